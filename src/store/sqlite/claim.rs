//! Which messages may run.
//!
//! An ordered shard is read without a mark: its lease is the claim. Nothing is remembered between two reads.
//!
//! **Held keys** are filtered before the limit, in the walk along the index, so that they cannot fill a window.
//! The walk passes over their rows, though: a read costs as many index steps as rows of held keys lie before
//! what it returns: 50 to 215 milliseconds for 100,000 rows on two busy cores. The cost is one of the read and not of
//! the message, so a reader behind such a backlog should read in large windows. What else was tried is told in the
//! module of the same name for PostgreSQL; the key's hash in the index in order takes half the time here too.

use laneway_actors::OrderingKey;
use sqlx::sqlite::SqliteRow;
use sqlx::{Connection as _, Row as _, SqliteConnection};

use super::fault::Fault;
use super::lease::{Clock, fence};
use super::{list, text};
use crate::store::columns::ReadRow;
use crate::store::names::Names;
use crate::store::{Lease, Scope, Sequence, StoreError, Stored, Window};

/// `'now'` is one moment for the whole statement (sqlite.org/lang_datefunc.html): a head that becomes due while
/// it runs must not be left out itself and yet no longer hold back what follows it.
const READ: &str = "SELECT m.* FROM {t}messages AS m \
     WHERE m.queue = ?1 AND m.shard = ?2 AND m.sequence IS NOT NULL \
     AND m.sequence NOT IN (SELECT value FROM json_each(?3)) \
     AND (m.key_hash IS NULL OR m.key_hash NOT IN (SELECT value FROM json_each(?4))) \
     AND (m.due_at IS NULL OR m.due_at <= {now}) \
     AND NOT EXISTS (SELECT 1 FROM {t}messages AS h WHERE h.queue = m.queue AND h.shard = m.shard \
     AND h.key_hash = m.key_hash AND h.sequence < m.sequence AND h.sequence IS NOT NULL \
     AND h.due_at IS NOT NULL AND h.due_at > {now}) \
     ORDER BY m.sequence LIMIT ?5";

/// Free is what nobody has claimed, or a node that is dead.
const CLAIM: &str = "UPDATE {t}messages SET claim = ?2 WHERE queue = ?1 AND shard = 0 AND sequence IN \
     (SELECT p.sequence FROM {t}messages AS p WHERE p.queue = ?1 AND p.shard = 0 AND p.sequence IS NOT NULL \
     AND (p.due_at IS NULL OR p.due_at <= {now}) \
     AND (p.claim IS NULL OR EXISTS (SELECT 1 FROM {t}nodes AS n WHERE n.epoch = p.claim AND n.dead)) \
     ORDER BY p.sequence LIMIT ?3) RETURNING *";

pub(super) async fn read(
    connection: &mut SqliteConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    window: &Window,
) -> Result<Vec<Stored>, Fault> {
    let Scope::Shard(shard) = lease.scope else {
        return Err(StoreError::refused("an unordered queue is claimed, not read").into());
    };
    fence(connection, names, queue, lease).await?;
    let rows = sqlx::query(&text(names, READ))
        .bind(queue)
        .bind(shard.0)
        .bind(list(window.skip()))
        .bind(list(window.held()))
        .bind(window.limit())
        .fetch_all(connection)
        .await?;
    rows.iter().map(|row| Ok(stored(row)?)).collect()
}

pub(super) async fn claim(
    connection: &mut SqliteConnection,
    names: &Names,
    clock: &Clock,
    queue: i32,
    lease: &Lease,
    limit: u32,
) -> Result<Vec<Stored>, Fault> {
    if lease.scope != Scope::Shared {
        return Err(StoreError::refused("a shard of an ordered queue is read, not claimed").into());
    }
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    let dead = clock.expired(queue);
    if !dead.is_empty() {
        sqlx::query(
            &names.fill(
                "UPDATE {t}nodes SET dead = 1 WHERE epoch IN (SELECT value FROM json_each(?))",
            ),
        )
        .bind(list(&dead))
        .execute(&mut *transaction)
        .await?;
    }
    fence(&mut transaction, names, queue, lease).await?;
    let rows = sqlx::query(&text(names, CLAIM))
        .bind(queue)
        .bind(lease.epoch.0)
        .bind(limit)
        .fetch_all(&mut *transaction)
        .await?;
    let mut claimed = Vec::with_capacity(rows.len());
    for row in &rows {
        claimed.push(stored(row)?);
    }
    transaction.commit().await?;
    // `RETURNING` has no order.
    claimed.sort_unstable_by_key(|message: &Stored| message.sequence);
    Ok(claimed)
}

pub(super) async fn give_back(
    connection: &mut SqliteConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    sequences: &[i64],
) -> Result<(), Fault> {
    // Needs no fence: whoever took a claim over has put its own epoch there.
    sqlx::query(&names.fill(
        "UPDATE {t}messages SET claim = NULL WHERE queue = ? AND shard = 0 \
         AND sequence IN (SELECT value FROM json_each(?)) AND claim = ?",
    ))
    .bind(queue)
    .bind(list(sequences))
    .bind(lease.epoch.0)
    .execute(connection)
    .await?;
    Ok(())
}

/// Reads a row of messages or dead letters.
pub(super) fn stored(row: &SqliteRow) -> Result<Stored, sqlx::Error> {
    let columns = ReadRow {
        id: row.try_get("id")?,
        message_type: row.try_get("message_type")?,
        content_type: row.try_get("content_type")?,
        headers: row.try_get("headers")?,
        correlation_id: row.try_get("correlation_id")?,
        causation_id: row.try_get("causation_id")?,
        sent_at: row.try_get("sent_at")?,
        body: row.try_get("body")?,
    };
    let (envelope, broken) = columns.envelope();
    let key: Option<Vec<u8>> = row.try_get("key")?;
    Ok(Stored {
        sequence: Sequence(row.try_get::<Option<i64>, _>("sequence")?.unwrap_or(0)),
        attempts: row.try_get("attempts")?,
        key: key.map(OrderingKey::new),
        envelope,
        broken,
    })
}
