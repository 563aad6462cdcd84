//! What the members of a queue's group announce, and who owns what.

use std::time::Duration;

use laneway_actors::port::Announcement;
use sqlx::{PgConnection, Row as _};

use super::fault::Fault;
use super::lease::millis;
use crate::store::columns::read_member;
use crate::store::names::Names;
use crate::store::{Ownership, Shard, StoreError};

/// An announcement that comes late does not replace a newer one; one that is repeated lasts longer.
const ANNOUNCE: &str = "INSERT INTO {t}members AS m \
     (queue, member, sequence, shard_count, shards, willing, expires) \
     VALUES ($1, $2, $3::numeric, $4, $5, $6, clock_timestamp() + $7 * interval '1 millisecond') \
     ON CONFLICT (queue, member) DO UPDATE SET sequence = excluded.sequence, \
     shard_count = excluded.shard_count, shards = excluded.shards, willing = excluded.willing, \
     expires = excluded.expires WHERE m.sequence <= excluded.sequence";

/// What has expired long ago goes with a look, a few rows at a time, and whoever deletes others waits for nobody.
/// The minute is for announcements that come late, and must find the newer one.
const CURRENT: &str = "WITH gone AS (DELETE FROM {t}members WHERE ctid = ANY(ARRAY(SELECT ctid FROM {t}members \
     WHERE queue = $1 AND expires < clock_timestamp() - interval '1 minute' LIMIT 8 FOR UPDATE SKIP LOCKED))) \
     SELECT member, sequence::text, shard_count, shards, willing FROM {t}members \
     WHERE queue = $1 AND expires > clock_timestamp()";

const OWNERS: &str = "SELECT shard, owner, expires > clock_timestamp() FROM {t}leases \
     WHERE queue = $1 ORDER BY shard";

pub(super) async fn announce(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
    announcement: &Announcement,
    ttl: Duration,
) -> Result<(), Fault> {
    let shards = announcement.shards.iter();
    sqlx::query(&names.fill(ANNOUNCE))
        .bind(queue)
        .bind(announcement.member.to_string())
        .bind(announcement.sequence.to_string())
        .bind(announcement.of as i64)
        .bind(shards.map(|shard| *shard as i64).collect::<Vec<_>>())
        .bind(announcement.willing)
        .bind(millis(ttl))
        .execute(connection)
        .await?;
    Ok(())
}

pub(super) async fn announcements(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
) -> Result<Vec<Announcement>, Fault> {
    let rows = sqlx::query(&names.fill(CURRENT))
        .bind(queue)
        .fetch_all(connection)
        .await?;
    let mut current = Vec::with_capacity(rows.len());
    for row in rows {
        let (member, sequence): (String, String) = (row.try_get(0)?, row.try_get(1)?);
        let (of, shards): (i64, Vec<i64>) = (row.try_get(2)?, row.try_get(3)?);
        current.push(Announcement {
            member: read_member(&member)?,
            sequence: sequence
                .parse()
                .map_err(|_| StoreError::refused("the sequence of a member cannot be read"))?,
            of: of as usize,
            shards: shards.into_iter().map(|shard| shard as usize).collect(),
            willing: row.try_get(4)?,
        });
    }
    Ok(current)
}

pub(super) async fn owners(
    connection: &mut PgConnection,
    names: &Names,
    queue: i32,
) -> Result<Vec<Ownership>, Fault> {
    let rows = sqlx::query(&names.fill(OWNERS))
        .bind(queue)
        .fetch_all(connection)
        .await?;
    let mut owners = Vec::with_capacity(rows.len());
    for row in rows {
        let owner: Option<String> = row.try_get(1)?;
        owners.push(Ownership {
            shard: Shard(row.try_get::<i32, _>(0)? as u32),
            owner: owner.as_deref().map(read_member).transpose()?,
            fresh: row.try_get(2)?,
        });
    }
    Ok(owners)
}
