//! Exchanges and bindings.

use super::arguments::{
    self, ALTERNATE_EXCHANGE, ArgumentValue, Arguments, HASH_HEADER, HASH_PROPERTY, HEADER_MATCH,
};
use laneway_actors::MappingEpoch;

/// How an exchange chooses among the queues that are bound to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExchangeKind {
    /// Every bound queue gets a copy.
    Fanout,
    /// Every queue bound with exactly the message's routing key gets a copy.
    Direct,
    /// Every queue whose binding matches the routing key, word by word (`*` is one word, `#` any number),
    /// gets a copy.
    Topic,
    /// Every queue whose binding matches the message's headers gets a copy.
    Headers,
    /// One of the bound queues gets the message, by a hash; always the same one for the same value, while
    /// the bindings stay the same.
    ConsistentHash,
}

impl ExchangeKind {
    /// Its name in AMQP.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fanout => "fanout",
            Self::Direct => "direct",
            Self::Topic => "topic",
            Self::Headers => "headers",
            Self::ConsistentHash => "x-consistent-hash",
        }
    }
}

/// What a consistent-hash exchange hashes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HashBy {
    /// The value of this header, its type included: the text `42` and the number 42 are two values. A
    /// message without it goes to one and the same queue.
    Header(String),
    /// A property.
    Property(HashProperty),
}

impl HashBy {
    /// What identifies it: `header account`, `property correlation_id`.
    pub(crate) fn identity(&self) -> String {
        match self {
            Self::Header(header) => format!("header {header}"),
            Self::Property(property) => format!("property {}", property.name()),
        }
    }
}

/// A property by which a consistent-hash exchange can hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HashProperty {
    /// The correlation id.
    CorrelationId,
    /// The message's id: spreads evenly, and keeps nothing together.
    MessageId,
}

impl HashProperty {
    fn name(self) -> &'static str {
        match self {
            Self::CorrelationId => "correlation_id",
            Self::MessageId => "message_id",
        }
    }
}

/// One exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExchangeSpec {
    /// Its name.
    pub name: String,
    /// Whether Laneway creates it (`true`) or only checks that it exists.
    pub declared: bool,
    /// Its kind; of an existing one unknown, and not used.
    pub kind: ExchangeKind,
    /// Whether it survives a restart of the broker.
    pub durable: bool,
    /// Whether nobody can publish to it.
    pub internal: bool,
    /// Where messages go that no bound queue takes.
    pub alternate: Option<String>,
    /// What it hashes, if it does.
    pub hash: Option<HashBy>,
    /// Its other arguments.
    pub arguments: Arguments,
    /// The queues behind a consistent-hash exchange, with their weights, as listed.
    pub(crate) queues: Vec<(String, u32)>,
    pub(super) by_name: Arguments,
    pub(super) hashes_said: u32,
}

impl ExchangeSpec {
    pub(super) fn new(name: &str, declared: bool) -> Self {
        Self {
            name: name.to_owned(),
            declared,
            kind: ExchangeKind::Direct,
            durable: true,
            internal: false,
            alternate: None,
            hash: None,
            arguments: Arguments::new(),
            queues: Vec::new(),
            by_name: Arguments::new(),
            hashes_said: 0,
        }
    }

    /// A declared exchange of a kind.
    pub(crate) fn of_kind_named(name: &str, kind: ExchangeKind) -> Self {
        Self::new(name, true).of_kind(kind)
    }

    fn of_kind(mut self, kind: ExchangeKind) -> Self {
        self.kind = kind;
        self
    }

    /// It sends by exactly the routing key. The default.
    #[must_use]
    pub fn direct(self) -> Self {
        self.of_kind(ExchangeKind::Direct)
    }

    /// It sends to every bound queue.
    #[must_use]
    pub fn fanout(self) -> Self {
        self.of_kind(ExchangeKind::Fanout)
    }

    /// It sends by the words of the routing key.
    #[must_use]
    pub fn topic(self) -> Self {
        self.of_kind(ExchangeKind::Topic)
    }

    /// It sends by the headers; see [`bind_headers`](super::Topology::bind_headers).
    #[must_use]
    pub fn headers(self) -> Self {
        self.of_kind(ExchangeKind::Headers)
    }

    /// It sends to one of its queues, by a hash; the routing key of a binding is the queue's weight.
    /// [`consistent_hash_exchange`](super::Topology::consistent_hash_exchange) says the same.
    #[must_use]
    pub fn consistent_hash(self) -> Self {
        self.of_kind(ExchangeKind::ConsistentHash)
    }

    /// It survives a restart of the broker. The default.
    #[must_use]
    pub fn durable(mut self) -> Self {
        self.durable = true;
        self
    }

    /// It is gone after a restart of the broker, with its bindings.
    #[must_use]
    pub fn transient(mut self) -> Self {
        self.durable = false;
        self
    }

    /// Messages that no bound queue takes go to this exchange.
    #[must_use]
    pub fn alternate_exchange(mut self, exchange: &str) -> Self {
        self.alternate = Some(exchange.to_owned());
        self
    }

    /// A consistent-hash exchange hashes the value of this header.
    #[must_use]
    pub fn hash_header(self, header: &str) -> Self {
        self.hash_by(HashBy::Header(header.to_owned()))
    }

    /// A consistent-hash exchange hashes this property.
    #[must_use]
    pub fn hash_property(self, property: HashProperty) -> Self {
        self.hash_by(HashBy::Property(property))
    }

    fn hash_by(mut self, by: HashBy) -> Self {
        self.hash = Some(by);
        self.hashes_said += 1;
        self
    }

    /// A queue of the topology behind a consistent-hash exchange. A queue with weight 2 gets about twice
    /// the keys of one with weight 1. At least 1.
    #[must_use]
    pub fn queue(mut self, queue: &str, weight: u32) -> Self {
        self.queues.push((queue.to_owned(), weight));
        self
    }

    /// Any other argument, by its name at the broker. One that has a method of its own is refused.
    #[must_use]
    pub fn argument(mut self, name: &str, value: impl Into<ArgumentValue>) -> Self {
        let value = value.into();
        self.by_name.insert(name.to_owned(), value.clone());
        if arguments::method_of(name).is_none() {
            self.arguments.insert(name.to_owned(), value);
        }
        self
    }

    /// All its arguments.
    pub fn all_arguments(&self) -> Arguments {
        let mut all = self.arguments.clone();
        if let Some(alternate) = &self.alternate {
            all.insert(ALTERNATE_EXCHANGE.to_owned(), alternate.as_str().into());
        }
        match &self.hash {
            Some(HashBy::Header(header)) => {
                all.insert(HASH_HEADER.to_owned(), header.as_str().into());
            }
            Some(HashBy::Property(property)) => {
                all.insert(HASH_PROPERTY.to_owned(), property.name().into());
            }
            None => {}
        }
        all
    }

    /// An exchange that nobody publishes to, which holds an identity: RabbitMQ compares its alternate
    /// exchange when it is declared again, atomically, and refuses another one. (It compares no other
    /// argument of an exchange, `hash-header` included; seen with 3.10.8.)
    pub(super) fn marker(name: &str, identity: &str) -> Self {
        Self {
            internal: true,
            ..Self::new(name, true).fanout().alternate_exchange(identity)
        }
    }
}

/// The mapping epoch of a consistent-hash exchange over these queues.
pub(crate) fn epoch(by: &HashBy, queues: &[(&str, u32)]) -> MappingEpoch {
    MappingEpoch::of(&by.identity(), queues)
}

/// When the headers of a message match a binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderMatch {
    /// All are there with these values.
    All,
    /// At least one is.
    Any,
}

/// A binding of a queue to an exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BindingSpec {
    /// The queue.
    pub queue: String,
    /// The exchange.
    pub exchange: String,
    /// The routing key.
    pub routing_key: String,
    /// Arguments: the headers to match, and how.
    pub arguments: Arguments,
}

impl BindingSpec {
    pub(super) fn new(queue: &str, exchange: &str, routing_key: &str) -> Self {
        Self {
            queue: queue.to_owned(),
            exchange: exchange.to_owned(),
            routing_key: routing_key.to_owned(),
            arguments: Arguments::new(),
        }
    }

    pub(super) fn matching<N: Into<String>, V: Into<ArgumentValue>>(
        mut self,
        which: HeaderMatch,
        headers: impl IntoIterator<Item = (N, V)>,
    ) -> Self {
        let which = match which {
            HeaderMatch::All => "all",
            HeaderMatch::Any => "any",
        };
        let headers = headers.into_iter();
        self.arguments = headers
            .map(|(name, value)| (name.into(), value.into()))
            .collect();
        self.arguments.insert(HEADER_MATCH.to_owned(), which.into());
        self
    }
}
