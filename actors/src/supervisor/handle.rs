//! The handle of a running endpoint.

use std::sync::Arc;
use std::time::Duration;

use actix::Addr;
use tokio::sync::watch;

use crate::endpoint::Endpoint;
use crate::key::{Fingerprint, LaneIndex, OrderingKey};
use crate::lane::machine::HoldEnd;
use crate::lane::{LaneAddr, LaneGate, LaneLink, ToLane};
use crate::observe::{EndpointSnapshot, EndpointState, Events};

use super::{AskSupervisor, Drain, EndpointSupervisor, FirstSession};

/// A running endpoint. Cheap to clone; works from any thread and runtime.
#[derive(Clone)]
pub struct EndpointHandle {
    pub(super) addr: Addr<EndpointSupervisor>,
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) lanes: Arc<Vec<Arc<LaneLink>>>,
    pub(super) gates: Arc<Vec<Arc<LaneGate>>>,
    pub(super) state: watch::Receiver<EndpointState>,
}

impl EndpointHandle {
    /// Name of the endpoint.
    pub fn name(&self) -> &str {
        &self.endpoint.config.name
    }

    /// The address of the lane that a key belongs to.
    pub fn lane_of(&self, key: &OrderingKey) -> LaneAddr {
        self.lane(LaneIndex::of(key, self.count()))
            .expect("cannot fail because the index was made for this number of lanes")
    }

    /// The address of a lane by its index; `None` beyond the last.
    pub fn lane(&self, index: LaneIndex) -> Option<LaneAddr> {
        Some(LaneAddr {
            link: Arc::clone(self.lanes.get(index.get())?),
            gate: Arc::clone(self.gates.get(index.get())?),
            count: self.count(),
            endpoint: Arc::clone(&self.endpoint),
        })
    }

    fn count(&self) -> crate::key::LaneCount {
        let count = u32::try_from(self.lanes.len())
            .ok()
            .and_then(std::num::NonZeroU32::new);
        crate::key::LaneCount::new(count.unwrap_or(std::num::NonZeroU32::MIN))
    }

    /// Waits until the first session is open, and so deliveries flow.
    ///
    /// # Errors
    /// Why the first try to open a session failed (the endpoint goes on trying), or that the endpoint
    /// has stopped.
    pub async fn connected(&self) -> Result<(), String> {
        match self.addr.send(FirstSession).await {
            Ok(answer) => answer,
            Err(_) => Err("the endpoint has stopped".to_owned()),
        }
    }

    /// The state of the endpoint now.
    ///
    /// A stopped endpoint answers with its counters and no lanes.
    pub async fn snapshot(&self) -> EndpointSnapshot {
        match self.addr.send(AskSupervisor).await {
            Ok(snapshot) => snapshot,
            Err(_) => self.endpoint_snapshot(),
        }
    }

    fn endpoint_snapshot(&self) -> EndpointSnapshot {
        snapshot_of(&self.endpoint, *self.state.borrow())
    }

    /// What happens at this endpoint (and at every other that was given the same [`Events`]).
    pub fn events(&self) -> &Events {
        &self.endpoint.events
    }

    /// What the endpoint is doing, and every change of it.
    pub fn state(&self) -> watch::Receiver<EndpointState> {
        self.state.clone()
    }

    /// Drains: starts nothing new, lets what runs finish until the deadline, then aborts it; settles,
    /// closes the session, stops. A second call waits for the first.
    ///
    /// # Cancellation
    /// Dropping the future does not stop the drain.
    pub async fn drain(&self, within: Duration) -> DrainReport {
        // An error means that it has drained already.
        self.addr.send(Drain { within }).await.unwrap_or_default()
    }

    /// Ends the hold of a key ([`PoisonMode::BlockKey`](crate::PoisonMode::BlockKey)); whether it was held.
    pub async fn end_hold(&self, key: Fingerprint, end: HoldEnd) -> bool {
        let (done, mut answers) = tokio::sync::mpsc::unbounded_channel();
        // A fingerprint does not tell the lane.
        for lane in self.lanes.iter() {
            let done = done.clone();
            lane.tell(ToLane::EndHold { key, end, done });
        }
        drop(done);
        answers.recv().await.is_some()
    }

    /// Makes the next message of a lane panic in the lane's own code.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn panic_lane(&self, index: LaneIndex) {
        if let Some(lane) = self.lanes.get(index.get()) {
            lane.tell(ToLane::Panic);
        }
    }
}

impl std::fmt::Debug for EndpointHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EndpointHandle")
            .field("name", &self.name())
            .field("state", &*self.state.borrow())
            .finish_non_exhaustive()
    }
}

/// How a drain ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DrainReport {
    /// Deliveries given back to the source unfinished.
    pub given_back: usize,
    /// Attempts that were still running when the session was closed: stuck, or not done by the deadline.
    pub unfinished: usize,
}

pub(super) fn snapshot_of(endpoint: &Endpoint, state: EndpointState) -> EndpointSnapshot {
    let counters = &endpoint.counters;
    EndpointSnapshot {
        endpoint: Arc::clone(&endpoint.config.name),
        state,
        in_flight: 0,
        shards: Vec::new(),
        mapping_changes: 0,
        credits: u32::from(endpoint.config.credits),
        running: endpoint.permits.running() as usize,
        lane_depth: Vec::new(),
        waiting_keys: Vec::new(),
        handled: counters.handled.get(),
        parked: counters.parked.get(),
        discarded: counters.discarded.get(),
        gaps: counters.gaps.get(),
        attempts: counters.attempts.get(),
        key_fallbacks: counters.key_fallbacks.get(),
        keyless: counters.keyless.get(),
        reconnects: counters.reconnects.get(),
    }
}
