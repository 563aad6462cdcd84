//! What one enqueuing call will do, decided before the database is asked. Pure.
//!
//! Owns the order of locks and the copies within one batch.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::columns::NewRow;
use super::{NewMessage, Placed, QueueIdentity, QueueOrder, StoreError};

/// Locks of one queue: keys hash to them. Part of the format: two programs that disagree would not
/// exclude each other.
pub(crate) const SLOTS: u64 = 1_024;

/// The most locks of one queue that a call takes singly. PostgreSQL keeps all locks of all transactions in
/// one table of `max_locks_per_transaction × max_connections` entries, 6,400 by default; sixteen writers
/// with a thousand keys each would fill it, and then every transaction of the database fails. A call with
/// more keys locks the whole queue instead.
pub(crate) const MOST_SLOTS: usize = 64;

/// A queue as its store knows it.
#[derive(Debug, Clone)]
pub(crate) struct KnownQueue {
    pub(crate) number: i32,
    pub(crate) identity: QueueIdentity,
}

/// A message of the batch that is to be written.
pub(crate) struct PlannedRow {
    /// Its position in the batch.
    pub(crate) position: usize,
    pub(crate) queue: i32,
    /// Whether its queue has order.
    pub(crate) ordered: bool,
    pub(crate) row: NewRow,
}

/// One lock to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lock {
    pub(crate) queue: i32,
    /// 0 is the queue as a whole; key locks are 1 to [`SLOTS`].
    pub(crate) slot: u32,
    pub(crate) shared: bool,
}

/// What a call will do.
pub(crate) struct Plan {
    /// Messages to insert, in the order of the batch.
    pub(crate) rows: Vec<PlannedRow>,
    /// Messages with the id of an earlier one of the batch, but another body.
    pub(crate) reused: Vec<PlannedRow>,
    /// What is known already of each message of the batch.
    pub(crate) placed: Vec<Option<Placed>>,
    pub(crate) queues: Vec<Arc<str>>,
}

impl Plan {
    pub(crate) fn of(
        batch: &[NewMessage],
        known: &HashMap<Arc<str>, KnownQueue>,
    ) -> Result<Self, StoreError> {
        let mut plan = Self {
            rows: Vec::with_capacity(batch.len()),
            reused: Vec::new(),
            placed: vec![None; batch.len()],
            queues: batch.iter().map(|message| message.queue.clone()).collect(),
        };
        let mut first: HashMap<(i32, String), i64> = HashMap::new();
        for (position, message) in batch.iter().enumerate() {
            let queue = known.get(&message.queue).ok_or_else(|| {
                StoreError::refused(format!("the queue `{}` is not declared", message.queue))
            })?;
            let planned = PlannedRow {
                position,
                queue: queue.number,
                ordered: matches!(queue.identity.order, QueueOrder::Ordered(_)),
                row: NewRow::of(message, queue.identity.order)?,
            };
            match first.get(&(planned.queue, planned.row.id.clone())) {
                None => {
                    first.insert((planned.queue, planned.row.id.clone()), planned.row.digest);
                    plan.rows.push(planned);
                }
                Some(digest) if *digest == planned.row.digest => {
                    plan.placed[position] = Some(Placed::Duplicate);
                }
                Some(_) => {
                    plan.placed[position] = Some(Placed::IdReused);
                    plan.reused.push(planned);
                }
            }
        }
        Ok(plan)
    }

    /// The locks that this call needs.
    #[cfg(feature = "postgres")]
    pub(crate) fn locks(&self) -> Vec<Lock> {
        let rows = self.rows.iter();
        let at_once = rows.filter(|planned| planned.ordered && planned.row.due_at.is_none());
        locks(at_once.filter_map(|planned| Some((planned.queue, planned.row.key_hash?))))
    }

    /// What became of each message. Every position has been filled by now.
    pub(crate) fn placed(self) -> Vec<Placed> {
        let placed = self.placed.into_iter();
        placed.map(|p| p.unwrap_or(Placed::Duplicate)).collect()
    }
}

/// The locks for keys of ordered queues, in the one order in which every call takes them. Messages without a
/// key, and those that get their place later, need none.
pub(crate) fn locks(keys: impl IntoIterator<Item = (i32, i64)>) -> Vec<Lock> {
    let mut slots: BTreeMap<i32, BTreeSet<u32>> = BTreeMap::new();
    for (queue, key_hash) in keys {
        let slot = key_hash.cast_unsigned() % SLOTS + 1;
        slots.entry(queue).or_default().insert(slot as u32);
    }
    let mut locks = Vec::new();
    for (queue, slots) in slots {
        let singly = slots.len() <= MOST_SLOTS;
        locks.push(Lock {
            queue,
            slot: 0,
            shared: singly,
        });
        if singly {
            locks.extend(slots.into_iter().map(|slot| Lock {
                queue,
                slot,
                shared: false,
            }));
        }
    }
    locks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_taken_in_one_order_whatever_the_order_of_the_batch() {
        let keys = [(2, 70), (1, -5), (1, 9), (2, 3), (1, 9)];
        let mut turned = keys;
        turned.reverse();
        let locks = locks(keys);
        assert_eq!(locks, super::locks(turned));
        assert!(locks.is_sorted());
        let slots: Vec<_> = locks.iter().map(|l| (l.queue, l.slot, l.shared)).collect();
        let expected = [
            (1, 0, true),
            (1, 10, false),
            (1, 1020, false),
            (2, 0, true),
            (2, 4, false),
            (2, 71, false),
        ];
        assert_eq!(slots, expected);
    }

    #[test]
    fn a_call_with_many_keys_takes_one_lock() {
        let locks = locks((0..=MOST_SLOTS as i64).map(|hash| (7, hash)));
        assert_eq!(locks.len(), 1);
        assert!(!locks[0].shared);
    }
}
