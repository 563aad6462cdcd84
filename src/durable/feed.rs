//! Which message of a queue or shard is handed to the lanes next. Pure.
//!
//! Owns what one session has in memory, and with it these promises:
//! - **Of a key one message is out at a time.** Its successor follows when the first has ended. So a message that is
//!   *kept* (its retry is later, or its key is held) is the only one of its key outside of the database, and what was
//!   read behind it can simply be forgotten: it is read again after it.
//! - What is out never exceeds the credits, and what is in memory never exceeds a few times as much.
//! - A key with much work cannot keep others out: of each key so many messages are in memory at most, and that
//!   number falls when the memory is full and nothing in it can run.
//!
//! # A read that crosses with an ending
//! A read names what it must leave out: everything in memory, and messages whose end is not known to be committed.
//! While it is under way,
//! - a message can end. It was named, so it does not come again.
//! - a message can be kept. The read may have seen its key before that, and bring its successors. They are dropped
//!   ([`Feed::kept`] notes the key while a read is under way): the next read sees what holds them.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use laneway_actors::OrderingKey;

use crate::store::{Sequence, Stored, Window};

/// Messages in memory for each credit. A read costs the database a walk over what it passes, so fewer and larger
/// ones are cheaper; but bodies are as large as the application makes them.
const READ_AHEAD: usize = 6;
/// The least that is read at once.
const LEAST_READ: usize = 16;

/// What one session has in memory.
pub(super) struct Feed {
    credits: usize,
    /// Handed out and not ended, by tag.
    out: BTreeMap<u64, Out>,
    last_tag: u64,
    keys: HashMap<OrderingKey, KeyState>,
    /// May be handed out, in the order in which they became so.
    ready: VecDeque<Stored>,
    /// In memory and not handed out.
    waiting: usize,
    /// Ended, and not known to be committed: not to be read again.
    ending: HashSet<Sequence>,
    /// Messages of one key in memory at most.
    cap: usize,
    reading: Option<Reading>,
    /// The last read was full, or left keys out: there may be more.
    more: bool,
}

struct Out {
    sequence: Sequence,
    key: Option<OrderingKey>,
}

#[derive(Default)]
struct KeyState {
    /// One of its messages is out, or in `ready`.
    busy: bool,
    /// What comes after that, in order.
    waiting: VecDeque<Stored>,
}

/// A read that is under way.
struct Reading {
    limit: usize,
    /// Keys with enough in memory were left out.
    left_out: bool,
    kept: HashSet<OrderingKey>,
}

/// A message that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) sequence: Sequence,
}

impl Feed {
    pub(super) fn new(credits: u16) -> Self {
        let credits = usize::from(credits).max(1);
        let mut feed = Self {
            credits,
            out: BTreeMap::new(),
            last_tag: 0,
            keys: HashMap::new(),
            ready: VecDeque::new(),
            waiting: 0,
            ending: HashSet::new(),
            cap: 0,
            reading: None,
            more: true,
        };
        feed.cap = feed.most_of_a_key();
        feed
    }

    fn room(&self) -> usize {
        (READ_AHEAD * self.credits)
            .max(LEAST_READ)
            .saturating_sub(self.waiting)
    }

    fn most_of_a_key(&self) -> usize {
        self.credits.max(LEAST_READ)
    }

    /// There is something new, or there may be.
    pub(super) fn look_again(&mut self) {
        self.more = true;
    }

    /// What to read now; `None` if nothing, or if a read is under way.
    pub(super) fn read(&mut self) -> Option<Window> {
        let idle = self.ready.is_empty() && self.out.len() < self.credits;
        if self.reading.is_some() || !self.more {
            return None;
        }
        if self.room() < LEAST_READ.max(self.credits / 2) {
            if !idle || self.cap == 1 {
                return None;
            }
            // Full of what cannot run: less of each key, so that others find room.
            self.cap = (self.cap / 2).max(1);
            self.trim();
            if self.room() == 0 {
                return None;
            }
        }
        let limit = self.room();
        let full = self
            .keys
            .iter()
            .filter(|(_, state)| state.waiting.len() >= self.cap);
        let full: Vec<_> = full.map(|(key, _)| key).collect();
        let in_memory = self
            .ready
            .iter()
            .chain(self.keys.values().flat_map(|state| &state.waiting));
        let skip = in_memory
            .map(|stored| stored.sequence)
            .chain(self.out.values().map(|out| out.sequence))
            .chain(self.ending.iter().copied());
        let window = Window::of(u32::try_from(limit).unwrap_or(u32::MAX))
            .skipping(skip)
            .holding(full.iter().copied());
        self.reading = Some(Reading {
            limit,
            left_out: !full.is_empty(),
            kept: HashSet::new(),
        });
        self.more = false;
        Some(window)
    }

    /// Forgets what each key has too much of. It is read again.
    fn trim(&mut self) {
        for state in self.keys.values_mut() {
            while state.waiting.len() > self.cap {
                state.waiting.pop_back();
                self.waiting -= 1;
            }
        }
    }

    /// How many messages may be claimed of a queue without order; `None` if none, or if a claim is under way.
    pub(super) fn claim(&mut self) -> Option<u32> {
        let free = self
            .credits
            .saturating_sub(self.out.len() + self.ready.len());
        let enough = free >= self.credits.div_ceil(4);
        if self.reading.is_some() || !self.more || !enough {
            return None;
        }
        self.reading = Some(Reading {
            limit: free,
            left_out: false,
            kept: HashSet::new(),
        });
        self.more = false;
        Some(u32::try_from(free).unwrap_or(u32::MAX))
    }

    /// The read has failed.
    pub(super) fn read_failed(&mut self) {
        self.reading = None;
        self.more = true;
    }

    /// What was read, in order.
    pub(super) fn arrived(&mut self, messages: Vec<Stored>) {
        let Some(reading) = self.reading.take() else {
            return;
        };
        if messages.len() >= reading.limit {
            self.more = true;
        } else if reading.left_out {
            // Looked for again when one of those keys has room.
        } else {
            self.cap = self.most_of_a_key();
        }
        for stored in messages {
            match &stored.key {
                None => {
                    self.waiting += 1;
                    self.ready.push_back(stored);
                }
                Some(key) if reading.kept.contains(key) => self.more = true,
                Some(key) => {
                    let state = self.keys.entry(key.clone()).or_default();
                    if !state.busy {
                        state.busy = true;
                        self.waiting += 1;
                        self.ready.push_back(stored);
                    } else if state.waiting.len() < self.cap {
                        self.waiting += 1;
                        state.waiting.push_back(stored);
                    } else {
                        // Too much of one key. What follows of it in this read is as much too much.
                        self.more = true;
                    }
                }
            }
        }
    }

    /// The next message to hand out, with its tag.
    pub(super) fn next(&mut self) -> Option<(u64, Stored)> {
        if self.out.len() >= self.credits {
            return None;
        }
        let stored = self.ready.pop_front()?;
        self.waiting -= 1;
        self.last_tag += 1;
        let out = Out {
            sequence: stored.sequence,
            key: stored.key.clone(),
        };
        self.out.insert(self.last_tag, out);
        Some((self.last_tag, stored))
    }

    /// The tags that an acknowledgement names and that are out.
    pub(super) fn named(&self, tag: u64, multiple: bool) -> Vec<u64> {
        match multiple {
            true => self.out.range(..=tag).map(|(tag, _)| *tag).collect(),
            false => self
                .out
                .contains_key(&tag)
                .then_some(tag)
                .into_iter()
                .collect(),
        }
    }

    /// A message has ended, and is about to be settled: its key goes on. `None` if it is not out.
    pub(super) fn ended(&mut self, tag: u64) -> Option<Ended> {
        let out = self.out.remove(&tag)?;
        self.ending.insert(out.sequence);
        if let Some(key) = out.key {
            self.go_on(key);
        }
        Some(Ended {
            sequence: out.sequence,
        })
    }

    /// A message that has ended is settled, for all to see.
    pub(super) fn committed(&mut self, sequence: Sequence) {
        self.ending.remove(&sequence);
    }

    /// A message is kept in its place, and its key with it: it comes again when its time has come.
    pub(super) fn kept(&mut self, tag: u64) {
        let Some(out) = self.out.remove(&tag) else {
            return;
        };
        let Some(key) = out.key else { return };
        if let Some(state) = self.keys.remove(&key) {
            self.waiting -= state.waiting.len();
        }
        if let Some(reading) = &mut self.reading {
            reading.kept.insert(key);
        }
    }

    fn go_on(&mut self, key: OrderingKey) {
        let Some(state) = self.keys.get_mut(&key) else {
            return;
        };
        match state.waiting.pop_front() {
            Some(next) => {
                if state.waiting.len() + 1 == self.cap.div_ceil(2) {
                    // It may have been left out, and has room now.
                    self.more = true;
                }
                self.ready.push_back(next);
            }
            None => {
                self.keys.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use laneway_actors::Envelope;

    fn stored(sequence: i64, key: Option<&str>) -> Stored {
        Stored {
            sequence: Sequence(sequence),
            attempts: 0,
            key: key.map(OrderingKey::from),
            envelope: Envelope::default(),
            broken: None,
        }
    }

    /// Reads this, and says what is handed out.
    fn arrive(feed: &mut Feed, messages: &[(i64, Option<&str>)]) -> Vec<(u64, i64)> {
        feed.look_again();
        feed.read().expect("there is room");
        feed.arrived(messages.iter().map(|(n, key)| stored(*n, *key)).collect());
        hand_out(feed)
    }

    fn hand_out(feed: &mut Feed) -> Vec<(u64, i64)> {
        std::iter::from_fn(|| feed.next())
            .map(|(tag, stored)| (tag, stored.sequence.0))
            .collect()
    }

    #[test]
    fn of_a_key_one_message_is_out_and_its_successor_follows_its_end() {
        let mut feed = Feed::new(8);
        let out = arrive(
            &mut feed,
            &[
                (1, Some("a")),
                (2, Some("a")),
                (3, Some("b")),
                (4, None),
                (5, None),
            ],
        );
        assert_eq!(out, [(1, 1), (2, 3), (3, 4), (4, 5)]);
        assert_eq!(
            feed.ended(1),
            Some(Ended {
                sequence: Sequence(1)
            })
        );
        assert_eq!(hand_out(&mut feed), [(5, 2)]);
        assert_eq!(feed.ended(1), None, "settled at most once");
    }

    #[test]
    fn what_is_out_never_exceeds_the_credits() {
        let mut feed = Feed::new(2);
        assert_eq!(
            arrive(&mut feed, &[(1, None), (2, None), (3, None)]).len(),
            2
        );
        feed.ended(2);
        assert_eq!(hand_out(&mut feed), [(3, 3)]);
        assert_eq!(feed.named(3, true), [1, 3]);
        assert_eq!(feed.named(2, false), [0_u64; 0]);
    }

    #[test]
    fn a_kept_message_takes_what_follows_it_out_of_memory_also_out_of_a_read_under_way() {
        let mut feed = Feed::new(8);
        arrive(&mut feed, &[(1, Some("a")), (2, Some("a")), (3, Some("b"))]);
        feed.look_again();
        feed.read().expect("there is room");
        feed.kept(1);
        feed.arrived(vec![
            stored(4, Some("a")),
            stored(5, Some("b")),
            stored(6, Some("c")),
        ]);
        assert_eq!(hand_out(&mut feed), [(3, 6)]);
        // Its time has come: it is read again, and what follows it behind it.
        let out = arrive(&mut feed, &[(1, Some("a")), (2, Some("a")), (4, Some("a"))]);
        assert_eq!(out, [(4, 1)]);
    }

    #[test]
    fn a_message_is_not_read_again_before_its_end_is_committed() {
        let mut feed = Feed::new(8);
        arrive(&mut feed, &[(1, Some("a"))]);
        feed.ended(1);
        feed.look_again();
        let window = feed.read().expect("there is room");
        assert_eq!(window.skip(), [1]);
        feed.arrived(Vec::new());
        feed.committed(Sequence(1));
        feed.look_again();
        assert_eq!(feed.read().expect("there is room").skip(), [0_i64; 0]);
    }

    #[test]
    fn one_busy_key_does_not_keep_others_out() {
        let mut feed = Feed::new(16);
        let hot: Vec<i64> = (1..=1_000).collect();
        let other = 1_001;
        // The database gives the oldest that the window does not leave out.
        for _ in 0..100 {
            feed.look_again();
            let Some(window) = feed.read() else { break };
            let mut found: Vec<_> = Vec::new();
            if window.held().is_empty() {
                let known: HashSet<_> = window.skip().iter().copied().collect();
                let fresh = hot.iter().filter(|n| !known.contains(n));
                found.extend(
                    fresh
                        .take(window.limit() as usize)
                        .map(|n| stored(*n, Some("hot"))),
                );
            }
            if found.len() < window.limit() as usize {
                found.push(stored(other, Some("other")));
                feed.arrived(found);
                let out = hand_out(&mut feed);
                assert!(out.iter().any(|(_, n)| *n == other), "{out:?}");
                return;
            }
            feed.arrived(found);
            hand_out(&mut feed);
        }
        panic!("the other key never came");
    }

    /// Random reads, ends and keeps against a model of the database: every message of a key is handed out after
    /// the end of the one before it, and none is lost.
    #[test]
    fn whatever_happens_a_key_is_handed_out_in_order_and_nothing_is_lost() {
        for seed in 0..400 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut feed = Feed::new(rng.u16(1..12));
            let keys = rng.i64(1..6);
            let total = 200;
            // Sequence to key; `None` once it is settled.
            let key_of = |n: i64| (n % keys).to_string();
            let mut rows: BTreeMap<i64, bool> = (1..=total).map(|n| (n, false)).collect();
            let mut out: HashMap<u64, i64> = HashMap::new();
            let mut reading: Option<Vec<Stored>> = None;
            let mut committing: Vec<i64> = Vec::new();
            let mut done: HashMap<String, i64> = HashMap::new();
            let mut handled = 0;
            for step in 0..200_000 {
                if handled == total {
                    break;
                }
                assert!(step < 199_999, "seed {seed}: stuck with {handled} handled");
                match rng.u8(0..7) {
                    0 => {
                        feed.look_again();
                    }
                    1 if reading.is_none() => {
                        if let Some(window) = feed.read() {
                            // The snapshot is taken now, its answer comes later.
                            let held: HashSet<_> = window.held().iter().copied().collect();
                            let waits: HashSet<String> = rows
                                .iter()
                                .filter(|(_, kept)| **kept)
                                .map(|(n, _)| key_of(*n))
                                .collect();
                            let found = rows
                                .keys()
                                .filter(|n| !window.skip().contains(n))
                                .filter(|n| !waits.contains(&key_of(**n)))
                                .map(|n| stored(*n, Some(&key_of(*n))))
                                .filter(|row| {
                                    let key = row.key.as_ref().expect("all have one");
                                    let alone = Window::of(1).holding([key]);
                                    !held.contains(&alone.held()[0])
                                })
                                .take(window.limit() as usize)
                                .collect();
                            reading = Some(found);
                        }
                    }
                    2 => {
                        if let Some(found) = reading.take() {
                            feed.arrived(found);
                        }
                    }
                    3 => {
                        if let Some((tag, message)) = feed.next() {
                            let n = message.sequence.0;
                            let before = done.get(&key_of(n)).copied().unwrap_or(0);
                            let expected = (before + 1..=total).find(|m| key_of(*m) == key_of(n));
                            assert_eq!(Some(n), expected, "seed {seed}");
                            assert!(out.values().all(|other| key_of(*other) != key_of(n)));
                            out.insert(tag, n);
                        }
                    }
                    4 => {
                        let Some(tag) = out.keys().copied().min() else {
                            continue;
                        };
                        let n = out.remove(&tag).expect("it is there");
                        assert_eq!(feed.ended(tag).map(|e| e.sequence.0), Some(n));
                        done.insert(key_of(n), n);
                        committing.push(n);
                        handled += 1;
                    }
                    5 => {
                        let Some(tag) = out.keys().copied().max() else {
                            continue;
                        };
                        // Kept in the database first, then here.
                        let n = out.remove(&tag).expect("it is there");
                        rows.insert(n, true);
                        if rng.bool() && reading.is_none() {
                            feed.look_again();
                        }
                        feed.kept(tag);
                    }
                    _ => {
                        if let Some(n) = committing.pop() {
                            rows.remove(&n);
                            feed.committed(Sequence(n));
                        }
                        // The time of what is kept has come.
                        if rng.u8(0..4) == 0 {
                            rows.values_mut().for_each(|kept| *kept = false);
                            feed.look_again();
                        }
                    }
                }
            }
        }
    }
}
