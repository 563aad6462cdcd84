//! The store of a bus while it runs: its runtime, its leases, its chores.
//!
//! Everything about the store runs on threads of its own: handlers that block the application's runtime must not
//! stop the renewal of leases.

use std::any::Any;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use laneway_actors::port::{MemberId, Scope};
use sqlx::Database;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::keeper::Keeper;
use super::lent::Lent;
use super::link::Claim;
use super::retired::{self, Queues};
use super::scope::TransactionScope;
use super::sink::Sink;
use crate::publish::BusPublisher;
use crate::store::{Store, StoreError, TransactionalStore};

/// Threads of the store.
const THREADS: usize = 2;
/// How often scheduled messages are looked for whose time has come.
const PROMOTE: Duration = Duration::from_millis(250);
/// Messages that get their place at once at most.
const PROMOTE_AT_ONCE: u32 = 1_000;
/// How often ids of messages that ended long ago are looked for.
const PRUNE: Duration = Duration::from_secs(10);
/// Ids that are forgotten at once at most: small transactions disturb nobody.
const PRUNE_AT_ONCE: u32 = 1_000;

/// How long closing the connections may take.
const CLOSE: Duration = Duration::from_secs(2);

/// Where the store is found once it has started.
#[derive(Default)]
pub(crate) struct Slot(Mutex<Option<Arc<Engine>>>);

impl Slot {
    /// `None` before the start and after the end.
    pub(super) fn engine(&self) -> Option<Arc<Engine>> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Arc<Engine>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What all sessions and scopes of a store share.
pub(super) struct Engine {
    pub(super) store: Arc<dyn Store>,
    /// The same as an `Arc<dyn TransactionalStore<Database = …>>`.
    transactional: Box<dyn Any + Send + Sync>,
    make_scope: MakeScope,
    /// This process, as an owner of leases.
    pub(super) me: MemberId,
    pub(super) keeper: Arc<Keeper>,
    pub(super) lent: Lent,
    pub(super) sink: Sink,
    pub(super) publisher: Arc<BusPublisher>,
    pub(super) runtime: Handle,
    /// Cancelled when a drain has had its time: what the database does not answer is not tried again.
    pub(super) give_up: CancellationToken,
}

type MakeScope = Box<dyn Fn(Arc<Engine>, Option<Arc<Claim>>) -> Arc<dyn Scope> + Send + Sync>;

impl Engine {
    /// A transaction around a handler; without a claim it settles nothing.
    pub(super) fn scope(self: &Arc<Self>, claim: Option<Arc<Claim>>) -> Arc<dyn Scope> {
        (self.make_scope)(Arc::clone(self), claim)
    }

    /// The store, if its database is of this kind.
    pub(super) fn transactional<DB: Database>(
        &self,
    ) -> Option<Arc<dyn TransactionalStore<Database = DB>>> {
        self.transactional
            .downcast_ref::<Arc<dyn TransactionalStore<Database = DB>>>()
            .cloned()
    }
}

/// The store of a running bus. Dropping it stops everything at once, as a crash would.
pub(super) struct Running {
    pub(super) slot: Arc<Slot>,
    runtime: Mutex<Option<Runtime>>,
}

impl Running {
    /// Starts the store and its chores.
    ///
    /// # Errors
    /// What the store refuses, or why it cannot be reached.
    pub(super) async fn start<S: TransactionalStore>(
        slot: Arc<Slot>,
        starting: impl Future<Output = Result<S, StoreError>> + Send + 'static,
        queues: Queues,
        publisher: Arc<BusPublisher>,
        remember_ids_for: Duration,
    ) -> Result<Self, StoreError> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("laneway-store")
            .enable_all()
            .build()
            .map_err(|error| StoreError::Refused {
                what: format!("the threads of the store cannot be started: {error}"),
            })?;
        let handle = runtime.handle().clone();
        // Made now, so that the threads end if the store does not start.
        let running = Self {
            slot,
            runtime: Mutex::new(Some(runtime)),
        };
        let started = handle.spawn(async move {
            let store = Arc::new(starting.await?);
            store.declare(&queues.handled).await?;
            retired::tell_unhandled(&*store, &queues).await;
            Ok((store, queues.retired))
        });
        let (store, to_retire): (Arc<S>, _) =
            started.await.map_err(|_| StoreError::Refused {
                what: "the store panicked while starting".to_owned(),
            })??;
        let engine = Arc::new(Engine {
            sink: Sink::start(Arc::clone(&store) as Arc<dyn Store>, &handle),
            transactional: Box::new(
                Arc::clone(&store) as Arc<dyn TransactionalStore<Database = S::Database>>
            ),
            make_scope: {
                let store =
                    Arc::clone(&store) as Arc<dyn TransactionalStore<Database = S::Database>>;
                Box::new(move |engine, claim| {
                    Arc::new(TransactionScope::new(engine, Arc::clone(&store), claim))
                })
            },
            me: MemberId::unique(),
            keeper: Arc::default(),
            lent: Lent::default(),
            publisher,
            runtime: handle.clone(),
            give_up: CancellationToken::new(),
            store,
        });
        let store = &engine.store;
        handle.spawn(Arc::clone(&engine.keeper).run(Arc::clone(store)));
        handle.spawn(promote(Arc::clone(store)));
        handle.spawn(prune(Arc::clone(store), remember_ids_for));
        for queue in to_retire {
            handle.spawn(retired::retire(Arc::clone(store), engine.me, queue));
        }
        *running.slot.lock() = Some(engine);
        Ok(running)
    }

    /// From `deadline` on nothing waits for a database that does not answer.
    pub(super) fn give_up_after(&self, deadline: Duration) {
        if let Some(engine) = self.slot.engine() {
            let give_up = engine.give_up.clone();
            engine.runtime.spawn(async move {
                tokio::time::sleep(deadline).await;
                give_up.cancel();
            });
        }
    }

    /// Closes the store. Whatever is under way fails.
    pub(super) async fn stop(&self) {
        let engine = self.slot.lock().take();
        if let Some(engine) = engine {
            let runtime = engine.runtime.clone();
            let closing = runtime.spawn(async move {
                let closing = tokio::time::timeout(CLOSE, engine.store.close()).await;
                if closing.is_err() {
                    // A connection on which nobody answers, or one that a handler still holds. With the threads ends
                    // what remains.
                    warn!(target: "laneway", store = engine.store.name(), "not every connection could be closed in time");
                }
            });
            // An error means that it panicked, and is closed all the more.
            let _ = closing.await;
        }
        self.end_threads();
    }

    fn end_threads(&self) {
        let runtime = self.runtime.lock();
        let runtime = runtime.unwrap_or_else(PoisonError::into_inner).take();
        if let Some(runtime) = runtime {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.slot.lock().take();
        self.end_threads();
    }
}

/// Gives scheduled messages their place when they become due.
async fn promote(store: Arc<dyn Store>) {
    let mut silent = false;
    loop {
        match store.promote_due(PROMOTE_AT_ONCE).await {
            Ok(PROMOTE_AT_ONCE) => {
                silent = false;
                continue;
            }
            Ok(_) => silent = false,
            Err(error) => tell_once(&mut silent, &*store, &error, "scheduled messages wait"),
        }
        tokio::time::sleep(PROMOTE).await;
    }
}

/// Forgets the ids of messages that ended long ago.
async fn prune(store: Arc<dyn Store>, window: Duration) {
    let mut silent = false;
    loop {
        tokio::time::sleep(PRUNE).await;
        loop {
            match store.prune(window, PRUNE_AT_ONCE).await {
                Ok(PRUNE_AT_ONCE) => silent = false,
                Ok(_) => {
                    silent = false;
                    break;
                }
                Err(error) => {
                    tell_once(&mut silent, &*store, &error, "old ids are kept");
                    break;
                }
            }
        }
    }
}

/// Logs the first of several errors.
pub(super) fn tell_once(silent: &mut bool, store: &dyn Store, error: &StoreError, what: &str) {
    if !*silent {
        warn!(target: "laneway", store = store.name(), %error, "{what} while the database does not answer");
    }
    *silent = true;
}
