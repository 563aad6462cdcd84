//! Connections to the file, the lock on it, and the checks.
//!
//! One connection writes, since SQLite lets only one; several read beside it, which write-ahead logging allows.

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{ConnectOptions as _, Connection as _, Executor as _, Sqlite, SqlitePool};

use super::SqliteConfig;
use super::fault::Fault;
use crate::store::{Durability, StoreError};

/// The lock that keeps other processes away: an exclusive transaction on a file of its own beside the database,
/// which stays open as long as the store. The operating system ends it with the process, however that ends.
///
/// It is not on the database file itself: that must stay open to the application's own connections.
pub(super) struct FileLock {
    held: SqliteConnection,
}

impl FileLock {
    pub(super) async fn take(file: &Path) -> Result<Self, Fault> {
        let mut path = PathBuf::from(file).into_os_string();
        path.push(".lock");
        let mut connection = SqliteConnectOptions::new()
            .filename(Path::new(&path))
            .create_if_missing(true)
            .busy_timeout(Duration::ZERO)
            .connect()
            .await?;
        let locked = connection.execute("BEGIN EXCLUSIVE").await;
        match locked.map_err(Fault::from) {
            Ok(_) => Ok(Self { held: connection }),
            Err(Fault(StoreError::Conflict { .. })) => Err(StoreError::refused(
                "the SQLite file is in use by another process, or by another store of this one: one process per \
                 file. Processes that share queues need PostgreSQL",
            )
            .into()),
            Err(fault) => Err(fault),
        }
    }

    /// Gives the file free. When it resolves, another one can have it: a connection that is only dropped is closed
    /// by its thread some time later.
    pub(super) async fn release(self) {
        // An error means that its thread has ended, and the lock with it.
        let _ = self.held.close().await;
    }
}

/// The pools of one store.
pub(super) struct Pools {
    /// The one connection that writes.
    pub(super) writer: SqlitePool,
    pub(super) readers: SqlitePool,
}

impl Pools {
    pub(super) async fn connect(config: &SqliteConfig) -> Result<Self, Fault> {
        let options = SqliteConnectOptions::new()
            .filename(&config.file)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(synchronous(config.durability))
            .busy_timeout(config.timeout);
        let pool = |most: u32, options: SqliteConnectOptions| {
            SqlitePoolOptions::new()
                .min_connections(0)
                .max_connections(most)
                .acquire_timeout(config.timeout)
                .connect_with(options)
        };
        // The writer first: it creates the file.
        let writer = pool(1, options.clone()).await?;
        let readers = pool(config.readers, options.read_only(true)).await?;
        Ok(Self { writer, readers })
    }

    /// For what needs no connection, and yet fails when the store is closed.
    pub(super) fn check_open(&self) -> Result<(), StoreError> {
        if self.writer.is_closed() {
            return Err(StoreError::from_client(&sqlx::Error::PoolClosed));
        }
        Ok(())
    }

    pub(super) async fn close(&self) {
        // Readers first: the last connection to close folds the log into the file, and must be able to write.
        self.readers.close().await;
        self.writer.close().await;
    }
}

/// A connection that returns to its pool only when all went well ([`done`](Self::done)). Dropped before, after an
/// error or because its operation was cancelled or took too long, it is closed, which rolls back.
pub(super) struct Guarded(Option<PoolConnection<Sqlite>>);

impl Guarded {
    pub(super) async fn from(pool: &SqlitePool) -> Result<Self, Fault> {
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
            drop(connection.detach());
        }
    }
}

impl Deref for Guarded {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        self.0.as_ref().expect("it is there until `done` or `drop`")
    }
}

impl DerefMut for Guarded {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        self.0.as_mut().expect("it is there until `done` or `drop`")
    }
}

fn synchronous(durability: Durability) -> SqliteSynchronous {
    match durability {
        Durability::Full => SqliteSynchronous::Full,
        Durability::AcceptLossAtPowerFailure => SqliteSynchronous::Normal,
    }
}

/// What commits of this connection survive from now on. Not within a transaction, where SQLite refuses it.
pub(super) async fn commits_survive(
    connection: &mut SqliteConnection,
    durability: Durability,
) -> Result<(), Fault> {
    let statement = match synchronous(durability) {
        SqliteSynchronous::Full => "PRAGMA synchronous = FULL",
        _ => "PRAGMA synchronous = NORMAL",
    };
    connection.execute(statement).await?;
    Ok(())
}

/// Checks that the file is what the options asked for: SQLite keeps another journal mode silently where the file
/// system cannot do write-ahead logging.
pub(super) async fn check(
    connection: &mut SqliteConnection,
    durability: Durability,
) -> Result<(), Fault> {
    let mode: String = sqlx::query_scalar("PRAGMA journal_mode")
        .fetch_one(&mut *connection)
        .await?;
    if mode != "wal" {
        return Err(StoreError::refused(format!(
            "the SQLite file is in journal mode `{mode}`, and write-ahead logging is needed: does its file system \
             support shared memory?"
        ))
        .into());
    }
    let synchronous: i64 = sqlx::query_scalar("PRAGMA synchronous")
        .fetch_one(connection)
        .await?;
    // FULL is 2.
    if durability == Durability::Full && synchronous < 2 {
        return Err(StoreError::refused(
            "SQLite does not wait for the disk (synchronous below FULL)",
        )
        .into());
    }
    Ok(())
}
