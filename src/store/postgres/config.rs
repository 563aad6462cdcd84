//! Where the store is, and its settings.

use std::fmt;
use std::time::Duration;

use super::schema;
use crate::store::names::Names;
use crate::store::{Durability, Provision, StoreError};

/// Where the store is and how it is used.
#[derive(Clone)]
pub struct PostgresConfig {
    pub(super) url: String,
    pub(super) schema: String,
    pub(super) prefix: String,
    pub(super) provision: Provision,
    pub(super) durability: Durability,
    pub(super) timeout: Duration,
    pub(super) work_connections: u32,
}

/// Without the address, which may hold a password.
impl fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresConfig")
            .field("schema", &self.schema)
            .field("prefix", &self.prefix)
            .field("provision", &self.provision)
            .field("durability", &self.durability)
            .field("timeout", &self.timeout)
            .field("work_connections", &self.work_connections)
            .finish_non_exhaustive()
    }
}

impl PostgresConfig {
    /// The database at `postgres://user:password@host:port/database`.
    pub fn at(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            schema: "laneway".into(),
            prefix: String::new(),
            provision: Provision::default(),
            durability: Durability::default(),
            timeout: Duration::from_secs(5),
            work_connections: 4,
        }
    }

    /// The schema that holds the tables; created where it is missing. Defaults to `laneway`.
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = schema.into();
        self
    }

    /// What the names of the tables begin with. Defaults to nothing.
    pub fn table_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Whether the tables are migrated or only checked. Defaults to [`Provision::Apply`].
    pub fn provision(mut self, provision: Provision) -> Self {
        self.provision = provision;
        self
    }

    /// What a commit must survive. Defaults to [`Durability::Full`].
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// Bounds every operation, waiting for a connection and for locks included, but not the application's own
    /// statements in a transaction. Must be well below the time a lease lasts. Defaults to 5 seconds.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Most connections for enqueuing and for the transactions of handlers, of which each running one needs
    /// its own. Leases, claims and heartbeats have six others. Defaults to 4.
    pub fn work_connections(mut self, connections: std::num::NonZeroU32) -> Self {
        self.work_connections = connections.get();
        self
    }

    /// The text of all migrations, to be applied by hand where the application's role may not.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if the schema or the prefix is not a plain identifier.
    pub fn migrations(&self) -> Result<String, StoreError> {
        Ok(schema::text(&self.names()?))
    }

    pub(super) fn names(&self) -> Result<Names, StoreError> {
        Names::new(Some(&self.schema), &self.prefix)
    }
}
