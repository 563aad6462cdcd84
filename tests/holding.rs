//! `PoisonMode::BlockKey`: a poison message holds its key, and only its key, until an operator decides or a
//! bound is reached.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::{
    EndpointBuilder, EventKind, Fingerprint, HoldEnd, HoldError, HoldOver, Outcome, PoisonMode,
    PoisonReason, Problem, WaitReason,
};

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{
    ORDERS, PARKED, Seen, ends, envelope, handled, held_keys, in_flight, is_held, is_over, orders,
    parked, plain_orders, put, send, snapshot, started, stop, within,
};
use workload::{Numbered, Scripted, Step};

/// A handler that fails for good with message 1 of every key that begins with `bad`, until it is cured.
struct Cure(Arc<AtomicBool>);

impl Cure {
    fn handler(ledger: &OrderLedger) -> (Self, Scripted) {
        let cured = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&cured);
        let handler = Scripted::new(ledger, move |message, _| {
            let bad = message.key.starts_with("bad") && message.seq == 1;
            if bad && !asked.load(Ordering::SeqCst) {
                Step::FailForGood
            } else {
                Step::Succeed(Duration::ZERO)
            }
        });
        (Self(cured), handler)
    }

    fn apply(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A bus on which message 1 of key `bad` is held and two of its successors wait.
struct Held {
    broker: MemoryBroker,
    ledger: OrderLedger,
    bus: Bus,
    seen: Seen,
    cure: Cure,
    key: Fingerprint,
}

async fn one_held() -> Held {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let (cure, handler) = Cure::handler(&ledger);
    let bus = started(orders(broker.clone(), |e| {
        e.lanes(1)
            .poison_mode(PoisonMode::block_key())
            .handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    for seq in 1..=3 {
        send(&bus, &ledger, "bad", seq).await;
    }
    seen.until("a held key", 1, is_held).await;
    let key = held_keys(&seen)[0];
    in_flight(&bus, 3).await;
    Held {
        broker,
        ledger,
        bus,
        seen,
        cure,
        key,
    }
}

impl Held {
    async fn end(&self, end: HoldEnd) -> Result<(), HoldError> {
        within("an answer", self.bus.end_hold(ORDERS, self.key, end)).await
    }

    /// Everything has ended; the ledger shows these numbers of handled messages and attempts.
    async fn finish(self, numbers: (u64, u64)) -> Vec<(String, u64)> {
        within("an empty queue", self.broker.wait_empty(ORDERS)).await;
        stop(&self.bus).await;
        let parked = parked(&self.broker, &self.ledger);
        let figures = self.ledger.figures().expect("in memory");
        assert_eq!((figures.inversions, figures.overlaps), (0, 0));
        assert_eq!((figures.handled, figures.attempts), numbers);
        parked
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_key_waits_visibly_and_the_other_keys_of_its_lane_go_on() {
    let held = one_held().await;
    for seq in 1..=100 {
        send(&held.bus, &held.ledger, "good", seq).await;
    }
    handled(&held.bus, 100).await;
    let state = snapshot(&held.bus).await;
    assert_eq!((state.attempts, state.gaps, state.parked), (101, 0, 0));
    let [waiting] = &state.waiting_keys[..] else {
        panic!("one key waits: {:?}", state.waiting_keys);
    };
    assert_eq!(waiting.why, WaitReason::Held);
    assert_eq!((waiting.key, waiting.behind), (Some(held.key), 2));
    held.end(HoldEnd::Release).await.expect("held");
    assert_eq!(held.finish((102, 103)).await, [("bad".to_owned(), 1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_released_head_is_parked_with_its_reason_and_its_key_goes_on() {
    let held = one_held().await;
    held.end(HoldEnd::Release).await.expect("held");
    within("an empty queue", held.broker.wait_empty(ORDERS)).await;
    let copy = &held.broker.messages(PARKED)[0];
    let header = |name| copy.headers.text(name).map(str::to_owned);
    use laneway::transport::provenance::{DETAIL, REASON};
    assert_eq!(header(REASON).as_deref(), Some("permanent"));
    assert_eq!(header(DETAIL).as_deref(), Some("as the script says"));
    let why = HoldOver::Operator(HoldEnd::Release);
    assert_eq!(ends(&held.seen), [(Some(held.key), why)]);
    let gap = |kind: &EventKind| matches!(kind, EventKind::Gap { .. });
    assert_eq!(held.seen.count(gap), 1);
    assert_eq!(held.finish((2, 3)).await, [("bad".to_owned(), 1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_head_runs_as_a_first_attempt_and_leaves_no_gap() {
    let held = one_held().await;
    held.cure.apply();
    held.end(HoldEnd::Retry).await.expect("held");
    handled(&held.bus, 3).await;
    assert_eq!(snapshot(&held.bus).await.gaps, 0);
    assert_eq!(held.finish((3, 4)).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_head_that_fails_again_is_held_again() {
    let held = one_held().await;
    held.end(HoldEnd::Retry).await.expect("held");
    held.seen.until("a second hold", 2, is_held).await;
    held.end(HoldEnd::Skip).await.expect("held");
    assert_eq!(held.finish((2, 4)).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_skipped_head_is_discarded_and_reported_as_a_gap() {
    let held = one_held().await;
    held.end(HoldEnd::Skip).await.expect("held");
    let gap = |kind: &EventKind| {
        matches!(
            kind,
            EventKind::Gap {
                outcome: Outcome::Discarded,
                reason: PoisonReason::Permanent,
                ..
            }
        )
    };
    held.seen.until("a gap", 1, gap).await;
    assert_eq!(held.finish((2, 3)).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_is_held_can_be_released() {
    let held = one_held().await;
    let nobody = within(
        "an answer",
        held.bus.end_hold("none", held.key, HoldEnd::Retry),
    )
    .await;
    assert_eq!(nobody, Err(HoldError::NoEndpoint("none".to_owned())));
    // What an operator has is the text in a log.
    let shown: Fingerprint = held.key.to_string().parse().expect("a fingerprint");
    assert_eq!(shown, held.key);
    held.end(HoldEnd::Release).await.expect("held");
    assert_eq!(
        held.end(HoldEnd::Release).await,
        Err(HoldError::NotHeld(held.key))
    );
    held.finish((2, 3)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_outlives_a_lost_session_and_its_head_does_not_run_again() {
    let held = one_held().await;
    held.broker.cut_sessions(ORDERS);
    let again = |kind: &EventKind| matches!(kind, EventKind::Connected { reconnects: 1, .. });
    held.seen.until("another session", 1, again).await;
    send(&held.bus, &held.ledger, "good", 1).await;
    handled(&held.bus, 1).await;
    in_flight(&held.bus, 3).await;
    let state = snapshot(&held.bus).await;
    assert_eq!((state.attempts, state.waiting_keys.len()), (2, 1));
    assert_eq!(state.waiting_keys[0].why, WaitReason::Held);
    held.end(HoldEnd::Release).await.expect("still held");
    assert_eq!(held.finish((3, 4)).await, [("bad".to_owned(), 1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_does_not_wait_for_a_held_key_and_gives_it_back() {
    let held = one_held().await;
    stop(&held.bus).await;
    assert_eq!(held.broker.status(ORDERS).total(), 3);
    assert_eq!(held.broker.messages(PARKED).len(), 0);
    // Whoever comes next begins anew, in order.
    let handler = Scripted::succeeding(&held.ledger, Duration::ZERO);
    let bus = started(orders(held.broker.clone(), |e| e.handler(handler))).await;
    within("an empty queue", held.broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    held.ledger.figures().expect("in memory").assert_ordered();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_lasts_too_long_ends_loudly_with_its_head_parked() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let (_cure, handler) = Cure::handler(&ledger);
    let hold_at_most = Duration::from_millis(20);
    let bus = started(orders(broker.clone(), |e| {
        e.poison_mode(PoisonMode::BlockKey { hold_at_most })
            .handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    send(&bus, &ledger, "bad", 1).await;
    send(&bus, &ledger, "bad", 2).await;
    seen.until("the end of the hold", 1, is_over).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    let key = held_keys(&seen)[0];
    assert_eq!(ends(&seen), [(Some(key), HoldOver::TooLong)]);
    let waited = |kind: &EventKind| match kind {
        EventKind::HoldEnded { after, .. } => *after >= hold_at_most,
        _ => false,
    };
    assert_eq!(seen.count(waited), 1);
    assert_eq!(parked(&broker, &ledger), [("bad".to_owned(), 1)]);
    ledger.figures().expect("in memory").assert_ordered();
}

#[tokio::test(flavor = "multi_thread")]
async fn when_held_keys_use_more_than_half_the_credits_the_oldest_is_parked() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let (_cure, handler) = Cure::handler(&ledger);
    let bus = started(orders(broker.clone(), |e| {
        e.concurrency(4)
            .max_in_flight(4)
            .poison_mode(PoisonMode::block_key())
            .handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    // Two are half of the credits; each further one costs the oldest its hold.
    for number in 1..=5 {
        send(&bus, &ledger, &format!("bad-{number}"), 1).await;
        seen.until("a held key", number, is_held).await;
        seen.until("room", number.saturating_sub(2), is_over).await;
    }
    let keys = held_keys(&seen);
    let oldest = keys[..3].iter().map(|key| (Some(*key), HoldOver::TooMany));
    assert_eq!(ends(&seen), oldest.collect::<Vec<_>>());
    in_flight(&bus, 2).await;
    // What waits behind a held key uses credits too.
    send(&bus, &ledger, "bad-5", 2).await;
    seen.until("room", 4, is_over).await;
    in_flight(&bus, 2).await;
    send(&bus, &ledger, "good", 1).await;
    handled(&bus, 1).await;
    stop(&bus).await;
    let parked = parked(&broker, &ledger);
    let expected = [1, 2, 3, 4].map(|number| (format!("bad-{number}"), 1));
    assert_eq!(parked, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keyless_poison_message_holds_nobody_and_is_parked() {
    let broker = MemoryBroker::new();
    let bus = started(orders(broker.clone(), |e| {
        e.poison_mode(PoisonMode::block_key())
            .handler(|_: Numbered, _: Context| async { Err::<(), _>(Failure::permanent("always")) })
    }))
    .await;
    let seen = Seen::of(&bus);
    let mut keyless = envelope("a", 1);
    keyless.headers = laneway::Headers::default();
    put(&broker, ORDERS, keyless).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    assert_eq!(seen.count(is_held), 0);
    assert_eq!(broker.messages(PARKED).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_a_rule_discards_is_not_held() {
    let broker = MemoryBroker::new();
    let bus = started(orders(broker.clone(), |e| {
        e.poison_mode(PoisonMode::block_key())
            .on_failure(|p| p.on_any().discard())
            .handler(|_: Numbered, _: Context| async { Err::<(), _>(Failure::permanent("always")) })
    }))
    .await;
    let seen = Seen::of(&bus);
    put(&broker, ORDERS, envelope("a", 1)).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    stop(&bus).await;
    assert_eq!(seen.count(is_held), 0);
}

#[test]
fn a_hold_without_effect_or_beyond_the_acknowledgement_time_out_is_refused() {
    async fn idle(_: Numbered, _: Context) -> Result<(), Failure> {
        Ok(())
    }
    fn found(ordered: bool, change: fn(EndpointBuilder) -> EndpointBuilder) -> Vec<Problem> {
        let broker = MemoryBroker::new();
        let describe = |e: EndpointBuilder| change(e.handler(idle));
        let builder = if ordered {
            orders(broker, describe)
        } else {
            plain_orders(broker, describe)
        };
        let error = builder.build().err();
        error.map(|error| error.problems).unwrap_or_default()
    }
    assert_eq!(found(true, |e| e.poison_mode(PoisonMode::block_key())), []);
    let cases = [
        (
            found(false, |e| e.poison_mode(PoisonMode::block_key())),
            "without ordering",
        ),
        (
            found(true, |e| {
                e.poison_mode(PoisonMode::BlockKey {
                    hold_at_most: Duration::from_secs(1_800),
                })
            }),
            "less than `ack_timeout` (1800s)",
        ),
        (
            found(true, |e| {
                e.poison_mode(PoisonMode::BlockKey {
                    hold_at_most: Duration::ZERO,
                })
            }),
            "more than zero",
        ),
        (
            found(true, |e| {
                e.concurrency(1)
                    .max_in_flight(1)
                    .poison_mode(PoisonMode::block_key())
            }),
            "max_in_flight(1)",
        ),
    ];
    for (problems, part) in cases {
        let [problem] = &problems[..] else {
            panic!("one problem: {problems:?}");
        };
        assert_eq!(problem.setting, "poison_mode");
        assert!(problem.what.contains(part), "{part:?}: {problem}");
    }
    let both = found(true, |e| {
        e.discard_poison().poison_mode(PoisonMode::block_key())
    });
    assert!(
        both.iter()
            .any(|p| p.setting == "poison_mode" && p.what.contains("contradicts")),
        "{both:?}"
    );
}
