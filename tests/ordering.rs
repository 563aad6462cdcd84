//! Messages of one key are handled in order, whatever their handlers do; keys do not wait for each other.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::{EventKind, HeaderValue, WaitReason};

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{
    Gate, NO_ACK_TIMEOUT, ORDERS, Seen, Tally, envelope, handled, in_flight, orders, plain_orders,
    put, send, snapshot, started, stop, within,
};
use workload::{KEY_HEADER, Numbered, Scripted, Step, publish};

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_one_key_run_in_order_and_keys_in_parallel() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::succeeding(&ledger, Duration::from_millis(2));
    let bus = started(orders(broker.clone(), |e| {
        e.concurrency(16).handler(handler)
    }))
    .await;
    publish(&bus, &ledger, 20_000, 500).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.attempts), (20_000, 20_000));
}

// O1
#[tokio::test(flavor = "multi_thread")]
async fn the_typed_key_is_really_used() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::succeeding(&ledger, Duration::from_millis(3));
    let bus = started(plain_orders(broker.clone(), |e| {
        e.ordered_by(|m: &Numbered| m.key.clone())
            .transport_affinity(TransportAffinity::SingleActiveConsumer)
            .lanes(8)
            .handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    for number in 0..4_000_u64 {
        let mut message = envelope(&format!("key-{}", number % 200), number / 200 + 1);
        // Nothing but the payload tells the key.
        message.headers = laneway::Headers::new();
        put(&broker, ORDERS, message).await;
        ledger.published(&format!("key-{}", number % 200), number / 200 + 1);
    }
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    let state = snapshot(&bus).await;
    assert_eq!((state.keyless, state.key_fallbacks), (0, 0));
    stop(&bus).await;
    assert_eq!(
        seen.count(|kind| matches!(kind, EventKind::KeyMissing { .. })),
        0
    );
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!(figures.handled, 4_000);
}

// O4
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_backs_off_delays_no_other_key_of_its_lane() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |message, _| match message.key.as_str() {
        "failing" => Step::Fail(Duration::ZERO),
        _ => Step::Succeed(Duration::ZERO),
    });
    let bus = started(orders(broker.clone(), |e| {
        e.lanes(1)
            .concurrency(2)
            .backoff(Backoff::constant(Duration::from_secs(3600)))
            .ack_timeout(NO_ACK_TIMEOUT)
            .handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    send(&bus, &ledger, "failing", 1).await;
    send(&bus, &ledger, "failing", 2).await;
    seen.until("the first failure", 1, |kind| {
        matches!(kind, EventKind::AttemptFailed { attempt: 1, .. })
    })
    .await;
    for seq in 1..=100 {
        send(&bus, &ledger, "steady", seq).await;
    }
    handled(&bus, 100).await;
    let state = snapshot(&bus).await;
    assert_eq!(state.attempts, 101);
    assert_eq!(state.waiting_keys.len(), 1, "{state:?}");
    assert_eq!(state.waiting_keys[0].why, WaitReason::BackingOff);
    assert_eq!(state.waiting_keys[0].behind, 1);
    // A drain does not wait for the pause; both messages are given back.
    stop(&bus).await;
    assert_eq!(broker.status(ORDERS).ready, 2);
}

// O5
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_key_holds_up_nobody_until_the_credits_are_used() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let gate = Gate::closed();
    let slow = gate.clone();
    let record = ledger.clone();
    let bus = started(orders(broker.clone(), |e| {
        e.concurrency(256).lanes(4).max_in_flight(256).handler(
            move |message: Numbered, cx: Context| {
                let (slow, record) = (slow.clone(), record.clone());
                async move {
                    let run = record.run(&message.key, message.seq, cx.attempt());
                    if message.key == "slow" {
                        slow.pass().await;
                    }
                    run.end(true);
                    Ok(())
                }
            },
        )
    }))
    .await;
    let seen = Seen::of(&bus);
    let exhausted = |kind: &EventKind| {
        matches!(
            kind,
            EventKind::CreditsExhausted {
                keys: 1,
                credits: 256,
                ..
            }
        )
    };
    for seq in 1..=100 {
        send(&bus, &ledger, "slow", seq).await;
    }
    gate.until_waiting(1).await;
    publish(&bus, &ledger, 1_000, 50).await;
    handled(&bus, 1_000).await;
    assert_eq!(seen.count(exhausted), 0);

    for seq in 101..=300 {
        send(&bus, &ledger, "slow", seq).await;
    }
    seen.until("used-up credits", 1, exhausted).await;
    assert_eq!(snapshot(&bus).await.in_flight, 256);

    gate.open();
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    ledger.figures().expect("in memory").assert_ordered();
}

// O19
#[tokio::test(flavor = "multi_thread")]
async fn keyless_messages_never_wait_for_a_blocked_key() {
    let broker = MemoryBroker::new();
    let gate = Gate::closed();
    let blocked = gate.clone();
    let bus = started(orders(broker.clone(), |e| {
        e.lanes(1).concurrency(2).max_in_flight(200).handler(
            move |message: Numbered, _: Context| {
                let blocked = blocked.clone();
                async move {
                    if message.key == "blocked" {
                        blocked.pass().await;
                    }
                    Ok(())
                }
            },
        )
    }))
    .await;
    for seq in 1..=50 {
        put(&broker, ORDERS, envelope("blocked", seq)).await;
        let mut keyless = envelope("free", seq);
        keyless.headers = laneway::Headers::new();
        put(&broker, ORDERS, keyless).await;
    }
    handled(&bus, 50).await;
    let state = snapshot(&bus).await;
    assert_eq!((state.handled, state.keyless, state.running), (50, 50, 1));
    gate.open();
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_without_its_key_is_ordered_by_its_correlation_id_and_counted() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::succeeding(&ledger, Duration::from_millis(3));
    let bus = started(orders(broker.clone(), |e| e.handler(handler))).await;
    let seen = Seen::of(&bus);
    for seq in 1..=200_u64 {
        let mut message = envelope("correlated", seq);
        message.headers = laneway::Headers::new();
        message.correlation_id = Some("one-conversation".into());
        put(&broker, ORDERS, message).await;
        ledger.published("correlated", seq);
    }
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    let state = snapshot(&bus).await;
    assert_eq!((state.keyless, state.key_fallbacks), (0, 200));
    stop(&bus).await;
    seen.until("a report of each", 200, |kind| {
        matches!(kind, EventKind::KeyMissing { fallback: true, .. })
    })
    .await;
    ledger.figures().expect("in memory").assert_ordered();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_without_order_runs_messages_of_one_key_at_once_and_asks_for_no_key() {
    let broker = MemoryBroker::new();
    let gate = Gate::closed();
    let held = gate.clone();
    let bus = started(plain_orders(broker.clone(), |e| {
        e.concurrency(8)
            .max_in_flight(100)
            .handler(move |_: Numbered, cx: Context| {
                let held = held.clone();
                async move {
                    assert!(cx.key().is_none());
                    held.pass().await;
                    Ok(())
                }
            })
    }))
    .await;
    let seen = Seen::of(&bus);
    for seq in 1..=20 {
        put(&broker, ORDERS, envelope("same", seq)).await;
    }
    gate.until_waiting(8).await;
    let state = snapshot(&bus).await;
    assert_eq!((state.running, state.keyless), (8, 0));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    assert!(
        state.lane_depth.len() <= cores.saturating_sub(1).max(1),
        "{state:?}"
    );
    gate.open();
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    assert_eq!(
        seen.count(|kind| matches!(kind, EventKind::KeyMissing { .. })),
        0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn without_order_nothing_that_could_be_a_key_is_looked_at_and_the_handler_sees_it_all() {
    let broker = MemoryBroker::new();
    let (seen_keys, seen_headers) = (Tally::new(), Tally::new());
    let (keys, headers) = (seen_keys.clone(), seen_headers.clone());
    let bus = started(plain_orders(broker.clone(), |e| {
        e.handler(move |message: Numbered, cx: Context| {
            if cx.key().is_some() {
                keys.add();
            }
            let text = Some(&HeaderValue::Text(message.key.clone()));
            let correlated = cx.envelope().correlation_id.as_deref() == Some("conversation");
            if cx.headers().get(KEY_HEADER) == text && correlated {
                headers.add();
            }
            async { Ok(()) }
        })
    }))
    .await;
    let seen = Seen::of(&bus);
    for seq in 1..=300 {
        let mut message = envelope("same", seq);
        message.correlation_id = Some("conversation".into());
        put(&broker, ORDERS, message).await;
    }
    handled(&bus, 300).await;
    let state = snapshot(&bus).await;
    stop(&bus).await;
    assert_eq!((seen_keys.get(), seen_headers.get()), (0, 300));
    assert_eq!((state.keyless, state.key_fallbacks), (0, 0));
    assert_eq!(
        seen.count(|kind| matches!(kind, EventKind::KeyMissing { .. })),
        0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn without_order_a_message_that_backs_off_holds_up_none_with_the_same_header() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |message, _| match message.seq {
        1 => Step::Fail(Duration::ZERO),
        _ => Step::Succeed(Duration::ZERO),
    });
    let bus = started(plain_orders(broker.clone(), |e| {
        e.concurrency(2)
            .backoff(Backoff::constant(Duration::from_secs(3600)))
            .ack_timeout(NO_ACK_TIMEOUT)
            .handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    send(&bus, &ledger, "same", 1).await;
    seen.until("the first failure", 1, |kind| {
        matches!(
            kind,
            EventKind::AttemptFailed {
                attempt: 1,
                key: None,
                ..
            }
        )
    })
    .await;
    for seq in 2..=100 {
        send(&bus, &ledger, "same", seq).await;
    }
    handled(&bus, 99).await;
    let state = snapshot(&bus).await;
    assert_eq!((state.attempts, state.in_flight), (100, 1));
    assert!(
        state
            .waiting_keys
            .iter()
            .all(|waiting| waiting.key.is_none() && waiting.behind == 0),
        "{state:?}"
    );
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrency_bounds_all_handlers_of_the_endpoint_and_is_used_to_the_full() {
    let broker = MemoryBroker::new();
    let gate = Gate::closed();
    let held = gate.clone();
    let keys = Arc::new(Mutex::new(HashSet::new()));
    let running = Arc::clone(&keys);
    let bus = started(orders(broker.clone(), |e| {
        e.concurrency(5).lanes(3).max_in_flight(100).handler(
            move |message: Numbered, _: Context| {
                let (held, running) = (held.clone(), Arc::clone(&running));
                async move {
                    let first = running
                        .lock()
                        .expect("no panic")
                        .insert(message.key.clone());
                    assert!(first, "two messages of a key at once");
                    held.pass().await;
                    running.lock().expect("no panic").remove(&message.key);
                    Ok(())
                }
            },
        )
    }))
    .await;
    for seq in 1..=4 {
        for key in 0..10 {
            put(&broker, ORDERS, envelope(&format!("key-{key}"), seq)).await;
        }
    }
    gate.until_waiting(5).await;
    in_flight(&bus, 40).await;
    assert_eq!(snapshot(&bus).await.running, 5);
    gate.open();
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    assert_eq!(broker.status("orders-parked").total(), 0);
    stop(&bus).await;
}
