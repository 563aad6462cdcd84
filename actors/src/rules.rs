//! Failure rules: which failure is treated how.
//!
//! A rule has a condition (on the error, or on the kind of failure) and a [`Plan`]. The first rule whose
//! condition holds decides; conditions are the application's own code, so they are asked where the error
//! is, in the attempt's task, and guarded. What travels on to the lane is the number of the plan.

use std::any::TypeId;
use std::error::Error;
use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::config::Problem;
use crate::handler::{Failure, FailureKind};
use crate::policy::{Backoff, Plan, PlanIndex, Step};

/// An ordered list of failure rules: the first that applies to a failure decides. A failure to which none
/// applies is treated as the endpoint's back-off and `max_delivery_attempts` say.
///
/// Each rule begins with what it applies to (`on…`), may go on with retries, and ends with
/// [`park`](FailureRule::park) or [`discard`](FailureRule::discard):
///
/// ```
/// # use std::time::Duration;
/// # use laneway_actors::{Backoff, FailureRules};
/// # use std::io::{Error, ErrorKind};
/// # let rules = FailureRules::new();
/// rules
///     .on::<Error>().when(|e| e.kind() == ErrorKind::InvalidData).park()
///     .on::<Error>().retry_now(1).retry_after([Duration::from_secs(1), Duration::from_secs(10)]).park()
///     .on_panic().discard()
///     .on_any().backoff(Backoff::default()).park()
/// # ;
/// ```
///
/// After the n-th attempt of a message the n-th step of the rule applies, whichever rules applied to its
/// earlier attempts. A failure that no attempt can mend ([`Failure::permanent`], an undecodable body, no
/// handler) is never retried: the end of the rule applies at once.
#[derive(Clone, Default)]
pub struct FailureRules {
    rules: Vec<Rule>,
}

/// Where a rule was said.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Scope {
    #[default]
    Endpoint,
    MessageType(&'static str),
    Bus,
}

#[derive(Clone)]
struct Rule {
    scope: Scope,
    applies_to: AppliesTo,
    condition: Option<Condition>,
    plan: Plan,
    /// What is wrong in itself.
    problems: Vec<String>,
}

type Condition = Arc<dyn Fn(&Failure) -> bool + Send + Sync>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum AppliesTo {
    Any,
    Panic,
    TimeOut,
    Undecodable,
    NoHandler,
    Error(ErrorType),
}

#[derive(Clone, Copy)]
struct ErrorType {
    id: TypeId,
    name: &'static str,
    is_in: fn(&Failure) -> bool,
}

impl PartialEq for ErrorType {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for ErrorType {}

impl AppliesTo {
    fn holds(self, failure: &Failure) -> bool {
        match self {
            Self::Any => true,
            Self::Panic => failure.kind() == FailureKind::Panicked,
            Self::TimeOut => failure.kind() == FailureKind::TimedOut,
            Self::Undecodable => failure.kind() == FailureKind::Undecodable,
            Self::NoHandler => failure.kind() == FailureKind::NoHandler,
            Self::Error(error) => (error.is_in)(failure),
        }
    }
}

impl Rule {
    fn holds(&self, message_type: Option<&str>, failure: &Failure) -> bool {
        let in_scope = match self.scope {
            Scope::Endpoint | Scope::Bus => true,
            Scope::MessageType(name) => message_type == Some(name),
        };
        in_scope
            && self.applies_to.holds(failure)
            && self.condition.as_ref().is_none_or(|holds| holds(failure))
    }

    /// Whether nothing that `later` applies to gets past this rule.
    fn hides(&self, later: &Self) -> bool {
        self.scope == later.scope
            && self.condition.is_none()
            && (self.applies_to == AppliesTo::Any || self.applies_to == later.applies_to)
    }
}

/// Names the rule as it was said.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.applies_to {
            AppliesTo::Any => f.write_str("on_any()")?,
            AppliesTo::Panic => f.write_str("on_panic()")?,
            AppliesTo::TimeOut => f.write_str("on_timeout()")?,
            AppliesTo::Undecodable => f.write_str("on_undecodable()")?,
            AppliesTo::NoHandler => f.write_str("on_no_handler()")?,
            AppliesTo::Error(error) => write!(f, "on::<{}>()", error.name)?,
        }
        match self.condition {
            Some(_) => f.write_str(".when(…)"),
            None => Ok(()),
        }
    }
}

impl FailureRules {
    /// No rule.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether there is no rule.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Begins a rule for failures with an error of type `E`: the error that the handler returned, or any of
    /// its causes ([`Error::source`]).
    pub fn on<E: Error + 'static>(self) -> FailureRule<E> {
        self.begin(AppliesTo::Error(ErrorType {
            id: TypeId::of::<E>(),
            name: std::any::type_name::<E>(),
            is_in: |failure| failure.find::<E>().is_some(),
        }))
    }

    /// Begins a rule for panics of the handler (and of a key selector).
    pub fn on_panic(self) -> FailureRule<Failure> {
        self.begin(AppliesTo::Panic)
    }

    /// Begins a rule for attempts that took longer than the endpoint's `handler_timeout`.
    pub fn on_timeout(self) -> FailureRule<Failure> {
        self.begin(AppliesTo::TimeOut)
    }

    /// Begins a rule for messages whose body cannot be decoded. They are never retried.
    pub fn on_undecodable(self) -> FailureRule<Failure> {
        self.begin(AppliesTo::Undecodable)
    }

    /// Begins a rule for messages of a type that has no handler. They are never retried.
    pub fn on_no_handler(self) -> FailureRule<Failure> {
        self.begin(AppliesTo::NoHandler)
    }

    /// Begins a rule for every failure, or for every one that meets a condition
    /// ([`when`](FailureRule::<Failure>::when)).
    pub fn on_any(self) -> FailureRule<Failure> {
        self.begin(AppliesTo::Any)
    }

    fn begin<E>(self, applies_to: AppliesTo) -> FailureRule<E> {
        FailureRule {
            rules: self,
            rule: Rule {
                scope: Scope::Endpoint,
                applies_to,
                condition: None,
                plan: Plan::default(),
                problems: Vec::new(),
            },
            error: PhantomData,
        }
    }

    /// The rules of an endpoint in the order in which they are asked: its own, those of message types, those
    /// of the bus.
    pub(crate) fn in_order(own: &Self, of_types: &[(&'static str, Self)], of_bus: &Self) -> Self {
        let mut all = own.clone();
        for (name, rules) in of_types {
            all.append(rules.clone().in_scope(Scope::MessageType(name)));
        }
        all.append(of_bus.clone().in_scope(Scope::Bus));
        all
    }

    fn in_scope(mut self, scope: Scope) -> Self {
        for rule in &mut self.rules {
            rule.scope = scope;
        }
        self
    }

    /// Adds rules that are asked after these.
    pub fn append(&mut self, others: Self) {
        self.rules.extend(others.rules);
    }

    /// What is wrong with them, on an endpoint that is otherwise like this.
    pub(crate) fn problems(
        &self,
        endpoint: &str,
        max_attempts: NonZeroU32,
        parks: bool,
    ) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (number, rule) in self.rules.iter().enumerate() {
            let (place, setting, whose) = match rule.scope {
                Scope::Endpoint => (endpoint, "on_failure".to_owned(), ""),
                Scope::MessageType(name) => ("", format!("on_failure_of `{name}`"), "the bus's "),
                Scope::Bus => ("", "on_failure".to_owned(), "the bus's "),
            };
            let mut wrong = rule.problems.clone();
            let never = match rule.applies_to {
                AppliesTo::Undecodable => Some("a body that cannot be decoded"),
                AppliesTo::NoHandler => Some("a message that nobody handles"),
                _ => None,
            };
            if let Some(what) = never
                && rule.plan.attempts() > 1
            {
                wrong.push(format!(
                    "retries {what}, which no attempt can mend; remove the retries"
                ));
            }
            if matches!(rule.scope, Scope::MessageType(_))
                && rule.applies_to == AppliesTo::NoHandler
            {
                wrong.push("can never apply to a type that has a handler; remove it".to_owned());
            }
            if let Some(earlier) = self.rules[..number].iter().find(|other| other.hides(rule)) {
                wrong.push(format!("can never apply, because `{earlier}` stands before it; change their order or remove one"));
            }
            if rule.scope == Scope::Endpoint && !rule.plan.discard && !parks {
                wrong.push("parks, but the endpoint says `discard_poison()` and has no parking place; end the rule with `discard()`".to_owned());
            }
            for what in wrong {
                problems.push(Problem::new(place, &setting, format!("`{rule}` {what}")));
            }
            if rule.plan.attempts() > max_attempts.get() as usize {
                problems.push(Problem::new(
                    endpoint,
                    &setting,
                    format!(
                        "{whose}`{rule}` needs {} attempts to come to its end, but `max_delivery_attempts` is {max_attempts}; shorten the rule or allow more attempts",
                        rule.plan.attempts()
                    ),
                ));
            }
        }
        problems
    }

    /// Whether some rule applies to every failure.
    pub(crate) fn are_complete(&self) -> bool {
        self.rules.iter().any(|rule| {
            rule.applies_to == AppliesTo::Any
                && rule.condition.is_none()
                && !matches!(rule.scope, Scope::MessageType(_))
        })
    }

    /// What the rules do, by their number.
    pub(crate) fn plans(&self) -> Arc<[Plan]> {
        self.rules.iter().map(|rule| rule.plan.clone()).collect()
    }

    /// The plan of the first rule that applies. A rule whose condition panics does not apply.
    pub(crate) fn find(
        &self,
        message_type: Option<&str>,
        failure: &Failure,
        endpoint: &str,
    ) -> Option<PlanIndex> {
        let applies = |rule: &Rule| {
            catch_unwind(AssertUnwindSafe(|| rule.holds(message_type, failure))).unwrap_or_else(
                |_| {
                    tracing::error!(
                        endpoint,
                        %rule,
                        "the condition of a failure rule panicked: the rule is taken not to apply"
                    );
                    false
                },
            )
        };
        self.rules.iter().position(applies).map(PlanIndex)
    }
}

/// Names the rules; conditions cannot be shown.
impl fmt::Debug for FailureRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules = self.rules.iter();
        f.debug_list()
            .entries(rules.map(|rule| (rule.to_string(), &rule.plan)))
            .finish()
    }
}

/// A rule that is being described. It counts when it ends with [`park`](Self::park) or
/// [`discard`](Self::discard).
#[must_use = "a failure rule must end with `park()` or `discard()`"]
pub struct FailureRule<E> {
    rules: FailureRules,
    rule: Rule,
    error: PhantomData<fn(&E)>,
}

impl<E> fmt::Debug for FailureRule<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FailureRule")
            .field(&self.rule.to_string())
            .finish()
    }
}

impl<E: Error + 'static> FailureRule<E> {
    /// Only when this holds for an error of type `E` among the error and its causes. A condition that panics
    /// does not hold. It runs while its attempt still counts as running, so it should not block.
    pub fn when(self, holds: impl Fn(&E) -> bool + Send + Sync + 'static) -> Self {
        self.on_condition(move |failure| {
            failure
                .chain()
                .filter_map(|error| error.downcast_ref())
                .any(&holds)
        })
    }
}

impl FailureRule<Failure> {
    /// Only when this holds for the failure. A condition that panics does not hold. It runs while its attempt
    /// still counts as running, so it should not block.
    pub fn when(self, holds: impl Fn(&Failure) -> bool + Send + Sync + 'static) -> Self {
        self.on_condition(holds)
    }
}

impl<E> FailureRule<E> {
    fn on_condition(mut self, holds: impl Fn(&Failure) -> bool + Send + Sync + 'static) -> Self {
        self.rule.condition = Some(match self.rule.condition.take() {
            Some(first) => Arc::new(move |failure| first(failure) && holds(failure)),
            None => Arc::new(holds),
        });
        self
    }

    /// So many retries without a pause. The message stays at the head of its key.
    pub fn retry_now(self, times: u32) -> Self {
        // More than the 1,000 that any message may have are refused like 1,001.
        let times = times.min(1_001) as usize;
        self.retries("retry_now", vec![Step::Wait(Duration::ZERO); times])
    }

    /// One retry after each of these pauses. Only the message's key waits. A pause that the handler asks for
    /// ([`Failure::retry_after`]) takes the place of the rule's.
    pub fn retry_after(self, pauses: impl IntoIterator<Item = Duration>) -> Self {
        let pauses = pauses.into_iter().take(1_001);
        self.retries("retry_after", pauses.map(Step::Wait).collect())
    }

    /// One retry after a pause of the **whole endpoint**, for failures that every message would meet (a
    /// database that is away): what runs may finish, then the endpoint gives all its sessions back, so that
    /// another instance may take over, and opens them again after this time. Messages keep their order and
    /// their attempts.
    ///
    /// The state meanwhile is [`EndpointState::Paused`](crate::EndpointState::Paused). Pauses do not add up:
    /// while the endpoint pauses, only a longer one makes it longer. None is longer than 30 days.
    pub fn pause_endpoint(mut self, pause: Duration) -> Self {
        if pause.is_zero() {
            let what = "has a `pause_endpoint` of no time; use `retry_now` or give it a time";
            self.rule.problems.push(what.to_owned());
        }
        self.retries("pause_endpoint", vec![Step::PauseEndpoint(pause)])
    }

    fn retries(mut self, step: &str, steps: Vec<Step>) -> Self {
        if steps.is_empty() {
            let what = format!("has a `{step}` without a retry; remove it");
            self.rule.problems.push(what);
        }
        self.nothing_after_backoff(step);
        self.rule.plan.steps.extend(steps);
        self
    }

    /// Retries with growing pauses for as long as `max_delivery_attempts` allows. Nothing but the end of the
    /// rule can come after it. Without it a rule ends when its retries are used up.
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.nothing_after_backoff("backoff");
        for what in backoff.problems() {
            self.rule.problems.push(format!("has a `backoff`: {what}"));
        }
        self.rule.plan.backoff = Some(backoff);
        self
    }

    fn nothing_after_backoff(&mut self, step: &str) {
        if self.rule.plan.backoff.is_some() {
            let what = format!(
                "has a `{step}` after its `backoff`, which uses up the attempts; remove one of them"
            );
            self.rule.problems.push(what);
        }
    }

    /// After the retries the message is parked. Where the endpoint says `discard_poison()` there is no
    /// parking place: there, a rule of the endpoint that parks is refused, and a rule of the bus discards.
    pub fn park(self) -> FailureRules {
        self.finish(false)
    }

    /// After the retries the message is discarded: acknowledged and reported as a gap, nothing of it is kept.
    pub fn discard(self) -> FailureRules {
        self.finish(true)
    }

    fn finish(self, discard: bool) -> FailureRules {
        let Self {
            mut rules,
            mut rule,
            ..
        } = self;
        rule.plan.discard = discard;
        rules.rules.push(rule);
        rules
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Error as IoError, ErrorKind};

    use super::*;

    /// The number of the plan that applies to a failure of a message of this type.
    fn found(rules: &FailureRules, message_type: Option<&str>, failure: &Failure) -> Option<usize> {
        let plan = rules.find(message_type, failure, "orders");
        plan.map(|PlanIndex(number)| number)
    }

    #[test]
    fn each_kind_of_failure_finds_its_own_rule_and_what_is_left_finds_the_last() {
        let rules = FailureRules::new();
        let rules = rules.on_panic().park().on_timeout().park();
        let rules = rules.on_undecodable().park().on_no_handler().park();
        let rules = rules.on_any().park();
        for (kind, rule) in [
            (FailureKind::Panicked, 0),
            (FailureKind::TimedOut, 1),
            (FailureKind::Undecodable, 2),
            (FailureKind::NoHandler, 3),
            (FailureKind::Transient, 4),
            (FailureKind::RetryAfter(Duration::ZERO), 4),
            (FailureKind::Permanent, 4),
        ] {
            let failure = Failure::new(kind, "some text");
            assert_eq!(found(&rules, None, &failure), Some(rule), "{kind:?}");
        }
    }

    #[test]
    fn conditions_of_one_rule_must_all_hold() {
        let rules = FailureRules::new()
            .on::<IoError>()
            .when(|e| e.kind() != ErrorKind::NotFound)
            .when(|e| e.kind() != ErrorKind::TimedOut)
            .park();
        let find = |kind: ErrorKind| found(&rules, None, &Failure::from(IoError::from(kind)));
        assert_eq!(find(ErrorKind::NotFound), None);
        assert_eq!(find(ErrorKind::TimedOut), None);
        assert_eq!(find(ErrorKind::InvalidData), Some(0));
    }

    #[test]
    fn rules_of_a_type_are_asked_for_messages_of_that_type_alone_and_in_their_place() {
        let rule = |rules: FailureRules| rules.on_panic().park();
        let of_types = [
            ("paid", rule(FailureRules::new())),
            ("sent", FailureRules::new().on_any().park()),
        ];
        let of_bus = FailureRules::new().on_any().park();
        let rules = FailureRules::in_order(&FailureRules::new(), &of_types, &of_bus);
        let panicked = Failure::new(FailureKind::Panicked, "");
        assert_eq!(found(&rules, Some("paid"), &panicked), Some(0));
        assert_eq!(found(&rules, Some("sent"), &panicked), Some(1));
        assert_eq!(found(&rules, Some("other"), &panicked), Some(2));
        assert_eq!(found(&rules, None, &panicked), Some(2));
        let own = rule(FailureRules::new());
        let rules = FailureRules::in_order(&own, &of_types, &of_bus);
        assert_eq!(found(&rules, Some("paid"), &panicked), Some(0), "its own");
        assert_eq!(rules.plans().len(), 4);
    }
}
