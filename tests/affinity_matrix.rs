//! The matrix of strategy, affinity, transport, source of the key, topology, parking and arguments: what
//! starts, and what is refused, at which stage, with words that say what to change. The same table holds for
//! RabbitMQ and for the embedded broker; `docs/affinity.md` shows it to users.

mod support;

use std::time::Duration;

use laneway::prelude::*;
use laneway::topology::{HashProperty, LeaderLocator, Overflow};
use laneway::transport::Transport;
use laneway::{BusBuilder, EndpointBuilder, RouteBuilder, Shards, Strategy, Topology};
use serde::{Deserialize, Serialize};

use support::broker::unique;

#[derive(Serialize, Deserialize)]
struct Paid {
    account: u32,
}

impl Message for Paid {
    const TYPE: &'static str = "paid";
}

async fn idle(_: Paid, _: Context) -> Result<(), Failure> {
    Ok(())
}

/// How a row ends.
#[derive(Clone, Copy)]
enum End {
    /// It starts.
    Starts,
    /// `build()` refuses it, with these words in one problem.
    Build(&'static [&'static str]),
    /// Only the embedded broker refuses it, at `build()`.
    BuildInMemory(&'static [&'static str]),
    /// `start()` refuses it.
    Start(&'static [&'static str]),
}

type Describe = fn(Topology, &str) -> Topology;

/// A bus with one endpoint. Every name begins with the queue's.
struct Row {
    what: &'static str,
    /// What is at the broker before.
    world: Describe,
    topology: Describe,
    endpoint: fn(EndpointBuilder) -> EndpointBuilder,
    route: Option<fn(RouteBuilder<Paid>, &str) -> RouteBuilder<Paid>>,
    end: End,
}

fn row(
    what: &'static str,
    topology: Describe,
    endpoint: fn(EndpointBuilder) -> EndpointBuilder,
    end: End,
) -> Row {
    Row {
        what,
        world: |t, _| t,
        topology,
        endpoint,
        route: None,
        end,
    }
}

/// A row of the sharded queue, ordered by its header, in a world.
fn in_world(what: &'static str, world: Describe, topology: Describe, end: End) -> Row {
    let affinity: fn(EndpointBuilder) -> EndpointBuilder = match what.split(':').next() {
        Some("sharded") => sharded,
        Some("hashed") => hashed,
        _ => single,
    };
    Row {
        world,
        ..row(what, topology, affinity, end)
    }
}

fn routed(
    what: &'static str,
    topology: Describe,
    endpoint: fn(EndpointBuilder) -> EndpointBuilder,
    route: fn(RouteBuilder<Paid>, &str) -> RouteBuilder<Paid>,
    end: End,
) -> Row {
    Row {
        route: Some(route),
        ..row(what, topology, endpoint, end)
    }
}

// ---- topologies

fn parked(queue: laneway::QueueSpec, name: &str) -> laneway::QueueSpec {
    queue.parking(&format!("{name}-dlx"), &format!("{name}-parked"))
}

fn one(t: Topology, n: &str) -> Topology {
    t.queue(n, |q| parked(q.durable().single_active_consumer(), n))
}

fn competing(t: Topology, n: &str) -> Topology {
    t.queue(n, |q| parked(q.durable(), n))
}

fn three(t: Topology, n: &str) -> Topology {
    t.sharded_queue(n, 3, |q| parked(q, n))
}

fn three_by_broker(t: Topology, n: &str) -> Topology {
    t.sharded_queue(n, Shards::mapped_by_broker(3, "account"), |q| parked(q, n))
}

/// Two queues behind an exchange that hashes by the header.
fn two(t: Topology, n: &str) -> Topology {
    let [a, b] = ["a", "b"].map(|side| format!("{n}-{side}"));
    t.queue(&a, |q| parked(q.durable().single_active_consumer(), n))
        .queue(&b, |q| parked(q.durable().single_active_consumer(), n))
        .consistent_hash_exchange(n, |x| x.hash_header("account").queue(&a, 1).queue(&b, 1))
}

fn two_by(t: Topology, n: &str, property: HashProperty) -> Topology {
    let a = format!("{n}-a");
    t.queue(&a, |q| parked(q.durable().single_active_consumer(), n))
        .consistent_hash_exchange(n, |x| x.hash_property(property).queue(&a, 1))
}

// ---- endpoints

fn single(e: EndpointBuilder) -> EndpointBuilder {
    e.ordered_by_header("account")
        .transport_affinity(TransportAffinity::SingleActiveConsumer)
}

fn sharded(e: EndpointBuilder) -> EndpointBuilder {
    e.ordered_by_header("account")
        .transport_affinity(TransportAffinity::Sharded)
}

fn hashed(e: EndpointBuilder) -> EndpointBuilder {
    e.ordered_by_header("account")
        .transport_affinity(TransportAffinity::ConsistentHash)
}

fn local(e: EndpointBuilder) -> EndpointBuilder {
    e.ordered_by_header("account").local_partitioned()
}

fn strategies() -> Vec<Row> {
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

fn affinities() -> Vec<Row> {
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
            |t, n| t.sharded_queue(n, 2, |q| parked(q.quorum().single_active_consumer(), n)),
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
            |t, n| t.sharded_queue(n, 20, |q| parked(q, n)),
            |e| sharded(e).max_in_flight(19),
            Build(&["max_in_flight", "19", "raise it to 20"]),
        ),
        row(
            "sharded: as many credits as shards",
            |t, n| t.sharded_queue(n, 20, |q| parked(q, n)),
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

fn places() -> Vec<Row> {
    use End::{Build, Starts};
    vec![
        row(
            "single: no parking",
            |t, n| t.queue(n, |q| q.single_active_consumer()),
            single,
            Build(&["parking", "`discard_poison()`"]),
        ),
        row(
            "sharded: no parking",
            |t, n| t.sharded_queue(n, 2, |q| q),
            sharded,
            Build(&["parking", "`discard_poison()`"]),
        ),
        row(
            "sharded: discards",
            |t, n| t.sharded_queue(n, 2, |q| q),
            |e| sharded(e).discard_poison(),
            Starts,
        ),
        row(
            "sharded: parks in a shard",
            |t, n| t.sharded_queue(n, 2, |q| q.parking("x", &format!("{n}-001"))),
            sharded,
            Build(&["parks in itself"]),
        ),
        row(
            "hashed: two parking places",
            |t, n| {
                let [a, b] = ["a", "b"].map(|side| format!("{n}-{side}"));
                t.queue(&a, |q| parked(q.single_active_consumer(), &a))
                    .queue(&b, |q| parked(q.single_active_consumer(), &b))
                    .consistent_hash_exchange(n, |x| {
                        x.hash_header("account").queue(&a, 1).queue(&b, 1)
                    })
            },
            hashed,
            Build(&["parking", "different parking places", "the same"]),
        ),
        row(
            "a parking queue that forgets",
            |t, n| {
                one(t, n).queue(&format!("{n}-parked"), |q| {
                    q.durable().message_ttl(Duration::from_secs(60))
                })
            },
            single,
            Build(&["keeps parked messages", "message_ttl(…)", "remove it"]),
        ),
        row(
            "a parking queue that drops",
            |t, n| one(t, n).queue(&format!("{n}-parked"), |q| q.durable().max_length(9)),
            single,
            Build(&["keeps parked messages", "max_length(…)", "RejectPublish"]),
        ),
        row(
            "a parking queue with a limit",
            |t, n| {
                one(t, n).queue(&format!("{n}-parked"), |q| {
                    q.durable().max_length(9).overflow(Overflow::RejectPublish)
                })
            },
            single,
            Starts,
        ),
        row(
            "a parking queue of another type",
            |t, n| one(t, n).queue(&format!("{n}-parked"), |q| q.quorum()),
            single,
            Build(&["keeps parked messages", "of the same type"]),
        ),
    ]
}

fn arguments() -> Vec<Row> {
    use End::{Build, BuildInMemory, Starts};
    const UNSEEN: &[&str] = &["removes messages unseen", "say `accept_unreported_gaps()`"];
    vec![
        row(
            "priorities, ordered",
            |t, n| t.queue(n, |q| parked(q.single_active_consumer().max_priority(5), n)),
            single,
            Build(&["max_priority(…)", "overtake", "do not order"]),
        ),
        row(
            "priorities, ordered locally",
            |t, n| t.queue(n, |q| parked(q.max_priority(5), n)),
            local,
            Build(&["max_priority(…)", "overtake"]),
        ),
        row(
            "priorities, not ordered",
            |t, n| t.queue(n, |q| parked(q.durable().max_priority(5), n)),
            |e| e,
            BuildInMemory(&["does not know x-max-priority"]),
        ),
        row(
            "priorities on shards",
            |t, n| t.sharded_queue(n, 2, |q| parked(q.max_priority(5), n)),
            sharded,
            Build(&["max_priority(…)", "overtake"]),
        ),
        row(
            "time to live",
            |t, n| {
                t.queue(n, |q| {
                    parked(
                        q.single_active_consumer()
                            .message_ttl(Duration::from_secs(9)),
                        n,
                    )
                })
            },
            single,
            Build(UNSEEN),
        ),
        row(
            "time to live, accepted",
            |t, n| {
                t.queue(n, |q| {
                    parked(
                        q.durable()
                            .single_active_consumer()
                            .message_ttl(Duration::from_secs(9))
                            .accept_unreported_gaps(),
                        n,
                    )
                })
            },
            single,
            BuildInMemory(&["does not know x-message-ttl"]),
        ),
        row(
            "expires",
            |t, n| {
                t.queue(n, |q| {
                    parked(
                        q.single_active_consumer().expires(Duration::from_secs(9)),
                        n,
                    )
                })
            },
            single,
            Build(UNSEEN),
        ),
        row(
            "drops its oldest",
            |t, n| t.queue(n, |q| parked(q.single_active_consumer().max_length(9), n)),
            single,
            Build(UNSEEN),
        ),
        row(
            "drops its oldest, by bytes, on shards",
            |t, n| {
                t.sharded_queue(n, 2, |q| {
                    parked(q.max_length_bytes(9).overflow(Overflow::DropHead), n)
                })
            },
            sharded,
            Build(UNSEEN),
        ),
        row(
            "rejects",
            |t, n| {
                t.queue(n, |q| {
                    parked(
                        q.durable()
                            .single_active_consumer()
                            .max_length(9)
                            .overflow(Overflow::RejectPublish),
                        n,
                    )
                })
            },
            single,
            Starts,
        ),
        row(
            "a delivery limit",
            |t, n| {
                t.queue(n, |q| {
                    parked(q.quorum().single_active_consumer().delivery_limit(9), n)
                })
            },
            single,
            Build(UNSEEN),
        ),
        row(
            "a delivery limit, of an existing queue",
            |t, n| {
                t.existing_queue(n, |q| {
                    parked(q.quorum().single_active_consumer().delivery_limit(9), n)
                })
            },
            single,
            Build(UNSEEN),
        ),
        row(
            "accepts nothing",
            |t, n| {
                t.queue(n, |q| {
                    parked(q.single_active_consumer().accept_unreported_gaps(), n)
                })
            },
            single,
            Build(&["accept_unreported_gaps()", "no effect", "remove it"]),
        ),
        row(
            "accepts the broker's default",
            |t, n| {
                t.queue(n, |q| {
                    parked(
                        q.quorum().single_active_consumer().accept_unreported_gaps(),
                        n,
                    )
                })
            },
            single,
            Starts,
        ),
        row(
            "priorities on a quorum queue",
            |t, n| t.queue(n, |q| parked(q.quorum().max_priority(5), n)),
            |e| e,
            Build(&["max_priority(…)", "for classic queues"]),
        ),
        row(
            "lazy quorum queue",
            |t, n| t.queue(n, |q| parked(q.quorum().lazy(), n)),
            |e| e,
            Build(&["lazy()", "for classic queues"]),
        ),
        row(
            "a delivery limit on a classic queue",
            |t, n| t.queue(n, |q| parked(q.delivery_limit(3), n)),
            |e| e,
            Build(&["delivery_limit(…)", "for quorum queues", "`quorum()`"]),
        ),
        row(
            "a leader of a classic queue",
            |t, n| t.queue(n, |q| parked(q.leader_locator(LeaderLocator::Balanced), n)),
            |e| e,
            Build(&["leader_locator(…)", "for quorum queues"]),
        ),
        row(
            "zero",
            |t, n| t.queue(n, |q| parked(q.max_length(0), n)),
            |e| e,
            Build(&["max_length(…)", "at least 1"]),
        ),
        row(
            "less than a millisecond",
            |t, n| t.queue(n, |q| parked(q.message_ttl(Duration::from_micros(9)), n)),
            |e| e,
            Build(&["message_ttl(…)", "at least 1"]),
        ),
        row(
            "overflow of nothing",
            |t, n| t.queue(n, |q| parked(q.overflow(Overflow::RejectPublish), n)),
            |e| e,
            Build(&["overflow(…)", "no effect without `max_length(…)`"]),
        ),
        row(
            "by name, though it has a method",
            |t, n| t.queue(n, |q| parked(q.argument("x-message-ttl", 9), n)),
            |e| e,
            Build(&["x-message-ttl", "use `message_ttl(…)`"]),
        ),
        row(
            "by name",
            |t, n| t.queue(n, |q| parked(q.durable().argument("x-queue-version", 1), n)),
            |e| e,
            Starts,
        ),
    ]
}

fn names() -> Vec<Row> {
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
            |t, n| t.sharded_queue(n, 0, |q| parked(q, n)),
            sharded,
            Build(&["0 shards", "1 to 1000"]),
        ),
        row(
            "too many shards",
            |t, n| t.sharded_queue(n, 1_001, |q| parked(q, n)),
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

fn worlds() -> Vec<Row> {
    use End::{Start, Starts};
    vec![
        // O16
        in_world(
            "single: the queue is there without single active consumer",
            competing,
            one,
            Start(&["topology", "x-single-active-consumer"]),
        ),
        in_world(
            "single: the existing queue is missing",
            |t, _| t,
            |t, n| t.existing_queue(n, |q| parked(q.single_active_consumer(), n)),
            Start(&["does not exist"]),
        ),
        in_world(
            "single: the existing queue is there",
            one,
            |t, n| t.existing_queue(n, |q| parked(q.durable().single_active_consumer(), n)),
            Starts,
        ),
        in_world(
            "single: with another limit",
            |t, n| {
                t.queue(n, |q| {
                    parked(
                        q.durable()
                            .single_active_consumer()
                            .max_length(8)
                            .overflow(Overflow::RejectPublish),
                        n,
                    )
                })
            },
            |t, n| {
                t.queue(n, |q| {
                    parked(
                        q.durable()
                            .single_active_consumer()
                            .max_length(9)
                            .overflow(Overflow::RejectPublish),
                        n,
                    )
                })
            },
            Start(&["x-max-length"]),
        ),
        in_world(
            "single: an exchange of another kind",
            |t, n| one(t, n).exchange(&format!("{n}-x"), |x| x.direct()),
            |t, n| one(t, n).exchange(&format!("{n}-x"), |x| x.topic()),
            Start(&["-x`", "type"]),
        ),
        in_world(
            "single: an existing exchange is missing",
            |t, _| t,
            |t, n| one(t, n).existing_exchange(&format!("{n}-x")),
            Start(&["-x`", "does not exist"]),
        ),
        in_world("sharded: the same", three, three, Starts),
        in_world(
            "sharded: another number",
            three,
            |t, n| t.sharded_queue(n, 4, |q| parked(q, n)),
            Start(&[
                "another number of shards",
                "publisher-3",
                "publisher-4",
                "another name",
            ]),
        ),
        in_world(
            "sharded: another map",
            three,
            three_by_broker,
            Start(&["another map", "publisher-3", "broker-3 by account"]),
        ),
        in_world(
            "sharded: a plain queue before",
            competing,
            three,
            Start(&["exists as a plain queue", "empty and delete it"]),
        ),
        in_world(
            "sharded: a shard that is a plain queue",
            |t, n| t.queue(&format!("{n}-002"), |q| q.durable()),
            three,
            Start(&["-002`", "x-single-active-consumer"]),
        ),
        in_world("hashed: the same", two, two, Starts),
        in_world(
            "hashed: by another header before",
            |t, n| {
                t.queue(&format!("{n}-a"), |q| q.durable().single_active_consumer())
                    .consistent_hash_exchange(n, |x| {
                        x.hash_header("device").queue(&format!("{n}-a"), 1)
                    })
            },
            two,
            Start(&["header device", "header account", "another name"]),
        ),
    ]
}

fn all() -> Vec<Row> {
    [
        strategies(),
        affinities(),
        places(),
        arguments(),
        names(),
        worlds(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn described(row: &Row, builder: BusBuilder, name: &str) -> BusBuilder {
    let topology = (row.topology)(Topology::default(), name);
    let endpoint = row.endpoint;
    let builder = builder
        .topology(|_| topology)
        .endpoint(name, |e| endpoint(e).handler(idle));
    match row.route {
        Some(route) => builder.publishes::<Paid>(|r| route(r, name)),
        None => builder,
    }
}

/// Whether one problem has all the words.
fn assert_says(row: &str, error: &laneway::ConfigError, words: &[&str]) {
    let texts: Vec<_> = error.problems.iter().map(ToString::to_string).collect();
    let one = texts
        .iter()
        .any(|text| words.iter().all(|word| text.contains(word)));
    assert!(one, "{row}: no problem says {words:?}: {texts:#?}");
}

async fn check(row: &Row, transport: impl Transport + Clone, in_memory: bool) {
    let name = unique("matrix");
    let builder = Bus::builder().transport(transport.clone());
    let built = described(row, builder, &name).build();
    let refused_here = match row.end {
        End::Build(words) => Some(words),
        End::BuildInMemory(words) if in_memory => Some(words),
        _ => None,
    };
    let ready = match (built, refused_here) {
        (Err(error), Some(words)) => return assert_says(row.what, &error, words),
        (Ok(_), Some(words)) => panic!("{}: built, but should say {words:?}", row.what),
        (Err(error), None) => panic!("{}: {error}", row.what),
        (Ok(ready), None) => ready,
    };
    let world = (row.world)(Topology::default(), &name);
    transport.apply(&world).await.expect("the world is made");
    match (ready.start().await, row.end) {
        (Err(error), End::Start(words)) => assert_says(row.what, &error, words),
        (Ok(_), End::Start(words)) => panic!("{}: started, but should say {words:?}", row.what),
        (Err(error), _) => panic!("{}: {error}", row.what),
        (Ok(bus), _) => {
            bus.shutdown(Duration::from_secs(5)).await;
        }
    }
}

#[tokio::test]
async fn the_matrix_holds_on_the_embedded_broker() {
    for row in all() {
        check(&row, MemoryBroker::new(), true).await;
    }
}

#[cfg(feature = "rabbitmq")]
#[tokio::test]
async fn the_matrix_holds_on_rabbitmq() {
    let node = tokio::task::spawn_blocking(support::broker::PrivateBroker::start)
        .await
        .expect("started");
    let broker = RabbitMq::at(node.url());
    for row in all() {
        check(&row, broker.clone(), false).await;
    }
}

/// Names that are refused are shown; what a header or a key holds, and how the broker is reached, never is.
#[cfg(feature = "rabbitmq")]
#[test]
fn no_refusal_shows_credentials() {
    let broker = RabbitMq::at("amqp://guest:s3cret-value@127.0.0.1:1");
    for row in all() {
        let builder = Bus::builder().rabbitmq(broker.clone());
        if let Err(error) = described(&row, builder, "orders").build() {
            assert!(
                !error.to_string().contains("s3cret"),
                "{}: {error}",
                row.what
            );
        }
    }
}
