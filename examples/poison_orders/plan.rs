//! Which events there are, in which round, and which of them are poison: the same in every run with the
//! same counts. Pure.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use laneway::PoisonReason;

use crate::events::OrderEvent;

/// Without poison, with, without, with, …: a median of three for each.
pub(crate) const ROUNDS: u64 = 6;
/// So many events of healthy orders are under way at most.
pub(crate) const WINDOW: u64 = 64;

/// What is wrong with a poison event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Defect {
    /// The handler returns an error.
    Fails,
    /// The handler panics.
    Panics,
    /// The handler exceeds its time-out.
    Slow,
    /// A foreign publisher has sent it in a form that this program does not read.
    Undecodable,
}

impl Defect {
    const ALL: [Self; 4] = [Self::Fails, Self::Panics, Self::Slow, Self::Undecodable];

    /// As what it must be parked.
    pub(crate) fn reason(self) -> PoisonReason {
        match self {
            Self::Fails => PoisonReason::Failed,
            Self::Panics => PoisonReason::Panicked,
            Self::Slow => PoisonReason::TimedOut,
            Self::Undecodable => PoisonReason::Undecodable,
        }
    }
}

/// The events of one round.
pub(crate) struct Round {
    /// Their numbers.
    pub numbers: Range<u64>,
    /// Number and defect of the poison event of an order, by the order.
    pub poison: BTreeMap<u64, (u64, Defect)>,
    /// How many events stand behind a poison event of their order.
    pub behind: u64,
}

/// The events of a run, numbered from 0.
pub(crate) struct Plan {
    keys: u64,
    /// So many events of an order follow each other before it is the next order's turn. More than one, so
    /// that a healthy order has several under way too.
    burst: u64,
    pub rounds: Vec<Round>,
}

impl Plan {
    /// The most that `max_in_flight` can be.
    pub(crate) const MOST_CREDITS: u64 = 65_535;

    /// At least 600 messages and 16 keys, and no more keys than messages: then each round has orders enough.
    pub(crate) fn new(messages: u64, keys: u64) -> Self {
        let mut plan = Self {
            keys,
            burst: (messages / keys).clamp(1, 4),
            rounds: Vec::new(),
        };
        let mut poisoned = HashSet::new();
        for round in 0..ROUNDS {
            let numbers = messages * round / ROUNDS..messages * (round + 1) / ROUNDS;
            let with_poison = round % 2 == 1;
            let poison = if with_poison {
                plan.choose_poison(&numbers, &mut poisoned)
            } else {
                BTreeMap::new()
            };
            let is_behind = |number: &u64| {
                let poison = poison.get(&plan.order(*number));
                poison.is_some_and(|(at, _)| number > at)
            };
            let behind = numbers.clone().filter(is_behind).count() as u64;
            plan.rounds.push(Round {
                numbers,
                poison,
                behind,
            });
        }
        plan
    }

    /// Spread evenly over the round; no order gets poison twice in a run, so that each key can be held once.
    fn choose_poison(
        &self,
        numbers: &Range<u64>,
        poisoned: &mut HashSet<u64>,
    ) -> BTreeMap<u64, (u64, Defect)> {
        let length = numbers.end - numbers.start;
        let orders = self.keys.min(length / self.burst);
        let count = (orders / 100).max(Defect::ALL.len() as u64);
        let chosen = (0..count).zip(Defect::ALL.into_iter().cycle());
        chosen
            .map(|(index, defect)| {
                let aim = (2 * index + 1) * length / (2 * count);
                // From there on, and around: the first of an order that has no poison yet, and more behind it.
                let number = (0..length)
                    .map(|step| numbers.start + (aim + step) % length)
                    .find(|number| number % self.burst == 0 && poisoned.insert(self.order(*number)))
                    .expect("cannot fail because a round has more orders than a run has poison");
                (self.order(number), (number, defect))
            })
            .collect()
    }

    /// The order that an event belongs to: its ordering key.
    pub(crate) fn order(&self, number: u64) -> u64 {
        number / self.burst % self.keys
    }

    pub(crate) fn event(&self, number: u64) -> OrderEvent {
        let turn = number / (self.burst * self.keys);
        OrderEvent {
            order: self.order(number),
            seq: turn * self.burst + number % self.burst + 1,
        }
    }

    /// The number of an event; `None` if it is not of this run.
    pub(crate) fn number(&self, event: &OrderEvent) -> Option<u64> {
        let before = event.seq.checked_sub(1)?;
        let turn = (before / self.burst).checked_mul(self.keys)?;
        let bursts = turn.checked_add(event.order)?;
        let number = bursts.checked_mul(self.burst)? + before % self.burst;
        (event.order < self.keys && number < self.messages()).then_some(number)
    }

    pub(crate) fn messages(&self) -> u64 {
        self.rounds.last().map_or(0, |round| round.numbers.end)
    }

    /// The place of a replayed event in its order: behind everything that was published before.
    pub(crate) fn replay_place(&self, event: &OrderEvent) -> u64 {
        self.messages() + event.seq
    }

    /// What is wrong with an event.
    pub(crate) fn defect(&self, number: u64) -> Option<Defect> {
        let (at, defect) = self.round_of(number)?.poison.get(&self.order(number))?;
        (*at == number).then_some(*defect)
    }

    /// Whether the order of an event has no poison in this round.
    pub(crate) fn is_healthy(&self, number: u64) -> bool {
        let order = self.order(number);
        self.round_of(number)
            .is_some_and(|round| !round.poison.contains_key(&order))
    }

    fn round_of(&self, number: u64) -> Option<&Round> {
        let mut rounds = self.rounds.iter();
        rounds.find(|round| round.numbers.contains(&number))
    }

    /// Every poison event, in the order of publishing.
    pub(crate) fn poison(&self) -> BTreeMap<u64, Defect> {
        let all = self.rounds.iter().flat_map(|round| round.poison.values());
        all.copied().collect()
    }

    /// The most that a round makes wait behind held keys, the held events included.
    pub(crate) fn most_behind(&self) -> u64 {
        let waiting = |round: &Round| round.poison.len() as u64 + round.behind;
        self.rounds.iter().map(waiting).max().unwrap_or(0)
    }

    /// Credits of which held keys can never use more than half.
    pub(crate) fn credits(&self) -> u64 {
        2 * (self.most_behind() + WINDOW)
    }
}
