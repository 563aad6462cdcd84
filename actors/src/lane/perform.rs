//! What the machine asks for, carried out.
//!
//! One arm for each [`Effect`]: whom it goes to, and what is shown of it. Decides nothing. What has to be waited for (a
//! permit, a timer, the poison handler) answers later, in a message; only a permit that is free is answered at once.

use std::sync::Arc;
use std::time::Instant;

use super::Lane;
use super::machine::{Effect, Event};
use crate::envelope::Delivery;
use crate::key::Fingerprint;
use crate::observe::EventKind;
use crate::outcome::Outcome;
use crate::permits::Permit;
use crate::poison::ParkingJob;
use crate::port::{DeadLetter, Place};
use crate::supervisor::{FromLane, Settled};

impl Lane {
    /// Feeds one event and performs everything that follows from it.
    pub(super) fn feed(&mut self, event: Event<Arc<Delivery>>, permit: Option<Permit>) {
        self.machine.handle(event, &mut self.effects);
        self.perform_all(permit);
    }

    /// Performs what the machine asks for. Performing can feed further events; what follows from them
    /// comes last.
    pub(super) fn perform_all(&mut self, mut permit: Option<Permit>) {
        let mut at = 0;
        while at < self.effects.len() {
            let effect = std::mem::replace(&mut self.effects[at], Effect::ReturnPermit);
            at += 1;
            self.perform(effect, &mut permit);
        }
        self.effects.clear();
    }

    fn perform(&mut self, effect: Effect<Arc<Delivery>>, permit: &mut Option<Permit>) {
        match effect {
            Effect::AskPermit(ticket) => {
                if let Some(granted) = self.endpoint.permits.take_or_wait(&self.link, ticket) {
                    // The grant is answered before the next request is made, so that there is one permit
                    // in hand at most.
                    let mut answer = std::mem::take(&mut self.scratch);
                    self.machine.handle(Event::Granted(ticket), &mut answer);
                    let mut granted = Some(granted);
                    for effect in answer.drain(..) {
                        self.perform(effect, &mut granted);
                    }
                    self.scratch = answer;
                }
            }
            Effect::ReturnPermit => drop(permit.take()),
            Effect::Start {
                ticket,
                delivery,
                attempt,
            } => {
                if let Some(permit) = permit.take() {
                    self.start(ticket, delivery, attempt, permit);
                }
            }
            Effect::Cancel(ticket) => {
                self.cancel(ticket);
            }
            Effect::ArmTimer { ticket, after } => {
                let now = Instant::now();
                self.since.insert(ticket, now);
                // A pause too long for the clock never ends, which is what was asked for.
                if let Some(at) = now.checked_add(after) {
                    self.timers.insert((at, ticket), ());
                }
            }
            Effect::AttemptFailed {
                delivery,
                attempt,
                kind,
                retry_in,
            } => {
                let key = self.fingerprint(&delivery);
                let message = delivery.envelope().id.clone();
                tracing::warn!(
                    endpoint = %self.endpoint.config.name,
                    queue = %self.endpoint.queue_of(&delivery),
                    key = key.map(tracing::field::display),
                    message = message.as_ref().map(tracing::field::display),
                    attempt,
                    failure = ?kind,
                    ?retry_in,
                    "attempt failed"
                );
                self.endpoint.emit(EventKind::AttemptFailed {
                    key,
                    message,
                    attempt,
                    failure: kind,
                    retry_in,
                });
            }
            Effect::Settle { delivery, outcome } => self.settle(delivery, outcome, false),
            Effect::Orphaned { delivery, outcome } => self.settle(delivery, outcome, true),
            Effect::Forgotten { delivery, attempts } => {
                let identity = delivery.identity().clone();
                self.supervisor
                    .do_send(FromLane::Forgotten(identity, attempts));
            }
            Effect::Park {
                ticket,
                delivery,
                reason,
                attempts,
                place,
            } => {
                self.since.insert(ticket, Instant::now());
                let detail = self.take_detail(delivery.identity());
                if place == Place::Kept(None) {
                    self.tell_held(&delivery, reason, attempts, None);
                }
                let letter = DeadLetter {
                    endpoint: Arc::clone(&self.endpoint.config.name),
                    queue: Arc::clone(self.endpoint.queue_of(&delivery)),
                    key: self.endpoint.fingerprint(delivery.key()),
                    reason,
                    place,
                    detail: self.endpoint.redact(&detail, delivery.key()),
                    attempts,
                    given_up_at: std::time::SystemTime::now(),
                    delivery,
                };
                self.poison.do_send(ParkingJob {
                    lane: Arc::clone(&self.link),
                    ticket,
                    delivery: Arc::clone(&letter.delivery),
                    outcome: match place {
                        Place::Parking => Outcome::Parked,
                        Place::Kept(_) => Outcome::Kept,
                    },
                    letter: Some(Arc::new(letter)),
                });
            }
            Effect::Hold {
                ticket,
                delivery,
                reason,
                attempts,
                at_most,
            } => self.hold(ticket, &delivery, reason, attempts, at_most),
            Effect::SettleWithBarrier {
                ticket,
                delivery,
                outcome,
            } => {
                self.since.insert(ticket, Instant::now());
                self.poison.do_send(ParkingJob {
                    lane: Arc::clone(&self.link),
                    ticket,
                    delivery,
                    outcome,
                    letter: None,
                });
            }
            Effect::PauseEndpoint(pause) => {
                self.supervisor.do_send(FromLane::PauseEndpoint(pause));
            }
            Effect::Gap {
                delivery,
                reason,
                outcome,
                attempts,
            } => self
                .endpoint
                .report_gap(&delivery, reason, outcome, attempts),
            Effect::Stuck(delivery) => {
                let key = self.fingerprint(&delivery);
                let message = delivery.envelope().id.clone();
                tracing::error!(
                    endpoint = %self.endpoint.config.name,
                    queue = %self.endpoint.queue_of(&delivery),
                    key = key.map(tracing::field::display),
                    message = message.as_ref().map(tracing::field::display),
                    "handler blocks its thread and cannot be aborted: its key waits for it"
                );
                self.endpoint.emit(EventKind::Stuck { key, message });
            }
            Effect::Unstuck(delivery) => {
                let key = self.fingerprint(&delivery);
                self.endpoint.emit(EventKind::Unstuck { key });
            }
            Effect::Quiet(session) => {
                if let Some(name) = self.draining.remove(&session)
                    && !self.draining.values().any(|other| *other == name)
                {
                    // What ended in this very step must be acknowledged before the session is closed.
                    self.tell_settled();
                    let quiet = FromLane::Quiet(self.link.index(), name);
                    self.supervisor.do_send(quiet);
                }
            }
        }
    }

    fn settle(&mut self, delivery: Arc<Delivery>, outcome: Outcome, orphan: bool) {
        match outcome {
            Outcome::Handled if !orphan => self.endpoint.counters.handled.add(1),
            _ => {}
        }
        if delivery.is_direct() {
            if let Some(settle) = delivery.take_direct()
                && !orphan
            {
                settle(outcome);
            }
        } else {
            self.settled.push(Settled {
                delivery,
                outcome,
                orphan,
            });
        }
    }

    pub(super) fn tell_settled(&mut self) {
        if !self.settled.is_empty() {
            self.outbox.put(&mut self.settled, &self.supervisor);
        }
    }

    pub(super) fn fingerprint(&self, delivery: &Delivery) -> Option<Fingerprint> {
        self.endpoint.fingerprint(delivery.key())
    }
}
