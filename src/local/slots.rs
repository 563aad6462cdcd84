//! The bound of a buffered queue: hard for publishers from outside, soft for handlers.
//!
//! Owns the count of places. Who must wait takes a [`Slot`] first; who must not wait takes a place if there is one, and
//! goes into debt otherwise. Places that become free pay the debt off before anybody from outside is let in: so the
//! outside never adds to what handlers have put beyond the bound.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The places of one queue.
pub(super) struct Slots {
    free: Arc<Semaphore>,
    /// Messages beyond the bound.
    debt: Mutex<usize>,
}

/// A place that is taken and not filled yet. Dropped, it is free again.
pub(crate) struct Slot {
    slots: Arc<Slots>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Slots {
    pub(super) fn new(bound: usize) -> Arc<Self> {
        Arc::new(Self {
            free: Arc::new(Semaphore::new(bound.min(Semaphore::MAX_PERMITS))),
            debt: Mutex::new(0),
        })
    }

    fn debt(&self) -> MutexGuard<'_, usize> {
        self.debt.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a place, first come, first served. `None`: the queue is closed.
    ///
    /// # Cancellation
    /// Dropping the future takes nothing.
    pub(super) async fn wait(self: Arc<Self>) -> Option<Slot> {
        let permit = Arc::clone(&self.free).acquire_owned().await.ok()?;
        Some(Slot {
            slots: self,
            permit: Some(permit),
        })
    }

    /// Takes a place, beyond the bound if need be.
    pub(super) fn take(&self) {
        // Under the lock: a place that becomes free now either is taken here or pays for this one.
        let mut debt = self.debt();
        match self.free.try_acquire() {
            Ok(permit) => permit.forget(),
            Err(_) => *debt += 1,
        }
    }

    /// So many messages have ended.
    pub(super) fn release(&self, ended: usize) {
        let mut debt = self.debt();
        let paid = ended.min(*debt);
        *debt -= paid;
        self.free.add_permits(ended - paid);
    }

    /// Nobody waits from now on.
    pub(super) fn close(&self) {
        self.free.close();
    }
}

impl Slot {
    /// A message is in it now; it is released when that has ended.
    pub(super) fn fill(mut self) {
        if let Some(permit) = self.permit.take() {
            permit.forget();
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(permit) = self.permit.take() {
            permit.forget();
            // Not given back as it is: it may have to pay for a handler's message.
            self.slots.release(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    fn wait(slots: &Arc<Slots>) -> Option<Slot> {
        Arc::clone(slots).wait().now_or_never().flatten()
    }

    #[tokio::test]
    async fn who_waits_gets_a_place_when_one_is_free() {
        let slots = Slots::new(1);
        wait(&slots).expect("free").fill();
        let mut waiting = Box::pin(Arc::clone(&slots).wait());
        assert!((&mut waiting).now_or_never().is_none());
        slots.release(1);
        assert!(waiting.await.is_some());
    }

    #[tokio::test]
    async fn what_exceeds_the_bound_is_paid_off_before_anybody_is_let_in() {
        let slots = Slots::new(2);
        (0..5).for_each(|_| slots.take());
        for left in [4, 3, 2] {
            slots.release(1);
            assert!(wait(&slots).is_none(), "{left} of 2 are there");
        }
        slots.release(1);
        assert!(wait(&slots).is_some());
    }

    #[tokio::test]
    async fn a_place_that_was_not_filled_is_free_again_and_pays_too() {
        let slots = Slots::new(1);
        let held = wait(&slots).expect("free");
        slots.take();
        drop(held);
        assert!(
            wait(&slots).is_none(),
            "the handler's message has the place"
        );
        slots.release(1);
        drop(wait(&slots).expect("free"));
        assert!(wait(&slots).is_some());
    }

    #[tokio::test]
    async fn a_waiter_that_goes_away_takes_nothing() {
        let slots = Slots::new(1);
        wait(&slots).expect("free").fill();
        let mut gone = Box::pin(Arc::clone(&slots).wait());
        assert!((&mut gone).now_or_never().is_none());
        slots.release(1);
        drop(gone);
        assert!(wait(&slots).is_some());
    }

    #[tokio::test]
    async fn closing_ends_the_waiting() {
        let slots = Slots::new(1);
        slots.take();
        let mut waiting = Box::pin(Arc::clone(&slots).wait());
        assert!((&mut waiting).now_or_never().is_none());
        slots.close();
        assert!(waiting.await.is_none());
    }
}
