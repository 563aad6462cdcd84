//! The ordering key: what it is, how it is hashed, how it is kept out of logs.
//!
//! Owns the one function from key to lane, and the one from key to shard. Promises that the same key goes
//! to the same lane and the same shard in every process and release ([`LaneIndex::of`],
//! [`ShardIndex::of`], held by golden vectors), and that a key's value
//! is never printed: [`OrderingKey`] has a `Debug` without the value, and no `Display`
//! (invariant 11). Does not decide where a key comes from: that is [`KeySource`](crate::KeySource).

use std::fmt;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::Arc;

use siphasher::sip::SipHasher24;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Seed of the hash that chooses a lane. Part of the format: never changed.
const LANE_SEED: u64 = 0;

/// Seed of the hash that chooses a shard. Part of the format: never changed. Another one than the lane's:
/// the keys of one shard would else fill only some of its lanes.
const SHARD_SEED: u64 = 0x6c61_6e65_7761_7931;

/// What must stay in order: messages with equal keys are handled one after the other.
///
/// Any bytes are a key; integers and text convert to their decimal and UTF-8 form, so that the
/// header `"42"`, the header `42` and the typed key `42_u64` are the same key.
///
/// Cloning is cheap (a counted reference). `Debug` does not show the value.
///
/// ```
/// use laneway_actors::OrderingKey;
/// assert_eq!(OrderingKey::from(42_u64), OrderingKey::from("42"));
/// assert_eq!(format!("{:?}", OrderingKey::from("account-7")), "OrderingKey(redacted)");
/// ```
#[derive(Clone)]
pub struct OrderingKey {
    bytes: Arc<[u8]>,
    hash: u64,
}

impl OrderingKey {
    /// Makes a key from its bytes.
    pub fn new(bytes: impl Into<Arc<[u8]>>) -> Self {
        let bytes = bytes.into();
        let hash = xxh3_64_with_seed(&bytes, LANE_SEED);
        Self { bytes, hash }
    }

    /// The bytes of the key. A secret as far as logs and pages are concerned: show
    /// [`Fingerprints::of`] instead.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl PartialEq for OrderingKey {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.bytes == other.bytes
    }
}

impl Eq for OrderingKey {}

impl Hash for OrderingKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl fmt::Debug for OrderingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OrderingKey(redacted)")
    }
}

impl From<&str> for OrderingKey {
    fn from(text: &str) -> Self {
        Self::new(text.as_bytes())
    }
}

impl From<String> for OrderingKey {
    fn from(text: String) -> Self {
        Self::new(text.into_bytes())
    }
}

impl From<&[u8]> for OrderingKey {
    fn from(bytes: &[u8]) -> Self {
        Self::new(bytes)
    }
}

macro_rules! key_from_integers {
    ($($integer:ty),*) => {$(
        impl From<$integer> for OrderingKey {
            fn from(number: $integer) -> Self {
                Self::from(number.to_string())
            }
        }
    )*};
}
key_from_integers!(
    u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize
);

/// A message that knows its own ordering key.
pub trait Keyed {
    /// The key. Called once per message, before its lane is chosen; a panic in it is a failure of
    /// the message, not of the lane.
    fn key(&self) -> OrderingKey;
}

/// How many lanes an endpoint has. Fixed while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneCount(NonZeroU32);

impl LaneCount {
    /// A number of lanes.
    pub fn new(count: NonZeroU32) -> Self {
        Self(count)
    }

    /// The number.
    pub fn get(self) -> u32 {
        self.0.get()
    }
}

/// Which lane of its endpoint, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneIndex(u32);

impl LaneIndex {
    /// The lane of `key` among `count` lanes: `(xxh3_64(key, seed 0) × count) >> 64`.
    ///
    /// The same in every process and release, so that two instances agree. XXH3 is specified and
    /// has implementations in every language; the multiplication spreads without the bias and
    /// the division of a modulo.
    pub fn of(key: &OrderingKey, count: LaneCount) -> Self {
        let wide = u128::from(key.hash) * u128::from(count.get());
        Self((wide >> 64) as u32)
    }

    /// A lane by its number. Whoever uses it checks it against the count.
    pub fn new(index: u32) -> Self {
        Self(index)
    }

    /// The number, as an index.
    pub fn get(self) -> usize {
        self.0 as usize
    }
}

/// How many shards a queue has, 1 to 1,000. Never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardCount(NonZeroU32);

impl ShardCount {
    /// The most shards that a queue can have: names are numbered with three digits, and a session for each
    /// is more than one instance should hold long before that.
    pub const MOST: u32 = 1_000;

    /// A number of shards, if it is 1 to 1,000.
    pub fn new(count: u32) -> Option<Self> {
        let count = NonZeroU32::new(count)?;
        (count.get() <= Self::MOST).then_some(Self(count))
    }

    /// The number.
    pub fn get(self) -> u32 {
        self.0.get()
    }
}

/// Which shard of its queue, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardIndex(u32);

impl ShardIndex {
    /// The shard of `key` among `count`: `(xxh3_64(key, seed 0x6c616e6577617931) × count) >> 64`.
    ///
    /// The same in every process and release, and for publishers in any language.
    pub fn of(key: &OrderingKey, count: ShardCount) -> Self {
        let hash = xxh3_64_with_seed(key.as_bytes(), SHARD_SEED);
        let wide = u128::from(hash) * u128::from(count.get());
        Self((wide >> 64) as u32)
    }

    /// The number, as an index.
    pub fn get(self) -> usize {
        self.0 as usize
    }
}

/// What stands for a key wherever a person or another program can read it: 16 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(u64);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Reads what `Display` shows.
impl std::str::FromStr for Fingerprint {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u64::from_str_radix(text, 16).map(Self)
    }
}

/// Makes fingerprints, keyed with a secret: without it nobody can find the key by trying values.
///
/// Two processes show the same fingerprint for a key only if they were given the same secret.
#[derive(Clone)]
pub struct Fingerprints {
    secret: [u8; 16],
}

impl Fingerprints {
    /// Fingerprints under a secret of any length, the same in every process that has it.
    pub fn with_secret(secret: &[u8]) -> Self {
        let wide = xxhash_rust::xxh3::xxh3_128(secret);
        Self {
            secret: wide.to_le_bytes(),
        }
    }

    /// Fingerprints under a secret of this process: stable until it ends.
    pub fn of_this_process() -> Self {
        Self::with_secret(uuid::Uuid::new_v4().as_bytes())
    }

    /// The fingerprint of a key: SipHash-2-4 under the secret.
    pub fn of(&self, key: &OrderingKey) -> Fingerprint {
        let mut hasher = SipHasher24::new_with_key(&self.secret);
        hasher.write(key.as_bytes());
        Fingerprint(hasher.finish())
    }
}

impl fmt::Debug for Fingerprints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fingerprints(secret)")
    }
}

/// A map by key that uses the hash the key already carries.
pub(crate) type KeyMap<V> =
    std::collections::HashMap<OrderingKey, V, BuildHasherDefault<CarriedHash>>;

/// Passes on the one `u64` that [`OrderingKey`] writes.
#[derive(Default)]
pub(crate) struct CarriedHash(u64);

impl Hasher for CarriedHash {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // Not reached by `OrderingKey`, which writes one u64; kept right for any other use.
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(count: u32) -> LaneCount {
        LaneCount::new(NonZeroU32::new(count).expect("tests use one lane or more"))
    }

    /// Golden vectors, computed with the Python package `xxhash`: a release that changes one of
    /// these moves keys to other lanes.
    #[test]
    fn a_key_has_the_same_lane_in_every_release() {
        for (key, of_8, of_256) in [
            ("", 1, 45),
            ("a", 7, 230),
            ("42", 0, 18),
            ("account-1", 3, 96),
            ("account-2", 6, 194),
        ] {
            let key = OrderingKey::from(key);
            let found = (
                LaneIndex::of(&key, lanes(8)).0,
                LaneIndex::of(&key, lanes(256)).0,
            );
            assert_eq!(found, (of_8, of_256), "key {:?}", key.as_bytes());
        }
    }

    fn shards(count: u32) -> ShardCount {
        ShardCount::new(count).expect("tests use a number that is allowed")
    }

    /// Golden vectors, computed with the Python package `xxhash`: a release that changes one of these
    /// sends messages of a key to a shard where its earlier ones are not.
    #[test]
    fn a_key_has_the_same_shard_in_every_release() {
        for (key, of_8, of_1000) in [
            ("", 1, 177),
            ("a", 0, 109),
            ("42", 3, 430),
            ("account-1", 6, 844),
            ("account-2", 1, 237),
        ] {
            let key = OrderingKey::from(key);
            let found = (
                ShardIndex::of(&key, shards(8)).0,
                ShardIndex::of(&key, shards(1000)).0,
            );
            assert_eq!(found, (of_8, of_1000), "key {:?}", key.as_bytes());
        }
    }

    #[test]
    fn the_keys_of_one_shard_fill_all_lanes() {
        let mut hits = [0_u32; 8];
        for number in 0..64_000_u32 {
            let key = OrderingKey::from(number);
            if ShardIndex::of(&key, shards(8)).get() == 3 {
                hits[LaneIndex::of(&key, lanes(8)).get()] += 1;
            }
        }
        assert!(
            hits.iter().all(|&n| (800..1200).contains(&n)),
            "uneven: {hits:?}"
        );
    }

    #[test]
    fn a_number_of_shards_is_bounded() {
        assert_eq!(ShardCount::new(0), None);
        assert_eq!(ShardCount::new(1_001), None);
        assert_eq!(ShardCount::new(1_000).map(ShardCount::get), Some(1_000));
    }

    #[test]
    fn keys_spread_over_all_lanes() {
        let mut hits = [0_u32; 16];
        for number in 0..16_000_u32 {
            hits[LaneIndex::of(&number.into(), lanes(16)).get()] += 1;
        }
        assert!(
            hits.iter().all(|&n| (800..1200).contains(&n)),
            "uneven: {hits:?}"
        );
    }

    #[test]
    fn integers_and_text_of_the_same_digits_are_one_key() {
        assert_eq!(OrderingKey::from(-7_i32), OrderingKey::from("-7"));
        assert_eq!(OrderingKey::from(7_u128), OrderingKey::from("7".to_owned()));
    }

    #[test]
    fn debug_output_does_not_show_the_key() {
        let shown = format!("{:?}", OrderingKey::from("marked-value"));
        assert!(!shown.contains("marked"), "{shown}");
    }

    #[test]
    fn fingerprints_depend_on_the_secret_and_on_the_key() {
        let one = Fingerprints::with_secret(b"one");
        let two = Fingerprints::with_secret(b"two");
        let key = OrderingKey::from("a");
        assert_eq!(one.of(&key), one.of(&key));
        assert_ne!(one.of(&key), two.of(&key));
        assert_ne!(one.of(&key), one.of(&"b".into()));
        assert_eq!(one.of(&key).to_string().len(), 16);
    }
}
