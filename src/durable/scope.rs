//! One handler's transaction: its writes, what it publishes, and that its message is handled, in one commit.
//!
//! # Order of the steps
//! Everything that Laneway writes comes at the end, just before the commit: first the mark, which checks the
//! lease and locks it, so that nobody can take the shard before the commit; then the outgoing messages, all in one
//! call, so that their keys are locked in one order (two calls could dead-lock with another transaction). The locks
//! last until the commit, which is next.
//!
//! # A commit without an answer
//! The connection breaks after COMMIT was sent. Whether it took place, the message's own row tells: it is gone if, and
//! only if, it did. It is asked for until there is an answer, and the key waits. The asking itself waits for a
//! commit that is still under way in the database, since that has locked the row.

use std::any::Any;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use laneway_actors::Context;
use laneway_actors::port::{CommitError, Draft, PublishError, Scope};
use sqlx::{Database, Transaction};
use tokio::sync::OwnedMutexGuard;

use super::engine::Engine;
use super::link::{Claim, Order};
use crate::local::LocalQueues;
use crate::local::address::{ToBuffered, ToQueue};
use crate::store::{Ending, Enqueued, Settlement, StoreError, TransactionalStore};

/// Pause before the database is asked again.
const AGAIN: Duration = Duration::from_millis(100);
/// How long a commit may take to be answered; after that its outcome is unknown and found out.
const COMMIT: Duration = Duration::from_secs(5);

type Slot<DB> = Option<Transaction<'static, DB>>;

/// The transaction, and whether its attempt has ended.
struct Shared<DB: Database> {
    slot: Arc<tokio::sync::Mutex<Slot<DB>>>,
    ended: AtomicBool,
}

impl<DB: Database> Shared<DB> {
    /// Gives up what is there after the end, unless a handler's task still has it: then that does so when it is done.
    ///
    /// The end is said before the lock is tried here, and the lock is given back there before it is asked for the end: so
    /// one of the two gives it up.
    fn give_up_if_ended(&self) {
        if self.ended.load(Ordering::SeqCst)
            && let Ok(mut slot) = self.slot.try_lock()
        {
            drop(slot.take());
        }
    }
}

/// What a handler has published so far.
#[derive(Default)]
struct Published {
    durable: Vec<ToQueue>,
    buffered: Vec<ToBuffered>,
}

/// The transaction of one attempt. It begins when the handler first asks for it, else at the commit.
pub(super) struct TransactionScope<DB: Database> {
    engine: Arc<Engine>,
    store: Arc<dyn TransactionalStore<Database = DB>>,
    /// `None` where the handler was called directly: there is nothing to settle.
    claim: Option<Arc<Claim>>,
    transaction: Arc<Shared<DB>>,
    published: Mutex<Published>,
}

impl<DB: Database> TransactionScope<DB> {
    pub(super) fn new(
        engine: Arc<Engine>,
        store: Arc<dyn TransactionalStore<Database = DB>>,
        claim: Option<Arc<Claim>>,
    ) -> Self {
        Self {
            engine,
            store,
            claim,
            transaction: Arc::new(Shared {
                slot: Arc::default(),
                ended: AtomicBool::new(false),
            }),
            published: Mutex::default(),
        }
    }

    fn take_down(&self, draft: &Draft) -> Result<(), PublishError> {
        let addressed = self.engine.publisher.addressed_in_transaction(draft)?;
        let published = &mut self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        published.durable.extend(addressed.durable);
        published.buffered.extend(addressed.buffered);
        Ok(())
    }

    async fn begin(&self) -> Result<Transaction<'static, DB>, StoreError> {
        loop {
            match self.store.begin().await {
                // Another handler's transaction is in the way, or the database is away. The handler's time-out
                // bounds this.
                Err(error) if error.is_retryable() => tokio::time::sleep(AGAIN).await,
                answered => return answered,
            }
        }
    }

    async fn finish(&self, returned: Vec<Draft>) -> Result<(), CommitError> {
        for draft in &returned {
            self.take_down(draft).map_err(rolled_back)?;
        }
        let mut slot = self.transaction.slot.try_lock().map_err(|_| {
            rolled_back("the handler has returned and still holds its transaction; drop it first")
        })?;
        let Published { durable, buffered } = std::mem::take(
            &mut *self
                .published
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        let mut transaction = match slot.take() {
            Some(transaction) => transaction,
            None if self.claim.is_none() && durable.is_empty() => {
                send(buffered);
                return Ok(());
            }
            None => self.begin().await.map_err(rolled_back)?,
        };
        if let Some(claim) = &self.claim {
            match self.mark(&mut transaction, claim).await {
                Ok(()) => {}
                Err(StoreError::LeaseLost { .. }) => {
                    claim.link.lose();
                    return Err(CommitError::SessionEnded);
                }
                // An earlier attempt's commit took place after all: its effects stand, these do not.
                Err(StoreError::AlreadySettled { .. }) => {
                    claim.link.tell(Order::Committed(claim.tag));
                    return Ok(());
                }
                Err(error) => return Err(rolled_back(error)),
            }
        }
        let (rows, lendings): (Vec<_>, Vec<_>) = durable
            .into_iter()
            .map(|message| {
                let (mut row, original) = super::into_row(message);
                let lending = super::enqueue::lending(&mut row, original);
                (row, lending)
            })
            .unzip();
        let enqueued = match rows.is_empty() {
            true => None,
            false => {
                let enqueued = self.store.enqueue_in(&mut transaction, rows).await;
                Some(enqueued.map_err(rolled_back)?)
            }
        };
        // One that is not answered in time is dropped with its connection. Whether it took place is found out.
        let committing = tokio::time::timeout(COMMIT, transaction.commit()).await;
        if let Some(why) = match committing {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(StoreError::from_client(&error)),
            Err(_) => Some(StoreError::timed_out("commit", COMMIT)),
        } {
            self.find_out(why).await?;
        }
        if let Some(claim) = &self.claim {
            claim.link.tell(Order::Committed(claim.tag));
        }
        if let Some(enqueued) = enqueued {
            super::enqueue::lend(&self.engine, &enqueued, lendings);
            let _: Vec<_> = Enqueued::committed(enqueued);
        }
        send(buffered);
        Ok(())
    }

    async fn mark(
        &self,
        transaction: &mut Transaction<'static, DB>,
        claim: &Claim,
    ) -> Result<(), StoreError> {
        let Some(lease) = claim.link.lease.get() else {
            return Err(StoreError::LeaseLost {
                queue: String::new(),
                epoch: 0,
            });
        };
        let settlement = Settlement {
            sequence: claim.sequence,
            ending: Ending::Handled,
        };
        self.store
            .settle_in(transaction, lease, &[settlement])
            .await
    }

    /// The commit was not answered with success: `Ok` if it took place all the same.
    async fn find_out(&self, why: StoreError) -> Result<(), CommitError> {
        let Some(claim) = &self.claim else {
            // There is no row that could tell.
            return Err(rolled_back(why));
        };
        let Some(lease) = claim.link.lease.get() else {
            claim.link.lose();
            return Err(CommitError::SessionEnded);
        };
        loop {
            let asking = self
                .store
                .unsettled(lease, std::slice::from_ref(&claim.sequence));
            let answer = tokio::select! {
                answer = asking => answer,
                () = claim.link.lost.cancelled() => return Err(CommitError::SessionEnded),
            };
            match answer {
                Ok(left) if left.is_empty() => return Ok(()),
                Ok(_) => return Err(rolled_back(why)),
                Err(error) if error.is_retryable() => tokio::time::sleep(AGAIN).await,
                Err(_) => {
                    claim.link.lose();
                    return Err(CommitError::SessionEnded);
                }
            }
        }
    }
}

/// What goes to queues in memory is sent after the commit, into places beyond their bound if need be: a handler that
/// waited for one could wait for itself.
fn send(buffered: Vec<ToBuffered>) {
    // An error means that the bus is being shut down, and what is in memory with it.
    let _ = LocalQueues::put(buffered, Vec::new());
}

fn rolled_back(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> CommitError {
    CommitError::RolledBack(why.into())
}

impl<DB: Database> Scope for TransactionScope<DB> {
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }

    fn publish(&self, draft: Draft) -> BoxFuture<'_, Result<(), PublishError>> {
        let taken = self.take_down(&draft);
        Box::pin(async move { taken })
    }

    fn commit(
        self: Arc<Self>,
        returned: Vec<Draft>,
    ) -> BoxFuture<'static, Result<(), CommitError>> {
        Box::pin(async move { self.finish(returned).await })
    }

    fn end(&self) {
        self.transaction.ended.store(true, Ordering::SeqCst);
        self.transaction.give_up_if_ended();
    }
}

/// Why a handler has no transaction.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransactionError {
    /// The queue's handlers have no transactions.
    #[error("this handler has no transaction: make its queue `durable()` and `transactional()`")]
    NotTransactional,
    /// The transaction is one of another database.
    #[error("the bus's store is another kind of database than the one asked for")]
    OtherDatabase,
    /// The handler has it already.
    #[error("the handler already uses its transaction; drop that first")]
    InUse,
    /// The attempt has ended: a task that the handler has left behind asks.
    #[error("the handler has ended, and its transaction with it")]
    Ended,
    /// It could not begin.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A handler's own transaction, on the store's database.
///
/// Whatever is written in it commits together with the mark that the message is handled, and with everything the handler
/// publishes, when the handler has succeeded; else nothing of it does. It is a connection: `execute(&mut *transaction)`.
/// To be dropped before the handler returns. Ending it by SQL (`COMMIT`) is not allowed, and breaks the promise.
pub struct HandlerTransaction<DB: Database> {
    slot: Option<OwnedMutexGuard<Slot<DB>>>,
    shared: Arc<Shared<DB>>,
}

impl<DB: Database> Drop for HandlerTransaction<DB> {
    fn drop(&mut self) {
        drop(self.slot.take());
        self.shared.give_up_if_ended();
    }
}

impl<DB: Database> HandlerTransaction<DB> {
    /// The transaction itself, for functions that take one.
    pub fn as_transaction(&mut self) -> &mut Transaction<'static, DB> {
        let slot = self.slot.as_mut().and_then(|slot| slot.as_mut());
        slot.expect("it was begun before it was given out")
    }
}

impl<DB: Database> Deref for HandlerTransaction<DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &DB::Connection {
        let slot = self.slot.as_ref().and_then(|slot| slot.as_ref());
        slot.expect("it was begun before it was given out")
    }
}

impl<DB: Database> DerefMut for HandlerTransaction<DB> {
    fn deref_mut(&mut self) -> &mut DB::Connection {
        self.as_transaction()
    }
}

impl<DB: Database> std::fmt::Debug for HandlerTransaction<DB> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HandlerTransaction").finish_non_exhaustive()
    }
}

/// What the context of a handler in a transaction can do.
pub trait InTransaction {
    /// The handler's transaction; begun when it is first asked for. On SQLite, which has one writer, all others wait from
    /// then on.
    ///
    /// # Errors
    /// [`TransactionError`].
    ///
    /// # Cancellation
    /// Dropping the future begins nothing.
    fn transaction<DB: Database>(
        &self,
    ) -> impl Future<Output = Result<HandlerTransaction<DB>, TransactionError>> + Send;
}

impl InTransaction for Context {
    async fn transaction<DB: Database>(&self) -> Result<HandlerTransaction<DB>, TransactionError> {
        let scope = self.scope().ok_or(TransactionError::NotTransactional)?;
        let scope = Arc::clone(scope).as_any();
        let scope = scope
            .downcast::<TransactionScope<DB>>()
            .map_err(|_| TransactionError::OtherDatabase)?;
        let shared = Arc::clone(&scope.transaction);
        let slot = Arc::clone(&shared.slot).try_lock_owned();
        // Made at once, so that the attempt's end while it begins is seen.
        let mut own = HandlerTransaction {
            slot: Some(slot.map_err(|_| TransactionError::InUse)?),
            shared,
        };
        let ended = |own: &HandlerTransaction<DB>| own.shared.ended.load(Ordering::SeqCst);
        if ended(&own) {
            return Err(TransactionError::Ended);
        }
        if let Some(slot) = &mut own.slot
            && slot.is_none()
        {
            **slot = Some(scope.begin().await?);
        }
        match ended(&own) {
            true => Err(TransactionError::Ended),
            false => Ok(own),
        }
    }
}
