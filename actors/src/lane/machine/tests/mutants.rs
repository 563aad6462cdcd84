//! Machines that are broken on purpose, one promise each.
//!
//! A mutant disturbs the machine from outside, before or after it takes in an event, so that the
//! machine's own code holds no test switch.

use super::world::*;
use super::*;

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mutant {
    SuccessorStartsWhileThePredecessorRuns,
    LastInFirstOut,
    SessionEndForgetsTheRunningHead,
    CopyOfAParkedHeadRuns,
    CopyOfAParkedHeadIsParkedAgain,
    CopyOfAnOrphanThatWasHandledRuns,
    CopyOfADiscardedOrphanIsParked,
    HeldKeyGoesOn,
    SessionEndForgetsTheHold,
    OperatorsRetryGoesOnCounting,
    ReleasedBeforeItIsSettled,
    AbortIsCounted,
    SessionEndLosesTheAttempts,
    OldTimerIsAccepted,
    DrainLetsWhatWaitsStart,
    EndedSessionStarts,
    StaleGrantIsSwallowed,
    BackoffBlocksTheLane,
    GapIsNotReported,
    GapIsReportedTwice,
    OrphanIsSettled,
    PauseIsIgnored,
    ResumeForgetsWhatWaits,
    AnotherFirstMessageInheritsTheAttempts,
    LikenessIsEnoughToSkipTheRun,
    QuietWhileParking,
    QuietIsNotTold,
    OneAttemptTooMany,
    RetryDoesNotWait,
    MemoryHasNoLimit,
    KeylessAttemptsAreNotHandedOn,
    NobodyIsCancelled,
}

/// Every mutant, and the check that finds it.
pub(super) const ALL: &[(Mutant, &str)] = &[
    (Mutant::SuccessorStartsWhileThePredecessorRuns, ONE_RUN),
    (Mutant::LastInFirstOut, IN_ORDER),
    (Mutant::SessionEndForgetsTheRunningHead, ONE_RUN),
    (Mutant::CopyOfAParkedHeadRuns, NOT_AGAIN),
    (Mutant::CopyOfAParkedHeadIsParkedAgain, PARK),
    (Mutant::CopyOfAnOrphanThatWasHandledRuns, NOT_AGAIN),
    (Mutant::CopyOfADiscardedOrphanIsParked, PARK),
    (Mutant::HeldKeyGoesOn, HOLD),
    (Mutant::SessionEndForgetsTheHold, HOLD),
    (Mutant::OperatorsRetryGoesOnCounting, COUNT),
    (Mutant::ReleasedBeforeItIsSettled, BARRIER),
    (Mutant::AbortIsCounted, COUNT),
    (Mutant::SessionEndLosesTheAttempts, COUNT),
    (Mutant::OldTimerIsAccepted, TIMER),
    (Mutant::DrainLetsWhatWaitsStart, DRAINING),
    (Mutant::EndedSessionStarts, ENDED),
    (Mutant::StaleGrantIsSwallowed, PERMITS),
    (Mutant::BackoffBlocksTheLane, EVERY_READY_KEY_ASKS),
    (Mutant::GapIsNotReported, GAP),
    (Mutant::GapIsReportedTwice, GAP),
    (Mutant::OrphanIsSettled, SETTLE),
    (Mutant::PauseIsIgnored, PAUSED),
    (Mutant::ResumeForgetsWhatWaits, EVERY_READY_KEY_ASKS),
    (Mutant::AnotherFirstMessageInheritsTheAttempts, COUNT),
    (Mutant::LikenessIsEnoughToSkipTheRun, SETTLE),
    (Mutant::QuietWhileParking, QUIET),
    (Mutant::QuietIsNotTold, QUIET),
    (Mutant::OneAttemptTooMany, TIMER),
    (Mutant::RetryDoesNotWait, TIMER),
    (Mutant::MemoryHasNoLimit, LEAK),
    (Mutant::KeylessAttemptsAreNotHandedOn, FORGOTTEN),
    (Mutant::NobodyIsCancelled, CANCEL),
];

/// The machine under test, broken or not.
pub(super) struct Subject {
    machine: Machine<Msg>,
    mutant: Option<Mutant>,
}

impl Subject {
    pub(super) fn new(mut machine: Machine<Msg>, mutant: Option<Mutant>) -> Self {
        match mutant {
            Some(Mutant::OneAttemptTooMany) => {
                let limit = machine.policy.max_attempts;
                machine.policy.max_attempts = limit.saturating_add(1);
            }
            Some(Mutant::MemoryHasNoLimit) => machine.remember_at_most = usize::MAX,
            _ => {}
        }
        Self { machine, mutant }
    }

    pub(super) fn machine(&self) -> &Machine<Msg> {
        &self.machine
    }

    pub(super) fn handle(&mut self, event: Event<Msg>, effects: &mut Vec<Effect<Msg>>) {
        match self.mutant {
            None => self.machine.handle(event, effects),
            Some(mutant) => self.machine.handle_wrongly(mutant, event, effects),
        }
    }
}

impl Machine<Msg> {
    /// `handle`, and what the mutant does otherwise.
    fn handle_wrongly(
        &mut self,
        mutant: Mutant,
        event: Event<Msg>,
        effects: &mut Vec<Effect<Msg>>,
    ) {
        match (mutant, &event) {
            (Mutant::SuccessorStartsWhileThePredecessorRuns, Event::Offered(delivery)) => {
                self.forget_keys_that_run(|head| head.key == delivery.key);
                self.handle(event, effects);
            }
            (Mutant::SessionEndForgetsTheRunningHead, Event::SessionEnded(session)) => {
                let ended = *session;
                self.handle(event, effects);
                self.forget_keys_that_run(|head| head.session == ended);
            }
            (Mutant::LastInFirstOut, Event::Offered(delivery)) => {
                let key = delivery.key.clone();
                self.handle(event, effects);
                if let Some(track) = self.track_of(key.as_ref()) {
                    let by = usize::from(track.waiting.len() > 1);
                    track.waiting.rotate_right(by);
                }
            }
            (Mutant::CopyOfAParkedHeadRuns, _) => {
                self.handle(event, effects);
                for memory in self.memories() {
                    if let Next::Settle(..) = memory.next {
                        (memory.next, memory.attempts) = (Next::Run, 0);
                    }
                }
            }
            (Mutant::CopyOfADiscardedOrphanIsParked, _) => {
                self.handle(event, effects);
                for memory in self.memories() {
                    if let Next::End(_, plan) = &mut memory.next {
                        *plan = PoisonPlan::Park;
                    }
                }
            }
            (Mutant::HeldKeyGoesOn, _) => {
                self.handle(event, effects);
                for slot in self.slots() {
                    if let State::Held { head: Some(_), .. } = self.tracks[slot].state
                        && !self.tracks[slot].waiting.is_empty()
                    {
                        self.advance(slot, effects);
                    }
                }
            }
            (Mutant::SessionEndForgetsTheHold, Event::SessionEnded(_)) => {
                self.handle(event, effects);
                for slot in self.slots() {
                    if let State::Held { head: None, .. } = self.tracks[slot].state {
                        self.remove(slot);
                    }
                }
            }
            (Mutant::OperatorsRetryGoesOnCounting, Event::HoldEnded(ticket, HoldEnd::Retry)) => {
                let ticket = *ticket;
                let made = match self.current(ticket).map(|track| &track.state) {
                    Some(State::Held { attempts, .. }) => *attempts,
                    _ => 0,
                };
                self.handle(event, effects);
                if let Some(track) = self.tracks.get_mut(ticket.slot)
                    && let State::Ready { attempts, .. } = &mut track.state
                {
                    *attempts = made;
                }
            }
            (Mutant::CopyOfAParkedHeadIsParkedAgain, _) => {
                self.handle(event, effects);
                for memory in self.memories() {
                    if let Next::Settle(reason, _) = memory.next {
                        let next = Next::End(reason, PoisonPlan::Park);
                        (memory.next, memory.attempts) = (next, 0);
                    }
                }
            }
            (Mutant::CopyOfAnOrphanThatWasHandledRuns, _) => {
                self.handle(event, effects);
                for memory in self.memories() {
                    if let Next::Finish = memory.next {
                        (memory.next, memory.attempts) = (Next::Run, 0);
                    }
                }
            }
            (
                Mutant::ReleasedBeforeItIsSettled,
                &Event::Parked {
                    ticket,
                    settled: false,
                },
            ) => {
                let depth = self.depth;
                let settled = true;
                self.handle(Event::Parked { ticket, settled }, effects);
                self.depth = depth;
            }
            (
                Mutant::AbortIsCounted,
                &Event::Finished {
                    ticket,
                    result: RunResult::Aborted,
                },
            ) => {
                self.handle(event, effects);
                if let Some(track) = self.tracks.get_mut(ticket.slot)
                    && let State::Ready { attempts, .. } = &mut track.state
                {
                    *attempts += 1;
                }
            }
            (Mutant::SessionEndLosesTheAttempts, Event::SessionEnded(_)) => {
                self.handle(event, effects);
                self.memories().for_each(|memory| memory.attempts = 0);
            }
            (Mutant::AnotherFirstMessageInheritsTheAttempts, Event::Offered(delivery)) => {
                let key = delivery.key.clone();
                let inherited = match self.track_of(key.as_ref()).map(|track| &track.state) {
                    Some(State::Remembered(memory)) => memory.attempts,
                    _ => 0,
                };
                self.handle(event, effects);
                if let Some(track) = self.track_of(key.as_ref())
                    && let State::Ready { attempts, .. } = &mut track.state
                {
                    *attempts = (*attempts).max(inherited);
                }
            }
            (Mutant::LikenessIsEnoughToSkipTheRun, Event::Offered(delivery)) => {
                let delivery = delivery.clone();
                if let Some(track) = self.track_of(delivery.key.as_ref())
                    && let State::Remembered(memory) = &track.state
                    && let Next::Finish = memory.next
                    && memory.identity.looks_like(&delivery.identity)
                {
                    effects.push(Effect::Settle {
                        delivery,
                        outcome: Outcome::Handled,
                    });
                } else {
                    self.handle(event, effects);
                }
            }
            (Mutant::OldTimerIsAccepted, &Event::BackoffElapsed(Ticket { slot, .. })) => {
                let stamp = self.tracks.get(slot).map_or(0, |track| track.stamp);
                self.handle(Event::BackoffElapsed(Ticket { slot, stamp }), effects);
            }
            (Mutant::RetryDoesNotWait, Event::Finished { .. }) => {
                self.handle(event, effects);
                let armed = effects.iter().find_map(|effect| match effect {
                    Effect::ArmTimer { ticket, .. } => Some(*ticket),
                    _ => None,
                });
                if let Some(ticket) = armed {
                    self.handle(Event::BackoffElapsed(ticket), effects);
                }
            }
            (Mutant::EndedSessionStarts, &Event::SessionEnded(session))
            | (Mutant::DrainLetsWhatWaitsStart, &Event::Drain(session)) => {
                // While the machine looks, the heads that may not start belong to another session.
                self.rename_what_is_ready(session, SessionId::next(), |this| {
                    this.handle(event, effects);
                });
            }
            (Mutant::BackoffBlocksTheLane, Event::Granted(_)) => {
                let backs_off = |state: &State<Msg>| matches!(state, State::BackingOff { .. });
                if self.tracks.iter().any(|(_, track)| backs_off(&track.state)) {
                    effects.push(Effect::ReturnPermit);
                } else {
                    self.handle(event, effects);
                }
            }
            (Mutant::PauseIsIgnored, Event::Paused) => {}
            (Mutant::ResumeForgetsWhatWaits, Event::Resumed) => self.paused = false,
            (Mutant::QuietWhileParking, Event::Finished { .. }) => {
                self.handle(event, effects);
                effects.extend(self.draining.keys().copied().map(Effect::Quiet));
            }
            (Mutant::OrphanIsSettled, Event::Finished { .. }) => {
                self.handle(event, effects);
                let orphan = effects.iter().find_map(|effect| match effect {
                    Effect::Orphaned { delivery, .. } => Some(delivery.clone()),
                    _ => None,
                });
                effects.extend(orphan.map(|delivery| Effect::Settle {
                    delivery,
                    outcome: Outcome::Handled,
                }));
            }
            (Mutant::GapIsReportedTwice, Event::Parked { .. }) => {
                self.handle(event, effects);
                let is_gap = |effect: &&Effect<Msg>| matches!(effect, Effect::Gap { .. });
                let gap = effects.iter().find(is_gap).cloned();
                effects.extend(gap);
            }
            _ => {
                self.handle(event, effects);
                effects.retain(|effect| !mutant.swallows(effect));
            }
        }
    }

    fn track_of(&mut self, key: Option<&OrderingKey>) -> Option<&mut Track<Msg>> {
        let slot = *self.by_key.get(key?)?;
        Some(&mut self.tracks[slot])
    }

    fn memories(&mut self) -> impl Iterator<Item = &mut Memory> {
        self.tracks
            .iter_mut()
            .filter_map(|(_, track)| match &mut track.state {
                State::Remembered(memory) => Some(memory),
                _ => None,
            })
    }

    /// Nothing waits any more for these running heads.
    fn forget_keys_that_run(&mut self, which: impl Fn(&Msg) -> bool) {
        for (_, track) in &self.tracks {
            if let State::Running { head, .. } = &track.state
                && let Some(key) = &head.key
                && which(head)
            {
                self.by_key.remove(key);
            }
        }
    }

    fn rename_what_is_ready(
        &mut self,
        session: SessionId,
        name: SessionId,
        meanwhile: impl FnOnce(&mut Self),
    ) {
        let rename = |machine: &mut Self, from, to| {
            let mut renamed = 0;
            for (_, track) in &mut machine.tracks {
                if let State::Ready { head, .. } = &mut track.state
                    && head.session == from
                {
                    head.session = to;
                    renamed += 1;
                }
            }
            renamed
        };
        rename(self, session, name);
        meanwhile(self);
        self.depth -= rename(self, name, session);
    }
}

impl Mutant {
    fn swallows(self, effect: &Effect<Msg>) -> bool {
        matches!(
            (self, effect),
            (Self::StaleGrantIsSwallowed, Effect::ReturnPermit)
                | (Self::GapIsNotReported, Effect::Gap { .. })
                | (Self::QuietIsNotTold, Effect::Quiet(_))
                | (
                    Self::KeylessAttemptsAreNotHandedOn,
                    Effect::Forgotten { .. }
                )
                | (Self::NobodyIsCancelled, Effect::Cancel(_))
        )
    }
}
