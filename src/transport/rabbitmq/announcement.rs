//! The form in which an announcement travels: JSON with a version.
//!
//! Instances of two releases hear one another during an upgrade, so what is here stays as it is.

use std::collections::BTreeSet;

use laneway_actors::port::{Announcement, MemberId};
use serde::{Deserialize, Serialize};

/// The version of what is announced. A release that needs another form announces both for a while.
const VERSION: u32 = 1;

/// The form of an announcement.
#[derive(Serialize, Deserialize)]
struct Wire {
    v: u32,
    /// 32 hexadecimal digits: JSON's numbers are too small.
    member: String,
    sequence: u64,
    of: usize,
    shards: BTreeSet<usize>,
    willing: bool,
}

#[derive(Deserialize)]
struct WireVersion {
    v: u32,
}

pub(super) fn encode(announcement: &Announcement) -> Result<bytes::Bytes, serde_json::Error> {
    let wire = Wire {
        v: VERSION,
        member: announcement.member.to_string(),
        sequence: announcement.sequence,
        of: announcement.of,
        shards: announcement.shards.clone(),
        willing: announcement.willing,
    };
    serde_json::to_vec(&wire).map(Into::into)
}

/// # Errors
/// Why it cannot be read: another version, or no announcement at all.
pub(super) fn decode(body: &[u8]) -> Result<Announcement, String> {
    let version: WireVersion = serde_json::from_slice(body).map_err(|why| why.to_string())?;
    if version.v != VERSION {
        return Err(format!("version {}, known is {VERSION}", version.v));
    }
    let wire: Wire = serde_json::from_slice(body).map_err(|why| why.to_string())?;
    let member = u128::from_str_radix(&wire.member, 16).map_err(|why| why.to_string())?;
    Ok(Announcement {
        member: MemberId::from_u128(member),
        sequence: wire.sequence,
        of: wire.of,
        shards: wire.shards,
        willing: wire.willing,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announcement() -> Announcement {
        Announcement {
            member: MemberId::from_u128(0xab),
            sequence: 7,
            of: 4,
            shards: BTreeSet::from([0, 3]),
            willing: true,
        }
    }

    #[test]
    fn an_announcement_is_the_same_in_every_release() {
        let body = encode(&announcement()).expect("plain data");
        let text = std::str::from_utf8(&body).expect("JSON is text");
        let expected = r#"{"v":1,"member":"000000000000000000000000000000ab","sequence":7,"of":4,"shards":[0,3],"willing":true}"#;
        assert_eq!(text, expected);
        assert_eq!(decode(&body), Ok(announcement()));
    }

    #[test]
    fn what_cannot_be_read_says_why() {
        for (body, why) in [
            (r#"{"v":2,"anything":0}"#, "version 2, known is 1"),
            (r#"{"v":1}"#, "missing field `member`"),
            ("nonsense", "expected"),
        ] {
            let error = decode(body.as_bytes()).expect_err(body);
            assert!(error.contains(why), "{error}");
        }
    }
}
