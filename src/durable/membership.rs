//! The group of the nodes that share an ordered queue, on the store's own threads.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::{self, StreamExt};
use laneway_actors::port::{Announcement, Announcer, Joined, Membership, SourceError};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::engine::Slot;
use crate::store::StoreMembership;

/// A [`StoreMembership`] of a store that starts later.
pub(super) struct DurableMembership {
    pub(super) queue: Arc<str>,
    pub(super) slot: Arc<Slot>,
}

impl DurableMembership {
    fn group(&self) -> Result<(StoreMembership, Handle), SourceError> {
        let engine = self.slot.engine().ok_or_else(|| SourceError::Refused {
            what: format!("the store of the queue `{}` is closed", self.queue),
            source: None,
        })?;
        let group = StoreMembership::new(Arc::clone(&engine.store), Arc::clone(&self.queue));
        Ok((group, engine.runtime.clone()))
    }
}

impl Membership for DurableMembership {
    fn name(&self) -> &str {
        &self.queue
    }

    fn join(&self) -> BoxFuture<'_, Result<Joined, SourceError>> {
        Box::pin(async move {
            let (group, runtime) = self.group()?;
            let mut joined = on(&runtime, async move { group.join().await }).await?;
            let (news, mut told) = mpsc::unbounded_channel();
            runtime.spawn(async move {
                while let Some(announcement) = tokio::select! {
                    heard = joined.heard.next() => heard,
                    // Nobody listens any more.
                    () = news.closed() => None,
                } {
                    let _ = news.send(announcement);
                }
            });
            Ok(Joined {
                heard: stream::poll_fn(move |cx| told.poll_recv(cx)).boxed(),
                announcer: Arc::new(OnThreads {
                    announcer: joined.announcer,
                    runtime,
                }),
            })
        })
    }

    fn unattended(
        &self,
        shards: BTreeSet<usize>,
    ) -> BoxFuture<'_, Result<BTreeSet<usize>, SourceError>> {
        Box::pin(async move {
            let (group, runtime) = self.group()?;
            on(&runtime, async move { group.unattended(shards).await }).await
        })
    }
}

struct OnThreads {
    announcer: Arc<dyn Announcer>,
    runtime: Handle,
}

impl Announcer for OnThreads {
    fn announce(&self, announcement: Announcement) -> BoxFuture<'static, Result<(), SourceError>> {
        let announcer = Arc::clone(&self.announcer);
        let announcing = async move { announcer.announce(announcement).await };
        let runtime = self.runtime.clone();
        Box::pin(async move { on(&runtime, announcing).await })
    }
}

/// Runs it on the store's threads.
async fn on<T: Send + 'static>(
    runtime: &Handle,
    work: impl Future<Output = Result<T, SourceError>> + Send + 'static,
) -> Result<T, SourceError> {
    let done = runtime.spawn(work).await;
    done.unwrap_or_else(|_| {
        Err(SourceError::Unavailable {
            what: "the store was closed meanwhile".to_owned(),
            source: None,
        })
    })
}
