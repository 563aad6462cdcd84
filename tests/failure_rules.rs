//! Failure rules decide what happens after a failure: by the error, by a condition, by the kind of failure;
//! those of the endpoint before those of the message's type before those of the bus.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::{
    BusBuilder, EndpointBuilder, EventKind, FailureKind, FailureRules, Outcome, PoisonReason,
};
use serde::{Deserialize, Serialize};

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{
    Gate, NO_ACK_TIMEOUT, ORDERS, PARKED, Seen, Tally, envelope, handled, orders, parked, put,
    send, snapshot, started, stop, within,
};
use workload::{Numbered, Scripted, Step};

/// An error with a cause.
#[derive(Debug)]
struct Outer(Inner);
#[derive(Debug, Clone, Copy)]
struct Inner {
    temporary: bool,
}

impl fmt::Display for Outer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("outer")
    }
}
impl fmt::Display for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("inner")
    }
}
impl std::error::Error for Outer {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}
impl std::error::Error for Inner {}

const TEMPORARY: Inner = Inner { temporary: true };
const LASTING: Inner = Inner { temporary: false };

/// So short that no test waits for it.
const SOON: Duration = Duration::from_millis(1);
/// How one message ended: its outcome and reason, how often it ran, and the pauses between.
#[derive(Debug, PartialEq)]
struct Ended {
    outcome: Outcome,
    reason: PoisonReason,
    attempts: u32,
    pauses: Vec<Duration>,
}

fn ended(outcome: Outcome, reason: PoisonReason, attempts: u32, pauses: &[Duration]) -> Ended {
    let pauses = pauses.to_vec();
    Ended {
        outcome,
        reason,
        attempts,
        pauses,
    }
}

/// Sends one message to a bus and waits until it has ended without effect.
async fn end_of_one(broker: &MemoryBroker, builder: BusBuilder) -> Ended {
    let bus = started(builder).await;
    let seen = Seen::of(&bus);
    put(broker, ORDERS, envelope("a", 1)).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    let mut pauses = Vec::new();
    let mut end = None;
    for kind in seen.all() {
        match kind {
            EventKind::AttemptFailed { retry_in, .. } => pauses.extend(retry_in),
            EventKind::Gap {
                reason,
                outcome,
                attempts,
                ..
            } => end = Some((outcome, reason, attempts)),
            _ => {}
        }
    }
    let (outcome, reason, attempts) = end.expect("a gap");
    let kept = usize::from(outcome == Outcome::Parked);
    assert_eq!(broker.messages(PARKED).len(), kept);
    ended(outcome, reason, attempts, &pauses)
}

/// The end of a message on an endpoint with this handler, these rules, and every default otherwise.
async fn end_under<F>(
    handler: impl Fn() -> F + Send + Sync + Copy + 'static,
    rules: impl FnOnce(FailureRules) -> FailureRules,
) -> Ended
where
    F: Future<Output = Result<(), Failure>> + Send + 'static,
{
    let broker = MemoryBroker::new();
    let builder = orders(broker.clone(), |e| {
        e.handler_timeout(Duration::from_millis(20))
            .ack_timeout(NO_ACK_TIMEOUT)
            .handler(move |_: Numbered, _: Context| handler())
            .on_failure(rules)
    });
    end_of_one(&broker, builder).await
}

async fn outer(inner: Inner) -> Result<(), Failure> {
    Err(Outer(inner).into())
}

use Outcome::{Discarded, Parked};

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_for_an_error_applies_to_the_error_and_to_its_causes_and_to_no_other() {
    let by_cause = end_under(
        || outer(TEMPORARY),
        |p| {
            p.on::<std::io::Error>()
                .park()
                .on::<Inner>()
                .retry_now(1)
                .retry_after([SOON])
                .discard()
        },
    )
    .await;
    let pauses = [Duration::ZERO, SOON];
    assert_eq!(by_cause, ended(Discarded, PoisonReason::Failed, 3, &pauses));
    let itself = end_under(|| outer(TEMPORARY), |p| p.on::<Outer>().park()).await;
    assert_eq!(itself, ended(Parked, PoisonReason::Failed, 1, &[]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_condition_on_the_error_decides_between_rules_and_the_first_that_applies_wins() {
    let rules = |p: FailureRules| {
        p.on::<Inner>()
            .when(|e| e.temporary)
            .retry_now(2)
            .park()
            .on::<Inner>()
            .discard()
            .on_any()
            .park()
    };
    assert_eq!(
        end_under(|| outer(TEMPORARY), rules).await,
        ended(Parked, PoisonReason::Failed, 3, &[Duration::ZERO; 2])
    );
    assert_eq!(
        end_under(|| outer(LASTING), rules).await,
        ended(Discarded, PoisonReason::Failed, 1, &[])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_condition_on_the_failure_sees_its_kind_and_its_errors() {
    let rules = |p: FailureRules| {
        p.on_any()
            .when(|f| f.kind() == FailureKind::Permanent && f.find::<Inner>().is_some())
            .discard()
            .on_any()
            .park()
    };
    async fn for_good() -> Result<(), Failure> {
        Err(Failure::permanent(Outer(LASTING)))
    }
    assert_eq!(
        end_under(for_good, rules).await,
        ended(Discarded, PoisonReason::Permanent, 1, &[])
    );
    assert_eq!(
        end_under(|| outer(LASTING), rules).await,
        ended(Parked, PoisonReason::Failed, 1, &[])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_with_a_condition_that_panics_does_not_apply() {
    let end = end_under(
        || outer(TEMPORARY),
        |p| {
            p.on::<Inner>()
                .when(|_| panic!("a condition"))
                .park()
                .on_any()
                .discard()
        },
    )
    .await;
    assert_eq!(end, ended(Discarded, PoisonReason::Failed, 1, &[]));
}

#[tokio::test(flavor = "multi_thread")]
async fn panics_and_time_outs_have_rules_of_their_own() {
    let rules = |p: FailureRules| {
        p.on_panic()
            .retry_now(1)
            .discard()
            .on_timeout()
            .retry_after([SOON])
            .park()
            .on_any()
            .park()
    };
    async fn panics() -> Result<(), Failure> {
        panic!("a handler")
    }
    assert_eq!(
        end_under(panics, rules).await,
        ended(Discarded, PoisonReason::Panicked, 2, &[Duration::ZERO])
    );
    assert_eq!(
        end_under(std::future::pending, rules).await,
        ended(Parked, PoisonReason::TimedOut, 2, &[SOON])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn undecodable_messages_and_those_without_a_handler_have_rules_of_their_own() {
    let broker = MemoryBroker::new();
    let bus = started(orders(broker.clone(), |e| {
        e.handler(|_: Numbered, _: Context| async { Ok(()) })
            .on_failure(|p| p.on_undecodable().discard().on_no_handler().discard())
    }))
    .await;
    let seen = Seen::of(&bus);
    let mut undecodable = envelope("a", 1);
    undecodable.body = "not json".to_owned().into();
    let mut unknown = envelope("b", 1);
    unknown.message_type = Some("unknown".into());
    put(&broker, ORDERS, undecodable).await;
    put(&broker, ORDERS, unknown).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    for wanted in [PoisonReason::Undecodable, PoisonReason::NoHandler] {
        let discarded = seen.count(|kind| {
            matches!(kind, EventKind::Gap { reason, outcome: Discarded, .. } if *reason == wanted)
        });
        assert_eq!(discarded, 1, "{wanted}");
    }
    assert_eq!(broker.messages(PARKED).len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_that_the_handler_asks_for_takes_the_place_of_the_rules_pause() {
    async fn asks() -> Result<(), Failure> {
        Err(Failure::retry_after(SOON, "busy"))
    }
    let hour = Duration::from_secs(3_600);
    let end = end_under(asks, |p| {
        p.on_any().when(|_| true).retry_after([hour]).park()
    })
    .await;
    assert_eq!(end, ended(Parked, PoisonReason::Failed, 2, &[SOON]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rules_back_off_goes_on_for_as_many_attempts_as_are_allowed() {
    let end = end_under(
        || outer(TEMPORARY),
        |p| {
            p.on::<Inner>()
                .retry_now(1)
                .backoff(Backoff::constant(SOON))
                .discard()
        },
    )
    .await;
    let pauses = [Duration::ZERO, SOON, SOON, SOON];
    assert_eq!(end, ended(Discarded, PoisonReason::Failed, 5, &pauses));
}

/// Which of three levels have a rule; each would end the message after another number of attempts.
async fn attempts_with(own: bool, of_type: bool, of_bus: bool) -> u32 {
    let rule = |retries| move |p: FailureRules| p.on::<Inner>().retry_now(retries).park();
    let broker = MemoryBroker::new();
    let mut builder = orders(broker.clone(), |e| {
        let e = e
            .backoff(Backoff::constant(SOON))
            .handler(|_: Numbered, _: Context| outer(TEMPORARY));
        if own { e.on_failure(rule(1)) } else { e }
    });
    if of_bus {
        builder = builder.on_failure(rule(3));
    }
    if of_type {
        builder = builder.on_failure_of::<Numbered>(rule(2));
    }
    end_of_one(&broker, builder).await.attempts
}

#[tokio::test(flavor = "multi_thread")]
async fn the_endpoints_rules_come_before_those_of_the_message_type_before_those_of_the_bus() {
    for (own, of_type, of_bus, attempts) in [
        (true, true, true, 2),
        (true, false, true, 2),
        (false, true, true, 3),
        (false, true, false, 3),
        (false, false, true, 4),
        (false, false, false, 5),
    ] {
        assert_eq!(
            attempts_with(own, of_type, of_bus).await,
            attempts,
            "{own} {of_type} {of_bus}"
        );
    }
}

#[derive(Serialize, Deserialize)]
struct Other;
impl Message for Other {
    const TYPE: &'static str = "other";
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_for_a_message_type_leaves_other_types_alone() {
    let broker = MemoryBroker::new();
    let builder = orders(broker.clone(), |e| {
        e.backoff(Backoff::constant(SOON))
            .handler(|_: Numbered, _: Context| outer(TEMPORARY))
            .handler(|_: Other, _: Context| outer(TEMPORARY))
    })
    .on_failure_of::<Other>(|p| p.on_any().discard());
    let end = end_of_one(&broker, builder).await;
    assert_eq!((end.outcome, end.attempts), (Parked, 5));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_keeps_its_order_through_the_retries_and_the_discards_of_rules() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |message, attempt| match message.seq % 5 {
        1 if attempt < 3 => Step::Fail(Duration::ZERO),
        2 => Step::Panic,
        3 => Step::FailForGood,
        _ => Step::Succeed(Duration::ZERO),
    });
    let bus = started(orders(broker.clone(), |e| {
        e.handler(handler).on_failure(|p| {
            p.on_panic()
                .retry_now(1)
                .discard()
                .on_any()
                .retry_now(1)
                .retry_after([SOON])
                .park()
        })
    }))
    .await;
    let seen = Seen::of(&bus);
    workload::publish(&bus, &ledger, 200, 10).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    let discarded = |kind: &EventKind| {
        let reason = PoisonReason::Panicked;
        matches!(kind, EventKind::Gap { reason: r, outcome: Discarded, .. } if *r == reason)
    };
    assert_eq!(seen.count(discarded), 40);
    let parked = parked(&broker, &ledger);
    assert_eq!(parked.len(), 40);
    assert!(parked.iter().all(|(_, seq)| seq % 5 == 3), "{parked:?}");
    let figures = ledger.figures().expect("in memory");
    assert_eq!((figures.inversions, figures.overlaps), (0, 0));
    assert_eq!(figures.handled, 120);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_discard_by_a_rule_that_was_decided_after_its_session_is_not_run_again() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let (gate, runs) = (Gate::closed(), Tally::new());
    let (held, counted) = (gate.clone(), runs.clone());
    let bus = started(orders(broker.clone(), |e| {
        e.abort_grace(Duration::from_secs(60))
            .handler(move |message: Numbered, _: Context| {
                let (gate, runs) = (held.clone(), counted.clone());
                async move {
                    if message.seq > 1 {
                        return Ok(());
                    }
                    runs.add();
                    gate.pass().await;
                    outer(LASTING).await
                }
            })
            .on_failure(|p| p.on::<Inner>().discard())
    }))
    .await;
    let seen = Seen::of(&bus);
    send(&bus, &ledger, "a", 1).await;
    send(&bus, &ledger, "a", 2).await;
    gate.until_waiting(1).await;
    let opened = |kind: &EventKind| matches!(kind, EventKind::Connected { .. });
    let sessions = seen.count(opened);
    broker.cut_sessions(ORDERS);
    seen.until("another session", sessions + 1, opened).await;
    gate.open();
    handled(&bus, 1).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    assert_eq!(snapshot(&bus).await.discarded, 1);
    stop(&bus).await;
    assert_eq!(runs.get(), 1);
    assert_eq!(broker.messages(PARKED).len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_message_runs_more_often_than_max_delivery_attempts_whatever_the_rules() {
    const LIMIT: u32 = 4;
    let mut most_of_all = 0;
    for seed in 0..40_u64 {
        let mut random = fastrand::Rng::with_seed(seed);
        let broker = MemoryBroker::new();
        let runs = Arc::new(Mutex::new(std::collections::HashMap::<u64, u32>::new()));
        let counted = Arc::clone(&runs);
        let handler = move |message: Numbered, cx: Context| {
            *counted
                .lock()
                .expect("no panic")
                .entry(message.seq)
                .or_default() += 1;
            async move {
                // Attempts of one message fail in different ways.
                match (message.seq + u64::from(cx.attempt())) % 5 {
                    0 => Err(Failure::permanent("for good")),
                    1 => Err(Failure::retry_after(SOON, "later")),
                    2 => panic!("a handler"),
                    3 => outer(TEMPORARY).await,
                    _ => outer(LASTING).await,
                }
            }
        };
        let describe = |e: EndpointBuilder| {
            e.max_delivery_attempts(LIMIT)
                .backoff(Backoff::constant(SOON))
                .handler(handler)
                .on_failure(|mut p| {
                    for _ in 0..random.usize(1..4) {
                        // Conditions, so that none hides another.
                        let taste = random.u32(1..3);
                        let rule = p
                            .on_any()
                            .when(move |f| f.detail().len() as u32 % 3 == taste);
                        let rule = match random.u32(0..4) {
                            0 => rule.retry_now(random.u32(1..LIMIT)),
                            1 => rule.retry_after(vec![SOON; random.usize(1..LIMIT as usize)]),
                            2 => rule.retry_now(1).backoff(Backoff::constant(SOON)),
                            _ => rule,
                        };
                        p = if random.bool() {
                            rule.park()
                        } else {
                            rule.discard()
                        };
                    }
                    p
                })
        };
        let bus = started(orders(broker.clone(), describe)).await;
        for seq in 1..=10 {
            put(&broker, ORDERS, envelope("a", seq)).await;
        }
        within("an empty queue", broker.wait_empty(ORDERS)).await;
        stop(&bus).await;
        let runs = runs.lock().expect("no panic");
        assert_eq!(runs.len(), 10, "seed {seed}");
        let most = runs.values().copied().max().expect("ten");
        assert!(most <= LIMIT, "seed {seed}: {most}");
        most_of_all = most.max(most_of_all);
    }
    assert_eq!(most_of_all, LIMIT, "the limit was never reached");
}
