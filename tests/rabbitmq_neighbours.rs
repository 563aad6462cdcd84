//! Keys beside one another on RabbitMQ, on both kinds of queues: one that fails, backs off or is slow harms
//! nobody beside it.
#![cfg(feature = "rabbitmq")]

use std::time::Duration;

use laneway::prelude::*;
use laneway::transport::provenance;
use laneway::{EventKind, WaitReason};
use lapin::types::AMQPValue;

#[path = "support/orders.rs"]
mod orders;
#[path = "support/stand.rs"]
mod stand;
mod support;
#[path = "support/workload.rs"]
mod workload;
use orders::{Gate, NO_ACK_TIMEOUT, Seen, handled, snapshot, started, stop};
use stand::{Stand, on_both};
use support::broker::shared_url;
use workload::{Numbered, Step};

/// Case O3.
#[tokio::test(flavor = "multi_thread")]
async fn failing_keys_of_one_lane_do_not_disturb_each_others_attempts() {
    on_both(async |queue_type| {
        let stand = Stand::new(&shared_url(), "lane-mates", queue_type);
        let handler = stand.handler(|message, _| match message.seq {
            1 => Step::Fail(Duration::from_millis(1)),
            _ => Step::Succeed(Duration::ZERO),
        });
        let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| {
            e.lanes(1)
                .max_delivery_attempts(3)
                .backoff(Backoff::constant(Duration::from_millis(3)))
                .handler(handler)
        }))
        .await;
        stand.publish(10, 2).await;
        stand.until_settled(&bus).await;
        let foreign = stand.foreign().await;
        stop(&bus).await;
        for _ in 0..2 {
            let parked = foreign
                .get(&stand.parking())
                .await
                .expect("one of each key");
            let headers = parked.properties.headers().clone().unwrap_or_default();
            let attempts = headers.inner().get(provenance::ATTEMPTS).cloned();
            assert!(
                matches!(attempts, Some(AMQPValue::LongLongInt(3))),
                "{attempts:?}"
            );
            let message: Numbered = serde_json::from_slice(&parked.data).expect("as published");
            stand.ledger.parked(&message.key, message.seq);
        }
        let (copies, figures) = stand.parked_and_figures().await;
        assert!(copies.is_empty(), "{copies:?}");
        // Six failed ones, eight of the others, and the last message.
        assert_eq!((figures.attempts, figures.handled), (6 + 8 + 1, 8 + 1));
    })
    .await;
}

/// Case O4.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_backs_off_delays_no_other_key_of_its_lane() {
    on_both(async |queue_type| {
        let stand = Stand::new(&shared_url(), "backs-off", queue_type);
        let handler = stand.handler(|message, _| match &*message.key {
            "failing" => Step::Fail(Duration::ZERO),
            _ => Step::Succeed(Duration::ZERO),
        });
        let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| {
            e.lanes(1)
                .backoff(Backoff::constant(Duration::from_secs(3_600)))
                .ack_timeout(NO_ACK_TIMEOUT)
                .handler(handler)
        }))
        .await;
        let seen = Seen::of(&bus);
        stand.send_all("failing", 1..=3).await;
        seen.until("the failed attempt", 1, |kind| {
            matches!(kind, EventKind::AttemptFailed { .. })
        })
        .await;
        stand.send_all("other", 1..=100).await;
        handled(&bus, 100).await;
        let waiting = snapshot(&bus).await.waiting_keys;
        assert_eq!(waiting.len(), 1);
        assert_eq!(
            (waiting[0].why, waiting[0].behind),
            (WaitReason::BackingOff, 2)
        );
        stop(&bus).await;
        // What backed off is still there, first, for whoever comes next.
        let succeeding = stand.handler(|_, _| Step::Succeed(Duration::ZERO));
        let next = started(stand.bus(RabbitMq::at(&stand.url), |e| e.handler(succeeding))).await;
        let (_, figures) = stand.finish(next).await;
        assert_eq!((figures.handled, figures.duplicates), (104, 0));
    })
    .await;
}

/// Case O5, as far as it holds without an inbox.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_key_holds_up_nobody_while_there_are_credits() {
    on_both(async |queue_type| {
        let stand = Stand::new(&shared_url(), "slow", queue_type);
        let gate = Gate::closed();
        let (inner, held) = (
            stand.handler(|_, _| Step::Succeed(Duration::ZERO)),
            gate.clone(),
        );
        let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| {
            e.concurrency(256)
                .max_in_flight(256)
                .handler_timeout(None)
                .handler(move |message: Numbered, cx: Context| {
                    let (inner, held) = (inner.clone(), held.clone());
                    async move {
                        if message.key == "slow" {
                            held.pass().await;
                        }
                        laneway::Handler::handle(&inner, message, cx).await
                    }
                })
        }))
        .await;
        stand.send_all("slow", 1..=100).await;
        gate.until_waiting(1).await;
        stand.publish(2_000, 50).await;
        handled(&bus, 2_000).await;
        assert_eq!(snapshot(&bus).await.in_flight, 100);
        gate.open();
        let (_, figures) = stand.finish(bus).await;
        assert_eq!((figures.handled, figures.duplicates), (2_101, 0));
    })
    .await;
}
