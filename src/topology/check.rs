//! What is wrong with a topology, whatever the broker. Pure; every problem at once.

use std::collections::HashMap;

use laneway_actors::ShardCount;

use super::arguments::{
    ArgumentValue, DEAD_LETTER_EXCHANGE, DELIVERY_LIMIT, EXPIRES, GROUP_SIZE, LEADER_LOCATOR,
    MAX_LENGTH, MAX_LENGTH_BYTES, MAX_PRIORITY, MESSAGE_TTL, OVERFLOW, QUEUE_MODE, method_of,
};
use super::exchange::{ExchangeKind, ExchangeSpec, HashBy};
use super::queue::{ParkingSpec, QueueSpec, QueueType};
use super::sharded::{ShardedQueue, hash_marker_name, marker_name, members_name};
use super::{BindingSpec, Topology};

impl Topology {
    /// Every problem, naming the thing and the way out.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = self.name_problems();
        for queue in &self.queues {
            problems.extend(queue_problems(queue));
            problems.extend(self.parking_problems(queue));
        }
        for sharded in &self.sharded {
            problems.extend(sharded_problems(sharded));
            // They are all alike, so what is wrong with the first is said once, of all.
            if let Some(shard) = sharded.queues.first() {
                problems.extend(queue_problems(shard));
                problems.extend(self.parking_problems(shard));
            }
        }
        for exchange in &self.exchanges {
            problems.extend(self.exchange_problems(exchange));
        }
        for binding in &self.bindings {
            problems.extend(self.binding_problems(binding));
        }
        problems
    }

    /// Names that are empty, or stand for two things.
    fn name_problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut queues: HashMap<&str, &str> = HashMap::new();
        let mut exchanges: HashMap<String, String> = HashMap::new();
        for queue in &self.queues {
            if queue.name.is_empty() {
                problems.push("a queue has an empty name".to_owned());
            } else if queues.insert(&queue.name, "").is_some() {
                problems.push(format!("queue `{}` is named twice", queue.name));
            }
        }
        for sharded in &self.sharded {
            let name = &sharded.name;
            if name.is_empty() {
                problems.push("a sharded queue has an empty name".to_owned());
                continue;
            }
            for shard in &sharded.queues {
                if let Some(other) = queues.insert(&shard.name, name) {
                    problems.push(match other {
                        "" => format!(
                            "queue `{}` is a shard of `{name}`, and is named by itself too; remove the plain one",
                            shard.name
                        ),
                        other => format!(
                            "queue `{}` would be a shard of `{other}` and of `{name}`: two maps over the same queues; remove one of them",
                            shard.name
                        ),
                    });
                    break;
                }
            }
        }
        for sharded in &self.sharded {
            if self.find(&sharded.name).is_some() {
                problems.push(format!(
                    "`{0}` is a plain queue and a sharded queue; rename or remove the plain one",
                    sharded.name
                ));
            }
        }
        let named = self.exchanges.iter().map(|exchange| {
            (
                exchange.name.clone(),
                format!("exchange `{}`", exchange.name),
            )
        });
        let mut taken: Vec<_> = named.collect();
        for name in self.sharded.iter().map(|sharded| &sharded.name) {
            let whose = format!("sharded queue `{name}`");
            taken.push((name.clone(), whose.clone()));
            taken.push((marker_name(name), whose.clone()));
            taken.push((members_name(name), whose));
        }
        for exchange in self
            .exchanges
            .iter()
            .filter(|known| known.kind == ExchangeKind::ConsistentHash)
        {
            let whose = format!("consistent-hash exchange `{}`", exchange.name);
            taken.push((hash_marker_name(&exchange.name), whose.clone()));
            taken.push((members_name(&exchange.name), whose));
        }
        for (name, whose) in taken {
            if name.is_empty() {
                problems.push("an exchange has an empty name, which is AMQP's default exchange and is always there; remove it".to_owned());
            } else if let Some(other) = exchanges.get(&name) {
                problems.push(if *other == whose {
                    format!("{whose} is named twice")
                } else {
                    format!("the exchange name `{name}` belongs to {other} and to {whose}; rename one of them")
                });
            } else {
                exchanges.insert(name, whose);
            }
        }
        problems
    }

    /// What is wrong with a queue's parking place.
    fn parking_problems(&self, spec: &QueueSpec) -> Vec<String> {
        let Some(ParkingSpec {
            exchange, queue, ..
        }) = &spec.parking
        else {
            return Vec::new();
        };
        let name = &spec.name;
        let mut problems = Vec::new();
        if exchange.is_empty() {
            problems.push(format!(
                "the parking exchange of queue `{name}` has an empty name"
            ));
        }
        if queue.is_empty() {
            problems.push(format!(
                "the parking queue of queue `{name}` has an empty name"
            ));
        }
        if queue == name || self.shard_of(queue).is_some() {
            problems.push(format!(
                "queue `{name}` parks in itself, so a poison message would come again for ever; park in another queue"
            ));
        }
        let known = self
            .exchanges
            .iter()
            .find(|known| known.name == *exchange && known.declared);
        if known.is_some_and(|known| known.kind != ExchangeKind::Fanout || !known.durable) {
            problems.push(format!(
                "exchange `{exchange}` parks messages of queue `{name}`, so it must be a durable fanout exchange; say `fanout()`, or remove it here: `parking` declares it"
            ));
        }
        let parked = self.find(queue).filter(|parked| parked.name != *name);
        let Some(parked) = parked.filter(|parked| parked.declared) else {
            return problems;
        };
        let removing = parked.removes_unseen();
        if !removing.is_empty() {
            let removing = super::queue::listed(&removing);
            problems.push(format!(
                "queue `{queue}` keeps parked messages, and {removing} would remove them unseen; remove it (a length limit is right with `overflow(Overflow::RejectPublish)`)"
            ));
        }
        if parked.arguments.contains_key(MAX_PRIORITY) {
            problems.push(format!(
                "queue `{queue}` keeps parked messages in their order, which `max_priority(…)` breaks; remove it"
            ));
        }
        if !parked.durable || parked.queue_type != spec.queue_type || parked.single_active_consumer
        {
            problems.push(format!(
                "queue `{queue}` keeps parked messages of queue `{name}`, so it must be durable, of the same type, and without `single_active_consumer()`"
            ));
        }
        // Both are declared, and must not differ in whether they have the broker's own delivery limit.
        if parked.queue_type == QueueType::Quorum && parked.gaps_accepted != spec.gaps_accepted {
            problems.push(format!(
                "`accept_unreported_gaps()` is said of only one of queue `{name}` and its parking queue `{queue}`; say it of both, or of none"
            ));
        }
        problems
    }

    fn exchange_problems(&self, exchange: &ExchangeSpec) -> Vec<String> {
        let name = &exchange.name;
        let mut problems = Vec::new();
        let hashing = exchange.kind == ExchangeKind::ConsistentHash;
        for argument in exchange.by_name.keys() {
            if let Some(method) = method_of(argument) {
                problems.push(format!(
                    "exchange `{name}`: `argument(\"{argument}\", …)` has a method of its own; use `{method}`"
                ));
            }
        }
        if exchange.alternate.as_ref().is_some_and(String::is_empty) {
            problems.push(format!(
                "the alternate exchange of exchange `{name}` has an empty name"
            ));
        }
        if !hashing {
            if exchange.hashes_said > 0 || !exchange.queues.is_empty() {
                problems.push(format!(
                    "exchange `{name}` does not hash, so `hash_header`, `hash_property` and `queue` have no effect; say `consistent_hash()`, or remove them"
                ));
            }
            return problems;
        }
        if exchange.hashes_said != 1 {
            problems.push(format!(
                "consistent-hash exchange `{name}` must say once by what it hashes: `hash_header(…)` or `hash_property(…)`"
            ));
        }
        if matches!(&exchange.hash, Some(HashBy::Header(header)) if header.is_empty()) {
            problems.push(format!(
                "the hash header of exchange `{name}` has an empty name"
            ));
        }
        let behind = self.hashed_queues(exchange);
        if behind.is_empty() {
            problems.push(format!(
                "consistent-hash exchange `{name}` has no queue; add one with `queue(name, weight)`"
            ));
        }
        for (number, (queue, weight)) in behind.iter().enumerate() {
            if *weight == 0 {
                problems.push(format!(
                    "queue `{queue}` has the weight 0 at exchange `{name}`, so it gets nothing; give it at least 1, or remove it"
                ));
            }
            if behind[..number].iter().any(|(other, _)| other == queue) {
                problems.push(format!(
                    "queue `{queue}` is bound to exchange `{name}` twice; add its weights up"
                ));
            }
        }
        for (queue, _) in &exchange.queues {
            problems.extend(self.binding_queue_problem(queue, name));
        }
        problems
    }

    fn binding_problems(&self, binding: &BindingSpec) -> Vec<String> {
        let BindingSpec {
            queue,
            exchange,
            routing_key,
            arguments,
        } = binding;
        let mut problems = self.binding_queue_problem(queue, exchange);
        if self.find_sharded(exchange).is_some() {
            problems.push(format!(
                "exchange `{exchange}` is the entry of a sharded queue, so queue `{queue}` cannot be bound to it; use an exchange of its own"
            ));
            return problems;
        }
        let known = self.exchanges.iter().find(|known| known.name == *exchange);
        let Some(known) = known else {
            let declared = self.queues.iter().any(|queue| {
                queue
                    .parking
                    .as_ref()
                    .is_some_and(|parking| parking.exchange == *exchange)
            });
            if !declared {
                problems.push(format!(
                    "queue `{queue}` is bound to exchange `{exchange}`, which is not in the topology: declare it with `exchange`, or name it with `existing_exchange`"
                ));
            }
            return problems;
        };
        if !known.declared {
            return problems;
        }
        match known.kind {
            ExchangeKind::ConsistentHash if routing_key.parse::<u32>().is_err() => {
                problems.push(format!(
                    "the binding of queue `{queue}` to consistent-hash exchange `{exchange}` needs its weight as routing key, a number from 1; or list it with `queue(name, weight)`"
                ));
            }
            ExchangeKind::Headers => {}
            kind if !arguments.is_empty() => problems.push(format!(
                "queue `{queue}` is bound by headers to exchange `{exchange}`, which is of type {}; use `bind`, or say `headers()`",
                kind.name()
            )),
            _ => {}
        }
        problems
    }

    fn binding_queue_problem(&self, queue: &str, exchange: &str) -> Vec<String> {
        if let Some(sharded) = self.shard_of(queue) {
            return vec![format!(
                "queue `{queue}` is a shard of `{}`, whose exchange is the only entry to it; do not bind it to `{exchange}`",
                sharded.name
            )];
        }
        if self.find(queue).is_none() {
            return vec![format!(
                "queue `{queue}` is bound to exchange `{exchange}`, but is not in the topology: declare it with `queue`, or name it with `existing_queue`"
            )];
        }
        Vec::new()
    }
}

fn sharded_problems(sharded: &ShardedQueue) -> Vec<String> {
    let ShardedQueue { name, shards, .. } = sharded;
    let mut problems = Vec::new();
    if sharded.count().is_none() {
        problems.push(format!(
            "sharded queue `{name}` has {} shards; 1 to {} are possible",
            shards.count,
            ShardCount::MOST
        ));
    }
    if shards.header.is_empty() {
        problems.push(format!(
            "the header that carries the key of sharded queue `{name}` has an empty name"
        ));
    }
    problems
}

/// What is wrong with the arguments of a queue.
fn queue_problems(queue: &QueueSpec) -> Vec<String> {
    let QueueSpec {
        name, arguments, ..
    } = queue;
    let mut problems = Vec::new();
    let mut problem = |what: String| problems.push(format!("queue `{name}`: {what}"));
    for argument in queue.by_name.keys() {
        if let Some(method) = method_of(argument) {
            problem(format!(
                "`argument(\"{argument}\", …)` has a method of its own; use `{method}`"
            ));
        }
    }
    let positive = [
        MESSAGE_TTL,
        EXPIRES,
        MAX_LENGTH,
        MAX_LENGTH_BYTES,
        DELIVERY_LIMIT,
        MAX_PRIORITY,
        GROUP_SIZE,
    ];
    for argument in positive {
        if arguments.get(argument) == Some(&ArgumentValue::Integer(0)) {
            let method = method_of(argument).unwrap_or(argument);
            problem(format!(
                "`{method}` must be at least 1 (milliseconds, where it is a time); give it a value, or remove it"
            ));
        }
    }
    let (foreign, why) = match queue.queue_type {
        QueueType::Classic => (
            [DELIVERY_LIMIT, LEADER_LOCATOR, GROUP_SIZE],
            "is for quorum queues; say `quorum()`, or remove it",
        ),
        QueueType::Quorum => (
            [MAX_PRIORITY, QUEUE_MODE, ""],
            "is for classic queues; remove it, or remove `quorum()`",
        ),
    };
    for argument in foreign {
        if arguments.contains_key(argument) {
            let method = method_of(argument).unwrap_or(argument);
            problem(format!("`{method}` {why}"));
        }
    }
    let overflow = match arguments.get(OVERFLOW) {
        Some(ArgumentValue::Text(overflow)) => Some(overflow.as_str()),
        _ => None,
    };
    if queue.queue_type == QueueType::Quorum && overflow == Some("reject-publish-dlx") {
        problem("`Overflow::RejectPublishDeadLetter` is for classic queues; use `Overflow::RejectPublish`".to_owned());
    }
    if overflow == Some("reject-publish-dlx") && !arguments.contains_key(DEAD_LETTER_EXCHANGE) {
        problem("`Overflow::RejectPublishDeadLetter` has no effect without `dead_letter(…)`; add it, or use `Overflow::RejectPublish`".to_owned());
    }
    let limited = arguments.contains_key(MAX_LENGTH) || arguments.contains_key(MAX_LENGTH_BYTES);
    if overflow.is_some() && !limited {
        problem("`overflow(…)` has no effect without `max_length(…)` or `max_length_bytes(…)`; add one, or remove it".to_owned());
    }
    if queue.queue_type == QueueType::Quorum && !queue.durable {
        problem("a quorum queue is always durable".to_owned());
    }
    // A quorum queue may have the broker's own delivery limit, which this accepts.
    let nothing = queue.removes_unseen().is_empty() && queue.queue_type == QueueType::Classic;
    if queue.gaps_accepted && nothing {
        problem("`accept_unreported_gaps()` has no effect, because nothing of it removes messages; remove it".to_owned());
    }
    problems
}
