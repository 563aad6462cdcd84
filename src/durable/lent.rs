//! Messages that were enqueued as objects in this process, lent to whoever claims their rows here.
//!
//! Saves decoding, and nothing else: what is not found here is decoded from its row. So it is bounded, and forgets
//! what it was given first. An object gets here after the commit that made its row, under the row's number and the
//! message's id. The number alone is not enough: an application may say that it has committed when it has rolled back,
//! and SQLite, whose counter is rolled back too, gives the same number to the next message. That one must not be handled
//! as the object of the other.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use laneway_actors::MessageId;

use crate::store::Sequence;

/// Objects kept at most.
const AT_MOST: usize = 4_096;

type Name = (Arc<str>, Sequence);

#[derive(Default)]
pub(super) struct Lent(Mutex<Objects>);

#[derive(Default)]
struct Objects {
    by_row: HashMap<Name, (MessageId, Box<dyn Any + Send>)>,
    oldest_first: VecDeque<Name>,
}

impl Lent {
    pub(super) fn give(
        &self,
        queue: Arc<str>,
        sequence: Sequence,
        id: MessageId,
        object: Box<dyn Any + Send>,
    ) {
        let mut objects = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let name = (queue, sequence);
        objects.oldest_first.push_back(name.clone());
        objects.by_row.insert(name, (id, object));
        if objects.oldest_first.len() > AT_MOST
            && let Some(oldest) = objects.oldest_first.pop_front()
        {
            objects.by_row.remove(&oldest);
        }
    }

    pub(super) fn take(
        &self,
        queue: &Arc<str>,
        sequence: Sequence,
        id: Option<&MessageId>,
    ) -> Option<Box<dyn Any + Send>> {
        let mut objects = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (own, object) = objects.by_row.remove(&(Arc::clone(queue), sequence))?;
        (Some(&own) == id).then_some(object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn give(lent: &Lent, queue: &Arc<str>, number: i64) {
        let id = MessageId::from(&*number.to_string());
        lent.give(queue.clone(), Sequence(number), id, Box::new(number));
    }

    #[test]
    fn another_message_in_the_place_of_one_that_was_rolled_back_gets_nothing() {
        let lent = Lent::default();
        let queue: Arc<str> = "q".into();
        give(&lent, &queue, 1);
        let other = MessageId::from("other");
        assert!(lent.take(&queue, Sequence(1), Some(&other)).is_none());
    }

    #[test]
    fn it_is_bounded_and_forgets_the_oldest() {
        let lent = Lent::default();
        let queue: Arc<str> = "q".into();
        for number in 0..=AT_MOST as i64 {
            give(&lent, &queue, number);
        }
        assert!(lent.take(&queue, Sequence(0), Some(&"0".into())).is_none());
        let id = MessageId::from(&*AT_MOST.to_string());
        let last = lent.take(&queue, Sequence(AT_MOST as i64), Some(&id));
        assert_eq!(
            last.and_then(|object| object.downcast().ok()),
            Some(Box::new(AT_MOST as i64))
        );
    }
}
