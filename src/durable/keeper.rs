//! Keeps the leases of this process alive, all of them in one statement.
//!
//! Promises that a session is proven alive only by a renewal, as of the moment when it was asked for; and that it ends
//! as soon as its lease is known to be another's.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::link::Link;
use crate::store::{Lease, Store};

/// How long a lease lasts without a renewal. A node that dies is replaced after that.
pub(super) const TTL: Duration = Duration::from_secs(5);
/// How often leases are renewed.
const EVERY: Duration = Duration::from_secs(1);
/// How old a proof may be for an attempt to start: nobody else can have the lease yet, by a margin for clocks that run
/// at different speeds.
pub(super) const PROOF: Duration = Duration::from_millis(4_500);
/// How old a proof may be for an attempt to start that was counted ahead, without asking the database: two renewals may
/// be late. Half of a lease, so that a node that is cut off has stopped long before another one begins.
pub(super) const UNASKED: Duration = Duration::from_millis(2_500);

/// The leases of this process.
#[derive(Default)]
pub(super) struct Keeper {
    held: Mutex<Vec<Held>>,
}

struct Held {
    lease: Lease,
    link: Arc<Link>,
}

impl Keeper {
    /// Renews a lease, which was asked for at `asked`, until it is [let go](Self::let_go).
    pub(super) fn keep(&self, lease: Lease, link: Arc<Link>, asked: Instant) {
        link.state.prove(asked);
        link.state.require_proof_every(PROOF);
        self.lock().push(Held { lease, link });
    }

    /// Whether it was kept until now.
    pub(super) fn let_go(&self, lease: &Lease) -> bool {
        let mut held = self.lock();
        let before = held.len();
        held.retain(|held| held.lease != *lease);
        held.len() < before
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs as long as the store is in use.
    pub(super) async fn run(self: Arc<Self>, store: Arc<dyn Store>) {
        let mut silent_since: Option<Instant> = None;
        loop {
            tokio::time::sleep(EVERY).await;
            let (leases, links): (Vec<_>, Vec<_>) = {
                let held = self.lock();
                let held = held.iter();
                held.map(|held| (held.lease.clone(), Arc::clone(&held.link)))
                    .unzip()
            };
            if leases.is_empty() {
                continue;
            }
            let asked = Instant::now();
            match store.renew(&leases, TTL).await {
                Ok(lost) => {
                    if let Some(since) = silent_since.take() {
                        info!(target: "laneway", store = store.name(), after = ?since.elapsed(), "leases are renewed again");
                    }
                    for (lease, link) in leases.iter().zip(links) {
                        if !lost.contains(lease) {
                            link.state.prove(asked);
                            continue;
                        }
                        // Given back meanwhile, it is lost to nobody. (And let go here, not by its session alone: one
                        // that is no more would be found lost again and again.)
                        if self.let_go(lease) {
                            warn!(target: "laneway", queue = %lease.queue, scope = ?lease.scope, "a lease was lost to another node");
                            link.lose();
                        }
                    }
                }
                Err(error) => {
                    if silent_since.is_none() {
                        warn!(target: "laneway", store = store.name(), %error, "leases cannot be renewed; nothing starts while they may have expired");
                        silent_since = Some(asked);
                    }
                }
            }
        }
    }
}
