//! What most tests need around a bus: one queue `orders` with a parking place, waiting that says what it
//! waited for, a record of events, a gate that holds handlers.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file uses its own part of it"
)]

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use laneway::actors::Delivery;
use laneway::actors::port::{Destination, Outgoing};
use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::transport::Transport;
use laneway::{
    BusBuilder, EndpointBuilder, EndpointSnapshot, Envelope, Event, EventKind, Fingerprint,
    HoldOver,
};
use tokio::sync::{broadcast, watch};

use crate::workload::{KEY_HEADER, Numbered};

/// The queue.
pub const ORDERS: &str = "orders";
/// Where its poison messages are kept.
pub const PARKED: &str = "orders-parked";
/// The exchange that leads there.
pub const DLX: &str = "orders-dlx";

/// Lets pauses that never end in a test fit into the time in which the source wants an acknowledgement.
pub const NO_ACK_TIMEOUT: Duration = Duration::from_secs(7 * 86_400);

/// Waits for `future`, but not for ever; says what was awaited in vain.
#[track_caller]
pub fn within<F: Future>(what: &str, future: F) -> impl Future<Output = F::Output> {
    let caller = std::panic::Location::caller();
    async move {
        match tokio::time::timeout(Duration::from_secs(60), future).await {
            Ok(output) => output,
            Err(_) => panic!("waited a minute in vain for {what} ({caller})"),
        }
    }
}

/// A bus with an endpoint `orders`, not ordered yet; the queue has a parking place and one active
/// consumer. `Numbered` goes there under its key.
pub fn plain_orders(
    broker: impl Transport,
    describe: impl FnOnce(EndpointBuilder) -> EndpointBuilder,
) -> BusBuilder {
    Bus::builder()
        .transport(broker)
        .topology(|t| {
            t.queue(ORDERS, |q| {
                q.durable().single_active_consumer().parking(DLX, PARKED)
            })
        })
        .endpoint(ORDERS, describe)
        .publishes::<Numbered>(|r| r.to_queue(ORDERS).keyed_by(|m| m.key.clone()))
}

/// The same, ordered by the header.
pub fn orders(
    broker: impl Transport,
    describe: impl FnOnce(EndpointBuilder) -> EndpointBuilder,
) -> BusBuilder {
    plain_orders(broker, |e| {
        describe(
            e.ordered_by_header(KEY_HEADER)
                .transport_affinity(TransportAffinity::SingleActiveConsumer),
        )
    })
}

/// Builds and starts.
pub async fn started(builder: BusBuilder) -> Bus {
    let ready = builder.build().expect("valid");
    within("the start", ready.start()).await.expect("starts")
}

/// Drains, and holds the drain to be a clean one.
pub async fn stop(bus: &Bus) {
    let report = within("the shutdown", bus.shutdown(Duration::from_secs(20))).await;
    assert!(report.is_clean(), "{report:?}");
}

/// Publishes one message of a key and records it.
pub async fn send(bus: &Bus, ledger: &OrderLedger, key: &str, seq: u64) {
    let message = Numbered {
        key: key.to_owned(),
        seq,
    };
    bus.publish(&message).await.expect("published");
    ledger.published(key, seq);
}

/// Puts any envelope into a queue.
pub async fn put(broker: &MemoryBroker, queue: &str, envelope: Envelope) {
    let outgoing = Outgoing {
        destination: Destination::Queue(queue.into()),
        envelope,
        key: None,
    };
    broker
        .publisher()
        .publish(outgoing)
        .await
        .expect("published");
}

/// The envelope of a numbered message, with its key in the header.
pub fn envelope(key: &str, seq: u64) -> Envelope {
    let message = Numbered {
        key: key.to_owned(),
        seq,
    };
    let mut envelope = Envelope::of(&message, Encoding::Json).expect("encodes");
    envelope.set_key(KEY_HEADER, &key.into());
    envelope
}

/// The numbered message in an envelope.
pub fn numbered(envelope: &Envelope) -> Numbered {
    Encoding::Json.decode(&envelope.body).expect("decodes")
}

/// The parked messages as (key, sequence), in the order of parking; they are recorded in the ledger too.
pub fn parked(broker: &MemoryBroker, ledger: &OrderLedger) -> Vec<(String, u64)> {
    let messages = broker.messages(PARKED);
    let all = messages.iter().map(numbered);
    all.map(|message| {
        ledger.parked(&message.key, message.seq);
        (message.key, message.seq)
    })
    .collect()
}

/// The endpoint's snapshot.
pub async fn snapshot(bus: &Bus) -> EndpointSnapshot {
    let snapshot = within("a snapshot", bus.snapshot()).await;
    snapshot.endpoint(ORDERS).expect("it exists").clone()
}

/// Waits until the ledger shows this many handled messages.
pub async fn handled(bus: &Bus, count: u64) {
    within(&format!("{count} handled messages"), async {
        while snapshot(bus).await.handled < count {
            // Nothing tells when a counter has changed; asking again is cheap.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// Waits until the endpoint has received so many messages that have not ended.
pub async fn in_flight(bus: &Bus, count: usize) {
    within(&format!("{count} messages in flight"), async {
        while snapshot(bus).await.in_flight != count {
            // Nothing tells when a counter has changed; asking again is cheap.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// Every event of a bus since it was made.
pub struct Seen {
    record: Arc<Mutex<Record>>,
    count: watch::Receiver<usize>,
}

struct Record {
    receiver: broadcast::Receiver<Event>,
    kinds: Vec<EventKind>,
}

impl Record {
    /// Writes down everything that has happened by now.
    fn catch_up(&mut self) {
        loop {
            match self.receiver.try_recv() {
                Ok(event) => self.kinds.push(event.kind),
                Err(broadcast::error::TryRecvError::Lagged(missed)) => {
                    panic!("the record of events missed {missed}")
                }
                Err(_) => return,
            }
        }
    }
}

impl Seen {
    /// Records from now on.
    pub fn of(bus: &Bus) -> Self {
        let record = Arc::new(Mutex::new(Record {
            receiver: bus.events(),
            kinds: Vec::new(),
        }));
        let mut news = bus.events();
        let (sender, count) = watch::channel(0);
        let shared = Arc::clone(&record);
        tokio::spawn(async move {
            while !matches!(news.recv().await, Err(broadcast::error::RecvError::Closed)) {
                let mut record = shared.lock().unwrap_or_else(PoisonError::into_inner);
                record.catch_up();
                sender.send_replace(record.kinds.len());
            }
        });
        Self { record, count }
    }

    /// Everything that has happened by now.
    pub fn all(&self) -> Vec<EventKind> {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        record.catch_up();
        record.kinds.clone()
    }

    /// How many events so far are like this.
    pub fn count(&self, like: impl Fn(&EventKind) -> bool) -> usize {
        self.all().iter().filter(|kind| like(kind)).count()
    }

    /// Waits until `number` events are like this.
    pub async fn until(&self, what: &str, number: usize, like: impl Fn(&EventKind) -> bool) {
        let mut count = self.count.clone();
        within(what, async {
            loop {
                count.borrow_and_update();
                if self.count(&like) >= number {
                    return;
                }
                count.changed().await.expect("the bus is there");
            }
        })
        .await;
    }
}

/// A key is held from now on.
pub fn is_held(kind: &EventKind) -> bool {
    matches!(kind, EventKind::Held { .. })
}

/// The hold of a key has ended.
pub fn is_over(kind: &EventKind) -> bool {
    matches!(kind, EventKind::HoldEnded { .. })
}

/// The keys of which something was held, in that order.
pub fn held_keys(seen: &Seen) -> Vec<Fingerprint> {
    let held = |kind| match kind {
        EventKind::Held { key, .. } => key,
        _ => None,
    };
    seen.all().into_iter().filter_map(held).collect()
}

/// Why holds ended, in that order.
pub fn ends(seen: &Seen) -> Vec<(Option<Fingerprint>, HoldOver)> {
    let end = |kind| match kind {
        EventKind::HoldEnded { key, why, .. } => Some((key, why)),
        _ => None,
    };
    seen.all().into_iter().filter_map(end).collect()
}

/// Holds handlers until it is opened. Tells who is waiting in front of it.
#[derive(Clone)]
pub struct Gate {
    open: Arc<watch::Sender<bool>>,
    waiting: Arc<watch::Sender<usize>>,
}

impl Gate {
    /// A closed gate.
    pub fn closed() -> Self {
        Self {
            open: Arc::new(watch::Sender::new(false)),
            waiting: Arc::new(watch::Sender::new(0)),
        }
    }

    /// Waits until it is open.
    pub async fn pass(&self) {
        struct Waiting<'a>(&'a watch::Sender<usize>);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.send_modify(|number| *number -= 1);
            }
        }
        let mut open = self.open.subscribe();
        self.waiting.send_modify(|number| *number += 1);
        let _waiting = Waiting(&self.waiting);
        open.wait_for(|open| *open)
            .await
            .expect("the gate is there");
    }

    /// Lets everybody through, from now on.
    pub fn open(&self) {
        self.open.send_replace(true);
    }

    /// Waits until exactly so many wait in front of it.
    pub async fn until_waiting(&self, number: usize) {
        let mut waiting = self.waiting.subscribe();
        within(&format!("{number} at the gate"), async {
            waiting
                .wait_for(|waiting| *waiting == number)
                .await
                .expect("the gate is there");
        })
        .await;
    }
}

/// A number that tests wait for.
#[derive(Clone)]
pub struct Tally(Arc<watch::Sender<u64>>);

impl Tally {
    /// Zero.
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }

    /// One more.
    pub fn add(&self) {
        self.0.send_modify(|number| *number += 1);
    }

    /// The number.
    pub fn get(&self) -> u64 {
        *self.0.borrow()
    }

    /// Waits until it is at least this.
    pub async fn until(&self, what: &str, number: u64) {
        let mut receiver = self.0.subscribe();
        within(what, async {
            receiver
                .wait_for(|tally| *tally >= number)
                .await
                .expect("the tally is there");
        })
        .await;
    }
}

/// A delivery that a source of a test makes.
pub fn delivery(
    envelope: Envelope,
    session: &Arc<laneway::actors::SessionState>,
    tag: u64,
) -> Delivery {
    Delivery::new(
        envelope,
        Arc::clone(session),
        laneway::actors::DeliveryTag(tag),
    )
}
