//! First attempts that are counted before their messages are handed out. Pure, but for the mark that a claim shares.
//!
//! An attempt must be counted before its handler is called, or a message that kills the process is never recognised. One
//! count before each attempt is a round trip before each attempt, which is all that a queue with one handler does. So the
//! first attempts of everything that a read brings are counted in one statement, before any of it is handed out. Later
//! attempts are few, and each is counted by itself.
//!
//! # What a count that was not needed costs
//! - **A crash** leaves messages counted that only waited. They are read with one attempt, and from then on each attempt
//!   is counted by itself: so each loses one, once, however often the process dies. Where only one attempt is allowed
//!   that would be all, and nothing is counted ahead ([`Ahead::new`]).
//! - **The feed forgets** what it has no use for now, and reads it again later. As long as the lease is the same, nobody
//!   else can have begun it. So a message that is known here as counted and not handed out has had no attempt, whatever
//!   the store says.
//! - **An orderly close** takes back what never began ([`Ahead::take_back`]).
//!
//! # A begin that crosses with the close
//! The close decides in the session's task, an attempt begins in a task of the handlers. Each message that is handed out
//! has one [`First`], which leaves *waiting* once: it has begun, or it was taken back.
//! - The begin is first: the close finds it begun and leaves its count. If the handler is not called after all (the
//!   session ends between the begin and the call), the count is one too many, as it would be of any attempt.
//! - The close is first: the begin is refused, and the handler is not called. What the close takes back in the store
//!   therefore never ran, however long the statement takes, and whoever has the lease next counts from nothing.
//!
//! # Why only the close takes back
//! A taking back whose answer is lost may take place later. While the session goes on, the message could be counted again
//! and begun meanwhile, and the late statement would take back an attempt that was made: a missing count, which breaks
//! the promise. After the close it cannot: nothing begins under this lease any more, and under the next one the fence
//! stops it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::store::{Sequence, Start, Stored};

/// Forgotten messages that are remembered here as counted, beside all that the feed has. (Behind each key that is kept
/// stay a few.) Of the others each loses an attempt.
const FORGOTTEN: usize = 10_000;

const WAITING: u8 = 0;
const BEGUN: u8 = 1;
const TAKEN_BACK: u8 = 2;

/// A first attempt that was counted ahead: it begins, or is taken back, and never both.
#[derive(Debug, Default)]
pub(super) struct First(AtomicU8);

impl First {
    /// Whether it may begin; then its count stays. It may come again, where the attempt did not start after all.
    pub(super) fn begin(&self) -> bool {
        let left = self
            .0
            .compare_exchange(WAITING, BEGUN, Ordering::SeqCst, Ordering::SeqCst);
        matches!(left, Ok(_) | Err(BEGUN))
    }

    /// Whether it has not begun; then it never will.
    pub(super) fn take_back(&self) -> bool {
        let left = self
            .0
            .compare_exchange(WAITING, TAKEN_BACK, Ordering::SeqCst, Ordering::SeqCst);
        left.is_ok()
    }
}

/// The messages of one session whose first attempt was counted ahead and that have not ended.
pub(super) struct Ahead {
    allowed: bool,
    most: usize,
    /// `None` as long as it is not handed out.
    counted: BTreeMap<Sequence, Option<Arc<First>>>,
}

impl Ahead {
    /// For messages that are allowed so many attempts, of which the feed has `in_memory` at most.
    pub(super) fn new(max_attempts: u32, in_memory: usize) -> Self {
        Self {
            // With one attempt a message that only waited at a crash would have had it.
            allowed: max_attempts >= 2,
            most: in_memory + FORGOTTEN,
            counted: BTreeMap::new(),
        }
    }

    /// What to count of a read before it is handed out. What was counted by an earlier read, and forgotten, is fresh.
    ///
    /// They are known from here on, and not from the answer on: a count without an answer may have taken place.
    pub(super) fn count(&mut self, read: &mut [Stored]) -> Vec<Start> {
        if !self.allowed {
            return Vec::new();
        }
        let mut starts = Vec::new();
        // One that cannot be read never starts.
        for stored in read.iter_mut().filter(|stored| stored.broken.is_none()) {
            let sequence = stored.sequence;
            match stored.attempts {
                0 => {
                    self.counted.insert(sequence, None);
                    starts.push(Start {
                        sequence,
                        attempt: 1,
                    });
                }
                1 if matches!(self.counted.get(&sequence), Some(None)) => stored.attempts = 0,
                _ => {}
            }
        }
        // Each of them may go: then it is counted when it begins, and is not taken back.
        while self.counted.len() > self.most {
            self.counted.pop_first();
        }
        starts
    }

    /// A message is handed out: the mark of its first attempt, if that is counted.
    pub(super) fn hand_out(&mut self, sequence: Sequence) -> Option<Arc<First>> {
        let first = self.counted.get_mut(&sequence)?;
        Some(Arc::clone(first.get_or_insert_default()))
    }

    /// A message that was out has ended or is kept: what the store has counted of it stands.
    pub(super) fn ended(&mut self, sequence: Sequence) {
        self.counted.remove(&sequence);
    }

    /// The session is closed: the messages whose count is to be taken back. None of them begins any more.
    pub(super) fn take_back(&mut self) -> Vec<Sequence> {
        let counted = std::mem::take(&mut self.counted).into_iter();
        counted
            .filter(|(_, first)| first.as_ref().is_none_or(|first| first.take_back()))
            .map(|(sequence, _)| sequence)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use laneway_actors::Envelope;

    fn read(messages: &[(i64, u32)]) -> Vec<Stored> {
        let stored = |&(sequence, attempts)| Stored {
            sequence: Sequence(sequence),
            attempts,
            key: None,
            envelope: Envelope::default(),
            broken: None,
        };
        messages.iter().map(stored).collect()
    }

    fn counted(ahead: &mut Ahead, read: &mut [Stored]) -> Vec<(i64, u32)> {
        let starts = ahead.count(read).into_iter();
        starts
            .map(|start| (start.sequence.0, start.attempt))
            .collect()
    }

    fn attempts(read: &[Stored]) -> Vec<u32> {
        read.iter().map(|stored| stored.attempts).collect()
    }

    #[test]
    fn what_is_fresh_is_counted_once_and_nothing_else() {
        let mut ahead = Ahead::new(2, 10);
        let mut found = read(&[(1, 0), (2, 1), (3, 2), (4, 0)]);
        found[3].broken = Some("headers".to_owned());
        assert_eq!(counted(&mut ahead, &mut found), [(1, 1)]);
        assert_eq!(attempts(&found), [0, 1, 2, 0]);
        assert!(ahead.hand_out(Sequence(1)).is_some());
        for other in 2..=4 {
            assert!(ahead.hand_out(Sequence(other)).is_none(), "{other}");
        }
    }

    #[test]
    fn with_one_attempt_nothing_is_counted_ahead() {
        let mut ahead = Ahead::new(1, 10);
        assert_eq!(counted(&mut ahead, &mut read(&[(1, 0)])), []);
        assert!(ahead.hand_out(Sequence(1)).is_none());
        assert_eq!(ahead.take_back(), []);
    }

    #[test]
    fn what_was_counted_here_and_forgotten_is_fresh_when_it_is_read_again() {
        let mut ahead = Ahead::new(2, 10);
        counted(&mut ahead, &mut read(&[(1, 0), (2, 0)]));
        let mut again = read(&[(1, 1), (2, 2), (3, 1)]);
        assert_eq!(counted(&mut ahead, &mut again), []);
        // 2 has had more, and 3 was counted by somebody else.
        assert_eq!(attempts(&again), [0, 2, 1]);
        // Its count did not take place after all.
        assert_eq!(counted(&mut ahead, &mut read(&[(1, 0)])), [(1, 1)]);
    }

    #[test]
    fn what_was_handed_out_has_the_attempts_that_the_store_says() {
        let mut ahead = Ahead::new(2, 10);
        counted(&mut ahead, &mut read(&[(1, 0), (2, 0)]));
        ahead.hand_out(Sequence(1));
        ahead.hand_out(Sequence(2));
        ahead.ended(Sequence(2));
        let mut again = read(&[(1, 1), (2, 1)]);
        assert_eq!(counted(&mut ahead, &mut again), []);
        assert_eq!(attempts(&again), [1, 1]);
    }

    #[test]
    fn the_close_takes_back_what_never_began_and_that_never_begins() {
        let mut ahead = Ahead::new(2, 10);
        counted(&mut ahead, &mut read(&[(1, 0), (2, 0), (3, 0), (4, 0)]));
        let out = [1, 2, 3].map(|n| ahead.hand_out(Sequence(n)).expect("counted"));
        assert!(out[0].begin() && out[0].begin(), "it may come again");
        assert!(out[2].begin());
        ahead.ended(Sequence(3));
        assert_eq!(ahead.take_back(), [Sequence(2), Sequence(4)]);
        assert!(!out[1].begin());
        assert!(out[0].begin(), "what has begun has");
        assert_eq!(ahead.take_back(), []);
    }

    #[test]
    fn what_is_remembered_is_bounded_and_the_oldest_go_first() {
        let mut ahead = Ahead::new(2, 0);
        let count = FORGOTTEN as i64 + 3;
        let many: Vec<_> = (1..=count).map(|n| (n, 0)).collect();
        assert_eq!(counted(&mut ahead, &mut read(&many)).len(), many.len());
        assert_eq!(
            ahead.take_back(),
            (4..=count).map(Sequence).collect::<Vec<_>>()
        );
    }

    /// Whatever the interleaving of a begin and a taking back: one of them has it.
    #[test]
    fn of_a_begin_and_a_taking_back_at_once_one_happens() {
        for _ in 0..2_000 {
            let first = First::default();
            let (begun, taken) = std::thread::scope(|scope| {
                let begin = scope.spawn(|| first.begin());
                let taken = first.take_back();
                (begin.join().expect("no panic"), taken)
            });
            assert!(begun != taken, "begun: {begun}, taken back: {taken}");
        }
    }
}
