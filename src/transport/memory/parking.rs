//! The parking place of a queue: its copy goes through the parking exchange, with provenance.
//!
//! A missing exchange, an exchange that no queue is bound to, and a full parking queue are refused:
//! the message stays where it is. The outcome is never unknown here.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use laneway_actors::port::{DeadLetter, ParkError, Parking};

use super::broker::{MemoryBroker, Route};
use crate::topology::ParkingSpec;
use crate::transport::provenance;

/// Parks in the embedded broker.
#[derive(Debug)]
pub(super) struct MemoryParking {
    broker: MemoryBroker,
    place: Arc<ParkingSpec>,
}

impl MemoryParking {
    pub(super) fn new(broker: MemoryBroker, place: ParkingSpec) -> Self {
        Self {
            broker,
            place: Arc::new(place),
        }
    }
}

impl Parking for MemoryParking {
    fn name(&self) -> &str {
        &self.place.exchange
    }

    fn park(&self, letter: Arc<DeadLetter>) -> BoxFuture<'static, Result<(), ParkError>> {
        let (broker, place) = (self.broker.clone(), Arc::clone(&self.place));
        async move {
            let mut copy = letter.delivery.envelope().clone();
            for (name, value) in provenance::headers(&letter) {
                copy.headers.insert(name, value);
            }
            let route = Route::Exchange {
                exchange: &place.exchange,
                // A fanout exchange ignores it; it names the origin to whoever binds otherwise.
                routing_key: &letter.queue,
            };
            broker
                .send(route, Arc::new(copy))
                .map_err(ParkError::Refused)
        }
        .boxed()
    }
}
