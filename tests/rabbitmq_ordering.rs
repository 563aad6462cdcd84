//! Order on a real broker: classic and quorum queues, under load, while connections are closed.
//!
//! `LANEWAY_SOAK=1` runs the full counts (200,000 messages, 5,000 keys).

#![cfg(feature = "rabbitmq")]

use std::sync::Arc;
use std::time::Duration;

use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::{EndpointState, Event, EventKind, QueueSpec};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use tokio::sync::broadcast::Receiver;
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

fn counts() -> (u64, u64) {
    match std::env::var_os("LANEWAY_SOAK") {
        Some(_) => (200_000, 5_000),
        None => (20_000, 500),
    }
}

fn parked(queue: &str) -> String {
    format!("{queue}-parked")
}

/// A queue of this test with its parking place.
fn declared(queue: &str, queue_type: QueueType) -> impl Fn(QueueSpec) -> QueueSpec {
    let (exchange, parked) = (format!("{queue}-dlx"), parked(queue));
    move |q| {
        q.durable()
            .of_type(queue_type)
            .single_active_consumer()
            .parking(&exchange, &parked)
    }
}

async fn clean_up(url: &str, queue: &str) {
    let foreign = Foreign::connect(url).await;
    foreign.delete(queue).await;
    foreign.delete(&parked(queue)).await;
    foreign.delete_exchange(&format!("{queue}-dlx")).await;
}

struct Setup {
    url: String,
    queue: String,
    queue_type: QueueType,
    ledger: OrderLedger,
}

impl Setup {
    fn new(url: String, name: &str, queue_type: QueueType) -> Self {
        Self {
            url,
            queue: unique(name),
            queue_type,
            ledger: OrderLedger::in_memory(),
        }
    }

    async fn start(
        &self,
        handler: Scripted,
        change: impl FnOnce(laneway::EndpointBuilder) -> laneway::EndpointBuilder,
    ) -> Bus {
        Bus::builder()
            .rabbitmq(RabbitMq::at(&self.url))
            .topology(|t| t.queue(&self.queue, declared(&self.queue, self.queue_type)))
            .endpoint(&self.queue, |e| {
                change(
                    e.ordered_by_header(KEY_HEADER)
                        .transport_affinity(TransportAffinity::SingleActiveConsumer)
                        .concurrency(16)
                        .handler(handler),
                )
            })
            .publishes::<Numbered>(|r| r.to_queue(&self.queue).keyed_by(|m| m.key.clone()))
            .build()
            .expect("valid")
            .start()
            .await
            .expect("starts")
    }
}

/// Waits until every published message has been started at least once.
async fn all_handled(ledger: &OrderLedger, done: &mut watch::Receiver<u64>, messages: u64) {
    let waiting = done.wait_for(|&count| count >= messages);
    if timeout(PATIENCE, waiting).await.is_err() {
        let figures = ledger.figures().expect("in memory");
        panic!("not all messages were handled in time:\n{figures}");
    }
}

/// Counts distinct messages at their first start.
fn counting(ledger: &OrderLedger) -> (Scripted, watch::Receiver<u64>) {
    let (count, done) = watch::channel(0);
    let seen = Arc::new(std::sync::Mutex::new(std::collections::HashSet::new()));
    let handler = Scripted::new(ledger, move |message: &Numbered, _| {
        let new = seen
            .lock()
            .expect("no panic under this lock")
            .insert((message.key.clone(), message.seq));
        if new {
            count.send_modify(|count| *count += 1);
        }
        Step::Succeed(Duration::from_millis(2).mul_f64(fastrand::f64()))
    });
    (handler, done)
}

async fn order_holds_under_load(queue_type: QueueType) {
    let setup = Setup::new(shared_url(), "ordered", queue_type);
    let (messages, keys) = counts();
    let (handler, mut done) = counting(&setup.ledger);
    let bus = setup.start(handler, |e| e).await;
    workload::publish(&bus, &setup.ledger, messages, keys).await;
    all_handled(&setup.ledger, &mut done, messages).await;
    let report = bus.shutdown(Duration::from_secs(10)).await;
    assert!(report.is_clean(), "{report:?}");
    let figures = setup.ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.duplicates), (messages, 0));
    clean_up(&setup.url, &setup.queue).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_one_key_run_in_order_from_a_classic_queue() {
    order_holds_under_load(QueueType::Classic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_one_key_run_in_order_from_a_quorum_queue() {
    order_holds_under_load(QueueType::Quorum).await;
}

/// Closes every connection at the broker, and waits until the loss was reported and the endpoint is back.
/// (By events: while the command runs the endpoint can be gone and back again.)
async fn close_connections(broker: &PrivateBroker, events: &mut Receiver<Event>) {
    broker.close_all_connections();
    let mut lost = false;
    let back = async {
        loop {
            match events.recv().await.expect("few events").kind {
                EventKind::Disconnected { .. } => lost = true,
                EventKind::Connected { .. } if lost => break,
                _ => {}
            }
        }
    };
    timeout(PATIENCE, back).await.expect("it reconnects");
}

/// Case O6 (and O12: handlers run whenever the connection is closed).
async fn order_holds_while_the_broker_closes_connections(queue_type: QueueType) {
    let broker = PrivateBroker::start();
    let setup = Setup::new(broker.url(), "closed", queue_type);
    let (messages, keys) = counts();
    let (handler, mut done) = counting(&setup.ledger);
    let bus = setup.start(handler, |e| e.max_in_flight(100)).await;
    let mut events = bus.events();
    // Publishing has a connection of its own that is closed as well, so a foreign client publishes
    // before; the closures then fall into the consumption.
    let foreign = Foreign::connect(&setup.url).await;
    foreign
        .publish_numbered(&setup.queue, KEY_HEADER, &setup.ledger, messages, keys)
        .await;
    drop(foreign);
    let steps = 10;
    for step in 1..=steps {
        let target = messages * step / (steps + 2);
        // Spreads the closures over the run.
        timeout(PATIENCE, done.wait_for(|&count| count >= target))
            .await
            .expect("progress")
            .expect("the handler is there");
        close_connections(&broker, &mut events).await;
    }
    all_handled(&setup.ledger, &mut done, messages).await;
    let snapshot = bus.snapshot().await;
    let endpoint = snapshot.endpoint(&setup.queue).expect("named above");
    assert_eq!((endpoint.reconnects, endpoint.parked), (steps, 0));
    assert!(snapshot.is_healthy());
    bus.shutdown(Duration::from_secs(10)).await;
    let figures = setup.ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!(figures.handled, messages);
    assert!(figures.duplicates <= 100 * steps, "{figures}");
}

#[tokio::test(flavor = "multi_thread")]
async fn order_holds_on_a_classic_queue_while_the_broker_closes_ten_connections() {
    order_holds_while_the_broker_closes_connections(QueueType::Classic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_holds_on_a_quorum_queue_while_the_broker_closes_ten_connections() {
    order_holds_while_the_broker_closes_connections(QueueType::Quorum).await;
}

/// Case O22 on the real broker: the connection dies somewhere between the park's acknowledgement and
/// the answer to the barrier.
#[tokio::test(flavor = "multi_thread")]
async fn a_successor_never_starts_before_the_broker_has_processed_the_acknowledgement_of_a_parked_message()
 {
    let rounds = if std::env::var_os("LANEWAY_SOAK").is_some() {
        100
    } else {
        15
    };
    for queue_type in [QueueType::Classic, QueueType::Quorum] {
        for round in 0..rounds {
            cut_after_the_park(queue_type, round).await;
        }
    }
}

async fn cut_after_the_park(queue_type: QueueType, round: u32) {
    let target = shared_url();
    let host = target.rsplit('@').next().expect("an URL").to_owned();
    let proxy = Arc::new(Proxy::to(host.trim_end_matches('/')));
    let through = target.replace(&host, &proxy.address().to_string());
    let setup = Setup::new(through, "cut-park", queue_type);
    // The first message of each key fails for good in its first run. Should a copy of it ever run again
    // it succeeds: after its successor that would be an inversion.
    let failed = Arc::new(std::sync::Mutex::new(std::collections::HashSet::new()));
    let handler = Scripted::new(&setup.ledger, move |message: &Numbered, _| {
        let first_run = message.seq == 1
            && failed
                .lock()
                .expect("no panic under this lock")
                .insert(message.key.clone());
        if first_run {
            Step::FailForGood
        } else {
            Step::Succeed(Duration::ZERO)
        }
    });
    let bus = setup.start(handler, |e| e).await;
    let mut events = bus.events();
    let cut = Arc::clone(&proxy);
    let cutting = tokio::spawn(async move {
        let mut gaps = 0;
        let mut late = 0;
        while let Ok(event) = events.recv().await {
            if let EventKind::Gap { .. } = event.kind {
                gaps += 1;
                // At another moment each round: after the first, second, third gap.
                if gaps == 1 + round % 3 {
                    cut.cut();
                    late = gaps;
                }
            }
        }
        (gaps, late)
    });
    let foreign = Foreign::connect(&target).await;
    foreign
        .publish_numbered(&setup.queue, KEY_HEADER, &setup.ledger, 40, 8)
        .await;
    let endpoint = bus.endpoint(&setup.queue).expect("named above").clone();
    let all = async {
        loop {
            let snapshot = endpoint.snapshot().await;
            let idle = snapshot.in_flight == 0 && snapshot.state == EndpointState::Running;
            if idle && snapshot.handled + snapshot.parked >= 40 {
                break;
            }
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, all).await.expect("everything has ended");
    bus.shutdown(Duration::from_secs(10)).await;
    drop(bus);
    drop(endpoint);
    while let Some(delivery) = foreign.get(&parked(&setup.queue)).await {
        let message: Numbered = serde_json::from_slice(&delivery.data).expect("as published");
        setup.ledger.parked(&message.key, message.seq);
    }
    setup.ledger.figures().expect("in memory").assert_ordered();
    cutting.abort();
    clean_up(&target, &setup.queue).await;
}

/// A publisher that is not Laneway's: raw JSON, no type, a number as the header.
#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_publisher_is_consumed_in_order() {
    let setup = Setup::new(shared_url(), "foreign", QueueType::Classic);
    let (handler, mut done) = counting(&setup.ledger);
    let bus = setup.start(handler, EndpointUntyped::untyped).await;
    let foreign = Foreign::connect(&setup.url).await;
    for number in 0..2_000_u64 {
        let message = Numbered {
            key: (number % 40).to_string(),
            seq: number / 40 + 1,
        };
        let mut headers = FieldTable::default();
        // Text one time, a number the other: the same key.
        let value = match number % 3 {
            0 => AMQPValue::LongString(message.key.as_str().into()),
            1 => AMQPValue::LongLongInt((number % 40) as i64),
            _ => AMQPValue::ShortUInt((number % 40) as u16),
        };
        headers.insert(KEY_HEADER.into(), value);
        let body = serde_json::to_vec(&message).expect("encodes");
        setup.ledger.published(&message.key, message.seq);
        let properties = BasicProperties::default().with_headers(headers);
        foreign.publish(&setup.queue, &body, properties).await;
    }
    all_handled(&setup.ledger, &mut done, 2_000).await;
    bus.shutdown(Duration::from_secs(10)).await;
    setup.ledger.figures().expect("in memory").assert_ordered();
    clean_up(&setup.url, &setup.queue).await;
}

/// Makes `untyped::<Numbered>` a plain function.
trait EndpointUntyped {
    fn untyped(self) -> Self;
}

impl EndpointUntyped for laneway::EndpointBuilder {
    fn untyped(self) -> Self {
        laneway::EndpointBuilder::untyped::<Numbered>(self)
    }
}

/// Case O8 on a real broker.
#[tokio::test(flavor = "multi_thread")]
async fn a_parked_message_survives_a_restart_of_the_broker_with_all_it_had() {
    let broker = PrivateBroker::start();
    let mut queues = Vec::new();
    for queue_type in [QueueType::Classic, QueueType::Quorum] {
        let setup = Setup::new(broker.url(), "parked", queue_type);
        let handler = Scripted::new(&setup.ledger, |_, _| Step::Fail(Duration::ZERO));
        let quick = Backoff::constant(Duration::from_millis(1));
        let bus = setup
            .start(handler, |e| e.max_delivery_attempts(3).backoff(quick))
            .await;
        let mut events = bus.events();
        let foreign = Foreign::connect(&setup.url).await;
        let mut headers = FieldTable::default();
        headers.insert(KEY_HEADER.into(), AMQPValue::LongString("a".into()));
        headers.insert("tenant".into(), AMQPValue::ShortInt(7));
        let properties = BasicProperties::default()
            .with_message_id("the-id".into())
            .with_type("numbered".into())
            .with_correlation_id("the-correlation".into())
            .with_headers(headers);
        foreign
            .publish(&setup.queue, br#"{"key":"a","seq":1}"#, properties)
            .await;
        let gap = async {
            loop {
                let event = events.recv().await.expect("the bus lives");
                if let EventKind::Gap { attempts, .. } = event.kind {
                    break attempts;
                }
            }
        };
        let attempts = timeout(PATIENCE, gap).await.expect("a gap is reported");
        assert_eq!(attempts, 3);
        bus.shutdown(Duration::from_secs(10)).await;
        queues.push(setup.queue);
    }
    // In order, not by a kill: a quorum queue that is a second old when its node is killed can stay without
    // a leader for good (RabbitMQ 3.10.8).
    broker.stop_app();
    broker.start_app();
    for queue in queues {
        let delivery = timeout(PATIENCE, first_of(&broker.url(), &parked(&queue)))
            .await
            .expect("it is there");
        let properties = &delivery.properties;
        assert_eq!(delivery.data, br#"{"key":"a","seq":1}"#);
        assert_eq!(*properties.delivery_mode(), Some(2));
        let id = properties.message_id().as_ref().map(|id| id.as_str());
        assert_eq!(id, Some("the-id"));
        let correlation = properties.correlation_id().as_ref().map(|id| id.as_str());
        assert_eq!(correlation, Some("the-correlation"));
        let headers = properties.headers().as_ref().expect("headers").inner();
        assert_eq!(headers.get("tenant"), Some(&AMQPValue::ShortInt(7)));
        let text = |name: &str| match headers.get(name) {
            Some(AMQPValue::LongString(text)) => text.to_string(),
            other => panic!("{name} is {other:?}"),
        };
        assert_eq!(text(KEY_HEADER), "a");
        assert_eq!(text("laneway-reason"), "failed");
        assert_eq!(text("laneway-queue"), queue);
        assert!(matches!(
            headers.get("laneway-attempts"),
            Some(AMQPValue::LongLongInt(3))
        ));
    }
}

/// The first message of a queue. For seconds after a boot a quorum queue can report nothing, or refuse with
/// an error that closes the connection (FACTS 20): then once more, on a new one.
async fn first_of(url: &str, queue: &str) -> lapin::message::Delivery {
    loop {
        let foreign = Foreign::connect(url).await;
        if let Ok(Some(got)) = foreign.try_get(queue).await {
            return got.delivery;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bus_that_cannot_start_says_what_to_change_and_shows_no_password() {
    let start = |url: String, existing: bool| async move {
        let queue = unique("missing");
        let built = Bus::builder()
            .rabbitmq(RabbitMq::at(url))
            .topology(|t| {
                if existing {
                    t.existing_queue(&queue, |q| q)
                } else {
                    t.queue(&queue, |q| q)
                }
            })
            .endpoint(&queue, |e| {
                e.discard_poison().handler(Scripted::succeeding(
                    &OrderLedger::in_memory(),
                    Duration::ZERO,
                ))
            })
            .build();
        let error = match built {
            Err(error) => error,
            Ok(ready) => timeout(PATIENCE, ready.start())
                .await
                .expect("no hang")
                .expect_err("it cannot start"),
        };
        (error.to_string(), queue)
    };
    let url = shared_url();
    let (text, queue) = start(url.clone(), true).await;
    assert!(text.contains(&queue), "names the queue: {text}");
    let host = url.rsplit('@').next().expect("an URL").to_owned();
    let (text, _) = start(format!("amqp://guest:s3cret-value@{host}"), false).await;
    assert!(text.to_lowercase().contains("credentials"), "{text}");
    assert!(!text.contains("s3cret"), "{text}");
    let (text, _) = start("amqp://guest:s3cret-value@127.0.0.1:1".to_owned(), false).await;
    assert!(text.contains("127.0.0.1:1"), "{text}");
    assert!(!text.contains("s3cret"), "{text}");
    let (text, _) = start("http://guest:s3cret-value@localhost".to_owned(), false).await;
    assert!(text.contains("amqp"), "{text}");
    assert!(!text.contains("s3cret"), "{text}");
}
