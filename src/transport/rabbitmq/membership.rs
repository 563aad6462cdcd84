//! The group of the instances that share the shards of an endpoint.
//!
//! ```text
//! announce ──► exchange `<group>.members` (fanout, durable) ──► a queue per member ──► heard
//!   announcing connection                                         consuming connection, own channel
//! ```
//! A member declares the exchange, which changes nothing if it is there, and a queue of its own that is
//! exclusive to its connection, short, and whose messages live as long as a member does: it is gone
//! with the member, and never fills. What is announced is JSON, not persistent.
//!
//! # Why announcements have a connection of their own
//! Not the consuming one: while the broker has an alarm it reads nothing from a connection that
//! publishes, so a single announcement would block the acknowledgements and probes of all sessions
//! (FACTS 9). Not the publishing one: a message that is not confirmed in time ends its connection, and
//! an announcement must not make an application's messages *unknown*; and a burst of those, which the
//! broker slows down, must not make this instance look dead.
//!
//! During an alarm nobody's announcement gets through. Members hear this, because they do not hear
//! themselves either, and leave everything as it is; see [`laneway_actors::balance`].

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use laneway_actors::balance::EXPIRY;
use laneway_actors::port::{Announcement, Announcer, Joined, Membership, SourceError};
use lapin::options::{
    BasicConsumeOptions, BasicQosOptions, ExchangeDeclareOptions, QueueBindOptions,
    QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Consumer, ExchangeKind};
use tokio::sync::broadcast;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::RabbitMq;
use super::announcement::{decode, encode};
use super::connection::{Live, Purpose};
use super::core::Core;
use super::sending::{Message, SendError, send};
use super::source::{refused, stopped, unavailable};
use super::topology::{administrative, named, source_error};
use crate::topology::members_name;
use crate::transport::announcements::{WAITING_AT_MOST, heard};

/// A group, and the queues that are its shards.
pub(super) struct GroupMembership {
    broker: RabbitMq,
    group: Arc<Group>,
    queues: Arc<[String]>,
}

struct Group {
    name: String,
    /// Something was announced that this release cannot read; said once.
    warned: AtomicBool,
}

impl Group {
    fn exchange(&self) -> Result<ShortString, SourceError> {
        named("exchange", &members_name(&self.name))
    }
}

impl GroupMembership {
    pub(super) fn new(broker: RabbitMq, group: &str, queues: &[String]) -> Self {
        Self {
            broker,
            group: Arc::new(Group {
                name: group.to_owned(),
                warned: AtomicBool::new(false),
            }),
            queues: queues.into(),
        }
    }
}

impl Membership for GroupMembership {
    fn name(&self) -> &str {
        &self.group.name
    }

    fn join(&self) -> BoxFuture<'_, Result<Joined, SourceError>> {
        async move {
            let core = self.broker.core().map_err(|why| refused(why, None))?;
            let joining = {
                let (core, group) = (Arc::clone(&core), Arc::clone(&self.group));
                async move { join(&core, group).await }
            };
            // Who asked and has gone drops what comes, and with it the place.
            let receiver = core.run(joining).await.unwrap_or_else(|| Err(stopped()))?;
            Ok(Joined {
                heard: heard(receiver),
                announcer: Arc::new(BrokerAnnouncer {
                    broker: self.broker.clone(),
                    group: Arc::clone(&self.group),
                }),
            })
        }
        .boxed()
    }

    fn unattended(
        &self,
        shards: BTreeSet<usize>,
    ) -> BoxFuture<'_, Result<BTreeSet<usize>, SourceError>> {
        async move {
            let core = self.broker.core().map_err(|why| refused(why, None))?;
            let looking = {
                let (core, queues) = (Arc::clone(&core), Arc::clone(&self.queues));
                async move { look(&core, &queues, shards).await }
            };
            core.run(looking).await.unwrap_or_else(|| Err(stopped()))
        }
        .boxed()
    }
}

// ---- hearing

/// Takes a place in the group. To be called on the own runtime, in a task that is not aborted.
async fn join(
    core: &Core,
    group: Arc<Group>,
) -> Result<broadcast::Receiver<Announcement>, SourceError> {
    let exchange = group.exchange()?;
    // Begins with the name of the group, so that permissions by prefix cover it.
    let queue = format!("{}.member-{:032x}", group.name, fastrand::u128(..));
    let queue = named("queue", &queue)?;
    let what = format!("group `{}`", group.name);
    let bound = core.settings.operation_timeout;
    let live = administrative(core).await?;
    let channel = open_channel(&live, &what, bound).await?;
    let consumer = match timeout(bound, take_place(&channel, exchange, queue)).await {
        Ok(Ok(consumer)) => consumer,
        Ok(Err(why)) => return Err(source_error(&what, why)),
        Err(_) => {
            tokio::spawn(async move { live.close_channel(&channel, bound).await });
            return Err(no_answer(&what, "joining", bound));
        }
    };
    let (sender, receiver) = broadcast::channel(WAITING_AT_MOST);
    let place = Place {
        group,
        live,
        channel,
        sender,
        shut_down: core.closing.clone(),
        heartbeat: core.settings.heartbeat,
        bound,
    };
    core.handle().spawn(keep(place, consumer));
    Ok(receiver)
}

/// A connection that gives no channel is given no more work: the next try opens another.
async fn open_channel(live: &Live, what: &str, bound: Duration) -> Result<Channel, SourceError> {
    match timeout(bound, live.connection.create_channel()).await {
        Ok(Ok(channel)) => Ok(channel),
        Ok(Err(why)) => {
            live.retire();
            Err(source_error(what, why))
        }
        Err(_) => {
            live.retire();
            Err(no_answer(what, "opening a channel", bound))
        }
    }
}

fn no_answer(what: &str, doing: &str, bound: Duration) -> SourceError {
    unavailable(
        format!("{what}: the broker did not answer to {doing} within {bound:?}"),
        None,
    )
}

async fn take_place(
    channel: &Channel,
    exchange: ShortString,
    queue: ShortString,
) -> Result<Consumer, lapin::Error> {
    // Durable: the exchange belongs to the endpoint and not to one run of it, and a member that is
    // connected again needs it at once.
    let durable = ExchangeDeclareOptions {
        durable: true,
        ..ExchangeDeclareOptions::default()
    };
    channel
        .exchange_declare(
            exchange.clone(),
            ExchangeKind::Fanout,
            durable,
            FieldTable::default(),
        )
        .await?;
    let own = QueueDeclareOptions {
        exclusive: true,
        auto_delete: true,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(queue.clone(), own, arguments())
        .await?;
    channel
        .queue_bind(
            queue.clone(),
            exchange,
            ShortString::default(),
            QueueBindOptions::default(),
            FieldTable::default(),
        )
        .await?;
    let unacknowledged = BasicConsumeOptions {
        no_ack: true,
        ..BasicConsumeOptions::default()
    };
    let tag = format!("laneway-member-{:016x}", fastrand::u64(..));
    channel
        .basic_consume(queue, tag.into(), unacknowledged, FieldTable::default())
        .await
}

/// Old announcements go: by age, because they say nothing about the present, and by number.
fn arguments() -> FieldTable {
    let mut arguments = FieldTable::default();
    let at_most = i64::try_from(WAITING_AT_MOST).unwrap_or(i64::MAX);
    let ttl = i64::try_from(EXPIRY.as_millis()).unwrap_or(i64::MAX);
    arguments.insert("x-max-length".into(), AMQPValue::LongLongInt(at_most));
    arguments.insert("x-message-ttl".into(), AMQPValue::LongLongInt(ttl));
    arguments
}

/// What the keeper of a place needs. Not the core: that one would never be dropped.
struct Place {
    group: Arc<Group>,
    live: Arc<Live>,
    channel: Channel,
    sender: broadcast::Sender<Announcement>,
    shut_down: CancellationToken,
    heartbeat: Duration,
    bound: Duration,
}

/// Hands on what is heard, until nobody listens or the connection is lost; then leaves.
async fn keep(place: Place, mut consumer: Consumer) {
    let hearing = async {
        while let Some(delivery) = consumer.next().await {
            match delivery {
                Ok(delivery) => place.hand_on(&delivery.data),
                Err(why) => return format!("the channel was lost: {why}"),
            }
        }
        "the broker cancelled the consumer".to_owned()
    };
    let lost = tokio::select! {
        () = place.sender.closed() => None,
        () = place.shut_down.cancelled() => None,
        () = place.live.dead.cancelled() => Some("the connection was lost".to_owned()),
        lost = hearing => Some(lost),
        lost = place.probe() => Some(lost),
    };
    let group = &place.group.name;
    match lost {
        Some(cause) => warn!(target: "laneway", %group, %cause, "place in the group lost"),
        None => debug!(target: "laneway", %group, "left the group"),
    }
    // Ends the stream, before the close is waited for.
    drop(place.sender);
    place.live.close_channel(&place.channel, place.bound).await;
}

impl Place {
    fn hand_on(&self, body: &[u8]) {
        match decode(body) {
            Ok(announcement) => {
                // An error means that nobody listens any more, which ends the keeper.
                let _ = self.sender.send(announcement);
            }
            Err(why) => {
                if !self.group.warned.swap(true, Ordering::Relaxed) {
                    warn!(
                        target: "laneway",
                        group = %self.group.name,
                        %why,
                        "an announcement cannot be read, and is ignored like all others of its kind"
                    );
                }
            }
        }
    }

    /// Asks the broker for signs of life; returns when there are none. A connection can be dead for long
    /// without a word, and a silent group looks like one in which nobody speaks.
    async fn probe(&self) -> String {
        let mut ticks = interval(self.heartbeat / 2);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            // Changes nothing: without acknowledgements there is no prefetch.
            let asked = self.channel.basic_qos(1, BasicQosOptions::default());
            match timeout(self.heartbeat, asked).await {
                Ok(Ok(())) => {}
                Ok(Err(why)) => return format!("the channel was lost: {why}"),
                Err(_) => {
                    self.live.retire();
                    let heartbeat = self.heartbeat;
                    return format!("the broker has not answered for a heartbeat ({heartbeat:?})");
                }
            }
        }
    }
}

// ---- speaking

struct BrokerAnnouncer {
    broker: RabbitMq,
    group: Arc<Group>,
}

impl Announcer for BrokerAnnouncer {
    fn announce(&self, announcement: Announcement) -> BoxFuture<'static, Result<(), SourceError>> {
        let (broker, group) = (self.broker.clone(), Arc::clone(&self.group));
        async move {
            let core = broker.core().map_err(|why| refused(why, None))?;
            let message = Message {
                exchange: group.exchange()?,
                routing_key: ShortString::default(),
                // Not persistent: it is old before it could be written down.
                properties: BasicProperties::default()
                    .with_content_type("application/json".into())
                    .with_delivery_mode(1),
                body: encode(&announcement).map_err(|why| {
                    refused(format!("the announcement cannot be encoded: {why}"), None)
                })?,
            };
            let sending = {
                let core = Arc::clone(&core);
                async move { send(&core, Purpose::Announcing, message).await }
            };
            match core.run(sending).await {
                Some(Ok(())) => Ok(()),
                Some(Err(SendError::Refused(why) | SendError::Unknown(why))) => {
                    Err(unavailable(format!("group `{}`: {why}", group.name), None))
                }
                None => Err(stopped()),
            }
        }
        .boxed()
    }
}

// ---- looking

/// Asks for the consumers of the shards, one after the other on one channel. To be called on the own
/// runtime, in a task that is not aborted.
async fn look(
    core: &Core,
    queues: &[String],
    shards: BTreeSet<usize>,
) -> Result<BTreeSet<usize>, SourceError> {
    let bound = core.settings.operation_timeout;
    let live = administrative(core).await?;
    let channel = open_channel(&live, "looking at shards", bound).await?;
    let result = ask_all(&channel, queues, shards, bound).await;
    // In a task of its own, because it can take long: a queue that does not answer keeps the channel.
    tokio::spawn(async move { live.close_channel(&channel, bound).await });
    result
}

async fn ask_all(
    channel: &Channel,
    queues: &[String],
    shards: BTreeSet<usize>,
    bound: Duration,
) -> Result<BTreeSet<usize>, SourceError> {
    let mut deserted = BTreeSet::new();
    for shard in shards {
        let queue = queues.get(shard);
        let queue = queue.ok_or_else(|| refused(format!("there is no shard {shard}"), None))?;
        let name = named("queue", queue)?;
        let what = format!("queue `{queue}`");
        let passive = QueueDeclareOptions {
            passive: true,
            ..QueueDeclareOptions::default()
        };
        let asked = channel.queue_declare(name, passive, FieldTable::default());
        match timeout(bound, asked).await {
            // A quorum queue shows one consumer however many there are; none is none (FACTS 42).
            Ok(Ok(declared)) if declared.consumer_count() == 0 => drop(deserted.insert(shard)),
            Ok(Ok(_)) => {}
            Ok(Err(why)) => return Err(source_error(&what, why)),
            Err(_) => return Err(no_answer(&what, "looking at its consumers", bound)),
        }
    }
    Ok(deserted)
}
