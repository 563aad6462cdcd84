//! Drain: nothing new starts, what runs may finish, what ended is acknowledged, the rest is given back.

use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::{DrainReport, EndpointState, EventKind, FailureKind, WaitReason};

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{
    DLX, Gate, NO_ACK_TIMEOUT, ORDERS, Seen, Tally, envelope, in_flight, numbered, orders, put,
    send, snapshot, started, stop, within,
};
use workload::{Numbered, Scripted, Step};

/// Far away: a drain that waits for it has failed its test.
const NEVER: Duration = Duration::from_secs(3600);

fn report_of(report: &laneway::ShutdownReport) -> DrainReport {
    report.endpoints[0].1
}

/// A handler that waits at the gate and counts how many got through.
fn gated(gate: &Gate, through: &Tally) -> impl laneway::Handler<Numbered> {
    let (gate, through) = (gate.clone(), through.clone());
    move |_: Numbered, _: Context| {
        let (gate, through) = (gate.clone(), through.clone());
        async move {
            gate.pass().await;
            through.add();
            Ok(())
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_finishes_and_is_acknowledged_and_the_rest_is_given_back_in_order() {
    let broker = MemoryBroker::new();
    let (gate, through) = (Gate::closed(), Tally::new());
    let handler = gated(&gate, &through);
    let bus = started(orders(broker.clone(), |e| {
        e.concurrency(4).lanes(2).handler(handler)
    }))
    .await;
    for seq in 1..=5 {
        for key in ["a", "b", "c", "d"] {
            put(&broker, ORDERS, envelope(key, seq)).await;
        }
    }
    gate.until_waiting(4).await;
    in_flight(&bus, 20).await;
    let stopping = tokio::spawn({
        let bus = bus.clone();
        async move { bus.shutdown(NEVER).await }
    });
    let mut state = bus.endpoint(ORDERS).expect("it exists").state();
    within(
        "the drain to begin",
        state.wait_for(|s| *s == EndpointState::Draining),
    )
    .await
    .expect("the endpoint is there");
    gate.open();
    let report = within("the shutdown", stopping).await.expect("no panic");
    assert!(report.is_clean());
    assert_eq!(report_of(&report).given_back, 16);
    assert_eq!(through.get(), 4);
    let rest: Vec<_> = broker.messages(ORDERS).iter().map(numbered).collect();
    let rest: Vec<_> = rest.iter().map(|m| (m.key.as_str(), m.seq)).collect();
    let expected: Vec<_> = (2..=5)
        .flat_map(|seq| ["a", "b", "c", "d"].map(|key| (key, seq)))
        .collect();
    assert_eq!(rest, expected);
}

/// The permit of the one that runs passes on to a key that waits for it, which does not start any more: nothing
/// of that is an unfinished handler.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_with_keys_that_wait_for_a_permit_is_clean() {
    for _ in 0..20 {
        let broker = MemoryBroker::new();
        let (gate, through) = (Gate::closed(), Tally::new());
        let handler = gated(&gate, &through);
        let bus = started(orders(broker.clone(), |e| {
            e.concurrency(1).lanes(8).max_in_flight(64).handler(handler)
        }))
        .await;
        for key in 0..64 {
            put(&broker, ORDERS, envelope(&format!("key-{key}"), 1)).await;
        }
        gate.until_waiting(1).await;
        in_flight(&bus, 64).await;
        let mut state = bus.endpoint(ORDERS).expect("it exists").state();
        let opening = async {
            let draining = state.wait_for(|s| *s == EndpointState::Draining);
            draining.await.expect("the endpoint is there");
            gate.open();
        };
        let stopping = within("the shutdown", bus.shutdown(NEVER));
        let (report, ()) = futures::future::join(stopping, opening).await;
        let report = report_of(&report);
        assert_eq!((report.given_back, report.unfinished), (63, 0));
        assert_eq!(through.get(), 1);
    }
}

/// One lane and one message: the last outcome and the end of the drain come from the same step.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_message_that_finishes_during_a_drain_is_acknowledged_too() {
    for _ in 0..20 {
        let broker = MemoryBroker::new();
        let (gate, through) = (Gate::closed(), Tally::new());
        let handler = gated(&gate, &through);
        let bus = started(orders(broker.clone(), |e| e.lanes(1).handler(handler))).await;
        put(&broker, ORDERS, envelope("only", 1)).await;
        gate.until_waiting(1).await;
        let stopping = tokio::spawn({
            let bus = bus.clone();
            async move { bus.shutdown(NEVER).await }
        });
        let mut state = bus.endpoint(ORDERS).expect("it exists").state();
        within(
            "the drain to begin",
            state.wait_for(|s| *s == EndpointState::Draining),
        )
        .await
        .expect("the endpoint is there");
        gate.open();
        let report = within("the shutdown", stopping).await.expect("no panic");
        assert_eq!(through.get(), 1);
        assert_eq!(report_of(&report).given_back, 0);
        assert_eq!(broker.status(ORDERS).total(), 0);
    }
}

// O9
#[tokio::test(flavor = "multi_thread")]
async fn stopping_and_starting_under_load_keeps_order_and_loses_nothing() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let mut published = 0;
    for round in 0..30_u64 {
        let handler = Scripted::new(&ledger, |message, attempt| match message.seq % 10 {
            3 if attempt < 2 => Step::Fail(Duration::ZERO),
            _ => Step::Succeed(Duration::from_millis(fastrand::u64(0..4))),
        });
        let bus = started(orders(broker.clone(), |e| {
            e.backoff(Backoff::constant(Duration::from_millis(1)))
                .handler(handler)
        }))
        .await;
        let moment = fastrand::u64(1..100);
        for number in 0..100_u64 {
            let (key, seq) = (format!("key-{}", number % 10), round * 10 + number / 10 + 1);
            send(&bus, &ledger, &key, seq).await;
            published += 1;
            if number == moment {
                let bus = bus.clone();
                tokio::spawn(async move { bus.shutdown(NEVER).await });
            }
            if number >= moment {
                // The bus may be closed for publishing by now: the rest goes in by another door.
                for number in number + 1..100 {
                    let (key, seq) = (format!("key-{}", number % 10), round * 10 + number / 10 + 1);
                    put(&broker, ORDERS, envelope(&key, seq)).await;
                    ledger.published(&key, seq);
                    published += 1;
                }
                break;
            }
        }
        stop(&bus).await;
        assert_eq!(broker.status(ORDERS).unsettled, 0);
    }
    let handler = Scripted::succeeding(&ledger, Duration::ZERO);
    let bus = started(orders(broker.clone(), |e| e.handler(handler))).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!(
        (figures.handled, figures.duplicates),
        (published, 0),
        "{figures}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_deadline_aborts_what_runs_uncounted_and_its_context_tells_so() {
    let broker = MemoryBroker::new();
    let (running, told) = (Tally::new(), Tally::new());
    let (runs, tell) = (running.clone(), told.clone());
    let bus = started(orders(broker.clone(), |e| {
        e.handler(move |_: Numbered, cx: Context| {
            let (runs, tell) = (runs.clone(), tell.clone());
            async move {
                // What the handler has started elsewhere must hear of the end, too.
                tokio::spawn(async move {
                    cx.cancelled().await;
                    tell.add();
                });
                runs.add();
                std::future::pending::<Result<(), _>>().await
            }
        })
    }))
    .await;
    let seen = Seen::of(&bus);
    put(&broker, ORDERS, envelope("endless", 1)).await;
    put(&broker, ORDERS, envelope("endless", 2)).await;
    running.until("the endless handler", 1).await;
    in_flight(&bus, 2).await;
    let report = within("the shutdown", bus.shutdown(Duration::from_millis(50))).await;
    assert!(
        report.is_clean(),
        "aborted, so nothing was left running: {report:?}"
    );
    assert_eq!(report_of(&report).given_back, 2);
    assert_eq!(broker.status(ORDERS).ready, 2);
    told.until("the context to tell", 1).await;
    let failed = |kind: &EventKind| matches!(kind, EventKind::AttemptFailed { .. });
    assert_eq!(seen.count(failed), 0);
    assert_eq!(snapshot(&bus).await.attempts, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_is_asked_for_twice_happens_once_and_both_wait_for_it() {
    let broker = MemoryBroker::new();
    let (gate, through) = (Gate::closed(), Tally::new());
    let handler = gated(&gate, &through);
    let bus = started(orders(broker.clone(), |e| e.handler(handler))).await;
    put(&broker, ORDERS, envelope("a", 1)).await;
    put(&broker, ORDERS, envelope("a", 2)).await;
    gate.until_waiting(1).await;
    in_flight(&bus, 2).await;
    let (first, second) = (bus.clone(), bus.clone());
    let first = tokio::spawn(async move { first.shutdown(NEVER).await });
    let second = tokio::spawn(async move { second.shutdown(NEVER).await });
    let mut state = bus.endpoint(ORDERS).expect("it exists").state();
    within(
        "the drain to begin",
        state.wait_for(|s| *s == EndpointState::Draining),
    )
    .await
    .expect("the endpoint is there");
    assert!(!first.is_finished() && !second.is_finished());
    gate.open();
    let first = within("the first shutdown", first).await.expect("no panic");
    let second = within("the second shutdown", second)
        .await
        .expect("no panic");
    assert!(first.is_clean() && second.is_clean());
    assert_eq!(through.get(), 1);
    assert_eq!(broker.status(ORDERS).ready, 1);
    // And once more, when everything is over.
    assert!(
        within("a third shutdown", bus.shutdown(NEVER))
            .await
            .is_clean()
    );
    assert_eq!(snapshot(&bus).await.state, EndpointState::Stopped);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnected_endpoint_drains_at_once() {
    let broker = MemoryBroker::new();
    let bus = started(orders(broker.clone(), |e| {
        e.handler(|_: Numbered, _: Context| async { Ok(()) })
    }))
    .await;
    let seen = Seen::of(&bus);
    broker.make_unreachable();
    seen.until("the loss", 1, |kind| {
        matches!(kind, EventKind::Disconnected { .. })
    })
    .await;
    assert!(within("the shutdown", bus.shutdown(NEVER)).await.is_clean());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_lost_during_a_drain_does_not_hold_it_up() {
    let broker = MemoryBroker::new();
    let (gate, through) = (Gate::closed(), Tally::new());
    let handler = gated(&gate, &through);
    let bus = started(orders(broker.clone(), |e| e.lanes(2).handler(handler))).await;
    put(&broker, ORDERS, envelope("a", 1)).await;
    gate.until_waiting(1).await;
    let stopping = tokio::spawn({
        let bus = bus.clone();
        async move { bus.shutdown(NEVER).await }
    });
    let mut state = bus.endpoint(ORDERS).expect("it exists").state();
    within(
        "the drain to begin",
        state.wait_for(|s| *s == EndpointState::Draining),
    )
    .await
    .expect("the endpoint is there");
    // The attempt is aborted with its session, and nothing else is left to wait for.
    broker.cut_sessions(ORDERS);
    let report = within("the shutdown", stopping).await.expect("no panic");
    assert!(report.is_clean());
    assert_eq!(through.get(), 0);
    assert_eq!(broker.status(ORDERS).ready, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn parking_that_fails_does_not_hold_a_drain_beyond_its_deadline() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |_, _| Step::FailForGood);
    let bus = started(orders(broker.clone(), |e| e.handler(handler))).await;
    let seen = Seen::of(&bus);
    broker.remove_exchange(DLX);
    put(&broker, ORDERS, envelope("poisoned", 1)).await;
    put(&broker, ORDERS, envelope("poisoned", 2)).await;
    seen.until("a failed try to park", 1, |kind| {
        matches!(kind, EventKind::ParkingFailed { .. })
    })
    .await;
    in_flight(&bus, 2).await;
    let report = within("the shutdown", bus.shutdown(Duration::from_millis(50))).await;
    assert!(report.is_clean());
    assert_eq!(report_of(&report).given_back, 2);
    assert_eq!(broker.status(ORDERS).ready, 2);
    assert_eq!(seen.count(|kind| matches!(kind, EventKind::Gap { .. })), 0);
}

#[test]
fn a_stuck_handler_is_reported_and_not_waited_for() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(3)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let broker = MemoryBroker::new();
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let blocking = Tally::new();
        let begun = blocking.clone();
        let bus = started(orders(broker.clone(), |e| {
            e.handler(move |_: Numbered, _: Context| {
                let (held, begun) = (Arc::clone(&held), begun.clone());
                async move {
                    begun.add();
                    // An error means that the test is over.
                    let _ = held.lock().expect("no panic").recv();
                    Ok(())
                }
            })
        }))
        .await;
        put(&broker, ORDERS, envelope("stuck", 1)).await;
        blocking.until("the blocking handler", 1).await;
        let asked = Instant::now();
        let report = within("the shutdown", bus.shutdown(Duration::from_millis(100))).await;
        assert!(
            asked.elapsed() < Duration::from_secs(10),
            "{:?}",
            asked.elapsed()
        );
        assert!(!report.is_clean());
        assert_eq!(report_of(&report), {
            let mut expected = DrainReport::default();
            expected.given_back = 1;
            expected.unfinished = 1;
            expected
        });
        assert_eq!(broker.status(ORDERS).ready, 1);
        drop(release);
    });
}

/// The permit of a handler that outlives its endpoint passes over everybody who waited for one.
#[test]
fn a_stuck_handler_that_ends_after_the_endpoint_harms_nobody() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(3)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let broker = MemoryBroker::new();
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let (begun, ended) = (Tally::new(), Tally::new());
        let (begin, end) = (begun.clone(), ended.clone());
        let bus = started(orders(broker.clone(), |e| {
            e.concurrency(1).lanes(4).max_in_flight(60_000).handler(
                move |_: Numbered, cx: Context| {
                    let (held, begin, end) = (Arc::clone(&held), begin.clone(), end.clone());
                    async move {
                        begin.add();
                        // An error means that the test is over.
                        let _ = held.lock().expect("no panic").recv();
                        // Dropped with the task, after the permit.
                        let after_permit = Arc::new(cx);
                        drop(after_permit);
                        end.add();
                        Ok(())
                    }
                },
            )
        }))
        .await;
        for number in 0..40_000 {
            put(&broker, ORDERS, envelope(&format!("key-{number}"), 1)).await;
        }
        begun.until("the blocking handler", 1).await;
        in_flight(&bus, 40_000).await;
        let report = within("the shutdown", bus.shutdown(Duration::ZERO)).await;
        assert_eq!(report_of(&report).unfinished, 1);
        drop(release);
        ended.until("the end of the handler", 1).await;
    });
    // Joins the threads: everything that the last permit sets off is over.
    drop(runtime);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_backs_off_keeps_its_place_over_a_drain_and_starts_anew_elsewhere() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let failing = Scripted::new(&ledger, |_, _| Step::Fail(Duration::ZERO));
    let bus = started(orders(broker.clone(), |e| {
        e.backoff(Backoff::constant(NEVER))
            .ack_timeout(NO_ACK_TIMEOUT)
            .handler(failing)
    }))
    .await;
    let seen = Seen::of(&bus);
    for seq in 1..=3 {
        send(&bus, &ledger, "a", seq).await;
    }
    seen.until("the failed attempt", 1, |kind| {
        matches!(
            kind,
            EventKind::AttemptFailed {
                failure: FailureKind::Transient,
                ..
            }
        )
    })
    .await;
    let state = snapshot(&bus).await;
    assert_eq!(state.waiting_keys[0].why, WaitReason::BackingOff);
    stop(&bus).await;
    let succeeding = Scripted::succeeding(&ledger, Duration::ZERO);
    let bus = started(orders(broker.clone(), |e| e.handler(succeeding))).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.attempts), (3, 4));
}

#[tokio::test(flavor = "multi_thread")]
async fn run_until_drains_when_its_signal_comes() {
    let broker = MemoryBroker::new();
    let (gate, through) = (Gate::closed(), Tally::new());
    let handler = gated(&gate, &through);
    let bus = started(orders(broker.clone(), |e| e.handler(handler))).await;
    put(&broker, ORDERS, envelope("a", 1)).await;
    gate.until_waiting(1).await;
    let (signal, signalled) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn({
        let bus = bus.clone();
        async move {
            bus.run_until(async move {
                // An error means the same.
                let _ = signalled.await;
            })
            .await
        }
    });
    assert!(!running.is_finished());
    signal.send(()).expect("it runs");
    gate.open();
    let report = within("the end", running).await.expect("no panic");
    assert!(report.expect("nothing failed").is_clean());
    assert_eq!(broker.status(ORDERS).total(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn handlers_may_publish_until_they_have_ended_and_nobody_afterwards() {
    let broker = MemoryBroker::new();
    let gate = Gate::closed();
    let held = gate.clone();
    let bus = started(orders(broker.clone(), |e| {
        e.handler(move |message: Numbered, cx: Context| {
            let held = held.clone();
            async move {
                held.pass().await;
                if message.seq < 10 {
                    let next = Numbered {
                        seq: message.seq + 10,
                        ..message
                    };
                    cx.publish(&next).await?;
                }
                Ok(())
            }
        })
    }))
    .await;
    put(&broker, ORDERS, envelope("a", 1)).await;
    gate.until_waiting(1).await;
    let stopping = tokio::spawn({
        let bus = bus.clone();
        async move { bus.shutdown(NEVER).await }
    });
    let mut state = bus.endpoint(ORDERS).expect("it exists").state();
    within(
        "the drain to begin",
        state.wait_for(|s| *s == EndpointState::Draining),
    )
    .await
    .expect("the endpoint is there");
    gate.open();
    within("the shutdown", stopping).await.expect("no panic");
    let rest: Vec<_> = broker.messages(ORDERS).iter().map(numbered).collect();
    assert_eq!((rest.len(), rest[0].seq), (1, 11));
    let late = Numbered {
        key: "a".to_owned(),
        seq: 99,
    };
    let error = bus.publish(&late).await.expect_err("shut down");
    assert!(matches!(error, laneway::PublishError::ShutDown), "{error}");
}
