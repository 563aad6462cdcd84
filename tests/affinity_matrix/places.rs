//! Parking places, and arguments of queues.

use std::time::Duration;

use laneway::topology::{LeaderLocator, Overflow};

use crate::shapes::*;
use crate::{End, Row, row};

pub(crate) fn places() -> Vec<Row> {
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
            |t, n| t.sharded_queue(n, by_account(2), |q| q),
            sharded,
            Build(&["parking", "`discard_poison()`"]),
        ),
        row(
            "sharded: discards",
            |t, n| t.sharded_queue(n, by_account(2), |q| q),
            |e| sharded(e).discard_poison(),
            Starts,
        ),
        row(
            "sharded: parks in a shard",
            |t, n| t.sharded_queue(n, by_account(2), |q| q.parking("x", &format!("{n}-001"))),
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

pub(crate) fn arguments() -> Vec<Row> {
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
            |t, n| t.sharded_queue(n, by_account(2), |q| parked(q.max_priority(5), n)),
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
                t.sharded_queue(n, by_account(2), |q| {
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
