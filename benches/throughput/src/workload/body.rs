//! A message as it is on the wire.

use serde::{Deserialize, Serialize};

/// The header that carries the key.
pub(crate) const KEY_HEADER: &str = "ordering-key";
/// The same for `ruststream-lapin`, which reads only this one.
pub(crate) const PARTITION_HEADER: &str = "amqp-partition-key";
/// How long a body is.
const BYTES: usize = 256;

/// Its key, its number within the key from 1, when it was published, and padding to 256 bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Message {
    pub(crate) key: u32,
    pub(crate) seq: u32,
    /// Nanoseconds of the clock that all processes of the machine share.
    pub(crate) sent: u64,
    padding: String,
}

impl laneway::Message for Message {
    const TYPE: &'static str = "bench-message";
}

impl Message {
    /// Without padding, for where no broker is.
    pub(crate) fn short(key: u32, seq: u32) -> Self {
        Self {
            key,
            seq,
            sent: 0,
            padding: String::new(),
        }
    }

    /// Padded so that its body has 256 bytes.
    pub(crate) fn padded(key: u32, seq: u32, sent: u64) -> serde_json::Result<Self> {
        let mut message = Self {
            sent,
            ..Self::short(key, seq)
        };
        let bare = serde_json::to_vec(&message)?.len();
        message.padding = "x".repeat(BYTES.saturating_sub(bare));
        Ok(message)
    }

    /// The body.
    pub(crate) fn json(key: u32, seq: u32, sent: u64) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&Self::padded(key, seq, sent)?)
    }
}
