//! Applies a whole topology: identities, exchanges, queues, bindings, in this order, with the rules of the
//! RabbitMQ transport.

use laneway_actors::port::SourceError;

use super::MemoryBroker;
use super::broker::{missing_exchange, missing_queue};
use super::topology::refused;
use crate::topology::Plan;

impl MemoryBroker {
    pub(super) fn apply_plan(&self, plan: &Plan) -> Result<(), Vec<SourceError>> {
        self.apply_exchanges(plan)?;
        let mut problems = Vec::new();
        for queue in &plan.queues {
            let result = if queue.declared {
                self.declare_queue(queue)
            } else {
                self.check(queue)
            };
            problems.extend(result.err().into_iter().flatten());
        }
        let mut registry = self.registry_mut();
        for binding in plan.bindings.iter().filter(|_| problems.is_empty()) {
            if !registry.has_queue(&binding.queue) {
                return Err(vec![missing_queue(&binding.queue)]);
            }
            if !registry.bind(&binding.exchange, &binding.queue, &binding.routing_key) {
                return Err(vec![refused(missing_exchange(&binding.exchange))]);
            }
        }
        if problems.is_empty() {
            Ok(())
        } else {
            Err(problems)
        }
    }

    /// Identities and exchanges, all or none.
    fn apply_exchanges(&self, plan: &Plan) -> Result<(), Vec<SourceError>> {
        let mut registry = self.registry_mut();
        registry.reachable().map_err(|error| vec![error])?;
        let mut problems = Vec::new();
        for (whose, marker) in &plan.markers {
            let there = registry.alternate_of(&marker.name);
            let wanted = marker.alternate.as_deref();
            problems.extend(match there {
                Some(there) if Some(there) != wanted => vec![refused(format!(
                    "{whose} exists with another number of shards, another map or another key header (`{there}`), than is declared (`{}`); it cannot be changed: declare that, or use another name",
                    wanted.unwrap_or_default()
                ))],
                _ => registry.differences(marker),
            });
        }
        for queue in plan.absent.iter().filter(|queue| registry.has_queue(queue)) {
            problems.push(refused(format!(
                "queue `{queue}` exists as a plain queue, and is declared as a sharded one: nothing would consume what is in it; empty and delete it, or use another name"
            )));
        }
        for (queue, marker) in &plan.plain {
            if registry.has_exchange(marker) {
                problems.push(refused(format!(
                    "queue `{queue}` is a sharded queue at the broker (exchange `{marker}` is there), and is declared as a plain one: messages in its shards would be forgotten; use `sharded_queue`, or another name"
                )));
            }
        }
        for exchange in &plan.exchanges {
            if exchange.declared {
                problems.extend(registry.differences(exchange));
            } else if !registry.has_exchange(&exchange.name) {
                problems.push(refused(missing_exchange(&exchange.name)));
            }
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        let markers = plan.markers.iter().map(|(_, marker)| marker);
        for exchange in markers
            .chain(&plan.exchanges)
            .filter(|exchange| exchange.declared)
        {
            registry.add_exchange(exchange.clone());
        }
        Ok(())
    }
}
