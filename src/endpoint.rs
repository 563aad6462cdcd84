//! The endpoint builder: a queue, its handlers, its order, its policy.

use std::sync::Arc;
use std::time::Duration;

use laneway_actors::{
    Backoff, EndpointSettings, FailureRules, Handler, HandlerSet, KeySource, Keyed, Message,
    OrderingKey, PoisonMode, Problem,
};

use crate::feed::Feed;
use crate::topology::Topology;

/// What keeps the order of a key across the instances of a program. [`docs::affinity`](crate::docs::affinity)
/// helps to choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TransportAffinity {
    /// The broker delivers the queue to one instance at a time, and moves on to another when that one
    /// goes: per-key order across any number of instances, one of which works.
    SingleActiveConsumer,
    /// The queue is a [sharded one](crate::Topology::sharded_queue): instances share its shards out among
    /// them, so that all of them work. Per-key order, with the key in a header.
    Sharded,
    /// The queue names a [consistent-hash exchange](crate::Topology::consistent_hash_exchange), whose queues
    /// the instances share out among them. Per-key order, except while the queues behind the exchange
    /// change, which is detected and counted.
    ConsistentHash,
}

impl TransportAffinity {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SingleActiveConsumer => "SingleActiveConsumer",
            Self::Sharded => "Sharded",
            Self::ConsistentHash => "ConsistentHash",
        }
    }
}

/// How far the order of an endpoint reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Strategy {
    /// Across all instances where a transport affinity is declared; without one the endpoint is refused.
    #[default]
    Auto,
    /// Within this instance. **With a second instance on the same queue there is no order**: its messages
    /// are shared out between them. Never chosen by itself.
    LocalPartitioned,
    /// Across all instances, by the transport affinity that is declared.
    TransportNative,
}

/// Describes an endpoint. Every method has an effect, or [`build`](crate::BusBuilder::build) refuses it.
pub struct EndpointBuilder {
    pub(crate) settings: EndpointSettings,
    pub(crate) queue: String,
    pub(crate) handlers: HandlerSet,
    strategies: Vec<Strategy>,
    affinities: Vec<TransportAffinity>,
    /// Asked for in words, not a fallback.
    by_correlation_id: bool,
    abort_grace: Option<Duration>,
    rules_missing: bool,
}

impl EndpointBuilder {
    pub(crate) fn named(name: &str) -> Self {
        Self {
            settings: EndpointSettings::named(name),
            queue: name.to_owned(),
            handlers: HandlerSet::new(),
            strategies: Vec::new(),
            affinities: Vec::new(),
            by_correlation_id: false,
            abort_grace: None,
            rules_missing: false,
        }
    }

    /// The queue it consumes. Defaults to the endpoint's name.
    #[must_use]
    pub fn queue(mut self, queue: &str) -> Self {
        queue.clone_into(&mut self.queue);
        self
    }

    // ---- handlers

    /// Handles messages of type `T`: an `async fn(T, Context) -> Result<(), Failure>`, or a struct
    /// that implements [`Handler<T>`].
    #[must_use]
    pub fn handler<T: Message, H: Handler<T>>(mut self, handler: H) -> Self {
        self.handlers.add::<T>(handler);
        self
    }

    /// Messages without a type are of type `T`, which has a handler here: for publishers that send a
    /// bare body. They are read as JSON unless their content type says otherwise.
    #[must_use]
    pub fn untyped<T: Message>(mut self) -> Self {
        self.handlers.untyped_as::<T>();
        self
    }

    // ---- ordering

    fn key_source(&mut self) -> &mut KeySource {
        self.settings.ordering.get_or_insert_with(|| KeySource {
            correlation_id: true,
            ..KeySource::default()
        })
    }

    /// Messages with the same value in this header are handled strictly in order. A message without it
    /// is ordered by its typed key, if it has one, else by its correlation id, else not at all; such
    /// messages are counted and reported.
    ///
    /// Text and whole numbers of the same digits are the same key. An empty value, a truth value, a
    /// floating-point number and a structured value are no keys.
    #[must_use]
    pub fn ordered_by_header(mut self, header: &str) -> Self {
        self.key_source().header = Some(header.to_owned());
        self
    }

    /// Messages of type `T` with the same value of `selector` are handled strictly in order.
    #[must_use]
    pub fn ordered_by<T: Message, K: Into<OrderingKey>>(
        mut self,
        selector: impl Fn(&T) -> K + Send + Sync + 'static,
    ) -> Self {
        self.key_source().typed = true;
        self.handlers
            .order_by::<T>(move |message| selector(message).into());
        self
    }

    /// Messages of type `T` are ordered by their own [`Keyed::key`].
    #[must_use]
    pub fn ordered_by_key_of<T: Message + Keyed>(self) -> Self {
        self.ordered_by(T::key)
    }

    /// Messages with the same correlation id are handled strictly in order.
    #[must_use]
    pub fn ordered_by_correlation_id(mut self) -> Self {
        self.key_source().correlation_id = true;
        self.by_correlation_id = true;
        self
    }

    /// Keeps the order across all instances of the program, by this means of the broker.
    #[must_use]
    pub fn transport_affinity(mut self, affinity: TransportAffinity) -> Self {
        self.affinities.push(affinity);
        self
    }

    /// How far the order reaches. Defaults to [`Strategy::Auto`], which is enough with a
    /// [`transport_affinity`](Self::transport_affinity).
    #[must_use]
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategies.push(strategy);
        self
    }

    /// Keeps the order within this instance only: [`Strategy::LocalPartitioned`]. **With a second instance
    /// on the same queue there is no order**: its messages are shared out between them.
    #[must_use]
    pub fn local_partitioned(self) -> Self {
        self.strategy(Strategy::LocalPartitioned)
    }

    // ---- bounds

    /// At most `n` handlers at once, 1 to 65,535. Defaults to 16.
    #[must_use]
    pub fn concurrency(mut self, n: u32) -> Self {
        self.settings.concurrency = n;
        self
    }

    /// Number of lanes, 1 to 65,535. Defaults to the concurrency, but to no more than 16. A lane does not wait
    /// for itself: any runnable key of it may start while a handler is free; so there is rarely a reason to set
    /// this.
    #[must_use]
    pub fn lanes(mut self, n: u32) -> Self {
        self.settings.lanes = Some(n);
        self
    }

    /// At most `n` unsettled messages in this process (the broker's prefetch), from the concurrency to
    /// 65,535. Defaults to twice the concurrency, at least 32; over several shards to at least 16 for each.
    /// It bounds memory, and the duplicates after a crash. Each shard has its fixed part of them, so there
    /// must not be fewer than shards.
    ///
    /// Lowering it while messages wait in a **quorum** queue can break the order: RabbitMQ 3.10.8 puts what a
    /// session gives back behind what an earlier session with more credits has given back.
    #[must_use]
    pub fn max_in_flight(mut self, n: u32) -> Self {
        self.settings.max_in_flight = Some(n);
        self
    }

    /// Slots of each lane for messages that the program sends to it directly, 1 to 65,535. They bound how many of
    /// them run at once, too. Defaults to 64 for each handler that there is for a lane, rounded up: 64 where nothing is
    /// said of concurrency and lanes, 1,024 with `concurrency(256)`.
    #[must_use]
    pub fn lane_depth(mut self, n: u32) -> Self {
        self.settings.lane_depth = Some(n);
        self
    }

    // ---- failure

    /// Total number of runs of a message, the first included, 1 to 1,000. Defaults to 5.
    #[must_use]
    pub fn max_delivery_attempts(mut self, n: u32) -> Self {
        self.settings.max_delivery_attempts = n;
        self
    }

    /// What to do about which failure: the first rule that applies decides. Called again, it adds rules. After
    /// these, those that the bus has for the message's type ([`on_failure_of`](crate::BusBuilder::on_failure_of))
    /// and for all endpoints ([`on_failure`](crate::BusBuilder::on_failure)) are asked; where none
    /// applies, [`backoff`](Self::backoff).
    ///
    /// No rule gives a message more runs than [`max_delivery_attempts`](Self::max_delivery_attempts); one that
    /// would need more is refused.
    #[must_use]
    pub fn on_failure(mut self, describe: impl FnOnce(FailureRules) -> FailureRules) -> Self {
        let rules = describe(FailureRules::new());
        self.rules_missing |= rules.is_empty();
        self.settings.rules.append(rules);
        self
    }

    /// Pauses between the attempts of a message, where no failure rule applies. Only its key waits.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.settings.backoff = backoff;
        self
    }

    /// How long one attempt may take; `None` for no bound. Defaults to 60 s. An attempt that takes longer
    /// is dropped at its next `await` and counts as failed.
    #[must_use]
    pub fn handler_timeout(mut self, bound: impl Into<Option<Duration>>) -> Self {
        self.settings.handler_timeout = bound.into();
        self
    }

    /// The time in which the broker wants an acknowledgement: RabbitMQ's `consumer_timeout`, which it does not
    /// tell over AMQP. 1 s to 7 days; defaults to RabbitMQ's own default, 30 minutes. It must be **no longer**
    /// than what the broker is configured with.
    ///
    /// All attempts of a message, with their time-outs and pauses, must fit into it. When the oldest unsettled
    /// message is 80 % of this old, its session is renewed: what runs may finish, then the session is closed,
    /// which gives the rest back in order, and opened again; at 90 % what still runs is aborted.
    #[must_use]
    pub fn ack_timeout(mut self, bound: Duration) -> Self {
        self.settings.ack_timeout = Some(bound);
        self
    }

    /// What happens to the key of a poison message. Defaults to [`PoisonMode::ReleaseKey`].
    #[must_use]
    pub fn poison_mode(mut self, mode: PoisonMode) -> Self {
        self.settings.poison_mode = mode;
        self
    }

    /// Poison messages are acknowledged and reported as gaps, instead of parked.
    #[must_use]
    pub fn discard_poison(mut self) -> Self {
        self.settings.discard_poison = true;
        self
    }

    /// How long an attempt may go on after its session was lost. Defaults to zero with a transport affinity
    /// (another instance may already run the same message), and to 10 s otherwise.
    #[must_use]
    pub fn abort_grace(mut self, grace: Duration) -> Self {
        self.abort_grace = Some(grace);
        self
    }

    pub(crate) fn handles(&self, message_type: &str) -> bool {
        self.handlers.types().any(|name| name == message_type)
    }

    /// Takes over what the bus says for its message types and for all endpoints.
    pub(crate) fn share_rules(
        &mut self,
        of_types: &[(&'static str, FailureRules)],
        of_bus: &FailureRules,
    ) {
        let mine = of_types.iter().filter(|(name, _)| self.handles(name));
        self.settings.type_rules = mine.cloned().collect();
        self.settings.bus_rules = of_bus.clone();
    }

    /// Settles the defaults that depend on each other, lists what is wrong beyond the settings themselves,
    /// and finds the queues it consumes. `None` where they cannot be known.
    pub(crate) fn finish(
        &mut self,
        topology: &Topology,
        problems: &mut Vec<Problem>,
    ) -> Option<Feed> {
        let feed = Feed::of(&self.queue, topology);
        let name = self.settings.name.clone();
        let mut problem = |setting: &str, what: String| {
            problems.push(Problem::new(&name, setting, what));
        };
        if let Err(what) = &feed {
            problem("queue", what.clone());
        }
        let feed = feed.ok();
        if self.rules_missing {
            problem(
                "on_failure",
                "names no rule; add one or remove it".to_owned(),
            );
        }
        for what in self.strategy_problems() {
            problem("strategy", what);
        }
        let affinity = self.affinities.first().copied();
        if let Some(feed) = &feed {
            let ordered = self.settings.ordering.is_some();
            for (setting, what) in feed.problems(ordered, affinity, self.is_local()) {
                problem(setting, what);
            }
            if ordered && feed.shares_out() {
                for (setting, what) in
                    feed.key_problems(self.settings.ordering.as_ref(), self.by_correlation_id)
                {
                    problem(setting, what);
                }
                self.settle_shards(feed, &mut problem);
            }
        }
        self.settings.abort_grace = self.abort_grace.unwrap_or(match affinity {
            Some(_) => Duration::ZERO,
            None => Duration::from_secs(10),
        });
        feed
    }

    fn is_local(&self) -> bool {
        self.strategies.contains(&Strategy::LocalPartitioned)
    }

    /// What is wrong with how far the order shall reach.
    fn strategy_problems(&self) -> Vec<String> {
        let said = !self.strategies.is_empty() || !self.affinities.is_empty();
        if self.settings.ordering.is_none() {
            let problem = "has no effect without ordering: order by a key, or remove it";
            return said.then(|| problem.to_owned()).into_iter().collect();
        }
        let mut problems = Vec::new();
        let mut problem = |what: &str| problems.push(what.to_owned());
        if self.strategies.len() > 1 {
            problem("is said more than once; say one of them once");
        }
        if self.affinities.len() > 1 {
            problem("`transport_affinity` is said more than once; say one of them once");
        }
        match (self.strategies.first(), self.affinities.first()) {
            (Some(Strategy::LocalPartitioned), Some(_)) => problem(
                "`transport_affinity` and `local_partitioned` exclude each other; say one of them once",
            ),
            (None | Some(Strategy::Auto), None) => problem(
                "an ordered endpoint must say how far the order reaches: `transport_affinity(SingleActiveConsumer)`, or `Sharded`, or `ConsistentHash`, for all instances, or `local_partitioned()` for this one alone",
            ),
            (Some(Strategy::TransportNative), None) => problem(
                "`TransportNative` needs a `transport_affinity(…)`: `SingleActiveConsumer`, `Sharded` or `ConsistentHash`",
            ),
            _ => {}
        }
        problems
    }

    /// What the number of shards means for the settings.
    fn settle_shards(&mut self, feed: &Feed, problem: &mut impl FnMut(&str, String)) {
        if let Some(source) = &mut self.settings.ordering {
            // The fallback is off here, without a word: the key must be what the shard was chosen by.
            source.correlation_id = feed.by_correlation_id();
        }
        let shards = u32::try_from(feed.queues.len()).unwrap_or(u32::MAX);
        match self.settings.max_in_flight {
            Some(credits) if credits < shards => problem(
                "max_in_flight",
                format!(
                    "{credits} is less than the {shards} queues of `{}`, each of which needs at least one; raise it to {shards} or more",
                    self.queue
                ),
            ),
            Some(_) => {}
            None => {
                let for_handlers = self.settings.concurrency.saturating_mul(2);
                let for_shards = shards.saturating_mul(16);
                self.settings.max_in_flight = Some(for_handlers.max(for_shards).clamp(32, 65_535));
            }
        }
    }

    /// The header that carries the key, where the key comes from a header.
    pub(crate) fn key_header(&self) -> Option<Arc<str>> {
        let source = self.settings.ordering.as_ref()?;
        source.header.as_deref().map(Into::into)
    }
}
