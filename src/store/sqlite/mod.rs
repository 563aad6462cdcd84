//! The store in an SQLite file: one process per file, one writer.
//!
//! A transaction of a handler, or of the application, that has begun to write makes every other writer wait, the
//! store's own settling included: transactional handlers run one at a time here, and should be short. Reads and
//! heartbeats wait for nobody. Inside such a transaction use `enqueue_in` and `settle_in`: the operations without a
//! transaction would wait for its end, until their time is up.
//!
//! The application's own transactions come from its own connections to the same file. How durable their commits are
//! is decided by the `synchronous` setting of *those* connections; and one that reads before it writes can be told
//! that its snapshot is too old ([`StoreError::Conflict`]), which beginning with `BEGIN IMMEDIATE` avoids.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use laneway_actors::port::{Announcement, MemberId};
use sqlx::{Connection as _, Sqlite, SqliteConnection, Transaction};

use super::names::Names;
use super::plan::Plan;
use super::wake::{LocalWakes, Wake};
use super::{
    Answer, Counts, DeadMessage, Durability, Enqueued, HoldEnding, Known, Lease, NewMessage,
    Ownership, QueueIdentity, Scope, Sequence, Settled, Settlement, Shard, Start, Store,
    StoreError, Stored, TransactionalStore, WaitingQueue, Wakeup, Window,
};

mod claim;
mod config;
mod connect;
mod enqueue;
mod fault;
mod holds;
mod lease;
mod members;
mod schema;
mod settle;
mod upkeep;

pub use config::SqliteConfig;

use connect::{FileLock, Guarded, Pools};
use fault::Fault;
use lease::Clock;
use members::Members;

/// The moment of the statement, in milliseconds since 1970.
const NOW: &str = "CAST(unixepoch('subsec') * 1000 AS INTEGER)";

/// When a message is due that is held: the greatest of all times. A statement must say it in the very words of the
/// index of held messages, or that is not used.
const NEVER: &str = "9223372036854775807";

/// A statement with names, the moment and never.
fn text(names: &Names, statement: &str) -> String {
    names.fill(&statement.replace("{now}", NOW).replace("{never}", NEVER))
}

/// Numbers as the JSON list that `json_each` reads: any number of them in one parameter.
fn list(numbers: &[i64]) -> String {
    let numbers: Vec<String> = numbers.iter().map(i64::to_string).collect();
    format!("[{}]", numbers.join(","))
}

/// Bounded by a century, so that sums with it stay in range.
fn millis(duration: Duration) -> i64 {
    duration.as_millis().min(3_155_760_000_000) as i64
}

/// A [`Store`] in an SQLite file. See the [module](self).
pub struct SqliteStore {
    names: Names,
    timeout: Duration,
    durability: Durability,
    pools: Pools,
    clock: Clock,
    members: Members,
    known: Known,
    wakes: Arc<LocalWakes>,
    /// Given back when the store closes.
    lock: std::sync::Mutex<Option<FileLock>>,
}

impl SqliteStore {
    /// Opens the file, keeps other processes away from it, checks it, and applies or checks the migrations. All
    /// leases of an earlier process end. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if the file is in use or cannot be opened, for a setting, or for a missing
    /// migration.
    pub async fn start(config: SqliteConfig) -> Result<Self, StoreError> {
        let names = config.names()?;
        Self::open(&config, names)
            .await
            .map_err(|Fault(error)| error)
    }

    async fn open(config: &SqliteConfig, names: Names) -> Result<Self, Fault> {
        let lock = FileLock::take(&config.file).await?;
        let pools = Pools::connect(config).await?;
        let mut connection = Guarded::from(&pools.writer).await?;
        connect::check(&mut connection, config.durability).await?;
        schema::provision(&mut connection, &names, config.provision).await?;
        lease::end_all(&mut connection, &names).await?;
        connection.done();
        Ok(Self {
            names,
            timeout: config.timeout,
            durability: config.durability,
            pools,
            clock: Clock::default(),
            members: Members::default(),
            known: Known::default(),
            wakes: Arc::default(),
            lock: std::sync::Mutex::new(Some(lock)),
        })
    }

    fn wakes(&self) -> Arc<dyn Wake> {
        self.wakes.clone()
    }

    /// Runs an operation within its time.
    fn bounded<'a, T: 'a>(
        &'a self,
        what: &'static str,
        operation: impl Future<Output = Result<T, Fault>> + Send + 'a,
    ) -> Answer<'a, T> {
        Box::pin(async move {
            match tokio::time::timeout(self.timeout, operation).await {
                Ok(result) => result.map_err(|Fault(error)| error),
                Err(_) => Err(StoreError::timed_out(what, self.timeout)),
            }
        })
    }

    async fn write(
        &self,
        connection: &mut SqliteConnection,
        plan: Plan,
    ) -> Result<Enqueued, Fault> {
        let plan = enqueue::enqueue(connection, &self.names, plan).await?;
        let queues = plan.queues.clone();
        Ok(Enqueued::new(plan.placed(), queues, self.wakes()))
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl Store for SqliteStore {
    fn name(&self) -> &str {
        "SQLite"
    }

    fn declare<'a>(&'a self, queues: &'a [QueueIdentity]) -> Answer<'a, ()> {
        self.bounded("declare", async move {
            let mut connection = Guarded::from(&self.pools.writer).await?;
            for queue in queues {
                let known = upkeep::declare(&mut connection, &self.names, queue).await?;
                self.known.insert(known);
            }
            connection.done();
            Ok(())
        })
    }

    fn declared<'a>(&'a self, queue: &'a str) -> Answer<'a, Option<QueueIdentity>> {
        self.bounded("declared", async move {
            let mut connection = Guarded::from(&self.pools.readers).await?;
            let identity = upkeep::declared(&mut connection, &self.names, queue).await?;
            connection.done();
            Ok(identity)
        })
    }

    fn waiting_queues(&self) -> Answer<'_, Vec<WaitingQueue>> {
        self.bounded("waiting_queues", async move {
            let mut connection = Guarded::from(&self.pools.readers).await?;
            let waiting = upkeep::waiting_queues(&mut connection, &self.names).await?;
            connection.done();
            Ok(waiting)
        })
    }

    fn enqueue(&self, batch: Vec<NewMessage>) -> Answer<'_, Enqueued> {
        self.bounded("enqueue", async move {
            let plan = self.known.plan(&batch)?;
            let mut connection = Guarded::from(&self.pools.writer).await?;
            let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
            let enqueued = self.write(&mut transaction, plan).await?;
            transaction.commit().await?;
            connection.done();
            Ok(enqueued)
        })
    }

    fn promote_due(&self, limit: u32) -> Answer<'_, u32> {
        self.bounded("promote_due", async move {
            let mut connection = Guarded::from(&self.pools.writer).await?;
            let queues = upkeep::promote_due(&mut connection, &self.names, limit).await?;
            connection.done();
            for queue in queues.iter().collect::<std::collections::BTreeSet<_>>() {
                if let Some(name) = self.known.name(*queue) {
                    self.wakes.wake(&name);
                }
            }
            Ok(queues.len() as u32)
        })
    }

    fn take<'a>(
        &'a self,
        queue: &'a str,
        shard: Shard,
        owner: MemberId,
        ttl: Duration,
    ) -> Answer<'a, Option<Lease>> {
        self.bounded("take", async move {
            let number = self.known.number(queue)?;
            let mut connection = Guarded::from(&self.pools.writer).await?;
            let taken = lease::take(
                &mut connection,
                &self.names,
                &self.clock,
                (number, shard),
                owner,
                ttl,
            )
            .await?;
            connection.done();
            Ok(taken.map(|epoch| Lease {
                queue: queue.into(),
                scope: Scope::Shard(shard),
                owner,
                epoch,
            }))
        })
    }

    fn join<'a>(&'a self, queue: &'a str, owner: MemberId, ttl: Duration) -> Answer<'a, Lease> {
        self.bounded("join", async move {
            let number = self.known.unordered(queue)?;
            let mut connection = Guarded::from(&self.pools.writer).await?;
            let epoch = lease::join(
                &mut connection,
                &self.names,
                &self.clock,
                number,
                owner,
                ttl,
            )
            .await?;
            connection.done();
            Ok(Lease {
                queue: queue.into(),
                scope: Scope::Shared,
                owner,
                epoch,
            })
        })
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], ttl: Duration) -> Answer<'a, Vec<Lease>> {
        self.bounded("renew", async move {
            let mut numbered = Vec::with_capacity(leases.len());
            for lease in leases {
                numbered.push((self.known.number(&lease.queue)?, lease.clone()));
            }
            Ok(self.clock.renew(&numbered, ttl))
        })
    }

    fn release<'a>(&'a self, lease: &'a Lease) -> Answer<'a, ()> {
        self.bounded("release", async move {
            let number = self.known.number(&lease.queue)?;
            let mut connection = Guarded::from(&self.pools.writer).await?;
            lease::release(&mut connection, &self.names, &self.clock, number, lease).await?;
            connection.done();
            // Others may take it at once.
            self.wakes.wake(&lease.queue);
            Ok(())
        })
    }

    fn owners<'a>(&'a self, queue: &'a str) -> Answer<'a, Vec<Ownership>> {
        self.bounded("owners", async move {
            let (number, shards) = self.known.shards(queue)?;
            self.pools.check_open()?;
            Ok(self.clock.owners(number, shards))
        })
    }

    fn announce<'a>(
        &'a self,
        queue: &'a str,
        announcement: &'a Announcement,
        ttl: Duration,
    ) -> Answer<'a, ()> {
        self.bounded("announce", async move {
            let number = self.known.number(queue)?;
            self.pools.check_open()?;
            self.members.announce(number, announcement, ttl);
            Ok(())
        })
    }

    fn announcements<'a>(&'a self, queue: &'a str) -> Answer<'a, Vec<Announcement>> {
        self.bounded("announcements", async move {
            let number = self.known.number(queue)?;
            self.pools.check_open()?;
            Ok(self.members.announcements(number))
        })
    }

    fn read<'a>(&'a self, lease: &'a Lease, window: &'a Window) -> Answer<'a, Vec<Stored>> {
        self.bounded("read", async move {
            let number = self.known.number(&lease.queue)?;
            let mut connection = Guarded::from(&self.pools.readers).await?;
            let rows = claim::read(&mut connection, &self.names, number, lease, window).await?;
            connection.done();
            Ok(rows)
        })
    }

    fn claim<'a>(&'a self, lease: &'a Lease, limit: u32) -> Answer<'a, Vec<Stored>> {
        self.bounded("claim", async move {
            let number = self.known.number(&lease.queue)?;
            let mut connection = Guarded::from(&self.pools.writer).await?;
            let rows = claim::claim(
                &mut connection,
                &self.names,
                &self.clock,
                number,
                lease,
                limit,
            )
            .await?;
            connection.done();
            Ok(rows)
        })
    }

    fn give_back<'a>(&'a self, lease: &'a Lease, sequences: &'a [Sequence]) -> Answer<'a, ()> {
        self.bounded("give_back", async move {
            let number = self.known.number(&lease.queue)?;
            let mut connection = Guarded::from(&self.pools.writer).await?;
            let sequences = &Sequence::numbers(sequences);
            claim::give_back(&mut connection, &self.names, number, lease, sequences).await?;
            connection.done();
            self.wakes.wake(&lease.queue);
            Ok(())
        })
    }

    fn start<'a>(&'a self, lease: &'a Lease, starts: &'a [Start]) -> Answer<'a, ()> {
        self.bounded("start", async move {
            let number = self.known.number(&lease.queue)?;
            let mut connection = Guarded::from(&self.pools.writer).await?;
            // Around the transaction: SQLite changes it only outside of one. If anything goes wrong in between,
            // the connection is closed, and the next one is opened with what was configured.
            let not_the_disk = Durability::AcceptLossAtPowerFailure;
            connect::commits_survive(&mut connection, not_the_disk).await?;
            let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
            settle::start(&mut transaction, &self.names, number, lease, starts).await?;
            transaction.commit().await?;
            connect::commits_survive(&mut connection, self.durability).await?;
            connection.done();
            Ok(())
        })
    }

    fn uncount<'a>(&'a self, lease: &'a Lease, sequences: &'a [Sequence]) -> Answer<'a, ()> {
        self.bounded("uncount", async move {
            let number = self.known.number(&lease.queue)?;
            let mut connection = Guarded::from(&self.pools.writer).await?;
            // Around the transaction, as at a start.
            let not_the_disk = Durability::AcceptLossAtPowerFailure;
            connect::commits_survive(&mut connection, not_the_disk).await?;
            let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
            let sequences = &Sequence::numbers(sequences);
            settle::uncount(&mut transaction, &self.names, number, lease, sequences).await?;
            transaction.commit().await?;
            connect::commits_survive(&mut connection, self.durability).await?;
            connection.done();
            Ok(())
        })
    }

    fn settle<'a>(
        &'a self,
        lease: &'a Lease,
        settlements: &'a [Settlement],
    ) -> Answer<'a, Settled> {
        self.bounded("settle", async move {
            let number = self.known.number(&lease.queue)?;
            let mut connection = Guarded::from(&self.pools.writer).await?;
            let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
            let settled =
                settle::settle(&mut transaction, &self.names, number, lease, settlements).await?;
            transaction.commit().await?;
            connection.done();
            Ok(settled)
        })
    }

    fn unsettled<'a>(
        &'a self,
        lease: &'a Lease,
        sequences: &'a [Sequence],
    ) -> Answer<'a, Vec<Sequence>> {
        self.bounded("unsettled", async move {
            let number = self.known.number(&lease.queue)?;
            let mut connection = Guarded::from(&self.pools.writer).await?;
            let sequences = &Sequence::numbers(sequences);
            let left =
                settle::unsettled(&mut connection, &self.names, number, lease, sequences).await?;
            connection.done();
            Ok(left)
        })
    }

    fn held<'a>(&'a self, queue: &'a str, after: Sequence, limit: u32) -> Answer<'a, Vec<Stored>> {
        self.bounded("held", async move {
            let number = self.known.number(queue)?;
            let mut connection = Guarded::from(&self.pools.readers).await?;
            let rows = holds::held(&mut connection, &self.names, number, after, limit).await?;
            connection.done();
            Ok(rows)
        })
    }

    fn end_hold<'a>(
        &'a self,
        queue: &'a str,
        sequence: Sequence,
        ending: HoldEnding,
    ) -> Answer<'a, bool> {
        self.bounded("end_hold", async move {
            let number = self.known.number(queue)?;
            let mut connection = Guarded::from(&self.pools.writer).await?;
            let ended = holds::end(&mut connection, &self.names, number, sequence, ending).await?;
            connection.done();
            if ended {
                self.wakes.wake(queue);
            }
            Ok(ended)
        })
    }

    fn prune(&self, window: Duration, limit: u32) -> Answer<'_, u32> {
        self.bounded("prune", async move {
            let mut connection = Guarded::from(&self.pools.writer).await?;
            let pruned = upkeep::prune(&mut connection, &self.names, window, limit).await?;
            connection.done();
            Ok(pruned)
        })
    }

    fn count<'a>(&'a self, queue: &'a str) -> Answer<'a, Counts> {
        self.bounded("count", async move {
            let number = self.known.number(queue)?;
            let mut connection = Guarded::from(&self.pools.readers).await?;
            let counts = upkeep::count(&mut connection, &self.names, number).await?;
            connection.done();
            Ok(counts)
        })
    }

    fn dead_letters<'a>(
        &'a self,
        queue: &'a str,
        after: i64,
        limit: u32,
    ) -> Answer<'a, Vec<DeadMessage>> {
        self.bounded("dead_letters", async move {
            let number = self.known.number(queue)?;
            let mut connection = Guarded::from(&self.pools.readers).await?;
            let letters =
                upkeep::dead_letters(&mut connection, &self.names, number, after, limit).await?;
            connection.done();
            Ok(letters)
        })
    }

    fn watch(&self, queue: &str) -> Wakeup {
        self.wakes.watch(queue)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.pools.close().await;
            // Last: as long as a connection is open, nobody else may have the file.
            let lock = {
                let lock = self.lock.lock();
                lock.unwrap_or_else(std::sync::PoisonError::into_inner)
                    .take()
            };
            if let Some(lock) = lock {
                lock.release().await;
            }
        })
    }
}

impl TransactionalStore for SqliteStore {
    type Database = Sqlite;

    fn begin(&self) -> Answer<'_, Transaction<'static, Sqlite>> {
        self.bounded("begin", async move {
            Ok(self.pools.writer.begin_with("BEGIN IMMEDIATE").await?)
        })
    }

    fn enqueue_in<'a>(
        &'a self,
        transaction: &'a mut Transaction<'_, Sqlite>,
        batch: Vec<NewMessage>,
    ) -> Answer<'a, Enqueued> {
        let connection: &'a mut SqliteConnection = &mut *transaction;
        self.bounded("enqueue_in", async move {
            let plan = self.known.plan(&batch)?;
            self.write(connection, plan).await
        })
    }

    fn settle_in<'a>(
        &'a self,
        transaction: &'a mut Transaction<'_, Sqlite>,
        lease: &'a Lease,
        settlements: &'a [Settlement],
    ) -> Answer<'a, ()> {
        let connection: &'a mut SqliteConnection = &mut *transaction;
        self.bounded("settle_in", async move {
            let number = self.known.number(&lease.queue)?;
            let settled =
                settle::settle(connection, &self.names, number, lease, settlements).await?;
            Ok(settled.complete(&lease.queue)?)
        })
    }
}
