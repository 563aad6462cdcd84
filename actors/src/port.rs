//! What the outside must provide: sources with their sessions, a parking place, a publisher, and for
//! endpoints over several shards a membership.
//!
//! The traits here are all that a broker or a store has to implement; `laneway` implements them
//! for RabbitMQ and for the embedded broker. One conformance suite holds every adapter to them.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::BoxStream;

use crate::envelope::{Delivery, DeliveryTag, Envelope};
use crate::handler::FailureKind;
use crate::key::{Fingerprint, OrderingKey};
use crate::outcome::PoisonReason;
use crate::session::SessionState;

/// Where deliveries come from: a queue of a broker.
pub trait Source: Send + Sync + 'static {
    /// Name of the queue, for logs, events and errors.
    fn name(&self) -> &str;

    /// Checks the world before the first message: the queue exists and is as declared, the
    /// parking place is there. Declares what the application asked to be declared.
    ///
    /// # Errors
    /// Every difference, each naming the thing and the setting to change.
    fn verify(&self) -> BoxFuture<'_, Result<(), Vec<SourceError>>>;

    /// Opens a session: one channel on which the queue's messages arrive in order.
    ///
    /// At most `credits` deliveries are unsettled at any time. The adapter ends `state` when it
    /// notices that the session is lost, and proves it alive while it lives
    /// ([`SessionState::prove`]). Cancelling the future opens nothing.
    ///
    /// # Errors
    /// When the source cannot be reached or refuses; the caller tries again after a pause, unless
    /// the error is [`SourceError::Refused`].
    fn open(
        &self,
        state: Arc<SessionState>,
        credits: u16,
    ) -> BoxFuture<'_, Result<OpenSession, SourceError>>;
}

/// A session that was opened: what arrives, and how to answer. When both are dropped without a close it ends by itself,
/// and gives back what is unsettled as a close does: nobody could settle it any more.
pub struct OpenSession {
    /// Batches in order of arrival. Ends with one error, or without; both mean the session ended.
    /// A session that the supervisor closed ends without an error.
    pub deliveries: BoxStream<'static, Result<Vec<Delivery>, SourceError>>,
    /// Settles, proves, closes.
    pub control: Arc<dyn Session>,
}

/// The answering side of a session. Used by one owner, the endpoint's supervisor.
pub trait Session: Send + Sync + 'static {
    /// Queues acknowledgements, in this order, without waiting. On a session that has ended it
    /// does nothing: a delivery of an ended session cannot be settled.
    fn acknowledge(&self, acks: &[Ack]);

    /// Whether one acknowledgement with `multiple` costs much less than many single ones. If so, those of
    /// messages that ended before an earlier one are kept back for a moment (10 ms at most, and half of the
    /// session's credits at most), so that the earlier one's covers them. False unless a source says otherwise.
    fn gathers_acknowledgements(&self) -> bool {
        false
    }

    /// Resolves when the source has *processed* every acknowledgement queued before the call.
    ///
    /// # Errors
    /// [`SessionLost`] if the session ended first: it is unknown which were processed.
    fn barrier(&self) -> BoxFuture<'static, Result<(), SessionLost>>;

    /// Closes the session in an orderly way: everything unsettled goes back to the queue in its
    /// original order, with no attempt counted. Resolves when the source has confirmed, or when it
    /// is lost anyway; never waits for ever. May be called again, with the same answer.
    fn close(&self) -> BoxFuture<'static, ()>;
}

/// One acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// The delivery's tag; with `multiple`, one that is still outstanding.
    pub tag: DeliveryTag,
    /// Acknowledges every outstanding delivery up to and including the tag.
    pub multiple: bool,
}

/// The session ended before the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the session ended before the source had answered")]
pub struct SessionLost;

/// Why a source cannot deliver.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The source cannot be reached, or went away: worth another try.
    #[error("{what}")]
    Unavailable {
        /// What happened, without credentials.
        what: String,
        /// The adapter's own error.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// The source answered that it will not do this (missing queue, refused credentials, an argument
    /// that differs): trying again changes nothing until somebody changes something.
    #[error("{what}")]
    Refused {
        /// What was refused, and which setting or thing to change; without credentials.
        what: String,
        /// The adapter's own error.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
}

/// Where poison messages go.
pub trait Parking: Send + Sync + 'static {
    /// Name of the place, for logs and events.
    fn name(&self) -> &str;

    /// Stores the message durably, and resolves when that is confirmed. Once per call: trying again
    /// is the caller's decision.
    ///
    /// # Errors
    /// [`ParkError`], telling whether a copy may have been stored.
    fn park(&self, letter: Arc<DeadLetter>) -> BoxFuture<'static, Result<(), ParkError>>;
}

/// A poison message with its provenance.
#[derive(Debug)]
pub struct DeadLetter {
    /// The delivery, with envelope and the adapter's own form of the message.
    pub delivery: Arc<Delivery>,
    /// Endpoint that gave it up.
    pub endpoint: Arc<str>,
    /// Queue it came from.
    pub queue: Arc<str>,
    /// Fingerprint of its key; `None` for a keyless message.
    pub key: Option<Fingerprint>,
    /// Why. For a message that is kept for a later attempt, that is not its end.
    pub reason: PoisonReason,
    /// Where it goes.
    pub place: Place,
    /// The last error's text, with occurrences of the key replaced by its fingerprint.
    pub detail: String,
    /// Attempts made; one that could call no handler counts.
    pub attempts: u32,
    /// When it was given up, by this machine's clock.
    pub given_up_at: std::time::SystemTime,
}

/// Where a message that cannot be handled now is moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// The parking place. The only one that brokers are asked for.
    Parking,
    /// It stays in its queue and in its place, and nothing of its key is delivered before it: for this long, or,
    /// `None`, until an operator decides. Then it is delivered again.
    Kept(Option<std::time::Duration>),
}

/// Why a message is not known to be parked.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ParkError {
    /// The parking place refused it: surely no copy there.
    #[error("the parking place refused the message: {0}")]
    Refused(String),
    /// No answer: a copy may be there. Trying again can leave a second one.
    #[error("whether the message was parked is unknown: {0}")]
    Unknown(String),
    /// The message's session has ended, and with it the right to move it: it will be delivered again, here or
    /// elsewhere, unless it was parked. Trying again is of no use.
    #[error("the message's session has ended")]
    SessionEnded,
}

/// What a source does around each attempt of its deliveries, where it does anything: a store counts attempts
/// durably, and makes a transaction of each.
pub trait Attempts: Send + Sync + 'static {
    /// Just before the handler is called in the attempt of this number, from 1. Resolves when the attempt is durably
    /// counted, with what surrounds it. May come again with the same number, where an attempt did not start after all:
    /// that counts once.
    ///
    /// # Errors
    /// [`SessionLost`]: the attempt must not start.
    ///
    /// # Cancellation
    /// Dropping the future leaves it open whether the attempt was counted.
    fn begin(
        &self,
        delivery: &Arc<Delivery>,
        attempt: u32,
    ) -> BoxFuture<'static, Result<Option<Arc<dyn Scope>>, SessionLost>>;

    /// An attempt failed; kept with the message's past, once it is settled. Does not wait.
    fn failed(&self, delivery: &Delivery, attempt: u32, kind: FailureKind, detail: &str);
}

/// What surrounds one attempt and makes its effects final together: a transaction. Dropped without a commit, it
/// has had no effect.
pub trait Scope: Send + Sync + 'static {
    /// Itself, for whoever made it.
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;

    /// Takes a message that the handler publishes; it is sent if, and when, the scope commits.
    ///
    /// # Errors
    /// [`PublishError`]: this one cannot be sent in this scope.
    fn publish(&self, draft: Draft) -> BoxFuture<'_, Result<(), PublishError>>;

    /// The handler has succeeded and returned these messages: makes its writes, everything published, and that
    /// the message is handled, final in one step. A success means that the message is settled.
    ///
    /// # Errors
    /// [`CommitError`].
    ///
    /// # Cancellation
    /// Dropping the future leaves it open whether the commit took place.
    fn commit(self: Arc<Self>, returned: Vec<Draft>)
    -> BoxFuture<'static, Result<(), CommitError>>;

    /// The attempt has ended: what is not committed is given up now, and nothing can begin any more, whoever still has
    /// the handler's context. Does not wait.
    fn end(&self);
}

/// Why an attempt's effects are not final.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// Nothing took effect; another attempt may succeed.
    #[error("the handler's transaction was not committed: {0}")]
    RolledBack(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The session has ended: whether it took effect, the next session finds out.
    #[error("the session ended before the handler's transaction was known to be committed")]
    SessionEnded,
}

/// An encoded message that a handler publishes, and that has no destination yet.
#[derive(Debug, Clone)]
pub struct Draft {
    /// Its type; decides where it goes.
    pub message_type: &'static str,
    /// The message.
    pub envelope: Envelope,
    /// The key given with it, else the one its payload has.
    pub key: Option<OrderingKey>,
}

/// The messages of a parking place: to be looked at, discarded, or replayed.
///
/// Looking is a session on the parking queue that acknowledges only what is discarded or replayed;
/// closing it gives the rest back in order.
pub trait ParkedMessages: Send + Sync + 'static {
    /// Name of the parking queue.
    fn name(&self) -> &str;

    /// What the parking queue holds now, and how many read from it.
    ///
    /// # Errors
    /// When the queue cannot be reached, or does not exist.
    fn count(&self) -> BoxFuture<'_, Result<ParkedCount, SourceError>>;

    /// Opens a session on the parking queue; see [`Source::open`].
    ///
    /// # Errors
    /// See [`Source::open`].
    fn open(
        &self,
        state: Arc<SessionState>,
        credits: u16,
    ) -> BoxFuture<'_, Result<OpenSession, SourceError>>;

    /// Publishes a parked message to a queue, persistent, with everything it has, and with
    /// [`header::REPLAY`](crate::header::REPLAY) set to `replay`. Resolves when the broker has
    /// confirmed it. Does not acknowledge the parked copy, and never sends twice.
    ///
    /// # Errors
    /// [`PublishError`], telling whether a copy may have been sent.
    fn send_back(
        &self,
        parked: Arc<Delivery>,
        queue: Arc<str>,
        replay: i64,
    ) -> BoxFuture<'static, Result<(), PublishError>>;
}

/// What a parking queue holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParkedCount {
    /// Messages in it that no session holds.
    pub ready: u32,
    /// Sessions on it, whoever opened them.
    pub sessions: u32,
}

/// Sends messages out.
pub trait Publisher: Send + Sync + 'static {
    /// Sends one message and resolves when the broker has confirmed it. Never sends it twice.
    ///
    /// # Errors
    /// [`PublishError`], telling whether a copy may have been sent.
    ///
    /// # Cancellation
    /// Dropping the future leaves the outcome unknown: the message may or may not be sent.
    fn publish(&self, outgoing: Outgoing) -> BoxFuture<'static, Result<(), PublishError>>;
}

/// A message on its way out.
#[derive(Debug, Clone)]
pub struct Outgoing {
    /// Where to.
    pub destination: Destination,
    /// The message.
    pub envelope: Envelope,
    /// Its ordering key; the header that carries it is set already.
    pub key: Option<OrderingKey>,
}

/// Where a message is sent.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Destination {
    /// A queue, by its name.
    Queue(Arc<str>),
    /// An exchange, with a routing key.
    Exchange {
        /// Name of the exchange.
        exchange: Arc<str>,
        /// Routing key.
        routing_key: Arc<str>,
    },
}

/// Why a message is not known to be published.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The broker refused it, or had no queue for it: surely not sent.
    #[error("the broker did not accept the message: {0}")]
    Refused(String),
    /// No answer: it may have been sent. Laneway does not send it again by itself.
    #[error("whether the message was published is unknown: {0}")]
    Unknown(String),
    /// Not sent, because an earlier message of the same key failed while this one waited: sending it
    /// would have put it before the earlier one, should that be sent again.
    #[error("not published: an earlier message of the same key failed first")]
    EarlierFailed,
    /// Not sent: no destination is configured for this type.
    #[error("no destination is configured for messages of type `{0}`")]
    NoDestination(String),
    /// Not sent: it was to be handled by somebody, and its type has neither a handler here nor a route.
    #[error("nobody handles messages of type `{0}`: they have no handler here and no route")]
    NoHandler(String),
    /// Not sent: the payload could not be encoded.
    #[error("the message could not be encoded: {0}")]
    Encode(String),
    /// Not sent: the bus has been shut down.
    #[error("not published: the bus has been shut down")]
    ShutDown,
}

/// How the instances that share the shards of one endpoint learn of one another.
///
/// Correctness never rests on it: which instance is active on a shard is the broker's decision. A
/// membership that is slow, deaf or silent costs evenness, not order.
pub trait Membership: Send + Sync + 'static {
    /// Name of the group, for logs and errors.
    fn name(&self) -> &str;

    /// Joins the group. Announcements of before are not heard. Cancelling the future joins nothing.
    ///
    /// # Errors
    /// When the group cannot be reached or refuses; the caller tries again after a pause.
    fn join(&self) -> BoxFuture<'_, Result<Joined, SourceError>>;

    /// Which of these shards no session is open on, at this moment, whoever might have opened it.
    /// Costs one question to the broker per shard.
    ///
    /// # Errors
    /// When the broker cannot be reached, or a shard does not exist; then nothing is known of any.
    fn unattended(
        &self,
        shards: BTreeSet<usize>,
    ) -> BoxFuture<'_, Result<BTreeSet<usize>, SourceError>>;
}

/// One life of a place in a group.
pub struct Joined {
    /// What members announce, **the own announcements included**: they are the proof that the group can be
    /// heard. Those of one member come in their order; any may be lost, and old ones are dropped
    /// before new ones when nobody reads. Ends when the connection is lost: then join again. Dropping it
    /// leaves the group, which tells nobody.
    pub heard: BoxStream<'static, Announcement>,
    /// Speaks to the group.
    pub announcer: Arc<dyn Announcer>,
}

/// Speaks to a group.
pub trait Announcer: Send + Sync + 'static {
    /// Announces to all who are members now, and resolves when it is sent or surely not heard any more;
    /// never waits for ever. One at a time: of two that are under way together either may be first.
    ///
    /// # Errors
    /// When it is not known to be sent. Trying again with the same announcement is harmless.
    ///
    /// # Cancellation
    /// Dropping the future does not stop the announcement.
    fn announce(&self, announcement: Announcement) -> BoxFuture<'static, Result<(), SourceError>>;
}

/// Names one instance of an endpoint, from its start to its end; never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(u128);

impl MemberId {
    /// A new one, by chance.
    pub fn unique() -> Self {
        Self(uuid::Uuid::new_v4().as_u128())
    }

    /// From its number, as an adapter read it.
    pub const fn from_u128(number: u128) -> Self {
        Self(number)
    }

    /// Its number.
    pub const fn as_u128(self) -> u128 {
        self.0
    }
}

/// 32 hexadecimal digits.
impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// What an instance tells the others of its group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announcement {
    /// Who speaks.
    pub member: MemberId,
    /// Rises from one announcement of a member to the next. An older one says nothing any more.
    pub sequence: u64,
    /// Into how many shards the speaker believes the endpoint to be divided.
    pub of: usize,
    /// The shards on which it has a session, active or standing by. One that it is about to give is not
    /// listed.
    pub shards: BTreeSet<usize>,
    /// Whether it wants shards. False is its goodbye: it drains, is paused or ends.
    pub willing: bool,
}
