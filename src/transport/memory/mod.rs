//! The embedded broker: queues, prefetch, redelivery, single active consumer and parking, in memory.
//!
//! **Owns** [`MemoryBroker`] and the four ports over it. **Promises** what RabbitMQ promises to
//! Laneway, held to it by the same conformance suite: a queue's messages arrive in the order of
//! publishing, what a session leaves unsettled goes back to its original place and is marked
//! redelivered, and a publish is confirmed or refused, never lost silently. **Does not** survive the
//! process: every message is gone with the last handle.
//!
//! ```text
//! Publisher ─┐                                            ┌─ Deliveries (stream of batches)
//!            ├─ broker.rs ── live_queue.rs ── queue.rs ───┤
//! Parking  ──┘  names,       lock, wakers     decisions   └─ Session (acknowledge, barrier, close)
//!               exchanges
//! ```
//!
//! It needs no task and no timer of its own and works in any runtime: a publish hands the message to
//! a session under the queue's lock and wakes the stream.
//!
//! # As a test kit
//! The broker also plays the faults of a real one: [`cut_sessions`](MemoryBroker::cut_sessions),
//! [`cut_members`](MemoryBroker::cut_members),
//! [`make_unreachable`](MemoryBroker::make_unreachable),
//! [`remove_exchange`](MemoryBroker::remove_exchange),
//! [`limit_length`](MemoryBroker::limit_length). Tests wait for what they expect with
//! [`wait_empty`](MemoryBroker::wait_empty) and [`wait_until`](MemoryBroker::wait_until), which
//! are driven by events, and look with [`messages`](MemoryBroker::messages).
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! use laneway::actors::port::{Destination, Outgoing};
//! use laneway::topology::Topology;
//! use laneway::transport::{Transport, memory::MemoryBroker};
//!
//! let broker = MemoryBroker::new();
//! let topology = Topology::default().queue("orders", |q| q.single_active_consumer());
//! broker.declare_queue(&topology.queues()[0]).expect("the name is free");
//!
//! broker
//!     .publisher()
//!     .publish(Outgoing {
//!         destination: Destination::Queue("orders".into()),
//!         envelope: Default::default(),
//!         key: None,
//!     })
//!     .await
//!     .expect("the queue exists");
//! assert_eq!(broker.status("orders").ready, 1);
//! # }
//! ```

mod broker;
mod live_queue;
mod membership;
mod parked;
mod parking;
mod publisher;
mod queue;
mod source;
mod topology;

pub use broker::{ExchangeKind, MemoryBroker};
pub use queue::QueueStatus;
