//! What most programs need: `use laneway::prelude::*;`.

#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use crate::durable::InTransaction;
pub use crate::transport::memory::MemoryBroker;
#[cfg(feature = "rabbitmq")]
pub use crate::transport::rabbitmq::RabbitMq;
pub use crate::{
    Backoff, Bus, Context, Encoding, Failure, Handler, Keyed, Message, OrderingKey, QueueType,
    TransportAffinity, shutdown_signal,
};
