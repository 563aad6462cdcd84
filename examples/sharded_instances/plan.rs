//! What every process of a run must know and say alike: the queues, the messages, the endpoint.

use std::path::PathBuf;
use std::time::Duration;

use laneway::prelude::*;
use laneway::{EndpointBuilder, QueueSpec, Shards, Topology};
use serde::{Deserialize, Serialize};

use crate::broker::{Kind, fresh_run_id};
use crate::options::{Affinity, Options};

/// The header that carries the ordering key.
pub(crate) const KEY_HEADER: &str = "order";

/// Something happened to an order.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct OrderEvent {
    /// The order: the ordering key.
    pub order: u64,
    /// Number of the event within its order, from 1.
    pub seq: u64,
}

impl Message for OrderEvent {
    const TYPE: &'static str = "order-event";
}

/// A run, as its instances are told about it. Holds the credentials of the URL, so it has no `Debug`.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub url: String,
    /// Name of the queue, or of the queues together.
    pub queue: String,
    pub affinity: Affinity,
    pub kind: Kind,
    pub shards: u32,
    pub concurrency: u32,
    pub max_in_flight: u32,
    /// How long handlers take on average.
    pub handler_time: Duration,
    /// Folder of the ledger.
    pub ledger: PathBuf,
}

impl Plan {
    pub(crate) fn new(options: &Options, url: String, ledger: PathBuf) -> Self {
        Self {
            url,
            queue: format!("sharded-instances-{}", fresh_run_id()),
            affinity: options.affinity,
            kind: options.queue_type,
            shards: options.shards(),
            concurrency: options.concurrency,
            max_in_flight: options.max_in_flight(),
            handler_time: options.handler_time(),
            ledger,
        }
    }

    pub(crate) fn topology(&self, topology: Topology) -> Topology {
        let name = &self.queue;
        let plain = |q: QueueSpec| q.durable().of_type(self.kind.into());
        match self.affinity {
            Affinity::Local => topology.queue(name, plain),
            Affinity::Sac => topology.queue(name, |q| plain(q).single_active_consumer()),
            Affinity::Sharded => {
                let shards = Shards::mapped_by_publisher(self.shards, KEY_HEADER);
                topology.sharded_queue(name, shards, plain)
            }
            Affinity::Hash => {
                let queues = self.queues();
                let declared = queues.iter().fold(topology, |topology, queue| {
                    topology.queue(queue, |q| plain(q).single_active_consumer())
                });
                declared.consistent_hash_exchange(name, |x| {
                    let hashing = x.hash_header(KEY_HEADER);
                    queues.iter().fold(hashing, |x, queue| x.queue(queue, 1))
                })
            }
        }
    }

    /// The names of the queues. (Those of a sharded queue are given by Laneway.)
    pub(crate) fn queues(&self) -> Vec<String> {
        match self.affinity {
            Affinity::Local | Affinity::Sac => vec![self.queue.clone()],
            Affinity::Sharded | Affinity::Hash => (0..self.shards)
                .map(|shard| format!("{}-{shard:03}", self.queue))
                .collect(),
        }
    }

    pub(crate) fn endpoint(&self, endpoint: EndpointBuilder) -> EndpointBuilder {
        let ordered = endpoint
            .ordered_by_header(KEY_HEADER)
            .concurrency(self.concurrency)
            .max_in_flight(self.max_in_flight)
            // No handler fails here; a message that ended without effect would be counted as lost.
            .discard_poison();
        match self.affinity {
            Affinity::Local => ordered.local_partitioned(),
            Affinity::Sac => ordered.transport_affinity(TransportAffinity::SingleActiveConsumer),
            Affinity::Sharded => ordered.transport_affinity(TransportAffinity::Sharded),
            Affinity::Hash => ordered.transport_affinity(TransportAffinity::ConsistentHash),
        }
    }
}
