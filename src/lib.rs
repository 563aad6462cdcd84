//! Laneway runs message handlers **in order within a key and in parallel across keys**, from RabbitMQ
//! or from a broker embedded in the process, and keeps that order when handlers fail, processes die and
//! connections drop.
//!
//! ```text
//! publisher ──► queue ──► endpoint ──► lanes ──► handlers        one key: one at a time, in order
//!                            │                                   many keys: at the same time
//!                            └── poison ──► parking place
//! ```
//!
//! # Start here
//! ```
//! use laneway::prelude::*;
//! use serde::{Deserialize, Serialize};
//! use tokio::sync::mpsc;
//!
//! #[derive(Serialize, Deserialize)]
//! struct Moved { device: String, position: u64 }
//! impl Message for Moved { const TYPE: &'static str = "moved"; }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (seen, mut positions) = mpsc::unbounded_channel();
//! let bus = Bus::builder()
//!     .memory(MemoryBroker::new()) // or: .rabbitmq(RabbitMq::at("amqp://localhost:5672"))
//!     .topology(|t| t.queue("moves", |q| q.single_active_consumer().parking("moves-dlx", "moves-parked")))
//!     .endpoint("moves", |e| {
//!         e.ordered_by_header("device")
//!             .transport_affinity(TransportAffinity::SingleActiveConsumer)
//!             .handler(move |moved: Moved, _: Context| {
//!                 let seen = seen.clone();
//!                 async move {
//!                     seen.send(moved.position)?;
//!                     Ok(())
//!                 }
//!             })
//!     })
//!     .publishes::<Moved>(|r| r.to_queue("moves").keyed_by(|moved| moved.device.clone()))
//!     .build()?
//!     .start()
//!     .await?;
//!
//! for position in 1..=3 {
//!     bus.publish(&Moved { device: "drill".into(), position }).await?;
//! }
//! for expected in 1..=3 {
//!     assert_eq!(positions.recv().await, Some(expected));
//! }
//! bus.shutdown(std::time::Duration::from_secs(5)).await;
//! # Ok(())
//! # }
//! ```
//!
//! [`Bus::builder`] describes, [`build`](BusBuilder::build) checks without I/O and lists every problem at
//! once, [`start`](ReadyBus::start) checks the world and begins, [`run_until`](Bus::run_until) ends with a
//! drain.
//!
//! # Guides
//! - [`docs::ordering`]: choosing a key; what order means and does not
//! - [`docs::affinity`]: order across instances: which means to choose, and what each does not give
//! - [`docs::failure`]: attempts, back-off, rules, parking and coming back; what an operator sees
//! - [`docs::shutdown`]: the steps of a drain
//! - [`docs::architecture`]: how the parts work together, for whoever changes them
//! - [`actors`]: the glossary, the supervision tree, the invariants; embedding in an actix `System`
//! - [`transport::memory`]: the embedded broker, also as a test kit; [`testing`]: the order ledger
//!
//! The guarantees, and the limits that stand beside them, are in the README.
//!
//! # Features
//! - `rabbitmq` (default): the RabbitMQ transport.
//! - `tls`: `amqps://` for it.
//! - `sqlite`, `postgres`: durable local queues in the application's own database.

mod builder;
mod bus;
pub mod docs;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub mod durable;
mod endpoint;
mod entries;
mod feed;
mod host;
mod local;
pub mod parked;
pub mod prelude;
mod publish;
mod routing;
mod signal;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub mod store;
pub mod testing;
pub mod topology;
pub mod transport;

pub use builder::{BusBuilder, ConfigError, ReadyBus};
pub use bus::{Bus, BusSnapshot, HoldError, RunError, ShutdownReport};
pub use endpoint::{EndpointBuilder, Strategy, TransportAffinity};
pub use laneway_actors as actors;
pub use laneway_actors::port::{Destination, PublishError};
pub use laneway_actors::{
    Backoff, Cascade, Context, DrainReport, Encoding, EndpointSnapshot, EndpointState, Envelope,
    Event, EventKind, Failure, FailureKind, FailureRule, FailureRules, Fingerprint, Handler,
    HeaderValue, Headers, HoldEnd, HoldOver, Keyed, KeyedMessages, Message, MessageId, OrderingKey,
    Outcome, PoisonMode, PoisonReason, Problem, WaitReason, WaitingKey, WithKey,
};
pub use local::{InvokeError, LocalQueueBuilder, ModuleBuilder};
pub use parked::{Parked, ParkedError};
pub use routing::RouteBuilder;
pub use signal::shutdown_signal;
pub use topology::{QueueSpec, QueueType, ShardMap, Shards, Topology};

/// The programs of the README are compiled as tests.
#[cfg(all(doctest, feature = "sqlite"))]
#[doc = include_str!("../README.md")]
struct Readme;
