//! One queue: its kind, its arguments, its parking place, and what of it breaks an order.

use std::time::Duration;

use super::arguments::{
    self, ArgumentValue, Arguments, DEAD_LETTER_EXCHANGE, DEAD_LETTER_ROUTING_KEY, DELIVERY_LIMIT,
    EXPIRES, GROUP_SIZE, LEADER_LOCATOR, LeaderLocator, MAX_LENGTH, MAX_LENGTH_BYTES, MAX_PRIORITY,
    MESSAGE_TTL, OVERFLOW, Overflow, QUEUE_MODE,
};

/// The kind of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum QueueType {
    /// A classic queue: one node holds it.
    #[default]
    Classic,
    /// A quorum queue: replicated by a log.
    Quorum,
}

/// One queue.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueSpec {
    /// Its name.
    pub name: String,
    /// Whether Laneway creates it (`true`) or only checks that it exists.
    pub declared: bool,
    /// Its kind.
    pub queue_type: QueueType,
    /// Whether it survives a restart of the broker.
    pub durable: bool,
    /// Whether the broker delivers to one consumer at a time (`x-single-active-consumer`).
    pub single_active_consumer: bool,
    /// Its other arguments.
    pub arguments: Arguments,
    /// Whether the application accepts that the broker removes messages unseen.
    pub gaps_accepted: bool,
    /// Where its poison messages go.
    pub parking: Option<ParkingSpec>,
    /// Arguments that were set by name.
    pub(super) by_name: Arguments,
}

/// Where poison messages of a queue go: published to the exchange, kept in the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParkingSpec {
    /// The (fanout) exchange.
    pub exchange: String,
    /// The queue bound to it.
    pub queue: String,
    /// Arguments of that queue; there are some only where the topology declares it by itself too.
    pub arguments: Arguments,
}

impl QueueSpec {
    pub(super) fn new(name: &str, declared: bool) -> Self {
        Self {
            name: name.to_owned(),
            declared,
            queue_type: QueueType::Classic,
            durable: false,
            single_active_consumer: false,
            arguments: Arguments::new(),
            gaps_accepted: false,
            parking: None,
            by_name: Arguments::new(),
        }
    }

    /// It survives a restart of the broker. A quorum queue is always durable.
    #[must_use]
    pub fn durable(mut self) -> Self {
        self.durable = true;
        self
    }

    /// It is a quorum queue (and so durable).
    ///
    /// RabbitMQ counts how often a quorum queue takes a message back, also when no handler has seen it,
    /// and from version 4 on removes it at 20 by default. Laneway counts attempts itself; so there a declared
    /// quorum queue, and its parking queue, is declared without a limit (`x-delivery-limit` = -1), unless it
    /// sets [`delivery_limit`](Self::delivery_limit), or says
    /// [`accept_unreported_gaps`](Self::accept_unreported_gaps). (Older versions have no limit by default, and
    /// are not told: 3.10.8 takes -1 for a limit that every return exceeds.) One that already exists there
    /// without this argument is refused at start.
    #[must_use]
    pub fn quorum(mut self) -> Self {
        self.queue_type = QueueType::Quorum;
        self.durable = true;
        self
    }

    /// It is a queue of this type; a quorum queue is durable too.
    #[must_use]
    pub fn of_type(self, queue_type: QueueType) -> Self {
        match queue_type {
            QueueType::Classic => Self { queue_type, ..self },
            QueueType::Quorum => self.quorum(),
        }
    }

    /// The broker delivers to one consumer at a time, and moves on to another when that one goes. Of an
    /// existing queue this is an assertion: the broker does not tell whether it is so.
    #[must_use]
    pub fn single_active_consumer(mut self) -> Self {
        self.single_active_consumer = true;
        self
    }

    /// Poison messages are published to this durable fanout exchange, to which this durable queue of
    /// the same type is bound. Declared with the queue; for an existing queue only checked.
    #[must_use]
    pub fn parking(mut self, exchange: &str, queue: &str) -> Self {
        self.parking = Some(ParkingSpec {
            exchange: exchange.to_owned(),
            queue: queue.to_owned(),
            arguments: Arguments::new(),
        });
        self
    }

    // ---- arguments

    fn set(mut self, name: &str, value: impl Into<ArgumentValue>) -> Self {
        self.arguments.insert(name.to_owned(), value.into());
        self
    }

    /// Messages older than this are removed by the broker, unseen. Whole milliseconds, at least one.
    #[must_use]
    pub fn message_ttl(self, age: Duration) -> Self {
        self.set(MESSAGE_TTL, millis(age))
    }

    /// The queue is deleted, with what it holds, when it was not used for so long. Whole milliseconds, at
    /// least one.
    #[must_use]
    pub fn expires(self, unused_for: Duration) -> Self {
        self.set(EXPIRES, millis(unused_for))
    }

    /// At most this many messages are ready in it, at least 1. What happens to one more is said by
    /// [`overflow`](Self::overflow); the broker's default is to drop the oldest.
    #[must_use]
    pub fn max_length(self, messages: u64) -> Self {
        self.set(MAX_LENGTH, number(messages))
    }

    /// At most this many bytes of bodies are ready in it, at least 1.
    #[must_use]
    pub fn max_length_bytes(self, bytes: u64) -> Self {
        self.set(MAX_LENGTH_BYTES, number(bytes))
    }

    /// What happens to a message for which there is no room. Has no effect without a length limit.
    #[must_use]
    pub fn overflow(self, overflow: Overflow) -> Self {
        self.set(OVERFLOW, overflow.name())
    }

    /// Where the broker puts what *it* removes: to this exchange, with this routing key (`None`: the
    /// message's own). The broker does this without waiting: the message is lost where no queue takes it.
    /// Laneway's poison messages go to the [parking place](Self::parking), with a confirm.
    #[must_use]
    pub fn dead_letter<'a>(self, exchange: &str, routing_key: impl Into<Option<&'a str>>) -> Self {
        let queue = self.set(DEAD_LETTER_EXCHANGE, exchange);
        match routing_key.into() {
            Some(key) => queue.set(DEAD_LETTER_ROUTING_KEY, key),
            None => queue,
        }
    }

    /// A quorum queue removes a message that it has taken back more often than this, at least 1. Every lost
    /// session counts for all messages that it held, started or not; attempts are bounded by
    /// [`max_delivery_attempts`](crate::EndpointBuilder::max_delivery_attempts).
    #[must_use]
    pub fn delivery_limit(self, times: u32) -> Self {
        self.set(DELIVERY_LIMIT, i64::from(times))
    }

    /// A classic queue with priorities from 0 to this, 1 to 255: messages of a higher priority overtake.
    #[must_use]
    pub fn max_priority(self, highest: u8) -> Self {
        self.set(MAX_PRIORITY, i64::from(highest))
    }

    /// A classic queue that keeps its messages on disk.
    #[must_use]
    pub fn lazy(self) -> Self {
        self.set(QUEUE_MODE, "lazy")
    }

    /// Where the leader of a quorum queue starts.
    #[must_use]
    pub fn leader_locator(self, locator: LeaderLocator) -> Self {
        self.set(LEADER_LOCATOR, locator.name())
    }

    /// On how many nodes a quorum queue starts, at least 1.
    #[must_use]
    pub fn initial_group_size(self, nodes: u32) -> Self {
        self.set(GROUP_SIZE, i64::from(nodes))
    }

    /// Any other argument, by its name at the broker, which ignores those that it does not know. One that
    /// has a method of its own is refused.
    #[must_use]
    pub fn argument(mut self, name: &str, value: impl Into<ArgumentValue>) -> Self {
        let value = value.into();
        self.by_name.insert(name.to_owned(), value.clone());
        if arguments::method_of(name).is_none() {
            self.arguments.insert(name.to_owned(), value);
        }
        self
    }

    /// Accepts that the broker removes messages of this queue without telling anybody: by a time to live,
    /// by dropping the oldest, by expiring, by a delivery limit (its own default one too, on quorum
    /// queues and the parking queues of such). On an ordered endpoint such a queue is refused otherwise, because each removed message is a
    /// gap in a sequence that nothing reports.
    #[must_use]
    pub fn accept_unreported_gaps(mut self) -> Self {
        self.gaps_accepted = true;
        self
    }

    // ---- what follows from it

    /// What of it removes messages without telling anybody, by the names of the methods.
    pub(crate) fn removes_unseen(&self) -> Vec<&'static str> {
        let limited = [MAX_LENGTH, MAX_LENGTH_BYTES];
        let drops = !matches!(
            self.arguments.get(OVERFLOW),
            Some(ArgumentValue::Text(kind)) if kind.starts_with("reject-publish")
        );
        let always = [MESSAGE_TTL, EXPIRES, DELIVERY_LIMIT];
        let removing = always
            .into_iter()
            .chain(limited.into_iter().filter(|_| drops));
        removing
            .filter(|name| self.arguments.contains_key(*name))
            .filter_map(arguments::method_of)
            .collect()
    }

    /// What is wrong with it as the queue of an ordered endpoint.
    pub(crate) fn order_problems(&self) -> Vec<String> {
        let name = &self.name;
        let mut problems = Vec::new();
        if self.arguments.contains_key(MAX_PRIORITY) {
            problems.push(format!(
                "queue `{name}` has `max_priority(…)`, which lets messages overtake each other; remove it, or do not order the endpoint"
            ));
        }
        let removing = self.removes_unseen();
        if !removing.is_empty() && !self.gaps_accepted {
            problems.push(format!(
                "queue `{name}` has {}, by which the broker removes messages unseen; remove it, limit the length with `overflow(Overflow::RejectPublish)`, or say `accept_unreported_gaps()` of the queue",
                listed(&removing)
            ));
        }
        problems
    }

    /// Its parking queue, as a queue to read from.
    pub(crate) fn parking_queue(&self) -> Option<Self> {
        let parking = self.parking.as_ref()?;
        Some(Self {
            durable: true,
            queue_type: self.queue_type,
            arguments: parking.arguments.clone(),
            gaps_accepted: self.gaps_accepted,
            ..Self::new(&parking.queue, false)
        })
    }
}

/// `a`, `b` and `c`.
pub(super) fn listed(names: &[&str]) -> String {
    let quoted: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    quoted.join(" and ")
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn number(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
