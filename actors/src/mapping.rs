//! The mapping epoch: identity of the key-to-queue map of a consistent-hash exchange, and the watch for
//! messages that were sent under another one.
//!
//! While such a map changes, messages of one key can be in two queues, and nothing keeps them in order. That
//! cannot be prevented, but it can be seen: publishers stamp the epoch of the map they know into
//! [`header::MAPPING`](crate::header::MAPPING), and a consumer compares it with its own.
//!
//! Owns the epoch and [`MappingWatch`]. Pure: who looks reports.

use std::fmt;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::envelope::{Headers, header};

/// Seed of the epoch's hash. Part of the format: never changed.
const MAPPING_SEED: u64 = 0x6d61_7070_696e_6731;

/// How many foreign epochs are told apart. A map changes a few times in a life; more than this is somebody
/// who writes into the header what he likes, and must not use up memory.
const DISTINCT: usize = 64;

/// Identity of a map from keys to queues: the same for the same hash and the same queues with their weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MappingEpoch(u64);

impl MappingEpoch {
    /// The epoch of a map that hashes by `by` (`header account`) over `queues`, in the order in which they
    /// are bound, with their weights: XXH3-64 of `by`, a line feed, and for each queue its name, a tab,
    /// its weight in decimal and a line feed.
    pub fn of(by: &str, queues: &[(&str, u32)]) -> Self {
        let mut text = format!("{by}\n");
        for (name, weight) in queues {
            text.push_str(&format!("{name}\t{weight}\n"));
        }
        Self(xxh3_64_with_seed(text.as_bytes(), MAPPING_SEED))
    }
}

/// 16 hexadecimal digits, as it stands in the header.
impl fmt::Display for MappingEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Reads what `Display` shows.
impl std::str::FromStr for MappingEpoch {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u64::from_str_radix(text, 16).map(Self)
    }
}

/// Looks at deliveries for epochs that differ from an endpoint's own.
#[derive(Debug, Clone)]
pub struct MappingWatch {
    own: MappingEpoch,
    /// As it stands in the header: what is equal need not be read.
    own_text: Box<str>,
    seen: Vec<MappingEpoch>,
    differing: u64,
}

impl MappingWatch {
    /// A watch for everything that is not `own`.
    pub fn new(own: MappingEpoch) -> Self {
        Self {
            own,
            own_text: own.to_string().into(),
            seen: Vec::new(),
            differing: 0,
        }
    }

    /// The endpoint's own epoch.
    pub fn own(&self) -> MappingEpoch {
        self.own
    }

    /// Looks at a delivery's headers. A foreign epoch that was not seen before is returned, once, to be
    /// reported; after 64 different ones they are only counted. A message without an epoch (from a
    /// publisher that stamps none), or with something that is none, is not counted.
    pub fn look(&mut self, headers: &Headers) -> Option<MappingEpoch> {
        let text = headers.text(header::MAPPING)?;
        if *text == *self.own_text {
            return None;
        }
        let epoch: MappingEpoch = text.parse().ok()?;
        if epoch == self.own {
            return None;
        }
        self.differing += 1;
        if self.seen.contains(&epoch) || self.seen.len() == DISTINCT {
            return None;
        }
        self.seen.push(epoch);
        Some(epoch)
    }

    /// How many deliveries had a foreign epoch.
    pub fn differing(&self) -> u64 {
        self.differing
    }

    /// How many different foreign epochs there were, 64 at most.
    pub fn distinct(&self) -> usize {
        self.seen.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamped(text: &str) -> Headers {
        let mut headers = Headers::new();
        headers.insert(header::MAPPING, text);
        headers
    }

    /// Golden vectors, computed with the Python package `xxhash`: a release that changes one of these
    /// reports a change of the map where there is none.
    #[test]
    fn a_map_has_the_same_epoch_in_every_release() {
        let epochs = [
            MappingEpoch::of("header account", &[("orders-a", 1), ("orders-b", 2)]),
            MappingEpoch::of("header account", &[("orders-a", 2), ("orders-b", 1)]),
            MappingEpoch::of(
                "property correlation_id",
                &[("orders-a", 1), ("orders-b", 2)],
            ),
            MappingEpoch::of("header account", &[]),
        ];
        let shown = epochs.map(|epoch| epoch.to_string());
        assert_eq!(shown, GOLDEN);
    }

    const GOLDEN: [&str; 4] = [
        "157dce2ad7c9662f",
        "5637690c141e568f",
        "6fa5cd48129701f0",
        "1b49212546292f45",
    ];

    #[test]
    fn a_foreign_epoch_is_reported_once_and_counted_each_time() {
        let own = MappingEpoch::of("header k", &[("a", 1)]);
        let other = MappingEpoch::of("header k", &[("a", 1), ("b", 1)]);
        let third = MappingEpoch::of("header k", &[("b", 1)]);
        let mut watch = MappingWatch::new(own);
        assert_eq!(watch.look(&stamped(&own.to_string())), None);
        assert_eq!(watch.look(&stamped(&other.to_string())), Some(other));
        assert_eq!(watch.look(&stamped(&other.to_string())), None);
        assert_eq!(watch.look(&stamped(&third.to_string())), Some(third));
        assert_eq!(watch.look(&stamped(&other.to_string())), None);
        assert_eq!((watch.differing(), watch.distinct()), (4, 2));
    }

    #[test]
    fn what_is_no_epoch_is_no_change_of_the_map() {
        let mut watch = MappingWatch::new(MappingEpoch::of("header k", &[("a", 1)]));
        assert_eq!(watch.look(&Headers::new()), None);
        assert_eq!(watch.look(&stamped("what?")), None);
        let mut number = Headers::new();
        number.insert(header::MAPPING, 7_i64);
        assert_eq!(watch.look(&number), None);
        assert_eq!(watch.differing(), 0);
    }

    #[test]
    fn memory_does_not_grow_with_what_others_write() {
        let mut watch = MappingWatch::new(MappingEpoch(0));
        for number in 1..=10_000_u64 {
            watch.look(&stamped(&MappingEpoch(number).to_string()));
        }
        assert_eq!((watch.differing(), watch.distinct()), (10_000, DISTINCT));
    }
}
