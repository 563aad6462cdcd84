//! The runtime on which everything of one broker handle runs, and the places of its connections.
//!
//! Owns [`Core`] (the runtime, and one [`Link`] per purpose) and [`Link`], which opens a connection
//! again when it is needed, once for all who ask. Promises that nothing outlives its runtime, and that
//! dropping it never waits. Does not pause between attempts: back-off belongs to the caller.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::connection::{LinkError, Live, Purpose, open};
use super::settings::Valid;

/// The runtime and the connections of one broker handle.
pub(super) struct Core {
    pub(super) settings: Arc<Valid>,
    /// Heartbeats, socket readiness and channel calls of a connection run on the runtime it was
    /// opened on; on an application's own runtime a handler that blocks would cost the connection
    /// (FACTS 2). `None` only while dropping.
    runtime: Option<Runtime>,
    consuming: Link,
    publishing: Link,
    parking: Link,
    announcing: Link,
    /// Set by `close`; sessions watch it.
    pub(super) closing: CancellationToken,
}

impl Core {
    pub(super) fn start(settings: Valid) -> Result<Arc<Self>, String> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("laneway-rabbitmq")
            .enable_all()
            .build()
            .map_err(|why| format!("no runtime for the connections could be started: {why}"))?;
        Ok(Arc::new(Self {
            settings: Arc::new(settings),
            runtime: Some(runtime),
            consuming: Link::new(Purpose::Consuming),
            publishing: Link::new(Purpose::Publishing),
            parking: Link::new(Purpose::Parking),
            announcing: Link::new(Purpose::Announcing),
            closing: CancellationToken::new(),
        }))
    }

    /// The runtime's handle.
    pub(super) fn handle(&self) -> &Handle {
        match &self.runtime {
            Some(runtime) => runtime.handle(),
            // Only `drop` takes the runtime, and nobody can call anything then.
            None => unreachable!("the runtime is there until the core is dropped"),
        }
    }

    /// Runs a future to its end on the own runtime, so that the caller needs none. It goes on when
    /// the caller drops the returned future: half a protocol is worse than one too many.
    pub(super) fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> impl Future<Output = Option<T>> + Send + 'static {
        let task = self.handle().spawn(work);
        async move { task.await.ok() }
    }

    /// The connection for a purpose, opened if there is none. To be called on the own runtime.
    pub(super) async fn live(&self, purpose: Purpose) -> Result<Arc<Live>, LinkError> {
        if self.closing.is_cancelled() {
            return Err(LinkError::Refused(CLOSED.to_owned()));
        }
        let link = self.link(purpose);
        link.live(&self.settings, self.handle()).await
    }

    /// Closes everything; see [`RabbitMq::close`](super::RabbitMq::close).
    pub(super) async fn close(&self) {
        // Sessions see this and close their channels themselves; closing the connection does the
        // same at the broker for those that are slower: their unsettled messages go back in order.
        self.closing.cancel();
        let lives = self.take_lives();
        let bound = self.settings.operation_timeout;
        let closing = self.run(async move { close_all(lives, bound).await });
        closing.await;
    }

    fn link(&self, purpose: Purpose) -> &Link {
        match purpose {
            Purpose::Consuming => &self.consuming,
            Purpose::Publishing => &self.publishing,
            Purpose::Parking => &self.parking,
            Purpose::Announcing => &self.announcing,
        }
    }

    fn take_lives(&self) -> Vec<Arc<Live>> {
        [
            &self.consuming,
            &self.publishing,
            &self.parking,
            &self.announcing,
        ]
        .into_iter()
        .filter_map(Link::take)
        .collect()
    }
}

impl Drop for Core {
    /// The last handle, port and session are gone. Closing needs the runtime for a moment, and the
    /// dropping thread may be one of a runtime, where waiting is not allowed: so another one waits.
    fn drop(&mut self) {
        self.closing.cancel();
        let lives = self.take_lives();
        let bound = self.settings.operation_timeout;
        let Some(runtime) = self.runtime.take() else {
            return;
        };
        if lives.is_empty() {
            runtime.shutdown_background();
            return;
        }
        let waiting = std::thread::Builder::new().name("laneway-rabbitmq-close".to_owned());
        // If there is no thread to be had, the closure is dropped with the runtime in it, and that
        // must not wait either: hence the guard.
        let runtime = ShutDown(Some(runtime));
        let spawned = waiting.spawn(move || {
            if let Some(runtime) = &runtime.0 {
                runtime.block_on(close_all(lives, bound));
            }
            drop(runtime);
        });
        if let Err(why) = spawned {
            warn!(target: "laneway", %why, "the connections to RabbitMQ could not be closed in order");
        }
    }
}

const CLOSED: &str = "the RabbitMq handle has been closed";

/// Shuts a runtime down without waiting, wherever it is dropped.
struct ShutDown(Option<Runtime>);

impl Drop for ShutDown {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

async fn close_all(lives: Vec<Arc<Live>>, bound: Duration) {
    let closing = lives.iter().map(|live| live.close(bound));
    futures::future::join_all(closing).await;
}

/// The place of one connection.
struct Link {
    purpose: Purpose,
    slot: Mutex<Slot>,
}

enum Slot {
    Empty,
    /// Everybody who needs the connection waits for the same attempt.
    Opening(Shared<BoxFuture<'static, Result<Arc<Live>, LinkError>>>),
    Open(Arc<Live>),
}

impl Link {
    fn new(purpose: Purpose) -> Self {
        Self {
            purpose,
            slot: Mutex::new(Slot::Empty),
        }
    }

    async fn live(&self, settings: &Arc<Valid>, handle: &Handle) -> Result<Arc<Live>, LinkError> {
        let attempt = {
            let mut slot = self.lock();
            match &*slot {
                Slot::Open(live) if live.is_usable() => return Ok(Arc::clone(live)),
                Slot::Opening(attempt) => attempt.clone(),
                _ => {
                    let opening = open(Arc::clone(settings), self.purpose, handle.clone());
                    // A task of its own, so that the attempt goes on when who asked first gives up.
                    let task = handle.spawn(opening);
                    let attempt = async move {
                        task.await.unwrap_or_else(|_| {
                            Err(LinkError::Unavailable("the runtime has stopped".to_owned()))
                        })
                    };
                    let attempt = attempt.boxed().shared();
                    *slot = Slot::Opening(attempt.clone());
                    attempt
                }
            }
        };
        let result = attempt.clone().await;
        let mut slot = self.lock();
        // Only for the attempt that is still in the slot: another may have begun since.
        if matches!(&*slot, Slot::Opening(current) if current.ptr_eq(&attempt)) {
            *slot = match &result {
                Ok(live) => Slot::Open(Arc::clone(live)),
                Err(_) => Slot::Empty,
            };
        }
        result
    }

    fn take(&self) -> Option<Arc<Live>> {
        match std::mem::replace(&mut *self.lock(), Slot::Empty) {
            Slot::Open(live) => Some(live),
            // An attempt under way ends by itself; its connection closes when its last user drops it.
            Slot::Opening(_) | Slot::Empty => None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
