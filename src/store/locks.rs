//! Which locks an enqueuing takes, and in which order. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::plan::Plan;

/// Locks of one queue: keys hash to them. Part of the format: two programs that disagree would not
/// exclude each other.
pub(crate) const SLOTS: u64 = 1_024;

/// The most locks of one queue that a call takes singly. PostgreSQL keeps all locks of all transactions in
/// one table of `max_locks_per_transaction × max_connections` entries, 6,400 by default; sixteen writers
/// with a thousand keys each would fill it, and then every transaction of the database fails. A call with
/// more keys locks the whole queue instead.
pub(crate) const MOST_SLOTS: usize = 64;

/// One lock to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lock {
    pub(crate) queue: i32,
    /// 0 is the queue as a whole; key locks are 1 to [`SLOTS`].
    pub(crate) slot: u32,
    pub(crate) shared: bool,
}

/// The locks that a call needs.
pub(crate) fn of_plan(plan: &Plan) -> Vec<Lock> {
    let rows = plan.rows.iter();
    let at_once = rows.filter(|planned| planned.ordered && planned.row.due_at.is_none());
    locks(at_once.filter_map(|planned| Some((planned.queue, planned.row.key_hash?))))
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
