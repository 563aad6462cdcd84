//! Where the store is, and its settings.

use std::path::PathBuf;
use std::time::Duration;

use super::schema;
use crate::store::names::Names;
use crate::store::{Durability, Provision, StoreError};

/// Where the store is and how it is used.
#[derive(Debug, Clone)]
pub struct SqliteConfig {
    pub(super) file: PathBuf,
    pub(super) prefix: String,
    pub(super) provision: Provision,
    pub(super) durability: Durability,
    pub(super) timeout: Duration,
    pub(super) readers: u32,
}

impl SqliteConfig {
    /// The database in this file, created where it is missing. Beside it lies a file for the lock, with `.lock`
    /// after the same name, and SQLite's own.
    pub fn file(file: impl Into<PathBuf>) -> Self {
        Self {
            file: file.into(),
            prefix: "laneway_".into(),
            provision: Provision::default(),
            durability: Durability::default(),
            timeout: Duration::from_secs(5),
            readers: 2,
        }
    }

    /// What the names of the tables begin with. Defaults to `laneway_`.
    pub fn table_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Whether the tables are migrated or only checked. Defaults to [`Provision::Apply`].
    pub fn provision(mut self, provision: Provision) -> Self {
        self.provision = provision;
        self
    }

    /// What a commit must survive: `synchronous` is `FULL`, or `NORMAL`. Defaults to [`Durability::Full`].
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// Bounds every operation, waiting for the writer included. Defaults to 5 seconds.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Connections that read beside the writer. Defaults to 2.
    pub fn readers(mut self, readers: std::num::NonZeroU32) -> Self {
        self.readers = readers.get();
        self
    }

    /// The text of all migrations, to be applied by hand.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if the prefix is not a plain identifier.
    pub fn migrations(&self) -> Result<String, StoreError> {
        Ok(schema::text(&self.names()?))
    }

    pub(super) fn names(&self) -> Result<Names, StoreError> {
        Names::new(None, &self.prefix)
    }
}
