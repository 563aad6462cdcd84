//! The store in PostgreSQL, version 12 or later.
//!
//! Beside four pools, one connection listens for hints: with the defaults a node uses up to ten
//! connections. None of them is the application's.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use laneway_actors::port::{Announcement, MemberId};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, PgConnection, PgPool, Postgres, Transaction};
use tokio::task::AbortHandle;
use xxhash_rust::xxh3::xxh3_64;

use super::locks;
use super::names::Names;
use super::plan::Plan;
use super::wake::Wake;
use super::{
    Answer, Counts, DeadMessage, Enqueued, HoldEnding, Known, Lease, NewMessage, Ownership,
    QueueIdentity, Scope, Sequence, Settled, Settlement, Shard, Start, Store, StoreError, Stored,
    TransactionalStore, WaitingQueue, Wakeup, Window,
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
mod wake;

pub use config::PostgresConfig;

use connect::{Guarded, Pools};
use fault::Fault;

/// A [`Store`] in PostgreSQL. See the [module](self).
pub struct PostgresStore {
    names: Names,
    /// First half of all its advisory locks, so that two stores of one database do not meet.
    lock_space: i32,
    timeout: Duration,
    pools: Pools,
    known: Arc<Known>,
    wakes: Arc<wake::Wakes>,
    listening: PgPool,
    tasks: Vec<AbortHandle>,
}

impl PostgresStore {
    /// Connects, checks the database, and applies or checks the migrations. Needs a tokio runtime, on which its
    /// connections live from then on.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] if the database cannot be reached; [`StoreError::Refused`] for a setting or
    /// a missing migration.
    pub async fn start(config: PostgresConfig) -> Result<Self, StoreError> {
        let names = config.names()?;
        let space = xxh3_64(names.fill("laneway {t}").as_bytes());
        let lock_space = (space >> 32) as u32 as i32;
        Self::connect(&config, names, lock_space)
            .await
            .map_err(|Fault(error)| error)
    }

    async fn connect(
        config: &PostgresConfig,
        names: Names,
        lock_space: i32,
    ) -> Result<Self, Fault> {
        let pools = Pools::connect(config).await?;
        let mut connection = Guarded::from(&pools.claims).await?;
        connect::check(&mut connection, config.durability).await?;
        schema::provision(&mut connection, &names, lock_space, config.provision).await?;
        connection.done();

        let known = Arc::new(Known::default());
        let wakes = wake::Wakes::new();
        let channel = format!("laneway_{lock_space:08x}");
        let listening = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(config.timeout)
            .connect_lazy_with(connect::options(config)?);
        let notifier = wake::notify(
            wakes.clone(),
            known.clone(),
            pools.claims.clone(),
            channel.clone(),
        );
        let listener = wake::listen(wakes.clone(), known.clone(), listening.clone(), channel);
        Ok(Self {
            names,
            lock_space,
            timeout: config.timeout,
            pools,
            known,
            wakes,
            listening,
            tasks: vec![
                tokio::spawn(notifier).abort_handle(),
                tokio::spawn(listener).abort_handle(),
            ],
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

    async fn write(&self, connection: &mut PgConnection, plan: Plan) -> Result<Enqueued, Fault> {
        let plan = enqueue::enqueue(connection, &self.names, plan).await?;
        Ok(self.enqueued(plan))
    }

    fn enqueued(&self, plan: Plan) -> Enqueued {
        let queues = plan.queues.clone();
        Enqueued::new(plan.placed(), queues, self.wakes())
    }
}

impl Drop for PostgresStore {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl Store for PostgresStore {
    fn name(&self) -> &str {
        "PostgreSQL"
    }

    fn declare<'a>(&'a self, queues: &'a [QueueIdentity]) -> Answer<'a, ()> {
        self.bounded("declare", async move {
            let mut connection = Guarded::from(&self.pools.claims).await?;
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
            let mut connection = Guarded::from(&self.pools.claims).await?;
            let identity = upkeep::declared(&mut connection, &self.names, queue).await?;
            connection.done();
            Ok(identity)
        })
    }

    fn waiting_queues(&self) -> Answer<'_, Vec<WaitingQueue>> {
        self.bounded("waiting_queues", async move {
            let mut connection = Guarded::from(&self.pools.claims).await?;
            let waiting = upkeep::waiting_queues(&mut connection, &self.names).await?;
            connection.done();
            Ok(waiting)
        })
    }

    fn enqueue(&self, batch: Vec<NewMessage>) -> Answer<'_, Enqueued> {
        let asked = Instant::now();
        self.bounded("enqueue", async move {
            let plan = self.known.plan(&batch)?;
            let mut connection = Guarded::from(&self.pools.work).await?;
            let (names, space) = (&self.names, self.lock_space);
            // The server must give up before this side does: if it were the other way round, a key that becomes free
            // in between would let it store what nobody waits for any more.
            let patience = self.timeout.saturating_sub(asked.elapsed()) * 3 / 4;
            let stored =
                enqueue::enqueue_new(&mut connection, names, space, patience, plan).await?;
            let enqueued = match stored {
                Ok(plan) => self.enqueued(plan),
                Err(plan) => {
                    let begin = enqueue::begin_locked(space, &plan);
                    let mut transaction = connection.begin_with(begin).await?;
                    let enqueued = self.write(&mut transaction, plan).await?;
                    transaction.commit().await?;
                    enqueued
                }
            };
            connection.done();
            Ok(enqueued)
        })
    }

    fn promote_due(&self, limit: u32) -> Answer<'_, u32> {
        self.bounded("promote_due", async move {
            let mut connection = Guarded::from(&self.pools.claims).await?;
            let queues =
                upkeep::promote_due(&mut connection, &self.names, self.lock_space, limit).await?;
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
            let mut connection = Guarded::from(&self.pools.leases).await?;
            let taken =
                lease::take(&mut connection, &self.names, number, shard, owner, ttl).await?;
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
            let mut connection = Guarded::from(&self.pools.leases).await?;
            let epoch = lease::join(&mut connection, &self.names, number, owner, ttl).await?;
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
            let mut connection = Guarded::from(&self.pools.heartbeats).await?;
            let lost = lease::renew(&mut connection, &self.names, &numbered, ttl).await?;
            connection.done();
            Ok(lost)
        })
    }

    fn release<'a>(&'a self, lease: &'a Lease) -> Answer<'a, ()> {
        self.bounded("release", async move {
            let number = self.known.number(&lease.queue)?;
            let mut connection = Guarded::from(&self.pools.leases).await?;
            lease::release(&mut connection, &self.names, number, lease).await?;
            connection.done();
            // Others may take it at once.
            self.wakes.wake(&lease.queue);
            Ok(())
        })
    }

    fn owners<'a>(&'a self, queue: &'a str) -> Answer<'a, Vec<Ownership>> {
        self.bounded("owners", async move {
            let number = self.known.number(queue)?;
            let mut connection = Guarded::from(&self.pools.claims).await?;
            let owners = members::owners(&mut connection, &self.names, number).await?;
            connection.done();
            Ok(owners)
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
            let mut connection = Guarded::from(&self.pools.heartbeats).await?;
            members::announce(&mut connection, &self.names, number, announcement, ttl).await?;
            connection.done();
            Ok(())
        })
    }

    fn announcements<'a>(&'a self, queue: &'a str) -> Answer<'a, Vec<Announcement>> {
        self.bounded("announcements", async move {
            let number = self.known.number(queue)?;
            let mut connection = Guarded::from(&self.pools.heartbeats).await?;
            let current = members::announcements(&mut connection, &self.names, number).await?;
            connection.done();
            Ok(current)
        })
    }

    fn read<'a>(&'a self, lease: &'a Lease, window: &'a Window) -> Answer<'a, Vec<Stored>> {
        self.bounded("read", async move {
            let number = self.known.number(&lease.queue)?;
            let mut connection = Guarded::from(&self.pools.claims).await?;
            let rows = claim::read(&mut connection, &self.names, number, lease, window).await?;
            connection.done();
            Ok(rows)
        })
    }

    fn claim<'a>(&'a self, lease: &'a Lease, limit: u32) -> Answer<'a, Vec<Stored>> {
        self.bounded("claim", async move {
            let number = self.known.number(&lease.queue)?;
            let mut connection = Guarded::from(&self.pools.claims).await?;
            let rows = claim::claim(&mut connection, &self.names, number, lease, limit).await?;
            connection.done();
            Ok(rows)
        })
    }

    fn give_back<'a>(&'a self, lease: &'a Lease, sequences: &'a [Sequence]) -> Answer<'a, ()> {
        self.bounded("give_back", async move {
            let number = self.known.number(&lease.queue)?;
            let mut connection = Guarded::from(&self.pools.claims).await?;
            let sequences = Sequence::numbers(sequences);
            claim::give_back(&mut connection, &self.names, number, lease, sequences).await?;
            connection.done();
            self.wakes.wake(&lease.queue);
            Ok(())
        })
    }

    fn start<'a>(&'a self, lease: &'a Lease, starts: &'a [Start]) -> Answer<'a, ()> {
        self.bounded("start", async move {
            let number = self.known.number(&lease.queue)?;
            let mut connection = Guarded::from(&self.pools.claims).await?;
            settle::start(&mut connection, &self.names, number, lease, starts).await?;
            connection.done();
            Ok(())
        })
    }

    fn uncount<'a>(&'a self, lease: &'a Lease, sequences: &'a [Sequence]) -> Answer<'a, ()> {
        self.bounded("uncount", async move {
            let number = self.known.number(&lease.queue)?;
            let mut connection = Guarded::from(&self.pools.claims).await?;
            let sequences = Sequence::numbers(sequences);
            settle::uncount(&mut connection, &self.names, number, lease, sequences).await?;
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
            let mut connection = Guarded::from(&self.pools.claims).await?;
            let settled =
                settle::settle(&mut connection, &self.names, number, lease, settlements).await?;
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
            let mut connection = Guarded::from(&self.pools.claims).await?;
            let sequences = Sequence::numbers(sequences);
            let left =
                settle::unsettled(&mut connection, &self.names, number, lease, sequences).await?;
            connection.done();
            Ok(left)
        })
    }

    fn held<'a>(&'a self, queue: &'a str, after: Sequence, limit: u32) -> Answer<'a, Vec<Stored>> {
        self.bounded("held", async move {
            let number = self.known.number(queue)?;
            let mut connection = Guarded::from(&self.pools.claims).await?;
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
            let mut connection = Guarded::from(&self.pools.claims).await?;
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
            let mut connection = Guarded::from(&self.pools.claims).await?;
            let pruned = upkeep::prune(&mut connection, &self.names, window, limit).await?;
            connection.done();
            Ok(pruned)
        })
    }

    fn count<'a>(&'a self, queue: &'a str) -> Answer<'a, Counts> {
        self.bounded("count", async move {
            let number = self.known.number(queue)?;
            let mut connection = Guarded::from(&self.pools.claims).await?;
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
            let mut connection = Guarded::from(&self.pools.claims).await?;
            let letters =
                upkeep::dead_letters(&mut connection, &self.names, number, after, limit).await?;
            connection.done();
            Ok(letters)
        })
    }

    fn watch(&self, queue: &str) -> Wakeup {
        self.wakes.local.watch(queue)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            for task in &self.tasks {
                task.abort();
            }
            futures::join!(self.pools.close(), self.listening.close());
        })
    }
}

impl TransactionalStore for PostgresStore {
    type Database = Postgres;

    fn begin(&self) -> Answer<'_, Transaction<'static, Postgres>> {
        self.bounded("begin", async move { Ok(self.pools.work.begin().await?) })
    }

    fn enqueue_in<'a>(
        &'a self,
        transaction: &'a mut Transaction<'_, Postgres>,
        batch: Vec<NewMessage>,
    ) -> Answer<'a, Enqueued> {
        let connection: &'a mut PgConnection = &mut *transaction;
        self.bounded("enqueue_in", async move {
            let plan = self.known.plan(&batch)?;
            enqueue::check_isolation(connection).await?;
            enqueue::lock(connection, self.lock_space, &locks::of_plan(&plan)).await?;
            self.write(connection, plan).await
        })
    }

    fn settle_in<'a>(
        &'a self,
        transaction: &'a mut Transaction<'_, Postgres>,
        lease: &'a Lease,
        settlements: &'a [Settlement],
    ) -> Answer<'a, ()> {
        let connection: &'a mut PgConnection = &mut *transaction;
        self.bounded("settle_in", async move {
            let number = self.known.number(&lease.queue)?;
            let settled =
                settle::settle_in(connection, &self.names, number, lease, settlements).await?;
            Ok(settled.complete(&lease.queue)?)
        })
    }
}
