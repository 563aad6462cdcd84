//! What a store answers when it cannot do what it was asked, sorted by what the caller can do about it.
//!
//! Promises that no credentials, key values, ids or bodies are in an error, not even in its `Debug` form:
//! a database's own error can quote the values of a row, so it is not kept. What is kept is its code and,
//! where the code says that the text speaks of objects and not of values, its text.

use std::time::Duration;

/// Why a store did not do what it was asked.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The database cannot be reached, went away, or did not answer in time: worth another try. **Whether
    /// the operation took place is unknown** if the connection was lost at its end; each operation says what
    /// repeating it does.
    #[error("the database is not available: {what}")]
    Unavailable {
        /// What happened.
        what: String,
    },
    /// The database or the store refuses, and will until somebody changes something.
    #[error("{what}")]
    Refused {
        /// What was refused, and which thing or setting to change.
        what: String,
    },
    /// Another transaction was in the way (a dead-lock, a database that stays locked, a snapshot too old):
    /// nothing took place. Roll the transaction back and try the whole of it again.
    #[error("another transaction was in the way, try again: {what}")]
    Conflict {
        /// What was in the way.
        what: String,
    },
    /// The lease is no longer its owner's: another one has taken the shard, or it was released. Nothing
    /// took place, and nothing more may be started under it.
    #[error("the lease of epoch {epoch} on `{queue}` was lost")]
    LeaseLost {
        /// Queue of the lease.
        queue: String,
        /// Its epoch.
        epoch: u64,
    },
    /// A message of the batch is not there any more: it was settled before. Only a settling within the
    /// caller's transaction fails on it, because the writes beside it would take effect a second time.
    #[error("{missing} of the messages to settle in `{queue}` were settled before")]
    AlreadySettled {
        /// Queue of the messages.
        queue: String,
        /// How many were not there.
        missing: usize,
    },
}

impl StoreError {
    /// Whether the same call can succeed later without anybody changing anything.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::Conflict { .. })
    }

    pub(crate) fn refused(what: impl Into<String>) -> Self {
        Self::Refused { what: what.into() }
    }

    pub(crate) fn unavailable(what: impl Into<String>) -> Self {
        Self::Unavailable { what: what.into() }
    }

    pub(crate) fn conflict(what: impl Into<String>) -> Self {
        Self::Conflict { what: what.into() }
    }

    pub(crate) fn timed_out(during: &str, after: Duration) -> Self {
        Self::unavailable(format!("no answer to `{during}` within {after:?}"))
    }

    pub(crate) fn identity_changed(queue: &str, ordered: bool, shards: i32) -> Self {
        let exists = if ordered {
            format!("ordered, in {shards} shards")
        } else {
            "unordered".to_owned()
        };
        Self::refused(format!(
            "the queue `{queue}` exists and is {exists}: that is part of its identity. Declare it so, or use \
             another name"
        ))
    }

    /// An error that did not come from the database itself.
    ///
    /// Only those forms of `sqlx::Error` are shown whose text is made of names and numbers.
    pub(crate) fn from_client(error: &sqlx::Error) -> Self {
        match error {
            sqlx::Error::Io(io) => Self::unavailable(io.kind().to_string()),
            sqlx::Error::Tls(_) => Self::unavailable("the encryption of the connection failed"),
            sqlx::Error::PoolTimedOut => Self::unavailable("no connection became free in time"),
            sqlx::Error::PoolClosed => Self::unavailable("the store was closed"),
            sqlx::Error::WorkerCrashed => Self::unavailable("the connection's thread ended"),
            sqlx::Error::Protocol(_) => Self::unavailable("the connection broke off in an answer"),
            sqlx::Error::Configuration(_) => {
                Self::refused("the address of the database cannot be understood")
            }
            sqlx::Error::ColumnDecode { index, .. } => {
                Self::refused(format!("column {index} of a row cannot be read"))
            }
            sqlx::Error::ColumnNotFound(name) => Self::refused(format!("no column {name}")),
            _ => Self::unavailable("the database client failed"),
        }
    }
}
