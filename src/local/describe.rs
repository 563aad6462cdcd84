//! How an application describes local queues and modules.

use std::any::TypeId;
use std::time::Duration;

use laneway_actors::{
    Backoff, FailureRules, Handler, HandlerSet, KeySelector, Message, PoisonMode,
};

use super::settings::{
    BACKOFF, BOUND, HANDLER_TIMEOUT, KEYS_FROM_PUBLISHER, MAX_PARALLEL, ORDER, POISON, Poison,
    QueueOrder, QueueSettings, SHARDS, STORAGE, Storage, TRANSACTIONAL,
};

/// Settings of local queues: of one ([`local_queue`](crate::BusBuilder::local_queue)), of that of a handler
/// ([`handler_with`](crate::BusBuilder::handler_with)), of those of a module ([`ModuleBuilder::queues`]), or of all
/// ([`local_queues`](crate::BusBuilder::local_queues)).
///
/// For each setting the first of these that says it decides. Of handlers and modules that share a queue, all that say
/// it must agree. A setting that fits no queue, or that does not fit the one it is said of, is refused.
#[derive(Debug, Clone, Default)]
pub struct LocalQueueBuilder {
    pub(crate) settings: QueueSettings,
}

/// Sets what is not set differently.
fn set<T: PartialEq>(
    twice: &mut Vec<&'static str>,
    setting: &'static str,
    slot: &mut Option<T>,
    value: T,
) {
    match slot {
        Some(before) if *before != value => twice.push(setting),
        _ => *slot = Some(value),
    }
}

impl LocalQueueBuilder {
    // ---- where messages wait

    /// Messages wait in this process's memory: the fastest, and **gone when the process ends**; what waits at a
    /// shutdown is lost and its number logged. A poison message is reported as a gap and discarded. The default.
    #[must_use]
    pub fn buffered(self) -> Self {
        self.storage(Storage::Buffered)
    }

    /// Messages wait in the application's database, and survive the process.
    #[must_use]
    pub fn durable(self) -> Self {
        self.storage(Storage::Durable)
    }

    /// The queue lives on the bus's transport: one line moves a type from a local queue to RabbitMQ. The messages of
    /// its type are published there, and consumed from there with the same handlers and settings.
    ///
    /// Unless the topology has a queue of this name, it is declared durable, with a single active consumer where it is
    /// ordered, and with a parking place: exchange and queue `<name>.parked`. One queue of a type may live there.
    #[must_use]
    pub fn on_broker(self) -> Self {
        self.storage(Storage::Broker)
    }

    fn storage(mut self, storage: Storage) -> Self {
        let of = &mut self.settings;
        set(&mut of.twice, STORAGE, &mut of.storage, storage);
        self
    }

    /// At most so many messages in a buffered queue, those being handled included, at least 1. Defaults to 10,000.
    ///
    /// Who publishes from outside ([`Bus::publish`](crate::Bus::publish)) waits for a place. What handlers publish or
    /// return never waits, and may exceed the bound: else a handler could wait for its own queue.
    #[must_use]
    pub fn bound(mut self, messages: usize) -> Self {
        let of = &mut self.settings;
        set(&mut of.twice, BOUND, &mut of.bound, messages);
        self
    }

    // ---- order

    /// The whole queue in order, one message at a time. A message that is retried holds up all that follow.
    #[must_use]
    pub fn sequential(self) -> Self {
        self.order(QueueOrder::Sequential)
    }

    /// In order within a key, over so many lanes, 1 to 65,535; as many handlers run at once, unless
    /// [`max_parallel`](Self::max_parallel) allows others. The message's type needs a key
    /// ([`key_by`](crate::BusBuilder::key_by), [`keyed`](crate::BusBuilder::keyed), or the key of its route), or say
    /// [`keys_from_publisher`](Self::keys_from_publisher).
    #[must_use]
    pub fn partitioned(self, lanes: u32) -> Self {
        self.order(QueueOrder::Partitioned(lanes))
    }

    fn order(mut self, order: QueueOrder) -> Self {
        let of = &mut self.settings;
        set(&mut of.twice, ORDER, &mut of.order, order);
        self
    }

    /// A partitioned queue whose message type has no key of its own: whoever publishes gives each message its key
    /// (`publish_keyed`, [`WithKey`](crate::WithKey)). A message without one has no order.
    #[must_use]
    pub fn keys_from_publisher(mut self) -> Self {
        let of = &mut self.settings;
        set(
            &mut of.twice,
            KEYS_FROM_PUBLISHER,
            &mut of.keys_from_publisher,
            (),
        );
        self
    }

    /// At most `n` handlers at once, 1 to 65,535. Defaults to the number of processors, at least 5; on a partitioned
    /// queue to its lanes.
    #[must_use]
    pub fn max_parallel(mut self, n: u32) -> Self {
        let of = &mut self.settings;
        set(&mut of.twice, MAX_PARALLEL, &mut of.max_parallel, n);
        self
    }

    /// Over how many shards the nodes share out an ordered durable queue, 1 to 1,000. Defaults to 1.
    #[must_use]
    pub fn shards(mut self, n: u32) -> Self {
        let of = &mut self.settings;
        set(&mut of.twice, SHARDS, &mut of.shards, n);
        self
    }

    /// Each attempt on a durable queue is a transaction: the handler's writes in it, what it publishes, and that the
    /// message is handled, take effect together.
    #[must_use]
    pub fn transactional(mut self) -> Self {
        let of = &mut self.settings;
        set(&mut of.twice, TRANSACTIONAL, &mut of.transactional, ());
        self
    }

    // ---- failure

    /// How long one attempt may take; `None` for no bound. Defaults to 60 s.
    #[must_use]
    pub fn handler_timeout(mut self, bound: impl Into<Option<Duration>>) -> Self {
        let of = &mut self.settings;
        let bound = bound.into();
        set(
            &mut of.twice,
            HANDLER_TIMEOUT,
            &mut of.handler_timeout,
            bound,
        );
        self
    }

    /// Total number of runs of a message, the first included, 1 to 1,000. Defaults to 5.
    #[must_use]
    pub fn max_delivery_attempts(mut self, n: u32) -> Self {
        let of = &mut self.settings;
        let setting = super::settings::ATTEMPTS;
        set(&mut of.twice, setting, &mut of.max_delivery_attempts, n);
        self
    }

    /// Pauses between the attempts of a message, where no failure rule applies.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        let of = &mut self.settings;
        set(&mut of.twice, BACKOFF, &mut of.backoff, backoff);
        self
    }

    /// What to do about which failure; see [`EndpointBuilder::on_failure`](crate::EndpointBuilder::on_failure). Rules
    /// add up: those of the queue are asked first, then those of its handlers, of the module, of all local queues, of
    /// the message's type, of the bus. Called again, it adds rules.
    #[must_use]
    pub fn on_failure(mut self, describe: impl FnOnce(FailureRules) -> FailureRules) -> Self {
        let rules = describe(FailureRules::new());
        self.settings.rules_missing |= rules.is_empty();
        let all = self.settings.rules.get_or_insert_with(FailureRules::new);
        all.append(rules);
        self
    }

    /// What happens to the key of a poison message, where the queue has a place for it (not on a buffered queue).
    /// Defaults to [`PoisonMode::ReleaseKey`].
    #[must_use]
    pub fn poison_mode(self, mode: PoisonMode) -> Self {
        self.poison(Poison::Mode(mode))
    }

    /// Poison messages are reported as gaps and discarded, instead of kept. A buffered queue always does so.
    #[must_use]
    pub fn discard_poison(self) -> Self {
        self.poison(Poison::Discard)
    }

    fn poison(mut self, poison: Poison) -> Self {
        let of = &mut self.settings;
        set(&mut of.twice, POISON, &mut of.poison, poison);
        self
    }
}

/// A handler on its way to its queue.
pub(crate) struct LocalHandler {
    pub(crate) message_type: &'static str,
    /// The name of a queue of its own.
    pub(crate) separated: Option<String>,
    pub(crate) settings: Option<QueueSettings>,
    /// Number of its module.
    pub(crate) module: Option<usize>,
    pub(crate) answer: Answer,
    /// Says where the typed key of its messages comes from.
    pub(crate) order_by: fn(&mut HandlerSet, KeySelector),
    add: Box<dyn FnOnce(&mut HandlerSet) + Send>,
}

fn order_by<T: Message>(handlers: &mut HandlerSet, selector: KeySelector) {
    handlers.order_by::<T>(move |message| {
        let key = selector(message);
        key.expect("the rule of a message type gives a key for each of its messages")
    });
}

/// The type of a handler's answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answer {
    pub(crate) id: TypeId,
    pub(crate) name: &'static str,
}

impl Answer {
    pub(crate) fn of<A: 'static>() -> Self {
        Self {
            id: TypeId::of::<A>(),
            name: std::any::type_name::<A>(),
        }
    }
}

impl LocalHandler {
    pub(crate) fn new<T: Message, H: Handler<T>>(
        separated: Option<&str>,
        handler: H,
        settings: Option<QueueSettings>,
    ) -> Self {
        Self {
            message_type: T::TYPE,
            separated: separated.map(str::to_owned),
            settings,
            module: None,
            answer: Answer::of::<H::Answer>(),
            order_by: order_by::<T>,
            add: Box::new(move |handlers| handlers.add::<T>(handler)),
        }
    }

    /// Name of its queue.
    pub(crate) fn queue(&self) -> &str {
        self.separated.as_deref().unwrap_or(self.message_type)
    }

    pub(crate) fn add_to(self, handlers: &mut HandlerSet) {
        (self.add)(handlers);
    }
}

pub(crate) fn described(
    describe: impl FnOnce(LocalQueueBuilder) -> LocalQueueBuilder,
) -> QueueSettings {
    describe(LocalQueueBuilder::default()).settings
}

/// Describes a module: handlers that belong together, and what holds for their queues.
#[derive(Default)]
pub struct ModuleBuilder {
    pub(crate) handlers: Vec<LocalHandler>,
    pub(crate) settings: Vec<QueueSettings>,
}

impl ModuleBuilder {
    /// See [`BusBuilder::handler`](crate::BusBuilder::handler).
    #[must_use]
    pub fn handler<T: Message, H: Handler<T>>(mut self, handler: H) -> Self {
        let handler = LocalHandler::new::<T, H>(None, handler, None);
        self.handlers.push(handler);
        self
    }

    /// See [`BusBuilder::handler_with`](crate::BusBuilder::handler_with).
    #[must_use]
    pub fn handler_with<T: Message, H: Handler<T>>(
        mut self,
        handler: H,
        describe: impl FnOnce(LocalQueueBuilder) -> LocalQueueBuilder,
    ) -> Self {
        let settings = Some(described(describe));
        let handler = LocalHandler::new::<T, H>(None, handler, settings);
        self.handlers.push(handler);
        self
    }

    /// See [`BusBuilder::separated`](crate::BusBuilder::separated).
    #[must_use]
    pub fn separated<T: Message, H: Handler<T>>(mut self, name: &str, handler: H) -> Self {
        let handler = LocalHandler::new::<T, H>(Some(name), handler, None);
        self.handlers.push(handler);
        self
    }

    /// See [`BusBuilder::separated_with`](crate::BusBuilder::separated_with).
    #[must_use]
    pub fn separated_with<T: Message, H: Handler<T>>(
        mut self,
        name: &str,
        handler: H,
        describe: impl FnOnce(LocalQueueBuilder) -> LocalQueueBuilder,
    ) -> Self {
        let settings = Some(described(describe));
        let handler = LocalHandler::new::<T, H>(Some(name), handler, settings);
        self.handlers.push(handler);
        self
    }

    /// Settings of all queues of the module's handlers.
    #[must_use]
    pub fn queues(mut self, describe: impl FnOnce(LocalQueueBuilder) -> LocalQueueBuilder) -> Self {
        self.settings.push(described(describe));
        self
    }
}
