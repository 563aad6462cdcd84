//! What arrives: every message, in order, as it was sent, and no more at a time than there are credits.

use std::collections::BTreeSet;

use super::Adapter;
use super::stage::{Stage, assert_same_message, full_envelope, number_of, numbers_of};

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
