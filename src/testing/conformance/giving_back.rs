//! What comes back: everything that was not acknowledged, in its order, however the session ended; and nothing else.

use laneway_actors::Delivery;
use laneway_actors::port::SessionLost;

use super::Adapter;
use super::stage::{Stage, numbers_of, single, within};
use crate::topology::QueueSpec;

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

/// A session whose stream and control are dropped without a close ends, though deliveries of it are still about: the
/// next one gets everything that was not acknowledged, in its original order, and what was acknowledged stays so. On a
/// queue with a single active consumer, where a session that stayed would keep all others out.
pub async fn a_dropped_session_gives_its_messages_back_in_order(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, QueueSpec::single_active_consumer).await;
    stage.publish_all(0..12).await;
    // Dropped before anybody has read from it.
    let unread = stage.open(8).await.dropped();
    let mut session = stage.open(8).await;
    let held = session.take(5).await;
    session.acknowledge(held[0].tag());
    session.acknowledge(held[2].tag());
    session.barrier().await.expect("the session lives");
    let read = session.dropped();

    let mut next = stage.open(50).await;
    let rest = next.take(10).await;
    assert_eq!(numbers_of(&rest), [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    assert!(
        rest[..3].iter().all(Delivery::is_redelivered),
        "all that were held are marked"
    );
    assert!(
        !rest[8..].iter().any(Delivery::is_redelivered),
        "those beyond its credits are not marked"
    );
    for dropped in [unread, read] {
        within("a dropped session to be marked ended", dropped.ended()).await;
    }
    stage.end(next).await;
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
