//! Which deliveries of a session are unsettled, how to acknowledge, and what was finished when a
//! session ended. Pure.
//!
//! Owns the order of acknowledgements. RabbitMQ closes a channel that acknowledges an unknown tag, so
//! each tag is named at most once, and `multiple` names one that is still outstanding.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::envelope::{DeliveryTag, Identity};
use crate::outcome::Outcome;
use crate::port::Ack;

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
        let before = self.kept_back.len();
        if let Some(covered) = covered {
            self.kept_back.retain(|&(tag, _)| tag > covered);
        }
        let worth_while = self.kept_back.len() < before;
        let ended = self.ended.drain(..);
        let out_of_order = ended.filter(|&tag| covered.is_none_or(|covered| tag > covered));
        self.kept_back.extend(out_of_order.map(|tag| (tag, now)));
        let &(_, oldest) = self.kept_back.front()?;
        let count = self.kept_back.len();
        let gathering = self.gathering.as_mut();
        let until = gathering.and_then(|it| it.keep_back(count, oldest, worth_while, now));
        if until.is_none() {
            self.acknowledge_singly(acks);
        }
        until
    }

    /// All acknowledgements, nothing kept back: somebody waits for their being processed.
    pub(crate) fn acknowledge_all(&mut self, now: Instant, acks: &mut Vec<Ack>) {
        if self.acknowledge(now, acks).is_some() {
            self.acknowledge_singly(acks);
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
                EntryState::Acknowledged => {}
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

    fn acknowledge_singly(&mut self, acks: &mut Vec<Ack>) {
        for (tag, _) in self.kept_back.drain(..) {
            acks.push(Ack {
                tag,
                multiple: false,
            });
            if let Ok(at) = self.entries.binary_search_by_key(&tag, |entry| entry.tag) {
                self.entries[at].state = EntryState::Acknowledged;
            }
        }
    }
}

/// Whether what ended out of order waits for its predecessors, to be acknowledged together with them.
///
/// Lanes report in batches, so most of what ends out of order is passed by the finished prefix within a
/// millisecond; acknowledged singly, it was more than half of all frames. What is kept back uses credits, and is
/// run again by another instance if this process is killed. So it is never more than half of the credits, never
/// longer than [`LONGEST`](Self::LONGEST), and after it has been in vain (a message in front takes long) not
/// tried for a while, twice as long each time.
#[derive(Debug)]
struct Gathering {
    most: usize,
    /// In vain, in a row.
    failures: u32,
    /// Nothing is kept back before.
    not_before: Option<Instant>,
}

impl Gathering {
    const LONGEST: Duration = Duration::from_millis(10);
    const FIRST_PAUSE: Duration = Duration::from_millis(20);
    /// The longest pause is the first, doubled so often.
    const MOST_DOUBLINGS: u32 = 6;

    fn of(credits: u16) -> Self {
        Self {
            most: usize::from(credits) / 2,
            failures: 0,
            not_before: None,
        }
    }

    /// Until when to keep back `count` deliveries, the first of them kept back since `oldest`; `None` to
    /// acknowledge them now. `worth_while` says that the prefix has just passed some.
    fn keep_back(
        &mut self,
        count: usize,
        oldest: Instant,
        worth_while: bool,
        now: Instant,
    ) -> Option<Instant> {
        if worth_while {
            self.failures = 0;
        }
        if self.not_before.is_some_and(|not_before| now < not_before) {
            return None;
        }
        let until = oldest + Self::LONGEST;
        if count <= self.most && now < until {
            return Some(until);
        }
        let doublings = self.failures.min(Self::MOST_DOUBLINGS);
        self.failures += 1;
        self.not_before = Some(now + Self::FIRST_PAUSE * 2_u32.pow(doublings));
        None
    }
}

/// What was finished in the session that just ended: copies of it need not run again.
///
/// Acknowledgements that were on their way when a session ended may or may not have been processed.
/// Until the first delivery of the next session that is not a redelivery, a copy that is surely the
/// same message (id, body, replay number) is settled without running.
#[derive(Debug, Default)]
pub(crate) struct Finished {
    /// The last deliveries of this session, oldest first.
    entries: VecDeque<(Identity, Ending)>,
    keep: usize,
    /// What earlier sessions finished; the deliveries of this one are compared with it.
    comparing: HashMap<Identity, Ending>,
}

/// How a message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ending {
    pub(crate) outcome: Outcome,
    /// It ended after its session, so nobody has counted it yet: perhaps no copy of it comes here, and
    /// another instance handles it.
    pub(crate) late: bool,
}

impl Finished {
    /// Remembers the last `keep` finished deliveries.
    pub(crate) fn new(keep: usize) -> Self {
        Self {
            keep,
            ..Self::default()
        }
    }

    /// A delivery of the current session ended. Without an id it could not be recognised.
    pub(crate) fn record(&mut self, identity: &Identity, outcome: Outcome) {
        // What its source keeps comes again, to run.
        if identity.id().is_none() || outcome == Outcome::Kept {
            return;
        }
        if self.entries.len() == self.keep {
            self.entries.pop_front();
        }
        let late = false;
        self.entries
            .push_back((identity.clone(), Ending { outcome, late }));
    }

    /// A delivery of a session that has already ended turned out to be finished.
    pub(crate) fn record_late(&mut self, identity: &Identity, ending: Ending) {
        if identity.id().is_some() && ending.outcome != Outcome::Kept {
            self.make_room();
            self.comparing.insert(identity.clone(), ending);
        }
    }

    /// The session ended: what it finished is compared with what comes next. What came before stays
    /// as well: a session that ended early must not make us forget the one before it.
    pub(crate) fn session_ended(&mut self) {
        self.make_room();
        self.comparing.extend(self.entries.drain(..));
    }

    /// Bounds the memory. To forget costs a second run of a message, never the order: copies come
    /// before their successors.
    fn make_room(&mut self) {
        if self.comparing.len() >= 2 * self.keep {
            self.comparing.clear();
        }
    }

    /// How the message ended before, if this delivery is a copy of a finished one. An entry matches
    /// once.
    pub(crate) fn match_copy(&mut self, identity: &Identity, redelivered: bool) -> Option<Ending> {
        if self.comparing.is_empty() {
            return None;
        }
        if !redelivered {
            // The redeliveries of the ended session come first, in order; they are over.
            self.comparing.clear();
            return None;
        }
        identity.id()?;
        self.comparing.remove(identity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::envelope::Envelope;

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
            let at = start + std::time::Duration::from_secs(tag);
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

    fn identity(id: Option<&str>, body: &'static str) -> Identity {
        Identity::of(&Envelope {
            id: id.map(Into::into),
            body: bytes::Bytes::from_static(body.as_bytes()),
            ..Envelope::default()
        })
    }

    const HANDLED: Ending = Ending {
        outcome: Outcome::Handled,
        late: false,
    };

    fn finished(id: Option<&str>, body: &'static str) -> Finished {
        let mut finished = Finished::new(4);
        finished.record(&identity(id, body), Outcome::Handled);
        finished.session_ended();
        finished
    }

    #[test]
    fn a_copy_of_a_finished_message_is_recognised_once() {
        let mut finished = finished(Some("a"), "x");
        let copy = identity(Some("a"), "x");
        assert_eq!(finished.match_copy(&copy, true), Some(HANDLED));
        assert_eq!(finished.match_copy(&copy, true), None);
    }

    #[test]
    fn another_body_or_no_id_is_no_copy() {
        assert_eq!(
            finished(Some("a"), "x").match_copy(&identity(Some("a"), "y"), true),
            None
        );
        assert_eq!(
            finished(None, "x").match_copy(&identity(None, "x"), true),
            None
        );
    }

    #[test]
    fn the_memory_ends_with_the_first_new_message() {
        let mut finished = finished(Some("a"), "x");
        let copy = identity(Some("a"), "x");
        assert_eq!(finished.match_copy(&copy, false), None);
        assert_eq!(finished.match_copy(&copy, true), None);
    }

    #[test]
    fn two_losses_in_a_row_do_not_forget() {
        let mut finished = finished(Some("a"), "x");
        finished.session_ended();
        let copy = identity(Some("a"), "x");
        assert_eq!(finished.match_copy(&copy, true), Some(HANDLED));
    }
}
