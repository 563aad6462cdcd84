//! Local queues: messages from one part of a program to others, handled later, each part by its own handlers, with its own
//! retries.
//!
//! **Owns** which queues follow from the handlers, what is said of each, and which of them a message goes to. A local
//! queue is an endpoint like any other: order, retries, failure rules, events and drains are those of the runtime, and
//! nothing of that is here. **Does not** store anything durably.
//!
//! ```text
//! describe ──► settings (merge) ──► plan (queues, problems) ──► endpoint (specs)
//!                                                     └───────► address (type → subscribers) ◄── publishing
//! ```

pub(crate) mod address;
mod buffered;
mod bus_builder;
mod describe;
pub(crate) mod durable;
pub(crate) mod endpoint;
mod invoke;
pub(crate) mod plan;
pub(crate) mod settings;
mod slots;

pub use describe::{LocalQueueBuilder, ModuleBuilder};
pub use invoke::InvokeError;

pub(crate) use address::LocalQueues;
pub(crate) use invoke::Invocables;
