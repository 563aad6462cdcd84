//! You will see a program that runs an actix `System` of its own embed Laneway's actors: a supervisor
//! consumes a queue, and at the same time an actor of the program sends messages straight to the lanes.
//! Both kinds of messages of one key are handled strictly in order.
//!
//! `cargo run --release --example actix_embedding [-- --amqp amqp://localhost:5672]`

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::{Actor, ResponseFuture, System};
use laneway::actors::port::{Destination, Outgoing};
use laneway::actors::{
    ConfigActor, Delivery, EndpointHandle, EndpointSettings, EndpointSpec, EndpointSupervisor,
    HandlerSet, KeySource, SendError, SessionState, VerifyWorld,
};
use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::transport::Transport;
use laneway::{Envelope, Topology};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

const KEYS: u64 = 20;
const FROM_QUEUE: u64 = 50;
const DIRECT: u64 = 50;

/// A reading of a meter: the first ones come by the queue, the later ones from an actor.
#[derive(Serialize, Deserialize)]
struct Reading {
    meter: u64,
    seq: u64,
}

impl laneway::Message for Reading {
    const TYPE: &'static str = "reading";
}

/// The program's own actor: sends readings to the lanes of their meters.
struct Gateway {
    endpoint: EndpointHandle,
    /// The actor's own "session": if it ended, what it sent and what has not started would be dropped.
    session: Arc<SessionState>,
    settled: mpsc::UnboundedSender<laneway::Outcome>,
}

impl Actor for Gateway {
    type Context = actix::Context<Self>;
}

#[derive(actix::Message)]
#[rtype(result = "Result<(), SendError>")]
struct Send(Reading);

impl actix::Handler<Send> for Gateway {
    type Result = ResponseFuture<Result<(), SendError>>;

    fn handle(&mut self, Send(reading): Send, _: &mut actix::Context<Self>) -> Self::Result {
        let key = OrderingKey::from(reading.meter);
        let lane = self.endpoint.lane_of(&key);
        let settled = self.settled.clone();
        let session = Arc::clone(&self.session);
        Box::pin(async move {
            let envelope = Envelope::of(&reading, Encoding::MessagePack)
                .expect("cannot fail because a reading has two numbers");
            let delivery = Delivery::direct(envelope, key, session, move |outcome| {
                // An error means that nobody counts any more.
                let _ = settled.send(outcome);
            });
            lane.send(delivery).await // waits while the lane has no free slot
        })
    }
}

async fn run(amqp: Option<String>) -> Result<(), Box<dyn std::error::Error>> {
    let ledger = OrderLedger::in_memory();
    let queue_name = format!("readings-{}", std::process::id());
    let topology = Topology::default().queue(&queue_name, |q| {
        q.durable().single_active_consumer().parking(
            &format!("{queue_name}-dlx"),
            &format!("{queue_name}-parked"),
        )
    });
    let queue = topology.find(&queue_name).expect("named above");
    let transport: Arc<dyn Transport> = match &amqp {
        Some(url) => Arc::new(RabbitMq::at(url)),
        None => Arc::new(MemoryBroker::new()),
    };

    // The endpoint: where deliveries come from, what handles them, how they are ordered.
    let mut handlers = HandlerSet::new();
    let record = ledger.clone();
    handlers.add(move |reading: Reading, cx: laneway::Context| {
        let run = record.run(&reading.meter.to_string(), reading.seq, cx.attempt());
        async move {
            tokio::task::yield_now().await;
            run.end(true);
            Ok(())
        }
    });
    let mut settings = EndpointSettings::named("readings");
    settings.ordering = Some(KeySource {
        header: Some("meter".to_owned()),
        ..KeySource::default()
    });
    let mut spec = EndpointSpec::new(settings, transport.source(queue), handlers);
    spec.parking = transport.parking(queue);

    // The checks of the world, then the supervisor: on this thread's System, lanes included.
    let sources = spec.sources.iter();
    let sources = sources.map(|source| ("readings".to_owned(), Arc::clone(source)));
    let sources = sources.collect();
    let listed = |problems: Vec<laneway::Problem>| {
        let lines: Vec<_> = problems.iter().map(ToString::to_string).collect();
        lines.join("\n")
    };
    ConfigActor
        .start()
        .send(VerifyWorld {
            sources,
            memberships: Vec::new(),
        })
        .await?
        .map_err(listed)?;
    let endpoint = EndpointSupervisor::start(spec).map_err(listed)?;
    endpoint.connected().await?;

    // First half: by the queue.
    let publisher = transport.publisher();
    for seq in 1..=FROM_QUEUE {
        for meter in 0..KEYS {
            let mut envelope = Envelope::of(&Reading { meter, seq }, Encoding::Json)?;
            envelope.set_key("meter", &meter.into());
            let destination = Destination::Queue(queue_name.as_str().into());
            publisher
                .publish(Outgoing {
                    destination,
                    envelope,
                    key: Some(meter.into()),
                })
                .await?;
            ledger.published(&meter.to_string(), seq);
        }
    }
    wait_for_handled(&endpoint, KEYS * FROM_QUEUE).await;

    // Second half: straight to the lanes.
    let (settled, mut outcomes) = mpsc::unbounded_channel();
    let gateway = Gateway {
        endpoint: endpoint.clone(),
        session: SessionState::start(),
        settled,
    }
    .start();
    for seq in FROM_QUEUE + 1..=FROM_QUEUE + DIRECT {
        for meter in 0..KEYS {
            ledger.published(&meter.to_string(), seq);
            gateway.send(Send(Reading { meter, seq })).await??;
        }
    }
    for _ in 0..KEYS * DIRECT {
        let outcome = outcomes.recv().await;
        assert_eq!(outcome, Some(laneway::Outcome::Handled));
    }

    // A lane takes only its own keys, and nothing during a drain.
    let (mine, other) = (
        OrderingKey::from(1_u64),
        some_key_of_another_lane(&endpoint),
    );
    let wrong = endpoint.lane_of(&mine).try_send(reading_for(&other));
    assert!(matches!(wrong, Err(SendError::WrongLane { .. })));
    let lane = endpoint.lane_of(&mine);
    let report = endpoint.drain(Duration::from_secs(5)).await;
    let late = lane.try_send(reading_for(&mine));
    assert!(matches!(late, Err(SendError::Draining(_))));

    if let Some(url) = &amqp {
        RabbitMq::at(url).delete(&topology).await?;
    }
    let figures = ledger.figures()?;
    println!("{figures}");
    println!("drained: {report:?}");
    figures.assert_ordered();
    assert_eq!(figures.handled, KEYS * (FROM_QUEUE + DIRECT));
    Ok(())
}

fn reading_for(key: &OrderingKey) -> Delivery {
    let reading = Reading { meter: 0, seq: 0 };
    let envelope = Envelope::of(&reading, Encoding::Json)
        .expect("cannot fail because a reading has two numbers");
    Delivery::direct(envelope, key.clone(), SessionState::start(), |_| {})
}

fn some_key_of_another_lane(endpoint: &EndpointHandle) -> OrderingKey {
    let first = endpoint.lane_of(&1_u64.into()).index();
    (2_u64..)
        .map(OrderingKey::from)
        .find(|key| endpoint.lane_of(key).index() != first)
        .expect("cannot fail because there are many lanes")
}

/// Waits for the endpoint's own count; its events would tell of failures only.
async fn wait_for_handled(endpoint: &EndpointHandle, count: u64) {
    while endpoint.snapshot().await.handled < count {
        tokio::task::yield_now().await;
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let amqp = match (arguments.next().as_deref(), arguments.next()) {
        (None, None) => None,
        (Some("--amqp"), Some(url)) => Some(url),
        _ => return Err("usage: actix_embedding [--amqp URL]".into()),
    };
    // The program's own System. Handlers do not run on it but on a pool of Laneway's.
    System::new().block_on(run(amqp))
}
