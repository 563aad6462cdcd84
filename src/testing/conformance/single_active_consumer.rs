//! A queue with a single active consumer: one session at a time, and the next goes on where it was.

use laneway_actors::Delivery;

use super::Adapter;
use super::stage::{Stage, number_of, numbers_of};
use crate::topology::QueueSpec;

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
