//! The message, as the program reads it and as the mended program does.

use laneway::{Envelope, Message, MessageId};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

/// The header with the ordering key.
pub(crate) const KEY_HEADER: &str = "order";

/// Something happened to an order.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct OrderEvent {
    /// The order: the ordering key.
    pub order: u64,
    /// Number of the event within its order, from 1.
    pub seq: u64,
}

impl Message for OrderEvent {
    const TYPE: &'static str = "order-event";
}

impl OrderEvent {
    /// How a publisher that knows nothing of Laneway sends it: the numbers are text, which this program
    /// cannot decode.
    pub(crate) fn foreign(&self, id: MessageId) -> Envelope {
        let Self { order, seq } = self;
        let mut envelope = Envelope {
            id: Some(id),
            message_type: Some(Self::TYPE.into()),
            content_type: Some("application/json".into()),
            body: format!(r#"{{"order":"{order}","seq":"{seq}"}}"#).into(),
            ..Envelope::default()
        };
        envelope.headers.insert(KEY_HEADER, order.to_string());
        envelope
    }
}

/// The same message in the mended program, which reads numbers that are text too.
#[derive(Serialize, Deserialize)]
pub(crate) struct MendedEvent {
    #[serde(deserialize_with = "number_or_text")]
    order: u64,
    #[serde(deserialize_with = "number_or_text")]
    seq: u64,
}

impl Message for MendedEvent {
    const TYPE: &'static str = OrderEvent::TYPE;
}

impl From<MendedEvent> for OrderEvent {
    fn from(MendedEvent { order, seq }: MendedEvent) -> Self {
        Self { order, seq }
    }
}

fn number_or_text<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Number(u64),
        Text(String),
    }
    match Either::deserialize(from)? {
        Either::Number(number) => Ok(number),
        Either::Text(text) => text.parse().map_err(D::Error::custom),
    }
}
