//! A handler may fail, panic, hang or block: its key keeps its order, nothing is lost, nobody else waits.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::transport::provenance;
use laneway::{
    Envelope, EventKind, FailureKind, HeaderValue, Headers, Outcome, PoisonReason, WaitReason,
};

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{
    DLX, ORDERS, PARKED, Seen, Tally, envelope, handled, orders, parked, plain_orders, put, send,
    snapshot, started, stop, within,
};
use workload::{KEY_HEADER, Numbered, Scripted, Step, publish};

/// So short that no test waits for it.
fn soon() -> Backoff {
    Backoff::constant(Duration::from_millis(1))
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

// O2
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_succeeds_on_its_third_attempt_is_not_parked_and_holds_back_its_successors()
{
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |message, attempt| {
        if message.seq == 2 && attempt < 3 {
            Step::Fail(ms(1))
        } else {
            Step::Succeed(Duration::ZERO)
        }
    });
    let bus = started(orders(broker.clone(), |e| {
        e.max_delivery_attempts(3).backoff(soon()).handler(handler)
    }))
    .await;
    publish(&bus, &ledger, 50, 10).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    let state = snapshot(&bus).await;
    assert_eq!((state.handled, state.attempts, state.gaps), (50, 70, 0));
    stop(&bus).await;
    assert_eq!(parked(&broker, &ledger), []);
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.attempts), (50, 70));
}

// O3
#[tokio::test(flavor = "multi_thread")]
async fn failing_keys_of_one_lane_do_not_disturb_each_others_attempts() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let runs = Arc::new(Mutex::new(BTreeMap::<(String, u64), Vec<u32>>::new()));
    let record = Arc::clone(&runs);
    let handler = Scripted::new(&ledger, move |message, attempt| {
        let mut record = record.lock().expect("no panic");
        let message = (message.key.clone(), message.seq);
        record.entry(message).or_default().push(attempt);
        Step::Fail(ms(1))
    });
    let bus = started(orders(broker.clone(), |e| {
        e.lanes(1)
            .max_delivery_attempts(3)
            .backoff(soon())
            .handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    publish(&bus, &ledger, 10, 2).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    let parked = parked(&broker, &ledger);
    for key in ["key-0", "key-1"] {
        let of_key: Vec<_> = parked
            .iter()
            .filter(|(k, _)| k == key)
            .map(|&(_, seq)| seq)
            .collect();
        assert_eq!(of_key, [1, 2, 3, 4, 5], "parked in order, each once");
    }
    for (message, attempts) in runs.lock().expect("no panic").iter() {
        assert_eq!(attempts, &[1, 2, 3], "{message:?}");
    }
    let gap = |kind: &EventKind| {
        matches!(
            kind,
            EventKind::Gap {
                reason: PoisonReason::Failed,
                outcome: Outcome::Parked,
                attempts: 3,
                ..
            }
        )
    };
    assert_eq!(seen.count(gap), 10);
    ledger.figures().expect("in memory").assert_ordered();
}

// O7
#[tokio::test(flavor = "multi_thread")]
async fn a_key_waits_while_its_head_cannot_be_parked_and_others_go_on() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |message, _| {
        match (message.key.as_str(), message.seq) {
            ("poisoned", 1) => Step::FailForGood,
            _ => Step::Succeed(Duration::ZERO),
        }
    });
    let bus = started(orders(broker.clone(), |e| e.lanes(1).handler(handler))).await;
    let seen = Seen::of(&bus);
    broker.remove_exchange(DLX);
    send(&bus, &ledger, "poisoned", 1).await;
    send(&bus, &ledger, "poisoned", 2).await;
    let failed = |kind: &EventKind| matches!(kind, EventKind::ParkingFailed { .. });
    seen.until("two failed tries to park", 2, failed).await;
    for seq in 1..=100 {
        send(&bus, &ledger, "other", seq).await;
    }
    handled(&bus, 100).await;
    let state = snapshot(&bus).await;
    assert_eq!((state.gaps, state.parked, state.attempts), (0, 0, 101));
    assert_eq!(state.waiting_keys[0].why, WaitReason::Parking);
    // The last of the others may be acknowledged a moment after they were handled.
    let others_are_gone = broker.wait_until(ORDERS, |status| status.total() == 2);
    within("the others acknowledged", others_are_gone).await;

    let topology = laneway::Topology::default().queue(ORDERS, |q| {
        q.durable().single_active_consumer().parking(DLX, PARKED)
    });
    broker
        .declare_queue(&topology.queues()[0])
        .expect("the same");
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    assert_eq!(parked(&broker, &ledger), [("poisoned".to_owned(), 1)]);
    assert_eq!(seen.count(|kind| matches!(kind, EventKind::Gap { .. })), 1);
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.attempts), (101, 102));
}

// O8
#[tokio::test(flavor = "multi_thread")]
async fn a_parked_message_keeps_everything_and_tells_why_it_is_there() {
    let broker = MemoryBroker::new();
    let bus = started(orders(broker.clone(), |e| {
        e.max_delivery_attempts(2).backoff(soon()).handler(
            |message: Numbered, _: Context| async move {
                Err::<(), _>(Failure::transient(format!("no stock for {}", message.key)))
            },
        )
    }))
    .await;
    let mut original = envelope("account-7", 3);
    original.correlation_id = Some("conversation".into());
    original.causation_id = Some("cause".into());
    original.headers.insert("tenant", "north");
    original.headers.insert("size", 42);
    put(&broker, ORDERS, original.clone()).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    let [copy] = &broker.messages(PARKED)[..] else {
        panic!("one parked message");
    };
    assert_eq!(copy.id, original.id);
    assert_eq!(copy.message_type, original.message_type);
    assert_eq!(copy.content_type, original.content_type);
    assert_eq!(copy.correlation_id, original.correlation_id);
    assert_eq!(copy.causation_id, original.causation_id);
    assert_eq!(copy.sent_at, original.sent_at);
    assert_eq!(copy.body, original.body);
    for (name, value) in original.headers.iter() {
        assert_eq!(copy.headers.get(name), Some(value), "{name}");
    }
    let added = &copy.headers;
    assert_eq!(added.text(provenance::REASON), Some("failed"));
    assert_eq!(
        added.get(provenance::ATTEMPTS),
        Some(&HeaderValue::Integer(2))
    );
    assert_eq!(added.text(provenance::ENDPOINT), Some(ORDERS));
    assert_eq!(added.text(provenance::QUEUE), Some(ORDERS));
    let detail = added.text(provenance::DETAIL).expect("the error's text");
    assert!(detail.starts_with("no stock for "), "{detail}");
    assert!(!detail.contains("account-7"), "{detail}");
    assert!(matches!(
        added.get(provenance::PARKED_AT),
        Some(HeaderValue::Integer(_))
    ));
}

// O14
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_handled_is_parked_with_its_reason_and_the_rest_flows() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::succeeding(&ledger, ms(1));
    let bus = started(plain_orders(broker.clone(), |e| {
        e.ordered_by_header(KEY_HEADER)
            .ordered_by(|m: &Numbered| m.key.clone())
            .transport_affinity(TransportAffinity::SingleActiveConsumer)
            .handler(handler)
    }))
    .await;
    type Spoil = fn(&mut Envelope);
    let spoils: [(&str, Spoil); 7] = [
        ("undecodable", |e| e.body = b"\xff\x00 garbage"[..].into()),
        ("undecodable", |e| {
            e.body = b"{\"key\":"[..].into();
            e.headers = Headers::new();
        }),
        ("undecodable", |e| e.body = bytes::Bytes::new()),
        ("undecodable", |e| {
            e.content_type = Some("application/xml".into())
        }),
        ("no-handler", |e| e.message_type = Some("unheard-of".into())),
        ("no-handler", |e| {
            e.message_type = None;
            e.headers = Headers::new();
        }),
        ("no-handler", |e| {
            *e = Envelope::default();
        }),
    ];
    let mut expected = Vec::new();
    for number in 0..2_000_u64 {
        let (key, seq) = (format!("key-{}", number % 20), number / 20 + 1);
        put(&broker, ORDERS, envelope(&key, seq)).await;
        ledger.published(&key, seq);
        if number % 100 == 50 {
            let (reason, spoil) = spoils[(number as usize / 100) % spoils.len()];
            // Of a key that has good messages before and behind it.
            let mut spoilt = envelope(&key, seq);
            spoil(&mut spoilt);
            put(&broker, ORDERS, spoilt).await;
            expected.push(reason);
        }
    }
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    let messages = broker.messages(PARKED);
    let mut found: Vec<_> = messages
        .iter()
        .map(|message| message.headers.text(provenance::REASON).expect("a reason"))
        .collect();
    expected.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, expected);
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.attempts), (2_000, 2_000));
}

// O18
#[tokio::test(flavor = "multi_thread")]
async fn a_panic_counts_as_a_failed_attempt_and_nobody_else_notices() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |message, attempt| {
        // One in a hundred panics in its first attempt, one in three hundred in every one.
        match message.seq % 100 {
            7 if message.key == "key-1" => Step::Panic,
            7 if attempt == 1 => Step::Panic,
            _ => Step::Succeed(Duration::ZERO),
        }
    });
    let bus = started(orders(broker.clone(), |e| {
        e.max_delivery_attempts(3).backoff(soon()).handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    publish(&bus, &ledger, 900, 3).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    let state = snapshot(&bus).await;
    assert_eq!((state.parked, state.handled), (3, 897));
    assert_eq!(state.attempts, 897 + 3 * 2 + 3 * 3);
    stop(&bus).await;
    let of_key = |seq| ("key-1".to_owned(), seq);
    assert_eq!(
        parked(&broker, &ledger),
        [of_key(7), of_key(107), of_key(207)]
    );
    let restarted = |kind: &EventKind| matches!(kind, EventKind::ActorRestarted { .. });
    assert_eq!(seen.count(restarted), 0);
    let panicked = |kind: &EventKind| {
        matches!(
            kind,
            EventKind::AttemptFailed {
                failure: FailureKind::Panicked,
                ..
            }
        )
    };
    assert_eq!(seen.count(panicked), 15);
    ledger.figures().expect("in memory").assert_ordered();
}

// O18
#[test]
fn a_handler_that_blocks_its_thread_delays_only_its_own_key() {
    // A thread to spare, so that one blocked handler does not stop the runtime itself.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(3)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let broker = MemoryBroker::new();
        let ledger = OrderLedger::in_memory();
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let record = ledger.clone();
        let blocking = Tally::new();
        let started_blocking = blocking.clone();
        let bus = started(orders(broker.clone(), |e| {
            e.lanes(1).handler(move |message: Numbered, cx: Context| {
                let (held, record) = (Arc::clone(&held), record.clone());
                let blocking = started_blocking.clone();
                async move {
                    let run = record.run(&message.key, message.seq, cx.attempt());
                    if message.key == "blocked" && message.seq == 1 {
                        blocking.add();
                        // An error means that the test is over.
                        let _ = held.lock().expect("no panic").recv();
                    }
                    run.end(true);
                    Ok(())
                }
            })
        }))
        .await;
        send(&bus, &ledger, "blocked", 1).await;
        send(&bus, &ledger, "blocked", 2).await;
        blocking.until("the blocking handler", 1).await;
        for seq in 1..=200 {
            send(&bus, &ledger, "free", seq).await;
        }
        handled(&bus, 200).await;
        assert_eq!(snapshot(&bus).await.running, 1);
        drop(release);
        within("an empty queue", broker.wait_empty(ORDERS)).await;
        stop(&bus).await;
        ledger.figures().expect("in memory").assert_ordered();
    });
}

// O21
#[test]
fn a_timed_out_handler_that_blocks_is_reported_stuck_and_never_overlapped() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(3)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let broker = MemoryBroker::new();
        let ledger = OrderLedger::in_memory();
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let record = ledger.clone();
        let bus = started(orders(broker.clone(), |e| {
            e.lanes(1).handler_timeout(ms(100)).backoff(soon()).handler(
                move |message: Numbered, cx: Context| {
                    let (held, record) = (Arc::clone(&held), record.clone());
                    async move {
                        let run = record.run(&message.key, message.seq, cx.attempt());
                        if message.key == "stuck" && cx.attempt() == 1 && message.seq == 1 {
                            // An error means that the test is over.
                            let _ = held.lock().expect("no panic").recv();
                            // The time-out can only be seen where the handler waits.
                            tokio::task::yield_now().await;
                        }
                        run.end(true);
                        Ok(())
                    }
                },
            )
        }))
        .await;
        let seen = Seen::of(&bus);
        send(&bus, &ledger, "stuck", 1).await;
        send(&bus, &ledger, "stuck", 2).await;
        let stuck = |kind: &EventKind| matches!(kind, EventKind::Stuck { .. });
        seen.until("the stuck key", 1, stuck).await;
        for seq in 1..=50 {
            send(&bus, &ledger, "free", seq).await;
        }
        handled(&bus, 50).await;
        let state = snapshot(&bus).await;
        assert_eq!(state.waiting_keys.len(), 1, "{state:?}");
        assert_eq!(state.waiting_keys[0].why, WaitReason::Stuck);
        assert_eq!((state.waiting_keys[0].behind, state.running), (1, 1));
        drop(release);
        within("an empty queue", broker.wait_empty(ORDERS)).await;
        let state = snapshot(&bus).await;
        assert!(state.waiting_keys.is_empty(), "{state:?}");
        stop(&bus).await;
        assert_eq!(
            seen.count(|kind| matches!(kind, EventKind::Unstuck { .. })),
            1
        );
        assert_eq!(seen.count(stuck), 1);
        let timed_out = |kind: &EventKind| {
            matches!(
                kind,
                EventKind::AttemptFailed {
                    attempt: 1,
                    failure: FailureKind::TimedOut,
                    ..
                }
            )
        };
        assert_eq!(seen.count(timed_out), 1);
        let figures = ledger.figures().expect("in memory");
        figures.assert_ordered();
        assert_eq!((figures.handled, figures.attempts), (52, 53));
    });
}

#[test]
fn an_endpoint_whose_every_permit_is_held_by_a_stuck_handler_is_not_healthy() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(3)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let broker = MemoryBroker::new();
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let bus = started(orders(broker.clone(), |e| {
            e.concurrency(1)
                .handler_timeout(ms(50))
                .handler(move |_: Numbered, _: Context| {
                    let held = Arc::clone(&held);
                    async move {
                        // An error means that the test is over.
                        let _ = held.lock().expect("no panic").recv();
                        Ok(())
                    }
                })
        }))
        .await;
        let seen = Seen::of(&bus);
        assert!(snapshot(&bus).await.is_healthy());
        put(&broker, ORDERS, envelope("stuck", 1)).await;
        put(&broker, ORDERS, envelope("waits for the permit", 1)).await;
        seen.until("the stuck key", 1, |kind| {
            matches!(kind, EventKind::Stuck { .. })
        })
        .await;
        assert!(!snapshot(&bus).await.is_healthy());
        drop(release);
        within("an empty queue", broker.wait_empty(ORDERS)).await;
        assert!(snapshot(&bus).await.is_healthy());
        stop(&bus).await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_never_returns_is_dropped_at_its_time_out_and_parked_as_timed_out() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |message, _| match message.seq {
        1 => Step::Hang,
        _ => Step::Succeed(Duration::ZERO),
    });
    let bus = started(orders(broker.clone(), |e| {
        e.handler_timeout(ms(20))
            .max_delivery_attempts(2)
            .backoff(soon())
            .handler(handler)
    }))
    .await;
    publish(&bus, &ledger, 20, 10).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    assert_eq!(parked(&broker, &ledger).len(), 10);
    for message in broker.messages(PARKED) {
        assert_eq!(message.headers.text(provenance::REASON), Some("timed-out"));
    }
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.attempts), (10, 30));
}

/// An error of the application that is itself broken.
#[derive(Debug)]
struct Treacherous;

impl std::fmt::Display for Treacherous {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        panic!("showing the error panics")
    }
}

impl std::error::Error for Treacherous {}

// O18
#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_panics_when_shown_is_a_failed_attempt_and_no_more() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let record = ledger.clone();
    let bus = started(orders(broker.clone(), |e| {
        e.lanes(1).max_delivery_attempts(2).backoff(soon()).handler(
            move |message: Numbered, cx: Context| {
                let record = record.clone();
                async move {
                    let run = record.run(&message.key, message.seq, cx.attempt());
                    if message.seq % 2 == 1 {
                        run.end(false);
                        return Err(Treacherous.into());
                    }
                    run.end(true);
                    Ok(())
                }
            },
        )
    }))
    .await;
    let seen = Seen::of(&bus);
    publish(&bus, &ledger, 20, 2).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    let restarted = |kind: &EventKind| matches!(kind, EventKind::ActorRestarted { .. });
    assert_eq!(seen.count(restarted), 0);
    assert_eq!(parked(&broker, &ledger).len(), 10);
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.attempts), (10, 30));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_selector_that_panics_is_a_failure_of_its_message_alone() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::succeeding(&ledger, Duration::ZERO);
    let bus = started(plain_orders(broker.clone(), |e| {
        e.ordered_by(|m: &Numbered| {
            assert!(m.seq != 3, "the selector panics");
            m.key.clone()
        })
        .transport_affinity(TransportAffinity::SingleActiveConsumer)
        .max_delivery_attempts(2)
        .backoff(soon())
        .handler(handler)
    }))
    .await;
    publish(&bus, &ledger, 50, 10).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    let parked = parked(&broker, &ledger);
    assert_eq!(parked.len(), 10);
    assert!(parked.iter().all(|&(_, seq)| seq == 3), "{parked:?}");
    for message in broker.messages(PARKED) {
        assert_eq!(message.headers.text(provenance::REASON), Some("panicked"));
    }
    let figures = ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!(figures.handled, 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_permanent_failure_is_parked_after_one_attempt_and_a_discarded_one_is_only_reported() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |message, _| match message.seq {
        2 => Step::FailForGood,
        _ => Step::Succeed(Duration::ZERO),
    });
    let bus = Bus::builder()
        .memory(broker.clone())
        .topology(|t| t.queue(ORDERS, |q| q.single_active_consumer()))
        .endpoint(ORDERS, |e| {
            e.ordered_by_header(KEY_HEADER)
                .transport_affinity(TransportAffinity::SingleActiveConsumer)
                .discard_poison()
                .handler(handler)
        })
        .publishes::<Numbered>(|r| r.to_queue(ORDERS).keyed_by(|m| m.key.clone()));
    let bus = started(bus).await;
    let seen = Seen::of(&bus);
    publish(&bus, &ledger, 30, 10).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    let state = snapshot(&bus).await;
    assert_eq!((state.handled, state.attempts), (20, 30));
    assert_eq!((state.discarded, state.parked, state.gaps), (10, 0, 10));
    stop(&bus).await;
    let gap = |kind: &EventKind| {
        matches!(
            kind,
            EventKind::Gap {
                reason: PoisonReason::Permanent,
                outcome: Outcome::Discarded,
                attempts: 1,
                ..
            }
        )
    };
    assert_eq!(seen.count(gap), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_chooses_the_pause_before_its_next_attempt() {
    let broker = MemoryBroker::new();
    let bus = started(orders(broker.clone(), |e| {
        e.backoff(soon()).handler(|_: Numbered, _: Context| async {
            let pause = Duration::from_secs(3600);
            Err::<(), _>(Failure::retry_after(pause, "come back later"))
        })
    }))
    .await;
    let seen = Seen::of(&bus);
    put(&broker, ORDERS, envelope("patient", 1)).await;
    let chosen = |kind: &EventKind| {
        matches!(kind, EventKind::AttemptFailed { retry_in: Some(pause), .. }
            if *pause == Duration::from_secs(3600))
    };
    seen.until("the failed attempt", 1, chosen).await;
    stop(&bus).await;
    assert_eq!(broker.status(ORDERS).ready, 1);
}
