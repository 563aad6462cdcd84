//! How a session ends: without an error when its owner closes it, with one when it is lost.

use laneway_actors::port::{SessionLost, SourceError};

use super::Adapter;
use super::stage::{Stage, numbers_of, within};

/// A session that its owner closes ends without an error, also with messages unread.
pub async fn the_stream_ends_without_an_error_after_close(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..3).await;
    let mut session = stage.open(50).await;
    session.next().await;
    session.close().await;
    assert!(session.state.has_ended());
    let error = session.drain().await;
    assert!(error.is_none(), "closed by its owner, but: {error:?}");
    stage.clean_up().await;
}

/// A session that is lost is marked ended, and its stream ends with one error.
pub async fn the_stream_ends_with_an_error_after_a_cut(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..3).await;
    let mut session = stage.open(50).await;
    session.take(3).await;
    stage.cut().await;
    let error = session.drain().await;
    assert!(
        matches!(error, Some(SourceError::Unavailable { .. })),
        "lost, so worth another try, but: {error:?}"
    );
    within("the lost session to be marked ended", session.state.ended()).await;
    assert_eq!(session.barrier().await, Err(SessionLost));
    stage.clean_up().await;
}

/// Closing a session twice, or after it was lost, resolves and breaks nothing.
pub async fn closing_again_is_harmless(adapter: &dyn Adapter) {
    let stage = Stage::declare(adapter, |queue| queue).await;
    stage.publish_all(0..2).await;
    let mut closed = stage.open(50).await;
    closed.take(2).await;
    closed.close().await;
    closed.close().await;

    let mut lost = stage.open(50).await;
    lost.take(2).await;
    stage.cut().await;
    lost.ended_by_itself().await;
    lost.close().await;

    let mut next = stage.open(50).await;
    assert_eq!(numbers_of(&next.take(2).await), [0, 1]);
    stage.end(next).await;
}
