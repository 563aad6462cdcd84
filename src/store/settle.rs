//! How messages end, and what is kept of those that ended badly.

use std::time::{Duration, SystemTime};

use laneway_actors::PoisonReason;
use serde::{Deserialize, Serialize};

use super::{Sequence, StoreError, Stored};

/// What to do with one message.
#[derive(Debug, Clone)]
pub struct Settlement {
    /// Which message.
    pub sequence: Sequence,
    /// What becomes of it.
    pub ending: Ending,
}

/// What becomes of a message.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Ending {
    /// It is done: removed, and its id is remembered.
    Handled,
    /// Given up without a trace but its id.
    Discarded,
    /// Tried again after a while. It keeps its place, and in an ordered queue holds its key; the attempt
    /// that failed goes into its past.
    Retry {
        /// How long to wait, by the database's clock.
        after: Duration,
        /// Attempts that failed and are not in its past yet.
        failed: Vec<FailedAttempt>,
    },
    /// Kept where it is, and with it its key, until [`end_hold`](super::Store::end_hold), or a
    /// [`Retry`](Self::Retry) of the same message, lets it go.
    Hold {
        /// Attempts that failed and are not in its past yet.
        failed: Vec<FailedAttempt>,
    },
    /// Moved to the dead letters, with its whole past. Its id is remembered.
    Dead {
        /// Why.
        reason: DeadReason,
        /// The last error's text. The caller has taken key values out of it.
        detail: String,
        /// Attempts that failed and are not in its past yet.
        failed: Vec<FailedAttempt>,
    },
}

/// What becomes of a message that is held.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum HoldEnding {
    /// It may run at once, its attempts counted anew. Its past stays.
    Retry,
    /// Moved to the dead letters, with its whole past. Its id is remembered.
    Dead {
        /// Why.
        reason: DeadReason,
        /// What a person should know. The caller has taken key values out of it.
        detail: String,
    },
    /// Given up without a trace but its id.
    Discarded,
}

impl HoldEnding {
    /// The settlement that it is, if it removes the message.
    pub(crate) fn removal(self, sequence: Sequence) -> Option<Settlement> {
        let ending = match self {
            Self::Retry => return None,
            Self::Dead { reason, detail } => Ending::Dead {
                reason,
                detail,
                failed: Vec::new(),
            },
            Self::Discarded => Ending::Discarded,
        };
        Some(Settlement { sequence, ending })
    }
}

/// One attempt that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedAttempt {
    /// Its number, from 1.
    pub attempt: u32,
    /// When it ended, in milliseconds since 1970, by the clock of the machine that made it.
    pub at: u64,
    /// What kind of failure: `failed`, `panicked`, `timed-out` …
    pub kind: String,
    /// The error's text. The caller has taken key values out of it.
    pub detail: String,
}

impl FailedAttempt {
    /// An attempt that failed now.
    pub fn now(attempt: u32, kind: impl Into<String>, detail: impl Into<String>) -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Self {
            attempt,
            at: since.map_or(0, |since| since.as_millis() as u64),
            kind: kind.into(),
            detail: detail.into(),
        }
    }
}

/// Why a message is a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeadReason {
    /// It was poison.
    Poison(PoisonReason),
    /// Its queue has or had a message with the same id and another body.
    IdReused,
    /// Its row cannot be read.
    Broken,
}

impl DeadReason {
    pub(crate) fn text(self) -> String {
        match self {
            Self::Poison(reason) => reason.to_string(),
            Self::IdReused => ID_REUSED.to_owned(),
            Self::Broken => "broken".to_owned(),
        }
    }
}

pub(crate) const ID_REUSED: &str = "id reused";

/// What a settling did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[must_use]
pub struct Settled {
    /// Messages settled now.
    pub settled: usize,
    /// Messages that were not there: settled before. After an outcome that was unknown, this is how a
    /// repetition looks.
    pub missing: usize,
}

/// A dead letter.
#[derive(Debug, Clone)]
pub struct DeadMessage {
    /// Its number among the dead letters of the store.
    pub number: i64,
    /// The message as it was. Its sequence is 0 if it never had a place.
    pub message: Stored,
    /// Why, as text: one of [`PoisonReason`]'s, `id reused` or `broken`.
    pub reason: String,
    /// The last error's text.
    pub detail: String,
    /// Every attempt that failed, oldest first; empty if the past cannot be read (see
    /// [`Stored::broken`]).
    pub past: Vec<FailedAttempt>,
}

impl Settled {
    /// So many of so many.
    pub(crate) fn of(settled: usize, count: usize) -> Self {
        Self {
            settled,
            missing: count.saturating_sub(settled),
        }
    }

    /// For a settling whose other writes must not take effect twice.
    pub(crate) fn complete(self, queue: &str) -> Result<(), StoreError> {
        if self.missing == 0 {
            return Ok(());
        }
        Err(StoreError::AlreadySettled {
            queue: queue.to_owned(),
            missing: self.missing,
        })
    }
}

impl DeadMessage {
    pub(crate) fn read(
        number: i64,
        mut message: Stored,
        reason: String,
        detail: String,
        past: Option<Vec<FailedAttempt>>,
    ) -> Self {
        if past.is_none() {
            let broken = message.broken.get_or_insert_with(String::new);
            if !broken.is_empty() {
                broken.push_str(", ");
            }
            broken.push_str("its past cannot be read");
        }
        Self {
            number,
            message,
            reason,
            detail,
            past: past.unwrap_or_default(),
        }
    }
}
