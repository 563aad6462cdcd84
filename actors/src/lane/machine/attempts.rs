//! An attempt: from its permit to its end, and the pause before the next one.
//!
//! Promises that a head runs only with a permit, once for each grant, and that its run ends for the machine when its
//! future is gone, and not before. What became of it is decided by the [`Policy`](crate::policy::Policy) alone; this file
//! says which way the head goes then: on to the next message, into a pause, or to where poison goes.

use std::time::Duration;

use super::track::{Next, State};
use super::{Effect, Item, Machine, PoisonPlan, RunResult, Ticket};
use crate::outcome::{Outcome, PoisonReason};
use crate::policy::Verdict;

impl<D: Item> Machine<D> {
    pub(super) fn granted(&mut self, ticket: Ticket, effects: &mut Vec<Effect<D>>) {
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

    pub(super) fn finished(
        &mut self,
        ticket: Ticket,
        result: RunResult,
        effects: &mut Vec<Effect<D>>,
    ) {
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

    pub(super) fn still_running(&mut self, ticket: Ticket, effects: &mut Vec<Effect<D>>) {
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

    pub(super) fn backoff_elapsed(&mut self, ticket: Ticket, effects: &mut Vec<Effect<D>>) {
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
}
