//! The rounds: events are published and handled, and an operator looks after held keys.

use std::sync::Arc;

use futures::future::{join, join_all};
use laneway::actors::port::{Outgoing, Publisher};
use laneway::prelude::*;
use laneway::{Destination, Fingerprint, HoldEnd, MessageId, PublishError, WaitReason, WaitingKey};

use crate::options::Mode;
use crate::plan::{Defect, Round};
use crate::work::{Stopped, Work};

/// So many publish at the same time, each the events of its own orders.
const PUBLISHERS: u64 = 32;

/// What publishes, looks and decides.
pub(crate) struct Rounds<'a> {
    pub bus: &'a Bus,
    /// Another program, which publishes to the same broker without Laneway's bus.
    pub foreign: Arc<dyn Publisher>,
    /// The queue, and the endpoint on it.
    pub orders: &'a str,
    pub mode: Mode,
    pub work: &'a Work,
}

impl Rounds<'_> {
    /// # Errors
    /// When the run is to end early.
    pub(crate) async fn run(&self) -> Result<(), Stopped> {
        let mut held = 0;
        for round in &self.work.plan.rounds {
            let handling = async {
                if self.mode == Mode::Block && !round.poison.is_empty() {
                    held += round.poison.len() as u64;
                    let others = round.numbers.end - round.poison.len() as u64 - round.behind;
                    self.work
                        .until("held keys, and the end of all others", |counts| {
                            counts.held >= held && counts.handled + counts.parked >= others
                        })
                        .await?;
                    self.look_after_holds(&mut held).await?;
                }
                let end = round.numbers.end;
                self.work
                    .until("the end of a round", |counts| {
                        counts.handled + counts.parked >= end
                    })
                    .await
            };
            // Not `try_join`: a publish that has begun goes on until its confirm, so that it is known.
            let (published, handled) = join(self.publish(round), handling).await;
            published.and(handled)?;
            eprintln!(
                "{} of {} events handled or parked",
                round.numbers.end,
                self.work.plan.messages()
            );
        }
        Ok(())
    }

    // ---- publishing

    /// Publishes the events of a round; those of one order one after the other.
    async fn publish(&self, round: &Round) -> Result<(), Stopped> {
        let publishers = (0..PUBLISHERS).map(|publisher| async move {
            for number in round.numbers.clone() {
                if self.work.plan.order(number) % PUBLISHERS == publisher {
                    self.publish_one(number).await?;
                }
            }
            Ok(())
        });
        join_all(publishers).await.into_iter().collect()
    }

    async fn publish_one(&self, number: u64) -> Result<(), Stopped> {
        let work = self.work;
        if work.plan.is_healthy(number) {
            tokio::select! {
                permit = work.window.acquire() => {
                    // Comes back when the event has been handled.
                    permit.map_err(|_| Stopped)?.forget();
                }
                () = work.stop.cancelled() => return Err(Stopped),
            }
        } else if work.stop.is_cancelled() {
            return Err(Stopped);
        }
        let event = work.plan.event(number);
        work.publishing(number);
        let result = if work.plan.defect(number) == Some(Defect::Undecodable) {
            self.publish_foreign(number).await
        } else {
            self.bus.publish(&event).await
        };
        match result {
            Ok(()) => {
                work.published(&event);
                Ok(())
            }
            Err(error) => Err(work.fail(format!("cannot publish: {error}"))),
        }
    }

    async fn publish_foreign(&self, number: u64) -> Result<(), PublishError> {
        // Handlers tell the ids of the other poison events. No handler will see this one.
        let id = MessageId::unique();
        self.work.is_called(number, id.clone());
        let sent = self.foreign.publish(Outgoing {
            destination: Destination::Queue(self.orders.into()),
            envelope: self.work.plan.event(number).foreign(id),
            key: None,
        });
        sent.await
    }

    // ---- held keys

    /// What an operator does: looks, tries one event again, then gives all of them up. `held` is how often keys
    /// have begun to be held.
    async fn look_after_holds(&self, held: &mut u64) -> Result<(), Stopped> {
        let waiting = self.held_keys().await;
        self.work.saw_held(waiting.iter().filter_map(|key| key.key));
        for key in &waiting {
            if let Some(fingerprint) = key.key {
                let (behind, since) = (key.behind, key.since);
                eprintln!("  key {fingerprint} held for {since:.1?}, {behind} events behind it");
            }
        }
        let keys = waiting.iter().filter_map(|key| key.key);
        if let Some(key) = keys.clone().next() {
            eprintln!("  one is retried, without success; then all are released");
            self.end_hold(key, HoldEnd::Retry).await?;
            *held += 1;
            let again = *held;
            self.work
                .until("a key to be held again", |counts| counts.held >= again)
                .await?;
        }
        for key in keys {
            self.end_hold(key, HoldEnd::Release).await?;
        }
        Ok(())
    }

    async fn held_keys(&self) -> Vec<WaitingKey> {
        let snapshot = self.bus.snapshot().await;
        let endpoint = snapshot.endpoint(self.orders);
        let waiting = endpoint.map(|endpoint| endpoint.waiting_keys.clone());
        let mut waiting = waiting.unwrap_or_default();
        waiting.retain(|key| key.why == WaitReason::Held);
        waiting
    }

    async fn end_hold(&self, key: Fingerprint, end: HoldEnd) -> Result<(), Stopped> {
        let ended = self.bus.end_hold(self.orders, key, end).await;
        ended.map_err(|error| self.work.fail(error.to_string()))
    }
}
