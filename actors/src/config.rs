//! The settings of an endpoint: raw in, valid out; and the ConfigActor that runs the checks at boot.
//!
//! [`EndpointSettings`] is what a user writes; [`EndpointSettings::check`] lists *every* problem at
//! once, each naming its setting and the way out, or gives an [`EndpointConfig`], which cannot be
//! wrong. The check is pure. [`ConfigActor`] runs it at boot together with the checks of the world
//! ([`Source::verify`]), before anything starts.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use actix::{Actor, Context, Handler, Message, ResponseFuture};

use crate::key::LaneCount;
use crate::lane::machine::PoisonPlan;
use crate::policy::{Backoff, Policy};
use crate::port::{Membership, Source, SourceError};
use crate::restart::Intensity;
use crate::rules::FailureRules;

/// Lanes of an ordered endpoint that says nothing of them. With `concurrency(256)`, a lane for each made nearly
/// each message one to an actor of its own, on the way in and on the way out: 1.2 times the processor time on two
/// cores. (`benches/throughput/notes.md`, "The lane path made cheaper")
const MOST_LANES_UNASKED: NonZeroU32 = NonZeroU32::new(16).expect("not zero");

/// Slots of a lane for direct senders, for each handler that there is for it.
const SLOTS_FOR_HANDLER: u32 = 64;

/// Where the ordering key of a delivery comes from. The first that gives one wins: the header, the
/// typed selector, the correlation id. A message without any is keyless: it has no order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KeySource {
    /// Name of the header.
    pub header: Option<String>,
    /// Whether typed selectors of the handlers are asked.
    pub typed: bool,
    /// Whether the correlation id stands in. (Each such message is counted.)
    pub correlation_id: bool,
    /// Whether the source gives the key itself ([`Delivery::with_key`](crate::Delivery::with_key)), as a store does,
    /// which has it from whoever sent the message. Then nothing else is asked.
    pub given: bool,
}

/// What happens to the key of a message that is poison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PoisonMode {
    /// The message is parked, the gap reported, and the key goes on.
    #[default]
    ReleaseKey,
    /// The message stays at the head of its key, and nothing of the key runs until an operator decides. Other
    /// keys go on. (A message that a failure rule discards holds nothing, nor does a keyless one.)
    ///
    /// The hold has two bounds, at which the message is parked, loudly, and the key goes on: this time, and
    /// half of the credits for all held keys together (then the oldest goes).
    BlockKey {
        /// More than zero, less than [`EndpointSettings::ack_timeout`].
        hold_at_most: Duration,
    },
    /// The same without a bound, where the source keeps what is held ([`EndpointSettings::source_keeps`]): it uses no
    /// credit, and survives the end of the process.
    KeepKey,
}

impl PoisonMode {
    /// [`BlockKey`](Self::BlockKey) for at most 10 minutes.
    pub fn block_key() -> Self {
        Self::BlockKey {
            hold_at_most: Duration::from_secs(600),
        }
    }
}

/// The settings of an endpoint, as written.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EndpointSettings {
    /// Name of the endpoint, for logs, events and errors.
    pub name: String,
    /// At most this many handlers at once, 1 to 65,535. Defaults to 16.
    pub concurrency: u32,
    /// Number of lanes of an ordered endpoint, 1 to 65,535. Defaults to `concurrency`, but to no more than
    /// 16: a lane is no bound on how many keys of a source run at once, and each one more costs something for
    /// each message that comes alone. An endpoint without ordering has no use for it, and refuses it.
    pub lanes: Option<u32>,
    /// Credits: at most this many unsettled deliveries (the broker's prefetch), `concurrency` to
    /// 65,535. Defaults to twice `concurrency`, at least 32.
    pub max_in_flight: Option<u32>,
    /// Slots of each lane for messages sent directly to it, 1 to 65,535. They bound how many of them run at
    /// once, too. Defaults to 64 for each handler that there is for a lane, rounded up.
    pub lane_depth: Option<u32>,
    /// Where the key comes from; `None` for an endpoint without ordering (the default).
    pub ordering: Option<KeySource>,
    /// Total number of runs of a message, 1 to 1,000. Defaults to 5.
    pub max_delivery_attempts: u32,
    /// Pauses between attempts, where no failure rule applies.
    pub backoff: Backoff,
    /// What to do about which failure: the first rule that applies decides.
    pub rules: FailureRules,
    /// Rules for messages of a type, asked after those.
    pub type_rules: Vec<(&'static str, FailureRules)>,
    /// Rules that all endpoints of a bus share, asked last.
    pub bus_rules: FailureRules,
    /// How long a handler may run; `None` for no bound. Defaults to 60 s.
    pub handler_timeout: Option<Duration>,
    /// The time in which the source wants an acknowledgement, as the broker is configured: over AMQP it does not
    /// tell. 1 s to 7 days; defaults to the 30 minutes of RabbitMQ (`consumer_timeout`).
    ///
    /// When the oldest unsettled message is 80 % of this old, its session is renewed: what runs may finish, then
    /// the session is closed and opened again; at 90 % what still runs is aborted. All attempts of a message,
    /// with their time-outs and pauses, must fit into it.
    ///
    /// `None` for a source that waits for ever.
    pub ack_timeout: Option<Duration>,
    /// Pauses of at least this length are spent in the source, and held keys are kept there; `None` for sources that
    /// cannot do that (the default).
    pub source_keeps: Option<Duration>,
    /// Poison messages are acknowledged and reported instead of parked.
    pub discard_poison: bool,
    /// What happens to the key of a poison message. Defaults to releasing it.
    pub poison_mode: PoisonMode,
    /// How long an attempt may go on after its session was lost. Defaults to zero: another instance
    /// may already be running the same message.
    pub abort_grace: Duration,
    /// How often Laneway's own actors may panic before the endpoint is given up.
    pub intensity: Intensity,
}

impl EndpointSettings {
    /// Settings with every default.
    pub fn named(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            concurrency: 16,
            lanes: None,
            max_in_flight: None,
            lane_depth: None,
            ordering: None,
            max_delivery_attempts: 5,
            backoff: Backoff::default(),
            rules: FailureRules::default(),
            type_rules: Vec::new(),
            bus_rules: FailureRules::default(),
            handler_timeout: Some(Duration::from_secs(60)),
            ack_timeout: Some(Duration::from_secs(1_800)),
            source_keeps: None,
            discard_poison: false,
            poison_mode: PoisonMode::default(),
            abort_grace: Duration::ZERO,
            intensity: Intensity::default(),
        }
    }

    /// Checks everything. `has_parking`: whether there is a parking place; `shards`: the number of sources,
    /// which share the credits.
    ///
    /// # Errors
    /// All problems, each naming its setting.
    pub fn check(&self, has_parking: bool, shards: usize) -> Result<EndpointConfig, Vec<Problem>> {
        let mut problems = Vec::new();
        let mut problem = |setting: &str, what: String| {
            problems.push(Problem::new(&self.name, setting, what));
        };
        if self.name.is_empty() {
            problem("name", "must not be empty".to_owned());
        }
        let mut number = |setting: &str, value: u32, least: u32, most: u32| {
            if !(least..=most).contains(&value) {
                problem(
                    setting,
                    format!("{value} is not between {least} and {most}"),
                );
            }
            NonZeroU32::new(value).unwrap_or(NonZeroU32::MIN)
        };
        let concurrency = number("concurrency", self.concurrency, 1, 65_535);
        let lanes = match self.lanes {
            Some(lanes) => number("lanes", lanes, 1, 65_535),
            None => concurrency.min(MOST_LANES_UNASKED),
        };
        let credits = self
            .max_in_flight
            .unwrap_or_else(|| self.concurrency.saturating_mul(2).clamp(32, 65_535));
        let credits = number(
            "max_in_flight",
            credits,
            self.concurrency.clamp(1, 65_535),
            65_535,
        );
        let lane_depth = match self.lane_depth {
            Some(depth) => number("lane_depth", depth, 1, 65_535),
            None => {
                let handlers = concurrency.get().div_ceil(lanes.get());
                let depth = SLOTS_FOR_HANDLER.saturating_mul(handlers).min(65_535);
                NonZeroU32::new(depth).unwrap_or(NonZeroU32::MIN)
            }
        };
        let max_attempts = number(
            "max_delivery_attempts",
            self.max_delivery_attempts,
            1,
            1_000,
        );
        if (credits.get() as usize) < shards {
            problem(
                "max_in_flight",
                format!("{credits} is fewer than one for each of the {shards} shards"),
            );
        }
        if self.lanes.is_some() && self.ordering.is_none() {
            problem(
                "lanes",
                "has no effect without ordering; remove it or order by a key".to_owned(),
            );
        }
        if let Some(KeySource {
            header,
            typed,
            correlation_id,
            given,
        }) = &self.ordering
        {
            if header.as_ref().is_some_and(String::is_empty) {
                problem(
                    "ordered_by_header",
                    "the header's name must not be empty".to_owned(),
                );
            }
            if *given && (header.is_some() || *typed || *correlation_id) {
                problem(
                    "ordering",
                    "the source gives the key, so a header, a typed selector or the correlation id has no effect; remove it"
                        .to_owned(),
                );
            }
            if header.is_none() && !typed && !correlation_id && !given {
                problem(
                    "ordering",
                    "names no source of the key: use a header, a typed selector or the correlation id"
                        .to_owned(),
                );
            }
        }
        if self.handler_timeout.is_some_and(|bound| bound.is_zero()) {
            problem(
                "handler_timeout",
                "zero would stop every handler before it starts; use `None` for no bound"
                    .to_owned(),
            );
        }
        let rules = FailureRules::in_order(&self.rules, &self.type_rules, &self.bus_rules);
        for what in self.backoff.problems() {
            problem("backoff", what);
        }
        if self.backoff != Backoff::default() && rules.are_complete() {
            problem(
                "backoff",
                "has no effect, because a failure rule applies to every failure; remove one of them"
                    .to_owned(),
            );
        }
        if self.poison_mode != PoisonMode::ReleaseKey {
            if self.ordering.is_none() {
                problem(
                    "poison_mode",
                    "holding keys has no effect without ordering; remove it or order by a key"
                        .to_owned(),
                );
            }
            if self.discard_poison {
                problem(
                    "poison_mode",
                    "holding keys contradicts `discard_poison()`: it needs a parking place for when the hold ends; remove one of them".to_owned(),
                );
            }
        }
        if self.poison_mode == PoisonMode::KeepKey && self.source_keeps.is_none() {
            problem(
                "poison_mode",
                "`KeepKey` needs a durable queue, which keeps what is held; use `BlockKey`, whose hold has a bound"
                    .to_owned(),
            );
        }
        if let PoisonMode::BlockKey { hold_at_most } = self.poison_mode {
            if self.source_keeps.is_some() {
                problem(
                    "poison_mode",
                    "on a durable queue a hold needs no bound; use `KeepKey`".to_owned(),
                );
            }
            if (credits.get() as usize) < 2 * shards {
                problem(
                    "poison_mode",
                    format!(
                        "`BlockKey` has no effect with `max_in_flight({credits})`: a hold may use half of the credits of its shard; allow at least {}",
                        2 * shards
                    ),
                );
            }
            let ack_timeout = self.ack_timeout.unwrap_or(Duration::MAX);
            if hold_at_most.is_zero() || hold_at_most >= ack_timeout {
                problem(
                    "poison_mode",
                    format!(
                        "`hold_at_most` is {hold_at_most:?}, but must be more than zero and less than `ack_timeout` ({ack_timeout:?}), in which the source wants an acknowledgement"
                    ),
                );
            }
        }
        match (has_parking, self.discard_poison) {
            (false, false) => problem(
                "parking",
                "messages that fail for good need a place: give the queue a `parking(exchange, queue)`, or say `discard_poison()`".to_owned(),
            ),
            (true, true) => problem(
                "discard_poison",
                "contradicts the queue's parking place; remove one of them".to_owned(),
            ),
            _ => {}
        }
        let policy = Policy {
            max_attempts,
            backoff: self.backoff,
            plans: rules.plans(),
            keep_from: self.source_keeps,
        };
        if let Some(ack_timeout) = self.ack_timeout {
            if !(Duration::from_secs(1)..=Duration::from_secs(7 * 86_400)).contains(&ack_timeout) {
                problem(
                    "ack_timeout",
                    format!("{ack_timeout:?} is not between 1 s and 7 days"),
                );
            }
            let longest = policy.longest(self.handler_timeout.unwrap_or_default());
            if longest >= ack_timeout {
                problem(
                    "ack_timeout",
                    format!(
                        "{max_attempts} attempts with their time-outs and pauses can take {longest:?}, but the source takes a message away that is not acknowledged within {ack_timeout:?}; lower `max_delivery_attempts`, `handler_timeout` or the pauses, or raise this together with the broker's `consumer_timeout`"
                    ),
                );
            }
        }
        problems.extend(rules.problems(&self.name, max_attempts, !self.discard_poison));
        if !problems.is_empty() {
            return Err(problems);
        }
        Ok(EndpointConfig {
            name: self.name.as_str().into(),
            concurrency,
            lanes: LaneCount::new(lanes),
            credits: u16::try_from(credits.get()).unwrap_or(u16::MAX),
            lane_depth: lane_depth.get() as usize,
            ordering: self.ordering.clone(),
            policy,
            rules,
            handler_timeout: self.handler_timeout,
            ack_timeout: self.ack_timeout,
            plan: match self.poison_mode {
                _ if self.discard_poison => PoisonPlan::Discard,
                PoisonMode::ReleaseKey => PoisonPlan::Park,
                PoisonMode::BlockKey { hold_at_most } => PoisonPlan::Hold(hold_at_most),
                PoisonMode::KeepKey => PoisonPlan::Keep(None),
            },
            abort_grace: self.abort_grace,
            intensity: self.intensity,
        })
    }
}

/// Checked settings: every value is in its bounds.
#[derive(Debug, Clone)]
pub struct EndpointConfig {
    pub(crate) name: Arc<str>,
    pub(crate) concurrency: NonZeroU32,
    pub(crate) lanes: LaneCount,
    pub(crate) credits: u16,
    pub(crate) lane_depth: usize,
    pub(crate) ordering: Option<KeySource>,
    pub(crate) policy: Policy,
    pub(crate) rules: FailureRules,
    pub(crate) handler_timeout: Option<Duration>,
    pub(crate) ack_timeout: Option<Duration>,
    pub(crate) plan: PoisonPlan,
    pub(crate) abort_grace: Duration,
    pub(crate) intensity: Intensity,
}

/// Something that must be changed before the endpoint can start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Name of the endpoint; empty for what concerns the whole program.
    pub endpoint: String,
    /// The setting, or the thing in the world.
    pub setting: String,
    /// What is wrong, and what to do instead.
    pub what: String,
}

impl Problem {
    /// A problem of an endpoint's setting.
    pub fn new(
        endpoint: impl Into<String>,
        setting: impl Into<String>,
        what: impl Into<String>,
    ) -> Self {
        Self {
            endpoint: endpoint.into(),
            setting: setting.into(),
            what: what.into(),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.endpoint.is_empty() {
            write!(f, "endpoint `{}`: ", self.endpoint)?;
        }
        write!(f, "{}: {}", self.setting, self.what)
    }
}

/// Runs the checks of the world at boot, before anything starts.
#[derive(Debug, Default)]
pub struct ConfigActor;

impl Actor for ConfigActor {
    type Context = Context<Self>;
}

/// Asks [`ConfigActor`] to verify the world: the program can survive panics, and every source and
/// parking place is there and as declared.
#[derive(Message)]
#[rtype(result = "Result<(), Vec<Problem>>")]
pub struct VerifyWorld {
    /// The endpoints' names and sources.
    pub sources: Vec<(String, Arc<dyn Source>)>,
    /// The endpoints' names and groups, of those that share their sources out among instances. Each is joined
    /// once and left again: an endpoint that may not join its group would start, and never take a shard.
    pub memberships: Vec<(String, Arc<dyn Membership>)>,
}

impl Handler<VerifyWorld> for ConfigActor {
    type Result = ResponseFuture<Result<(), Vec<Problem>>>;

    fn handle(&mut self, world: VerifyWorld, _: &mut Self::Context) -> Self::Result {
        Box::pin(async move {
            let mut problems = Vec::new();
            if cfg!(not(panic = "unwind")) {
                problems.push(Problem::new(
                    "",
                    "panic",
                    "the program is built with `panic = \"abort\"`: a handler's panic would end it; remove that from the profile",
                ));
            }
            // One after the other: queues are declared in the order in which they are named.
            for (endpoint, source) in &world.sources {
                for error in source.verify().await.err().into_iter().flatten() {
                    add(&mut problems, endpoint, &error);
                }
            }
            for (endpoint, membership) in &world.memberships {
                if let Err(error) = membership.join().await {
                    add(&mut problems, endpoint, &error);
                }
            }
            if problems.is_empty() {
                Ok(())
            } else {
                Err(problems)
            }
        })
    }
}

/// Adds what an endpoint's world answered, once.
fn add(problems: &mut Vec<Problem>, endpoint: &str, error: &SourceError) {
    let setting = match error {
        SourceError::Unavailable { .. } => "connection",
        SourceError::Refused { .. } => "topology",
    };
    let problem = Problem::new(endpoint, setting, error.to_string());
    if !problems.contains(&problem) {
        problems.push(problem);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> EndpointSettings {
        EndpointSettings::named("orders")
    }

    fn check(change: impl FnOnce(&mut EndpointSettings), has_parking: bool) -> Vec<String> {
        let mut settings = settings();
        change(&mut settings);
        let problems = settings.check(has_parking, 1).err().unwrap_or_default();
        problems
            .into_iter()
            .map(|problem| problem.setting)
            .collect()
    }

    #[test]
    fn the_defaults_are_valid() {
        assert_eq!(check(|_| {}, true), Vec::<String>::new());
    }

    #[test]
    fn there_are_no_more_than_16_lanes_unasked_and_direct_senders_lose_nothing() {
        let of = |concurrency, lanes| {
            let settings = EndpointSettings {
                concurrency,
                lanes,
                ordering: Some(KeySource {
                    correlation_id: true,
                    ..KeySource::default()
                }),
                ..settings()
            };
            let config = settings.check(true, 1).expect("valid");
            (config.lanes.get(), config.lane_depth)
        };
        assert_eq!(of(1, None), (1, 64));
        assert_eq!(of(16, None), (16, 64));
        assert_eq!(of(256, None), (16, 1_024));
        assert_eq!(of(256, Some(256)), (256, 64));
        assert_eq!(of(20, None), (16, 128), "rounded up");
        assert_eq!(of(65_535, Some(1)), (1, 65_535), "bounded");
    }

    #[test]
    fn every_bad_setting_is_refused_by_its_name() {
        type Change = fn(&mut EndpointSettings);
        let cases: [(&str, Change); 14] = [
            ("name", |s| s.name.clear()),
            ("concurrency", |s| s.concurrency = 0),
            ("concurrency", |s| {
                s.concurrency = 65_536;
                s.max_in_flight = Some(65_535);
            }),
            ("lanes", |s| {
                s.ordering = Some(KeySource {
                    correlation_id: true,
                    ..KeySource::default()
                });
                s.lanes = Some(0);
            }),
            ("lanes", |s| s.lanes = Some(4)),
            ("max_in_flight", |s| s.max_in_flight = Some(15)),
            ("max_in_flight", |s| s.max_in_flight = Some(100_000)),
            ("lane_depth", |s| s.lane_depth = Some(0)),
            ("max_delivery_attempts", |s| s.max_delivery_attempts = 0),
            ("handler_timeout", |s| {
                s.handler_timeout = Some(Duration::ZERO);
            }),
            ("backoff", |s| s.backoff.factor = 0.5),
            ("backoff", |s| s.backoff.jitter = f64::NAN),
            ("ordering", |s| s.ordering = Some(KeySource::default())),
            ("discard_poison", |s| s.discard_poison = true),
        ];
        for (setting, change) in cases {
            assert_eq!(check(change, true), [setting]);
        }
        assert_eq!(check(|_| {}, false), ["parking"]);
    }

    #[test]
    fn all_problems_are_listed_at_once() {
        let problems = check(
            |s| {
                s.concurrency = 0;
                s.lane_depth = Some(0);
            },
            false,
        );
        assert_eq!(problems, ["concurrency", "lane_depth", "parking"]);
    }
}
