//! What is said of local queues holds or is refused, with every problem at once, its queue, its setting and the way out.

use std::time::Duration;

use laneway::prelude::*;
use laneway::{BusBuilder, ConfigError, LocalQueueBuilder, PoisonMode};
use serde::{Deserialize, Serialize};

macro_rules! messages {
    ($($name:ident $text:literal),*) => {$(
        #[derive(Serialize, Deserialize)]
        struct $name {
            account: u64,
        }
        impl Message for $name {
            const TYPE: &'static str = $text;
        }
        impl Keyed for $name {
            fn key(&self) -> OrderingKey {
                self.account.into()
            }
        }
    )*};
}
messages!(Paid "paid", Billed "billed");

async fn paid(_: Paid, _: Context) -> Result<(), Failure> {
    Ok(())
}

async fn bills(paid: Paid, _: Context) -> Result<Billed, Failure> {
    Ok(Billed {
        account: paid.account,
    })
}

async fn billed(_: Billed, _: Context) -> Result<(), Failure> {
    Ok(())
}

/// (queue or endpoint, setting, what)
type Found = Vec<(String, String, String)>;

fn found(builder: BusBuilder) -> Found {
    let problems = match builder.build() {
        Ok(_) => Vec::new(),
        Err(ConfigError { problems, .. }) => problems,
    };
    let problems = problems.into_iter();
    problems
        .map(|one| (one.endpoint, one.setting, one.what))
        .collect()
}

/// A bus with one handler of `Paid`.
fn bus() -> BusBuilder {
    Bus::builder().handler::<Paid, _>(paid)
}

/// Of a bus with a memory broker and the queue `outside`.
fn with_broker() -> BusBuilder {
    Bus::builder()
        .memory(MemoryBroker::new())
        .topology(|t| t.queue("outside", |q| q.durable()))
}

type Describe = fn(LocalQueueBuilder) -> LocalQueueBuilder;

#[test]
fn what_is_valid_is_accepted() {
    let valid: Vec<BusBuilder> = vec![
        bus(),
        bus()
            .handler::<Paid, _>(paid)
            .separated::<Paid, _>("mail", paid),
        bus()
            .local_queue("paid", |q| q.partitioned(4))
            .keyed::<Paid>(),
        bus()
            .handler::<Billed, _>(billed)
            .local_queues(|q| q.partitioned(4).max_parallel(2))
            .keyed::<(Paid, Billed)>(),
        bus().local_queue("paid", |q| q.partitioned(4).keys_from_publisher()),
        bus().local_queue("paid", |q| q.bound(1).handler_timeout(None)),
        bus()
            .handler::<Billed, _>(billed)
            // For the one that it fits.
            .local_queues(|q| q.max_parallel(3))
            .local_queue("billed", |q| q.sequential()),
        with_broker().handler_with::<Paid, _>(paid, |q| q.on_broker()),
        with_broker().handler_with::<Paid, _>(paid, |q| q.on_broker().discard_poison()),
        with_broker().handler_with::<Paid, _>(paid, |q| {
            q.on_broker()
                .sequential()
                .poison_mode(PoisonMode::block_key())
        }),
        // The topology's own description of a queue that lives there.
        with_broker()
            .topology(|t| t.queue("paid", |q| q.quorum().parking("dlx", "dead")))
            .handler_with::<Paid, _>(paid, |q| q.on_broker()),
        with_broker()
            .handler::<Paid, _>(paid)
            .publishes::<Paid>(|r| r.to_queue("outside").and_local_queues().keyed())
            .local_queue("paid", |q| q.partitioned(2)),
        // One lives there, and one here.
        with_broker()
            .handler_with::<Paid, _>(paid, |q| q.on_broker())
            .separated::<Paid, _>("mail", paid),
        bus()
            .on_failure_of::<Paid>(|p| p.on_timeout().discard())
            .on_failure(|p| p.on_panic().discard()),
    ];
    for (number, builder) in valid.into_iter().enumerate() {
        assert_eq!(found(builder), [], "number {number}");
    }
}

#[test]
fn every_mistake_is_refused_at_its_place_with_the_way_out() {
    let of_queue = |describe: Describe| found(bus().local_queue("paid", describe));
    let of_module = |describe: Describe| {
        found(Bus::builder().module("m", |m| m.handler::<Paid, _>(paid).queues(describe)))
    };
    let of_all = |describe: Describe| found(bus().local_queues(describe));
    // (problems, place, setting, words that the text must have)
    let cases: Vec<(Found, &str, &str, &[&str])> = vec![
        // Settings that do not fit.
        (of_queue(|q| q.bound(0)), "paid", "bound", &["at least 1"]),
        (
            of_queue(|q| q.max_parallel(0)),
            "paid",
            "max_parallel",
            &["65,535"],
        ),
        (
            of_queue(|q| q.sequential().max_parallel(2)),
            "paid",
            "max_parallel",
            &["sequential()"],
        ),
        (of_queue(|q| q.shards(2)), "paid", "shards", &["durable()"]),
        (
            of_queue(|q| q.transactional()),
            "paid",
            "transactional",
            &["durable()"],
        ),
        (
            of_queue(|q| q.keys_from_publisher()),
            "paid",
            "keys_from_publisher",
            &["partitioned"],
        ),
        (
            of_queue(|q| q.discard_poison()),
            "paid",
            "poison_mode/discard_poison",
            &["always discards"],
        ),
        (
            of_queue(|q| q.sequential().poison_mode(PoisonMode::block_key())),
            "paid",
            "poison_mode/discard_poison",
            &["durable()", "on_broker()"],
        ),
        (
            of_queue(|q| q.max_delivery_attempts(0)),
            "paid",
            "max_delivery_attempts",
            &["1000"],
        ),
        (
            of_queue(|q| q.handler_timeout(Duration::ZERO)),
            "paid",
            "handler_timeout",
            &["None"],
        ),
        (
            of_queue(|q| {
                q.backoff(Backoff {
                    factor: 0.1,
                    ..Backoff::default()
                })
            }),
            "paid",
            "backoff",
            &["factor"],
        ),
        (
            of_queue(|q| q.on_failure(|p| p.on_timeout().park())),
            "paid",
            "on_failure",
            &["discard()"],
        ),
        (
            of_queue(|q| q.partitioned(0).keys_from_publisher()),
            "paid",
            "sequential/partitioned",
            &["65,535"],
        ),
        // What is said twice, or not at all.
        (
            of_queue(|q| q.bound(1).bound(2)),
            "paid",
            "local_queue",
            &["`bound`", "twice"],
        ),
        (
            of_queue(|q| q.buffered().on_broker()),
            "paid",
            "local_queue",
            &["twice"],
        ),
        (of_queue(|q| q), "paid", "local_queue", &["says nothing"]),
        (of_module(|q| q), "", "module `m`", &["says nothing"]),
        (
            of_all(|q| q.on_failure(|p| p)),
            "",
            "local_queues",
            &["names no rule"],
        ),
        (
            found(
                bus()
                    .local_queue("paid", |q| q.bound(1))
                    .local_queue("paid", |q| q.bound(2)),
            ),
            "paid",
            "bound",
            &["differently"],
        ),
        (
            found(
                Bus::builder()
                    .handler_with::<Paid, _>(paid, |q| q.bound(1))
                    .handler_with::<Paid, _>(paid, |q| q.bound(2)),
            ),
            "paid",
            "bound",
            &["local_queue("],
        ),
        (
            found(
                Bus::builder()
                    .module("a", |m| m.handler::<Paid, _>(paid).queues(|q| q.bound(1)))
                    .module("b", |m| m.handler::<Paid, _>(paid).queues(|q| q.bound(2))),
            ),
            "paid",
            "bound",
            &["modules"],
        ),
        // What reaches nothing.
        (
            found(bus().local_queue("pade", |q| q.bound(1))),
            "pade",
            "local_queue",
            &["no handler", "`paid`"],
        ),
        (
            found(with_broker().local_queue("paid", |q| q.bound(1))),
            "paid",
            "local_queue",
            &["no local queue at all"],
        ),
        (
            found(with_broker().local_queues(|q| q.bound(1))),
            "",
            "local_queues",
            &["no local handler"],
        ),
        (
            of_all(|q| q.shards(2)),
            "",
            "local_queues",
            &["`shards`", "none"],
        ),
        (
            of_module(|q| q.transactional()),
            "",
            "module `m`",
            &["`transactional`", "none"],
        ),
        (
            found(bus().module("m", |m| m)),
            "",
            "module `m`",
            &["no handlers"],
        ),
        (
            found(bus().module("m", |m| m.queues(|q| q.bound(1)))),
            "",
            "module `m`",
            &["no handlers"],
        ),
        (
            found(bus().keyed::<Billed>()),
            "",
            "key_by::<billed>",
            &["neither"],
        ),
        (
            found(bus().on_failure_of::<Billed>(|p| p.on_timeout().discard())),
            "",
            "on_failure_of",
            &["billed"],
        ),
        // Keys.
        (
            of_queue(|q| q.partitioned(4)),
            "paid",
            "partitioned",
            &["key_by", "keyed", "keys_from_publisher()"],
        ),
        (
            found(
                bus()
                    .keyed::<Paid>()
                    .local_queue("paid", |q| q.partitioned(4).keys_from_publisher()),
            ),
            "paid",
            "keys_from_publisher",
            &["no effect"],
        ),
        (
            found(
                bus()
                    .keyed::<Paid>()
                    .key_by::<Paid, _>(|paid: &Paid| paid.account),
            ),
            "",
            "key_by::<paid>",
            &["two rules"],
        ),
        (
            found(
                with_broker()
                    .handler::<Paid, _>(paid)
                    .keyed::<Paid>()
                    .publishes::<Paid>(|r| r.to_queue("outside").and_local_queues().keyed()),
            ),
            "",
            "publishes::<paid>",
            &["key_by", "remove one"],
        ),
        // Names.
        (
            found(bus().separated::<Billed, _>("paid", billed)),
            "paid",
            "separated",
            &["message type"],
        ),
        (
            found(bus().separated::<Paid, _>("", paid)),
            "",
            "name",
            &["empty"],
        ),
        (
            found(
                bus()
                    .separated::<Paid, _>("a", paid)
                    .separated::<Billed, _>("a", billed),
            ),
            "a",
            "separated",
            &["two names"],
        ),
        (
            found(with_broker().separated::<Paid, _>("outside", paid)),
            "outside",
            "separated",
            &["topology", "on_broker()"],
        ),
        (
            found(
                with_broker()
                    .handler::<Paid, _>(paid)
                    .endpoint("paid", |e| {
                        e.queue("outside")
                            .discard_poison()
                            .handler::<Billed, _>(billed)
                    }),
            ),
            "paid",
            "handler",
            &["endpoint"],
        ),
        (
            found(
                Bus::builder()
                    .module("m", |m| m.handler::<Paid, _>(paid))
                    .module("m", |m| m.handler::<Billed, _>(billed)),
            ),
            "",
            "module `m`",
            &["two modules"],
        ),
        // Routes and the broker.
        (
            found(
                with_broker()
                    .handler::<Paid, _>(paid)
                    .publishes::<Paid>(|r| r.to_queue("outside")),
            ),
            "",
            "publishes::<paid>",
            &["a route wins", "and_local_queues()"],
        ),
        (
            found(with_broker().publishes::<Paid>(|r| r.to_queue("outside").and_local_queues())),
            "",
            "publishes::<paid>",
            &["no local queue"],
        ),
        (
            found(
                with_broker()
                    .handler_with::<Paid, _>(paid, |q| q.on_broker())
                    .publishes::<Paid>(|r| r.to_queue("outside")),
            ),
            "paid",
            "on_broker",
            &["remove one"],
        ),
        (
            found(
                with_broker()
                    .handler::<Paid, _>(paid)
                    .separated::<Paid, _>("mail", paid)
                    .local_queues(|q| q.on_broker()),
            ),
            "mail",
            "on_broker",
            &["one of a type"],
        ),
        (
            found(bus().local_queue("paid", |q| q.on_broker())),
            "",
            "transport",
            &["no transport"],
        ),
        (
            of_queue(|q| q.durable()),
            "paid",
            "durable",
            &["need a store"],
        ),
    ];
    for (number, (problems, place, setting, words)) in cases.into_iter().enumerate() {
        let [(found_place, found_setting, what)] = &problems[..] else {
            panic!("number {number} (`{setting}`) has not one problem: {problems:#?}");
        };
        assert_eq!(
            (&**found_place, &**found_setting),
            (place, setting),
            "number {number}: {what}"
        );
        for word in words {
            assert!(
                what.contains(word),
                "number {number}: `{word}` is not in: {what}"
            );
        }
    }
}

#[test]
fn a_durable_queue_has_no_bound_and_one_without_order_no_shards() {
    for (describe, setting) in [
        ((|q| q.durable().bound(3)) as Describe, "bound"),
        (|q| q.durable().shards(2), "shards"),
        (|q| q.durable().sequential().shards(2), "shards"),
    ] {
        let problems = found(bus().local_queue("paid", describe));
        assert!(
            problems.iter().any(|(_, found, _)| found == setting),
            "{problems:#?}"
        );
    }
}

#[test]
fn a_transaction_cannot_return_what_goes_to_the_transport() {
    let problems = |builder: BusBuilder| {
        let all = found(builder).into_iter();
        let of = all.filter(|(_, setting, _)| setting == "transactional");
        of.map(|(queue, _, what)| (queue, what)).collect::<Vec<_>>()
    };
    let transactional =
        || with_broker().handler_with::<Paid, _>(bills, |q| q.durable().transactional());
    let routed = transactional().publishes::<Billed>(|r| r.to_queue("outside"));
    let moved = transactional().handler_with::<Billed, _>(billed, |q| q.on_broker());
    for builder in [routed, moved] {
        let [(queue, what)] = &problems(builder)[..] else {
            panic!("not one problem");
        };
        assert_eq!(queue, "paid");
        assert!(
            what.contains("`billed`") && what.contains("outbox"),
            "{what}"
        );
    }
    let local = transactional().handler::<Billed, _>(billed);
    assert_eq!(problems(local), []);
}

#[test]
fn all_problems_are_listed_at_once() {
    let problems = found(
        bus()
            .module("empty", |m| m)
            .local_queue("paid", |q| q.bound(0).partitioned(2))
            .local_queue("nobody", |q| q.bound(1))
            .keyed::<Billed>(),
    );
    let mut settings: Vec<_> = problems.iter().map(|(_, setting, _)| &**setting).collect();
    settings.sort_unstable();
    assert_eq!(
        settings,
        [
            "bound",
            "key_by::<billed>",
            "local_queue",
            "module `empty`",
            "partitioned"
        ]
    );
}

#[test]
fn a_retired_queue_has_no_handler_and_a_store() {
    let check = |builder: BusBuilder, way_out: &str| {
        let found = found(builder);
        let of_retired = found
            .iter()
            .filter(|(_, setting, _)| setting == "retired_queue");
        let [(name, _, what)] = &of_retired.collect::<Vec<_>>()[..] else {
            panic!("{found:?}")
        };
        assert!(name == "paid" || name == "gone", "{found:?}");
        assert!(what.contains(way_out), "{found:?}");
    };
    check(bus().retired_queue("gone"), "`store(…)`");
    #[cfg(feature = "sqlite")]
    {
        use laneway::store::sqlite::SqliteConfig;
        let stored = || bus().store(SqliteConfig::file("never-opened.db"));
        assert_eq!(found(stored().retired_queue("gone")), []);
        check(
            stored().retired_queue("gone").retired_queue("gone"),
            "twice",
        );
        check(stored().retired_queue("paid"), "`durable()`");
        let durable = stored().local_queues(|q| q.durable());
        check(durable.retired_queue("paid"), "remove one of them");
    }
}
