//! Intake: from a batch of a shard to the lanes, by key.

use std::sync::Arc;
use std::time::Instant;

use crate::config::KeySource;
use crate::endpoint::Endpoint;
use crate::envelope::{Delivery, HeaderValue, header};
use crate::key::{LaneIndex, OrderingKey};
use crate::lane::ToLane;
use crate::mapping::MappingEpoch;
use crate::observe::EventKind;
use crate::outcome::Outcome;

use super::EndpointSupervisor;
use super::shard::Shard;

impl EndpointSupervisor {
    /// Sends deliveries to their lanes.
    ///
    /// # Errors
    /// When the source breaks its promise: then the session is of no use any more.
    pub(super) fn arrived(&mut self, shard: usize, batch: Vec<Delivery>) -> Result<(), String> {
        let Shard { live, finished, .. } = &mut self.shards[shard];
        let Some(live) = live else {
            return Ok(());
        };
        let (mut broken, now) = (Ok(()), Instant::now());
        let ordered = self.endpoint.config.ordering.is_some();
        for mut delivery in batch {
            let (tag, identity) = (delivery.tag(), delivery.identity());
            let out_of_order = || {
                let tag = tag.0;
                Err(format!(
                    "the source gave delivery tag {tag}, which does not rise"
                ))
            };
            let copy_of = finished.match_copy(identity, delivery.is_redelivered());
            if let Some(ending) = copy_of {
                if !live.book.arrived(tag, 0, now) {
                    broken = out_of_order();
                    break;
                }
                live.book.ended(tag);
                if ending.late && ending.outcome == Outcome::Handled {
                    self.endpoint.counters.handled.add(1);
                }
                finished.record(delivery.identity(), ending.outcome);
                continue;
            }
            if let Some(watch) = &mut self.mapping
                && let Some(seen) = watch.look(&delivery.envelope().headers)
            {
                report_mapping(&self.endpoint, watch.own(), seen);
            }
            if ordered {
                resolve_key(&self.endpoint, &mut delivery);
            } else {
                // Whatever its source knows.
                delivery.key = None;
            }
            let lane = match delivery.key() {
                Some(key) => LaneIndex::of(key, self.endpoint.config.lanes).get(),
                None => {
                    if !self.earlier_attempts.is_empty() && delivery.is_redelivered() {
                        let earlier = self.earlier_attempts.remove(delivery.identity());
                        delivery.earlier_attempts = earlier.unwrap_or(0);
                    }
                    least_loaded(&self.loads)
                }
            };
            if !live.book.arrived(tag, lane, now) {
                broken = out_of_order();
                break;
            }
            self.loads[lane] += 1;
            self.by_lane[lane].push(Arc::new(delivery));
        }
        for (lane, deliveries) in self.by_lane.iter_mut().enumerate() {
            if !deliveries.is_empty() {
                self.lanes[lane].tell(ToLane::Offer(std::mem::take(deliveries)));
            }
        }
        broken
    }
}

/// The first source of the key that gives one: header, typed selector, correlation id.
fn resolve_key(endpoint: &Endpoint, delivery: &mut Delivery) {
    let Some(source) = &endpoint.config.ordering else {
        return;
    };
    if source.given {
        if delivery.key.is_none() {
            count_keyless(endpoint, source, delivery);
            endpoint.emit(EventKind::KeyMissing {
                message: delivery.envelope().id.clone(),
                fallback: false,
            });
        }
        return;
    }
    let from_header = source.header.as_deref().and_then(|name| {
        let value = delivery.envelope().headers.get(name)?;
        HeaderValue::as_key_bytes(value).map(|bytes| OrderingKey::from(&*bytes))
    });
    let key = match from_header {
        None if source.typed => endpoint
            .handlers
            .typed_key(delivery)
            .unwrap_or_else(|failure| {
                // The message fails when it is handled; without its key it has no place in any order.
                delivery.intake_failure = Some((failure.kind(), failure.detail()));
                None
            }),
        found => found,
    };
    if key.is_some() {
        delivery.key = key;
        return;
    }
    let correlation = delivery.envelope().correlation_id.as_deref();
    let fallback = correlation
        .filter(|id| source.correlation_id && !id.is_empty())
        .map(OrderingKey::from);
    let only_source = source.header.is_none() && !source.typed;
    if fallback.is_none() {
        count_keyless(endpoint, source, delivery);
    } else if !only_source {
        endpoint.counters.key_fallbacks.add(1);
    }
    if fallback.is_none() || !only_source {
        endpoint.emit(EventKind::KeyMissing {
            message: delivery.envelope().id.clone(),
            fallback: fallback.is_some(),
        });
    }
    delivery.key = fallback;
}

fn count_keyless(endpoint: &Endpoint, source: &KeySource, delivery: &Delivery) {
    if endpoint.counters.keyless.get() == 0 {
        warn_of_keyless(endpoint, source, delivery);
    }
    endpoint.counters.keyless.add(1);
}

/// The first message without a key, perhaps of many: somebody publishes otherwise than is consumed here.
fn warn_of_keyless(endpoint: &Endpoint, source: &KeySource, delivery: &Delivery) {
    let headers = &delivery.envelope().headers;
    let elsewhere = headers.get(header::ORDERING_KEY).is_some();
    tracing::warn!(
        endpoint = %endpoint.config.name,
        queue = %endpoint.queue_of(delivery),
        message = delivery.envelope().id.as_ref().map(tracing::field::display),
        ordered_by_header = source.header,
        key_in_laneway_key = elsewhere,
        "a message without its ordering key has no order; later ones are counted (`keyless`) and are events. Where its key is in the header `laneway-key`, give its route `key_header(…)`"
    );
}

/// The map from keys to queues has changed: once for each map that is not the endpoint's own.
fn report_mapping(endpoint: &Endpoint, own: MappingEpoch, seen: MappingEpoch) {
    tracing::warn!(
        endpoint = %endpoint.config.name,
        queue = %endpoint.queue,
        %own,
        %seen,
        "a message was sent under another map of keys to queues: while maps differ, keys may be out of order"
    );
    endpoint.emit(EventKind::MappingChanged { own, seen });
}

fn least_loaded(loads: &[usize]) -> usize {
    loads
        .iter()
        .enumerate()
        .min_by_key(|&(_, load)| load)
        .map_or(0, |(lane, _)| lane)
}
