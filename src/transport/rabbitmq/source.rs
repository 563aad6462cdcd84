//! A queue as a source: verifies it, opens sessions on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::FutureExt;
use futures::future::BoxFuture;
use laneway_actors::SessionState;
use laneway_actors::port::{OpenSession, Source, SourceError};
use tokio::sync::oneshot;

use super::RabbitMq;
use super::properties::short;
use super::{session, topology};
use crate::topology::QueueSpec;

/// One queue of the broker.
pub(super) struct QueueSource {
    broker: RabbitMq,
    spec: Arc<QueueSpec>,
    /// A session was opened before; since then the queue may have become another one.
    opened: Arc<AtomicBool>,
}

impl QueueSource {
    pub(super) fn new(broker: RabbitMq, spec: QueueSpec) -> Self {
        Self {
            broker,
            spec: Arc::new(spec),
            opened: Arc::default(),
        }
    }
}

impl Source for QueueSource {
    fn name(&self) -> &str {
        &self.spec.name
    }

    fn verify(&self) -> BoxFuture<'_, Result<(), Vec<SourceError>>> {
        async move {
            let core = self.broker.core().map_err(|why| vec![refused(why, None)])?;
            let spec = Arc::clone(&self.spec);
            let verifying = {
                let core = Arc::clone(&core);
                async move { topology::verify(&core, &spec).await }
            };
            core.run(verifying)
                .await
                .unwrap_or_else(|| Err(vec![stopped()]))
        }
        .boxed()
    }

    fn open(
        &self,
        state: Arc<SessionState>,
        credits: u16,
    ) -> BoxFuture<'_, Result<OpenSession, SourceError>> {
        async move {
            let queue = short(&self.spec.name)
                .map_err(|why| refused(format!("queue name: {why}"), None))?;
            let core = self.broker.core().map_err(|why| refused(why, None))?;
            let spec = Arc::clone(&self.spec);
            let before = Arc::clone(&self.opened);
            let (opened, result) = oneshot::channel();
            let opening = {
                let core = Arc::clone(&core);
                async move {
                    let verified = if before.load(Ordering::Relaxed) {
                        topology::verify_again(&core, &spec).await
                    } else {
                        Ok(())
                    };
                    let result = match verified {
                        Ok(()) => session::open(core, &spec, queue, state, credits).await,
                        Err(why) => Err(why),
                    };
                    if result.is_ok() {
                        before.store(true, Ordering::Relaxed);
                    }
                    // Who asked has gone: then the session closes in order, by being dropped here.
                    // (Aborting the opening instead could cancel a consumer that has messages in
                    // hand: FACTS 12.)
                    drop(opened.send(result));
                }
            };
            core.handle().spawn(opening);
            result.await.unwrap_or_else(|_| Err(stopped()))
        }
        .boxed()
    }
}

pub(super) fn refused(what: String, source: Option<lapin::Error>) -> SourceError {
    SourceError::Refused {
        what,
        source: source.map(Into::into),
    }
}

pub(super) fn unavailable(what: String, source: Option<lapin::Error>) -> SourceError {
    SourceError::Unavailable {
        what,
        source: source.map(Into::into),
    }
}

pub(super) fn stopped() -> SourceError {
    unavailable("the connections have been shut down".to_owned(), None)
}
