//! What an endpoint consumes: one queue, the shards of one, or the queues behind a consistent-hash exchange.
//!
//! Owns the rules that an affinity sets for the queues and for the source of the key. Pure.

use laneway_actors::{KeySource, MappingEpoch};

use crate::endpoint::TransportAffinity;
use crate::topology::{HashBy, HashProperty, QueueSpec, Topology, epoch};

/// The queues of an endpoint.
#[derive(Debug, Clone)]
pub(crate) struct Feed {
    /// In the order of the shards' numbers, which is that of their names.
    pub(crate) queues: Vec<QueueSpec>,
    /// The name under which instances find each other to share the queues out; `None` for a single queue.
    pub(crate) group: Option<String>,
    /// What messages must be stamped with, where the map can change.
    pub(crate) mapping: Option<MappingEpoch>,
    name: String,
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    Single,
    Shards {
        /// The header that carries the key.
        header: String,
    },
    Hashed(Option<HashBy>),
}

impl Feed {
    /// What a name stands for in a topology.
    ///
    /// # Errors
    /// What is wrong with the name.
    pub(crate) fn of(name: &str, topology: &Topology) -> Result<Self, String> {
        let feed = |queues, kind| Self {
            queues,
            group: Some(name.to_owned()),
            mapping: None,
            name: name.to_owned(),
            kind,
        };
        if let Some(sharded) = topology.find_sharded(name) {
            let shards = sharded.queues.iter().map(|shard| topology.settled(shard));
            let header = sharded.shards.header.clone();
            return Ok(feed(shards.collect(), Kind::Shards { header }));
        }
        if let Some(queue) = topology.find(name) {
            return Ok(Self {
                group: None,
                ..feed(vec![topology.settled(queue)], Kind::Single)
            });
        }
        if let Some(exchange) = topology.find_hashed(name) {
            let behind = topology.hashed_queues(exchange);
            // What is not in the topology is a problem of the topology.
            let queues = behind.iter().filter_map(|(queue, _)| topology.find(queue));
            let queues = queues.map(|queue| topology.settled(queue)).collect();
            return Ok(Self {
                mapping: exchange.hash.as_ref().map(|by| epoch(by, &behind)),
                ..feed(queues, Kind::Hashed(exchange.hash.clone()))
            });
        }
        Err(match topology.shard_of(name) {
            Some(sharded) => format!(
                "`{name}` is a shard of `{0}`; consume `{0}` with `transport_affinity(Sharded)`",
                sharded.name
            ),
            None => format!(
                "`{name}` is not in the topology: declare it with `queue` or `sharded_queue`, or name it with `existing_queue`"
            ),
        })
    }

    /// Whether instances share several queues out among them.
    pub(crate) fn shares_out(&self) -> bool {
        !matches!(self.kind, Kind::Single)
    }

    /// Whether the broker maps by the correlation id.
    pub(crate) fn by_correlation_id(&self) -> bool {
        let property = HashBy::Property(HashProperty::CorrelationId);
        matches!(&self.kind, Kind::Hashed(Some(by)) if *by == property)
    }

    /// What of the queues does not fit the affinity: setting, and what is wrong.
    pub(crate) fn problems(
        &self,
        ordered: bool,
        affinity: Option<TransportAffinity>,
        local: bool,
    ) -> Vec<(&'static str, String)> {
        use TransportAffinity::{ConsistentHash, Sharded, SingleActiveConsumer};
        let name = &self.name;
        let mut problems = Vec::new();
        let mut problem = |setting, what: String| problems.push((setting, what));
        match (&self.kind, affinity) {
            (Kind::Shards { .. }, Some(Sharded)) | (Kind::Hashed(_), Some(ConsistentHash)) => {}
            (Kind::Shards { .. }, _) if !ordered || local => problem(
                "transport_affinity",
                format!(
                    "`{name}` is a sharded queue, which keeps order across instances: use `ordered_by_header(…)` with `transport_affinity(Sharded)`, or declare a plain `queue`"
                ),
            ),
            (Kind::Hashed(_), _) if !ordered || local => problem(
                "transport_affinity",
                format!(
                    "`{name}` is a consistent-hash exchange: use `ordered_by_header(…)` with `transport_affinity(ConsistentHash)`, or consume one of its queues by name"
                ),
            ),
            (Kind::Shards { .. }, Some(other)) => problem(
                "transport_affinity",
                format!(
                    "`{name}` is a sharded queue; use `Sharded` instead of `{}`",
                    other.name()
                ),
            ),
            (Kind::Hashed(_), Some(other)) => problem(
                "transport_affinity",
                format!(
                    "`{name}` is a consistent-hash exchange; use `ConsistentHash` instead of `{}`",
                    other.name()
                ),
            ),
            (Kind::Single, Some(Sharded)) => problem(
                "transport_affinity",
                format!(
                    "`{name}` is not a sharded queue; declare it with `sharded_queue(\"{name}\", n, …)`, or use `SingleActiveConsumer`"
                ),
            ),
            (Kind::Single, Some(ConsistentHash)) => problem(
                "transport_affinity",
                format!(
                    "`{name}` is not a consistent-hash exchange; declare one with `consistent_hash_exchange`, or use `SingleActiveConsumer`"
                ),
            ),
            (Kind::Single, Some(SingleActiveConsumer)) | (_, None) => {}
        }
        if !ordered {
            return problems;
        }
        for queue in self.queues.iter().filter(|_| affinity.is_some()) {
            if !queue.single_active_consumer {
                problem("transport_affinity", not_single(queue));
            }
        }
        // Shards are all alike: what is wrong with the first is said once.
        let alike = matches!(self.kind, Kind::Shards { .. });
        let asked = self.queues.iter().take(if alike { 1 } else { usize::MAX });
        for queue in asked {
            for what in queue.order_problems() {
                problem("queue", what);
            }
        }
        if self
            .queues
            .windows(2)
            .any(|two| two[0].parking != two[1].parking)
        {
            problem(
                "parking",
                format!(
                    "the queues behind `{name}` have different parking places; give all of them the same"
                ),
            );
        }
        problems
    }

    /// What is wrong with where the key comes from: it must be what the shard is chosen by.
    pub(crate) fn key_problems(
        &self,
        source: Option<&KeySource>,
        by_correlation_id: bool,
    ) -> Vec<(&'static str, String)> {
        let name = &self.name;
        let header = source.and_then(|source| source.header.as_deref());
        let mut problems = Vec::new();
        let mut problem = |setting, what: String| problems.push((setting, what));
        if source.is_some_and(|source| source.typed) {
            problem(
                "ordered_by",
                format!(
                    "over the queues of `{name}` the key must be what the queue was chosen by, and the broker cannot look into the message; use `ordered_by_header(…)` alone"
                ),
            );
        }
        let hash = match &self.kind {
            Kind::Hashed(by) => by.as_ref(),
            _ => None,
        };
        if let Some(HashBy::Property(property)) = hash {
            if *property == HashProperty::MessageId {
                problem(
                    "queue",
                    format!(
                        "exchange `{name}` hashes by the message id, which keeps nothing together; use `hash_header(…)`"
                    ),
                );
            } else if header.is_some() || !by_correlation_id {
                problem(
                    "ordered_by_header",
                    format!(
                        "exchange `{name}` hashes by the correlation id, so that must be the key; use `ordered_by_correlation_id()` alone, or `hash_header(…)`"
                    ),
                );
            }
            return problems;
        }
        if by_correlation_id {
            problem(
                "ordered_by_correlation_id",
                format!(
                    "over the queues of `{name}` the key must be what the queue was chosen by; use `ordered_by_header(…)` alone"
                ),
            );
        }
        let hashed = match (&self.kind, hash) {
            (Kind::Shards { header }, _) => Some(header.as_str()),
            (_, Some(HashBy::Header(header))) => Some(header.as_str()),
            _ => None,
        };
        match (header, hashed) {
            (None, _) => problem(
                "ordered_by_header",
                format!(
                    "over the queues of `{name}` the key must come from a header; say `ordered_by_header(\"{}\")`",
                    hashed.unwrap_or("…")
                ),
            ),
            (Some(header), Some(hashed)) if header != hashed => problem(
                "ordered_by_header",
                format!(
                    "`{header}` is not the header in which `{name}` has its key; use `{hashed}`, or declare `{name}` with `{header}`"
                ),
            ),
            _ => {}
        }
        problems
    }
}

fn not_single(queue: &QueueSpec) -> String {
    let name = &queue.name;
    if queue.declared {
        return format!("queue `{name}` is not declared with `single_active_consumer()`");
    }
    format!(
        "whether queue `{name}` has a single active consumer cannot be asked of the broker: say `single_active_consumer()` of it, if it was declared so (`x-single-active-consumer`)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::EndpointBuilder;
    use crate::topology::Shards;

    fn finished(
        topology: Topology,
        describe: impl FnOnce(EndpointBuilder) -> EndpointBuilder,
    ) -> (EndpointBuilder, Feed) {
        let mut problems = Vec::new();
        let mut endpoint = describe(EndpointBuilder::named("orders").ordered_by_header("account"));
        let feed = endpoint.finish(&topology, &mut problems);
        assert_eq!(problems, []);
        (endpoint, feed.expect("the queue is known"))
    }

    fn names(feed: &Feed) -> Vec<&str> {
        feed.queues
            .iter()
            .map(|queue| queue.name.as_str())
            .collect()
    }

    #[test]
    fn a_sharded_queue_is_fed_by_its_shards_in_the_order_of_their_numbers() {
        let shards = Shards::mapped_by_publisher(12, "account");
        let topology = Topology::default().sharded_queue("orders", shards, |q| q.quorum());
        let (endpoint, feed) = finished(topology, |e| {
            e.transport_affinity(TransportAffinity::Sharded)
        });
        assert_eq!(names(&feed)[..2], ["orders-000", "orders-001"]);
        assert_eq!(names(&feed)[11], "orders-011");
        assert!(
            feed.queues
                .iter()
                .all(|q| q.durable && q.single_active_consumer)
        );
        assert_eq!(feed.group.as_deref(), Some("orders"));
        assert_eq!(feed.mapping, None);
        assert_eq!(endpoint.settings.max_in_flight, Some(12 * 16));
        let ordering = endpoint.settings.ordering.expect("it is ordered");
        assert!(!ordering.correlation_id, "the key is the header alone");
    }

    #[test]
    fn credits_suffice_for_the_handlers_and_for_the_shards() {
        for (shards, concurrency, credits) in [
            (2, 16, 32),
            (2, 100, 200),
            (8, 16, 128),
            (1_000, 16, 16_000),
            (2, 60_000, 65_535),
        ] {
            let shards = Shards::mapped_by_publisher(shards, "account");
            let topology = Topology::default().sharded_queue("orders", shards, |q| q);
            let (endpoint, _) = finished(topology, |e| {
                e.transport_affinity(TransportAffinity::Sharded)
                    .concurrency(concurrency)
            });
            assert_eq!(endpoint.settings.max_in_flight, Some(credits));
        }
    }

    #[test]
    fn a_hash_is_fed_by_its_queues_in_the_order_of_their_names() {
        let topology = Topology::default()
            .queue("z", |q| q.single_active_consumer())
            .queue("a", |q| q.single_active_consumer())
            .exchange("orders", |x| {
                x.consistent_hash().hash_header("account").queue("z", 2)
            })
            .bind("a", "orders", "3");
        let (_, feed) = finished(topology, |e| {
            e.transport_affinity(TransportAffinity::ConsistentHash)
        });
        assert_eq!(names(&feed), ["a", "z"]);
        assert_eq!(feed.group.as_deref(), Some("orders"));
        let epoch = MappingEpoch::of("header account", &[("a", 3), ("z", 2)]);
        assert_eq!(feed.mapping, Some(epoch));
    }

    #[test]
    fn a_plain_queue_is_shared_with_nobody() {
        let topology = Topology::default().queue("orders", |q| q.single_active_consumer());
        let (endpoint, feed) = finished(topology, |e| {
            e.transport_affinity(TransportAffinity::SingleActiveConsumer)
        });
        assert_eq!(names(&feed), ["orders"]);
        assert_eq!((feed.group, feed.mapping), (None, None));
        assert_eq!(endpoint.settings.max_in_flight, None);
    }
}
