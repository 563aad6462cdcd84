//! The Lane actor: performs what the [`machine`] decides.
//!
//! Owns the lane's state, and its restart after a panic of its own. Promises that a handler may fail, panic,
//! hang or block without the lane dying or going deaf (invariant 9): handlers run as tasks on a
//! multi-threaded runtime, never on the lane's own thread, and report their end in a message.
//! Does not settle: it tells the supervisor how messages ended, in batches.
//!
//! What the lane does is in the files beside: what it is told (`post.rs`), what the machine asks for (`perform.rs`), the
//! attempts that run (`runs.rs`), held keys (`holding.rs`), timers and the end of a pass (`alarm.rs`), what it says of
//! itself (`snapshot.rs`).
//!
//! The mailbox is no bound (an actix mailbox cannot be one). What comes from the source is bounded by
//! the endpoint's credits, what comes from direct senders by the slots of [`LaneAddr`].

mod address;
mod alarm;
mod attempt;
mod crew;
mod holding;
pub mod machine;
mod mail;
mod outbox;
mod perform;
mod post;
mod runs;
mod snapshot;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use actix::{Actor, Addr, Context, SpawnHandle, Supervised};
use slab::Slab;

pub use address::{LaneAddr, SendError};
pub(crate) use address::{LaneGate, LaneLink};
use attempt::Job;
pub(crate) use crew::Crew;
pub(crate) use mail::Mail;
pub(crate) use outbox::Outbox;
pub(crate) use post::ToLane;

use crate::endpoint::Endpoint;
use crate::envelope::{Delivery, Identity};
use crate::key::OrderingKey;
use crate::poison::PoisonHandler;
use crate::session::SessionId;
use crate::supervisor::{EndpointSupervisor, FromLane, Settled};
use holding::Hold;
use machine::{Effect, Item, Machine, Ticket};
use runs::Run;

impl Item for Arc<Delivery> {
    fn key(&self) -> Option<&OrderingKey> {
        Delivery::key(self)
    }
    fn session(&self) -> SessionId {
        self.session_id()
    }
    fn identity(&self) -> &Identity {
        Delivery::identity(self)
    }
    fn is_redelivered(&self) -> bool {
        Delivery::is_redelivered(self)
    }
    fn earlier_attempts(&self) -> u32 {
        self.earlier_attempts
    }
    fn source_attempts(&self) -> Option<u32> {
        Delivery::source_attempts(self)
    }
}

/// The actor of one lane.
pub(crate) struct Lane {
    endpoint: Arc<Endpoint>,
    link: Arc<LaneLink>,
    outbox: Arc<Outbox>,
    supervisor: Addr<EndpointSupervisor>,
    poison: Addr<PoisonHandler>,
    machine: Machine<Arc<Delivery>>,
    effects: Vec<Effect<Arc<Delivery>>>,
    /// Performed while `effects` is being walked.
    scratch: Vec<Effect<Arc<Delivery>>>,
    runs: Slab<Run>,
    /// Attempts that start at the end of this pass.
    starting: Vec<Job>,
    /// Ends of back-offs.
    timers: BTreeMap<(Instant, Ticket), ()>,
    alarm: Option<(Instant, SpawnHandle)>,
    /// What is held.
    holds: BTreeMap<Ticket, Hold>,
    /// The endpoint was last told of some.
    holds_reported: bool,
    /// Since when a track does not move, for snapshots.
    since: HashMap<Ticket, Instant>,
    /// What the attempt that has just ended said.
    detail: Option<String>,
    /// What attempts said that ended after their session: should it have been the last one, the message's
    /// copy is parked without another run.
    late_details: HashMap<Identity, String>,
    settled: Vec<Settled>,
    /// What the lane was told and has not looked at. Here and not in the message that brought it: should one
    /// of them make the lane panic, the restarted lane goes on with the next.
    post: VecDeque<ToLane>,
    /// Nothing starts any more.
    drains: bool,
    /// Sessions that drain and are not quiet yet, and under which name that is told.
    draining: BTreeMap<SessionId, SessionId>,
    /// Restarted, and what it has forgotten will come again in the next sessions only. Until all of before
    /// are known to be over nothing is taken: it would start before what was forgotten. (The end of one is
    /// not enough: that of another shard may be told while the lane restarts.)
    forgetful: bool,
}

impl Lane {
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        link: Arc<LaneLink>,
        outbox: Arc<Outbox>,
        supervisor: Addr<EndpointSupervisor>,
        poison: Addr<PoisonHandler>,
    ) -> Self {
        Self {
            machine: Self::new_machine(&endpoint),
            endpoint,
            link,
            outbox,
            supervisor,
            poison,
            effects: Vec::new(),
            scratch: Vec::new(),
            runs: Slab::new(),
            starting: Vec::new(),
            timers: BTreeMap::new(),
            alarm: None,
            holds: BTreeMap::new(),
            holds_reported: false,
            since: HashMap::new(),
            detail: None,
            late_details: HashMap::new(),
            settled: Vec::new(),
            post: VecDeque::new(),
            drains: false,
            draining: BTreeMap::new(),
            forgetful: false,
        }
    }

    fn new_machine(endpoint: &Endpoint) -> Machine<Arc<Delivery>> {
        let config = &endpoint.config;
        // Enough for every unsettled delivery of two sessions to be a head of this one lane.
        Machine::new(
            config.policy.clone(),
            config.plan,
            2 * usize::from(config.credits),
        )
    }
}

impl Actor for Lane {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        // After a restart: what came together with the message that panicked.
        self.read_post(ctx);
    }
}

impl Drop for Lane {
    /// Nobody hears of their end any more, and they cannot be settled.
    fn drop(&mut self) {
        self.abort_runs(None);
    }
}

impl Supervised for Lane {
    /// After a panic of the lane's own code its machine may be half changed, and the message that
    /// panicked is lost. The supervisor therefore ends the session, so that everything unsettled
    /// comes again, in order; the machine starts empty, but for the keys whose attempts still run:
    /// those must not be overtaken.
    fn restarting(&mut self, _: &mut Context<Self>) {
        self.machine = self.machine.successor();
        self.adopt_runs();
        // They are aborted, like all runs, and report that they were dropped.
        self.starting.clear();
        self.effects.clear();
        self.scratch.clear();
        self.timers.clear();
        self.since.clear();
        self.holds.clear();
        self.alarm = None;
        self.forgetful = true;
        // What has ended has, whatever panicked after it: were it not told, the copies would run again, and after
        // successors that ran in the same pass.
        self.tell_settled();
        self.supervisor.do_send(FromLane::Restarted);
    }
}
