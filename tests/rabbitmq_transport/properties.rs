//! Everything that a message says arrives, of whatever type, from Laneway and from others.

use super::*;

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

pub(super) fn every_type() -> FieldTable {
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
