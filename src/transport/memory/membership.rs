//! Groups of instances that share one embedded broker.
//!
//! Owns the registry of groups. A group is there as soon as somebody joins it; several buses on one
//! [`MemoryBroker`] meet in it. Announcing reaches everybody before it returns.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use laneway_actors::port::{Announcement, Announcer, Joined, Membership, SourceError};
use tokio::sync::broadcast::{Sender, WeakSender};

use super::broker::MemoryBroker;
use super::topology::refused;
use crate::transport::announcements::{WAITING_AT_MOST, heard};

/// The groups of a broker by name. The one sender of a group is here: taking it away ends the places
/// of all its members.
#[derive(Default)]
pub(super) struct Groups(Mutex<HashMap<Arc<str>, Sender<Announcement>>>);

impl Groups {
    fn join(&self, group: &Arc<str>) -> Joined {
        let mut groups = self.lock();
        let sender = groups
            .entry(Arc::clone(group))
            .or_insert_with(|| Sender::new(WAITING_AT_MOST));
        Joined {
            heard: heard(sender.subscribe()),
            announcer: Arc::new(MemoryAnnouncer(sender.downgrade())),
        }
    }

    /// Ends all places of a group.
    pub(super) fn cut(&self, group: &str) {
        let cut = self.lock().remove(group);
        // Outside of the lock: it wakes the members.
        drop(cut);
    }

    /// Ends all places of all groups.
    pub(super) fn cut_all(&self) {
        let cut = std::mem::take(&mut *self.lock());
        drop(cut);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, Sender<Announcement>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A group of instances on the embedded broker, and the queues that are its shards.
pub(super) struct MemoryMembership {
    broker: MemoryBroker,
    group: Arc<str>,
    queues: Arc<[String]>,
}

impl MemoryMembership {
    pub(super) fn new(broker: MemoryBroker, group: &str, queues: &[String]) -> Self {
        Self {
            broker,
            group: group.into(),
            queues: queues.into(),
        }
    }

    fn look(&self, shards: BTreeSet<usize>) -> Result<BTreeSet<usize>, SourceError> {
        let mut deserted = BTreeSet::new();
        for shard in shards {
            let queue = self.queues.get(shard);
            let queue = queue.ok_or_else(|| refused(format!("there is no shard {shard}")))?;
            if self.broker.existing(queue)?.sessions == 0 {
                deserted.insert(shard);
            }
        }
        Ok(deserted)
    }
}

impl Membership for MemoryMembership {
    fn name(&self) -> &str {
        &self.group
    }

    fn join(&self) -> BoxFuture<'_, Result<Joined, SourceError>> {
        async { self.broker.join(|groups| groups.join(&self.group)) }.boxed()
    }

    fn unattended(
        &self,
        shards: BTreeSet<usize>,
    ) -> BoxFuture<'_, Result<BTreeSet<usize>, SourceError>> {
        async move { self.look(shards) }.boxed()
    }
}

struct MemoryAnnouncer(WeakSender<Announcement>);

impl Announcer for MemoryAnnouncer {
    fn announce(&self, announcement: Announcement) -> BoxFuture<'static, Result<(), SourceError>> {
        let group = self.0.upgrade();
        async move {
            let group = group.ok_or_else(|| SourceError::Unavailable {
                what: "the place in the group was lost".to_owned(),
                source: None,
            })?;
            // An error means that nobody listens, not even who speaks.
            let _ = group.send(announcement);
            Ok(())
        }
        .boxed()
    }
}
