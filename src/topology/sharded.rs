//! One queue in n shards.
//!
//! Owns its names and what identifies it. The number of shards and the map from key to shard can never
//! change: with another number almost every key would have another shard, while messages of it wait in the
//! old one. So they are held by an exchange of their own ([`marker`](ShardedQueue::marker)), which whoever
//! starts first creates, and which refuses everybody who thinks otherwise.

use laneway_actors::{ShardCount, header};

use super::exchange::{BindingSpec, ExchangeSpec, HashBy};
use super::queue::QueueSpec;

/// Who maps a key to its shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ShardMap {
    /// Laneway's publishers: they hash the key and send through a direct exchange, whose routing key is
    /// the shard's number (`0`, `1`, …). A foreign publisher has to use the same hash
    /// ([`ShardIndex::of`](laneway_actors::ShardIndex::of)).
    #[default]
    Publisher,
    /// The broker, by a consistent-hash exchange, which is the only entry for every publisher, Laneway's
    /// included. For publishers in other languages: they only have to set the header, as text.
    ///
    /// **This map can change when the broker restarts**, and what waits in the shards then loses its order to
    /// what comes later: RabbitMQ 3.10.8 binds the queues again with several workers, and whoever comes
    /// second gets another place. Measured on two cores, the map of the first of two such exchanges had
    /// changed after each of 16 restarts, that of the second after none.
    Broker,
}

/// How many shards, by which map, and in which header the key travels. Said once, here: publishers that used
/// another header than the consumers would send messages without a key, and so without order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shards {
    /// 1 to 1,000.
    pub count: u32,
    /// Who maps.
    pub map: ShardMap,
    /// The header that carries the key.
    pub header: String,
}

impl Shards {
    /// This many shards, 1 to 1,000; the publishers map the key, and send it in this header.
    pub fn mapped_by_publisher(count: u32, header: &str) -> Self {
        Self {
            count,
            map: ShardMap::Publisher,
            header: header.to_owned(),
        }
    }

    /// This many shards, 1 to 1,000; the broker maps them, by this header. The map can change when the broker
    /// restarts: see [`ShardMap::Broker`].
    pub fn mapped_by_broker(count: u32, header: &str) -> Self {
        Self {
            map: ShardMap::Broker,
            ..Self::mapped_by_publisher(count, header)
        }
    }

    /// What the marker holds: `publisher-8 by account`.
    fn identity(&self) -> String {
        let map = match self.map {
            ShardMap::Publisher => "publisher",
            ShardMap::Broker => "broker",
        };
        format!("{map}-{} by {}", self.count, self.header)
    }
}

/// This many shards; the publishers map the key, and send it in the header `laneway-key`.
impl From<u32> for Shards {
    fn from(count: u32) -> Self {
        Self::mapped_by_publisher(count, header::ORDERING_KEY)
    }
}

/// One queue in shards.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShardedQueue {
    /// Its name, and that of the exchange which is its entry.
    pub name: String,
    /// How many shards, and by which map.
    pub shards: Shards,
    /// The shards, in the order of their numbers, which is that of their names.
    pub queues: Vec<QueueSpec>,
}

impl ShardedQueue {
    pub(super) fn new(name: &str, shards: Shards, template: &QueueSpec) -> Self {
        // One too many shows that there are too many; a million need not be made for it.
        let count = shards.count.min(ShardCount::MOST + 1);
        let queues = (0..count).map(|index| QueueSpec {
            name: shard_name(name, index),
            durable: true,
            single_active_consumer: true,
            ..template.clone()
        });
        Self {
            name: name.to_owned(),
            queues: queues.collect(),
            shards,
        }
    }

    /// The number of shards, if it is one that is allowed.
    pub fn count(&self) -> Option<ShardCount> {
        ShardCount::new(self.shards.count)
    }

    /// The exchange that is the entry.
    pub fn exchange(&self) -> ExchangeSpec {
        let entry = ExchangeSpec::new(&self.name, true);
        match self.shards.map {
            ShardMap::Publisher => entry.direct(),
            ShardMap::Broker => entry.consistent_hash().hash_header(&self.shards.header),
        }
    }

    /// The exchange that holds the number of shards and the map: an internal fanout exchange whose
    /// alternate exchange names them.
    pub fn marker(&self) -> ExchangeSpec {
        ExchangeSpec::marker(&marker_name(&self.name), &self.shards.identity())
    }

    /// Each shard's binding, in the order of their names.
    pub(super) fn bindings(&self) -> impl Iterator<Item = BindingSpec> {
        self.queues.iter().enumerate().map(|(index, queue)| {
            let routing_key = match self.shards.map {
                ShardMap::Publisher => index.to_string(),
                // The weight: each shard has the same.
                ShardMap::Broker => "1".to_owned(),
            };
            BindingSpec::new(&queue.name, &self.name, &routing_key)
        })
    }
}

fn shard_name(name: &str, index: u32) -> String {
    format!("{name}-{index:03}")
}

/// The exchange that holds a sharded queue's identity.
pub(crate) fn marker_name(name: &str) -> String {
    format!("{name}.shards")
}

/// The exchange that holds what a consistent-hash exchange hashes by.
pub(super) fn hash_marker(exchange: &ExchangeSpec) -> Option<ExchangeSpec> {
    let by: &HashBy = exchange.hash.as_ref()?;
    let name = hash_marker_name(&exchange.name);
    Some(ExchangeSpec::marker(&name, &by.identity()))
}

pub(super) fn hash_marker_name(name: &str) -> String {
    format!("{name}.hash")
}

/// The exchange over which the instances that share the queues find each other: of the group that is named like
/// what they consume.
pub(crate) fn members_name(name: &str) -> String {
    format!("{name}.members")
}
