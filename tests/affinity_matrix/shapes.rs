//! Topologies and endpoints that many rows share.

use laneway::prelude::*;
use laneway::topology::HashProperty;
use laneway::{EndpointBuilder, QueueSpec, Shards, Topology};

// ---- topologies

pub(crate) fn parked(queue: QueueSpec, name: &str) -> QueueSpec {
    queue.parking(&format!("{name}-dlx"), &format!("{name}-parked"))
}

/// This many shards, mapped by the publishers.
pub(crate) fn by_account(count: u32) -> Shards {
    Shards::mapped_by_publisher(count, "account")
}

pub(crate) fn one(t: Topology, n: &str) -> Topology {
    t.queue(n, |q| parked(q.durable().single_active_consumer(), n))
}

pub(crate) fn competing(t: Topology, n: &str) -> Topology {
    t.queue(n, |q| parked(q.durable(), n))
}

pub(crate) fn three(t: Topology, n: &str) -> Topology {
    t.sharded_queue(n, by_account(3), |q| parked(q, n))
}

pub(crate) fn three_by_broker(t: Topology, n: &str) -> Topology {
    t.sharded_queue(n, Shards::mapped_by_broker(3, "account"), |q| parked(q, n))
}

/// Two queues behind an exchange that hashes by the header.
pub(crate) fn two(t: Topology, n: &str) -> Topology {
    let [a, b] = ["a", "b"].map(|side| format!("{n}-{side}"));
    t.queue(&a, |q| parked(q.durable().single_active_consumer(), n))
        .queue(&b, |q| parked(q.durable().single_active_consumer(), n))
        .consistent_hash_exchange(n, |x| x.hash_header("account").queue(&a, 1).queue(&b, 1))
}

pub(crate) fn two_by(t: Topology, n: &str, property: HashProperty) -> Topology {
    let a = format!("{n}-a");
    t.queue(&a, |q| parked(q.durable().single_active_consumer(), n))
        .consistent_hash_exchange(n, |x| x.hash_property(property).queue(&a, 1))
}

// ---- endpoints

pub(crate) fn single(e: EndpointBuilder) -> EndpointBuilder {
    e.ordered_by_header("account")
        .transport_affinity(TransportAffinity::SingleActiveConsumer)
}

pub(crate) fn sharded(e: EndpointBuilder) -> EndpointBuilder {
    e.ordered_by_header("account")
        .transport_affinity(TransportAffinity::Sharded)
}

pub(crate) fn hashed(e: EndpointBuilder) -> EndpointBuilder {
    e.ordered_by_header("account")
        .transport_affinity(TransportAffinity::ConsistentHash)
}

pub(crate) fn local(e: EndpointBuilder) -> EndpointBuilder {
    e.ordered_by_header("account").local_partitioned()
}
