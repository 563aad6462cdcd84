//! The end of a session, and its drain.
//!
//! Promises that nothing of an ended or draining session starts; that what has not started is forgotten, since the
//! source gives it again; and that of each draining session is told once, and not too early, that nothing of it runs or
//! is being parked. What a key keeps all the same is in [`memory`](super::memory).

use super::track::{Next, State};
use super::{Effect, Item, Machine, Ticket};
use crate::session::SessionId;

/// A session that drains.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Draining {
    /// It was told that nothing of it runs or parks.
    told: bool,
    /// It has ended.
    ended: bool,
}

impl<D: Item> Machine<D> {
    pub(super) fn session_ended(&mut self, session: SessionId, effects: &mut Vec<Effect<D>>) {
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
    pub(super) fn drain(&mut self, session: SessionId, effects: &mut Vec<Effect<D>>) {
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

    /// Tells of each draining session, once, that nothing is left of it.
    pub(super) fn report_quiet(&mut self, effects: &mut Vec<Effect<D>>) {
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
