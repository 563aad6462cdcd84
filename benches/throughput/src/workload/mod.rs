//! What is sent: which messages, of which keys, in which order, and what handling each of them takes. The
//! same for every subject of a round, and made again from its seed in the process of the subject.

mod body;
mod zipf;

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub(crate) use body::{KEY_HEADER, Message, PARTITION_HEADER};

/// How keys are spread over the messages.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) enum Spread {
    /// Each key is as likely as any other.
    Uniform,
    /// The k-th key is 1/k^s as likely as the first.
    Zipf(f64),
}

/// What makes a plan.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub(crate) messages: u64,
    pub(crate) keys: u32,
    pub(crate) spread: Spread,
    /// How long a handler waits.
    pub(crate) handler: Duration,
    /// One key in a hundred has a message that always fails.
    pub(crate) poison: bool,
    /// Messages of one more key that take [`SLOW`] each, spread over the others.
    pub(crate) slow: u64,
    pub(crate) seed: u64,
}

/// How long handling a message of the slow key takes.
pub(crate) const SLOW: Duration = Duration::from_millis(100);

/// What a poison message may have: five runs with these pauses between them.
pub(crate) const PAUSES: [Duration; 4] = [
    Duration::from_millis(100),
    Duration::from_secs(1),
    Duration::from_secs(1),
    Duration::from_secs(1),
];

/// What handling a message takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    Nothing,
    Wait(Duration),
    /// It fails, at each run.
    Fail,
}

/// The messages of a run, in the order in which they are published.
pub(crate) struct Plan {
    pub(crate) shape: Shape,
    /// The key of each message.
    pub(crate) keys: Vec<u32>,
    /// Where the numbers of a key begin, were the messages sorted by key; one more than there are keys.
    begins: Vec<usize>,
    /// The number within its key of the key's poison message; 0 for none.
    poison: Vec<u32>,
}

impl Plan {
    pub(crate) fn of(shape: Shape) -> Self {
        let mut random = fastrand::Rng::with_seed(shape.seed);
        let mut draw: Box<dyn FnMut() -> u32> = match shape.spread {
            Spread::Uniform => Box::new(move || random.u32(0..shape.keys)),
            Spread::Zipf(s) => {
                let zipf = zipf::Zipf::new(shape.keys, s);
                Box::new(move || zipf.at(random.f64()))
            }
        };
        let others: Vec<u32> = (0..shape.messages).map(|_| draw()).collect();
        let keys = spread_over(&others, shape.slow, shape.keys);
        let mut counts = vec![0_usize; shape.keys as usize + 1];
        let mut poison = vec![0; counts.len()];
        let every = shape.messages / u64::from(shape.keys / 100).max(1);
        let mut due = every / 2;
        for (at, &key) in keys.iter().enumerate() {
            let key = key as usize;
            counts[key] += 1;
            // A key that has one already leaves it to the next message.
            if shape.poison && at as u64 >= due && poison[key] == 0 {
                poison[key] = u32::try_from(counts[key]).unwrap_or(u32::MAX);
                due += every;
            }
        }
        let mut begins = vec![0];
        for count in counts {
            begins.push(begins[begins.len() - 1] + count);
        }
        Self {
            shape,
            keys,
            begins,
            poison,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    /// The place of a message among all, by key and number; `None` if it is none of the plan.
    pub(crate) fn index(&self, key: u32, seq: u32) -> Option<usize> {
        let key = key as usize;
        let from = *self.begins.get(key)?;
        let index = from + (seq as usize).checked_sub(1)?;
        (index < *self.begins.get(key + 1)?).then_some(index)
    }

    /// Key and number of every message, as they are published.
    pub(crate) fn messages(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let mut counts = vec![0; self.begins.len()];
        self.keys.iter().map(move |&key| {
            counts[key as usize] += 1;
            (key, counts[key as usize])
        })
    }

    pub(crate) fn effort(&self, key: u32, seq: u32) -> Effort {
        if self.is_slow(key) {
            Effort::Wait(SLOW)
        } else if self.poison.get(key as usize) == Some(&seq) {
            Effort::Fail
        } else if self.shape.handler.is_zero() {
            Effort::Nothing
        } else {
            Effort::Wait(self.shape.handler)
        }
    }

    fn is_slow(&self, key: u32) -> bool {
        key == self.shape.keys
    }

    /// Whether the key has nothing that makes it wait: what is measured.
    pub(crate) fn is_healthy(&self, key: u32) -> bool {
        !self.is_slow(key) && self.poison.get(key as usize) == Some(&0)
    }

    /// Every message that must end parked.
    pub(crate) fn poisoned(&self) -> BTreeSet<(u32, u32)> {
        let keys = (0_u32..).zip(&self.poison);
        keys.filter(|(_, seq)| **seq != 0)
            .map(|(key, seq)| (key, *seq))
            .collect()
    }

    /// The share of the key with the most messages.
    pub(crate) fn top_share(&self) -> f64 {
        let most = self.begins.windows(2).map(|pair| pair[1] - pair[0]).max();
        most.unwrap_or(0) as f64 / self.len().max(1) as f64
    }
}

/// Puts `more` messages of `key` between the others, evenly.
fn spread_over(others: &[u32], more: u64, key: u32) -> Vec<u32> {
    let more = more as usize;
    let mut all = Vec::with_capacity(others.len() + more);
    let mut added = 0;
    for (at, &other) in others.iter().enumerate() {
        if added * others.len() < (at + 1) * more {
            all.push(key);
            added += 1;
        }
        all.push(other);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        Shape {
            messages: 20_000,
            keys: 1_000,
            spread: Spread::Uniform,
            handler: Duration::ZERO,
            poison: false,
            slow: 0,
            seed: 1,
        }
    }

    #[test]
    fn one_key_in_a_hundred_is_poisoned_once_and_evenly() {
        let plan = Plan::of(Shape {
            poison: true,
            ..shape()
        });
        let poisoned = plan.poisoned();
        assert_eq!(poisoned.len(), 10);
        let places: Vec<_> = plan
            .messages()
            .enumerate()
            .filter(|(_, message)| poisoned.contains(message))
            .map(|(at, _)| at)
            .collect();
        for pair in places.windows(2) {
            assert!((1_900..2_100).contains(&(pair[1] - pair[0])), "{places:?}");
        }
    }

    #[test]
    fn the_slow_key_is_one_more_and_spread() {
        let plan = Plan::of(Shape {
            slow: 500,
            ..shape()
        });
        assert_eq!(plan.len(), 20_500);
        let first_half = &plan.keys[..10_250];
        assert_eq!(first_half.iter().filter(|key| **key == 1_000).count(), 250);
        assert!(!plan.is_healthy(1_000));
    }

    #[test]
    fn every_message_has_a_place_of_its_own() {
        let plan = Plan::of(Shape {
            spread: Spread::Zipf(1.2),
            ..shape()
        });
        let mut places: Vec<_> = plan
            .messages()
            .map(|(key, seq)| plan.index(key, seq).expect("planned"))
            .collect();
        places.sort_unstable();
        assert!(places.iter().copied().eq(0..20_000));
        assert_eq!(plan.index(0, 0), None);
        assert_eq!(plan.index(1_001, 1), None);
    }
}
