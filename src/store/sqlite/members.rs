//! What the members of a queue's group announce. Like the ends of leases it is known to the one process that has
//! the file: nobody else could read it, and it is old before a disk has it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use laneway_actors::port::{Announcement, MemberId};

/// How long what has expired is kept, so that an announcement which comes late finds the newer one.
const KEEP: Duration = Duration::from_secs(60);

/// The last announcement of each member, by queue, and until when it lasts.
#[derive(Debug, Default)]
pub(super) struct Members(Mutex<HashMap<i32, OfQueue>>);

/// What each member announced last, and until when that lasts.
type OfQueue = BTreeMap<MemberId, (Announcement, Instant)>;

impl Members {
    /// An announcement that comes late does not replace a newer one; one that is repeated lasts longer.
    pub(super) fn announce(&self, queue: i32, announcement: &Announcement, ttl: Duration) {
        let until = Instant::now() + ttl;
        let mut queues = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let members = queues.entry(queue).or_default();
        let last = members.get(&announcement.member);
        if last.is_none_or(|(last, _)| last.sequence <= announcement.sequence) {
            members.insert(announcement.member, (announcement.clone(), until));
        }
    }

    pub(super) fn announcements(&self, queue: i32) -> Vec<Announcement> {
        let now = Instant::now();
        let mut queues = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(members) = queues.get_mut(&queue) else {
            return Vec::new();
        };
        members.retain(|_, (_, until)| now.saturating_duration_since(*until) < KEEP);
        let current = members.values().filter(|(_, until)| *until > now);
        current.map(|(last, _)| last.clone()).collect()
    }
}
