//! The store: durable queues in the application's own database.
//!
//! ```text
//! application's transaction ──► enqueue_in ──┐
//!                                            ▼
//!                           ┌──────── messages ────────┐    retry: due, keeps its place and its key
//!     scheduled ─ promote ─►│ queue · shard · sequence │◄──────────────┐
//!                           └────────────┬─────────────┘               │
//!                 take ► lease ► read / claim ► start ► (a handler) ► settle ─┬─► ended (ids, pruned)
//!                        owner, epoch                                        └─► dead letters
//! ```
//! Owns the tables, their migrations, and the statements on them: one contract ([`Store`], and
//! [`TransactionalStore`] for what happens inside a transaction of the application), one conformance suite
//! (`testing::conformance::store`), one folder per database with the same file names.
//!
//! # Promises
//! - **Stored with the transaction**: what is enqueued in a transaction exists when, and only if, that commits.
//! - **Commit order**: in an ordered queue, sequences of one key rise in the order of the commits, and
//!   a reader that sees a message of a key sees, or has seen, every earlier one of it. No reader remembers a
//!   last sequence: a message of *another* key may appear below it later.
//! - **One owner**: a settling by anybody but the current holder of the lease has no effect and says so.
//! - **Held keys delay nobody**: a window is filled with what may run, whatever waits before it.
//! - **Copies are recognised** by id within their queue, while the first waits and for a window after its end.
//! - **Every operation is bounded in time**, and its error says whether to try again.
//! - Nothing in an error or a log is a credential, a key, an id or a body.
//!
//! # What it does not do
//! It decides nothing: when to look, what to hold, how often to try again and who should own a shard is the
//! engine's business. It starts no handler. It does not make sequences free of gaps. It does not protect from
//! an application that writes into its tables, nor from one that turns durability off in its own transaction.
//!
//! # What a message costs
//! Per batch, not per message, except for the row versions. PostgreSQL:
//!
//! | step | statements per batch | row versions per message |
//! |---|---|---|
//! | enqueue, ordered | 3: locks, insert, look for ended ids | 1, in two indexes |
//! | enqueue, unordered | 2 | 1, in two indexes |
//! | read, ordered | 1 | 0: the lease is the claim |
//! | claim, unordered | 1 or 2 | 1 without index entries (page permitting) |
//! | start | 1, and a commit that does not wait for the disk | 1 without index entries (page permitting) |
//! | uncount, at an orderly end | the same | the same |
//! | settle as handled | 2 and a commit | 1 removed, 1 id remembered in one index |
//! | prune | 1 | 1 removed |
//! | hold, and end the hold | 2 and a commit, each | 1 in every index, each |
//! | announce, look at the announcements | 1 each, every half second for each queue and node | none: not logged |
//!
//! A start mark is what makes a message that kills its process recognisable. It must outlive the process and not the
//! machine, so its commit waits for no disk: `synchronous_commit = off` in its transaction, `synchronous = NORMAL` in
//! SQLite. A loss of power, or a crash of the database's server, can take the last marks back, and a message then
//! gets an attempt more. Every other commit waits, and takes the marks before it along.
//!
//! SQLite writes the same rows; there a statement per message is as cheap as one per batch, since nothing goes over
//! a network, and what counts is the commit, which waits for the disk except at a start.
//!
//! # Limits
//! - In PostgreSQL, [`enqueue_in`](TransactionalStore::enqueue_in) needs READ COMMITTED, and refuses other
//!   isolation levels: in an older snapshot it could not see that a copy was handled in the meantime.
//! - Each call takes its locks in one order, so transactions that enqueue **in one call** each cannot dead-lock. One
//!   that enqueues in several can, with any other: one of the two gets [`StoreError::Conflict`] and is to be tried
//!   again as a whole.
//! - A transaction that stays open after its enqueuing makes other writers of its keys wait, and what is promoted.
//! - A read passes over every row of the keys that it leaves out and that lie before what it returns: in both
//!   databases about 0.1 seconds for 100,000 rows, for each read, however many messages that returns. A key with a
//!   backlog of a million makes a shard's reads take a second; small windows then make the other keys slow, large
//!   ones do not.
//! - SQLite has one writer: a transaction that has begun to write makes all others wait.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use laneway_actors::port::{Announcement, MemberId};

mod columns;
mod error;
mod lease;
#[cfg(feature = "postgres")]
mod locks;
mod membership;
mod message;
mod names;
mod plan;
#[cfg(feature = "postgres")]
pub mod postgres;
mod settle;
#[cfg(feature = "sqlite")]
pub mod sqlite;
mod wake;

pub use error::StoreError;
pub use lease::{Epoch, Lease, Ownership, Scope, Window};
pub use membership::StoreMembership;
pub use message::{
    Counts, Enqueued, NewMessage, Placed, QueueIdentity, QueueOrder, Sequence, Shard, Start,
    Stored, WaitingQueue,
};
pub use settle::{DeadMessage, DeadReason, Ending, FailedAttempt, HoldEnding, Settled, Settlement};
pub use wake::Wakeup;

/// The answer of a store.
pub type Answer<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// How a store treats its tables when it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Provision {
    /// Creates and migrates them. Any number of nodes may start at once.
    #[default]
    Apply,
    /// Only checks that they are there and up to date; what is missing is refused by name.
    Check,
}

/// What must survive when a commit has returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// A loss of power: every commit waits for the disk. A database that is set to less is refused.
    #[default]
    Full,
    /// The end of this process, not a loss of power: the last commits before one may be gone, and messages
    /// with them, or may be handled again.
    AcceptLossAtPowerFailure,
}

/// Durable queues in a database.
///
/// Every operation that only repeats itself is safe to repeat after [`StoreError::Unavailable`], except
/// [`enqueue`](Self::enqueue) of messages without ids, which may be stored twice. **Cancelling** an operation
/// leaves it open whether it took place, as `Unavailable` does.
pub trait Store: Send + Sync + 'static {
    /// What it is, for logs: without address or credentials.
    fn name(&self) -> &str;

    /// Makes queues known, here and in the database. Repeating it is harmless.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if a queue exists with another order or number of shards.
    fn declare<'a>(&'a self, queues: &'a [QueueIdentity]) -> Answer<'a, ()>;

    /// What a queue was declared as, by whichever process; `None` if it never was. Makes nothing known here.
    fn declared<'a>(&'a self, queue: &'a str) -> Answer<'a, Option<QueueIdentity>>;

    /// The queues of the database that have unsettled or scheduled messages, by name, whether or not this process has
    /// declared them. Costs a walk over all messages.
    fn waiting_queues(&self) -> Answer<'_, Vec<WaitingQueue>>;

    /// Stores messages in a transaction of the store's own, all or none.
    fn enqueue(&self, batch: Vec<NewMessage>) -> Answer<'_, Enqueued>;

    /// Gives up to `limit` messages whose time has come their place, the one due first first; returns how
    /// many. Run by any number of nodes at once; one works, the others return 0.
    fn promote_due(&self, limit: u32) -> Answer<'_, u32>;

    /// Takes a shard of an ordered queue for `ttl`. `None` while another owner's lease is fresh. An owner
    /// that takes what it has gets a new epoch, and its older lease is lost.
    fn take<'a>(
        &'a self,
        queue: &'a str,
        shard: Shard,
        owner: MemberId,
        ttl: Duration,
    ) -> Answer<'a, Option<Lease>>;

    /// Joins those who share an unordered queue, for `ttl`.
    fn join<'a>(&'a self, queue: &'a str, owner: MemberId, ttl: Duration) -> Answer<'a, Lease>;

    /// Prolongs leases to `ttl` from now; returns those that are lost. One that has expired and that nobody
    /// has taken is not lost.
    fn renew<'a>(&'a self, leases: &'a [Lease], ttl: Duration) -> Answer<'a, Vec<Lease>>;

    /// Gives a lease back: the shard can be taken at once, what was claimed can be claimed. Releasing a
    /// lost lease does nothing.
    fn release<'a>(&'a self, lease: &'a Lease) -> Answer<'a, ()>;

    /// Who has which shard of an ordered queue, by shard; nothing for an unordered one. Changes nothing.
    fn owners<'a>(&'a self, queue: &'a str) -> Answer<'a, Vec<Ownership>>;

    /// Puts an announcement in the place of the member's last one in the queue's group, unless that is newer. It
    /// lasts for `ttl`, by the database's clock. Waits for no disk: a crash of the database forgets it.
    fn announce<'a>(
        &'a self,
        queue: &'a str,
        announcement: &'a Announcement,
        ttl: Duration,
    ) -> Answer<'a, ()>;

    /// The last announcement of each member of the queue's group that lasts, in no order.
    fn announcements<'a>(&'a self, queue: &'a str) -> Answer<'a, Vec<Announcement>>;

    /// The messages of a leased shard that may run and that the window does not leave out, in order. Left out are
    /// also keys whose head waits for its retry or is held. Changes nothing.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] if the shard has another owner; [`StoreError::Refused`] for a shared lease.
    fn read<'a>(&'a self, lease: &'a Lease, window: &'a Window) -> Answer<'a, Vec<Stored>>;

    /// Claims up to `limit` messages of an unordered queue, never one that another node has claimed, waiting
    /// for nobody. A claim lasts until it is settled or given back, or its node's lease has expired.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] as above; [`StoreError::Refused`] for the lease of a shard. After
    /// [`StoreError::Unavailable`] messages may be claimed that this node does not know of: release the lease
    /// and join again, or they wait until it expires.
    fn claim<'a>(&'a self, lease: &'a Lease, limit: u32) -> Answer<'a, Vec<Stored>>;

    /// Gives claims of an unordered queue back, uncounted.
    fn give_back<'a>(&'a self, lease: &'a Lease, sequences: &'a [Sequence]) -> Answer<'a, ()>;

    /// Counts these attempts, before they start: a message has then had as many as the number says, or more. So an
    /// attempt counts once, however often it is told.
    ///
    /// The count survives the end of this process. It does not wait for the disk: a loss of power right after may
    /// take it back.
    fn start<'a>(&'a self, lease: &'a Lease, starts: &'a [Start]) -> Answer<'a, ()>;

    /// Takes the count of first attempts back that were counted and never began: a message that has had one attempt has
    /// had none. One that has had more is left as it is, and so is one that is not there any more.
    ///
    /// Only for whoever starts nothing under this lease from here on, just before [`release`](Self::release). A call
    /// without an answer may take place later, and takes back whatever first attempt was counted meanwhile.
    ///
    /// Does not wait for the disk, as [`start`](Self::start) does not: a loss of power right after may leave them counted.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] as above.
    fn uncount<'a>(&'a self, lease: &'a Lease, sequences: &'a [Sequence]) -> Answer<'a, ()>;

    /// Ends messages, all or none of the batch. Messages that are not there any more are counted and left.
    fn settle<'a>(&'a self, lease: &'a Lease, settlements: &'a [Settlement])
    -> Answer<'a, Settled>;

    /// Which of these messages are not settled: how a commit whose outcome is unknown is cleared up.
    fn unsettled<'a>(
        &'a self,
        lease: &'a Lease,
        sequences: &'a [Sequence],
    ) -> Answer<'a, Vec<Sequence>>;

    /// Up to `limit` messages that [`Ending::Hold`] keeps, with sequences above `after`, oldest first.
    fn held<'a>(&'a self, queue: &'a str, after: Sequence, limit: u32) -> Answer<'a, Vec<Stored>>;

    /// Ends the hold of a message, and wakes whoever handles the queue. Needs no lease, since nobody runs a message
    /// that is held. False if it is not held, or not any more: of several calls at once, one has an effect. After
    /// [`StoreError::Unavailable`], false may mean that the earlier call had it.
    fn end_hold<'a>(
        &'a self,
        queue: &'a str,
        sequence: Sequence,
        ending: HoldEnding,
    ) -> Answer<'a, bool>;

    /// Forgets up to `limit` ids of messages that ended longer than `window` ago; returns how many.
    fn prune(&self, window: Duration, limit: u32) -> Answer<'_, u32>;

    /// Counts a queue. Costs a walk over its index.
    fn count<'a>(&'a self, queue: &'a str) -> Answer<'a, Counts>;

    /// Up to `limit` dead letters of a queue with numbers above `after`, oldest first.
    fn dead_letters<'a>(
        &'a self,
        queue: &'a str,
        after: i64,
        limit: u32,
    ) -> Answer<'a, Vec<DeadMessage>>;

    /// Hints that a queue has something new.
    fn watch(&self, queue: &str) -> Wakeup;

    /// Closes every connection. Operations fail from then on.
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// What a store does inside a transaction on its database.
///
/// After an error the transaction is to be rolled back: the database may refuse everything else in it.
pub trait TransactionalStore: Store {
    /// The database.
    type Database: sqlx::Database;

    /// Begins a transaction on a connection that is kept for handlers and cannot use up those of leases.
    fn begin(&self) -> Answer<'_, sqlx::Transaction<'static, Self::Database>>;

    /// Stores messages in a transaction of the caller's, on the store's own database: they exist when it commits.
    /// Locks of keys are held until then, so it should be the last statement before the commit.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] for a dead-lock with another transaction.
    fn enqueue_in<'a>(
        &'a self,
        transaction: &'a mut sqlx::Transaction<'_, Self::Database>,
        batch: Vec<NewMessage>,
    ) -> Answer<'a, Enqueued>;

    /// Ends messages in a transaction of the caller's: its writes and the endings commit together. It should
    /// be the last statement but an enqueuing: the lease cannot be taken by anybody until the commit.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`]; [`StoreError::AlreadySettled`] if one of them is not there.
    fn settle_in<'a>(
        &'a self,
        transaction: &'a mut sqlx::Transaction<'_, Self::Database>,
        lease: &'a Lease,
        settlements: &'a [Settlement],
    ) -> Answer<'a, ()>;
}

/// A group of settlements by what a statement can do for all of them at once.
#[derive(Debug, Default)]
struct Endings<'a> {
    /// Removed, their ids remembered: handled and discarded.
    removed: Vec<i64>,
    /// Kept: when due (`None` is never), and what to append to the past.
    kept: Vec<(i64, Option<Duration>, String)>,
    dead: Vec<(i64, DeadReason, &'a str, String)>,
}

impl<'a> Endings<'a> {
    fn of(settlements: &'a [Settlement]) -> Self {
        let mut endings = Self::default();
        for Settlement { sequence, ending } in settlements {
            let sequence = sequence.0;
            match ending {
                Ending::Handled | Ending::Discarded => endings.removed.push(sequence),
                Ending::Retry { after, failed } => {
                    let past = columns::write_past(failed);
                    endings.kept.push((sequence, Some(*after), past));
                }
                Ending::Hold { failed } => {
                    endings
                        .kept
                        .push((sequence, None, columns::write_past(failed)));
                }
                Ending::Dead {
                    reason,
                    detail,
                    failed,
                } => {
                    let past = columns::write_past(failed);
                    endings.dead.push((sequence, *reason, detail, past));
                }
            }
        }
        endings
    }
}

/// What a store knows of its queues, from declarations of this process.
#[derive(Debug, Default)]
struct Known(std::sync::RwLock<std::collections::HashMap<Arc<str>, plan::KnownQueue>>);

impl Known {
    /// What enqueuing this batch means.
    fn plan(&self, batch: &[NewMessage]) -> Result<plan::Plan, StoreError> {
        let known = self.0.read();
        plan::Plan::of(
            batch,
            &known.unwrap_or_else(std::sync::PoisonError::into_inner),
        )
    }

    fn insert(&self, queue: plan::KnownQueue) {
        let known = self.0.write();
        known
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .insert(queue.identity.name.clone(), queue);
    }

    /// The number of a declared queue.
    fn number(&self, queue: &str) -> Result<i32, StoreError> {
        let known = self.0.read();
        let known = known.unwrap_or_else(std::sync::PoisonError::into_inner);
        let queue = known.get(queue).map(|known| known.number).ok_or(queue);
        queue.map_err(|queue| StoreError::refused(format!("the queue `{queue}` is not declared")))
    }

    /// Number and shards of a declared queue that is ordered; no shards of one that is not.
    #[cfg(feature = "sqlite")]
    fn shards(&self, queue: &str) -> Result<(i32, u32), StoreError> {
        let number = self.number(queue)?;
        let known = self.0.read();
        let known = known.unwrap_or_else(std::sync::PoisonError::into_inner);
        let shards = match known.get(queue).map(|known| known.identity.order) {
            Some(QueueOrder::Ordered(count)) => count.get(),
            _ => 0,
        };
        Ok((number, shards))
    }

    /// The number of a declared queue that has no order.
    fn unordered(&self, queue: &str) -> Result<i32, StoreError> {
        let known = self.0.read();
        let known = known.unwrap_or_else(std::sync::PoisonError::into_inner);
        match known.get(queue).map(|known| known.identity.order) {
            Some(QueueOrder::Ordered(_)) => Err(StoreError::refused(format!(
                "the queue `{queue}` has order: its shards are taken, nobody joins it"
            ))),
            _ => {
                drop(known);
                self.number(queue)
            }
        }
    }

    /// The name of a declared queue.
    fn name(&self, number: i32) -> Option<Arc<str>> {
        let known = self.0.read();
        let known = known.unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut queues = known.values();
        let queue = queues.find(|queue| queue.number == number)?;
        Some(queue.identity.name.clone())
    }
}
