//! The rules of declaring: what makes two queues the same, and how a difference is reported.
//!
//! Pure. The rules and the argument names are RabbitMQ's, so that a topology which the embedded
//! broker accepts is one that RabbitMQ accepts, and an error reads the same.

use std::collections::BTreeSet;

use laneway_actors::port::SourceError;

use crate::topology::arguments::{
    DELIVERY_LIMIT, EXPIRES, MAX_LENGTH, MAX_LENGTH_BYTES, MAX_PRIORITY, MESSAGE_TTL, OVERFLOW,
};
use crate::topology::{self, ArgumentValue, ExchangeKind, QueueSpec, QueueType, Topology};

/// What a queue was declared with. All but the single active consumer and a length limit is only
/// remembered, to be compared: in memory nothing is durable or replicated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Arguments {
    durable: bool,
    pub(super) single_active_consumer: bool,
    queue_type: QueueType,
    others: topology::Arguments,
}

/// What of a topology the embedded broker cannot do.
pub(super) fn problems(topology: &Topology) -> Vec<String> {
    let mut problems = Vec::new();
    for exchange in topology.exchanges() {
        if exchange.kind == ExchangeKind::Headers {
            problems.push(format!(
                "exchange `{}`: the embedded broker has no headers exchanges; use another kind",
                exchange.name
            ));
        }
    }
    let shards = topology.sharded_queues().iter();
    let shards = shards.filter_map(|sharded| sharded.queues.first());
    for queue in topology
        .queues()
        .iter()
        .chain(shards)
        .filter(|queue| queue.declared)
    {
        let rejects = queue.arguments.get(OVERFLOW) == Some(&"reject-publish".into());
        let never = [
            MESSAGE_TTL,
            EXPIRES,
            MAX_LENGTH_BYTES,
            DELIVERY_LIMIT,
            MAX_PRIORITY,
        ];
        let unknown = never.into_iter().chain((!rejects).then_some(MAX_LENGTH));
        for argument in unknown.filter(|name| queue.arguments.contains_key(*name)) {
            problems.push(format!(
                "queue `{}`: the embedded broker does not know {argument}, only a `max_length(…)` with `overflow(Overflow::RejectPublish)`; remove it",
                queue.name
            ));
        }
    }
    problems
}

impl Arguments {
    /// Of the queue itself.
    pub(super) fn of(queue: &QueueSpec) -> Self {
        Self {
            durable: queue.durable,
            single_active_consumer: queue.single_active_consumer,
            queue_type: queue.queue_type,
            others: queue.arguments.clone(),
        }
    }

    /// How many messages may be ready.
    pub(super) fn max_length(&self) -> Option<usize> {
        match self.others.get(MAX_LENGTH) {
            Some(ArgumentValue::Integer(most)) => usize::try_from(*most).ok(),
            _ => None,
        }
    }

    /// Of the queue that keeps its poison messages.
    pub(super) fn of_parking(queue: &QueueSpec) -> Self {
        Self {
            durable: true,
            single_active_consumer: false,
            queue_type: queue.queue_type,
            others: queue
                .parking
                .as_ref()
                .map(|parking| parking.arguments.clone())
                .unwrap_or_default(),
        }
    }

    /// Refuses each difference between what exists (`self`) and what is wanted.
    pub(super) fn differences(&self, wanted: &Self, queue: &str) -> Vec<SourceError> {
        let value = |arguments: &topology::Arguments, name: &str| {
            arguments
                .get(name)
                .map_or_else(|| "none".to_owned(), ToString::to_string)
        };
        let names: BTreeSet<&String> = self.others.keys().chain(wanted.others.keys()).collect();
        let others = names.into_iter().map(|name| {
            let (exists, wanted) = (value(&self.others, name), value(&wanted.others, name));
            (name.as_str(), exists, wanted)
        });
        let arguments = [
            (
                "durable",
                self.durable.to_string(),
                wanted.durable.to_string(),
            ),
            (
                "x-single-active-consumer",
                self.single_active_consumer.to_string(),
                wanted.single_active_consumer.to_string(),
            ),
            (
                "x-queue-type",
                type_name(self.queue_type).to_owned(),
                type_name(wanted.queue_type).to_owned(),
            ),
        ];
        arguments
            .into_iter()
            .chain(others)
            .filter(|(_, exists, wanted)| exists != wanted)
            .map(|(argument, exists, wanted)| {
                refused(format!(
                    "queue `{queue}` exists with {argument} = {exists}, but {wanted} was declared: \
                     declare it as it is, or choose another name"
                ))
            })
            .collect()
    }
}

fn type_name(queue_type: QueueType) -> &'static str {
    match queue_type {
        QueueType::Classic => "classic",
        QueueType::Quorum => "quorum",
    }
}

pub(super) fn refused(what: String) -> SourceError {
    SourceError::Refused { what, source: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Topology;

    fn arguments(describe: impl FnOnce(QueueSpec) -> QueueSpec) -> Arguments {
        Arguments::of(&Topology::default().queue("orders", describe).queues()[0])
    }

    #[test]
    fn equal_arguments_are_no_difference() {
        let same = arguments(|q| q.quorum().single_active_consumer());
        assert!(same.differences(&same, "orders").is_empty());
    }

    #[test]
    fn every_difference_names_the_queue_and_the_argument() {
        let plain = arguments(|q| q);
        let other = arguments(|q| q.quorum().single_active_consumer().max_length(3));
        let texts: Vec<_> = plain
            .differences(&other, "orders")
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(texts.len(), 4);
        for (text, argument) in texts.iter().zip([
            "durable",
            "x-single-active-consumer",
            "x-queue-type",
            "x-max-length",
        ]) {
            assert!(
                text.contains("`orders`") && text.contains(argument),
                "{text}"
            );
        }
    }
}
