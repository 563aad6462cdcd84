//! Keys spread over the shards, and each has one. The map survives restarts of the broker where publishers map. (That of a
//! consistent-hash exchange does not: see `ShardMap::Broker`.)

#![cfg(feature = "rabbitmq")]

use std::collections::BTreeMap;

use futures::StreamExt;
use laneway::prelude::*;
use laneway::{Shards, Topology};

#[path = "support/orders.rs"]
mod orders;
mod support;
#[path = "support/workload.rs"]
mod workload;
use orders::{started, stop};
use support::broker::PrivateBroker;
use support::foreign::Foreign;
use workload::{KEY_HEADER, Numbered};

const KEYS: u64 = 200;
const QUEUES: u32 = 8;

/// Publishes one message of each key and reads where it arrived: key to queue.
async fn map(
    round: u64,
    url: &str,
    entry: &str,
    queues: &[String],
    topology: Topology,
) -> BTreeMap<String, String> {
    let builder = Bus::builder()
        .rabbitmq(RabbitMq::at(url))
        .topology(|_| topology)
        .publishes::<Numbered>(|r| {
            r.to_queue(entry)
                .keyed_by(|m| m.key.clone())
                .key_header(KEY_HEADER)
        });
    let bus = started(builder).await;
    for number in 0..KEYS {
        let key = format!("key-{number}");
        bus.publish(&Numbered { key, seq: round })
            .await
            .expect("published");
    }
    stop(&bus).await;
    let foreign = Foreign::connect(url).await;
    let mut map = BTreeMap::new();
    for queue in queues {
        while let Some(delivery) = foreign.get(queue).await {
            let message: Numbered = serde_json::from_slice(&delivery.data).expect("as published");
            // A broker that is killed forgets that the messages of the last round were taken.
            if message.seq == round {
                let other = map.insert(message.key, queue.clone());
                assert_eq!(other, None, "one queue for a key");
            }
        }
    }
    assert_eq!(map.len() as u64, KEYS);
    map
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_has_the_same_shard_after_each_of_four_restarts_of_the_broker() {
    let mut broker = PrivateBroker::start();
    let url = broker.url();
    let numbered = |name: &str| -> Vec<_> {
        (0..QUEUES)
            .map(|shard| format!("{name}-{shard:03}"))
            .collect()
    };
    let shards = || Shards::mapped_by_publisher(QUEUES, KEY_HEADER);
    let entries = [
        (
            "classic",
            Topology::default().sharded_queue("classic", shards(), |q| q),
        ),
        (
            "other",
            Topology::default().sharded_queue("other", shards(), |q| q),
        ),
    ];
    let mut before = Vec::new();
    for (entry, topology) in &entries {
        before.push(map(0, &url, entry, &numbered(entry), topology.clone()).await);
    }
    for restart in 1..=4 {
        if restart % 2 == 0 {
            broker.kill();
            broker.restart();
        } else {
            broker.stop_app();
            broker.start_app();
        }
        for ((entry, topology), before) in entries.iter().zip(&before) {
            let now = map(restart, &url, entry, &numbered(entry), topology.clone()).await;
            assert_eq!(now, *before, "`{entry}` after restart {restart}");
        }
    }
}

/// Case O15.
#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_keys_spread_over_eight_queues_and_each_has_one() {
    const MANY: u64 = 10_000;
    let broker = PrivateBroker::start();
    let url = broker.url();
    let names: Vec<_> = ["a", "b", "c", "d", "e", "f", "g", "h"]
        .iter()
        .map(|letter| format!("hashed-{letter}"))
        .collect();
    let hashed = Topology::default().consistent_hash_exchange("hashed", |x| {
        let x = x.hash_header(KEY_HEADER);
        names.iter().fold(x, |x, queue| x.queue(queue, 1))
    });
    let hashed = names.iter().fold(hashed, |t, queue| {
        t.queue(queue, |q| q.durable().single_active_consumer())
    });
    let shards = |shards: Shards| Topology::default().sharded_queue("orders", shards, |q| q);
    let numbered = |name: &str| {
        (0..QUEUES)
            .map(move |shard| format!("{name}-{shard:03}"))
            .collect()
    };
    let entries: [(&str, Vec<String>, Topology); 2] = [
        (
            "orders",
            numbered("orders"),
            shards(Shards::mapped_by_publisher(QUEUES, KEY_HEADER)),
        ),
        ("hashed", names.clone(), hashed),
    ];
    for (entry, queues, topology) in entries {
        let builder = Bus::builder()
            .rabbitmq(RabbitMq::at(&url))
            .topology(|_| topology)
            .publishes::<Numbered>(|r| {
                r.to_queue(entry)
                    .keyed_by(|m| m.key.clone())
                    .key_header(KEY_HEADER)
            });
        let bus = started(builder).await;
        // Some twice, to see that a key has one queue.
        let sends = (0..MANY + 1_000).map(|number| {
            let (key, bus) = (format!("key-{}", number % MANY), bus.clone());
            async move {
                let message = Numbered {
                    key,
                    seq: number / MANY + 1,
                };
                bus.publish(&message).await.expect("published");
            }
        });
        let sending = futures::stream::iter(sends).buffer_unordered(64);
        sending.collect::<()>().await;
        stop(&bus).await;
        let foreign = Foreign::connect(&url).await;
        let mut found: BTreeMap<String, (&str, u64)> = BTreeMap::new();
        let mut counts = Vec::new();
        for queue in &queues {
            let mut here = 0;
            while let Some(delivery) = foreign.get(queue).await {
                let message: Numbered = serde_json::from_slice(&delivery.data).expect("published");
                let (place, copies) = found.entry(message.key).or_insert((queue, 0));
                assert_eq!(place, queue, "one queue for a key");
                *copies += 1;
                here += 1;
            }
            counts.push(here);
        }
        assert_eq!(
            found.values().filter(|(_, copies)| *copies == 2).count(),
            1_000
        );
        assert_eq!(found.len() as u64, MANY);
        // 1,375 each on average; a fair spread of 10,000 keys is within 150 (four standard deviations).
        let fair = 1_375 - 150..=1_375 + 150;
        assert!(
            counts.iter().all(|count| fair.contains(count)),
            "{entry}: {counts:?}"
        );
    }
}
