//! Messages that were enqueued as objects in this process, lent to whoever claims their rows here.
//!
//! Saves decoding, and nothing else: what is not found here is decoded from its row. So it is bounded, and forgets
//! what it was given first. An object gets here only after the commit that made its row, under the row's number,
//! which is never used again.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use crate::store::Sequence;

/// Objects kept at most.
const AT_MOST: usize = 4_096;

type Name = (Arc<str>, Sequence);

#[derive(Default)]
pub(super) struct Lent(Mutex<Objects>);

#[derive(Default)]
struct Objects {
    by_row: HashMap<Name, Box<dyn Any + Send>>,
    oldest_first: VecDeque<Name>,
}

impl Lent {
    pub(super) fn give(&self, queue: Arc<str>, sequence: Sequence, object: Box<dyn Any + Send>) {
        let mut objects = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let name = (queue, sequence);
        objects.oldest_first.push_back(name.clone());
        objects.by_row.insert(name, object);
        if objects.oldest_first.len() > AT_MOST
            && let Some(oldest) = objects.oldest_first.pop_front()
        {
            objects.by_row.remove(&oldest);
        }
    }

    pub(super) fn take(&self, queue: &Arc<str>, sequence: Sequence) -> Option<Box<dyn Any + Send>> {
        let mut objects = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        objects.by_row.remove(&(Arc::clone(queue), sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_bounded_and_forgets_the_oldest() {
        let lent = Lent::default();
        let queue: Arc<str> = "q".into();
        for number in 0..=AT_MOST as i64 {
            lent.give(queue.clone(), Sequence(number), Box::new(number));
        }
        assert!(lent.take(&queue, Sequence(0)).is_none());
        let last = lent.take(&queue, Sequence(AT_MOST as i64));
        assert_eq!(
            last.and_then(|object| object.downcast().ok()),
            Some(Box::new(AT_MOST as i64))
        );
    }
}
