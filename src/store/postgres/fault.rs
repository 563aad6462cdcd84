//! What PostgreSQL's errors mean here.

use sqlx::postgres::PgDatabaseError;

use crate::store::StoreError;

/// The one error of this folder's functions, so that `?` sorts a database's error.
pub(super) struct Fault(pub(super) StoreError);

impl From<StoreError> for Fault {
    fn from(error: StoreError) -> Self {
        Self(error)
    }
}

impl From<sqlx::Error> for Fault {
    fn from(error: sqlx::Error) -> Self {
        let Some(answer) = error.as_database_error() else {
            return Self(StoreError::from_client(&error));
        };
        match answer.try_downcast_ref::<PgDatabaseError>() {
            Some(answer) => Self(sorted(answer.code(), answer.message())),
            None => Self(StoreError::unavailable("the database client failed")),
        }
    }
}

/// By SQLSTATE (appendix A of PostgreSQL's manual). Only texts of classes that name objects are shown: those
/// of classes 22 and 23 quote values.
fn sorted(code: &str, message: &str) -> StoreError {
    match code {
        // Serialization failure, dead-lock, lock time-out.
        "40001" | "40P01" | "55P03" => StoreError::conflict(format!("{message} ({code})")),
        // Cancelled: by the statement time-out of our own connections, or by an operator.
        "57014" => StoreError::unavailable(format!("the statement was cancelled ({code})")),
        // The transaction failed before; the caller has seen why.
        "25P02" => StoreError::conflict(format!("{message} ({code})")),
        // 3D000: no such database; 28xxx: who we say we are; 42xxx: tables, columns, privileges.
        _ if code.starts_with("42") || code.starts_with("28") || code == "3D000" => {
            StoreError::refused(format!("PostgreSQL refuses: {message} ({code})"))
        }
        // Read-only: a standby, most likely, and the primary may come back to this address.
        "25006" => StoreError::unavailable(format!("{message} ({code})")),
        // Connections, resources (disk full, too many connections), operators (shutting down), system.
        _ if ["08", "53", "57", "58"].contains(&code.get(..2).unwrap_or_default()) => {
            StoreError::unavailable(format!("{message} ({code})"))
        }
        _ => StoreError::refused(format!("PostgreSQL refuses with SQLSTATE {code}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_sorted_by_what_can_be_done_and_quote_no_values() {
        for (code, retryable) in [
            ("40P01", true),
            ("53100", true),
            ("57P01", true),
            ("42P01", false),
            ("23505", false),
            ("22021", false),
        ] {
            let error = sorted(code, "text of the server");
            assert_eq!(error.is_retryable(), retryable, "{code}");
            let quotes = error.to_string().contains("text of the server");
            assert_eq!(quotes, !code.starts_with('2'), "{code}");
        }
    }
}
