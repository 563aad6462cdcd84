//! Laneway runs message handlers in order within a key and in parallel across keys.

pub mod testing;
pub mod topology;
pub mod transport;

pub use laneway_actors as actors;
