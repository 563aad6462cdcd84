//! Storing messages.
//!
//! SQLite has one writer, and a transaction that has begun to write keeps all others from it until it has ended.
//! So the first thing an enqueuing does is to write (it draws its places), and from there on nothing changes
//! beside it: places rise in the order of commits over all keys, and a copy cannot end while it is looked for.

use sqlx::{Row as _, SqliteConnection};

use super::fault::Fault;
use super::text;
use crate::store::names::Names;
use crate::store::plan::{Plan, PlannedRow};
use crate::store::settle::ID_REUSED;
use crate::store::{Placed, Sequence, StoreError};

const INSERT: &str = "INSERT INTO {t}messages (queue, id, shard, sequence, key, key_hash, digest, due_at, \
     message_type, content_type, headers, correlation_id, causation_id, sent_at, body) \
     SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15 \
     WHERE NOT EXISTS (SELECT 1 FROM {t}ended WHERE queue = ?1 AND id = ?2) \
     ON CONFLICT (queue, id) DO NOTHING";

/// A message that is there counts before an ended one of the same id: it is a dead letter that was sent back.
const KNOWN: &str = "SELECT digest, 1 AS priority FROM {t}messages WHERE queue = ?1 AND id = ?2 \
     UNION ALL SELECT digest, 2 FROM {t}ended WHERE queue = ?1 AND id = ?2 ORDER BY priority LIMIT 1";

const DEAD: &str = "INSERT INTO {t}dead_letters (queue, id, shard, key, key_hash, digest, attempts, message_type, \
     content_type, headers, correlation_id, causation_id, sent_at, past, body, reason, detail, dead_at) \
     VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?, '', ?, ?, '', {now})";

/// Draws so many places; returns the first. Takes the write lock, also for none.
pub(super) async fn draw(
    connection: &mut SqliteConnection,
    names: &Names,
    count: usize,
) -> Result<i64, Fault> {
    let last: i64 =
        sqlx::query_scalar(&names.fill("UPDATE {t}counter SET last = last + ? RETURNING last"))
            .bind(count as i64)
            .fetch_one(connection)
            .await?;
    Ok(last - count as i64 + 1)
}

/// Stores what was planned, in the transaction of the connection.
pub(super) async fn enqueue(
    connection: &mut SqliteConnection,
    names: &Names,
    mut plan: Plan,
) -> Result<Plan, Fault> {
    let rows = std::mem::take(&mut plan.rows);
    let at_once = rows.iter().filter(|planned| planned.row.due_at.is_none());
    let mut next = draw(connection, names, at_once.count()).await?;
    for planned in rows {
        let place = planned.row.due_at.is_none().then(|| {
            next += 1;
            next - 1
        });
        let placed = if insert(connection, names, &planned, place).await? {
            place.map_or(Placed::Scheduled, |place| Placed::At(Sequence(place)))
        } else {
            let known = sqlx::query(&names.fill(KNOWN))
                .bind(planned.queue)
                .bind(&planned.row.id)
                .fetch_optional(&mut *connection)
                .await?;
            let Some(known) = known else {
                return Err(StoreError::conflict("a copy was removed at the same time").into());
            };
            if known.try_get::<i64, _>(0)? == planned.row.digest {
                Placed::Duplicate
            } else {
                Placed::IdReused
            }
        };
        plan.placed[planned.position] = Some(placed);
        if placed == Placed::IdReused {
            plan.reused.push(planned);
        }
    }
    for reused in std::mem::take(&mut plan.reused) {
        bury(connection, names, reused).await?;
    }
    Ok(plan)
}

/// False if a message or an ended id keeps it out.
async fn insert(
    connection: &mut SqliteConnection,
    names: &Names,
    planned: &PlannedRow,
    place: Option<i64>,
) -> Result<bool, Fault> {
    let row = &planned.row;
    let done = sqlx::query(&names.fill(INSERT))
        .bind(planned.queue)
        .bind(&row.id)
        .bind(row.shard.0)
        .bind(place)
        .bind(row.key.as_deref())
        .bind(row.key_hash)
        .bind(row.digest)
        .bind(row.due_at)
        .bind(row.message_type.as_deref())
        .bind(row.content_type.as_deref())
        .bind(row.headers.as_deref())
        .bind(row.correlation_id.as_deref())
        .bind(row.causation_id.as_deref())
        .bind(row.sent_at)
        .bind(row.body.as_slice())
        .execute(connection)
        .await?;
    Ok(done.rows_affected() == 1)
}

/// A message with the id of another one goes to the dead letters.
async fn bury(
    connection: &mut SqliteConnection,
    names: &Names,
    planned: PlannedRow,
) -> Result<(), Fault> {
    let row = planned.row;
    sqlx::query(&text(names, DEAD))
        .bind(planned.queue)
        .bind(row.id)
        .bind(row.shard.0)
        .bind(row.key)
        .bind(row.key_hash)
        .bind(row.digest)
        .bind(row.message_type)
        .bind(row.content_type)
        .bind(row.headers)
        .bind(row.correlation_id)
        .bind(row.causation_id)
        .bind(row.sent_at)
        .bind(row.body)
        .bind(ID_REUSED)
        .execute(connection)
        .await?;
    Ok(())
}
