//! What the builder of a bus says about local handlers and their queues.

use std::any::Any;
use std::sync::Arc;

use laneway_actors::{Handler, KeyedMessages, Message, OrderingKey};

use super::describe::{LocalHandler, LocalQueueBuilder, ModuleBuilder, described};
use crate::builder::BusBuilder;

/// # Local handlers
/// Messages from one part of the program to others. Every type with a handler has a local queue of its own, named
/// [`T::TYPE`](Message::TYPE), and [`Bus::publish`](crate::Bus::publish) puts a message into every local queue of its
/// type. A queue is an endpoint: it shows in snapshots and events under its name.
///
/// ```
/// # use laneway::prelude::*;
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize)] struct Paid { account: u64 }
/// # impl Message for Paid { const TYPE: &'static str = "paid"; }
/// # impl Keyed for Paid { fn key(&self) -> OrderingKey { self.account.into() } }
/// # async fn ship(_: Paid, _: Context) -> Result<(), Failure> { Ok(()) }
/// # async fn bill(_: Paid, _: Context) -> Result<(), Failure> { Ok(()) }
/// let ready = Bus::builder()
///     .keyed::<Paid>()
///     .module("shipping", |m| m.handler::<Paid, _>(ship))
///     .module("billing", |m| m.separated::<Paid, _>("billing-paid", bill))
///     .local_queue("billing-paid", |q| q.partitioned(8).max_delivery_attempts(3))
///     .build()?;
/// # Ok::<(), laneway::ConfigError>(())
/// ```
///
/// **What wins.** A route ([`publishes`](Self::publishes)) wins over local queues: as they would get nothing then, the
/// combination is refused, unless the route says that it is for both
/// ([`and_local_queues`](crate::RouteBuilder::and_local_queues)). [`on_broker`](LocalQueueBuilder::on_broker) is the
/// route of its type; a second one is refused.
impl BusBuilder {
    /// Handles messages of type `T` from the type's own local queue. Several handlers of one type run together: one
    /// after the other, in the order in which they are said, as one attempt; if one fails, all run again.
    #[must_use]
    pub fn handler<T: Message, H: Handler<T>>(mut self, handler: H) -> Self {
        let handler = LocalHandler::new::<T, H>(None, handler, None);
        self.local.handlers.push(handler);
        self
    }

    /// The same, with settings of the queue.
    #[must_use]
    pub fn handler_with<T: Message, H: Handler<T>>(
        mut self,
        handler: H,
        describe: impl FnOnce(LocalQueueBuilder) -> LocalQueueBuilder,
    ) -> Self {
        let settings = Some(described(describe));
        let handler = LocalHandler::new::<T, H>(None, handler, settings);
        self.local.handlers.push(handler);
        self
    }

    /// Handles messages of type `T` from a queue of its own with this name, apart from the type's other handlers: with
    /// its own order and its own retries. The name is stable: on a durable queue messages wait under it.
    #[must_use]
    pub fn separated<T: Message, H: Handler<T>>(mut self, name: &str, handler: H) -> Self {
        let handler = LocalHandler::new::<T, H>(Some(name), handler, None);
        self.local.handlers.push(handler);
        self
    }

    /// The same, with settings of the queue.
    #[must_use]
    pub fn separated_with<T: Message, H: Handler<T>>(
        mut self,
        name: &str,
        handler: H,
        describe: impl FnOnce(LocalQueueBuilder) -> LocalQueueBuilder,
    ) -> Self {
        let settings = Some(described(describe));
        let handler = LocalHandler::new::<T, H>(Some(name), handler, settings);
        self.local.handlers.push(handler);
        self
    }

    /// Handlers that belong together, and settings of all their queues. The name is for errors.
    #[must_use]
    pub fn module(
        mut self,
        name: &str,
        describe: impl FnOnce(ModuleBuilder) -> ModuleBuilder,
    ) -> Self {
        let module = describe(ModuleBuilder::default());
        self.local.add_module(name, module);
        self
    }

    /// Settings of the local queue of this name: a message type's, or a separated handler's. They win over those that
    /// are said anywhere else.
    #[must_use]
    pub fn local_queue(
        mut self,
        name: &str,
        describe: impl FnOnce(LocalQueueBuilder) -> LocalQueueBuilder,
    ) -> Self {
        let settings = described(describe);
        self.local.queues.push((name.to_owned(), settings));
        self
    }

    /// Settings of all local queues that say nothing else.
    #[must_use]
    pub fn local_queues(
        mut self,
        describe: impl FnOnce(LocalQueueBuilder) -> LocalQueueBuilder,
    ) -> Self {
        self.local.all.push(described(describe));
        self
    }

    /// Nobody handles the durable queue of this name any more: each of its messages becomes a dead letter with the reason
    /// `no-handler`, those that come late too, and none counts as handled. A handler that is removed leaves its queue's
    /// messages in the database, where they wait, and each start warns of them; this is the way out.
    ///
    /// To be said only when no other program on the database handles the queue: this one competes with it for the
    /// messages. It can be removed again once the queue is empty and nobody publishes to it.
    ///
    /// A name that has a handler here is refused by [`build`](Self::build), as is one without a store. One that the
    /// database does not know is told in the log.
    #[must_use]
    pub fn retired_queue(mut self, name: &str) -> Self {
        self.local.retired.push(name.to_owned());
        self
    }

    /// The ordering key of messages of type `T`, wherever they go. A key that is given on publishing wins.
    #[must_use]
    pub fn key_by<T: Message, K: Into<OrderingKey>>(
        mut self,
        key: impl Fn(&T) -> K + Send + Sync + 'static,
    ) -> Self {
        let selector = move |message: &dyn Any| {
            let message = message.downcast_ref::<T>();
            message.map(|message| key(message).into())
        };
        self.local.keys.push((T::TYPE, Arc::new(selector)));
        self
    }

    /// Messages of type `T` have their own [key](crate::Keyed::key); so have those of each type of a tuple:
    /// `.keyed::<(Paid, Shipped)>()`.
    #[must_use]
    pub fn keyed<T: KeyedMessages>(mut self) -> Self {
        T::selectors(&mut self.local.keys);
        self
    }
}
