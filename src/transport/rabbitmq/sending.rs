//! Sends one message and learns what became of it. Publisher and parking place share it.
//!
//! Owns the pool of channels of a connection and the one way in which a message is sent:
//! persistent, mandatory, confirmed, **one unconfirmed message per channel**. (With several on one
//! channel `lapin` attaches a returned message to the wrong confirm, and an unroutable message is
//! reported as stored: FACTS 7.)
//!
//! Promises that [`SendError::Refused`] is said only when no copy can be at the broker, and that
//! after an answer of [`SendError::Unknown`] by time-out nothing of the message is sent later: the
//! connection is killed first. Sends nothing twice.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{BasicProperties, Channel, Confirmation, ErrorKind};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use super::connection::{Live, Purpose, said};
use super::core::Core;

/// A message in the broker's form.
pub(super) struct Message {
    pub(super) exchange: ShortString,
    pub(super) routing_key: ShortString,
    pub(super) properties: BasicProperties,
    pub(super) body: bytes::Bytes,
}

/// Why a message is not known to be stored.
#[derive(Debug)]
pub(super) enum SendError {
    /// Surely no copy at the broker.
    Refused(String),
    /// A copy may be there.
    Unknown(String),
}

/// How long a confirm counts as proof that the broker reads from the connection.
const FRESH: Duration = Duration::from_secs(1);

/// The channels of one connection.
pub(super) struct Pool {
    /// One permit per channel; given in the order of the requests.
    permits: Semaphore,
    state: Mutex<PoolState>,
    knocking: tokio::sync::Mutex<()>,
}

struct PoolState {
    /// Open channels that nobody uses.
    free: Vec<Channel>,
    /// When the broker last answered to a message on this connection.
    answered: Option<Instant>,
    /// The user may not write to the default exchange, so nobody knocks.
    may_not_knock: bool,
}

impl Pool {
    pub(super) fn new(channels: u16) -> Self {
        Self {
            permits: Semaphore::new(usize::from(channels)),
            state: Mutex::new(PoolState {
                free: Vec::new(),
                answered: None,
                may_not_knock: false,
            }),
            knocking: tokio::sync::Mutex::new(()),
        }
    }

    /// Lets nobody begin any more; who waits for a channel is told.
    pub(super) fn stop(&self) {
        self.permits.close();
    }

    fn take(&self) -> Option<Channel> {
        let mut state = self.lock();
        loop {
            let channel = state.free.pop()?;
            if channel.status().connected() {
                return Some(channel);
            }
        }
    }

    fn give_back(&self, channel: Channel) {
        self.lock().free.push(channel);
    }

    fn answered(&self) {
        self.lock().answered = Some(Instant::now());
    }

    /// Whether to find out first if the broker reads.
    fn wants_knock(&self) -> bool {
        let state = self.lock();
        let fresh = state
            .answered
            .is_some_and(|answered| answered.elapsed() < FRESH);
        !fresh && !state.may_not_knock
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends a message. To be called on the own runtime, in a task that is not aborted.
pub(super) async fn send(core: &Core, purpose: Purpose, message: Message) -> Result<(), SendError> {
    let settings = &core.settings;
    let mut lost = String::new();
    // A connection can be lost while the message waits for a channel. Nothing of it was sent then,
    // so it may go to the next connection; twice, not for ever.
    for _ in 0..2 {
        let live = core
            .live(purpose)
            .await
            .map_err(|why| not_sent(&why.into_text()))?;
        let Ok(_permit) = ready(&live, settings.operation_timeout).await? else {
            lost = format!("the connection to {} was lost", live.address);
            continue;
        };
        let channel = match live.pool.take() {
            Some(channel) => channel,
            None => open_channel(&live, settings.operation_timeout).await?,
        };
        let result = publish(&live, &channel, message, settings.confirm_timeout).await;
        if channel.status().connected() {
            live.pool.give_back(channel);
        }
        return result;
    }
    Err(not_sent(&lost))
}

/// Waits for a free channel on a connection that the broker reads from. `Ok(Err(_))` when the
/// connection ended meanwhile.
async fn ready(live: &Live, bound: Duration) -> Result<Result<SemaphorePermit<'_>, ()>, SendError> {
    // Waiting for a channel has no bound of its own: each message before this one has. Only an
    // alarm could make it endless.
    let permit = match live.pool.permits.try_acquire() {
        // Overtakes nobody: a permit that others wait for is never free.
        Ok(permit) => Ok(permit),
        Err(_) => tokio::select! {
            permit = live.pool.permits.acquire() => permit,
            reason = live.blocked_for(bound) => return Err(alarm(&reason)),
        },
    };
    let Ok(permit) = permit else {
        return Ok(Err(()));
    };
    if live.blocked().is_none() && live.pool.wants_knock() {
        // One for all who wait: it is one message too many that an alarm catches, at most.
        let _one = tokio::select! {
            one = live.pool.knocking.lock() => one,
            reason = live.blocked_for(bound) => return Err(alarm(&reason)),
        };
        if live.is_usable() && live.blocked().is_none() && live.pool.wants_knock() {
            knock(live, bound).await?;
        }
    }
    if live.blocked().is_some() {
        tokio::select! {
            () = live.unblocked() => {}
            reason = live.blocked_for(bound) => return Err(alarm(&reason)),
        }
    }
    Ok(if live.is_usable() {
        Ok(permit)
    } else {
        Err(())
    })
}

/// Finds out whether the broker reads from this connection, by an empty message that no queue takes.
///
/// The broker says that it blocks a connection only when a message arrives on it. It then stops in
/// the middle of that message, and takes the rest when the alarm is over, even if the connection is
/// gone by then: a real message would be stored that was given up long ago, once more for every
/// try. So it is this one that is caught.
async fn knock(live: &Live, bound: Duration) -> Result<(), SendError> {
    let channel = match live.pool.take() {
        Some(channel) => channel,
        None => open_channel(live, bound).await?,
    };
    let sent = async {
        let options = BasicPublishOptions::default();
        let properties = BasicProperties::default();
        let nowhere = ShortString::from("laneway.knock");
        channel
            .basic_publish(ShortString::default(), nowhere, options, &[], properties)
            .await?
            .await
    };
    tokio::select! {
        answer = timeout(bound, sent) => match answer {
            Ok(Ok(_)) => live.pool.answered(),
            // An answer too: the user may not write to the default exchange. Once is enough, each
            // leaves an error in the broker's log; the first message of a pause then takes its chance.
            Ok(Err(why)) if is_answer(&why) => {
                live.pool.answered();
                live.pool.lock().may_not_knock = true;
            }
            Ok(Err(why)) => {
                return Err(not_sent(&format!("the connection was lost: {why}")));
            }
            // The channel is dropped with its unconfirmed message: a second one on it could get
            // the answer that is meant for the first.
            Err(_) if live.blocked().is_some() => return Ok(()),
            Err(_) => {
                live.kill("the broker did not confirm an empty message");
                return Err(not_sent("the broker does not answer"));
            }
        },
        reason = live.blocked_for(bound) => return Err(alarm(&reason)),
    }
    if channel.status().connected() {
        live.pool.give_back(channel);
    }
    Ok(())
}

async fn open_channel(live: &Live, bound: Duration) -> Result<Channel, SendError> {
    let opening = async {
        let channel = live.connection.create_channel().await?;
        // Without this every message would be reported as "not requested", which is no error to
        // lapin (FACTS 8).
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await?;
        Ok::<_, lapin::Error>(channel)
    };
    tokio::select! {
        opened = timeout(bound, opening) => match opened {
            Ok(Ok(channel)) => Ok(channel),
            Ok(Err(why)) => Err(not_sent(&format!("no channel: {why}"))),
            Err(_) => Err(match live.blocked() {
                Some(reason) => alarm(&reason),
                None => {
                    live.kill("the broker did not open a channel");
                    not_sent("the broker does not answer")
                }
            }),
        },
        reason = live.blocked_for(bound) => Err(alarm(&reason)),
    }
}

async fn publish(
    live: &Live,
    channel: &Channel,
    message: Message,
    bound: Duration,
) -> Result<(), SendError> {
    let options = BasicPublishOptions {
        mandatory: true,
        ..BasicPublishOptions::default()
    };
    let exchange = message.exchange;
    let writing = channel.basic_publish(
        exchange.clone(),
        message.routing_key,
        options,
        &message.body,
        message.properties,
    );
    let mut writing = std::pin::pin!(writing);
    let deadline = tokio::time::Instant::now() + bound;
    let confirm = match tokio::time::timeout_at(deadline, writing.as_mut()).await {
        Ok(Ok(confirm)) => confirm,
        // The last frame was never written, so the broker has no whole message.
        Ok(Err(why)) => return Err(refused(&why, &exchange)),
        Err(_) => {
            let reason = live.blocked();
            live.kill("a message could not be written in time");
            // Whether it was written after all is known once the connection has ended.
            let written = timeout(Duration::from_secs(5), writing).await;
            return Err(match (written, reason) {
                (Ok(Err(_)), Some(reason)) => alarm(&reason),
                (Ok(Err(_)), None) => not_sent("the connection took no more data"),
                _ => SendError::Unknown(format!("no confirm within {bound:?}")),
            });
        }
    };
    match tokio::time::timeout_at(deadline, confirm).await {
        Ok(Ok(Confirmation::Ack(None))) => {
            live.pool.answered();
            Ok(())
        }
        Ok(Ok(Confirmation::Ack(Some(returned)))) => {
            live.pool.answered();
            Err(SendError::Refused(format!(
                "no route: exchange `{}` has no queue for the message ({} {})",
                exchange, returned.reply_code, returned.reply_text
            )))
        }
        Ok(Ok(Confirmation::Nack(_))) => {
            live.pool.answered();
            Err(SendError::Refused(format!(
                "the broker said no (nack) to a message for exchange `{}`: a queue is full and \
                 rejects, or could not store it",
                exchange
            )))
        }
        Ok(Ok(Confirmation::NotRequested)) => {
            live.kill("a channel was not in confirm mode");
            Err(SendError::Unknown(
                "the channel was not in confirm mode".to_owned(),
            ))
        }
        Ok(Err(why)) if is_answer(&why) => {
            live.pool.answered();
            Err(refused(&why, &exchange))
        }
        Ok(Err(why)) => Err(SendError::Unknown(format!(
            "the connection was lost before the confirm: {why}"
        ))),
        Err(_) => {
            // Before anything else is sent: what of it lies unsent dies with the connection.
            live.kill("a message was not confirmed in time");
            Err(SendError::Unknown(format!("no confirm within {bound:?}")))
        }
    }
}

/// Whether an error is the broker's answer to the one message of the channel (a channel exception).
fn is_answer(why: &lapin::Error) -> bool {
    why.is_amqp_soft_error()
}

fn refused(why: &lapin::Error, exchange: &ShortString) -> SendError {
    match why.kind() {
        ErrorKind::ProtocolError(error) if error.get_id() == 404 => SendError::Refused(format!(
            "there is no exchange `{}` ({})",
            exchange,
            said(error)
        )),
        ErrorKind::ProtocolError(error) => {
            SendError::Refused(format!("exchange `{}`: {}", exchange, said(error)))
        }
        _ => not_sent(&why.to_string()),
    }
}

fn not_sent(why: &str) -> SendError {
    SendError::Refused(format!("not sent: {why}"))
}

fn alarm(reason: &str) -> SendError {
    SendError::Refused(format!(
        "not sent: broker blocks publishing (memory or disk alarm: {reason})"
    ))
}
