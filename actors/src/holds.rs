//! The held keys of an endpoint over all its lanes: how many credits they use, and which is the oldest.
//!
//! Promises that held keys keep at most half the credits for themselves, but for the moment that parking
//! the oldest takes: the other keys always have the rest.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::key::LaneIndex;
use crate::lane::machine::Ticket;
use crate::lane::{LaneLink, ToLane};

/// One held key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeldKey {
    pub(crate) ticket: Ticket,
    pub(crate) since: Instant,
    /// Credits that it uses: its head, and what waits behind it.
    pub(crate) credits: usize,
}

/// Shared by the lanes of an endpoint.
pub(crate) struct Holds {
    limit: usize,
    book: Mutex<Book>,
}

#[derive(Default)]
struct Book {
    lanes: HashMap<LaneIndex, (Arc<LaneLink>, Vec<HeldKey>)>,
    /// Told to end, and not gone yet. One at a time: its end makes room that must be seen before the next.
    ending: Option<(LaneIndex, Ticket)>,
}

impl Holds {
    pub(crate) fn new(credits: u16) -> Self {
        Self {
            limit: usize::from(credits) / 2,
            book: Mutex::default(),
        }
    }

    /// What a lane holds now. Where all lanes together hold too much, the oldest hold is told to end.
    pub(crate) fn report(&self, lane: &Arc<LaneLink>, held: Vec<HeldKey>) {
        let mut book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        let index = lane.index();
        if held.is_empty() {
            book.lanes.remove(&index);
        } else {
            book.lanes.insert(index, (Arc::clone(lane), held));
        }
        let all = || {
            let lanes = book.lanes.iter();
            lanes.flat_map(|(index, (link, held))| held.iter().map(move |key| (*index, link, key)))
        };
        let waits = book
            .ending
            .is_some_and(|ending| all().any(|(index, _, key)| (index, key.ticket) == ending));
        let credits: usize = all().map(|(_, _, key)| key.credits).sum();
        let oldest = all().min_by_key(|(_, _, key)| key.since);
        let ending = match oldest {
            Some((index, link, key)) if !waits && credits > self.limit => {
                Some((index, Arc::clone(link), key.ticket))
            }
            _ => None,
        };
        if let Some((index, link, ticket)) = ending {
            book.ending = Some((index, ticket));
            drop(book);
            link.tell(ToLane::HoldTooMany(ticket));
        }
    }
}
