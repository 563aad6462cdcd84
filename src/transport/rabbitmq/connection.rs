//! The connections and the runtime they live on.
//!
//! Owns [`Core`] (the runtime, and one [`Link`] per purpose), [`Link`] (opens a connection again
//! when it is needed, once for all who ask) and [`Live`] (one life of one connection).
//!
//! Promises that every wait is bounded, that a connection can be killed at any time so that
//! nothing more is written on it, and that errors name the setting to change, without credentials.
//! Does not pause between attempts: back-off belongs to the caller.

use std::future::Future;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_rs::TokioRuntime;
use async_rs::traits::Reactor;
use futures::StreamExt;
use futures::future::{BoxFuture, Shared};
use lapin::tcp::{AsyncTcpStream, OwnedTLSConfig};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{Channel, Connection, ConnectionProperties, ErrorKind, Event};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::sending::Pool;
use super::settings::Valid;

/// What a connection is for. Consuming and publishing never share one: an alarm at the broker
/// blocks a connection that publishes, acknowledgements included (FACTS 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Consuming,
    Publishing,
    Parking,
}

impl Purpose {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Consuming => "consuming",
            Self::Publishing => "publishing",
            Self::Parking => "parking",
        }
    }
}

/// Why there is no connection.
#[derive(Debug, Clone)]
pub(super) enum LinkError {
    /// Somebody has to change something.
    Refused(String),
    /// Worth another try.
    Unavailable(String),
}

impl LinkError {
    pub(super) fn into_text(self) -> String {
        match self {
            Self::Refused(text) | Self::Unavailable(text) => text,
        }
    }
}

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
        }
    }

    fn take_lives(&self) -> Vec<Arc<Live>> {
        [&self.consuming, &self.publishing, &self.parking]
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
        use futures::FutureExt;

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

/// One life of one connection.
pub(super) struct Live {
    pub(super) connection: Connection,
    pub(super) address: String,
    socket: Socket,
    /// No new work: lost, killed or closing.
    retired: CancellationToken,
    /// Surely gone: lost or killed.
    pub(super) dead: CancellationToken,
    /// The broker's reason while it blocks this connection.
    blocked: watch::Receiver<Option<String>>,
    /// Channels to publish on.
    pub(super) pool: Pool,
}

impl Live {
    /// Whether new work may be given to it.
    pub(super) fn is_usable(&self) -> bool {
        !self.retired.is_cancelled() && self.connection.status().connected()
    }

    /// Gives it no new work; what it carries goes on. Who needs a connection opens another.
    pub(super) fn retire(&self) {
        self.retired.cancel();
        self.pool.stop();
    }

    /// Ends the connection at once: afterwards not one byte more is written to it.
    ///
    /// An orderly close would not do. While the broker has an alarm `lapin` writes nothing, the
    /// close included, and when the alarm ends it first writes everything that was queued, also
    /// messages whose futures were dropped long ago (FACTS 9).
    pub(super) fn kill(&self, why: &str) {
        if !self.dead.is_cancelled() {
            warn!(target: "laneway", address = %self.address, why, "closing a connection to RabbitMQ abruptly");
        }
        self.retire();
        self.dead.cancel();
        self.socket.shut_down();
    }

    /// Closes one channel, and with it the consumers on it.
    ///
    /// A channel may not answer because its queue does not (a quorum queue without a leader): the
    /// close then stays pending for as long as the connection lives, and nobody else is harmed. If
    /// the connection does not answer either, it is killed.
    pub(super) async fn close_channel(&self, channel: &Channel, bound: Duration) {
        if !channel.status().connected() {
            return;
        }
        let mut closing = std::pin::pin!(channel.close(200, "closed".into()));
        // The result does not matter: an error says that the channel is gone already.
        tokio::select! {
            _ = &mut closing => return,
            () = self.dead.cancelled() => return,
            () = tokio::time::sleep(bound) => {}
        }
        let asking = async {
            let other = self.connection.create_channel().await?;
            other.close(200, "asked".into()).await
        };
        if timeout(bound, asking).await.is_err() {
            self.kill("the broker did not answer to closing a channel");
            return;
        }
        warn!(target: "laneway", address = %self.address, "a channel does not close; its messages stay with it until it does");
        tokio::select! {
            _ = &mut closing => {}
            () = self.dead.cancelled() => {}
        }
    }

    /// Closes in an orderly way, within a bound, else abruptly.
    async fn close(&self, bound: Duration) {
        self.retire();
        if !self.connection.status().connected() {
            return;
        }
        let closing = self
            .connection
            .close(200, "closed by the application".into());
        if timeout(bound, closing).await.is_err() {
            self.kill("the broker did not answer to closing it");
        }
        self.dead.cancel();
    }

    /// The broker's reason, if it blocks this connection now.
    pub(super) fn blocked(&self) -> Option<String> {
        self.blocked.borrow().clone()
    }

    /// Resolves when the connection is not blocked, or will never change again.
    pub(super) async fn unblocked(&self) {
        let mut blocked = self.blocked.clone();
        // An error means that the sender is gone, with the connection.
        let _ = blocked.wait_for(Option::is_none).await;
    }

    /// Resolves, with the broker's reason, when it has blocked this connection for `limit` without
    /// a break, counted from now at the earliest. Never resolves otherwise.
    pub(super) async fn blocked_for(&self, limit: Duration) -> String {
        let mut blocked = self.blocked.clone();
        loop {
            let reason = blocked.wait_for(Option::is_some).await;
            let reason = reason.ok().and_then(|reason| reason.clone());
            let Some(reason) = reason else {
                return std::future::pending().await;
            };
            if timeout(limit, blocked.wait_for(Option::is_none))
                .await
                .is_err()
            {
                return reason;
            }
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.dead.cancel();
    }
}

/// A second handle on the connection's socket, to shut it down from outside of `lapin`.
#[derive(Clone, Default)]
struct Socket(Arc<Mutex<SocketState>>);

#[derive(Default)]
struct SocketState {
    socket: Option<std::net::TcpStream>,
    shut_down: bool,
}

impl Socket {
    /// Takes a socket; shuts it down if that was asked for before it was there.
    fn set(&self, socket: std::net::TcpStream) {
        let mut state = self.lock();
        if state.shut_down {
            let _ = socket.shutdown(Shutdown::Both);
        }
        state.socket = Some(socket);
    }

    fn shut_down(&self) {
        let mut state = self.lock();
        state.shut_down = true;
        if let Some(socket) = &state.socket {
            // An error says that it is not connected any more, which is what is wanted.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn lock(&self) -> MutexGuard<'_, SocketState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens a connection, within the connect time-out.
async fn open(
    settings: Arc<Valid>,
    purpose: Purpose,
    handle: Handle,
) -> Result<Arc<Live>, LinkError> {
    let address = settings.address();
    let socket = Socket::default();
    let bound = settings.connect_timeout;
    let name = format!("laneway {}", purpose.as_str());
    // `enable_auto_recover` stays off: it gives no sign of a lost connection, starts delivery tags
    // again at 1, and a late acknowledgement then settles a message that never ran (FACTS 3).
    let properties = ConnectionProperties::default().with_connection_name(name.into());
    let connecting = {
        let socket = socket.clone();
        Connection::connector(
            settings.uri.clone(),
            TokioRuntime::tokio_with_handle(handle.clone()),
            async move |uri: AMQPUri, runtime: TokioRuntime| {
                let reaching = reach(uri, runtime, socket.clone());
                // lapin polls this on a thread of its own, which must end even if nobody waits.
                match timeout(bound, reaching).await {
                    Ok(reached) => reached.map_err(lapin::Error::from),
                    Err(_) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
                }
            },
            properties,
        )
    };
    let started = Instant::now();
    let connection = match timeout(bound, connecting).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(why)) => return Err(not_connected(&why, &settings)),
        Err(_) => {
            // The handshake hangs; end it, or its thread would stay.
            socket.shut_down();
            let what = format!("RabbitMQ at {address} did not answer within {bound:?}");
            return Err(LinkError::Unavailable(what));
        }
    };
    let (blocked_in, blocked) = watch::channel(None);
    let dead = CancellationToken::new();
    let retired = CancellationToken::new();
    // The one listener of this connection: two would compete for the events (FACTS 8).
    let events = Box::pin(connection.events_listener());
    handle.spawn(watch_events(
        events,
        blocked_in,
        dead.clone(),
        retired.clone(),
        address.clone(),
        purpose,
    ));
    info!(
        target: "laneway",
        %address,
        purpose = purpose.as_str(),
        took = ?started.elapsed(),
        "connected to RabbitMQ"
    );
    Ok(Arc::new(Live {
        pool: Pool::new(match purpose {
            Purpose::Consuming => 0,
            Purpose::Publishing => settings.publisher_channels,
            Purpose::Parking => settings.parking_channels,
        }),
        connection,
        address,
        socket,
        retired,
        dead,
        blocked,
    }))
}

type Events = Pin<Box<dyn futures::Stream<Item = Event> + Send>>;

/// Turns the connection's events into states that many can watch. Ends with the connection.
async fn watch_events(
    mut events: Events,
    blocked: watch::Sender<Option<String>>,
    dead: CancellationToken,
    retired: CancellationToken,
    address: String,
    purpose: Purpose,
) {
    let purpose = purpose.as_str();
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            () = dead.cancelled() => None,
        };
        match event {
            Some(Event::ConnectionBlocked(reason)) => {
                warn!(target: "laneway", %address, purpose, %reason, "RabbitMQ blocks a connection");
                blocked.send_replace(Some(reason));
            }
            Some(Event::ConnectionUnblocked) => {
                info!(target: "laneway", %address, purpose, "RabbitMQ does not block the connection any more");
                blocked.send_replace(None);
            }
            Some(Event::Error(why)) => {
                warn!(target: "laneway", %address, purpose, %why, "a connection to RabbitMQ was lost");
                break;
            }
            Some(_) => {}
            None => break,
        }
    }
    retired.cancel();
    dead.cancel();
}

/// Opens the socket and keeps a second handle on it.
async fn reach(
    uri: AMQPUri,
    runtime: TokioRuntime,
    socket: Socket,
) -> std::io::Result<AsyncTcpStream<<TokioRuntime as Reactor>::TcpStream>> {
    let host = uri.authority.host.clone();
    let addresses = runtime.to_socket_addrs((host.clone(), uri.authority.port));
    let stream = runtime.tcp_connect(addresses).await?;
    socket.set(second_handle(stream.get_ref())?);
    let stream = AsyncTcpStream::Plain(stream);
    match uri.scheme {
        AMQPScheme::AMQP => Ok(stream),
        AMQPScheme::AMQPS => {
            let tls = OwnedTLSConfig::default();
            stream.into_tls(&host, tls.as_ref()).await
        }
    }
}

#[cfg(unix)]
fn second_handle(stream: &impl std::os::fd::AsFd) -> std::io::Result<std::net::TcpStream> {
    stream.as_fd().try_clone_to_owned().map(Into::into)
}

#[cfg(windows)]
fn second_handle(
    stream: &impl std::os::windows::io::AsSocket,
) -> std::io::Result<std::net::TcpStream> {
    stream.as_socket().try_clone_to_owned().map(Into::into)
}

/// Says why there is no connection, and which setting is to blame.
fn not_connected(why: &lapin::Error, settings: &Valid) -> LinkError {
    let address = settings.address();
    let vhost = &settings.uri.vhost;
    match why.kind() {
        ErrorKind::ProtocolError(error) => {
            let said = error.get_message();
            match error.get_id() {
                403 => LinkError::Refused(format!(
                    "RabbitMQ at {address} refused the credentials: check the user name and the \
                     password in `url` ({said})"
                )),
                530 if said.as_str().contains("vhost") && !said.as_str().contains("is down") => {
                    let hint = if vhost.is_empty() {
                        "; a URL that ends in a slash names the virtual host with the empty name"
                    } else {
                        ""
                    };
                    LinkError::Refused(format!(
                        "RabbitMQ at {address} refused the virtual host `{vhost}`: check the last \
                         part of `url` ({said}){hint}"
                    ))
                }
                _ => LinkError::Unavailable(format!(
                    "RabbitMQ at {address} closed the connection: {said}"
                )),
            }
        }
        ErrorKind::InvalidProtocolVersion(_) | ErrorKind::ParsingError(_) => LinkError::Refused(
            format!("what listens at {address} does not speak AMQP 0-9-1: check `url` ({why})"),
        ),
        _ => LinkError::Unavailable(format!("RabbitMQ at {address} cannot be reached: {why}")),
    }
}
