//! AMQP properties to envelopes and back.
//!
//! Owns what each property means. Promises that parking writes the properties and headers of a
//! message as they arrived, types included: they are kept beside the envelope ([`Native`]). Text is
//! bounded by 255 bytes in AMQP's short strings; longer values are errors here, not panics in `lapin`.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use laneway_actors::{
    Delivery, DeliveryTag, Envelope, HeaderValue, Headers, MessageId, SessionState, header,
};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, ByteArray, FieldTable, LongString, ShortString};

/// A message's properties as they arrived, for parking.
pub(super) struct Native(pub(super) BasicProperties);

/// Persistent: a durable queue writes the message to disk.
pub(super) const PERSISTENT: u8 = 2;

/// Turns deliveries of one session into envelopes.
///
/// A queue mostly holds messages of few types, so the last type and content type are shared instead of
/// copied anew for each message.
pub(super) struct Reader {
    session: Arc<SessionState>,
    message_type: Option<Arc<str>>,
    content_type: Option<Arc<str>>,
}

impl Reader {
    pub(super) fn new(session: Arc<SessionState>) -> Self {
        Self {
            session,
            message_type: None,
            content_type: None,
        }
    }

    pub(super) fn read(&mut self, delivery: lapin::message::Delivery) -> Delivery {
        let properties = delivery.properties;
        let (headers, causation_id) = read_headers(properties.headers().as_ref());
        let envelope = Envelope {
            id: properties
                .message_id()
                .as_ref()
                .map(|id| MessageId::from(id.as_str())),
            message_type: intern(&mut self.message_type, properties.kind().as_ref()),
            content_type: intern(&mut self.content_type, properties.content_type().as_ref()),
            headers,
            correlation_id: properties
                .correlation_id()
                .as_ref()
                .map(|id| id.as_str().into()),
            causation_id,
            sent_at: properties
                .timestamp()
                .and_then(|seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds))),
            body: Bytes::from(delivery.data),
        };
        Delivery::new(
            envelope,
            Arc::clone(&self.session),
            DeliveryTag(delivery.delivery_tag),
        )
        .redelivered(delivery.redelivered)
        .with_native(Arc::new(Native(properties)))
    }
}

fn intern(last: &mut Option<Arc<str>>, value: Option<&ShortString>) -> Option<Arc<str>> {
    let value = value?.as_str();
    match last {
        Some(known) if **known == *value => Some(Arc::clone(known)),
        _ => {
            let new: Arc<str> = value.into();
            *last = Some(Arc::clone(&new));
            Some(new)
        }
    }
}

fn read_headers(table: Option<&FieldTable>) -> (Headers, Option<Arc<str>>) {
    let mut headers = Headers::new();
    let mut causation_id = None;
    for (name, value) in table.into_iter().flat_map(|table| table.inner()) {
        let value = read_value(value);
        match value {
            HeaderValue::Text(id) if name.as_str() == header::CAUSATION_ID => {
                causation_id = Some(id.into());
            }
            value => headers.insert(name.as_str(), value),
        }
    }
    (headers, causation_id)
}

fn read_value(value: &AMQPValue) -> HeaderValue {
    match value {
        AMQPValue::LongString(text) => bytes_or_text(text.as_bytes()),
        AMQPValue::ShortString(text) => HeaderValue::Text(text.as_str().to_owned()),
        AMQPValue::ByteArray(bytes) => HeaderValue::Bytes(bytes.as_slice().to_vec()),
        AMQPValue::Boolean(truth) => HeaderValue::Bool(*truth),
        AMQPValue::ShortShortInt(number) => HeaderValue::Integer((*number).into()),
        AMQPValue::ShortShortUInt(number) => HeaderValue::Integer((*number).into()),
        AMQPValue::ShortInt(number) => HeaderValue::Integer((*number).into()),
        AMQPValue::ShortUInt(number) => HeaderValue::Integer((*number).into()),
        AMQPValue::LongInt(number) => HeaderValue::Integer((*number).into()),
        AMQPValue::LongUInt(number) => HeaderValue::Integer((*number).into()),
        AMQPValue::LongLongInt(number) => HeaderValue::Integer(*number),
        AMQPValue::Float(number) => HeaderValue::Float((*number).into()),
        AMQPValue::Double(number) => HeaderValue::Float(*number),
        AMQPValue::DecimalValue(_)
        | AMQPValue::FieldArray(_)
        | AMQPValue::Timestamp(_)
        | AMQPValue::FieldTable(_)
        | AMQPValue::Void => HeaderValue::Other,
    }
}

fn bytes_or_text(bytes: &[u8]) -> HeaderValue {
    match std::str::from_utf8(bytes) {
        Ok(text) => HeaderValue::Text(text.to_owned()),
        Err(_) => HeaderValue::Bytes(bytes.to_vec()),
    }
}

/// A short string, if the text fits into one.
pub(super) fn short(text: &str) -> Result<ShortString, String> {
    ShortString::try_new(text).map_err(|_| format!("{} bytes long; AMQP allows 255", text.len()))
}

/// The properties of a message on its way out.
///
/// # Errors
/// What cannot be said in AMQP; names, never values.
pub(super) fn write(envelope: &Envelope) -> Result<BasicProperties, String> {
    let mut properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
    if let Some(id) = &envelope.id {
        properties = properties.with_message_id(field("message id", id.as_str())?);
    }
    if let Some(message_type) = &envelope.message_type {
        properties = properties.with_type(field("type", message_type)?);
    }
    if let Some(content_type) = &envelope.content_type {
        properties = properties.with_content_type(field("content type", content_type)?);
    }
    if let Some(id) = &envelope.correlation_id {
        properties = properties.with_correlation_id(field("correlation id", id)?);
    }
    if let Some(seconds) = envelope.sent_at.and_then(unix_seconds) {
        properties = properties.with_timestamp(seconds);
    }
    let mut table = FieldTable::default();
    for (name, value) in envelope.headers.iter() {
        let name = field("a header's name", name)?;
        let Some(value) = write_value(value) else {
            // Leaving it out would be silent.
            return Err(format!(
                "header `{name}` has a value of a type that cannot be written"
            ));
        };
        table.insert(name, value);
    }
    if let Some(id) = &envelope.causation_id {
        table.insert(header::CAUSATION_ID.into(), long(id));
    }
    if !table.inner().is_empty() {
        properties = properties.with_headers(table);
    }
    Ok(properties)
}

fn field(what: &str, text: &str) -> Result<ShortString, String> {
    short(text).map_err(|why| format!("{what} is {why}"))
}

fn unix_seconds(at: SystemTime) -> Option<u64> {
    Some(at.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

/// A value in AMQP's types; `None` for one that has none.
pub(super) fn write_value(value: &HeaderValue) -> Option<AMQPValue> {
    Some(match value {
        HeaderValue::Text(text) => long(text),
        HeaderValue::Integer(number) => AMQPValue::LongLongInt(*number),
        HeaderValue::Bool(truth) => AMQPValue::Boolean(*truth),
        HeaderValue::Float(number) => AMQPValue::Double(*number),
        HeaderValue::Bytes(bytes) => AMQPValue::ByteArray(ByteArray::from(bytes.as_slice())),
        _ => return None,
    })
}

fn long(text: &str) -> AMQPValue {
    AMQPValue::LongString(LongString::from(text))
}

/// Carries the header `CC` of a message that was replayed: under its own name it would send copies to
/// the other queues once more.
const CC: &str = "laneway-cc";

/// Headers that a quorum queue adds to what it delivers; they count the life in that queue.
const COUNTED_BY_QUEUE: [&str; 2] = ["x-delivery-count", "x-acquired-count"];

/// The properties of a parked message on its way back: everything it has, the replay number set.
pub(super) fn replayed(native: &BasicProperties, user: &str, replay: i64) -> BasicProperties {
    let number = (header::REPLAY.into(), AMQPValue::LongLongInt(replay));
    let properties = parked(native, user, [number]);
    let mut headers = FieldTable::default();
    for (name, value) in properties.headers().iter().flat_map(FieldTable::inner) {
        if COUNTED_BY_QUEUE.contains(&name.as_str()) {
            continue;
        }
        let name = if name.as_str() == "CC" {
            CC.into()
        } else {
            name.clone()
        };
        headers.insert(name, value.clone());
    }
    properties.with_headers(headers)
}

/// Carries the `user-id` of a parked message whose publisher was another user.
const USER_ID: &str = "laneway-user-id";

/// The properties of a parked message: as they arrived, made persistent, without a time to live
/// (which would remove it unseen), with these headers added. `user` is who parks it.
pub(super) fn parked(
    native: &BasicProperties,
    user: &str,
    added: impl IntoIterator<Item = (ShortString, AMQPValue)>,
) -> BasicProperties {
    let mut properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
    // There is no way to take a property away, so all others are copied; `expiration` is not.
    macro_rules! keep {
        ($($get:ident => $set:ident),+ $(,)?) => {$(
            if let Some(value) = native.$get() {
                properties = properties.$set(value.clone());
            }
        )+};
    }
    keep! {
        content_type => with_content_type,
        content_encoding => with_content_encoding,
        priority => with_priority,
        correlation_id => with_correlation_id,
        reply_to => with_reply_to,
        message_id => with_message_id,
        timestamp => with_timestamp,
        kind => with_type,
        app_id => with_app_id,
        cluster_id => with_cluster_id,
    }
    let mut headers = native.headers().clone().unwrap_or_default();
    if let Some(publisher) = native.user_id() {
        // The broker refuses a message that names another user than the connection's, and it would
        // be refused for ever.
        if publisher.as_str() == user {
            properties = properties.with_user_id(publisher.clone());
        } else {
            headers.insert(USER_ID.into(), long(publisher.as_str()));
        }
    }
    for (name, value) in added {
        headers.insert(name, value);
    }
    properties.with_headers(headers)
}
