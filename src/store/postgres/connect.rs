//! Connections to PostgreSQL, and the checks of the database behind them.
//!
//! Four pools, so that nobody waits for a connection behind somebody less urgent: a heartbeat never behind a take
//! (which waits for settlings that have begun), neither behind a claim, and a claim never behind a handler.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPoolOptions};
use sqlx::{Connection as _, PgPool, Postgres, Row as _};

use super::PostgresConfig;
use super::fault::Fault;
use crate::store::{Durability, StoreError};

/// `WITH … AS MATERIALIZED` and identity columns need 12; older versions get no fixes any more either way.
const OLDEST: i32 = 120_000;

/// A connection that was not used for so long is asked whether it still lives before it is. At work that would be a round
/// trip for each statement, and one that has died since fails like one that dies now.
const ASK_AFTER: Duration = Duration::from_secs(1);

/// The pools of one store.
#[derive(Debug, Clone)]
pub(super) struct Pools {
    /// Renewing, announcing, looking at announcements: short, and waiting for nobody's transaction.
    pub(super) heartbeats: PgPool,
    /// Taking, joining, releasing.
    pub(super) leases: PgPool,
    /// Reading, claiming, starting, settling, holds, owners, upkeep.
    pub(super) claims: PgPool,
    /// Enqueuing in transactions of the store's own, and transactions for handlers.
    pub(super) work: PgPool,
}

impl Pools {
    pub(super) async fn connect(config: &PostgresConfig) -> Result<Self, Fault> {
        let options = options(config)?;
        let bounded = bounded_by(options.clone(), config.timeout);
        let pool = |most| {
            PgPoolOptions::new()
                .min_connections(0)
                .max_connections(most)
                .acquire_timeout(config.timeout)
                .test_before_acquire(false)
                .before_acquire(|connection, about| {
                    Box::pin(async move {
                        if about.idle_for >= ASK_AFTER {
                            connection.ping().await?;
                        }
                        Ok(true)
                    })
                })
                .connect_with(bounded.clone())
        };
        Ok(Self {
            heartbeats: pool(1).await?,
            leases: pool(1).await?,
            claims: pool(3).await?,
            // Handlers decide themselves how long their statements take.
            work: given_up(config)
                .max_connections(config.work_connections)
                .connect_with(options)
                .await?,
        })
    }

    pub(super) async fn close(&self) {
        futures::join!(
            self.work.close(),
            self.claims.close(),
            self.leases.close(),
            self.heartbeats.close()
        );
    }
}

/// A pool that does not wait for ever for connections that come back to it.
///
/// A transaction that is dropped leaves its rollback to the pool, which sends it and waits for the answer. Where a network
/// device has forgotten the connection there is none: the connection would count as in use until the operating system
/// gives it up, after a quarter of an hour, and a few of them are all there are. (The other pools need no such bound:
/// [`Guarded`] gives nothing back that has not answered.)
fn given_up(config: &PostgresConfig) -> PgPoolOptions {
    let timeout = config.timeout;
    PgPoolOptions::new()
        .min_connections(0)
        .acquire_timeout(timeout)
        .after_release(move |connection, _| {
            Box::pin(async move {
                match tokio::time::timeout(timeout, connection.ping()).await {
                    Ok(answer) => answer.map(|()| true),
                    Err(_) => {
                        let silent = std::io::ErrorKind::TimedOut;
                        // An error closes it without another word to the server, which would wait again.
                        Err(std::io::Error::from(silent).into())
                    }
                }
            })
        })
}

pub(super) fn options(config: &PostgresConfig) -> Result<PgConnectOptions, StoreError> {
    let options: PgConnectOptions = config
        .url
        .parse()
        .map_err(|_| StoreError::refused("the address of the database cannot be understood"))?;
    // What is stored sees copies that are being settled only if each statement has a snapshot of its own, whatever the
    // database's default is. (The space is escaped, as in the variable PGOPTIONS.)
    let isolation = [("default_transaction_isolation", r"read\ committed")];
    Ok(options.application_name("laneway").options(isolation))
}

/// The server gives up as we do, so that what we gave up does not go on there and keep its locks.
fn bounded_by(options: PgConnectOptions, timeout: Duration) -> PgConnectOptions {
    let millis = timeout.as_millis().max(1).to_string();
    options.options([
        ("statement_timeout", millis.as_str()),
        ("lock_timeout", millis.as_str()),
        ("idle_in_transaction_session_timeout", millis.as_str()),
    ])
}

/// A connection that returns to its pool only when all went well ([`done`](Self::done)). Dropped before, after
/// an error or because its operation was cancelled or took too long, it is closed: what is under way on it is
/// unknown, and the next operation should not wait for that.
pub(super) struct Guarded(Option<PoolConnection<Postgres>>);

impl Guarded {
    pub(super) async fn from(pool: &PgPool) -> Result<Self, Fault> {
        Ok(Self(Some(pool.acquire().await?)))
    }

    pub(super) fn done(mut self) {
        // Dropping a pool's connection returns it.
        drop(self.0.take());
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            // A detached connection closes its socket when it is dropped.
            drop(connection.detach());
        }
    }
}

impl Deref for Guarded {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.0.as_ref().expect("it is there until `done` or `drop`")
    }
}

impl DerefMut for Guarded {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.0.as_mut().expect("it is there until `done` or `drop`")
    }
}

/// Checks that the server can do what the store needs, and that a commit means what was asked for.
pub(super) async fn check(
    connection: &mut PgConnection,
    durability: Durability,
) -> Result<(), Fault> {
    let row = sqlx::query(
        "SELECT current_setting('server_version_num')::int4, current_setting('synchronous_commit'), \
         current_setting('fsync'), pg_is_in_recovery()",
    )
    .fetch_one(connection)
    .await?;
    let (version, commit, fsync, standby): (i32, String, String, bool) = (
        row.try_get(0)?,
        row.try_get(1)?,
        row.try_get(2)?,
        row.try_get(3)?,
    );
    if version < OLDEST {
        return Err(StoreError::refused(format!(
            "the PostgreSQL server is of version {}, and 12 or later is needed",
            version / 10_000
        ))
        .into());
    }
    if standby {
        return Err(
            StoreError::unavailable("the server is a standby and cannot be written").into(),
        );
    }
    if durability == Durability::Full && (commit == "off" || fsync == "off") {
        return Err(StoreError::refused(format!(
            "a commit does not wait for the disk (synchronous_commit = {commit}, fsync = {fsync}): change that \
             for this role or database, or state `Durability::AcceptLossAtPowerFailure`"
        ))
        .into());
    }
    Ok(())
}
