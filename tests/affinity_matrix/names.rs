//! Names that stand for two things, and ways past the entry.

use laneway::prelude::*;
use laneway::topology::HashProperty;

use crate::shapes::*;
use crate::{End, Row, routed, row};

pub(crate) fn names() -> Vec<Row> {
    use End::Build;
    vec![
        row(
            "a plain queue of the sharded one's name",
            |t, n| competing(three(t, n), n),
            sharded,
            Build(&["topology", "is a plain queue and a sharded queue"]),
        ),
        row(
            "a plain queue of a shard's name",
            |t, n| three(t, n).queue(&format!("{n}-001"), |q| q),
            sharded,
            Build(&["is a shard of", "remove the plain one"]),
        ),
        row(
            "two maps over the same queues",
            |t, n| three_by_broker(three(t, n), n),
            sharded,
            Build(&["two maps over the same queues"]),
        ),
        row(
            "a shard consumed by itself",
            three,
            |e| sharded(e).queue("nowhere-000"),
            Build(&["`nowhere-000` is not in the topology"]),
        ),
        row(
            "no shards",
            |t, n| t.sharded_queue(n, by_account(0), |q| parked(q, n)),
            sharded,
            Build(&["0 shards", "1 to 1000"]),
        ),
        row(
            "too many shards",
            |t, n| t.sharded_queue(n, by_account(1_001), |q| parked(q, n)),
            sharded,
            Build(&["1001 shards", "1 to 1000"]),
        ),
        row(
            "an exchange of the sharded queue's name",
            |t, n| three(t, n).exchange(n, |x| x.fanout()),
            sharded,
            Build(&["belongs to", "rename one"]),
        ),
        row(
            "an exchange of the members' name",
            |t, n| three(t, n).exchange(&format!("{n}.members"), |x| x.fanout()),
            sharded,
            Build(&["belongs to", "rename one"]),
        ),
        row(
            "an exchange twice",
            |t, n| one(t, n).exchange("x", |x| x).exchange("x", |x| x),
            single,
            Build(&["exchange `x` is named twice"]),
        ),
        row(
            "a binding of a queue that is nowhere",
            |t, n| one(t, n).exchange("x", |x| x).bind("gone", "x", ""),
            single,
            Build(&["`gone`", "declare it with `queue`"]),
        ),
        row(
            "a binding to an exchange that is nowhere",
            |t, n| one(t, n).bind(n, "gone", ""),
            single,
            Build(&["`gone`", "`existing_exchange`"]),
        ),
        row(
            "a binding to a shard",
            |t, n| {
                three(t, n)
                    .exchange("x", |x| x)
                    .bind(&format!("{n}-000"), "x", "")
            },
            sharded,
            Build(&["is the only entry", "do not bind it"]),
        ),
        row(
            "a hash of nothing",
            |t, n| one(t, n).consistent_hash_exchange("x", |x| x.queue(n, 1)),
            single,
            Build(&["must say once by what it hashes"]),
        ),
        row(
            "a hash over nothing",
            |t, n| one(t, n).consistent_hash_exchange("x", |x| x.hash_header("account")),
            single,
            Build(&["has no queue", "`queue(name, weight)`"]),
        ),
        row(
            "a queue without weight",
            |t, n| {
                one(t, n).consistent_hash_exchange("x", |x| x.hash_header("account").queue(n, 0))
            },
            single,
            Build(&["weight 0", "at least 1"]),
        ),
        row(
            "a direct exchange that hashes",
            |t, n| one(t, n).exchange("x", |x| x.hash_header("account")),
            single,
            Build(&["does not hash", "`consistent_hash()`"]),
        ),
        routed(
            "published to one shard",
            three,
            sharded,
            |r, n| r.to_queue(&format!("{n}-001")),
            Build(&["only entry", "publish to"]),
        ),
        routed(
            "published past the map",
            three,
            sharded,
            |r, n| r.to_exchange(n, "1"),
            Build(&["is the entry of a sharded queue", "to_queue("]),
        ),
        routed(
            "published to a queue behind the hash",
            two,
            hashed,
            |r, n| r.to_queue(&format!("{n}-a")),
            Build(&["only entry", "publish to"]),
        ),
        routed(
            "published under another header",
            three,
            sharded,
            |r, n| {
                r.to_queue(n)
                    .key_header("device")
                    .keyed_by(|paid| paid.account)
            },
            Build(&["`device` is not the header", "use `account`"]),
        ),
        routed(
            "published with a key to a hash of a property",
            |t, n| two_by(t, n, HashProperty::CorrelationId),
            |e| {
                e.ordered_by_correlation_id()
                    .transport_affinity(TransportAffinity::ConsistentHash)
            },
            |r, n| r.to_queue(n).keyed_by(|paid| paid.account),
            Build(&["remove `keyed_by`", "`hash_header(…)`"]),
        ),
        routed(
            "published by the key",
            three,
            sharded,
            |r, n| r.to_queue(n).keyed_by(|paid| paid.account),
            End::Starts,
        ),
    ]
}
