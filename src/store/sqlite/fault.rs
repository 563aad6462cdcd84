//! What SQLite's errors mean here.

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
        let code = answer.code().and_then(|code| code.parse().ok());
        Self(sorted(code.unwrap_or(1), answer.message()))
    }
}

/// By result code (sqlite.org/rescode.html), whose lowest byte is the kind. The texts of these kinds name files,
/// tables and columns; those of the others are left out.
fn sorted(code: i32, message: &str) -> StoreError {
    let text = format!("{message} (SQLite code {code})");
    match code & 0xff {
        // BUSY, LOCKED. BUSY_SNAPSHOT (517) too: a transaction that has read and now wants to write.
        5 | 6 => StoreError::conflict(text),
        // IOERR, FULL, INTERRUPT, NOMEM.
        10 | 13 | 9 | 7 => StoreError::unavailable(text),
        // ERROR (no such table), PERM, READONLY, CORRUPT, CANTOPEN, NOTADB.
        1 | 3 | 8 | 11 | 14 | 26 => StoreError::refused(format!("SQLite refuses: {text}")),
        _ => StoreError::refused(format!("SQLite refuses with code {code}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_sorted_by_what_can_be_done() {
        for (code, retryable) in [
            (5, true),
            (517, true),
            (13, true),
            (1, false),
            (1555, false),
        ] {
            assert_eq!(sorted(code, "text").is_retryable(), retryable, "{code}");
        }
    }
}
