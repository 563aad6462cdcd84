//! Durable queues: what runs over a [store](crate::store).
//!
//! ```text
//! bus.publish ──► sink ──┐                          ┌──► lanes ──► attempt ──► handler
//! bus.enqueue_in ────────┤   store   ◄── session ───┤                │
//! handler's transaction ─┘  (tables)     (feed)     └── parking      └── scope: its transaction
//!                               ▲
//!                               └── keeper: leases · promote · prune
//! ```
//! A durable queue is an endpoint like any other: this folder gives the engine a [`Source`](laneway_actors::port::Source)
//! for each shard, a parking place and what surrounds an attempt, and nothing of lanes, order, retries or drains is here.

mod config;
mod engine;
mod enqueue;
mod feed;
mod keeper;
mod lent;
mod link;
mod membership;
mod outgoing;
mod queue;
mod scope;
mod session;
mod sink;
#[cfg(all(test, feature = "sqlite"))]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use laneway_actors::port::{Attempts, Membership, Parking, PublishError, Scope, Source};
use laneway_actors::{ContextPublisher, ShardCount};
use sqlx::{Database, Transaction};

pub use config::StoreConfig;
pub use enqueue::{Batch, EnqueueError, Enqueued};
pub use scope::{HandlerTransaction, InTransaction, TransactionError};

pub(crate) use engine::Running;
#[allow(unused_imports)]
pub(crate) use outgoing::{Addressed, Addressing, ToQueue};

use config::AnyConfig;
use engine::Slot;
use queue::{DurableAttempts, DurableParking, DurableSource, Place};

use crate::store::{QueueIdentity, QueueOrder, Shard, StoreError};

/// For how long the ids of messages that ended are remembered, unless the bus says otherwise.
pub(crate) const REMEMBER_IDS_FOR: Duration = Duration::from_secs(5 * 60);

/// The store of a bus, as described.
pub(crate) struct Durable {
    config: Box<dyn AnyConfig>,
    slot: Arc<Slot>,
    pub(crate) remember_ids_for: Duration,
}

impl Durable {
    pub(crate) fn new(config: impl StoreConfig) -> Self {
        Self {
            config: Box::new(config),
            slot: Arc::default(),
            remember_ids_for: REMEMBER_IDS_FOR,
        }
    }

    pub(crate) fn handle(&self) -> DurableHandle {
        DurableHandle(Arc::clone(&self.slot))
    }

    /// The sources of a queue, in the order of its shards.
    pub(crate) fn sources(&self, queue: &QueueIdentity) -> Vec<Arc<dyn Source>> {
        let source = |name: String, place| {
            let slot = Arc::clone(&self.slot);
            let source = DurableSource::new(Arc::clone(&queue.name), name, place, slot);
            Arc::new(source) as Arc<dyn Source>
        };
        match queue.order {
            QueueOrder::Unordered => vec![source(queue.name.to_string(), Place::Shared)],
            QueueOrder::Ordered(count) => (0..count.get())
                .map(|number| {
                    let name = shard_name(&queue.name, number, count);
                    source(name, Place::Shard(Shard(number)))
                })
                .collect(),
        }
    }

    /// The group of nodes that share a queue's shards out; `None` where there is nothing to share.
    pub(crate) fn membership(&self, queue: &QueueIdentity) -> Option<Arc<dyn Membership>> {
        let ordered = matches!(queue.order, QueueOrder::Ordered(_));
        (ordered && self.config.is_shared()).then(|| {
            Arc::new(membership::DurableMembership {
                queue: Arc::clone(&queue.name),
                slot: Arc::clone(&self.slot),
            }) as Arc<dyn Membership>
        })
    }

    pub(crate) fn parking(queue: &str) -> Arc<dyn Parking> {
        Arc::new(DurableParking::of(queue))
    }

    pub(crate) fn attempts(&self, transactional: bool) -> Arc<dyn Attempts> {
        Arc::new(DurableAttempts::new(Arc::clone(&self.slot), transactional))
    }

    /// Connects, declares the queues and starts the chores.
    pub(crate) fn start(
        self,
        queues: Vec<QueueIdentity>,
        addressing: Arc<dyn Addressing>,
    ) -> BoxFuture<'static, Result<Running, StoreError>> {
        self.config
            .start(self.slot, queues, addressing, self.remember_ids_for)
    }
}

/// A shard's queue, as it is shown.
fn shard_name(queue: &str, number: u32, count: ShardCount) -> String {
    match count.get() {
        1 => queue.to_owned(),
        _ => format!("{queue}-{number:03}"),
    }
}

/// What the bus does with its store while it runs.
#[derive(Clone)]
pub(crate) struct DurableHandle(Arc<Slot>);

impl DurableHandle {
    /// Stores messages outside of a transaction, all or none.
    pub(crate) fn enqueue(
        &self,
        batch: Vec<ToQueue>,
    ) -> BoxFuture<'static, Result<(), PublishError>> {
        match self.0.engine() {
            Some(engine) => engine.sink.enqueue(batch),
            None => Box::pin(async { Err(PublishError::ShutDown) }),
        }
    }

    pub(crate) async fn enqueue_in<DB: Database>(
        &self,
        publisher: &dyn ContextPublisher,
        transaction: &mut Transaction<'_, DB>,
        batch: Batch,
    ) -> Result<Enqueued, EnqueueError> {
        enqueue::enqueue_in(&self.0, publisher, transaction, batch).await
    }

    /// A transaction for a handler that is called directly.
    pub(crate) fn scope(&self) -> Option<Arc<dyn Scope>> {
        self.0.engine().map(|engine| engine.scope(None))
    }

    /// The store itself, to look at.
    pub(crate) fn store(&self) -> Option<Arc<dyn crate::store::Store>> {
        self.0.engine().map(|engine| Arc::clone(&engine.store))
    }
}
