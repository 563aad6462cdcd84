//! The Lane actor: performs what the [`machine`] decides.
//!
//! Owns the lane's timers and its table of running attempts. Promises that a handler may fail, panic,
//! hang or block without the lane dying or going deaf (invariant 9): handlers run as tasks on a
//! multi-threaded runtime, never on the lane's own thread, and report their end in a message.
//! Does not settle: it tells the supervisor how messages ended, in batches.
//!
//! The mailbox is no bound (an actix mailbox cannot be one). What comes from the source is bounded by
//! the endpoint's credits, what comes from direct senders by the slots of [`LaneAddr`].

mod address;
mod attempt;
mod crew;
pub mod machine;
mod mail;
mod outbox;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::{
    Actor, ActorContext, Addr, AsyncContext, Context, Handler, Message, SpawnHandle, Supervised,
};
use futures::future::AbortHandle;
use tokio::sync::mpsc;

pub use address::{LaneAddr, SendError};
pub(crate) use address::{LaneGate, LaneLink};
use attempt::Job;
pub(crate) use attempt::RunEnd;
pub(crate) use crew::Crew;
pub(crate) use mail::Mail;
pub(crate) use outbox::Outbox;

use crate::endpoint::Endpoint;
use crate::envelope::{Delivery, Identity, MessageId};
use crate::holds::HeldKey;
use crate::key::{Fingerprint, OrderingKey};
use crate::observe::{EventKind, HoldOver, WaitReason, WaitingKey};
use crate::outcome::{Outcome, PoisonReason};
use crate::permits::Permit;
use crate::poison::{ParkingJob, PoisonHandler};
use crate::port::{DeadLetter, Place};
use crate::session::SessionId;
use crate::supervisor::{EndpointSupervisor, FromLane, Settled};
use machine::{Effect, Event, HoldEnd, Item, Machine, RunResult, Ticket, Waiting};

/// How often a lane with running attempts looks for those that overstay.
const SWEEP: Duration = Duration::from_millis(250);
/// How long an aborted attempt may take to be dropped before its key is reported stuck.
const ABORT_PATIENCE: Duration = Duration::from_secs(1);

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

/// Everything that a lane is told at one time, in order.
#[derive(Message)]
#[rtype(result = "()")]
struct Post(Vec<ToLane>);

/// What a lane is told.
pub(crate) enum ToLane {
    /// Deliveries of the source, in order.
    Offer(Vec<Arc<Delivery>>),
    /// A delivery of a direct sender.
    Direct(Arc<Delivery>),
    /// The permit that was asked for.
    Granted(Ticket, Permit),
    /// A run has ended: its future has returned or was dropped.
    RunEnded(RunId, RunEnd),
    /// The head is parked, and perhaps settled.
    Parked { ticket: Ticket, settled: bool },
    /// The head cannot be parked any more: its session has ended.
    ParkingEnded(Ticket),
    /// An operator ends the hold of a key. Answered by the lane that holds it.
    EndHold {
        key: Fingerprint,
        end: HoldEnd,
        done: mpsc::UnboundedSender<()>,
    },
    /// Held keys use too many credits, and this hold is the oldest.
    HoldTooMany(Ticket),
    /// A session ended.
    SessionEnded(SessionId),
    /// All sessions of before have: what is offered from now on comes from new ones, and so completely.
    AllEnded,
    /// Nothing of a session may start any more; tell when nothing of it runs.
    Drain(SessionId),
    /// Nothing may start any more; tell, under this name, when nothing runs of direct senders' sessions and
    /// of sessions that were lost.
    DrainAll(SessionId),
    /// A new proof of life: things may start again.
    Resume,
    /// The time for a drain is over: abort what runs, of one session or of all.
    AbortRuns(Option<SessionId>),
    /// The endpoint has stopped.
    Stop,
    /// Panics, to test the restart of the lane.
    #[cfg(any(test, feature = "testing"))]
    Panic,
}

/// Asks a lane for its part of a snapshot.
#[derive(Message)]
#[rtype(result = "LaneSnapshot")]
pub(crate) struct AskLane;

/// A lane's part of a snapshot.
#[derive(Debug, Default, actix::MessageResponse)]
pub(crate) struct LaneSnapshot {
    pub(crate) depth: usize,
    pub(crate) waiting: Vec<WaitingKey>,
}

/// Names one attempt for as long as it runs. (Its ticket changes when the lane restarts.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RunId(u64);

/// One attempt that runs.
struct Run {
    ticket: Ticket,
    attempt: u32,
    abort: AbortHandle,
    delivery: Arc<Delivery>,
    /// When the handler's own time-out fires, in its task.
    deadline: Option<Instant>,
    abort_at: Option<Instant>,
    aborted: Option<Instant>,
    reported_stuck: bool,
}

/// One held head.
struct Hold {
    shard: usize,
    since: Instant,
    key: Option<Fingerprint>,
    message: Option<MessageId>,
    reason: PoisonReason,
    identity: Identity,
    /// The last error's text, with the key replaced.
    detail: String,
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
    runs: HashMap<RunId, Run>,
    next_run: u64,
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
            runs: HashMap::new(),
            next_run: 0,
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

    /// Feeds one event and performs everything that follows from it.
    fn feed(&mut self, event: Event<Arc<Delivery>>, permit: Option<Permit>) {
        self.machine.handle(event, &mut self.effects);
        self.perform_all(permit);
    }

    /// Performs what the machine asks for. Performing can feed further events; what follows from them
    /// comes last.
    fn perform_all(&mut self, mut permit: Option<Permit>) {
        let mut at = 0;
        while at < self.effects.len() {
            let effect = std::mem::replace(&mut self.effects[at], Effect::ReturnPermit);
            at += 1;
            self.perform(effect, &mut permit);
        }
        self.effects.clear();
    }

    fn perform(&mut self, effect: Effect<Arc<Delivery>>, permit: &mut Option<Permit>) {
        match effect {
            Effect::AskPermit(ticket) => {
                if let Some(granted) = self.endpoint.permits.take_or_wait(&self.link, ticket) {
                    // The grant is answered before the next request is made, so that there is one permit
                    // in hand at most.
                    let mut answer = std::mem::take(&mut self.scratch);
                    self.machine.handle(Event::Granted(ticket), &mut answer);
                    let mut granted = Some(granted);
                    for effect in answer.drain(..) {
                        self.perform(effect, &mut granted);
                    }
                    self.scratch = answer;
                }
            }
            Effect::ReturnPermit => drop(permit.take()),
            Effect::Start {
                ticket,
                delivery,
                attempt,
            } => {
                if let Some(permit) = permit.take() {
                    self.start(ticket, delivery, attempt, permit);
                }
            }
            Effect::Cancel(ticket) => {
                if let Some(run) = self.runs.values_mut().find(|run| run.ticket == ticket) {
                    run.abort_at = Some(Instant::now() + self.endpoint.config.abort_grace);
                    if self.endpoint.config.abort_grace.is_zero() {
                        run.abort();
                    }
                }
            }
            Effect::ArmTimer { ticket, after } => {
                let now = Instant::now();
                self.since.insert(ticket, now);
                // A pause too long for the clock never ends, which is what was asked for.
                if let Some(at) = now.checked_add(after) {
                    self.timers.insert((at, ticket), ());
                }
            }
            Effect::AttemptFailed {
                delivery,
                attempt,
                kind,
                retry_in,
            } => {
                let key = self.fingerprint(&delivery);
                let message = delivery.envelope().id.clone();
                tracing::warn!(
                    endpoint = %self.endpoint.config.name,
                    queue = %self.endpoint.queue_of(&delivery),
                    key = key.map(tracing::field::display),
                    message = message.as_ref().map(tracing::field::display),
                    attempt,
                    failure = ?kind,
                    ?retry_in,
                    "attempt failed"
                );
                self.endpoint.emit(EventKind::AttemptFailed {
                    key,
                    message,
                    attempt,
                    failure: kind,
                    retry_in,
                });
            }
            Effect::Settle { delivery, outcome } => self.settle(delivery, outcome, false),
            Effect::Orphaned { delivery, outcome } => self.settle(delivery, outcome, true),
            Effect::Forgotten { delivery, attempts } => {
                let identity = delivery.identity().clone();
                self.supervisor
                    .do_send(FromLane::Forgotten(identity, attempts));
            }
            Effect::Park {
                ticket,
                delivery,
                reason,
                attempts,
                place,
            } => {
                self.since.insert(ticket, Instant::now());
                let detail = self
                    .detail
                    .take()
                    .or_else(|| self.late_details.remove(delivery.identity()))
                    .unwrap_or_default();
                if place == Place::Kept(None) {
                    self.tell_held(&delivery, reason, attempts, None);
                }
                let letter = DeadLetter {
                    endpoint: Arc::clone(&self.endpoint.config.name),
                    queue: Arc::clone(self.endpoint.queue_of(&delivery)),
                    key: self.endpoint.fingerprint(delivery.key()),
                    reason,
                    place,
                    detail: self.endpoint.redact(&detail, delivery.key()),
                    attempts,
                    given_up_at: std::time::SystemTime::now(),
                    delivery,
                };
                self.poison.do_send(ParkingJob {
                    lane: Arc::clone(&self.link),
                    ticket,
                    delivery: Arc::clone(&letter.delivery),
                    outcome: match place {
                        Place::Parking => Outcome::Parked,
                        Place::Kept(_) => Outcome::Kept,
                    },
                    letter: Some(Arc::new(letter)),
                });
            }
            Effect::Hold {
                ticket,
                delivery,
                reason,
                attempts,
                at_most,
            } => self.hold(ticket, &delivery, reason, attempts, at_most),
            Effect::SettleWithBarrier {
                ticket,
                delivery,
                outcome,
            } => {
                self.since.insert(ticket, Instant::now());
                self.poison.do_send(ParkingJob {
                    lane: Arc::clone(&self.link),
                    ticket,
                    delivery,
                    outcome,
                    letter: None,
                });
            }
            Effect::PauseEndpoint(pause) => {
                self.supervisor.do_send(FromLane::PauseEndpoint(pause));
            }
            Effect::Gap {
                delivery,
                reason,
                outcome,
                attempts,
            } => self
                .endpoint
                .report_gap(&delivery, reason, outcome, attempts),
            Effect::Stuck(delivery) => {
                let key = self.fingerprint(&delivery);
                let message = delivery.envelope().id.clone();
                tracing::error!(
                    endpoint = %self.endpoint.config.name,
                    queue = %self.endpoint.queue_of(&delivery),
                    key = key.map(tracing::field::display),
                    message = message.as_ref().map(tracing::field::display),
                    "handler blocks its thread and cannot be aborted: its key waits for it"
                );
                self.endpoint.emit(EventKind::Stuck { key, message });
            }
            Effect::Unstuck(delivery) => {
                let key = self.fingerprint(&delivery);
                self.endpoint.emit(EventKind::Unstuck { key });
            }
            Effect::Quiet(session) => {
                if let Some(name) = self.draining.remove(&session)
                    && !self.draining.values().any(|other| *other == name)
                {
                    // What ended in this very step must be acknowledged before the session is closed.
                    self.tell_settled();
                    let quiet = FromLane::Quiet(self.link.index(), name);
                    self.supervisor.do_send(quiet);
                }
            }
        }
    }

    fn start(&mut self, ticket: Ticket, delivery: Arc<Delivery>, attempt: u32, permit: Permit) {
        if !Delivery::session(&delivery).may_start() {
            drop(permit);
            self.not_started(ticket, &delivery);
            return;
        }
        let deadline = self
            .endpoint
            .config
            .handler_timeout
            .and_then(|bound| Instant::now().checked_add(bound));
        let id = RunId(self.next_run);
        self.next_run += 1;
        let (job, abort) = attempt::prepare(
            &self.endpoint,
            &self.link,
            id,
            Arc::clone(&delivery),
            attempt,
            permit,
        );
        let run = Run {
            ticket,
            attempt,
            abort,
            delivery,
            deadline,
            abort_at: None,
            aborted: None,
            reported_stuck: false,
        };
        self.runs.insert(id, run);
        self.starting.push(job);
    }

    /// The session does not allow a start: it has ended (its end is about to be reported here, and is
    /// taken for known), or its proof of life is too old (then nothing starts until there is a new
    /// one; the supervisor watches for it); or it is to be closed, and gives this message back.
    fn not_started(&mut self, ticket: Ticket, delivery: &Delivery) {
        let session = delivery.session();
        if session.has_ended() {
            let ended = Event::SessionEnded(session.id());
            self.machine.handle(ended, &mut self.effects);
        } else if !session.is_draining() {
            self.supervisor.do_send(FromLane::Paused);
            self.machine.handle(Event::Paused, &mut self.effects);
        }
        let result = RunResult::Aborted;
        self.machine
            .handle(Event::Finished { ticket, result }, &mut self.effects);
    }

    fn run_ended(&mut self, id: RunId, end: RunEnd) {
        let Some(run) = self.runs.remove(&id) else {
            return;
        };
        let ticket = run.ticket;
        let result = match end {
            RunEnd::Handled => RunResult::Handled,
            RunEnd::Failed { kind, plan, detail } => {
                self.detail = Some(detail);
                RunResult::Failed {
                    kind,
                    plan,
                    chance: fastrand::f64(),
                }
            }
            RunEnd::NotStarted => {
                self.not_started(ticket, &run.delivery);
                self.perform_all(None);
                return;
            }
            RunEnd::Dropped => {
                if run.aborted.is_none() {
                    // Nobody here aborted it: the runtime that runs the handlers is shutting down, and would
                    // drop every further attempt as well.
                    self.machine.handle(Event::Paused, &mut self.effects);
                    self.supervisor.do_send(FromLane::HandlersGone);
                }
                RunResult::Aborted
            }
        };
        if !matches!(result, RunResult::Aborted) {
            self.endpoint.counters.attempts.add(1);
        }
        self.feed(Event::Finished { ticket, result }, None);
        // Not taken: the message is not parked now. Never left here for another one, whose key is not the
        // one that is replaced in it.
        if let Some(detail) = self.detail.take()
            && Delivery::session(&run.delivery).has_ended()
        {
            self.keep_detail(run.delivery.identity().clone(), detail);
        }
    }

    fn keep_detail(&mut self, identity: Identity, detail: String) {
        if self.late_details.len() >= 2 * usize::from(self.endpoint.config.credits) {
            self.late_details.clear(); // a parked message without a text, nothing worse
        }
        self.late_details.insert(identity, detail);
    }

    fn settle(&mut self, delivery: Arc<Delivery>, outcome: Outcome, orphan: bool) {
        match outcome {
            Outcome::Handled if !orphan => self.endpoint.counters.handled.add(1),
            _ => {}
        }
        if delivery.is_direct() {
            if let Some(settle) = delivery.take_direct()
                && !orphan
            {
                settle(outcome);
            }
        } else {
            self.settled.push(Settled {
                delivery,
                outcome,
                orphan,
            });
        }
    }

    fn hold(
        &mut self,
        ticket: Ticket,
        delivery: &Arc<Delivery>,
        reason: PoisonReason,
        attempts: u32,
        at_most: Duration,
    ) {
        let since = Instant::now();
        let detail = self.detail.take();
        let detail = detail.or_else(|| self.late_details.remove(delivery.identity()));
        let detail = detail.unwrap_or_default();
        let (key, message) = self.tell_held(delivery, reason, attempts, Some(at_most));
        self.since.insert(ticket, since);
        self.timers.insert((since + at_most, ticket), ());
        let hold = Hold {
            shard: Delivery::session(delivery).shard(),
            since,
            key,
            message,
            reason,
            identity: delivery.identity().clone(),
            detail: self.endpoint.redact(&detail, delivery.key()),
        };
        self.holds.insert(ticket, hold);
    }

    /// A key is held, here or by its source.
    fn tell_held(
        &self,
        delivery: &Arc<Delivery>,
        reason: PoisonReason,
        attempts: u32,
        at_most: Option<Duration>,
    ) -> (Option<Fingerprint>, Option<MessageId>) {
        let key = self.fingerprint(delivery);
        let message = delivery.envelope().id.clone();
        tracing::error!(
            endpoint = %self.endpoint.config.name,
            queue = %self.endpoint.queue_of(delivery),
            key = key.map(tracing::field::display),
            message = message.as_ref().map(tracing::field::display),
            %reason,
            attempts,
            ?at_most,
            "poison message: its key is held until an operator releases, retries or skips it"
        );
        self.endpoint.emit(EventKind::Held {
            key,
            message: message.clone(),
            reason,
            attempts,
            at_most,
        });
        (key, message)
    }

    /// Ends a hold, if it is still there.
    fn end_hold(&mut self, ticket: Ticket, end: HoldEnd, why: HoldOver) {
        if self.machine.held(ticket).is_none() {
            return; // `review_holds` tells
        }
        let Some(hold) = self.holds.remove(&ticket) else {
            return;
        };
        self.tell_hold_ended(&hold, why);
        self.since.remove(&ticket);
        self.detail = (end == HoldEnd::Release).then_some(hold.detail);
        self.feed(Event::HoldEnded(ticket, end), None);
        // Not taken: it is parked when its copy comes.
        if let Some(detail) = self.detail.take() {
            self.keep_detail(hold.identity, detail);
        }
    }

    fn tell_hold_ended(&self, hold: &Hold, why: HoldOver) {
        let after = hold.since.elapsed();
        let (key, message) = (hold.key, hold.message.clone());
        let queue = &self.endpoint.queues[hold.shard];
        if matches!(why, HoldOver::TooLong | HoldOver::TooMany) {
            tracing::error!(
                endpoint = %self.endpoint.config.name,
                %queue,
                key = key.map(tracing::field::display),
                message = message.as_ref().map(tracing::field::display),
                reason = %hold.reason,
                ?why,
                ?after,
                "a hold has reached its bound: the message is parked, its key goes on"
            );
        } else {
            tracing::info!(
                endpoint = %self.endpoint.config.name,
                %queue,
                key = key.map(tracing::field::display),
                message = message.as_ref().map(tracing::field::display),
                reason = %hold.reason,
                ?why,
                ?after,
                "hold ended"
            );
        }
        self.endpoint.emit(EventKind::HoldEnded {
            key,
            message,
            why,
            after,
        });
    }

    /// Tells what is held here, so that the endpoint knows what its held keys use.
    fn review_holds(&mut self) {
        if self.holds.is_empty() && !self.holds_reported {
            return;
        }
        let tickets: Vec<_> = self.holds.keys().copied().collect();
        for ticket in tickets {
            if self.machine.held(ticket).is_none()
                && let Some(hold) = self.holds.remove(&ticket)
            {
                self.since.remove(&ticket);
                self.tell_hold_ended(&hold, HoldOver::Gone);
            }
        }
        let held = self.holds.iter().map(|(&ticket, hold)| HeldKey {
            ticket,
            shard: hold.shard,
            since: hold.since,
            credits: self.machine.held(ticket).unwrap_or(0),
        });
        let held: Vec<_> = held.collect();
        self.holds_reported = !held.is_empty();
        self.endpoint.holds.report(&self.link, held);
    }

    fn tell_settled(&mut self) {
        if !self.settled.is_empty() {
            self.outbox.put(&mut self.settled, &self.supervisor);
        }
    }

    fn fingerprint(&self, delivery: &Delivery) -> Option<Fingerprint> {
        self.endpoint.fingerprint(delivery.key())
    }

    /// After each post: start what may start, tell the supervisor what ended, and set the alarm.
    fn finish_pass(&mut self, ctx: &mut Context<Self>) {
        if !self.starting.is_empty() {
            self.endpoint.crew.put(&mut self.starting);
        }
        self.review_holds();
        self.tell_settled();
        self.link.publish_load(self.machine.tracks());
        let sweep = (!self.runs.is_empty()).then(|| Instant::now() + SWEEP);
        let timer = self.timers.keys().next().map(|&(at, _)| at);
        let Some(at) = [sweep, timer].into_iter().flatten().min() else {
            return;
        };
        match self.alarm {
            Some((set, _)) if set <= at => return,
            Some((_, handle)) => {
                ctx.cancel_future(handle);
            }
            None => {}
        }
        let after = at.saturating_duration_since(Instant::now());
        let handle = ctx.run_later(after, Self::ring);
        self.alarm = Some((at, handle));
    }

    fn ring(&mut self, ctx: &mut Context<Self>) {
        self.alarm = None;
        let now = Instant::now();
        while let Some(first) = self.timers.first_entry()
            && first.key().0 <= now
        {
            let ((_, ticket), ()) = first.remove_entry();
            if self.holds.contains_key(&ticket) {
                self.end_hold(ticket, HoldEnd::Release, HoldOver::TooLong);
                continue;
            }
            self.since.remove(&ticket);
            self.feed(Event::BackoffElapsed(ticket), None);
        }
        self.endpoint.crew.look_after(now);
        let mut overstaying = Vec::new();
        for run in self.runs.values_mut() {
            if run.aborted.is_none() && run.abort_at.is_some_and(|at| at <= now) {
                run.abort();
            }
            let over = |since: Option<Instant>| since.is_some_and(|at| now >= at + ABORT_PATIENCE);
            if !run.reported_stuck && (over(run.aborted) || over(run.deadline)) {
                run.reported_stuck = true;
                overstaying.push(run.ticket);
            }
        }
        for ticket in overstaying {
            self.since.insert(ticket, now);
            self.feed(Event::StillRunning(ticket), None);
        }
        self.finish_pass(ctx);
    }

    fn snapshot(&mut self) -> LaneSnapshot {
        let now = Instant::now();
        let lane = self.link.index().get();
        let waiting: Vec<_> = self
            .machine
            .waiting()
            .map(|(ticket, key, why, behind)| {
                let since = self.since.get(&ticket).copied().unwrap_or(now);
                let why = match why {
                    Waiting::BackingOff => WaitReason::BackingOff,
                    Waiting::Parking => WaitReason::Parking,
                    Waiting::Held => WaitReason::Held,
                    Waiting::Stuck => WaitReason::Stuck,
                };
                (
                    ticket,
                    WaitingKey {
                        key: self.endpoint.fingerprint(key),
                        lane,
                        why,
                        since: now.saturating_duration_since(since),
                        behind,
                    },
                )
            })
            .collect();
        // What no longer waits needs no time any more.
        let known: std::collections::HashSet<_> =
            waiting.iter().map(|(ticket, _)| *ticket).collect();
        self.since.retain(|ticket, _| known.contains(ticket));
        LaneSnapshot {
            depth: self.machine.depth(),
            waiting: waiting.into_iter().map(|(_, waiting)| waiting).collect(),
        }
    }
}

impl Run {
    fn abort(&mut self) {
        self.abort.abort();
        self.aborted = Some(Instant::now());
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
        for run in self.runs.values() {
            run.abort.abort();
        }
    }
}

impl Supervised for Lane {
    /// After a panic of the lane's own code its machine may be half changed, and the message that
    /// panicked is lost. The supervisor therefore ends the session, so that everything unsettled
    /// comes again, in order; the machine starts empty, but for the keys whose attempts still run:
    /// those must not be overtaken.
    fn restarting(&mut self, _: &mut Context<Self>) {
        self.machine = self.machine.successor();
        for run in self.runs.values_mut() {
            run.abort();
            run.reported_stuck = false;
            let head = Arc::clone(&run.delivery);
            run.ticket = self.machine.adopt_running(head, run.attempt);
        }
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

impl Handler<Post> for Lane {
    type Result = ();

    fn handle(&mut self, Post(post): Post, ctx: &mut Context<Self>) {
        self.post.extend(post);
        self.read_post(ctx);
    }
}

impl Lane {
    fn read_post(&mut self, ctx: &mut Context<Self>) {
        while let Some(message) = self.post.pop_front() {
            if matches!(message, ToLane::Stop) {
                self.tell_settled();
                ctx.stop();
                return;
            }
            self.hear(message);
        }
        self.finish_pass(ctx);
    }

    fn hear(&mut self, message: ToLane) {
        match message {
            ToLane::Offer(_) if self.forgetful => {} // unsettled, so they come again
            ToLane::Offer(deliveries) => {
                for delivery in deliveries {
                    // The machine may know of the end before the supervisor does (see `not_started`). It
                    // would take this for the first message of the next session, and drop what it remembers
                    // of the key.
                    if !Delivery::session(&delivery).has_ended() {
                        self.feed(Event::Offered(delivery), None);
                    }
                }
            }
            ToLane::Direct(delivery) => {
                // A session that has ended takes its deliveries with it, and a sender that had looked before
                // the drain began can still come after it: the settle handle is dropped.
                if !self.drains && !Delivery::session(&delivery).has_ended() {
                    self.feed(Event::Offered(delivery), None);
                }
            }
            ToLane::Granted(ticket, permit) => self.feed(Event::Granted(ticket), Some(permit)),
            ToLane::RunEnded(ticket, end) => self.run_ended(ticket, end),
            ToLane::Parked { ticket, settled } => {
                self.since.remove(&ticket);
                self.feed(Event::Parked { ticket, settled }, None);
            }
            ToLane::ParkingEnded(ticket) => {
                self.since.remove(&ticket);
                self.feed(Event::ParkingEnded(ticket), None);
            }
            ToLane::SessionEnded(session) => self.feed(Event::SessionEnded(session), None),
            ToLane::AllEnded => self.forgetful = false,
            ToLane::Drain(session) => {
                self.draining.insert(session, session);
                self.feed(Event::Drain(session), None);
            }
            ToLane::DrainAll(name) => {
                self.drains = true;
                let direct = self.machine.deliveries().filter(|it| it.is_direct());
                let rest: BTreeSet<_> = direct.map(|it| it.session_id()).chain([name]).collect();
                self.draining
                    .extend(rest.iter().map(|&session| (session, name)));
                for session in rest {
                    self.feed(Event::Drain(session), None);
                }
            }
            ToLane::EndHold { key, end, done } => {
                let mut holds = self.holds.iter();
                if let Some((&ticket, _)) = holds.find(|(_, hold)| hold.key == Some(key)) {
                    self.end_hold(ticket, end, HoldOver::Operator(end));
                    // An error means that nobody waits for the answer.
                    let _ = done.send(());
                }
            }
            ToLane::HoldTooMany(ticket) => {
                self.end_hold(ticket, HoldEnd::Release, HoldOver::TooMany);
            }
            ToLane::Resume => self.feed(Event::Resumed, None),
            ToLane::AbortRuns(session) => {
                for run in self.runs.values_mut() {
                    if session.is_none_or(|session| session == run.delivery.session_id()) {
                        run.abort();
                    }
                }
            }
            ToLane::Stop => {} // `read_post` sees to it
            #[cfg(any(test, feature = "testing"))]
            ToLane::Panic => panic!("a panic of the lane itself, asked for by a test"),
        }
    }
}

impl Handler<AskLane> for Lane {
    type Result = LaneSnapshot;

    fn handle(&mut self, _: AskLane, _: &mut Context<Self>) -> LaneSnapshot {
        self.snapshot()
    }
}

/// Asks a lane what it has not put away.
#[cfg(test)]
#[derive(Message)]
#[rtype(result = "Vec<String>")]
pub(crate) struct AskLeft;

#[cfg(test)]
impl Handler<AskLeft> for Lane {
    type Result = Vec<String>;

    fn handle(&mut self, _: AskLeft, _: &mut Context<Self>) -> Vec<String> {
        let sizes = [
            ("draining in the lane", self.draining.len()),
            ("draining in the machine", self.machine.draining()),
            ("depth", self.machine.depth()),
            ("runs", self.runs.len()),
            ("holds", self.holds.len()),
            ("timers", self.timers.len()),
            ("since", self.since.len()),
            ("forgetful", usize::from(self.forgetful)),
        ];
        let left = sizes.into_iter().filter(|&(_, size)| size > 0);
        left.map(|(what, size)| format!("{what}: {size}")).collect()
    }
}
