//! Starts and ends. Each is one statement for all messages of a kind, behind the fence of the lease.

use std::collections::BTreeMap;

use sqlx::{Connection as _, PgConnection, Row as _};

use super::fault::Fault;
use super::lease::{self, fence, millis};
use crate::store::columns::write_detail;
use crate::store::names::Names;
use crate::store::{Endings, Lease, Scope, Sequence, Settled, Settlement, Start};

/// A claim in an unordered queue must be the lease's own; a shard's rows have none.
const OWN: &str = "m.queue = $1 AND m.shard = $2 AND m.claim IS NOT DISTINCT FROM $3";

/// The same of a statement that carries the [fence](lease::FENCE) itself. PostgreSQL asks for the lease before it
/// looks for a row, since the question is the same for all of them.
const OWN_FENCED: &str = "m.queue = $1 AND m.shard = $2 AND m.claim IS NOT DISTINCT FROM $3 \
     AND EXISTS (SELECT 1 FROM fence)";

/// Its commit does not wait for the disk: all that a crash of the server can take with it is a count.
const START: &str = "WITH {fence} soft AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)) \
     UPDATE {t}messages AS m SET attempts = GREATEST(m.attempts, $7) \
     WHERE {own} AND m.sequence = ANY($4) AND EXISTS (SELECT 1 FROM soft)";

/// Loses nothing but an attempt if the server crashes before it is on the disk.
const UNCOUNT: &str = "WITH {fence} soft AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)) \
     UPDATE {t}messages AS m SET attempts = 0 \
     WHERE {own} AND m.sequence = ANY($4) AND m.attempts = 1 AND EXISTS (SELECT 1 FROM soft)";

const REMOVE: &str = "WITH {fence} \
     gone AS (DELETE FROM {t}messages AS m WHERE {own} AND m.sequence = ANY($4) \
     RETURNING m.queue, m.id, m.digest) \
     INSERT INTO {t}ended (queue, id, digest, ended_at) SELECT queue, id, digest, now() FROM gone \
     ON CONFLICT (queue, id) DO UPDATE SET digest = excluded.digest, ended_at = excluded.ended_at";

const KEEP: &str = "UPDATE {t}messages AS m SET claim = NULL, past = m.past || k.past, \
     due_at = CASE WHEN k.millis IS NULL THEN 'infinity' \
     ELSE clock_timestamp() + k.millis * interval '1 millisecond' END \
     FROM unnest($4::int8[], $5::int8[], $6::text[]) AS k(sequence, millis, past) \
     WHERE {own} AND m.sequence = ANY($4) AND m.sequence = k.sequence";

const BURY: &str = "WITH gone AS (DELETE FROM {t}messages AS m \
     USING unnest($4::int8[], $5::text[], $6::text[], $7::text[]) AS d(sequence, reason, detail, more) \
     WHERE {own} AND m.sequence = ANY($4) AND m.sequence = d.sequence \
     RETURNING m.queue, m.id, m.shard, m.sequence, m.key, m.key_hash, m.digest, m.attempts, m.message_type, \
     m.content_type, m.headers, m.correlation_id, m.causation_id, m.sent_at, m.past || d.more AS past, m.body, \
     d.reason, d.detail), \
     letters AS (INSERT INTO {t}dead_letters (queue, id, shard, sequence, key, key_hash, digest, attempts, \
     message_type, content_type, headers, correlation_id, causation_id, sent_at, past, body, reason, detail, \
     dead_at) SELECT queue, id, shard, sequence, key, key_hash, digest, attempts, message_type, content_type, \
     headers, correlation_id, causation_id, sent_at, past, body, reason, detail, now() \
     FROM gone ORDER BY sequence) \
     INSERT INTO {t}ended (queue, id, digest, ended_at) SELECT queue, id, digest, now() FROM gone \
     ON CONFLICT (queue, id) DO UPDATE SET digest = excluded.digest, ended_at = excluded.ended_at";

fn claim(lease: &Lease) -> Option<i64> {
    match lease.scope {
        Scope::Shard(_) => None,
        Scope::Shared => Some(lease.epoch.0),
    }
}

fn text(names: &Names, text: &str) -> String {
    names.fill(&text.replace("{fence}", "").replace("{own}", OWN))
}

fn fenced(names: &Names, text: &str, lease: &Lease) -> String {
    let fence = lease::FENCE.replace("{lease}", lease::row_of(lease));
    names.fill(&text.replace("{fence}", &fence).replace("{own}", OWN_FENCED))
}

/// One statement for all attempts with the same number, and most are the first. Each is its own transaction: a round
/// trip instead of four. (A join with pairs was planned as a walk over the whole shard for each of them: half a second
/// for 500 starts in a shard of 6,000. The arrays of the others are beside `= ANY` for that reason.)
pub(super) async fn start(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    starts: &[Start],
) -> Result<(), Fault> {
    let mut by_attempt: BTreeMap<i32, Vec<i64>> = BTreeMap::new();
    for start in starts {
        let sequences = by_attempt.entry(start.attempt as i32).or_default();
        sequences.push(start.sequence.0);
    }
    let statement = fenced(names, START, lease);
    for (attempt, sequences) in by_attempt {
        let started = sqlx::query(&statement)
            .bind(queue)
            .bind(lease.shard().0 as i32)
            .bind(claim(lease))
            .bind(sequences)
            .bind(lease.epoch.0)
            .bind(lease.owner.to_string())
            .bind(attempt)
            .execute(&mut *connection)
            .await?;
        if started.rows_affected() == 0 && !lease::held(connection, names, queue, lease, "").await?
        {
            return Err(lease.lost().into());
        }
    }
    Ok(())
}

pub(super) async fn uncount(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    sequences: Vec<i64>,
) -> Result<(), Fault> {
    let text = fenced(names, UNCOUNT, lease);
    let uncounted = on_own(connection, &text, queue, lease, sequences).await?;
    if uncounted == 0 && !lease::held(connection, names, queue, lease, "").await? {
        return Err(lease.lost().into());
    }
    Ok(())
}

/// Runs a fenced statement on these messages; returns how many rows it found. None may mean that the lease is lost.
async fn on_own(
    connection: &mut PgConnection,
    text: &str,
    queue: i32,
    lease: &Lease,
    sequences: Vec<i64>,
) -> Result<u64, sqlx::Error> {
    let done = sqlx::query(text)
        .bind(queue)
        .bind(lease.shard().0 as i32)
        .bind(claim(lease))
        .bind(sequences)
        .bind(lease.epoch.0)
        .bind(lease.owner.to_string())
        .execute(connection)
        .await?;
    Ok(done.rows_affected())
}

/// In a transaction of its own: a single statement where nothing but removing is to be done.
pub(super) async fn settle(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    settlements: &[Settlement],
) -> Result<Settled, Fault> {
    let endings = Endings::of(settlements);
    if endings.kept.is_empty() && endings.dead.is_empty() {
        return remove(connection, names, queue, lease, endings.removed).await;
    }
    let mut transaction = connection.begin().await?;
    let settled = settle_in(&mut transaction, names, queue, lease, settlements).await?;
    transaction.commit().await?;
    Ok(settled)
}

/// In the transaction of the connection.
pub(super) async fn settle_in(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    settlements: &[Settlement],
) -> Result<Settled, Fault> {
    let endings = Endings::of(settlements);
    if endings.kept.is_empty() && endings.dead.is_empty() {
        return remove(connection, names, queue, lease, endings.removed).await;
    }
    fence(connection, names, queue, lease).await?;
    let rows = (queue, lease.shard().0 as i32, claim(lease));
    let settled = end(connection, names, rows, endings).await?;
    Ok(Settled::of(settled, settlements.len()))
}

async fn remove(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    sequences: Vec<i64>,
) -> Result<Settled, Fault> {
    let count = sequences.len();
    let text = fenced(names, REMOVE, lease);
    let removed = on_own(connection, &text, queue, lease, sequences).await?;
    if removed == 0 && !lease::held(connection, names, queue, lease, "").await? {
        return Err(lease.lost().into());
    }
    Ok(Settled::of(removed as usize, count))
}

/// Ends messages of a queue's shard that have this claim; returns how many. The caller has made sure that it may.
pub(super) async fn end(
    connection: &mut PgConnection,
    names: &Names,
    (queue, shard, claim): (i32, i32, Option<i64>),
    endings: Endings<'_>,
) -> Result<usize, Fault> {
    let Endings {
        removed,
        kept,
        dead,
    } = endings;
    let mut settled = 0;
    if !removed.is_empty() {
        let done = sqlx::query(&text(names, REMOVE))
            .bind(queue)
            .bind(shard)
            .bind(claim)
            .bind(removed)
            .execute(&mut *connection)
            .await?;
        settled += done.rows_affected();
    }
    if !kept.is_empty() {
        let due = |after: &Option<_>| after.map(millis);
        let done = sqlx::query(&text(names, KEEP))
            .bind(queue)
            .bind(shard)
            .bind(claim)
            .bind(kept.iter().map(|(s, _, _)| *s).collect::<Vec<_>>())
            .bind(
                kept.iter()
                    .map(|(_, after, _)| due(after))
                    .collect::<Vec<_>>(),
            )
            .bind(
                kept.iter()
                    .map(|(_, _, past)| past.as_str())
                    .collect::<Vec<_>>(),
            )
            .execute(&mut *connection)
            .await?;
        settled += done.rows_affected();
    }
    if !dead.is_empty() {
        let done = sqlx::query(&text(names, BURY))
            .bind(queue)
            .bind(shard)
            .bind(claim)
            .bind(dead.iter().map(|(s, ..)| *s).collect::<Vec<_>>())
            .bind(
                dead.iter()
                    .map(|(_, reason, ..)| reason.text())
                    .collect::<Vec<_>>(),
            )
            .bind(
                dead.iter()
                    .map(|(_, _, detail, _)| write_detail(detail))
                    .collect::<Vec<_>>(),
            )
            .bind(
                dead.iter()
                    .map(|(.., past)| past.as_str())
                    .collect::<Vec<_>>(),
            )
            .execute(connection)
            .await?;
        settled += done.rows_affected();
    }
    Ok(settled as usize)
}

/// Waits for a settling whose commit may still be under way: its row is locked until that has ended.
pub(super) async fn unsettled(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    sequences: Vec<i64>,
) -> Result<Vec<Sequence>, Fault> {
    let rows = sqlx::query(&names.fill(
        "SELECT sequence FROM {t}messages \
         WHERE queue = $1 AND shard = $2 AND sequence = ANY($3) ORDER BY sequence FOR UPDATE",
    ))
    .bind(queue)
    .bind(lease.shard().0 as i32)
    .bind(sequences)
    .fetch_all(connection)
    .await?;
    let mut left = Vec::with_capacity(rows.len());
    for row in rows {
        left.push(Sequence(row.try_get(0)?));
    }
    Ok(left)
}
