//! Where the database is.

use std::error::Error;
use std::path::PathBuf;

use laneway::BusBuilder;
use laneway::store::postgres::{PostgresConfig, PostgresStore};
use laneway::store::sqlite::{SqliteConfig, SqliteStore};
use laneway::store::{Store, StoreError};
use serde::{Deserialize, Serialize};
use sqlx::{Connection as _, PgConnection};
use tempfile::TempDir;

/// Connections for handlers' transactions: few, so that several nodes fit into a server's default of 100.
const HANDLERS: std::num::NonZeroU32 = std::num::NonZeroU32::new(6).unwrap();

/// Where the database is, which holds the application's tables and Laneway's.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) enum Place {
    Sqlite { file: PathBuf },
    Postgres { url: String, schema: String },
}

impl Place {
    fn sqlite(file: &PathBuf) -> SqliteConfig {
        SqliteConfig::file(file)
    }

    fn postgres(url: &str, schema: &str) -> PostgresConfig {
        PostgresConfig::at(url)
            .schema(schema)
            .work_connections(HANDLERS)
    }

    /// Gives the bus its store.
    pub(crate) fn under(&self, bus: BusBuilder) -> BusBuilder {
        match self {
            Self::Sqlite { file } => bus.store(Self::sqlite(file)),
            Self::Postgres { url, schema } => bus.store(Self::postgres(url, schema)),
        }
    }

    /// The store alone, to be looked at. Not while a bus uses the same SQLite file.
    pub(crate) async fn store(&self) -> Result<Box<dyn Store>, StoreError> {
        Ok(match self {
            Self::Sqlite { file } => Box::new(SqliteStore::start(Self::sqlite(file)).await?),
            Self::Postgres { url, schema } => {
                Box::new(PostgresStore::start(Self::postgres(url, schema)).await?)
            }
        })
    }
}

/// Without the address, which may hold a password.
impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Sqlite { file } => write!(f, "the SQLite file {}", file.display()),
            Self::Postgres { schema, .. } => write!(f, "the PostgreSQL schema {schema}"),
        }
    }
}

/// A database of one run's own.
pub(crate) enum Temporary {
    Sqlite(TempDir),
    Postgres { url: String, schema: String },
}

impl Temporary {
    pub(crate) fn new(postgres: Option<&str>) -> std::io::Result<Self> {
        Ok(match postgres {
            None => Self::Sqlite(tempfile::tempdir()?),
            Some(url) => Self::Postgres {
                url: url.to_owned(),
                schema: format!("modular_monolith_{:08x}", fastrand::u32(..)),
            },
        })
    }

    pub(crate) fn place(&self) -> Place {
        match self {
            Self::Sqlite(folder) => Place::Sqlite {
                file: folder.path().join("modular_monolith.db"),
            },
            Self::Postgres { url, schema } => Place::Postgres {
                url: url.clone(),
                schema: schema.clone(),
            },
        }
    }

    pub(crate) async fn remove(self) -> Result<(), Box<dyn Error>> {
        match self {
            Self::Sqlite(folder) => folder.close()?,
            Self::Postgres { url, schema } => {
                let mut connection = PgConnection::connect(&url).await?;
                let drop = format!("DROP SCHEMA IF EXISTS {schema} CASCADE");
                sqlx::raw_sql(&drop).execute(&mut connection).await?;
            }
        }
        Ok(())
    }
}
