//! What is at the broker before.

use laneway::topology::Overflow;

use crate::shapes::*;
use crate::{End, Row, in_world};

pub(crate) fn worlds() -> Vec<Row> {
    use End::{Start, Starts};
    vec![
        in_world(
            "single: a sharded queue before",
            three,
            one,
            Start(&["is a sharded queue at the broker", "use `sharded_queue`"]),
        ),
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
            |t, n| t.sharded_queue(n, by_account(4), |q| parked(q, n)),
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
