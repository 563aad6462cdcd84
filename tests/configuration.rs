//! A configuration holds what it promises or is refused, with every problem at once, its setting and the
//! way out.

use std::time::Duration;

use laneway::prelude::*;
use laneway::{BusBuilder, ConfigError, EndpointBuilder, Problem, QueueSpec};
use serde::{Deserialize, Serialize};

#[path = "support/orders.rs"]
mod support;
#[path = "support/workload.rs"]
mod workload;
use support::{DLX, ORDERS, PARKED, orders, plain_orders, started, stop, within};
use workload::{KEY_HEADER, Numbered};

async fn idle(_: Numbered, _: Context) -> Result<(), Failure> {
    Ok(())
}

fn problems(builder: BusBuilder) -> Vec<Problem> {
    match builder.build() {
        Ok(_) => Vec::new(),
        Err(ConfigError { problems, .. }) => problems,
    }
}

/// Of an ordered endpoint that is valid but for this change.
fn of_endpoint(change: fn(EndpointBuilder) -> EndpointBuilder) -> Vec<Problem> {
    problems(orders(MemoryBroker::new(), |e| change(e.handler(idle))))
}

/// Of an endpoint without order that is valid but for this change.
fn of_plain(change: fn(EndpointBuilder) -> EndpointBuilder) -> Vec<Problem> {
    problems(plain_orders(MemoryBroker::new(), |e| {
        change(e.handler(idle))
    }))
}

/// Of a bus whose queue is described like this.
fn of_queue(describe: fn(QueueSpec) -> QueueSpec) -> Vec<Problem> {
    let builder = Bus::builder()
        .memory(MemoryBroker::new())
        .topology(|t| t.queue(ORDERS, describe))
        .endpoint(ORDERS, |e| {
            e.ordered_by_header(KEY_HEADER)
                .transport_affinity(TransportAffinity::SingleActiveConsumer)
                .handler(idle)
        });
    problems(builder)
}

/// Of a whole bus, after this change to a valid one.
fn of_bus(change: fn(BusBuilder) -> BusBuilder) -> Vec<Problem> {
    problems(change(orders(MemoryBroker::new(), |e| e.handler(idle))))
}

#[derive(Serialize, Deserialize)]
struct Other;
impl Message for Other {
    const TYPE: &'static str = "other";
}

#[test]
fn what_is_valid_is_accepted() {
    assert_eq!(of_endpoint(|e| e), []);
    assert_eq!(of_plain(|e| e), []);
    assert_eq!(
        of_endpoint(|e| e.ordered_by(|m: &Numbered| m.key.clone())),
        []
    );
    assert_eq!(
        of_plain(|e| e.ordered_by_correlation_id().local_partitioned()),
        []
    );
    assert_eq!(
        of_endpoint(|e| e.handler_timeout(None).lanes(3).max_in_flight(65_535)),
        []
    );
}

#[test]
fn every_mistake_is_refused_by_its_setting_with_the_way_out() {
    // (problems, setting, words that the text must have)
    let cases: Vec<(Vec<Problem>, &str, &[&str])> = vec![
        (
            of_endpoint(|e| e.concurrency(0)),
            "concurrency",
            &["0", "65535"],
        ),
        (of_endpoint(|e| e.lanes(0)), "lanes", &["0", "65535"]),
        (of_plain(|e| e.lanes(4)), "lanes", &["no effect", "order"]),
        (
            of_endpoint(|e| e.max_in_flight(3)),
            "max_in_flight",
            &["3", "16"],
        ),
        (
            of_endpoint(|e| e.max_in_flight(70_000)),
            "max_in_flight",
            &["70000", "65535"],
        ),
        (of_endpoint(|e| e.lane_depth(0)), "lane_depth", &["0"]),
        (
            of_endpoint(|e| e.max_delivery_attempts(0)),
            "max_delivery_attempts",
            &["0", "1000"],
        ),
        (
            of_endpoint(|e| e.handler_timeout(Duration::ZERO)),
            "handler_timeout",
            &["None"],
        ),
        (
            of_endpoint(|e| {
                e.backoff(Backoff {
                    factor: 0.1,
                    ..Backoff::default()
                })
            }),
            "backoff",
            &["factor"],
        ),
        (
            of_endpoint(|e| e.ordered_by_header("")),
            "ordered_by_header",
            &["empty"],
        ),
        (
            of_endpoint(|e| e.discard_poison()),
            "discard_poison",
            &["parking", "remove"],
        ),
        (
            of_queue(|q| q.single_active_consumer()),
            "parking",
            &["parking(", "discard_poison()"],
        ),
        (
            of_queue(|q| q.parking(DLX, PARKED)),
            "transport_affinity",
            &["`orders`", "single_active_consumer()"],
        ),
        (
            of_queue(|q| q.single_active_consumer().parking(DLX, ORDERS)),
            "topology",
            &["`orders`", "itself"],
        ),
        (
            of_queue(|q| q.single_active_consumer().parking("", PARKED)),
            "topology",
            &["`orders`", "exchange", "empty"],
        ),
        (
            of_queue(|q| q.single_active_consumer().parking(DLX, "")),
            "topology",
            &["`orders`", "queue", "empty"],
        ),
        (
            of_plain(|e| e.ordered_by_header(KEY_HEADER)),
            "strategy",
            &["transport_affinity", "local_partitioned()"],
        ),
        (
            of_plain(|e| e.local_partitioned()),
            "strategy",
            &["no effect", "remove"],
        ),
        (
            of_endpoint(|e| e.local_partitioned()),
            "strategy",
            &["exclude", "one of them"],
        ),
        (
            of_endpoint(|e| e.handler(idle)),
            "handler",
            &["`numbered`", "remove one"],
        ),
        (
            of_endpoint(|e| e.ordered_by(|_: &Other| 1_u8)),
            "ordered_by",
            &["`other`", "no handler"],
        ),
        (
            of_endpoint(|e| e.untyped::<Other>()),
            "untyped",
            &["`other`", "no handler"],
        ),
        (
            of_endpoint(|e| e.queue("nowhere")),
            "queue",
            &["`nowhere`", "existing_queue"],
        ),
        (
            problems(orders(MemoryBroker::new(), |e| e)),
            "handler",
            &["no handler"],
        ),
        (
            of_bus(|b| b.memory(MemoryBroker::new())),
            "transport",
            &["more than once", "keep one"],
        ),
        (
            of_bus(|b| b.publishes::<Numbered>(|r| r.to_queue("twice"))),
            "publishes::<numbered>",
            &["two destinations", "remove one"],
        ),
        (
            of_bus(|b| b.publishes::<Other>(|r| r)),
            "publishes::<other>",
            &["to_queue", "to_exchange"],
        ),
        (
            of_bus(|b| b.topology(|t| t.queue(ORDERS, |q| q))),
            "topology",
            &["`orders`", "twice"],
        ),
        (
            of_bus(|b| b.endpoint("second", |e| e.queue(ORDERS).handler(idle))),
            "queue",
            &["`orders`", "`second`"],
        ),
    ];
    for (problems, setting, words) in cases {
        let found: Vec<_> = problems.iter().filter(|p| p.setting == setting).collect();
        assert!(!found.is_empty(), "{setting}: {problems:?}");
        let text = found[0].to_string();
        for word in words {
            assert!(text.contains(word), "{word:?} is missing in: {text}");
        }
    }
}

#[test]
fn all_problems_are_listed_at_once_also_without_transport_and_queue() {
    let builder = Bus::builder()
        .endpoint("a", |e| e.concurrency(0))
        .endpoint("b", |e| e.lane_depth(0).lanes(2).handler(idle));
    let error = builder.build().expect_err("full of mistakes");
    let text = error.to_string();
    for part in [
        "transport",
        "endpoint `a`: queue",
        "endpoint `a`: concurrency",
        "endpoint `a`: handler",
        "endpoint `b`: queue",
        "endpoint `b`: lane_depth",
        "endpoint `b`: lanes",
    ] {
        assert!(text.contains(part), "{part:?} is missing in: {text}");
    }
    assert_eq!(error.problems.len(), 7, "{text}");
}

// O16
#[tokio::test]
async fn a_queue_that_exists_with_other_arguments_is_refused_at_start() {
    let broker = MemoryBroker::new();
    let other = laneway::Topology::default().queue(ORDERS, |q| q.durable());
    broker.declare_queue(&other.queues()[0]).expect("empty");
    let ready = orders(broker.clone(), |e| e.handler(idle)).build();
    let error = within("the start", ready.expect("valid").start())
        .await
        .expect_err("the argument differs")
        .to_string();
    for part in ["topology", "`orders`", "x-single-active-consumer"] {
        assert!(error.contains(part), "{part:?} is missing in: {error}");
    }
    assert_eq!(broker.status(ORDERS).sessions, 0);
}

#[tokio::test]
async fn a_queue_that_must_exist_and_does_not_is_refused_at_start() {
    let broker = MemoryBroker::new();
    let ready = Bus::builder()
        .memory(broker)
        .topology(|t| {
            t.existing_queue("theirs", |q| {
                q.single_active_consumer()
                    .parking("their-dlx", "their-parked")
            })
        })
        .endpoint("theirs", |e| e.handler(idle))
        .build()
        .expect("valid");
    let error = within("the start", ready.start())
        .await
        .expect_err("missing")
        .to_string();
    for part in ["`theirs`", "`their-dlx`", "`their-parked`"] {
        assert!(error.contains(part), "{part:?} is missing in: {error}");
    }
}

#[tokio::test]
async fn a_queue_that_is_only_published_to_is_declared_too() {
    let broker = MemoryBroker::new();
    let bus = started(
        orders(broker.clone(), |e| e.handler(idle)).topology(|t| t.queue("only-out", |q| q)),
    )
    .await;
    let message = Numbered {
        key: "a".to_owned(),
        seq: 1,
    };
    bus.publish_to_queue("only-out", &message, None)
        .await
        .expect("declared");
    stop(&bus).await;
}

#[cfg(feature = "rabbitmq")]
#[test]
fn a_wrong_url_is_refused_by_build_without_showing_its_password() {
    let built = Bus::builder()
        .rabbitmq(RabbitMq::at("http://guest:s3cret-value@localhost"))
        .build();
    let text = built.expect_err("not an AMQP URL").to_string();
    assert!(text.contains("RabbitMq::url"), "{text}");
    assert!(text.contains("amqp"), "{text}");
    assert!(!text.contains("s3cret"), "{text}");
}

#[test]
fn a_failure_rule_that_cannot_do_what_it_says_is_refused() {
    let second = Duration::from_secs(1);
    let steep = Backoff {
        factor: 0.5,
        ..Backoff::default()
    };
    let cases: [(Vec<Problem>, &str, &[&str]); 17] = [
        (
            of_endpoint(|e| e.on_failure(|p| p.on_panic().retry_now(5).park())),
            "on_failure",
            &[
                "`on_panic()`",
                "6 attempts",
                "`max_delivery_attempts` is 5",
                "endpoint `orders`",
            ],
        ),
        (
            of_endpoint(|e| {
                e.max_delivery_attempts(2).on_failure(|p| {
                    let second = Duration::from_secs(1);
                    p.on::<std::io::Error>().retry_after([second; 2]).discard()
                })
            }),
            "on_failure",
            &[
                "on::<std::io::error::Error>()",
                "3 attempts",
                "`max_delivery_attempts` is 2",
            ],
        ),
        (
            of_endpoint(|e| {
                e.on_failure(|p| p.on_any().retry_now(4).backoff(Backoff::default()).park())
            }),
            "on_failure",
            &["6 attempts", "`max_delivery_attempts` is 5"],
        ),
        (
            of_bus(|b| b.on_failure(|p| p.on_panic().retry_now(5).park())),
            "on_failure",
            &["endpoint `orders`", "the bus's `on_panic()`", "6 attempts"],
        ),
        (
            of_bus(|b| b.on_failure_of::<Numbered>(|p| p.on_panic().retry_now(5).park())),
            "on_failure_of `numbered`",
            &["endpoint `orders`", "6 attempts"],
        ),
        (
            of_endpoint(|e| e.on_failure(|p| p)),
            "on_failure",
            &["names no rule"],
        ),
        (
            of_bus(|b| b.on_failure(|p| p)),
            "on_failure",
            &["names no rule"],
        ),
        (
            of_bus(|b| b.on_failure_of::<Other>(|p| p.on_any().park())),
            "on_failure_of",
            &["`other`", "add a handler"],
        ),
        (
            of_bus(|b| b.on_failure_of::<Numbered>(|p| p.on_no_handler().park())),
            "on_failure_of `numbered`",
            &["`on_no_handler()`", "can never apply"],
        ),
        (
            of_endpoint(|e| e.on_failure(|p| p.on_undecodable().retry_now(1).park())),
            "on_failure",
            &["`on_undecodable()`", "remove the retries"],
        ),
        (
            of_endpoint(|e| e.on_failure(|p| p.on_panic().retry_after([]).park())),
            "on_failure",
            &["`retry_after` without a retry"],
        ),
        (
            of_endpoint(|e| {
                e.on_failure(|p| p.on_any().park().on_panic().when(|_| true).discard())
            }),
            "on_failure",
            &["`on_panic().when(…)`", "`on_any()` stands before it"],
        ),
        (
            of_endpoint(|e| {
                e.on_failure(|p| p.on_timeout().park())
                    .on_failure(|p| p.on_timeout().discard())
            }),
            "on_failure",
            &["can never apply", "`on_timeout()` stands before it"],
        ),
        (
            of_endpoint(|e| {
                e.on_failure(|p| p.on_any().backoff(Backoff::default()).retry_now(1).park())
            }),
            "on_failure",
            &["`retry_now` after its `backoff`"],
        ),
        (
            problems(orders(MemoryBroker::new(), |e| {
                e.handler(idle)
                    .on_failure(|p| p.on_panic().backoff(steep).park())
            })),
            "on_failure",
            &["`backoff`: factor 0.5"],
        ),
        (
            problems(orders(MemoryBroker::new(), |e| {
                e.handler(idle)
                    .backoff(Backoff::constant(second))
                    .on_failure(|p| p.on_any().park())
            })),
            "backoff",
            &["has no effect", "remove one"],
        ),
        (
            problems(
                Bus::builder()
                    .memory(MemoryBroker::new())
                    .topology(|t| t.queue(ORDERS, |q| q))
                    .endpoint(ORDERS, |e| {
                        e.discard_poison()
                            .handler(idle)
                            .on_failure(|p| p.on_panic().park())
                    }),
            ),
            "on_failure",
            &["`on_panic()` parks", "end the rule with `discard()`"],
        ),
    ];
    for (problems, setting, words) in cases {
        let [problem] = &problems[..] else {
            panic!("one problem: {problems:?}");
        };
        assert_eq!(problem.setting, setting);
        let text = problem.to_string();
        for word in words {
            assert!(text.contains(word), "{word:?} is missing in: {text}");
        }
    }
}

#[test]
fn a_mistake_in_a_rule_of_the_bus_is_listed_once_for_all_endpoints() {
    let found = of_bus(|b| {
        b.topology(|t| t.queue("second", |q| q.parking("second-dlx", "second-parked")))
            .endpoint("second", |e| e.handler(idle))
            .on_failure(|p| p.on_panic().retry_now(0).park())
    });
    assert_eq!(found.len(), 1, "{found:?}");
}

#[test]
fn failure_rules_that_do_what_they_say_are_accepted() {
    assert_eq!(
        of_endpoint(|e| {
            e.on_failure(|p| {
                p.on_panic()
                    .retry_now(4)
                    .park()
                    .on::<std::io::Error>()
                    .when(|e| e.kind() == std::io::ErrorKind::TimedOut)
                    .retry_now(3)
                    .backoff(Backoff::default())
                    .discard()
                    .on::<std::io::Error>()
                    .park()
                    .on_undecodable()
                    .discard()
            })
        }),
        []
    );
    // The endpoint's own rules and those of the bus are different lists.
    let both = of_bus(|b| {
        b.on_failure(|p| p.on_any().park())
            .on_failure_of::<Numbered>(|p| p.on_any().park())
    });
    assert_eq!(both, []);
    let discarding = Bus::builder()
        .memory(MemoryBroker::new())
        .topology(|t| t.queue(ORDERS, |q| q))
        .endpoint(ORDERS, |e| e.discard_poison().handler(idle))
        .on_failure(|p| p.on_panic().park());
    assert_eq!(problems(discarding), []);
}
