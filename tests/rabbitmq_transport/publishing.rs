//! What the broker did not take is refused, and nothing else is.

use super::*;

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
