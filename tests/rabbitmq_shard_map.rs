//! The map from keys to shards survives restarts of the broker where publishers map. (That of a
//! consistent-hash exchange does not: see `ShardMap::Broker`.)

#![cfg(feature = "rabbitmq")]

use std::collections::BTreeMap;

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
