//! The EndpointSupervisor actor: owns the source's session, the credits, the lanes and the drain.
//!
//! ```text
//! source ── batches ──► supervisor ── one message per lane and batch ──► lanes
//!    ▲                      │  ▲                                          │
//!    └── acknowledgements ──┘  └────────────── ended, in batches ─────────┘
//! ```
//! It is the only one who acknowledges (invariant 5). From the moment a session is seen to be lost,
//! nothing of it is started or settled (invariant 8); what it finished is remembered, so that copies
//! need not run again.
//!
//! **Drain**, in this order: no more intake; the lanes start nothing new; what runs may finish, and what
//! is being parked may be confirmed, until the deadline; every acknowledgement is processed (barrier);
//! the session is closed, which gives the rest back in order; the lanes stop.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use actix::{
    Actor, ActorContext, ActorFutureExt, Addr, ArbiterHandle, AsyncContext, Context, Handler,
    Message, ResponseFuture, StreamHandler, Supervised, WrapFuture,
};
use futures::StreamExt;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::config::{EndpointConfig, EndpointSettings, Problem};
use crate::endpoint::{Counters, Endpoint};
use crate::envelope::{Delivery, HeaderValue, Identity};
use crate::handler::{ContextPublisher, HandlerSet};
use crate::holds::Holds;
use crate::key::{Fingerprint, Fingerprints, LaneIndex, OrderingKey};
use crate::lane::machine::HoldEnd;
use crate::lane::{Lane, LaneAddr, LaneGate, LaneLink, Mail, ToLane};
use crate::observe::{EndpointSnapshot, EndpointState, EventKind, Events};
use crate::outcome::Outcome;
use crate::permits::Permits;
use crate::poison::PoisonHandler;
use crate::policy::Backoff;
use crate::port::{OpenSession, Parking, Session, Source, SourceError};
use crate::restart;
use crate::session::{SessionId, SessionState};
use crate::settlement::{AckBook, Ending, Finished};

/// Pauses between tries to open a session.
const RECONNECT_BACKOFF: Backoff = Backoff {
    first: Duration::from_millis(100),
    ceiling: Duration::from_secs(10),
    factor: 2.0,
    jitter: 0.3,
};
/// How often the supervisor looks after paused lanes and used-up credits.
const HOUSEKEEPING: Duration = Duration::from_millis(250);
/// After the deadline, how long aborted attempts may take before the session is closed all the same.
const ABORT_PATIENCE: Duration = Duration::from_secs(1);

/// Everything an endpoint is made of.
pub struct EndpointSpec {
    /// Its settings.
    pub settings: EndpointSettings,
    /// Where deliveries come from.
    pub source: Arc<dyn Source>,
    /// Where poison messages go.
    pub parking: Option<Arc<dyn Parking>>,
    /// Its handlers.
    pub handlers: HandlerSet,
    /// Publishes for `Context::publish`, if handlers may publish.
    pub publisher: Option<Arc<dyn ContextPublisher>>,
    /// Where its events go.
    pub events: Events,
    /// How its keys are shown.
    pub fingerprints: Fingerprints,
    /// The multi-threaded runtime on which handlers run. `None`: the one the caller is in, or, where
    /// there is none or only a current-thread one, a pool that all such endpoints of the process share.
    pub runtime: Option<Handle>,
    /// Where the lanes run. Empty: on the current thread's `System`.
    pub arbiters: Vec<ArbiterHandle>,
}

impl EndpointSpec {
    /// An endpoint with every default.
    pub fn new(settings: EndpointSettings, source: Arc<dyn Source>, handlers: HandlerSet) -> Self {
        Self {
            settings,
            source,
            parking: None,
            handlers,
            publisher: None,
            events: Events::default(),
            fingerprints: Fingerprints::of_this_process(),
            runtime: None,
            arbiters: Vec::new(),
        }
    }

    /// All problems of the settings and the handlers. Pure.
    ///
    /// # Errors
    /// Each problem, naming its setting.
    pub fn check(&self) -> Result<EndpointConfig, Vec<Problem>> {
        check_endpoint(&self.settings, &self.handlers, self.parking.is_some())
    }
}

/// All problems of an endpoint's settings and handlers, also where there is no source yet. Pure.
///
/// # Errors
/// Each problem, naming its setting.
pub fn check_endpoint(
    settings: &EndpointSettings,
    handlers: &HandlerSet,
    has_parking: bool,
) -> Result<EndpointConfig, Vec<Problem>> {
    let name = &settings.name;
    let mut problems = Vec::new();
    let config = match settings.check(has_parking) {
        Ok(config) => Some(config),
        Err(found) => {
            problems = found;
            None
        }
    };
    for (setting, what) in handlers.problems() {
        problems.push(Problem::new(name, setting, what));
    }
    let typed = settings.ordering.as_ref().is_some_and(|key| key.typed);
    if handlers.has_selectors() && !typed {
        problems.push(Problem::new(
            name,
            "ordering",
            "a handler has a typed key, but the endpoint is not ordered by it; order by the typed key or remove it",
        ));
    }
    if typed && !handlers.has_selectors() {
        problems.push(Problem::new(
            name,
            "ordering",
            "the key is to come from the message, but no handler has a typed key",
        ));
    }
    config.filter(|_| problems.is_empty()).ok_or(problems)
}

/// A running endpoint. Cheap to clone; works from any thread and runtime.
#[derive(Clone)]
pub struct EndpointHandle {
    addr: Addr<EndpointSupervisor>,
    endpoint: Arc<Endpoint>,
    lanes: Arc<Vec<Arc<LaneLink>>>,
    gates: Arc<Vec<Arc<LaneGate>>>,
    state: watch::Receiver<EndpointState>,
}

impl EndpointHandle {
    /// Name of the endpoint.
    pub fn name(&self) -> &str {
        &self.endpoint.config.name
    }

    /// The address of the lane that a key belongs to.
    pub fn lane_of(&self, key: &OrderingKey) -> LaneAddr {
        self.lane(LaneIndex::of(key, self.count()))
            .expect("cannot fail because the index was made for this number of lanes")
    }

    /// The address of a lane by its index; `None` beyond the last.
    pub fn lane(&self, index: LaneIndex) -> Option<LaneAddr> {
        Some(LaneAddr {
            link: Arc::clone(self.lanes.get(index.get())?),
            gate: Arc::clone(self.gates.get(index.get())?),
            count: self.count(),
            endpoint: Arc::clone(&self.endpoint),
        })
    }

    fn count(&self) -> crate::key::LaneCount {
        let count = u32::try_from(self.lanes.len())
            .ok()
            .and_then(std::num::NonZeroU32::new);
        crate::key::LaneCount::new(count.unwrap_or(std::num::NonZeroU32::MIN))
    }

    /// Waits until the first session is open, and so deliveries flow.
    ///
    /// # Errors
    /// Why the first try to open a session failed (the endpoint goes on trying), or that the endpoint
    /// has stopped.
    pub async fn connected(&self) -> Result<(), String> {
        match self.addr.send(FirstSession).await {
            Ok(answer) => answer,
            Err(_) => Err("the endpoint has stopped".to_owned()),
        }
    }

    /// The state of the endpoint now.
    ///
    /// A stopped endpoint answers with its counters and no lanes.
    pub async fn snapshot(&self) -> EndpointSnapshot {
        match self.addr.send(AskSupervisor).await {
            Ok(snapshot) => snapshot,
            Err(_) => self.endpoint_snapshot(),
        }
    }

    fn endpoint_snapshot(&self) -> EndpointSnapshot {
        snapshot_of(&self.endpoint, *self.state.borrow(), 0)
    }

    /// What happens at this endpoint (and at every other that was given the same [`Events`]).
    pub fn events(&self) -> &Events {
        &self.endpoint.events
    }

    /// What the endpoint is doing, and every change of it.
    pub fn state(&self) -> watch::Receiver<EndpointState> {
        self.state.clone()
    }

    /// Drains: starts nothing new, lets what runs finish until the deadline, then aborts it; settles,
    /// closes the session, stops. A second call waits for the first.
    ///
    /// # Cancellation
    /// Dropping the future does not stop the drain.
    pub async fn drain(&self, within: Duration) -> DrainReport {
        // An error means that it has drained already.
        self.addr.send(Drain { within }).await.unwrap_or_default()
    }

    /// Ends the hold of a key ([`PoisonMode::BlockKey`](crate::PoisonMode::BlockKey)); whether it was held.
    pub async fn end_hold(&self, key: Fingerprint, end: HoldEnd) -> bool {
        let (done, mut answers) = tokio::sync::mpsc::unbounded_channel();
        // A fingerprint does not tell the lane.
        for lane in self.lanes.iter() {
            let done = done.clone();
            lane.tell(ToLane::EndHold { key, end, done });
        }
        drop(done);
        answers.recv().await.is_some()
    }

    /// Makes the next message of a lane panic in the lane's own code.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn panic_lane(&self, index: LaneIndex) {
        if let Some(lane) = self.lanes.get(index.get()) {
            lane.tell(ToLane::Panic);
        }
    }
}

impl std::fmt::Debug for EndpointHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EndpointHandle")
            .field("name", &self.name())
            .field("state", &*self.state.borrow())
            .finish_non_exhaustive()
    }
}

/// How a drain ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DrainReport {
    /// Deliveries given back to the source unfinished.
    pub given_back: usize,
    /// Attempts that were still running when the session was closed: stuck, or not done by the deadline.
    pub unfinished: usize,
}

// ---- messages

/// What lanes tell the supervisor.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) enum FromLane {
    Settled(Vec<Settled>),
    Forgotten(Identity, u32),
    Quiet(LaneIndex),
    Paused,
    HandlersGone,
    Restarted,
    /// The lane has panicked too often.
    LaneDied(LaneIndex),
    /// The poison handler has panicked too often.
    PoisonHandlerDied,
    /// The carrier of the mail for lanes has panicked too often.
    CarrierDied,
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

/// An item of the source's stream: a batch, an error, or (without either) the end.
struct FromSource {
    session: SessionId,
    batch: Option<Result<Vec<Delivery>, SourceError>>,
}

// ---- the actor

/// The open session.
struct Live {
    state: Arc<SessionState>,
    control: Arc<dyn Session>,
    book: AckBook,
    opened: Instant,
    /// Something was acknowledged on it.
    useful: bool,
}

/// Supervises one endpoint; see the module.
pub struct EndpointSupervisor {
    endpoint: Arc<Endpoint>,
    source: Arc<dyn Source>,
    lanes: Arc<Vec<Arc<LaneLink>>>,
    mails: Vec<Arc<Mail>>,
    gates: Arc<Vec<Arc<LaneGate>>>,
    draining_flag: Arc<AtomicBool>,
    /// Unsettled deliveries per lane, to find the least loaded one.
    loads: Vec<usize>,
    /// Deliveries of one batch, by lane.
    by_lane: Vec<Vec<Arc<Delivery>>>,
    live: Option<Live>,
    last_session: SessionId,
    finished: Finished,
    /// Attempts of keyless messages whose session has ended.
    earlier_attempts: HashMap<Identity, u32>,
    /// Failed tries to open a session, and sessions that were of no use, since the last useful one.
    failures: u32,
    flush_scheduled: bool,
    any_paused: bool,
    exhausted: bool,
    /// Lanes that were given up. They report nothing any more.
    dead_lanes: Vec<LaneIndex>,
    first_session: Vec<oneshot::Sender<Result<(), String>>>,
    first_result: Option<Result<(), String>>,
    drain: Option<Draining>,
    state: watch::Sender<EndpointState>,
}

struct Draining {
    quiet: Vec<bool>,
    reports: Vec<oneshot::Sender<DrainReport>>,
    closing: bool,
    /// Why, if it was not asked for.
    broken: bool,
}

impl EndpointSupervisor {
    /// Starts an endpoint in the current thread's actix `System`.
    ///
    /// # Errors
    /// Every problem of the settings; nothing is started then.
    ///
    /// # Panics
    /// When the current thread runs no actix `System`.
    pub fn start(spec: EndpointSpec) -> Result<EndpointHandle, Vec<Problem>> {
        let config = spec.check()?;
        let runtime = handler_runtime(spec.runtime)
            .map_err(|what| vec![Problem::new(&*config.name, "runtime", what)])?;
        // An endpoint without ordering has no use for lanes: one per thread that runs them is enough.
        let lane_count = match config.ordering {
            Some(_) => config.lanes.get() as usize,
            None => spec.arbiters.len().max(1),
        };
        let intensity = config.intensity;
        let credits = usize::from(config.credits);
        let lane_depth = config.lane_depth;
        let endpoint = Arc::new(Endpoint {
            permits: Permits::new(config.concurrency),
            queue: spec.source.name().into(),
            handlers: spec.handlers,
            publisher: spec.publisher,
            events: spec.events,
            fingerprints: spec.fingerprints,
            runtime,
            counters: Counters::default(),
            holds: Holds::new(config.credits),
            cancel: CancellationToken::new(),
            config,
        });
        let draining_flag = Arc::new(AtomicBool::new(false));
        let index = |lane: usize| LaneIndex::new(u32::try_from(lane).unwrap_or(u32::MAX));
        let threads = spec.arbiters.len().max(1);
        let mails: Vec<_> = (0..threads).map(|_| Arc::new(Mail::default())).collect();
        let lanes: Arc<Vec<_>> = Arc::new(
            (0..lane_count)
                .map(|lane| LaneLink::new(index(lane), &mails[lane % threads]))
                .collect(),
        );
        let gates: Arc<Vec<_>> = Arc::new(
            (0..lane_count)
                .map(|_| {
                    Arc::new(LaneGate {
                        slots: Arc::new(Semaphore::new(lane_depth)),
                        draining: Arc::clone(&draining_flag),
                    })
                })
                .collect(),
        );
        let (state, state_receiver) = watch::channel(EndpointState::Starting);
        let actor = Self {
            endpoint: Arc::clone(&endpoint),
            source: spec.source,
            lanes: Arc::clone(&lanes),
            mails: mails.clone(),
            gates: Arc::clone(&gates),
            draining_flag,
            loads: vec![0; lane_count],
            by_lane: vec![Vec::new(); lane_count],
            live: None,
            last_session: SessionId::next(),
            finished: Finished::new(2 * credits),
            earlier_attempts: HashMap::new(),
            failures: 0,
            flush_scheduled: false,
            any_paused: false,
            exhausted: false,
            dead_lanes: Vec::new(),
            first_session: Vec::new(),
            first_result: None,
            drain: None,
            state,
        };
        let dying = Arc::clone(&endpoint);
        let state_on_death = actor.state.clone();
        let addr = restart::start(
            None,
            intensity,
            move |_| actor,
            move || {
                // Without its supervisor nothing can be settled: handlers are cancelled, nothing starts.
                dying.cancel.cancel();
                state_on_death.send_replace(EndpointState::Failed);
                let reason = "the endpoint's supervisor panicked too often".to_owned();
                dying.emit(EventKind::Failed { reason });
            },
        );
        let died = |message: FromLane| {
            let addr = addr.clone();
            move || addr.do_send(message)
        };
        let poison = {
            let (endpoint, parking, supervisor) =
                (Arc::clone(&endpoint), spec.parking, addr.clone());
            restart::start(
                None,
                intensity,
                move |_| PoisonHandler::new(endpoint, parking, supervisor),
                died(FromLane::PoisonHandlerDied),
            )
        };
        for (number, mail) in mails.iter().enumerate() {
            let arbiter = spec.arbiters.get(number);
            mail.start_carrier(arbiter, intensity, died(FromLane::CarrierDied));
        }
        for (number, link) in lanes.iter().enumerate() {
            let arbiter = spec.arbiters.get(number % threads);
            let (endpoint, own_link) = (Arc::clone(&endpoint), Arc::clone(link));
            let (supervisor, poison) = (addr.clone(), poison.clone());
            link.connect(restart::start(
                arbiter,
                intensity,
                move |_| Lane::new(endpoint, own_link, supervisor, poison),
                died(FromLane::LaneDied(index(number))),
            ));
        }
        Ok(EndpointHandle {
            addr,
            endpoint,
            lanes,
            gates,
            state: state_receiver,
        })
    }

    fn tell_lanes(&self, message: impl Fn() -> ToLane) {
        for lane in self.lanes.iter() {
            lane.tell(message());
        }
    }

    fn set_state(&self, state: EndpointState) {
        self.state.send_replace(state);
    }

    // ---- the session

    fn open(&mut self, ctx: &mut Context<Self>) {
        let state = SessionState::start();
        let (source, credits) = (Arc::clone(&self.source), self.endpoint.config.credits);
        let opening = Arc::clone(&state);
        ctx.spawn(
            async move { source.open(opening, credits).await }
                .into_actor(self)
                .map(move |result, this, ctx| this.opened(state, result, ctx)),
        );
    }

    fn opened(
        &mut self,
        state: Arc<SessionState>,
        result: Result<OpenSession, SourceError>,
        ctx: &mut Context<Self>,
    ) {
        match result {
            Ok(open) if self.drain.is_some() => {
                state.end();
                ctx.spawn(async move { open.control.close().await }.into_actor(self));
            }
            Ok(open) => {
                let session = state.id();
                self.last_session = session;
                self.live = Some(Live {
                    state,
                    control: open.control,
                    book: AckBook::default(),
                    opened: Instant::now(),
                    useful: false,
                });
                let reconnects = self.endpoint.counters.reconnects.get();
                tracing::info!(
                    endpoint = %self.endpoint.config.name,
                    queue = %self.endpoint.queue,
                    %session,
                    reconnects,
                    "session opened"
                );
                let of_session = move |batch| FromSource { session, batch };
                ctx.add_stream(
                    open.deliveries
                        .map(move |batch| of_session(Some(batch)))
                        .chain(futures::stream::iter([of_session(None)])),
                );
                self.set_state(EndpointState::Running);
                self.endpoint.emit(EventKind::Connected {
                    session,
                    reconnects,
                });
                self.answer_first(Ok(()));
            }
            Err(error) => {
                self.answer_first(Err(error.to_string()));
                self.retry(error.to_string(), ctx);
            }
        }
    }

    fn answer_first(&mut self, result: Result<(), String>) {
        for waiting in self.first_session.drain(..) {
            // An error means that nobody waits any more.
            let _ = waiting.send(result.clone());
        }
        self.first_result.get_or_insert(result);
    }

    fn retry(&mut self, reason: String, ctx: &mut Context<Self>) {
        if self.drain.is_some() {
            return;
        }
        self.failures += 1;
        let retry_in = RECONNECT_BACKOFF.pause(self.failures, fastrand::f64());
        tracing::warn!(
            endpoint = %self.endpoint.config.name,
            queue = %self.endpoint.queue,
            %reason,
            ?retry_in,
            "disconnected"
        );
        self.set_state(EndpointState::Disconnected);
        self.endpoint
            .emit(EventKind::Disconnected { reason, retry_in });
        ctx.run_later(retry_in, |this, ctx| {
            if this.drain.is_none() && this.live.is_none() {
                this.open(ctx);
            }
        });
    }

    /// The session is over: nothing of it may start or be settled any more.
    fn session_lost(&mut self, reason: String, ctx: &mut Context<Self>) {
        let Some(live) = self.live.take() else {
            return;
        };
        live.state.end();
        // A session that ends as soon as it is open is as good as one that cannot be opened; only one that
        // was of use, or that lasted, begins the pauses anew.
        if live.useful || live.opened.elapsed() >= RECONNECT_BACKOFF.ceiling {
            self.failures = 0;
        }
        let session = live.state.id();
        self.tell_lanes(|| ToLane::SessionEnded(session));
        for lane in live.book.outstanding_lanes() {
            self.loads[lane] -= 1;
        }
        self.finished.session_ended();
        self.endpoint.counters.reconnects.add(1);
        // Whatever the other side still believes of this session, it shall end there too.
        ctx.spawn(async move { live.control.close().await }.into_actor(self));
        match &mut self.drain {
            Some(_) => self.maybe_close(ctx),
            None => self.retry(reason, ctx),
        }
    }

    // ---- intake

    /// Sends deliveries to their lanes.
    ///
    /// # Errors
    /// When the source breaks its promise: then the session is of no use any more.
    fn arrived(&mut self, batch: Vec<Delivery>) -> Result<(), String> {
        let Some(live) = &mut self.live else {
            return Ok(());
        };
        let mut broken = Ok(());
        let ordered = self.endpoint.config.ordering.is_some();
        for mut delivery in batch {
            let (tag, identity) = (delivery.tag(), delivery.identity());
            let out_of_order = || {
                let tag = tag.0;
                Err(format!(
                    "the source gave delivery tag {tag}, which does not rise"
                ))
            };
            let copy_of = self
                .finished
                .match_copy(identity, delivery.is_redelivered());
            if let Some(ending) = copy_of {
                if !live.book.arrived(tag, 0) {
                    broken = out_of_order();
                    break;
                }
                live.book.ended(tag);
                if ending.late && ending.outcome == Outcome::Handled {
                    self.endpoint.counters.handled.add(1);
                }
                self.finished.record(delivery.identity(), ending.outcome);
                continue;
            }
            if ordered {
                resolve_key(&self.endpoint, &mut delivery);
            }
            let lane = match delivery.key() {
                Some(key) => LaneIndex::of(key, self.endpoint.config.lanes).get(),
                None => {
                    if !self.earlier_attempts.is_empty() && delivery.is_redelivered() {
                        let earlier = self.earlier_attempts.remove(delivery.identity());
                        delivery.earlier_attempts = earlier.unwrap_or(0);
                    }
                    least_loaded(&self.loads)
                }
            };
            if !live.book.arrived(tag, lane) {
                broken = out_of_order();
                break;
            }
            self.loads[lane] += 1;
            self.by_lane[lane].push(Arc::new(delivery));
        }
        for (lane, deliveries) in self.by_lane.iter_mut().enumerate() {
            if !deliveries.is_empty() {
                self.lanes[lane].tell(ToLane::Offer(std::mem::take(deliveries)));
            }
        }
        broken
    }

    // ---- settling

    /// Marks a delivery ended; false if it cannot be settled, because its session has ended.
    fn mark_ended(&mut self, delivery: &Delivery) -> bool {
        let Some(live) = &mut self.live else {
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

    fn flush(&mut self) {
        self.flush_scheduled = false;
        if let Some(live) = &mut self.live
            && live.book.has_ended()
        {
            let mut acks = Vec::new();
            live.book.acknowledge(&mut acks);
            live.control.acknowledge(&acks);
            live.useful = true;
        }
    }

    /// Acknowledges after everything that waits in the mailbox now, so that a burst of outcomes becomes
    /// few acknowledgements; without a timer, so that a single outcome is not delayed.
    fn schedule_flush(&mut self, ctx: &mut Context<Self>) {
        if !self.flush_scheduled {
            self.flush_scheduled = true;
            ctx.notify(Flush);
        }
    }

    // ---- drain

    fn begin_drain(&mut self, within: Duration, broken: bool, ctx: &mut Context<Self>) {
        if self.drain.is_some() {
            return;
        }
        self.draining_flag.store(true, Ordering::Release);
        for gate in self.gates.iter() {
            gate.slots.close();
        }
        self.drain = Some(Draining {
            quiet: vec![false; self.lanes.len()],
            reports: Vec::new(),
            closing: false,
            broken,
        });
        let session = self.last_session;
        self.tell_lanes(|| ToLane::Drain(session));
        // Shown only now: whatever somebody who sees it does, the lanes hear of the drain first.
        self.set_state(EndpointState::Draining);
        self.answer_first(Err("the endpoint is draining".to_owned()));
        ctx.run_later(within, |this, ctx| {
            if this.drain.as_ref().is_some_and(|drain| !drain.closing) {
                this.endpoint.cancel.cancel();
                this.tell_lanes(|| ToLane::AbortRuns);
                ctx.run_later(ABORT_PATIENCE, |this, ctx| this.close(ctx));
            }
        });
    }

    fn maybe_close(&mut self, ctx: &mut Context<Self>) {
        let all_quiet = |drain: &Draining| drain.quiet.iter().all(|&quiet| quiet);
        if self.drain.as_ref().is_some_and(all_quiet) {
            self.close(ctx);
        }
    }

    /// The last steps: acknowledge, barrier, close, stop. Everything in them is bounded by the source.
    fn close(&mut self, ctx: &mut Context<Self>) {
        match &mut self.drain {
            Some(drain) if !drain.closing => drain.closing = true,
            _ => return,
        }
        self.flush();
        let live = self.live.take();
        let report = DrainReport {
            given_back: live.as_ref().map_or(0, |live| live.book.unsettled()),
            unfinished: self.endpoint.permits.taken() as usize,
        };
        ctx.spawn(
            async move {
                if let Some(live) = live {
                    // An error means that the session ended by itself: everything unsettled is given back.
                    let _ = live.control.barrier().await;
                    // Before the close: what it gives back may start elsewhere at once.
                    live.state.end();
                    live.control.close().await;
                }
            }
            .into_actor(self)
            .map(move |(), this, ctx| this.stopped(report, ctx)),
        );
    }

    fn stopped(&mut self, report: DrainReport, ctx: &mut Context<Self>) {
        self.endpoint.cancel.cancel();
        let session = self.last_session;
        self.tell_lanes(|| ToLane::SessionEnded(session));
        self.tell_lanes(|| ToLane::Stop);
        self.mails.iter().for_each(|mail| mail.close());
        let drain = self.drain.take();
        let broken = drain.as_ref().is_some_and(|drain| drain.broken);
        tracing::info!(
            endpoint = %self.endpoint.config.name,
            queue = %self.endpoint.queue,
            given_back = report.given_back,
            unfinished = report.unfinished,
            "drained"
        );
        self.endpoint.emit(EventKind::Drained {
            given_back: report.given_back,
            unfinished: report.unfinished,
        });
        self.set_state(if broken {
            EndpointState::Failed
        } else {
            EndpointState::Stopped
        });
        for waiting in drain.into_iter().flat_map(|drain| drain.reports) {
            // An error means that nobody waits any more.
            let _ = waiting.send(report);
        }
        ctx.stop();
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
        if let Some(drain) = &mut self.drain
            && !self.dead_lanes.is_empty()
            && self.endpoint.permits.taken() == 0
        {
            // A dead lane cannot say that it is quiet; without a permit taken nothing of it can run.
            for lane in &self.dead_lanes {
                drain.quiet[lane.get()] = true;
            }
            self.maybe_close(ctx);
        }
        if self.any_paused
            && self
                .live
                .as_ref()
                .is_some_and(|live| live.state.may_start())
        {
            self.any_paused = false;
            self.tell_lanes(|| ToLane::Resume);
        }
        let credits = u32::from(self.endpoint.config.credits);
        let in_flight = self.live.as_ref().map_or(0, |live| live.book.unsettled());
        let used_up = in_flight >= credits as usize;
        if used_up && !self.exhausted {
            let keys: usize = self.lanes.iter().map(|lane| lane.tracks()).sum();
            // With as many keys as permits the credits are simply at work.
            if keys < self.endpoint.config.concurrency.get() as usize {
                self.exhausted = true;
                self.endpoint
                    .emit(EventKind::CreditsExhausted { keys, credits });
            }
        } else if !used_up {
            self.exhausted = false;
        }
    }
}

/// The first source of the key that gives one: header, typed selector, correlation id.
fn resolve_key(endpoint: &Endpoint, delivery: &mut Delivery) {
    let Some(source) = &endpoint.config.ordering else {
        return;
    };
    let from_header = source.header.as_deref().and_then(|name| {
        let value = delivery.envelope().headers.get(name)?;
        HeaderValue::as_key_bytes(value).map(|bytes| OrderingKey::from(&*bytes))
    });
    let key = match from_header {
        None if source.typed => endpoint
            .handlers
            .typed_key(delivery)
            .unwrap_or_else(|failure| {
                // The message fails when it is handled; without its key it has no place in any order.
                delivery.intake_failure = Some((failure.kind(), failure.detail()));
                None
            }),
        found => found,
    };
    if key.is_some() {
        delivery.key = key;
        return;
    }
    let correlation = delivery.envelope().correlation_id.as_deref();
    let fallback = correlation
        .filter(|id| source.correlation_id && !id.is_empty())
        .map(OrderingKey::from);
    let only_source = source.header.is_none() && !source.typed;
    if fallback.is_none() {
        endpoint.counters.keyless.add(1);
    } else if !only_source {
        endpoint.counters.key_fallbacks.add(1);
    }
    if fallback.is_none() || !only_source {
        endpoint.emit(EventKind::KeyMissing {
            message: delivery.envelope().id.clone(),
            fallback: fallback.is_some(),
        });
    }
    delivery.key = fallback;
}

fn least_loaded(loads: &[usize]) -> usize {
    loads
        .iter()
        .enumerate()
        .min_by_key(|&(_, load)| load)
        .map_or(0, |(lane, _)| lane)
}

/// A multi-threaded runtime for the handlers, with timers.
fn handler_runtime(given: Option<Handle>) -> Result<Handle, String> {
    let current = || {
        Handle::try_current()
            .ok()
            .filter(|handle| handle.runtime_flavor() == RuntimeFlavor::MultiThread)
    };
    let handle = match given.or_else(current) {
        Some(handle) => handle,
        None => own_pool()?,
    };
    if handle.runtime_flavor() != RuntimeFlavor::MultiThread {
        return Err(
            "handlers need a multi-threaded runtime: a blocking handler would stop all others"
                .to_owned(),
        );
    }
    let entered = handle.enter();
    let timers = std::panic::catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO)));
    drop(entered);
    match timers {
        Ok(()) => Ok(handle),
        Err(_) => Err(
            "the runtime has no timers; build it with `enable_time()` or `enable_all()`".to_owned(),
        ),
    }
}

/// The pool for handlers of programs without a multi-threaded runtime of their own. It lives as long as
/// the process.
fn own_pool() -> Result<Handle, String> {
    static POOL: std::sync::OnceLock<Result<tokio::runtime::Runtime, String>> =
        std::sync::OnceLock::new();
    let pool = POOL.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread()
            .thread_name("laneway-handlers")
            .enable_all()
            .build()
            .map_err(|error| format!("the pool for handlers cannot be started: {error}"))
    });
    match pool {
        Ok(runtime) => Ok(runtime.handle().clone()),
        Err(what) => Err(what.clone()),
    }
}

fn snapshot_of(endpoint: &Endpoint, state: EndpointState, in_flight: usize) -> EndpointSnapshot {
    let counters = &endpoint.counters;
    EndpointSnapshot {
        endpoint: Arc::clone(&endpoint.config.name),
        state,
        in_flight,
        credits: u32::from(endpoint.config.credits),
        running: endpoint.permits.taken() as usize,
        lane_depth: Vec::new(),
        waiting_keys: Vec::new(),
        handled: counters.handled.get(),
        parked: counters.parked.get(),
        discarded: counters.discarded.get(),
        gaps: counters.gaps.get(),
        attempts: counters.attempts.get(),
        key_fallbacks: counters.key_fallbacks.get(),
        keyless: counters.keyless.get(),
        reconnects: counters.reconnects.get(),
    }
}

impl Actor for EndpointSupervisor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        ctx.run_interval(HOUSEKEEPING, Self::housekeeping);
        if self.drain.is_some() {
            // Restarted after a panic in the middle of a drain: the rest of it, without waiting.
            self.close(ctx);
        } else {
            self.open(ctx);
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
        if let Some(live) = self.live.take() {
            live.state.end();
            actix::spawn(async move { live.control.close().await });
        }
        let session = self.last_session;
        self.tell_lanes(|| ToLane::SessionEnded(session));
        self.loads.fill(0);
        self.by_lane.iter_mut().for_each(Vec::clear);
        self.finished.session_ended();
        self.flush_scheduled = false;
        if let Some(drain) = &mut self.drain {
            drain.closing = false;
        }
    }
}

impl StreamHandler<FromSource> for EndpointSupervisor {
    fn handle(&mut self, item: FromSource, ctx: &mut Context<Self>) {
        let current = self
            .live
            .as_ref()
            .is_some_and(|live| live.state.id() == item.session);
        if !current {
            return; // late news of a session that is over
        }
        match item.batch {
            // Not taken in during a drain: closing the session gives it back.
            Some(Ok(_)) if self.drain.is_some() => {}
            Some(Ok(batch)) => match self.arrived(batch) {
                Ok(()) => self.schedule_flush(ctx),
                Err(reason) => self.session_lost(reason, ctx),
            },
            Some(Err(error)) => self.session_lost(error.to_string(), ctx),
            None => self.session_lost("the source ended the session".to_owned(), ctx),
        }
    }

    /// The end of one session's stream is not the end of the supervisor.
    fn finished(&mut self, _: &mut Context<Self>) {}
}

impl Handler<FromLane> for EndpointSupervisor {
    type Result = ();

    fn handle(&mut self, message: FromLane, ctx: &mut Context<Self>) {
        match message {
            FromLane::Settled(settled) => {
                for Settled {
                    delivery,
                    outcome,
                    orphan,
                } in settled
                {
                    if !orphan && self.mark_ended(&delivery) {
                        self.finished.record(delivery.identity(), outcome);
                    } else {
                        let ending = Ending {
                            outcome,
                            late: orphan,
                        };
                        self.finished.record_late(delivery.identity(), ending);
                    }
                }
                self.schedule_flush(ctx);
            }
            FromLane::Forgotten(identity, attempts) => {
                if self.earlier_attempts.len() >= 2 * usize::from(self.endpoint.config.credits) {
                    self.earlier_attempts.clear(); // counts begin anew, order is not touched
                }
                self.earlier_attempts.insert(identity, attempts);
            }
            FromLane::Quiet(lane) => {
                if let Some(drain) = &mut self.drain {
                    drain.quiet[lane.get()] = true;
                }
                self.maybe_close(ctx);
            }
            FromLane::Paused => self.any_paused = true,
            FromLane::HandlersGone => {
                let reason = "the runtime that runs the handlers has shut down".to_owned();
                self.fail(reason, ctx);
            }
            FromLane::Restarted => {
                self.endpoint
                    .emit(EventKind::ActorRestarted { actor: "lane" });
                if self.live.is_some() {
                    self.session_lost("a lane was restarted".to_owned(), ctx);
                } else {
                    // Between two sessions: the lane waits for the word all the same.
                    let session = self.last_session;
                    self.tell_lanes(|| ToLane::SessionEnded(session));
                }
            }
            FromLane::LaneDied(lane) => {
                self.dead_lanes.push(lane);
                self.fail("a lane panicked too often".to_owned(), ctx);
            }
            FromLane::PoisonHandlerDied => {
                self.fail("the poison handler panicked too often".to_owned(), ctx);
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

impl Handler<Flush> for EndpointSupervisor {
    type Result = ();

    fn handle(&mut self, _: Flush, _: &mut Context<Self>) {
        self.flush();
    }
}

impl Handler<SettleWithBarrier> for EndpointSupervisor {
    type Result = ResponseFuture<bool>;

    fn handle(&mut self, settle: SettleWithBarrier, _: &mut Context<Self>) -> Self::Result {
        if settle.delivery.is_direct() {
            let settle_now = settle.delivery.take_direct();
            let alive = !settle.delivery.session().has_ended();
            if let Some(tell) = settle_now.filter(|_| alive) {
                tell(settle.outcome);
            }
            return Box::pin(async move { alive });
        }
        // Not remembered as finished: should the session end before the barrier, the copy must go through
        // its lane, which holds the key until that copy's own acknowledgement is known to be processed.
        if !self.mark_ended(&settle.delivery) {
            return Box::pin(async { false });
        }
        self.flush();
        match &self.live {
            Some(live) => {
                let barrier = live.control.barrier();
                Box::pin(async move { barrier.await.is_ok() })
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
        let in_flight = self.live.as_ref().map_or(0, |live| live.book.unsettled());
        let mut snapshot = snapshot_of(&self.endpoint, *self.state.borrow(), in_flight);
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
