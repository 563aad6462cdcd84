//! What goes into a store and what comes out: new messages, what became of each, stored messages.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use laneway_actors::{Envelope, MessageId, OrderingKey, ShardCount};

use super::StoreError;
use super::wake::Wake;

/// Position of a message in its store: rises with the order of commits within a key, and says nothing
/// across keys. Never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sequence(pub i64);

impl Sequence {
    pub(crate) fn numbers(sequences: &[Self]) -> Vec<i64> {
        sequences.iter().map(|sequence| sequence.0).collect()
    }
}

/// An attempt that is to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start {
    /// Of which message.
    pub sequence: Sequence,
    /// Its number, from 1.
    pub attempt: u32,
}

/// Which shard of an ordered queue, counted from 0. An unordered queue has only shard 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shard(pub u32);

/// What a queue is, from its first declaration on. A change is refused: it would move keys to shards where
/// their earlier messages are not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueIdentity {
    /// Its name.
    pub name: Arc<str>,
    /// Whether it has order, and in how many shards.
    pub order: QueueOrder,
}

impl QueueIdentity {
    /// As it is stored.
    pub(crate) fn read(name: String, shards: i32, ordered: bool) -> Result<Self, StoreError> {
        let order = match ordered {
            false => QueueOrder::Unordered,
            true => {
                let count = u32::try_from(shards).ok().and_then(ShardCount::new);
                QueueOrder::Ordered(count.ok_or_else(|| {
                    StoreError::refused(format!(
                        "the queue `{name}` has {shards} shards in the database, which this program does not allow"
                    ))
                })?)
            }
        };
        let name = name.into();
        Ok(Self { name, order })
    }
}

/// Whether a queue has order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueOrder {
    /// None: messages are claimed singly, by any node.
    Unordered,
    /// Order per key: each of so many shards is leased to one owner.
    Ordered(ShardCount),
}

/// A message to be stored.
#[derive(Debug, Clone)]
pub struct NewMessage {
    /// The queue to handle it, declared before.
    pub queue: Arc<str>,
    /// What must stay in order. Ignored in an unordered queue, except that it is kept.
    pub key: Option<OrderingKey>,
    /// The message. One without an id gets a unique one, and with it no recognition of copies. A header of
    /// the kind [`HeaderValue::Other`](laneway_actors::HeaderValue::Other) keeps its name and kind only.
    pub envelope: Envelope,
    /// When it may be handled, in absolute time, judged by the database's clock. `None` is at once. A
    /// message with a time gets its place in the sequence when it becomes due, and holds nobody until then.
    pub due: Option<SystemTime>,
}

/// What became of a message that was enqueued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Placed {
    /// It waits, in this place.
    At(Sequence),
    /// It waits for its time, and has no place yet.
    Scheduled,
    /// Nothing was stored: the queue has or had a message with the same id and the same body.
    Duplicate,
    /// Stored as a dead letter: the queue has or had a message with the same id and **another** body.
    IdReused,
}

/// What became of a batch. Its rows exist when the transaction has committed, and then
/// [`committed`](Self::committed) says so.
#[must_use = "call `committed()` after the commit, or the messages wait for the next poll"]
pub struct Enqueued {
    placed: Vec<Placed>,
    queues: Vec<Arc<str>>,
    wake: Arc<dyn Wake>,
}

impl Enqueued {
    pub(crate) fn new(placed: Vec<Placed>, mut queues: Vec<Arc<str>>, wake: Arc<dyn Wake>) -> Self {
        queues.sort_unstable();
        queues.dedup();
        Self {
            placed,
            queues,
            wake,
        }
    }

    /// What became of each message, in the order of the batch.
    pub fn placed(&self) -> &[Placed] {
        &self.placed
    }

    /// The hint "look now" to whoever handles these queues, here and on other nodes. Call it after the commit;
    /// a hint that comes too early or never costs time and nothing else. Waits for nothing.
    pub fn committed(self) -> Vec<Placed> {
        for queue in &self.queues {
            self.wake.wake(queue);
        }
        self.placed
    }
}

impl fmt::Debug for Enqueued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Enqueued")
            .field("placed", &self.placed)
            .field("queues", &self.queues)
            .finish_non_exhaustive()
    }
}

/// A message as it is stored.
#[derive(Debug, Clone)]
pub struct Stored {
    /// Its place, and the name under which it is settled.
    pub sequence: Sequence,
    /// Attempts counted so far, in whatever process.
    pub attempts: u32,
    /// Its key.
    pub key: Option<OrderingKey>,
    /// The message. Always has an id.
    pub envelope: Envelope,
    /// Why its headers or its past could not be read, if so: then they are missing here. Such a message is
    /// for the dead letters, and hides no other one.
    pub broken: Option<String>,
}

impl Stored {
    /// The message's id.
    pub fn id(&self) -> Option<&MessageId> {
        self.envelope.id.as_ref()
    }
}

/// A queue of the database that has messages, whether or not this process knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingQueue {
    /// The queue, as it was declared.
    pub queue: QueueIdentity,
    /// Unsettled messages that have their place.
    pub backlog: u64,
    /// Messages that wait for their time.
    pub scheduled: u64,
}

/// How much of a queue is where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Unsettled messages that have their place: waiting, being handled, or holding their key for a retry.
    pub backlog: u64,
    /// Messages that wait for their time.
    pub scheduled: u64,
    /// Dead letters.
    pub dead: u64,
}
