//! What happens in the world: each [`Step`] moves the broker, a handler, a timer, the parking place or the endpoint.

use super::promises::*;
use super::*;

impl World {
    pub(super) fn step(&mut self, step: &Step) -> Checked {
        match *step {
            Step::Publish { key, kind } => {
                self.publish(key, kind);
                Ok(())
            }
            Step::Deliver { queue, count } => (0..count).try_for_each(|_| self.deliver(queue)),
            Step::Grant(nth) => self.grant(nth),
            Step::Finish(nth, ending) => self.finish(nth, ending),
            Step::Blocks(nth) => self.blocks(nth),
            Step::Timer(nth) => self.timer(nth),
            Step::Park(nth) => self.park(nth),
            Step::EndHold(nth, end) => self.end_hold(nth, end),
            Step::Acks { queue, count } => {
                self.acks(queue, count);
                Ok(())
            }
            Step::Lose { queue, acks } => {
                self.lose(queue, acks);
                Ok(())
            }
            Step::Notice(queue) => self.notice(queue),
            Step::Drain(queue) => self.drain(queue),
            Step::Close(queue) => self.close(queue),
            Step::Pause => {
                self.paused = true;
                self.tell(Event::Paused)
            }
            Step::Resume => {
                self.paused = false;
                self.tell(Event::Resumed)
            }
        }
    }

    fn publish(&mut self, key: usize, kind: Kind) {
        let number = self.messages.len();
        let key = key % (KEYS + QUEUES);
        let queue = if key < KEYS { key / 2 } else { key - KEYS };
        let key = (key < KEYS).then_some(key);
        let newest = (0..number).rev().find(|&other| {
            let other = &self.messages[other];
            key.is_some() && other.key == key && other.kind != Kind::WithoutId
        });
        let id = number.to_string();
        let identity = match (kind, newest) {
            (Kind::Twin, Some(newest)) => {
                self.messages[newest].doubled = true;
                self.messages[newest].identity.clone()
            }
            // All of a key look alike.
            (Kind::WithoutId, _) => identity(None, ""),
            _ => identity(Some(&id), &id),
        };
        self.messages.push(Message {
            key,
            queue,
            identity,
            kind,
            doubled: kind == Kind::Twin,
            delivered: false,
            gone: false,
            attempts: 0,
            earlier: 0,
            effect: false,
            settled: false,
            overshadowed: false,
            poison: None,
            ended: None,
            pause: None,
            finished: false,
            parked: 0,
        });
    }

    fn deliver(&mut self, queue: usize) -> Checked {
        let queue = queue % QUEUES;
        let open = self.open[queue].get_or_insert_with(|| Open {
            id: SessionId::next(),
            alive: true,
            draining: false,
            quiet: false,
            out: Vec::new(),
            acks: Vec::new(),
        });
        if !open.alive || open.out.len() >= self.setup.credit {
            return Ok(());
        }
        let (session, draining) = (open.id, open.draining);
        let next = (0..self.messages.len()).find(|number| {
            let message = &self.messages[*number];
            message.queue == queue && !message.gone && !open.out.contains(number)
        });
        let Some(number) = next else {
            return Ok(());
        };
        open.out.push(number);
        let message = &mut self.messages[number];
        let redelivered = std::mem::replace(&mut message.delivered, true);
        let known = message.settled || (message.key.is_none() && message.finished);
        if known && self.setup.finished_memory && message.kind != Kind::WithoutId {
            open.acks.push(number);
            return Ok(());
        }
        let delivery = Msg {
            number,
            key: message.key.map(OrderingKey::from),
            session,
            identity: message.identity.clone(),
            redelivered,
            earlier: message.earlier,
            counted: None,
        };
        if !draining {
            if message.settled {
                self.overshadow(number);
            }
            self.here.push((number, session));
            if delivery.key.is_none() {
                self.keyless.insert((number, session), delivery.earlier);
            }
        }
        self.tell(Event::Offered(delivery))
    }

    /// It was settled and is here again, so it is not the head that the machine remembers: what the
    /// machine knows of its key is void.
    fn overshadow(&mut self, number: usize) {
        let key = self.messages[number].key;
        for message in self.messages[number..]
            .iter_mut()
            .filter(|it| it.key == key)
        {
            message.overshadowed = true;
            message.pause = None;
        }
    }

    fn grant(&mut self, nth: usize) -> Checked {
        if self.free == 0 || self.asks.is_empty() {
            return Ok(());
        }
        self.free -= 1;
        let ticket = self.asks.remove(nth % self.asks.len());
        self.expected.granted = true;
        self.tell(Event::Granted(ticket))
    }

    fn finish(&mut self, nth: usize, ending: Ending) -> Checked {
        if self.runs.is_empty() {
            return Ok(());
        }
        let run = self.runs.remove(nth % self.runs.len());
        self.free += 1;
        let (number, session) = (run.message, run.session);
        let orphan = !self.is_live(session);
        let draining = self.is_draining(session);
        if run.stuck {
            self.expected.unstuck.push(number);
        }
        // Whether the run's delivery leaves the machine without an outcome.
        let mut dropped = orphan || draining;
        let result = match ending {
            Ending::Handled => {
                self.take_effect(number)?;
                if orphan {
                    self.expected.orphaned.push(number);
                } else {
                    self.expected.settle.push(number);
                }
                dropped = false;
                RunResult::Handled
            }
            Ending::Aborted => {
                *self.count(number, session) -= 1;
                RunResult::Aborted
            }
            Ending::Failed(kind, plan) => {
                self.expected.attempt_failed.push(number);
                let attempt = *self.count(number, session);
                match policy(self.setup.max_attempts).verdict(attempt, kind, plan, 0.5) {
                    verdict @ (Verdict::Poison(reason) | Verdict::Discard(reason)) => {
                        let plan = match verdict {
                            Verdict::Discard(_) => PoisonPlan::Discard,
                            _ => self.setup.plan,
                        };
                        let keyless = self.messages[number].key.is_none();
                        let plan = match plan {
                            PoisonPlan::Hold(_) if keyless => PoisonPlan::Park,
                            plan => plan,
                        };
                        if !(orphan && keyless) {
                            self.messages[number].poison = Some((reason, plan));
                        }
                        let holds = matches!(plan, PoisonPlan::Hold(_));
                        if holds && !orphan {
                            self.expected.hold.push(number);
                        }
                        dropped = orphan || (holds && draining);
                    }
                    verdict @ (Verdict::RetryAfter(_) | Verdict::PauseEndpoint(_)) => {
                        self.expected.pauses = matches!(verdict, Verdict::PauseEndpoint(_));
                        let keyless = self.messages[number].key.is_none();
                        if !(dropped && keyless) {
                            self.expected.timer.push(number);
                        }
                    }
                }
                failed_by(kind, plan)
            }
        };
        if dropped {
            self.forget(number, session);
            take(&mut self.here, &(number, session));
        }
        self.tell(Event::Finished {
            ticket: run.ticket,
            result,
        })
    }

    /// The first success of a message.
    fn take_effect(&mut self, number: usize) -> Checked {
        let key = self.messages[number].key;
        if !self.messages[number].effect && key.is_some() {
            let overtaken = self.messages[number + 1..]
                .iter()
                .any(|later| later.key == key && later.effect);
            must!(!overtaken, EFFECT_ORDER, "message {number}");
        }
        self.messages[number].effect = true;
        Ok(())
    }

    /// A keyless delivery leaves without an outcome: its count must be handed on.
    fn forget(&mut self, number: usize, session: SessionId) {
        let attempts = *self.count(number, session);
        if self.messages[number].key.is_none() && attempts > 0 {
            self.messages[number].pause = None;
            self.expected.forgotten.push((number, attempts));
        }
    }

    fn blocks(&mut self, nth: usize) -> Checked {
        let aborted: Vec<usize> = (0..self.runs.len())
            .filter(|&at| self.runs[at].cancelled && !self.runs[at].stuck)
            .collect();
        if aborted.is_empty() {
            return Ok(());
        }
        let run = &mut self.runs[aborted[nth % aborted.len()]];
        run.stuck = true;
        let ticket = run.ticket;
        self.expected.stuck.push(run.message);
        self.tell(Event::StillRunning(ticket))
    }

    fn timer(&mut self, nth: usize) -> Checked {
        if self.timers.is_empty() {
            return Ok(());
        }
        let (ticket, number) = self.timers.remove(nth % self.timers.len());
        self.messages[number]
            .pause
            .take_if(|pause| *pause == ticket);
        self.tell(Event::BackoffElapsed(ticket))
    }

    fn park(&mut self, nth: usize) -> Checked {
        if self.parkings.is_empty() {
            return Ok(());
        }
        let at = nth % self.parkings.len();
        let parking = &mut self.parkings[at];
        let (ticket, number, session) = (parking.ticket, parking.message, parking.session);
        let queue = self.messages[number].queue;
        let broker = self.open[queue]
            .as_mut()
            .filter(|open| open.id == session && open.alive);
        match (parking.stage, broker) {
            (Stage::Asked, broker) => {
                parking.stage = Stage::Confirmed;
                self.messages[number].parked += usize::from(parking.first);
                if let Some(open) = broker {
                    open.acks.push(number);
                }
                return Ok(());
            }
            (Stage::Confirmed, Some(_)) => {
                parking.stage = Stage::Settled;
                self.acks(queue, usize::MAX); // the barrier
                return Ok(());
            }
            (Stage::Confirmed, None) | (Stage::Settled, _) => {}
        }
        let settled = parking.stage == Stage::Settled;
        let parking = self.parkings.remove(at);
        if parking.first {
            self.expected.gap.push(number);
        }
        *self.count(number, session) = 0;
        self.messages[number].earlier = 0;
        if settled {
            take(&mut self.here, &(number, session));
        } else if self.is_live(session) {
            self.lost.push((number, session));
        } else if self.messages[number].key.is_none() {
            self.expected.orphaned.push(number);
        }
        self.tell(Event::Parked { ticket, settled })
    }

    fn end_hold(&mut self, nth: usize, end: HoldEnd) -> Checked {
        if self.holds.is_empty() {
            return Ok(());
        }
        let hold = self.holds.remove(nth % self.holds.len());
        let known = self.subject.machine().held(hold.ticket).is_some();
        must!(
            known || !self.is_exact(hold.message),
            HOLD,
            "{} is not held",
            hold.message
        );
        if known {
            let message = &mut self.messages[hold.message];
            message.poison = match end {
                HoldEnd::Release => Some((hold.reason, PoisonPlan::Park)),
                HoldEnd::Skip => Some((hold.reason, PoisonPlan::Discard)),
                HoldEnd::Retry => None,
            };
            if end == HoldEnd::Retry {
                message.attempts = 0;
            }
        }
        self.tell(Event::HoldEnded(hold.ticket, end))
    }

    /// The key goes on: nothing of it is held any more.
    pub(super) fn forget_holds(&mut self, number: usize) {
        if let Some(key) = self.messages[number].key {
            let messages = &self.messages;
            self.holds
                .retain(|hold| messages[hold.message].key != Some(key));
        }
    }

    fn acks(&mut self, queue: usize, count: usize) {
        if let Some(open) = &mut self.open[queue % QUEUES]
            && open.alive
        {
            let count = count.min(open.acks.len());
            for number in open.acks.drain(..count) {
                open.out.retain(|&out| out != number);
                self.messages[number].gone = true;
            }
        }
    }

    fn lose(&mut self, queue: usize, acks: usize) {
        self.acks(queue, acks);
        if let Some(open) = &mut self.open[queue % QUEUES] {
            open.alive = false;
        }
    }

    fn notice(&mut self, queue: usize) -> Checked {
        let Some(open) = self.open[queue % QUEUES].take_if(|open| !open.alive) else {
            return Ok(());
        };
        let session = open.id;
        for run in self.runs.iter_mut().filter(|run| run.session == session) {
            run.cancelled = true;
            self.expected.cancelled.push(run.ticket);
        }
        for (number, _) in self.unmoved(session) {
            self.forget(number, session);
        }
        for (number, _) in self.lost.extract_if(.., |(_, lost)| *lost == session) {
            if self.messages[number].key.is_none() {
                self.expected.orphaned.push(number);
            }
        }
        self.here.retain(|(_, here)| *here != session);
        if open.draining && !open.quiet {
            self.leaving.push(session);
        }
        self.tell(Event::SessionEnded(session))
    }

    fn drain(&mut self, queue: usize) -> Checked {
        let Some(open) = &mut self.open[queue % QUEUES] else {
            return Ok(());
        };
        open.draining = true;
        let session = open.id;
        for unmoved in self.unmoved(session) {
            self.forget(unmoved.0, session);
            take(&mut self.here, &unmoved);
        }
        self.tell(Event::Drain(session))
    }

    fn close(&mut self, queue: usize) -> Checked {
        if self.open[queue % QUEUES]
            .as_ref()
            .is_some_and(|open| open.draining && open.quiet)
        {
            self.lose(queue, usize::MAX);
            self.notice(queue)?;
        }
        Ok(())
    }

    /// Every fault is over: each round moves everything that can move, and everything succeeds.
    pub(super) fn come_to_an_end(&mut self) -> Checked {
        // A round moves at least one message of the longest key on; a retry takes a few.
        for _ in 0..20 * (self.messages.len() + 1) {
            if self.is_at_rest() {
                break;
            }
            self.step(&Step::Resume)?;
            for queue in 0..QUEUES {
                self.close(queue)?;
                self.notice(queue)?;
                self.acks(queue, usize::MAX);
                (0..self.setup.credit).try_for_each(|_| self.deliver(queue))?;
            }
            (0..self.timers.len()).try_for_each(|_| self.timer(0))?;
            (0..self.holds.len()).try_for_each(|_| self.end_hold(0, HoldEnd::Release))?;
            (0..3 * self.parkings.len()).try_for_each(|_| self.park(0))?;
            (0..self.asks.len()).try_for_each(|_| self.grant(0))?;
            (0..self.runs.len()).try_for_each(|_| self.finish(0, Ending::Handled))?;
        }
        let left = self.messages.iter().filter(|message| !message.gone);
        must!(
            self.is_at_rest(),
            EVERYTHING_ENDS,
            "{} messages are left",
            left.count()
        );
        must!(
            self.free == self.setup.permits,
            PERMITS,
            "{} of {}",
            self.free,
            self.setup.permits
        );
        let moving = self.tracks_that(|state| !matches!(state, State::Remembered(_)));
        must!(moving == 0, LEAK, "{moving} tracks");
        for (number, message) in self.messages.iter().enumerate() {
            let ended = message.effect || message.parked > 0 || !self.is_exact(number);
            must!(
                ended,
                EVERYTHING_ENDS,
                "{number} has neither effect nor gap"
            );
        }
        Ok(())
    }

    /// Nothing is left to do for anybody.
    fn is_at_rest(&self) -> bool {
        self.messages.iter().all(|message| message.gone)
            && (self.runs.is_empty() && self.asks.is_empty() && self.timers.is_empty())
            && (self.parkings.is_empty() && self.lost.is_empty() && self.holds.is_empty())
    }
}
