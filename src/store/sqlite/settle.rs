//! Starts and ends, behind the fence of the lease, in the transaction of the connection.

use sqlx::{Row as _, SqliteConnection};

use super::fault::Fault;
use super::lease::fence;
use super::{list, millis, text};
use crate::store::columns::write_detail;
use crate::store::names::Names;
use crate::store::{Endings, Lease, Scope, Sequence, Settled, Settlement, Start};

/// A claim in an unordered queue must be the lease's own; a shard's rows have none.
const OWN: &str = "queue = ?1 AND shard = ?2 AND claim IS ?3";

const START: &str =
    "UPDATE {t}messages SET attempts = max(attempts, ?5) WHERE {own} AND sequence = ?4";

const UNCOUNT: &str = "UPDATE {t}messages SET attempts = 0 \
     WHERE {own} AND sequence IN (SELECT value FROM json_each(?4)) AND attempts = 1";

const REMEMBER: &str = "INSERT INTO {t}ended (queue, id, digest, ended_at) \
     SELECT queue, id, digest, {now} FROM {t}messages \
     WHERE {own} AND sequence IN (SELECT value FROM json_each(?4)) \
     ON CONFLICT (queue, id) DO UPDATE SET digest = excluded.digest, ended_at = excluded.ended_at";

const REMOVE: &str = "DELETE FROM {t}messages \
     WHERE {own} AND sequence IN (SELECT value FROM json_each(?4))";

const KEEP: &str = "UPDATE {t}messages SET claim = NULL, past = past || ?6, \
     due_at = CASE WHEN ?5 IS NULL THEN {never} ELSE {now} + ?5 END \
     WHERE {own} AND sequence = ?4";

const LETTER: &str = "INSERT INTO {t}dead_letters (queue, id, shard, sequence, key, key_hash, digest, attempts, \
     message_type, content_type, headers, correlation_id, causation_id, sent_at, past, body, reason, detail, \
     dead_at) SELECT queue, id, shard, sequence, key, key_hash, digest, attempts, message_type, content_type, \
     headers, correlation_id, causation_id, sent_at, past || ?5, body, ?6, ?7, {now} \
     FROM {t}messages WHERE {own} AND sequence = ?4";

fn claim(lease: &Lease) -> Option<i64> {
    match lease.scope {
        Scope::Shard(_) => None,
        Scope::Shared => Some(lease.epoch.0),
    }
}

fn own(names: &Names, statement: &str) -> String {
    text(names, &statement.replace("{own}", OWN))
}

pub(super) async fn start(
    connection: &mut SqliteConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    starts: &[Start],
) -> Result<(), Fault> {
    fence(&mut *connection, names, queue, lease).await?;
    let text = own(names, START);
    for start in starts {
        sqlx::query(&text)
            .bind(queue)
            .bind(lease.shard().0)
            .bind(claim(lease))
            .bind(start.sequence.0)
            .bind(start.attempt)
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}

pub(super) async fn uncount(
    connection: &mut SqliteConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    sequences: &[i64],
) -> Result<(), Fault> {
    fence(&mut *connection, names, queue, lease).await?;
    sqlx::query(&own(names, UNCOUNT))
        .bind(queue)
        .bind(lease.shard().0)
        .bind(claim(lease))
        .bind(list(sequences))
        .execute(connection)
        .await?;
    Ok(())
}

pub(super) async fn settle(
    connection: &mut SqliteConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    settlements: &[Settlement],
) -> Result<Settled, Fault> {
    fence(connection, names, queue, lease).await?;
    let rows = (queue, lease.shard().0, claim(lease));
    let settled = end(connection, names, rows, Endings::of(settlements)).await?;
    Ok(Settled::of(settled, settlements.len()))
}

/// Ends messages of a queue's shard that have this claim; returns how many. The caller has made sure that it may.
pub(super) async fn end(
    connection: &mut SqliteConnection,
    names: &Names,
    (queue, shard, claim): (i32, u32, Option<i64>),
    endings: Endings<'_>,
) -> Result<usize, Fault> {
    let mut settled = 0;
    for (sequence, after, past) in &endings.kept {
        let done = sqlx::query(&own(names, KEEP))
            .bind(queue)
            .bind(shard)
            .bind(claim)
            .bind(sequence)
            .bind(after.map(millis))
            .bind(past)
            .execute(&mut *connection)
            .await?;
        settled += done.rows_affected();
    }
    for (sequence, reason, detail, past) in &endings.dead {
        sqlx::query(&own(names, LETTER))
            .bind(queue)
            .bind(shard)
            .bind(claim)
            .bind(sequence)
            .bind(past)
            .bind(reason.text())
            .bind(write_detail(detail))
            .execute(&mut *connection)
            .await?;
    }
    let dead = endings.dead.iter().map(|(sequence, ..)| *sequence);
    let gone: Vec<i64> = endings.removed.iter().copied().chain(dead).collect();
    if !gone.is_empty() {
        let gone = list(&gone);
        for statement in [REMEMBER, REMOVE] {
            let done = sqlx::query(&own(names, statement))
                .bind(queue)
                .bind(shard)
                .bind(claim)
                .bind(&gone)
                .execute(&mut *connection)
                .await?;
            if statement == REMOVE {
                settled += done.rows_affected();
            }
        }
    }
    Ok(settled as usize)
}

/// On the writer, and not on a reader: a settling whose commit is under way has ended before.
pub(super) async fn unsettled(
    connection: &mut SqliteConnection,
    names: &Names,
    queue: i32,
    lease: &Lease,
    sequences: &[i64],
) -> Result<Vec<Sequence>, Fault> {
    let rows = sqlx::query(&names.fill(
        "SELECT sequence FROM {t}messages WHERE queue = ? AND shard = ? \
         AND sequence IN (SELECT value FROM json_each(?)) ORDER BY sequence",
    ))
    .bind(queue)
    .bind(lease.shard().0)
    .bind(list(sequences))
    .fetch_all(connection)
    .await?;
    let mut left = Vec::with_capacity(rows.len());
    for row in rows {
        left.push(Sequence(row.try_get(0)?));
    }
    Ok(left)
}
