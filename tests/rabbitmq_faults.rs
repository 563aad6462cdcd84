//! The RabbitMQ transport's promises when connections are closed, brokers die or block. Each test
//! starts a broker of its own and breaks it.
#![cfg(feature = "rabbitmq")]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use laneway::actors::port::{
    Ack, DeadLetter, Destination, OpenSession, Outgoing, ParkError, PublishError, Source,
    SourceError,
};
use laneway::actors::{Delivery, Envelope, MessageId, PoisonReason, SessionState};
use laneway::topology::{QueueSpec, QueueType, Topology};
use laneway::transport::Transport;
use laneway::transport::rabbitmq::RabbitMq;
use lapin::types::FieldTable;

use support::broker::{PrivateBroker, unique};
use support::foreign::Foreign;

const BOTH: [QueueType; 2] = [QueueType::Classic, QueueType::Quorum];

/// Private brokers one at a time: several would only slow one another down.
static ONE_BROKER: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

fn declared(name: &str, describe: impl FnOnce(QueueSpec) -> QueueSpec) -> QueueSpec {
    Topology::default().queue(name, describe).queues()[0].clone()
}

async fn verified(broker: &RabbitMq, spec: &QueueSpec) -> Arc<dyn Source> {
    let source = broker.source(spec);
    source.verify().await.expect("verified");
    source
}

async fn open(source: &Arc<dyn Source>, credits: u16) -> (OpenSession, Arc<SessionState>) {
    let state = SessionState::start();
    let session = source.open(Arc::clone(&state), credits).await;
    (session.expect("opened"), state)
}

async fn take(session: &mut OpenSession, count: usize) -> Vec<Delivery> {
    let mut taken = Vec::new();
    while taken.len() < count {
        let batch = session.deliveries.next().await.expect("goes on");
        taken.extend(batch.expect("no error"));
    }
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

fn single(delivery: &Delivery) -> Ack {
    Ack {
        tag: delivery.tag(),
        multiple: false,
    }
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

/// Reads a lost session to its end: one error, then nothing, and nobody may start any more.
async fn expect_loss(mut session: OpenSession, state: &SessionState) {
    loop {
        match session.deliveries.next().await {
            Some(Ok(_)) => {}
            Some(Err(SourceError::Unavailable { .. })) => break,
            other => panic!("{:?}", other.map(|batch| batch.map(|batch| batch.len()))),
        }
    }
    assert!(session.deliveries.next().await.is_none());
    assert!(state.has_ended() && !state.may_start());
    assert!(session.control.barrier().await.is_err());
    session.control.close().await;
}

#[tokio::test]
async fn connections_closed_by_the_broker_end_their_sessions_and_new_ones_work() {
    let _one = ONE_BROKER.lock().await;
    let node = PrivateBroker::start();
    let broker = RabbitMq::at(node.url());
    for queue_type in BOTH {
        let queue = unique("closed");
        let spec = declared(&queue, |q| {
            q.durable().of_type(queue_type).single_active_consumer()
        });
        let source = verified(&broker, &spec).await;
        let publisher = broker.publisher();
        for number in 0..10 {
            let sent = publisher.publish(to_queue(&queue, &number.to_string()));
            sent.await.expect("sent");
        }
        let (mut session, state) = open(&source, 5).await;
        let held = take(&mut session, 5).await;
        node.close_all_connections();
        state.ended().await;
        let old = Arc::clone(&session.control);
        expect_loss(session, &state).await;

        let (mut session, state) = open(&source, 10).await;
        // The tags of the lost session exist in this one too; they must not reach it.
        old.acknowledge(&held.iter().map(single).collect::<Vec<_>>());
        let again = take(&mut session, 10).await;
        assert_eq!(bodies(&again), numbers(0..10), "{queue_type:?}");
        assert!(again[0].is_redelivered());
        old.acknowledge(&held.iter().map(single).collect::<Vec<_>>());
        session.control.barrier().await.expect("processed");
        session.control.close().await;
        assert!(state.has_ended());
        publisher
            .publish(to_queue(&queue, "10"))
            .await
            .expect("sent");
        let (mut session, _) = open(&source, 20).await;
        assert_eq!(bodies(&take(&mut session, 11).await), numbers(0..11));
        session.control.close().await;
    }
}

#[tokio::test]
async fn nothing_that_was_acknowledged_before_a_barrier_comes_back() {
    let _one = ONE_BROKER.lock().await;
    let node = PrivateBroker::start();
    let broker = RabbitMq::at(node.url());
    for queue_type in BOTH {
        let queue = unique("barrier");
        let spec = declared(&queue, |q| {
            q.durable().of_type(queue_type).single_active_consumer()
        });
        let source = verified(&broker, &spec).await;
        let foreign = Foreign::connect(&node.url()).await;
        for round in 0..3 {
            foreign.publish_numbers(&queue, 0..310).await;
            let (mut session, state) = open(&source, 310).await;
            let taken = take(&mut session, 310).await;
            assert_eq!(bodies(&taken), numbers(0..310), "{queue_type:?} {round}");
            // Singly, and far more than the 32 that the channel of a quorum queue hands on at once.
            let acks: Vec<_> = taken[..300].iter().map(single).collect();
            session.control.acknowledge(&acks);
            session.control.barrier().await.expect("processed");
            if round == 0 {
                session.control.close().await;
            } else {
                node.close_all_connections();
                state.ended().await;
            }
            let (mut session, _) = open(&source, 310).await;
            let rest = take(&mut session, 10).await;
            assert_eq!(bodies(&rest), numbers(300..310), "{queue_type:?} {round}");
            session.control.acknowledge(&[Ack {
                tag: rest[9].tag(),
                multiple: true,
            }]);
            session.control.barrier().await.expect("processed");
            session.control.close().await;
            if round > 0 {
                break;
            }
        }
    }
}

#[tokio::test]
async fn a_broker_that_is_killed_ends_idle_sessions_soon_and_serves_new_ones_after_its_restart() {
    let _one = ONE_BROKER.lock().await;
    let heartbeat = Duration::from_secs(2);
    let mut node = PrivateBroker::start();
    let broker = RabbitMq::at(node.url())
        .heartbeat(heartbeat)
        .operation_timeout(Duration::from_secs(20));
    let sources: Vec<_> = {
        let mut sources = Vec::new();
        for queue_type in BOTH {
            let queue = unique("killed");
            let spec = declared(&queue, |q| q.durable().of_type(queue_type));
            let source = verified(&broker, &spec).await;
            let sent = broker.publisher().publish(to_queue(&queue, "0"));
            sent.await.expect("sent");
            sources.push(source);
        }
        sources
    };
    // A quorum queue that is younger than a second or so when its node is killed can be without a
    // leader for ever after (3.10.8). An orderly restart writes everything down.
    node.stop_app();
    node.start_app();
    let mut sessions = Vec::new();
    for source in &sources {
        let (mut session, state) = open(source, 5).await;
        take(&mut session, 1).await;
        sessions.push((session, state));
    }
    node.kill();
    let killed = Instant::now();
    for (session, state) in sessions {
        expect_loss(session, &state).await;
    }
    assert!(killed.elapsed() < 2 * heartbeat + Duration::from_secs(1));
    let opened = sources[0].open(SessionState::start(), 5).await;
    assert!(matches!(
        opened.err(),
        Some(SourceError::Unavailable { .. })
    ));
    let sent = broker.publisher().publish(to_queue("laneway-none", "x"));
    assert!(matches!(sent.await, Err(PublishError::Refused(_))));

    node.restart();
    for source in &sources {
        let (mut session, _) = open(source, 5).await;
        let again = take(&mut session, 1).await;
        assert!(again[0].is_redelivered());
        session.control.acknowledge(&[single(&again[0])]);
        session.control.barrier().await.expect("processed");
        session.control.close().await;
    }
}

#[tokio::test]
async fn a_broker_that_falls_silent_lets_nothing_start_and_ends_its_sessions() {
    let _one = ONE_BROKER.lock().await;
    let heartbeat = Duration::from_secs(1);
    let node = PrivateBroker::start();
    let broker = RabbitMq::at(node.url())
        .heartbeat(heartbeat)
        .operation_timeout(Duration::from_secs(2));
    let queue = unique("silent");
    let source = verified(&broker, &declared(&queue, |q| q.durable())).await;
    let (session, state) = open(&source, 5).await;
    assert!(state.may_start());
    node.freeze();
    let frozen = Instant::now();
    expect_loss(session, &state).await;
    // A proof lasts a heartbeat, the probe after it another; the closing of the channel, which
    // nobody answers, is bounded too.
    assert!(
        frozen.elapsed() < Duration::from_secs(8),
        "{:?}",
        frozen.elapsed()
    );
    let opened = source.open(SessionState::start(), 5).await;
    assert!(matches!(
        opened.err(),
        Some(SourceError::Unavailable { .. })
    ));
    node.thaw();
    // The connection attempts that nobody answered were given up; a new one succeeds at once.
    let (session, _) = open(&source, 5).await;
    session.control.close().await;
}

#[tokio::test]
async fn a_memory_alarm_blocks_publishing_only_and_nothing_is_sent_late() {
    let _one = ONE_BROKER.lock().await;
    let node = PrivateBroker::start();
    let broker = RabbitMq::at(node.url())
        .operation_timeout(Duration::from_secs(2))
        .confirm_timeout(Duration::from_secs(4));
    let queue = unique("alarm");
    let (exchange, parked) = (format!("{queue}-dlx"), format!("{queue}-parked"));
    let spec = declared(&queue, |q| {
        q.durable()
            .single_active_consumer()
            .parking(&exchange, &parked)
    });
    let source = verified(&broker, &spec).await;
    let foreign = Foreign::connect(&node.url()).await;
    let quiet = unique("quiet");
    foreign.declare(&quiet, FieldTable::default()).await;
    let publisher = broker.publisher();
    let parking = broker.parking(&spec).expect("it has one");
    foreign.publish_numbers(&queue, 0..20).await;
    let (mut session, _) = open(&source, 10).await;
    let mut taken = take(&mut session, 10).await;
    // Both connections are in use before the alarm.
    publisher
        .publish(to_queue(&quiet, "before"))
        .await
        .expect("sent");
    let poison = Arc::new(DeadLetter {
        delivery: Arc::new(taken.remove(0)),
        endpoint: "endpoint".into(),
        queue: "queue".into(),
        key: None,
        reason: PoisonReason::Failed,
        place: laneway::actors::port::Place::Parking,
        detail: String::new(),
        attempts: 5,
        given_up_at: std::time::SystemTime::now(),
    });
    parking.park(Arc::clone(&poison)).await.expect("parked");

    // Raising it takes a second or more, so nothing was confirmed just before.
    node.raise_memory_alarm();
    for round in 0..2 {
        let began = Instant::now();
        let publishing = (0..20).map(|_| publisher.publish(to_queue(&quiet, "during")));
        for result in futures::future::join_all(publishing).await {
            match result {
                Err(PublishError::Refused(why)) => assert!(why.contains("alarm"), "{why}"),
                // Caught half written by the alarm.
                Err(PublishError::Unknown(_)) if round == 0 => {}
                other => panic!("{other:?}"),
            }
        }
        match parking.park(Arc::clone(&poison)).await {
            Err(ParkError::Refused(why)) => assert!(why.contains("alarm"), "{why}"),
            other => panic!("{other:?}"),
        }
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "{:?}",
            began.elapsed()
        );
    }
    // Meanwhile consuming and acknowledging go on.
    session.control.acknowledge(&[Ack {
        tag: taken[8].tag(),
        multiple: true,
    }]);
    session.control.barrier().await.expect("processed");
    let rest = take(&mut session, 10).await;
    assert_eq!(bodies(&rest), numbers(10..20));

    node.end_memory_alarm();
    publisher
        .publish(to_queue(&quiet, "after"))
        .await
        .expect("sent");
    parking.park(poison).await.expect("parked");
    let mut arrived = Vec::new();
    let foreign = Foreign::connect(&node.url()).await;
    while let Some(got) = foreign.get(&quiet).await {
        arrived.push(String::from_utf8_lossy(&got.data).into_owned());
    }
    assert_eq!(
        arrived,
        ["before", "after"],
        "nothing refused is delivered later"
    );
    assert_eq!(
        foreign.ready(&parked).await,
        2,
        "before and after, none between"
    );
    session.control.close().await;
}

#[tokio::test]
async fn an_unconfirmed_publish_is_unknown_and_never_sent_after_it_was_given_up() {
    let _one = ONE_BROKER.lock().await;
    let node = PrivateBroker::start();
    let broker = RabbitMq::at(node.url())
        .operation_timeout(Duration::from_secs(5))
        .confirm_timeout(Duration::from_secs(1));
    let queue = unique("unknown");
    let foreign = Foreign::connect(&node.url()).await;
    foreign.declare(&queue, FieldTable::default()).await;
    let publisher = broker.publisher();
    publisher
        .publish(to_queue(&queue, "first"))
        .await
        .expect("sent");
    node.freeze();
    let may_be_there = match publisher.publish(to_queue(&queue, "second")).await {
        Err(PublishError::Unknown(why)) => {
            assert!(why.contains("no confirm"), "{why}");
            true
        }
        // On a slow machine more than a second has passed since the last confirm, and the broker was
        // asked first whether it reads at all.
        Err(PublishError::Refused(why)) => {
            assert!(why.contains("does not answer"), "{why}");
            false
        }
        other => panic!("{other:?}"),
    };
    node.thaw();
    publisher
        .publish(to_queue(&queue, "third"))
        .await
        .expect("sent");
    // What was written lay in the broker's socket already: unknown is the truth. But it is there once.
    let mut arrived = Vec::new();
    while let Some(got) = foreign.get(&queue).await {
        arrived.push(String::from_utf8_lossy(&got.data).into_owned());
    }
    let seconds = arrived.iter().filter(|body| *body == "second").count();
    assert!(seconds <= usize::from(may_be_there), "{arrived:?}");
    arrived.retain(|body| body != "second");
    assert_eq!(arrived, ["first", "third"]);
}

#[tokio::test]
async fn a_user_with_few_permissions_can_do_what_it_may_and_is_told_the_rest() {
    let _one = ONE_BROKER.lock().await;
    let node = PrivateBroker::start();
    let (queue, exchange) = (unique("few"), unique("few-exchange"));
    let foreign = Foreign::connect(&node.url()).await;
    foreign.declare(&queue, FieldTable::default()).await;
    foreign.declare_exchange(&exchange, Some(&queue)).await;
    node.ctl(&["add_user", "modest", "sesame"]);
    let may_write = format!("^{exchange}$");
    node.ctl(&["set_permissions", "modest", "^$", &may_write, "^$"]);
    let url = node.url().replace("guest:guest", "modest:sesame");
    let broker = RabbitMq::at(url);
    let to_exchange = || Outgoing {
        destination: Destination::Exchange {
            exchange: exchange.as_str().into(),
            routing_key: "key".into(),
        },
        ..to_queue("", "x")
    };
    let publisher = broker.publisher();
    for _ in 0..3 {
        publisher.publish(to_exchange()).await.expect("sent");
    }
    let refused = publisher.publish(to_queue(&queue, "x")).await;
    assert!(
        matches!(refused, Err(PublishError::Refused(_))),
        "{refused:?}"
    );
    publisher.publish(to_exchange()).await.expect("sent");
    assert_eq!(foreign.ready(&queue).await, 4);

    let existing = Topology::default().existing_queue(&queue, |q| q.durable());
    let source = broker.source(&existing.queues()[0]);
    let opened = source.open(SessionState::start(), 1).await;
    match opened.err() {
        Some(SourceError::Refused { what, .. }) => {
            assert!(
                what.contains("permissions") && what.contains(&queue),
                "{what}"
            );
            assert!(!what.contains("modest"), "{what}");
        }
        other => panic!("{other:?}"),
    }
}
