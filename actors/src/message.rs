//! Typed messages and their encodings.

use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::envelope::{Envelope, MessageId, header};
use crate::key::OrderingKey;

/// A typed payload with a stable wire name.
///
/// ```
/// use laneway_actors::Message;
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct OrderShipped { order_id: u64 }
/// impl Message for OrderShipped { const TYPE: &'static str = "order-shipped"; }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a message",
    note = "derive `Serialize` and `Deserialize` for it and write `impl Message for {Self} {{ const TYPE: &'static str = \"its-wire-name\"; }}`"
)]
pub trait Message: Serialize + DeserializeOwned + Send + 'static {
    /// Name of the type on the wire. Stable: renaming the Rust type must not change it.
    const TYPE: &'static str;
}

/// How a body is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Encoding {
    /// `application/json`: what other languages read. The default, also for a message that names
    /// no content type.
    #[default]
    Json,
    /// `application/msgpack`: smaller and faster. `application/x-msgpack` and
    /// `application/vnd.msgpack` are read as the same.
    MessagePack,
}

/// A body that cannot be decoded, or a payload that cannot be encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The content type is none that Laneway reads.
    #[error("content type `{0}` is not one of application/json and application/msgpack")]
    ContentType(String),
    /// Not valid JSON of this type.
    #[error("not valid JSON for this type")]
    Json(#[source] serde_json::Error),
    /// Not valid MessagePack of this type.
    #[error("not valid MessagePack for this type")]
    MessagePack(#[source] rmp_serde::decode::Error),
    /// The payload cannot be written as MessagePack.
    #[error("the payload cannot be encoded as MessagePack")]
    EncodeMessagePack(#[source] rmp_serde::encode::Error),
    /// Decoding panicked (a `Deserialize` implementation of the application).
    #[error("decoding panicked")]
    Panicked,
}

impl Encoding {
    /// The encoding that a content type names; parameters (`; charset=utf-8`) are ignored.
    ///
    /// # Errors
    /// [`CodecError::ContentType`] for any other content type.
    pub fn of_content_type(content_type: Option<&str>) -> Result<Self, CodecError> {
        let Some(full) = content_type else {
            return Ok(Self::Json);
        };
        let essence = full.split(';').next().unwrap_or(full).trim();
        let is = |name: &str| essence.eq_ignore_ascii_case(name);
        if essence.is_empty() || is("application/json") || is("text/json") {
            Ok(Self::Json)
        } else if is("application/msgpack")
            || is("application/x-msgpack")
            || is("application/vnd.msgpack")
        {
            Ok(Self::MessagePack)
        } else {
            Err(CodecError::ContentType(full.to_owned()))
        }
    }

    /// The content type that names it.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::MessagePack => "application/msgpack",
        }
    }

    /// Decodes a body.
    ///
    /// # Errors
    /// When the body is not a valid encoding of a `T`.
    pub fn decode<T: DeserializeOwned>(self, body: &[u8]) -> Result<T, CodecError> {
        match self {
            Self::Json => serde_json::from_slice(body).map_err(CodecError::Json),
            Self::MessagePack => rmp_serde::from_slice(body).map_err(CodecError::MessagePack),
        }
    }

    /// Encodes a payload. MessagePack keeps field names, so that fields can be added later.
    ///
    /// # Errors
    /// When the payload's `Serialize` refuses.
    pub fn encode<T: Serialize>(self, payload: &T) -> Result<Bytes, CodecError> {
        match self {
            Self::Json => serde_json::to_vec(payload)
                .map(Bytes::from)
                .map_err(CodecError::Json),
            Self::MessagePack => rmp_serde::to_vec_named(payload)
                .map(Bytes::from)
                .map_err(CodecError::EncodeMessagePack),
        }
    }
}

impl Envelope {
    /// A new message: encoded, with type, content type, a unique id and the time of now.
    ///
    /// # Errors
    /// When the payload cannot be encoded.
    pub fn of<T: Message>(payload: &T, encoding: Encoding) -> Result<Self, CodecError> {
        Ok(Self {
            id: Some(MessageId::unique()),
            message_type: Some(T::TYPE.into()),
            content_type: Some(encoding.content_type().into()),
            sent_at: Some(std::time::SystemTime::now()),
            body: encoding.encode(payload)?,
            ..Self::default()
        })
    }

    /// Writes the key into a header (as text, whatever type it was made of).
    ///
    /// A key that is not UTF-8 is written as bytes.
    pub fn set_key(&mut self, header_name: &str, key: &OrderingKey) {
        use crate::envelope::HeaderValue;
        let value = match std::str::from_utf8(key.as_bytes()) {
            Ok(text) => HeaderValue::Text(text.to_owned()),
            Err(_) => HeaderValue::Bytes(key.as_bytes().to_vec()),
        };
        self.headers.insert(header_name, value);
    }

    /// Makes this message a consequence of another: its correlation id (or its id, where it has
    /// none) is passed on, its id becomes the causation id.
    pub fn caused_by(&mut self, cause: &Self) {
        let id: Option<Arc<str>> = cause.id.as_ref().map(|id| id.as_str().into());
        self.correlation_id = cause.correlation_id.clone().or_else(|| id.clone());
        if let Some(id) = id {
            self.headers.insert(header::CAUSATION_ID, &*id);
            self.causation_id = Some(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Paid {
        account: u64,
        cents: i64,
    }
    impl Message for Paid {
        const TYPE: &'static str = "paid";
    }

    #[test]
    fn both_encodings_give_back_what_went_in() {
        let paid = Paid {
            account: 7,
            cents: -3,
        };
        for encoding in [Encoding::Json, Encoding::MessagePack] {
            let envelope = Envelope::of(&paid, encoding).expect("encodes");
            let read = Encoding::of_content_type(envelope.content_type.as_deref())
                .expect("its own content type is known");
            assert_eq!(read, encoding);
            assert_eq!(read.decode::<Paid>(&envelope.body).expect("decodes"), paid);
        }
    }

    #[test]
    fn content_types_are_read_as_the_standard_says() {
        let of = |text| Encoding::of_content_type(text).ok();
        assert_eq!(of(None), Some(Encoding::Json));
        assert_eq!(
            of(Some("Application/JSON; charset=utf-8")),
            Some(Encoding::Json)
        );
        assert_eq!(
            of(Some("application/x-msgpack")),
            Some(Encoding::MessagePack)
        );
        assert_eq!(of(Some("application/xml")), None);
    }

    #[test]
    fn a_correlation_is_passed_on_and_starts_with_the_first_message() {
        let first = Envelope::of(
            &Paid {
                account: 1,
                cents: 1,
            },
            Encoding::Json,
        )
        .expect("encodes");
        let mut second = Envelope::default();
        second.caused_by(&first);
        let first_id = first.id.as_ref().map(MessageId::as_str);
        assert_eq!(second.correlation_id.as_deref(), first_id);
        let mut third = Envelope::default();
        third.caused_by(&Envelope {
            id: Some("second".into()),
            ..second.clone()
        });
        assert_eq!(third.correlation_id.as_deref(), first_id);
        assert_eq!(third.causation_id.as_deref(), Some("second"));
    }
}
