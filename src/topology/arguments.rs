//! Arguments of queues, exchanges and bindings, by their names at the broker.

use std::collections::BTreeMap;
use std::fmt;

/// The value of an argument, in the types that brokers know.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ArgumentValue {
    /// Text.
    Text(String),
    /// A whole number; brokers do not tell its widths apart.
    Integer(i64),
    /// True or false.
    Bool(bool),
}

impl fmt::Display for ArgumentValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Integer(number) => write!(f, "{number}"),
            Self::Bool(truth) => write!(f, "{truth}"),
        }
    }
}

impl From<&str> for ArgumentValue {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<i64> for ArgumentValue {
    fn from(number: i64) -> Self {
        Self::Integer(number)
    }
}

impl From<bool> for ArgumentValue {
    fn from(truth: bool) -> Self {
        Self::Bool(truth)
    }
}

/// Arguments by name.
pub type Arguments = BTreeMap<String, ArgumentValue>;

/// What a queue does with a message for which it has no room (`x-overflow`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Overflow {
    /// Drops its oldest message. The broker's default.
    DropHead,
    /// Refuses the new message; its publisher is told.
    RejectPublish,
    /// Refuses it, and dead-letters a copy. Classic queues only.
    RejectPublishDeadLetter,
}

impl Overflow {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::DropHead => "drop-head",
            Self::RejectPublish => "reject-publish",
            Self::RejectPublishDeadLetter => "reject-publish-dlx",
        }
    }
}

/// On which node the leader of a new quorum queue starts (`x-queue-leader-locator`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaderLocator {
    /// On the node to which the declaring program is connected.
    ClientLocal,
    /// On a node with few leaders.
    Balanced,
}

impl LeaderLocator {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::ClientLocal => "client-local",
            Self::Balanced => "balanced",
        }
    }
}

pub(crate) const MESSAGE_TTL: &str = "x-message-ttl";
pub(crate) const EXPIRES: &str = "x-expires";
pub(crate) const MAX_LENGTH: &str = "x-max-length";
pub(crate) const MAX_LENGTH_BYTES: &str = "x-max-length-bytes";
pub(crate) const OVERFLOW: &str = "x-overflow";
pub(crate) const DEAD_LETTER_EXCHANGE: &str = "x-dead-letter-exchange";
pub(crate) const DEAD_LETTER_ROUTING_KEY: &str = "x-dead-letter-routing-key";
pub(crate) const DELIVERY_LIMIT: &str = "x-delivery-limit";
pub(crate) const MAX_PRIORITY: &str = "x-max-priority";
pub(crate) const QUEUE_MODE: &str = "x-queue-mode";
pub(crate) const LEADER_LOCATOR: &str = "x-queue-leader-locator";
pub(crate) const GROUP_SIZE: &str = "x-quorum-initial-group-size";
pub(crate) const SINGLE_ACTIVE_CONSUMER: &str = "x-single-active-consumer";
pub(crate) const QUEUE_TYPE: &str = "x-queue-type";
pub(crate) const ALTERNATE_EXCHANGE: &str = "alternate-exchange";
pub(crate) const HASH_HEADER: &str = "hash-header";
pub(crate) const HASH_PROPERTY: &str = "hash-property";
pub(crate) const HEADER_MATCH: &str = "x-match";

/// The method that sets an argument, for those that have one.
pub(super) fn method_of(argument: &str) -> Option<&'static str> {
    Some(match argument {
        MESSAGE_TTL => "message_ttl(…)",
        EXPIRES => "expires(…)",
        MAX_LENGTH => "max_length(…)",
        MAX_LENGTH_BYTES => "max_length_bytes(…)",
        OVERFLOW => "overflow(…)",
        DEAD_LETTER_EXCHANGE | DEAD_LETTER_ROUTING_KEY => "dead_letter(…)",
        DELIVERY_LIMIT => "delivery_limit(…)",
        MAX_PRIORITY => "max_priority(…)",
        QUEUE_MODE => "lazy()",
        LEADER_LOCATOR => "leader_locator(…)",
        GROUP_SIZE => "initial_group_size(…)",
        SINGLE_ACTIVE_CONSUMER => "single_active_consumer()",
        QUEUE_TYPE => "of_type(…)",
        ALTERNATE_EXCHANGE => "alternate_exchange(…)",
        HASH_HEADER => "hash_header(…)",
        HASH_PROPERTY => "hash_property(…)",
        _ => return None,
    })
}
