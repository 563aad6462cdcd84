//! What happens after a failed attempt. Pure: (attempt, failure) to verdict.
//!
//! Names no clock and no runtime; the randomness of a jitter comes in as an argument.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::handler::FailureKind;
use crate::outcome::PoisonReason;

/// What to do after a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Try again in place after a pause; only the key waits.
    RetryAfter(Duration),
    /// The message is poison.
    Poison(PoisonReason),
}

/// How long to wait before the next attempt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    /// Pause after the first failed attempt.
    pub first: Duration,
    /// No pause is longer, except one that a handler asks for itself.
    pub ceiling: Duration,
    /// Each pause is this many times the one before.
    pub factor: f64,
    /// Each pause is made longer or shorter by up to this share of itself (0 to 1).
    pub jitter: f64,
}

impl Default for Backoff {
    /// 100 ms, doubled each time, at most 30 s, ± 10 %.
    fn default() -> Self {
        Self {
            first: Duration::from_millis(100),
            ceiling: Duration::from_secs(30),
            factor: 2.0,
            jitter: 0.1,
        }
    }
}

impl Backoff {
    /// The same pause each time, without jitter.
    pub fn constant(pause: Duration) -> Self {
        Self {
            first: pause,
            ceiling: pause,
            factor: 1.0,
            jitter: 0.0,
        }
    }

    /// The pause after failed attempt number `attempt` (from 1). `chance` is uniform in [0, 1).
    pub fn pause(&self, attempt: u32, chance: f64) -> Duration {
        let steps = f64::from(attempt.saturating_sub(1).min(1_000));
        let plain =
            (self.first.as_secs_f64() * self.factor.powf(steps)).min(self.ceiling.as_secs_f64());
        let swing = 1.0 + self.jitter * (2.0 * chance - 1.0);
        Duration::try_from_secs_f64(plain * swing).unwrap_or(self.ceiling)
    }
}

/// The failure policy of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// Total number of runs of a message, the first included.
    pub max_attempts: NonZeroU32,
    /// The pauses between them.
    pub backoff: Backoff,
}

impl Default for Policy {
    /// Five attempts.
    fn default() -> Self {
        Self {
            max_attempts: NonZeroU32::new(5).expect("cannot fail because five is not zero"),
            backoff: Backoff::default(),
        }
    }
}

impl Policy {
    /// What to do after attempt number `attempt` (from 1) failed.
    pub fn verdict(&self, attempt: u32, failure: FailureKind, chance: f64) -> Verdict {
        let reason = match failure {
            // No attempt can succeed: the body and the set of handlers stay as they are.
            FailureKind::Undecodable => return Verdict::Poison(PoisonReason::Undecodable),
            FailureKind::NoHandler => return Verdict::Poison(PoisonReason::NoHandler),
            FailureKind::Permanent => return Verdict::Poison(PoisonReason::Permanent),
            FailureKind::Transient | FailureKind::RetryAfter(_) => PoisonReason::Failed,
            FailureKind::Panicked => PoisonReason::Panicked,
            FailureKind::TimedOut => PoisonReason::TimedOut,
        };
        if attempt >= self.max_attempts.get() {
            return Verdict::Poison(reason);
        }
        Verdict::RetryAfter(match failure {
            FailureKind::RetryAfter(pause) => pause,
            _ => self.backoff.pause(attempt, chance),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three_attempts() -> Policy {
        Policy {
            max_attempts: NonZeroU32::new(3).expect("three"),
            backoff: Backoff {
                first: Duration::from_secs(1),
                ceiling: Duration::from_secs(3),
                factor: 2.0,
                jitter: 0.0,
            },
        }
    }

    #[test]
    fn the_last_allowed_attempt_is_the_last() {
        let policy = three_attempts();
        let verdict = |attempt| policy.verdict(attempt, FailureKind::Transient, 0.5);
        assert_eq!(verdict(1), Verdict::RetryAfter(Duration::from_secs(1)));
        assert_eq!(verdict(2), Verdict::RetryAfter(Duration::from_secs(2)));
        assert_eq!(verdict(3), Verdict::Poison(PoisonReason::Failed));
    }

    #[test]
    fn what_cannot_succeed_is_not_tried_again() {
        for (failure, reason) in [
            (FailureKind::Permanent, PoisonReason::Permanent),
            (FailureKind::Undecodable, PoisonReason::Undecodable),
            (FailureKind::NoHandler, PoisonReason::NoHandler),
        ] {
            let verdict = three_attempts().verdict(1, failure, 0.5);
            assert_eq!(verdict, Verdict::Poison(reason));
        }
    }

    #[test]
    fn a_handler_may_choose_its_own_pause() {
        let pause = Duration::from_secs(60);
        let verdict = three_attempts().verdict(1, FailureKind::RetryAfter(pause), 0.5);
        assert_eq!(verdict, Verdict::RetryAfter(pause));
    }

    #[test]
    fn pauses_grow_to_the_ceiling_and_swing_by_the_jitter() {
        let backoff = Backoff {
            jitter: 0.5,
            ..three_attempts().backoff
        };
        assert_eq!(backoff.pause(40, 0.5), Duration::from_secs(3));
        assert_eq!(backoff.pause(1, 0.0), Duration::from_millis(500));
        assert!(backoff.pause(1, 0.999) < Duration::from_millis(1_500));
    }
}
