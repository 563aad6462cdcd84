//! What the bus needs of a store to make queues durable. The features `sqlite` and `postgres` bring one; without them
//! there is none, and this is all that a bus knows of it.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use laneway_actors::port::Scope;
use laneway_actors::{EndpointSettings, EndpointSpec, HandlerSet, HoldEnd, MessageId, OrderingKey};

use super::address::DurableSink;
use super::settings::QueueOrder;
use crate::publish::BusPublisher;

/// A durable queue to be made.
#[cfg_attr(
    not(any(feature = "postgres", feature = "sqlite")),
    expect(dead_code, reason = "a store reads it")
)]
pub(crate) struct DurableQueue {
    pub(crate) name: Arc<str>,
    pub(crate) order: QueueOrder,
    pub(crate) shards: u32,
    pub(crate) transactional: bool,
}

/// A store that has not started yet.
pub(crate) trait DurableQueues: Send + Sync {
    /// An endpoint over a queue.
    fn endpoint(
        &mut self,
        queue: DurableQueue,
        settings: EndpointSettings,
        handlers: HandlerSet,
    ) -> EndpointSpec;

    /// Which queues' messages are to become dead letters, and the names of queues with handlers that are not durable.
    fn retire(&mut self, retired: Vec<Arc<str>>, elsewhere: Vec<Arc<str>>);

    /// Takes what is published.
    fn sink(&self) -> Arc<dyn DurableSink>;

    /// Connects, checks the database and declares the queues.
    fn start(
        self: Box<Self>,
        publisher: Arc<BusPublisher>,
    ) -> BoxFuture<'static, Result<Arc<dyn RunningStore>, String>>;
}

/// A key that a durable queue holds.
pub(crate) struct HeldMessage {
    pub(crate) sequence: i64,
    pub(crate) key: Option<OrderingKey>,
    pub(crate) message: Option<MessageId>,
    pub(crate) attempts: u32,
}

/// A store that runs. Dropping it stops it at once, as a crash would.
pub(crate) trait RunningStore: Send + Sync {
    #[cfg_attr(
        not(any(feature = "postgres", feature = "sqlite")),
        expect(dead_code, reason = "a store reads it")
    )]
    fn as_any(&self) -> &dyn Any;

    /// A transaction around a handler that is called directly.
    fn scope(&self) -> Option<Arc<dyn Scope>>;

    /// Up to `limit` messages of a queue that hold their keys, after this one.
    fn held<'a>(
        &'a self,
        queue: &'a str,
        after: i64,
        limit: u32,
    ) -> BoxFuture<'a, Result<Vec<HeldMessage>, String>>;

    /// Ends a hold; whether there was one.
    fn end_hold<'a>(
        &'a self,
        queue: &'a str,
        sequence: i64,
        end: HoldEnd,
    ) -> BoxFuture<'a, Result<bool, String>>;

    /// A drain has begun: from `deadline` on, what the database does not answer is not tried again.
    fn give_up_after(&self, deadline: Duration);

    /// Closes the database. Whatever is under way there fails.
    fn stop(&self) -> BoxFuture<'_, ()>;
}
