//! RabbitMQ wants each delivery acknowledged within its `consumer_timeout`, and closes the channel of who
//! does not. A session is renewed before; where the settings do not fit, the reason names them, and
//! consumption goes on.

#![cfg(feature = "rabbitmq")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::{EndpointBuilder, EventKind};

#[path = "support/orders.rs"]
mod orders;
mod support;
#[path = "support/workload.rs"]
mod workload;
use orders::{Seen, send, started, stop, within};
use support::broker::PrivateBroker;
use workload::{KEY_HEADER, Numbered, Scripted, Step};

const QUEUE_TYPES: [QueueType; 2] = [QueueType::Classic, QueueType::Quorum];

/// A broker that wants acknowledgements within 2 s, and looks twice a second. (By default it looks once a
/// minute.)
fn impatient_broker() -> PrivateBroker {
    let broker = PrivateBroker::start();
    broker.ctl(&[
        "eval",
        "application:set_env(rabbit, consumer_timeout, 2000), application:set_env(rabbit, channel_tick_interval, 500).",
    ]);
    broker
}

async fn bus(
    broker: &PrivateBroker,
    queue: &str,
    queue_type: QueueType,
    describe: impl FnOnce(EndpointBuilder) -> EndpointBuilder,
) -> Bus {
    let parking = (format!("{queue}-dlx"), format!("{queue}-parked"));
    let builder = Bus::builder()
        .rabbitmq(RabbitMq::at(broker.url()))
        .topology(|t| {
            t.queue(queue, |q| {
                q.durable()
                    .of_type(queue_type)
                    .single_active_consumer()
                    .parking(&parking.0, &parking.1)
            })
        })
        .endpoint(queue, |e| {
            describe(
                e.ordered_by_header(KEY_HEADER)
                    .transport_affinity(TransportAffinity::SingleActiveConsumer),
            )
        })
        .publishes::<Numbered>(|r| r.to_queue(queue).keyed_by(|m| m.key.clone()));
    started(builder).await
}

/// Waits until so many messages have been handled.
async fn until_handled(bus: &Bus, messages: u64) {
    within("the messages to be handled", async {
        while bus.snapshot().await.endpoints[0].handled < messages {
            // Nothing tells when a counter has changed.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

fn lost_for(kind: &EventKind, part: &str) -> bool {
    matches!(kind, EventKind::Disconnected { reason, .. } if reason.contains(part))
}

/// Case O13.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_outlasts_the_brokers_patience_costs_a_session_whose_end_names_the_setting()
{
    let broker = impatient_broker();
    for queue_type in QUEUE_TYPES {
        let ledger = OrderLedger::in_memory();
        let first = Arc::new(AtomicBool::new(true));
        let handler = Scripted::new(&ledger, move |message, _| match &*message.key {
            "slow" if first.swap(false, Ordering::Relaxed) => Step::Hang,
            _ => Step::Succeed(Duration::ZERO),
        });
        let queue = format!("impatient-{queue_type:?}");
        let bus = bus(&broker, &queue, queue_type, |e| e.handler(handler)).await;
        let seen = Seen::of(&bus);
        for seq in 1..=20 {
            send(&bus, &ledger, "slow", seq).await;
            send(&bus, &ledger, "quick", seq).await;
        }
        seen.until("the broker to lose its patience", 1, |kind| {
            lost_for(
                kind,
                "`ack_timeout` is longer than the broker's `consumer_timeout`",
            )
        })
        .await;
        until_handled(&bus, 40).await;
        stop(&bus).await;
        let figures = ledger.figures().expect("in memory");
        figures.assert_ordered();
        assert_eq!((figures.lost, figures.handled), (0, 40), "{queue_type:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_is_renewed_before_the_broker_loses_its_patience() {
    let broker = impatient_broker();
    for queue_type in QUEUE_TYPES {
        let ledger = OrderLedger::in_memory();
        let handler = Scripted::new(&ledger, |message, _| match &*message.key {
            "slow" => Step::Succeed(Duration::from_millis(100)),
            _ => Step::Succeed(Duration::ZERO),
        });
        let queue = format!("renewed-{queue_type:?}");
        let bus = bus(&broker, &queue, queue_type, |e| {
            e.handler(handler)
                .max_in_flight(200)
                .max_delivery_attempts(2)
                .handler_timeout(Duration::from_millis(500))
                .ack_timeout(Duration::from_secs(2))
        })
        .await;
        let seen = Seen::of(&bus);
        // Six seconds of work for one key, all of it received at once.
        for seq in 1..=60 {
            send(&bus, &ledger, "slow", seq).await;
            send(&bus, &ledger, "quick", seq).await;
        }
        until_handled(&bus, 120).await;
        let renewed = |kind: &EventKind| matches!(kind, EventKind::SessionRenewed { .. });
        assert!(seen.count(renewed) >= 2, "{queue_type:?}");
        assert_eq!(seen.count(|kind| lost_for(kind, "")), 0, "{queue_type:?}");
        stop(&bus).await;
        let figures = ledger.figures().expect("in memory");
        figures.assert_ordered();
        let expected = (0, 120, 0);
        assert_eq!(
            (figures.lost, figures.handled, figures.duplicates),
            expected,
            "{queue_type:?}"
        );
    }
}
