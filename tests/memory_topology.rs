//! What a topology makes of the embedded broker: the same as of RabbitMQ (`rabbitmq_topology.rs`), as far as
//! it can be seen.

use std::collections::HashMap;
use std::time::Duration;

use laneway::actors::{MappingEpoch, OrderingKey, ShardCount, ShardIndex, header};
use laneway::prelude::*;
use laneway::topology::Overflow;
use laneway::transport::Transport;
use laneway::{Shards, Topology};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Paid(u32);

impl Message for Paid {
    const TYPE: &'static str = "paid";
}

/// A bus that only publishes `Paid`, keyed by its number.
async fn publishing(broker: &MemoryBroker, topology: Topology, queue: &str) -> Bus {
    let built = Bus::builder()
        .memory(broker.clone())
        .topology(|_| topology)
        .publishes::<Paid>(|r| r.to_queue(queue).keyed_by(|paid| paid.0))
        .build();
    built.expect("valid").start().await.expect("starts")
}

fn keys(broker: &MemoryBroker, queue: &str, name: &str) -> Vec<Option<String>> {
    let messages = broker.messages(queue);
    let text = |envelope: &laneway::Envelope| envelope.headers.text(name).map(str::to_owned);
    messages.iter().map(text).collect()
}

#[tokio::test]
async fn a_key_goes_to_its_shard_and_keyless_messages_are_spread() {
    let broker = MemoryBroker::new();
    let topology = Topology::default().sharded_queue("orders", 8, |q| q);
    let bus = publishing(&broker, topology, "orders").await;
    for number in 0..100 {
        bus.publish(&Paid(number)).await.expect("published");
        let keyless = bus.publish_to_queue("orders", &Paid(number), None).await;
        keyless.expect("published");
    }
    let count = ShardCount::new(8).expect("allowed");
    let mut keyed = 0;
    for shard in 0..8 {
        let found = keys(&broker, &format!("orders-00{shard}"), header::ORDERING_KEY);
        assert!(
            found.iter().any(Option::is_none),
            "shard {shard}: {found:?}"
        );
        for key in found.iter().flatten() {
            assert_eq!(
                ShardIndex::of(&OrderingKey::from(&**key), count).get(),
                shard
            );
            keyed += 1;
        }
    }
    assert_eq!(keyed, 100);
    bus.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn where_the_broker_maps_a_key_has_one_queue() {
    let broker = MemoryBroker::new();
    let shards = Shards::mapped_by_broker(4, "account");
    let topology = Topology::default().sharded_queue("orders", shards, |q| q);
    let bus = publishing(&broker, topology, "orders").await;
    for number in 0..200 {
        bus.publish(&Paid(number % 50)).await.expect("published");
    }
    let mut shard_of = HashMap::new();
    let mut all = 0;
    for shard in 0..4 {
        let found = keys(&broker, &format!("orders-00{shard}"), "account");
        assert!(!found.is_empty(), "shard {shard} got something");
        all += found.len();
        for key in found {
            let key = key.expect("each has its key");
            assert_eq!(*shard_of.entry(key).or_insert(shard), shard);
        }
    }
    assert_eq!((all, shard_of.len()), (200, 50));
    bus.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn weights_share_the_keys_out_and_messages_carry_the_epoch() {
    let broker = MemoryBroker::new();
    let topology = Topology::default()
        .queue("a", |q| q.single_active_consumer())
        .queue("b", |q| q.single_active_consumer())
        .consistent_hash_exchange("orders", |x| {
            x.hash_header("account").queue("b", 3).queue("a", 1)
        });
    let bus = publishing(&broker, topology, "orders").await;
    for number in 0..1_000 {
        bus.publish(&Paid(number)).await.expect("published");
    }
    let (a, b) = (broker.status("a").ready, broker.status("b").ready);
    assert_eq!(a + b, 1_000);
    assert!((150..350).contains(&a), "about a quarter: {a}");
    let own = MappingEpoch::of("header account", &[("a", 1), ("b", 3)]).to_string();
    let epochs = keys(&broker, "a", header::MAPPING);
    assert!(epochs.iter().all(|epoch| epoch.as_ref() == Some(&own)));
    bus.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn what_no_queue_takes_goes_to_the_alternate_exchange_and_nothing_to_an_internal_one() {
    let broker = MemoryBroker::new();
    let topology = Topology::default()
        .queue("eu", |q| q)
        .queue("rest", |q| {
            q.max_length(1).overflow(Overflow::RejectPublish)
        })
        .sharded_queue("shards", 2, |q| q)
        .exchange("orders", |x| x.topic().alternate_exchange("others"))
        .exchange("others", |x| x.fanout().alternate_exchange("orders"))
        .bind("eu", "orders", "orders.eu.#")
        .bind("rest", "others", "");
    broker.apply(&topology).await.expect("applied");
    broker.apply(&topology).await.expect("applied again");
    let send = |exchange: &'static str, routing_key: &'static str| {
        let broker = broker.clone();
        async move {
            let outgoing = laneway::actors::port::Outgoing {
                destination: laneway::Destination::Exchange {
                    exchange: exchange.into(),
                    routing_key: routing_key.into(),
                },
                envelope: laneway::Envelope::default(),
                key: None,
            };
            broker.publisher().publish(outgoing).await
        }
    };
    send("orders", "orders.eu.a").await.expect("bound");
    send("orders", "bills")
        .await
        .expect("by the alternate exchange");
    let full = send("orders", "bills").await.expect_err("full").to_string();
    assert!(full.contains("`rest` is full"), "{full}");
    let marker = send("shards.shards", "")
        .await
        .expect_err("internal")
        .to_string();
    assert!(marker.contains("internal"), "{marker}");
    assert_eq!(
        (broker.status("eu").ready, broker.status("rest").ready),
        (1, 1)
    );
}

#[tokio::test]
async fn an_identity_that_differs_makes_nothing() {
    let broker = MemoryBroker::new();
    let sharded = |count: u32| {
        Topology::default()
            .sharded_queue("orders", count, |q| q)
            .queue("other", |q| q)
    };
    let three = Topology::default().sharded_queue("orders", 3, |q| q);
    broker.apply(&three).await.expect("applied");
    let errors = broker.apply(&sharded(4)).await.expect_err("refused");
    let text = errors.iter().map(ToString::to_string).collect::<String>();
    assert!(
        text.contains("`publisher-3 by laneway-key`")
            && text.contains("`publisher-4 by laneway-key`"),
        "{text}"
    );
    let bus = publishing(&broker, three, "orders").await;
    for queue in ["other", "orders-003"] {
        let topology = Topology::default().existing_queue(queue, |q| q);
        assert!(broker.apply(&topology).await.is_err(), "`{queue}` was made");
    }
    bus.shutdown(Duration::from_secs(5)).await;
}
