//! Several instances on a real broker, started and stopped at any moment: a key is in order across all of
//! them, nothing runs twice, and delivery goes on.

#![cfg(feature = "rabbitmq")]

use std::time::Duration;

use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::topology::QueueSpec;
use laneway::{Shards, Topology};

#[path = "support/orders.rs"]
mod orders;
mod support;
#[path = "support/workload.rs"]
mod workload;
use lapin::ExchangeKind;
use orders::{started, stop, within};
use support::broker::{shared_url, unique};
use support::foreign::Foreign;
use workload::{KEY_HEADER, Numbered, Scripted};

const SHARDS: u32 = 4;
const KEYS: u64 = 40;
const SLOTS: usize = 3;

/// How often an instance is started or stopped.
fn moves() -> u32 {
    match std::env::var_os("LANEWAY_SOAK") {
        Some(_) => 50,
        None => 10,
    }
}

/// A program that is run in several instances.
struct Program {
    queue: String,
    queue_type: QueueType,
    affinity: TransportAffinity,
    ledger: OrderLedger,
}

impl Program {
    fn topology(&self) -> impl FnOnce(Topology) -> Topology {
        let (name, queue_type, affinity) = (self.queue.clone(), self.queue_type, self.affinity);
        let (exchange, parked) = (format!("{name}-dlx"), format!("{name}-parked"));
        move |t| {
            let describe =
                |q: QueueSpec| q.durable().of_type(queue_type).parking(&exchange, &parked);
            match affinity {
                TransportAffinity::Sharded => t.sharded_queue(
                    &name,
                    Shards::mapped_by_publisher(SHARDS, KEY_HEADER),
                    describe,
                ),
                _ => t.queue(&name, |q| describe(q).single_active_consumer()),
            }
        }
    }

    async fn instance(&self) -> Bus {
        let handler = Scripted::succeeding(&self.ledger, Duration::from_millis(4));
        let builder = Bus::builder()
            .rabbitmq(RabbitMq::at(shared_url()))
            .topology(self.topology())
            .endpoint(&self.queue, |e| {
                e.ordered_by_header(KEY_HEADER)
                    .transport_affinity(self.affinity)
                    .handler(handler)
            });
        started(builder).await
    }

    /// A bus that only publishes.
    async fn publisher(&self) -> Bus {
        let builder = Bus::builder()
            .rabbitmq(RabbitMq::at(shared_url()))
            .topology(|t| self.topology()(t))
            .publishes::<Numbered>(|r| {
                r.to_queue(&self.queue)
                    .keyed_by(|m| m.key.clone())
                    .key_header(KEY_HEADER)
            });
        started(builder).await
    }

    /// The queues' messages that are not in anybody's hands.
    async fn ready(&self, broker: &RabbitMq) -> u32 {
        let names: Vec<_> = match self.affinity {
            TransportAffinity::Sharded => (0..SHARDS)
                .map(|shard| format!("{}-{shard:03}", self.queue))
                .collect(),
            _ => vec![self.queue.clone()],
        };
        let mut ready = 0;
        for name in names {
            ready += broker.ready(&name).await.expect("it answers");
        }
        ready
    }
}

/// Cases O9, O10, O17.
async fn started_and_stopped_in_random_order(affinity: TransportAffinity, queue_type: QueueType) {
    let program = Program {
        queue: unique("instances"),
        queue_type,
        affinity,
        ledger: OrderLedger::in_memory(),
    };
    let publisher = program.publisher().await;
    let ledger = program.ledger.clone();
    let (stop_publishing, mut stopped) = tokio::sync::oneshot::channel::<()>();
    let publishing = tokio::spawn({
        let (bus, ledger) = (publisher.clone(), ledger.clone());
        async move {
            let mut published = 0;
            while stopped.try_recv().is_err() {
                let sends = (published..published + KEYS).map(|number| {
                    let message = Numbered {
                        key: format!("key-{}", number % KEYS),
                        seq: number / KEYS + 1,
                    };
                    let (bus, ledger) = (bus.clone(), ledger.clone());
                    async move {
                        bus.publish(&message).await.expect("published");
                        ledger.published(&message.key, message.seq);
                    }
                });
                futures::future::join_all(sends).await;
                published += KEYS;
                // The pace of the load: less than one instance can do.
                tokio::time::sleep(Duration::from_millis(25)).await;
            }
            published
        }
    });
    let mut slots: [Option<Bus>; SLOTS] = Default::default();
    slots[0] = Some(program.instance().await);
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..moves() {
        // Some progress between two moves, and sometimes hardly any.
        let more = random.u64(1..300);
        let before = ledger.figures().expect("in memory").handled;
        within("deliveries to go on", async {
            while ledger.figures().expect("in memory").handled < before + more {
                // The ledger tells nobody when it grows.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        let running = slots.iter().flatten().count();
        let slot = random.usize(0..SLOTS);
        match slots[slot].take() {
            Some(bus) if running > 1 => stop(&bus).await,
            Some(last) => slots[slot] = Some(last),
            None => slots[slot] = Some(program.instance().await),
        }
    }
    // An error means that the publisher has failed, which the next line says.
    let _ = stop_publishing.send(());
    let published = publishing.await.expect("published");
    within("everything to be handled", async {
        while ledger.figures().expect("in memory").handled < published {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    for bus in slots.iter().flatten() {
        stop(bus).await;
    }
    let broker = RabbitMq::at(shared_url());
    assert_eq!(program.ready(&broker).await, 0);
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    let expected = (0, 0, published);
    let found = (figures.lost, figures.duplicates, figures.handled);
    assert_eq!(found, expected, "{affinity:?}, {queue_type:?}");
    stop(&publisher).await;
    let topology = program.topology()(Topology::default());
    broker.delete(&topology).await.expect("deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_of_one_classic_queue_come_and_go_in_order_and_without_duplicates() {
    let affinity = TransportAffinity::SingleActiveConsumer;
    started_and_stopped_in_random_order(affinity, QueueType::Classic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_of_one_quorum_queue_come_and_go_in_order_and_without_duplicates() {
    let affinity = TransportAffinity::SingleActiveConsumer;
    started_and_stopped_in_random_order(affinity, QueueType::Quorum).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_that_share_classic_shards_come_and_go_in_order_and_without_duplicates() {
    started_and_stopped_in_random_order(TransportAffinity::Sharded, QueueType::Classic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_that_share_quorum_shards_come_and_go_in_order_and_without_duplicates() {
    started_and_stopped_in_random_order(TransportAffinity::Sharded, QueueType::Quorum).await;
}

/// It would start, and never take a shard.
#[tokio::test(flavor = "multi_thread")]
async fn an_instance_that_cannot_join_its_group_is_refused_at_start() {
    let program = Program {
        queue: unique("no-group"),
        queue_type: QueueType::Classic,
        affinity: TransportAffinity::Sharded,
        ledger: OrderLedger::in_memory(),
    };
    let group = format!("{}.members", program.queue);
    let foreign = Foreign::connect(&shared_url()).await;
    // Somebody has an exchange of another kind there.
    let declaring = foreign.channel().await;
    let (options, arguments) = Default::default();
    declaring
        .exchange_declare(
            group.as_str().into(),
            ExchangeKind::Direct,
            options,
            arguments,
        )
        .await
        .expect("declared");
    let handler = Scripted::succeeding(&program.ledger, Duration::ZERO);
    let ready = Bus::builder()
        .rabbitmq(RabbitMq::at(shared_url()))
        .topology(program.topology())
        .endpoint(&program.queue, |e| {
            e.ordered_by_header(KEY_HEADER)
                .transport_affinity(program.affinity)
                .handler(handler)
        })
        .build()
        .expect("valid");
    let refused = within("the refusal", ready.start()).await.err();
    let shown = refused.expect("it cannot join").to_string();
    for part in [&*program.queue, &*group, "topology"] {
        assert!(shown.contains(part), "{part:?} in {shown}");
    }
    foreign.delete_exchange(&group).await;
    let broker = RabbitMq::at(shared_url());
    let topology = program.topology()(Topology::default());
    broker.delete(&topology).await.expect("deleted");
}
