//! Everything worth seeing: events as they happen, and the state at one moment.
//!
//! No key value is in any of it, only fingerprints (invariant 11). Exporters live elsewhere.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast;

use crate::envelope::MessageId;
use crate::handler::FailureKind;
use crate::key::Fingerprint;
use crate::lane::machine::HoldEnd;
use crate::mapping::MappingEpoch;
use crate::outcome::{Outcome, PoisonReason};
use crate::session::SessionId;

/// Something that happened at an endpoint.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Event {
    /// Name of the endpoint.
    pub endpoint: Arc<str>,
    /// What happened.
    pub kind: EventKind,
}

/// What happened.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum EventKind {
    /// A session was opened: deliveries flow.
    Connected {
        /// Its queue.
        queue: Arc<str>,
        /// The session.
        session: SessionId,
        /// How many sessions were lost before it.
        reconnects: u64,
    },
    /// The session ended unexpectedly, or could not be opened; another try follows.
    Disconnected {
        /// Its queue.
        queue: Arc<str>,
        /// What happened, without credentials.
        reason: String,
        /// Pause before the next try.
        retry_in: Duration,
    },
    /// A session was closed in an orderly way: on a drain, for a pause, to be renewed, or because another
    /// instance is to have its shard.
    SessionClosed {
        /// Its queue.
        queue: Arc<str>,
        /// The session.
        session: SessionId,
        /// Deliveries given back unfinished.
        given_back: usize,
    },
    /// A message has waited for its acknowledgement for so long (80 % of `ack_timeout`) that the session is
    /// closed and opened again, before the broker does it.
    SessionRenewed {
        /// Its queue.
        queue: Arc<str>,
        /// For how long the message has waited.
        age: Duration,
    },
    /// A failure rule pauses the endpoint: its sessions are closed for this long.
    Paused {
        /// For how long.
        pause: Duration,
    },
    /// The pause is over.
    Resumed,
    /// An attempt failed.
    AttemptFailed {
        /// The key, where there is one.
        key: Option<Fingerprint>,
        /// The message.
        message: Option<MessageId>,
        /// Which attempt.
        attempt: u32,
        /// In which way.
        failure: FailureKind,
        /// The pause before the next attempt; `None` when there is none.
        retry_in: Option<Duration>,
    },
    /// A message ended without effect: the key's sequence has a hole here.
    Gap {
        /// The key, where there is one.
        key: Option<Fingerprint>,
        /// The message.
        message: Option<MessageId>,
        /// Why.
        reason: PoisonReason,
        /// Where it went.
        outcome: Outcome,
        /// Attempts made; one that could call no handler counts.
        attempts: u32,
    },
    /// A message is poison, and its key is held: nothing of it runs until the hold ends.
    Held {
        /// The key.
        key: Option<Fingerprint>,
        /// The message.
        message: Option<MessageId>,
        /// Why it is poison.
        reason: PoisonReason,
        /// Attempts made; one that could call no handler counts.
        attempts: u32,
        /// The longest that it is held; `None` without a bound.
        at_most: Option<Duration>,
    },
    /// The hold of a key has ended.
    HoldEnded {
        /// The key.
        key: Option<Fingerprint>,
        /// The message that was held.
        message: Option<MessageId>,
        /// Why.
        why: HoldOver,
        /// How long it was held.
        after: Duration,
    },
    /// Parking failed; the key stays held, another try follows.
    ParkingFailed {
        /// The key, where there is one.
        key: Option<Fingerprint>,
        /// The message.
        message: Option<MessageId>,
        /// What the parking place said.
        error: String,
        /// Pause before the next try.
        retry_in: Duration,
    },
    /// A handler neither returned nor could be dropped within a second of being aborted: it blocks
    /// its thread. Its key waits for it, and its permit is not available.
    Stuck {
        /// The key, where there is one.
        key: Option<Fingerprint>,
        /// The message.
        message: Option<MessageId>,
    },
    /// A stuck handler has ended.
    Unstuck {
        /// The key, where there is one.
        key: Option<Fingerprint>,
    },
    /// All credits of a queue are used and few keys hold them: its other keys wait at the broker.
    CreditsExhausted {
        /// The queue.
        queue: Arc<str>,
        /// Number of keys with unsettled messages.
        keys: usize,
        /// The queue's credits: `max_in_flight`, or its part of them.
        credits: u32,
    },
    /// A message could not be given the key the endpoint asks for.
    KeyMissing {
        /// The message.
        message: Option<MessageId>,
        /// Whether the correlation id stood in for it; otherwise the message has no order.
        fallback: bool,
    },
    /// A message was published under another map of keys to queues than this endpoint's: while the map of a
    /// consistent-hash exchange changes, the order of a key is not kept. Once per foreign epoch.
    MappingChanged {
        /// The endpoint's own mapping epoch.
        own: MappingEpoch,
        /// The message's.
        seen: MappingEpoch,
    },
    /// One of Laneway's own actors panicked: a bug in Laneway. It was restarted.
    ActorRestarted {
        /// Which actor.
        actor: &'static str,
    },
    /// An actor panicked too often; the endpoint drains and stops.
    Failed {
        /// What happened.
        reason: String,
    },
    /// The endpoint has drained.
    Drained {
        /// Deliveries given back to the source unstarted.
        given_back: usize,
        /// Attempts that were still running at the deadline.
        unfinished: usize,
    },
}

/// Why a hold has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HoldOver {
    /// An operator said so, and what becomes of the head.
    Operator(HoldEnd),
    /// It has lasted `hold_at_most`: the head is parked.
    TooLong,
    /// Held keys used more than half the credits, and it was the oldest: the head is parked.
    TooMany,
    /// The source does not give the head again after a lost session, so it has been settled elsewhere.
    Gone,
}

/// Where events go: a broadcast to any number of subscribers. Never blocks the sender; a subscriber
/// that falls behind by more than 1,024 events misses the oldest and is told how many.
#[derive(Clone)]
pub struct Events(broadcast::Sender<Event>);

impl Default for Events {
    fn default() -> Self {
        Self(broadcast::channel(1_024).0)
    }
}

impl Events {
    /// Receives everything that happens from now on.
    pub fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.0.subscribe()
    }

    pub(crate) fn emit(&self, event: Event) {
        // An error means that nobody listens, which is fine.
        let _ = self.0.send(event);
    }
}

/// What an endpoint is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EndpointState {
    /// Opening its first session.
    Starting,
    /// Deliveries flow.
    Running,
    /// A session was lost; trying to open another.
    Disconnected,
    /// A failure rule lets it pause: no session is open.
    Paused,
    /// Finishing what runs.
    Draining,
    /// Ended in an orderly way.
    Stopped,
    /// Ended because something is broken; see the `Failed` event.
    Failed,
}

/// The state of one endpoint at one moment.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EndpointSnapshot {
    /// Name of the endpoint.
    pub endpoint: Arc<str>,
    /// What it is doing.
    pub state: EndpointState,
    /// Deliveries received and not settled.
    pub in_flight: usize,
    /// The most there can be (`max_in_flight`).
    pub credits: u32,
    /// Its queues: one, or one for each shard.
    pub shards: Vec<ShardSnapshot>,
    /// Handlers running now.
    pub running: usize,
    /// Messages in each lane, running ones included.
    pub lane_depth: Vec<usize>,
    /// Keys that do not move, with the reason.
    pub waiting_keys: Vec<WaitingKey>,
    /// Messages handled since the start.
    pub handled: u64,
    /// Messages parked since the start.
    pub parked: u64,
    /// Messages discarded since the start.
    pub discarded: u64,
    /// Messages that ended without effect since the start.
    pub gaps: u64,
    /// Attempts since the start.
    pub attempts: u64,
    /// Messages ordered by their correlation id, because the key itself was missing.
    pub key_fallbacks: u64,
    /// Messages of an ordered endpoint that had no key at all.
    pub keyless: u64,
    /// Sessions lost since the start.
    pub reconnects: u64,
    /// Messages that were sent under another map of keys to queues than the endpoint's own (a consistent-hash
    /// exchange whose queues have changed): their keys may be out of order.
    pub mapping_changes: u64,
}

impl EndpointSnapshot {
    /// Whether deliveries flow and at least one handler can run: false while disconnected, failed, or
    /// when every permit is held by a stuck handler.
    pub fn is_healthy(&self) -> bool {
        let stuck = self
            .waiting_keys
            .iter()
            .filter(|waiting| waiting.why == WaitReason::Stuck)
            .count();
        self.state == EndpointState::Running && (stuck == 0 || stuck < self.running)
    }
}

/// One queue of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShardSnapshot {
    /// Its name.
    pub queue: Arc<str>,
    /// Whether this instance is subscribed to it. (With a single active consumer, perhaps behind another.)
    pub subscribed: bool,
    /// Deliveries received from it and not settled.
    pub in_flight: usize,
    /// The most there can be.
    pub credits: u16,
}

/// A key that does not move.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WaitingKey {
    /// The key; `None` for a message without one.
    pub key: Option<Fingerprint>,
    /// Its lane.
    pub lane: usize,
    /// Why it waits.
    pub why: WaitReason,
    /// For how long.
    pub since: Duration,
    /// Messages waiting behind its head.
    pub behind: usize,
}

/// Why a key does not move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WaitReason {
    /// Its head failed and waits for the next attempt.
    BackingOff,
    /// Its head is being parked.
    Parking,
    /// Its head is poison, and the key is held for an operator (or the bound of the hold).
    Held,
    /// Its handler blocks and cannot be aborted.
    Stuck,
}
