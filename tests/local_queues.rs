//! Local queues: which queues follow from the handlers, what reaches them, and that they are endpoints like any other.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use laneway::prelude::*;
use laneway::{EventKind, InvokeError, Outcome, PublishError, WithKey};
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, mpsc};

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{Tally, started, stop, within};

macro_rules! messages {
    ($($name:ident $text:literal),*) => {$(
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        struct $name {
            account: u64,
            number: u64,
        }
        impl Message for $name {
            const TYPE: &'static str = $text;
        }
        impl Keyed for $name {
            fn key(&self) -> OrderingKey {
                self.account.into()
            }
        }
        impl $name {
            fn new(account: u64, number: u64) -> Self {
                Self { account, number }
            }
        }
    )*};
}
messages!(Paid "paid", Shipped "shipped", Billed "billed");

type Seen = mpsc::UnboundedReceiver<(&'static str, u64)>;
type Sender = mpsc::UnboundedSender<(&'static str, u64)>;

/// A handler that tells its name and the number of each message.
macro_rules! tells {
    ($seen:expr, $name:literal, $message:ty) => {{
        let seen: Sender = $seen.clone();
        move |message: $message, _: Context| {
            let seen = seen.clone();
            async move {
                seen.send(($name, message.number))?;
                Ok(())
            }
        }
    }};
}

async fn next(seen: &mut Seen) -> (&'static str, u64) {
    within("a handled message", seen.recv())
        .await
        .expect("open")
}

async fn next_of(seen: &mut Seen, count: usize) -> Vec<(&'static str, u64)> {
    let mut all = Vec::new();
    for _ in 0..count {
        all.push(next(seen).await);
    }
    all.sort_unstable();
    all
}

/// Nothing more comes: everything has drained.
async fn nothing_more(bus: &Bus, seen: &mut Seen) {
    stop(bus).await;
    assert_eq!(seen.try_recv().ok(), None);
}

async fn snapshot(bus: &Bus, queue: &str) -> laneway::EndpointSnapshot {
    let snapshot = within("a snapshot", bus.snapshot()).await;
    snapshot.endpoint(queue).expect("it exists").clone()
}

// ---- routing

#[tokio::test(flavor = "multi_thread")]
async fn a_type_with_a_handler_has_a_queue_of_its_own_and_needs_no_transport() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let bus = started(
        Bus::builder()
            .handler::<Paid, _>(tells!(tell, "paid", Paid))
            .handler::<Shipped, _>(tells!(tell, "shipped", Shipped)),
    )
    .await;
    bus.publish(&Paid::new(1, 1)).await.expect("published");
    bus.publish(&Shipped::new(1, 2)).await.expect("published");
    assert_eq!(next_of(&mut seen, 2).await, [("paid", 1), ("shipped", 2)]);
    let names: Vec<_> = bus
        .snapshot()
        .await
        .endpoints
        .into_iter()
        .map(|one| one.endpoint)
        .collect();
    assert_eq!(names, ["paid".into(), "shipped".into()]);
    nothing_more(&bus, &mut seen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn publish_reaches_every_subscriber_and_send_needs_at_least_one() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let bus = started(
        Bus::builder()
            .handler::<Paid, _>(tells!(tell, "own", Paid))
            .separated::<Paid, _>("billing", tells!(tell, "billing", Paid))
            .separated::<Paid, _>("mail", tells!(tell, "mail", Paid)),
    )
    .await;
    bus.send(&Paid::new(1, 1)).await.expect("sent");
    let expected = [("billing", 1), ("mail", 1), ("own", 1)];
    assert_eq!(next_of(&mut seen, 3).await, expected);
    // Nobody handles it: an event that nobody listens to, a command that cannot be carried out.
    bus.publish(&Billed::new(1, 1)).await.expect("no error");
    let error = bus.send(&Billed::new(1, 1)).await.expect_err("nobody");
    assert!(matches!(error, PublishError::NoHandler(name) if name == "billed"));
    let error = bus.send_keyed(&Billed::new(1, 1), "key").await;
    assert!(matches!(error, Err(PublishError::NoHandler(_))));
    nothing_more(&bus, &mut seen).await;
    let closed = bus.publish(&Paid::new(1, 2)).await;
    assert!(matches!(closed, Err(PublishError::ShutDown)));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_local_handlers_a_type_without_a_route_has_no_destination() {
    let bus = started(Bus::builder().memory(MemoryBroker::new())).await;
    let error = bus.publish(&Paid::new(1, 1)).await;
    assert!(matches!(error, Err(PublishError::NoDestination(_))));
    let error = bus.send(&Paid::new(1, 1)).await;
    assert!(matches!(error, Err(PublishError::NoHandler(_))));
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_for_both_sends_to_the_transport_and_to_the_local_queues() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let broker = MemoryBroker::new();
    let bus = started(
        Bus::builder()
            .memory(broker.clone())
            .topology(|t| t.queue("outside", |q| q.durable()))
            .handler::<Paid, _>(tells!(tell, "local", Paid))
            .publishes::<Paid>(|r| r.to_queue("outside").and_local_queues()),
    )
    .await;
    bus.publish(&Paid::new(1, 1)).await.expect("published");
    assert_eq!(next(&mut seen).await, ("local", 1));
    let sent = broker.messages("outside");
    assert_eq!(sent.len(), 1);
    // The route's encoding.
    assert_eq!(sent[0].content_type.as_deref(), Some("application/json"));
    nothing_more(&bus, &mut seen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn local_messages_are_message_pack_and_a_refused_route_leaves_nothing_in_buffered_queues() {
    let (content, mut contents) = mpsc::unbounded_channel();
    let (tell, mut seen) = mpsc::unbounded_channel();
    let broker = MemoryBroker::new();
    let bus = started(
        Bus::builder()
            .memory(broker.clone())
            .topology(|t| t.queue("outside", |q| q.durable()))
            .handler::<Billed, _>(move |_: Billed, cx: Context| {
                let content = content.clone();
                async move { Ok(content.send(cx.envelope().content_type.clone())?) }
            })
            .handler::<Paid, _>(tells!(tell, "local", Paid))
            .publishes::<Paid>(|r| r.to_queue("outside").and_local_queues()),
    )
    .await;
    bus.publish(&Billed::new(1, 1)).await.expect("published");
    let content = within("a message", contents.recv()).await.expect("open");
    assert_eq!(content.as_deref(), Some("application/msgpack"));
    broker.make_unreachable();
    let refused = bus.publish(&Paid::new(1, 1)).await;
    assert!(matches!(refused, Err(PublishError::Refused(_))));
    nothing_more(&bus, &mut seen).await;
}

// ---- handlers

#[tokio::test(flavor = "multi_thread")]
async fn handlers_of_one_type_run_together_and_separated_ones_have_retries_of_their_own() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let failing = |tell: &Sender, name: &'static str, failures: u32| {
        let (tell, left) = (tell.clone(), Arc::new(AtomicU32::new(failures)));
        move |message: Paid, cx: Context| {
            let (tell, left) = (tell.clone(), Arc::clone(&left));
            async move {
                tell.send((name, u64::from(cx.attempt())))?;
                let fails =
                    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
                match fails {
                    Ok(_) => Err(Failure::transient(format!("message {}", message.number))),
                    Err(_) => Ok(()),
                }
            }
        }
    };
    let bus = started(
        Bus::builder()
            .handler::<Paid, _>(failing(&tell, "first", 0))
            .handler::<Paid, _>(failing(&tell, "second", 1))
            .separated::<Paid, _>("billing", failing(&tell, "billing", 3))
            .separated::<Paid, _>("mail", failing(&tell, "mail", 0))
            .local_queues(|q| q.backoff(Backoff::constant(Duration::ZERO))),
    )
    .await;
    bus.publish(&Paid::new(1, 1)).await.expect("published");
    let all = next_of(&mut seen, 9).await;
    let mut attempts: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (name, attempt) in all {
        attempts.entry(name).or_default().push(attempt);
    }
    assert_eq!(attempts["first"], [1, 2], "both run again");
    assert_eq!(attempts["second"], [1, 2]);
    assert_eq!(attempts["billing"], [1, 2, 3, 4], "its own retries");
    assert_eq!(attempts["mail"], [1], "nobody else's");
    nothing_more(&bus, &mut seen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_handler_returns_is_published_after_its_success_and_only_then() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let held = Arc::new(Semaphore::new(0));
    let (begun, gate) = (Tally::new(), Arc::clone(&held));
    let begins = begun.clone();
    let several = move |paid: Paid, cx: Context| {
        let (begins, gate) = (begins.clone(), Arc::clone(&gate));
        async move {
            begins.add();
            gate.acquire().await?.forget();
            if cx.attempt() < 3 {
                return Err(Failure::transient("not yet"));
            }
            let bills = (1..=paid.number).map(|number| Billed::new(paid.account, number));
            let shipped = (paid.number > 1).then(|| Shipped::new(paid.account, paid.number));
            Ok((bills.collect::<Vec<_>>(), shipped))
        }
    };
    let bus = started(
        Bus::builder()
            .handler::<Paid, _>(several)
            .handler::<Billed, _>(tells!(tell, "billed", Billed))
            .handler::<Shipped, _>(tells!(tell, "shipped", Shipped))
            .local_queue("paid", |q| {
                q.sequential().backoff(Backoff::constant(Duration::ZERO))
            }),
    )
    .await;
    for number in [0, 1, 2] {
        bus.publish(&Paid::new(1, number)).await.expect("published");
    }
    for attempt in 1..=3 {
        begun.until("an attempt", attempt).await;
        assert_eq!(seen.try_recv().ok(), None, "before its success");
        held.add_permits(1);
    }
    held.add_permits(6);
    let expected = [("billed", 1), ("billed", 1), ("billed", 2), ("shipped", 2)];
    assert_eq!(next_of(&mut seen, 4).await, expected);
    nothing_more(&bus, &mut seen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_fails_for_good_is_a_gap_and_is_discarded() {
    let bus = started(
        Bus::builder()
            .handler::<Paid, _>(async |_: Paid, _: Context| -> Result<Billed, Failure> {
                Err(Failure::transient("never"))
            })
            .local_queue("paid", |q| {
                q.max_delivery_attempts(2)
                    .backoff(Backoff::constant(Duration::ZERO))
            }),
    )
    .await;
    let mut events = bus.events();
    bus.publish(&Paid::new(1, 1)).await.expect("published");
    let gap = within("the gap", async {
        loop {
            let event = events.recv().await.expect("open");
            if let EventKind::Gap {
                outcome, attempts, ..
            } = event.kind
            {
                return (event.endpoint, outcome, attempts);
            }
        }
    })
    .await;
    assert_eq!(gap, ("paid".into(), Outcome::Discarded, 2));
    assert!(bus.parked("paid").is_err());
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_queue_goes_on_in_its_order_with_what_it_had() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let failed = Arc::new(AtomicU32::new(0));
    let handler = move |paid: Paid, _: Context| {
        let (tell, failed): (Sender, _) = (tell.clone(), Arc::clone(&failed));
        async move {
            if paid.number == 3 && failed.fetch_add(1, Ordering::SeqCst) == 0 {
                return Err(Failure::transient("a pause"));
            }
            tell.send(("paid", paid.number))?;
            Ok(())
        }
    };
    let bus = started(Bus::builder().handler_with::<Paid, _>(handler, |q| {
        q.sequential().bound(5).on_failure(|p| {
            p.on_any()
                .pause_endpoint(Duration::from_millis(10))
                .discard()
        })
    }))
    .await;
    // More than there are places: those of the messages that came back are taken still.
    for number in 0..20 {
        let message = Paid::new(1, number);
        within("a place", bus.publish(&message))
            .await
            .expect("published");
    }
    for number in 0..20 {
        assert_eq!(next(&mut seen).await, ("paid", number));
    }
    nothing_more(&bus, &mut seen).await;
}

// ---- order

/// Numbers of one account that were handled, by account.
type Order = Arc<Mutex<BTreeMap<u64, Vec<u64>>>>;

/// Counts how many run at once and holds them until `permits` lets them go.
#[derive(Clone)]
struct Running {
    permits: Arc<Semaphore>,
    now: Arc<AtomicU32>,
    most: Arc<AtomicU32>,
    begun: Tally,
}

impl Running {
    fn new() -> Self {
        Self {
            permits: Arc::new(Semaphore::new(0)),
            now: Arc::default(),
            most: Arc::default(),
            begun: Tally::new(),
        }
    }

    async fn run(&self) -> Result<(), Failure> {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        self.begun.add();
        self.permits.acquire().await?.forget();
        self.now.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_queue_runs_handlers_off_the_publishers_task_and_5_at_once() {
    let running = Running::new();
    let of = running.clone();
    let bus = started(Bus::builder().handler_with::<Paid, _>(
        move |_: Paid, _: Context| {
            let running = of.clone();
            async move { running.run().await }
        },
        |q| q.max_parallel(5),
    ))
    .await;
    // All publishes return although no handler has: nothing is let go yet.
    for number in 0..20 {
        within("a publish", bus.publish(&Paid::new(number, number)))
            .await
            .expect("published");
    }
    running.begun.until("5 at once", 5).await;
    for ended in 1..=20 {
        running.permits.add_permits(1);
        let begun = (ended + 5).min(20);
        running.begun.until("the next one", begun).await;
    }
    stop(&bus).await;
    assert_eq!(running.most.load(Ordering::SeqCst), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partitioned_queue_keeps_the_order_of_each_key_and_runs_keys_in_parallel() {
    let order = Order::default();
    let (count, of) = (Tally::new(), Arc::clone(&order));
    let counted = count.clone();
    let failed = Arc::new(AtomicU32::new(0));
    let handler = move |paid: Paid, cx: Context| {
        let (order, counted, failed) = (Arc::clone(&of), counted.clone(), Arc::clone(&failed));
        async move {
            assert_eq!(cx.key(), Some(&paid.account.into()));
            // Every seventh fails once: its key waits for it.
            if paid.number.is_multiple_of(7) && cx.attempt() == 1 {
                failed.fetch_add(1, Ordering::SeqCst);
                return Err(Failure::transient("once"));
            }
            tokio::task::yield_now().await;
            order
                .lock()
                .expect("no panic")
                .entry(paid.account)
                .or_default()
                .push(paid.number);
            counted.add();
            Ok(())
        }
    };
    let bus = started(
        Bus::builder()
            .keyed::<Paid>()
            .handler_with::<Paid, _>(handler, |q| {
                q.partitioned(8)
                    .backoff(Backoff::constant(Duration::from_millis(1)))
            }),
    )
    .await;
    for number in 0..50 {
        for account in 0..20 {
            bus.publish(&Paid::new(account, number))
                .await
                .expect("published");
        }
    }
    count.until("all", 1_000).await;
    stop(&bus).await;
    for numbers in order.lock().expect("no panic").values() {
        assert_eq!(*numbers, (0..50).collect::<Vec<_>>());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_waits_with_a_long_backlog_delays_no_other_key() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let handler = move |paid: Paid, _: Context| {
        let tell: Sender = tell.clone();
        async move {
            if paid.account == 1 {
                return Err(Failure::transient("not now"));
            }
            tell.send(("paid", paid.number))?;
            Ok(())
        }
    };
    let bus = started(
        Bus::builder()
            .keyed::<Paid>()
            .handler_with::<Paid, _>(handler, |q| {
                q.partitioned(2)
                    .backoff(Backoff::constant(Duration::from_secs(3_600)))
            }),
    )
    .await;
    for number in 0..1_000 {
        bus.publish(&Paid::new(1, number)).await.expect("published");
    }
    bus.publish(&Paid::new(2, 7)).await.expect("published");
    assert_eq!(next(&mut seen).await, ("paid", 7));
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequential_queue_handles_one_at_a_time_in_order_also_through_retries() {
    let running = Running::new();
    running.permits.add_permits(1_000);
    let (tell, mut seen) = mpsc::unbounded_channel();
    let of = running.clone();
    let handler = move |paid: Paid, cx: Context| {
        let (running, tell) = (of.clone(), tell.clone());
        async move {
            running.run().await?;
            if paid.number.is_multiple_of(5) && cx.attempt() < 3 {
                return Err(Failure::transient("twice"));
            }
            tell.send(("paid", paid.number))?;
            Ok(())
        }
    };
    let bus = started(Bus::builder().handler_with::<Paid, _>(handler, |q| {
        q.sequential().backoff(Backoff::constant(Duration::ZERO))
    }))
    .await;
    for number in 0..100 {
        // Whatever key it has.
        bus.publish_keyed(&Paid::new(1, number), number)
            .await
            .expect("published");
    }
    for number in 0..100 {
        assert_eq!(next(&mut seen).await, ("paid", number));
    }
    stop(&bus).await;
    assert_eq!(running.most.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_key_is_the_explicit_one_else_the_rules() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    fn tells_key<T: Message>(
        tell: &mpsc::UnboundedSender<(&'static str, Option<OrderingKey>)>,
    ) -> impl laneway::Handler<T> {
        let tell = tell.clone();
        move |_: T, cx: Context| {
            let tell = tell.clone();
            async move {
                let sent = tell.send((T::TYPE, cx.key().cloned()));
                sent.map_err(|_| Failure::permanent("the test has ended"))
            }
        }
    }
    let bus = started(
        Bus::builder()
            .key_by::<Paid, _>(|paid: &Paid| format!("rule-{}", paid.account))
            .keyed::<(Shipped, Billed)>()
            .handler::<Paid, _>(tells_key::<Paid>(&tell))
            .handler::<Shipped, _>(tells_key::<Shipped>(&tell))
            .handler_with::<Billed, _>(
                async |billed: Billed, _: Context| {
                    // Returned under a key of its own.
                    Ok(WithKey::new(
                        Paid::new(9, 9),
                        format!("returned-{}", billed.account),
                    ))
                },
                |q| q.partitioned(2),
            )
            .local_queue("paid", |q| q.partitioned(2))
            .local_queue("shipped", |q| q.partitioned(2)),
    )
    .await;
    let mut key_of_next = async || within("a key", seen.recv()).await.expect("open");
    bus.publish(&Paid::new(1, 1)).await.expect("published");
    assert_eq!(key_of_next().await, ("paid", Some("rule-1".into())));
    bus.publish_keyed(&Paid::new(1, 1), "explicit")
        .await
        .expect("published");
    assert_eq!(key_of_next().await, ("paid", Some("explicit".into())));
    bus.publish(&Shipped::new(2, 1)).await.expect("published");
    assert_eq!(key_of_next().await, ("shipped", Some("2".into())));
    bus.publish(&Billed::new(3, 1)).await.expect("published");
    assert_eq!(key_of_next().await, ("paid", Some("returned-3".into())));
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_without_a_key_is_counted_where_publishers_give_the_keys() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let handler = tells!(tell, "paid", Paid);
    let bus = started(
        Bus::builder().handler_with::<Paid, _>(handler, |q| q.partitioned(2).keys_from_publisher()),
    )
    .await;
    let mut events = bus.events();
    bus.publish_keyed(&Paid::new(1, 1), 1_u64)
        .await
        .expect("published");
    bus.publish(&Paid::new(1, 2)).await.expect("published");
    next_of(&mut seen, 2).await;
    assert_eq!(snapshot(&bus, "paid").await.keyless, 1);
    within("the event", async {
        while !matches!(
            events.recv().await.expect("open").kind,
            EventKind::KeyMissing { .. }
        ) {}
    })
    .await;
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_without_order_runs_messages_of_one_key_in_parallel() {
    let running = Running::new();
    let of = running.clone();
    let handler = move |_: Paid, cx: Context| {
        let running = of.clone();
        async move {
            assert_eq!(cx.key(), None);
            running.run().await
        }
    };
    let bus = started(Bus::builder().keyed::<Paid>().handler::<Paid, _>(handler)).await;
    for number in 0..5 {
        bus.publish(&Paid::new(1, number)).await.expect("published");
    }
    running.begun.until("all of one key at once", 5).await;
    running.permits.add_permits(5);
    stop(&bus).await;
}

// ---- bounds

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_holds_up_publishers_from_outside_until_a_message_has_ended() {
    let running = Running::new();
    let of = running.clone();
    let bus = started(Bus::builder().handler_with::<Paid, _>(
        move |_: Paid, _: Context| {
            let running = of.clone();
            async move { running.run().await }
        },
        |q| q.bound(2),
    ))
    .await;
    let messages: Vec<_> = (0..4).map(|number| Paid::new(1, number)).collect();
    for message in &messages[..2] {
        bus.publish(message).await.expect("there is a place");
    }
    running.begun.until("both to begin", 2).await;
    let mut third = Box::pin(bus.publish(&messages[2]));
    assert!((&mut third).now_or_never().is_none(), "no place");
    // Given up: nothing of it stays behind.
    drop(third);
    let mut fourth = Box::pin(bus.publish(&messages[3]));
    assert!((&mut fourth).now_or_never().is_none(), "no place");
    running.permits.add_permits(1);
    within("a place", fourth).await.expect("published");
    running.permits.add_permits(2);
    running.begun.until("three", 3).await;
    stop(&bus).await;
    assert_eq!(running.begun.get(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_cascades_20_000_messages_to_its_own_queue_and_another_loses_none() {
    const MANY: u64 = 20_000;
    let (own, other) = (Tally::new(), Tally::new());
    let (owns, others) = (own.clone(), other.clone());
    let paid = move |paid: Paid, cx: Context| {
        let owns = owns.clone();
        async move {
            owns.add();
            let mut returned = Vec::new();
            if paid.number == 0 {
                for number in 1..=MANY {
                    cx.publish(&Paid::new(1, number)).await?;
                    returned.push(Billed::new(1, number));
                }
            }
            Ok(returned)
        }
    };
    let billed = move |_: Billed, _: Context| {
        let others = others.clone();
        async move {
            others.add();
            Ok(())
        }
    };
    // A single handler at a time and a small bound: whoever waited for a place would wait for ever.
    let bus = started(
        Bus::builder()
            .handler_with::<Paid, _>(paid, |q| q.bound(10).max_parallel(1))
            .handler_with::<Billed, _>(billed, |q| q.bound(10)),
    )
    .await;
    bus.publish(&Paid::new(1, 0)).await.expect("published");
    own.until("its own", 20_001).await;
    other.until("the other's", 20_000).await;
    // And the bound holds again for who comes from outside.
    bus.publish(&Paid::new(1, 1)).await.expect("published");
    own.until("one more", 20_002).await;
    stop(&bus).await;
    assert_eq!((own.get(), other.get()), (20_002, 20_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_lets_nobody_wait_for_a_place() {
    let running = Running::new();
    let of = running.clone();
    let bus = started(Bus::builder().handler_with::<Paid, _>(
        move |_: Paid, _: Context| {
            let running = of.clone();
            async move { running.run().await }
        },
        |q| q.bound(1),
    ))
    .await;
    bus.publish(&Paid::new(1, 1)).await.expect("published");
    running.begun.until("it to begin", 1).await;
    let message = Paid::new(1, 2);
    let mut waiting = Box::pin(bus.publish(&message));
    assert!((&mut waiting).now_or_never().is_none(), "no place");
    within("the shutdown", bus.shutdown(Duration::ZERO)).await;
    let result = within("the publisher", waiting).await;
    assert!(matches!(result, Err(PublishError::ShutDown)), "{result:?}");
}

// ---- invoke

#[tokio::test(flavor = "multi_thread")]
async fn invoke_answers_inline_and_publishes_nothing_of_the_answer() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let bus = started(
        Bus::builder()
            .handler::<Paid, _>(async |paid: Paid, cx: Context| {
                assert_eq!((cx.endpoint(), cx.attempt()), ("paid", 1));
                match paid.number {
                    0 => Err(Failure::permanent("zero")),
                    1 => panic!("one"),
                    2 => std::future::pending().await,
                    number => {
                        cx.publish(&Shipped::new(paid.account, number)).await?;
                        Ok(Billed::new(paid.account, number))
                    }
                }
            })
            .handler::<Billed, _>(tells!(tell, "billed", Billed))
            .handler::<Shipped, _>(tells!(tell, "shipped", Shipped))
            .local_queue("paid", |q| q.handler_timeout(Duration::from_millis(20))),
    )
    .await;
    let answer: Billed = bus.invoke(Paid::new(7, 3)).await.expect("answers");
    assert_eq!(answer, Billed::new(7, 3));
    assert_eq!(next(&mut seen).await, ("shipped", 3));
    bus.invoke::<_, ()>(Billed::new(1, 1))
        .await
        .expect("answers");
    assert_eq!(
        next(&mut seen).await,
        ("billed", 1),
        "called, not published"
    );
    for (number, kind) in [
        (0, laneway::FailureKind::Permanent),
        (1, laneway::FailureKind::Panicked),
    ] {
        match bus.invoke::<_, Billed>(Paid::new(1, number)).await {
            Err(InvokeError::Failed(failure)) => assert_eq!(failure.kind(), kind),
            other => panic!("{other:?}"),
        }
    }
    let late = bus.invoke::<_, Billed>(Paid::new(1, 2)).await;
    assert!(matches!(late, Err(InvokeError::TimedOut(_))), "{late:?}");
    match bus.invoke::<_, Shipped>(Paid::new(1, 3)).await {
        Err(error @ InvokeError::Answer { .. }) => {
            let text = error.to_string();
            assert!(
                text.contains("Billed") && text.contains("Shipped"),
                "{text}"
            );
        }
        other => panic!("{other:?}"),
    }
    // Not counted as the queue's, and nothing of it in the queue.
    assert_eq!(snapshot(&bus, "paid").await.handled, 0);
    nothing_more(&bus, &mut seen).await;
    let ended = bus.invoke::<_, Billed>(Paid::new(7, 3)).await;
    assert!(matches!(ended, Err(InvokeError::ShutDown)), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_invoked_is_refused_with_the_reason() {
    async fn idle<T: Message>(_: T, _: Context) -> Result<(), Failure> {
        Ok(())
    }
    let broker = MemoryBroker::new();
    let bus = started(
        Bus::builder()
            .memory(broker)
            .handler_with::<Paid, _>(idle::<Paid>, |q| q.sequential())
            .handler::<Shipped, _>(idle::<Shipped>)
            .separated::<Shipped, _>("mail", idle::<Shipped>)
            .handler_with::<Billed, _>(idle::<Billed>, |q| q.on_broker()),
    )
    .await;
    let refused = |result: Result<(), InvokeError>, word: &str| match result {
        Err(InvokeError::Refused { why, .. }) => assert!(why.contains(word), "{why}"),
        other => panic!("{other:?}"),
    };
    refused(bus.invoke(Paid::new(1, 1)).await, "ordered");
    refused(bus.invoke(Shipped::new(1, 1)).await, "several");
    refused(bus.invoke(Billed::new(1, 1)).await, "broker");
    let nobody = bus
        .invoke::<_, ()>(workload::Numbered {
            key: "a".into(),
            seq: 1,
        })
        .await;
    assert!(
        matches!(nobody, Err(InvokeError::NoHandler(_))),
        "{nobody:?}"
    );
    stop(&bus).await;
}

// ---- moving to the broker

#[tokio::test(flavor = "multi_thread")]
async fn one_line_moves_a_type_to_the_transport() {
    for moved in [false, true] {
        let (tell, mut seen) = mpsc::unbounded_channel();
        let broker = MemoryBroker::new();
        let order = Order::default();
        let of = Arc::clone(&order);
        let handler = move |paid: Paid, cx: Context| {
            let (tell, order): (Sender, Order) = (tell.clone(), Arc::clone(&of));
            async move {
                assert_eq!(cx.key(), Some(&paid.account.into()));
                if paid.number == 99 {
                    return Err(Failure::permanent("ninety-nine"));
                }
                order
                    .lock()
                    .expect("no panic")
                    .entry(paid.account)
                    .or_default()
                    .push(paid.number);
                tell.send(("paid", paid.number))?;
                Ok(())
            }
        };
        let builder = Bus::builder()
            .memory(broker.clone())
            .keyed::<Paid>()
            .handler_with::<Paid, _>(handler, |q| q.partitioned(4));
        let bus = started(match moved {
            true => builder.local_queue("paid", |q| q.on_broker()),
            false => builder,
        })
        .await;
        for number in 0..20 {
            bus.publish(&Paid::new(number % 3, number))
                .await
                .expect("published");
        }
        next_of(&mut seen, 20).await;
        for (account, numbers) in order.lock().expect("no panic").iter() {
            let expected: Vec<_> = (0..20).filter(|number| number % 3 == *account).collect();
            assert_eq!(*numbers, expected);
        }
        assert_eq!(broker.status("paid").sessions, usize::from(moved));
        bus.publish(&Paid::new(1, 99)).await.expect("published");
        if moved {
            let parked = broker.wait_until("paid.parked", |status| status.ready == 1);
            within("the parked one", parked).await;
            assert!(bus.parked("paid").is_ok());
        }
        stop(&bus).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequential_queue_on_the_broker_is_in_order_whatever_the_keys() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let broker = MemoryBroker::new();
    let handler = move |paid: Paid, cx: Context| {
        let tell: Sender = tell.clone();
        async move {
            if paid.number.is_multiple_of(4) && cx.attempt() == 1 {
                return Err(Failure::transient("once"));
            }
            tell.send(("paid", paid.number))?;
            Ok(())
        }
    };
    let bus = started(
        Bus::builder()
            .memory(broker)
            .handler_with::<Paid, _>(handler, |q| {
                q.sequential()
                    .on_broker()
                    .backoff(Backoff::constant(Duration::ZERO))
            }),
    )
    .await;
    for number in 0..20 {
        bus.publish_keyed(&Paid::new(1, number), number)
            .await
            .expect("published");
    }
    for number in 0..20 {
        assert_eq!(next(&mut seen).await, ("paid", number));
    }
    stop(&bus).await;
}
