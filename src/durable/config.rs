//! Which store a bus uses.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;

use super::engine::{Running, Slot};
use super::retired::Queues;
use crate::publish::BusPublisher;
use crate::store::{StoreError, TransactionalStore};

/// Settings of a store, with which a bus starts it.
pub trait StoreConfig: Send + Sync + 'static {
    /// The store.
    type Store: TransactionalStore;

    /// Whether several nodes may use the same database at once.
    const SHARED: bool;

    /// Connects, checks the database, and applies or checks the migrations.
    fn start(self) -> impl Future<Output = Result<Self::Store, StoreError>> + Send;
}

#[cfg(feature = "sqlite")]
impl StoreConfig for crate::store::sqlite::SqliteConfig {
    type Store = crate::store::sqlite::SqliteStore;
    const SHARED: bool = false;

    async fn start(self) -> Result<Self::Store, StoreError> {
        Self::Store::start(self).await
    }
}

#[cfg(feature = "postgres")]
impl StoreConfig for crate::store::postgres::PostgresConfig {
    type Store = crate::store::postgres::PostgresStore;
    const SHARED: bool = true;

    async fn start(self) -> Result<Self::Store, StoreError> {
        Self::Store::start(self).await
    }
}

/// The same with its type erased.
pub(super) trait AnyConfig: Send + Sync {
    fn is_shared(&self) -> bool;

    /// Once.
    fn start(
        self: Box<Self>,
        slot: Arc<Slot>,
        queues: Queues,
        publisher: Arc<BusPublisher>,
        remember_ids_for: Duration,
    ) -> BoxFuture<'static, Result<Running, StoreError>>;
}

impl<C: StoreConfig> AnyConfig for C {
    fn is_shared(&self) -> bool {
        C::SHARED
    }

    fn start(
        self: Box<Self>,
        slot: Arc<Slot>,
        queues: Queues,
        publisher: Arc<BusPublisher>,
        remember_ids_for: Duration,
    ) -> BoxFuture<'static, Result<Running, StoreError>> {
        let starting = async move { StoreConfig::start(*self).await };
        Box::pin(Running::start(
            slot,
            starting,
            queues,
            publisher,
            remember_ids_for,
        ))
    }
}
