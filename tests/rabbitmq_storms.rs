//! A bus on a real broker keeps its order and loses nothing while the broker is killed, restarted, frozen,
//! blocked and cut off under load, again and again in one run.

#![cfg(feature = "rabbitmq")]

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::{EndpointSnapshot, EndpointState, EventKind, PublishError, QueueSpec};
use lapin::types::{AMQPValue, FieldTable};
use tokio::sync::watch;
use tokio::time::timeout;

mod support;
#[path = "support/workload.rs"]
mod workload;
use support::broker::{PrivateBroker, shared_url, unique};
use support::foreign::Foreign;
use support::proxy::Proxy;
use workload::{KEY_HEADER, Numbered, Scripted, Step};

const PATIENCE: Duration = Duration::from_secs(120);
const HEARTBEAT: Duration = Duration::from_secs(2);
const CREDITS: u32 = 64;
const KEYS: u64 = 50;

/// Private brokers one at a time: several would only slow one another down.
static ONE_BROKER: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

fn rounds_of() -> u64 {
    match std::env::var_os("LANEWAY_SOAK") {
        Some(_) => 20_000,
        None => 1_000,
    }
}

fn declared(queue: QueueSpec, name: &str, queue_type: QueueType) -> QueueSpec {
    queue
        .durable()
        .of_type(queue_type)
        .single_active_consumer()
        .parking(&format!("{name}-dlx"), &format!("{name}-parked"))
}

async fn clean_up(foreign: &Foreign, queue: &str) {
    foreign.delete(queue).await;
    foreign.delete(&format!("{queue}-parked")).await;
    foreign.delete_exchange(&format!("{queue}-dlx")).await;
}

/// A bus under load, and what is known of it.
struct Storm {
    url: String,
    queue: String,
    bus: Bus,
    ledger: OrderLedger,
    /// Messages that were handled or used up their attempts.
    done: watch::Receiver<u64>,
    poison: Arc<Mutex<HashSet<(String, u64)>>>,
    published: u64,
    unknown: Arc<AtomicU64>,
}

impl Storm {
    async fn over(url: String, direct: &str, queue_type: QueueType) -> Self {
        let queue = unique("storm");
        let ledger = OrderLedger::in_memory();
        let (sender, done) = watch::channel(0);
        let ended = Mutex::new(HashSet::new());
        let poison = Arc::new(Mutex::new(HashSet::new()));
        let parked = Arc::clone(&poison);
        // Every 97th message always fails; every 13th fails once.
        let handler = Scripted::new(&ledger, move |message: &Numbered, attempt| {
            let number = (message.seq - 1) * KEYS + message.key[4..].parse::<u64>().expect("key-n");
            let id = (message.key.clone(), message.seq);
            let time = Duration::from_millis(2).mul_f64(fastrand::f64());
            let end = |id| {
                if ended.lock().expect("no panic").insert(id) {
                    sender.send_modify(|done| *done += 1);
                }
            };
            if number % 97 == 96 {
                if attempt >= 2 {
                    parked.lock().expect("no panic").insert(id.clone());
                    end(id);
                }
                return Step::Fail(time);
            }
            if number % 13 == 12 && attempt == 1 {
                return Step::Fail(time);
            }
            end(id);
            Step::Succeed(time)
        });
        let rabbitmq = RabbitMq::at(&url)
            .heartbeat(HEARTBEAT)
            .operation_timeout(Duration::from_secs(5))
            .confirm_timeout(Duration::from_secs(5));
        let bus = Bus::builder()
            .rabbitmq(rabbitmq)
            .topology(|t| t.queue(&queue, |q| declared(q, &queue, queue_type)))
            .endpoint(&queue, |e| {
                e.ordered_by_header(KEY_HEADER)
                    .transport_affinity(TransportAffinity::SingleActiveConsumer)
                    .concurrency(16)
                    .max_in_flight(CREDITS)
                    .max_delivery_attempts(2)
                    .backoff(Backoff::constant(Duration::from_millis(2)))
                    .handler(handler)
            })
            .publishes::<Numbered>(|r| r.to_queue(&queue).keyed_by(|m| m.key.clone()))
            .build()
            .expect("valid")
            .start()
            .await
            .expect("starts");
        Self {
            url: direct.to_owned(),
            queue,
            bus,
            ledger,
            done,
            poison,
            published: 0,
            unknown: Arc::default(),
        }
    }

    /// Publishes the next messages, each until it is confirmed; of one key one after the other.
    fn publish(&mut self, messages: u64) -> tokio::task::JoinHandle<()> {
        let (bus, ledger) = (self.bus.clone(), self.ledger.clone());
        let unknown = Arc::clone(&self.unknown);
        let (from, to) = (self.published, self.published + messages);
        self.published = to;
        tokio::spawn(async move {
            let keys = (0..KEYS).map(|key| {
                let (bus, ledger, unknown) = (bus.clone(), ledger.clone(), Arc::clone(&unknown));
                async move {
                    for number in (from..to).filter(|number| number % KEYS == key) {
                        let message = Numbered {
                            key: format!("key-{key}"),
                            seq: number / KEYS + 1,
                        };
                        loop {
                            match bus.publish(&message).await {
                                Ok(()) => break,
                                Err(PublishError::Unknown(_)) => {
                                    unknown.fetch_add(1, Relaxed);
                                }
                                Err(PublishError::Refused(_)) => {}
                                Err(error) => panic!("{error}"),
                            }
                            // A pause as any publisher makes it, not to be refused all the time.
                            tokio::time::sleep(Duration::from_millis(50)).await;
                        }
                        ledger.published(&message.key, message.seq);
                    }
                }
            });
            futures::stream::iter(keys)
                .buffer_unordered(KEYS as usize)
                .collect::<Vec<()>>()
                .await;
        })
    }

    async fn until_done(&self, number: u64) {
        let mut done = self.done.clone();
        let waiting = timeout(PATIENCE, done.wait_for(|done| *done >= number));
        if waiting.await.is_err() {
            let snapshot = self.bus.snapshot().await;
            let figures = self.ledger.figures().expect("in memory");
            panic!("{number} messages were not done in time\n{figures}\n{snapshot:?}");
        }
    }

    /// Load, a fault in the middle of it, and everything done after it.
    async fn round<F: Future<Output = ()>>(&mut self, fault: impl FnOnce(Bus, String) -> F) {
        let before = self.published;
        let publishing = self.publish(rounds_of());
        self.until_done(before + rounds_of() / 4).await;
        fault(self.bus.clone(), self.queue.clone()).await;
        timeout(PATIENCE, publishing)
            .await
            .expect("everything is published")
            .expect("no panic");
        self.until_done(self.published).await;
        println!(
            "round: {}",
            self.ledger.figures().expect("in memory").duplicates
        );
    }

    /// `forgotten` are acknowledged messages that the broker may have forgotten.
    async fn end(self, faults: u64, forgotten: u64) {
        let endpoint = self.bus.endpoint(&self.queue).expect("named above");
        let idle = async {
            loop {
                let snapshot = endpoint.snapshot().await;
                if snapshot.in_flight == 0 && snapshot.state == EndpointState::Running {
                    break;
                }
                // Nothing tells that the last acknowledgement was made; asking again is cheap.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(PATIENCE, idle).await.expect("all is settled");
        let report = self.bus.shutdown(Duration::from_secs(10)).await;
        assert!(report.is_clean(), "{report:?}");
        let foreign = Foreign::connect(&self.url).await;
        assert_eq!(foreign.ready(&self.queue).await, 0, "the queue is empty");
        let mut parked = HashSet::new();
        while let Some(delivery) = foreign.get(&format!("{}-parked", self.queue)).await {
            let message: Numbered = serde_json::from_slice(&delivery.data).expect("as published");
            self.ledger.parked(&message.key, message.seq);
            parked.insert((message.key, message.seq));
        }
        assert_eq!(parked, *self.poison.lock().expect("no panic"));
        let figures = self.ledger.figures().expect("in memory");
        figures.assert_ordered();
        assert_eq!(figures.handled + figures.parked, self.published);
        let unknown = self.unknown.load(Relaxed);
        assert!(
            figures.duplicates <= faults * u64::from(CREDITS) + forgotten + unknown,
            "{unknown} unknown\n{figures}"
        );
    }
}

/// Waits until the endpoint is in a state.
async fn reaches(bus: &Bus, queue: &str, wanted: EndpointState) {
    let mut state = bus.endpoint(queue).expect("named above").state();
    timeout(PATIENCE, state.wait_for(|state| *state == wanted))
        .await
        .unwrap_or_else(|_| panic!("never {wanted:?}"))
        .expect("the endpoint lives");
}

async fn order_holds_in_a_storm(queue_type: QueueType) {
    let _one = ONE_BROKER.lock().await;
    let mut node = PrivateBroker::start();
    let mut storm = Storm::over(node.url(), &node.url(), queue_type).await;
    storm
        .round(async |bus, queue| {
            node.stop_app();
            reaches(&bus, &queue, EndpointState::Disconnected).await;
            node.start_app();
        })
        .await;
    // Not earlier: a quorum queue that is a second old when its node is killed can stay without a leader for
    // good (RabbitMQ 3.10.8). The restart has written everything down.
    storm
        .round(async |bus, queue| {
            node.kill();
            reaches(&bus, &queue, EndpointState::Disconnected).await;
            node.restart();
        })
        .await;
    storm
        .round(async |bus, queue| {
            node.freeze();
            reaches(&bus, &queue, EndpointState::Disconnected).await;
            node.thaw();
        })
        .await;
    storm
        .round(async |_, _| {
            // Each takes a second or two, in which publishers and parking are refused.
            node.raise_memory_alarm();
            node.end_memory_alarm();
        })
        .await;
    storm
        .round(async |bus, queue| {
            for _ in 0..3 {
                reaches(&bus, &queue, EndpointState::Running).await;
                node.close_all_connections();
            }
        })
        .await;
    // A classic queue writes acknowledgements down later; a broker that is killed forgets those of the last
    // second or so, on 3.10.8 often more than the bus remembers.
    let forgotten = match queue_type {
        QueueType::Classic => rounds_of(),
        _ => 0,
    };
    storm.end(7, forgotten).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_holds_on_a_classic_queue_while_its_broker_is_killed_frozen_blocked_and_restarted() {
    order_holds_in_a_storm(QueueType::Classic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_holds_on_a_quorum_queue_while_its_broker_is_killed_frozen_blocked_and_restarted() {
    order_holds_in_a_storm(QueueType::Quorum).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_holds_while_the_network_stalls_for_longer_and_shorter_than_the_heartbeat() {
    let _one = ONE_BROKER.lock().await;
    let node = PrivateBroker::start();
    let target = node.url().rsplit('@').next().expect("an URL").to_owned();
    let proxy = Proxy::to(&target);
    let url = format!("amqp://guest:guest@{}", proxy.address());
    let mut storm = Storm::over(url, &node.url(), QueueType::Quorum).await;
    storm
        .round(async |bus, queue| {
            proxy.stall();
            reaches(&bus, &queue, EndpointState::Disconnected).await;
            proxy.resume();
        })
        .await;
    storm
        .round(async |_, _| {
            for _ in 0..5 {
                proxy.stall();
                // The fault itself: shorter than a heartbeat.
                tokio::time::sleep(HEARTBEAT / 4).await;
                proxy.resume();
                tokio::time::sleep(HEARTBEAT / 8).await;
            }
        })
        .await;
    storm.end(2, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_was_deleted_is_consumed_again_only_when_it_is_again_what_was_declared() {
    let _one = ONE_BROKER.lock().await;
    let node = PrivateBroker::start();
    for queue_type in [QueueType::Classic, QueueType::Quorum] {
        let mut storm = Storm::over(node.url(), &node.url(), queue_type).await;
        let publishing = storm.publish(200);
        publishing.await.expect("no panic");
        storm.until_done(200).await;
        let mut events = storm.bus.events();
        let foreign = Foreign::connect(&node.url()).await;
        foreign.delete(&storm.queue).await;
        let lost = async {
            loop {
                let event = events.recv().await.expect("the bus lives");
                if let EventKind::Disconnected { .. } = event.kind {
                    break;
                }
            }
        };
        timeout(PATIENCE, lost).await.expect("the loss is seen");
        // By hand, as an operator would. First without what keeps the order.
        let mut arguments = FieldTable::default();
        if queue_type == QueueType::Quorum {
            let quorum = AMQPValue::LongString("quorum".into());
            arguments.insert("x-queue-type".into(), quorum);
        }
        foreign.declare(&storm.queue, arguments.clone()).await;
        let refused = async {
            loop {
                let event = events.recv().await.expect("the bus lives");
                match event.kind {
                    EventKind::Disconnected { reason, .. } if reason.contains("differs") => {
                        break reason;
                    }
                    EventKind::Connected { .. } => panic!("consumes a queue that keeps no order"),
                    _ => {}
                }
            }
        };
        let reason = timeout(PATIENCE, refused).await.expect("it is refused");
        assert!(reason.contains(&storm.queue), "{reason}");
        foreign.delete(&storm.queue).await;
        let yes = AMQPValue::Boolean(true);
        arguments.insert("x-single-active-consumer".into(), yes);
        foreign.declare(&storm.queue, arguments).await;
        reaches(&storm.bus, &storm.queue, EndpointState::Running).await;
        let publishing = storm.publish(200);
        publishing.await.expect("no panic");
        storm.until_done(400).await;
        storm.end(1, 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_keys_that_park_at_once_are_all_released_in_order_with_the_largest_prefetch() {
    const PARKED: u64 = 10_000;
    let queue = unique("parked-at-once");
    let url = shared_url();
    let ledger = OrderLedger::in_memory();
    let gate = watch::Sender::new(false);
    let handler = BehindGate {
        // The first message of each key fails for good.
        inner: Scripted::new(&ledger, |message: &Numbered, _| match message.seq {
            1 => Step::FailForGood,
            _ => Step::Succeed(Duration::ZERO),
        }),
        gate: gate.subscribe(),
    };
    let bus = Bus::builder()
        .rabbitmq(RabbitMq::at(&url))
        .topology(|t| t.queue(&queue, |q| declared(q, &queue, QueueType::Quorum)))
        .endpoint(&queue, |e| {
            e.ordered_by_header(KEY_HEADER)
                .transport_affinity(TransportAffinity::SingleActiveConsumer)
                .concurrency(64)
                .max_in_flight(65_535)
                .handler(handler)
        })
        .build()
        .expect("valid")
        .start()
        .await
        .expect("starts");
    let foreign = Foreign::connect(&url).await;
    foreign
        .publish_numbered(&queue, KEY_HEADER, &ledger, 2 * PARKED, PARKED)
        .await;
    let endpoint = bus.endpoint(&queue).expect("named above");
    let reach = async |what: &str, enough: &dyn Fn(&EndpointSnapshot) -> bool| {
        let waiting = async {
            while !enough(&endpoint.snapshot().await) {
                // Nothing tells when a counter has changed; asking again is cheap.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        if timeout(PATIENCE, waiting).await.is_err() {
            let mut snapshot = endpoint.snapshot().await;
            snapshot.waiting_keys.truncate(3);
            panic!("never {what}: {snapshot:?}");
        }
    };
    reach("all in flight", &|s| s.in_flight as u64 == 2 * PARKED).await;
    gate.send_replace(true);
    reach("all ended", &|s| s.handled == PARKED && s.parked == PARKED).await;
    reach("all settled", &|s| s.in_flight == 0).await;
    let state = endpoint.snapshot().await;
    assert_eq!((state.attempts, state.reconnects), (2 * PARKED, 0));
    let report = bus.shutdown(Duration::from_secs(20)).await;
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(u64::from(foreign.ready(&queue).await), 0);
    let parked = format!("{queue}-parked");
    assert_eq!(u64::from(foreign.ready(&parked).await), PARKED);
    for key in 0..PARKED {
        ledger.parked(&format!("key-{key}"), 1);
    }
    ledger.figures().expect("in memory").assert_ordered();
    clean_up(&foreign, &queue).await;
}

/// Runs the inner handler when the gate is open.
struct BehindGate {
    inner: Scripted,
    gate: watch::Receiver<bool>,
}

impl Handler<Numbered> for BehindGate {
    type Answer = ();

    async fn handle(&self, message: Numbered, cx: Context) -> Result<(), Failure> {
        self.gate.clone().wait_for(|open| *open).await?;
        self.inner.handle(message, cx).await
    }
}

/// A message with a large body.
#[derive(serde::Serialize, serde::Deserialize)]
struct Blob {
    seq: u64,
    content: String,
}

impl Message for Blob {
    const TYPE: &'static str = "blob";
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_without_bytes_and_one_of_ten_megabytes_are_handled_or_parked_whole_and_in_order() {
    const LARGE: usize = 10_000_000;
    let url = shared_url();
    for queue_type in [QueueType::Classic, QueueType::Quorum] {
        let queue = unique("bodies");
        let (sender, mut done) = watch::channel(Vec::new());
        let bus = Bus::builder()
            .rabbitmq(RabbitMq::at(&url))
            .topology(|t| t.queue(&queue, |q| declared(q, &queue, queue_type)))
            .endpoint(&queue, |e| {
                e.ordered_by_header(KEY_HEADER)
                    .transport_affinity(TransportAffinity::SingleActiveConsumer)
                    .handler(move |blob: Blob, _: Context| {
                        let all = blob.content.bytes().filter(|byte| *byte == b'x').count();
                        sender.send_modify(|done| done.push((blob.seq, all)));
                        async move {
                            match blob.seq {
                                2 => Err(Failure::permanent("as the test says")),
                                _ => Ok(()),
                            }
                        }
                    })
            })
            .publishes::<Blob>(|r| r.to_queue(&queue).keyed_by(|_| "one"))
            .build()
            .expect("valid")
            .start()
            .await
            .expect("starts");
        let foreign = Foreign::connect(&url).await;
        let mut headers = FieldTable::default();
        headers.insert(KEY_HEADER.into(), AMQPValue::LongString("one".into()));
        let properties = lapin::BasicProperties::default()
            .with_type("blob".into())
            .with_headers(headers);
        foreign.publish(&queue, b"", properties).await;
        for (seq, size) in [(1, LARGE), (2, LARGE), (3, 0)] {
            let content = "x".repeat(size);
            let blob = Blob { seq, content };
            let sent = bus.publish(&blob);
            timeout(PATIENCE, sent)
                .await
                .expect("in time")
                .expect("sent");
        }
        timeout(PATIENCE, done.wait_for(|done| done.len() == 3))
            .await
            .unwrap_or_else(|_| panic!("{queue_type:?}: three messages are handled"))
            .expect("the handler is there");
        let report = bus.shutdown(Duration::from_secs(20)).await;
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(*done.borrow(), [(1, LARGE), (2, LARGE), (3, 0)]);
        let parked = format!("{queue}-parked");
        let empty = foreign.get(&parked).await.expect("parked");
        assert!(empty.data.is_empty());
        let large = foreign.get(&parked).await.expect("parked");
        let blob: Blob = serde_json::from_slice(&large.data).expect("whole");
        assert_eq!((blob.seq, blob.content.len()), (2, LARGE));
        assert_eq!(foreign.ready(&queue).await, 0);
        clean_up(&foreign, &queue).await;
    }
}

/// A broker that is killed forgets acknowledgements that it has answered for: a classic queue writes them
/// down later. What was parked then comes again, and must not run after its successors.
#[tokio::test(flavor = "multi_thread")]
async fn a_parked_message_does_not_run_after_its_successors_when_the_broker_is_killed() {
    const ORDERS: u64 = 20;
    let _one = ONE_BROKER.lock().await;
    let mut node = PrivateBroker::start();
    for queue_type in [QueueType::Quorum, QueueType::Classic] {
        let queue = unique("parked-and-killed");
        let ledger = OrderLedger::in_memory();
        let failed = Mutex::new(HashSet::new());
        let (sender, mut successes) = watch::channel(0);
        // The first message of each key fails for good, and would succeed if it were run again.
        let handler = Scripted::new(&ledger, move |message: &Numbered, _| {
            let first_run = failed.lock().expect("no panic").insert(message.key.clone());
            if message.seq == 1 && first_run {
                return Step::FailForGood;
            }
            sender.send_modify(|successes| *successes += 1);
            Step::Succeed(Duration::ZERO)
        });
        let bus = Bus::builder()
            .rabbitmq(RabbitMq::at(node.url()).heartbeat(HEARTBEAT))
            .topology(|t| t.queue(&queue, |q| declared(q, &queue, queue_type)))
            .endpoint(&queue, |e| {
                e.ordered_by_header(KEY_HEADER)
                    .transport_affinity(TransportAffinity::SingleActiveConsumer)
                    .max_in_flight(CREDITS)
                    .handler(handler)
            })
            .publishes::<Numbered>(|r| r.to_queue(&queue).keyed_by(|m| m.key.clone()))
            .build()
            .expect("valid")
            .start()
            .await
            .expect("starts");
        // A young quorum queue would not survive the kill; see above.
        node.stop_app();
        reaches(&bus, &queue, EndpointState::Disconnected).await;
        node.start_app();
        reaches(&bus, &queue, EndpointState::Running).await;
        let foreign = Foreign::connect(&node.url()).await;
        foreign
            .publish_numbered(&queue, KEY_HEADER, &ledger, 2 * ORDERS, ORDERS)
            .await;
        drop(foreign);
        timeout(PATIENCE, successes.wait_for(|number| *number == ORDERS))
            .await
            .expect("the successors are handled")
            .expect("the handler is there");
        node.kill();
        reaches(&bus, &queue, EndpointState::Disconnected).await;
        node.restart();
        reaches(&bus, &queue, EndpointState::Running).await;
        // It is behind everything that came again.
        let last = Numbered {
            key: "last".to_owned(),
            seq: 2,
        };
        while bus.publish(&last).await.is_err() {
            // A pause as any publisher makes it; the broker has just started.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        ledger.published("last", 2);
        timeout(PATIENCE, successes.wait_for(|number| *number > ORDERS))
            .await
            .expect("the last one is handled")
            .expect("the handler is there");
        let report = bus.shutdown(Duration::from_secs(10)).await;
        assert!(report.is_clean(), "{report:?}");
        for key in 0..ORDERS {
            ledger.parked(&format!("key-{key}"), 1);
        }
        ledger.figures().expect("in memory").assert_ordered();
    }
}
