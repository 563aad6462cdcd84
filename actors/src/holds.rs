//! The held keys of an endpoint over all its lanes: how many credits they use, and which is the oldest.
//!
//! Promises that held keys keep at most half the credits of their shard for themselves, but for the moment
//! that parking the oldest takes: the other keys always have the rest.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::key::LaneIndex;
use crate::lane::machine::Ticket;
use crate::lane::{LaneLink, ToLane};

/// One held key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeldKey {
    pub(crate) ticket: Ticket,
    pub(crate) shard: usize,
    pub(crate) since: Instant,
    /// Credits that it uses: its head, and what waits behind it.
    pub(crate) credits: usize,
}

/// Shared by the lanes of an endpoint.
pub(crate) struct Holds {
    /// Half the credits of each shard.
    limits: Vec<usize>,
    book: Mutex<Book>,
}

#[derive(Default)]
struct Book {
    lanes: HashMap<LaneIndex, (Arc<LaneLink>, Vec<HeldKey>)>,
    /// Told to end, and not gone yet, by shard. One at a time: its end makes room that must be seen before the
    /// next.
    ending: HashMap<usize, (LaneIndex, Ticket)>,
}

impl Holds {
    /// For shards with these credits.
    pub(crate) fn new(credits: &[u16]) -> Self {
        let half = |credits: &u16| usize::from(*credits) / 2;
        Self {
            limits: credits.iter().map(half).collect(),
            book: Mutex::default(),
        }
    }

    /// What a lane holds now. Where all lanes together hold too much of a shard, its oldest hold is told to
    /// end.
    pub(crate) fn report(&self, lane: &Arc<LaneLink>, held: Vec<HeldKey>) {
        let mut guard = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        let book = &mut *guard;
        let index = lane.index();
        // Also those that this lane held before: their end makes room for the next.
        let before = book.lanes.remove(&index);
        let before = before.iter().flat_map(|(_, held)| held);
        let shards: BTreeSet<_> = before.chain(&held).map(|key| key.shard).collect();
        if !held.is_empty() {
            book.lanes.insert(index, (Arc::clone(lane), held));
        }
        let mut told = Vec::new();
        for shard in shards {
            if let Some((link, ticket)) = book.to_end(shard, self.limits[shard]) {
                book.ending.insert(shard, (link.index(), ticket));
                told.push((link, ticket));
            }
        }
        drop(guard);
        for (link, ticket) in told {
            link.tell(ToLane::HoldTooMany(ticket));
        }
    }
}

impl Book {
    /// The oldest hold of a shard, if its holds use more credits than `limit` and none of them is ending.
    fn to_end(&self, shard: usize, limit: usize) -> Option<(Arc<LaneLink>, Ticket)> {
        let held = || {
            let lanes = self.lanes.values();
            let all = lanes.flat_map(|(link, held)| held.iter().map(move |key| (link, key)));
            all.filter(|(_, key)| key.shard == shard)
        };
        let ending = self.ending.get(&shard);
        let waits = held().any(|(link, key)| ending == Some(&(link.index(), key.ticket)));
        let credits: usize = held().map(|(_, key)| key.credits).sum();
        if waits || credits <= limit {
            return None;
        }
        let (link, oldest) = held().min_by_key(|(_, key)| key.since)?;
        Some((Arc::clone(link), oldest.ticket))
    }
}
