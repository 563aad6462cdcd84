//! What both transports do alike with announcements: hold the newest for who reads slowly.

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use laneway_actors::port::Announcement;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

/// How many announcements wait for a member that does not read. Beyond it the oldest are dropped: an
/// announcement is news and no order, and the next one of the same member replaces it.
pub(super) const WAITING_AT_MOST: usize = 256;

/// The announcements of a place in a group, until its sender is gone.
pub(super) fn heard(receiver: Receiver<Announcement>) -> BoxStream<'static, Announcement> {
    stream::unfold(receiver, async |mut receiver| {
        loop {
            match receiver.recv().await {
                Ok(announcement) => return Some((announcement, receiver)),
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    })
    .boxed()
}
