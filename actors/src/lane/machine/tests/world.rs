//! A simulated world around one machine, and the naive model of what must hold in it.
//!
//! The world is a broker with two queues, the permits of an endpoint, running handlers, timers and a
//! parking place. It is moved by [`Step`]s that name what they touch by a number, taken modulo what
//! there is: so any list of steps is a valid story, and a shorter list is one too (shrinking).
//!
//! The model keeps a plain list of what each delivery has been through and knows nothing of the
//! machine's states. A promise that does not hold comes back as a [`Violation`] with its name.

use std::collections::{HashMap, HashSet};

use super::mutants::Subject;
use super::*;

/// Keys 0 and 1 live in queue 0, keys 2 and 3 in queue 1; one keyless kind in each.
const KEYS: usize = 4;
const QUEUES: usize = 2;

/// What a story is played in.
#[derive(Debug, Clone)]
pub(super) struct Setup {
    pub(super) permits: usize,
    pub(super) max_attempts: u32,
    pub(super) plan: PoisonPlan,
    pub(super) remember: usize,
    /// Unsettled deliveries a session may have.
    pub(super) credit: usize,
    /// Whether a supervisor settles copies of what was settled already, if they have an id.
    pub(super) finished_memory: bool,
}

/// Which message is published.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Unique,
    WithoutId,
    /// The same id and body as the newest message of its key: the publisher sent it twice.
    Twin,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Ending {
    Handled,
    /// Failed, and this plan applies.
    Failed(FailureKind, Option<PlanIndex>),
    Aborted,
}

#[derive(Debug, Clone)]
pub(super) enum Step {
    Publish {
        key: usize,
        kind: Kind,
    },
    Deliver {
        queue: usize,
        count: usize,
    },
    Grant(usize),
    Finish(usize, Ending),
    /// An aborted run has still not ended.
    Blocks(usize),
    Timer(usize),
    /// A hold ends.
    EndHold(usize, HoldEnd),
    /// A parking gets one step on: confirmed, settled, answered.
    Park(usize),
    /// The broker processes acknowledgements.
    Acks {
        queue: usize,
        count: usize,
    },
    /// The broker drops the session, after processing some acknowledgements.
    Lose {
        queue: usize,
        acks: usize,
    },
    /// The loss is seen here.
    Notice(usize),
    Drain(usize),
    /// A drained session is closed, once it is quiet.
    Close(usize),
    Pause,
    Resume,
}

/// A broken promise.
#[derive(Debug, PartialEq)]
pub(super) struct Violation {
    pub(super) promise: &'static str,
    pub(super) detail: String,
}

type Checked = Result<(), Violation>;

/// `must!(condition, promise, detail…)`.
macro_rules! must {
    ($holds:expr, $promise:expr, $($detail:tt)+) => {
        if !$holds {
            return Err(Violation { promise: $promise, detail: format!($($detail)+) });
        }
    };
}

pub(super) const ONE_RUN: &str = "a key has one run at a time";
pub(super) const IN_ORDER: &str = "a key's messages start in order";
pub(super) const EFFECT_ORDER: &str = "first effects come in sequence";
pub(super) const EVERY_READY_KEY_ASKS: &str = "a key that waits blocks no other";
pub(super) const PERMITS: &str = "every grant is used or returned, once";
pub(super) const ENDED: &str = "nothing of an ended session starts";
pub(super) const DRAINING: &str = "nothing of a draining session starts";
pub(super) const PAUSED: &str = "nothing starts while paused";
pub(super) const COUNT: &str = "attempts are counted exactly";
pub(super) const LIMIT: &str = "no message has more attempts than allowed";
pub(super) const NOT_AGAIN: &str = "what has ended does not run again";
pub(super) const BARRIER: &str = "a successor waits for the parked head's acknowledgement";
pub(super) const HOLD: &str = "poison is held where keys are to be held, until the hold ends";
pub(super) const PARK: &str = "poison is parked once, and nothing else is";
pub(super) const SETTLE: &str = "a delivery is settled once, in its live session";
pub(super) const ORPHAN: &str = "an orphan's end is told";
pub(super) const FORGOTTEN: &str = "a dropped keyless message hands its attempts on";
pub(super) const CANCEL: &str = "runs of an ended session are cancelled";
pub(super) const TIMER: &str = "a retry waits for the pause of the policy";
pub(super) const SHOWN: &str = "failed attempts and stuck runs are shown";
pub(super) const GAP: &str = "a gap is reported once";
pub(super) const QUIET: &str = "a drained session is quiet when nothing of it runs or parks";
pub(super) const DEPTH: &str = "the depth is the number of deliveries here";
pub(super) const LEAK: &str = "nothing is left of what has ended";
pub(super) const EVERYTHING_ENDS: &str = "everything ends";

struct Message {
    key: Option<usize>,
    queue: usize,
    identity: Identity,
    kind: Kind,
    /// It has a twin.
    doubled: bool,
    // What the broker knows.
    delivered: bool,
    gone: bool,
    // What the model knows.
    /// Counted attempts since it last ended (of a keyed message).
    attempts: u32,
    /// What earlier copies of a keyless message handed on.
    earlier: u32,
    effect: bool,
    /// A lane has settled it; the acknowledgement may still be lost.
    settled: bool,
    /// A settled message of its key came back before it, and made the machine forget.
    overshadowed: bool,
    poison: Option<(PoisonReason, PoisonPlan)>,
    /// What was last said of its end without effect.
    ended: Option<Outcome>,
    /// The timer of its pause.
    pause: Option<Ticket>,
    /// It has ended after its session; its copy need not run.
    finished: bool,
    parked: usize,
}

struct Hold {
    ticket: Ticket,
    message: usize,
    reason: PoisonReason,
}

struct Open {
    id: SessionId,
    alive: bool,
    draining: bool,
    quiet: bool,
    out: Vec<usize>,
    acks: Vec<usize>,
}

struct Run {
    ticket: Ticket,
    message: usize,
    session: SessionId,
    cancelled: bool,
    stuck: bool,
}

struct Parking {
    ticket: Ticket,
    message: usize,
    session: SessionId,
    /// The first time, so that a gap is to be reported.
    first: bool,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Stage {
    Asked,
    /// It is durable; the acknowledgement is on its way.
    Confirmed,
    /// The broker is known to have processed the acknowledgement; the machine does not know it yet.
    Settled,
}

/// What the event just told must bring about, and nothing else.
#[derive(Default)]
struct Expected {
    granted: bool,
    /// The endpoint is told to pause.
    pauses: bool,
    settle: Vec<usize>,
    orphaned: Vec<usize>,
    forgotten: Vec<(usize, u32)>,
    cancelled: Vec<Ticket>,
    timer: Vec<usize>,
    hold: Vec<usize>,
    attempt_failed: Vec<usize>,
    gap: Vec<usize>,
    stuck: Vec<usize>,
    unstuck: Vec<usize>,
}

/// Removes one from a list of expectations; whether it was there.
fn take<T: PartialEq>(expected: &mut Vec<T>, what: &T) -> bool {
    let found = expected.iter().position(|known| known == what);
    found.map(|at| expected.remove(at)).is_some()
}

pub(super) struct World {
    setup: Setup,
    subject: Subject,
    messages: Vec<Message>,
    open: [Option<Open>; QUEUES],
    /// Draining sessions that ended before they were quiet.
    leaving: Vec<SessionId>,
    /// Deliveries in the machine, in the order in which they were offered.
    here: Vec<(usize, SessionId)>,
    /// Attempts of keyless deliveries.
    keyless: HashMap<(usize, SessionId), u32>,
    runs: Vec<Run>,
    parkings: Vec<Parking>,
    holds: Vec<Hold>,
    /// Parked, and the loss of the session not yet seen.
    lost: Vec<(usize, SessionId)>,
    timers: Vec<(Ticket, usize)>,
    asks: Vec<Ticket>,
    tickets: HashSet<Ticket>,
    free: usize,
    paused: bool,
    expected: Expected,
}

impl World {
    pub(super) fn new(setup: Setup, mutant: Option<mutants::Mutant>) -> Self {
        let machine = Machine::new(policy(setup.max_attempts), setup.plan, setup.remember);
        Self {
            subject: Subject::new(machine, mutant),
            messages: Vec::new(),
            open: [None, None],
            leaving: Vec::new(),
            here: Vec::new(),
            keyless: HashMap::new(),
            runs: Vec::new(),
            parkings: Vec::new(),
            holds: Vec::new(),
            lost: Vec::new(),
            timers: Vec::new(),
            asks: Vec::new(),
            tickets: HashSet::new(),
            free: setup.permits,
            paused: false,
            expected: Expected::default(),
            setup,
        }
    }

    /// Plays a story, then lets everything come to its end.
    pub(super) fn play(mut self, steps: &[Step]) -> Checked {
        for step in steps {
            self.step(step)?;
        }
        self.come_to_an_end()
    }

    // ---- what happens

    fn step(&mut self, step: &Step) -> Checked {
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
    fn forget_holds(&mut self, number: usize) {
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
    fn come_to_an_end(&mut self) -> Checked {
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

    // ---- what the machine does about it

    fn tell(&mut self, event: Event<Msg>) -> Checked {
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
    fn is_exact(&self, number: usize) -> bool {
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

    fn is_live(&self, session: SessionId) -> bool {
        self.find(session).is_some()
    }

    fn is_draining(&self, session: SessionId) -> bool {
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
    fn unmoved(&self, session: SessionId) -> Vec<(usize, SessionId)> {
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

    fn count(&mut self, number: usize, session: SessionId) -> &mut u32 {
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

    fn tracks_that(&self, which: impl Fn(&State<Msg>) -> bool) -> usize {
        let tracks = self.subject.machine().tracks.iter();
        tracks.filter(|(_, track)| which(&track.state)).count()
    }
}
