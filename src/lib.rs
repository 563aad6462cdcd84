//! Laneway runs message handlers **in order within a key and in parallel across keys**, and keeps that
//! order when handlers fail, processes die and connections drop.

mod bus;
mod endpoint;
mod host;
pub mod prelude;
mod publish;
mod routing;
mod signal;
pub mod testing;
pub mod topology;
pub mod transport;

pub use bus::{Bus, BusBuilder, BusSnapshot, ConfigError, ReadyBus, RunError, ShutdownReport};
pub use endpoint::{EndpointBuilder, TransportAffinity};
pub use laneway_actors as actors;
pub use laneway_actors::port::{Destination, PublishError};
pub use laneway_actors::{
    Backoff, Context, DrainReport, Encoding, EndpointSnapshot, EndpointState, Envelope, Event,
    EventKind, Failure, FailureKind, Fingerprint, Handler, HeaderValue, Headers, Keyed, Message,
    MessageId, OrderingKey, Outcome, PoisonReason, Problem, WaitReason, WaitingKey,
};
pub use routing::RouteBuilder;
pub use signal::shutdown_signal;
pub use topology::{QueueSpec, QueueType, Topology};
