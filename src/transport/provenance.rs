//! What is written on a message when it is parked: why, where and when.
//!
//! Owns the names of these headers, so that every transport writes the same ones and a tool can
//! read them from any parking place. Promises that the message's own headers are left to the
//! transport, which keeps them as they were; these are added to them.

use std::time::UNIX_EPOCH;

use laneway_actors::HeaderValue;
use laneway_actors::port::DeadLetter;

/// Why the message is poison, as a word ([`laneway_actors::PoisonReason`]).
pub const REASON: &str = "laneway-reason";
/// How often a handler ran.
pub const ATTEMPTS: &str = "laneway-attempts";
/// The endpoint that gave it up.
pub const ENDPOINT: &str = "laneway-endpoint";
/// The queue it came from.
pub const QUEUE: &str = "laneway-queue";
/// The last error's text, without the ordering key.
pub const DETAIL: &str = "laneway-detail";
/// When it was given up: milliseconds since the Unix epoch.
pub const PARKED_AT: &str = "laneway-parked-at";

/// The provenance of a dead letter, as headers.
pub fn headers(letter: &DeadLetter) -> Vec<(&'static str, HeaderValue)> {
    // A clock before 1970 is a broken clock; zero says so and parks the message all the same.
    let at = letter
        .given_up_at
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
        });
    vec![
        (REASON, letter.reason.to_string().into()),
        (ATTEMPTS, i64::from(letter.attempts).into()),
        (ENDPOINT, letter.endpoint.as_ref().into()),
        (QUEUE, letter.queue.as_ref().into()),
        (DETAIL, letter.detail.as_str().into()),
        (PARKED_AT, at.into()),
    ]
}
