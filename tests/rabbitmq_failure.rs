//! Handlers that fail, on RabbitMQ and on both kinds of queues: what the rules say happens, messages that
//! cannot be handled are parked with their reason, and a handler that panics or blocks harms its key alone.
#![cfg(feature = "rabbitmq")]

use std::collections::BTreeMap;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use laneway::prelude::*;
use laneway::transport::provenance;
use laneway::{EventKind, FailureKind, FailureRules, Outcome, PoisonReason, WaitReason};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};

#[path = "support/orders.rs"]
mod orders;
#[path = "support/stand.rs"]
mod stand;
mod support;
#[path = "support/workload.rs"]
mod workload;
use orders::{Seen, Tally, handled, snapshot, started, stop};
use stand::{Name, Stand, name, on_both, once};
use support::broker::shared_url;
use support::foreign::numbered;
use workload::{KEY_HEADER, Numbered, Scripted, Step};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Parked, discarded and retried messages in every key, with pauses; the numbers say which.
fn as_numbered(message: &Numbered, attempt: u32) -> Step {
    match message.seq % 10 {
        1 if attempt < 4 => Step::Fail(Duration::ZERO),
        2 => Step::Panic,
        3 => Step::FailForGood,
        4 if attempt < 3 => Step::Panic,
        5 => Step::Fail(Duration::ZERO),
        6 if attempt == 1 && message.seq == 6 => Step::Hang,
        _ => Step::Succeed(ms(1).mul_f64(fastrand::f64())),
    }
}

fn every_step(p: FailureRules) -> FailureRules {
    p.on_panic()
        .retry_now(1)
        .retry_after([ms(2)])
        .discard()
        .on_timeout()
        .backoff(Backoff::constant(ms(5)))
        .park()
        .on_any()
        .retry_now(1)
        .retry_after([ms(5), ms(1)])
        .park()
}

/// Case O11, with the rules: a requeue would put a message behind the prefetched ones.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_keeps_its_order_through_retries_pauses_and_discards_with_a_prefetch_of_a_hundred() {
    const KEYS: u64 = 20;
    on_both(async |queue_type| {
        let stand = Stand::new(&shared_url(), "rules", queue_type);
        let handler = stand.handler(as_numbered);
        let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| {
            e.concurrency(16)
                .max_in_flight(100)
                .handler_timeout(ms(500))
                .handler(handler)
                .on_failure(every_step)
        }))
        .await;
        let seen = Seen::of(&bus);
        // So few that all their events fit into the bus's memory of them.
        stand.publish(30 * KEYS, KEYS).await;
        stand.until_settled(&bus).await;
        let numbers = |ends: &'static [u64]| {
            let all = (0..KEYS).flat_map(|key| (1..=30).map(move |seq| name(key, seq)));
            all.filter(move |(_, seq)| ends.contains(&(seq % 10)))
        };
        let mut discarded: Vec<Name> = seen.all().into_iter().filter_map(discarded).collect();
        discarded.sort();
        let mut expected: Vec<Name> = numbers(&[2]).collect();
        expected.sort();
        assert_eq!(discarded, expected, "each is reported as a gap");
        for (key, seq) in &discarded {
            stand.ledger.discarded(key, *seq);
        }
        let state = snapshot(&bus).await;
        assert_eq!((state.discarded, state.parked), (3 * KEYS, 6 * KEYS));
        assert_eq!((state.gaps, state.reconnects), (9 * KEYS, 0));
        // On a slow machine others than those that hang can be timed out too, and tried again.
        let timed_out = seen.count(is_timed_out) as u64;
        assert!(timed_out >= KEYS);
        let (copies, figures) = stand.finish(bus).await;
        assert_eq!(copies, once(numbers(&[3, 5])));
        assert_eq!((figures.handled, figures.duplicates), (21 * KEYS + 2, 0));
        // Every attempt that the rules say, and no other.
        let in_ten: u64 = [1, 4, 3, 1, 3, 4, 1, 1, 1, 1].iter().sum();
        assert_eq!(figures.attempts, 3 * in_ten * KEYS + timed_out + 2);
    })
    .await;
}

fn is_timed_out(kind: &EventKind) -> bool {
    let timed_out = FailureKind::TimedOut;
    matches!(kind, EventKind::AttemptFailed { attempt: 1, failure, .. } if *failure == timed_out)
}

/// The message of a gap that was discarded after a panic.
fn discarded(kind: EventKind) -> Option<Name> {
    match kind {
        EventKind::Gap {
            message: Some(id),
            reason: PoisonReason::Panicked,
            outcome: Outcome::Discarded,
            attempts: 3,
            ..
        } => {
            let id = id.to_string();
            let (key, seq) = id.rsplit_once('-').expect("key and number");
            Some((key.to_owned(), seq.parse().expect("a number")))
        }
        _ => None,
    }
}

/// Case O14.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_handled_is_parked_with_its_reason_and_the_rest_flows() {
    type Spoil = fn(&mut Vec<u8>, &mut BasicProperties);
    fn typed(p: &BasicProperties, message_type: &str) -> BasicProperties {
        p.clone().with_type(message_type.into())
    }
    let spoils: [(&str, Spoil); 6] = [
        ("undecodable", |body, _| {
            *body = b"\xff\x00 garbage".to_vec()
        }),
        ("undecodable", |body, p| {
            *body = b"{\"key\":".to_vec();
            *p = p.clone().with_headers(FieldTable::default());
        }),
        ("undecodable", |body, _| body.clear()),
        ("undecodable", |_, p| {
            *p = p.clone().with_content_type("application/xml".into());
        }),
        ("no-handler", |_, p| *p = typed(p, "unheard-of")),
        // No type, no key, no id: nothing at all.
        ("no-handler", |_, p| *p = BasicProperties::default()),
    ];
    on_both(async |queue_type| {
        let stand = Stand::new(&shared_url(), "garbage", queue_type);
        let handler = stand.handler(|_, _| Step::Succeed(Duration::ZERO));
        let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| {
            e.max_in_flight(100)
                .ordered_by(|message: &Numbered| message.key.clone())
                .handler(handler)
        }))
        .await;
        let foreign = stand.foreign().await;
        let mut expected = BTreeMap::new();
        for hundred in 0..12 {
            // Of a key that has good messages before and behind it.
            let (reason, spoil) = spoils[hundred % spoils.len()];
            for number in 0..100 {
                let (key, seq) = name(number % 20, hundred as u64 * 5 + number / 20 + 1);
                stand.ledger.published(&key, seq);
                let (body, properties) = numbered(KEY_HEADER, &key, seq);
                foreign.publish(&stand.queue, &body, properties).await;
            }
            let (mut body, mut properties) = numbered(KEY_HEADER, "key-7", 0);
            spoil(&mut body, &mut properties);
            foreign.publish(&stand.queue, &body, properties).await;
            *expected.entry((reason.to_owned(), body)).or_insert(0) += 1;
        }
        stand.until_settled(&bus).await;
        stop(&bus).await;
        let mut found = BTreeMap::new();
        while let Some(copy) = foreign.get(&stand.parking()).await {
            let headers = copy.properties.headers().as_ref().expect("headers").inner();
            let Some(AMQPValue::LongString(reason)) = headers.get(provenance::REASON) else {
                panic!("no reason: {headers:?}");
            };
            *found.entry((reason.to_string(), copy.data)).or_insert(0) += 1;
        }
        assert_eq!(found, expected);
        let (_, figures) = stand.parked_and_figures().await;
        assert_eq!((figures.handled, figures.attempts), (1_201, 1_201));
    })
    .await;
}

/// Case O18: one in a hundred panics, once or for good.
#[tokio::test(flavor = "multi_thread")]
async fn panics_count_as_failed_attempts_and_nobody_else_notices() {
    on_both(async |queue_type| {
        let stand = Stand::new(&shared_url(), "panics", queue_type);
        let handler = stand.handler(|message, attempt| match message.seq % 100 {
            7 if message.key == "key-1" || attempt == 1 => Step::Panic,
            _ => Step::Succeed(Duration::ZERO),
        });
        let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| {
            e.max_in_flight(100)
                .max_delivery_attempts(3)
                .backoff(Backoff::constant(ms(1)))
                .handler(handler)
        }))
        .await;
        let seen = Seen::of(&bus);
        stand.publish(1_500, 5).await;
        stand.until_settled(&bus).await;
        let state = snapshot(&bus).await;
        assert_eq!((state.parked, state.reconnects), (3, 0));
        let restarted = |kind: &EventKind| matches!(kind, EventKind::ActorRestarted { .. });
        assert_eq!(seen.count(restarted), 0);
        let (copies, figures) = stand.finish(bus).await;
        assert_eq!(copies, once([7, 107, 207].map(|seq| name(1, seq))));
        assert_eq!(figures.handled, 1_497 + 2);
        // 12 once, 3 each three times in vain.
        assert_eq!(figures.attempts, 1_499 + 12 + 9);
    })
    .await;
}

/// Blocks its thread in the first run of message 1 of `key-0`, for some time and until it is released.
struct Blocking {
    inner: Scripted,
    at_least: Duration,
    held: Mutex<mpsc::Receiver<()>>,
    blocks: Tally,
}

impl Handler<Numbered> for Blocking {
    type Answer = ();

    async fn handle(&self, message: Numbered, cx: Context) -> Result<(), Failure> {
        if (message.key.as_str(), message.seq, cx.attempt()) != ("key-0", 1, 1) {
            return self.inner.handle(message, cx).await;
        }
        let run = self.inner.ledger.run(&message.key, message.seq, 1);
        self.blocks.add();
        // The fault itself.
        std::thread::sleep(self.at_least);
        // An error means that the test is over.
        let _ = self.held.lock().expect("no panic under this lock").recv();
        // A time-out can only be seen where the handler waits.
        tokio::task::yield_now().await;
        run.end(true);
        Ok(())
    }
}

/// A bus of which one handler blocks; everything of the other keys is handled meanwhile.
struct Blocked {
    stand: Stand,
    bus: Bus,
    seen: Seen,
    release: mpsc::Sender<()>,
}

async fn one_blocks(queue_type: QueueType, at_least: Duration, time_out: Duration) -> Blocked {
    let stand = Stand::new(&shared_url(), "blocks", queue_type);
    let (release, held) = mpsc::channel();
    let blocks = Tally::new();
    let handler = Blocking {
        inner: stand.handler(|_, _| Step::Succeed(Duration::ZERO)),
        at_least,
        held: Mutex::new(held),
        blocks: blocks.clone(),
    };
    let bus = started(stand.bus(RabbitMq::at(&stand.url), |e| {
        e.lanes(1)
            .max_in_flight(100)
            .handler_timeout(time_out)
            .backoff(Backoff::constant(ms(1)))
            .handler(handler)
    }))
    .await;
    let seen = Seen::of(&bus);
    stand.publish(400, 20).await;
    blocks.until("the blocking handler", 1).await;
    handled(&bus, 380).await;
    let state = snapshot(&bus).await;
    assert_eq!((state.running, state.in_flight), (1, 20), "{state:?}");
    Blocked {
        stand,
        bus,
        seen,
        release,
    }
}

/// Case O18.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_handler_that_blocks_its_thread_delays_only_its_own_key() {
    on_both(async |queue_type| {
        let minute = Duration::from_secs(60);
        let blocked = one_blocks(queue_type, Duration::from_secs(2), minute).await;
        drop(blocked.release);
        let (copies, figures) = blocked.stand.finish(blocked.bus).await;
        assert_eq!(copies, once([]));
        assert_eq!((figures.handled, figures.attempts), (401, 401));
    })
    .await;
}

/// Case O21.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_timed_out_handler_that_blocks_is_reported_stuck_and_never_overlapped() {
    on_both(async |queue_type| {
        let (second, three) = (Duration::from_secs(1), Duration::from_secs(3));
        let blocked = one_blocks(queue_type, three, second).await;
        let stuck = |kind: &EventKind| matches!(kind, EventKind::Stuck { .. });
        blocked.seen.until("the stuck key", 1, stuck).await;
        let state = snapshot(&blocked.bus).await;
        let [waiting] = &state.waiting_keys[..] else {
            panic!("one key waits: {state:?}");
        };
        assert_eq!((waiting.why, waiting.behind), (WaitReason::Stuck, 19));
        assert_eq!((state.handled, state.running), (380, 1));
        drop(blocked.release);
        blocked.stand.until_settled(&blocked.bus).await;
        let unstuck = |kind: &EventKind| matches!(kind, EventKind::Unstuck { .. });
        assert_eq!(
            (blocked.seen.count(stuck), blocked.seen.count(unstuck)),
            (1, 1)
        );
        assert_eq!(blocked.seen.count(is_timed_out), 1);
        let (copies, figures) = blocked.stand.finish(blocked.bus).await;
        assert_eq!(copies, once([]));
        // The blocked run does not count; the second one is the message's.
        assert_eq!((figures.handled, figures.attempts), (402, 403));
    })
    .await;
}
