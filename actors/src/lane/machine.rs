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

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use slab::Slab;

use crate::envelope::Identity;
use crate::handler::FailureKind;
use crate::key::{KeyMap, OrderingKey};
use crate::outcome::{Outcome, PoisonReason};
use crate::policy::{PlanIndex, Policy, Verdict};
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
    slot: usize,
    stamp: u64,
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

/// Where poison messages go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoisonPlan {
    /// To the parking place.
    Park,
    /// Nowhere: acknowledged and reported.
    Discard,
    /// They stay at the head of their key for at most this long; then to the parking place. (Keyless ones
    /// go there at once: they hold nobody.)
    Hold(Duration),
    /// Their source keeps them and their key: for so long, or until an operator decides. (Keyless ones that are
    /// poison go to the parking place.)
    Keep(Option<Duration>),
}

impl PoisonPlan {
    fn outcome(self) -> Outcome {
        match self {
            Self::Park | Self::Hold(_) => Outcome::Parked,
            Self::Discard => Outcome::Discarded,
            Self::Keep(_) => Outcome::Kept,
        }
    }
}

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

/// A session that drains.
#[derive(Debug, Clone, Copy, Default)]
struct Draining {
    /// It was told that nothing of it runs or parks.
    told: bool,
    /// It has ended.
    ended: bool,
}

struct Track<D> {
    key: Option<OrderingKey>,
    stamp: u64,
    state: State<D>,
    waiting: VecDeque<D>,
}

enum State<D> {
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

struct Parking<D> {
    head: D,
    attempts: u32,
    reason: PoisonReason,
    plan: PoisonPlan,
    /// Its session has ended.
    orphan: bool,
    /// It could not be parked, because its session has ended; the end itself has not been reported here yet.
    refused: bool,
    /// It is parked, and its session ended before the acknowledgement was known to be processed; the
    /// end itself has not been reported here yet.
    lost: bool,
    /// The gap has been reported.
    reported: bool,
}

struct Memory {
    identity: Identity,
    attempts: u32,
    next: Next,
}

/// What a copy of a remembered head has to do.
#[derive(Clone, Copy)]
enum Next {
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
fn count<D: Item>(delivery: &D, known: u32) -> u32 {
    delivery.source_attempts().unwrap_or(known)
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

    fn granted(&mut self, ticket: Ticket, effects: &mut Vec<Effect<D>>) {
        let (paused, stamp) = (self.paused, self.stamp());
        if let Some(track) = self.current(ticket)
            && let State::Ready { head, attempts } = &track.state
            && !paused
        {
            let (head, attempts) = (head.clone(), attempts + 1);
            track.stamp = stamp;
            track.state = State::Running {
                head: head.clone(),
                attempts,
                orphan: false,
                stuck: false,
            };
            effects.push(Effect::Start {
                ticket: Ticket {
                    slot: ticket.slot,
                    stamp,
                },
                delivery: head,
                attempt: attempts,
            });
        } else {
            effects.push(Effect::ReturnPermit);
        }
    }

    fn finished(&mut self, ticket: Ticket, result: RunResult, effects: &mut Vec<Effect<D>>) {
        let slot = ticket.slot;
        let (head, attempts, orphan, stuck) = match self.current(ticket).map(|track| &track.state) {
            Some(State::Running {
                head,
                attempts,
                orphan,
                stuck,
            }) => (head.clone(), *attempts, *orphan, *stuck),
            _ => return,
        };
        if stuck {
            effects.push(Effect::Unstuck(head.clone()));
        }
        let session = head.session();
        match result {
            RunResult::Handled if orphan => {
                effects.push(Effect::Orphaned {
                    delivery: head.clone(),
                    outcome: Outcome::Handled,
                });
                self.remember(slot, &head, attempts, Next::Finish, effects);
            }
            RunResult::Handled => {
                self.depth -= 1;
                effects.push(Effect::Settle {
                    delivery: head,
                    outcome: Outcome::Handled,
                });
                self.advance(slot, effects);
            }
            RunResult::Aborted => self.not_counted(slot, head, attempts - 1, orphan, effects),
            RunResult::Failed { kind, plan, chance } => {
                let verdict = self.policy.verdict(attempts, kind, plan, chance);
                let retry_in = match verdict {
                    Verdict::RetryAfter(pause) | Verdict::PauseEndpoint(pause) => Some(pause),
                    Verdict::Poison(_) | Verdict::Discard(_) => None,
                };
                effects.push(Effect::AttemptFailed {
                    delivery: head.clone(),
                    attempt: attempts,
                    kind,
                    retry_in,
                });
                if let Verdict::PauseEndpoint(pause) = verdict {
                    effects.push(Effect::PauseEndpoint(pause));
                }
                match verdict {
                    Verdict::RetryAfter(pause) if self.policy.keeps(pause) && !orphan => {
                        let plan = PoisonPlan::Keep(Some(pause));
                        self.park(slot, head, PoisonReason::Failed, plan, attempts, effects);
                    }
                    Verdict::RetryAfter(pause) | Verdict::PauseEndpoint(pause) => {
                        let draining = !orphan && self.draining.contains_key(&session);
                        self.depth -= usize::from(draining);
                        self.back_off(slot, head, attempts, orphan || draining, pause, effects);
                    }
                    Verdict::Poison(reason) | Verdict::Discard(reason) => {
                        let plan = match verdict {
                            Verdict::Discard(_) => PoisonPlan::Discard,
                            _ => self.plan,
                        };
                        if orphan {
                            // It cannot be settled, so it is not parked now: the copy is, when it comes.
                            let next = Next::End(reason, plan);
                            self.remember(slot, &head, attempts, next, effects);
                        } else {
                            self.park(slot, head, reason, plan, attempts, effects);
                        }
                    }
                }
            }
        }
        self.report_quiet(effects);
    }

    /// A run that does not count: the head goes on where it was before it.
    fn not_counted(
        &mut self,
        slot: usize,
        head: D,
        attempts: u32,
        orphan: bool,
        effects: &mut Vec<Effect<D>>,
    ) {
        let draining = !orphan && self.draining.contains_key(&head.session());
        self.depth -= usize::from(draining);
        if orphan || draining {
            self.remember(slot, &head, attempts, Next::Run, effects);
        } else {
            self.ready(slot, head, attempts, effects);
        }
    }

    fn still_running(&mut self, ticket: Ticket, effects: &mut Vec<Effect<D>>) {
        if let Some(track) = self.current(ticket)
            && let State::Running { head, stuck, .. } = &mut track.state
            && !*stuck
        {
            *stuck = true;
            effects.push(Effect::Stuck(head.clone()));
            // A drain reports a stuck run, it does not wait for it.
            self.report_quiet(effects);
        }
    }

    fn backoff_elapsed(&mut self, ticket: Ticket, effects: &mut Vec<Effect<D>>) {
        let slot = ticket.slot;
        let Some(track) = self.current(ticket) else {
            return;
        };
        if let State::BackingOff {
            head,
            identity,
            attempts,
        } = &track.state
        {
            let attempts = *attempts;
            match head.clone() {
                Some(head) => self.ready(slot, head, attempts, effects),
                None => {
                    let identity = identity.clone();
                    self.store_memory(slot, identity, attempts, Next::Run);
                }
            }
        }
    }

    fn hold_ended(&mut self, ticket: Ticket, end: HoldEnd, effects: &mut Vec<Effect<D>>) {
        let slot = ticket.slot;
        let Some(State::Held {
            head,
            identity,
            attempts,
            reason,
        }) = self.current(ticket).map(|track| &track.state)
        else {
            return;
        };
        let (head, identity) = (head.clone(), identity.clone());
        let (attempts, reason) = (*attempts, *reason);
        let plan = match end {
            HoldEnd::Release => PoisonPlan::Park,
            HoldEnd::Skip => PoisonPlan::Discard,
            HoldEnd::Retry => {
                match head {
                    Some(head) => self.ready(slot, head, 0, effects),
                    None => self.remove(slot),
                }
                return;
            }
        };
        match head {
            Some(head) => self.park(slot, head, reason, plan, attempts, effects),
            None => self.store_memory(slot, identity, attempts, Next::End(reason, plan)),
        }
    }

    fn parked(&mut self, ticket: Ticket, settled: bool, effects: &mut Vec<Effect<D>>) {
        let slot = ticket.slot;
        let Some(track) = self.current(ticket) else {
            return;
        };
        let State::Parking(parking) = &mut track.state else {
            return;
        };
        let outcome = parking.plan.outcome();
        if !parking.reported && outcome != Outcome::Kept {
            parking.reported = true;
            effects.push(Effect::Gap {
                delivery: parking.head.clone(),
                reason: parking.reason,
                outcome,
                attempts: parking.attempts,
            });
        }
        if settled {
            let orphan = parking.orphan;
            self.depth -= usize::from(!orphan);
            self.advance(slot, effects);
        } else if parking.orphan {
            self.await_copy(slot, effects);
        } else {
            // The end of the session is about to be reported here. Until then what waits behind the head
            // belongs to the ended session, and must not be taken for the copy.
            parking.lost = true;
        }
        self.report_quiet(effects);
    }

    /// Only a source that parks in one step with settling says this: either nothing of it is anywhere, or the step took
    /// place and its answer was lost with the session. Then no copy comes, unless an operator lets it try again.
    fn parking_ended(&mut self, ticket: Ticket, effects: &mut Vec<Effect<D>>) {
        let slot = ticket.slot;
        if let Some(track) = self.current(ticket)
            && let State::Parking(parking) = &mut track.state
        {
            parking.refused = true;
            if parking.orphan {
                self.await_copy(slot, effects);
            }
        }
        self.report_quiet(effects);
    }

    fn session_ended(&mut self, session: SessionId, effects: &mut Vec<Effect<D>>) {
        if let Some(draining) = self.draining.get_mut(&session) {
            draining.ended = true;
        }
        self.forget_waiting(session);
        for slot in self.slots() {
            self.give_back(slot, session, effects);
            let Some(track) = self.tracks.get_mut(slot) else {
                continue;
            };
            let stamp = track.stamp;
            match &mut track.state {
                State::Running { head, orphan, .. } if head.session() == session && !*orphan => {
                    *orphan = true;
                    self.depth -= 1;
                    effects.push(Effect::Cancel(Ticket { slot, stamp }));
                }
                State::Parking(parking) if parking.head.session() == session && !parking.orphan => {
                    parking.orphan = true;
                    self.depth -= 1;
                    if parking.lost || parking.refused {
                        self.await_copy(slot, effects);
                    }
                }
                _ => {}
            }
        }
        self.report_quiet(effects);
    }

    /// Nothing of the session starts any more. What has not started will be given back: as far as it is
    /// concerned the session has ended; what runs or is being parked can still be settled.
    fn drain(&mut self, session: SessionId, effects: &mut Vec<Effect<D>>) {
        self.draining.entry(session).or_default();
        self.forget_waiting(session);
        for slot in self.slots() {
            self.give_back(slot, session, effects);
        }
        self.report_quiet(effects);
    }

    /// A head of the session that waits is no longer here.
    fn give_back(&mut self, slot: usize, session: SessionId, effects: &mut Vec<Effect<D>>) {
        // Gone if what an earlier slot left to remember took its place.
        let Some(track) = self.tracks.get_mut(slot) else {
            return;
        };
        let keyless = track.key.is_none();
        match &mut track.state {
            State::Ready { head, attempts } if head.session() == session => {
                let (head, attempts) = (head.clone(), *attempts);
                self.depth -= 1;
                self.remember(slot, &head, attempts, Next::Run, effects);
            }
            State::BackingOff { head, attempts, .. }
                if head.as_ref().is_some_and(|head| head.session() == session) =>
            {
                self.depth -= 1;
                let attempts = *attempts;
                match head.take() {
                    // No copy will ever come to this track: the count goes with the message.
                    Some(head) if keyless => {
                        self.remember(slot, &head, attempts, Next::Run, effects);
                    }
                    _ => self.rejoin_backoff(slot, effects),
                }
            }
            State::Held { head, .. }
                if head.as_ref().is_some_and(|head| head.session() == session) =>
            {
                self.depth -= 1;
                *head = None;
                self.rejoin_hold(slot, effects);
            }
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

    /// `gone`: the head's session has ended, or is about to give it back.
    fn back_off(
        &mut self,
        slot: usize,
        head: D,
        attempts: u32,
        gone: bool,
        pause: Duration,
        effects: &mut Vec<Effect<D>>,
    ) {
        if gone && self.tracks[slot].key.is_none() {
            self.remember(slot, &head, attempts, Next::Run, effects);
            return;
        }
        let stamp = self.stamp();
        let track = &mut self.tracks[slot];
        track.stamp = stamp;
        track.state = State::BackingOff {
            identity: head.identity().clone(),
            head: (!gone).then_some(head),
            attempts,
        };
        effects.push(Effect::ArmTimer {
            ticket: Ticket { slot, stamp },
            after: pause,
        });
        if gone {
            self.rejoin_backoff(slot, effects);
        }
    }

    /// A key backs off without a head: the first message that waits, if one does, is the copy, or
    /// another one.
    fn rejoin_backoff(&mut self, slot: usize, effects: &mut Vec<Effect<D>>) {
        let track = &mut self.tracks[slot];
        let State::BackingOff {
            head,
            identity,
            attempts,
        } = &mut track.state
        else {
            return;
        };
        let Some(first) = track.waiting.pop_front() else {
            return;
        };
        if first.is_redelivered() && identity.looks_like(first.identity()) {
            *attempts = count(&first, *attempts);
            *head = Some(first);
        } else {
            let attempts = count(&first, 0);
            self.ready(slot, first, attempts, effects);
        }
    }

    /// A key is held without a head: the first message that waits, if one does, is the copy, or another
    /// one.
    fn rejoin_hold(&mut self, slot: usize, effects: &mut Vec<Effect<D>>) {
        let track = &mut self.tracks[slot];
        let State::Held {
            head,
            identity,
            attempts,
            ..
        } = &mut track.state
        else {
            return;
        };
        let Some(first) = track.waiting.pop_front() else {
            return;
        };
        // As for a remembered head: to withhold a run takes certainty, to carry a count over likeness.
        if first.is_redelivered() && identity.same_message(first.identity()) {
            *head = Some(first);
            return;
        }
        let alike = first.is_redelivered() && identity.looks_like(first.identity());
        let attempts = count(&first, if alike { *attempts } else { 0 });
        self.ready(slot, first, attempts, effects);
    }

    fn hold(
        &mut self,
        slot: usize,
        head: D,
        reason: PoisonReason,
        attempts: u32,
        at_most: Duration,
        effects: &mut Vec<Effect<D>>,
    ) {
        let stamp = self.stamp();
        let draining = self.draining.contains_key(&head.session());
        // What drains is given back: the hold goes on with the copy.
        self.depth -= usize::from(draining);
        let track = &mut self.tracks[slot];
        track.stamp = stamp;
        track.state = State::Held {
            identity: head.identity().clone(),
            head: (!draining).then(|| head.clone()),
            attempts,
            reason,
        };
        effects.push(Effect::Hold {
            ticket: Ticket { slot, stamp },
            delivery: head,
            reason,
            attempts,
            at_most,
        });
        if draining {
            self.rejoin_hold(slot, effects);
        }
    }

    fn park(
        &mut self,
        slot: usize,
        head: D,
        reason: PoisonReason,
        plan: PoisonPlan,
        attempts: u32,
        effects: &mut Vec<Effect<D>>,
    ) {
        let keyless = self.tracks[slot].key.is_none();
        let plan = match plan {
            PoisonPlan::Hold(at_most) if !keyless => {
                self.hold(slot, head, reason, attempts, at_most, effects);
                return;
            }
            PoisonPlan::Keep(None) if keyless => PoisonPlan::Park,
            plan => plan,
        };
        let ticket = self.set_parking(slot, head.clone(), reason, plan, attempts, false);
        let place = match plan {
            PoisonPlan::Keep(until) => Place::Kept(until),
            _ => Place::Parking,
        };
        effects.push(match plan {
            PoisonPlan::Park | PoisonPlan::Hold(_) | PoisonPlan::Keep(_) => Effect::Park {
                ticket,
                delivery: head,
                reason,
                attempts,
                place,
            },
            // A discarded head needs the barrier as much as a parked one: coming back after its
            // successor it would be out of order.
            PoisonPlan::Discard => Effect::SettleWithBarrier {
                ticket,
                delivery: head,
                outcome: plan.outcome(),
            },
        });
    }

    fn set_parking(
        &mut self,
        slot: usize,
        head: D,
        reason: PoisonReason,
        plan: PoisonPlan,
        attempts: u32,
        reported: bool,
    ) -> Ticket {
        let stamp = self.stamp();
        let track = &mut self.tracks[slot];
        track.stamp = stamp;
        track.state = State::Parking(Parking {
            head,
            attempts,
            reason,
            plan,
            orphan: false,
            refused: false,
            lost: false,
            reported,
        });
        Ticket { slot, stamp }
    }

    /// The head's session is gone. If it is parked, its copy will have to be settled; if it could not be, the copy is
    /// to be parked; if its source has kept it, the copy comes when its time has come.
    fn await_copy(&mut self, slot: usize, effects: &mut Vec<Effect<D>>) {
        if let State::Parking(parking) = &self.tracks[slot].state {
            let (head, attempts) = (parking.head.clone(), parking.attempts);
            let (reason, plan, outcome) = (parking.reason, parking.plan, parking.plan.outcome());
            if parking.refused || outcome == Outcome::Kept {
                let next = match plan {
                    PoisonPlan::Keep(Some(_)) => Next::Run,
                    PoisonPlan::Keep(None) if !parking.refused => Next::Run,
                    plan => Next::End(reason, plan),
                };
                self.remember(slot, &head, attempts, next, effects);
                return;
            }
            let next = Next::Settle(reason, plan);
            if self.tracks[slot].key.is_none() {
                effects.push(Effect::Orphaned {
                    delivery: head.clone(),
                    outcome,
                });
            }
            self.remember(slot, &head, attempts, next, effects);
        }
    }

    // ---- memory of heads whose session has ended

    /// The head can no longer be settled: keep what a copy of it needs. A copy that is here already
    /// takes it at once.
    fn remember(
        &mut self,
        slot: usize,
        head: &D,
        attempts: u32,
        next: Next,
        effects: &mut Vec<Effect<D>>,
    ) {
        let worth_it = attempts > 0 || !matches!(next, Next::Run);
        if self.tracks[slot].key.is_none() {
            // Its copy comes as an independent message, perhaps to another lane.
            if attempts > 0 && matches!(next, Next::Run | Next::End(..)) {
                effects.push(Effect::Forgotten {
                    delivery: head.clone(),
                    attempts,
                });
            }
            self.remove(slot);
        } else if worth_it {
            self.store_memory(slot, head.identity().clone(), attempts, next);
            self.next_of_key(slot, effects);
        } else {
            self.advance(slot, effects);
        }
    }

    fn store_memory(&mut self, slot: usize, identity: Identity, attempts: u32, next: Next) {
        let stamp = self.stamp();
        let track = &mut self.tracks[slot];
        track.stamp = stamp;
        track.state = State::Remembered(Memory {
            identity,
            attempts,
            next,
        });
        self.remembered.insert(stamp, slot);
        // At least one, so that what was just stored is there for whoever reads it next.
        if self.remembered.len() > self.remember_at_most.max(1)
            && let Some((_, oldest)) = self.remembered.pop_first()
        {
            self.remove(oldest);
        }
    }

    /// A track that only remembers takes the first message that waits, if one does.
    fn next_of_key(&mut self, slot: usize, effects: &mut Vec<Effect<D>>) {
        let track = &mut self.tracks[slot];
        let State::Remembered(memory) = &track.state else {
            return;
        };
        let Some(first) = track.waiting.pop_front() else {
            return;
        };
        self.remembered.remove(&track.stamp);
        let copy = first.is_redelivered();
        // To skip the run takes certainty; to carry a count over, likeness is enough.
        let same = copy && memory.identity.same_message(first.identity());
        let alike = copy && memory.identity.looks_like(first.identity());
        let attempts = memory.attempts;
        // Its source has counted less than was made here: an operator has let it try again, after it had been kept or
        // parked without an answer (the session had ended). What was decided before that does not bind it.
        let anew = first.source_attempts().is_some_and(|made| made < attempts);
        match memory.next {
            Next::Finish if same => {
                self.depth -= 1;
                effects.push(Effect::Settle {
                    delivery: first,
                    outcome: Outcome::Handled,
                });
                self.advance(slot, effects);
            }
            Next::End(reason, plan) if same && !anew => {
                self.park(slot, first, reason, plan, attempts, effects)
            }
            Next::Settle(reason, plan) if same && !anew => {
                let ticket = self.set_parking(slot, first.clone(), reason, plan, attempts, true);
                effects.push(Effect::SettleWithBarrier {
                    ticket,
                    delivery: first,
                    outcome: plan.outcome(),
                });
            }
            Next::Run | Next::End(..) if alike => {
                let attempts = count(&first, attempts);
                self.ready(slot, first, attempts, effects);
            }
            _ => {
                let attempts = count(&first, 0);
                self.ready(slot, first, attempts, effects);
            }
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

    /// Drops what waits behind the heads and belongs to the session.
    fn forget_waiting(&mut self, session: SessionId) {
        for (_, track) in &mut self.tracks {
            let before = track.waiting.len();
            track
                .waiting
                .retain(|delivery| delivery.session() != session);
            self.depth -= before - track.waiting.len();
        }
    }

    fn remove(&mut self, slot: usize) {
        let track = self.tracks.remove(slot);
        if let Some(key) = track.key {
            self.by_key.remove(&key);
        }
    }

    /// Tells of each draining session, once, that nothing is left of it.
    fn report_quiet(&mut self, effects: &mut Vec<Effect<D>>) {
        let tracks = &self.tracks;
        self.draining.retain(|&session, draining| {
            // An orphan that runs counts too: whoever takes over must not start meanwhile. One that is being
            // parked does not: nobody can settle it any more, its copy is given back in any case, and a parking
            // place that fails would keep every other session of the endpoint open.
            let busy = || {
                tracks.iter().any(|(_, track)| match &track.state {
                    State::Running {
                        head,
                        orphan,
                        stuck,
                        ..
                    } => !stuck && (*orphan || head.session() == session),
                    State::Parking(parking) => !parking.orphan && parking.head.session() == session,
                    _ => false,
                })
            };
            if !draining.told && !busy() {
                draining.told = true;
                effects.push(Effect::Quiet(session));
            }
            !(draining.told && draining.ended)
        });
    }
}

#[cfg(test)]
mod tests;
