//! What outlives a session: the memory of heads that cannot be settled any more, and their copies.
//!
//! Owns the decision whether the first message of a key in a new session is the copy of its old head, and what the copy
//! has to do then. To withhold a run takes certainty (the same id), to carry a count of attempts over, likeness is
//! enough. Promises to remember a bounded number of keys: the oldest memory goes first.

use super::track::{Memory, Next, State, count};
use super::{Effect, Item, Machine};
use crate::envelope::Identity;
use crate::outcome::Outcome;

impl<D: Item> Machine<D> {
    /// The head can no longer be settled: keep what a copy of it needs. A copy that is here already
    /// takes it at once.
    pub(super) fn remember(
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

    pub(super) fn store_memory(
        &mut self,
        slot: usize,
        identity: Identity,
        attempts: u32,
        next: Next,
    ) {
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
    pub(super) fn next_of_key(&mut self, slot: usize, effects: &mut Vec<Effect<D>>) {
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

    /// A key backs off without a head: the first message that waits, if one does, is the copy, or
    /// another one.
    pub(super) fn rejoin_backoff(&mut self, slot: usize, effects: &mut Vec<Effect<D>>) {
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
    pub(super) fn rejoin_hold(&mut self, slot: usize, effects: &mut Vec<Effect<D>>) {
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
}
