//! The naive model: what the machine does about a step is compared with what each delivery has been through.

use super::promises::*;
use super::*;

impl World {
    // ---- what the machine does about it

    pub(super) fn tell(&mut self, event: Event<Msg>) -> Checked {
        let mut effects = Vec::new();
        self.subject.handle(event, &mut effects);
        for effect in effects {
            self.perform(effect)?;
        }
        self.check_expected()?;
        self.check_state()
    }

    fn perform(&mut self, effect: Effect<Msg>) -> Checked {
        match effect {
            Effect::AskPermit(ticket) => {
                must!(!self.paused, PAUSED, "a request while paused");
                must!(
                    self.tickets.insert(ticket),
                    PERMITS,
                    "{ticket:?} used again"
                );
                must!(
                    self.expected.gap.is_empty(),
                    GAP,
                    "the next goes on before the gap is told"
                );
                self.asks.push(ticket);
            }
            Effect::ReturnPermit => {
                let granted = std::mem::take(&mut self.expected.granted);
                must!(granted, PERMITS, "returned without a grant");
                self.free += 1;
            }
            Effect::Start {
                ticket,
                delivery,
                attempt,
            } => {
                let granted = std::mem::take(&mut self.expected.granted);
                must!(granted, PERMITS, "started without a grant");
                self.check_start(&delivery, attempt)?;
                self.forget_holds(delivery.number);
                *self.count(delivery.number, delivery.session) = attempt;
                self.messages[delivery.number].poison = None;
                self.messages[delivery.number].finished = false;
                self.runs.push(Run {
                    ticket,
                    message: delivery.number,
                    session: delivery.session,
                    cancelled: false,
                    stuck: false,
                });
            }
            Effect::Cancel(ticket) => {
                let expected = take(&mut self.expected.cancelled, &ticket);
                must!(expected, CANCEL, "a run of a live session");
            }
            Effect::ArmTimer { ticket, after } => {
                let expected = self.expected.timer.pop();
                must!(expected.is_some() && after == PAUSE, TIMER, "{after:?}");
                if let Some(number) = expected {
                    self.messages[number].pause = Some(ticket);
                    self.timers.push((ticket, number));
                }
            }
            Effect::AttemptFailed { delivery, .. } => {
                let expected = take(&mut self.expected.attempt_failed, &delivery.number);
                must!(expected, SHOWN, "{} did not fail", delivery.number);
            }
            Effect::Settle { delivery, outcome } => {
                let number = delivery.number;
                let handled =
                    take(&mut self.expected.settle, &number) || self.has_finished_before(&delivery);
                must!(
                    handled && outcome == Outcome::Handled,
                    SETTLE,
                    "{number} was not handled"
                );
                let here = take(&mut self.here, &(number, delivery.session));
                must!(here, SETTLE, "{number} is not here, or not any more");
                *self.count(number, delivery.session) = 0;
                self.messages[number].earlier = 0;
                self.messages[number].finished = false;
                self.messages[number].settled = true;
                self.acknowledge(number, delivery.session);
            }
            Effect::Orphaned { delivery, .. } => {
                let number = delivery.number;
                let expected = take(&mut self.expected.orphaned, &number);
                must!(expected, ORPHAN, "{number} is not an orphan that ended");
                *self.count(number, delivery.session) = 0;
                self.messages[number].finished = true;
            }
            Effect::Forgotten { delivery, attempts } => {
                let number = delivery.number;
                let expected = take(&mut self.expected.forgotten, &(number, attempts));
                must!(expected, FORGOTTEN, "{number} with {attempts} attempts");
                let earlier = &mut self.messages[number].earlier;
                *earlier = attempts.max(*earlier);
            }
            Effect::Park {
                ticket,
                delivery,
                reason,
                attempts,
                place,
            } => {
                assert_eq!(place, Place::Parking, "no source here keeps anything");
                let message = &self.messages[delivery.number];
                let taken_for_its_twin = message.doubled && message.overshadowed;
                let counted = attempts == *self.count(delivery.number, delivery.session);
                must!(
                    counted || taken_for_its_twin,
                    COUNT,
                    "parked with {attempts}"
                );
                let poison = self.take_poison(&delivery);
                let expected = Some((reason, PoisonPlan::Park));
                must!(poison == expected, PARK, "{poison:?}, not {reason}");
                self.messages[delivery.number].ended = Some(Outcome::Parked);
                self.begin_parking(ticket, &delivery, true)?;
            }
            Effect::SettleWithBarrier {
                ticket,
                delivery,
                outcome,
            } => {
                let poison = self.take_poison(&delivery);
                let message = &self.messages[delivery.number];
                let copy =
                    delivery.identity.id().is_some() && (message.parked > 0 || message.doubled);
                must!(copy || poison.is_some(), PARK, "not poison");
                let expected = match poison {
                    // What is to be parked is not just settled.
                    Some((_, plan)) => (plan == PoisonPlan::Discard).then_some(Outcome::Discarded),
                    None if message.doubled => Some(outcome),
                    None => message.ended,
                };
                must!(expected == Some(outcome), PARK, "{outcome:?}");
                self.messages[delivery.number].ended = Some(outcome);
                self.begin_parking(ticket, &delivery, poison.is_some())?;
            }
            Effect::Hold {
                ticket,
                delivery,
                reason,
                attempts,
                at_most,
            } => {
                let number = delivery.number;
                let poison = self.take_poison(&delivery);
                let expected = Some((reason, self.setup.plan));
                must!(poison == expected, HOLD, "{poison:?}, not {reason}");
                must!(
                    self.setup.plan == PoisonPlan::Hold(at_most),
                    HOLD,
                    "{at_most:?}"
                );
                let taken_for_its_twin =
                    self.messages[number].doubled && self.messages[number].overshadowed;
                let counted = attempts == *self.count(number, delivery.session);
                must!(counted || taken_for_its_twin, COUNT, "held with {attempts}");
                take(&mut self.expected.hold, &number);
                self.forget_holds(number);
                self.holds.push(Hold {
                    ticket,
                    message: number,
                    reason,
                });
            }
            Effect::Gap { delivery, .. } => {
                let expected = take(&mut self.expected.gap, &delivery.number);
                must!(expected, GAP, "{} again, or too early", delivery.number);
            }
            Effect::PauseEndpoint(pause) => {
                let expected = std::mem::take(&mut self.expected.pauses);
                must!(expected && pause == PAUSE, SHOWN, "no pause is due");
            }
            Effect::Stuck(delivery) => {
                let expected = take(&mut self.expected.stuck, &delivery.number);
                must!(expected, SHOWN, "{} is not stuck", delivery.number);
            }
            Effect::Unstuck(delivery) => {
                let expected = take(&mut self.expected.unstuck, &delivery.number);
                must!(expected, SHOWN, "{} was not stuck", delivery.number);
            }
            Effect::Quiet(session) => {
                let waits = take(&mut self.leaving, &session) || self.is_draining(session);
                must!(waits && self.is_quiet(session), QUIET, "too early");
                for open in self.open.iter_mut().flatten() {
                    open.quiet |= open.id == session;
                }
            }
        }
        Ok(())
    }

    fn check_start(&mut self, delivery: &Msg, attempt: u32) -> Checked {
        let (number, session) = (delivery.number, delivery.session);
        must!(!self.paused, PAUSED, "{number}");
        must!(self.is_live(session), ENDED, "{number}");
        must!(!self.is_draining(session), DRAINING, "{number}");
        if let Some(key) = self.messages[number].key {
            self.check_turn(number, session, key)?;
        }
        let pausing = self.messages[number].pause.is_some();
        must!(!pausing, TIMER, "{number} starts before its pause is over");
        let counted = *self.count(number, session) + 1;
        let exact = match delivery.key {
            Some(_) if self.messages[number].overshadowed => attempt > 0,
            Some(_) if self.evicts() => (1..=counted).contains(&attempt),
            _ => attempt == counted,
        };
        must!(exact, COUNT, "{number}: {attempt}, not {counted}");
        let recognisable =
            self.is_exact(number) || (delivery.key.is_none() && delivery.identity.id().is_some());
        let allowed = !recognisable || attempt <= self.setup.max_attempts;
        must!(allowed, LIMIT, "{number}: {attempt}");
        Ok(())
    }

    /// Whether it is the message's turn among those of its key.
    fn check_turn(&self, number: usize, session: SessionId, key: usize) -> Checked {
        let message = &self.messages[number];
        let running = self.runs.iter().any(|run| self.is_of(run.message, key));
        must!(!running, ONE_RUN, "{number}");
        let held = self
            .holds
            .iter()
            .find(|hold| self.is_of(hold.message, key) && self.is_exact(hold.message));
        let held = held.map(|hold| hold.message);
        must!(held.is_none(), HOLD, "{number} before {held:?}");
        let ended = message.parked > 0 || message.finished || message.poison.is_some();
        must!(!ended || !self.is_exact(number), NOT_AGAIN, "{number}");
        let parking = self.parkings.iter().map(|parking| parking.message);
        let mut parking = parking.chain(self.lost.iter().map(|lost| lost.0));
        let parking = parking.find(|&parking| self.is_of(parking, key));
        must!(parking.is_none(), BARRIER, "{number} before {parking:?}");
        let unsettled = (0..number).find(|&before| {
            let head = &self.messages[before];
            self.is_of(before, key) && self.is_exact(before) && head.parked > 0 && !head.gone
        });
        must!(
            unsettled.is_none(),
            BARRIER,
            "{number} before {unsettled:?}"
        );
        let first = self.here.iter().find(|(here, _)| self.is_of(*here, key));
        must!(
            first == Some(&(number, session)),
            IN_ORDER,
            "{number}, not {first:?}"
        );
        Ok(())
    }

    /// Whether it, or its twin, was handled after its session had ended.
    fn has_finished_before(&self, delivery: &Msg) -> bool {
        let finished = |message: &Message| {
            message.finished && message.identity.same_message(&delivery.identity)
        };
        self.messages.iter().any(finished)
    }

    /// Why the message, or its twin, is poison, and where it goes; told once.
    fn take_poison(&mut self, delivery: &Msg) -> Option<(PoisonReason, PoisonPlan)> {
        let (number, key) = (delivery.number, self.messages[delivery.number].key);
        let twins = (0..self.messages.len()).filter(|&twin| {
            let twin = &self.messages[twin];
            twin.key == key && twin.identity.same_message(&delivery.identity)
        });
        let poisoned = [number]
            .into_iter()
            .chain(twins)
            .find(|&twin| self.messages[twin].poison.is_some());
        if let Some(poisoned) = poisoned {
            return self.messages[poisoned].poison.take();
        }
        let spent = key.is_none()
            && delivery.identity.id().is_some()
            && delivery.earlier >= self.setup.max_attempts;
        let plan = match self.setup.plan {
            PoisonPlan::Hold(_) => PoisonPlan::Park,
            plan => plan,
        };
        spent.then_some((PoisonReason::Failed, plan))
    }

    fn begin_parking(&mut self, ticket: Ticket, delivery: &Msg, first: bool) -> Checked {
        let (number, session) = (delivery.number, delivery.session);
        let here = self.here.contains(&(number, session));
        must!(here, SETTLE, "{number} is not here, or not any more");
        if let Some(key) = self.messages[number].key {
            let running = self.runs.iter().any(|run| self.is_of(run.message, key));
            let parking = self
                .parkings
                .iter()
                .any(|other| self.is_of(other.message, key));
            must!(!running && !parking, PARK, "{number}: its key is busy");
            let again = first && self.is_exact(number) && self.messages[number].parked > 0;
            must!(!again, PARK, "{number} twice");
        }
        self.forget_holds(number);
        self.parkings.push(Parking {
            ticket,
            message: number,
            session,
            first,
            stage: Stage::Asked,
        });
        Ok(())
    }

    // ---- what must hold after every event

    fn check_expected(&mut self) -> Checked {
        let left = std::mem::take(&mut self.expected);
        must!(!left.granted, PERMITS, "a grant was swallowed");
        must!(
            left.settle.is_empty(),
            SETTLE,
            "{:?} not settled",
            left.settle
        );
        must!(left.orphaned.is_empty(), ORPHAN, "{:?}", left.orphaned);
        must!(left.forgotten.is_empty(), FORGOTTEN, "{:?}", left.forgotten);
        must!(left.cancelled.is_empty(), CANCEL, "{:?}", left.cancelled);
        must!(left.timer.is_empty(), TIMER, "{:?} has none", left.timer);
        must!(left.hold.is_empty(), HOLD, "{:?} not held", left.hold);
        must!(left.gap.is_empty(), GAP, "{:?} not reported", left.gap);
        let shown =
            left.attempt_failed.is_empty() && left.stuck.is_empty() && left.unstuck.is_empty();
        must!(shown, SHOWN, "not shown");
        must!(!left.pauses, SHOWN, "the endpoint does not pause");
        Ok(())
    }

    fn check_state(&self) -> Checked {
        let machine = self.subject.machine();
        let depth = machine.depth();
        must!(
            depth == self.here.len(),
            DEPTH,
            "{depth}, not {}",
            self.here.len()
        );
        let remembered = self.tracks_that(|state| matches!(state, State::Remembered(_)));
        must!(
            remembered <= self.setup.remember,
            LEAK,
            "{remembered} memories"
        );
        for open in self.open.iter().flatten() {
            let told = !open.draining || open.quiet || !self.is_quiet(open.id);
            must!(told, QUIET, "not told");
        }
        let untold = self.leaving.iter().find(|&&session| self.is_quiet(session));
        must!(untold.is_none(), QUIET, "not told after the end");
        let asking: Vec<(usize, SessionId)> = machine
            .tracks
            .iter()
            .filter_map(|(slot, track)| match &track.state {
                State::Ready { head, .. } => {
                    let stamp = track.stamp;
                    let asks = self.paused || self.asks.contains(&Ticket { slot, stamp });
                    asks.then_some((head.number, head.session))
                }
                _ => None,
            })
            .collect();
        let mut keys = HashSet::new();
        for &(number, session) in &self.here {
            let key = self.messages[number].key;
            let head = key.is_none_or(|key| keys.insert(key));
            let same = |other: usize| match key {
                Some(key) => self.is_of(other, key),
                None => other == number,
            };
            let waits = self.runs.iter().any(|run| same(run.message))
                || self.parkings.iter().any(|parking| same(parking.message))
                || self.lost.iter().any(|lost| same(lost.0))
                || self.holds.iter().any(|hold| same(hold.message))
                // One that looks like the head takes over its pause.
                || self.timers.iter().any(|timer| {
                    timer.1 == number || (self.messages[number].overshadowed && same(timer.1))
                });
            let asks = !head || waits || asking.contains(&(number, session));
            must!(asks, EVERY_READY_KEY_ASKS, "{number} cannot start");
        }
        Ok(())
    }

    // ---- small things

    /// Whether the model may demand that the message never runs after its end: a copy of it can be
    /// recognised for certain, and the memory of it is still there.
    pub(super) fn is_exact(&self, number: usize) -> bool {
        let message = &self.messages[number];
        message.key.is_some()
            && message.kind != Kind::WithoutId
            && !message.doubled
            && !message.overshadowed
            && !self.evicts()
    }

    fn evicts(&self) -> bool {
        self.setup.remember < KEYS
    }

    fn is_of(&self, number: usize, key: usize) -> bool {
        self.messages[number].key == Some(key)
    }

    fn find(&self, session: SessionId) -> Option<&Open> {
        self.open.iter().flatten().find(|open| open.id == session)
    }

    pub(super) fn is_live(&self, session: SessionId) -> bool {
        self.find(session).is_some()
    }

    pub(super) fn is_draining(&self, session: SessionId) -> bool {
        self.find(session).is_some_and(|open| open.draining)
    }

    /// Nothing of the session runs or parks, and no orphan runs.
    fn is_quiet(&self, session: SessionId) -> bool {
        let concerns = |other: SessionId| other == session || !self.is_live(other);
        let parks = |parking: &Parking| parking.session == session && self.is_live(session);
        !self
            .runs
            .iter()
            .any(|run| !run.stuck && concerns(run.session))
            && !self.parkings.iter().any(parks)
            && !self.lost.iter().any(|lost| lost.1 == session)
    }

    /// Deliveries of the session that neither run nor park.
    pub(super) fn unmoved(&self, session: SessionId) -> Vec<(usize, SessionId)> {
        let moves = |number: usize| {
            self.runs
                .iter()
                .any(|run| (run.message, run.session) == (number, session))
                || self
                    .parkings
                    .iter()
                    .any(|other| (other.message, other.session) == (number, session))
                || self.lost.contains(&(number, session))
        };
        let here = self.here.iter().copied();
        here.filter(|&(number, of)| of == session && !moves(number))
            .collect()
    }

    pub(super) fn count(&mut self, number: usize, session: SessionId) -> &mut u32 {
        match self.messages[number].key {
            Some(_) => &mut self.messages[number].attempts,
            None => self.keyless.entry((number, session)).or_default(),
        }
    }

    fn acknowledge(&mut self, number: usize, session: SessionId) {
        if let Some(open) = self
            .open
            .iter_mut()
            .flatten()
            .find(|open| open.id == session)
        {
            open.acks.push(number);
        }
    }

    pub(super) fn tracks_that(&self, which: impl Fn(&State<Msg>) -> bool) -> usize {
        let tracks = self.subject.machine().tracks.iter();
        tracks.filter(|(_, track)| which(&track.state)).count()
    }
}
