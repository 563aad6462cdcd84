//! What a message looks like in a row: hashes, headers, past. The same in every database.
//!
//! Owns the format. Headers and pasts are JSON, so that a person can read them with the database's own
//! tools; a past is one line of JSON per attempt, so that an attempt is added by appending text.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use laneway_actors::{
    Envelope, HeaderValue, Headers, MessageId, OrderingKey, ShardCount, ShardIndex, header,
};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{FailedAttempt, NewMessage, QueueOrder, Shard, StoreError};

/// Seed of the hash of keys in rows. Part of the format: never changed. Another one than those of lanes
/// and shards, so that the keys of one shard use all locks.
const KEY_SEED: u64 = 0x6c61_6e65_7761_7932;

/// The hash of a key in a row and in a claim's list of held keys.
pub(crate) fn key_hash(key: &OrderingKey) -> i64 {
    xxh3_64_with_seed(key.as_bytes(), KEY_SEED).cast_signed()
}

/// A new message, ready to be written.
pub(crate) struct NewRow {
    pub(crate) shard: Shard,
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) key_hash: Option<i64>,
    pub(crate) id: String,
    /// Of the body and the replay number, as in the runtime's `Identity`: a dead letter that is replayed is another
    /// message.
    pub(crate) digest: i64,
    pub(crate) message_type: Option<String>,
    pub(crate) content_type: Option<String>,
    pub(crate) headers: Option<String>,
    pub(crate) correlation_id: Option<String>,
    pub(crate) causation_id: Option<String>,
    /// Microseconds since 1970.
    pub(crate) sent_at: Option<i64>,
    /// Milliseconds since 1970.
    pub(crate) due_at: Option<i64>,
    pub(crate) body: Vec<u8>,
}

impl NewRow {
    pub(crate) fn of(message: &NewMessage, order: QueueOrder) -> Result<Self, StoreError> {
        let envelope = &message.envelope;
        let id = envelope.id.clone().unwrap_or_else(MessageId::unique);
        let text = |what, text: &Option<Arc<str>>| -> Result<Option<String>, StoreError> {
            let Some(text) = text else { return Ok(None) };
            checked(what, text).map(Some)
        };
        let replay = match envelope.headers.get(header::REPLAY) {
            Some(HeaderValue::Integer(number)) => number.cast_unsigned(),
            _ => 0,
        };
        let shard = match order {
            QueueOrder::Unordered => Shard(0),
            QueueOrder::Ordered(count) => shard_of(message.key.as_ref(), id.as_str(), count),
        };
        Ok(Self {
            shard,
            key: message.key.as_ref().map(|key| key.as_bytes().to_vec()),
            key_hash: message.key.as_ref().map(key_hash),
            id: checked("id", id.as_str())?,
            digest: xxh3_64_with_seed(&envelope.body, replay).cast_signed(),
            message_type: text("type", &envelope.message_type)?,
            content_type: text("content type", &envelope.content_type)?,
            headers: write_headers(&envelope.headers),
            correlation_id: text("correlation id", &envelope.correlation_id)?,
            causation_id: text("causation id", &envelope.causation_id)?,
            sent_at: envelope.sent_at.map(|at| since_1970(at).as_micros() as i64),
            due_at: message.due.map(|at| since_1970(at).as_millis() as i64),
            body: envelope.body.to_vec(),
        })
    }
}

/// A keyless message of an ordered queue has no order, but needs an owner: its id spreads it.
fn shard_of(key: Option<&OrderingKey>, id: &str, count: ShardCount) -> Shard {
    let index = match key {
        Some(key) => ShardIndex::of(key, count),
        None => ShardIndex::of(&OrderingKey::from(id), count),
    };
    Shard(index.get() as u32)
}

/// PostgreSQL cannot keep a zero byte in text. Refused everywhere, so that a message does not depend on
/// the database that it happens to meet.
fn checked(what: &str, text: &str) -> Result<String, StoreError> {
    if text.contains('\0') {
        return Err(StoreError::refused(format!(
            "the {what} of a message contains a zero byte, which cannot be stored"
        )));
    }
    Ok(text.to_owned())
}

fn since_1970(at: SystemTime) -> Duration {
    at.duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The columns of a message as they were read.
pub(crate) struct ReadRow {
    pub(crate) id: String,
    pub(crate) message_type: Option<String>,
    pub(crate) content_type: Option<String>,
    pub(crate) headers: Option<String>,
    pub(crate) correlation_id: Option<String>,
    pub(crate) causation_id: Option<String>,
    pub(crate) sent_at: Option<i64>,
    pub(crate) body: Vec<u8>,
}

impl ReadRow {
    /// The envelope, and why its headers are missing if they cannot be read.
    pub(crate) fn envelope(self) -> (Envelope, Option<String>) {
        let (headers, broken) = match self.headers.as_deref().map(read_headers) {
            None => (Headers::new(), None),
            Some(Ok(headers)) => (headers, None),
            Some(Err(_)) => (
                Headers::new(),
                Some("its headers cannot be read".to_owned()),
            ),
        };
        let envelope = Envelope {
            id: Some(self.id.as_str().into()),
            message_type: self.message_type.map(Into::into),
            content_type: self.content_type.map(Into::into),
            headers,
            correlation_id: self.correlation_id.map(Into::into),
            causation_id: self.causation_id.map(Into::into),
            sent_at: self
                .sent_at
                .map(|at| UNIX_EPOCH + Duration::from_micros(at.unsigned_abs())),
            body: self.body.into(),
        };
        (envelope, broken)
    }
}

/// A header's value as JSON: `{"text":"…"}`, `{"integer":42}` …
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum StoredValue {
    Text(String),
    Integer(i64),
    Bool(bool),
    /// As text: JSON has no infinity.
    Float(String),
    Bytes(Vec<u8>),
    Other,
}

fn write_headers(headers: &Headers) -> Option<String> {
    let list: Vec<(&str, StoredValue)> = headers
        .iter()
        .map(|(name, value)| {
            let value = match value {
                HeaderValue::Text(text) => StoredValue::Text(text.clone()),
                HeaderValue::Integer(number) => StoredValue::Integer(*number),
                HeaderValue::Bool(truth) => StoredValue::Bool(*truth),
                HeaderValue::Float(number) => StoredValue::Float(number.to_string()),
                HeaderValue::Bytes(bytes) => StoredValue::Bytes(bytes.clone()),
                _ => StoredValue::Other,
            };
            (name, value)
        })
        .collect();
    if list.is_empty() {
        return None;
    }
    // Cannot fail: text, numbers and lists only.
    serde_json::to_string(&list).ok()
}

fn read_headers(text: &str) -> Result<Headers, Box<dyn std::error::Error>> {
    let list: Vec<(String, StoredValue)> = serde_json::from_str(text)?;
    let mut headers = Headers::new();
    for (name, value) in list {
        let value = match value {
            StoredValue::Text(text) => HeaderValue::Text(text),
            StoredValue::Integer(number) => HeaderValue::Integer(number),
            StoredValue::Bool(truth) => HeaderValue::Bool(truth),
            StoredValue::Float(number) => HeaderValue::Float(number.parse()?),
            StoredValue::Bytes(bytes) => HeaderValue::Bytes(bytes),
            StoredValue::Other => HeaderValue::Other,
        };
        headers.insert(name, value);
    }
    Ok(headers)
}

/// Lines to append to a past; empty for none.
pub(crate) fn write_past<'a>(failed: impl IntoIterator<Item = &'a FailedAttempt>) -> String {
    let mut lines = String::new();
    for attempt in failed {
        // Cannot fail: text and numbers only.
        if let Ok(line) = serde_json::to_string(attempt) {
            lines.push_str(&line);
            lines.push('\n');
        }
    }
    lines
}

/// A past, or `None` where a line of it cannot be read.
pub(crate) fn read_past(text: &str) -> Option<Vec<FailedAttempt>> {
    let lines = text.lines().map(|line| serde_json::from_str(line).ok());
    lines.collect()
}

/// A member, from the text that its `Display` gives.
#[cfg(feature = "postgres")]
pub(crate) fn read_member(text: &str) -> Result<laneway_actors::port::MemberId, StoreError> {
    let number = u128::from_str_radix(text, 16);
    number
        .map(laneway_actors::port::MemberId::from_u128)
        .map_err(|_| StoreError::refused("the name of a member cannot be read"))
}

/// The detail of a dead letter as text that every database keeps.
pub(crate) fn write_detail(detail: &str) -> String {
    detail.replace('\0', "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_every_kind_survive() {
        let mut headers = Headers::new();
        for (name, value) in [
            ("text", HeaderValue::Text("a\0\"é".into())),
            ("integer", HeaderValue::Integer(i64::MIN)),
            ("bool", HeaderValue::Bool(true)),
            ("float", HeaderValue::Float(f64::INFINITY)),
            ("exact", HeaderValue::Float(0.1 + 0.2)),
            ("bytes", HeaderValue::Bytes(vec![0, 255])),
            ("other", HeaderValue::Other),
        ] {
            headers.insert(name, value);
        }
        let text = write_headers(&headers).expect("there are some");
        assert_eq!(read_headers(&text).ok(), Some(headers));
    }

    /// Golden vectors: a release that changes one no longer finds what an earlier one has stored.
    #[test]
    fn hashes_are_the_same_in_every_release() {
        let message = NewMessage {
            queue: "q".into(),
            key: Some("account-1".into()),
            envelope: Envelope {
                body: "body".into(),
                ..Envelope::default()
            },
            due: None,
        };
        let row = NewRow::of(&message, QueueOrder::Unordered).expect("right");
        assert_eq!(row.key_hash, Some(KEY_HASH));
        assert_eq!(row.digest, -8_866_803_791_400_279_558);
    }

    /// Computed with the Python package `xxhash`, as the digest above.
    const KEY_HASH: i64 = -4_404_008_229_107_688_311;
}
