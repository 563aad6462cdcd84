//! The store as a bus sees it: what makes its queues durable, and what runs then.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use laneway_actors::port::{Membership, PublishError, Scope, Source};
use laneway_actors::{
    EndpointSettings, EndpointSpec, HandlerSet, HoldEnd, PoisonReason, ShardCount,
};

use super::config::{AnyConfig, StoreConfig};
use super::engine::{Running, Slot};
use super::membership::DurableMembership;
use super::queue::{DurableAttempts, DurableParking, DurableSource, Place};
use super::retired::Queues;
use crate::builder::BusBuilder;
use crate::bus::Bus;
use crate::local::address::{DurableSink, ToQueue};
use crate::local::durable::{DurableQueue, DurableQueues, HeldMessage, RunningStore};
use crate::local::settings::QueueOrder;
use crate::publish::BusPublisher;
use crate::store::{
    DeadReason, HoldEnding, QueueIdentity, QueueOrder as StoredOrder, Sequence, Shard, Store,
};

/// For how long the ids of messages that ended are remembered, unless the store says otherwise.
const REMEMBER_IDS_FOR: Duration = Duration::from_secs(300);

/// Which store a bus has, and how it uses it.
pub struct DurableStore {
    config: Box<dyn AnyConfig>,
    remember_ids_for: Duration,
}

impl DurableStore {
    /// For how long the id of a message is remembered after its end, so that a copy is recognised and not handled again.
    /// Defaults to 5 minutes. Each costs a small row until then.
    #[must_use]
    pub fn remember_ids_for(mut self, window: Duration) -> Self {
        self.remember_ids_for = window;
        self
    }
}

impl<C: StoreConfig> From<C> for DurableStore {
    fn from(config: C) -> Self {
        Self {
            config: Box::new(config),
            remember_ids_for: REMEMBER_IDS_FOR,
        }
    }
}

impl std::fmt::Debug for DurableStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DurableStore")
            .field("remember_ids_for", &self.remember_ids_for)
            .finish_non_exhaustive()
    }
}

impl BusBuilder {
    /// Keeps the [`durable()`](crate::LocalQueueBuilder::durable) queues in this database, which is the application's own:
    /// `store(SqliteConfig::file("orders.db"))` or `store(PostgresConfig::at(url))`.
    /// [`docs::durability`](crate::docs::durability) says what is durable when.
    #[must_use]
    pub fn store(mut self, store: impl Into<DurableStore>) -> Self {
        self.store = Some(Box::new(Description::new(store.into())));
        self.stores_said += 1;
        self
    }
}

impl Bus {
    /// The store of the durable queues, to be looked at. `None` without one, and after a shutdown.
    pub fn store(&self) -> Option<Arc<dyn Store>> {
        let store = self.inner.store.as_ref()?;
        let running = store.as_any().downcast_ref::<Running>()?;
        Some(Arc::clone(&running.slot.engine()?.store))
    }
}

/// The store of a bus, as described.
struct Description {
    store: DurableStore,
    slot: Arc<Slot>,
    queues: Queues,
}

impl Description {
    fn new(store: DurableStore) -> Self {
        Self {
            store,
            slot: Arc::default(),
            queues: Queues::default(),
        }
    }

    /// The sources of a queue, in the order of its shards.
    fn sources(&self, queue: &QueueIdentity, max_attempts: u32) -> Vec<Arc<dyn Source>> {
        let source = |name: String, place| {
            let slot = Arc::clone(&self.slot);
            let queue = Arc::clone(&queue.name);
            let source = DurableSource::new(queue, name, place, slot, max_attempts);
            Arc::new(source) as Arc<dyn Source>
        };
        match queue.order {
            StoredOrder::Unordered => vec![source(queue.name.to_string(), Place::Shared)],
            StoredOrder::Ordered(count) => (0..count.get())
                .map(|number| {
                    let name = shard_name(&queue.name, number, count);
                    source(name, Place::Shard(Shard(number)))
                })
                .collect(),
        }
    }

    /// The group of nodes that share a queue's shards out; `None` where there is nothing to share.
    fn membership(&self, queue: &QueueIdentity) -> Option<Arc<dyn Membership>> {
        let ordered = matches!(queue.order, StoredOrder::Ordered(_));
        (ordered && self.store.config.is_shared()).then(|| {
            Arc::new(DurableMembership {
                queue: Arc::clone(&queue.name),
                slot: Arc::clone(&self.slot),
            }) as Arc<dyn Membership>
        })
    }
}

impl DurableQueues for Description {
    fn endpoint(
        &mut self,
        queue: DurableQueue,
        settings: EndpointSettings,
        handlers: HandlerSet,
    ) -> EndpointSpec {
        // A number that is not allowed is a problem of the settings; nothing starts then.
        let shards = ShardCount::new(queue.shards).or(ShardCount::new(1));
        let identity = QueueIdentity {
            name: Arc::clone(&queue.name),
            order: match (queue.order, shards) {
                (QueueOrder::Unordered, _) | (_, None) => StoredOrder::Unordered,
                (_, Some(shards)) => StoredOrder::Ordered(shards),
            },
        };
        let slot = Arc::clone(&self.slot);
        let sources = self.sources(&identity, settings.max_delivery_attempts);
        let spec = EndpointSpec {
            parking: (!settings.discard_poison).then(|| DurableParking::of(&queue.name)),
            membership: self.membership(&identity),
            attempts: Some(Arc::new(DurableAttempts::new(slot, queue.transactional))),
            ..EndpointSpec::sharded(settings, queue.name, sources, handlers)
        };
        self.queues.handled.push(identity);
        spec
    }

    fn retire(&mut self, retired: Vec<Arc<str>>, elsewhere: Vec<Arc<str>>) {
        self.queues.retired = retired;
        self.queues.elsewhere = elsewhere;
    }

    fn sink(&self) -> Arc<dyn DurableSink> {
        Arc::new(SlotSink(Arc::clone(&self.slot)))
    }

    fn start(
        self: Box<Self>,
        publisher: Arc<BusPublisher>,
    ) -> BoxFuture<'static, Result<Arc<dyn RunningStore>, String>> {
        let Self {
            store,
            slot,
            queues,
        } = *self;
        Box::pin(async move {
            let starting = store
                .config
                .start(slot, queues, publisher, store.remember_ids_for);
            match starting.await {
                Ok(running) => Ok(Arc::new(running) as Arc<dyn RunningStore>),
                Err(error) => Err(error.to_string()),
            }
        })
    }
}

/// A shard's queue, as it is shown.
fn shard_name(queue: &str, number: u32, count: ShardCount) -> String {
    match count.get() {
        1 => queue.to_owned(),
        _ => format!("{queue}-{number:03}"),
    }
}

struct SlotSink(Arc<Slot>);

impl DurableSink for SlotSink {
    fn enqueue(&self, batch: Vec<ToQueue>) -> BoxFuture<'static, Result<(), PublishError>> {
        match self.0.engine() {
            Some(engine) => engine.sink.enqueue(batch),
            None => Box::pin(async { Err(PublishError::ShutDown) }),
        }
    }
}

impl RunningStore for Running {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn scope(&self) -> Option<Arc<dyn Scope>> {
        self.slot.engine().map(|engine| engine.scope(None))
    }

    fn held<'a>(
        &'a self,
        queue: &'a str,
        after: i64,
        limit: u32,
    ) -> BoxFuture<'a, Result<Vec<HeldMessage>, String>> {
        Box::pin(async move {
            let engine = self.slot.engine().ok_or(CLOSED)?;
            let held = engine.store.held(queue, Sequence(after), limit).await;
            let held = held.map_err(|error| error.to_string())?.into_iter();
            Ok(held
                .map(|stored| HeldMessage {
                    sequence: stored.sequence.0,
                    message: stored.id().cloned(),
                    key: stored.key,
                    attempts: stored.attempts,
                })
                .collect())
        })
    }

    fn end_hold<'a>(
        &'a self,
        queue: &'a str,
        sequence: i64,
        end: HoldEnd,
    ) -> BoxFuture<'a, Result<bool, String>> {
        let ending = match end {
            HoldEnd::Retry => HoldEnding::Retry,
            HoldEnd::Skip => HoldEnding::Discarded,
            HoldEnd::Release => HoldEnding::Dead {
                reason: DeadReason::Poison(PoisonReason::Failed),
                detail: "released by an operator; its past says why it was held".to_owned(),
            },
        };
        Box::pin(async move {
            let engine = self.slot.engine().ok_or(CLOSED)?;
            let ended = engine.store.end_hold(queue, Sequence(sequence), ending);
            ended.await.map_err(|error| error.to_string())
        })
    }

    fn give_up_after(&self, deadline: Duration) {
        Running::give_up_after(self, deadline);
    }

    fn stop(&self) -> BoxFuture<'_, ()> {
        Box::pin(Running::stop(self))
    }
}

const CLOSED: &str = "the store is closed";

#[cfg(all(test, feature = "sqlite", feature = "postgres"))]
mod tests;
