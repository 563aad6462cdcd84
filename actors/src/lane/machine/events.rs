//! What the machine is told, and what it asks for.
//!
//! Owns the words between the machine and whoever holds it: the [`Item`] that a delivery is to the machine, the
//! [`Event`]s in and the [`Effect`]s out, and the [`Ticket`] by which an answer is matched with its question.
//! Decides nothing.

use std::time::Duration;

use crate::envelope::Identity;
use crate::handler::FailureKind;
use crate::key::OrderingKey;
use crate::outcome::{Outcome, PoisonReason};
use crate::policy::PlanIndex;
use crate::port::Place;
use crate::session::SessionId;

/// What the machine must know of a delivery.
pub trait Item: Clone {
    /// Its ordering key; a keyless one has no order and is independent of all others.
    fn key(&self) -> Option<&OrderingKey>;
    /// The session it belongs to.
    fn session(&self) -> SessionId;
    /// What recognises a copy of it.
    fn identity(&self) -> &Identity;
    /// Whether the source has handed it over before.
    fn is_redelivered(&self) -> bool;
    /// For a keyless one: attempts that earlier copies of it have made ([`Effect::Forgotten`]). (A key
    /// keeps that count here, in the machine; a keyless copy may come to another lane.)
    fn earlier_attempts(&self) -> u32;
    /// Attempts that its source has counted, where it counts them: then nothing else is asked.
    fn source_attempts(&self) -> Option<u32>;
}

/// Names one step of one track: a request for a permit, a run, a timer, a parking. An answer that
/// comes with an outdated ticket is recognised as such.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    pub(super) slot: usize,
    pub(super) stamp: u64,
}

/// What happened.
#[derive(Debug, Clone)]
pub enum Event<D> {
    /// A delivery was handed to this lane.
    Offered(D),
    /// A permit was granted to the track that asked with this ticket.
    Granted(Ticket),
    /// The run's future has returned or was dropped; nothing of it runs any more.
    Finished {
        /// The ticket of its start.
        ticket: Ticket,
        /// How it ended.
        result: RunResult,
    },
    /// The run was aborted a while ago and has still not ended: its handler blocks.
    StillRunning(Ticket),
    /// The pause is over.
    BackoffElapsed(Ticket),
    /// A held head is to be held no longer.
    HoldEnded(Ticket, HoldEnd),
    /// The head is in the parking place (or was discarded). `settled`: the source has also processed its
    /// acknowledgement; otherwise the session ended before that was known.
    Parked {
        /// The ticket of the parking.
        ticket: Ticket,
        /// Whether the source is known to have processed the acknowledgement.
        settled: bool,
    },
    /// The head could not be parked, since its session has ended: a copy of it will come, unless another instance
    /// takes it.
    ParkingEnded(Ticket),
    /// A session ended: nothing of it may start or be settled from now on.
    SessionEnded(SessionId),
    /// A session is to be closed: nothing of it may start; what runs may finish.
    Drain(SessionId),
    /// Nothing may start until [`Event::Resumed`].
    Paused,
    /// Things may start again.
    Resumed,
}

/// What becomes of a held head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HoldEnd {
    /// It is parked, and its key goes on.
    Release,
    /// It runs again; its attempts are counted anew.
    Retry,
    /// It is discarded, and its key goes on.
    Skip,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RunResult {
    /// The handler succeeded.
    Handled,
    /// The handler failed. `chance` is a random number in [0, 1) for the jitter of a pause.
    Failed {
        /// In which way.
        kind: FailureKind,
        /// The plan of the failure rule that applies, if one does.
        plan: Option<PlanIndex>,
        /// Randomness.
        chance: f64,
    },
    /// The future was dropped, or never called: does not count as an attempt.
    Aborted,
}

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect<D> {
    /// Ask the endpoint for a permit.
    AskPermit(Ticket),
    /// The permit just granted is not needed: give it to somebody else.
    ReturnPermit,
    /// Run the handler, with the permit just granted.
    Start {
        /// To be given back with the end of the run.
        ticket: Ticket,
        /// The message.
        delivery: D,
        /// Which attempt, from 1.
        attempt: u32,
    },
    /// The session of this running attempt has ended: tell it, and abort it after the grace.
    Cancel(Ticket),
    /// Report [`Event::BackoffElapsed`] after the pause.
    ArmTimer {
        /// To be given back.
        ticket: Ticket,
        /// The pause.
        after: Duration,
    },
    /// An attempt failed; only to be shown.
    AttemptFailed {
        /// The message.
        delivery: D,
        /// Which attempt.
        attempt: u32,
        /// In which way.
        kind: FailureKind,
        /// The pause before the next one; `None` when there is none.
        retry_in: Option<Duration>,
    },
    /// The message has ended: settle it, in its session.
    Settle {
        /// The message.
        delivery: D,
        /// How it ended.
        outcome: Outcome,
    },
    /// The message has ended after its session: it cannot be settled, but a copy of it will come.
    Orphaned {
        /// The message.
        delivery: D,
        /// How it ended.
        outcome: Outcome,
    },
    /// A keyless message was dropped with its session after some attempts: a copy of it, in whatever
    /// lane, should go on counting from there.
    Forgotten {
        /// The message.
        delivery: D,
        /// Attempts made.
        attempts: u32,
    },
    /// Park the message; when that is confirmed, settle it and wait until the source has processed that;
    /// then report [`Event::Parked`]. Not before: a crash in between must find the key unreleased.
    Park {
        /// To be given back.
        ticket: Ticket,
        /// The message.
        delivery: D,
        /// Why.
        reason: PoisonReason,
        /// How often a handler ran.
        attempts: u32,
        /// Where to.
        place: Place,
    },
    /// Like [`Effect::Park`], for a message that is in the parking place already, or needs none.
    SettleWithBarrier {
        /// To be given back.
        ticket: Ticket,
        /// The message.
        delivery: D,
        /// How it ended.
        outcome: Outcome,
    },
    /// The message is held at the head of its key. Report [`Event::HoldEnded`] when that is asked for, and
    /// after `at_most` in any case.
    Hold {
        /// To be given back. The same until the end of the hold, also when a session ends meanwhile.
        ticket: Ticket,
        /// The message.
        delivery: D,
        /// Why it is poison.
        reason: PoisonReason,
        /// How often a handler ran.
        attempts: u32,
        /// The bound of the hold.
        at_most: Duration,
    },
    /// The endpoint is to give its sessions back for this long.
    PauseEndpoint(Duration),
    /// A message ended without effect.
    Gap {
        /// The message.
        delivery: D,
        /// Why.
        reason: PoisonReason,
        /// Where it went.
        outcome: Outcome,
        /// How often a handler ran.
        attempts: u32,
    },
    /// The handler blocks and cannot be aborted.
    Stuck(D),
    /// A stuck handler has ended.
    Unstuck(D),
    /// Nothing of a draining session runs or parks any more, and no attempt of an ended one runs.
    Quiet(SessionId),
}
