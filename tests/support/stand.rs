//! A queue of one's own on a RabbitMQ, with a parking place, and the bus that works on it: started, fed, and
//! in the end held to its promises by the broker and the ledger.
//!
//! The endpoint is called `orders`, so that what `orders.rs` has for any bus works here too.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file uses its own part of it"
)]

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use laneway::prelude::*;
use laneway::testing::{Figures, OrderLedger};
use laneway::transport::Transport;
use laneway::{BusBuilder, EndpointBuilder};

use crate::orders::{Gate, ORDERS, Tally, in_flight, stop, within};
use crate::support::broker::unique;
use crate::support::foreign::{Foreign, numbered};
use crate::support::proxy::Proxy;
use crate::workload::{KEY_HEADER, Numbered, Scripted, Step};

/// Both kinds of queues; what is said of one is said of the other.
pub const BOTH: [QueueType; 2] = [QueueType::Classic, QueueType::Quorum];

/// The key of the message behind all others.
const LAST: &str = "last";

/// Key and number.
pub type Name = (String, u64);

/// Whether the full counts are asked for.
pub fn soak() -> bool {
    std::env::var_os("LANEWAY_SOAK").is_some()
}

/// Runs the same on both kinds of queues, at the same time.
pub async fn on_both(run: impl AsyncFn(QueueType)) {
    futures::future::join(run(BOTH[0]), run(BOTH[1])).await;
}

/// One queue and what is known of its messages.
pub struct Stand {
    /// The broker.
    pub url: String,
    /// The queue.
    pub queue: String,
    queue_type: QueueType,
    /// What ran.
    pub ledger: OrderLedger,
    last: Tally,
}

impl Stand {
    /// A new name for a queue on this broker; nothing is declared yet.
    pub fn new(url: &str, name: &str, queue_type: QueueType) -> Self {
        Self::named(url, &unique(name), queue_type, OrderLedger::in_memory())
    }

    /// A queue of exactly this name.
    pub fn named(url: &str, queue: &str, queue_type: QueueType, ledger: OrderLedger) -> Self {
        Self {
            url: url.to_owned(),
            queue: queue.to_owned(),
            queue_type,
            ledger,
            last: Tally::new(),
        }
    }

    /// A proxy in front of the broker, and the broker as it is seen through it.
    pub fn behind_proxy(&self) -> (Proxy, RabbitMq) {
        let (front, rest) = self.url.split_once('@').expect("user and host");
        let (address, vhost) = rest.split_once('/').unwrap_or((rest, "%2f"));
        let proxy = Proxy::to(address);
        let through = format!("{front}@{}/{vhost}", proxy.address());
        (proxy, RabbitMq::at(through))
    }

    /// A handler that does what the script says, and handles the last message.
    pub fn handler(
        &self,
        script: impl Fn(&Numbered, u32) -> Step + Send + Sync + 'static,
    ) -> Scripted {
        let last = self.last.clone();
        Scripted::new(&self.ledger, move |message, attempt| {
            if message.key == LAST {
                last.add();
                return Step::Succeed(std::time::Duration::ZERO);
            }
            script(message, attempt)
        })
    }

    /// A bus on this queue, ordered by the header, with a single active consumer.
    pub fn bus(
        &self,
        transport: impl Transport,
        describe: impl FnOnce(EndpointBuilder) -> EndpointBuilder,
    ) -> BusBuilder {
        let (exchange, parking) = (self.exchange(), self.parking());
        Bus::builder()
            .transport(transport)
            .topology(|t| {
                t.queue(&self.queue, |q| {
                    q.durable()
                        .of_type(self.queue_type)
                        .single_active_consumer()
                        .parking(&exchange, &parking)
                })
            })
            .endpoint(ORDERS, |e| {
                describe(
                    e.queue(&self.queue)
                        .ordered_by_header(KEY_HEADER)
                        .transport_affinity(TransportAffinity::SingleActiveConsumer),
                )
            })
    }

    /// Where poison messages are published to.
    pub fn exchange(&self) -> String {
        format!("{}-dlx", self.queue)
    }

    /// Where poison messages are kept.
    pub fn parking(&self) -> String {
        format!("{}-parked", self.queue)
    }

    /// Another program at the broker.
    pub async fn foreign(&self) -> Foreign {
        within("a connection", Foreign::connect(&self.url)).await
    }

    /// Publishes messages over `keys` keys round robin, `key-0` first, each key's numbers from 1.
    pub async fn publish(&self, messages: u64, keys: u64) {
        let foreign = self.foreign().await;
        foreign
            .publish_numbered(&self.queue, KEY_HEADER, &self.ledger, messages, keys)
            .await;
    }

    /// Publishes one message.
    pub async fn send(&self, key: &str, seq: u64) {
        self.send_all(key, seq..=seq).await;
    }

    /// Publishes messages of one key.
    pub async fn send_all(&self, key: &str, numbers: RangeInclusive<u64>) {
        let foreign = self.foreign().await;
        for seq in numbers {
            let (body, properties) = numbered(KEY_HEADER, key, seq);
            foreign.publish(&self.queue, &body, properties).await;
            self.ledger.published(key, seq);
        }
    }

    /// Waits until everything that was in the queue is settled. No fault may follow.
    ///
    /// By one more message: what a lost session gave back is in front of it, so when this one has arrived
    /// everything has.
    pub async fn until_settled(&self, bus: &Bus) {
        let number = self.last.get() + 1;
        self.send_last(number).await;
        self.until_last(bus, number).await;
    }

    /// Publishes one message more, behind all others.
    pub async fn send_last(&self, number: u64) {
        self.send(LAST, number).await;
    }

    /// Waits until the bus has handled this many last messages and settled everything.
    pub async fn until_last(&self, bus: &Bus, number: u64) {
        self.last.until("the last message", number).await;
        in_flight(bus, 0).await;
    }

    /// Waits until everything is settled, drains, and takes what was parked: how many copies of which message.
    /// The queue must be empty and the order must have held.
    pub async fn finish(self, bus: Bus) -> (BTreeMap<Name, u32>, Figures) {
        self.until_settled(&bus).await;
        stop(&bus).await;
        self.parked_and_figures().await
    }

    /// What [`finish`](Self::finish) looks at when the bus is gone. Removes the queues.
    pub async fn parked_and_figures(self) -> (BTreeMap<Name, u32>, Figures) {
        let foreign = self.foreign().await;
        assert_eq!(foreign.ready(&self.queue).await, 0, "the queue is empty");
        let mut copies = BTreeMap::new();
        while let Some(delivery) = foreign.get(&self.parking()).await {
            let message: Numbered = serde_json::from_slice(&delivery.data).expect("as published");
            self.ledger.parked(&message.key, message.seq);
            *copies.entry((message.key, message.seq)).or_default() += 1;
        }
        self.clean_up(&foreign).await;
        let figures = self.ledger.figures().expect("readable");
        figures.assert_ordered();
        (copies, figures)
    }

    /// Removes everything from the broker.
    pub async fn clean_up(&self, foreign: &Foreign) {
        foreign.delete(&self.queue).await;
        foreign.delete(&self.parking()).await;
        foreign.delete_exchange(&self.exchange()).await;
    }
}

/// Runs the inner handler, with the messages that wait only when the gate is open.
pub struct Gated {
    /// What runs.
    pub inner: Scripted,
    /// What it waits for.
    pub gate: Gate,
    /// Which messages wait.
    pub waits: fn(&Numbered) -> bool,
}

impl Handler<Numbered> for Gated {
    type Answer = ();

    async fn handle(&self, message: Numbered, cx: Context) -> Result<(), Failure> {
        if (self.waits)(&message) {
            self.gate.pass().await;
        }
        self.inner.handle(message, cx).await
    }
}

/// These messages, each with one copy.
pub fn once(messages: impl IntoIterator<Item = Name>) -> BTreeMap<Name, u32> {
    messages.into_iter().map(|name| (name, 1)).collect()
}

/// Message `seq` of `key-<key>`.
pub fn name(key: u64, seq: u64) -> Name {
    (format!("key-{key}"), seq)
}
