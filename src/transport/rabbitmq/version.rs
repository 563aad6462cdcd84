//! Which RabbitMQ it is, where that decides what must be said to it.
//!
//! `lapin` does not tell what the broker says of itself, so it is asked on a connection of its own, which
//! ends after the broker's first frame: that one comes before any credentials, and holds the version.
//! (Trying out what the broker accepts would not do: 3.10.8 accepts a delivery limit of -1, and then removes
//! a message at its first return.)

use std::str;

use futures::{AsyncReadExt as _, AsyncWriteExt as _};
use lapin::protocol::{AMQPClass, connection};
use lapin::types::AMQPValue;
use tokio::time::timeout;

use super::connection::dial;
use super::core::Core;

/// Major and minor version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version {
    major: u32,
    minor: u32,
}

impl Version {
    /// Whether a quorum queue without `x-delivery-limit` has one, and -1 means that it has none. From 4.0 on;
    /// before, there is none by default, and -1 removes everything that comes back.
    pub(super) fn has_delivery_limit_of_its_own(self) -> bool {
        self >= Self { major: 4, minor: 0 }
    }
}

impl str::FromStr for Version {
    type Err = String;

    /// Reads `3.10.8`, `4.0.0-beta.5`, `4.1`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split('.').map(str::parse);
        match (parts.next(), parts.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Ok(Self { major, minor }),
            _ => Err(format!("`{text}` is no version")),
        }
    }
}

/// The longest first frame that is believed to be one.
const LONGEST: u32 = 64 * 1_024;

/// Asks, within the connect time-out. To be called on the own runtime.
///
/// # Errors
/// A text, without credentials.
pub(super) async fn ask(core: &Core) -> Result<Version, String> {
    let bound = core.settings.connect_timeout;
    match timeout(bound, first_frame(core)).await {
        Ok(Ok(payload)) => version_in(&payload),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {bound:?}")),
    }
}

async fn first_frame(core: &Core) -> std::io::Result<Vec<u8>> {
    let mut stream = dial(&core.settings, core.handle()).await?;
    stream.write_all(b"AMQP\x00\x00\x09\x01").await?;
    stream.flush().await?;
    // Type, channel, size.
    let mut head = [0_u8; 7];
    stream.read_exact(&mut head).await?;
    let [1, _, _, size @ ..] = head else {
        return Err(std::io::Error::other("the first frame is no method"));
    };
    let size = u32::from_be_bytes(size);
    if size > LONGEST {
        return Err(std::io::Error::other("the first frame is too long"));
    }
    let mut payload = vec![0; size as usize];
    stream.read_exact(&mut payload).await?;
    // Dropping the stream ends the connection; nothing was promised on it.
    Ok(payload)
}

fn version_in(payload: &[u8]) -> Result<Version, String> {
    let parsed = lapin::protocol::parse_class(payload);
    let Ok((_, AMQPClass::Connection(connection::AMQPMethod::Start(start)))) = parsed else {
        return Err("the first frame is not understood".to_owned());
    };
    match start.server_properties.inner().get("version") {
        Some(AMQPValue::LongString(version)) => version.to_string().parse(),
        _ => Err("the broker does not tell its version".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_decides_whether_a_limit_must_be_lifted() {
        for (text, expected) in [
            ("3.8.2", false),
            ("3.10.8", false),
            ("3.13.7", false),
            ("4.0.0-beta.5", true),
            ("4.0.5", true),
            ("4.1", true),
            ("10.0.0", true),
        ] {
            let version: Version = text.parse().expect("a version");
            assert_eq!(version.has_delivery_limit_of_its_own(), expected, "{text}");
        }
        for text in ["", "4", "four.zero", "4.x"] {
            assert!(text.parse::<Version>().is_err(), "{text}");
        }
    }
}
