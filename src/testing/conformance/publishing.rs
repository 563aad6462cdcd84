//! Messages that are published: they reach their queue, or the publisher hears that they did not.

use laneway_actors::port::Destination;

use super::Adapter;
use super::stage::{Stage, assert_same_message, full_envelope, unique_name};

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
