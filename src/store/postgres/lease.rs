//! Leases, all in the database's clock.
//!
//! `clock_timestamp()` and not `now()`: the latter is the time at which the transaction began, and a taker can
//! wait for a lock in between.
//!
//! **The fence.** A settling S of the old owner and a take T of the next one meet at the lease's row. S locks it
//! FOR KEY SHARE before it changes anything, and T locks it FOR UPDATE; these two exclude each other. S first: T
//! waits until S has committed, and the new owner reads what S has left. T first: S waits, then PostgreSQL looks at
//! its condition again on the row as T has left it, finds another epoch, and S changes nothing. There is no moment
//! between S's check and its commit in which T could commit. A renewal only updates the row, and that excludes
//! neither: heartbeats do not wait for a handler's transaction.

use std::time::Duration;

use laneway_actors::port::MemberId;
use sqlx::{Connection as _, PgConnection, Row as _};

use super::fault::Fault;
use crate::store::names::Names;
use crate::store::{Epoch, Lease, Scope, Shard, StoreError};

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

pub(super) async fn take(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    shard: Shard,
    owner: MemberId,
    ttl: Duration,
) -> Result<Option<Epoch>, Fault> {
    // First without a lock: who waits for a shard asks again and again, and the lock would make the owner's
    // settlings wait each time.
    if !is_free(connection, names, (queue, shard), owner, "").await? {
        return Ok(None);
    }
    let mut transaction = connection.begin().await?;
    if !is_free(&mut transaction, names, (queue, shard), owner, "FOR UPDATE").await? {
        transaction.rollback().await?;
        return Ok(None);
    }
    let epoch: i64 = sqlx::query_scalar(&names.fill(
        "UPDATE {t}leases SET owner = $3, epoch = epoch + 1, \
         expires = clock_timestamp() + $4 * interval '1 millisecond' \
         WHERE queue = $1 AND shard = $2 RETURNING epoch",
    ))
    .bind(queue)
    .bind(shard.0 as i32)
    .bind(owner.to_string())
    .bind(millis(ttl))
    .fetch_one(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(Some(Epoch(epoch)))
}

/// Whether the owner may take it now. A lease without owner has an expiry in the past.
async fn is_free(
    connection: &mut PgConnection,
    names: &Names,
    (queue, shard): (i32, Shard),
    owner: MemberId,
    lock: &str,
) -> Result<bool, Fault> {
    let text = "SELECT owner IS NOT DISTINCT FROM $3 OR expires <= clock_timestamp() FROM {t}leases \
         WHERE queue = $1 AND shard = $2 ";
    let free: Option<bool> = sqlx::query_scalar(&names.fill(&format!("{text}{lock}")))
        .bind(queue)
        .bind(shard.0 as i32)
        .bind(owner.to_string())
        .fetch_optional(connection)
        .await?;
    free.ok_or_else(|| {
        StoreError::refused(format!("the queue has no shard {} to lease", shard.0)).into()
    })
}

pub(super) async fn join(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    owner: MemberId,
    ttl: Duration,
) -> Result<Epoch, Fault> {
    let epoch: i64 = sqlx::query_scalar(&names.fill(
        "INSERT INTO {t}nodes (queue, owner, expires) \
         VALUES ($1, $2, clock_timestamp() + $3 * interval '1 millisecond') RETURNING epoch",
    ))
    .bind(queue)
    .bind(owner.to_string())
    .bind(millis(ttl))
    .fetch_one(connection)
    .await?;
    Ok(Epoch(epoch))
}

/// Renews; returns the lost ones.
pub(super) async fn renew(
    connection: &mut PgConnection,
    names: &Names,
    leases: &[(i32, Lease)],
    ttl: Duration,
) -> Result<Vec<Lease>, Fault> {
    let (shared, shards): (Vec<_>, Vec<_>) = leases
        .iter()
        .partition(|(_, lease)| lease.scope == Scope::Shared);
    let mut kept: Vec<(i32, i32, i64)> = Vec::new();
    if !shards.is_empty() {
        let rows = sqlx::query(&names.fill(
            "UPDATE {t}leases AS l SET expires = clock_timestamp() + $5 * interval '1 millisecond' \
             FROM unnest($1::int4[], $2::int4[], $3::int8[], $4::text[]) AS w(queue, shard, epoch, owner) \
             WHERE l.queue = w.queue AND l.shard = w.shard AND l.epoch = w.epoch AND l.owner = w.owner \
             RETURNING l.queue, l.shard, l.epoch",
        ))
        .bind(shards.iter().map(|(queue, _)| *queue).collect::<Vec<_>>())
        .bind(shards.iter().map(|(_, l)| l.shard().0 as i32).collect::<Vec<_>>())
        .bind(shards.iter().map(|(_, l)| l.epoch.0).collect::<Vec<_>>())
        .bind(shards.iter().map(|(_, l)| l.owner.to_string()).collect::<Vec<_>>())
        .bind(millis(ttl))
        .fetch_all(&mut *connection)
        .await?;
        for row in rows {
            kept.push((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?));
        }
    }
    if !shared.is_empty() {
        let rows = sqlx::query(&names.fill(
            "UPDATE {t}nodes SET expires = clock_timestamp() + $2 * interval '1 millisecond' \
             WHERE epoch = ANY($1) AND NOT dead RETURNING queue, 0, epoch",
        ))
        .bind(shared.iter().map(|(_, l)| l.epoch.0).collect::<Vec<_>>())
        .bind(millis(ttl))
        .fetch_all(connection)
        .await?;
        for row in rows {
            kept.push((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?));
        }
    }
    let lost = leases
        .iter()
        .filter(|(queue, lease)| !kept.contains(&(*queue, lease.shard().0 as i32, lease.epoch.0)));
    Ok(lost.map(|(_, lease)| lease.clone()).collect())
}

/// Both forms wait for settlings under way: what comes after the release must see them.
pub(super) async fn release(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
) -> Result<(), Fault> {
    let mut transaction = connection.begin().await?;
    if held(&mut transaction, names, queue, lease, "FOR UPDATE").await? {
        let text = match lease.scope {
            Scope::Shard(_) => {
                "UPDATE {t}leases SET owner = NULL, expires = '-infinity' \
                 WHERE queue = $1 AND shard = $2 AND epoch = $3"
            }
            Scope::Shared => {
                "UPDATE {t}nodes SET dead = true WHERE queue = $1 AND $2 = 0 AND epoch = $3"
            }
        };
        sqlx::query(&names.fill(text))
            .bind(queue)
            .bind(lease.shard().0 as i32)
            .bind(lease.epoch.0)
            .execute(&mut *transaction)
            .await?;
    }
    transaction.commit().await?;
    Ok(())
}

/// Refuses unless the lease is its owner's, and keeps it so until the transaction ends.
pub(super) async fn fence(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
) -> Result<(), Fault> {
    if held(connection, names, queue, lease, "FOR KEY SHARE").await? {
        return Ok(());
    }
    Err(lease.lost().into())
}

/// What a statement on messages begins with that is fenced by itself. Its parameters are the queue `$1`, the shard `$2`,
/// the epoch `$5` and the owner `$6`.
pub(super) const FENCE: &str =
    "fence AS MATERIALIZED (SELECT 1 FROM {lease} AND epoch = $5 AND owner = $6 FOR KEY SHARE),";

/// The row of a lease, but for its epoch and owner.
pub(super) fn row_of(lease: &Lease) -> &'static str {
    match lease.scope {
        Scope::Shard(_) => "{t}leases WHERE queue = $1 AND shard = $2",
        Scope::Shared => "{t}nodes WHERE queue = $1 AND $2 = 0 AND NOT dead",
    }
}

/// Whether the lease is its owner's, under the given lock.
pub(super) async fn held(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    lock: &str,
) -> Result<bool, Fault> {
    let row = row_of(lease);
    let text = format!("SELECT 1 FROM {row} AND epoch = $3 AND owner = $4 {lock}");
    let found: Option<i32> = sqlx::query_scalar(&names.fill(&text))
        .bind(queue)
        .bind(lease.shard().0 as i32)
        .bind(lease.epoch.0)
        .bind(lease.owner.to_string())
        .fetch_optional(connection)
        .await?;
    Ok(found.is_some())
}
