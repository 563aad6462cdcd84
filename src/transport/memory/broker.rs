//! The broker's names: queues and exchanges, routing, and the controls of the test kit.
//!
//! Owns the registry. It is locked before a queue and never while holding one; opening a session
//! happens under it, so that [`MemoryBroker::make_unreachable`] misses none.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use laneway_actors::port::{
    Joined, Membership, ParkedMessages, Parking, Publisher, Source, SourceError,
};
use laneway_actors::{Envelope, SessionState};
use tokio::sync::Notify;

use super::exchange::Exchange;
use super::live_queue::LiveQueue;
use super::membership::{Groups, MemoryMembership};
use super::parked::MemoryParked;
use super::parking::MemoryParking;
use super::publisher::MemoryPublisher;
use super::queue::{ConsumerId, QueueStatus};
use super::source::MemorySource;
use super::topology::{Arguments, refused};
use crate::topology::{ExchangeKind, ExchangeSpec, ParkingSpec, QueueSpec, Topology};
use crate::transport::Transport;

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
pub(super) struct Registry {
    unreachable: bool,
    queues: HashMap<Arc<str>, Arc<LiveQueue>>,
    exchanges: HashMap<String, Exchange>,
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

    pub(super) fn registry_mut(&self) -> RwLockWriteGuard<'_, Registry> {
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
                Some(existing.arguments().differences(wanted, name))
            })
            .flatten()
            .collect();
        if let Some(parking) = &queue.parking {
            problems.extend(registry.differences(&parking_exchange(parking)));
        }
        if !problems.is_empty() {
            return Err(problems);
        }

        for (name, arguments) in wanted {
            registry.add_queue(name, arguments);
        }
        if let Some(parking) = &queue.parking {
            registry.add_exchange(parking_exchange(parking));
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
            ..
        }) = &queue.parking
        {
            if !registry.queues.contains_key(parked.as_str()) {
                problems.push(missing_queue(parked));
            }
            match registry.exchanges.get(exchange) {
                None => problems.push(refused(missing_exchange(exchange))),
                Some(known) if known.spec.kind != ExchangeKind::Fanout => {
                    problems.push(refused(format!(
                        "exchange `{exchange}` exists with type = {}, but fanout is needed: choose another name",
                        known.spec.kind.name()
                    )));
                }
                Some(_) => {}
            }
        }
        if problems.is_empty() {
            Ok(())
        } else {
            Err(problems)
        }
    }

    /// Declares a durable exchange. Declaring it again changes nothing. One that hashes is declared by a
    /// topology, which says by what.
    ///
    /// # Errors
    /// [`SourceError::Refused`] when it exists with another kind.
    pub fn declare_exchange(&self, exchange: &str, kind: ExchangeKind) -> Result<(), SourceError> {
        let spec = ExchangeSpec::of_kind_named(exchange, kind);
        let mut registry = self.registry_mut();
        match registry.differences(&spec).into_iter().next() {
            Some(error) => Err(error),
            None => {
                registry.add_exchange(spec);
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
        let mut targets = self.registry().targets(route, &message)?;
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
    pub(super) fn reachable(&self) -> Result<(), SourceError> {
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

    pub(super) fn add_exchange(&mut self, spec: ExchangeSpec) {
        self.exchanges
            .entry(spec.name.clone())
            .or_insert_with(|| Exchange::new(spec));
    }

    pub(super) fn has_exchange(&self, name: &str) -> bool {
        self.exchanges.contains_key(name)
    }

    pub(super) fn has_queue(&self, name: &str) -> bool {
        self.queues.contains_key(name)
    }

    /// What an exchange of this identity says, if it is there.
    pub(super) fn alternate_of(&self, exchange: &str) -> Option<&str> {
        self.exchanges.get(exchange)?.spec.alternate.as_deref()
    }

    /// Whether the exchange exists, and so the binding does now.
    pub(super) fn bind(&mut self, exchange: &str, queue: &str, routing_key: &str) -> bool {
        let Some(exchange) = self.exchanges.get_mut(exchange) else {
            return false;
        };
        exchange.bind(queue, routing_key);
        true
    }

    /// In what an exchange that exists differs.
    pub(super) fn differences(&self, wanted: &ExchangeSpec) -> Vec<SourceError> {
        let known = self.exchanges.get(&wanted.name);
        known.map_or_else(Vec::new, |known| known.differences(wanted))
    }

    /// The queues a route leads to, sorted by name; at least one.
    fn targets(&self, route: Route<'_>, message: &Envelope) -> Result<Vec<Arc<LiveQueue>>, String> {
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
        let mut known = self
            .exchanges
            .get(exchange)
            .ok_or_else(|| missing_exchange(exchange))?;
        if known.spec.internal {
            return Err(format!(
                "exchange `{exchange}` is internal: nobody publishes to it"
            ));
        }
        // Alternate exchanges may lead in a circle, so each is asked once.
        let mut asked = BTreeSet::new();
        while asked.insert(&known.spec.name) {
            let names = known.targets(routing_key, message).into_iter();
            let targets: Vec<_> = names
                .filter_map(|queue| self.queues.get(queue).cloned())
                .collect();
            if !targets.is_empty() {
                return Ok(targets);
            }
            let alternate = known.spec.alternate.as_ref();
            match alternate.and_then(|name| self.exchanges.get(name)) {
                Some(alternate) => known = alternate,
                None => break,
            }
        }
        // Without the routing key: it may be an ordering key, which no error may show.
        Err(format!("no queue bound to exchange `{exchange}` takes it"))
    }
}

fn parking_exchange(parking: &ParkingSpec) -> ExchangeSpec {
    ExchangeSpec::of_kind_named(&parking.exchange, ExchangeKind::Fanout)
}

const UNREACHABLE: &str = "the embedded broker was made unreachable";

pub(super) fn missing_queue(queue: &str) -> SourceError {
    refused(format!("queue `{queue}` does not exist"))
}

pub(super) fn missing_exchange(exchange: &str) -> String {
    format!("exchange `{exchange}` does not exist")
}

impl Transport for MemoryBroker {
    fn topology_problems(&self, topology: &Topology) -> Vec<String> {
        super::topology::problems(topology)
    }

    fn apply<'a>(&'a self, topology: &Topology) -> BoxFuture<'a, Result<(), Vec<SourceError>>> {
        let plan = topology.plan();
        async move { self.apply_plan(&plan) }.boxed()
    }

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
