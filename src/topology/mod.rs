//! What exists at the broker, in the application's own words: queues and their parking places, exchanges,
//! bindings, and the queues that are one queue in n shards.
//!
//! Owns the description and its check, both pure. Promises that nothing is created unless it is declared
//! here, that applying it again changes nothing, and that a difference with what the broker has is an
//! error that names the thing and the argument. What somebody else owns is named with `existing_…` and
//! only checked.
//!
//! Everything is applied in one order, whatever the order in which it was said: exchanges, queues, bindings,
//! each by name. A consistent-hash exchange maps keys by the order in which its queues were bound, after a
//! restart of the broker by the order of their names; only if both are the same does the map survive.

pub(crate) mod arguments;
mod check;
mod exchange;
mod plan;
mod queue;
mod sharded;

pub use arguments::{ArgumentValue, Arguments, LeaderLocator, Overflow};
pub(crate) use exchange::epoch;
pub use exchange::{BindingSpec, ExchangeKind, ExchangeSpec, HashBy, HashProperty, HeaderMatch};
pub use plan::Plan;
pub use queue::{ParkingSpec, QueueSpec, QueueType};
#[cfg(feature = "rabbitmq")]
pub(crate) use sharded::members_name;
pub use sharded::{ShardMap, ShardedQueue, Shards};

/// The queues, exchanges and bindings of an application.
#[derive(Debug, Clone, Default)]
pub struct Topology {
    queues: Vec<QueueSpec>,
    sharded: Vec<ShardedQueue>,
    exchanges: Vec<ExchangeSpec>,
    bindings: Vec<BindingSpec>,
}

impl Topology {
    /// Declares a queue: created if missing, verified if it exists (a difference is refused at start).
    #[must_use]
    pub fn queue(mut self, name: &str, describe: impl FnOnce(QueueSpec) -> QueueSpec) -> Self {
        self.queues.push(describe(QueueSpec::new(name, true)));
        self
    }

    /// Names a queue that somebody else owns. It must exist; its arguments cannot be read over AMQP,
    /// so what is said of it here is believed.
    #[must_use]
    pub fn existing_queue(
        mut self,
        name: &str,
        describe: impl FnOnce(QueueSpec) -> QueueSpec,
    ) -> Self {
        self.queues.push(describe(QueueSpec::new(name, false)));
        self
    }

    /// Declares one queue in n shards: the durable queues `name-000`, `name-001`, …, each with a single
    /// active consumer, behind a durable exchange `name` that is their only entry. An endpoint consumes it
    /// with [`TransportAffinity::Sharded`](crate::TransportAffinity::Sharded), and several instances share
    /// the shards out among them. n and the map are part of its identity: once it exists they cannot be
    /// changed, and whoever declares it otherwise is refused at start, publishers too.
    ///
    /// `shards` is a number, 1 to 1,000, or a [`Shards`]. What `describe` says holds for each shard. The
    /// names `name.shards` (the exchange that holds the identity) and `name.members` are taken too.
    ///
    /// ```
    /// use laneway::topology::{Shards, Topology};
    /// let _ = Topology::default()
    ///     .sharded_queue("orders", 8, |q| q.quorum().parking("orders-dlx", "orders-parked"))
    ///     .sharded_queue("devices", Shards::mapped_by_broker(4, "device"), |q| q.quorum());
    /// ```
    #[must_use]
    pub fn sharded_queue(
        mut self,
        name: &str,
        shards: impl Into<Shards>,
        describe: impl FnOnce(QueueSpec) -> QueueSpec,
    ) -> Self {
        let template = describe(QueueSpec::new("", true));
        self.sharded
            .push(ShardedQueue::new(name, shards.into(), &template));
        self
    }

    /// Declares an exchange, durable and direct unless it says otherwise.
    #[must_use]
    pub fn exchange(
        mut self,
        name: &str,
        describe: impl FnOnce(ExchangeSpec) -> ExchangeSpec,
    ) -> Self {
        self.exchanges.push(describe(ExchangeSpec::new(name, true)));
        self
    }

    /// Names an exchange that somebody else owns. It must exist; of what kind it is cannot be asked.
    #[must_use]
    pub fn existing_exchange(mut self, name: &str) -> Self {
        self.exchanges.push(ExchangeSpec::new(name, false));
        self
    }

    /// Declares a consistent-hash exchange over queues of this topology, which are bound to it with
    /// weights. On RabbitMQ it needs the plugin `rabbitmq_consistent_hash_exchange`. An endpoint consumes
    /// all its queues with [`TransportAffinity::ConsistentHash`](crate::TransportAffinity::ConsistentHash).
    ///
    /// What it hashes by is part of its identity, held by the exchange `name.hash`; the queues may change,
    /// and while they do the order of a key is not kept ([affinity](crate::docs::affinity)).
    ///
    /// ```
    /// use laneway::topology::Topology;
    /// let _ = Topology::default()
    ///     .queue("orders-a", |q| q.quorum().single_active_consumer())
    ///     .queue("orders-b", |q| q.quorum().single_active_consumer())
    ///     .consistent_hash_exchange("orders", |x| {
    ///         x.hash_header("account").queue("orders-a", 1).queue("orders-b", 2)
    ///     });
    /// ```
    #[must_use]
    pub fn consistent_hash_exchange(
        mut self,
        name: &str,
        describe: impl FnOnce(ExchangeSpec) -> ExchangeSpec,
    ) -> Self {
        let exchange = ExchangeSpec::new(name, true).consistent_hash();
        self.exchanges.push(describe(exchange));
        self
    }

    /// Binds a queue to an exchange. Both must be in the topology. The routing key means what the
    /// exchange's kind makes of it; a fanout exchange ignores it.
    #[must_use]
    pub fn bind(mut self, queue: &str, exchange: &str, routing_key: &str) -> Self {
        self.bindings
            .push(BindingSpec::new(queue, exchange, routing_key));
        self
    }

    /// Binds a queue to a headers exchange: messages whose headers match go there.
    #[must_use]
    pub fn bind_headers<N: Into<String>, V: Into<ArgumentValue>>(
        mut self,
        queue: &str,
        exchange: &str,
        which: HeaderMatch,
        headers: impl IntoIterator<Item = (N, V)>,
    ) -> Self {
        let binding = BindingSpec::new(queue, exchange, "").matching(which, headers);
        self.bindings.push(binding);
        self
    }

    /// All queues but the shards, in the order in which they were named.
    pub fn queues(&self) -> &[QueueSpec] {
        &self.queues
    }

    /// The queues that are one queue in shards, in the order in which they were named.
    pub fn sharded_queues(&self) -> &[ShardedQueue] {
        &self.sharded
    }

    /// All exchanges that were named, in that order; those of sharded queues are not among them.
    pub fn exchanges(&self) -> &[ExchangeSpec] {
        &self.exchanges
    }

    /// All bindings that were named one by one.
    pub fn bindings(&self) -> &[BindingSpec] {
        &self.bindings
    }

    /// Whether nothing is described.
    pub(crate) fn is_empty(&self) -> bool {
        self.queues.is_empty()
            && self.sharded.is_empty()
            && self.exchanges.is_empty()
            && self.bindings.is_empty()
    }

    /// The queue of a name; not a shard.
    pub fn find(&self, name: &str) -> Option<&QueueSpec> {
        self.queues.iter().find(|queue| queue.name == name)
    }

    /// The sharded queue of a name.
    pub fn find_sharded(&self, name: &str) -> Option<&ShardedQueue> {
        self.sharded.iter().find(|queue| queue.name == name)
    }

    /// The consistent-hash exchange of a name.
    pub fn find_hashed(&self, name: &str) -> Option<&ExchangeSpec> {
        self.exchanges
            .iter()
            .find(|exchange| exchange.name == name && exchange.kind == ExchangeKind::ConsistentHash)
    }

    /// The sharded queue that a queue is a shard of.
    pub(crate) fn shard_of(&self, queue: &str) -> Option<&ShardedQueue> {
        self.sharded
            .iter()
            .find(|sharded| sharded.queues.iter().any(|shard| shard.name == queue))
    }

    /// The queues behind a consistent-hash exchange with their weights, in the order of their names, which
    /// is the order in which they are bound.
    pub(crate) fn hashed_queues<'a>(&'a self, exchange: &'a ExchangeSpec) -> Vec<(&'a str, u32)> {
        let bound = self
            .bindings
            .iter()
            .filter(|binding| binding.exchange == exchange.name)
            .filter_map(|binding| {
                Some((binding.queue.as_str(), binding.routing_key.parse().ok()?))
            });
        let listed = exchange
            .queues
            .iter()
            .map(|(name, weight)| (name.as_str(), *weight));
        let mut queues: Vec<_> = listed.chain(bound).collect();
        queues.sort_unstable();
        queues
    }
}
