//! Queues with a single active consumer, instances on them, and what handlers did.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use actix::ArbiterHandle;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

use super::AskLeft;
use crate::balance::Decision;
use crate::config::{EndpointSettings, KeySource};
use crate::envelope::{Delivery, DeliveryTag, Envelope};
use crate::handler::{Context, Failure, HandlerSet};
use crate::key::OrderingKey;
use crate::message::{Encoding, Message};
use crate::observe::{Event, EventKind};
use crate::policy::Backoff;
use crate::port::{
    Ack, DeadLetter, OpenSession, ParkError, Parking, Session, SessionLost, Source, SourceError,
};
use crate::session::{SessionId, SessionState};
use crate::supervisor::{EndpointHandle, EndpointSpec, EndpointSupervisor, Rebalance};

const KEY: &str = "key";

/// One numbered message of a key.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Numbered {
    pub(super) key: String,
    pub(super) seq: u64,
}

impl Message for Numbered {
    const TYPE: &'static str = "numbered";
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for `future`, but not for ever.
pub(super) async fn within<F: Future>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(Duration::from_secs(20), future).await {
        Ok(output) => output,
        Err(_) => panic!("waited in vain for {what}"),
    }
}

/// Lets others go first, now and then.
async fn a_moment() {
    for _ in 0..fastrand::usize(0..12) {
        tokio::task::yield_now().await;
    }
}

// ---- the broker

struct Stored {
    place: u64,
    envelope: Envelope,
    redelivered: bool,
}

struct Consumer {
    instance: usize,
    state: Arc<SessionState>,
    credits: usize,
    last_tag: u64,
    unsettled: BTreeMap<u64, Stored>,
    stream: mpsc::UnboundedSender<Result<Vec<Delivery>, SourceError>>,
}

/// A queue whose first consumer is the active one.
#[derive(Default)]
struct Queue {
    next_place: u64,
    ready: VecDeque<Stored>,
    consumers: Vec<Consumer>,
}

impl Queue {
    fn dispatch(&mut self) {
        let Some(active) = self.consumers.first_mut() else {
            return;
        };
        let mut batch = Vec::new();
        while active.unsettled.len() < active.credits
            && let Some(stored) = self.ready.pop_front()
        {
            active.last_tag += 1;
            let tag = DeliveryTag(active.last_tag);
            let delivery = Delivery::new(stored.envelope.clone(), Arc::clone(&active.state), tag)
                .redelivered(stored.redelivered);
            active.unsettled.insert(active.last_tag, stored);
            batch.push(delivery);
        }
        if !batch.is_empty() {
            // An error means that nobody reads any more; ending the session gives it back.
            let _ = active.stream.send(Ok(batch));
        }
    }

    /// What a consumer held goes back to its place. Its stream ends, with an error if there is one.
    fn end(&mut self, session: SessionId, error: Option<SourceError>) {
        let at = |consumer: &Consumer| consumer.state.id() == session;
        let Some(at) = self.consumers.iter().position(at) else {
            return;
        };
        let consumer = self.consumers.remove(at);
        if let Some(error) = error {
            let _ = consumer.stream.send(Err(error));
        }
        for (_, mut stored) in consumer.unsettled {
            stored.redelivered = true;
            self.ready.push_back(stored);
        }
        let ready = self.ready.make_contiguous();
        ready.sort_by_key(|stored| stored.place);
        self.dispatch();
    }

    fn is_empty(&self) -> bool {
        let held = |consumer: &Consumer| !consumer.unsettled.is_empty();
        self.ready.is_empty() && !self.consumers.iter().any(held)
    }
}

// ---- what happened

struct Run {
    key: String,
    seq: u64,
    instance: usize,
    running: bool,
    /// When it ended well.
    success: Option<u64>,
}

#[derive(Default)]
struct Ledger {
    clock: u64,
    published: BTreeSet<(String, u64)>,
    next: HashMap<String, u64>,
    runs: Vec<Run>,
    parked: BTreeSet<(String, u64)>,
    violations: Vec<String>,
}

/// Runs that are under way when their future is dropped end here.
struct Running {
    world: Arc<World>,
    number: usize,
}

impl Running {
    fn succeeded(&self) {
        let mut ledger = lock(&self.world.ledger);
        ledger.clock += 1;
        let now = ledger.clock;
        ledger.runs[self.number].success = Some(now);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        lock(&self.world.ledger).runs[self.number].running = false;
        self.world.changed.send_modify(|changes| *changes += 1);
    }
}

/// What a handler does with a message: (message, attempt).
pub(super) type Script = Arc<dyn Fn(&Numbered, u32) -> Step + Send + Sync>;

#[derive(Clone)]
pub(super) enum Step {
    Succeed,
    Take(Duration),
    Fail,
    /// Waits until the gate is open.
    Wait(watch::Receiver<bool>),
    /// Blocks its thread until something is sent.
    Block(Arc<Mutex<std::sync::mpsc::Receiver<()>>>),
    /// The same, and tells the runtime that it does.
    BlockInPlace(Arc<Mutex<std::sync::mpsc::Receiver<()>>>),
}

pub(super) struct World {
    queues: Vec<Mutex<Queue>>,
    ledger: Mutex<Ledger>,
    changed: watch::Sender<u64>,
    /// Whether parking fails.
    pub(super) parking_fails: AtomicBool,
    /// Whether it fails now and then.
    pub(super) parking_is_flaky: bool,
    /// Something was lost, or cut short: then an attempt may overlap with one of another instance, and
    /// messages may be handled twice.
    pub(super) unclean: AtomicBool,
}

impl World {
    pub(super) fn new(shards: usize, parking_is_flaky: bool) -> Arc<Self> {
        Arc::new(Self {
            queues: (0..shards).map(|_| Mutex::default()).collect(),
            ledger: Mutex::default(),
            changed: watch::Sender::new(0),
            parking_fails: AtomicBool::new(false),
            parking_is_flaky,
            unclean: AtomicBool::new(false),
        })
    }

    fn violation(&self, what: String) {
        lock(&self.ledger).violations.push(what);
    }

    /// The next message of a key.
    fn next(&self, key: &str) -> Numbered {
        let mut ledger = lock(&self.ledger);
        let seq = ledger.next.entry(key.to_owned()).or_default();
        *seq += 1;
        Numbered {
            key: key.to_owned(),
            seq: *seq,
        }
    }

    /// Publishes the next message of a key to a shard. Names say what a message does not have: one that begins with
    /// `keyless` no key, one that begins with `nameless` no id.
    pub(super) fn publish(&self, shard: usize, key: &str) {
        let message = self.next(key);
        let mut envelope = Envelope::of(&message, Encoding::Json).expect("encodes");
        if !key.starts_with("keyless") {
            envelope.set_key(KEY, &key.into());
        }
        if key.starts_with("nameless") {
            envelope.id = None;
        }
        let published = (message.key, message.seq);
        lock(&self.ledger).published.insert(published);
        let mut queue = lock(&self.queues[shard]);
        let place = queue.next_place;
        queue.next_place += 1;
        queue.ready.push_back(Stored {
            place,
            envelope,
            redelivered: false,
        });
        queue.dispatch();
    }

    /// The session of an instance is cut; whether the adapter marks it ended before it says so is up to it.
    pub(super) fn cut(&self, shard: usize, instance: usize) {
        self.unclean.store(true, Ordering::SeqCst);
        let mut queue = lock(&self.queues[shard]);
        let of = |consumer: &&Consumer| consumer.instance == instance;
        let Some(consumer) = queue.consumers.iter().find(of) else {
            return;
        };
        let state = Arc::clone(&consumer.state);
        if fastrand::bool() {
            state.end();
        }
        let error = SourceError::Unavailable {
            what: "cut".to_owned(),
            source: None,
        };
        queue.end(state.id(), Some(error));
    }

    /// Waits until the ledger and the queues are like this.
    async fn until(&self, what: &str, like: impl Fn() -> bool) {
        let mut changed = self.changed.subscribe();
        let waiting = async {
            while !like() {
                changed.changed().await.expect("the world is there");
            }
        };
        if tokio::time::timeout(Duration::from_secs(20), waiting)
            .await
            .is_err()
        {
            let queues = self.queues.iter().map(|queue| {
                let queue = lock(queue);
                let held: Vec<_> = queue
                    .consumers
                    .iter()
                    .map(|one| (one.instance, one.unsettled.len(), one.state.has_ended()))
                    .collect();
                (queue.ready.len(), held)
            });
            panic!(
                "waited in vain for {what}: {:?} {:?}",
                queues.collect::<Vec<_>>(),
                lock(&self.ledger).violations
            );
        }
    }

    pub(super) async fn empty(&self) {
        let empty = || self.queues.iter().all(|queue| lock(queue).is_empty());
        self.until("empty queues", empty).await;
    }

    pub(super) async fn handled(&self, key: &str, seq: u64) {
        let like = |run: &Run| run.key == key && run.seq == seq && run.success.is_some();
        let what = format!("{key} {seq}");
        self.until(&what, || lock(&self.ledger).runs.iter().any(like))
            .await;
    }

    pub(super) async fn running(&self, key: &str) {
        let like = |run: &Run| run.key == key && run.running;
        self.until(key, || lock(&self.ledger).runs.iter().any(like))
            .await;
    }

    /// How many attempts there were.
    pub(super) fn runs(&self) -> usize {
        lock(&self.ledger).runs.len()
    }

    /// How many attempts a key had.
    pub(super) fn runs_of(&self, key: &str) -> usize {
        let ledger = lock(&self.ledger);
        ledger.runs.iter().filter(|run| run.key == key).count()
    }

    /// Nothing was lost or came out of order, and no two runs of a key overlapped.
    pub(super) fn check(&self) {
        let mut ledger = lock(&self.ledger);
        let mut violations = std::mem::take(&mut ledger.violations);
        let mut firsts: BTreeMap<(&str, u64), u64> = BTreeMap::new();
        let unclean = self.unclean.load(Ordering::SeqCst);
        for run in &ledger.runs {
            if let Some(at) = run.success {
                let twice = firsts.insert((&run.key, run.seq), at);
                if twice.is_some() && !unclean {
                    violations.push(format!("{} {} was handled twice", run.key, run.seq));
                }
                // The first one counts.
                if let Some(first) = twice {
                    firsts.insert((&run.key, run.seq), first.min(at));
                }
            }
        }
        for (key, seq) in &ledger.published {
            let parked = ledger.parked.contains(&(key.clone(), *seq));
            if !parked && !firsts.contains_key(&(&**key, *seq)) {
                violations.push(format!("{key} {seq} is lost"));
            }
        }
        let mut before: Option<((&str, u64), u64)> = None;
        for (&(key, seq), &at) in &firsts {
            if let Some(((other, earlier), then)) = before
                && other == key
                && at < then
                && !key.starts_with("keyless")
            {
                violations.push(format!("{key}: {seq} before {earlier}"));
            }
            before = Some(((key, seq), at));
        }
        assert!(violations.is_empty(), "{violations:#?}");
    }

    fn run(self: &Arc<Self>, message: &Numbered, instance: usize) -> Running {
        let mut ledger = lock(&self.ledger);
        let unclean = self.unclean.load(Ordering::SeqCst);
        let at_once = |run: &&Run| {
            run.running && run.key == message.key && (run.instance == instance || !unclean)
        };
        if !message.key.starts_with("keyless")
            && let Some(other) = ledger.runs.iter().find(at_once)
        {
            let what = format!(
                "{}: {} starts in {instance} while {} runs in {}",
                message.key, message.seq, other.seq, other.instance
            );
            ledger.violations.push(what);
        }
        ledger.runs.push(Run {
            key: message.key.clone(),
            seq: message.seq,
            instance,
            running: true,
            success: None,
        });
        let number = ledger.runs.len() - 1;
        drop(ledger);
        self.changed.send_modify(|changes| *changes += 1);
        Running {
            world: Arc::clone(self),
            number,
        }
    }
}

// ---- the ports

struct ShardSource {
    world: Arc<World>,
    shard: usize,
    instance: usize,
    name: String,
}

impl Source for ShardSource {
    fn name(&self) -> &str {
        &self.name
    }

    fn verify(&self) -> BoxFuture<'_, Result<(), Vec<SourceError>>> {
        async { Ok(()) }.boxed()
    }

    fn open(
        &self,
        state: Arc<SessionState>,
        credits: u16,
    ) -> BoxFuture<'_, Result<OpenSession, SourceError>> {
        async move {
            a_moment().await;
            let (sender, receiver) = mpsc::unbounded_channel();
            let mut queue = lock(&self.world.queues[self.shard]);
            let mut others = queue.consumers.iter();
            if others.any(|other| other.instance == self.instance) {
                self.world.violation(format!(
                    "instance {} has two sessions on shard {}",
                    self.instance, self.shard
                ));
            }
            queue.consumers.push(Consumer {
                instance: self.instance,
                state: Arc::clone(&state),
                credits: usize::from(credits),
                last_tag: 0,
                unsettled: BTreeMap::new(),
                stream: sender,
            });
            queue.dispatch();
            let deliveries = futures::stream::unfold(receiver, async |mut receiver| {
                let batch = receiver.recv().await?;
                Some((batch, receiver))
            });
            Ok(OpenSession {
                deliveries: deliveries.boxed(),
                control: Arc::new(ShardSession {
                    world: Arc::clone(&self.world),
                    shard: self.shard,
                    state,
                }),
            })
        }
        .boxed()
    }
}

struct ShardSession {
    world: Arc<World>,
    shard: usize,
    state: Arc<SessionState>,
}

impl ShardSession {
    fn end(&self) {
        lock(&self.world.queues[self.shard]).end(self.state.id(), None);
        self.world.changed.send_modify(|changes| *changes += 1);
    }
}

/// Whoever can settle it has gone.
impl Drop for ShardSession {
    fn drop(&mut self) {
        self.end();
    }
}

impl Session for ShardSession {
    fn acknowledge(&self, acks: &[Ack]) {
        let mut queue = lock(&self.world.queues[self.shard]);
        let id = self.state.id();
        let of = |consumer: &&mut Consumer| consumer.state.id() == id;
        if let Some(consumer) = queue.consumers.iter_mut().find(of) {
            for ack in acks {
                if consumer.unsettled.remove(&ack.tag.0).is_none() {
                    self.world.violation(format!("unknown tag {ack:?}"));
                }
                if ack.multiple {
                    consumer.unsettled.retain(|&tag, _| tag > ack.tag.0);
                }
            }
        }
        queue.dispatch();
        drop(queue);
        self.world.changed.send_modify(|changes| *changes += 1);
    }

    /// Both kinds of sources are in every story with more than one shard.
    fn gathers_acknowledgements(&self) -> bool {
        self.shard.is_multiple_of(2)
    }

    fn barrier(&self) -> BoxFuture<'static, Result<(), SessionLost>> {
        let (world, shard, id) = (Arc::clone(&self.world), self.shard, self.state.id());
        async move {
            a_moment().await;
            let queue = lock(&world.queues[shard]);
            let mut open = queue.consumers.iter();
            match open.any(|consumer| consumer.state.id() == id) {
                true => Ok(()),
                false => Err(SessionLost),
            }
        }
        .boxed()
    }

    fn close(&self) -> BoxFuture<'static, ()> {
        let (world, shard, id) = (Arc::clone(&self.world), self.shard, self.state.id());
        async move {
            a_moment().await;
            lock(&world.queues[shard]).end(id, None);
            a_moment().await;
        }
        .boxed()
    }
}

struct Shelf(Arc<World>);

impl Parking for Shelf {
    fn name(&self) -> &str {
        "shelf"
    }

    fn park(&self, letter: Arc<DeadLetter>) -> BoxFuture<'static, Result<(), ParkError>> {
        let world = Arc::clone(&self.0);
        async move {
            a_moment().await;
            let flaky = world.parking_is_flaky && fastrand::u32(0..8) == 0;
            if flaky || world.parking_fails.load(Ordering::SeqCst) {
                return Err(ParkError::Refused("full".to_owned()));
            }
            let body = &letter.delivery.envelope().body;
            let message: Numbered = Encoding::Json.decode(body).expect("decodes");
            let mut ledger = lock(&world.ledger);
            ledger.parked.insert((message.key, message.seq));
            Ok(())
        }
        .boxed()
    }
}

// ---- the instances

pub(super) struct Instance {
    pub(super) number: usize,
    pub(super) handle: EndpointHandle,
    events: tokio::sync::broadcast::Receiver<Event>,
}

impl Instance {
    pub(super) fn start(
        world: &Arc<World>,
        number: usize,
        script: &Script,
        arbiters: Vec<ArbiterHandle>,
        describe: impl FnOnce(&mut EndpointSettings),
    ) -> Self {
        let shards = world.queues.len();
        let sources = (0..shards).map(|shard| {
            Arc::new(ShardSource {
                world: Arc::clone(world),
                shard,
                instance: number,
                name: format!("orders-{shard}"),
            }) as Arc<dyn Source>
        });
        let mut settings = EndpointSettings::named("orders");
        settings.ordering = Some(KeySource {
            header: Some(KEY.to_owned()),
            ..KeySource::default()
        });
        settings.max_delivery_attempts = 3;
        settings.backoff = Backoff::constant(Duration::from_millis(2));
        describe(&mut settings);
        let mut handlers = HandlerSet::new();
        let (handling, script) = (Arc::clone(world), Arc::clone(script));
        handlers.add(move |message: Numbered, cx: Context| {
            let (world, script) = (Arc::clone(&handling), Arc::clone(&script));
            async move {
                let step = script(&message, cx.attempt());
                let run = world.run(&message, number);
                match step {
                    Step::Succeed => {}
                    // The time a handler takes.
                    Step::Take(time) => tokio::time::sleep(time).await,
                    Step::Block(until) => lock(&until).recv().expect("sent"),
                    Step::BlockInPlace(until) => {
                        tokio::task::block_in_place(|| lock(&until).recv().expect("sent"));
                    }
                    Step::Fail => return Err(Failure::transient("as the script says")),
                    Step::Wait(mut gate) => {
                        gate.wait_for(|open| *open)
                            .await
                            .expect("the gate is there");
                    }
                }
                run.succeeded();
                Ok(())
            }
        });
        let mut spec =
            EndpointSpec::sharded(settings, "orders".into(), sources.collect(), handlers);
        spec.parking = Some(Arc::new(Shelf(Arc::clone(world))));
        spec.arbiters = arbiters;
        let events = spec.events.subscribe();
        let handle = EndpointSupervisor::start(spec).expect("valid");
        Self {
            number,
            handle,
            events,
        }
    }

    pub(super) fn rebalance(&self, subscribe: &[usize], give: &[usize]) {
        self.handle.addr.do_send(Rebalance(Decision {
            subscribe: subscribe.to_vec(),
            give: give.to_vec(),
        }));
    }

    /// Sends the next message of a key straight to its lane. It may be refused, or lost with the lane.
    pub(super) fn send(&self, world: &World, key: &str) {
        let envelope = Envelope::of(&world.next(key), Encoding::Json).expect("encodes");
        let key = OrderingKey::from(key);
        let lane = self.handle.lane_of(&key);
        let delivery = Delivery::direct(envelope, key, SessionState::start(), drop);
        let _ = lane.try_send(delivery);
    }

    /// Waits for an event, of those that have not been waited for.
    pub(super) async fn until(&mut self, what: &str, like: impl Fn(&EventKind) -> bool) {
        within(what, async {
            while !like(&self.events.recv().await.expect("few events").kind) {}
        })
        .await;
    }

    /// What is still there when everything has ended and every shard is wanted.
    pub(super) async fn left(&self) -> Vec<String> {
        let mut left = self.handle.addr.send(AskLeft).await.expect("it is there");
        for lane in self.handle.lanes.iter() {
            let in_lane = lane.left().await;
            if !in_lane.is_empty() {
                left.push(format!("lane {}: {in_lane:?}", lane.index().get()));
            }
        }
        left
    }
}
