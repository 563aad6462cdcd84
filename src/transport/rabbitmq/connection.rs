//! One life of one connection: opening it, watching it, ending it.
//!
//! Owns [`Live`] and how it comes to be. Promises that every wait is bounded, that a connection can be
//! killed at any time so that nothing more is written on it, and that errors name the setting to
//! change, without credentials. Which connection is used for what is in [`core`](super::core).

use std::net::Shutdown;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use async_rs::TokioRuntime;
use async_rs::traits::Reactor;
use futures::StreamExt;
use lapin::protocol::AMQPError;
use lapin::tcp::{AsyncTcpStream, OwnedTLSConfig};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{Channel, Connection, ConnectionProperties, ConnectionStatus, ErrorKind, Event};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::sending::Pool;
use super::settings::Valid;
use super::version::Version;

/// What a connection is for. Consuming and publishing never share one: an alarm at the broker
/// blocks a connection that publishes, acknowledgements included (FACTS 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Consuming,
    Publishing,
    Parking,
    Announcing,
}

impl Purpose {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Consuming => "consuming",
            Self::Publishing => "publishing",
            Self::Parking => "parking",
            Self::Announcing => "announcing",
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
    /// The broker's version, once it was asked.
    pub(super) version: OnceLock<Version>,
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
    pub(super) async fn close(&self, bound: Duration) {
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
pub(super) async fn open(
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
        connection.status().clone(),
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
            // One announcement at a time, the newest one next.
            Purpose::Announcing => 1,
        }),
        connection,
        version: OnceLock::new(),
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
    status: ConnectionStatus,
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
            // lapin tells the connection's listener of channel exceptions too (a missing exchange, an
            // acknowledgement that came too late): they end one channel, which its users see.
            Some(Event::Error(why)) if why.is_amqp_soft_error() && status.connected() => {}
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

/// A socket to the broker, with TLS where the URL asks for it.
type Stream = AsyncTcpStream<<TokioRuntime as Reactor>::TcpStream>;

/// Opens a socket for who speaks AMQP by himself.
pub(super) async fn dial(settings: &Valid, handle: &Handle) -> std::io::Result<Stream> {
    let runtime = TokioRuntime::tokio_with_handle(handle.clone());
    reach(settings.uri.clone(), runtime, Socket::default()).await
}

/// Opens the socket and keeps a second handle on it.
async fn reach(uri: AMQPUri, runtime: TokioRuntime, socket: Socket) -> std::io::Result<Stream> {
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

/// The broker's own words, without the user name that it puts at the end of some.
pub(super) fn said(error: &AMQPError) -> &str {
    let said = error.get_message().as_str();
    said.split(" for user").next().unwrap_or(said)
}

/// Says why there is no connection, and which setting is to blame.
fn not_connected(why: &lapin::Error, settings: &Valid) -> LinkError {
    let address = settings.address();
    let vhost = &settings.uri.vhost;
    match why.kind() {
        ErrorKind::ProtocolError(error) => {
            let said = said(error);
            match error.get_id() {
                403 => LinkError::Refused(format!(
                    "RabbitMQ at {address} refused the credentials: check the user name and the \
                     password in `url` ({said})"
                )),
                530 if said.contains("vhost") && !said.contains("is down") => {
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
