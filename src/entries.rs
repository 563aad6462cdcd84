//! The one entry to queues that belong together: how a published message finds the shard of its key.
//!
//! Owns the translation of a destination and the header that carries the key there. Promises that Laneway's
//! publishers use the same map as everybody else: the shards of a queue, and the queues behind a
//! consistent-hash exchange, cannot be published to one by one.
//!
//! A keyless message has no order and so no shard. It goes to one chosen by its id, past the map: the map
//! is a promise about keys. (Through a consistent-hash exchange every message without the header would go
//! to one and the same queue, and inventing a header would invent a key.)

use std::collections::HashMap;
use std::sync::Arc;

use laneway_actors::port::{Destination, PublishError};
use laneway_actors::{Envelope, MessageId, OrderingKey, ShardCount, ShardIndex, header};

use crate::topology::{HashBy, HashProperty, ShardMap, Topology, epoch};

/// The entries of a topology.
#[derive(Default)]
pub(crate) struct Entries {
    by_name: HashMap<Arc<str>, Entry>,
    /// Queues behind an entry, with the entry's name.
    behind: HashMap<String, Arc<str>>,
}

/// One entry.
pub(crate) struct Entry {
    exchange: Arc<str>,
    queues: Vec<Arc<str>>,
    count: ShardCount,
    map: Map,
    /// The header that carries the key, where it is known.
    key_header: Option<Arc<str>>,
    /// Stamped into each message, where the map can change.
    epoch: Option<Arc<str>>,
}

enum Map {
    /// The routing key is the shard's number.
    Number(Vec<Arc<str>>),
    /// The broker hashes the header.
    Header,
    /// The broker hashes a property.
    Property(HashProperty),
}

/// Where a message goes, and what keeps it in order on the way.
pub(crate) struct Resolved {
    pub(crate) destination: Destination,
    /// One message of this key is unconfirmed at a time.
    pub(crate) gate: Option<OrderingKey>,
}

impl Entries {
    pub(crate) fn of(topology: &Topology) -> Self {
        let mut entries = Self::default();
        for sharded in topology.sharded_queues() {
            let names = sharded.queues.iter().map(|shard| shard.name.as_str());
            let map = match sharded.shards.map {
                ShardMap::Publisher => {
                    let numbers = (0..sharded.queues.len()).map(|index| index.to_string().into());
                    Map::Number(numbers.collect())
                }
                ShardMap::Broker => Map::Header,
            };
            let key_header = Some(sharded.shards.header.as_str().into());
            entries.add(&sharded.name, names.collect(), map, key_header, None);
        }
        for exchange in topology.exchanges() {
            let Some(hash) = topology
                .find_hashed(&exchange.name)
                .and(exchange.hash.as_ref())
            else {
                continue;
            };
            let queues = topology.hashed_queues(exchange);
            let epoch = epoch(hash, &queues).to_string().into();
            let names = queues.iter().map(|(name, _)| *name).collect();
            let (map, key_header) = match hash {
                HashBy::Header(header) => (Map::Header, Some(header.as_str().into())),
                HashBy::Property(property) => (Map::Property(*property), None),
            };
            entries.add(&exchange.name, names, map, key_header, Some(epoch));
        }
        entries
    }

    fn add(
        &mut self,
        name: &str,
        queues: Vec<&str>,
        map: Map,
        key_header: Option<Arc<str>>,
        epoch: Option<Arc<str>>,
    ) {
        // A number that is not allowed is a problem of the topology; nothing is published then.
        let count = u32::try_from(queues.len()).ok().and_then(ShardCount::new);
        let Some(count) = count else { return };
        let exchange: Arc<str> = name.into();
        for queue in &queues {
            self.behind
                .insert((*queue).to_owned(), Arc::clone(&exchange));
        }
        let entry = Entry {
            exchange: Arc::clone(&exchange),
            queues: queues.into_iter().map(Into::into).collect(),
            count,
            map,
            key_header,
            epoch,
        };
        self.by_name.insert(exchange, entry);
    }

    /// The entry that a destination names.
    ///
    /// # Errors
    /// Why it must not be published to; names only.
    pub(crate) fn find(&self, destination: &Destination) -> Result<Option<&Entry>, String> {
        let name = match destination {
            Destination::Queue(queue) => queue,
            // AMQP's default exchange: the routing key names the queue.
            Destination::Exchange {
                exchange,
                routing_key,
            } if exchange.is_empty() => routing_key,
            Destination::Exchange { exchange, .. } => {
                let entry = self.by_name.get(exchange);
                return match entry.map(|entry| &entry.map) {
                    Some(Map::Number(_)) => Err(format!(
                        "exchange `{exchange}` is the entry of a sharded queue, and its routing key is the shard of each message's key; use `to_queue(\"{exchange}\")`"
                    )),
                    _ => Ok(entry),
                };
            }
            _ => return Ok(None),
        };
        match self.behind.get(&**name) {
            Some(entry) => Err(format!(
                "queue `{name}` is behind `{entry}`, which is its only entry; publish to `{entry}`"
            )),
            None => Ok(self.by_name.get(name)),
        }
    }
}

impl Entry {
    /// The header that carries the key, where it is known.
    pub(crate) fn key_header(&self) -> Option<&Arc<str>> {
        self.key_header.as_ref()
    }

    /// Whether a message's key chooses its queue.
    pub(crate) fn takes_key(&self) -> bool {
        !matches!(self.map, Map::Property(_))
    }

    /// Where a message goes, whose key is set already. Stamps what the consumer compares.
    ///
    /// # Errors
    /// [`PublishError::Refused`]: nothing is sent.
    pub(crate) fn resolve(
        &self,
        envelope: &mut Envelope,
        key: Option<&OrderingKey>,
    ) -> Result<Resolved, PublishError> {
        if let Some(epoch) = &self.epoch {
            envelope.headers.insert(header::MAPPING, &**epoch);
        }
        let through = |routing_key: &Arc<str>| Destination::Exchange {
            exchange: Arc::clone(&self.exchange),
            routing_key: Arc::clone(routing_key),
        };
        let destination = match (&self.map, key) {
            (Map::Property(property), key) => return self.by_property(*property, envelope, key),
            (Map::Number(numbers), Some(key)) => {
                through(&numbers[ShardIndex::of(key, self.count).get()])
            }
            (Map::Header, Some(_)) => through(&"".into()),
            (Map::Number(numbers), None) => through(&numbers[self.any(envelope)]),
            (Map::Header, None) => Destination::Queue(Arc::clone(&self.queues[self.any(envelope)])),
        };
        Ok(Resolved {
            destination,
            gate: key.cloned(),
        })
    }

    /// Some queue, by the message's id.
    fn any(&self, envelope: &mut Envelope) -> usize {
        let id = envelope.id.get_or_insert_with(MessageId::unique);
        ShardIndex::of(&id.as_str().into(), self.count).get()
    }

    fn by_property(
        &self,
        property: HashProperty,
        envelope: &mut Envelope,
        key: Option<&OrderingKey>,
    ) -> Result<Resolved, PublishError> {
        let refused = |what: &str| {
            let exchange = &self.exchange;
            Err(PublishError::Refused(format!(
                "not sent: exchange `{exchange}` {what}"
            )))
        };
        if key.is_some() {
            return refused(
                "hashes by a property, so a key would not choose the queue; publish without one",
            );
        }
        let gate = match (property, &envelope.correlation_id) {
            (HashProperty::CorrelationId, None) => {
                return refused("hashes by the correlation id, and the message has none");
            }
            (HashProperty::CorrelationId, Some(id)) => Some(OrderingKey::from(&**id)),
            (HashProperty::MessageId, _) => {
                envelope.id.get_or_insert_with(MessageId::unique);
                None
            }
        };
        Ok(Resolved {
            destination: Destination::Exchange {
                exchange: Arc::clone(&self.exchange),
                routing_key: "".into(),
            },
            gate,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Shards;

    fn entries() -> Entries {
        let topology = Topology::default()
            .sharded_queue("orders", Shards::mapped_by_publisher(8, "account"), |q| q)
            .sharded_queue("devices", Shards::mapped_by_broker(4, "device"), |q| q)
            .queue("a", |q| q.single_active_consumer())
            .queue("b", |q| q.single_active_consumer())
            .consistent_hash_exchange("hashed", |x| {
                x.hash_header("account").queue("b", 1).queue("a", 2)
            });
        Entries::of(&topology)
    }

    fn queue(name: &str) -> Destination {
        Destination::Queue(name.into())
    }

    fn resolved(name: &str, key: Option<&str>) -> (Envelope, Resolved) {
        let entries = entries();
        let entry = entries
            .find(&queue(name))
            .expect("an entry")
            .expect("it is one");
        let mut envelope = Envelope::default();
        let resolved = entry.resolve(&mut envelope, key.map(OrderingKey::from).as_ref());
        (envelope, resolved.expect("goes"))
    }

    fn to(exchange: &str, routing_key: &str) -> Destination {
        Destination::Exchange {
            exchange: exchange.into(),
            routing_key: routing_key.into(),
        }
    }

    #[test]
    fn a_key_goes_to_its_shard() {
        // The golden vectors of `ShardIndex::of`.
        for (key, shard) in [("a", "0"), ("42", "3"), ("account-1", "6")] {
            let (_, resolved) = resolved("orders", Some(key));
            assert_eq!(resolved.destination, to("orders", shard));
            assert_eq!(resolved.gate, Some(key.into()));
        }
    }

    #[test]
    fn where_the_broker_maps_a_key_goes_through_the_exchange() {
        let (envelope, resolved) = resolved("devices", Some("a"));
        assert_eq!(resolved.destination, to("devices", ""));
        assert_eq!(
            envelope.headers.get(header::MAPPING),
            None,
            "the map cannot change"
        );
    }

    #[test]
    fn keyless_messages_are_spread_past_the_map() {
        let mut hit = std::collections::HashSet::new();
        for _ in 0..200 {
            let (envelope, resolved) = resolved("devices", None);
            assert!(envelope.id.is_some());
            assert_eq!(resolved.gate, None);
            hit.insert(resolved.destination);
        }
        let all: Vec<_> = (0..4).map(|n| queue(&format!("devices-00{n}"))).collect();
        assert_eq!(hit, all.into_iter().collect());
    }

    #[test]
    fn what_goes_through_a_map_that_can_change_is_stamped_with_its_epoch() {
        let (envelope, resolved) = resolved("hashed", Some("a"));
        assert_eq!(resolved.destination, to("hashed", ""));
        let by = HashBy::Header("account".to_owned());
        // In the order of the names, whatever the order in which they were listed.
        let epoch = epoch(&by, &[("a", 2), ("b", 1)]).to_string();
        assert_eq!(envelope.headers.text(header::MAPPING), Some(&*epoch));
    }

    #[test]
    fn nobody_publishes_past_the_entry() {
        let entries = entries();
        for (destination, entry) in [
            (queue("orders-003"), "`orders`"),
            (queue("a"), "`hashed`"),
            (to("", "devices-001"), "`devices`"),
            (to("orders", "3"), "to_queue(\"orders\")"),
        ] {
            let why = entries.find(&destination).err().expect("refused");
            assert!(why.contains(entry), "{why}");
        }
        assert!(entries.find(&queue("other")).expect("allowed").is_none());
        assert!(entries.find(&to("hashed", "")).expect("allowed").is_some());
    }
}
