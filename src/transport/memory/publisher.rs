//! Sends messages out. Confirmed when the call returns: the message is in its queues by then.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use laneway_actors::port::{Destination, Outgoing, PublishError, Publisher};

use super::broker::{MemoryBroker, Route};

/// Publishes to the embedded broker. Messages of one caller keep their order.
#[derive(Debug)]
pub(super) struct MemoryPublisher {
    broker: MemoryBroker,
}

impl MemoryPublisher {
    pub(super) fn new(broker: MemoryBroker) -> Self {
        Self { broker }
    }
}

impl Publisher for MemoryPublisher {
    fn publish(&self, outgoing: Outgoing) -> BoxFuture<'static, Result<(), PublishError>> {
        let broker = self.broker.clone();
        async move {
            let route = match &outgoing.destination {
                Destination::Queue(queue) => Route::Queue(queue),
                Destination::Exchange {
                    exchange,
                    routing_key,
                } => Route::Exchange {
                    exchange,
                    routing_key,
                },
                // Not shown: a routing key in it may be an ordering key.
                _ => {
                    return Err(PublishError::Refused(
                        "the embedded broker does not know this kind of destination".to_owned(),
                    ));
                }
            };
            broker
                .send(route, Arc::new(outgoing.envelope))
                .map_err(PublishError::Refused)
        }
        .boxed()
    }
}
