//! Affinity against queue, source of the key and credits.

use laneway::prelude::*;
use laneway::topology::HashProperty;

use crate::shapes::*;
use crate::{End, Paid, Row, row};

pub(crate) fn affinities() -> Vec<Row> {
    use End::{Build, Starts};
    vec![
        row("single", one, single, Starts),
        row(
            "single: typed key",
            one,
            |e| single(e).ordered_by(|paid: &Paid| paid.account),
            Starts,
        ),
        row(
            "single: correlation id",
            one,
            |e| {
                e.ordered_by_correlation_id()
                    .transport_affinity(TransportAffinity::SingleActiveConsumer)
            },
            Starts,
        ),
        row(
            "single: queue without it",
            competing,
            single,
            Build(&[
                "transport_affinity",
                "is not declared with `single_active_consumer()`",
            ]),
        ),
        row(
            "single: existing queue, not asserted",
            |t, n| t.existing_queue(n, |q| parked(q, n)),
            single,
            Build(&[
                "cannot be asked of the broker",
                "say `single_active_consumer()`",
                "x-single-active-consumer",
            ]),
        ),
        row(
            "single: sharded queue",
            three,
            single,
            Build(&["use `Sharded` instead of `SingleActiveConsumer`"]),
        ),
        row(
            "single: consistent-hash exchange",
            two,
            single,
            Build(&["use `ConsistentHash` instead of `SingleActiveConsumer`"]),
        ),
        row("sharded", three, sharded, Starts),
        row(
            "sharded: mapped by the broker",
            three_by_broker,
            sharded,
            Starts,
        ),
        row(
            "sharded: saying single_active_consumer is no mistake",
            |t, n| {
                t.sharded_queue(n, by_account(2), |q| {
                    parked(q.quorum().single_active_consumer(), n)
                })
            },
            sharded,
            Starts,
        ),
        row(
            "sharded: plain queue",
            one,
            sharded,
            Build(&["is not a sharded queue", "declare it with `sharded_queue("]),
        ),
        row(
            "sharded: consistent-hash exchange",
            two,
            sharded,
            Build(&["use `ConsistentHash` instead of `Sharded`"]),
        ),
        row(
            "sharded: not ordered",
            three,
            |e| e,
            Build(&["is a sharded queue", "ordered_by_header(…)"]),
        ),
        row(
            "sharded: typed key",
            three,
            |e| sharded(e).ordered_by(|paid: &Paid| paid.account),
            Build(&["ordered_by:", "use `ordered_by_header(…)` alone"]),
        ),
        row(
            "sharded: typed key alone",
            three,
            |e| {
                e.transport_affinity(TransportAffinity::Sharded)
                    .ordered_by(|paid: &Paid| paid.account)
            },
            Build(&["must come from a header", "say `ordered_by_header("]),
        ),
        row(
            "sharded: correlation id as well",
            three,
            |e| sharded(e).ordered_by_correlation_id(),
            Build(&[
                "ordered_by_correlation_id",
                "use `ordered_by_header(…)` alone",
            ]),
        ),
        row(
            "sharded: another header than the broker's map",
            three_by_broker,
            |e| {
                e.ordered_by_header("device")
                    .transport_affinity(TransportAffinity::Sharded)
            },
            Build(&["`device` is not the header", "use `account`"]),
        ),
        row(
            "sharded: fewer credits than shards",
            |t, n| t.sharded_queue(n, by_account(20), |q| parked(q, n)),
            |e| sharded(e).max_in_flight(19),
            Build(&["max_in_flight", "19", "raise it to 20"]),
        ),
        row(
            "sharded: as many credits as shards",
            |t, n| t.sharded_queue(n, by_account(20), |q| parked(q, n)),
            |e| sharded(e).max_in_flight(20),
            Starts,
        ),
        row("hashed", two, hashed, Starts),
        row(
            "hashed: plain queue",
            one,
            hashed,
            Build(&[
                "is not a consistent-hash exchange",
                "declare one with `consistent_hash_exchange`",
            ]),
        ),
        row(
            "hashed: sharded queue",
            three_by_broker,
            hashed,
            Build(&["use `Sharded` instead of `ConsistentHash`"]),
        ),
        row(
            "hashed: not ordered",
            two,
            |e| e,
            Build(&[
                "is a consistent-hash exchange",
                "consume one of its queues by name",
            ]),
        ),
        row(
            "hashed: another header",
            two,
            |e| {
                e.ordered_by_header("device")
                    .transport_affinity(TransportAffinity::ConsistentHash)
            },
            Build(&["`device` is not the header", "use `account`"]),
        ),
        row(
            "hashed: typed key",
            two,
            |e| hashed(e).ordered_by(|paid: &Paid| paid.account),
            Build(&["ordered_by:", "use `ordered_by_header(…)` alone"]),
        ),
        row(
            "hashed: correlation id as well",
            two,
            |e| hashed(e).ordered_by_correlation_id(),
            Build(&["ordered_by_correlation_id", "alone"]),
        ),
        row(
            "hashed by the correlation id",
            |t, n| two_by(t, n, HashProperty::CorrelationId),
            |e| {
                e.ordered_by_correlation_id()
                    .transport_affinity(TransportAffinity::ConsistentHash)
            },
            Starts,
        ),
        row(
            "hashed by the correlation id: header",
            |t, n| two_by(t, n, HashProperty::CorrelationId),
            hashed,
            Build(&[
                "hashes by the correlation id",
                "use `ordered_by_correlation_id()` alone",
            ]),
        ),
        row(
            "hashed by the message id",
            |t, n| two_by(t, n, HashProperty::MessageId),
            hashed,
            Build(&["keeps nothing together", "use `hash_header(…)`"]),
        ),
        row(
            "hashed: a queue without single active consumer",
            |t, n| {
                let a = format!("{n}-a");
                t.queue(&a, |q| parked(q.durable(), n))
                    .consistent_hash_exchange(n, |x| x.hash_header("account").queue(&a, 1))
            },
            hashed,
            Build(&["-a` is not declared with `single_active_consumer()`"]),
        ),
        row(
            "hashed: fewer credits than queues",
            two,
            |e| hashed(e).concurrency(1).max_in_flight(1),
            Build(&["max_in_flight", "raise it to 2"]),
        ),
    ]
}
