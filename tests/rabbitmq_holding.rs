//! `PoisonMode::BlockKey` on RabbitMQ, on both kinds of queues: the held message is not lost with its
//! connection, the hold goes on with its copy, and it ends as an operator or a bound says.
#![cfg(feature = "rabbitmq")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use laneway::prelude::*;
use laneway::{EndpointState, EventKind, HoldEnd, HoldOver, PoisonMode, WaitReason};

#[path = "support/orders.rs"]
mod orders;
#[path = "support/stand.rs"]
mod stand;
mod support;
#[path = "support/workload.rs"]
mod workload;
use orders::{
    ORDERS, Seen, ends, handled, held_keys, in_flight, is_held, is_over, snapshot, started, stop,
    within,
};
use stand::{Name, Stand, name, on_both, once};
use support::broker::shared_url;
use workload::{Numbered, Scripted, Step};

/// Message 1 of every key fails for good, until it is cured.
fn curable(stand: &Stand) -> (Arc<AtomicBool>, Scripted) {
    let cured = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&cured);
    let handler = stand.handler(move |message: &Numbered, _| {
        if message.seq == 1 && !asked.load(Ordering::SeqCst) {
            Step::FailForGood
        } else {
            Step::Succeed(Duration::ZERO)
        }
    });
    (cured, handler)
}

/// A key is held; its connection is cut again and again; it is still held, by the copy, and nothing of it has
/// run. Then an operator ends the hold.
async fn a_hold_outlives_its_connections(queue_type: QueueType, end: HoldEnd) {
    const CUTS: u64 = 3;
    let stand = Stand::new(&shared_url(), "held", queue_type);
    let (proxy, rabbitmq) = stand.behind_proxy();
    let (cured, handler) = curable(&stand);
    let bus = started(stand.bus(rabbitmq, |e| {
        e.max_in_flight(100)
            .poison_mode(PoisonMode::block_key())
            .handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    stand.send_all("key-0", 1..=3).await;
    seen.until("a held key", 1, is_held).await;
    let key = held_keys(&seen)[0];
    for cut in 1..=CUTS {
        proxy.cut();
        let again = |kind: &EventKind| matches!(kind, EventKind::Connected { reconnects, .. } if *reconnects >= cut);
        seen.until("the next session", 1, again).await;
        // Behind the three, so that these have come again when it is handled.
        stand.send("key-1", cut + 1).await;
        handled(&bus, cut).await;
        in_flight(&bus, 3).await;
        let state = snapshot(&bus).await;
        assert_eq!(
            (state.state, state.attempts),
            (EndpointState::Running, 1 + cut)
        );
        let [waiting] = &state.waiting_keys[..] else {
            panic!("one key waits: {state:?}");
        };
        assert_eq!(
            (waiting.key, waiting.why, waiting.behind),
            (Some(key), WaitReason::Held, 2)
        );
    }
    assert_eq!(ends(&seen), []);
    cured.store(true, Ordering::SeqCst);
    within("an answer", bus.end_hold(ORDERS, key, end))
        .await
        .expect("still held");
    stand.until_settled(&bus).await;
    assert_eq!(ends(&seen), [(Some(key), HoldOver::Operator(end))]);
    let gaps = seen.count(|kind| matches!(kind, EventKind::Gap { .. }));
    let attempts = snapshot(&bus).await.attempts;
    let head = name(0, 1);
    // The others of its key, those of the other key, the last message, and the first run of the head (in the
    // attempts) or one more last message (in what is handled).
    let others = 2 + CUTS + 2;
    let parked: Vec<Name> = match end {
        HoldEnd::Release => vec![head],
        HoldEnd::Retry => vec![],
        HoldEnd::Skip => {
            stand.ledger.skipped(&head.0, head.1);
            vec![]
        }
    };
    let retried = u64::from(end == HoldEnd::Retry);
    assert_eq!((gaps as u64, attempts), (1 - retried, others + retried));
    let (copies, figures) = stand.finish(bus).await;
    assert_eq!(copies, once(parked), "{queue_type:?} {end:?}");
    assert_eq!((figures.handled, figures.duplicates), (others + retried, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_outlives_its_connections_and_ends_as_an_operator_says() {
    on_both(async |queue_type| {
        let ends = [HoldEnd::Release, HoldEnd::Retry, HoldEnd::Skip];
        let runs = ends.map(|end| a_hold_outlives_its_connections(queue_type, end));
        futures::future::join_all(runs).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_message_of_a_bus_that_ends_runs_again_before_its_successors_on_the_next() {
    on_both(async |queue_type| {
        let stand = Stand::new(&shared_url(), "held-given-back", queue_type);
        let (cured, handler) = curable(&stand);
        let describe = |e: laneway::EndpointBuilder, handler: &Scripted| {
            e.max_in_flight(100)
                .poison_mode(PoisonMode::block_key())
                .handler(handler.clone())
        };
        let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| describe(e, &handler))).await;
        let seen = Seen::of(&bus);
        stand.publish(30, 10).await;
        seen.until("held keys", 10, is_held).await;
        in_flight(&bus, 30).await;
        stop(&bus).await;
        assert_eq!(stand.foreign().await.ready(&stand.queue).await, 30);
        cured.store(true, Ordering::SeqCst);
        let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| describe(e, &handler))).await;
        let (copies, figures) = stand.finish(bus).await;
        assert_eq!(copies, once([]));
        assert_eq!((figures.handled, figures.duplicates), (31, 0));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_lasts_too_long_ends_with_its_head_parked() {
    on_both(async |queue_type| {
        let stand = Stand::new(&shared_url(), "held-too-long", queue_type);
        let (_, handler) = curable(&stand);
        let hold_at_most = Duration::from_millis(20);
        let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| {
            e.poison_mode(PoisonMode::BlockKey { hold_at_most })
                .handler(handler)
        }))
        .await;
        let seen = Seen::of(&bus);
        stand.publish(3, 1).await;
        seen.until("the end of the hold", 1, is_over).await;
        let key = held_keys(&seen)[0];
        assert_eq!(ends(&seen), [(Some(key), HoldOver::TooLong)]);
        let (copies, figures) = stand.finish(bus).await;
        assert_eq!(copies, once([name(0, 1)]));
        assert_eq!((figures.handled, figures.attempts), (3, 4));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_held_keys_use_more_than_half_the_credits_the_oldest_is_parked() {
    on_both(async |queue_type| {
        let stand = Stand::new(&shared_url(), "held-many", queue_type);
        let (_, handler) = curable(&stand);
        let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| {
            e.concurrency(4)
                .max_in_flight(4)
                .poison_mode(PoisonMode::block_key())
                .handler(handler)
        }))
        .await;
        let seen = Seen::of(&bus);
        // Two are half of the credits; each further one costs the oldest its hold.
        for number in 1..=6 {
            stand.send(&format!("key-{number}"), 1).await;
            seen.until("a held key", number, is_held).await;
            seen.until("room", number.saturating_sub(2), is_over).await;
        }
        let keys = held_keys(&seen);
        let oldest = keys[..4].iter().map(|key| (Some(*key), HoldOver::TooMany));
        assert_eq!(ends(&seen), oldest.collect::<Vec<_>>());
        in_flight(&bus, 2).await;
        // What is left of the credits is enough for the others.
        stand.send_all("key-7", 2..=50).await;
        handled(&bus, 49).await;
        assert_eq!(ends(&seen).len(), 4);
        for key in &keys[4..] {
            let answer = bus.end_hold(ORDERS, *key, HoldEnd::Skip);
            within("an answer", answer).await.expect("held");
        }
        for key in [5, 6] {
            let (key, seq) = name(key, 1);
            stand.ledger.skipped(&key, seq);
        }
        let (copies, _) = stand.finish(bus).await;
        assert_eq!(copies, once((1..=4).map(|key| name(key, 1))));
    })
    .await;
}
