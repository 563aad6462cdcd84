//! Other durable queues, each by its public API in the best configuration that its documentation describes;
//! `notes.md` says where.

pub(super) mod awa;
pub(super) mod graphile_worker;
pub(super) mod riverqueue;

/// Connections of each peer.
const CONNECTIONS: u32 = 20;
/// How long stopping may take.
const STOP: std::time::Duration = std::time::Duration::from_secs(30);
