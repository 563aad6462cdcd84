//! Where a parked message says why it is there: the headers that parking adds.
//!
//! Owns the names and the values, so that a parked message reads the same whichever broker keeps
//! it. Adds to the original headers and replaces only what an earlier parking of the same message
//! wrote. Does not park: each transport publishes in its own way.

use std::time::UNIX_EPOCH;

use laneway_actors::HeaderValue;
use laneway_actors::port::DeadLetter;

/// Why the message was given up, as the text of [`PoisonReason`](laneway_actors::PoisonReason).
pub const REASON: &str = "laneway-reason";
/// Attempts made (whole number); one that could call no handler counts.
pub const ATTEMPTS: &str = "laneway-attempts";
/// The endpoint that gave it up.
pub const ENDPOINT: &str = "laneway-endpoint";
/// The queue it came from.
pub const QUEUE: &str = "laneway-queue";
/// Fingerprint of its key, as the process that parked it shows it; absent for a keyless message.
pub const FINGERPRINT: &str = "laneway-fingerprint";
/// The last error's text, without key values, shortened to [`MAX_DETAIL`] bytes.
pub const DETAIL: &str = "laneway-detail";
/// When it was given up: milliseconds since the start of 1970 (UTC), a whole number.
pub const PARKED_AT: &str = "laneway-parked-at";

/// How much of an error's text is kept, in bytes. A broker must fit all headers of a message into
/// one frame (128 KiB by default on RabbitMQ); an error that quotes a whole document would make its
/// message impossible to park.
pub const MAX_DETAIL: usize = 4096;

/// The headers to set on the parked copy, in a fixed order.
pub(crate) fn headers(letter: &DeadLetter) -> Vec<(&'static str, HeaderValue)> {
    let since_epoch = letter.given_up_at.duration_since(UNIX_EPOCH);
    // A clock before 1970 is wrong anyway; zero is visibly so, and parking must not fail on it.
    let millis = since_epoch.map_or(0, |past| {
        i64::try_from(past.as_millis()).unwrap_or(i64::MAX)
    });
    let mut headers = vec![
        (REASON, letter.reason.to_string().into()),
        (ATTEMPTS, i64::from(letter.attempts).into()),
        (ENDPOINT, letter.endpoint.as_ref().into()),
        (QUEUE, letter.queue.as_ref().into()),
        (DETAIL, shortened(&letter.detail).into()),
        (PARKED_AT, millis.into()),
    ];
    headers.extend(letter.key.map(|key| (FINGERPRINT, key.to_string().into())));
    headers
}

/// The longest beginning that fits and is whole text.
fn shortened(text: &str) -> &str {
    let mut end = text.len().min(MAX_DETAIL);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use laneway_actors::{
        Delivery, DeliveryTag, Envelope, Fingerprints, PoisonReason, SessionState,
    };

    use super::*;

    fn letter(detail: &str) -> DeadLetter {
        DeadLetter {
            delivery: Arc::new(Delivery::new(
                Envelope::default(),
                SessionState::start(),
                DeliveryTag(1),
            )),
            endpoint: "billing".into(),
            queue: "orders".into(),
            key: None,
            reason: PoisonReason::TimedOut,
            place: laneway_actors::port::Place::Parking,
            detail: detail.to_owned(),
            attempts: 3,
            given_up_at: UNIX_EPOCH + Duration::from_millis(1_700_000_000_123),
        }
    }

    #[test]
    fn a_parked_message_tells_where_it_comes_from_and_why() {
        assert_eq!(
            headers(&letter("no answer")),
            [
                (REASON, HeaderValue::from("timed-out")),
                (ATTEMPTS, HeaderValue::Integer(3)),
                (ENDPOINT, HeaderValue::from("billing")),
                (QUEUE, HeaderValue::from("orders")),
                (DETAIL, HeaderValue::from("no answer")),
                (PARKED_AT, HeaderValue::Integer(1_700_000_000_123)),
            ]
        );
    }

    #[test]
    fn a_key_is_shown_by_its_fingerprint() {
        let key = Fingerprints::with_secret(b"secret").of(&"account-7".into());
        let headers = headers(&DeadLetter {
            key: Some(key),
            ..letter("no answer")
        });
        let shown = (FINGERPRINT, HeaderValue::from(key.to_string()));
        assert_eq!(headers.last(), Some(&shown));
    }

    #[test]
    fn a_long_error_is_shortened_at_a_whole_character() {
        // One ASCII letter first, so that the limit falls into the middle of a two-byte letter.
        let text = format!("a{}", "ä".repeat(MAX_DETAIL));
        let headers = headers(&letter(&text));
        let (_, HeaderValue::Text(kept)) = &headers[4] else {
            panic!("the detail is text");
        };
        assert_eq!(kept.len(), MAX_DETAIL - 1);
        assert!(text.starts_with(kept.as_str()));
    }
}
