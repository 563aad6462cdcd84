//! When acknowledgements of what ended out of order wait. Pure.
//!
//! Owns how long and how many; the books say which ([`AckBook`](super::AckBook)).

use std::time::{Duration, Instant};

/// Whether what ended out of order waits for its predecessors, to be acknowledged together with them.
///
/// Lanes report in batches, so most of what ends out of order is passed by the finished prefix within a
/// millisecond; acknowledged singly, it was more than half of all frames. What is kept back uses credits, and is
/// run again by another instance if this process is killed. So it is never more than half of the credits (of more than
/// that the oldest go: a thread that is not run for a moment holds up half of the credits within two milliseconds, and
/// were all of them to go, each time, most of what is acknowledged would be), never longer than
/// [`LONGEST`](Self::LONGEST), and after it has been in vain (a message in front takes long) not tried for a while,
/// twice as long each time. Being passed by the prefix takes back one such doubling, and not all:
/// where a slow key keeps the front, a wait meets the end of one of its messages now and then, by chance. (Then few
/// credits are left, and what is kept back stops everything.)
#[derive(Debug)]
pub(super) struct Gathering {
    most: usize,
    /// How often it was in vain, less how often it was worth while.
    failures: u32,
    /// Nothing is kept back before.
    not_before: Option<Instant>,
}

impl Gathering {
    pub(super) const LONGEST: Duration = Duration::from_millis(10);
    const FIRST_PAUSE: Duration = Duration::from_millis(20);
    /// The longest pause is the first, doubled so often.
    const MOST_DOUBLINGS: u32 = 6;

    pub(super) fn of(credits: u16) -> Self {
        Self {
            most: usize::from(credits) / 2,
            failures: 0,
            not_before: None,
        }
    }

    /// The prefix has passed some of what was kept back.
    pub(super) fn was_worth_while(&mut self) {
        self.failures = self.failures.saturating_sub(1);
    }

    /// How many deliveries may be kept back, the first of them since `oldest`; the others, from the oldest on, are
    /// acknowledged now.
    pub(super) fn keep_back(&mut self, oldest: Instant, now: Instant) -> usize {
        if self.not_before.is_some_and(|not_before| now < not_before) {
            return 0;
        }
        if now < oldest + Self::LONGEST {
            return self.most;
        }
        self.not_before = Some(now + Self::FIRST_PAUSE * 2_u32.pow(self.failures));
        self.failures = (self.failures + 1).min(Self::MOST_DOUBLINGS);
        0
    }
}
