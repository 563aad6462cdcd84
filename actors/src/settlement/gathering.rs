//! When acknowledgements of what ended out of order wait. Pure.
//!
//! Owns how long and how many; the books say which ([`AckBook`](super::AckBook)).

use std::time::{Duration, Instant};

/// Whether what ended out of order waits for its predecessors, to be acknowledged together with them.
///
/// Lanes report in batches, so most of what ends out of order is passed by the finished prefix within a
/// millisecond; acknowledged singly, it was more than half of all frames. What is kept back uses credits, and is
/// run again by another instance if this process is killed. So:
/// - It is never more than half of the credits; of more than that the oldest go. (Not all of it, and no pause: a thread
///   that is not run for a moment holds up more than that within a millisecond, and is no message that takes long.)
/// - It is never longer than [`LONGEST`](Self::LONGEST).
/// - When the prefix has passed none of it for so long, it was in vain: a message in front takes long. Then it is not
///   tried for a while, twice as long each time. That what is kept back has changed meanwhile, because there was too
///   much of it, makes no difference: else half of the credits would be kept back for as long as that message takes.
///
/// Being passed by the prefix takes back one such doubling, and not all: where a slow key keeps the front, a wait meets
/// the end of one of its messages now and then, by chance. (Then few credits are left, and what is kept back stops
/// everything.)
#[derive(Debug)]
pub(super) struct Gathering {
    most: usize,
    /// Since when the prefix has passed none of what is kept back.
    since: Option<Instant>,
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
            since: None,
            failures: 0,
            not_before: None,
        }
    }

    /// Nothing is kept back.
    pub(super) fn is_over(&mut self) {
        self.since = None;
    }

    /// The prefix has passed some of what was kept back.
    pub(super) fn was_worth_while(&mut self) {
        self.since = None;
        self.failures = self.failures.saturating_sub(1);
    }

    /// How many deliveries may be kept back, the first of them since `oldest`, and until when; the others, from the oldest
    /// on, are acknowledged now.
    pub(super) fn keep_back(&mut self, oldest: Instant, now: Instant) -> Option<(usize, Instant)> {
        if self.not_before.is_some_and(|not_before| now < not_before) {
            return None;
        }
        let until = *self.since.get_or_insert(oldest) + Self::LONGEST;
        if now < until {
            return Some((self.most, until));
        }
        self.since = None;
        self.not_before = Some(now + Self::FIRST_PAUSE * 2_u32.pow(self.failures));
        self.failures = (self.failures + 1).min(Self::MOST_DOUBLINGS);
        None
    }
}
