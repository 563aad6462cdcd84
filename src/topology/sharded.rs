//! One queue in n shards.
//!
//! Owns its names and what identifies it. The number of shards and the map from key to shard can never
//! change: with another number almost every key would have another shard, while messages of it wait in the
//! old one. So they are held by an exchange of their own ([`marker`](ShardedQueue::marker)), which whoever
//! starts first creates, and which refuses everybody who thinks otherwise.

use laneway_actors::ShardCount;

use super::exchange::{BindingSpec, ExchangeSpec, HashBy};
use super::queue::QueueSpec;

/// Who maps a key to its shard.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ShardMap {
    /// Laneway's publishers: they hash the key and send through a direct exchange, whose routing key is
    /// the shard's number (`0`, `1`, …). A foreign publisher has to use the same hash
    /// ([`ShardIndex::of`](laneway_actors::ShardIndex::of)).
    #[default]
    Publisher,
    /// The broker, by a consistent-hash exchange, which is the only entry for every publisher, Laneway's
    /// included. For publishers in other languages: they only have to set the header, as text.
    Broker {
        /// The header that carries the key.
        header: String,
    },
}

/// How many shards, and by which map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shards {
    /// 1 to 1,000.
    pub count: u32,
    /// Who maps.
    pub map: ShardMap,
}

impl Shards {
    /// This many shards, 1 to 1,000; the broker maps them, by this header.
    pub fn mapped_by_broker(count: u32, header: &str) -> Self {
        Self {
            count,
            map: ShardMap::Broker {
                header: header.to_owned(),
            },
        }
    }

    /// What the marker holds: `publisher-8`, `broker-8 by account`.
    fn identity(&self) -> String {
        match &self.map {
            ShardMap::Publisher => format!("publisher-{}", self.count),
            ShardMap::Broker { header } => format!("broker-{} by {header}", self.count),
        }
    }
}

/// This many shards; the publishers map them.
impl From<u32> for Shards {
    fn from(count: u32) -> Self {
        Self {
            count,
            map: ShardMap::Publisher,
        }
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
        match &self.shards.map {
            ShardMap::Publisher => entry.direct(),
            ShardMap::Broker { header } => entry.consistent_hash().hash_header(header),
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
            let routing_key = match &self.shards.map {
                ShardMap::Publisher => index.to_string(),
                // The weight: each shard has the same.
                ShardMap::Broker { .. } => "1".to_owned(),
            };
            BindingSpec::new(&queue.name, &self.name, &routing_key)
        })
    }

    /// The header by which the broker maps, if it does.
    pub(crate) fn hash_header(&self) -> Option<&str> {
        match &self.shards.map {
            ShardMap::Broker { header } => Some(header),
            ShardMap::Publisher => None,
        }
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

/// The name under which the instances that share the queues find each other.
pub(crate) fn group_name(name: &str) -> String {
    format!("{name}.members")
}
