//! A parked message is whole, or is refused.

use super::properties::every_type;
use super::*;

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
