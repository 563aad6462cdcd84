//! The group of the nodes that share the shards of an ordered queue, over a store.
//!
//! ```text
//! announce ──► what each member said last, in the store ◄── every half second ── heard
//!                                            leases ◄────── owners ───────────── unattended
//! ```
//! Owns what each member was heard to say last. Promises that of each member the newest announcement is heard within
//! [`POLL`] and a query, and that none is heard twice or after a newer one. Those in between are not heard: they
//! say nothing any more.
//!
//! It does not hear while nobody reads the stream, and decides nothing: who should own a shard is up to
//! [`balance`](laneway_actors::balance).

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use futures::{FutureExt as _, StreamExt as _};
use laneway_actors::balance::EXPIRY;
use laneway_actors::port::{Announcement, Announcer, Joined, MemberId, Membership, SourceError};

use super::{Store, StoreError};

/// Pause between two looks at what was announced: as long as that between two announcements.
const POLL: Duration = laneway_actors::balance::ANNOUNCE_EVERY;

/// The nodes that share an ordered queue of a store. Its group has the queue's name.
///
/// An announcement is heard half a second after it was made at the latest, and it lasts as long as a member that is
/// not heard counts as one ([`EXPIRY`]). Needs a tokio runtime with a clock.
#[derive(Clone)]
pub struct StoreMembership {
    store: Arc<dyn Store>,
    queue: Arc<str>,
}

impl StoreMembership {
    /// The group of a queue, which must be declared before anybody joins. Does no I/O.
    pub fn new(store: Arc<dyn Store>, queue: impl Into<Arc<str>>) -> Self {
        let queue = queue.into();
        Self { store, queue }
    }

    fn error(&self, error: StoreError) -> SourceError {
        let what = format!("group `{}`: {error}", self.queue);
        if error.is_retryable() {
            let source = Some(error.into());
            SourceError::Unavailable { what, source }
        } else {
            let source = Some(error.into());
            SourceError::Refused { what, source }
        }
    }
}

impl Membership for StoreMembership {
    fn name(&self) -> &str {
        &self.queue
    }

    fn join(&self) -> BoxFuture<'_, Result<Joined, SourceError>> {
        async move {
            let before = self.store.announcements(&self.queue).await;
            let mut heard = Heard::default();
            heard.news(before.map_err(|error| self.error(error))?);
            Ok(Joined {
                heard: listen(self.clone(), heard),
                announcer: Arc::new(self.clone()),
            })
        }
        .boxed()
    }

    /// A shard is unattended while its lease is free or has expired. Costs one query for all of them.
    fn unattended(
        &self,
        shards: BTreeSet<usize>,
    ) -> BoxFuture<'_, Result<BTreeSet<usize>, SourceError>> {
        async move {
            let owners = self.store.owners(&self.queue).await;
            let owners = owners.map_err(|error| self.error(error))?;
            let mut unattended = BTreeSet::new();
            for shard in shards {
                let owner = owners.iter().find(|owner| owner.shard.0 as usize == shard);
                let owner = owner.ok_or_else(|| {
                    self.error(StoreError::refused(format!("there is no shard {shard}")))
                })?;
                if !owner.fresh {
                    unattended.insert(shard);
                }
            }
            Ok(unattended)
        }
        .boxed()
    }
}

impl Announcer for StoreMembership {
    fn announce(&self, announcement: Announcement) -> BoxFuture<'static, Result<(), SourceError>> {
        let this = self.clone();
        async move {
            let announcing = {
                let this = this.clone();
                async move {
                    this.store
                        .announce(&this.queue, &announcement, EXPIRY)
                        .await
                }
            };
            // In a task of its own, because dropping this future does not stop it.
            let announced = tokio::spawn(announcing).await.unwrap_or_else(|_| {
                Err(StoreError::unavailable(
                    "the runtime of the store has ended",
                ))
            });
            announced.map_err(|error| this.error(error))
        }
        .boxed()
    }
}

/// What is announced from now on. Ends when a look fails.
fn listen(group: StoreMembership, heard: Heard) -> BoxStream<'static, Announcement> {
    let start = (group, heard, VecDeque::new());
    stream::unfold(start, async |(group, mut heard, mut news)| {
        loop {
            if let Some(announcement) = news.pop_front() {
                return Some((announcement, (group, heard, news)));
            }
            tokio::time::sleep(POLL).await;
            match group.store.announcements(&group.queue).await {
                Ok(current) => news.extend(heard.news(current)),
                Err(error) => {
                    let group = &group.queue;
                    tracing::warn!(target: "laneway", %group, %error, "place in the group lost");
                    return None;
                }
            }
        }
    })
    .boxed()
}

/// What each member was heard to say last. Pure.
#[derive(Debug, Default)]
struct Heard(HashMap<MemberId, u64>);

impl Heard {
    /// Of what is announced now, what was not heard before. Who announces nothing any more is forgotten: the store
    /// keeps the last announcement for longer than it shows it, so that an older one cannot come back.
    fn news(&mut self, current: Vec<Announcement>) -> Vec<Announcement> {
        let mut news = Vec::new();
        let mut last = HashMap::with_capacity(current.len());
        for announcement in current {
            let (member, sequence) = (announcement.member, announcement.sequence);
            let known = self.0.get(&member).copied();
            last.insert(member, sequence.max(known.unwrap_or(0)));
            if known.is_none_or(|known| known < sequence) {
                news.push(announcement);
            }
        }
        self.0 = last;
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_is_what_is_newer_than_what_was_heard() {
        let said = |member, sequence| Announcement {
            member: MemberId::from_u128(member),
            sequence,
            of: 1,
            shards: BTreeSet::new(),
            willing: true,
        };
        let mut heard = Heard::default();
        for (current, expected) in [
            (vec![said(1, 0), said(2, 7)], vec![said(1, 0), said(2, 7)]),
            (vec![said(1, 0), said(2, 8)], vec![said(2, 8)]),
            // A look that was overtaken by another one.
            (vec![said(1, 1), said(2, 7)], vec![said(1, 1)]),
            (vec![said(1, 1), said(2, 8), said(3, 1)], vec![said(3, 1)]),
            (vec![], vec![]),
            (vec![said(2, 9)], vec![said(2, 9)]),
        ] {
            assert_eq!(heard.news(current), expected);
        }
    }
}
