//! What is known of one key, or of one keyless message.
//!
//! Owns the states that a track can be in, as data: what leads from one to another is in the files beside this one.

use std::collections::VecDeque;

use super::{Item, PoisonPlan};
use crate::envelope::Identity;
use crate::key::OrderingKey;
use crate::outcome::PoisonReason;

/// One key, or one keyless message: its head, and what waits behind it.
pub(super) struct Track<D> {
    pub(super) key: Option<OrderingKey>,
    pub(super) stamp: u64,
    pub(super) state: State<D>,
    pub(super) waiting: VecDeque<D>,
}

pub(super) enum State<D> {
    /// No head; what is known of the last one.
    Remembered(Memory),
    /// The head waits for a permit.
    Ready {
        head: D,
        attempts: u32,
    },
    /// `attempts` includes the running one. `orphan`: its session has ended.
    Running {
        head: D,
        attempts: u32,
        orphan: bool,
        stuck: bool,
    },
    /// The head waits for its next attempt; `None` when its session has ended meanwhile.
    BackingOff {
        head: Option<D>,
        identity: Identity,
        attempts: u32,
    },
    Parking(Parking<D>),
    /// The head is poison and keeps its key; `None` when its session has ended meanwhile.
    Held {
        head: Option<D>,
        identity: Identity,
        attempts: u32,
        reason: PoisonReason,
    },
}

pub(super) struct Parking<D> {
    pub(super) head: D,
    pub(super) attempts: u32,
    pub(super) reason: PoisonReason,
    pub(super) plan: PoisonPlan,
    /// Its session has ended.
    pub(super) orphan: bool,
    /// It could not be parked, because its session has ended; the end itself has not been reported here yet.
    pub(super) refused: bool,
    /// It is parked, and its session ended before the acknowledgement was known to be processed; the
    /// end itself has not been reported here yet.
    pub(super) lost: bool,
    /// The gap has been reported.
    pub(super) reported: bool,
}

pub(super) struct Memory {
    pub(super) identity: Identity,
    pub(super) attempts: u32,
    pub(super) next: Next,
}

/// What a copy of a remembered head has to do.
#[derive(Clone, Copy)]
pub(super) enum Next {
    /// Run, counting on.
    Run,
    /// Be parked or discarded, without another run.
    End(PoisonReason, PoisonPlan),
    /// Be settled: it was handled.
    Finish,
    /// Be settled, with barrier: it is parked already.
    Settle(PoisonReason, PoisonPlan),
}

/// Attempts of a message: its source's count, where there is one.
pub(super) fn count<D: Item>(delivery: &D, known: u32) -> u32 {
    delivery.source_attempts().unwrap_or(known)
}
