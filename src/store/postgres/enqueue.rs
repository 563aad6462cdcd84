//! Storing messages: locks, then places, then copies.
//!
//! **Why locks.** A sequence's numbers are drawn in one order and committed in another. Two transactions of one
//! key, one with number 1 that commits late and one with number 2 that commits early: a reader sees 2, hands it
//! over, and 1 appears after it. With the key's lock held from before the draw until the commit is visible, the
//! second transaction draws after the first has committed. PostgreSQL makes a commit visible before it gives the
//! transaction's advisory locks back, so whoever gets the lock draws a higher number *and* everybody who sees
//! its row sees the earlier ones.
//!
//! **Why advisory locks and not rows.** A locked row is written to: its page and its log record cost as much as
//! the message. An advisory lock lives in shared memory and leaves nothing behind. Their table is of fixed size,
//! which is why a call with many keys locks its queue as a whole (see `locks`).
//!
//! **Why insert before looking at the ended ids.** Message `a` is being settled by S while E stores a copy. If E
//! looked first it would see no ended id, then wait in its insert until S commits (the unique index makes it
//! wait), and then insert: handled twice. E inserts first; if it had to wait for S, or came after it, the next
//! statement has a newer snapshot, sees the ended id, and takes the copy out again. If S has not begun, the
//! insert finds the message itself.
//!
//! **One round trip, if all is new.** A batch in a transaction of the store's own goes to a function in the database
//! that takes these steps one after the other and commits. Whatever it meets that is not new takes everything back,
//! and the batch is stored step by step: what a copy becomes is decided here.

use std::collections::HashMap;
use std::time::Duration;

use sqlx::postgres::{PgArguments, PgRow};
use sqlx::{PgConnection, Postgres, Row as _};

use super::fault::Fault;
use crate::store::locks::{self, Lock, SLOTS};
use crate::store::names::Names;
use crate::store::plan::{Plan, PlannedRow};
use crate::store::settle::ID_REUSED;
use crate::store::{Placed, Sequence, StoreError};

/// The `shared` locks of queues, then those of keys, in the order of the arrays: a call on a function scan
/// evaluates its list row by row, in order.
const LOCK: &str = "SELECT CASE WHEN shared THEN pg_advisory_xact_lock_shared($1, slot)::text \
     ELSE pg_advisory_xact_lock($1, slot)::text END \
     FROM unnest($2::int4[], $3::bool[]) AS l(slot, shared)";

/// The places are drawn outside the sorted inner query, hence in the order of the batch.
const INSERT: &str = "INSERT INTO {t}messages (queue, id, shard, sequence, key, key_hash, digest, due_at, \
     message_type, content_type, headers, correlation_id, causation_id, sent_at, body) \
     SELECT queue, id, shard, CASE WHEN due IS NULL THEN nextval('{t}sequence') END, key, key_hash, digest, \
     to_timestamp(due / 1000.0), message_type, content_type, headers, correlation_id, causation_id, sent_at, body \
     FROM (SELECT * FROM unnest($1::int4[], $2::text[], $3::int4[], $4::bytea[], $5::int8[], $6::int8[], \
     $7::int8[], $8::text[], $9::text[], $10::text[], $11::text[], $12::text[], $13::int8[], $14::bytea[]) \
     WITH ORDINALITY AS n(queue, id, shard, key, key_hash, digest, due, message_type, content_type, headers, \
     correlation_id, causation_id, sent_at, body, position) ORDER BY position) AS batch \
     ON CONFLICT (queue, id) DO NOTHING RETURNING queue, id, sequence";

/// Ended ids among the batch, and the messages that kept rows of the batch out.
const KNOWN: &str = "SELECT queue, id, digest, 1 AS priority FROM {t}ended \
     WHERE (queue, id) IN (SELECT * FROM unnest($1::int4[], $2::text[])) \
     UNION ALL SELECT queue, id, digest, 2 FROM {t}messages \
     WHERE (queue, id) IN (SELECT * FROM unnest($3::int4[], $4::text[])) ORDER BY priority";

const TAKE_OUT: &str = "DELETE FROM {t}messages \
     WHERE (queue, id) IN (SELECT * FROM unnest($1::int4[], $2::text[]))";

const DEAD: &str = "INSERT INTO {t}dead_letters (queue, id, shard, key, key_hash, digest, attempts, message_type, \
     content_type, headers, correlation_id, causation_id, sent_at, past, body, reason, detail, dead_at) \
     VALUES ($1, $2, $3, $4, $5, $6, 0, $7, $8, $9, $10, $11, $12, '', $13, $14, '', now())";

/// Refuses a transaction whose snapshot is older than its statements: it would not see that a copy has ended.
pub(super) async fn check_isolation(connection: &mut PgConnection) -> Result<(), Fault> {
    let level: String = sqlx::query_scalar("SELECT current_setting('transaction_isolation')")
        .fetch_one(connection)
        .await?;
    if level == "read committed" {
        return Ok(());
    }
    Err(StoreError::refused(format!(
        "messages cannot be enqueued in a transaction that is {level}: use READ COMMITTED"
    ))
    .into())
}

/// The number of a lock, of any queue.
fn slot(lock: &Lock) -> i32 {
    let first_of_queue = lock.queue.wrapping_mul(SLOTS as i32 + 1);
    first_of_queue.wrapping_add(lock.slot as i32)
}

/// Takes the locks, in their order, until the end of the transaction.
pub(super) async fn lock(
    connection: &mut PgConnection,
    lock_space: i32,
    locks: &[Lock],
) -> Result<(), Fault> {
    if locks.is_empty() {
        return Ok(());
    }
    let slots: Vec<i32> = locks.iter().map(slot).collect();
    let shared: Vec<bool> = locks.iter().map(|lock| lock.shared).collect();
    sqlx::query(LOCK)
        .bind(lock_space)
        .bind(slots)
        .bind(shared)
        .execute(connection)
        .await?;
    Ok(())
}

/// Begins a transaction that has the locks of a plan, in their order. All of it is one round trip, which it can be
/// where nothing but numbers is to be said; each statement takes its snapshot when it is its turn.
pub(super) fn begin_locked(lock_space: i32, plan: &Plan) -> String {
    let mut text = "BEGIN".to_owned();
    for lock in &locks::of_plan(plan) {
        let shared = if lock.shared { "_shared" } else { "" };
        let slot = slot(lock);
        text.push_str(&format!(
            "; SELECT pg_advisory_xact_lock{shared}('{lock_space}', '{slot}')"
        ));
    }
    text
}

/// Stores what was planned, in the transaction of the connection, which has the plan's locks.
pub(super) async fn enqueue(
    connection: &mut PgConnection,
    names: &Names,
    mut plan: Plan,
) -> Result<Plan, Fault> {
    let rows = std::mem::take(&mut plan.rows);
    let mut inserted = insert(connection, names, &rows).await?;

    let id = |planned: &PlannedRow| (planned.queue, planned.row.id.clone());
    let all: Vec<_> = rows.iter().map(id).collect();
    let kept_out: Vec<_> = all
        .iter()
        .filter(|id| !inserted.contains_key(*id))
        .cloned()
        .collect();
    let known = known(connection, names, all, kept_out).await?;

    let mut copies = Vec::new();
    for planned in rows {
        let id = id(&planned);
        let placed = match (inserted.remove(&id), known.get(&id)) {
            (Some(Some(sequence)), None) => Placed::At(Sequence(sequence)),
            (Some(None), None) => Placed::Scheduled,
            (found, Some(digest)) => {
                if found.is_some() {
                    copies.push(id);
                }
                if *digest == planned.row.digest {
                    Placed::Duplicate
                } else {
                    Placed::IdReused
                }
            }
            // What kept it out was settled between the two statements and its id forgotten at once, which
            // takes a window of nothing.
            (None, None) => {
                return Err(StoreError::conflict("a copy was removed at the same time").into());
            }
        };
        plan.placed[planned.position] = Some(placed);
        if placed == Placed::IdReused {
            plan.reused.push(planned);
        }
    }
    if !copies.is_empty() {
        let (queues, ids): (Vec<i32>, Vec<String>) = copies.into_iter().unzip();
        sqlx::query(&names.fill(TAKE_OUT))
            .bind(queues)
            .bind(ids)
            .execute(&mut *connection)
            .await?;
    }
    for reused in std::mem::take(&mut plan.reused) {
        bury(connection, names, reused).await?;
    }
    Ok(plan)
}

/// What the function of the database answers to a batch that is not all new.
const NOT_NEW: &str = "LW001";

/// Stores what was planned, in a transaction of its own and in one round trip; gives the plan back if not all of it is
/// new. Nothing of it is stored then, nor if a lock is not there within `patience`.
pub(super) async fn enqueue_new(
    connection: &mut PgConnection,
    names: &Names,
    lock_space: i32,
    patience: Duration,
    mut plan: Plan,
) -> Result<Result<Plan, Plan>, Fault> {
    if !plan.reused.is_empty() {
        return Ok(Err(plan));
    }
    let locks = locks::of_plan(&plan);
    let query = names.fill(
        "SELECT * FROM {t}enqueue_new($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)",
    );
    let query = sqlx::query(&query)
        .bind(i32::try_from(patience.as_millis().max(1)).unwrap_or(i32::MAX))
        .bind(lock_space)
        .bind(locks.iter().map(slot).collect::<Vec<_>>())
        .bind(locks.iter().map(|lock| lock.shared).collect::<Vec<_>>());
    let inserted = match bind_rows(query, &plan.rows).fetch_all(connection).await {
        Ok(rows) => places(rows)?,
        Err(error) => {
            let code = error.as_database_error().and_then(|answer| answer.code());
            return match code.as_deref() {
                Some(NOT_NEW) => Ok(Err(plan)),
                _ => Err(error.into()),
            };
        }
    };
    for planned in std::mem::take(&mut plan.rows) {
        let placed = match inserted.get(&(planned.queue, planned.row.id)) {
            Some(Some(sequence)) => Placed::At(Sequence(*sequence)),
            _ => Placed::Scheduled,
        };
        plan.placed[planned.position] = Some(placed);
    }
    Ok(Ok(plan))
}

type Id = (i32, String);

/// Inserts the rows that no message keeps out; returns those, with their places.
async fn insert(
    connection: &mut PgConnection,
    names: &Names,
    rows: &[PlannedRow],
) -> Result<HashMap<Id, Option<i64>>, Fault> {
    let statement = names.fill(INSERT);
    let query = bind_rows(sqlx::query(&statement), rows);
    places(query.fetch_all(connection).await?)
}

type Query<'q> = sqlx::query::Query<'q, Postgres, PgArguments>;

/// A column of the rows after the other.
fn bind_rows<'q>(query: Query<'q>, rows: &'q [PlannedRow]) -> Query<'q> {
    fn column<'a, T>(rows: &'a [PlannedRow], of: impl Fn(&'a PlannedRow) -> T) -> Vec<T> {
        rows.iter().map(of).collect()
    }
    query
        .bind(column(rows, |r| r.queue))
        .bind(column(rows, |r| r.row.id.as_str()))
        .bind(column(rows, |r| r.row.shard.0 as i32))
        .bind(column(rows, |r| r.row.key.as_deref()))
        .bind(column(rows, |r| r.row.key_hash))
        .bind(column(rows, |r| r.row.digest))
        .bind(column(rows, |r| r.row.due_at))
        .bind(column(rows, |r| r.row.message_type.as_deref()))
        .bind(column(rows, |r| r.row.content_type.as_deref()))
        .bind(column(rows, |r| r.row.headers.as_deref()))
        .bind(column(rows, |r| r.row.correlation_id.as_deref()))
        .bind(column(rows, |r| r.row.causation_id.as_deref()))
        .bind(column(rows, |r| r.row.sent_at))
        .bind(column(rows, |r| r.row.body.as_slice()))
}

/// The places of what was inserted.
fn places(inserted: Vec<PgRow>) -> Result<HashMap<Id, Option<i64>>, Fault> {
    let mut places = HashMap::with_capacity(inserted.len());
    for row in inserted {
        places.insert((row.try_get(0)?, row.try_get(1)?), row.try_get(2)?);
    }
    Ok(places)
}

/// The digests of messages and ended ids that the batch has met. A message that is there counts before an ended
/// one of the same id: it is a dead letter that was sent back.
async fn known(
    connection: &mut PgConnection,
    names: &Names,
    all: Vec<Id>,
    kept_out: Vec<Id>,
) -> Result<HashMap<Id, i64>, Fault> {
    let (queues, ids): (Vec<i32>, Vec<String>) = all.into_iter().unzip();
    let (out_queues, out_ids): (Vec<i32>, Vec<String>) = kept_out.into_iter().unzip();
    let rows = sqlx::query(&names.fill(KNOWN))
        .bind(queues)
        .bind(ids)
        .bind(out_queues)
        .bind(out_ids)
        .fetch_all(connection)
        .await?;
    let mut known = HashMap::with_capacity(rows.len());
    for row in rows {
        known.insert((row.try_get(0)?, row.try_get(1)?), row.try_get(2)?);
    }
    Ok(known)
}

/// A message with the id of another one goes to the dead letters.
async fn bury(
    connection: &mut PgConnection,
    names: &Names,
    planned: PlannedRow,
) -> Result<(), Fault> {
    let row = planned.row;
    sqlx::query(&names.fill(DEAD))
        .bind(planned.queue)
        .bind(row.id)
        .bind(row.shard.0 as i32)
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
