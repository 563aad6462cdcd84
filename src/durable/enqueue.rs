//! Enqueuing in a transaction of the application's own: a message exists when, and only if, that commits.

use std::any::Any;
use std::sync::Arc;
use std::time::SystemTime;

use laneway_actors::port::{Draft, PublishError};
use laneway_actors::{ContextPublisher, Envelope, Message, MessageId, OrderingKey};
use sqlx::{Database, Transaction};

use super::engine::{Engine, Running};
use crate::bus::Bus;
use crate::local::address::ToQueue;
use crate::store::{self, NewMessage, Placed, StoreError};

/// Why messages were not enqueued in a transaction.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum EnqueueError {
    /// The bus has no store, or has been shut down.
    #[error("the bus has no running store: give it one with `store(…)`")]
    NoStore,
    /// The transaction is on another kind of database than the bus's store.
    #[error("the transaction is not on the database of the bus's store")]
    OtherDatabase,
    /// A message cannot go along with a transaction.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// The store. After [`StoreError::Conflict`] the whole transaction is to be tried again.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Messages to be enqueued together, of any types.
///
/// One batch is better than several calls in one transaction: the keys of a call are locked in one order, so that
/// two transactions cannot wait for each other.
#[derive(Default)]
pub struct Batch(Vec<Item>);

struct Item {
    message_type: &'static str,
    encode: Encode,
    key: Option<OrderingKey>,
    due: Option<SystemTime>,
}

type Encode = Box<dyn FnOnce(&dyn ContextPublisher, Option<OrderingKey>) -> Encoded + Send>;
type Encoded = Result<(Draft, Box<dyn Any + Send>), PublishError>;

impl Batch {
    /// No messages yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a message, under the key that the rules give it.
    #[must_use]
    pub fn message<T: Message>(self, message: T) -> Self {
        self.push(message, None, None)
    }

    /// Adds a message under this key.
    #[must_use]
    pub fn keyed<T: Message>(self, message: T, key: impl Into<OrderingKey>) -> Self {
        self.push(message, Some(key.into()), None)
    }

    /// Adds a message that is not to be handled before `due`, by the database's clock. It gets its place in the order
    /// of its key when it becomes due, and holds nobody until then.
    #[must_use]
    pub fn scheduled<T: Message>(self, message: T, due: SystemTime) -> Self {
        self.push(message, None, Some(due))
    }

    fn push<T: Message>(
        mut self,
        message: T,
        key: Option<OrderingKey>,
        due: Option<SystemTime>,
    ) -> Self {
        let encode: Encode = Box::new(move |publisher, key| {
            let envelope = Envelope::of(&message, publisher.encoding(T::TYPE))
                .map_err(|error| PublishError::Encode(error.to_string()))?;
            let key = key.or_else(|| publisher.key_of(T::TYPE, &message));
            let message_type = T::TYPE;
            let draft = Draft {
                message_type,
                envelope,
                key,
            };
            Ok((draft, Box::new(message)))
        });
        self.0.push(Item {
            message_type: T::TYPE,
            encode,
            key,
            due,
        });
        self
    }
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let types = self.0.iter().map(|item| item.message_type);
        f.debug_list().entries(types).finish()
    }
}

/// Messages in a transaction that has not committed yet.
#[must_use = "call `committed()` after the commit, or the messages wait for the next poll"]
pub struct Enqueued {
    stored: Option<store::Enqueued>,
    engine: Arc<Engine>,
    lendings: Vec<Lending>,
}

/// What may be lent when it is committed: to which queue, and the object with its message's id.
pub(super) type Lending = (Arc<str>, Option<(MessageId, Box<dyn Any + Send>)>);

/// The message gets its id now, so that the object is known by it.
pub(super) fn lending(row: &mut NewMessage, original: Option<Box<dyn Any + Send>>) -> Lending {
    let id = row.envelope.id.get_or_insert_with(MessageId::unique);
    let object = original.map(|original| (id.clone(), original));
    (Arc::clone(&row.queue), object)
}

impl Enqueued {
    /// What became of each message, once for each queue that handles it.
    pub fn placed(&self) -> &[Placed] {
        self.stored.as_ref().map_or(&[], store::Enqueued::placed)
    }

    /// The transaction has committed: whoever handles the messages is told to look now, and gets the original objects,
    /// where that is in this process. Without it polling finds the messages, within a second. **Not to be called if the
    /// transaction was rolled back**; if it is, nothing happens, for there are no rows.
    pub fn committed(self) {
        let Some(stored) = self.stored else { return };
        lend(&self.engine, &stored, self.lendings);
        stored.committed();
    }
}

impl std::fmt::Debug for Enqueued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Enqueued")
            .field("placed", &self.placed())
            .finish_non_exhaustive()
    }
}

/// Lends the original objects to whoever claims their rows.
pub(super) fn lend(engine: &Engine, stored: &store::Enqueued, lendings: Vec<Lending>) {
    for (placed, (queue, object)) in stored.placed().iter().zip(lendings) {
        if let (Placed::At(sequence), Some((id, original))) = (placed, object) {
            engine.lent.give(queue, *sequence, id, original);
        }
    }
}

impl Bus {
    /// Enqueues one message in a transaction of the application's own, on the database of the bus's store, for every
    /// durable queue of its type: it exists when, and only if, that transaction commits. To be called last before the
    /// commit, since the message's key stays locked until then; for several messages there is
    /// [`enqueue_all`](Self::enqueue_all).
    ///
    /// ```
    /// # use laneway::prelude::*;
    /// # use serde::{Deserialize, Serialize};
    /// #[derive(Serialize, Deserialize)]
    /// struct Paid { order: u64 }
    /// impl Message for Paid { const TYPE: &'static str = "paid"; }
    ///
    /// # #[cfg(feature = "sqlite")]
    /// async fn pay(bus: &Bus, pool: &sqlx::SqlitePool, order: u64) -> Result<(), Box<dyn std::error::Error>> {
    ///     let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await?;
    ///     sqlx::query("UPDATE orders SET paid = true WHERE id = ?")
    ///         .bind(order as i64)
    ///         .execute(&mut *transaction)
    ///         .await?;
    ///     let enqueued = bus.enqueue_in(&mut transaction, Paid { order }).await?;
    ///     transaction.commit().await?;
    ///     enqueued.committed();
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// [`EnqueueError`]. Roll the transaction back then; after a [conflict](StoreError::Conflict) try all of it again.
    ///
    /// # Cancellation
    /// Dropping the future leaves it open whether the message is in the transaction: roll that back.
    pub async fn enqueue_in<DB: Database, T: Message>(
        &self,
        transaction: &mut Transaction<'_, DB>,
        message: T,
    ) -> Result<Enqueued, EnqueueError> {
        self.enqueue_all(transaction, Batch::new().message(message))
            .await
    }

    /// Enqueues messages of any types in a transaction of the application's own; see [`enqueue_in`](Self::enqueue_in).
    ///
    /// # Errors
    /// See there. None of them is in the transaction then.
    pub async fn enqueue_all<DB: Database>(
        &self,
        transaction: &mut Transaction<'_, DB>,
        batch: Batch,
    ) -> Result<Enqueued, EnqueueError> {
        let publisher = &*self.inner.publisher;
        let running = self.inner.store.as_ref();
        let running = running.and_then(|store| store.as_any().downcast_ref::<Running>());
        let engine = running.and_then(|running| running.slot.engine());
        let engine = engine.ok_or(EnqueueError::NoStore)?;
        let store = engine
            .transactional::<DB>()
            .ok_or(EnqueueError::OtherDatabase)?;
        let mut rows = Vec::new();
        let mut lendings = Vec::new();
        for item in batch.0 {
            let (draft, original) = (item.encode)(publisher, item.key)?;
            let addressed = publisher.addressed_in_transaction(&draft)?;
            if !addressed.buffered.is_empty() {
                let what = format!(
                    "messages of type `{}` go to a queue in memory, which cannot take part in a transaction; make the queue `durable()`",
                    draft.message_type
                );
                return Err(PublishError::Refused(what).into());
            }
            // There is one object: the first queue gets it.
            let mut original = Some(original);
            for to in addressed.durable {
                let due = item.due;
                let (mut row, _) = super::into_row(ToQueue { due, ..to });
                lendings.push(lending(&mut row, original.take()));
                rows.push(row);
            }
        }
        let stored = match rows.is_empty() {
            true => None,
            false => Some(store.enqueue_in(transaction, rows).await?),
        };
        Ok(Enqueued {
            stored,
            engine,
            lendings,
        })
    }
}
