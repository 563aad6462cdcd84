//! What happens after a failed attempt. Pure: (attempt, failure, rule) to verdict.
//!
//! Names no clock and no runtime; the randomness of a jitter comes in as an argument. Sees no error
//! either: which rule applies is found out where the error is ([`rules`](crate::rules)), and only its
//! number comes here.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::handler::FailureKind;
use crate::outcome::PoisonReason;

/// What to do after a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Try again in place after a pause; only the key waits.
    RetryAfter(Duration),
    /// The whole endpoint pauses: it gives its sessions back, and the message is tried again in the next one.
    PauseEndpoint(Duration),
    /// The message is poison: it goes where the endpoint's poison messages go.
    Poison(PoisonReason),
    /// The message is poison, and a rule says that nothing of it is kept.
    Discard(PoisonReason),
}

/// The number of a [`Plan`] in its [`Policy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlanIndex(pub(crate) usize);

/// What one failure rule does with a message: its retries, and what comes after them.
///
/// Counted in attempts of the *message*, whichever rule decided about the earlier ones: after the n-th
/// attempt the n-th step applies. So a message whose failures alternate between rules does not start
/// from the first step again and again.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Plan {
    /// What comes after the first attempt, after the second, ….
    pub(crate) steps: Vec<Step>,
    /// Pauses after those, for as many attempts as the message may have.
    pub(crate) backoff: Option<Backoff>,
    /// At the end the message is discarded, not parked.
    pub(crate) discard: bool,
}

/// What comes before the next attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Only the key waits; zero for a retry at once.
    Wait(Duration),
    /// The endpoint pauses.
    PauseEndpoint(Duration),
}

impl Step {
    fn verdict(self, own: Option<Duration>) -> Verdict {
        match self {
            Self::Wait(pause) => Verdict::RetryAfter(own.unwrap_or(pause)),
            Self::PauseEndpoint(pause) => Verdict::PauseEndpoint(own.unwrap_or(pause)),
        }
    }
}

impl Plan {
    /// What comes after failed attempt number `attempt` (from 1); `None` when the plan has come to its end.
    fn step(&self, attempt: u32, chance: f64) -> Option<Step> {
        let before = self.steps.len();
        match self.steps.get(attempt.saturating_sub(1) as usize) {
            Some(step) => Some(*step),
            None => {
                let attempt = attempt.saturating_sub(u32::try_from(before).unwrap_or(u32::MAX));
                let backoff = self.backoff?;
                Some(Step::Wait(backoff.pause(attempt, chance)))
            }
        }
    }

    /// How many attempts a message must be allowed for every step to be reached.
    pub(crate) fn attempts(&self) -> usize {
        1 + self.steps.len() + usize::from(self.backoff.is_some())
    }
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

    /// What is wrong with it.
    pub(crate) fn problems(&self) -> Vec<String> {
        let Self {
            first,
            ceiling,
            factor,
            jitter,
        } = self;
        let mut problems = Vec::new();
        if !(1.0..=1_000.0).contains(factor) {
            problems.push(format!("factor {factor} is not between 1 and 1000"));
        }
        if !(0.0..=1.0).contains(jitter) {
            problems.push(format!("jitter {jitter} is not between 0 and 1"));
        }
        if first > ceiling {
            problems.push("the first pause is longer than the ceiling".to_owned());
        }
        problems
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
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// Total number of runs of a message, the first included. No plan goes beyond it.
    pub max_attempts: NonZeroU32,
    /// The pauses between them where no rule applies.
    pub backoff: Backoff,
    /// What the failure rules do, by their number.
    pub plans: Arc<[Plan]>,
    /// Pauses of at least this length are spent in the source, which keeps the message: in a process they would
    /// use a credit. `None` for sources that cannot do that.
    pub keep_from: Option<Duration>,
}

impl Default for Policy {
    /// Five attempts.
    fn default() -> Self {
        Self {
            max_attempts: NonZeroU32::new(5).expect("cannot fail because five is not zero"),
            backoff: Backoff::default(),
            plans: Arc::default(),
            keep_from: None,
        }
    }
}

impl Policy {
    /// Whether a pause is spent in the source.
    pub(crate) fn keeps(&self, pause: Duration) -> bool {
        self.keep_from.is_some_and(|from| pause >= from)
    }

    /// What to do after attempt number `attempt` (from 1) failed. `plan`: that of the rule that applies.
    pub fn verdict(
        &self,
        attempt: u32,
        failure: FailureKind,
        plan: Option<PlanIndex>,
        chance: f64,
    ) -> Verdict {
        let plan = plan.and_then(|PlanIndex(number)| self.plans.get(number));
        let (reason, hopeless) = match failure {
            // No attempt can succeed: the body and the set of handlers stay as they are.
            FailureKind::Undecodable => (PoisonReason::Undecodable, true),
            FailureKind::NoHandler => (PoisonReason::NoHandler, true),
            FailureKind::Permanent => (PoisonReason::Permanent, true),
            FailureKind::Transient | FailureKind::RetryAfter(_) => (PoisonReason::Failed, false),
            FailureKind::Panicked => (PoisonReason::Panicked, false),
            FailureKind::TimedOut => (PoisonReason::TimedOut, false),
        };
        let own = match failure {
            FailureKind::RetryAfter(own) => Some(own),
            _ => None,
        };
        let step = if hopeless || attempt >= self.max_attempts.get() {
            None
        } else {
            self.step(plan, attempt, chance)
        };
        match step {
            Some(step) => step.verdict(own),
            None if plan.is_some_and(|plan| plan.discard) => Verdict::Discard(reason),
            None => Verdict::Poison(reason),
        }
    }

    fn step(&self, plan: Option<&Plan>, attempt: u32, chance: f64) -> Option<Step> {
        match plan {
            Some(plan) => plan.step(attempt, chance),
            None => Some(Step::Wait(self.backoff.pause(attempt, chance))),
        }
    }

    /// The longest that a message can stay at the head of its key, if every attempt takes `attempt`, whichever
    /// rules apply. (Without the pauses of the endpoint: then no session holds it.)
    pub(crate) fn longest(&self, attempt: Duration) -> Duration {
        let attempts = self.max_attempts.get();
        let wait = |number: u32| {
            let plans = self.plans.iter().map(Some);
            let steps = plans.chain([None]).map(|plan| self.step(plan, number, 1.0));
            let waits = steps.map(|step| match step {
                Some(Step::Wait(pause)) => pause,
                _ => Duration::ZERO,
            });
            waits.max().unwrap_or_default()
        };
        let waits = (1..attempts).map(wait);
        waits.fold(attempt.saturating_mul(attempts), Duration::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn three_attempts() -> Policy {
        Policy {
            keep_from: None,
            plans: Arc::default(),
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
        let verdict = |attempt| policy.verdict(attempt, FailureKind::Transient, None, 0.5);
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
            let verdict = three_attempts().verdict(1, failure, None, 0.5);
            assert_eq!(verdict, Verdict::Poison(reason));
        }
    }

    #[test]
    fn a_handler_may_choose_its_own_pause() {
        let pause = Duration::from_secs(60);
        let verdict = three_attempts().verdict(1, FailureKind::RetryAfter(pause), None, 0.5);
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

    /// Retry at once, after 1 s, then with a back-off; discard.
    fn long() -> Plan {
        Plan {
            steps: vec![Step::Wait(Duration::ZERO), Step::Wait(SECOND)],
            backoff: Some(Backoff::constant(7 * SECOND)),
            discard: true,
        }
    }

    fn with_plans(max_attempts: u32, plans: Vec<Plan>) -> Policy {
        Policy {
            keep_from: None,
            max_attempts: NonZeroU32::new(max_attempts).expect("not zero"),
            plans: plans.into(),
            ..three_attempts()
        }
    }

    #[test]
    fn the_nth_step_of_a_plan_applies_after_the_nth_attempt() {
        let short = Plan {
            steps: vec![Step::Wait(5 * SECOND)],
            ..Plan::default()
        };
        let policy = with_plans(5, vec![long(), short, Plan::default()]);
        let after = Verdict::RetryAfter;
        let (park, discard) = (
            Verdict::Poison(PoisonReason::Failed),
            Verdict::Discard(PoisonReason::Failed),
        );
        let table = [
            // plan, verdicts after the attempts 1 to 6
            (
                0,
                [
                    after(Duration::ZERO),
                    after(SECOND),
                    after(7 * SECOND),
                    after(7 * SECOND),
                    discard,
                    discard,
                ],
            ),
            (1, [after(5 * SECOND), park, park, park, park, park]),
            (2, [park; 6]),
        ];
        for (plan, verdicts) in table {
            for (attempt, expected) in (1..).zip(verdicts) {
                let verdict =
                    policy.verdict(attempt, FailureKind::Transient, Some(PlanIndex(plan)), 0.5);
                assert_eq!(verdict, expected, "plan {plan}, attempt {attempt}");
            }
        }
    }

    #[test]
    fn a_back_off_after_fixed_pauses_begins_with_its_first_pause() {
        let plan = Plan {
            steps: vec![Step::Wait(Duration::ZERO); 2],
            backoff: Some(three_attempts().backoff),
            discard: false,
        };
        let steps: Vec<_> = (1..=5).map(|attempt| plan.step(attempt, 0.5)).collect();
        let expected = [0, 0, 1, 2, 3].map(|secs| Some(Step::Wait(Duration::from_secs(secs))));
        assert_eq!(steps, expected);
    }

    #[test]
    fn no_plan_retries_what_cannot_succeed_and_its_end_applies() {
        let policy = with_plans(5, vec![long()]);
        for (failure, reason) in [
            (FailureKind::Permanent, PoisonReason::Permanent),
            (FailureKind::Undecodable, PoisonReason::Undecodable),
            (FailureKind::NoHandler, PoisonReason::NoHandler),
        ] {
            let verdict = policy.verdict(1, failure, Some(PlanIndex(0)), 0.5);
            assert_eq!(verdict, Verdict::Discard(reason));
        }
    }

    #[test]
    fn a_pause_that_the_handler_asks_for_replaces_that_of_a_plan_but_adds_no_attempt() {
        let policy = with_plans(5, vec![long(), Plan::default()]);
        let failure = FailureKind::RetryAfter(60 * SECOND);
        let verdict = |plan| policy.verdict(1, failure, Some(PlanIndex(plan)), 0.5);
        assert_eq!(verdict(0), Verdict::RetryAfter(60 * SECOND));
        assert_eq!(verdict(1), Verdict::Poison(PoisonReason::Failed));
    }

    #[test]
    fn an_endpoint_pauses_where_a_plan_says_so_and_that_is_no_time_at_the_head_of_the_key() {
        let pausing = Plan {
            steps: vec![Step::Wait(SECOND), Step::PauseEndpoint(60 * SECOND)],
            ..Plan::default()
        };
        let policy = with_plans(3, vec![pausing]);
        let verdict = |failure| policy.verdict(2, failure, Some(PlanIndex(0)), 0.5);
        let pause = Verdict::PauseEndpoint;
        assert_eq!(verdict(FailureKind::Transient), pause(60 * SECOND));
        let own = FailureKind::RetryAfter(5 * SECOND);
        assert_eq!(verdict(own), pause(5 * SECOND));
        // Where no rule applies: 1 s and 2 s.
        assert_eq!(policy.longest(10 * SECOND), 33 * SECOND);
    }

    fn plans() -> impl Strategy<Value = Vec<Plan>> {
        let plan = (vec(0..3_u64, 0..12), any::<bool>(), any::<bool>());
        let step = |secs| match secs {
            0 => Step::PauseEndpoint(SECOND),
            secs => Step::Wait(secs as u32 * SECOND),
        };
        let plan = plan.prop_map(move |(steps, open, discard)| Plan {
            steps: steps.into_iter().map(step).collect(),
            backoff: open.then(Backoff::default),
            discard,
        });
        vec(plan, 0..4)
    }

    proptest! {
        /// Also for plans that a build would refuse as too long.
        #[test]
        fn a_message_never_runs_more_often_than_allowed_whatever_the_policy(
            max_attempts in 1..8_u32,
            plans in plans(),
            failures in vec((0..7_usize, 0..5_usize, 0.0..1.0_f64), 20),
        ) {
            let policy = with_plans(max_attempts, plans);
            let mut attempts = 0;
            for (kind, plan, chance) in failures {
                attempts += 1;
                let kind = [
                    FailureKind::Transient,
                    FailureKind::RetryAfter(SECOND),
                    FailureKind::Permanent,
                    FailureKind::Panicked,
                    FailureKind::TimedOut,
                    FailureKind::Undecodable,
                    FailureKind::NoHandler,
                ][kind];
                // Number 4 is never there.
                let plan = plan.checked_sub(1).map(PlanIndex);
                match policy.verdict(attempts, kind, plan, chance) {
                    Verdict::RetryAfter(_) | Verdict::PauseEndpoint(_) => {}
                    Verdict::Poison(_) | Verdict::Discard(_) => break,
                }
            }
            prop_assert!(attempts <= max_attempts, "{attempts}");
        }
    }
}
