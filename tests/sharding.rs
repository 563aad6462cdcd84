//! Several instances share the shards of one queue: all of them work, a key is in order across all of them,
//! and shards move when instances come, go, pause or die.

use std::time::Duration;

use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::{EndpointBuilder, EndpointSnapshot, EventKind, Shards, Topology};

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{Gate, ORDERS, Seen, envelope, handled, put, snapshot, started, stop, within};
use workload::{KEY_HEADER, Numbered, Scripted};

const SHARDS: u32 = 8;

/// A bus that knows the sharded queue.
fn sharded(broker: &MemoryBroker) -> laneway::BusBuilder {
    Bus::builder().memory(broker.clone()).topology(|t| {
        let shards = Shards::mapped_by_publisher(SHARDS, KEY_HEADER);
        t.sharded_queue(ORDERS, shards, |q| q.durable().parking("dlx", "parked"))
    })
}

/// An instance of a program whose endpoint shares 8 shards with the others on the same broker.
async fn instance(
    broker: &MemoryBroker,
    ledger: &OrderLedger,
    describe: impl FnOnce(EndpointBuilder) -> EndpointBuilder,
) -> Bus {
    let handler = Scripted::succeeding(ledger, Duration::from_millis(1));
    let builder = sharded(broker)
        .endpoint(ORDERS, |e| {
            describe(
                e.ordered_by_header(KEY_HEADER)
                    .transport_affinity(TransportAffinity::Sharded)
                    .handler(handler),
            )
        })
        .publishes::<Numbered>(|r| r.to_queue(ORDERS).keyed_by(|m| m.key.clone()));
    started(builder).await
}

fn subscribed(state: &EndpointSnapshot) -> usize {
    state.shards.iter().filter(|shard| shard.subscribed).count()
}

/// Waits until these instances have as many shards as is said here, in any order.
async fn shares(instances: &[&Bus], expected: &[usize]) {
    within(&format!("shares of {expected:?}"), async {
        loop {
            let mut shares = Vec::new();
            for instance in instances {
                shares.push(subscribed(&snapshot(instance).await));
            }
            shares.sort_unstable();
            if shares == expected {
                return;
            }
            // The balance takes seconds; a snapshot is cheap.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

async fn publish(bus: &Bus, ledger: &OrderLedger, messages: std::ops::Range<u64>) {
    for number in messages {
        let message = Numbered {
            key: format!("key-{}", number % 50),
            seq: number / 50 + 1,
        };
        bus.publish(&message).await.expect("published");
        ledger.published(&message.key, message.seq);
    }
}

async fn all_empty(broker: &MemoryBroker) {
    for shard in 0..SHARDS {
        let queue = format!("{ORDERS}-{shard:03}");
        within("an empty shard", broker.wait_empty(&queue)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shards_move_in_order_as_instances_join_leave_and_die() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let first = instance(&broker, &ledger, |e| e).await;
    shares(&[&first], &[8]).await;
    let seen = Seen::of(&first);
    let publishing = {
        let (bus, ledger) = (first.clone(), ledger.clone());
        tokio::spawn(async move {
            for round in 0..200 {
                publish(&bus, &ledger, round * 100..(round + 1) * 100).await;
                // Spread over the time that the moves take.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
    };
    let second = instance(&broker, &ledger, |e| e).await;
    shares(&[&first, &second], &[4, 4]).await;
    let third = instance(&broker, &ledger, |e| e).await;
    shares(&[&first, &second, &third], &[2, 3, 3]).await;
    stop(&second).await;
    shares(&[&first, &third], &[4, 4]).await;
    // Like a crash: nothing is drained.
    drop(third);
    shares(&[&first], &[8]).await;
    within("everything to be published", publishing)
        .await
        .expect("published");
    all_empty(&broker).await;
    let gave = |kind: &EventKind| matches!(kind, EventKind::SessionClosed { .. });
    assert!(seen.count(gave) >= 5, "{:?}", seen.all());
    stop(&first).await;
    let figures = ledger.figures().expect("in memory");
    assert_eq!((figures.lost, figures.inversions), (0, 0), "{figures:?}");
    // Only the crash may leave any.
    assert!(figures.duplicates <= 128, "{figures:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn more_instances_than_shards_leave_some_of_them_ready_and_idle() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let mut all = Vec::new();
    for _ in 0..9 {
        all.push(instance(&broker, &ledger, |e| e).await);
    }
    let instances: Vec<_> = all.iter().collect();
    shares(&instances, &[0, 1, 1, 1, 1, 1, 1, 1, 1]).await;
    publish(&all[0], &ledger, 0..500).await;
    all_empty(&broker).await;
    for bus in &all {
        assert!(snapshot(bus).await.is_healthy());
        stop(bus).await;
    }
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.duplicates), (500, 0));
}

/// The memory of finished messages is for the session that follows, not for what another instance leaves.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_was_given_a_used_id_runs_although_its_shard_was_elsewhere_meanwhile() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let first = instance(&broker, &ledger, |e| e).await;
    shares(&[&first], &[8]).await;
    let fixed = |shard: usize| {
        let mut envelope = envelope("key", 1);
        envelope.id = Some(format!("used-{shard}").as_str().into());
        envelope
    };
    let queue = |shard: usize| format!("{ORDERS}-{shard:03}");
    for shard in 0..8 {
        put(&broker, &queue(shard), fixed(shard)).await;
    }
    handled(&first, 8).await;
    let stuck = Gate::closed();
    let held = stuck.clone();
    let builder = sharded(&broker).endpoint(ORDERS, |e| {
        e.ordered_by_header(KEY_HEADER)
            .transport_affinity(TransportAffinity::Sharded)
            .handler(move |_: Numbered, _: Context| {
                let held = held.clone();
                async move {
                    held.pass().await;
                    Ok(())
                }
            })
    });
    let second = started(builder).await;
    shares(&[&first, &second], &[4, 4]).await;
    let state = snapshot(&second).await;
    let moved = state.shards.iter().position(|shard| shard.subscribed);
    let moved = moved.expect("it has four");
    put(&broker, &queue(moved), fixed(moved)).await;
    stuck.until_waiting(1).await;
    // Like a crash: the message comes back, marked as redelivered.
    drop(second);
    handled(&first, 9).await;
    stop(&first).await;
}

/// Queues behind a consistent-hash exchange, with a single active consumer each.
fn hashed(queues: &'static [&'static str]) -> impl FnOnce(Topology) -> Topology {
    move |t| {
        let t = t.consistent_hash_exchange(ORDERS, |x| {
            let x = x.hash_header(KEY_HEADER);
            queues.iter().fold(x, |x, queue| x.queue(queue, 1))
        });
        queues.iter().fold(t, |t, queue| {
            t.queue(queue, |q| {
                q.durable()
                    .single_active_consumer()
                    .parking("dlx", "parked")
            })
        })
    }
}

fn hash_publisher(broker: &MemoryBroker, queues: &'static [&'static str]) -> laneway::BusBuilder {
    Bus::builder()
        .memory(broker.clone())
        .topology(hashed(queues))
        .publishes::<Numbered>(|r| r.to_queue(ORDERS).keyed_by(|m| m.key.clone()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_map_of_a_consistent_hash_exchange_is_reported_once_and_counted() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::succeeding(&ledger, Duration::ZERO);
    let builder = Bus::builder()
        .memory(broker.clone())
        .topology(hashed(&["a", "b"]))
        .endpoint(ORDERS, |e| {
            e.ordered_by_header(KEY_HEADER)
                .transport_affinity(TransportAffinity::ConsistentHash)
                .handler(handler)
        });
    let consumer = started(builder).await;
    shares(&[&consumer], &[2]).await;
    let seen = Seen::of(&consumer);
    let changed = |kind: &EventKind| matches!(kind, EventKind::MappingChanged { .. });

    let same = started(hash_publisher(&broker, &["a", "b"])).await;
    publish(&same, &ledger, 0..100).await;
    for queue in ["a", "b"] {
        within("an empty queue", broker.wait_empty(queue)).await;
    }
    assert_eq!(seen.count(changed), 0);
    assert_eq!(snapshot(&consumer).await.mapping_changes, 0);

    let grown = started(hash_publisher(&broker, &["a", "b", "c"])).await;
    publish(&grown, &ledger, 100..200).await;
    for queue in ["a", "b"] {
        within("an empty queue", broker.wait_empty(queue)).await;
    }
    assert_eq!(seen.count(changed), 1);
    let counted = snapshot(&consumer).await.mapping_changes;
    // What went to the new queue was not seen here.
    assert!((1..100).contains(&counted), "{counted}");
    for bus in [&consumer, &same, &grown] {
        stop(bus).await;
    }
}
