//! One suite of promises for [`Source`], [`Session`], [`Parking`] and [`Publisher`], run by every
//! adapter.
//!
//! Owns the cases. Each is an `async fn` whose name is the promise; it returns if the promise is kept
//! and panics otherwise. [`conformance_suite!`](crate::conformance_suite) makes a test of each.
//!
//! What an adapter must bring beside its [`Transport`] is little ([`Adapter`]): a way to cut a
//! connection, and a way to take an exchange away. Everything else is done and seen through the ports.
//!
//! Waiting is for events, each wait bounded by [`PATIENCE`]. That something does *not* happen is
//! proven by a later event that would have come second: a marker message, or the same message at
//! another session.
//!
//! It does not check speed, durability across a restart of the broker, nor what an adapter does on a
//! tag that is not outstanding (no owner sends one).

use std::collections::{BTreeSet, VecDeque};
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use laneway_actors::port::{
    Ack, DeadLetter, Destination, Outgoing, ParkError, ParkedMessages, Parking, PublishError,
    Publisher, Session, SessionLost, Source, SourceError,
};
use laneway_actors::{
    Delivery, DeliveryTag, Envelope, HeaderValue, Identity, MessageId, PoisonReason, SessionState,
    header,
};

use crate::topology::{ParkingSpec, QueueSpec, Topology};
use crate::transport::{Transport, provenance};

pub mod membership;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub mod store;

/// How long any single step may take before the case fails. Generous: a loaded machine is slow, and
/// a case that passes never waits this long.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// What the suite needs of an adapter. Made anew for each case.
pub trait Adapter: Send + Sync {
    /// The transport under test.
    fn transport(&self) -> &dyn Transport;

    /// Changes how queues are declared, to run the suite over another kind of queue
    /// (`|queue| queue.quorum()`). Applied to every queue that a case declares.
    fn describe(&self, queue: QueueSpec) -> QueueSpec {
        queue
    }

    /// Ends, from the outside, the connection of every session that is open on the queue, so that
    /// they notice without having asked for it. Resolves when it is done; when the sessions notice is
    /// up to them. The broker and the queue stay. It may cut publishing connections too: no case
    /// publishes after it.
    fn cut<'a>(&'a self, queue: &'a str) -> BoxFuture<'a, ()>;

    /// Ends, from the outside, the connection of every member of a group, so that they notice without
    /// having asked for it. It may end their sessions too. By default it does what [`cut`](Self::cut)
    /// does, for an adapter that cuts everything whatever it is given.
    fn cut_members<'a>(&'a self, group: &'a str) -> BoxFuture<'a, ()> {
        self.cut(group)
    }

    /// Removes an exchange from the broker, from the outside. Resolves when it is gone.
    fn remove_exchange<'a>(&'a self, exchange: &'a str) -> BoxFuture<'a, ()>;

    /// Removes what a case has declared; called after it has passed. By default it is left to the
    /// broker's own end.
    fn clean_up<'a>(&'a self, _queue: &'a QueueSpec) -> BoxFuture<'a, ()> {
        Box::pin(std::future::ready(()))
    }
}

/// Makes one `#[tokio::test]` of each case of the [suite](crate::testing::conformance).
///
/// The argument is a path to an `async fn() -> impl Adapter`. Put the invocation into a module of its
/// own to run the suite more than once in a test file. The calling crate needs `tokio` with `macros`
/// and `rt-multi-thread`.
#[macro_export]
macro_rules! conformance_suite {
    ($make_adapter:path) => {
        $crate::conformance_suite! { @cases $make_adapter;
            messages_arrive_in_the_order_of_publishing
            tags_rise_from_message_to_message
            the_properties_of_a_message_survive
            credits_bound_what_is_unsettled
            competing_sessions_share_the_messages
            unsettled_messages_come_back_in_order_after_close
            unsettled_messages_come_back_in_order_after_a_cut
            messages_that_come_back_precede_newer_ones
            acknowledged_messages_do_not_come_back
            nothing_acknowledged_before_a_barrier_comes_back
            an_acknowledgement_on_a_closed_session_changes_nothing
            a_stale_tag_settles_nothing_of_the_next_session
            the_stream_ends_without_an_error_after_close
            the_stream_ends_with_an_error_after_a_cut
            closing_again_is_harmless
            a_single_active_consumer_hands_over_in_order
            a_single_active_consumer_leaves_no_room_for_a_second
            parking_keeps_the_message_and_adds_its_provenance
            parking_again_replaces_the_provenance
            parking_without_its_exchange_is_refused_and_works_once_restored
            a_parked_message_comes_back_with_everything_and_its_replay_number
            a_look_at_parked_messages_counts_as_a_session_and_gives_them_back_in_order
            a_parked_message_is_not_sent_back_to_a_missing_queue
            publishing_to_a_missing_queue_is_refused
            publishing_to_a_missing_exchange_is_refused
            publishing_to_an_exchange_reaches_the_bound_queue
            a_missing_queue_is_refused_by_name
            a_missing_parking_place_of_an_existing_queue_is_refused_by_name
            verifying_twice_changes_nothing
            a_different_single_active_consumer_argument_is_refused_by_name
        }
    };
    (@cases $make_adapter:path; $($case:ident)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            let adapter = $make_adapter().await;
            $crate::testing::conformance::$case(&adapter).await;
        }
    )*};
}

// ---- order, properties, credits -------------------------------------------------------------

/// A queue hands its messages over in the order in which they were published.
pub async fn messages_arrive_in_the_order_of_publishing(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..300).await;
    let mut session = stage.open(50).await;
    for number in 0..300 {
        let delivery = session.next().await;
        assert_eq!(number_of(&delivery), number);
        assert!(
            !delivery.is_redelivered(),
            "message {number} was never handed over before"
        );
        session.acknowledge(delivery.tag());
    }
    stage.end(session).await;
}

/// Within a session, a later message has a larger tag, and all belong to the session.
pub async fn tags_rise_from_message_to_message(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..20).await;
    let mut session = stage.open(50).await;
    let deliveries = session.take(20).await;
    assert!(
        deliveries
            .windows(2)
            .all(|pair| pair[0].tag() < pair[1].tag())
    );
    assert!(
        deliveries
            .iter()
            .all(|one| one.session_id() == session.state.id())
    );
    stage.end(session).await;
}

/// Id, type, content type, correlation and causation id, time and headers of each simple type arrive
/// as they were sent.
pub async fn the_properties_of_a_message_survive(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    let sent = full_envelope();
    stage.publish(sent.clone()).await;
    let mut session = stage.open(1).await;
    let delivery = session.next().await;
    assert_same_message(delivery.envelope(), &sent);
    assert!(
        delivery.key().is_none(),
        "keys are resolved by the endpoint"
    );
    session.acknowledge(delivery.tag());
    stage.end(session).await;
}

/// No more than `credits` deliveries are unsettled; settling one lets exactly one more come.
pub async fn credits_bound_what_is_unsettled(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..5).await;
    let mut narrow = stage.open(3).await;
    let held = narrow.take(3).await;
    assert_eq!(numbers_of(&held), [0, 1, 2]);

    // What `narrow` left in the queue another session can get.
    let mut other = stage.open(10).await;
    assert_eq!(numbers_of(&other.take(2).await), [3, 4]);
    other.close().await;

    // Both are back, and there is room for one of them.
    narrow.acknowledge(held[0].tag());
    assert_eq!(number_of(&narrow.next().await), 3);
    let mut other = stage.open(10).await;
    assert_eq!(number_of(&other.next().await), 4);
    other.close().await;
    stage.end(narrow).await;
}

/// Without a single active consumer, several sessions of a queue get all messages, each once.
pub async fn competing_sessions_share_the_messages(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    let mut left = stage.open(5).await;
    let mut right = stage.open(5).await;
    stage.publish_all(0..10).await;
    // Each has five credits and settles nothing, so each must get five.
    let mut seen: BTreeSet<_> = numbers_of(&left.take(5).await).into_iter().collect();
    seen.extend(numbers_of(&right.take(5).await));
    assert_eq!(seen, (0..10).collect());
    right.close().await;
    stage.end(left).await;
}

// ---- giving back ----------------------------------------------------------------------------

/// Closing gives everything unsettled back in its original order, marked redelivered.
pub async fn unsettled_messages_come_back_in_order_after_close(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..20).await;
    let mut session = stage.open(10).await;
    session.take(10).await;
    session.close().await;

    let mut session = stage.open(50).await;
    let deliveries = session.take(20).await;
    assert_eq!(numbers_of(&deliveries), (0..20).collect::<Vec<_>>());
    assert!(
        deliveries[..10].iter().all(Delivery::is_redelivered),
        "all that were held are marked"
    );
    assert!(
        !deliveries[10..].iter().any(Delivery::is_redelivered),
        "those that were not held are not marked"
    );
    stage.end(session).await;
}

/// A cut connection gives everything unsettled back in its original order, marked redelivered.
pub async fn unsettled_messages_come_back_in_order_after_a_cut(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..20).await;
    let mut session = stage.open(50).await;
    session.take(20).await;
    stage.cut().await;
    session.ended_by_itself().await;

    let mut session = stage.open(50).await;
    let deliveries = session.take(20).await;
    assert_eq!(numbers_of(&deliveries), (0..20).collect::<Vec<_>>());
    assert!(deliveries.iter().all(Delivery::is_redelivered));
    stage.end(session).await;
}

/// What was given back comes before what was published meanwhile.
pub async fn messages_that_come_back_precede_newer_ones(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..3).await;
    let mut session = stage.open(3).await;
    session.take(3).await;
    stage.publish_all(3..6).await;
    session.close().await;

    let mut session = stage.open(50).await;
    assert_eq!(numbers_of(&session.take(6).await), [0, 1, 2, 3, 4, 5]);
    stage.end(session).await;
}

/// Acknowledged messages are gone: singly and out of order, and everything up to a tag.
pub async fn acknowledged_messages_do_not_come_back(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..8).await;
    let mut session = stage.open(50).await;
    let held = session.take(8).await;
    session.acknowledge(held[5].tag());
    session.acknowledge(held[2].tag());
    session.acknowledge_up_to(held[3].tag());
    session.barrier().await.expect("the session lives");
    session.close().await;

    stage.expect_exactly(&[4, 6, 7]).await;
}

/// Acknowledged one by one, a barrier, closed: nothing comes back. On a queue with a single active
/// consumer, where an ordered endpoint depends on it; so many that a quorum queue stashes
/// acknowledgements, which a barrier of the wrong kind does not wait for.
pub async fn nothing_acknowledged_before_a_barrier_comes_back(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, QueueSpec::single_active_consumer).await;
    stage.publish_all(0..300).await;
    let mut session = stage.open(500).await;
    let held = session.take(300).await;
    let acks: Vec<_> = held.iter().map(|one| single(one.tag())).collect();
    session.control.acknowledge(&acks);
    session.barrier().await.expect("the session lives");
    session.close().await;

    stage.expect_exactly(&[]).await;
}

/// After a session was closed, its acknowledgements do nothing and its barrier says so.
pub async fn an_acknowledgement_on_a_closed_session_changes_nothing(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..3).await;
    let mut session = stage.open(50).await;
    let held = session.take(3).await;
    session.close().await;
    session.acknowledge(held[1].tag());
    session.acknowledge_up_to(held[2].tag());
    assert_eq!(session.barrier().await, Err(SessionLost));

    stage.expect_exactly(&[0, 1, 2]).await;
}

/// A tag of a lost session has the same number as one of the next session, and does not settle it.
pub async fn a_stale_tag_settles_nothing_of_the_next_session(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..3).await;
    let mut stale = stage.open(50).await;
    let held = stale.take(3).await;
    stage.cut().await;
    stale.ended_by_itself().await;

    let mut next = stage.open(50).await;
    next.take(3).await;
    stale.acknowledge(held[0].tag());
    stale.acknowledge_up_to(held[2].tag());
    assert_eq!(stale.barrier().await, Err(SessionLost));
    next.barrier().await.expect("the next session lives");
    next.close().await;

    let mut last = stage.open(50).await;
    assert_eq!(numbers_of(&last.take(3).await), [0, 1, 2]);
    stage.end(last).await;
}

// ---- the end of a session -------------------------------------------------------------------

/// A session that its owner closes ends without an error, also with messages unread.
pub async fn the_stream_ends_without_an_error_after_close(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..3).await;
    let mut session = stage.open(50).await;
    session.next().await;
    session.close().await;
    assert!(session.state.has_ended());
    let error = session.drain().await;
    assert!(error.is_none(), "closed by its owner, but: {error:?}");
    stage.clean_up().await;
}

/// A session that is lost is marked ended, and its stream ends with one error.
pub async fn the_stream_ends_with_an_error_after_a_cut(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..3).await;
    let mut session = stage.open(50).await;
    session.take(3).await;
    stage.cut().await;
    let error = session.drain().await;
    assert!(
        matches!(error, Some(SourceError::Unavailable { .. })),
        "lost, so worth another try, but: {error:?}"
    );
    within("the lost session to be marked ended", session.state.ended()).await;
    assert_eq!(session.barrier().await, Err(SessionLost));
    stage.clean_up().await;
}

/// Closing a session twice, or after it was lost, resolves and breaks nothing.
pub async fn closing_again_is_harmless(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..2).await;
    let mut closed = stage.open(50).await;
    closed.take(2).await;
    closed.close().await;
    closed.close().await;

    let mut lost = stage.open(50).await;
    lost.take(2).await;
    stage.cut().await;
    lost.ended_by_itself().await;
    lost.close().await;

    let mut next = stage.open(50).await;
    assert_eq!(numbers_of(&next.take(2).await), [0, 1]);
    stage.end(next).await;
}

// ---- single active consumer -----------------------------------------------------------------

/// When the active session closes, the next one gets what is left, in order: first what comes back,
/// then what nobody has had.
pub async fn a_single_active_consumer_hands_over_in_order(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, QueueSpec::single_active_consumer).await;
    let mut active = stage.open(4).await;
    let mut standby = stage.open(50).await;
    stage.publish_all(0..6).await;
    let held = active.take(4).await;
    assert_eq!(numbers_of(&held), [0, 1, 2, 3]);
    // The freed credit brings the next one, so that what comes back is not a plain beginning.
    active.acknowledge(held[0].tag());
    assert_eq!(number_of(&active.next().await), 4);
    active.barrier().await.expect("the session lives");
    active.close().await;

    let rest = standby.take(5).await;
    assert_eq!(numbers_of(&rest), [1, 2, 3, 4, 5]);
    let marks: Vec<_> = rest.iter().map(Delivery::is_redelivered).collect();
    assert_eq!(marks, [true, true, true, true, false]);
    stage.end(standby).await;
}

/// While one session is active, a second one gets nothing, whatever its credits.
pub async fn a_single_active_consumer_leaves_no_room_for_a_second(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, QueueSpec::single_active_consumer).await;
    let mut active = stage.open(1).await;
    let mut standby = stage.open(50).await;
    stage.publish_all(0..20).await;
    for number in 0..20 {
        let delivery = active.next().await;
        assert_eq!(number_of(&delivery), number);
        active.acknowledge(delivery.tag());
    }
    active.barrier().await.expect("the session lives");
    active.close().await;
    // The first that the standby ever sees is published after the hand-over.
    stage.publish_all([20]).await;
    let first = standby.next().await;
    assert_eq!((number_of(&first), first.is_redelivered()), (20, false));
    stage.end(standby).await;
}

// ---- parking --------------------------------------------------------------------------------

/// The parked copy has body, id, type, content type, correlation id and headers of the original, and
/// says why, where and when it was given up.
pub async fn parking_keeps_the_message_and_adds_its_provenance(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    let sent = full_envelope();
    stage.publish(sent.clone()).await;
    let mut session = stage.open(1).await;
    let delivery = Arc::new(session.next().await);
    stage
        .park(&delivery, 5)
        .await
        .expect("the parking place exists");

    let parked = stage.next_parked().await;
    let headers = parked.headers.clone();
    assert_same_message(&parked, &sent);
    let number = |name| match headers.get(name) {
        Some(HeaderValue::Integer(number)) => Some(*number),
        _ => None,
    };
    assert_eq!(headers.text(provenance::REASON), Some("failed"));
    assert_eq!(headers.text(provenance::ENDPOINT), Some("conformance"));
    assert_eq!(headers.text(provenance::QUEUE), Some(stage.name()));
    assert_eq!(headers.text(provenance::DETAIL), Some("no answer"));
    assert_eq!(number(provenance::ATTEMPTS), Some(5));
    assert_eq!(number(provenance::PARKED_AT), Some(GIVEN_UP_AT_MILLIS));

    // Parking settles nothing: that is the session's part.
    session.close().await;
    stage.expect_exactly(&[number_in(&sent)]).await;
}

/// A message that was parked before, came back and is given up again tells of the last time.
pub async fn parking_again_replaces_the_provenance(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    let mut sent = full_envelope();
    sent.headers.insert(provenance::ATTEMPTS, 2);
    sent.headers.insert(provenance::REASON, "panicked");
    stage.publish(sent).await;
    let mut session = stage.open(1).await;
    let delivery = Arc::new(session.next().await);
    stage
        .park(&delivery, 7)
        .await
        .expect("the parking place exists");
    session.acknowledge(delivery.tag());

    let parked = stage.next_parked().await;
    assert_eq!(parked.headers.text(provenance::REASON), Some("failed"));
    assert_eq!(
        parked.headers.get(provenance::ATTEMPTS),
        Some(&HeaderValue::Integer(7))
    );
    stage.end(session).await;
}

/// A parked message that is sent back has everything it had, and its replay number; the parked copy stays
/// until it is acknowledged.
pub async fn a_parked_message_comes_back_with_everything_and_its_replay_number(
    adapter: &dyn Adapter,
) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    let mut sent = full_envelope();
    stage.publish(sent.clone()).await;
    let mut session = stage.open(1).await;
    let delivery = Arc::new(session.next().await);
    stage.park(&delivery, 3).await.expect("the place exists");
    session.acknowledge(delivery.tag());

    let parked = stage.parked();
    let mut look = Reader::look(parked.as_ref(), 10).await;
    let copy = Arc::new(look.next().await);
    let sending = parked.send_back(Arc::clone(&copy), stage.name().into(), 4);
    within("the message to be sent back", sending)
        .await
        .expect("the queue exists");
    let again = session.next().await;
    for (name, value) in copy.envelope().headers.iter() {
        // A quorum queue's own count; it counts that queue only.
        if name != "x-delivery-count" {
            sent.headers.insert(name, value.clone());
        }
    }
    sent.headers.insert(header::REPLAY, 4);
    assert_same_message(again.envelope(), &sent);
    assert_ne!(
        Identity::of(again.envelope()),
        Identity::of(delivery.envelope()),
        "a replayed message is not a copy of the one that was parked"
    );
    session.acknowledge(again.tag());
    look.close().await;

    let mut look = Reader::look(parked.as_ref(), 10).await;
    let kept = look.next().await;
    assert_same_message(kept.envelope(), copy.envelope());
    look.acknowledge(kept.tag());
    look.barrier().await.expect("the session lives");
    look.close().await;
    stage.end(session).await;
}

/// Who looks at parked messages is counted, and gives back in order what was not acknowledged.
pub async fn a_look_at_parked_messages_counts_as_a_session_and_gives_them_back_in_order(
    adapter: &dyn Adapter,
) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..50).await;
    let mut session = stage.open(50).await;
    for _ in 0..50 {
        let delivery = Arc::new(session.next().await);
        stage.park(&delivery, 1).await.expect("the place exists");
        session.acknowledge(delivery.tag());
    }
    let parked = stage.parked();
    let count = within("a count", parked.count()).await.expect("it exists");
    assert_eq!((count.ready, count.sessions), (50, 0));
    let mut look = Reader::look(parked.as_ref(), 40).await;
    let held = look.take(40).await;
    let count = within("a count", parked.count()).await.expect("it exists");
    assert_eq!((count.ready, count.sessions), (10, 1));
    look.acknowledge(held[20].tag());
    look.barrier().await.expect("the session lives");
    look.close().await;

    let mut look = Reader::look(parked.as_ref(), 60).await;
    let left: Vec<_> = (0..50).filter(|number| *number != 20).collect();
    assert_eq!(numbers_of(&look.take(49).await), left);
    look.close().await;
    stage.end(session).await;
}

/// Sending back to a queue that does not exist is refused: surely nothing was sent.
pub async fn a_parked_message_is_not_sent_back_to_a_missing_queue(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..1).await;
    let mut session = stage.open(1).await;
    let delivery = Arc::new(session.next().await);
    let missing = unique_name("missing").into();
    let sending = stage.parked().send_back(delivery, missing, 1);
    let refused = within("an answer", sending).await;
    assert!(
        matches!(refused, Err(PublishError::Refused(_))),
        "surely not sent, but: {refused:?}"
    );
    stage.end(session).await;
}

/// Without its exchange, parking says that no copy was made, and goes on working once it is back.
pub async fn parking_without_its_exchange_is_refused_and_works_once_restored(
    adapter: &dyn Adapter,
) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..2).await;
    let mut session = stage.open(2).await;
    let first = Arc::new(session.next().await);
    let second = Arc::new(session.next().await);
    // Once before, so that whatever the adapter opens for parking is open when the exchange goes.
    stage.park(&first, 1).await.expect("the place exists");

    within(
        "the exchange to be removed",
        adapter.remove_exchange(&stage.parking().exchange),
    )
    .await;
    for _ in 0..2 {
        let refused = stage.park(&second, 1).await;
        assert!(
            matches!(refused, Err(ParkError::Refused(_))),
            "surely no copy was made, but: {refused:?}"
        );
    }

    stage.verify().await.expect("declares it again");
    stage.park(&second, 1).await.expect("the place is back");
    session.acknowledge_up_to(second.tag());
    let parked = stage.parked_source();
    let mut reader = Reader::open(parked.as_ref(), 10).await;
    // Two, not three: what was refused left no copy.
    assert_eq!(numbers_of(&reader.take(2).await), [0, 1]);
    stage.park(&first, 1).await.expect("the place is back");
    assert_eq!(number_of(&reader.next().await), 0);
    reader.close().await;
    stage.end(session).await;
}

// ---- publishing -----------------------------------------------------------------------------

/// A queue that does not exist is refused, and the publisher goes on working.
pub async fn publishing_to_a_missing_queue_is_refused(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    let missing = Destination::Queue(unique_name("missing").into());
    stage.expect_refused(missing).await;
    stage.publish_all(0..1).await;
    stage.expect_exactly(&[0]).await;
}

/// An exchange that does not exist is refused, and the publisher goes on working.
pub async fn publishing_to_a_missing_exchange_is_refused(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    let missing = Destination::Exchange {
        exchange: unique_name("missing").into(),
        routing_key: "any".into(),
    };
    stage.expect_refused(missing).await;
    stage.publish_all(0..1).await;
    stage.expect_exactly(&[0]).await;
}

/// A message for an exchange reaches the queue that is bound to it.
pub async fn publishing_to_an_exchange_reaches_the_bound_queue(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    let sent = full_envelope();
    let destination = Destination::Exchange {
        exchange: stage.parking().exchange.as_str().into(),
        routing_key: "any".into(),
    };
    stage
        .send(destination, sent.clone())
        .await
        .expect("a queue is bound to the exchange");
    assert_same_message(&stage.next_parked().await, &sent);
    stage.clean_up().await;
}

// ---- checking the world ---------------------------------------------------------------------

/// A queue that somebody else owns and that is missing is refused, by name, when it is verified and
/// when it is opened; nothing is created by asking.
pub async fn a_missing_queue_is_refused_by_name(adapter: &dyn Adapter) {
    let name = unique_name("missing");
    let topology = Topology::default().existing_queue(&name, |queue| adapter.describe(queue));
    let source = adapter.transport().source(&topology.queues()[0]);
    // Twice: asking must not have created it.
    for _ in 0..2 {
        let verified = within("a missing queue to be verified", source.verify()).await;
        let errors = verified.expect_err("the queue is missing");
        assert_refused_naming(&errors, &[&name]);
    }
    let opened = within(
        "a missing queue to be opened",
        source.open(SessionState::start(), 1),
    )
    .await;
    let error = opened.err().expect("the queue is missing");
    assert_refused_naming(&[error], &[&name]);
}

/// The parking place of a queue that somebody else owns is checked, not created.
pub async fn a_missing_parking_place_of_an_existing_queue_is_refused_by_name(
    adapter: &dyn Adapter,
) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    let missing = unique_name("missing");
    let topology = Topology::default().existing_queue(stage.name(), |queue| {
        adapter
            .describe(queue)
            .parking(&missing, &stage.parking().queue)
    });
    let source = adapter.transport().source(&topology.queues()[0]);
    for _ in 0..2 {
        let verified = within("an existing queue to be verified", source.verify()).await;
        let errors = verified.expect_err("its parking exchange is missing");
        assert_refused_naming(&errors, &[&missing]);
    }
    stage.clean_up().await;
}

/// Verifying a declared queue again finds it as declared, and leaves its messages alone.
pub async fn verifying_twice_changes_nothing(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, QueueSpec::single_active_consumer).await;
    stage.publish_all(0..3).await;
    stage.verify().await.expect("it is as declared");
    stage.expect_exactly(&[0, 1, 2]).await;
}

/// A queue that exists with another single-active-consumer argument is refused, naming queue and
/// argument, in both directions.
pub async fn a_different_single_active_consumer_argument_is_refused_by_name(adapter: &dyn Adapter) {
    type Describe = fn(QueueSpec) -> QueueSpec;
    let plain: Describe = |queue| queue;
    let single: Describe = QueueSpec::single_active_consumer;
    for (exists, wanted) in [(plain, single), (single, plain)] {
        let stage = Stage::declare(adapter, exists).await;
        let topology = Topology::default().queue(stage.name(), |queue| {
            let parking = stage.parking();
            adapter.describe(wanted(queue).parking(&parking.exchange, &parking.queue))
        });
        let source = adapter.transport().source(&topology.queues()[0]);
        let verified = within("a differing queue to be verified", source.verify()).await;
        let errors = verified.expect_err("the argument differs");
        assert_refused_naming(&errors, &[stage.name(), "single-active-consumer"]);
        stage.clean_up().await;
    }
}

// ---- what the cases are made of -------------------------------------------------------------

/// A fresh queue with a parking place, and the ports over it.
struct Stage<'a> {
    adapter: &'a dyn Adapter,
    spec: QueueSpec,
    source: Arc<dyn Source>,
    parking: Arc<dyn Parking>,
    publisher: Arc<dyn Publisher>,
}

impl<'a> Stage<'a> {
    async fn declare(
        adapter: &'a dyn Adapter,
        describe: impl FnOnce(QueueSpec) -> QueueSpec,
    ) -> Self {
        let name = unique_name("queue");
        let topology = Topology::default().queue(&name, |queue| {
            let queue = queue.parking(&format!("{name}-dlx"), &format!("{name}-parked"));
            adapter.describe(describe(queue))
        });
        let spec = topology.queues()[0].clone();
        let transport = adapter.transport();
        let stage = Self {
            adapter,
            source: transport.source(&spec),
            parking: transport
                .parking(&spec)
                .expect("the queue was given a parking place"),
            publisher: transport.publisher(),
            spec,
        };
        assert_eq!(stage.source.name(), name);
        stage.verify().await.expect("a fresh queue can be declared");
        stage
    }

    fn name(&self) -> &str {
        &self.spec.name
    }

    fn parking(&self) -> &ParkingSpec {
        let parking = self.spec.parking.as_ref();
        parking.expect("every stage has a parking place")
    }

    async fn verify(&self) -> Result<(), Vec<SourceError>> {
        within("the queue to be verified", self.source.verify()).await
    }

    async fn open(&self, credits: u16) -> Reader {
        Reader::open(self.source.as_ref(), credits).await
    }

    async fn cut(&self) {
        within("the connection to be cut", self.adapter.cut(self.name())).await;
    }

    async fn send(&self, destination: Destination, envelope: Envelope) -> Result<(), PublishError> {
        let outgoing = Outgoing {
            destination,
            envelope,
            key: None,
        };
        within("a publish to be answered", self.publisher.publish(outgoing)).await
    }

    async fn publish(&self, envelope: Envelope) {
        let destination = Destination::Queue(self.name().into());
        self.send(destination, envelope)
            .await
            .expect("the queue exists");
    }

    /// One after the other, each confirmed before the next is sent.
    async fn publish_all(&self, numbers: impl IntoIterator<Item = u32>) {
        for number in numbers {
            self.publish(numbered(number)).await;
        }
    }

    async fn expect_refused(&self, destination: Destination) {
        let refused = self.send(destination, numbered(99)).await;
        assert!(
            matches!(refused, Err(PublishError::Refused(_))),
            "surely not sent, but: {refused:?}"
        );
    }

    async fn park(&self, delivery: &Arc<Delivery>, attempts: u32) -> Result<(), ParkError> {
        let letter = Arc::new(DeadLetter {
            delivery: Arc::clone(delivery),
            endpoint: "conformance".into(),
            queue: self.name().into(),
            key: None,
            reason: PoisonReason::Failed,
            place: laneway_actors::port::Place::Parking,
            detail: "no answer".to_owned(),
            attempts,
            given_up_at: UNIX_EPOCH + Duration::from_millis(GIVEN_UP_AT_MILLIS.unsigned_abs()),
        });
        within("parking to be answered", self.parking.park(letter)).await
    }

    /// The parked messages.
    fn parked(&self) -> Arc<dyn ParkedMessages> {
        let parked = self.adapter.transport().parked(&self.spec);
        parked.expect("the queue was given a parking place")
    }

    /// The parking queue, read like any queue.
    fn parked_source(&self) -> Arc<dyn Source> {
        let topology = Topology::default()
            .existing_queue(&self.parking().queue, |queue| self.adapter.describe(queue));
        self.adapter.transport().source(&topology.queues()[0])
    }

    /// Takes one message out of the parking queue.
    async fn next_parked(&self) -> Envelope {
        let source = self.parked_source();
        let mut reader = Reader::open(source.as_ref(), 1).await;
        let delivery = reader.next().await;
        reader.acknowledge(delivery.tag());
        reader.barrier().await.expect("the session lives");
        reader.close().await;
        delivery.envelope().clone()
    }

    /// Asserts that the queue holds these messages and nothing else, by a marker behind them; ends
    /// the stage. No session may be open.
    async fn expect_exactly(self, expected: &[u32]) {
        self.publish(numbered(MARKER)).await;
        let mut session = self.open(500).await;
        let mut found = Vec::new();
        loop {
            match number_of(&session.next().await) {
                MARKER => break,
                number => found.push(number),
            }
        }
        assert_eq!(found, expected, "what the queue holds");
        self.end(session).await;
    }

    async fn end(self, session: Reader) {
        session.close().await;
        self.clean_up().await;
    }

    async fn clean_up(self) {
        within("the queue to be removed", self.adapter.clean_up(&self.spec)).await;
    }
}

/// An open session, read one delivery at a time.
struct Reader {
    deliveries: BoxStream<'static, Result<Vec<Delivery>, SourceError>>,
    control: Arc<dyn Session>,
    state: Arc<SessionState>,
    arrived: VecDeque<Delivery>,
}

impl Reader {
    async fn open(source: &dyn Source, credits: u16) -> Self {
        within("a session to be opened", async {
            loop {
                let state = SessionState::start();
                match source.open(Arc::clone(&state), credits).await {
                    Ok(open) => {
                        return Self {
                            deliveries: open.deliveries,
                            control: open.control,
                            state,
                            arrived: VecDeque::new(),
                        };
                    }
                    // A pause between tries, as the port asks of every caller; after a cut the
                    // broker may take a moment. It waits for no event that could be named.
                    Err(SourceError::Unavailable { .. }) => {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    Err(error) => panic!("the session was not opened: {error}"),
                }
            }
        })
        .await
    }

    async fn look(parked: &dyn ParkedMessages, credits: u16) -> Self {
        let state = SessionState::start();
        let opening = parked.open(Arc::clone(&state), credits);
        let open = within("the parking queue to be opened", opening).await;
        let open = open.expect("the parking queue is there");
        Self {
            deliveries: open.deliveries,
            control: open.control,
            state,
            arrived: VecDeque::new(),
        }
    }

    async fn next(&mut self) -> Delivery {
        within("the next delivery", async {
            loop {
                if let Some(delivery) = self.arrived.pop_front() {
                    return delivery;
                }
                match self.deliveries.next().await {
                    Some(Ok(batch)) => self.arrived.extend(batch),
                    Some(Err(error)) => panic!("the session was lost: {error}"),
                    None => panic!("the session ended"),
                }
            }
        })
        .await
    }

    async fn take(&mut self, count: usize) -> Vec<Delivery> {
        let mut taken = Vec::with_capacity(count);
        for _ in 0..count {
            taken.push(self.next().await);
        }
        taken
    }

    /// Reads to the end of the stream and returns the error it ended with. Deliveries that were on
    /// their way are skipped.
    async fn drain(&mut self) -> Option<SourceError> {
        within("the stream to end", async {
            let mut last = None;
            while let Some(item) = self.deliveries.next().await {
                assert!(last.is_none(), "nothing follows the error");
                last = item.err();
            }
            last
        })
        .await
    }

    /// Waits until the session has noticed that it was lost.
    async fn ended_by_itself(&mut self) {
        let error = self.drain().await;
        assert!(error.is_some(), "a lost session ends with an error");
        within("the lost session to be marked ended", self.state.ended()).await;
    }

    fn acknowledge(&self, tag: DeliveryTag) {
        self.control.acknowledge(&[single(tag)]);
    }

    fn acknowledge_up_to(&self, tag: DeliveryTag) {
        let multiple = true;
        self.control.acknowledge(&[Ack { tag, multiple }]);
    }

    async fn barrier(&self) -> Result<(), SessionLost> {
        within("the barrier", self.control.barrier()).await
    }

    async fn close(&self) {
        within("the session to close", self.control.close()).await;
    }
}

/// The body of a marker; no case publishes so many messages.
const MARKER: u32 = u32::MAX;

const GIVEN_UP_AT_MILLIS: i64 = 1_700_000_000_123;

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(output) => output,
        Err(_) => panic!("waited {PATIENCE:?} for {what}"),
    }
}

/// Unique among all runs, because a broker may outlive them.
fn unique_name(kind: &str) -> String {
    format!("laneway-conformance-{kind}-{}", MessageId::unique())
}

fn single(tag: DeliveryTag) -> Ack {
    let multiple = false;
    Ack { tag, multiple }
}

fn numbered(number: u32) -> Envelope {
    Envelope {
        id: Some(MessageId::unique()),
        body: number.to_be_bytes().to_vec().into(),
        ..Envelope::default()
    }
}

fn number_in(envelope: &Envelope) -> u32 {
    let bytes = envelope.body.as_ref().try_into();
    u32::from_be_bytes(bytes.expect("every body of the suite is a number of four bytes"))
}

fn number_of(delivery: &Delivery) -> u32 {
    number_in(delivery.envelope())
}

fn numbers_of(deliveries: &[Delivery]) -> Vec<u32> {
    deliveries.iter().map(number_of).collect()
}

/// A message that says everything a message can say.
fn full_envelope() -> Envelope {
    let mut envelope = Envelope {
        message_type: Some("order-shipped".into()),
        content_type: Some("application/json".into()),
        correlation_id: Some("correlation-1".into()),
        causation_id: Some("cause-1".into()),
        // Whole seconds: AMQP's time stamps have no more.
        sent_at: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)),
        ..numbered(7)
    };
    let headers = &mut envelope.headers;
    headers.insert("text", "grün");
    headers.insert("integer", -7_000_000_000);
    headers.insert("true", HeaderValue::Bool(true));
    headers.insert("false", HeaderValue::Bool(false));
    headers.insert("float", HeaderValue::Float(0.25));
    // No UTF-8, and with a zero byte.
    headers.insert("bytes", HeaderValue::Bytes(vec![0xff, 0x00, 0xfe]));
    envelope
}

/// Asserts that `found` is `sent`, with all its headers; further headers are allowed.
fn assert_same_message(found: &Envelope, sent: &Envelope) {
    assert_eq!(found.body, sent.body);
    assert_eq!(found.id, sent.id);
    assert_eq!(found.message_type, sent.message_type);
    assert_eq!(found.content_type, sent.content_type);
    assert_eq!(found.correlation_id, sent.correlation_id);
    assert_eq!(found.causation_id, sent.causation_id);
    assert_eq!(found.sent_at, sent.sent_at);
    for (name, value) in sent.headers.iter() {
        assert_eq!(found.headers.get(name), Some(value), "header `{name}`");
    }
}

/// Asserts that one of the errors is a refusal whose text contains all the names.
fn assert_refused_naming(errors: &[SourceError], names: &[&str]) {
    let named = errors.iter().any(|error| {
        let text = error.to_string();
        matches!(error, SourceError::Refused { .. }) && names.iter().all(|name| text.contains(name))
    });
    assert!(named, "a refusal naming {names:?}, but: {errors:?}");
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_case_is_in_the_suite() {
        let source = include_str!("conformance.rs");
        let (suite, cases) = source
            .split_once("(@cases $make_adapter:path;")
            .expect("the macro stands above the cases");
        let names = cases
            .lines()
            .filter_map(|line| line.strip_prefix("pub async fn "))
            .filter_map(|line| line.split_once('('));
        for (name, _) in names {
            let listed = suite.lines().any(|line| line.trim() == name);
            assert!(listed, "`{name}` is not listed in conformance_suite!");
        }
    }
}
