//! A head that is given up: parked, discarded, kept by its source, or held at the head of its key.
//!
//! Promises that its key goes on only when the head is where it belongs *and* the source has processed its
//! acknowledgement; that the gap it leaves, if it leaves one, is reported once; and that a hold outlives its session.

use std::time::Duration;

use super::track::{Next, Parking, State};
use super::{Effect, HoldEnd, Item, Machine, Ticket};
use crate::outcome::{Outcome, PoisonReason};
use crate::port::Place;

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
    pub(super) fn outcome(self) -> Outcome {
        match self {
            Self::Park | Self::Hold(_) => Outcome::Parked,
            Self::Discard => Outcome::Discarded,
            Self::Keep(_) => Outcome::Kept,
        }
    }
}

impl<D: Item> Machine<D> {
    pub(super) fn park(
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

    pub(super) fn set_parking(
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

    pub(super) fn parked(&mut self, ticket: Ticket, settled: bool, effects: &mut Vec<Effect<D>>) {
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
    pub(super) fn parking_ended(&mut self, ticket: Ticket, effects: &mut Vec<Effect<D>>) {
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

    /// The head's session is gone. If it is parked, its copy will have to be settled; if it could not be, the copy is
    /// to be parked; if its source has kept it, the copy comes when its time has come.
    pub(super) fn await_copy(&mut self, slot: usize, effects: &mut Vec<Effect<D>>) {
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

    pub(super) fn hold_ended(
        &mut self,
        ticket: Ticket,
        end: HoldEnd,
        effects: &mut Vec<Effect<D>>,
    ) {
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
}
