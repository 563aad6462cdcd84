//! The messages in a parking place: read like any queue, sent back like any publish.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use laneway_actors::port::{
    OpenSession, ParkedCount, ParkedMessages, PublishError, Source, SourceError,
};
use laneway_actors::{Delivery, SessionState, header};

use super::broker::{MemoryBroker, Route};
use super::source::MemorySource;
use crate::topology::QueueSpec;

/// A parking queue of the embedded broker.
#[derive(Debug)]
pub(super) struct MemoryParked {
    broker: MemoryBroker,
    source: MemorySource,
}

impl MemoryParked {
    /// `parking` is the parking queue itself.
    pub(super) fn new(broker: MemoryBroker, parking: QueueSpec) -> Self {
        Self {
            source: MemorySource::new(broker.clone(), parking),
            broker,
        }
    }
}

impl ParkedMessages for MemoryParked {
    fn name(&self) -> &str {
        self.source.name()
    }

    fn count(&self) -> BoxFuture<'_, Result<ParkedCount, SourceError>> {
        async {
            let status = self.broker.existing(self.name())?;
            let number = |count| u32::try_from(count).unwrap_or(u32::MAX);
            Ok(ParkedCount {
                ready: number(status.ready),
                sessions: number(status.sessions),
            })
        }
        .boxed()
    }

    fn open(
        &self,
        state: Arc<SessionState>,
        credits: u16,
    ) -> BoxFuture<'_, Result<OpenSession, SourceError>> {
        self.source.open(state, credits)
    }

    fn send_back(
        &self,
        parked: Arc<Delivery>,
        queue: Arc<str>,
        replay: i64,
    ) -> BoxFuture<'static, Result<(), PublishError>> {
        let broker = self.broker.clone();
        async move {
            let mut copy = parked.envelope().clone();
            copy.headers.insert(header::REPLAY, replay);
            broker
                .send(Route::Queue(&queue), Arc::new(copy))
                .map_err(PublishError::Refused)
        }
        .boxed()
    }
}
