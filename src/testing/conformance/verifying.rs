//! What a queue is asked before it is used: is it there, and is it as described? Nothing changes by asking.

use laneway_actors::SessionState;

use super::Adapter;
use super::stage::{Stage, assert_refused_naming, unique_name, within};
use crate::topology::{QueueSpec, Topology};

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
