//! A simulated world around one machine, and the naive model of what must hold in it.
//!
//! The world is a broker with two queues, the permits of an endpoint, running handlers, timers and a
//! parking place. It is moved by [`Step`]s that name what they touch by a number, taken modulo what
//! there is: so any list of steps is a valid story, and a shorter list is one too (shrinking).
//!
//! The model keeps a plain list of what each delivery has been through and knows nothing of the
//! machine's states. A promise that does not hold comes back as a [`Violation`] with its name.
//!
//! Here is what the world consists of. What happens in it is in `steps.rs`, the model in `model.rs`, the promises in
//! `promises.rs`.

mod model;
mod promises;
mod steps;

use std::collections::{HashMap, HashSet};

use super::mutants::Subject;
use super::*;

pub(super) use promises::*;

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
}
