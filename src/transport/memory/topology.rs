//! The rules of declaring: what makes two queues the same, and how a difference is reported.
//!
//! Pure. The rules and the argument names are RabbitMQ's, so that a topology which the embedded
//! broker accepts is one that RabbitMQ accepts, and an error reads the same.

use laneway_actors::port::SourceError;

use crate::topology::{QueueSpec, QueueType};

/// What a queue was declared with. All but the single active consumer is only remembered, to be
/// compared: in memory nothing is durable or replicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Arguments {
    durable: bool,
    pub(super) single_active_consumer: bool,
    queue_type: QueueType,
}

impl Arguments {
    /// Of the queue itself.
    pub(super) fn of(queue: &QueueSpec) -> Self {
        Self {
            durable: queue.durable,
            single_active_consumer: queue.single_active_consumer,
            queue_type: queue.queue_type,
        }
    }

    /// Of the queue that keeps its poison messages.
    pub(super) fn of_parking(queue: &QueueSpec) -> Self {
        Self {
            durable: true,
            single_active_consumer: false,
            queue_type: queue.queue_type,
        }
    }

    /// Refuses each difference between what exists (`self`) and what is wanted.
    pub(super) fn differences(self, wanted: Self, queue: &str) -> Vec<SourceError> {
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
        assert!(same.differences(same, "orders").is_empty());
    }

    #[test]
    fn every_difference_names_the_queue_and_the_argument() {
        let plain = arguments(|q| q);
        let other = arguments(|q| q.quorum().single_active_consumer());
        let texts: Vec<_> = plain
            .differences(other, "orders")
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(texts.len(), 3);
        for (text, argument) in
            texts
                .iter()
                .zip(["durable", "x-single-active-consumer", "x-queue-type"])
        {
            assert!(
                text.contains("`orders`") && text.contains(argument),
                "{text}"
            );
        }
    }
}
