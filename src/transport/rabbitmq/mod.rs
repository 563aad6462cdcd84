//! RabbitMQ, over the AMQP 0-9-1 client `lapin`.
//!
//! Owns the connections to one broker and, through them, the ports: a [`Source`] per queue with
//! its sessions, the [`Parking`] place of a queue, the [`Publisher`], and the [`Membership`] of the
//! instances that share shards.
//!
//! ```text
//!                 RabbitMq (handle, cheap to clone)
//!                    │ owns a tokio runtime of its own, one worker thread
//!    ┌───────────────┼───────────────────┬──────────────┐
//! consuming       publishing          parking       announcing     one connection each, opened
//!    │               │                   │              │          when it is needed
//! one channel     a pool of channels, one unconfirmed message on each
//! per session
//! ```
//!
//! # What it promises
//! - A session is one channel. Nothing of an ended session is delivered if that can be known, and
//!   its acknowledgements do nothing. A session whose broker does not answer within a heartbeat ends.
//! - Closing a session closes its channel and never cancels its consumer: everything unsettled goes
//!   back to the queue in its original order, before anybody else gets a later message.
//! - A publish or a parking succeeds only when the broker has confirmed it *and* did not return it.
//!   It is reported as refused only when no copy can be at the broker, otherwise as unknown.
//! - The ports may be polled from any executor. All I/O and all timers run on the runtime of this
//!   handle, which outlives its sessions; no operation waits without a bound.
//! - Nothing it logs or reports holds credentials, header values or bodies.
//!
//! # What it does not do
//! - It does not reconnect by itself, and it does not pause: the next `open` or `publish` opens a
//!   lost connection again (once, for all who ask), and how long to wait between is the caller's.
//! - It never sends a message twice.
//! - `lapin` itself logs a returned (unroutable) message with its headers and body, as a warning
//!   with target `lapin::returned_messages`. Who must keep keys out of logs filters that target.
//!
//! # Barrier
//! On a classic queue a round trip on the channel proves that the acknowledgements sent before it
//! were handed to the queue. On a quorum queue it does not: beyond 32 commands that the queue has
//! not applied yet the channel keeps acknowledgements to itself, and they are lost with it. With a
//! single active consumer the barrier is therefore a command through the queue's own log: a second
//! consumer is subscribed, which waits behind the active one and gets nothing, and cancelled again.
//! On a quorum queue *without* single active consumer such a second consumer would be given messages,
//! so the barrier is a round trip there, and a window remains: if the channel dies just then, a
//! message that was acknowledged singly can come back.
//!
//! # Memory and disk alarms
//! While the broker has an alarm it reads nothing from a connection that publishes, once that
//! connection has begun to. Consuming has a connection of its own and goes on. A publish waits for
//! the end of the alarm no longer than the operation time-out and is then refused, not sent. So
//! that the first message after a pause is not caught half sent, a connection that has been silent
//! for a second first sends an empty message that no queue takes, and waits for its confirm.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use laneway_actors::Problem;
use laneway_actors::port::{Membership, ParkedMessages, Parking, Publisher, Source, SourceError};

use self::core::Core;
use self::membership::GroupMembership;
use self::parked::QueueParked;
use self::parking::QueueParking;
use self::publisher::BrokerPublisher;
use self::source::QueueSource;
use crate::topology::{QueueSpec, Topology};
use crate::transport::Transport;

mod announcement;
mod apply;
mod asker;
mod connection;
mod core;
mod membership;
mod parked;
mod parking;
mod properties;
mod publisher;
mod sending;
mod session;
mod settings;
mod source;
mod topology;
mod version;

pub use self::settings::{InvalidSetting, redact};

use self::settings::{Settings, Valid};

/// A RabbitMQ broker: how to reach it, and, once used, the connections to it.
///
/// Nothing is connected until a port is used. Clones share the connections; changing a setting gives
/// a handle with connections of its own. Dropping the last handle and the last session closes the
/// connections in the background; [`close`](Self::close) waits for it.
#[derive(Clone)]
pub struct RabbitMq {
    settings: Settings,
    core: Arc<OnceLock<Result<Arc<Core>, String>>>,
}

impl RabbitMq {
    /// A broker at a URL: `amqp://user:password@host:port/vhost`, each part but the scheme and host
    /// optional (`guest`, `guest`, 5672, the default virtual host `/`). A virtual host is
    /// percent-encoded; `…:5672/` with nothing behind the slash names the virtual host with the
    /// empty name. `amqps://` needs the feature `tls`.
    ///
    /// A wrong URL is reported by [`check`](Self::check), and by every port that is used.
    pub fn at(url: impl Into<String>) -> Self {
        Self::with(Settings::new(url.into()))
    }

    /// Bounds how long a dead broker goes unnoticed: a session whose broker does not answer for this
    /// long ends, and no handler starts on a proof of life older than this. It is also the AMQP
    /// heartbeat offered to the broker, which may ask for a shorter one. Whole seconds, 1 to 600.
    /// Defaults to 10 seconds.
    #[must_use]
    pub fn heartbeat(self, heartbeat: Duration) -> Self {
        Self::with(Settings {
            heartbeat,
            ..self.settings
        })
    }

    /// Bounds the time from the start of a connection attempt to a usable connection.
    /// 100 ms to 10 minutes. Defaults to 10 seconds.
    #[must_use]
    pub fn connect_timeout(self, timeout: Duration) -> Self {
        Self::with(Settings {
            connect_timeout: timeout,
            ..self.settings
        })
    }

    /// Bounds each question to the broker: opening a channel, subscribing, declaring, a barrier,
    /// closing. It is also how long a publish waits for the end of an alarm before it is refused.
    /// 100 ms to 10 minutes. Defaults to 10 seconds.
    #[must_use]
    pub fn operation_timeout(self, timeout: Duration) -> Self {
        Self::with(Settings {
            operation_timeout: timeout,
            ..self.settings
        })
    }

    /// Bounds the time from handing a message to the connection to the broker's confirm. When it is
    /// over the outcome is unknown and the connection is closed, so that nothing of the message is
    /// sent later. 100 ms to 10 minutes. Defaults to 30 seconds.
    #[must_use]
    pub fn confirm_timeout(self, timeout: Duration) -> Self {
        Self::with(Settings {
            confirm_timeout: timeout,
            ..self.settings
        })
    }

    /// How many messages may be published and not yet confirmed at a time: each uses a channel, and
    /// a further publish waits for a free one, in order of the calls. 1 to 1,000. Defaults to 64.
    #[must_use]
    pub fn publisher_channels(self, channels: u16) -> Self {
        Self::with(Settings {
            publisher_channels: channels,
            ..self.settings
        })
    }

    /// The same for parking. 1 to 1,000. Defaults to 4.
    #[must_use]
    pub fn parking_channels(self, channels: u16) -> Self {
        Self::with(Settings {
            parking_channels: channels,
            ..self.settings
        })
    }

    /// Checks the settings, without I/O.
    ///
    /// # Errors
    /// Every setting that is wrong, with its name and its bounds; never credentials.
    pub fn check(&self) -> Result<(), Vec<InvalidSetting>> {
        Valid::new(&self.settings).map(|_| ())
    }

    /// Closes all sessions and connections in an orderly way: what is unsettled goes back to its
    /// queue, in order. Afterwards every port answers that it has been closed. Bounded by the
    /// operation time-out; calling it again does nothing.
    ///
    /// # Cancellation
    /// Dropping the future does not stop the closing.
    pub async fn close(&self) {
        // Never used means nothing to close; but a later use must not open anything either.
        let core = self
            .core
            .get_or_init(|| Err("the RabbitMq handle has been closed".to_owned()));
        if let Ok(core) = core {
            core.close().await;
        }
    }

    /// Number of messages that are ready in a queue: in it, and not handed to a consumer. What a session has
    /// given back by its end a quorum queue counts only some moments later.
    ///
    /// # Errors
    /// When the broker cannot be reached, or the queue does not exist.
    pub async fn ready(&self, queue: &str) -> Result<u32, SourceError> {
        let core = self.core().map_err(|why| source::refused(why, None))?;
        let asking = {
            let (core, queue) = (Arc::clone(&core), queue.to_owned());
            async move { topology::count(&core, &queue).await }
        };
        let answer = core.run(asking).await;
        let (ready, _) = answer.unwrap_or_else(|| Err(source::stopped()))?;
        Ok(ready)
    }

    /// Deletes the declared queues of a topology **with every message in them**, their parking queues
    /// and parking exchanges, and the declared exchanges. What somebody else owns
    /// ([`Topology::existing_queue`]), parking places included, is left alone. What does not exist counts
    /// as deleted.
    ///
    /// For tests and tools: a running program has no reason to delete its queues, and a quorum queue
    /// must not be deleted and declared again while it has consumers.
    ///
    /// # Errors
    /// The first of what could not be deleted; the rest is deleted all the same.
    pub async fn delete(&self, topology: &Topology) -> Result<(), SourceError> {
        let core = self.core().map_err(|why| source::refused(why, None))?;
        let plan = topology.plan();
        let deleting = {
            let core = Arc::clone(&core);
            async move { apply::remove(&core, &plan).await }
        };
        let answer = core.run(deleting).await;
        answer.unwrap_or_else(|| Err(source::stopped()))
    }

    fn with(settings: Settings) -> Self {
        Self {
            settings,
            core: Arc::new(OnceLock::new()),
        }
    }

    /// The connections, set up on first use.
    ///
    /// # Errors
    /// A text for the caller: wrong settings, no runtime, or closed.
    fn core(&self) -> Result<Arc<Core>, String> {
        self.core
            .get_or_init(|| {
                let valid = Valid::new(&self.settings).map_err(|problems| {
                    let problems: Vec<_> = problems.iter().map(ToString::to_string).collect();
                    problems.join("; ")
                })?;
                Core::start(valid)
            })
            .clone()
    }
}

/// Shows the URL without credentials.
impl fmt::Debug for RabbitMq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMq")
            .field("url", &redact(&self.settings.url))
            .field("used", &self.core.get().is_some())
            .finish_non_exhaustive()
    }
}

impl Transport for RabbitMq {
    fn problems(&self) -> Vec<Problem> {
        let invalid = self.check().err().into_iter().flatten();
        invalid
            .map(|found| Problem::new("", format!("RabbitMq::{}", found.setting), found.problem))
            .collect()
    }

    fn apply<'a>(&'a self, topology: &Topology) -> BoxFuture<'a, Result<(), Vec<SourceError>>> {
        let plan = topology.plan();
        async move {
            let core = self
                .core()
                .map_err(|why| vec![source::refused(why, None)])?;
            let applying = {
                let core = Arc::clone(&core);
                async move { apply::apply(&core, &plan).await }
            };
            let answer = core.run(applying).await;
            answer.unwrap_or_else(|| Err(vec![source::stopped()]))
        }
        .boxed()
    }

    fn source(&self, queue: &QueueSpec) -> Arc<dyn Source> {
        Arc::new(QueueSource::new(self.clone(), queue.clone()))
    }

    fn parking(&self, queue: &QueueSpec) -> Option<Arc<dyn Parking>> {
        let parking = queue.parking.as_ref()?;
        Some(Arc::new(QueueParking::new(self.clone(), &parking.exchange)))
    }

    fn parked(&self, queue: &QueueSpec) -> Option<Arc<dyn ParkedMessages>> {
        let parking = queue.parking_queue()?;
        Some(Arc::new(QueueParked::new(self.clone(), parking)))
    }

    fn membership(&self, group: &str, queues: &[String]) -> Option<Arc<dyn Membership>> {
        Some(Arc::new(GroupMembership::new(self.clone(), group, queues)))
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(BrokerPublisher::new(self.clone()))
    }
}
