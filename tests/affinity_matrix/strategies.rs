//! Strategy against affinity.

use laneway::Strategy;
use laneway::prelude::*;

use crate::shapes::*;
use crate::{End, Row, row};

pub(crate) fn strategies() -> Vec<Row> {
    use End::{Build, Starts};
    const AUTO: &[&str] = &[
        "strategy",
        "how far the order reaches",
        "transport_affinity(SingleActiveConsumer)",
        "local_partitioned()",
    ];
    const NO_EFFECT: &[&str] = &["strategy", "no effect without ordering", "remove it"];
    const EXCLUDE: &[&str] = &["strategy", "exclude each other", "one of them"];
    vec![
        row("not ordered", competing, |e| e, Starts),
        row(
            "not ordered: single active consumer on the queue alone",
            one,
            |e| e,
            Starts,
        ),
        row(
            "not ordered: affinity",
            one,
            |e| e.transport_affinity(TransportAffinity::SingleActiveConsumer),
            Build(NO_EFFECT),
        ),
        row(
            "not ordered: strategy",
            one,
            |e| e.strategy(Strategy::LocalPartitioned),
            Build(NO_EFFECT),
        ),
        row(
            "auto without affinity",
            one,
            |e| e.ordered_by_header("account"),
            Build(AUTO),
        ),
        row(
            "auto in words without affinity",
            one,
            |e| e.ordered_by_header("account").strategy(Strategy::Auto),
            Build(AUTO),
        ),
        row(
            "native without affinity",
            one,
            |e| {
                e.ordered_by_header("account")
                    .strategy(Strategy::TransportNative)
            },
            Build(&[
                "strategy",
                "`TransportNative` needs a `transport_affinity(…)`",
            ]),
        ),
        row(
            "auto with affinity",
            one,
            |e| single(e).strategy(Strategy::Auto),
            Starts,
        ),
        row(
            "native with affinity",
            one,
            |e| single(e).strategy(Strategy::TransportNative),
            Starts,
        ),
        row("local", competing, local, Starts),
        row(
            "local on a queue with a single active consumer",
            one,
            local,
            Starts,
        ),
        row(
            "local with affinity",
            one,
            |e| single(e).local_partitioned(),
            Build(EXCLUDE),
        ),
        row(
            "local on a sharded queue",
            three,
            local,
            Build(&["is a sharded queue", "transport_affinity(Sharded)"]),
        ),
        row(
            "local on a consistent-hash exchange",
            two,
            local,
            Build(&[
                "is a consistent-hash exchange",
                "transport_affinity(ConsistentHash)",
            ]),
        ),
        row(
            "two strategies",
            one,
            |e| {
                single(e)
                    .strategy(Strategy::Auto)
                    .strategy(Strategy::TransportNative)
            },
            Build(&["strategy", "more than once"]),
        ),
        row(
            "two affinities",
            three,
            |e| single(e).transport_affinity(TransportAffinity::Sharded),
            Build(&["strategy", "more than once"]),
        ),
    ]
}
