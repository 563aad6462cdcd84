//! Ordering as a pure state machine: events in, effects out.
//!
//! Owns the state of every key of one lane, and with it these invariants:
//! 1. at most one attempt of a key at a time, and no attempt before the previous one's future has
//!    returned or was dropped, whatever happened to its session in between;
//! 2. within a session the messages of a key start in the order in which they were offered;
//! 3. a key that waits delays no other key.
//!
//! Does no I/O, knows no clock, no actor and no runtime: whoever holds it performs the effects and
//! reports what came of them. So every interleaving can be written down as a list of events.
//!
//! Here is the key's turn: which message is its head, and when it asks to run. Beside it, in `machine/`: what a track
//! knows (`track.rs`), the words in and out (`events.rs`), what runs (`attempts.rs`), what is given up (`poison.rs`),
//! what ends with a session (`sessions.rs`) and what outlives one (`memory.rs`).
//!
//! ```text
//!            offered            granted          finished: handled
//!   (idle) ──────────► Ready ────────────► Running ─────────────────► next message, or idle
//!                        ▲                  │    │
//!                        │  back-off over   │    │ finished: poison
//!                        └── BackingOff ◄───┘    ├──► Parking ── settled ──► next message
//!                        ▲                       │       ▲
//!                        │ retry                 │       │ release, skip, or the hold's bound
//!                        └───────────────────────┴──► Held                 (where keys are to be held)
//! ```
//!
//! **When a session ends**, everything of it that has not started is forgotten: the broker gives it
//! again, in order. Four things outlive it, because they belong to the key:
//! - a *running* attempt. Its handler may still be writing somewhere; the key waits until its future is
//!   gone. The broker meanwhile gives a copy of the same message, which waits behind it, and ends
//!   with it if it succeeded.
//! - a *parking* head. The copy must neither run nor be parked twice: it waits for the answer, and then
//!   only has to be settled, in its own session.
//! - a *held* head. Its copy is held on, until the same moment.
//! - the *attempts* made. A head that was backing off goes on where it was; the copy finds its count.
//!
//! If the first message of that key in the next session is another one, the old head has been settled
//! after all (its acknowledgement reached the broker before the end), and what was remembered
//! of it is dropped.
//!
//! This rests on whoever offers: an *earlier* message of the key, handled already but its
//! acknowledgement lost, would look like such another one, and the head behind it would run or be parked
//! again. The supervisor's memory of finished messages keeps such copies away from the lane, as far as
//! they have an id. Without ids that remains: more attempts than allowed, a second copy in the parking
//! place; never another order.

mod attempts;
mod events;
mod memory;
mod poison;
mod sessions;
mod track;

use std::collections::{BTreeMap, VecDeque};

use slab::Slab;

pub use events::{Effect, Event, HoldEnd, Item, RunResult, Ticket};
pub use poison::PoisonPlan;
use sessions::Draining;
use track::{State, Track, count};

use crate::key::{KeyMap, OrderingKey};
use crate::outcome::PoisonReason;
use crate::policy::Policy;
use crate::session::SessionId;

/// Why a track is not moving, for a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waiting {
    BackingOff,
    Parking,
    Held,
    Stuck,
}

/// The state machine of one lane.
pub struct Machine<D> {
    policy: Policy,
    plan: PoisonPlan,
    tracks: Slab<Track<D>>,
    by_key: KeyMap<usize>,
    next_stamp: u64,
    paused: bool,
    draining: BTreeMap<SessionId, Draining>,
    /// Tracks that hold only a memory, by stamp and therefore oldest first.
    remembered: BTreeMap<u64, usize>,
    remember_at_most: usize,
    /// Deliveries that wait or run.
    depth: usize,
}

impl<D: Item> Machine<D> {
    /// A machine without any key. It remembers at most `remember_at_most` keys of ended sessions; a
    /// key beyond that starts to count its attempts anew.
    pub fn new(policy: Policy, plan: PoisonPlan, remember_at_most: usize) -> Self {
        Self {
            policy,
            plan,
            tracks: Slab::new(),
            by_key: KeyMap::default(),
            next_stamp: 0,
            paused: false,
            draining: BTreeMap::new(),
            remembered: BTreeMap::new(),
            remember_at_most,
            depth: 0,
        }
    }

    /// An empty machine that recognises answers to questions of this one as outdated, and tells what this one
    /// was still to tell of draining sessions.
    pub fn successor(&self) -> Self {
        Self {
            next_stamp: self.next_stamp + 1,
            draining: self.draining.clone(),
            ..Self::new(self.policy.clone(), self.plan, self.remember_at_most)
        }
    }

    /// Takes over an attempt that already runs and cannot be settled: its key waits for its end, and counts
    /// on from `attempts`, this one included.
    pub fn adopt_running(&mut self, head: D, attempts: u32) -> Ticket {
        let stamp = self.stamp();
        let key = head.key().cloned();
        let slot = self.tracks.insert(Track {
            key: key.clone(),
            stamp,
            state: State::Running {
                head,
                attempts,
                orphan: true,
                stuck: false,
            },
            waiting: VecDeque::new(),
        });
        if let Some(key) = key {
            self.by_key.insert(key, slot);
        }
        Ticket { slot, stamp }
    }

    /// Deliveries that wait or run.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Keys (and keyless messages) with anything to remember.
    pub fn tracks(&self) -> usize {
        self.tracks.len()
    }

    /// Sessions of which something is still to be told or heard.
    #[cfg(test)]
    pub(crate) fn draining(&self) -> usize {
        self.draining.len()
    }

    /// Whether nothing may start at the moment.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// What does not move: the track's ticket, its key, why, and how many messages wait behind its head.
    pub(crate) fn waiting(
        &self,
    ) -> impl Iterator<Item = (Ticket, Option<&OrderingKey>, Waiting, usize)> {
        self.tracks.iter().filter_map(|(slot, track)| {
            let why = match &track.state {
                State::BackingOff { .. } => Waiting::BackingOff,
                State::Parking(_) => Waiting::Parking,
                State::Held { .. } => Waiting::Held,
                State::Running { stuck: true, .. } => Waiting::Stuck,
                _ => return None,
            };
            let stamp = track.stamp;
            Some((
                Ticket { slot, stamp },
                track.key.as_ref(),
                why,
                track.waiting.len(),
            ))
        })
    }

    /// Takes in an event; appends what is to be done.
    pub fn handle(&mut self, event: Event<D>, effects: &mut Vec<Effect<D>>) {
        match event {
            Event::Offered(delivery) => self.offered(delivery, effects),
            Event::Granted(ticket) => self.granted(ticket, effects),
            Event::Finished { ticket, result } => self.finished(ticket, result, effects),
            Event::StillRunning(ticket) => self.still_running(ticket, effects),
            Event::BackoffElapsed(ticket) => self.backoff_elapsed(ticket, effects),
            Event::HoldEnded(ticket, end) => self.hold_ended(ticket, end, effects),
            Event::Parked { ticket, settled } => self.parked(ticket, settled, effects),
            Event::ParkingEnded(ticket) => self.parking_ended(ticket, effects),
            Event::SessionEnded(session) => self.session_ended(session, effects),
            Event::Drain(session) => self.drain(session, effects),
            Event::Paused => self.paused = true,
            Event::Resumed => self.resumed(effects),
        }
    }

    /// Everything that waits, runs or is being parked.
    pub(crate) fn deliveries(&self) -> impl Iterator<Item = &D> {
        self.tracks.iter().flat_map(|(_, track)| {
            let head = match &track.state {
                State::Remembered(_) => None,
                State::Ready { head, .. } | State::Running { head, .. } => Some(head),
                State::BackingOff { head, .. } | State::Held { head, .. } => head.as_ref(),
                State::Parking(parking) => Some(&parking.head),
            };
            head.into_iter().chain(&track.waiting)
        })
    }

    /// Whether this is still a hold, and how many deliveries it keeps here: its head, unless that was given
    /// back with its session, and what waits behind it.
    pub(crate) fn held(&self, ticket: Ticket) -> Option<usize> {
        let track = self.tracks.get(ticket.slot);
        let track = track.filter(|track| track.stamp == ticket.stamp)?;
        match &track.state {
            State::Held { head, .. } => Some(usize::from(head.is_some()) + track.waiting.len()),
            _ => None,
        }
    }

    // ---- events

    fn offered(&mut self, delivery: D, effects: &mut Vec<Effect<D>>) {
        if self.draining.contains_key(&delivery.session()) {
            return; // not started: closing the session gives it back
        }
        self.depth += 1;
        let known = delivery.key().and_then(|key| self.by_key.get(key).copied());
        let Some(slot) = known else {
            self.open_track(delivery, effects);
            return;
        };
        self.tracks[slot].waiting.push_back(delivery);
        // Only a track without a head takes it at once.
        match &self.tracks[slot].state {
            State::Remembered(_) => self.next_of_key(slot, effects),
            State::BackingOff { head: None, .. } => self.rejoin_backoff(slot, effects),
            State::Held { head: None, .. } => self.rejoin_hold(slot, effects),
            _ => {}
        }
    }

    fn resumed(&mut self, effects: &mut Vec<Effect<D>>) {
        if !self.paused {
            return;
        }
        self.paused = false;
        for slot in self.slots() {
            if matches!(self.tracks[slot].state, State::Ready { .. }) {
                // A new stamp: a request from before the pause may still be answered.
                self.tracks[slot].stamp = self.stamp();
                self.ask(slot, effects);
            }
        }
    }

    // ---- transitions

    /// The first message of its key, or a keyless one.
    fn open_track(&mut self, head: D, effects: &mut Vec<Effect<D>>) {
        let key = head.key().cloned();
        let attempts = match key {
            Some(_) => count(&head, 0),
            None => count(&head, head.earlier_attempts()),
        };
        let stamp = self.stamp();
        let slot = self.tracks.insert(Track {
            key: key.clone(),
            stamp,
            state: State::Ready {
                head: head.clone(),
                attempts,
            },
            waiting: VecDeque::new(),
        });
        if let Some(key) = key {
            self.by_key.insert(key, slot);
        }
        // A copy whose last allowed attempt failed after its session. Likeness alone would not do: it
        // could be another message, and would be parked without ever having run.
        let spent = attempts >= self.policy.max_attempts.get() && head.identity().id().is_some();
        if self.is_used_up(&head, attempts) {
            self.park(
                slot,
                head,
                PoisonReason::Abandoned,
                self.plan,
                attempts,
                effects,
            );
        } else if spent {
            self.park(
                slot,
                head,
                PoisonReason::Failed,
                self.plan,
                attempts,
                effects,
            );
        } else {
            self.ask(slot, effects);
        }
    }

    /// Whether its source has counted the begin of every allowed attempt and heard of no end.
    fn is_used_up(&self, head: &D, attempts: u32) -> bool {
        head.source_attempts().is_some() && attempts >= self.policy.max_attempts.get()
    }

    /// Makes `head` the runnable head of its key; or parks it, if its source has counted all its attempts. (It need
    /// not be the first of its key here to be one of those: an attempt that was aborted with its session counts
    /// there, and a head that takes its process or its session down each time would never end.)
    fn ready(&mut self, slot: usize, head: D, attempts: u32, effects: &mut Vec<Effect<D>>) {
        if self.is_used_up(&head, attempts) {
            self.park(
                slot,
                head,
                PoisonReason::Abandoned,
                self.plan,
                attempts,
                effects,
            );
            return;
        }
        let stamp = self.stamp();
        let track = &mut self.tracks[slot];
        track.stamp = stamp;
        track.state = State::Ready { head, attempts };
        self.ask(slot, effects);
    }

    fn ask(&mut self, slot: usize, effects: &mut Vec<Effect<D>>) {
        if !self.paused {
            let stamp = self.tracks[slot].stamp;
            effects.push(Effect::AskPermit(Ticket { slot, stamp }));
        }
    }

    /// The head's outcome is final: the next message of the key, or none.
    fn advance(&mut self, slot: usize, effects: &mut Vec<Effect<D>>) {
        match self.tracks[slot].waiting.pop_front() {
            Some(next) => {
                let attempts = count(&next, 0);
                self.ready(slot, next, attempts, effects);
            }
            None => self.remove(slot),
        }
    }

    // ---- small things

    fn stamp(&mut self) -> u64 {
        self.next_stamp += 1;
        self.next_stamp - 1
    }

    fn current(&mut self, ticket: Ticket) -> Option<&mut Track<D>> {
        self.tracks
            .get_mut(ticket.slot)
            .filter(|track| track.stamp == ticket.stamp)
    }

    fn slots(&self) -> Vec<usize> {
        self.tracks.iter().map(|(slot, _)| slot).collect()
    }

    fn remove(&mut self, slot: usize) {
        let track = self.tracks.remove(slot);
        if let Some(key) = track.key {
            self.by_key.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests;
