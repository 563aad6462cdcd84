//! The EndpointSupervisor actor: owns the sessions of its shards, the credits, the lanes and the drain.
//!
//! ```text
//! shards ── batches ──► supervisor ── one message per lane and batch ──► lanes
//!    ▲                      │  ▲                                          │
//!    └── acknowledgements ──┘  └────────────── ended, in batches ─────────┘
//! ```
//! An endpoint over one queue has one shard, and whatever their number there is one set of lanes.
//!
//! It is the only one who acknowledges (invariant 5). From the moment a session is seen to be lost,
//! nothing of it is started or settled (invariant 8); what it finished is remembered, so that copies
//! need not run again.

mod drain;
mod handle;
mod intake;
mod shard;
mod spec;
mod start;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use actix::{
    Actor, AsyncContext, Context, Handler, Message, ResponseFuture, StreamHandler, Supervised,
};
use tokio::sync::{oneshot, watch};

use crate::balance::{Decision, Subscriptions};
use crate::endpoint::Endpoint;
use crate::envelope::{Delivery, Identity};
use crate::key::LaneIndex;
use crate::lane::{LaneGate, LaneLink, Mail, Outbox, ToLane};
use crate::mapping::MappingWatch;
use crate::observe::{EndpointSnapshot, EndpointState, EventKind};
use crate::outcome::Outcome;
use crate::port::SourceError;
use crate::session::SessionId;
use crate::settlement::Ending;

pub use handle::{DrainReport, EndpointHandle};
pub use spec::{EndpointSpec, check_endpoint};

use drain::Draining;
use shard::Shard;

/// How often the supervisor looks after paused lanes and used-up credits.
const HOUSEKEEPING: Duration = Duration::from_millis(250);
/// How long aborted attempts may take before their session is closed all the same.
const ABORT_PATIENCE: Duration = Duration::from_secs(1);

// ---- messages

/// What lanes tell the supervisor.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) enum FromLane {
    /// There is something in the outbox of the lanes of one thread.
    Settled(Arc<Outbox>),
    Forgotten(Identity, u32),
    /// The source has processed the acknowledgement of a message that ended without effect.
    BarrierPassed(Arc<Delivery>, Outcome),
    /// Nothing of a session that drains runs in the lane any more.
    Quiet(LaneIndex, SessionId),
    Paused,
    /// A failure rule says so.
    PauseEndpoint(Duration),
    HandlersGone,
    Restarted,
    /// The lane has panicked too often.
    LaneDied(LaneIndex),
    /// The poison handler has panicked too often.
    PoisonHandlerDied,
    /// The carrier of the mail for lanes has panicked too often.
    CarrierDied,
    /// The balancer has panicked too often.
    BalancerDied,
}

/// A message that has ended.
pub(crate) struct Settled {
    pub(crate) delivery: Arc<Delivery>,
    pub(crate) outcome: Outcome,
    /// Its session had ended before it did.
    pub(crate) orphan: bool,
}

/// Acknowledge, and answer whether the source is known to have processed it.
#[derive(Message)]
#[rtype(result = "bool")]
pub(crate) struct SettleWithBarrier {
    pub(crate) delivery: Arc<Delivery>,
    pub(crate) outcome: Outcome,
}

#[derive(Message)]
#[rtype(result = "()")]
struct Flush;

#[derive(Message)]
#[rtype(result = "Result<(), String>")]
struct FirstSession;

#[derive(Message)]
#[rtype(result = "EndpointSnapshot")]
struct AskSupervisor;

#[derive(Message)]
#[rtype(result = "DrainReport")]
struct Drain {
    within: Duration,
}

/// What the balance of the group wants.
#[derive(Message)]
#[rtype(result = "()")]
struct Rebalance(Decision);

/// An item of the source's stream: a batch, an error, or (without either) the end.
struct FromSource {
    shard: usize,
    session: SessionId,
    batch: Option<Result<Vec<Delivery>, SourceError>>,
}

// ---- the actor

/// Supervises one endpoint; see the module.
pub struct EndpointSupervisor {
    endpoint: Arc<Endpoint>,
    shards: Vec<Shard>,
    lanes: Arc<Vec<Arc<LaneLink>>>,
    mails: Vec<Arc<Mail>>,
    outboxes: Vec<Arc<Outbox>>,
    /// What was collected from them and is being settled. Here, so that a panic in the middle loses only the one
    /// outcome that it met.
    settled: VecDeque<Settled>,
    gates: Arc<Vec<Arc<LaneGate>>>,
    draining_flag: Arc<AtomicBool>,
    /// Unsettled deliveries per lane, to find the least loaded one.
    loads: Vec<usize>,
    /// Deliveries of one batch, by lane.
    by_lane: Vec<Vec<Arc<Delivery>>>,
    /// Attempts of keyless messages whose session has ended.
    earlier_attempts: HashMap<Identity, u32>,
    flush_scheduled: bool,
    /// A timer looks after acknowledgements that are kept back.
    look_scheduled: bool,
    any_paused: bool,
    /// No session is open, or opened, before.
    paused_until: Option<Instant>,
    /// Lanes that were given up. They report nothing any more.
    dead_lanes: Vec<LaneIndex>,
    first_session: Vec<oneshot::Sender<Result<(), String>>>,
    first_result: Option<Result<(), String>>,
    /// What the balancer is told.
    subscriptions: watch::Sender<Subscriptions>,
    mapping: Option<MappingWatch>,
    drain: Option<Draining>,
    state: watch::Sender<EndpointState>,
}

impl EndpointSupervisor {
    fn tell_lanes(&self, message: impl Fn() -> ToLane) {
        for lane in self.lanes.iter() {
            lane.tell(message());
        }
    }

    fn set_state(&self, state: EndpointState) {
        self.state
            .send_if_modified(|before| std::mem::replace(before, state) != state);
    }

    // ---- settling

    /// Marks a delivery ended; false if it cannot be settled, because its session has ended.
    fn mark_ended(&mut self, delivery: &Delivery) -> bool {
        let Some(live) = &mut self.shards[delivery.session().shard()].live else {
            return false;
        };
        if live.state.id() != delivery.session_id() || live.state.has_ended() {
            return false;
        }
        if let Some(lane) = live.book.ended(delivery.tag()) {
            self.loads[lane] -= 1;
        }
        true
    }

    fn settle_collected(&mut self) {
        while let Some(settled) = self.settled.pop_front() {
            let Settled {
                delivery,
                outcome,
                orphan,
            } = settled;
            let ended = !orphan && self.mark_ended(&delivery);
            let finished = &mut self.shards[delivery.session().shard()].finished;
            if ended {
                finished.record(delivery.identity(), outcome);
            } else {
                let ending = Ending {
                    outcome,
                    late: orphan,
                };
                finished.record_late(delivery.identity(), ending);
            }
        }
    }

    fn flush(&mut self, ctx: &mut Context<Self>) {
        self.flush_scheduled = false;
        let now = Instant::now();
        let shards = self.shards.iter_mut();
        let until = shards.filter_map(|shard| shard.acknowledge(now)).min();
        if let Some(until) = until.filter(|_| !self.look_scheduled) {
            // One timer at a time: what is kept back after it was set waits for the next one, or for what ends.
            self.look_scheduled = true;
            ctx.run_later(until.saturating_duration_since(now), |this, ctx| {
                this.look_scheduled = false;
                this.flush(ctx);
            });
        }
    }

    /// Acknowledges after everything that waits in the mailbox now, so that a burst of outcomes becomes
    /// few acknowledgements; without a timer, so that a single outcome is not delayed if nothing in front of it is.
    fn schedule_flush(&mut self, ctx: &mut Context<Self>) {
        if !self.flush_scheduled {
            self.flush_scheduled = true;
            ctx.notify(Flush);
        }
    }

    /// Something of Laneway itself is broken: finish what runs, and stop with an error.
    fn fail(&mut self, reason: String, ctx: &mut Context<Self>) {
        tracing::error!(
            endpoint = %self.endpoint.config.name,
            queue = %self.endpoint.queue,
            %reason,
            "endpoint failed: draining"
        );
        self.endpoint.emit(EventKind::Failed { reason });
        self.begin_drain(Duration::from_secs(30), true, ctx);
    }

    fn housekeeping(&mut self, ctx: &mut Context<Self>) {
        // A dead lane cannot say that it is quiet; without a permit taken nothing of it can run.
        if !self.dead_lanes.is_empty() && self.endpoint.permits.taken() == 0 {
            for lane in self.dead_lanes.clone() {
                for shard in 0..self.shards.len() {
                    if let Some(giving) = &self.shards[shard].giving {
                        self.lane_is_quiet(lane.get(), giving.session, ctx);
                    }
                }
                if let Some(drain) = &mut self.drain {
                    drain.quiet.mark(lane.get());
                }
            }
            self.stop_if_done(ctx);
        }
        if self.any_paused {
            // A lane pauses as a whole; a session without a new proof ends within a heartbeat.
            let mut live = self.shards.iter().flat_map(|shard| &shard.live);
            if live.all(|live| live.state.may_start()) {
                self.any_paused = false;
                self.tell_lanes(|| ToLane::Resume);
            }
        }
        self.watch_credits();
        self.renew_sessions(ctx);
    }

    /// Tells when few keys use up all credits of a shard.
    fn watch_credits(&mut self) {
        let keys = || self.lanes.iter().map(|lane| lane.tracks()).sum();
        let concurrency = self.endpoint.config.concurrency.get() as usize;
        for shard in &mut self.shards {
            let used_up = shard.in_flight() >= usize::from(shard.credits);
            if !used_up {
                shard.exhausted = false;
            } else if !shard.exhausted {
                let keys: usize = keys();
                // With as many keys as permits the credits are simply at work.
                if keys < concurrency {
                    shard.exhausted = true;
                    self.endpoint.emit(EventKind::CreditsExhausted {
                        queue: Arc::clone(&shard.queue),
                        keys,
                        credits: u32::from(shard.credits),
                    });
                }
            }
        }
    }
}

impl Actor for EndpointSupervisor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        ctx.run_interval(HOUSEKEEPING, Self::housekeeping);
        // After a restart something may lie there whose message was the one that panicked.
        for outbox in &self.outboxes {
            outbox.collect(&mut self.settled);
        }
        self.settle_collected();
        if self.drain.is_some() {
            // Restarted after a panic in the middle of a drain.
            self.drain_at_once(ctx);
        } else {
            self.open_wanted(ctx);
            // The timer of a pause is gone with the context that panicked.
            self.resume_when_over(ctx);
            self.review_state();
            self.review_subscriptions();
        }
    }
}

impl Supervised for EndpointSupervisor {
    /// After a panic of the supervisor's own code: its books may be half changed, and everything spawned
    /// in its context is gone. The session is given up, so that everything unsettled comes again.
    fn restarting(&mut self, _: &mut Context<Self>) {
        self.endpoint.emit(EventKind::ActorRestarted {
            actor: "supervisor",
        });
        for shard in &mut self.shards {
            let session = shard.last_session;
            shard.restart();
            self.lanes
                .iter()
                .for_each(|lane| lane.tell(ToLane::SessionEnded(session)));
        }
        // Perhaps it was the word of a lane's restart that panicked.
        self.tell_lanes(|| ToLane::AllEnded);
        self.loads.fill(0);
        self.by_lane.iter_mut().for_each(Vec::clear);
        self.flush_scheduled = false;
        self.look_scheduled = false;
    }
}

impl StreamHandler<FromSource> for EndpointSupervisor {
    fn handle(&mut self, item: FromSource, ctx: &mut Context<Self>) {
        let FromSource {
            shard,
            session,
            batch,
        } = item;
        let live = self.shards[shard].live.as_ref();
        if live.is_none_or(|live| live.state.id() != session) {
            return; // late news of a session that is over
        }
        match batch {
            // Not taken in: closing the session gives it back.
            Some(Ok(_)) if self.shards[shard].giving.is_some() => {}
            Some(Ok(batch)) => match self.arrived(shard, batch) {
                Ok(()) => self.schedule_flush(ctx),
                Err(reason) => self.session_lost(shard, reason, ctx),
            },
            Some(Err(error)) => self.session_lost(shard, error.to_string(), ctx),
            None => self.session_lost(shard, "the source ended the session".to_owned(), ctx),
        }
    }

    /// The end of one session's stream is not the end of the supervisor.
    fn finished(&mut self, _: &mut Context<Self>) {}
}

impl Handler<FromLane> for EndpointSupervisor {
    type Result = ();

    fn handle(&mut self, message: FromLane, ctx: &mut Context<Self>) {
        match message {
            FromLane::Settled(outbox) => {
                outbox.collect(&mut self.settled);
                self.settle_collected();
                self.schedule_flush(ctx);
            }
            FromLane::Forgotten(identity, attempts) => {
                if self.earlier_attempts.len() >= 2 * usize::from(self.endpoint.config.credits) {
                    self.earlier_attempts.clear(); // counts begin anew, order is not touched
                }
                self.earlier_attempts.insert(identity, attempts);
            }
            FromLane::Quiet(lane, session) => match &mut self.drain {
                Some(drain) if drain.rest == session => {
                    drain.quiet.mark(lane.get());
                    self.stop_if_done(ctx);
                }
                _ => self.lane_is_quiet(lane.get(), session, ctx),
            },
            FromLane::BarrierPassed(delivery, outcome) => {
                let shard = &mut self.shards[delivery.session().shard()];
                let session = shard.live.as_ref().map(|live| live.state.id());
                let identity = delivery.identity();
                if session == Some(delivery.session_id()) {
                    shard.finished.record(identity, outcome);
                } else {
                    let late = false;
                    shard
                        .finished
                        .record_late(identity, Ending { outcome, late });
                }
            }
            FromLane::Paused => self.any_paused = true,
            FromLane::PauseEndpoint(pause) => self.pause(pause, ctx),
            FromLane::HandlersGone => {
                let reason = "the runtime that runs the handlers has shut down".to_owned();
                self.fail(reason, ctx);
            }
            FromLane::Restarted => {
                self.endpoint
                    .emit(EventKind::ActorRestarted { actor: "lane" });
                for shard in 0..self.shards.len() {
                    if self.shards[shard].live.is_some() {
                        // The books are sound: what is kept back need not run again.
                        self.shards[shard].acknowledge_all();
                        self.session_lost(shard, "a lane was restarted".to_owned(), ctx);
                    } else {
                        // Between two sessions, or being closed: what the lane has taken over hears of it.
                        let session = self.shards[shard].last_session;
                        self.tell_lanes(|| ToLane::SessionEnded(session));
                    }
                }
                self.tell_lanes(|| ToLane::AllEnded);
            }
            FromLane::LaneDied(lane) => {
                self.dead_lanes.push(lane);
                self.fail("a lane panicked too often".to_owned(), ctx);
            }
            FromLane::PoisonHandlerDied => {
                self.fail("the poison handler panicked too often".to_owned(), ctx);
            }
            FromLane::BalancerDied => {
                self.fail("the balancer panicked too often".to_owned(), ctx);
            }
            FromLane::CarrierDied => {
                self.fail(
                    "the carrier of the lanes' mail panicked too often".to_owned(),
                    ctx,
                );
            }
        }
    }
}

impl Handler<Rebalance> for EndpointSupervisor {
    type Result = ();

    fn handle(&mut self, Rebalance(decision): Rebalance, ctx: &mut Context<Self>) {
        for shard in decision.subscribe {
            self.shards[shard].wanted = true;
            self.open(shard, ctx);
        }
        for shard in decision.give {
            self.shards[shard].wanted = false;
            self.give(shard);
        }
        self.review_state();
    }
}

impl Handler<Flush> for EndpointSupervisor {
    type Result = ();

    fn handle(&mut self, _: Flush, ctx: &mut Context<Self>) {
        self.flush(ctx);
    }
}

impl Handler<SettleWithBarrier> for EndpointSupervisor {
    type Result = ResponseFuture<bool>;

    fn handle(&mut self, settle: SettleWithBarrier, ctx: &mut Context<Self>) -> Self::Result {
        if settle.delivery.is_direct() {
            let settle_now = settle.delivery.take_direct();
            let alive = !settle.delivery.session().has_ended();
            if let Some(tell) = settle_now.filter(|_| alive) {
                tell(settle.outcome);
            }
            return Box::pin(async move { alive });
        }
        // Not remembered as finished yet: should the session end before the barrier, the copy must go through
        // its lane, which holds the key until that copy's own acknowledgement is known to be processed.
        if !self.mark_ended(&settle.delivery) {
            return Box::pin(async { false });
        }
        let shard = &mut self.shards[settle.delivery.session().shard()];
        shard.acknowledge_all();
        match &shard.live {
            Some(live) => {
                let barrier = live.control.barrier();
                let myself = ctx.address();
                Box::pin(async move {
                    let settled = barrier.await.is_ok();
                    if settled {
                        // A classic queue writes acknowledgements down later: a broker that is killed can forget
                        // even one that it has processed, and give the message again, after its successor. So
                        // it is remembered from here on, and before its key is released.
                        myself.do_send(FromLane::BarrierPassed(settle.delivery, settle.outcome));
                    }
                    settled
                })
            }
            None => Box::pin(async { false }),
        }
    }
}

impl Handler<FirstSession> for EndpointSupervisor {
    type Result = ResponseFuture<Result<(), String>>;

    fn handle(&mut self, _: FirstSession, _: &mut Context<Self>) -> Self::Result {
        if let Some(result) = self.first_result.clone() {
            return Box::pin(async move { result });
        }
        let (sender, receiver) = oneshot::channel();
        self.first_session.push(sender);
        Box::pin(async move {
            receiver
                .await
                .unwrap_or_else(|_| Err("the endpoint has stopped".to_owned()))
        })
    }
}

impl Handler<AskSupervisor> for EndpointSupervisor {
    type Result = ResponseFuture<EndpointSnapshot>;

    fn handle(&mut self, _: AskSupervisor, _: &mut Context<Self>) -> Self::Result {
        let mut snapshot = handle::snapshot_of(&self.endpoint, *self.state.borrow());
        snapshot.shards = self.shards.iter().map(Shard::snapshot).collect();
        snapshot.mapping_changes = self.mapping.as_ref().map_or(0, MappingWatch::differing);
        snapshot.in_flight = self.shards.iter().map(Shard::in_flight).sum();
        let lanes = Arc::clone(&self.lanes);
        Box::pin(async move {
            let parts = futures::future::join_all(lanes.iter().map(|lane| lane.snapshot())).await;
            for part in parts {
                snapshot.lane_depth.push(part.depth);
                snapshot.waiting_keys.extend(part.waiting);
            }
            snapshot
        })
    }
}

impl Handler<Drain> for EndpointSupervisor {
    type Result = ResponseFuture<DrainReport>;

    fn handle(&mut self, drain: Drain, ctx: &mut Context<Self>) -> Self::Result {
        self.begin_drain(drain.within, false, ctx);
        let (sender, receiver) = oneshot::channel();
        if let Some(drain) = &mut self.drain {
            drain.reports.push(sender);
        }
        Box::pin(async move { receiver.await.unwrap_or_default() })
    }
}
