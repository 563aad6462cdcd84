//! What a topology makes of a real broker: what is created, what is refused, and where a key goes.
#![cfg(feature = "rabbitmq")]

mod support;

use std::collections::HashMap;
use std::time::Duration;

use futures::StreamExt;
use laneway::actors::{MappingEpoch, OrderingKey, ShardCount, ShardIndex, header};
use laneway::prelude::*;
use laneway::topology::{HashProperty, HeaderMatch, LeaderLocator, Overflow, QueueSpec};
use laneway::transport::Transport;
use laneway::{Bus, QueueType, Shards, Topology};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use serde::{Deserialize, Serialize};

use support::broker::{PrivateBroker, shared_url, unique};
use support::foreign::Foreign;

const BOTH: [QueueType; 2] = [QueueType::Classic, QueueType::Quorum];

#[derive(Serialize, Deserialize)]
struct Paid(u32);

impl Message for Paid {
    const TYPE: &'static str = "paid";
}

async fn applied(broker: &RabbitMq, topology: &Topology) {
    broker.apply(topology).await.expect("applied");
}

/// The texts of a refusal.
async fn refused(broker: &RabbitMq, topology: &Topology) -> Vec<String> {
    let errors = broker.apply(topology).await.expect_err("refused");
    errors.iter().map(ToString::to_string).collect()
}

fn assert_names(texts: &[String], words: &[&str]) {
    let one = texts
        .iter()
        .any(|text| words.iter().all(|word| text.contains(word)));
    assert!(one, "no text with {words:?} in {texts:#?}");
}

/// A bus that only publishes `Paid`, keyed by its number.
async fn publishing(broker: &RabbitMq, topology: &Topology, queue: &str) -> Bus {
    let topology = topology.clone();
    Bus::builder()
        .rabbitmq(broker.clone())
        .topology(|_| topology)
        .publishes::<Paid>(|r| r.to_queue(queue).keyed_by(|paid| paid.0))
        .build()
        .expect("valid")
        .start()
        .await
        .expect("starts")
}

/// All messages of a queue: key header and mapping epoch.
async fn drained(
    foreign: &Foreign,
    queue: &str,
    key: &str,
) -> Vec<(Option<String>, Option<String>)> {
    let mut found = Vec::new();
    while let Some(message) = foreign.get(queue).await {
        let headers = message.properties.headers().clone().unwrap_or_default();
        let text = |name: &str| match headers.inner().get(name) {
            Some(AMQPValue::LongString(text)) => Some(text.to_string()),
            _ => None,
        };
        found.push((text(key), text(header::MAPPING)));
    }
    found
}

#[tokio::test]
async fn every_argument_with_a_method_is_known_to_the_broker_and_compared() {
    let broker = RabbitMq::at(shared_url());
    type Describe = fn(QueueSpec) -> QueueSpec;
    // (queue type, argument, described, described otherwise)
    let cases: Vec<(QueueType, &str, Describe, Describe)> = vec![
        (
            QueueType::Classic,
            "x-message-ttl",
            |q| q.message_ttl(Duration::from_secs(900)),
            |q| q.message_ttl(Duration::from_secs(901)),
        ),
        (
            QueueType::Quorum,
            "x-message-ttl",
            |q| q.message_ttl(Duration::from_secs(900)),
            |q| q,
        ),
        (
            QueueType::Classic,
            "x-expires",
            |q| q.expires(Duration::from_secs(900)),
            |q| q.expires(Duration::from_secs(901)),
        ),
        (
            QueueType::Classic,
            "x-max-length",
            |q| q.max_length(10),
            |q| q.max_length(11),
        ),
        (
            QueueType::Quorum,
            "x-max-length",
            |q| q.max_length(10),
            |q| q.max_length(11),
        ),
        (
            QueueType::Classic,
            "x-max-length-bytes",
            |q| q.max_length_bytes(10_000),
            |q| q,
        ),
        (
            QueueType::Classic,
            "x-overflow",
            |q| q.max_length(1).overflow(Overflow::RejectPublish),
            |q| q.max_length(1).overflow(Overflow::DropHead),
        ),
        (
            QueueType::Quorum,
            "x-overflow",
            |q| q.max_length(1).overflow(Overflow::RejectPublish),
            |q| q.max_length(1),
        ),
        (
            QueueType::Classic,
            "x-overflow",
            |q| {
                q.max_length(1)
                    .dead_letter("x", None)
                    .overflow(Overflow::RejectPublishDeadLetter)
            },
            |q| q.max_length(1).dead_letter("x", None),
        ),
        (
            QueueType::Classic,
            "x-dead-letter-exchange",
            |q| q.dead_letter("there", "key"),
            |q| q.dead_letter("elsewhere", "key"),
        ),
        (
            QueueType::Quorum,
            "x-dead-letter-routing-key",
            |q| q.dead_letter("there", "key"),
            |q| q.dead_letter("there", "other"),
        ),
        (
            QueueType::Quorum,
            "x-delivery-limit",
            |q| q.delivery_limit(7),
            |q| q.delivery_limit(8),
        ),
        (
            QueueType::Classic,
            "x-max-priority",
            |q| q.max_priority(3),
            |q| q.max_priority(4),
        ),
        (QueueType::Classic, "x-queue-mode", |q| q.lazy(), |q| q),
        (
            QueueType::Quorum,
            "x-queue-leader-locator",
            |q| q.leader_locator(LeaderLocator::Balanced),
            |q| q.leader_locator(LeaderLocator::ClientLocal),
        ),
        (
            QueueType::Quorum,
            "x-quorum-initial-group-size",
            |q| q.initial_group_size(1),
            |q| q.initial_group_size(2),
        ),
        (
            QueueType::Classic,
            "x-single-active-consumer",
            |q| q.single_active_consumer(),
            |q| q,
        ),
    ];
    for (queue_type, argument, describe, otherwise) in cases {
        let name = unique("argument");
        let queue = |describe: Describe| {
            Topology::default().queue(&name, |q| describe(q.durable().of_type(queue_type)))
        };
        let topology = queue(describe);
        applied(&broker, &topology).await;
        applied(&broker, &topology).await;
        let texts = refused(&broker, &queue(otherwise)).await;
        assert_names(&texts, &[&name, argument]);
        broker.delete(&topology).await.expect("deleted");
    }
}

#[tokio::test]
async fn exchanges_and_bindings_lead_where_they_say() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let [x, other, eu, us, rest] = ["x", "h", "eu", "us", "rest"].map(unique);
    let topology = Topology::default()
        .queue(&eu, |q| q.durable())
        .queue(&us, |q| q.durable())
        .queue(&rest, |q| q.durable())
        .exchange(&x, |e| e.topic().alternate_exchange(&other))
        .exchange(&other, |e| e.headers())
        .bind(&eu, &x, "orders.eu.#")
        .bind(&us, &x, "orders.us.*")
        .bind_headers(&rest, &other, HeaderMatch::All, [("laneway-key", "7")]);
    applied(&broker, &topology).await;
    applied(&broker, &topology).await;
    let topology = topology.clone();
    let there = topology.clone();
    let bus = |key: &'static str| {
        let (topology, x) = (topology.clone(), x.clone());
        let broker = broker.clone();
        async move {
            let bus = Bus::builder()
                .rabbitmq(broker)
                .topology(|_| topology)
                .publishes::<Paid>(|r| r.to_exchange(&x, key).keyed_by(|paid| paid.0))
                .build()
                .expect("valid");
            bus.start().await.expect("starts")
        }
    };
    bus("orders.eu.a.b")
        .await
        .publish(&Paid(1))
        .await
        .expect("routed");
    bus("orders.us.a")
        .await
        .publish(&Paid(1))
        .await
        .expect("routed");
    bus("bills")
        .await
        .publish(&Paid(7))
        .await
        .expect("by the alternate exchange");
    let nowhere = bus("bills").await.publish(&Paid(8)).await;
    assert!(nowhere.is_err(), "no header matches");
    for queue in [&eu, &us, &rest] {
        assert_eq!(foreign.ready(queue).await, 1, "{queue}");
    }
    let fanout = Topology::default().exchange(&x, |e| e.fanout().alternate_exchange(&other));
    assert_names(&refused(&broker, &fanout).await, &[&x, "type"]);
    broker.delete(&there).await.expect("deleted");
    let missing = Topology::default().existing_exchange(&x);
    assert_names(&refused(&broker, &missing).await, &[&x, "does not exist"]);
}

#[tokio::test]
async fn the_number_of_shards_and_the_map_are_part_of_a_queues_identity() {
    let broker = RabbitMq::at(shared_url());
    for queue_type in BOTH {
        let name = unique("sharded");
        let sharded = |shards: Shards| {
            Topology::default().sharded_queue(&name, shards, |q| {
                q.of_type(queue_type)
                    .parking(&format!("{name}-dlx"), &format!("{name}-parked"))
            })
        };
        let eight = sharded(8.into());
        applied(&broker, &eight).await;
        applied(&broker, &eight).await;
        for other in [9.into(), 4.into(), Shards::mapped_by_broker(8, "account")] {
            let texts = refused(&broker, &sharded(other)).await;
            assert_names(
                &texts,
                &[
                    &format!(
                        "queue `{name}` exists with another number of shards, another map or another key header (`publisher-8 by laneway-key`)"
                    ),
                    "cannot be changed",
                ],
            );
        }
        // Nothing was made by those.
        assert!(broker.ready(&format!("{name}-007")).await.is_ok());
        assert!(broker.ready(&format!("{name}-008")).await.is_err());
        // A shard is a queue with a single active consumer.
        let plain =
            Topology::default().queue(&format!("{name}-003"), |q| q.durable().of_type(queue_type));
        assert_names(
            &refused(&broker, &plain).await,
            &["x-single-active-consumer"],
        );
        broker.delete(&eight).await.expect("deleted");
        assert!(broker.ready(&format!("{name}-003")).await.is_err());
        applied(&broker, &sharded(9.into())).await;
        broker.delete(&sharded(9.into())).await.expect("deleted");
    }
}

#[tokio::test]
async fn of_two_that_declare_different_numbers_at_once_one_wins_and_the_other_makes_nothing() {
    let broker = RabbitMq::at(shared_url());
    for _ in 0..8 {
        let name = unique("race");
        let sharded = |count: u32| Topology::default().sharded_queue(&name, count, |q| q);
        let (two, three) = (sharded(2), sharded(3));
        let other = RabbitMq::at(shared_url());
        let (one, another) = tokio::join!(broker.apply(&two), other.apply(&three));
        assert!(one.is_ok() != another.is_ok(), "{one:?} {another:?}");
        let third = broker.ready(&format!("{name}-002")).await;
        assert_eq!(third.is_ok(), another.is_ok());
        broker.delete(&three).await.expect("deleted");
    }
}

#[tokio::test]
async fn a_plain_queue_of_the_name_of_a_sharded_one_is_refused() {
    let broker = RabbitMq::at(shared_url());
    let name = unique("was-plain");
    let plain = Topology::default().queue(&name, |q| q.durable());
    applied(&broker, &plain).await;
    let sharded = Topology::default().sharded_queue(&name, 2, |q| q);
    let texts = refused(&broker, &sharded).await;
    assert_names(
        &texts,
        &[&format!("queue `{name}` exists as a plain queue"), "delete"],
    );
    assert!(broker.ready(&format!("{name}-000")).await.is_err());
    broker.delete(&plain).await.expect("deleted");
    applied(&broker, &sharded).await;
    broker.delete(&sharded).await.expect("deleted");
}

#[tokio::test]
async fn a_key_is_published_to_its_shard() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let name = unique("orders");
    let topology = Topology::default().sharded_queue(&name, 8, |q| q);
    let bus = publishing(&broker, &topology, &name).await;
    for number in 0..100 {
        bus.publish(&Paid(number)).await.expect("published");
    }
    for number in 0..40 {
        let sent = bus.publish_to_queue(&name, &Paid(number), None).await;
        sent.expect("a keyless message goes to some shard");
    }
    let past = bus
        .publish_to_queue(&format!("{name}-001"), &Paid(1), None)
        .await;
    let past = past.expect_err("past the entry").to_string();
    assert!(past.contains(&format!("publish to `{name}`")), "{past}");
    let count = ShardCount::new(8).expect("allowed");
    let (mut keyed, mut keyless) = (0, Vec::new());
    for shard in 0..8 {
        let found = drained(&foreign, &format!("{name}-00{shard}"), header::ORDERING_KEY).await;
        let keys = found.iter().filter_map(|(key, _)| key.as_deref());
        for key in keys {
            assert_eq!(ShardIndex::of(&OrderingKey::from(key), count).get(), shard);
            keyed += 1;
        }
        keyless.push(found.iter().filter(|(key, _)| key.is_none()).count());
    }
    assert_eq!((keyed, keyless.iter().sum::<usize>()), (100, 40));
    assert!(
        keyless.iter().filter(|count| **count > 0).count() > 4,
        "{keyless:?}"
    );
    bus.shutdown(Duration::from_secs(5)).await;
    broker.delete(&topology).await.expect("deleted");
}

/// RabbitMQ 3.10.8 takes a delivery limit of -1 for one that every return exceeds, RabbitMQ 4 without it
/// removes at the 20th.
#[tokio::test]
async fn a_quorum_queue_keeps_what_comes_back_however_often() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let name = unique("limit");
    let parked = format!("{name}-parked");
    let topology = Topology::default().queue(&name, |q| {
        q.quorum().parking(&format!("{name}-dlx"), &parked)
    });
    applied(&broker, &topology).await;
    applied(&broker, &topology).await;
    for queue in [&name, &parked] {
        foreign
            .publish(queue, b"kept", BasicProperties::default())
            .await;
        for round in 0..25 {
            // A queue can be empty for a moment while it takes a message back, so somebody waits for it.
            let channel = foreign.channel().await;
            let mut consumer = channel
                .basic_consume(
                    queue.as_str().into(),
                    format!("{round}").into(),
                    Default::default(),
                    FieldTable::default(),
                )
                .await
                .expect("consumes");
            let next = tokio::time::timeout(Duration::from_secs(20), consumer.next()).await;
            let next = next.unwrap_or_else(|_| panic!("gone after {round} returns"));
            assert_eq!(next.expect("goes on").expect("no error").data, b"kept");
            channel
                .close(200, "gives it back".into())
                .await
                .expect("closes");
        }
    }
    broker.delete(&topology).await.expect("deleted");
}

#[tokio::test]
async fn a_broker_without_the_plugin_is_told_which_one_it_needs() {
    let node = tokio::task::spawn_blocking(PrivateBroker::plain)
        .await
        .expect("started");
    let broker = RabbitMq::at(node.url());
    let topology = Topology::default()
        .queue("a", |q| q.durable().single_active_consumer())
        .sharded_queue("s", Shards::mapped_by_broker(2, "account"), |q| q)
        .consistent_hash_exchange("h", |x| x.hash_header("account").queue("a", 1));
    let texts = refused(&broker, &topology).await;
    for exchange in ["`s`", "`h`"] {
        assert_names(
            &texts,
            &[
                exchange,
                "enable the plugin rabbitmq_consistent_hash_exchange",
            ],
        );
    }
    assert_eq!(
        texts.len(),
        2,
        "what else was asked was answered: {texts:#?}"
    );
}

/// What follows needs the plugin, so it shares one private broker.
#[tokio::test]
async fn a_consistent_hash_exchange_maps_for_all_publishers() {
    let node = tokio::task::spawn_blocking(PrivateBroker::start)
        .await
        .expect("started");
    let broker = RabbitMq::at(node.url());
    let foreign = Foreign::connect(&node.url()).await;
    the_broker_maps_the_keys_of_a_sharded_queue(&broker, &foreign).await;
    the_hash_header_is_part_of_the_identity(&broker).await;
    what_the_broker_itself_does_not_compare(&foreign).await;
    a_map_that_can_change_is_stamped(&broker, &foreign).await;
    a_hash_by_property(&broker, &foreign).await;
}

async fn the_broker_maps_the_keys_of_a_sharded_queue(broker: &RabbitMq, foreign: &Foreign) {
    let name = unique("devices");
    let shards = Shards::mapped_by_broker(4, "device");
    let topology = Topology::default().sharded_queue(&name, shards, |q| q);
    let bus = publishing(broker, &topology, &name).await;
    for _ in 0..2 {
        for number in 0..60 {
            bus.publish(&Paid(number)).await.expect("published");
        }
    }
    for number in 0..40 {
        let sent = bus.publish_to_queue(&name, &Paid(number), None).await;
        sent.expect("past the map");
    }
    // A foreign publisher, with the header as text.
    let channel = foreign.channel().await;
    for number in 0..60 {
        let mut headers = FieldTable::default();
        headers.insert(
            "device".into(),
            AMQPValue::LongString(number.to_string().into()),
        );
        let properties = BasicProperties::default().with_headers(headers);
        let sent = channel
            .basic_publish(
                name.as_str().into(),
                "".into(),
                Default::default(),
                b"{}",
                properties,
            )
            .await
            .expect("written");
        sent.await.expect("confirmed");
    }
    let mut shard_of: HashMap<String, usize> = HashMap::new();
    let mut counts = Vec::new();
    let mut keyless = Vec::new();
    for shard in 0..4 {
        let found = drained(foreign, &format!("{name}-00{shard}"), "device").await;
        keyless.push(found.iter().filter(|(key, _)| key.is_none()).count());
        let keys: Vec<_> = found.into_iter().filter_map(|(key, _)| key).collect();
        counts.push(keys.len());
        for key in keys {
            assert_eq!(
                *shard_of.entry(key).or_insert(shard),
                shard,
                "one shard for a key"
            );
        }
    }
    assert_eq!(counts.iter().sum::<usize>(), 180);
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    assert_eq!(keyless.iter().sum::<usize>(), 40);
    assert!(keyless.iter().all(|count| *count > 0), "{keyless:?}");
    bus.shutdown(Duration::from_secs(5)).await;
    broker.delete(&topology).await.expect("deleted");
}

async fn the_hash_header_is_part_of_the_identity(broker: &RabbitMq) {
    let [name, queue] = ["hashed", "a"].map(unique);
    let hashed = |header: &str| {
        Topology::default()
            .queue(&queue, |q| q.durable().single_active_consumer())
            .consistent_hash_exchange(&name, |x| x.hash_header(header).queue(&queue, 1))
    };
    applied(broker, &hashed("account")).await;
    let texts = refused(broker, &hashed("device")).await;
    assert_names(
        &texts,
        &[
            &format!("exchange `{name}`"),
            "`header account`",
            "`header device`",
        ],
    );
    broker.delete(&hashed("account")).await.expect("deleted");

    let sharded = |header: &str| {
        let shards = Shards::mapped_by_broker(2, header);
        Topology::default().sharded_queue(&name, shards, |q| q)
    };
    applied(broker, &sharded("account")).await;
    let texts = refused(broker, &sharded("device")).await;
    assert_names(&texts, &["`broker-2 by account`"]);
    broker.delete(&sharded("account")).await.expect("deleted");
}

/// The reason why there is a marker.
async fn what_the_broker_itself_does_not_compare(foreign: &Foreign) {
    let channel = foreign.channel().await;
    let name = unique("uncompared");
    for header in ["account", "device"] {
        let mut arguments = FieldTable::default();
        arguments.insert("hash-header".into(), AMQPValue::LongString(header.into()));
        let kind = lapin::ExchangeKind::Custom("x-consistent-hash".to_owned());
        let declared =
            channel.exchange_declare(name.as_str().into(), kind, Default::default(), arguments);
        declared.await.expect("accepted, though it differs");
    }
    foreign.delete_exchange(&name).await;
}

async fn a_map_that_can_change_is_stamped(broker: &RabbitMq, foreign: &Foreign) {
    let [name, a, b] = ["orders", "a", "b"].map(unique);
    let topology = Topology::default()
        .queue(&b, |q| q.durable().single_active_consumer())
        .queue(&a, |q| q.durable().single_active_consumer())
        .consistent_hash_exchange(&name, |x| {
            x.hash_header("account").queue(&b, 1).queue(&a, 2)
        });
    let bus = publishing(broker, &topology, &name).await;
    for number in 0..60 {
        bus.publish(&Paid(number)).await.expect("published");
    }
    let own = MappingEpoch::of("header account", &[(&a, 2), (&b, 1)]).to_string();
    let mut all = 0;
    for queue in [&a, &b] {
        let found = drained(foreign, queue, "account").await;
        assert!(!found.is_empty(), "{queue} got something");
        all += found.len();
        for (key, epoch) in found {
            assert!(key.is_some());
            assert_eq!(epoch.as_ref(), Some(&own));
        }
    }
    assert_eq!(all, 60);
    bus.shutdown(Duration::from_secs(5)).await;
    broker.delete(&topology).await.expect("deleted");
}

async fn a_hash_by_property(broker: &RabbitMq, foreign: &Foreign) {
    let [name, a, b] = ["property", "a", "b"].map(unique);
    let topology = Topology::default()
        .queue(&a, |q| q.durable().single_active_consumer())
        .queue(&b, |q| q.durable().single_active_consumer())
        .consistent_hash_exchange(&name, |x| {
            x.hash_property(HashProperty::MessageId)
                .queue(&a, 1)
                .queue(&b, 1)
        });
    let there = topology.clone();
    let bus = Bus::builder()
        .rabbitmq(broker.clone())
        .topology(|_| there)
        .publishes::<Paid>(|r| r.to_queue(&name))
        .build()
        .expect("valid")
        .start()
        .await
        .expect("starts");
    for number in 0..40 {
        bus.publish(&Paid(number)).await.expect("published");
    }
    let keyed = bus
        .publish_keyed(&Paid(1), 1_u8)
        .await
        .expect_err("no key")
        .to_string();
    assert!(keyed.contains("hashes by a property"), "{keyed}");
    let (a, b) = (foreign.ready(&a).await, foreign.ready(&b).await);
    assert!(a > 0 && b > 0 && a + b == 40, "{a} {b}");
    bus.shutdown(Duration::from_secs(5)).await;
    broker.delete(&topology).await.expect("deleted");
}
