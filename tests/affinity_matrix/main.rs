//! The matrix of strategy, affinity, transport, source of the key, topology, parking and arguments: what
//! starts, and what is refused, at which stage, with words that say what to change. The same table holds for
//! RabbitMQ and for the embedded broker; `docs/affinity.md` shows it to users.

mod affinities;
#[allow(dead_code, unreachable_pub, reason = "this file uses its part")]
#[path = "../support/broker.rs"]
mod broker;
mod names;
mod places;
mod shapes;
mod strategies;
mod worlds;

use std::time::Duration;

use laneway::prelude::*;
use laneway::transport::Transport;
use laneway::{BusBuilder, EndpointBuilder, RouteBuilder, Topology};
use serde::{Deserialize, Serialize};

use broker::unique;
use shapes::{hashed, sharded, single};

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
type Route = fn(RouteBuilder<Paid>, &str) -> RouteBuilder<Paid>;

/// A bus with one endpoint. Every name begins with the queue's.
struct Row {
    what: &'static str,
    /// What is at the broker before.
    world: Describe,
    topology: Describe,
    endpoint: fn(EndpointBuilder) -> EndpointBuilder,
    route: Option<Route>,
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
    route: Route,
    end: End,
) -> Row {
    Row {
        route: Some(route),
        ..row(what, topology, endpoint, end)
    }
}

fn all() -> Vec<Row> {
    [
        strategies::strategies(),
        affinities::affinities(),
        places::places(),
        places::arguments(),
        names::names(),
        worlds::worlds(),
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
    let node = tokio::task::spawn_blocking(broker::PrivateBroker::start)
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
