//! One exchange: which of its queues a message goes to.
//!
//! Pure. The rules are RabbitMQ's, as far as they can be seen from outside: a consistent-hash exchange here
//! hashes otherwise, but keeps the promises (the same value goes to the same queue while the bindings stay
//! the same; the value's type counts; what has no value goes to one and the same queue).

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use laneway_actors::port::SourceError;
use laneway_actors::{Envelope, HeaderValue};

use super::topology::refused;
use crate::topology::{ExchangeKind, ExchangeSpec, HashBy, HashProperty};

/// An exchange and what is bound to it.
pub(super) struct Exchange {
    pub(super) spec: ExchangeSpec,
    /// Bound queues by name with their routing keys; sorted, because that is the order of locking.
    bindings: BTreeMap<Arc<str>, BTreeSet<String>>,
}

impl Exchange {
    pub(super) fn new(spec: ExchangeSpec) -> Self {
        Self {
            spec,
            bindings: BTreeMap::new(),
        }
    }

    pub(super) fn bind(&mut self, queue: &str, routing_key: &str) {
        let keys = self.bindings.entry(queue.into()).or_default();
        keys.insert(routing_key.to_owned());
    }

    /// Refuses each difference between what exists and what is wanted, as far as RabbitMQ compares.
    pub(super) fn differences(&self, wanted: &ExchangeSpec) -> Vec<SourceError> {
        let name = &wanted.name;
        let shown = |spec: &ExchangeSpec| {
            [
                ("type", spec.kind.name().to_owned()),
                ("durable", spec.durable.to_string()),
                ("internal", spec.internal.to_string()),
                (
                    "alternate-exchange",
                    spec.alternate.clone().unwrap_or_else(|| "none".to_owned()),
                ),
            ]
        };
        let both = shown(&self.spec).into_iter().zip(shown(wanted));
        both.filter(|(there, wanted)| there != wanted)
            .map(|((argument, there), (_, wanted))| {
                refused(format!(
                    "exchange `{name}` exists with {argument} = {there}, but {wanted} is needed: declare it as it is, or choose another name"
                ))
            })
            .collect()
    }

    /// The names of the queues that a message goes to, sorted.
    pub(super) fn targets(&self, routing_key: &str, message: &Envelope) -> Vec<&Arc<str>> {
        let matches: &dyn Fn(&String) -> bool = match self.spec.kind {
            ExchangeKind::ConsistentHash => return self.hashed(message).into_iter().collect(),
            ExchangeKind::Fanout => &|_| true,
            ExchangeKind::Topic => &|pattern| {
                let pattern: Vec<_> = pattern.split('.').collect();
                let key: Vec<_> = routing_key.split('.').collect();
                topic_matches(&pattern, &key)
            },
            // Headers exchanges are refused at `build()`.
            _ => &|key| key == routing_key,
        };
        self.bindings
            .iter()
            .filter(|(_, keys)| keys.iter().any(matches))
            .map(|(queue, _)| queue)
            .collect()
    }

    fn hashed(&self, message: &Envelope) -> Option<&Arc<str>> {
        let weight = |keys: &BTreeSet<String>| -> u64 {
            let weights = keys.iter().filter_map(|key| key.parse::<u32>().ok());
            weights.map(u64::from).sum()
        };
        let total: u64 = self.bindings.values().map(weight).sum();
        let mut place = self.value(message).checked_rem(total)?;
        for (queue, keys) in &self.bindings {
            match place.checked_sub(weight(keys)) {
                Some(rest) => place = rest,
                None => return Some(queue),
            }
        }
        None
    }

    fn value(&self, message: &Envelope) -> u64 {
        // With fixed keys: the same in all uses of this process.
        let mut hasher = DefaultHasher::new();
        match &self.spec.hash {
            Some(HashBy::Header(header)) => match message.headers.get(header) {
                None => 0_u8.hash(&mut hasher),
                Some(value) => {
                    std::mem::discriminant(value).hash(&mut hasher);
                    match value {
                        HeaderValue::Text(text) => text.hash(&mut hasher),
                        HeaderValue::Integer(number) => number.hash(&mut hasher),
                        HeaderValue::Bool(truth) => truth.hash(&mut hasher),
                        HeaderValue::Float(number) => number.to_bits().hash(&mut hasher),
                        HeaderValue::Bytes(bytes) => bytes.hash(&mut hasher),
                        _ => {}
                    }
                }
            },
            Some(HashBy::Property(HashProperty::CorrelationId)) => {
                message.correlation_id.hash(&mut hasher);
            }
            Some(HashBy::Property(HashProperty::MessageId)) => message.id.hash(&mut hasher),
            None => {}
        }
        hasher.finish()
    }
}

/// `*` stands for one word, `#` for any number of them.
fn topic_matches(pattern: &[&str], key: &[&str]) -> bool {
    match (pattern, key) {
        ([], []) => true,
        (["#", rest @ ..], _) => {
            topic_matches(rest, key)
                || key
                    .split_first()
                    .is_some_and(|(_, key)| topic_matches(pattern, key))
        }
        (["*", pattern @ ..], [_, key @ ..]) => topic_matches(pattern, key),
        ([word, pattern @ ..], [same, key @ ..]) => word == same && topic_matches(pattern, key),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topic_matches_word_by_word() {
        let cases = [
            ("orders.*.paid", "orders.eu.paid", true),
            ("orders.*.paid", "orders.paid", false),
            ("orders.#", "orders", true),
            ("orders.#", "orders.eu.paid", true),
            ("#.paid", "orders.eu.paid", true),
            ("#.eu.#", "orders.us.paid", false),
            ("#", "", true),
            ("*", "orders.eu", false),
        ];
        for (pattern, key, expected) in cases {
            let split = |text: &'static str| text.split('.').collect::<Vec<_>>();
            let found = topic_matches(&split(pattern), &split(key));
            assert_eq!(found, expected, "{pattern} {key}");
        }
    }
}
