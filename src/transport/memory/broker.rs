//! The broker's names: queues and exchanges, routing, and the controls of the test kit.
//!
//! Owns the registry. It is locked before a queue and never while holding one; opening a session
//! happens under it, so that [`MemoryBroker::make_unreachable`] misses none.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use laneway_actors::port::{
    Joined, Membership, ParkedMessages, Parking, Publisher, Source, SourceError,
};
use laneway_actors::{Envelope, SessionState};
use tokio::sync::Notify;

use super::live_queue::LiveQueue;
use super::membership::{Groups, MemoryMembership};
use super::parked::MemoryParked;
use super::parking::MemoryParking;
use super::publisher::MemoryPublisher;
use super::queue::{ConsumerId, QueueStatus};
use super::source::MemorySource;
use super::topology::{Arguments, refused};
use crate::topology::{ParkingSpec, QueueSpec};
use crate::transport::Transport;

/// How an exchange chooses among the queues that are bound to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExchangeKind {
    /// Every bound queue gets a copy.
    Fanout,
    /// Every queue bound with exactly the message's routing key gets a copy.
    Direct,
}

/// The embedded broker: a handle, cheap to clone; the messages live as long as one of its handles,
/// sources, sessions or publishers does.
///
/// See the [module](super) for what it promises and for its use as a test kit. In what is asked about
/// a queue (status, messages, waiting), a queue that does not exist is an empty one.
#[derive(Clone, Default)]
pub struct MemoryBroker {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    registry: RwLock<Registry>,
    queue_added: Notify,
    groups: Groups,
}

#[derive(Default)]
struct Registry {
    unreachable: bool,
    queues: HashMap<Arc<str>, Arc<LiveQueue>>,
    exchanges: HashMap<String, Exchange>,
}

struct Exchange {
    kind: ExchangeKind,
    /// Bound queues by name with their routing keys; sorted, because that is the order of locking.
    bindings: BTreeMap<Arc<str>, BTreeSet<String>>,
}

/// Where a message is to go.
#[derive(Debug, Clone, Copy)]
pub(super) enum Route<'a> {
    Queue(&'a str),
    Exchange {
        exchange: &'a str,
        routing_key: &'a str,
    },
}

impl MemoryBroker {
    /// An empty broker.
    pub fn new() -> Self {
        Self::default()
    }

    fn registry(&self) -> RwLockReadGuard<'_, Registry> {
        let registry = &self.shared.registry;
        registry.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn registry_mut(&self) -> RwLockWriteGuard<'_, Registry> {
        let registry = &self.shared.registry;
        registry.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, queue: &str) -> Option<Arc<LiveQueue>> {
        self.registry().queues.get(queue).cloned()
    }

    /// Declares a queue with its parking place, whatever the specification says about who owns it:
    /// created if missing, left as it is if it exists with the same arguments.
    ///
    /// # Errors
    /// [`SourceError::Refused`] for each argument that differs from what exists; then nothing is
    /// created. [`SourceError::Unavailable`] while the broker is unreachable.
    pub fn declare_queue(&self, queue: &QueueSpec) -> Result<(), Vec<SourceError>> {
        let mut registry = self.registry_mut();
        registry.reachable().map_err(|error| vec![error])?;

        let mut wanted = vec![(queue.name.as_str(), Arguments::of(queue))];
        if let Some(parking) = &queue.parking {
            wanted.push((&parking.queue, Arguments::of_parking(queue)));
        }
        let mut problems: Vec<_> = wanted
            .iter()
            .filter_map(|(name, wanted)| {
                let existing = registry.queues.get(*name)?;
                Some(existing.arguments().differences(*wanted, name))
            })
            .flatten()
            .collect();
        if let Some(parking) = &queue.parking {
            problems.extend(registry.kind_differs(&parking.exchange, ExchangeKind::Fanout));
        }
        if !problems.is_empty() {
            return Err(problems);
        }

        for (name, arguments) in wanted {
            registry.add_queue(name, arguments);
        }
        if let Some(parking) = &queue.parking {
            registry.add_exchange(&parking.exchange, ExchangeKind::Fanout);
            registry.bind(&parking.exchange, &parking.queue, "");
        }
        drop(registry);
        self.shared.queue_added.notify_waiters();
        Ok(())
    }

    /// Checks that a queue which somebody else owns is there, and its parking place too.
    pub(super) fn check(&self, queue: &QueueSpec) -> Result<(), Vec<SourceError>> {
        let registry = self.registry();
        registry.reachable().map_err(|error| vec![error])?;
        let mut problems = Vec::new();
        if !registry.queues.contains_key(queue.name.as_str()) {
            problems.push(missing_queue(&queue.name));
        }
        if let Some(ParkingSpec {
            exchange,
            queue: parked,
        }) = &queue.parking
        {
            if !registry.queues.contains_key(parked.as_str()) {
                problems.push(missing_queue(parked));
            }
            match registry.exchanges.get(exchange) {
                None => problems.push(refused(missing_exchange(exchange))),
                Some(_) => problems.extend(registry.kind_differs(exchange, ExchangeKind::Fanout)),
            }
        }
        if problems.is_empty() {
            Ok(())
        } else {
            Err(problems)
        }
    }

    /// Declares an exchange. Declaring it again changes nothing.
    ///
    /// # Errors
    /// [`SourceError::Refused`] when it exists with another kind.
    pub fn declare_exchange(&self, exchange: &str, kind: ExchangeKind) -> Result<(), SourceError> {
        let mut registry = self.registry_mut();
        match registry.kind_differs(exchange, kind) {
            Some(error) => Err(error),
            None => {
                registry.add_exchange(exchange, kind);
                Ok(())
            }
        }
    }

    /// Binds a queue to an exchange. Binding it again changes nothing.
    ///
    /// # Errors
    /// [`SourceError::Refused`] when either does not exist.
    pub fn bind(&self, exchange: &str, queue: &str, routing_key: &str) -> Result<(), SourceError> {
        let mut registry = self.registry_mut();
        if !registry.queues.contains_key(queue) {
            return Err(missing_queue(queue));
        }
        if !registry.bind(exchange, queue, routing_key) {
            return Err(refused(missing_exchange(exchange)));
        }
        Ok(())
    }

    /// Removes an exchange with its bindings; the bound queues stay. Publishing and parking through
    /// it are refused from now on. Declaring the queue again brings a parking exchange back.
    pub fn remove_exchange(&self, exchange: &str) {
        self.registry_mut().exchanges.remove(exchange);
    }

    /// Lets a queue refuse messages while `max` are ready (RabbitMQ's `reject-publish`); `None`
    /// takes the limit away, and is the default.
    pub fn limit_length(&self, queue: &str, max: Option<usize>) {
        if let Some(queue) = self.find(queue) {
            queue.limit_length(max);
        }
    }

    /// Ends every session of a queue as if its connection had been cut: the session is marked ended,
    /// its stream yields [`SourceError::Unavailable`] and ends, and what it held is back in the queue,
    /// in the original order and marked redelivered, when this returns.
    pub fn cut_sessions(&self, queue: &str) {
        if let Some(queue) = self.find(queue) {
            let what = format!("the connection was cut (queue `{}`)", queue.name());
            queue.lose_all(&what);
        }
    }

    /// Ends the place of every member of a group as if its connection had been cut. The sessions on
    /// the shards stay.
    pub fn cut_members(&self, group: &str) {
        self.shared.groups.cut(group);
    }

    /// Cuts every session of every queue and every place in a group, and refuses everything with
    /// [`SourceError::Unavailable`] until [`make_reachable`](Self::make_reachable). Publishing and
    /// parking are refused as well: nothing was sent, and that is known.
    pub fn make_unreachable(&self) {
        let queues: Vec<_> = {
            let mut registry = self.registry_mut();
            registry.unreachable = true;
            registry.queues.values().cloned().collect()
        };
        for queue in queues {
            queue.lose_all(UNREACHABLE);
        }
        self.shared.groups.cut_all();
    }

    /// Ends what [`make_unreachable`](Self::make_unreachable) began.
    pub fn make_reachable(&self) {
        self.registry_mut().unreachable = false;
    }

    /// What a queue holds, and how many sessions are open on it.
    pub fn status(&self, queue: &str) -> QueueStatus {
        self.find(queue)
            .map_or_else(QueueStatus::default, |queue| queue.status())
    }

    /// The messages a queue holds, ready and unsettled, in the order of publishing.
    pub fn messages(&self, queue: &str) -> Vec<Envelope> {
        let messages = self.find(queue).map(|queue| queue.messages());
        messages
            .into_iter()
            .flatten()
            .map(Arc::unwrap_or_clone)
            .collect()
    }

    /// Waits until a queue holds nothing: everything published to it was acknowledged. Driven by
    /// events; put a time-out around it.
    pub async fn wait_empty(&self, queue: &str) {
        self.wait_until(queue, |status| status.is_empty()).await;
    }

    /// Waits until a queue's status satisfies the condition (two sessions are open, three messages are
    /// parked), which is asked at once and after each
    /// change (changes in quick succession may be seen as one). Driven by events; put a time-out
    /// around it.
    pub async fn wait_until(&self, queue: &str, condition: impl Fn(QueueStatus) -> bool) {
        let live = loop {
            // Enabled before looking, so that a queue added in between is not missed.
            let mut added = pin!(self.shared.queue_added.notified());
            added.as_mut().enable();
            if let Some(live) = self.find(queue) {
                break live;
            }
            if condition(QueueStatus::default()) {
                return;
            }
            added.await;
        };
        live.wait_until(condition).await;
    }

    /// What a queue holds that must exist.
    pub(super) fn existing(&self, queue: &str) -> Result<QueueStatus, SourceError> {
        let registry = self.registry();
        registry.reachable()?;
        let live = registry.queues.get(queue);
        Ok(live.ok_or_else(|| missing_queue(queue))?.status())
    }

    /// Joins a group, under the registry's lock, so that [`make_unreachable`](Self::make_unreachable)
    /// misses no place.
    pub(super) fn join(&self, join: impl FnOnce(&Groups) -> Joined) -> Result<Joined, SourceError> {
        let registry = self.registry();
        registry.reachable()?;
        Ok(join(&self.shared.groups))
    }

    /// Opens a session.
    pub(super) fn open(
        &self,
        queue: &str,
        state: &Arc<SessionState>,
        credits: u16,
    ) -> Result<(Arc<LiveQueue>, ConsumerId), SourceError> {
        let registry = self.registry();
        registry.reachable()?;
        let live = registry
            .queues
            .get(queue)
            .ok_or_else(|| missing_queue(queue))?;
        let consumer = live.open(Arc::clone(state), credits);
        Ok((Arc::clone(live), consumer))
    }

    /// Stores a message in every queue the route leads to, or in none.
    ///
    /// # Errors
    /// Why it was refused.
    pub(super) fn send(&self, route: Route<'_>, message: Arc<Envelope>) -> Result<(), String> {
        let mut targets = self.registry().targets(route)?;
        let full = match targets.pop() {
            Some(only) if targets.is_empty() => {
                only.publish(message).map_err(|_| Arc::clone(only.name()))
            }
            Some(last) => {
                targets.push(last);
                LiveQueue::publish_to_all(&targets, &message)
            }
            None => Ok(()),
        };
        full.map_err(|queue| format!("queue `{queue}` is full"))
    }
}

impl Registry {
    fn reachable(&self) -> Result<(), SourceError> {
        if self.unreachable {
            return Err(SourceError::Unavailable {
                what: UNREACHABLE.to_owned(),
                source: None,
            });
        }
        Ok(())
    }

    fn add_queue(&mut self, name: &str, arguments: Arguments) {
        if !self.queues.contains_key(name) {
            let queue = LiveQueue::new(name, arguments);
            self.queues.insert(Arc::clone(queue.name()), queue);
        }
    }

    fn add_exchange(&mut self, name: &str, kind: ExchangeKind) {
        self.exchanges
            .entry(name.to_owned())
            .or_insert_with(|| Exchange {
                kind,
                bindings: BTreeMap::new(),
            });
    }

    /// Whether the exchange exists, and so the binding does now.
    fn bind(&mut self, exchange: &str, queue: &str, routing_key: &str) -> bool {
        let Some(exchange) = self.exchanges.get_mut(exchange) else {
            return false;
        };
        let keys = exchange.bindings.entry(queue.into()).or_default();
        keys.insert(routing_key.to_owned());
        true
    }

    fn kind_differs(&self, exchange: &str, wanted: ExchangeKind) -> Option<SourceError> {
        let kind = self.exchanges.get(exchange)?.kind;
        (kind != wanted).then(|| {
            refused(format!(
                "exchange `{exchange}` exists with type = {kind:?}, but {wanted:?} is needed: \
                 choose another name"
            ))
        })
    }

    /// The queues a route leads to, sorted by name; at least one.
    fn targets(&self, route: Route<'_>) -> Result<Vec<Arc<LiveQueue>>, String> {
        if self.unreachable {
            return Err(UNREACHABLE.to_owned());
        }
        let (exchange, routing_key) = match route {
            Route::Exchange {
                exchange,
                routing_key,
            } if !exchange.is_empty() => (exchange, routing_key),
            // The exchange without a name is AMQP's default one: the routing key names the queue.
            Route::Queue(queue)
            | Route::Exchange {
                routing_key: queue, ..
            } => {
                let found = self.queues.get(queue);
                let found = found.ok_or_else(|| missing_queue(queue).to_string())?;
                return Ok(vec![Arc::clone(found)]);
            }
        };
        let known = self
            .exchanges
            .get(exchange)
            .ok_or_else(|| missing_exchange(exchange))?;
        let targets: Vec<_> = known
            .bindings
            .iter()
            .filter(|(_, keys)| known.kind == ExchangeKind::Fanout || keys.contains(routing_key))
            .filter_map(|(queue, _)| self.queues.get(queue).cloned())
            .collect();
        if targets.is_empty() {
            // Without the routing key: it may be an ordering key, which no error may show.
            return Err(format!("no queue bound to exchange `{exchange}` takes it"));
        }
        Ok(targets)
    }
}

const UNREACHABLE: &str = "the embedded broker was made unreachable";

fn missing_queue(queue: &str) -> SourceError {
    refused(format!("queue `{queue}` does not exist"))
}

fn missing_exchange(exchange: &str) -> String {
    format!("exchange `{exchange}` does not exist")
}

impl Transport for MemoryBroker {
    fn source(&self, queue: &QueueSpec) -> Arc<dyn Source> {
        Arc::new(MemorySource::new(self.clone(), queue.clone()))
    }

    fn parking(&self, queue: &QueueSpec) -> Option<Arc<dyn Parking>> {
        let place = queue.parking.clone()?;
        Some(Arc::new(MemoryParking::new(self.clone(), place)))
    }

    fn parked(&self, queue: &QueueSpec) -> Option<Arc<dyn ParkedMessages>> {
        let parking = queue.parking_queue()?;
        Some(Arc::new(MemoryParked::new(self.clone(), parking)))
    }

    fn membership(&self, group: &str, queues: &[String]) -> Option<Arc<dyn Membership>> {
        Some(Arc::new(MemoryMembership::new(self.clone(), group, queues)))
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(MemoryPublisher::new(self.clone()))
    }
}

/// Shows names only.
impl fmt::Debug for MemoryBroker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let registry = self.registry();
        f.debug_struct("MemoryBroker")
            .field("queues", &registry.queues.keys())
            .field("exchanges", &registry.exchanges.keys())
            .field("unreachable", &registry.unreachable)
            .finish()
    }
}
