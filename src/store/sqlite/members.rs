//! What the members of a queue's group announce. Like the ends of leases it is known to the one process that has
//! the file: nobody else could read it, and it is old before a disk has it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use laneway_actors::port::{Announcement, MemberId};

/// How long what has expired is kept, so that an announcement which comes late finds the newer one.
const KEEP: Duration = Duration::from_secs(60);

/// The last announcement of each member of each queue.
#[derive(Debug, Default)]
pub(super) struct Members(Mutex<BTreeMap<(i32, MemberId), Last>>);

#[derive(Debug)]
struct Last {
    announcement: Announcement,
    until: Instant,
}

impl Members {
    /// An announcement that comes late does not replace a newer one; one that is repeated lasts longer.
    pub(super) fn announce(&self, queue: i32, announcement: &Announcement, ttl: Duration) {
        let place = (queue, announcement.member);
        let mut members = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = members
            .get(&place)
            .is_none_or(|last| last.announcement.sequence <= announcement.sequence);
        if newest {
            let last = Last {
                announcement: announcement.clone(),
                until: Instant::now() + ttl,
            };
            members.insert(place, last);
        }
    }

    pub(super) fn announcements(&self, queue: i32) -> Vec<Announcement> {
        let now = Instant::now();
        let mut members = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        members.retain(|_, last| now.saturating_duration_since(last.until) < KEEP);
        let current = members
            .iter()
            .filter(|((of, _), last)| *of == queue && last.until > now);
        current.map(|(_, last)| last.announcement.clone()).collect()
    }
}
