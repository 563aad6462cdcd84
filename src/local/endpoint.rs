//! What a local queue is to the runtime: an endpoint like any other.

use std::sync::Arc;
use std::time::Duration;

use laneway_actors::{EndpointSettings, EndpointSpec, KeySource, Problem, header};

use super::address::{LocalQueues, SEQUENTIAL_KEY, Target, TargetKind};
use super::buffered::{BufferedQueue, BufferedSource};
use super::durable::{DurableQueue, DurableQueues};
use super::plan::{Plan, PlannedQueue};
use super::settings::{Poison, QueueOrder, Storage};
use crate::endpoint::{EndpointBuilder, TransportAffinity};
use crate::topology::Topology;

/// Pauses of at least this length are spent in the store.
const KEPT_FROM: Duration = Duration::from_secs(1);

/// What the settings of a queue are to an endpoint, wherever its messages wait; but for the source of its key.
fn settings_of(queue: &PlannedQueue) -> EndpointSettings {
    let said = &queue.settings;
    let mut settings = EndpointSettings::named(&*queue.name);
    settings.concurrency = said.parallel;
    if let QueueOrder::Partitioned(lanes) = said.order {
        settings.lanes = Some(lanes);
    }
    if let Some(bound) = said.handler_timeout {
        settings.handler_timeout = bound;
    }
    if let Some(attempts) = said.max_delivery_attempts {
        settings.max_delivery_attempts = attempts;
    }
    if let Some(backoff) = said.backoff {
        settings.backoff = backoff;
    }
    settings.rules = said.rules.clone();
    match said.poison {
        Some(Poison::Mode(mode)) => settings.poison_mode = mode,
        Some(Poison::Discard) => settings.discard_poison = true,
        None => {}
    }
    settings
}

/// The endpoint of a queue in this program. `share` adds what the bus says for all its endpoints.
///
/// # Errors
/// What is missing.
pub(crate) fn spec(
    queue: &PlannedQueue,
    store: Option<&mut (dyn DurableQueues + 'static)>,
    locals: &mut LocalQueues,
    share: impl FnOnce(&mut EndpointSettings),
) -> Result<EndpointSpec, Problem> {
    let mut settings = settings_of(queue);
    share(&mut settings);
    if queue.settings.order != QueueOrder::Unordered {
        settings.ordering = Some(KeySource {
            given: true,
            ..KeySource::default()
        });
    }
    let target = |kind| Target {
        queue: Arc::clone(&queue.name),
        kind,
        order: queue.settings.order,
    };
    match queue.settings.storage {
        Storage::Buffered => {
            // Memory waits for ever, and there is no place for what is poison.
            settings.ack_timeout = None;
            settings.discard_poison = true;
            if let QueueOrder::Partitioned(_) = queue.settings.order {
                // What waits is in this process either way, and its bound is the queue's. With fewer credits the backlog
                // of one key that waits would keep those of the others out of the lanes.
                let bound = u32::try_from(queue.settings.bound).unwrap_or(u32::MAX);
                let least = settings.concurrency.max(32);
                settings.max_in_flight = Some(bound.clamp(least.min(65_535), 65_535));
            }
            let buffered = BufferedQueue::new(&queue.name, queue.settings.bound);
            let source = Arc::new(BufferedSource(Arc::clone(&buffered)));
            locals.add(
                queue.message_type,
                target(TargetKind::Buffered),
                Some(buffered),
            );
            Ok(EndpointSpec::new(settings, source, queue.handlers.clone()))
        }
        // What lives on the transport is not asked here.
        Storage::Durable | Storage::Broker => {
            locals.add(queue.message_type, target(TargetKind::Durable), None);
            let Some(store) = store else {
                let what = "durable queues need a store, and the bus has none: give it one with `store(…)` (features `sqlite` and `postgres`), or use `buffered()`";
                return Err(Problem::new(&*queue.name, "durable", what));
            };
            // A store waits for ever, and keeps what is to be tried again later.
            settings.ack_timeout = None;
            settings.source_keeps = Some(KEPT_FROM);
            let shards = queue.settings.shards;
            let credits = settings.concurrency.saturating_mul(2).max(32);
            settings.max_in_flight = Some(credits.max(shards.saturating_mul(16)).min(65_535));
            let durable = DurableQueue {
                name: Arc::clone(&queue.name),
                order: queue.settings.order,
                shards,
                transactional: queue.settings.transactional,
            };
            Ok(store.endpoint(durable, settings, queue.handlers.clone()))
        }
    }
}

/// Moves the queues that live on the transport there: declares what the topology does not have, and gives their
/// endpoints.
pub(crate) fn on_broker(plan: &Plan, topology: &mut Topology) -> Vec<EndpointBuilder> {
    let mut endpoints = Vec::new();
    for queue in plan.on_broker() {
        let ordered = queue.settings.order != QueueOrder::Unordered;
        if topology.find(&queue.name).is_none() && topology.find_sharded(&queue.name).is_none() {
            let parked = format!("{}.parked", queue.name);
            *topology = std::mem::take(topology).queue(&queue.name, |mut declared| {
                declared = declared.durable();
                if ordered {
                    declared = declared.single_active_consumer();
                }
                match queue.settings.poison {
                    Some(Poison::Discard) => declared,
                    _ => declared.parking(&parked, &parked),
                }
            });
        }
        let mut endpoint = EndpointBuilder::named(&queue.name);
        endpoint.settings = settings_of(queue);
        endpoint.handlers = queue.handlers.clone();
        let rule = plan.keys.get(queue.message_type);
        // A single active consumer allows any source of the key, as long as it is the same for all.
        let mut source = KeySource::default();
        match (queue.settings.order, rule) {
            (QueueOrder::Unordered, _) => {}
            (QueueOrder::Sequential, _) => {
                source.typed = true;
                (queue.order_by)(
                    &mut endpoint.handlers,
                    Arc::new(|_| Some(SEQUENTIAL_KEY.into())),
                );
            }
            (QueueOrder::Partitioned(_), rule) => {
                source.header = Some(header::ORDERING_KEY.to_owned());
                if let Some(rule) = rule {
                    source.typed = true;
                    (queue.order_by)(&mut endpoint.handlers, Arc::clone(rule));
                }
            }
        }
        if ordered {
            endpoint.settings.ordering = Some(source);
            endpoint = endpoint.transport_affinity(TransportAffinity::SingleActiveConsumer);
        }
        endpoints.push(endpoint);
    }
    endpoints
}
