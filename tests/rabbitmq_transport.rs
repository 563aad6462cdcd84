//! The RabbitMQ transport's promises on a healthy broker. What happens when brokers and connections
//! fail is in `rabbitmq_faults.rs`.
#![cfg(feature = "rabbitmq")]

mod support;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::StreamExt;
use laneway::actors::port::{
    Ack, DeadLetter, Destination, OpenSession, Outgoing, ParkError, PublishError, Source,
    SourceError,
};
use laneway::actors::{
    Delivery, DeliveryTag, Envelope, HeaderValue, MessageId, PoisonReason, SessionState,
};
use laneway::topology::{QueueSpec, QueueType, Topology};
use laneway::transport::Transport;
use laneway::transport::rabbitmq::RabbitMq;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, DecimalValue, FieldArray, FieldTable};

use support::broker::{shared_url, unique};
use support::foreign::Foreign;
use support::proxy::Proxy;

const BOTH: [QueueType; 2] = [QueueType::Classic, QueueType::Quorum];

fn declared(name: &str, describe: impl FnOnce(QueueSpec) -> QueueSpec) -> QueueSpec {
    Topology::default().queue(name, describe).queues()[0].clone()
}

fn existing(name: &str, describe: impl FnOnce(QueueSpec) -> QueueSpec) -> QueueSpec {
    Topology::default().existing_queue(name, describe).queues()[0].clone()
}

async fn verified(broker: &RabbitMq, spec: &QueueSpec) -> Arc<dyn Source> {
    let source = broker.source(spec);
    source.verify().await.expect("verified");
    source
}

async fn open(source: &Arc<dyn Source>, credits: u16) -> (OpenSession, Arc<SessionState>) {
    let state = SessionState::start();
    let session = source
        .open(Arc::clone(&state), credits)
        .await
        .expect("opened");
    (session, state)
}

/// The next `count` deliveries.
async fn take(session: &mut OpenSession, count: usize) -> Vec<Delivery> {
    let mut taken = Vec::new();
    while taken.len() < count {
        let batch = session.deliveries.next().await.expect("goes on");
        taken.extend(batch.expect("no error"));
    }
    assert_eq!(taken.len(), count);
    taken
}

fn bodies(deliveries: &[Delivery]) -> Vec<String> {
    deliveries
        .iter()
        .map(|delivery| String::from_utf8_lossy(&delivery.envelope().body).into_owned())
        .collect()
}

fn numbers(range: std::ops::Range<u64>) -> Vec<String> {
    range.map(|number| number.to_string()).collect()
}

fn to_queue(queue: &str, body: &str) -> Outgoing {
    Outgoing {
        destination: Destination::Queue(queue.into()),
        envelope: Envelope {
            id: Some(MessageId::unique()),
            body: body.to_owned().into(),
            ..Envelope::default()
        },
        key: None,
    }
}

fn letter(delivery: Delivery) -> Arc<DeadLetter> {
    Arc::new(DeadLetter {
        delivery: Arc::new(delivery),
        endpoint: "orders".into(),
        queue: "orders-queue".into(),
        key: None,
        reason: PoisonReason::Permanent,
        place: laneway::actors::port::Place::Parking,
        detail: "no such order".to_owned(),
        attempts: 3,
        given_up_at: UNIX_EPOCH + Duration::from_millis(1_700_000_000_123),
    })
}

fn text_of(error: &SourceError) -> (bool, String) {
    match error {
        SourceError::Refused { what, .. } => (true, what.clone()),
        other => (false, other.to_string()),
    }
}

#[tokio::test]
async fn a_message_arrives_as_it_was_published() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    for queue_type in BOTH {
        let queue = unique("round-trip");
        let spec = declared(&queue, |q| q.durable().of_type(queue_type));
        let source = verified(&broker, &spec).await;
        let mut envelope = Envelope {
            id: Some("id-1".into()),
            message_type: Some("order-shipped".into()),
            content_type: Some("application/json".into()),
            correlation_id: Some("correlation".into()),
            causation_id: Some("cause".into()),
            sent_at: Some(UNIX_EPOCH + Duration::from_secs(1_700_000_000)),
            body: vec![7; 300_000].into(),
            ..Envelope::default()
        };
        envelope.headers.insert("text", "grüße");
        envelope.headers.insert("integer", -7_i64);
        envelope.headers.insert("bool", HeaderValue::Bool(true));
        envelope.headers.insert("float", HeaderValue::Float(0.5));
        let bytes = HeaderValue::Bytes(vec![255, 0, 1]);
        envelope.headers.insert("bytes", bytes);
        let outgoing = Outgoing {
            destination: Destination::Queue(queue.as_str().into()),
            envelope: envelope.clone(),
            key: None,
        };
        broker.publisher().publish(outgoing).await.expect("sent");

        let (mut session, state) = open(&source, 10).await;
        let arrived = take(&mut session, 1).await.remove(0);
        let got = arrived.envelope();
        assert_eq!(arrived.session_id(), state.id());
        assert!(!arrived.is_redelivered());
        assert_eq!(got.id, envelope.id);
        assert_eq!(got.message_type, envelope.message_type);
        assert_eq!(got.content_type, envelope.content_type);
        assert_eq!(got.correlation_id, envelope.correlation_id);
        assert_eq!(got.causation_id, envelope.causation_id);
        assert_eq!(got.sent_at, envelope.sent_at);
        assert_eq!(got.body, envelope.body);
        assert_eq!(got.headers.iter().count(), 5);
        for (name, value) in envelope.headers.iter() {
            assert_eq!(got.headers.get(name), Some(value), "{name}");
        }
        session.control.close().await;
        foreign.delete(&queue).await;
    }
}

#[tokio::test]
async fn headers_of_foreign_types_are_read() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let queue = unique("foreign-types");
    let source = verified(&broker, &declared(&queue, |q| q.durable())).await;
    foreign
        .publish(
            &queue,
            b"",
            BasicProperties::default().with_headers(every_type()),
        )
        .await;
    let (mut session, _) = open(&source, 10).await;
    let arrived = take(&mut session, 1).await.remove(0);
    let headers = &arrived.envelope().headers;
    for (name, value) in [
        ("text", HeaderValue::Text("text".into())),
        ("latin1", HeaderValue::Bytes(vec![0xfc])),
        ("bytes", HeaderValue::Bytes(vec![1, 2])),
        ("i8", HeaderValue::Integer(-8)),
        ("u8", HeaderValue::Integer(8)),
        ("i16", HeaderValue::Integer(-16)),
        ("i32", HeaderValue::Integer(-32)),
        ("u32", HeaderValue::Integer(32)),
        ("i64", HeaderValue::Integer(-64)),
        ("f32", HeaderValue::Float(0.5)),
        ("f64", HeaderValue::Float(0.25)),
        ("bool", HeaderValue::Bool(false)),
        ("time", HeaderValue::Other),
        ("decimal", HeaderValue::Other),
        ("list", HeaderValue::Other),
        ("table", HeaderValue::Other),
        ("void", HeaderValue::Other),
    ] {
        assert_eq!(headers.get(name), Some(&value), "{name}");
    }
    session.control.close().await;
    foreign.delete(&queue).await;
}

fn every_type() -> FieldTable {
    let mut inner = FieldTable::default();
    inner.insert("nested".into(), AMQPValue::LongInt(1));
    let mut table = FieldTable::default();
    for (name, value) in [
        ("text", AMQPValue::LongString("text".into())),
        ("latin1", AMQPValue::LongString(vec![0xfc].into())),
        ("bytes", AMQPValue::ByteArray([1, 2].as_slice().into())),
        ("i8", AMQPValue::ShortShortInt(-8)),
        ("u8", AMQPValue::ShortShortUInt(8)),
        ("i16", AMQPValue::ShortInt(-16)),
        ("i32", AMQPValue::LongInt(-32)),
        ("u32", AMQPValue::LongUInt(32)),
        ("i64", AMQPValue::LongLongInt(-64)),
        ("f32", AMQPValue::Float(0.5)),
        ("f64", AMQPValue::Double(0.25)),
        ("bool", AMQPValue::Boolean(false)),
        ("time", AMQPValue::Timestamp(1_700_000_000)),
        (
            "decimal",
            AMQPValue::DecimalValue(DecimalValue { scale: 2, value: 5 }),
        ),
        (
            "list",
            AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::Void])),
        ),
        ("table", AMQPValue::FieldTable(inner)),
        ("void", AMQPValue::Void),
    ] {
        table.insert(name.into(), value);
    }
    table
}

#[tokio::test]
async fn unsettled_messages_come_back_in_order_after_a_close() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    for queue_type in BOTH {
        let queue = unique("close");
        let spec = declared(&queue, |q| {
            q.durable().of_type(queue_type).single_active_consumer()
        });
        let source = verified(&broker, &spec).await;
        foreign.publish_numbers(&queue, 0..20).await;

        let (mut first, first_state) = open(&source, 10).await;
        let (mut second, _) = open(&source, 20).await;
        let taken = take(&mut first, 10).await;
        assert_eq!(bodies(&taken), numbers(0..10));
        let acked = [1, 3].map(|index: usize| Ack {
            tag: taken[index].tag(),
            multiple: false,
        });
        first.control.acknowledge(&acked);
        first.control.barrier().await.expect("processed");
        first.control.close().await;
        assert!(first_state.has_ended());
        assert!(first.deliveries.next().await.is_none(), "no error at close");

        let rest = take(&mut second, 18).await;
        let mut expected = numbers(0..20);
        expected.retain(|body| body != "1" && body != "3");
        assert_eq!(bodies(&rest), expected, "{queue_type:?}");
        for (place, delivery) in rest.iter().enumerate() {
            assert_eq!(
                delivery.is_redelivered(),
                // Two acknowledgements had let two more arrive.
                place < 10,
                "{queue_type:?} {place}"
            );
        }
        second.control.close().await;
        foreign.delete(&queue).await;
    }
}

#[tokio::test]
async fn unsettled_deliveries_never_exceed_the_credits() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let queue = unique("credits");
    let source = verified(&broker, &declared(&queue, |q| q.durable())).await;
    foreign.publish_numbers(&queue, 0..10).await;
    let (mut session, _) = open(&source, 3).await;
    let taken = take(&mut session, 3).await;
    // Everything else is still ready: the broker counts it after the answer to the barrier.
    session.control.barrier().await.expect("processed");
    assert_eq!(foreign.ready(&queue).await, 7);
    session.control.acknowledge(&[Ack {
        tag: taken[2].tag(),
        multiple: true,
    }]);
    assert_eq!(bodies(&take(&mut session, 3).await), numbers(3..6));
    session.control.close().await;
    foreign.delete(&queue).await;
}

#[tokio::test]
async fn a_session_nobody_holds_gives_its_messages_back_in_order() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    for queue_type in BOTH {
        let queue = unique("dropped");
        let spec = declared(&queue, |q| {
            q.durable().of_type(queue_type).single_active_consumer()
        });
        let source = verified(&broker, &spec).await;
        foreign.publish_numbers(&queue, 0..10).await;
        let (mut first, state) = open(&source, 5).await;
        let (mut second, _) = open(&source, 10).await;
        take(&mut first, 5).await;
        drop(first);
        state.ended().await;
        assert_eq!(bodies(&take(&mut second, 10).await), numbers(0..10));
        second.control.close().await;
        foreign.delete(&queue).await;
    }
}

#[tokio::test]
async fn a_session_ended_by_its_owner_gives_its_messages_back() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let queue = unique("ended");
    let spec = declared(&queue, |q| q.durable().single_active_consumer());
    let source = verified(&broker, &spec).await;
    foreign.publish_numbers(&queue, 0..5).await;
    let (mut first, state) = open(&source, 5).await;
    let (mut second, _) = open(&source, 5).await;
    let taken = take(&mut first, 5).await;
    state.end();
    assert!(matches!(
        first.deliveries.next().await,
        Some(Err(SourceError::Unavailable { .. }))
    ));
    assert!(first.deliveries.next().await.is_none());
    // An acknowledgement of the ended session changes nothing.
    first.control.acknowledge(&[Ack {
        tag: taken[4].tag(),
        multiple: true,
    }]);
    assert!(first.control.barrier().await.is_err());
    first.control.close().await;
    assert_eq!(bodies(&take(&mut second, 5).await), numbers(0..5));
    second.control.close().await;
    foreign.delete(&queue).await;
}

#[tokio::test]
async fn a_queue_that_is_deleted_ends_its_session_with_an_error() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    for queue_type in BOTH {
        let queue = unique("deleted");
        let spec = declared(&queue, |q| q.durable().of_type(queue_type));
        let source = verified(&broker, &spec).await;
        let (mut session, state) = open(&source, 5).await;
        foreign.delete(&queue).await;
        match session.deliveries.next().await {
            Some(Err(SourceError::Unavailable { what, .. })) => assert!(what.contains(&queue)),
            other => panic!("{:?}", other.map(|batch| batch.map(|batch| batch.len()))),
        }
        assert!(session.deliveries.next().await.is_none());
        assert!(state.has_ended());
        session.control.close().await;
    }
}

#[tokio::test]
async fn an_acknowledgement_of_an_unknown_delivery_ends_the_session_with_an_error() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let queue = unique("unknown-tag");
    let source = verified(&broker, &declared(&queue, |q| q.durable())).await;
    let (mut session, state) = open(&source, 5).await;
    session.control.acknowledge(&[Ack {
        tag: DeliveryTag(77),
        multiple: false,
    }]);
    assert!(session.control.barrier().await.is_err());
    assert!(session.deliveries.next().await.expect("an error").is_err());
    assert!(state.has_ended());
    foreign.delete(&queue).await;
}

#[tokio::test]
async fn barriers_can_be_asked_for_at_the_same_time_and_take_nothing_from_the_queue() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    for queue_type in BOTH {
        let queue = unique("barriers");
        let spec = declared(&queue, |q| {
            q.durable().of_type(queue_type).single_active_consumer()
        });
        let source = verified(&broker, &spec).await;
        foreign.publish_numbers(&queue, 0..400).await;
        let (mut session, _) = open(&source, 50).await;
        // The queue is never empty and the spare consumer has credits of its own: if it were given
        // anything, messages would be missing here.
        let mut seen = Vec::new();
        let mut barriers = Vec::new();
        while seen.len() < 400 {
            let batch = session
                .deliveries
                .next()
                .await
                .expect("goes on")
                .expect("no error");
            let acks: Vec<_> = batch
                .iter()
                .map(|delivery| Ack {
                    tag: delivery.tag(),
                    multiple: false,
                })
                .collect();
            session.control.acknowledge(&acks);
            barriers.extend((0..10).map(|_| session.control.barrier()));
            seen.extend(bodies(&batch));
        }
        for barrier in barriers {
            barrier.await.expect("processed");
        }
        assert_eq!(seen, numbers(0..400), "{queue_type:?}");
        session.control.barrier().await.expect("processed");
        session.control.close().await;
        assert_eq!(foreign.ready(&queue).await, 0);
        foreign.delete(&queue).await;
    }
}

#[tokio::test]
async fn parking_keeps_every_property_and_the_type_of_every_header() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let queue = unique("parking");
    let (exchange, parking_queue) = (format!("{queue}-dlx"), format!("{queue}-parked"));
    let spec = declared(&queue, |q| q.durable().parking(&exchange, &parking_queue));
    let source = verified(&broker, &spec).await;
    let sent = BasicProperties::default()
        .with_content_type("application/json".into())
        .with_content_encoding("identity".into())
        .with_headers(every_type())
        .with_delivery_mode(1)
        .with_priority(3)
        .with_correlation_id("correlation".into())
        .with_reply_to("reply".into())
        .with_expiration("60000".into())
        .with_message_id("id-9".into())
        .with_timestamp(1_700_000_000)
        .with_type("order".into())
        .with_user_id("guest".into())
        .with_app_id("app".into())
        .with_cluster_id("cluster".into());
    foreign.publish(&queue, b"poison", sent.clone()).await;
    let (mut session, _) = open(&source, 5).await;
    let poison = take(&mut session, 1).await.remove(0);
    let parking = broker.parking(&spec).expect("it has a parking place");
    parking.park(letter(poison)).await.expect("parked");

    let parked = foreign.get(&parking_queue).await.expect("a parked message");
    assert_eq!(parked.data, b"poison");
    let mut headers = every_type();
    for (name, value) in [
        ("laneway-reason", AMQPValue::LongString("permanent".into())),
        ("laneway-attempts", AMQPValue::LongLongInt(3)),
        ("laneway-endpoint", AMQPValue::LongString("orders".into())),
        (
            "laneway-queue",
            AMQPValue::LongString("orders-queue".into()),
        ),
        (
            "laneway-detail",
            AMQPValue::LongString("no such order".into()),
        ),
        (
            "laneway-parked-at",
            AMQPValue::LongLongInt(1_700_000_000_123),
        ),
    ] {
        headers.insert(name.into(), value);
    }
    let properties = &parked.properties;
    assert_eq!(properties.headers().as_ref(), Some(&headers));
    assert_eq!(*properties.delivery_mode(), Some(2));
    assert_eq!(*properties.expiration(), None, "it must not expire there");
    assert_eq!(properties.content_type(), sent.content_type());
    assert_eq!(properties.content_encoding(), sent.content_encoding());
    assert_eq!(properties.priority(), sent.priority());
    assert_eq!(properties.correlation_id(), sent.correlation_id());
    assert_eq!(properties.reply_to(), sent.reply_to());
    assert_eq!(properties.message_id(), sent.message_id());
    assert_eq!(properties.timestamp(), sent.timestamp());
    assert_eq!(properties.kind(), sent.kind());
    assert_eq!(properties.user_id(), sent.user_id());
    assert_eq!(properties.app_id(), sent.app_id());
    assert_eq!(properties.cluster_id(), sent.cluster_id());

    session.control.close().await;
    foreign.delete(&queue).await;
    foreign.delete(&parking_queue).await;
    foreign.delete_exchange(&exchange).await;
}

#[tokio::test]
async fn parking_is_refused_while_the_exchange_is_missing_or_leads_nowhere() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let queue = unique("no-parking");
    let exchange = format!("{queue}-dlx");
    foreign.declare(&queue, FieldTable::default()).await;
    let spec = existing(&queue, |q| q.durable().parking(&exchange, &queue));
    let parking = broker.parking(&spec).expect("it has a parking place");
    let poison = || {
        let state = SessionState::start();
        letter(Delivery::new(Envelope::default(), state, DeliveryTag(1)))
    };
    match parking.park(poison()).await {
        Err(ParkError::Refused(why)) => assert!(why.contains(&exchange), "{why}"),
        other => panic!("{other:?}"),
    }
    foreign.declare_exchange(&exchange, None).await;
    match parking.park(poison()).await {
        Err(ParkError::Refused(why)) => assert!(why.contains("no route"), "{why}"),
        other => panic!("{other:?}"),
    }
    foreign.declare_exchange(&exchange, Some(&queue)).await;
    parking.park(poison()).await.expect("parked");
    assert_eq!(foreign.ready(&queue).await, 1);
    foreign.delete(&queue).await;
    foreign.delete_exchange(&exchange).await;
}

#[tokio::test]
async fn a_full_queue_that_rejects_refuses_the_message() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let queue = unique("full");
    let mut arguments = FieldTable::default();
    arguments.insert("x-max-length".into(), AMQPValue::LongInt(1));
    arguments.insert(
        "x-overflow".into(),
        AMQPValue::LongString("reject-publish".into()),
    );
    foreign.declare(&queue, arguments).await;
    let publisher = broker.publisher();
    publisher
        .publish(to_queue(&queue, "1"))
        .await
        .expect("sent");
    match publisher.publish(to_queue(&queue, "2")).await {
        Err(PublishError::Refused(why)) => assert!(why.contains("nack"), "{why}"),
        other => panic!("{other:?}"),
    }
    foreign.get(&queue).await.expect("a message");
    publisher
        .publish(to_queue(&queue, "3"))
        .await
        .expect("sent");
    foreign.delete(&queue).await;
}

#[tokio::test]
async fn exactly_the_unroutable_messages_are_refused() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let queue = unique("unroutable");
    foreign.declare(&queue, FieldTable::default()).await;
    let publisher = broker.publisher();
    for _ in 0..5 {
        let publishing = (0..200).map(|number| {
            let nowhere = number % 10 == 3;
            let to = if nowhere {
                "laneway-no-such-queue"
            } else {
                &queue
            };
            let sent = publisher.publish(to_queue(to, &number.to_string()));
            async move { (nowhere, sent.await) }
        });
        for (nowhere, result) in futures::future::join_all(publishing).await {
            match result {
                Ok(()) => assert!(!nowhere),
                Err(PublishError::Refused(why)) => {
                    assert!(nowhere && why.contains("no route"), "{why}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(foreign.ready(&queue).await, 5 * 180);
    foreign.delete(&queue).await;
}

#[tokio::test]
async fn a_missing_exchange_refuses_only_the_messages_sent_to_it() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let queue = unique("no-exchange");
    foreign.declare(&queue, FieldTable::default()).await;
    let publisher = broker.publisher();
    let publishing = (0..100).map(|number| {
        let mut outgoing = to_queue(&queue, &number.to_string());
        if number % 5 == 0 {
            outgoing.destination = Destination::Exchange {
                exchange: "laneway-no-such-exchange".into(),
                routing_key: "x".into(),
            };
        }
        let sent = publisher.publish(outgoing);
        async move { (number % 5 == 0, sent.await) }
    });
    for (missing, result) in futures::future::join_all(publishing).await {
        match result {
            Ok(()) => assert!(!missing),
            Err(PublishError::Refused(why)) => {
                assert!(missing && why.contains("laneway-no-such-exchange"), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(foreign.ready(&queue).await, 80);
    foreign.delete(&queue).await;
}

#[tokio::test]
async fn an_exception_of_a_channel_leaves_its_connection_in_use() {
    let url = shared_url();
    let host = url.rsplit('@').next().expect("an URL");
    let host = host.strip_prefix("amqp://").unwrap_or(host);
    let host = host.trim_end_matches('/');
    let proxy = Proxy::to(host);
    let broker = RabbitMq::at(url.replace(host, &proxy.address().to_string()));
    let publisher = broker.publisher();
    for _ in 0..50 {
        let mut outgoing = to_queue("unused", "");
        outgoing.destination = Destination::Exchange {
            exchange: "laneway-no-such-exchange".into(),
            routing_key: "x".into(),
        };
        let result = publisher.publish(outgoing).await;
        assert!(
            matches!(result, Err(PublishError::Refused(_))),
            "{result:?}"
        );
    }
    assert_eq!(proxy.accepted(), 1);
}

#[tokio::test]
async fn what_amqp_cannot_say_is_an_error_and_no_panic() {
    let broker = RabbitMq::at(shared_url());
    let publisher = broker.publisher();
    let long = "x".repeat(256);
    let mut with_long_id = to_queue("q", "");
    with_long_id.envelope.id = Some(long.as_str().into());
    let mut with_other = to_queue("q", "");
    with_other.envelope.headers.insert("h", HeaderValue::Other);
    for outgoing in [with_long_id, with_other, to_queue(&long, "")] {
        let result = publisher.publish(outgoing).await;
        assert!(matches!(result, Err(PublishError::Encode(_))), "{result:?}");
    }
    let source = broker.source(&declared(&long, |q| q));
    assert!(text_of(&source.verify().await.expect_err("too long")[0]).0);
    let opened = source.open(SessionState::start(), 1).await;
    assert!(text_of(&opened.err().expect("too long")).0);
}

fn with_userinfo(userinfo: &str) -> String {
    let url = shared_url();
    let host = url.rsplit('@').next().expect("a host");
    let host = host.strip_prefix("amqp://").unwrap_or(host);
    format!("amqp://{userinfo}@{host}")
}

#[tokio::test]
async fn refusals_name_the_setting_and_never_the_password() {
    let nowhere = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = nowhere.local_addr().expect("bound").port();
    drop(nowhere);
    let vhost = format!("{}/laneway-no-such-vhost", with_userinfo("guest:guest"));
    for (url, refused, contains) in [
        (with_userinfo("guest:sesame"), true, "password in `url`"),
        (vhost, true, "virtual host `laneway-no-such-vhost`"),
        (
            format!("amqp://guest:sesame@127.0.0.1:{port}"),
            false,
            "127.0.0.1:",
        ),
        ("http://guest:sesame@127.0.0.1".to_owned(), true, "url: "),
    ] {
        let broker = RabbitMq::at(&url);
        let source = broker.source(&existing("q", |q| q));
        let mut errors = source.verify().await.expect_err("it cannot work");
        let opened = source.open(SessionState::start(), 1).await;
        errors.push(opened.err().expect("it cannot work"));
        for error in errors {
            let (was_refused, text) = text_of(&error);
            assert_eq!(was_refused, refused, "{text}");
            assert!(text.contains(contains), "{text}");
            assert!(
                !format!("{error:?} {broker:?}").contains("sesame"),
                "{error:?}"
            );
        }
        let published = broker.publisher().publish(to_queue("q", "")).await;
        match published {
            Err(PublishError::Refused(why)) => {
                assert!(why.contains(contains) && !why.contains("sesame"), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn verify_lists_every_difference() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let queue = unique("differs");
    let (exchange, parked) = (format!("{queue}-dlx"), format!("{queue}-parked"));

    // Missing, and owned by somebody else.
    let spec = existing(&queue, |q| q.durable().parking(&exchange, &parked));
    let errors = broker
        .source(&spec)
        .verify()
        .await
        .expect_err("nothing is there");
    let texts: Vec<_> = errors.iter().map(text_of).collect();
    assert_eq!(texts.len(), 3, "{texts:?}");
    for ((refused, text), name) in texts.iter().zip([&queue, &exchange, &parked]) {
        assert!(*refused && text.contains(name.as_str()), "{text}");
    }
    let opened = broker.source(&spec).open(SessionState::start(), 1).await;
    let (refused, text) = text_of(&opened.err().expect("nothing is there"));
    assert!(refused && text.contains(&queue), "{text}");

    // There, and different: one argument of the queue, the type of the parking queue.
    foreign.declare(&queue, FieldTable::default()).await;
    foreign.declare(&parked, FieldTable::default()).await;
    let spec = declared(&queue, |q| {
        q.quorum()
            .single_active_consumer()
            .parking(&exchange, &parked)
    });
    let errors = broker.source(&spec).verify().await.expect_err("it differs");
    let texts: Vec<_> = errors.iter().map(text_of).collect();
    assert_eq!(texts.len(), 2, "{texts:?}");
    for ((refused, text), name) in texts.iter().zip([&queue, &parked]) {
        assert!(*refused && text.contains(name.as_str()), "{text}");
        assert!(text.contains("inequivalent arg"), "{text}");
    }
    let spec = declared(&queue, |q| q.durable().single_active_consumer());
    let errors = broker.source(&spec).verify().await.expect_err("it differs");
    let (refused, text) = text_of(&errors[0]);
    assert!(
        refused && text.contains("x-single-active-consumer") && text.contains(&queue),
        "{text}"
    );

    // The refusals have not harmed the connection; what is as declared is verified, again and again.
    let spec = declared(&queue, |q| q.durable());
    let source = verified(&broker, &spec).await;
    source.verify().await.expect("verified again");
    foreign.delete(&queue).await;
    foreign.delete(&parked).await;
    foreign.delete_exchange(&exchange).await;
}

/// The smallest executor there is.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn the_ports_work_on_any_executor() {
    // No tokio runtime here: the futures bring none and need none.
    let broker = RabbitMq::at(shared_url());
    let queue = unique("executor");
    let spec = declared(&queue, |q| q);
    block_on(async {
        let source = verified(&broker, &spec).await;
        let sent = broker.publisher().publish(to_queue(&queue, "here")).await;
        sent.expect("sent");
        let (mut session, _) = open(&source, 1).await;
        let taken = take(&mut session, 1).await;
        session.control.acknowledge(&[Ack {
            tag: taken[0].tag(),
            multiple: false,
        }]);
        session.control.barrier().await.expect("processed");
        session.control.close().await;
        broker.close().await;
    });
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        Foreign::connect(&shared_url()).await.delete(&queue).await;
        // The last handle may go anywhere, also where waiting is not allowed.
        let broker = RabbitMq::at(shared_url());
        broker
            .source(&existing("laneway-none", |q| q))
            .verify()
            .await
            .expect_err("missing");
        drop(broker);
    });
}

#[tokio::test]
async fn closing_the_handle_closes_sessions_without_an_error() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let queue = unique("close-handle");
    let source = verified(&broker, &declared(&queue, |q| q.durable())).await;
    foreign.publish_numbers(&queue, 0..3).await;
    let (mut session, state) = open(&source, 5).await;
    take(&mut session, 3).await;
    broker.close().await;
    assert!(session.deliveries.next().await.is_none());
    assert!(state.has_ended());
    session.control.close().await;
    let opened = source.open(SessionState::start(), 5).await;
    assert!(
        text_of(&opened.err().expect("closed"))
            .1
            .contains("has been closed")
    );
    let published = broker.publisher().publish(to_queue(&queue, "")).await;
    assert!(matches!(published, Err(PublishError::Refused(_))));
    broker.close().await;
    assert_eq!(foreign.ready(&queue).await, 3);
    foreign.delete(&queue).await;
}

#[tokio::test]
async fn dropping_an_unfinished_open_leaves_no_consumer_behind() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let queue = unique("dropped-open");
    let spec = declared(&queue, |q| q.durable().single_active_consumer());
    let source = verified(&broker, &spec).await;
    foreign.publish_numbers(&queue, 0..5).await;
    let dropped = SessionState::start();
    {
        let mut opening = source.open(Arc::clone(&dropped), 5);
        // Polled once, so that it has begun.
        assert!(futures::poll!(&mut opening).is_pending());
    }
    dropped.ended().await;
    let (mut session, _) = open(&source, 5).await;
    assert_eq!(bodies(&take(&mut session, 5).await), numbers(0..5));
    session.control.close().await;
    foreign.delete(&queue).await;
}

#[tokio::test]
async fn a_publish_is_stamped_persistent() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let queue = unique("persistent");
    foreign.declare(&queue, FieldTable::default()).await;
    let mut outgoing = to_queue(&queue, "x");
    outgoing.envelope.sent_at = Some(SystemTime::now());
    broker.publisher().publish(outgoing).await.expect("sent");
    let got = foreign.get(&queue).await.expect("a message");
    assert_eq!(*got.properties.delivery_mode(), Some(2));
    assert!(got.properties.timestamp().is_some());
    foreign.delete(&queue).await;
}
