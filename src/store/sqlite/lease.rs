//! Leases. Who owns what, under which epoch, is in the file; until when, in this process's memory and by its
//! monotonic clock: the file has one process, and whoever held a lease in an earlier one is dead. So a start ends
//! all leases, and a heartbeat writes nothing and waits for no writer.
//!
//! **The fence.** A settling reads the lease's row in the transaction in which it writes, and a take changes it in
//! a transaction of its own. There is one writer: a settling that began to write first commits before the take can
//! begin; one that only began to read first is told that its snapshot is too old when it wants to write
//! ([`StoreError::Conflict`]).

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use laneway_actors::port::MemberId;
use sqlx::{Connection as _, SqliteConnection};

use super::fault::Fault;
use crate::store::names::Names;
use crate::store::{Epoch, Lease, Ownership, Scope, Shard, StoreError};

/// Until when leases last.
#[derive(Debug, Default)]
pub(super) struct Clock(Mutex<Expiries>);

#[derive(Debug, Default)]
pub(super) struct Expiries {
    shards: HashMap<(i32, Shard), Term>,
    nodes: HashMap<Epoch, (i32, Instant)>,
}

#[derive(Debug, Clone, Copy)]
struct Term {
    owner: MemberId,
    /// `None` while it is being taken.
    epoch: Option<Epoch>,
    until: Instant,
}

impl Clock {
    fn lock(&self) -> MutexGuard<'_, Expiries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nodes of a queue whose lease has expired. They cannot be renewed any more.
    pub(super) fn expired(&self, queue: i32) -> Vec<i64> {
        let now = Instant::now();
        let mut expiries = self.lock();
        let gone = expiries
            .nodes
            .extract_if(|_, (of, until)| *of == queue && *until <= now);
        gone.map(|(epoch, _)| epoch.0).collect()
    }

    /// Who has which of the first `shards` shards. Who is taking one counts: nobody else gets it meanwhile.
    pub(super) fn owners(&self, queue: i32, shards: u32) -> Vec<Ownership> {
        let now = Instant::now();
        let expiries = self.lock();
        let owner = |shard| {
            let term = expiries.shards.get(&(queue, shard));
            Ownership {
                shard,
                owner: term.map(|term| term.owner),
                fresh: term.is_some_and(|term| term.until > now),
            }
        };
        (0..shards).map(Shard).map(owner).collect()
    }

    /// Renews; returns the lost ones.
    pub(super) fn renew(&self, leases: &[(i32, Lease)], ttl: Duration) -> Vec<Lease> {
        let until = Instant::now() + ttl;
        let mut expiries = self.lock();
        let mut lost = Vec::new();
        for (queue, lease) in leases {
            let kept = match lease.scope {
                Scope::Shard(shard) => expiries
                    .shards
                    .get_mut(&(*queue, shard))
                    .filter(|term| term.owner == lease.owner && term.epoch == Some(lease.epoch))
                    .map(|term| &mut term.until),
                Scope::Shared => expiries.nodes.get_mut(&lease.epoch).map(|(_, until)| until),
            };
            match kept {
                Some(kept) => *kept = until,
                None => lost.push(lease.clone()),
            }
        }
        lost
    }
}

/// Every lease of an earlier process ends.
pub(super) async fn end_all(connection: &mut SqliteConnection, names: &Names) -> Result<(), Fault> {
    for text in [
        "UPDATE {t}leases SET owner = NULL WHERE owner IS NOT NULL",
        "UPDATE {t}nodes SET dead = 1 WHERE NOT dead",
    ] {
        sqlx::query(&names.fill(text))
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}

pub(super) async fn take(
    connection: &mut SqliteConnection,
    names: &Names,
    clock: &Clock,
    (queue, shard): (i32, Shard),
    owner: MemberId,
    ttl: Duration,
) -> Result<Option<Epoch>, Fault> {
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    // In one step under the lock: from here on the earlier owner cannot renew. If the rest fails, the term runs
    // out like that of an owner who died, and the file still names the earlier owner, who may settle until then.
    let now = Instant::now();
    let term = Term {
        owner,
        epoch: None,
        until: now + ttl,
    };
    {
        let mut expiries = clock.lock();
        let held = expiries.shards.get(&(queue, shard));
        if held.is_some_and(|held| held.owner != owner && held.until > now) {
            return Ok(None);
        }
        expiries.shards.insert((queue, shard), term);
    }
    let epoch: Option<i64> = sqlx::query_scalar(&names.fill(
        "UPDATE {t}leases SET owner = ?3, epoch = epoch + 1 WHERE queue = ?1 AND shard = ?2 RETURNING epoch",
    ))
    .bind(queue)
    .bind(shard.0)
    .bind(owner.to_string())
    .fetch_optional(&mut *transaction)
    .await?;
    let Some(epoch) = epoch.map(Epoch) else {
        clock.lock().shards.remove(&(queue, shard));
        return Err(
            StoreError::refused(format!("the queue has no shard {} to lease", shard.0)).into(),
        );
    };
    transaction.commit().await?;
    if let Some(term) = clock.lock().shards.get_mut(&(queue, shard)) {
        // A take by the same owner that overlapped with this one may have come later; the writer put them in
        // the order of their epochs.
        term.epoch = term.epoch.max(Some(epoch));
    }
    Ok(Some(epoch))
}

pub(super) async fn join(
    connection: &mut SqliteConnection,
    names: &Names,
    clock: &Clock,
    queue: i32,
    owner: MemberId,
    ttl: Duration,
) -> Result<Epoch, Fault> {
    let epoch: i64 = sqlx::query_scalar(
        &names.fill("INSERT INTO {t}nodes (queue, owner) VALUES (?, ?) RETURNING epoch"),
    )
    .bind(queue)
    .bind(owner.to_string())
    .fetch_one(connection)
    .await?;
    let until = Instant::now() + ttl;
    clock.lock().nodes.insert(Epoch(epoch), (queue, until));
    Ok(Epoch(epoch))
}

pub(super) async fn release(
    connection: &mut SqliteConnection,
    names: &Names,
    clock: &Clock,
    queue: i32,
    lease: &Lease,
) -> Result<(), Fault> {
    let text = match lease.scope {
        Scope::Shard(_) => {
            "UPDATE {t}leases SET owner = NULL WHERE queue = ? AND shard = ? AND epoch = ? AND owner = ?"
        }
        Scope::Shared => {
            "UPDATE {t}nodes SET dead = 1 WHERE queue = ? AND ? = 0 AND epoch = ? AND owner = ?"
        }
    };
    sqlx::query(&names.fill(text))
        .bind(queue)
        .bind(lease.shard().0)
        .bind(lease.epoch.0)
        .bind(lease.owner.to_string())
        .execute(connection)
        .await?;
    let mut expiries = clock.lock();
    match lease.scope {
        Scope::Shard(shard) => {
            let term = expiries.shards.get(&(queue, shard));
            if term.is_some_and(|term| term.epoch == Some(lease.epoch)) {
                expiries.shards.remove(&(queue, shard));
            }
        }
        Scope::Shared => {
            expiries.nodes.remove(&lease.epoch);
        }
    }
    Ok(())
}

/// Refuses unless the lease is its owner's.
pub(super) async fn fence(
    connection: &mut SqliteConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
) -> Result<(), Fault> {
    let text = match lease.scope {
        Scope::Shard(_) => {
            "SELECT 1 FROM {t}leases WHERE queue = ? AND shard = ? AND epoch = ? AND owner = ?"
        }
        Scope::Shared => {
            "SELECT 1 FROM {t}nodes WHERE queue = ? AND ? = 0 AND epoch = ? AND owner = ? AND NOT dead"
        }
    };
    let found: Option<i64> = sqlx::query_scalar(&names.fill(text))
        .bind(queue)
        .bind(lease.shard().0)
        .bind(lease.epoch.0)
        .bind(lease.owner.to_string())
        .fetch_optional(connection)
        .await?;
    if found.is_some() {
        return Ok(());
    }
    Err(lease.lost().into())
}
