//! Parked messages come back: listed without being removed, shown, discarded, replayed in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use laneway::actors::port::{
    OpenSession, ParkedCount, ParkedMessages, Parking, PublishError, Publisher, Source, SourceError,
};
use laneway::actors::{Delivery, SessionState, header};
use laneway::parked::{ParkedOrigin, Replayed};
use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::transport::{Transport, provenance};
use laneway::{Envelope, HeaderValue, MessageId, Parked, ParkedError, QueueSpec};

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{
    ORDERS, PARKED, Tally, envelope, numbered, orders, plain_orders, put, send, snapshot, started,
    stop, within,
};
use workload::{Numbered, Scripted, Step};

const SECRET: &[u8] = b"of the test";

/// Waits until so many messages lie in the parking queue.
async fn until_parked(broker: &MemoryBroker, count: usize) {
    let parked = broker.wait_until(PARKED, |status| status.ready == count);
    within(&format!("{count} parked messages"), parked).await;
}

/// A bus whose handler fails for good until it is mended, with what it parks of `messages` messages over
/// `keys` keys.
struct Ward {
    broker: MemoryBroker,
    ledger: OrderLedger,
    mended: Tally,
    handled: Tally,
    bus: Bus,
}

impl Ward {
    async fn with(messages: u64, keys: u64) -> Self {
        Self::over(MemoryBroker::new(), |broker| broker, messages, keys).await
    }

    async fn over<T: Transport>(
        broker: MemoryBroker,
        transport: impl FnOnce(MemoryBroker) -> T,
        messages: u64,
        keys: u64,
    ) -> Self {
        let ledger = OrderLedger::in_memory();
        let (mended, handled) = (Tally::new(), Tally::new());
        let handler = {
            let (mended, handled) = (mended.clone(), handled.clone());
            Scripted::new(&ledger, move |_, _| {
                if mended.get() == 0 {
                    return Step::FailForGood;
                }
                handled.add();
                Step::Succeed(Duration::ZERO)
            })
        };
        let bus = orders(transport(broker.clone()), |e| e.handler(handler));
        let bus = started(bus.fingerprint_secret(SECRET)).await;
        for number in 0..messages {
            let (key, seq) = (format!("key-{}", number % keys), number / keys + 1);
            send(&bus, &ledger, &key, seq).await;
            // One after the other, so that the order of parking is known.
            until_parked(&broker, usize::try_from(number).expect("small") + 1).await;
        }
        within("an empty queue", broker.wait_empty(ORDERS)).await;
        Self {
            broker,
            ledger,
            mended,
            handled,
            bus,
        }
    }

    fn parked(&self) -> Parked {
        self.bus.parked(ORDERS).expect("it has a parking place")
    }

    fn seqs(&self) -> Vec<(String, u64)> {
        let messages = self.broker.messages(PARKED);
        let all = messages.iter().map(numbered);
        all.map(|message| (message.key, message.seq)).collect()
    }

    async fn until_handled(&self, count: u64) {
        self.handled.until("replayed messages", count).await;
        within("an empty queue", self.broker.wait_empty(ORDERS)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn listing_shows_every_parked_message_in_order_and_removes_none() {
    let ward = Ward::with(6, 2).await;
    let before = ward.seqs();
    let first = ward.parked().list().await.expect("listed");
    let second = ward.parked().list().await.expect("listed");
    assert_eq!(first.messages, second.messages);
    assert!(!first.more);
    assert_eq!(ward.seqs(), before);
    let copies = ward.broker.messages(PARKED);
    assert_eq!(first.messages.len(), copies.len());
    for (entry, copy) in first.messages.iter().zip(&copies) {
        assert_eq!(entry.message_id, copy.id);
        assert_eq!(entry.message_type.as_deref(), Some("numbered"));
        assert_eq!(entry.origin, ParkedOrigin::Ours);
        assert_eq!(entry.endpoint.as_deref(), Some(ORDERS));
        assert_eq!(entry.reason.as_deref(), Some("permanent"));
        assert_eq!((entry.attempts, entry.replays), (Some(1), 0));
        assert_eq!(entry.body_bytes, copy.body.len());
        assert!(entry.parked_at.is_some());
        let key = numbered(copy).key.as_str().into();
        let shown = laneway::actors::Fingerprints::with_secret(SECRET).of(&key);
        assert_eq!(entry.key, Some(shown.to_string()));
    }
    stop(&ward.bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_shows_no_key_and_a_message_only_when_it_is_asked_for() {
    let ward = Ward::with(1, 1).await;
    let list = ward.parked().list().await.expect("listed");
    let id = list.messages[0].id.clone();
    let message = ward.parked().show(&id).await.expect("shown");
    let shown = format!("{list:?} {message:?} {id} {:?}", ward.parked());
    assert!(!shown.contains("key-0"), "{shown}");
    assert_eq!(numbered(&message.envelope).key, "key-0");
    let why = message.envelope.headers.text(provenance::DETAIL);
    assert_eq!(why, Some("as the script says"));
    assert_eq!(ward.seqs().len(), 1, "showing removes nothing");
    stop(&ward.bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_is_bounded_and_says_that_there_is_more() {
    let ward = Ward::with(1, 1).await;
    let limit = usize::from(Parked::LIMIT);
    for seq in 2..=limit {
        put(&ward.broker, PARKED, envelope("key-0", seq as u64)).await;
    }
    let list = ward.parked().list().await.expect("listed");
    assert_eq!((list.messages.len(), list.more), (limit, false));
    let mut last = envelope("key-0", 0);
    last.id = Some(MessageId::from("last"));
    put(&ward.broker, PARKED, last).await;
    let list = ward.parked().list().await.expect("listed");
    assert_eq!((list.messages.len(), list.more), (limit, true));
    let error = ward.parked().show("last").await.expect_err("too far");
    assert!(error.to_string().contains("1000"), "{error}");
    ward.parked()
        .discard(&list.messages[0].id)
        .await
        .expect("discarded");
    ward.parked().show("last").await.expect("within reach now");
    stop(&ward.bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn discarding_removes_that_message_and_no_other() {
    let ward = Ward::with(4, 4).await;
    let list = ward.parked().list().await.expect("listed");
    let gone = ward.parked().discard(&list.messages[2].id).await;
    assert_eq!(gone.expect("discarded"), list.messages[2]);
    let mut left = list.messages;
    left.remove(2);
    let again = ward.parked().list().await.expect("listed");
    assert_eq!(again.messages, left);
    let twice = ward.parked().discard("no such message").await;
    assert!(matches!(twice, Err(ParkedError::NotFound { .. })));
    stop(&ward.bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_of_one_message_are_all_listed_and_each_is_discarded_by_itself() {
    let ward = Ward::with(1, 1).await;
    let copy = ward.broker.messages(PARKED).remove(0);
    let id = copy.id.clone().expect("every message has one");
    let mut other = copy.clone();
    other.body = "another body under the same id".into();
    put(&ward.broker, PARKED, copy).await;
    put(&ward.broker, PARKED, other).await;
    let list = ward.parked().list().await.expect("listed").messages;
    assert!(
        list.iter()
            .all(|entry| entry.message_id.as_ref() == Some(&id))
    );
    assert_eq!(list[1].id.to_string(), format!("{}#2", list[0].id));
    assert_ne!(list[2].id, list[0].id);
    let unclear = ward.parked().discard(id.as_str()).await;
    assert!(
        matches!(unclear, Err(ParkedError::Ambiguous { copies: 3, .. })),
        "{unclear:?}"
    );
    ward.parked().discard(&list[1].id).await.expect("discarded");
    ward.parked().discard(&list[2].id).await.expect("discarded");
    // Now the message id alone is enough.
    let left = ward.parked().show(id.as_str()).await.expect("one is left");
    assert_eq!(left.entry.id, list[0].id);
    stop(&ward.bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_without_an_id_is_named_by_a_fingerprint() {
    let ward = Ward::with(1, 1).await;
    let mut copy = ward.broker.messages(PARKED).remove(0);
    copy.id = None;
    put(&ward.broker, PARKED, copy).await;
    let list = ward.parked().list().await.expect("listed").messages;
    assert_eq!(list[1].message_id, None);
    assert!(list[1].id.as_ref().starts_with('~'), "{}", list[1].id);
    ward.parked().discard(&list[1].id).await.expect("discarded");
    assert_eq!(ward.seqs().len(), 1);
    stop(&ward.bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_message_is_handled_and_not_taken_for_a_copy_of_the_parked_one() {
    let ward = Ward::with(3, 1).await;
    let list = ward.parked().list().await.expect("listed").messages;
    ward.mended.add();
    let replayed = ward.parked().replay(&list[1].id).await.expect("replayed");
    assert_eq!(replayed, list[1]);
    ward.until_handled(1).await;
    let left = [("key-0".to_owned(), 1), ("key-0".to_owned(), 3)];
    assert_eq!(ward.seqs(), left);
    let state = snapshot(&ward.bus).await;
    assert_eq!((state.handled, state.parked, state.attempts), (1, 3, 4));
    stop(&ward.bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_keeps_the_headers_and_the_history_and_counts_itself() {
    let broker = MemoryBroker::new();
    let (sender, mut seen) = tokio::sync::mpsc::unbounded_channel();
    let bus = plain_orders(broker.clone(), |e| {
        e.handler(move |_: Numbered, cx: Context| {
            let sender = sender.clone();
            async move {
                let fails = cx.headers().get(header::REPLAY) != Some(&HeaderValue::Integer(2));
                sender.send(cx.envelope().clone()).expect("the test reads");
                if fails {
                    return Err(Failure::permanent("not yet"));
                }
                Ok(())
            }
        })
    });
    let bus = started(bus).await;
    let mut original = envelope("account-7", 3);
    original.correlation_id = Some("conversation".into());
    original.headers.insert("tenant", "north");
    put(&broker, ORDERS, original.clone()).await;
    for _ in 0..2 {
        until_parked(&broker, 1).await;
        within("an empty queue", broker.wait_empty(ORDERS)).await;
        let parked = bus.parked(ORDERS).expect("it has a parking place");
        assert_eq!(parked.replay_all().await.expect("replayed").replayed, 1);
    }
    let mut last = Envelope::default();
    for _ in 0..3 {
        last = within("a run", seen.recv()).await.expect("the bus runs");
    }
    assert_eq!(last.id, original.id);
    assert_eq!(last.body, original.body);
    assert_eq!(last.correlation_id, original.correlation_id);
    for (name, value) in original.headers.iter() {
        assert_eq!(last.headers.get(name), Some(value), "{name}");
    }
    assert_eq!(last.headers.text(provenance::REASON), Some("permanent"));
    assert_eq!(last.headers.text(provenance::DETAIL), Some("not yet"));
    stop(&bus).await;
    assert!(broker.status(PARKED).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn replaying_all_keeps_the_order_of_each_key() {
    let ward = Ward::with(200, 20).await;
    ward.mended.add();
    let report = ward.parked().replay_all().await;
    let report = report.expect("replayed");
    assert_eq!((report.replayed, report.skipped, report.left), (200, 0, 0));
    ward.until_handled(200).await;
    assert!(ward.broker.status(PARKED).is_empty());
    stop(&ward.bus).await;
    let figures = ward.ledger.figures().expect("in memory");
    figures.assert_ordered();
    assert_eq!((figures.handled, figures.duplicates), (200, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_again_is_parked_again_with_its_attempts_counted_anew() {
    let broker = MemoryBroker::new();
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::new(&ledger, |_, _| Step::Fail(Duration::ZERO));
    let bus = started(orders(broker.clone(), |e| {
        e.max_delivery_attempts(3)
            .backoff(Backoff::constant(Duration::from_millis(1)))
            .handler(handler)
    }))
    .await;
    for seq in 1..=2 {
        send(&bus, &ledger, "key-0", seq).await;
        until_parked(&broker, usize::try_from(seq).expect("small")).await;
    }
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    let parked = bus.parked(ORDERS).expect("it has a parking place");
    // Ends, although each of them is parked again behind the others.
    let report = parked.replay_all().await.expect("replayed");
    assert_eq!(report.replayed, 2);
    until_parked(&broker, 2).await;
    within("an empty queue", broker.wait_empty(ORDERS)).await;
    let list = parked.list().await.expect("listed").messages;
    for entry in &list {
        assert_eq!(entry.replays, 1);
        assert_eq!(entry.attempts, Some(3));
        assert_eq!(entry.reason.as_deref(), Some("failed"));
    }
    assert_eq!(snapshot(&bus).await.attempts, 12);
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_that_is_refused_half_way_says_how_far_it_came_and_leaves_the_rest_parked() {
    let ward = Ward::with(5, 1).await;
    stop(&ward.bus).await;
    // Nobody reads the queue any more, and it takes two.
    ward.broker.limit_length(ORDERS, Some(2));
    let error = ward.parked().replay_all().await.expect_err("it is full");
    assert_eq!(error.replayed, 2);
    assert!(
        matches!(
            error.source,
            ParkedError::NotReplayed {
                source: PublishError::Refused(_),
                ..
            }
        ),
        "{error}"
    );
    let left: Vec<_> = (3..=5).map(|seq| ("key-0".to_owned(), seq)).collect();
    assert_eq!(ward.seqs(), left);
    assert_eq!(ward.broker.status(ORDERS).ready, 2);
    ward.broker.limit_length(ORDERS, None);
    let report = ward.parked().replay_all().await.expect("there is room");
    assert_eq!(report.replayed, 3);
    let messages = ward.broker.messages(ORDERS);
    let back: Vec<_> = messages.iter().map(|one| numbered(one).seq).collect();
    assert_eq!(back, [1, 2, 3, 4, 5]);
}

/// The embedded broker, whose sessions on the parking queue are cut when a message has been sent back.
struct Cutting {
    broker: MemoryBroker,
    /// After this many.
    after: u32,
}

struct CuttingParked {
    inner: Arc<dyn ParkedMessages>,
    broker: MemoryBroker,
    left: AtomicU32,
}

impl Transport for Cutting {
    fn source(&self, queue: &QueueSpec) -> Arc<dyn Source> {
        self.broker.source(queue)
    }
    fn parking(&self, queue: &QueueSpec) -> Option<Arc<dyn Parking>> {
        self.broker.parking(queue)
    }
    fn parked(&self, queue: &QueueSpec) -> Option<Arc<dyn ParkedMessages>> {
        Some(Arc::new(CuttingParked {
            inner: self.broker.parked(queue)?,
            broker: self.broker.clone(),
            left: self.after.into(),
        }))
    }
    fn publisher(&self) -> Arc<dyn Publisher> {
        self.broker.publisher()
    }
}

impl ParkedMessages for CuttingParked {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn count(&self) -> BoxFuture<'_, Result<ParkedCount, SourceError>> {
        self.inner.count()
    }
    fn open(
        &self,
        state: Arc<SessionState>,
        credits: u16,
    ) -> BoxFuture<'_, Result<OpenSession, SourceError>> {
        self.inner.open(state, credits)
    }
    fn send_back(
        &self,
        parked: Arc<Delivery>,
        queue: Arc<str>,
        replay: i64,
    ) -> BoxFuture<'static, Result<(), PublishError>> {
        let sending = self.inner.send_back(parked, queue, replay);
        let cut = self.left.fetch_sub(1, Ordering::Relaxed) == 1;
        let broker = self.broker.clone();
        Box::pin(async move {
            sending.await?;
            if cut {
                broker.cut_sessions(PARKED);
            }
            Ok(())
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_cut_between_confirm_and_removal_leaves_the_message_in_both_and_says_so() {
    let cutting = |broker| Cutting { broker, after: 3 };
    let ward = Ward::over(MemoryBroker::new(), cutting, 5, 1).await;
    ward.mended.add();
    let error = ward.parked().replay_all().await.expect_err("it was cut");
    assert_eq!(error.replayed, 2);
    assert!(
        matches!(error.source, ParkedError::MayBeInBoth { .. }),
        "{error}"
    );
    ward.until_handled(3).await;
    let left: Vec<_> = (3..=5).map(|seq| ("key-0".to_owned(), seq)).collect();
    assert_eq!(ward.seqs(), left, "nothing is lost, the order is the same");
    let report = ward.parked().replay_all().await.expect("replayed");
    assert_eq!(report.replayed, 3);
    ward.until_handled(6).await;
    stop(&ward.bus).await;
    assert!(ward.broker.status(PARKED).is_empty());
    assert_eq!(ward.ledger.figures().expect("in memory").lost, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_messages_in_the_parking_queue_are_listed_as_such_and_hide_nothing() {
    let ward = Ward::with(1, 1).await;
    let ours = ward.broker.messages(PARKED).remove(0);
    let foreign = Envelope {
        body: vec![0xff, 0x00].into(),
        ..Envelope::default()
    };
    put(&ward.broker, PARKED, foreign).await;
    let mut of_another = ours.clone();
    of_another.headers.insert(provenance::QUEUE, "another");
    put(&ward.broker, PARKED, of_another).await;
    let mut strange = ours.clone();
    strange.id = Some(MessageId::from("strange"));
    strange.headers.insert(provenance::ATTEMPTS, "many");
    strange.headers.insert(provenance::PARKED_AT, -1);
    strange
        .headers
        .insert(provenance::FINGERPRINT, "the key itself");
    strange.headers.insert(header::REPLAY, "often");
    put(&ward.broker, PARKED, strange).await;

    let list = ward.parked().list().await.expect("listed").messages;
    assert_eq!(list.len(), 4);
    assert_eq!(list[1].origin, ParkedOrigin::Foreign);
    assert_eq!(list[1].body_bytes, 2);
    let another = ParkedOrigin::OtherQueue("another".to_owned());
    assert_eq!(list[2].origin, another);
    assert_eq!(list[3].origin, ParkedOrigin::Ours);
    assert_eq!((list[3].attempts, list[3].replays), (None, 0));
    assert_eq!((&list[3].key, list[3].parked_at), (&None, None));
    for entry in &list[1..3] {
        let refused = ward.parked().replay(&entry.id).await;
        assert!(
            matches!(refused, Err(ParkedError::NotOurs { .. })),
            "{refused:?}"
        );
    }
    ward.mended.add();
    let report = ward.parked().replay_all().await.expect("replayed");
    assert_eq!((report.replayed, report.skipped, report.left), (2, 2, 0));
    ward.until_handled(2).await;
    let left = ward.parked().list().await.expect("listed").messages;
    assert_eq!(left, list[1..3]);
    ward.parked().show(&left[0].id).await.expect("shown");
    ward.parked().discard(&left[0].id).await.expect("discarded");
    stop(&ward.bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_are_skipped_use_up_the_limit_visibly() {
    let ward = Ward::with(1, 1).await;
    let ours = ward.broker.messages(PARKED).remove(0);
    let limit = u64::from(Parked::LIMIT);
    for _ in 0..limit {
        put(&ward.broker, PARKED, Envelope::default()).await;
    }
    put(&ward.broker, PARKED, ours).await;
    let report = ward.parked().replay_all().await.expect("replayed");
    let found = (report.replayed, report.skipped, report.left);
    assert_eq!(found, (1, limit, 1));
    stop(&ward.bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parking_queue_that_somebody_reads_is_in_use_and_is_left_alone() {
    let ward = Ward::with(2, 1).await;
    let topology = laneway::Topology::default().existing_queue(PARKED, |q| q);
    let other = ward.broker.source(&topology.queues()[0]);
    let session = other.open(SessionState::start(), 1).await.expect("opened");
    let error = ward.parked().list().await.expect_err("in use");
    assert!(matches!(error, ParkedError::InUse { .. }), "{error}");
    let error = ward.parked().replay_all().await.expect_err("in use");
    assert!(matches!(error.source, ParkedError::InUse { .. }), "{error}");
    session.control.close().await;
    assert_eq!(ward.parked().list().await.expect("free").messages.len(), 2);
    stop(&ward.bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_parking_queue_lists_nothing_and_replays_nothing() {
    let ward = Ward::with(0, 1).await;
    let list = ward.parked().list().await.expect("listed");
    assert!(list.messages.is_empty() && !list.more);
    let report = ward.parked().replay_all().await.expect("replayed");
    assert_eq!(report, Replayed::default());
    stop(&ward.bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_endpoint_and_one_without_a_parking_place_are_said_to_be_so() {
    let ledger = OrderLedger::in_memory();
    let handler = Scripted::succeeding(&ledger, Duration::ZERO);
    let bus = Bus::builder()
        .memory(MemoryBroker::new())
        .topology(|t| t.queue("plain", |q| q))
        .endpoint("plain", |e| e.discard_poison().handler(handler));
    let bus = started(bus).await;
    let unknown = bus.parked("plane").expect_err("a typo").to_string();
    assert_eq!(unknown, "the bus has no endpoint `plane`");
    let none = bus.parked("plain").expect_err("it discards").to_string();
    assert!(
        none.contains("`plain`") && none.contains("parking("),
        "{none}"
    );
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_cannot_be_reached_is_an_error_and_changes_nothing() {
    let ward = Ward::with(2, 1).await;
    let parked = ward.parked();
    stop(&ward.bus).await;
    ward.broker.make_unreachable();
    let error = parked.list().await.expect_err("unreachable");
    assert!(matches!(error, ParkedError::Unavailable(_)), "{error}");
    ward.broker.make_reachable();
    assert_eq!(parked.list().await.expect("back").messages.len(), 2);
}
