//! What a session holds, how it ends, and what comes back then.

use super::*;

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
