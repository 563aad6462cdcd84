//! Which deliveries of a session are unsettled, and how to acknowledge. Pure.
//!
//! Owns the order of acknowledgements. RabbitMQ closes a channel that acknowledges an unknown tag, so
//! each tag is named at most once, and `multiple` names one that is still outstanding.

mod finished;
mod gathering;

use std::collections::VecDeque;
use std::time::Instant;

use crate::envelope::DeliveryTag;
use crate::port::Ack;

pub(crate) use finished::{Ending, Finished};
use gathering::Gathering;

/// So many entries are not worth a walk.
const MANY: usize = 64;

/// The unsettled deliveries of one session, in order of arrival.
#[derive(Debug)]
pub(crate) struct AckBook {
    entries: VecDeque<Entry>,
    /// Ended since the last acknowledgements, in order of completion.
    ended: Vec<DeliveryTag>,
    /// Ended before that and kept back, each with the time from which on it was; in order of completion.
    kept_back: VecDeque<(DeliveryTag, Instant)>,
    gathering: Option<Gathering>,
    unsettled: usize,
    /// Entries of what was acknowledged singly, not removed yet.
    acknowledged: usize,
    /// The highest tag that has arrived.
    last: Option<DeliveryTag>,
}

#[derive(Debug)]
struct Entry {
    tag: DeliveryTag,
    at: Instant,
    lane: usize,
    state: EntryState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EntryState {
    Outstanding,
    Ended,
    Acknowledged,
}

impl AckBook {
    /// A session with so many credits. With `gather`, what ends out of order is kept back for a moment; see
    /// [`Gathering`].
    pub(crate) fn new(credits: u16, gather: bool) -> Self {
        Self {
            entries: VecDeque::new(),
            ended: Vec::new(),
            kept_back: VecDeque::new(),
            gathering: gather.then(|| Gathering::of(credits)),
            unsettled: 0,
            acknowledged: 0,
            last: None,
        }
    }

    /// Deliveries that have not ended.
    pub(crate) fn unsettled(&self) -> usize {
        self.unsettled
    }

    /// A delivery arrived and went to a lane. False, and nothing is noted, if its tag is not above all
    /// earlier ones of the session, as a source promises.
    #[must_use]
    pub(crate) fn arrived(&mut self, tag: DeliveryTag, lane: usize, at: Instant) -> bool {
        if self.last.is_some_and(|last| tag <= last) {
            return false;
        }
        self.last = Some(tag);
        self.entries.push_back(Entry {
            tag,
            at,
            lane,
            state: EntryState::Outstanding,
        });
        self.unsettled += 1;
        true
    }

    /// A delivery ended. Returns its lane; `None` for a tag that is not outstanding.
    pub(crate) fn ended(&mut self, tag: DeliveryTag) -> Option<usize> {
        let at = self
            .entries
            .binary_search_by_key(&tag, |entry| entry.tag)
            .ok()?;
        let entry = &mut self.entries[at];
        if entry.state != EntryState::Outstanding {
            return None;
        }
        entry.state = EntryState::Ended;
        self.unsettled -= 1;
        self.ended.push(tag);
        Some(entry.lane)
    }

    /// The lanes of what has not ended.
    pub(crate) fn outstanding_lanes(&self) -> impl Iterator<Item = usize> {
        self.entries
            .iter()
            .filter(|entry| entry.state == EntryState::Outstanding)
            .map(|entry| entry.lane)
    }

    /// When the oldest that has not ended arrived.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        let mut entries = self.entries.iter();
        let oldest = entries.find(|entry| entry.state == EntryState::Outstanding);
        oldest.map(|entry| entry.at)
    }

    /// Whether there is something to acknowledge.
    pub(crate) fn has_ended(&self) -> bool {
        !self.ended.is_empty() || !self.kept_back.is_empty()
    }

    /// The acknowledgements due at `now`: the finished prefix at once, everything else singly in the order in
    /// which it ended, unless it is kept back. Returns when to ask again at the latest, if something is.
    #[must_use]
    pub(crate) fn acknowledge(&mut self, now: Instant, acks: &mut Vec<Ack>) -> Option<Instant> {
        let covered = self.acknowledge_prefix(acks);
        if let Some(covered) = covered {
            let before = self.kept_back.len();
            self.kept_back.retain(|&(tag, _)| tag > covered);
            if let Some(gathering) = &mut self.gathering
                && self.kept_back.len() < before
            {
                gathering.was_worth_while();
            }
        }
        if self.kept_back.is_empty()
            && let Some(gathering) = &mut self.gathering
        {
            gathering.is_over();
        }
        let ended = self.ended.drain(..);
        let out_of_order = ended.filter(|&tag| covered.is_none_or(|covered| tag > covered));
        self.kept_back.extend(out_of_order.map(|tag| (tag, now)));
        let &(_, oldest) = self.kept_back.front()?;
        let gathering = self.gathering.as_mut();
        let keep = gathering.and_then(|gathering| gathering.keep_back(oldest, now));
        let (most, until) = keep.unzip();
        self.acknowledge_singly(most.unwrap_or(0), acks);
        until.filter(|_| !self.kept_back.is_empty())
    }

    /// All acknowledgements, nothing kept back: somebody waits for their being processed.
    pub(crate) fn acknowledge_all(&mut self, now: Instant, acks: &mut Vec<Ack>) {
        if self.acknowledge(now, acks).is_some() {
            self.acknowledge_singly(0, acks);
        }
    }

    /// The finished prefix; returns the highest tag that is acknowledged with it.
    fn acknowledge_prefix(&mut self, acks: &mut Vec<Ack>) -> Option<DeliveryTag> {
        let mut prefix: Option<(DeliveryTag, usize)> = None;
        while let Some(first) = self.entries.front() {
            match first.state {
                EntryState::Outstanding => break,
                EntryState::Ended => {
                    let count = prefix.map_or(0, |(_, count)| count);
                    prefix = Some((first.tag, count + 1));
                }
                // Acknowledged singly before; no longer outstanding, so it must not be the tag named.
                EntryState::Acknowledged => self.acknowledged -= 1,
            }
            self.entries.pop_front();
        }
        let (tag, count) = prefix?;
        acks.push(Ack {
            tag,
            multiple: count > 1,
        });
        Some(tag)
    }

    /// What is kept back, but for the last `kept`.
    fn acknowledge_singly(&mut self, kept: usize, acks: &mut Vec<Ack>) {
        let count = self.kept_back.len().saturating_sub(kept);
        for (tag, _) in self.kept_back.drain(..count) {
            acks.push(Ack {
                tag,
                multiple: false,
            });
            if let Ok(at) = self.entries.binary_search_by_key(&tag, |entry| entry.tag) {
                self.entries[at].state = EntryState::Acknowledged;
                self.acknowledged += 1;
            }
        }
        // Behind a message that takes for ever they would never go.
        if self.acknowledged > MANY && 2 * self.acknowledged > self.entries.len() {
            let is_open = |entry: &Entry| entry.state != EntryState::Acknowledged;
            self.entries.retain(is_open);
            self.acknowledged = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    use proptest::prelude::*;

    fn acks(book: &mut AckBook) -> Vec<(u64, bool)> {
        let (acks, until) = acks_at(book, Instant::now());
        assert_eq!(until, None, "nothing is kept back without gathering");
        acks
    }

    fn acks_at(book: &mut AckBook, now: Instant) -> (Vec<(u64, bool)>, Option<Instant>) {
        let mut acks = Vec::new();
        let until = book.acknowledge(now, &mut acks);
        (named(&acks), until)
    }

    fn named(acks: &[Ack]) -> Vec<(u64, bool)> {
        acks.iter().map(|ack| (ack.tag.0, ack.multiple)).collect()
    }

    fn book(tags: std::ops::RangeInclusive<u64>) -> AckBook {
        arrived(AckBook::new(16, false), tags)
    }

    fn arrived(mut book: AckBook, tags: std::ops::RangeInclusive<u64>) -> AckBook {
        for tag in tags {
            assert!(book.arrived(DeliveryTag(tag), 0, Instant::now()));
        }
        book
    }

    fn end(book: &mut AckBook, tags: &[u64]) {
        for &tag in tags {
            assert!(book.ended(DeliveryTag(tag)).is_some(), "tag {tag}");
        }
    }

    #[test]
    fn the_finished_prefix_is_acknowledged_at_once() {
        let mut book = book(1..=5);
        end(&mut book, &[2, 1, 3]);
        assert_eq!(acks(&mut book), [(3, true)]);
        assert_eq!(acks(&mut book), []);
        assert_eq!(book.unsettled(), 2);
    }

    #[test]
    fn what_ends_out_of_order_is_acknowledged_singly_in_order_of_completion() {
        let mut book = book(1..=6);
        end(&mut book, &[5, 3]);
        assert_eq!(acks(&mut book), [(5, false), (3, false)]);
    }

    #[test]
    fn multiple_names_a_tag_that_is_still_outstanding() {
        let mut book = book(1..=4);
        end(&mut book, &[3]);
        assert_eq!(acks(&mut book), [(3, false)]);
        end(&mut book, &[2, 1]);
        // 3 is in the prefix too, but acknowledged already.
        assert_eq!(acks(&mut book), [(2, true)]);
        end(&mut book, &[4]);
        assert_eq!(acks(&mut book), [(4, false)]);
    }

    #[test]
    fn behind_one_that_takes_for_ever_the_book_does_not_grow() {
        let mut book = book(1..=2);
        for tag in 3..10_000 {
            end(&mut book, &[tag - 1]);
            assert_eq!(acks(&mut book), [(tag - 1, false)]);
            book = arrived(book, tag..=tag);
            assert!(book.entries.len() <= 2 * MANY + 4, "{}", book.entries.len());
        }
        end(&mut book, &[1]);
        assert_eq!(acks(&mut book), [(1, false)]);
        end(&mut book, &[9_999]);
        assert_eq!(acks(&mut book), [(9_999, false)]);
        assert!(book.entries.is_empty());
    }

    #[test]
    fn a_delivery_ends_once() {
        let mut book = book(1..=2);
        end(&mut book, &[2]);
        assert_eq!(book.ended(DeliveryTag(2)), None);
        assert_eq!(acks(&mut book), [(2, false)]);
        assert_eq!(book.ended(DeliveryTag(2)), None);
        assert_eq!(book.ended(DeliveryTag(9)), None);
    }

    #[test]
    fn a_tag_that_does_not_rise_is_refused_also_when_everything_is_settled() {
        let (mut book, at) = (book(1..=3), Instant::now());
        assert!(!book.arrived(DeliveryTag(3), 0, at));
        end(&mut book, &[1, 2, 3]);
        assert_eq!(acks(&mut book), [(3, true)]);
        assert!(!book.arrived(DeliveryTag(2), 0, at));
        assert!(book.arrived(DeliveryTag(4), 0, at));
    }

    #[test]
    fn the_oldest_is_the_first_to_arrive_of_what_has_not_ended() {
        let mut book = AckBook::new(16, false);
        let start = Instant::now();
        for tag in 1..=3 {
            let at = start + Duration::from_secs(tag);
            assert!(book.arrived(DeliveryTag(tag), 0, at));
        }
        let seconds = |book: &AckBook| Some((book.oldest()? - start).as_secs());
        end(&mut book, &[2]);
        assert_eq!(seconds(&book), Some(1));
        end(&mut book, &[1]);
        assert_eq!(seconds(&book), Some(3));
        acks(&mut book);
        assert_eq!(seconds(&book), Some(3));
        end(&mut book, &[3]);
        assert_eq!(seconds(&book), None);
    }

    /// A book of a session with 16 credits that gathers, in which these have arrived.
    fn gathering(tags: std::ops::RangeInclusive<u64>) -> AckBook {
        arrived(AckBook::new(16, true), tags)
    }

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn what_ends_out_of_order_waits_for_the_prefix_that_covers_it() {
        let (mut book, now) = (gathering(1..=4), Instant::now());
        end(&mut book, &[3, 2]);
        let until = Some(now + Gathering::LONGEST);
        assert_eq!(acks_at(&mut book, now), (vec![], until));
        end(&mut book, &[1]);
        assert_eq!(acks_at(&mut book, now + ms(1)), (vec![(3, true)], None));
        assert!(!book.has_ended());
    }

    #[test]
    fn it_waits_no_longer_than_the_bound() {
        let (mut book, now) = (gathering(1..=4), Instant::now());
        end(&mut book, &[2]);
        assert!(acks_at(&mut book, now).1.is_some());
        end(&mut book, &[3]);
        let late = now + Gathering::LONGEST;
        let singly = vec![(2, false), (3, false)];
        assert_eq!(acks_at(&mut book, late), (singly, None));
    }

    #[test]
    fn no_more_than_half_of_the_credits_wait() {
        let (mut book, now) = (gathering(1..=16), Instant::now());
        end(&mut book, &[2, 3, 4, 5, 6, 7, 8, 9]);
        assert!(acks_at(&mut book, now).1.is_some());
        end(&mut book, &[10]);
        let (acks, until) = acks_at(&mut book, now);
        assert_eq!(acks, [(2, false)], "the oldest goes");
        assert!(until.is_some(), "the others wait on");
        // One credit: whatever waited would keep everything out.
        let mut book = arrived(AckBook::new(1, true), 1..=2);
        end(&mut book, &[2]);
        assert_eq!(acks_at(&mut book, now), (vec![(2, false)], None));
    }

    #[test]
    fn behind_one_that_takes_for_ever_too_many_are_in_vain_too() {
        let (mut book, start) = (gathering(1..=16), Instant::now());
        let mut next = 2;
        let pass = |book: AckBook, next: &mut u64, at| {
            // As many as may wait end, and as many arrive.
            let mut book = arrived(book, *next + 15..=*next + 22);
            end(&mut book, &(*next..*next + 8).collect::<Vec<_>>());
            *next += 8;
            let (acks, until) = acks_at(&mut book, at);
            (book, acks.len(), until)
        };
        for passed in 0..10 {
            let (same, acks, until) = pass(book, &mut next, start + ms(passed));
            assert_eq!(acks, if passed == 0 { 0 } else { 8 }, "after {passed} ms");
            assert_eq!(until, Some(start + Gathering::LONGEST));
            book = same;
        }
        let (same, acks, until) = pass(book, &mut next, start + ms(10));
        assert_eq!((acks, until), (16, None), "in vain");
        let (_, acks, until) = pass(same, &mut next, start + ms(29));
        assert_eq!((acks, until), (8, None), "not tried for a while");
    }

    #[test]
    fn after_waiting_in_vain_it_is_not_tried_for_a_while_that_doubles() {
        let (mut book, start) = (gathering(1..=16), Instant::now());
        let mut now = start;
        for (tag, pause) in [(2, 20), (4, 40), (6, 80)] {
            end(&mut book, &[tag]);
            assert!(acks_at(&mut book, now).1.is_some(), "{tag} waits");
            now += Gathering::LONGEST;
            assert_eq!(acks_at(&mut book, now).0, [(tag, false)]);
            end(&mut book, &[tag + 1]);
            let within = now + ms(pause - 1);
            assert_eq!(acks_at(&mut book, within), (vec![(tag + 1, false)], None));
            now += ms(pause);
        }
        // What the prefix passes takes one doubling back: the next pause is as long as the last one.
        end(&mut book, &[8]);
        assert!(acks_at(&mut book, now).1.is_some());
        end(&mut book, &[1]);
        assert_eq!(acks_at(&mut book, now), (vec![(8, true)], None));
        end(&mut book, &[10]);
        assert!(acks_at(&mut book, now).1.is_some());
        now += Gathering::LONGEST;
        assert_eq!(acks_at(&mut book, now).0, [(10, false)]);
        end(&mut book, &[11]);
        assert_eq!(acks_at(&mut book, now + ms(79)).0, [(11, false)]);
        end(&mut book, &[12]);
        assert!(acks_at(&mut book, now + ms(80)).1.is_some());
    }

    #[test]
    fn before_a_barrier_nothing_waits() {
        let (mut book, now) = (gathering(1..=5), Instant::now());
        end(&mut book, &[4]);
        assert!(acks_at(&mut book, now).1.is_some());
        end(&mut book, &[1, 2]);
        let mut acks = Vec::new();
        book.acknowledge_all(now, &mut acks);
        assert_eq!(named(&acks), [(2, true), (4, false)]);
        assert!(!book.has_ended());
    }

    proptest! {
        /// Whatever ends when: each delivery is acknowledged once and after its end, `multiple` names one that is
        /// outstanding and covers nothing that has not ended, and nothing waits longer, nor more, than it may.
        #[test]
        fn every_end_is_acknowledged_once(
            credits in 1_u16..20,
            gather: bool,
            steps in prop::collection::vec((any::<prop::sample::Index>(), 0_u64..15, 0_u8..4), 1..120),
        ) {
            let mut book = AckBook::new(credits, gather);
            let mut now = Instant::now();
            let (mut next, mut running) = (1, Vec::new());
            // Ended, as the source sees it: with the time of the first acknowledgements after it.
            let mut waiting: Vec<(u64, Option<Instant>)> = Vec::new();
            for (which, passes, step) in steps {
                now += ms(passes);
                let in_hand = running.len() + waiting.len();
                match step {
                    0 if in_hand < usize::from(credits) => {
                        prop_assert!(book.arrived(DeliveryTag(next), 0, now));
                        running.push(next);
                        next += 1;
                    }
                    1 if !running.is_empty() => {
                        let tag = running.swap_remove(which.index(running.len()));
                        prop_assert!(book.ended(DeliveryTag(tag)).is_some());
                        waiting.push((tag, None));
                    }
                    _ => {
                        let mut acks = Vec::new();
                        let mut until = None;
                        let everything = step == 3;
                        if everything {
                            book.acknowledge_all(now, &mut acks);
                        } else {
                            until = book.acknowledge(now, &mut acks);
                        }
                        for ack in acks {
                            let tag = ack.tag.0;
                            prop_assert!(waiting.iter().any(|&(ended, _)| ended == tag), "{ack:?}");
                            if ack.multiple {
                                prop_assert!(running.iter().all(|&runs| runs > tag), "{ack:?}");
                            }
                            waiting.retain(|&(ended, _)| match ack.multiple {
                                true => ended > tag,
                                false => ended != tag,
                            });
                        }
                        for (_, since) in &mut waiting {
                            let since = *since.get_or_insert(now);
                            prop_assert!(gather && !everything);
                            prop_assert!(now < since + Gathering::LONGEST);
                        }
                        prop_assert!(waiting.len() <= usize::from(credits) / 2);
                        // Asked again in time for what has waited longest.
                        let oldest = waiting.iter().filter_map(|&(_, since)| since).min();
                        let latest = oldest.map(|oldest| oldest + Gathering::LONGEST);
                        prop_assert_eq!(until.is_some(), latest.is_some());
                        prop_assert!(until <= latest && until.is_none_or(|until| now < until));
                    }
                }
            }
        }
    }
}
