//! Brokers: where messages come from and go to. Each transport has the same shape.

use std::sync::Arc;

use laneway_actors::Problem;
use laneway_actors::port::{Membership, ParkedMessages, Parking, Publisher, Source};

use crate::topology::QueueSpec;

mod announcements;
pub mod memory;
pub mod provenance;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;

/// What the bus asks of a transport. Nothing here does I/O: connections are opened by the ports.
pub trait Transport: Send + Sync + 'static {
    /// What is wrong with the transport's own settings. Pure: asked by `build()`.
    fn problems(&self) -> Vec<Problem> {
        Vec::new()
    }

    /// The source of a queue. Its `verify` declares or checks the queue and its parking place.
    fn source(&self, queue: &QueueSpec) -> Arc<dyn Source>;

    /// The parking place of a queue, if it has one.
    fn parking(&self, queue: &QueueSpec) -> Option<Arc<dyn Parking>>;

    /// The messages in a queue's parking place. By default none can be looked at.
    fn parked(&self, _queue: &QueueSpec) -> Option<Arc<dyn ParkedMessages>> {
        None
    }

    /// The group of the instances that share the shards of an endpoint: `queues`, in the order of the
    /// shards. Who gives the same name of a group must give the same queues. By default there are no
    /// groups, and endpoints over several shards are refused.
    fn membership(&self, _group: &str, _queues: &[String]) -> Option<Arc<dyn Membership>> {
        None
    }

    /// Sends messages out.
    fn publisher(&self) -> Arc<dyn Publisher>;
}
