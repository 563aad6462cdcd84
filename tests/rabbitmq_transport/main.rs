//! The RabbitMQ transport's promises on a healthy broker. What happens when brokers and connections
//! fail is in `rabbitmq_faults.rs`.
#![cfg(feature = "rabbitmq")]

mod executors;
mod parking;
mod properties;
mod publishing;
mod refusals;
mod sessions;
#[path = "../support/mod.rs"]
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
