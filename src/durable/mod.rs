//! Durable queues: what runs over a [store](crate::store).
//!
//! ```text
//! bus.publish ──► sink ──┐                          ┌──► lanes ──► attempt ──► handler
//! bus.enqueue_in ────────┤   store   ◄── session ───┤                │
//! handler's transaction ─┘  (tables)     (feed)     └── parking      └── scope: its transaction
//!                               ▲
//!                               └── keeper: leases · promote · prune
//! ```
//! A durable queue is an endpoint like any other: this folder gives the engine a [`Source`](laneway_actors::port::Source)
//! for each shard, a parking place and what surrounds an attempt, and nothing of lanes, order, retries or drains is here.

mod ahead;
mod bus;
mod config;
mod engine;
mod enqueue;
mod feed;
mod keeper;
mod lent;
mod link;
mod membership;
mod queue;
mod retired;
mod scope;
mod session;
mod sink;

use std::any::Any;

pub use bus::DurableStore;
pub use config::StoreConfig;
pub use enqueue::{Batch, EnqueueError, Enqueued};
pub use scope::{HandlerTransaction, InTransaction, TransactionError};

use crate::local::address::ToQueue;
use crate::store::NewMessage;

/// A message as it is stored, and the object it was made of.
fn into_row(message: ToQueue) -> (NewMessage, Option<Box<dyn Any + Send>>) {
    let row = NewMessage {
        queue: message.queue,
        key: message.key,
        envelope: message.envelope,
        due: message.due,
    };
    (row, message.original)
}
