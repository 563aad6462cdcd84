//! The broker's version: `lapin` does not pass on what the server says of itself, so its first frame is read.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use lapin::uri::{AMQPScheme, AMQPUri};

/// "RabbitMQ 3.10.8", or why it is not known.
pub(crate) fn version(url: &str) -> String {
    first_frame(url).map_or_else(
        || "a broker that does not tell its version".to_owned(),
        |frame| {
            let product = text_after(&frame, "product").unwrap_or("unknown product");
            let version = text_after(&frame, "version").unwrap_or("of unknown version");
            format!("{product} {version}")
        },
    )
}

fn first_frame(url: &str) -> Option<Vec<u8>> {
    let uri: AMQPUri = url.parse().ok()?;
    if uri.scheme != AMQPScheme::AMQP {
        return None;
    }
    let address = (uri.authority.host.as_str(), uri.authority.port);
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.write_all(b"AMQP\x00\x00\x09\x01").ok()?;
    let mut frame = vec![0; 8_192];
    let read = stream.read(&mut frame).ok()?;
    frame.truncate(read);
    Some(frame)
}

/// The text of a field of a table: its name with its length before it, `S`, four bytes of length, the text.
fn text_after<'a>(frame: &'a [u8], field: &str) -> Option<&'a str> {
    let mut name = vec![field.len() as u8];
    name.extend(field.bytes());
    name.push(b'S');
    let at = frame.windows(name.len()).position(|part| part == name)? + name.len();
    let length = frame.get(at..at + 4)?.try_into().ok()?;
    let length = u32::from_be_bytes(length) as usize;
    std::str::from_utf8(frame.get(at + 4..at + 4 + length)?).ok()
}

#[cfg(test)]
mod tests {
    use super::text_after;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let frame = b"\x0fproduct_versionS\x00\x00\x00\x01x\x07versionS\x00\x00\x00\x063.10.8rest";
        assert_eq!(text_after(frame, "version"), Some("3.10.8"));
        assert_eq!(text_after(frame, "product"), None);
    }
}
