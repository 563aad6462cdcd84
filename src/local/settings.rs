//! What is said about local queues, and the one pure merge of it.
//!
//! Several voices may speak about a queue: [`local_queue`](crate::BusBuilder::local_queue) about it alone, each of
//! its handlers, the handlers' modules, and [`local_queues`](crate::BusBuilder::local_queues). The voice of the highest rank
//! that says something decides. Two voices of one rank that contradict each other are a problem, whoever is right.
//!
//! A setting that does not fit its queue (a bound of a durable one, say) is a problem where it is said of this queue
//! or handler; what is said of many queues holds for those that it fits. What fits none is found afterwards
//! ([`unreached`]). Being overruled is no mistake: that is what ranks are for.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::time::Duration;

use laneway_actors::{Backoff, FailureRules, PoisonMode};

/// Messages that a buffered queue holds, unless its bound says otherwise.
pub(crate) const DEFAULT_BOUND: usize = 10_000;

/// Where the messages of a queue wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Storage {
    /// In this process's memory.
    #[default]
    Buffered,
    /// In the application's database.
    Durable,
    /// At the bus's transport.
    Broker,
}

/// In which order a queue's messages are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum QueueOrder {
    /// In none.
    #[default]
    Unordered,
    /// The whole queue in order.
    Sequential,
    /// By key, over this many lanes.
    Partitioned(u32),
}

/// What happens to poison messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Poison {
    Mode(PoisonMode),
    Discard,
}

/// What one voice says.
#[derive(Debug, Clone, Default)]
pub(crate) struct QueueSettings {
    pub(crate) storage: Option<Storage>,
    pub(crate) order: Option<QueueOrder>,
    pub(crate) bound: Option<usize>,
    pub(crate) max_parallel: Option<u32>,
    pub(crate) shards: Option<u32>,
    pub(crate) transactional: Option<()>,
    pub(crate) keys_from_publisher: Option<()>,
    pub(crate) handler_timeout: Option<Option<Duration>>,
    pub(crate) max_delivery_attempts: Option<u32>,
    pub(crate) backoff: Option<Backoff>,
    pub(crate) poison: Option<Poison>,
    pub(crate) rules: Option<FailureRules>,
    /// Settings that it says twice, and differently.
    pub(crate) twice: Vec<&'static str>,
    /// `on_failure` was called without a rule.
    pub(crate) rules_missing: bool,
}

impl QueueSettings {
    /// The settings that are said.
    pub(crate) fn said(&self) -> Vec<&'static str> {
        let all = [
            (STORAGE, self.storage.is_some()),
            (ORDER, self.order.is_some()),
            (BOUND, self.bound.is_some()),
            (MAX_PARALLEL, self.max_parallel.is_some()),
            (SHARDS, self.shards.is_some()),
            (TRANSACTIONAL, self.transactional.is_some()),
            (KEYS_FROM_PUBLISHER, self.keys_from_publisher.is_some()),
            (HANDLER_TIMEOUT, self.handler_timeout.is_some()),
            (ATTEMPTS, self.max_delivery_attempts.is_some()),
            (BACKOFF, self.backoff.is_some()),
            (POISON, self.poison.is_some()),
            (RULES, self.rules.is_some()),
        ];
        let said = all.into_iter().filter(|(_, said)| *said);
        said.map(|(setting, _)| setting).collect()
    }
}

pub(crate) const STORAGE: &str = "buffered/durable/on_broker";
pub(crate) const ORDER: &str = "sequential/partitioned";
pub(crate) const BOUND: &str = "bound";
pub(crate) const MAX_PARALLEL: &str = "max_parallel";
pub(crate) const SHARDS: &str = "shards";
pub(crate) const TRANSACTIONAL: &str = "transactional";
pub(crate) const KEYS_FROM_PUBLISHER: &str = "keys_from_publisher";
pub(crate) const HANDLER_TIMEOUT: &str = "handler_timeout";
pub(crate) const ATTEMPTS: &str = "max_delivery_attempts";
pub(crate) const BACKOFF: &str = "backoff";
pub(crate) const POISON: &str = "poison_mode/discard_poison";
pub(crate) const RULES: &str = "on_failure";

/// Who speaks. The order is that of the ranks, the highest first; the number tells voices of one rank apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum VoiceId {
    Queue(usize),
    Handler(usize),
    Module(usize),
    All(usize),
}

impl VoiceId {
    fn rank(self) -> u8 {
        match self {
            Self::Queue(_) => 0,
            Self::Handler(_) => 1,
            Self::Module(_) => 2,
            Self::All(_) => 3,
        }
    }

    /// Whether it speaks about one queue, so that what does not fit can only be a mistake.
    fn is_particular(self) -> bool {
        matches!(self, Self::Queue(_) | Self::Handler(_))
    }
}

/// One voice, with what it says.
pub(crate) type Voice<'a> = (VoiceId, &'a QueueSettings);

/// The settings of one queue.
#[derive(Debug, Clone)]
pub(crate) struct Merged {
    pub(crate) storage: Storage,
    pub(crate) order: QueueOrder,
    pub(crate) bound: usize,
    /// At most this many handlers at once.
    pub(crate) parallel: u32,
    pub(crate) shards: u32,
    pub(crate) transactional: bool,
    pub(crate) keys_from_publisher: bool,
    pub(crate) handler_timeout: Option<Option<Duration>>,
    pub(crate) max_delivery_attempts: Option<u32>,
    pub(crate) backoff: Option<Backoff>,
    pub(crate) poison: Option<Poison>,
    pub(crate) rules: FailureRules,
    /// Which settings of which voices fit this queue, overruled or not.
    pub(crate) reached: BTreeSet<(VoiceId, &'static str)>,
    /// Setting, and what is wrong.
    pub(crate) problems: Vec<(&'static str, String)>,
}

/// Handlers at once, where nothing says otherwise: one for each processor, at least 5.
pub(crate) fn default_parallel(processors: Option<NonZeroUsize>) -> u32 {
    let processors = processors.map_or(1, NonZeroUsize::get);
    u32::try_from(processors)
        .unwrap_or(u32::MAX)
        .clamp(5, 65_535)
}

/// Merges what is said about one queue.
pub(crate) fn merge(voices: &[Voice<'_>], default_parallel: u32) -> Merged {
    let mut merging = Merging::new(voices);
    let storage = merging
        .pick(STORAGE, |s| s.storage, None)
        .unwrap_or_default();
    let order = merging.pick(ORDER, |s| s.order, None).unwrap_or_default();
    let not = |fits: bool, why: &'static str| (!fits).then_some(why);
    let (buffered, durable) = (storage == Storage::Buffered, storage == Storage::Durable);
    let ordered = order != QueueOrder::Unordered;
    let partitioned = matches!(order, QueueOrder::Partitioned(_));

    let bound = merging.pick(
        BOUND,
        |s| s.bound,
        not(
            buffered,
            "bounds what waits in memory, and this queue is not `buffered()`; remove it",
        ),
    );
    if bound == Some(0) {
        merging.problem(BOUND, "0 would let nobody publish; allow at least 1");
    }
    let parallel = merging.pick(
        MAX_PARALLEL,
        |s| s.max_parallel,
        not(
            order != QueueOrder::Sequential,
            "a `sequential()` queue handles one message at a time; remove one of them",
        ),
    );
    if parallel.is_some_and(|n| !(1..=65_535).contains(&n)) {
        merging.problem(MAX_PARALLEL, "must be 1 to 65,535");
    }
    let shards = merging.pick(
        SHARDS,
        |s| s.shards,
        not(
            durable && ordered,
            "shards share an ordered durable queue out among nodes; say `durable()` and `sequential()` or `partitioned(…)` of the queue, or remove it",
        ),
    );
    if shards.is_some_and(|shards| !(1..=1_000).contains(&shards)) {
        merging.problem(SHARDS, "must be 1 to 1,000");
    }
    if order == QueueOrder::Sequential && shards.is_some_and(|shards| shards > 1) {
        merging.problem(
            SHARDS,
            "a `sequential()` queue has one order and so one shard; use `partitioned(…)`, or remove it",
        );
    }
    let transactional = merging.pick(
        TRANSACTIONAL,
        |s| s.transactional,
        not(
            durable,
            "a transaction needs the database of a `durable()` queue; say so of the queue, or remove it",
        ),
    );
    let keys_from_publisher = merging.pick(
        KEYS_FROM_PUBLISHER,
        |s| s.keys_from_publisher,
        not(
            partitioned,
            "only a `partitioned(…)` queue needs keys; remove it",
        ),
    );
    let poison = merging.pick(
        POISON,
        |s| s.poison,
        not(
            !buffered,
            "a `buffered()` queue has no place for poison messages: it always discards and reports them; use `durable()` or `on_broker()`, or remove it",
        ),
    );
    let lanes = match order {
        QueueOrder::Unordered => default_parallel,
        QueueOrder::Sequential => 1,
        QueueOrder::Partitioned(lanes) => lanes,
    };
    if partitioned && !(1..=65_535).contains(&lanes) {
        merging.problem(ORDER, "the lanes of `partitioned(…)` must be 1 to 65,535");
    }
    Merged {
        storage,
        // What is out of bounds is told above, and not once more under the runtime's own name for it.
        order: match order {
            QueueOrder::Partitioned(lanes) => QueueOrder::Partitioned(lanes.clamp(1, 65_535)),
            order => order,
        },
        bound: bound.unwrap_or(DEFAULT_BOUND),
        parallel: parallel.unwrap_or(lanes).clamp(1, 65_535),
        shards: shards.unwrap_or(1),
        transactional: transactional.is_some(),
        keys_from_publisher: keys_from_publisher.is_some(),
        handler_timeout: merging.pick(HANDLER_TIMEOUT, |s| s.handler_timeout, None),
        max_delivery_attempts: merging.pick(ATTEMPTS, |s| s.max_delivery_attempts, None),
        backoff: merging.pick(BACKOFF, |s| s.backoff, None),
        poison,
        rules: merging.rules(),
        reached: merging.reached,
        problems: merging.problems,
    }
}

struct Merging<'a> {
    voices: &'a [Voice<'a>],
    reached: BTreeSet<(VoiceId, &'static str)>,
    problems: Vec<(&'static str, String)>,
}

impl<'a> Merging<'a> {
    fn new(voices: &'a [Voice<'a>]) -> Self {
        Self {
            voices,
            reached: BTreeSet::new(),
            problems: Vec::new(),
        }
    }

    fn problem(&mut self, setting: &'static str, what: &str) {
        self.problems.push((setting, what.to_owned()));
    }

    /// What the highest rank says that says something. `misfit`: why the setting does not fit the queue.
    fn pick<T: PartialEq>(
        &mut self,
        setting: &'static str,
        of: impl Fn(&QueueSettings) -> Option<T>,
        misfit: Option<&str>,
    ) -> Option<T> {
        let said = self.voices.iter();
        let mut said: Vec<_> = said
            .filter_map(|(id, settings)| Some((*id, of(settings)?)))
            .collect();
        said.sort_by_key(|(id, _)| *id);
        if let Some(why) = misfit {
            let particular = said.iter().filter(|(id, _)| id.is_particular());
            let reported: Vec<_> = particular.map(|(id, _)| (*id, setting)).collect();
            if !reported.is_empty() {
                self.problem(setting, why);
            }
            // Told already; not told again as reaching nothing.
            self.reached.extend(reported);
            return None;
        }
        self.reached
            .extend(said.iter().map(|(id, _)| (*id, setting)));
        let rank = said.first()?.0.rank();
        let mut same = said.into_iter().filter(|(id, _)| id.rank() == rank);
        let (_, value) = same.next()?;
        if same.any(|(_, other)| other != value) {
            self.problem(
                setting,
                "is said twice with the same right, and differently (of one queue, or by its handlers or their modules); keep one, or decide with `local_queue(…)`",
            );
        }
        Some(value)
    }

    /// All rules, those of the highest rank first: the first that applies decides.
    fn rules(&mut self) -> FailureRules {
        let said = self.voices.iter();
        let mut said: Vec<_> = said
            .filter_map(|(id, settings)| Some((*id, settings.rules.clone()?)))
            .collect();
        said.sort_by_key(|(id, _)| *id);
        let mut rules = FailureRules::new();
        let mut last = None;
        let mut unclear = false;
        for (id, more) in said {
            unclear |= last == Some(id.rank());
            last = Some(id.rank());
            self.reached.insert((id, RULES));
            rules.append(more);
        }
        if unclear {
            self.problem(
                RULES,
                "two say failure rules with the same right, and nothing says which are asked first; keep those of one",
            );
        }
        rules
    }
}

/// What voices say that fits none of the queues.
pub(crate) fn unreached(
    voices: &[Voice<'_>],
    reached: &BTreeSet<(VoiceId, &'static str)>,
) -> Vec<(VoiceId, &'static str)> {
    let all = voices.iter().flat_map(|(id, settings)| {
        let said = settings.said().into_iter();
        said.map(|setting| (*id, setting))
    });
    all.filter(|said| !reached.contains(said)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::LocalQueueBuilder;

    type Describe = fn(LocalQueueBuilder) -> LocalQueueBuilder;

    fn said(describe: Describe) -> QueueSettings {
        describe(LocalQueueBuilder::default()).settings
    }

    fn merged(voices: &[(VoiceId, Describe)]) -> Merged {
        let said: Vec<_> = voices.iter().map(|(id, of)| (*id, said(*of))).collect();
        let voices: Vec<_> = said.iter().map(|(id, settings)| (*id, settings)).collect();
        merge(&voices, 7)
    }

    fn settings_of(problems: &Merged) -> Vec<&'static str> {
        problems
            .problems
            .iter()
            .map(|(setting, _)| *setting)
            .collect()
    }

    use VoiceId::{All, Handler, Module, Queue};

    #[test]
    fn what_nobody_says_has_its_default() {
        let merged = merged(&[]);
        assert_eq!(merged.storage, Storage::Buffered);
        assert_eq!(merged.order, QueueOrder::Unordered);
        assert_eq!(
            (merged.bound, merged.parallel, merged.shards),
            (10_000, 7, 1)
        );
        assert!(!merged.transactional && merged.rules.is_empty());
        assert_eq!(merged.problems, []);
    }

    #[test]
    fn default_parallelism_is_the_processors_but_at_least_5() {
        let of = |n| default_parallel(NonZeroUsize::new(n));
        assert_eq!([of(0), of(2), of(5), of(12)], [5, 5, 5, 12]);
    }

    #[test]
    fn the_highest_rank_that_says_something_decides_each_setting_by_itself() {
        let voices: [(VoiceId, Describe); 4] = [
            (All(0), |q| {
                q.bound(1)
                    .max_parallel(1)
                    .max_delivery_attempts(1)
                    .durable()
            }),
            (Module(0), |q| {
                q.bound(2).max_parallel(2).max_delivery_attempts(2)
            }),
            (Handler(0), |q| q.bound(3).max_parallel(3)),
            (Queue(0), |q| q.bound(4).buffered()),
        ];
        // In whatever order they are heard.
        for turn in 0..voices.len() {
            let mut heard = voices;
            heard.rotate_left(turn);
            let merged = merged(&heard);
            assert_eq!(merged.problems, []);
            assert_eq!(merged.storage, Storage::Buffered);
            assert_eq!((merged.bound, merged.parallel), (4, 3));
            assert_eq!(merged.max_delivery_attempts, Some(2));
        }
    }

    #[test]
    fn the_same_rank_may_agree_and_must_not_contradict() {
        for (one, other) in [
            (Queue(0), Queue(1)),
            (Handler(0), Handler(1)),
            (Module(0), Module(1)),
            (All(0), All(1)),
        ] {
            let agreed = merged(&[(one, |q| q.bound(3)), (other, |q| q.bound(3))]);
            assert_eq!((agreed.bound, agreed.problems), (3, vec![]));
            let contrary = merged(&[(one, |q| q.bound(3)), (other, |q| q.bound(4))]);
            assert_eq!(settings_of(&contrary), [BOUND]);
        }
        let overruled = merged(&[
            (Queue(0), |q| q.bound(5)),
            (Handler(0), |q| q.bound(3)),
            (Handler(1), |q| q.bound(4)),
        ]);
        assert_eq!((overruled.bound, overruled.problems), (5, vec![]));
    }

    #[test]
    fn failure_rules_add_up_by_rank_and_two_of_one_rank_are_refused() {
        let rules: Describe = |q| q.on_failure(|p| p.on_timeout().discard());
        let others: Describe = |q| q.on_failure(|p| p.on_panic().discard());
        let both = merged(&[(All(0), rules), (Queue(0), others)]);
        let shown = format!("{:?}", both.rules);
        let at = |what: &str| shown.find(what).expect("it is there");
        assert!(at("on_panic()") < at("on_timeout()"), "{shown}");
        assert_eq!(both.problems, []);
        let unclear = merged(&[(Handler(0), rules), (Handler(1), others)]);
        assert_eq!(settings_of(&unclear), [RULES]);
    }

    #[test]
    fn what_does_not_fit_its_queue_is_refused_where_it_is_said_of_the_queue() {
        let cases: [(Describe, &str); 12] = [
            (|q| q.durable().bound(3), BOUND),
            (|q| q.on_broker().bound(3), BOUND),
            (|q| q.bound(0), BOUND),
            (|q| q.sequential().max_parallel(2), MAX_PARALLEL),
            (|q| q.max_parallel(0), MAX_PARALLEL),
            (|q| q.partitioned(0), ORDER),
            (|q| q.partitioned(4).shards(2), SHARDS),
            (|q| q.durable().shards(2), SHARDS),
            (|q| q.durable().sequential().shards(2), SHARDS),
            (|q| q.transactional(), TRANSACTIONAL),
            (|q| q.keys_from_publisher(), KEYS_FROM_PUBLISHER),
            (|q| q.discard_poison(), POISON),
        ];
        for (describe, setting) in cases {
            for id in [Queue(0), Handler(0)] {
                assert_eq!(settings_of(&merged(&[(id, describe)])), [setting]);
            }
        }
    }

    #[test]
    fn what_is_said_of_many_queues_holds_for_those_that_it_fits() {
        let all = said(|q| q.bound(3).max_parallel(2));
        let sequential = said(|q| q.sequential());
        let durable = said(|q| q.durable());
        let of = |queue: &QueueSettings| merge(&[(All(0), &all), (Queue(0), queue)], 7);
        let (one, other) = (of(&sequential), of(&durable));
        assert_eq!(
            (one.bound, one.parallel, &one.problems[..]),
            (3, 1, &[][..])
        );
        assert_eq!((other.parallel, &other.problems[..]), (2, &[][..]));
        let voices = [(All(0), &all)];
        assert_eq!(unreached(&voices, &one.reached), [(All(0), MAX_PARALLEL)]);
        assert_eq!(unreached(&voices, &other.reached), [(All(0), BOUND)]);
        let both = one.reached.union(&other.reached).copied().collect();
        assert_eq!(unreached(&voices, &both), []);
    }

    #[test]
    fn a_setting_that_is_overruled_everywhere_still_fits() {
        let (all, queue) = (said(|q| q.max_parallel(2)), said(|q| q.max_parallel(3)));
        let voices = [(All(0), &all), (Queue(0), &queue)];
        let merged = merge(&voices, 7);
        assert_eq!(unreached(&voices, &merged.reached), []);
    }
}
