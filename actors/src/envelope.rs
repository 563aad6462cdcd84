//! What travels: the envelope, and the delivery that hands it over once.
//!
//! Owns [`Envelope`], [`Headers`], [`MessageId`], [`Identity`] and [`Delivery`]. A delivery belongs
//! to one session and is settled at most once, by whoever owns that session (invariant 5); this
//! module holds the data and settles nothing itself, except a *direct* delivery, which carries
//! its own settle handle.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;

use crate::key::OrderingKey;
use crate::outcome::Outcome;
use crate::session::{SessionId, SessionState};

/// Names of the headers Laneway itself writes.
pub mod header {
    /// The ordering key, where the application names no header of its own.
    pub const ORDERING_KEY: &str = "laneway-key";
    /// Id of the message whose handler published this one.
    pub const CAUSATION_ID: &str = "laneway-causation-id";
    /// Mapping epoch of the consistent-hash exchange through which a message was published.
    pub const MAPPING: &str = "laneway-map";
    /// How many times a parked message was replayed; absent means never.
    pub const REPLAY: &str = "laneway-replay";
}

/// A message's id, unique among all messages.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageId(Arc<str>);

impl MessageId {
    /// A new unique id (UUID version 7: ids sort by time of creation).
    pub fn unique() -> Self {
        Self(uuid::Uuid::now_v7().to_string().into())
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for MessageId {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MessageId({})", self.0)
    }
}

/// A header's value, in the types that brokers know.
///
/// An adapter keeps a value of any other type in its own representation and gives it back
/// unchanged when the message is parked; here such a value is [`HeaderValue::Other`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum HeaderValue {
    /// Text.
    Text(String),
    /// A whole number of any width.
    Integer(i64),
    /// True or false.
    Bool(bool),
    /// A floating-point number of any width.
    Float(f64),
    /// Bytes that are not UTF-8 text.
    Bytes(Vec<u8>),
    /// A value with structure, or without content (list, table, time stamp, void).
    Other,
}

impl HeaderValue {
    /// The value as the text an ordering key is made of, or `None` where it cannot be a key.
    ///
    /// Text and bytes as they are, whole numbers in decimal, so that `"42"` and `42` are one key.
    /// An empty value, a truth value, a floating-point number and structured values are no keys:
    /// each is more likely a mistake than an intention, and one shared key for all of them would
    /// put them all in one sequence.
    pub fn as_key_bytes(&self) -> Option<Cow<'_, [u8]>> {
        match self {
            Self::Text(text) if !text.is_empty() => Some(Cow::Borrowed(text.as_bytes())),
            Self::Bytes(bytes) if !bytes.is_empty() => Some(Cow::Borrowed(bytes)),
            Self::Integer(number) => Some(Cow::Owned(number.to_string().into_bytes())),
            _ => None,
        }
    }

    /// The value as text, if it is text.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl From<&str> for HeaderValue {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for HeaderValue {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<i64> for HeaderValue {
    fn from(number: i64) -> Self {
        Self::Integer(number)
    }
}

/// The headers of a message, in the order in which they were set. Few, so a list is fastest.
#[derive(Clone, Default, PartialEq)]
pub struct Headers(Vec<(String, HeaderValue)>);

impl Headers {
    /// No headers. Allocates nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// The value of a header; names are compared exactly.
    pub fn get(&self, name: &str) -> Option<&HeaderValue> {
        self.0
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, value)| value)
    }

    /// The value of a header that is text.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.get(name).and_then(HeaderValue::as_text)
    }

    /// Sets a header, replacing a value it had.
    pub fn insert(&mut self, name: impl Into<String>, value: impl Into<HeaderValue>) {
        let (name, value) = (name.into(), value.into());
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some(slot) => slot.1 = value,
            None => self.0.push((name, value)),
        }
    }

    /// All headers, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &HeaderValue)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }
}

/// Values may hold the ordering key, so only the names are shown.
impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set()
            .entries(self.iter().map(|(name, _)| name))
            .finish()
    }
}

/// A message on its way: payload and everything said about it.
#[derive(Clone, Default)]
pub struct Envelope {
    /// Unique id. Messages of other publishers may have none; see [`Identity`] for the consequence.
    pub id: Option<MessageId>,
    /// Stable wire name of the type ([`Message::TYPE`](crate::Message::TYPE)).
    pub message_type: Option<Arc<str>>,
    /// How the body is encoded: `application/json` or `application/msgpack`.
    pub content_type: Option<Arc<str>>,
    /// Everything else the publisher said.
    pub headers: Headers,
    /// Groups messages that belong together; passed on by [`Context::publish`](crate::Context::publish).
    pub correlation_id: Option<Arc<str>>,
    /// Id of the message whose handler published this one.
    pub causation_id: Option<Arc<str>>,
    /// When the publisher sent it, by its own clock.
    pub sent_at: Option<SystemTime>,
    /// The encoded payload.
    pub body: Bytes,
}

/// Shows neither body nor header values.
impl fmt::Debug for Envelope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Envelope")
            .field("id", &self.id)
            .field("message_type", &self.message_type)
            .field("content_type", &self.content_type)
            .field("headers", &self.headers)
            .field("body_bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

/// What makes two deliveries copies of one message: id, digest of the body, replay number.
///
/// A message without id can be recognised by its body alone, and two different messages may have
/// equal bodies. Therefore [`Identity::same_message`] (which lets a copy be settled *without
/// running*) needs an id, while [`Identity::looks_like`] (which only carries an attempt count over)
/// does not.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Identity {
    id: Option<MessageId>,
    digest: u64,
}

impl Identity {
    /// The identity of a message.
    pub fn of(envelope: &Envelope) -> Self {
        let replay = match envelope.headers.get(header::REPLAY) {
            Some(HeaderValue::Integer(number)) => *number as u64,
            _ => 0,
        };
        Self {
            id: envelope.id.clone(),
            digest: xxhash_rust::xxh3::xxh3_64_with_seed(&envelope.body, replay),
        }
    }

    /// Surely the same message: both have the same id, the same body and the same replay number.
    pub fn same_message(&self, other: &Self) -> bool {
        self.id.is_some() && self == other
    }

    /// The same message as far as can be seen, with or without an id.
    pub fn looks_like(&self, other: &Self) -> bool {
        self == other
    }

    /// The message's id.
    pub fn id(&self) -> Option<&MessageId> {
        self.id.as_ref()
    }
}

/// The name under which a session settles a delivery; rises within a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeliveryTag(pub u64);

/// Called once with the final outcome of a direct delivery; dropped uncalled if it ended without one.
pub type DirectSettle = Box<dyn FnOnce(Outcome) + Send>;

/// One handing-over of an envelope by a source. Belongs to one session; settled at most once.
pub struct Delivery {
    envelope: Envelope,
    identity: Identity,
    session: Arc<SessionState>,
    tag: DeliveryTag,
    redelivered: bool,
    pub(crate) key: Option<OrderingKey>,
    native: Option<Arc<dyn Any + Send + Sync>>,
    /// The payload decoded for its key, kept for the first attempt.
    pub(crate) decoded: Mutex<Option<Box<dyn Any + Send>>>,
    is_direct: bool,
    direct: Mutex<Option<DirectSettle>>,
    /// A direct sender's slot in its lane; free again when the delivery has ended.
    pub(crate) slot: Option<tokio::sync::OwnedSemaphorePermit>,
    /// Its key could not be asked for: each attempt fails with this, without calling the handler.
    pub(crate) intake_failure: Option<(crate::handler::FailureKind, String)>,
    /// For a keyless message: attempts made by copies of it in ended sessions.
    pub(crate) earlier_attempts: u32,
    /// Attempts begun so far, where the source counts them.
    source_attempts: Option<u32>,
}

impl Delivery {
    /// A delivery of a source, to be settled through `session` under `tag`.
    pub fn new(envelope: Envelope, session: Arc<SessionState>, tag: DeliveryTag) -> Self {
        Self {
            identity: Identity::of(&envelope),
            envelope,
            session,
            tag,
            redelivered: false,
            key: None,
            native: None,
            decoded: Mutex::new(None),
            is_direct: false,
            direct: Mutex::new(None),
            slot: None,
            intake_failure: None,
            earlier_attempts: 0,
            source_attempts: None,
        }
    }

    /// A delivery that an embedder sends to a lane itself. `settle` is called once with the
    /// outcome, from the lane's thread (it must not block); it is dropped uncalled if the
    /// delivery ends without one, because its session ended or the lane drained.
    pub fn direct(
        envelope: Envelope,
        key: OrderingKey,
        session: Arc<SessionState>,
        settle: impl FnOnce(Outcome) + Send + 'static,
    ) -> Self {
        Self {
            key: Some(key),
            is_direct: true,
            direct: Mutex::new(Some(Box::new(settle))),
            ..Self::new(envelope, session, DeliveryTag(0))
        }
    }

    /// Marks that the source has handed this message over before.
    pub fn redelivered(mut self, redelivered: bool) -> Self {
        self.redelivered = redelivered;
        self
    }

    /// The source knows the key of its messages.
    pub fn with_key(mut self, key: Option<OrderingKey>) -> Self {
        self.key = key;
        self
    }

    /// The source counts attempts, and so many were begun, in whatever process: counting goes on from there.
    pub fn with_attempts(mut self, begun: u32) -> Self {
        self.source_attempts = Some(begun);
        self
    }

    /// The payload, already decoded: the first attempt takes it, if it is of the handler's type.
    pub fn with_decoded(mut self, payload: Box<dyn Any + Send>) -> Self {
        self.decoded = Mutex::new(Some(payload));
        self
    }

    /// Keeps the adapter's own form of the message, so that parking can keep every header as it was.
    pub fn with_native(mut self, native: Arc<dyn Any + Send + Sync>) -> Self {
        self.native = Some(native);
        self
    }

    /// The message.
    pub fn envelope(&self) -> &Envelope {
        &self.envelope
    }

    /// What recognises a copy of this message.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The session it belongs to.
    pub fn session(&self) -> &Arc<SessionState> {
        &self.session
    }

    /// The id of the session it belongs to.
    pub fn session_id(&self) -> SessionId {
        self.session.id()
    }

    /// Attempts begun so far, where its source counts them.
    pub fn source_attempts(&self) -> Option<u32> {
        self.source_attempts
    }

    /// Its tag in that session.
    pub fn tag(&self) -> DeliveryTag {
        self.tag
    }

    /// Whether the source has handed this message over before.
    pub fn is_redelivered(&self) -> bool {
        self.redelivered
    }

    /// Its ordering key; `None` for a keyless message.
    pub fn key(&self) -> Option<&OrderingKey> {
        self.key.as_ref()
    }

    /// The adapter's own form of the message, if it is of type `T`.
    pub fn native<T: Any + Send + Sync>(&self) -> Option<&T> {
        self.native.as_ref()?.downcast_ref()
    }

    /// Whether it was sent to its lane directly, rather than by a source.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// The settle handle of a direct delivery; there is one, once.
    pub(crate) fn take_direct(&self) -> Option<DirectSettle> {
        self.direct
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    pub(crate) fn take_decoded(&self) -> Option<Box<dyn Any + Send>> {
        self.decoded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery")
            .field("envelope", &self.envelope)
            .field("session", &self.session.id())
            .field("tag", &self.tag.0)
            .field("redelivered", &self.redelivered)
            .finish_non_exhaustive()
    }
}
