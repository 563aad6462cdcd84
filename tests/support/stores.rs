//! Stores for tests of durable queues: a file, or a schema of its own in a PostgreSQL.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::path::PathBuf;

use laneway::BusBuilder;
use laneway::store::postgres::PostgresConfig;
use laneway::store::sqlite::SqliteConfig;
use sqlx::{Connection as _, Executor as _, PgConnection};

/// The server that tests share.
pub fn postgres_url() -> String {
    std::env::var("LANEWAY_POSTGRES_URL")
        .unwrap_or_else(|_| "postgres://postgres@127.0.0.1:5432/test".to_owned())
}

/// One database, which outlives every bus on it, and is gone with this.
pub enum Database {
    Sqlite(tempfile::TempDir),
    Postgres { url: String, schema: String },
}

impl Database {
    pub fn sqlite() -> Self {
        Self::Sqlite(tempfile::tempdir().expect("a folder"))
    }

    pub fn postgres() -> Self {
        Self::postgres_at(postgres_url())
    }

    /// A schema of its own, reached by this URL (through a proxy, say).
    pub fn postgres_at(url: String) -> Self {
        let schema = format!("laneway_{:016x}", fastrand::u64(..));
        Self::Postgres { url, schema }
    }

    /// Gives the bus this store.
    pub fn under(&self, builder: BusBuilder) -> BusBuilder {
        match self {
            Self::Sqlite(_) => builder.store(SqliteConfig::file(self.file())),
            Self::Postgres { url, schema } => builder.store(PostgresConfig::at(url).schema(schema)),
        }
    }

    /// The file of a SQLite.
    pub fn file(&self) -> PathBuf {
        match self {
            Self::Sqlite(folder) => folder.path().join("laneway.db"),
            Self::Postgres { .. } => panic!("a PostgreSQL has no file here"),
        }
    }

    /// The name of the test's own table, which needs a schema where several tests share a server.
    pub fn table(&self, name: &str) -> String {
        match self {
            Self::Sqlite(_) => name.to_owned(),
            Self::Postgres { schema, .. } => format!("{schema}.{name}"),
        }
    }

    /// Removes a schema; a folder goes by itself. To be called with every bus stopped.
    pub async fn clean_up(self) {
        if let Self::Postgres { schema, .. } = &self {
            let mut connection = PgConnection::connect(&postgres_url())
                .await
                .expect("a PostgreSQL server; see LANEWAY_POSTGRES_URL");
            let drop = format!("DROP SCHEMA IF EXISTS {schema} CASCADE");
            connection.execute(&*drop).await.expect("dropped");
        }
    }
}
