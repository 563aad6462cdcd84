//! Which message of a queue or shard is handed to the lanes next. Pure.
//!
//! Owns what one session has in memory, and with it these promises:
//! - **Of a key one message is out at a time.** Its successor follows when the first has ended. So a message that is
//!   *kept* (its retry is later, or its key is held) is the only one of its key outside of the database, and what was
//!   read behind it can simply be forgotten: it is read again after it.
//! - What is out never exceeds the credits; with what has ended and is not settled, and what is in memory, a few times
//!   as much.
//! - A key with much work cannot keep others out: of each key so many messages are in memory at most, and that
//!   number falls when the memory is full and nothing in it can run.
//!
//! # A read that crosses with an ending
//! A read names what it must leave out: everything in memory, and messages whose end is not known to be committed.
//! While it is under way,
//! - a message can end. It was named, so it does not come again.
//! - a message can be kept. The read may have seen its key before that, and bring its successors. They are dropped
//!   ([`Feed::kept`] notes the key while a read is under way): the next read sees what holds them.
//!
//! A read is under way until [`Feed::arrived`]: also while what it has brought is counted.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use laneway_actors::OrderingKey;

use crate::store::{Sequence, Stored, Window};

/// Messages in memory for each credit. A read costs the database a walk over what it passes, so fewer and larger
/// ones are cheaper; but bodies are as large as the application makes them.
const READ_AHEAD: usize = 6;
/// Messages for each credit that are handed out or ended and not known to be settled: as many can run again if this
/// process is killed, and start here while the database does not answer.
const UNSETTLED: usize = 4;
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
    /// It cannot be read: the session moves it away, and the lanes do not know of it.
    buried: bool,
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

    fn most(&self) -> usize {
        (READ_AHEAD * self.credits).max(LEAST_READ)
    }

    /// Messages that it has at most, those that are out included.
    pub(super) fn most_in_memory(&self) -> usize {
        self.most() + self.credits
    }

    fn room(&self) -> usize {
        self.most().saturating_sub(self.waiting)
    }

    /// Room for which a read is worth while: a share of the whole, also of a small one. Were it more than what is
    /// free with one message of each key waiting, a key with a long handler would keep all others out: nothing of it
    /// could be forgotten any more, and nothing read.
    fn enough_room(&self) -> bool {
        self.room() >= self.most() / 4
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
        if !self.enough_room() {
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
        let unsettled = self.out.len() + self.ending.len();
        if self.out.len() >= self.credits || unsettled >= UNSETTLED * self.credits {
            return None;
        }
        let stored = self.ready.pop_front()?;
        self.waiting -= 1;
        self.last_tag += 1;
        let out = Out {
            sequence: stored.sequence,
            key: stored.key.clone(),
            buried: false,
        };
        self.out.insert(self.last_tag, out);
        Some((self.last_tag, stored))
    }

    /// A message that is out is not given to the lanes, but moved away. It is out until it has [ended](Self::ended), and
    /// no acknowledgement means it: one of all up to a later tag comes from somebody who does not know of it.
    pub(super) fn buried(&mut self, tag: u64) {
        if let Some(out) = self.out.get_mut(&tag) {
            out.buried = true;
        }
    }

    /// The tags that an acknowledgement names and that are out.
    pub(super) fn named(&self, tag: u64, multiple: bool) -> Vec<u64> {
        let first = if multiple { 0 } else { tag };
        let named = self.out.range(first..=tag);
        named
            .filter(|(_, out)| !out.buried)
            .map(|(tag, _)| *tag)
            .collect()
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

    /// A message is kept in its place, and its key with it: it comes again when its time has come. `None` if it is not
    /// out.
    pub(super) fn kept(&mut self, tag: u64) -> Option<Sequence> {
        let out = self.out.remove(&tag)?;
        if let Some(key) = out.key {
            if let Some(state) = self.keys.remove(&key) {
                self.waiting -= state.waiting.len();
            }
            if let Some(reading) = &mut self.reading {
                reading.kept.insert(key);
            }
        }
        Some(out.sequence)
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

    /// Acknowledged, it would be gone without a trace.
    #[test]
    fn an_acknowledgement_does_not_mean_what_is_being_buried() {
        let mut feed = Feed::new(8);
        arrive(&mut feed, &[(1, Some("a")), (2, None), (3, Some("a"))]);
        feed.buried(1);
        assert_eq!(feed.named(2, true), [2]);
        assert_eq!(feed.named(1, false), [0_u64; 0]);
        assert_eq!(hand_out(&mut feed), [], "its key waits for its end");
        assert!(feed.ended(1).is_some());
        assert_eq!(hand_out(&mut feed), [(3, 3)]);
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

    /// Also one that comes later, when of the busy key as little is left in memory as can be.
    #[test]
    fn a_key_with_a_long_handler_does_not_keep_out_what_is_published_later() {
        let mut feed = Feed::new(2);
        let hot: Vec<_> = (1..=16).map(|n| (n, Some("hot"))).collect();
        assert_eq!(arrive(&mut feed, &hot), [(1, 1)]);
        for nothing_new in 0..8 {
            feed.look_again();
            assert!(feed.read().is_some(), "read {nothing_new}");
            feed.arrived(Vec::new());
        }
        assert_eq!(arrive(&mut feed, &[(17, Some("other"))]), [(2, 17)]);
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

    /// Feeds that are broken on purpose, from outside. The random test must find each.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Mutant {
        /// A read under way does not learn of what is kept.
        ForgetsWhatIsKept,
        /// A read does not leave out what is being settled.
        ForgetsWhatIsEnding,
        /// A memory full of what cannot run stays full.
        DoesNotTrim,
        /// The successors of a kept message stay in memory, and the next one goes out.
        GoesOnBehindWhatIsKept,
        /// A key that was left out and has room again is not looked for.
        DoesNotLookAgain,
    }

    /// A message in the database.
    #[derive(Clone, Copy, PartialEq)]
    enum Row {
        Ready,
        /// Its time will come.
        Later,
        /// An operator will let it try again.
        Held,
    }

    /// A read is told to the database, seen by it, answered: each at its own time.
    enum Read {
        None,
        Asked(Window),
        Seen(Vec<Stored>),
    }

    /// A session and the database, step by step. What a session does in two steps (first in the database, then here,
    /// or the other way round) are two steps here, and anything may come between.
    struct Story {
        rng: fastrand::Rng,
        feed: Feed,
        mutant: Option<Mutant>,
        /// The key of each message ever.
        keys: BTreeMap<i64, String>,
        published: i64,
        rows: BTreeMap<i64, Row>,
        read: Read,
        out: BTreeMap<u64, i64>,
        /// Kept in the database, not here yet.
        keeping: Vec<(u64, i64)>,
        /// Ended here, not in the database yet.
        settling: Vec<i64>,
        /// Settled in the database, not known here.
        settled: Vec<i64>,
        /// Moved away in the database, not ended here yet.
        moved: Vec<(u64, i64)>,
        /// Ended here.
        done: HashSet<i64>,
        /// Looks by the clock, too.
        polls: bool,
        /// The first message of this key runs until those of all other keys have ended.
        long: Option<String>,
    }

    impl Story {
        fn new(seed: u64, mutant: Option<Mutant>) -> Self {
            let mut rng = fastrand::Rng::with_seed(seed);
            let credits = rng.u16(1..12);
            let hot = credits > 1 && rng.bool();
            let (many, total) = (rng.i64(1..6), rng.i64(1..80));
            let keys: BTreeMap<i64, String> = (1..=total)
                .map(|n| match hot && (n < 30 || rng.bool()) {
                    true => (n, "hot".to_owned()),
                    false => (n, rng.i64(0..many).to_string()),
                })
                .collect();
            let there = rng.i64(0..=total);
            Self {
                feed: Feed::new(credits),
                mutant,
                published: there,
                rows: (1..=there).map(|n| (n, Row::Ready)).collect(),
                keys,
                read: Read::None,
                out: BTreeMap::new(),
                keeping: Vec::new(),
                settling: Vec::new(),
                settled: Vec::new(),
                moved: Vec::new(),
                done: HashSet::new(),
                polls: rng.u8(0..4) == 0,
                long: hot.then(|| "hot".to_owned()),
                rng,
            }
        }

        fn play(&mut self) -> Result<(), String> {
            for _ in 0..20_000 {
                if self.done.len() == self.keys.len() {
                    return Ok(());
                }
                self.step()?;
                if self.feed.out.len() > self.feed.credits {
                    return Err("more is out than there are credits".to_owned());
                }
                let held: usize = self.feed.keys.values().map(|key| key.waiting.len()).sum();
                if self.feed.waiting != held + self.feed.ready.len() {
                    return Err("what is in memory is counted wrongly".to_owned());
                }
            }
            let Feed {
                credits,
                cap,
                more,
                waiting,
                ..
            } = &self.feed;
            Err(format!(
                "stuck with {} of {} ended: {:?} is out, {credits} credits, {waiting} wait, cap {cap}, more: {more}",
                self.done.len(),
                self.keys.len(),
                self.out
            ))
        }

        fn step(&mut self) -> Result<(), String> {
            match self.rng.u8(0..11) {
                0 => {
                    // Published, which is told.
                    if self.keys.contains_key(&(self.published + 1)) {
                        self.published += 1;
                        self.rows.insert(self.published, Row::Ready);
                        self.feed.look_again();
                    } else if self.polls {
                        self.feed.look_again();
                    }
                }
                1 => {
                    if let Read::None = self.read
                        && let Some(window) = self.ask()
                    {
                        self.read = Read::Asked(window);
                    }
                }
                2 => {
                    if let Read::Asked(window) = &self.read {
                        self.read = Read::Seen(self.see(window));
                    }
                }
                3 => {
                    if let Read::Seen(found) = &mut self.read {
                        let found = std::mem::take(found);
                        self.read = Read::None;
                        if self.mutant == Some(Mutant::ForgetsWhatIsKept) {
                            self.feed.reading.as_mut().expect("asked").kept.clear();
                        }
                        self.feed.arrived(found);
                    }
                }
                4 => self.hand_out()?,
                5 => {
                    // Handled: it ends here, and then in the database.
                    if let Some((tag, n)) = self.one_of_those_out() {
                        self.ends_here(tag, n);
                        self.settling.push(n);
                    }
                }
                6 => {
                    // Moved to the dead letters, or handled in its transaction: the other way round.
                    if let Some((tag, n)) = self.one_of_those_out() {
                        self.rows.remove(&n);
                        self.moved.push((tag, n));
                    }
                }
                7 => {
                    // Kept in the database. Its time may have come at once.
                    if let Some((tag, n)) = self.one_of_those_out() {
                        let row = [Row::Ready, Row::Later, Row::Held][self.rng.usize(0..3)];
                        self.rows.insert(n, row);
                        self.keeping.push((tag, n));
                    }
                }
                8 => {
                    if !self.keeping.is_empty() {
                        let (tag, n) = self.keeping.remove(self.rng.usize(0..self.keeping.len()));
                        self.kept_here(tag);
                        if self.rows[&n] == Row::Ready {
                            self.feed.look_again();
                        }
                    }
                }
                9 => {
                    if !self.settling.is_empty() {
                        let n = self.settling.remove(0);
                        self.rows.remove(&n);
                        self.settled.push(n);
                    } else if !self.settled.is_empty() {
                        let n = self.settled.remove(0);
                        self.feed.committed(Sequence(n));
                    } else if let Some((tag, n)) = self.moved.pop() {
                        self.ends_here(tag, n);
                        self.feed.committed(Sequence(n));
                    }
                }
                _ => {
                    // Its time has come, or the operator: both are told.
                    let kept = self.rows.iter().filter(|(_, row)| **row != Row::Ready);
                    let kept: Vec<_> = kept.map(|(n, _)| *n).collect();
                    if !kept.is_empty() {
                        let n = kept[self.rng.usize(0..kept.len())];
                        self.rows.insert(n, Row::Ready);
                        self.feed.look_again();
                    }
                }
            }
            Ok(())
        }

        fn ask(&mut self) -> Option<Window> {
            match self.mutant {
                Some(Mutant::DoesNotTrim) if !self.feed.enough_room() => return None,
                Some(Mutant::ForgetsWhatIsEnding) => self.feed.ending.clear(),
                _ => {}
            }
            self.feed.read()
        }

        /// What the database finds now.
        fn see(&self, window: &Window) -> Vec<Stored> {
            let waits = self.rows.iter().filter(|(_, row)| **row != Row::Ready);
            let waits: HashSet<_> = waits.map(|(n, _)| &self.keys[n]).collect();
            let left_out = |key: &str| {
                let alone = Window::of(1).holding([&OrderingKey::from(key)]);
                window.held().contains(&alone.held()[0])
            };
            let found = self.rows.keys().filter(|n| {
                let key = &self.keys[n];
                !window.skip().contains(n) && !waits.contains(key) && !left_out(key)
            });
            let limit = usize::try_from(window.limit()).expect("few");
            let found = found.take(limit);
            found.map(|n| stored(*n, Some(&self.keys[n]))).collect()
        }

        fn hand_out(&mut self) -> Result<(), String> {
            let Some((tag, message)) = self.feed.next() else {
                return Ok(());
            };
            let n = message.sequence.0;
            let of_key = |other: &i64| self.keys[other] == self.keys[&n];
            let first = self
                .keys
                .keys()
                .find(|m| of_key(m) && !self.done.contains(m));
            if first != Some(&n) {
                return Err(format!("{n} is handed out, it is the turn of {first:?}"));
            }
            let moving = self
                .keeping
                .iter()
                .chain(&self.moved)
                .map(|(_, other)| other);
            if self.out.values().chain(moving).any(of_key) {
                return Err(format!("{n} is handed out, and another of its key is out"));
            }
            if self.rows.get(&n) != Some(&Row::Ready) {
                return Err(format!("{n} is handed out, and its time has not come"));
            }
            self.out.insert(tag, n);
            Ok(())
        }

        fn one_of_those_out(&mut self) -> Option<(u64, i64)> {
            let tags: Vec<_> = self.out.keys().copied().collect();
            let tag = *tags.get(self.rng.usize(0..tags.len().max(1)))?;
            let runs_long = self.long.as_ref() == Some(&self.keys[&self.out[&tag]]);
            let others = |n: &&i64| self.long.as_ref() != Some(&self.keys[n]);
            if runs_long
                && self
                    .keys
                    .keys()
                    .filter(others)
                    .any(|n| !self.done.contains(n))
            {
                return None;
            }
            self.out.remove(&tag).map(|n| (tag, n))
        }

        fn ends_here(&mut self, tag: u64, n: i64) {
            let more = self.feed.more;
            let sequence = Sequence(n);
            assert_eq!(self.feed.ended(tag), Some(Ended { sequence }));
            if self.mutant == Some(Mutant::DoesNotLookAgain) {
                self.feed.more = more;
            }
            self.done.insert(n);
        }

        fn kept_here(&mut self, tag: u64) {
            if self.mutant == Some(Mutant::GoesOnBehindWhatIsKept) {
                let out = self.feed.out.remove(&tag).expect("it is out");
                self.feed.go_on(out.key.expect("all have one"));
                return;
            }
            self.feed.kept(tag);
        }
    }

    const STORIES: u64 = 300;

    /// Every message of a key is handed out after the end of the one before it and when its time has come, and none is
    /// lost: also without looking by the clock.
    #[test]
    fn whatever_happens_a_key_is_handed_out_in_order_and_nothing_is_lost() {
        for seed in 0..STORIES {
            if let Err(why) = Story::new(seed, None).play() {
                panic!("seed {seed}: {why}");
            }
        }
    }

    #[test]
    fn a_feed_that_is_broken_on_purpose_is_found() {
        for mutant in [
            Mutant::ForgetsWhatIsKept,
            Mutant::ForgetsWhatIsEnding,
            Mutant::DoesNotTrim,
            Mutant::GoesOnBehindWhatIsKept,
            Mutant::DoesNotLookAgain,
        ] {
            let found = (0..STORIES).any(|seed| Story::new(seed, Some(mutant)).play().is_err());
            assert!(found, "not found: {mutant:?}");
        }
    }
}
