//! A session may end at any moment: order holds, nothing is lost, no attempt is counted that did not end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use laneway::actors::SessionState;
use laneway::actors::port::{
    Ack, OpenSession, Parking, Publisher, Session, SessionLost, Source, SourceError,
};
use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::transport::{Transport, provenance};
use laneway::{EndpointState, EventKind, QueueSpec};

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{
    DLX, Gate, NO_ACK_TIMEOUT, ORDERS, PARKED, Seen, Tally, delivery, envelope, handled, orders,
    parked, put, send, snapshot, started, stop, within,
};
use workload::{Numbered, Scripted, Step, publish};

fn disconnected(kind: &EventKind) -> bool {
    matches!(kind, EventKind::Disconnected { .. })
}

fn connected(kind: &EventKind) -> bool {
    matches!(kind, EventKind::Connected { .. })
}

fn soon() -> Backoff {
    Backoff::constant(Duration::from_millis(1))
}

// O6
#[tokio::test(flavor = "multi_thread")]
async fn consumption_resumes_after_each_loss_and_order_holds() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |message, attempt| match message.seq % 20 {
        5 if attempt == 1 => Step::Fail(Duration::ZERO),
        9 if attempt == 1 => Step::Panic,
        _ => Step::Succeed(Duration::from_micros(fastrand::u64(0..3_000))),
    });
    let bus = started(orders(broker.clone(), |e| {
        e.backoff(soon()).handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    let (to, record) = (bus.clone(), ledger.clone());
    let publishing = tokio::spawn(async move { publish(&to, &record, 5_000, 50).await });
    let mut state = bus.endpoint(ORDERS).expect("it exists").state();
    for cut in 1..=10 {
        handled(&bus, cut * 300).await;
        broker.cut_sessions(ORDERS);
        within(
            "the loss to be shown",
            state.wait_for(|s| *s == EndpointState::Disconnected),
        )
        .await
        .expect("the endpoint is there");
        assert!(!snapshot(&bus).await.is_healthy());
        within(
            "the recovery",
            state.wait_for(|s| *s == EndpointState::Running),
        )
        .await
        .expect("the endpoint is there");
    }
    within("all published", publishing).await.expect("no panic");
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    assert_eq!(snapshot(&bus).await.reconnects, 10);
    stop(&bus).await;
    assert_eq!(seen.count(disconnected), 10);
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!(figures.handled, 5_000);
    assert_eq!(parked(&broker, &ledger), []);
}

// O12
#[tokio::test(flavor = "multi_thread")]
async fn a_cut_while_a_hundred_handlers_run_settles_nothing_stale() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let gate = Gate::closed();
    let (held, record) = (gate.clone(), ledger.clone());
    let bus = started(orders(broker.clone(), |e| {
        e.concurrency(100)
            .max_in_flight(300)
            .handler(move |message: Numbered, cx: Context| {
                let (held, record) = (held.clone(), record.clone());
                async move {
                    let run = record.run(&message.key, message.seq, cx.attempt());
                    assert_eq!(cx.attempt(), 1, "aborted attempts do not count");
                    held.pass().await;
                    run.end(true);
                    Ok(())
                }
            })
    }))
    .await;
    let seen = Seen::of(&bus);
    publish(&bus, &ledger, 300, 100).await;
    for losses in 1..=3 {
        gate.until_waiting(100).await;
        broker.cut_sessions(ORDERS);
        seen.until("the next session", losses, connected).await;
    }
    gate.until_waiting(100).await;
    gate.open();
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    // A stale or unknown tag would have ended a session (406).
    assert_eq!(snapshot(&bus).await.reconnects, 3);
    stop(&bus).await;
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.duplicates), (300, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_is_told_that_its_session_is_lost_and_within_its_grace_its_result_counts() {
    let broker = MemoryBroker::new();
    let (runs, told) = (Tally::new(), Tally::new());
    let (run, tell) = (runs.clone(), told.clone());
    let bus = started(orders(broker.clone(), |e| {
        e.abort_grace(Duration::from_secs(3600))
            .handler(move |message: Numbered, cx: Context| {
                let (run, tell) = (run.clone(), tell.clone());
                async move {
                    run.add();
                    if message.seq == 1 {
                        cx.cancelled().await;
                        assert!(cx.is_cancelled());
                        tell.add();
                    }
                    Ok(())
                }
            })
    }))
    .await;
    for seq in 1..=3 {
        put(&broker, ORDERS, envelope("a", seq)).await;
    }
    runs.until("the first run", 1).await;
    broker.cut_sessions(ORDERS);
    told.until("the handler to be told", 1).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    // The copy of the first is settled without a second run.
    assert_eq!((runs.get(), told.get()), (3, 1));
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attempts_go_on_counting_in_the_next_session() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |message, _| match message.seq {
        1 => Step::Fail(Duration::ZERO),
        _ => Step::Succeed(Duration::ZERO),
    });
    let bus = started(orders(broker.clone(), |e| {
        e.max_delivery_attempts(4)
            .backoff(Backoff::constant(Duration::from_millis(300)))
            .handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    send(&bus, &ledger, "a", 1).await;
    send(&bus, &ledger, "a", 2).await;
    for number in 1..=3 {
        let failed = |kind: &EventKind| matches!(kind, EventKind::AttemptFailed { attempt, .. } if *attempt == number);
        seen.until("the next attempt", 1, failed).await;
        broker.cut_sessions(ORDERS);
    }
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    assert_eq!(parked(&broker, &ledger), [("a".to_owned(), 1)]);
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!(figures.attempts, 5);
}

// O23
#[tokio::test(flavor = "multi_thread")]
async fn prefetched_messages_that_never_ran_are_not_parked_however_often_they_come_again() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let gate = Gate::closed();
    let (held, record) = (gate.clone(), ledger.clone());
    let bus = started(orders(broker.clone(), |e| {
        e.concurrency(2)
            .max_in_flight(100)
            .max_delivery_attempts(3)
            .handler(move |message: Numbered, cx: Context| {
                let (held, record) = (held.clone(), record.clone());
                async move {
                    let run = record.run(&message.key, message.seq, cx.attempt());
                    if message.key == "held" {
                        held.pass().await;
                    }
                    run.end(true);
                    Ok(())
                }
            })
    }))
    .await;
    let seen = Seen::of(&bus);
    for seq in 1..=60 {
        send(&bus, &ledger, "held", seq).await;
    }
    for cut in 1..=10 {
        send(&bus, &ledger, "alive", cut).await;
        gate.until_waiting(1).await;
        handled(&bus, cut).await;
        broker.cut_sessions(ORDERS);
        seen.until("the next session", cut as usize, connected)
            .await;
    }
    gate.open();
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    assert_eq!(parked(&broker, &ledger), []);
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!(figures.handled, 70);
}

// ---- the moment between the acknowledgement and its barrier

/// When to cut the connection.
#[derive(Clone, Copy, PartialEq)]
enum Cut {
    /// The acknowledgement is lost with the connection.
    BeforeAck,
    /// The broker has processed it; the client does not know.
    AfterAck,
}

/// The embedded broker, which cuts the session around the next acknowledgement after it was armed.
#[derive(Clone)]
struct Cutting {
    broker: MemoryBroker,
    armed: Arc<AtomicBool>,
    cut: Cut,
    cuts: Tally,
}

struct CuttingSource {
    inner: Arc<dyn Source>,
    world: Cutting,
}

struct CuttingSession {
    inner: Arc<dyn Session>,
    world: Cutting,
}

/// Arms the cut when a message has been parked: the next acknowledgement is that message's.
struct ArmingParking {
    inner: Arc<dyn Parking>,
    world: Cutting,
}

impl Transport for Cutting {
    fn source(&self, queue: &QueueSpec) -> Arc<dyn Source> {
        Arc::new(CuttingSource {
            inner: self.broker.source(queue),
            world: self.clone(),
        })
    }
    fn parking(&self, queue: &QueueSpec) -> Option<Arc<dyn Parking>> {
        Some(Arc::new(ArmingParking {
            inner: self.broker.parking(queue)?,
            world: self.clone(),
        }))
    }
    fn publisher(&self) -> Arc<dyn Publisher> {
        self.broker.publisher()
    }
}

impl Source for CuttingSource {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn verify(&self) -> BoxFuture<'_, Result<(), Vec<SourceError>>> {
        self.inner.verify()
    }
    fn open(
        &self,
        state: Arc<SessionState>,
        credits: u16,
    ) -> BoxFuture<'_, Result<OpenSession, SourceError>> {
        async move {
            let open = self.inner.open(state, credits).await?;
            Ok(OpenSession {
                deliveries: open.deliveries,
                control: Arc::new(CuttingSession {
                    inner: open.control,
                    world: self.world.clone(),
                }),
            })
        }
        .boxed()
    }
}

impl Session for CuttingSession {
    fn acknowledge(&self, acks: &[Ack]) {
        let now = self.world.armed.swap(false, Ordering::SeqCst);
        if now && self.world.cut == Cut::BeforeAck {
            self.world.broker.cut_sessions(ORDERS);
        }
        self.inner.acknowledge(acks);
        if now && self.world.cut == Cut::AfterAck {
            self.world.broker.cut_sessions(ORDERS);
        }
        if now {
            self.world.cuts.add();
        }
    }
    fn barrier(&self) -> BoxFuture<'static, Result<(), SessionLost>> {
        self.inner.barrier()
    }
    fn close(&self) -> BoxFuture<'static, ()> {
        self.inner.close()
    }
}

impl Parking for ArmingParking {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn park(
        &self,
        letter: Arc<laneway::actors::port::DeadLetter>,
    ) -> BoxFuture<'static, Result<(), laneway::actors::port::ParkError>> {
        let parked = self.inner.park(letter);
        let world = self.world.clone();
        async move {
            parked.await?;
            world.armed.store(true, Ordering::SeqCst);
            Ok(())
        }
        .boxed()
    }
}

/// One bus of its own: 10 poison messages, each cut at the acknowledgement of its parking.
async fn cut_at_each_parking(cut: Cut, ledger: OrderLedger, name: usize) {
    let world = Cutting {
        broker: MemoryBroker::new(),
        armed: Arc::default(),
        cut,
        cuts: Tally::new(),
    };
    let broker = world.broker.clone();
    let handler = Scripted::new(&ledger, |message, _| match message.seq % 3 {
        1 => Step::FailForGood,
        _ => Step::Succeed(Duration::ZERO),
    });
    let bus = started(orders(world.clone(), |e| e.handler(handler))).await;
    let key = format!("key-{name}");
    for seq in 1..=30 {
        send(&bus, &ledger, &key, seq).await;
    }
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    assert_eq!(world.cuts.get(), 10);
    let parked: Vec<_> = parked(&broker, &ledger)
        .into_iter()
        .map(|(_, seq)| seq)
        .collect();
    let expected: Vec<_> = (0..10).map(|n| 3 * n + 1).collect();
    assert_eq!(parked, expected, "each parked once, in order");
}

async fn a_hundred_cuts(cut: Cut) {
    let ledger = OrderLedger::in_memory();
    let buses = (0..10).map(|name| tokio::spawn(cut_at_each_parking(cut, ledger.clone(), name)));
    for bus in futures::future::join_all(buses).await {
        bus.expect("no panic");
    }
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.parked, figures.handled), (100, 200));
    // A second run of a parked message would show here.
    assert_eq!(figures.attempts, 300);
}

// O22
#[tokio::test(flavor = "multi_thread")]
async fn a_parked_message_whose_acknowledgement_was_lost_holds_its_successor_and_is_not_parked_again()
 {
    a_hundred_cuts(Cut::BeforeAck).await;
}

// O22
#[tokio::test(flavor = "multi_thread")]
async fn a_parked_message_whose_acknowledgement_was_processed_unnoticed_does_not_hold_its_key() {
    a_hundred_cuts(Cut::AfterAck).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_being_parked_when_its_session_ends_is_parked_once() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |message, _| match message.seq {
        1 => Step::FailForGood,
        _ => Step::Succeed(Duration::ZERO),
    });
    let bus = started(orders(broker.clone(), |e| e.handler(handler))).await;
    let seen = Seen::of(&bus);
    broker.remove_exchange(DLX);
    publish(&bus, &ledger, 10, 5).await;
    let failed = |kind: &EventKind| matches!(kind, EventKind::ParkingFailed { .. });
    seen.until("every head held", 5, failed).await;
    for losses in 1..=2 {
        broker.cut_sessions(ORDERS);
        seen.until("the next session", losses, connected).await;
    }
    let topology = laneway::Topology::default().queue(ORDERS, |q| {
        q.durable().single_active_consumer().parking(DLX, PARKED)
    });
    broker
        .declare_queue(&topology.queues()[0])
        .expect("the same");
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    assert_eq!(parked(&broker, &ledger).len(), 5);
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.attempts), (5, 10));
}

/// The message turns out to be poison after its session is gone, so its copy is parked without another
/// run; meanwhile another message of the lane failed with a text of its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_parked_message_carries_its_own_error_also_when_it_is_parked_in_a_later_session() {
    let broker = MemoryBroker::new();
    let (poison, neighbour) = (Gate::closed(), Gate::closed());
    let gates = (poison.clone(), neighbour.clone());
    let bus = started(orders(broker.clone(), |e| {
        e.lanes(1)
            .abort_grace(Duration::from_secs(3600))
            .backoff(Backoff::constant(Duration::from_secs(3600)))
            .ack_timeout(NO_ACK_TIMEOUT)
            .handler(move |message: Numbered, _: Context| {
                let (poison, neighbour) = gates.clone();
                async move {
                    if message.key == "poison" {
                        poison.pass().await;
                        return Err::<(), _>(Failure::permanent("the error of its own"));
                    }
                    neighbour.pass().await;
                    let text = format!("another error, of {}", message.key);
                    Err(Failure::transient(text))
                }
            })
    }))
    .await;
    let seen = Seen::of(&bus);
    put(&broker, ORDERS, envelope("poison", 1)).await;
    put(&broker, ORDERS, envelope("neighbour", 1)).await;
    poison.until_waiting(1).await;
    neighbour.until_waiting(1).await;
    broker.make_unreachable();
    seen.until("the loss", 1, disconnected).await;
    let failed = |kind: &EventKind| matches!(kind, EventKind::AttemptFailed { .. });
    poison.open();
    seen.until("the end of the poison", 1, failed).await;
    neighbour.open();
    seen.until("the end of the neighbour", 2, failed).await;
    broker.make_reachable();
    within(
        "the parked message",
        broker.wait_until(PARKED, |q| q.ready == 1),
    )
    .await;
    let parked = broker.messages(PARKED);
    let detail = parked[0].headers.text(provenance::DETAIL).expect("a text");
    assert_eq!(detail, "the error of its own");
    stop(&bus).await;
}

// ---- sources that misbehave

/// A transport whose source does what a test says; it has no parking place and no publisher.
#[derive(Clone)]
struct Odd<F>(F);

struct OddSource<F>(F);

type Opened = Result<OpenSession, SourceError>;

impl<F> Transport for Odd<F>
where
    F: Fn(Arc<SessionState>) -> Opened + Clone + Send + Sync + 'static,
{
    fn source(&self, _: &QueueSpec) -> Arc<dyn Source> {
        Arc::new(OddSource(self.0.clone()))
    }
    fn parking(&self, queue: &QueueSpec) -> Option<Arc<dyn Parking>> {
        MemoryBroker::new().parking(queue)
    }
    fn publisher(&self) -> Arc<dyn Publisher> {
        MemoryBroker::new().publisher()
    }
}

impl<F> Source for OddSource<F>
where
    F: Fn(Arc<SessionState>) -> Opened + Send + Sync + 'static,
{
    fn name(&self) -> &str {
        ORDERS
    }
    fn verify(&self) -> BoxFuture<'_, Result<(), Vec<SourceError>>> {
        async { Ok(()) }.boxed()
    }
    fn open(&self, state: Arc<SessionState>, _: u16) -> BoxFuture<'_, Opened> {
        async move { (self.0)(state) }.boxed()
    }
}

/// Accepts everything.
struct Agreeable;

impl Session for Agreeable {
    fn acknowledge(&self, _: &[Ack]) {}
    fn barrier(&self) -> BoxFuture<'static, Result<(), SessionLost>> {
        async { Ok(()) }.boxed()
    }
    fn close(&self) -> BoxFuture<'static, ()> {
        async {}.boxed()
    }
}

fn session_of(batches: Vec<Vec<laneway::actors::Delivery>>, then_ends: bool) -> Opened {
    let batches = futures::stream::iter(batches.into_iter().map(Ok));
    let deliveries = if then_ends {
        batches.boxed()
    } else {
        batches.chain(futures::stream::pending()).boxed()
    };
    Ok(OpenSession {
        deliveries,
        control: Arc::new(Agreeable),
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_whose_sessions_end_at_once_is_asked_again_in_growing_intervals() {
    let opened = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&opened);
    let source = Odd(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        session_of(Vec::new(), true)
    });
    let bus = started(orders(source, |e| {
        e.handler(|_: Numbered, _: Context| async { Ok(()) })
    }))
    .await;
    let seen = Seen::of(&bus);
    seen.until("three more sessions", 3, connected).await;
    let pauses: Vec<_> = seen
        .all()
        .into_iter()
        .filter_map(|kind| match kind {
            EventKind::Disconnected { retry_in, .. } => Some(retry_in),
            _ => None,
        })
        .collect();
    stop(&bus).await;
    // 100, 200, 400 ms, each give or take 30 %; the record may have missed the first.
    assert!(
        pauses.last() > Some(&Duration::from_millis(200)),
        "{pauses:?}"
    );
    assert!(opened.load(Ordering::SeqCst) <= 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_repeats_a_tag_loses_its_session_and_nothing_more() {
    let sessions = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&sessions);
    let source = Odd(move |state: Arc<SessionState>| {
        let number = count.fetch_add(1, Ordering::SeqCst);
        let tags = if number == 0 { [1, 2, 2] } else { [1, 2, 3] };
        let batch = tags.iter().enumerate().map(|(place, &tag)| {
            let envelope = envelope("a", place as u64 + 1);
            delivery(envelope, &state, tag)
        });
        session_of(vec![batch.collect()], false)
    });
    let handled_ones = Tally::new();
    let done = handled_ones.clone();
    let ready = orders(source, |e| {
        e.handler(move |message: Numbered, _: Context| {
            let done = done.clone();
            async move {
                if message.seq == 3 {
                    done.add();
                }
                Ok(())
            }
        })
    });
    let bus = started(ready).await;
    let seen = Seen::of(&bus);
    handled_ones
        .until("the third message, in a good session", 1)
        .await;
    let restarted = |kind: &EventKind| matches!(kind, EventKind::ActorRestarted { .. });
    assert_eq!(seen.count(restarted), 0);
    assert_eq!(sessions.load(Ordering::SeqCst), 2);
    assert_eq!(snapshot(&bus).await.reconnects, 1);
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_panics_costs_its_session_and_the_endpoint_goes_on() {
    let broker = MemoryBroker::new();
    let topology = laneway::Topology::default().queue(ORDERS, |q| q.single_active_consumer());
    broker.declare_queue(&topology.queues()[0]).expect("empty");
    let memory = broker.source(&topology.queues()[0]);
    let opened = Arc::new(AtomicU64::new(0));
    let source = Odd(move |state: Arc<SessionState>| {
        assert!(
            opened.fetch_add(1, Ordering::SeqCst) != 1,
            "the source panics"
        );
        let open = memory.open(state, 10).now_or_never();
        open.expect("the embedded broker answers at once")
    });
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::succeeding(&ledger, Duration::from_millis(2));
    let bus = started(orders(source, |e| e.handler(handler))).await;
    let seen = Seen::of(&bus);
    for number in 0..500_u64 {
        let (key, seq) = (format!("key-{}", number % 5), number / 5 + 1);
        put(&broker, ORDERS, envelope(&key, seq)).await;
        ledger.published(&key, seq);
        if number == 250 {
            broker.cut_sessions(ORDERS);
        }
    }
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    let restarted = |kind: &EventKind| {
        matches!(
            kind,
            EventKind::ActorRestarted {
                actor: "supervisor"
            }
        )
    };
    assert_eq!(seen.count(restarted), 1);
    stop(&bus).await;
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!(figures.handled, 500);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_cannot_be_opened_refuses_the_start_and_later_is_only_degraded() {
    let broker = MemoryBroker::new();
    let describe = |broker: &MemoryBroker| {
        orders(broker.clone(), |e| {
            e.handler(|_: Numbered, _: Context| async { Ok(()) })
        })
    };
    broker.make_unreachable();
    let refused = describe(&broker).build().expect("valid").start().await;
    let error = refused.expect_err("unreachable").to_string();
    assert!(
        error.contains("connection") && error.contains(ORDERS),
        "{error}"
    );

    broker.make_reachable();
    let bus = started(describe(&broker)).await;
    let seen = Seen::of(&bus);
    broker.make_unreachable();
    let asked = Instant::now();
    seen.until("three tries", 3, disconnected).await;
    assert!(
        asked.elapsed() > Duration::from_millis(150),
        "a pause between tries"
    );
    assert_eq!(snapshot(&bus).await.state, EndpointState::Disconnected);
    broker.make_reachable();
    put(&broker, ORDERS, envelope("a", 1)).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    assert!(snapshot(&bus).await.is_healthy());
    stop(&bus).await;
}
