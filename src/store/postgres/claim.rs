//! Which messages may run.
//!
//! An ordered shard is read without locks and without a mark: its lease is the claim. Nothing is remembered
//! between two reads. A row whose transaction is open is not visible, and by its key's lock nothing after it of
//! its key is either.
//!
//! **Held keys** are filtered before the limit, in the walk along the index, so that they cannot fill a window.
//! The walk passes over their rows, though: a read costs as many index steps as rows of held keys lie before
//! what it returns. Measured on two busy cores with rows of 200 bytes, for keys that the window leaves out: 40 to 90
//! milliseconds for 100,000 rows, 490 for 860,000; and about four times that for rows of a key whose head waits,
//! because each is looked up among the waiting ones: whoever knows such a key should leave it out by the window. The
//! cost is one of the read and not of the message, so a reader behind such a backlog should read in large windows.
//!
//! What else was tried, and why it is not here:
//! - An index by key, and a walk from key to key that reads the head of each: 2 milliseconds for 500 keys and
//!   112 for 20,000, whatever the backlog. But every enqueuing then writes a third index in random places (36 %
//!   more time in the server, 18 % more log), and with many keys it is slower than passing over 100,000 rows.
//! - The key's hash in the index in order, to pass over rows without visiting them: half the time, and only after
//!   a vacuum.
//!
//! The lists of held keys and of sequences to skip are hashed from PostgreSQL 15 on; before, keep them short.

use laneway_actors::OrderingKey;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::fault::Fault;
use super::lease;
use crate::store::columns::ReadRow;
use crate::store::names::Names;
use crate::store::{Lease, Scope, Sequence, StoreError, Stored, Window};

/// What [`stored`] reads.
pub(super) const COLUMNS: &str = "m.sequence, m.attempts, m.key, m.id, m.message_type, m.content_type, m.headers, \
     m.correlation_id, m.causation_id, m.sent_at, m.body";

/// `now()` is one moment for the whole statement: a head that becomes due while it runs must not be left out
/// itself and yet no longer hold back what follows it.
const READ: &str = "SELECT {columns} FROM {t}messages AS m \
     WHERE m.queue = $1 AND m.shard = $2 AND m.sequence IS NOT NULL \
     AND m.sequence <> ALL($3) AND (m.key_hash IS NULL OR m.key_hash <> ALL($4)) \
     AND (m.due_at IS NULL OR m.due_at <= now()) \
     AND NOT EXISTS (SELECT 1 FROM {t}messages AS h WHERE h.queue = m.queue AND h.shard = m.shard \
     AND h.key_hash = m.key_hash AND h.sequence < m.sequence AND h.due_at > now()) \
     AND EXISTS (SELECT 1 FROM {t}leases WHERE queue = $1 AND shard = $2 AND epoch = $6 AND owner = $7) \
     ORDER BY m.sequence LIMIT $5";

/// A node whose lease has expired is dead from here on, before anybody takes its claims: a renewal that comes
/// later fails. One that is settling at this moment is passed over, and found the next time.
const BURY: &str = "UPDATE {t}nodes SET dead = true WHERE epoch IN (SELECT epoch FROM {t}nodes \
     WHERE queue = $1 AND NOT dead AND expires <= clock_timestamp() FOR UPDATE SKIP LOCKED)";

/// Free is what nobody has claimed or a node that is known to be dead; not: what a node has claimed that is not
/// known to live. A node that joined after this statement's snapshot is not in it, and its claims are not free.
const CLAIM: &str = "WITH me AS MATERIALIZED (SELECT 1 FROM {t}nodes \
     WHERE queue = $1 AND epoch = $2 AND owner = $3 AND NOT dead FOR KEY SHARE), \
     picked AS MATERIALIZED (SELECT p.sequence FROM {t}messages AS p \
     WHERE p.queue = $1 AND p.shard = 0 AND p.sequence IS NOT NULL \
     AND (p.due_at IS NULL OR p.due_at <= now()) \
     AND (p.claim IS NULL OR EXISTS (SELECT 1 FROM {t}nodes AS n WHERE n.epoch = p.claim AND n.dead)) \
     AND EXISTS (SELECT 1 FROM me) \
     ORDER BY p.sequence LIMIT $4 FOR UPDATE OF p SKIP LOCKED) \
     UPDATE {t}messages AS m SET claim = $2 FROM picked \
     WHERE m.queue = $1 AND m.shard = 0 AND m.sequence = picked.sequence RETURNING {columns}";

/// The lease is checked in the statement itself; only when nothing came it is asked for again, to tell a shard
/// without work from one that is lost.
pub(super) async fn read(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    window: &Window,
) -> Result<Vec<Stored>, Fault> {
    let Scope::Shard(shard) = lease.scope else {
        return Err(StoreError::refused("an unordered queue is claimed, not read").into());
    };
    let rows = sqlx::query(&names.fill(&READ.replace("{columns}", COLUMNS)))
        .bind(queue)
        .bind(shard.0 as i32)
        .bind(window.skip())
        .bind(window.held())
        .bind(window.limit())
        .bind(lease.epoch.0)
        .bind(lease.owner.to_string())
        .fetch_all(&mut *connection)
        .await?;
    if rows.is_empty() && !lease::held(connection, names, queue, lease, "").await? {
        return Err(lease.lost().into());
    }
    rows.iter().map(|row| Ok(stored(row)?)).collect()
}

pub(super) async fn claim(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    limit: u32,
) -> Result<Vec<Stored>, Fault> {
    if lease.scope != Scope::Shared {
        return Err(StoreError::refused("a shard of an ordered queue is read, not claimed").into());
    }
    sqlx::query(&names.fill(BURY))
        .bind(queue)
        .execute(&mut *connection)
        .await?;
    let rows = sqlx::query(&names.fill(&CLAIM.replace("{columns}", COLUMNS)))
        .bind(queue)
        .bind(lease.epoch.0)
        .bind(lease.owner.to_string())
        .bind(i64::from(limit))
        .fetch_all(&mut *connection)
        .await?;
    if rows.is_empty() && !lease::held(connection, names, queue, lease, "").await? {
        return Err(lease.lost().into());
    }
    let mut claimed = Vec::with_capacity(rows.len());
    for row in &rows {
        claimed.push(stored(row)?);
    }
    // `RETURNING` has no order.
    claimed.sort_unstable_by_key(|message: &Stored| message.sequence);
    Ok(claimed)
}

pub(super) async fn give_back(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    sequences: Vec<i64>,
) -> Result<(), Fault> {
    // Needs no fence: whoever took a claim over has put its own epoch there.
    sqlx::query(&names.fill(
        "UPDATE {t}messages SET claim = NULL \
         WHERE queue = $1 AND shard = 0 AND sequence = ANY($2) AND claim = $3",
    ))
    .bind(queue)
    .bind(sequences)
    .bind(lease.epoch.0)
    .execute(connection)
    .await?;
    Ok(())
}

/// Reads a row with the [`COLUMNS`].
pub(super) fn stored(row: &PgRow) -> Result<Stored, sqlx::Error> {
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
        attempts: row.try_get::<i32, _>("attempts")?.unsigned_abs(),
        key: key.map(OrderingKey::new),
        envelope,
        broken,
    })
}
