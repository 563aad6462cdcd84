//! A topology as the steps in which it is applied.

use super::arguments::Arguments;
use super::exchange::{BindingSpec, ExchangeKind, ExchangeSpec};
use super::queue::QueueSpec;
use super::{Topology, sharded};

/// Everything that a topology asks of a broker, in the order in which it is to be done: the identities,
/// which refuse before anything else is made; the names that must be free; then exchanges, queues, bindings.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Plan {
    /// Exchanges that hold an identity, with the thing that it identifies.
    pub markers: Vec<(String, ExchangeSpec)>,
    /// Queues that must not exist: a queue of this name was there before it was sharded, or put behind an
    /// exchange of its name, and what is in it would be forgotten.
    pub absent: Vec<String>,
    /// Plain queues that must not be sharded: with the exchange that would hold that identity.
    pub plain: Vec<(String, String)>,
    /// Exchanges, in the order of their names.
    pub exchanges: Vec<ExchangeSpec>,
    /// Queues, shards included, in the order of their names.
    pub queues: Vec<QueueSpec>,
    /// Bindings, in the order of exchange, queue and routing key.
    pub bindings: Vec<BindingSpec>,
    /// Exchanges over which instances find each other. Those who consume declare them; here they are to be
    /// deleted with the rest.
    pub groups: Vec<String>,
}

impl Topology {
    /// The steps in which it is applied.
    pub fn plan(&self) -> Plan {
        let hashed = |exchange: &&ExchangeSpec| exchange.kind == ExchangeKind::ConsistentHash;
        let mut markers: Vec<_> = self
            .sharded
            .iter()
            .map(|queue| (format!("queue `{}`", queue.name), queue.marker()))
            .collect();
        let hash_markers = self.exchanges.iter().filter(hashed).filter_map(|exchange| {
            let marker = sharded::hash_marker(exchange)?;
            Some((format!("exchange `{}`", exchange.name), marker))
        });
        markers.extend(hash_markers);
        let mut exchanges = self.exchanges.clone();
        exchanges.extend(self.sharded.iter().map(super::ShardedQueue::exchange));
        exchanges.sort_by(|a, b| a.name.cmp(&b.name));
        let mut queues: Vec<_> = self
            .queues
            .iter()
            .chain(self.sharded.iter().flat_map(|sharded| &sharded.queues))
            .map(|queue| self.settled(queue))
            .collect();
        queues.sort_by(|a, b| a.name.cmp(&b.name));
        let own = self
            .exchanges
            .iter()
            .filter(hashed)
            .filter(|one| one.declared);
        let shared_out = self.sharded.iter().map(|one| &one.name);
        let shared_out = shared_out.chain(own.map(|one| &one.name));
        let groups = shared_out.map(|name| sharded::members_name(name)).collect();
        let mut bindings = self.bindings.clone();
        for exchange in self.exchanges.iter().filter(hashed) {
            let listed = exchange.queues.iter();
            bindings.extend(listed.map(|(queue, weight)| {
                BindingSpec::new(queue, &exchange.name, &weight.to_string())
            }));
        }
        bindings.extend(self.sharded.iter().flat_map(super::ShardedQueue::bindings));
        bindings.sort_by(|a, b| {
            (&a.exchange, &a.queue, &a.routing_key).cmp(&(&b.exchange, &b.queue, &b.routing_key))
        });
        Plan {
            markers,
            absent: self
                .sharded
                .iter()
                .map(|queue| queue.name.clone())
                .collect(),
            plain: self
                .queues
                .iter()
                .map(|queue| (queue.name.clone(), sharded::marker_name(&queue.name)))
                .collect(),
            exchanges,
            queues,
            bindings,
            groups,
        }
    }

    /// A queue with what the topology says of its parking queue, which may be named by itself too, to give
    /// it arguments.
    pub(crate) fn settled(&self, queue: &QueueSpec) -> QueueSpec {
        let mut queue = queue.clone();
        if let Some(parking) = &mut queue.parking {
            parking.arguments = self
                .find(&parking.queue)
                .map_or_else(Arguments::new, |parked| parked.arguments.clone());
        }
        queue
    }
}
