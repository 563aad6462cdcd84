//! Brokers: where messages come from and go to. Each transport has the same shape.

use std::sync::Arc;

use futures::future::BoxFuture;
use laneway_actors::Problem;
use laneway_actors::port::{Membership, ParkedMessages, Parking, Publisher, Source, SourceError};

use crate::topology::{QueueSpec, Topology};

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

    /// What of a topology this transport cannot do. Pure: asked by `build()`.
    fn topology_problems(&self, _topology: &Topology) -> Vec<String> {
        Vec::new()
    }

    /// Does what a topology says, in the order of its [plan](Topology::plan): declares what is declared,
    /// checks what is named. Doing it again changes nothing.
    ///
    /// By default only queues and their parking places are declared, and everything else is refused.
    ///
    /// # Errors
    /// Every difference, each naming the thing and the argument.
    fn apply<'a>(&'a self, topology: &Topology) -> BoxFuture<'a, Result<(), Vec<SourceError>>> {
        let plan = topology.plan();
        Box::pin(async move {
            let mut problems = Vec::new();
            if !plan.exchanges.is_empty() || !plan.bindings.is_empty() {
                problems.push(SourceError::Refused {
                    what: "this transport declares no exchanges and no bindings; remove them"
                        .to_owned(),
                    source: None,
                });
            }
            for queue in &plan.queues {
                problems.extend(
                    self.source(queue)
                        .verify()
                        .await
                        .err()
                        .into_iter()
                        .flatten(),
                );
            }
            if problems.is_empty() {
                Ok(())
            } else {
                Err(problems)
            }
        })
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
