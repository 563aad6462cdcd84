//! Parking on RabbitMQ when it cannot be done, or is interrupted: a key waits for as long as it takes, the
//! others go on, nothing is lost, and a second copy is only where a confirm was lost.
#![cfg(feature = "rabbitmq")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::FutureExt;
use laneway::prelude::*;
use laneway::{EndpointState, EventKind, WaitReason};
use lapin::BasicProperties;
use tokio::sync::watch;

#[path = "support/orders.rs"]
mod orders;
#[path = "support/stand.rs"]
mod stand;
mod support;
#[path = "support/watched.rs"]
mod watched;
#[path = "support/workload.rs"]
mod workload;
use orders::{Gate, ORDERS, Seen, Tally, handled, snapshot, started, within};
use stand::{BOTH, Gated, Name, Stand, name, on_both, once, soak};
use support::broker::{PrivateBroker, shared_url};
use watched::{Early, Record, Try, Watched};
use workload::{Scripted, Step};

/// Private brokers one at a time: several would only slow one another down.
static ONE_BROKER: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

fn parking_failed(kind: &EventKind) -> bool {
    matches!(kind, EventKind::ParkingFailed { .. })
}

/// Waits until the endpoint is in a state.
async fn reaches(bus: &Bus, wanted: EndpointState) {
    let mut state = bus.endpoint(ORDERS).expect("it exists").state();
    within(
        &format!("{wanted:?}"),
        state.wait_for(|state| *state == wanted),
    )
    .await
    .expect("the endpoint lives");
}

/// A handler that fails for good with the poison numbers of every key, and notes what runs too early.
fn failing(stand: &Stand, record: &Record, early: &Early, is_poison: fn(u64) -> bool) -> Scripted {
    let (record, early) = (record.clone(), early.clone());
    stand.handler(move |message, _| {
        early.check(&record, &message.key, message.seq, is_poison);
        if is_poison(message.seq) {
            Step::FailForGood
        } else {
            Step::Succeed(Duration::ZERO)
        }
    })
}

/// The poison is `key-0`'s first message.
fn one_poison(stand: &Stand) -> Scripted {
    stand.handler(|message, _| {
        if (message.key.as_str(), message.seq) == ("key-0", 1) {
            Step::FailForGood
        } else {
            Step::Succeed(Duration::ZERO)
        }
    })
}

/// Ten keys with ten messages each; the first of `key-0` cannot be parked, and what the broker says contains
/// `says`. Its key waits; the others have all been handled.
async fn one_key_waits(stand: &Stand, bus: &Bus, says: &str) {
    let seen = Seen::of(bus);
    stand.publish(100, 10).await;
    // The second time it was tried again, in vain.
    seen.until("two failed tries", 2, |kind| match kind {
        EventKind::ParkingFailed { error, .. } => {
            assert!(error.contains(says), "{error}");
            true
        }
        _ => false,
    })
    .await;
    handled(bus, 90).await;
    let state = snapshot(bus).await;
    assert_eq!((state.handled, state.parked, state.in_flight), (90, 0, 10));
    let [waiting] = &state.waiting_keys[..] else {
        panic!("one key waits: {state:?}");
    };
    assert_eq!((waiting.why, waiting.behind), (WaitReason::Parking, 9));
}

/// Its parking works again: it is parked, once, and the key goes on.
async fn it_is_parked_once(stand: Stand, bus: Bus) {
    let (copies, figures) = stand.finish(bus).await;
    assert_eq!(copies, once([name(0, 1)]));
    // The last message is one of the handled.
    assert_eq!((figures.handled, figures.attempts), (100, 101));
}

/// Case O7.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_held_while_its_parking_exchange_is_missing_and_parked_once_when_it_is_there() {
    on_both(async |queue_type| {
        let stand = Stand::new(&shared_url(), "no-exchange", queue_type);
        let handler = one_poison(&stand);
        let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| {
            // Fewer would all be held by the key that waits.
            e.max_in_flight(100).handler(handler)
        }))
        .await;
        let foreign = stand.foreign().await;
        foreign.delete_exchange(&stand.exchange()).await;
        one_key_waits(&stand, &bus, &stand.exchange()).await;
        let (exchange, parking) = (stand.exchange(), stand.parking());
        foreign.declare_exchange(&exchange, Some(&parking)).await;
        it_is_parked_once(stand, bus).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_held_while_its_parking_queue_is_full_and_parked_once_when_there_is_room() {
    let _one = ONE_BROKER.lock().await;
    let node = PrivateBroker::start();
    let full = r#"{"max-length":3,"overflow":"reject-publish"}"#;
    node.ctl(&[
        "set_policy",
        "full",
        ".*-parked$",
        full,
        "--apply-to",
        "queues",
    ]);
    on_both(async |queue_type| {
        let stand = Stand::new(&node.url(), "full", queue_type);
        let handler = one_poison(&stand);
        let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| {
            e.max_in_flight(100).handler(handler)
        }))
        .await;
        // A quorum queue may take one or two more than its limit.
        let foreign = stand.foreign().await;
        let mut others = 0;
        while foreign
            .try_publish(&stand.parking(), b"other", BasicProperties::default())
            .await
        {
            others += 1;
            assert!(others < 100, "the queue is never full");
        }
        assert!(others >= 3);
        one_key_waits(&stand, &bus, "nack").await;
        assert_eq!(foreign.ready(&stand.parking()).await, others);
        for _ in 0..others {
            let other = foreign.get(&stand.parking()).await.expect("it is there");
            assert_eq!(other.data, b"other");
        }
        it_is_parked_once(stand, bus).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_becomes_poison_during_a_memory_alarm_is_parked_once_when_the_alarm_is_over() {
    const KEYS: u64 = 20;
    let _one = ONE_BROKER.lock().await;
    let node = PrivateBroker::start();
    let raised = watch::Sender::new(false);
    let ended = watch::Sender::new(false);
    let blocked = Tally::new();
    let alarm = async {
        blocked.until("both are ready", 2).await;
        node.raise_memory_alarm();
        let began = Instant::now();
        raised.send_replace(true);
        blocked.until("both are blocked", 4).await;
        if soak() {
            // The fault itself: its length.
            tokio::time::sleep(Duration::from_secs(60).saturating_sub(began.elapsed())).await;
        }
        node.end_memory_alarm();
        ended.send_replace(true);
    };
    let load = on_both(async |queue_type| {
        let (record, early, gate) = (Record::new(), Early::none(), Gate::closed());
        let stand = Stand::new(&node.url(), "alarm", queue_type);
        let is_poison = |seq: u64| seq % 2 == 1;
        let handler = failing(&stand, &record, &early, is_poison);
        let rabbitmq = RabbitMq::at(&stand.url).operation_timeout(Duration::from_secs(1));
        let writes = record.clone();
        let transport = Watched::new(rabbitmq, move |message, attempt| {
            writes.of(message, attempt)
        });
        let handler = Gated {
            inner: handler,
            gate: gate.clone(),
            waits: |message| message.seq == 3,
        };
        let bus = started(stand.bus(transport, |e| {
            e.concurrency(KEYS as u32)
                .max_in_flight(200)
                .handler(handler)
        }))
        .await;
        let seen = Seen::of(&bus);
        // Each key has parked something before, so the connection is in use.
        stand.publish(4 * KEYS, KEYS).await;
        gate.until_waiting(KEYS as usize).await;
        blocked.add();
        let mut news = raised.subscribe();
        news.wait_for(|raised| *raised).await.expect("it is there");
        gate.open();
        let failures = 2 * KEYS as usize;
        seen.until("refused tries", failures, parking_failed).await;
        let state = snapshot(&bus).await;
        assert_eq!((state.parked, state.handled), (KEYS, KEYS));
        assert_eq!(state.waiting_keys.len() as u64, KEYS);
        blocked.add();
        let mut news = ended.subscribe();
        // No longer than the alarm lasts, which has a bound of its own.
        news.wait_for(|ended| *ended).await.expect("it is there");
        record.until_confirmed(2 * KEYS as usize).await;
        let (copies, _) = stand.finish(bus).await;
        let poison = (0..KEYS).flat_map(|key| [name(key, 1), name(key, 3)]);
        assert_eq!(copies, once(poison), "{queue_type:?}");
        assert_eq!(early.all(), []);
    });
    futures::future::join(alarm, load).await;
}

/// The broker dies when it has confirmed that it has the copy, and before the original is acknowledged. Two
/// buses go on when it is back; two others are gone too, and others take over, who know nothing of the copy.
#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_dies_between_the_confirm_and_the_acknowledgement_leaves_at_most_one_more_copy()
 {
    const KEYS: u64 = 5;
    let _one = ONE_BROKER.lock().await;
    let mut node = PrivateBroker::start();
    let is_poison = |seq: u64| seq == 2;
    let confirmed = Tally::new();
    let killed = watch::Sender::new(false);
    let mut stands = Vec::new();
    for (queue_type, bus_dies) in [
        (BOTH[0], false),
        (BOTH[0], true),
        (BOTH[1], false),
        (BOTH[1], true),
    ] {
        let stand = Stand::new(&node.url(), "confirmed", queue_type);
        let (record, early) = (Record::new(), Early::none());
        let (writes, tells, died) = (record.clone(), confirmed.clone(), killed.clone());
        let transport = Watched::new(RabbitMq::at(&stand.url), move |message, attempt| {
            let attempt = writes.of(message, attempt);
            let (tells, died) = (tells.clone(), died.clone());
            async move {
                let result = attempt.await;
                if *died.borrow() {
                    return result;
                }
                tells.add();
                let mut died = died.subscribe();
                let _ = died.wait_for(|died| *died).await;
                if bus_dies {
                    std::future::pending().await
                } else {
                    result
                }
            }
            .boxed()
        });
        let handler = failing(&stand, &record, &early, is_poison);
        let bus = started(stand.bus(transport, |e| e.handler(handler))).await;
        stands.push((stand, bus, record, early, bus_dies));
    }
    // A quorum queue that is younger than a second or so when its node is killed can be without a leader for
    // ever after (3.10.8). An orderly restart writes everything down.
    node.stop_app();
    node.start_app();
    for (stand, bus, ..) in &stands {
        reaches(bus, EndpointState::Running).await;
        stand.publish(4 * KEYS, KEYS).await;
    }
    let all = 4 * KEYS;
    confirmed.until("confirms", all).await;
    node.kill();
    killed.send_replace(true);
    for (_, bus, .., bus_dies) in &stands {
        reaches(bus, EndpointState::Disconnected).await;
        if *bus_dies {
            // Nothing of it reaches the broker, which is gone.
            within("the end of a bus", bus.shutdown(Duration::ZERO)).await;
        }
    }
    node.restart();
    let ends = stands
        .into_iter()
        .map(async |(stand, mut bus, record, early, bus_dies)| {
            if bus_dies {
                let writes = record.clone();
                let transport = Watched::new(RabbitMq::at(&stand.url), move |message, attempt| {
                    writes.of(message, attempt)
                });
                let handler = failing(&stand, &record, &early, is_poison);
                bus = started(stand.bus(transport, |e| e.handler(handler))).await;
            } else {
                reaches(&bus, EndpointState::Running).await;
            }
            let (copies, _) = stand.finish(bus).await;
            let poison = (0..KEYS).map(|key| name(key, 2));
            assert!(copies.keys().cloned().eq(poison), "{copies:?}");
            for (message, copies) in copies {
                let tries = record.tries(&message);
                assert_eq!(copies, tries.confirmed, "what is confirmed is kept");
                // A bus that lives on knows what it has parked.
                let at_most = if bus_dies { 2 } else { 1 };
                assert!(copies <= at_most, "{copies} copies of {message:?}");
            }
            assert_eq!(early.all(), []);
        });
    futures::future::join_all(ends).await;
}

/// Where the connections are cut, all of them.
#[derive(Debug, Clone, Copy)]
enum Cut {
    /// Before the copy is sent.
    Before,
    /// While it is sent and confirmed, after so many microseconds.
    During(u64),
    /// When it is confirmed, before the bus knows.
    After,
}

#[tokio::test(flavor = "multi_thread")]
async fn poison_is_parked_and_order_kept_while_the_connections_are_cut_at_its_parking() {
    const KEYS: u64 = 8;
    let cuts: u32 = if soak() { 200 } else { 12 };
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    on_both(async |queue_type| {
        let stand = Stand::new(&shared_url(), "cut-parking", queue_type);
        let (proxy, rabbitmq) = stand.behind_proxy();
        let proxy = Arc::new(proxy);
        let (record, early) = (Record::new(), Early::none());
        let is_poison = |seq: u64| seq % 2 == 1;
        let random = Mutex::new(fastrand::Rng::with_seed(seed));
        let left = AtomicU32::new(cuts);
        let writes = record.clone();
        let transport = Watched::new(rabbitmq, move |message, attempt| {
            let attempt = writes.of(message, attempt);
            let spend = |left: u32| left.checked_sub(1);
            let any = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend);
            let mut random = random.lock().expect("no panic under this lock");
            let cut = match (any, random.u8(..4)) {
                (Err(_), _) => return attempt,
                (_, 0) => Cut::Before,
                (_, 1) => Cut::After,
                _ => Cut::During(random.u64(..2_000)),
            };
            with_cut(cut, Arc::clone(&proxy), attempt)
        });
        let handler = failing(&stand, &record, &early, is_poison);
        let bus = started(stand.bus(transport, |e| e.max_in_flight(64).handler(handler))).await;
        // At least twice as much poison as cuts, so that some is parked in peace.
        let each = u64::from(cuts).div_ceil(KEYS) * 4;
        stand.publish(each * KEYS, KEYS).await;
        let poison: Vec<Name> = (0..KEYS)
            .flat_map(|key| (1..=each).map(move |seq| name(key, seq)))
            .filter(|(_, seq)| is_poison(*seq))
            .collect();
        // A minute for each tenth.
        for tenth in 1..=10 {
            record.until_confirmed(poison.len() * tenth / 10).await;
        }
        let (copies, figures) = stand.finish(bus).await;
        println!(
            "{queue_type:?}: {} copies of {}",
            copies.values().sum::<u32>(),
            poison.len()
        );
        assert_eq!(
            copies
                .keys()
                .cloned()
                .collect::<std::collections::BTreeSet<_>>(),
            poison.into_iter().collect()
        );
        for (message, copies) in copies {
            let tries = record.tries(&message);
            assert_eq!(tries.confirmed, 1, "parked once: {message:?} {tries:?}");
            // One more for each try of which nobody knows.
            assert!(
                (1..=1 + tries.unknown).contains(&copies),
                "{copies} copies: {message:?} {tries:?}"
            );
        }
        assert_eq!(early.all(), []);
        assert_eq!(figures.parked, each / 2 * KEYS);
    })
    .await;
}

fn with_cut(cut: Cut, proxy: Arc<support::proxy::Proxy>, attempt: Try) -> Try {
    async move {
        match cut {
            Cut::Before => {
                proxy.cut();
                attempt.await
            }
            Cut::During(micros) => {
                std::thread::spawn(move || {
                    // The fault itself: its moment.
                    std::thread::sleep(Duration::from_micros(micros));
                    proxy.cut();
                });
                attempt.await
            }
            Cut::After => {
                let result = attempt.await;
                proxy.cut();
                result
            }
        }
    }
    .boxed()
}
