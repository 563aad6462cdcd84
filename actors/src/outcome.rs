//! How a message ended, and why one is poison.

use std::fmt;

/// How a message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// A handler ran to the end and succeeded.
    Handled,
    /// Moved durably to the parking place.
    Parked,
    /// Given up without parking, because the endpoint (`discard_poison`) or a failure rule says so.
    Discarded,
    /// Kept by its source, which can do that (a store), in its place and its key with it: for a later attempt, or
    /// until an operator decides. It comes again.
    Kept,
}

/// Why a message is poison. Its text form goes into the parked message's headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PoisonReason {
    /// The handler failed, and had no further attempt.
    Failed,
    /// The handler said that no further attempt can succeed.
    Permanent,
    /// The handler panicked in the last allowed attempt.
    Panicked,
    /// The handler exceeded its time-out in the last allowed attempt.
    TimedOut,
    /// The body cannot be decoded as the type it claims to be.
    Undecodable,
    /// No handler of the endpoint takes messages of this type.
    NoHandler,
    /// All its attempts were begun, and none was seen to end: it may have ended its process each time.
    Abandoned,
}

impl fmt::Display for PoisonReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Failed => "failed",
            Self::Permanent => "permanent",
            Self::Panicked => "panicked",
            Self::TimedOut => "timed-out",
            Self::Undecodable => "undecodable",
            Self::NoHandler => "no-handler",
            Self::Abandoned => "abandoned",
        })
    }
}
