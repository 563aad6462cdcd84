//! No key value is in anything that Laneway writes. Alone in its file: the collector of output is global.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

use laneway::prelude::*;
use laneway::transport::provenance;
use laneway::{EventKind, Headers};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{DLX, ORDERS, PARKED, Seen, envelope, plain_orders, put, snapshot, stop, within};
use workload::{KEY_HEADER, Numbered};

/// In every key, and nowhere else.
const MARK: &str = "m4rked-v4lue";

/// Writes down everything of Laneway's own targets, at every level.
struct Collector;

fn output() -> &'static Mutex<String> {
    static OUTPUT: OnceLock<Mutex<String>> = OnceLock::new();
    OUTPUT.get_or_init(Mutex::default)
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        write!(self.0, " {}={value:?}", field.name()).expect("a string");
    }
}

fn ours(metadata: &Metadata<'_>) -> bool {
    metadata.target().starts_with("laneway")
}

fn note(metadata: &Metadata<'_>, record: impl FnOnce(&mut Line)) {
    let mut line = Line(format!("{} {}", metadata.level(), metadata.target()));
    record(&mut line);
    let mut output = output().lock().expect("no panic");
    output.push_str(&line.0);
    output.push('\n');
}

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        ours(metadata)
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        note(span.metadata(), |line| span.record(line));
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, values: &Record<'_>) {
        let mut line = Line("span".to_owned());
        values.record(&mut line);
        output().lock().expect("no panic").push_str(&line.0);
    }
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        note(event.metadata(), |line| event.record(line));
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Writes down the debug and, by the caller, the display form of something public.
fn show(what: &str, shown: &dyn std::fmt::Debug) {
    let mut output = output().lock().expect("no panic");
    writeln!(output, "{what}: {shown:?} {shown:#?}").expect("a string");
}

// O20
#[test]
fn no_key_value_is_in_anything_that_laneway_writes() {
    tracing::subscriber::set_global_default(Collector).expect("the first one");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(3)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(everything_that_can_go_wrong());
    drop(runtime);
    let output = output().lock().expect("no panic");
    for sure in [
        "attempt failed",
        "gap",
        "parking failed",
        "handler blocks",
        "disconnected",
        "session opened",
        "drained",
        "endpoint failed",
        "KeyMissing",
        "Stuck",
        "ActorRestarted",
    ] {
        assert!(output.contains(sure), "the scenario did not show {sure:?}");
    }
    let leaks: Vec<_> = output.lines().filter(|line| line.contains(MARK)).collect();
    assert!(leaks.is_empty(), "{leaks:#?}");
}

async fn everything_that_can_go_wrong() {
    let broker = MemoryBroker::new();
    let (release, held) = mpsc::channel::<()>();
    let held = Arc::new(Mutex::new(held));
    let bus = plain_orders(broker.clone(), |e| {
        e.ordered_by_header(KEY_HEADER)
            .ordered_by(|m: &Numbered| {
                assert!(m.seq != 66, "a selector that shows {}", m.key);
                m.key.clone()
            })
            .transport_affinity(TransportAffinity::SingleActiveConsumer)
            .max_delivery_attempts(2)
            .handler_timeout(Duration::from_millis(100))
            .backoff(Backoff::constant(Duration::from_millis(1)))
            .handler(move |message: Numbered, cx: Context| {
                let held = Arc::clone(&held);
                async move {
                    show("context", &cx);
                    show("envelope", cx.envelope());
                    show("key", &cx.key());
                    let key = &message.key;
                    match message.seq {
                        1 => Err(Failure::transient(format!(
                            "cannot find {key}, not even {key}"
                        ))),
                        2 => Err(Failure::permanent(format!("no {key}"))),
                        3 => panic!("a handler that shows {key}"),
                        4 => std::future::pending().await,
                        5 => {
                            // An error means that the test goes on.
                            let _ = held.lock().expect("no panic").recv();
                            Ok(())
                        }
                        6 => {
                            let failure = Failure::transient(format!("shown: {key}"));
                            show("failure", &failure);
                            let error = cx.publish(&Unroutable(key.clone())).await;
                            show("publish", &error);
                            Ok(())
                        }
                        _ => Ok(()),
                    }
                }
            })
    })
    .publishes::<Unroutable>(|r| r.to_exchange("nowhere", MARK).keyed_by(|m| m.0.clone()));
    let ready = bus.build().expect("valid");
    show("ready", &ready);
    let bus = within("the start", ready.start()).await.expect("starts");
    show("bus", &bus);
    let seen = Seen::of(&bus);
    let key = |number: u64| format!("{MARK}-{number}");

    for number in 1..=4_u64 {
        put(&broker, ORDERS, envelope(&key(number), number)).await;
    }
    // Of every kind of header value, without one, and not to be decoded.
    let mut bytes = envelope(&key(7), 7);
    bytes.body = format!("{{\"key\": \"{MARK}\"").into_bytes().into();
    put(&broker, ORDERS, bytes).await;
    let mut typed = envelope(&key(2), 2);
    typed.headers = Headers::new();
    put(&broker, ORDERS, typed).await;
    let mut selector = envelope(&key(66), 66);
    selector.headers = Headers::new();
    selector.correlation_id = Some(key(66).into());
    put(&broker, ORDERS, selector).await;
    let mut untyped = envelope(&key(8), 8);
    untyped.message_type = None;
    put(&broker, ORDERS, untyped).await;
    within(
        "the parked ones",
        broker.wait_until(PARKED, |q| q.ready == 8),
    )
    .await;
    for copy in broker.messages(PARKED) {
        show("parked", &copy);
        // The handler's own text is here and nowhere else, without the key.
        let detail = copy.headers.text(provenance::DETAIL).expect("a text");
        let known_key = copy.headers.get(KEY_HEADER).is_some()
            || copy.headers.text(provenance::REASON) == Some("permanent");
        assert!(!known_key || !detail.contains(MARK), "{detail}");
    }

    broker.remove_exchange(DLX);
    put(&broker, ORDERS, envelope(&key(2), 2)).await;
    put(&broker, ORDERS, envelope(&key(5), 5)).await;
    let parking_failed = |kind: &EventKind| matches!(kind, EventKind::ParkingFailed { .. });
    seen.until("failed parking", 1, parking_failed).await;
    let stuck = |kind: &EventKind| matches!(kind, EventKind::Stuck { .. });
    seen.until("the stuck handler", 1, stuck).await;
    show("snapshot", &snapshot(&bus).await);
    show("whole snapshot", &bus.snapshot().await);
    let topology = laneway::Topology::default().queue(ORDERS, |q| {
        q.durable().single_active_consumer().parking(DLX, PARKED)
    });
    broker
        .declare_queue(&topology.queues()[0])
        .expect("the same");
    drop(release);
    put(&broker, ORDERS, envelope(&key(6), 6)).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;

    broker.cut_sessions(ORDERS);
    let connected = |kind: &EventKind| matches!(kind, EventKind::Connected { .. });
    seen.until("the next session", 1, connected).await;

    let refused = bus
        .publish(&Unroutable(key(9)))
        .await
        .expect_err("no such exchange");
    show("refused", &refused);
    show("refused, displayed", &refused.to_string());
    let endpoint = bus.endpoint(ORDERS).expect("it exists");
    show("endpoint", endpoint);
    let lane = endpoint.lane_of(&key(9).into());
    show("lane", &lane);
    let session = laneway::actors::SessionState::start();
    let direct = |key: &str, to: &str| {
        laneway::actors::Delivery::direct(envelope(key, 9), to.into(), Arc::clone(&session), |_| {})
    };
    let other = (0..)
        .map(key)
        .find(|other| endpoint.lane_of(&other.as_str().into()).index() != lane.index())
        .expect("there are several lanes");
    let wrong = lane
        .try_send(direct(&other, &other))
        .expect_err("the wrong lane");
    show("wrong lane", &wrong);
    show("wrong lane, displayed", &wrong.to_string());

    let running = tokio::spawn({
        let bus = bus.clone();
        async move { bus.run_until(std::future::pending()).await }
    });
    for _ in 0..4 {
        endpoint.panic_lane(lane.index());
    }
    let result = within("the end", running).await.expect("no panic");
    show("run", &result);
    show("run, displayed", &result.expect_err("failed").to_string());
    let draining = lane.send(direct(&key(9), &key(9))).await;
    show("draining", &draining);
    for kind in seen.all() {
        show("event", &kind);
    }
    stop(&bus).await;

    let broken = plain_orders(broker, |e| e.ordered_by_header(KEY_HEADER)).build();
    show("configuration", &broken);
    show(
        "configuration, displayed",
        &broken.expect_err("no handler").to_string(),
    );
}

/// A message whose destination does not exist, under a routing key that is a key.
#[derive(serde::Serialize, serde::Deserialize)]
struct Unroutable(String);

impl Message for Unroutable {
    const TYPE: &'static str = "unroutable";
}
