//! The databases that W7 measures in: one for each run, created empty and dropped after it.

use std::path::Path;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgConnectOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{ConnectOptions as _, Connection as _, Executor as _, PgConnection};
use tempfile::TempDir;

use crate::Error;

/// Which database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub(crate) enum Database {
    Sqlite,
    Postgres,
}

impl Database {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
        }
    }

    /// Its version, and what a commit waits for.
    pub(crate) async fn description(self, url: &str) -> Result<String, Error> {
        match self {
            Self::Sqlite => {
                let mut connection = SqliteConnectOptions::new()
                    .in_memory(true)
                    .connect()
                    .await?;
                let version: String = sqlx::query_scalar("SELECT sqlite_version()")
                    .fetch_one(&mut connection)
                    .await?;
                Ok(format!(
                    "SQLite {version}, write-ahead log, synchronous = FULL"
                ))
            }
            Self::Postgres => {
                let mut server = PgConnection::connect(url).await?;
                let description = sqlx::query_scalar(
                    "SELECT format('PostgreSQL %s, synchronous_commit = %s, fsync = %s', \
                     split_part(current_setting('server_version'), ' ', 1), \
                     current_setting('synchronous_commit'), current_setting('fsync'))",
                )
                .fetch_one(&mut server)
                .await?;
                server.close().await?;
                Ok(description)
            }
        }
    }
}

/// The database of one run.
pub(crate) enum Home {
    /// A file in a folder of its own, which goes with this.
    Sqlite(TempDir),
    /// A database on the server that `url` leads to.
    Postgres {
        url: Box<PgConnectOptions>,
        name: String,
    },
}

impl Home {
    /// Creates it, empty. The files of SQLite are in `folder`: in a folder for temporary files a commit may
    /// wait for no disk.
    pub(crate) async fn create(
        database: Database,
        url: &str,
        folder: &Path,
        name: &str,
    ) -> Result<Self, Error> {
        match database {
            Database::Sqlite => Ok(Self::Sqlite(tempfile::tempdir_in(folder)?)),
            Database::Postgres => {
                let url: Box<PgConnectOptions> = Box::new(url.parse()?);
                let name = name.replace('-', "_").to_lowercase();
                let mut server = url.connect().await?;
                server
                    .execute(format!("CREATE DATABASE {name}").as_str())
                    .await?;
                server.close().await?;
                Ok(Self::Postgres { url, name })
            }
        }
    }

    /// Where it is: the path of the file, or an address.
    pub(crate) fn address(&self) -> String {
        match self {
            Self::Sqlite(folder) => folder.path().join("queue.db").display().to_string(),
            Self::Postgres { url, name } => url
                .clone()
                .database(name)
                .to_url_lossy()
                .as_str()
                .to_owned(),
        }
    }

    /// Removes it, whoever may still be connected to it.
    pub(crate) async fn remove(self) -> Result<(), Error> {
        match self {
            Self::Sqlite(folder) => Ok(folder.close()?),
            Self::Postgres { url, name } => {
                let mut server = url.connect().await?;
                server
                    .execute(format!("DROP DATABASE {name} WITH (FORCE)").as_str())
                    .await?;
                Ok(server.close().await?)
            }
        }
    }
}

/// How a file of SQLite is opened by everybody: as Laneway's store opens it.
pub(crate) fn sqlite_options(file: &str) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
}

/// Lets the planner know what is in the tables, as autovacuum would after a while.
pub(crate) async fn analyze(database: Database, address: &str) -> Result<(), Error> {
    match database {
        Database::Sqlite => {
            let mut file = sqlite_options(address).connect().await?;
            file.execute("ANALYZE").await?;
            file.close().await?;
        }
        Database::Postgres => {
            let mut server = PgConnection::connect(address).await?;
            server.execute("ANALYZE").await?;
            server.close().await?;
        }
    }
    Ok(())
}
