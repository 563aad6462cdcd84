//! Laneway's own actors may panic: order holds, nothing is lost; too often, and the program is told.

use std::time::Duration;

use laneway::actors::LaneIndex;
use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::{EndpointState, EventKind, RunError};

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{
    Gate, ORDERS, Seen, envelope, handled, orders, put, send, snapshot, started, stop, within,
};
use workload::{KEY_HEADER, Numbered, Scripted, Step, publish};

fn lane_restarted(kind: &EventKind) -> bool {
    matches!(kind, EventKind::ActorRestarted { actor: "lane" })
}

fn panic_lane(bus: &Bus, lane: u32) {
    let endpoint = bus.endpoint(ORDERS).expect("it exists");
    endpoint.panic_lane(LaneIndex::new(lane));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_that_panics_under_load_loses_nothing_and_keeps_the_order() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |message, attempt| match message.seq % 20 {
        5 if attempt == 1 => Step::Fail(Duration::ZERO),
        _ => Step::Succeed(Duration::from_micros(fastrand::u64(0..2_000))),
    });
    let bus = started(orders(broker.clone(), |e| {
        e.lanes(2)
            .max_in_flight(500)
            .backoff(Backoff::constant(Duration::from_millis(1)))
            .handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    let (to, record) = (bus.clone(), ledger.clone());
    let publishing = tokio::spawn(async move { publish(&to, &record, 6_000, 20).await });
    for round in 1..=3_u32 {
        handled(&bus, u64::from(round) * 700).await;
        panic_lane(&bus, 0);
        seen.until("the restart", round as usize, lane_restarted)
            .await;
    }
    within("all published", publishing).await.expect("no panic");
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    assert_eq!(snapshot(&bus).await.reconnects, 3);
    stop(&bus).await;
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!(figures.handled, 6_000);
}

/// A message that arrives while the lane is being restarted must not start before those that the lane
/// has just forgotten.
#[tokio::test(flavor = "multi_thread")]
async fn what_reaches_a_lane_while_it_restarts_waits_for_what_the_lane_has_forgotten() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let gate = Gate::closed();
    let (held, record) = (gate.clone(), ledger.clone());
    let bus = started(orders(broker.clone(), |e| {
        e.lanes(1).concurrency(1).max_in_flight(100).handler(
            move |message: Numbered, cx: Context| {
                let (held, record) = (held.clone(), record.clone());
                async move {
                    if message.key == "holds the permit" {
                        held.pass().await;
                    }
                    let run = record.run(&message.key, message.seq, cx.attempt());
                    run.end(true);
                    Ok(())
                }
            },
        )
    }))
    .await;
    let seen = Seen::of(&bus);
    send(&bus, &ledger, "holds the permit", 1).await;
    gate.until_waiting(1).await;
    for seq in 1..=10 {
        send(&bus, &ledger, "a", seq).await;
    }
    within("all in flight", async {
        while snapshot(&bus).await.in_flight < 11 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    panic_lane(&bus, 0);
    // The lane pauses before it restarts; meanwhile these go to its mailbox.
    for seq in 11..=20 {
        send(&bus, &ledger, "a", seq).await;
    }
    seen.until("the restart", 1, lane_restarted).await;
    gate.open();
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    ledger.figures().expect("in memory").assert_ordered();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_that_restarts_while_disconnected_works_in_the_next_session() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::succeeding(&ledger, Duration::ZERO);
    let bus = started(orders(broker.clone(), |e| e.lanes(1).handler(handler))).await;
    let seen = Seen::of(&bus);
    broker.make_unreachable();
    seen.until("the loss", 1, |kind| {
        matches!(kind, EventKind::Disconnected { .. })
    })
    .await;
    panic_lane(&bus, 0);
    seen.until("the restart", 1, lane_restarted).await;
    broker.make_reachable();
    publish(&bus, &ledger, 100, 10).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    ledger.figures().expect("in memory").assert_ordered();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_that_restarts_during_a_drain_does_not_hold_it_up() {
    let broker = MemoryBroker::new();
    let gate = Gate::closed();
    let held = gate.clone();
    let bus = started(orders(broker.clone(), |e| {
        e.lanes(2).handler(move |_: Numbered, _: Context| {
            let held = held.clone();
            async move {
                held.pass().await;
                Ok(())
            }
        })
    }))
    .await;
    for key in 0..8 {
        put(&broker, ORDERS, envelope(&format!("key-{key}"), 1)).await;
    }
    gate.until_waiting(8).await;
    let stopping = tokio::spawn({
        let bus = bus.clone();
        async move { bus.shutdown(Duration::from_secs(3600)).await }
    });
    let mut state = bus.endpoint(ORDERS).expect("it exists").state();
    within(
        "the drain to begin",
        state.wait_for(|s| *s == EndpointState::Draining),
    )
    .await
    .expect("the endpoint is there");
    panic_lane(&bus, 0);
    let report = within("the shutdown", stopping).await.expect("no panic");
    assert!(report.is_clean(), "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_that_panics_too_often_ends_its_endpoint_and_the_others_drain() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let gate = Gate::closed();
    let held = gate.clone();
    let handler = Scripted::succeeding(&ledger, Duration::from_millis(1));
    let bus = orders(broker.clone(), |e| {
        e.lanes(2).handler(move |_: Numbered, _: Context| {
            let held = held.clone();
            async move {
                held.pass().await;
                Ok(())
            }
        })
    })
    .topology(|t| {
        t.queue("healthy", |q| {
            q.single_active_consumer()
                .parking("healthy-dlx", "healthy-parked")
        })
    })
    .endpoint("healthy", |e| {
        e.ordered_by_header(KEY_HEADER)
            .transport_affinity(TransportAffinity::SingleActiveConsumer)
            .handler(handler)
    })
    .drain_deadline(Duration::from_secs(3600));
    let bus = started(bus).await;
    let seen = Seen::of(&bus);
    for key in 0..8 {
        put(&broker, ORDERS, envelope(&format!("key-{key}"), 1)).await;
    }
    for number in 0..200_u64 {
        put(&broker, "healthy", envelope("h", number + 1)).await;
        ledger.published("h", number + 1);
    }
    gate.until_waiting(8).await;
    let running = tokio::spawn({
        let bus = bus.clone();
        async move { bus.run_until(std::future::pending()).await }
    });
    for round in 1..=3 {
        panic_lane(&bus, 0);
        seen.until("the restart", round, lane_restarted).await;
    }
    assert!(!running.is_finished());
    panic_lane(&bus, 0);
    seen.until("the failure", 1, |kind| {
        matches!(kind, EventKind::Failed { .. })
    })
    .await;
    // What runs in the other lane may finish; what ran in the dead one is aborted.
    gate.open();
    // Far below the deadline: a dead lane has nothing to report, so nobody waits for its report.
    let result = tokio::time::timeout(Duration::from_secs(20), running).await;
    let result = result
        .expect("ends long before the deadline")
        .expect("no panic");
    let Err(RunError::EndpointFailed { endpoint }) = result else {
        panic!("an error, but: {result:?}");
    };
    assert_eq!(endpoint, ORDERS);
    let state = within("a snapshot", bus.snapshot()).await;
    let of = |name| state.endpoint(name).map(|endpoint| endpoint.state);
    assert_eq!(of(ORDERS), Some(EndpointState::Failed));
    assert_eq!(of("healthy"), Some(EndpointState::Stopped));
    assert_eq!(broker.status(ORDERS).unsettled, 0);
    assert_eq!(broker.status("healthy").unsettled, 0);
    let figures = ledger.figures().expect("in memory");
    assert_eq!(
        (figures.inversions, figures.overlaps, figures.duplicates),
        (0, 0, 0)
    );
}

#[test]
fn handlers_whose_runtime_is_shut_down_end_the_endpoint_with_an_error_and_lose_nothing() {
    let own = tokio::runtime::Runtime::new().expect("a runtime");
    let handlers = tokio::runtime::Runtime::new().expect("a runtime");
    own.block_on(async {
        let broker = MemoryBroker::new();
        let gate = Gate::closed();
        let held = gate.clone();
        let bus = orders(broker.clone(), |e| {
            e.handler(move |_: Numbered, _: Context| {
                let held = held.clone();
                async move {
                    held.pass().await;
                    Ok(())
                }
            })
        })
        .handler_runtime(handlers.handle().clone());
        let bus = started(bus).await;
        let seen = Seen::of(&bus);
        for seq in 1..=5 {
            for key in ["a", "b", "c"] {
                put(&broker, ORDERS, envelope(key, seq)).await;
            }
        }
        gate.until_waiting(3).await;
        handlers.shutdown_background();
        let result = within("the end", bus.run_until(std::future::pending())).await;
        assert!(matches!(result, Err(RunError::EndpointFailed { .. })), "{result:?}");
        assert_eq!(broker.status(ORDERS).ready, 15);
        let failed = |kind: &EventKind| {
            matches!(kind, EventKind::Failed { reason } if reason.contains("runtime"))
        };
        seen.until("the reason", 1, failed).await;
        assert_eq!(seen.count(|kind| matches!(kind, EventKind::AttemptFailed { .. })), 0);
    });
}
