//! Random stories with a source that keeps messages itself and counts attempts: a store.
//!
//! It hands out one message of a key at a time. To keep a message, or to park it, is one step in the database; its
//! answer comes later, or is lost with the session. Operators let what is held try again, counted anew.

use std::collections::{BTreeMap, HashMap};

use super::*;

const KEYS: usize = 3;
const LONG: Duration = Duration::from_secs(60);
const STORIES: u64 = 3_000;
const MAX: u32 = 3;

type Checked = Result<(), String>;

/// Machines that are broken on purpose, from outside.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mutant {
    SourceCountIsIgnored,
    OneAttemptTooMany,
    LongPauseIsSpentInTheLane,
    WhatIsHeldIsReportedAsGap,
    HeadThatCouldNotBeParkedIsForgotten,
    HeadThatCouldNotBeParkedRuns,
    WhatIsKeptIsParkedWithItsCopy,
    OperatorsRetryIsHeldAgain,
    KeylessIsHeld,
}

const MUTANTS: [Mutant; 9] = [
    Mutant::SourceCountIsIgnored,
    Mutant::OneAttemptTooMany,
    Mutant::LongPauseIsSpentInTheLane,
    Mutant::WhatIsHeldIsReportedAsGap,
    Mutant::HeadThatCouldNotBeParkedIsForgotten,
    Mutant::HeadThatCouldNotBeParkedRuns,
    Mutant::WhatIsKeptIsParkedWithItsCopy,
    Mutant::OperatorsRetryIsHeldAgain,
    Mutant::KeylessIsHeld,
];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Row {
    Ready,
    Later,
    Held,
    Gone,
}

struct Message {
    key: Option<usize>,
    row: Row,
    /// Attempts that the source has counted.
    counted: u32,
    /// Handled, perhaps without being settled.
    effect: bool,
    /// A lane has settled it; that may be lost. The supervisor knows its copy.
    settled: bool,
    /// Its gap was reported.
    reported: bool,
    /// It ended without effect, after so many attempts as the machine knew of; told once, and to be parked once.
    poison: Option<(PoisonReason, u32)>,
}

struct Session {
    id: SessionId,
    alive: bool,
    draining: bool,
    quiet: bool,
    out: Vec<usize>,
    /// Settled here, not in the database yet.
    ending: Vec<usize>,
}

struct Run {
    ticket: Ticket,
    number: usize,
    session: SessionId,
    /// The source has counted it.
    counted: bool,
}

struct Moving {
    ticket: Ticket,
    number: usize,
    session: SessionId,
    to: Row,
    /// It has taken place in the database.
    took_place: bool,
    settles_only: bool,
}

struct World {
    rng: fastrand::Rng,
    machine: Machine<Msg>,
    mutant: Option<Mutant>,
    plan: PoisonPlan,
    messages: Vec<Message>,
    session: Option<Session>,
    again: bool,
    runs: Vec<Run>,
    moving: Vec<Moving>,
    asks: Vec<Ticket>,
    timers: Vec<Ticket>,
    /// What each delivery's attempts are, as the machine must count them.
    counts: HashMap<(usize, SessionId), u32>,
    /// A failed attempt of this one is to be kept for later.
    keeps: Option<usize>,
    gaps: Vec<usize>,
    ending: bool,
}

fn check(holds: bool, what: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { Err(what()) }
}

impl World {
    fn new(seed: u64, mutant: Option<Mutant>) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let plan = [
            PoisonPlan::Park,
            PoisonPlan::Keep(None),
            PoisonPlan::Keep(None),
        ];
        let plan = plan[rng.usize(0..3)];
        let mut policy = Policy {
            keep_from: Some(LONG),
            ..policy(MAX)
        };
        match mutant {
            Some(Mutant::OneAttemptTooMany) => {
                policy.max_attempts = policy.max_attempts.saturating_add(1);
            }
            Some(Mutant::LongPauseIsSpentInTheLane) => policy.keep_from = None,
            _ => {}
        }
        Self {
            rng,
            machine: Machine::new(policy, plan, 100),
            mutant,
            plan,
            messages: Vec::new(),
            session: None,
            again: false,
            runs: Vec::new(),
            moving: Vec::new(),
            asks: Vec::new(),
            timers: Vec::new(),
            counts: HashMap::new(),
            keeps: None,
            gaps: Vec::new(),
            ending: false,
        }
    }

    fn play(mut self) -> Checked {
        for _ in 0..self.rng.usize(0..250) {
            self.step()?;
        }
        self.ending = true;
        for _ in 0..4_000 {
            let gone = self.messages.iter().all(|message| message.row == Row::Gone);
            let unseen = self.session.as_ref().is_some_and(|open| !open.alive);
            let gone = gone && !unseen && self.asks.is_empty();
            if gone && self.runs.is_empty() && self.moving.is_empty() && self.timers.is_empty() {
                let moving = |track: &Track<Msg>| !matches!(track.state, State::Remembered(_));
                let left = self
                    .machine
                    .tracks
                    .iter()
                    .filter(|(_, track)| moving(track));
                let left = left.count();
                return check(left == 0, || format!("{left} tracks are left"));
            }
            self.step()?;
        }
        Err("it does not come to an end".to_owned())
    }

    fn pick(&mut self, of: usize) -> Option<usize> {
        (of > 0).then(|| self.rng.usize(0..of))
    }

    fn step(&mut self) -> Checked {
        match self.rng.u8(0..16) {
            0 if !self.ending => {
                let key = self.rng.usize(0..KEYS + 1);
                self.messages.push(Message {
                    key: (key < KEYS).then_some(key),
                    row: Row::Ready,
                    counted: 0,
                    effect: false,
                    settled: false,
                    reported: false,
                    poison: None,
                });
                Ok(())
            }
            0..=3 => self.deliver(),
            4 | 5 => match self.pick(self.asks.len()) {
                Some(at) => {
                    let ask = self.asks.swap_remove(at);
                    self.tell(Event::Granted(ask))
                }
                None => Ok(()),
            },
            6..=8 => self.finish(),
            9 => match self.timers.pop() {
                Some(timer) => self.tell(Event::BackoffElapsed(timer)),
                None => Ok(()),
            },
            10..=12 => self.move_on(),
            13 => {
                // Time passes, or an operator lets it try again.
                let kept = |message: &&mut Message| matches!(message.row, Row::Later | Row::Held);
                let mut kept: Vec<_> = self.messages.iter_mut().filter(kept).collect();
                if !kept.is_empty() {
                    let at = self.rng.usize(0..kept.len());
                    let message = &mut kept[at];
                    if message.row == Row::Held {
                        message.counted = 0;
                        message.poison = None;
                    }
                    message.row = Row::Ready;
                }
                Ok(())
            }
            14 => {
                if let Some(session) = &mut self.session
                    && session.alive
                {
                    for number in session.ending.drain(..) {
                        self.messages[number].row = Row::Gone;
                    }
                }
                Ok(())
            }
            _ => self.disturb(),
        }
    }

    /// The session is lost, that is seen, or it drains and is closed.
    fn disturb(&mut self) -> Checked {
        let which = self.rng.u8(0..5);
        let Some(session) = &mut self.session else {
            return Ok(());
        };
        let id = session.id;
        match which {
            0 if !self.ending => {
                session.alive = false;
                Ok(())
            }
            1 if !self.ending && !session.draining => {
                session.draining = true;
                self.tell(Event::Drain(id))
            }
            _ if session.quiet && session.alive => {
                for number in session.ending.drain(..) {
                    self.messages[number].row = Row::Gone;
                }
                self.session = None;
                self.tell(Event::SessionEnded(id))
            }
            _ if !session.alive => {
                self.session = None;
                self.tell(Event::SessionEnded(id))
            }
            _ => Ok(()),
        }
    }

    fn deliver(&mut self) -> Checked {
        let again = self.again;
        let session = self.session.get_or_insert_with(|| Session {
            id: SessionId::next(),
            alive: true,
            draining: false,
            quiet: false,
            out: Vec::new(),
            ending: Vec::new(),
        });
        self.again = true;
        if !session.alive || session.draining {
            return Ok(());
        }
        // The first of each key that is not gone.
        let mut first = BTreeMap::new();
        for (number, message) in self.messages.iter().enumerate() {
            if message.row != Row::Gone && !session.ending.contains(&number) {
                first.entry(message.key.ok_or(number)).or_insert(number);
            }
        }
        let free = |number: &usize| {
            self.messages[*number].row == Row::Ready && !session.out.contains(number)
        };
        let free: Vec<_> = first.into_values().filter(free).collect();
        let id = session.id;
        let Some(at) = (!free.is_empty()).then(|| self.rng.usize(0..free.len())) else {
            return Ok(());
        };
        let number = free[at];
        if self.messages[number].settled {
            session.ending.push(number);
            return Ok(());
        }
        session.out.push(number);
        let message = &self.messages[number];
        self.counts.insert((number, id), message.counted);
        let name = number.to_string();
        self.tell(Event::Offered(Msg {
            number,
            key: message.key.map(OrderingKey::from),
            session: id,
            identity: identity(Some(&name), &name),
            redelivered: again || message.counted > 0,
            earlier: 0,
            counted: Some(message.counted),
        }))
    }

    fn is_live(&self, session: SessionId) -> bool {
        self.session.as_ref().is_some_and(|open| open.id == session)
    }

    fn finish(&mut self) -> Checked {
        let Some(at) = self.pick(self.runs.len()) else {
            return Ok(());
        };
        let (number, id) = (self.runs[at].number, self.runs[at].session);
        // Counting takes the lease.
        let alive = self
            .session
            .as_ref()
            .is_some_and(|open| open.id == id && open.alive);
        if !self.runs[at].counted && alive && self.rng.u8(0..4) > 0 {
            self.runs[at].counted = true;
            self.messages[number].counted += 1;
            return Ok(());
        }
        let run = self.runs.remove(at);
        let live = self.is_live(id);
        let result = match (run.counted, self.rng.u8(0..8)) {
            // While it is live only a runtime that shuts down drops it; then nothing more runs.
            (false, _) | (true, 0) if !live || !run.counted => RunResult::Aborted,
            (_, 0..=3) => RunResult::Handled,
            (_, 4) => failed(FailureKind::Transient),
            (_, 5) => failed(FailureKind::RetryAfter(LONG)),
            (_, 6) => failed_by(FailureKind::Permanent, DISCARD),
            _ => failed(FailureKind::Permanent),
        };
        let attempts = self.counts[&(number, id)];
        match result {
            RunResult::Aborted => {
                self.counts.insert((number, id), attempts - 1);
            }
            RunResult::Handled => self.messages[number].effect = true,
            RunResult::Failed { kind, plan, chance } => {
                match self.machine.policy.verdict(attempts, kind, plan, chance) {
                    Verdict::RetryAfter(pause) if pause >= LONG && live => {
                        self.keeps = Some(number);
                    }
                    Verdict::Poison(reason) | Verdict::Discard(reason)
                        if live || self.messages[number].key.is_some() =>
                    {
                        self.messages[number].poison = Some((reason, attempts));
                    }
                    _ => {}
                }
            }
        }
        let ticket = run.ticket;
        self.tell(Event::Finished { ticket, result })?;
        check(self.keeps.take().is_none(), || {
            format!("{number} is not kept for later")
        })
    }

    /// A move gets one step on.
    fn move_on(&mut self) -> Checked {
        let Some(at) = self.pick(self.moving.len()) else {
            return Ok(());
        };
        let lost_answer = self.rng.bool();
        let moving = &mut self.moving[at];
        let (ticket, number, to) = (moving.ticket, moving.number, moving.to);
        let session = self
            .session
            .as_mut()
            .filter(|open| open.id == moving.session && open.alive);
        match session {
            Some(_) if !moving.took_place => {
                moving.took_place = true;
                self.messages[number].row = to;
                return Ok(());
            }
            Some(session) => session.out.retain(|out| *out != number),
            None => {}
        }
        let answered = session_is(&self.session, moving.session);
        let moving = self.moving.remove(at);
        if answered {
            self.report(number, to);
            return self.told_end(Event::Parked {
                ticket,
                settled: true,
            });
        }
        if moving.settles_only || (moving.took_place && !lost_answer) {
            self.report(number, to);
            return self.told_end(Event::Parked {
                ticket,
                settled: false,
            });
        }
        self.tell(Event::ParkingEnded(ticket))
    }

    /// Once; a keyless message is another one in each session.
    fn report(&mut self, number: usize, to: Row) {
        if to != Row::Gone {
            return;
        }
        let message = &mut self.messages[number];
        let before = std::mem::replace(&mut message.reported, true);
        if message.key.is_none() || !before {
            self.gaps.push(number);
        }
    }

    fn told_end(&mut self, event: Event<Msg>) -> Checked {
        self.tell(event)?;
        let left = std::mem::take(&mut self.gaps);
        check(left.is_empty(), || format!("no gap reported of {left:?}"))
    }

    fn tell(&mut self, event: Event<Msg>) -> Checked {
        let mut effects = Vec::new();
        self.handle(event, &mut effects);
        for effect in effects {
            self.perform(effect)?;
        }
        Ok(())
    }

    /// `handle`, and what the mutant does otherwise.
    fn handle(&mut self, mut event: Event<Msg>, effects: &mut Vec<Effect<Msg>>) {
        let machine = &mut self.machine;
        let memories = |machine: &mut Machine<Msg>, change: fn(&mut Memory)| {
            for (_, track) in &mut machine.tracks {
                if let State::Remembered(memory) = &mut track.state {
                    change(memory);
                }
            }
        };
        match (self.mutant, &mut event) {
            (Some(Mutant::SourceCountIsIgnored), Event::Offered(delivery)) => {
                delivery.counted = None;
            }
            (Some(Mutant::OperatorsRetryIsHeldAgain), Event::Offered(delivery)) => {
                let slot = delivery
                    .key
                    .as_ref()
                    .and_then(|key| machine.by_key.get(key));
                if let Some(slot) = slot
                    && let State::Remembered(memory) = &machine.tracks[*slot].state
                {
                    delivery.counted = delivery.counted.max(Some(memory.attempts));
                }
            }
            (Some(Mutant::HeadThatCouldNotBeParkedIsForgotten), Event::ParkingEnded(_)) => return,
            _ => {}
        }
        machine.handle(event.clone(), effects);
        match (self.mutant, event) {
            (Some(Mutant::HeadThatCouldNotBeParkedRuns), _) => memories(machine, |memory| {
                if let Next::End(..) = memory.next {
                    memory.next = Next::Run;
                }
            }),
            (Some(Mutant::WhatIsKeptIsParkedWithItsCopy), Event::Parked { .. }) => {
                memories(machine, |memory| {
                    if let Next::Run = memory.next {
                        memory.next = Next::End(PoisonReason::Failed, PoisonPlan::Park);
                    }
                });
            }
            (Some(Mutant::WhatIsHeldIsReportedAsGap | Mutant::KeylessIsHeld), _) => {
                let gap = self.mutant == Some(Mutant::WhatIsHeldIsReportedAsGap);
                for at in 0..effects.len() {
                    if let Effect::Park {
                        delivery,
                        reason,
                        attempts,
                        place,
                        ..
                    } = &mut effects[at]
                    {
                        if !gap && delivery.key.is_none() {
                            *place = Place::Kept(None);
                        } else if gap && *place == Place::Kept(None) {
                            let (delivery, outcome) = (delivery.clone(), Outcome::Parked);
                            let (reason, attempts) = (*reason, *attempts);
                            effects.push(Effect::Gap {
                                delivery,
                                reason,
                                outcome,
                                attempts,
                            });
                        }
                    }
                }
            }
            _ => {}
        }
    }

    fn perform(&mut self, effect: Effect<Msg>) -> Checked {
        match effect {
            Effect::AskPermit(ticket) => self.asks.push(ticket),
            Effect::Start {
                ticket,
                delivery,
                attempt,
            } => {
                self.check_start(&delivery, attempt)?;
                self.counts
                    .insert((delivery.number, delivery.session), attempt);
                self.runs.push(Run {
                    ticket,
                    number: delivery.number,
                    session: delivery.session,
                    counted: false,
                });
            }
            Effect::ArmTimer { ticket, .. } => {
                let live = self.keeps.is_none();
                check(live, || "a long pause is spent in the lane".to_owned())?;
                self.timers.push(ticket);
            }
            Effect::Settle { delivery, .. } => {
                let number = delivery.number;
                check(self.messages[number].effect, || {
                    format!("{number} was not handled")
                })?;
                let open = self
                    .session
                    .as_mut()
                    .filter(|open| open.id == delivery.session);
                let Some(open) = open else {
                    return Err(format!("{number} is settled after its session"));
                };
                open.out.retain(|out| *out != number);
                open.ending.push(number);
                self.messages[number].settled = true;
            }
            Effect::Park {
                ticket,
                delivery,
                reason,
                attempts,
                place,
            } => {
                self.check_park(&delivery, reason, attempts, place)?;
                let to = match place {
                    Place::Parking => Row::Gone,
                    Place::Kept(Some(_)) => Row::Later,
                    Place::Kept(None) => Row::Held,
                };
                self.begin_move(ticket, &delivery, to, false)?;
            }
            // The supervisor knows the copy of a keyless one.
            Effect::Orphaned { delivery, .. } if delivery.key.is_none() => {
                self.messages[delivery.number].settled = true;
            }
            Effect::SettleWithBarrier {
                ticket, delivery, ..
            } => {
                let poison = self.messages[delivery.number].poison;
                check(poison.is_some(), || {
                    format!("{} is no poison", delivery.number)
                })?;
                self.begin_move(ticket, &delivery, Row::Gone, true)?;
            }
            Effect::Gap { delivery, .. } => {
                let at = self.gaps.iter().position(|gap| *gap == delivery.number);
                let Some(at) = at else {
                    return Err(format!("{} leaves no gap", delivery.number));
                };
                self.gaps.remove(at);
            }
            Effect::Quiet(session) => {
                let runs = self.runs.iter().any(|run| run.session == session);
                let moves = self.moving.iter().any(|moving| moving.session == session);
                let live = self.is_live(session);
                check(!(live && (runs || moves)), || "quiet too early".to_owned())?;
                if let Some(open) = self.session.as_mut().filter(|open| open.id == session) {
                    open.quiet = true;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn begin_move(&mut self, ticket: Ticket, of: &Msg, to: Row, settles_only: bool) -> Checked {
        let (number, session) = (of.number, of.session);
        check(self.is_live(session), || {
            format!("{number} is moved after its session")
        })?;
        self.moving.push(Moving {
            ticket,
            number,
            session,
            to,
            took_place: false,
            settles_only,
        });
        Ok(())
    }

    fn check_start(&self, delivery: &Msg, attempt: u32) -> Checked {
        let (number, session) = (delivery.number, delivery.session);
        let message = &self.messages[number];
        let open = self
            .session
            .as_ref()
            .filter(|open| open.id == session && !open.draining);
        check(open.is_some(), || format!("{number} starts in no session"))?;
        let counted = self.counts[&(number, session)] + 1;
        check(attempt == counted, || {
            format!("{number}: attempt {attempt}, not {counted}")
        })?;
        check(attempt <= MAX, || {
            format!("{number}: attempt {attempt} of {MAX}")
        })?;
        let of_key = |other: usize| {
            other == number || { message.key.is_some() && self.messages[other].key == message.key }
        };
        let runs = self
            .runs
            .iter()
            .any(|run| message.key.is_some() && of_key(run.number));
        check(!runs, || {
            format!("{number} starts while another of its key runs")
        })?;
        if message.key.is_none() {
            return Ok(());
        }
        let before = (0..number).find(|&before| {
            let ended = open.is_some_and(|open| open.ending.contains(&before));
            of_key(before) && self.messages[before].row != Row::Gone && !ended
        });
        check(before.is_none(), || {
            format!("{number} starts before {before:?}")
        })?;
        // Of an ended session the row may be kept: then its copy would not be here.
        check(message.row == Row::Ready || self.is_lost(), || {
            format!("{number} is kept")
        })?;
        check(!message.effect, || {
            format!("{number} was handled, and runs again")
        })?;
        let poison = message
            .poison
            .filter(|(_, made)| delivery.counted >= Some(*made));
        check(poison.is_none(), || {
            format!("{number} is poison, and runs again")
        })
    }

    fn is_lost(&self) -> bool {
        self.session.as_ref().is_none_or(|open| !open.alive)
    }

    fn check_park(
        &mut self,
        delivery: &Msg,
        reason: PoisonReason,
        attempts: u32,
        place: Place,
    ) -> Checked {
        let number = delivery.number;
        let message = &self.messages[number];
        let again = self
            .moving
            .iter()
            .any(|moving| (moving.number, moving.session) == (number, delivery.session));
        check(!again, || format!("{number} is moved twice"))?;
        if let Place::Kept(Some(pause)) = place {
            let kept = self.keeps.take() == Some(number) && pause == LONG;
            return check(kept, || format!("{number} is kept for {pause:?}"));
        }
        let expected = match self.plan {
            PoisonPlan::Keep(None) if message.key.is_some() => Place::Kept(None),
            _ => Place::Parking,
        };
        check(place == expected, || format!("{number} goes to {place:?}"))?;
        let known = message.poison.filter(|(_, made)| {
            delivery.counted >= Some(*made) || {
                // It has just failed, in this session.
                self.counts[&(number, delivery.session)] == *made
            }
        });
        match known {
            Some((why, _)) if why == reason => Ok(()),
            _ => {
                let used_up = reason == PoisonReason::Abandoned && attempts >= MAX;
                let counted = delivery.counted == Some(attempts);
                check(used_up && counted, || {
                    format!("{number} is parked: {reason}, {attempts}")
                })
            }
        }
    }
}

fn session_is(open: &Option<Session>, session: SessionId) -> bool {
    open.as_ref()
        .is_some_and(|open| open.id == session && open.alive)
}

#[test]
fn no_story_with_a_source_that_keeps_messages_breaks_a_promise() {
    let stories = match std::env::var_os("LANEWAY_SOAK") {
        None => STORIES,
        Some(_) => 100 * STORIES,
    };
    for seed in 0..stories {
        if let Err(broken) = World::new(seed, None).play() {
            panic!("seed {seed}: {broken}");
        }
    }
}

#[test]
fn every_broken_twin_of_a_keeping_lane_is_found() {
    let found = |mutant| (0..STORIES).any(|seed| World::new(seed, Some(mutant)).play().is_err());
    let survivors: Vec<_> = MUTANTS
        .into_iter()
        .filter(|mutant| !found(*mutant))
        .collect();
    assert!(survivors.is_empty(), "not found: {survivors:?}");
}
