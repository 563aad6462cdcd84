//! Sessions that end on purpose: renewed before the acknowledgement time-out, and given back for a pause of
//! the endpoint. Either way order and attempts go on where they were.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::{EndpointBuilder, EndpointState, EventKind};

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{ORDERS, PARKED, Seen, handled, orders, send, snapshot, started, stop, within};
use workload::{Scripted, Step};

fn is_lost(kind: &EventKind) -> bool {
    matches!(kind, EventKind::Disconnected { .. })
}

fn is_renewed(kind: &EventKind) -> bool {
    matches!(kind, EventKind::SessionRenewed { .. })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_is_renewed_before_a_message_has_waited_too_long_and_order_goes_on() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |message, _| match &*message.key {
        "slow" => Step::Succeed(Duration::from_millis(100)),
        _ => Step::Succeed(Duration::from_millis(1)),
    });
    let bus = started(orders(broker.clone(), |e| {
        e.handler_timeout(Duration::from_millis(200))
            .max_delivery_attempts(3)
            .ack_timeout(Duration::from_secs(1))
            .max_in_flight(64)
            .handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    // Together two seconds of work for one key, all of it received at once.
    for seq in 1..=20 {
        send(&bus, &ledger, "slow", seq).await;
        send(&bus, &ledger, "quick", seq).await;
    }
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    assert!(seen.count(is_renewed) >= 1);
    assert_eq!(seen.count(is_lost), 0);
    stop(&bus).await;
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.attempts), (40, 40));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_outlasts_the_renewal_of_its_session_is_aborted_and_runs_again_uncounted() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let first = Arc::new(AtomicBool::new(true));
    let handler = Scripted::new(&ledger, move |_, attempt| {
        assert_eq!(attempt, 1, "an aborted attempt does not count");
        match first.swap(false, Ordering::Relaxed) {
            true => Step::Hang,
            false => Step::Succeed(Duration::ZERO),
        }
    });
    let bus = started(orders(broker.clone(), |e| {
        e.handler_timeout(None)
            .ack_timeout(Duration::from_secs(2))
            .handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    for seq in 1..=3 {
        send(&bus, &ledger, "a", seq).await;
    }
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    assert_eq!(seen.count(is_renewed), 1);
    assert_eq!(seen.count(is_lost), 0);
    stop(&bus).await;
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.attempts), (3, 4));
}

/// Fails the first attempt of the second message of `a`, after which the endpoint pauses.
fn pausing(
    ledger: &OrderLedger,
    pause: Duration,
) -> impl FnOnce(EndpointBuilder) -> EndpointBuilder {
    let handler = Scripted::new(ledger, |message, attempt| {
        match (&*message.key, message.seq, attempt) {
            ("a", 2, 1) => Step::Fail(Duration::ZERO),
            _ => Step::Succeed(Duration::from_millis(1)),
        }
    });
    move |e| {
        e.handler(handler)
            .on_failure(|p| p.on_any().pause_endpoint(pause).park())
    }
}

async fn five_of_two_keys(bus: &Bus, ledger: &OrderLedger) {
    for seq in 1..=5 {
        for key in ["a", "b"] {
            send(bus, ledger, key, seq).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_pauses_and_goes_on_with_the_attempts_and_in_order() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let pause = Duration::from_millis(50);
    let bus = started(orders(broker.clone(), pausing(&ledger, pause))).await;
    let seen = Seen::of(&bus);
    five_of_two_keys(&bus, &ledger).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    let steps: Vec<_> = seen.all();
    let at = |like: fn(&EventKind) -> bool| steps.iter().position(like).expect("it happened");
    let paused = at(|kind| matches!(kind, EventKind::Paused { .. }));
    let closed = at(|kind| matches!(kind, EventKind::SessionClosed { .. }));
    let resumed = at(|kind| matches!(kind, EventKind::Resumed));
    let opened = at(|kind| matches!(kind, EventKind::Connected { .. }));
    assert!(
        paused < closed && closed < resumed && resumed < opened,
        "{steps:?}"
    );
    assert_eq!(seen.count(is_lost), 0);
    assert!(broker.messages(PARKED).is_empty());
    assert_eq!(snapshot(&bus).await.state, EndpointState::Running);
    stop(&bus).await;
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.attempts), (10, 11));
}

#[tokio::test(flavor = "multi_thread")]
async fn while_an_endpoint_pauses_another_instance_goes_on_in_order() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let year = Duration::from_secs(365 * 86_400);
    let bus = started(orders(broker.clone(), pausing(&ledger, year))).await;
    let succeeding = Scripted::succeeding(&ledger, Duration::from_millis(1));
    let standby = started(orders(broker.clone(), |e| e.handler(succeeding))).await;
    five_of_two_keys(&bus, &ledger).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    let state = snapshot(&bus).await;
    assert_eq!(state.state, EndpointState::Paused);
    assert!(!state.is_healthy() && !state.shards[0].subscribed);
    assert!(snapshot(&standby).await.handled > 0);
    // A paused endpoint drains at once.
    stop(&bus).await;
    stop(&standby).await;
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.attempts), (10, 11));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_without_order_pauses_too() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let describe = pausing(&ledger, Duration::from_millis(50));
    let bus = started(support::plain_orders(broker.clone(), describe)).await;
    let seen = Seen::of(&bus);
    five_of_two_keys(&bus, &ledger).await;
    handled(&bus, 10).await;
    assert_eq!(
        seen.count(|kind| matches!(kind, EventKind::Paused { .. })),
        1
    );
    stop(&bus).await;
    assert_eq!(ledger.figures().expect("in memory").lost, 0);
}

#[test]
fn an_acknowledgement_time_out_that_does_not_fit_is_refused() {
    let ledger = OrderLedger::in_memory();
    let problem = |change: fn(EndpointBuilder) -> EndpointBuilder| {
        let handler = Scripted::succeeding(&ledger, Duration::ZERO);
        let builder = orders(MemoryBroker::new(), |e| change(e.handler(handler)));
        let problems = builder.build().err().map(|error| error.problems);
        let problems = problems.unwrap_or_default();
        let shown: Vec<_> = problems.iter().map(ToString::to_string).collect();
        shown.join("\n")
    };
    assert_eq!(problem(|e| e), "");
    assert!(problem(|e| e.ack_timeout(Duration::ZERO)).contains("not between 1 s and 7 days"));
    let shown = problem(|e| e.ack_timeout(Duration::from_secs(300)));
    for part in [
        "ack_timeout: 5 attempts",
        "301.",
        "300s",
        "`handler_timeout`",
        "consumer_timeout",
    ] {
        assert!(shown.contains(part), "{part:?} in {shown}");
    }
    // The pauses of the rules count too.
    let shown = problem(|e| {
        e.on_failure(|p| {
            p.on_panic()
                .retry_after([Duration::from_secs(1_600)])
                .park()
        })
    });
    assert!(shown.contains("1901."), "{shown}");
}
