//! The description of a bus: builder → [`build`](BusBuilder::build) → [`start`](ReadyBus::start).
//!
//! What must be *true* is asked by `build()`, which is pure and lists every problem at once; what the
//! *world* must confirm is asked by `start()`, before the first message.

use std::sync::Arc;
use std::time::Duration;

use laneway_actors::port::SourceError;
use laneway_actors::{
    ContextPublisher, EndpointSettings, EndpointSpec, Events, FailureRules, Fingerprints, Message,
    Problem, check_endpoint,
};
use tokio::runtime::Handle;
use tokio::sync::Mutex;

use crate::bus::{Bus, Inner};
use crate::endpoint::EndpointBuilder;
use crate::entries::Entries;
use crate::feed::Feed;
use crate::host::Host;
use crate::local::durable::DurableQueues;
use crate::local::plan::{LocalBuilder, Plan, Taken};
use crate::local::settings::Storage;
use crate::local::{self, Invocables, LocalQueues};
use crate::parked::ParkedPlaces;
use crate::publish::BusPublisher;
use crate::routing::{RouteBuilder, Routes};
use crate::topology::Topology;
use crate::transport::Transport;
use crate::transport::memory::MemoryBroker;

/// How long [`Bus::run_until`] lets running handlers finish, unless the builder says otherwise.
const DRAIN_DEADLINE: Duration = Duration::from_secs(30);

/// Every problem of a configuration, or of the world at start.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}", list(.problems))]
pub struct ConfigError {
    /// The problems, each naming its setting or thing, and what to do.
    pub problems: Vec<Problem>,
}

fn list(problems: &[Problem]) -> String {
    let lines: Vec<_> = problems
        .iter()
        .map(|problem| format!("\n  - {problem}"))
        .collect();
    format!("{} problem(s):{}", lines.len(), lines.concat())
}

/// Describes a bus.
pub struct BusBuilder {
    transport: Option<Arc<dyn Transport>>,
    transports_said: u32,
    topology: Topology,
    endpoints: Vec<EndpointBuilder>,
    routes: Vec<AddRoute>,
    fingerprints: Fingerprints,
    runtime: Option<Handle>,
    drain_deadline: Duration,
    rules: FailureRules,
    type_rules: Vec<(&'static str, FailureRules)>,
    rules_missing: bool,
    pub(crate) local: LocalBuilder,
    pub(crate) store: Option<Box<dyn DurableQueues>>,
    pub(crate) stores_said: u32,
}

type HeaderOfQueue<'a> = &'a dyn Fn(&str) -> Option<Arc<str>>;
type AddRoute = Box<dyn FnOnce(&mut Routes, HeaderOfQueue<'_>, &Entries, &mut Vec<Problem>) + Send>;

impl BusBuilder {
    pub(crate) fn new() -> Self {
        Self {
            transport: None,
            transports_said: 0,
            topology: Topology::default(),
            endpoints: Vec::new(),
            routes: Vec::new(),
            fingerprints: Fingerprints::of_this_process(),
            runtime: None,
            drain_deadline: DRAIN_DEADLINE,
            rules: FailureRules::new(),
            type_rules: Vec::new(),
            rules_missing: false,
            local: LocalBuilder::default(),
            store: None,
            stores_said: 0,
        }
    }

    /// Uses the embedded broker: queues in this process's memory.
    #[must_use]
    pub fn memory(self, broker: MemoryBroker) -> Self {
        self.transport(broker)
    }

    /// Uses RabbitMQ.
    #[cfg(feature = "rabbitmq")]
    #[must_use]
    pub fn rabbitmq(self, rabbitmq: crate::transport::rabbitmq::RabbitMq) -> Self {
        self.transport(rabbitmq)
    }

    /// Uses any transport.
    #[must_use]
    pub fn transport(mut self, transport: impl Transport) -> Self {
        self.transport = Some(Arc::new(transport));
        self.transports_said += 1;
        self
    }

    /// Describes the queues.
    #[must_use]
    pub fn topology(mut self, describe: impl FnOnce(Topology) -> Topology) -> Self {
        self.topology = describe(self.topology);
        self
    }

    /// Adds an endpoint. It consumes the queue of the same name, unless it says otherwise.
    #[must_use]
    pub fn endpoint(
        mut self,
        name: &str,
        describe: impl FnOnce(EndpointBuilder) -> EndpointBuilder,
    ) -> Self {
        self.endpoints.push(describe(EndpointBuilder::named(name)));
        self
    }

    /// Says where messages of type `T` are published to.
    #[must_use]
    pub fn publishes<T: Message>(
        mut self,
        describe: impl FnOnce(RouteBuilder<T>) -> RouteBuilder<T>,
    ) -> Self {
        let route = describe(RouteBuilder::new());
        self.routes
            .push(Box::new(move |routes, header, entries, problems| {
                routes.add(route, header, entries, problems);
            }));
        self
    }

    /// What to do about which failure, on every endpoint: asked where neither a rule of the endpoint
    /// ([`EndpointBuilder::on_failure`]) nor one of the message's type applies. Called again, it adds rules.
    #[must_use]
    pub fn on_failure(mut self, describe: impl FnOnce(FailureRules) -> FailureRules) -> Self {
        let rules = describe(FailureRules::new());
        self.rules_missing |= rules.is_empty();
        self.rules.append(rules);
        self
    }

    /// What to do about which failure of messages of type `T`, on every endpoint that handles them: asked where
    /// no rule of the endpoint applies. Called again for the same type, it adds rules.
    #[must_use]
    pub fn on_failure_of<T: Message>(
        mut self,
        describe: impl FnOnce(FailureRules) -> FailureRules,
    ) -> Self {
        let rules = describe(FailureRules::new());
        self.rules_missing |= rules.is_empty();
        match self
            .type_rules
            .iter_mut()
            .find(|(name, _)| *name == T::TYPE)
        {
            Some((_, before)) => before.append(rules),
            None => self.type_rules.push((T::TYPE, rules)),
        }
        self
    }

    /// The secret under which keys are shown as fingerprints. With the same secret in every process a key
    /// has the same fingerprint everywhere and after restarts. Defaults to a random one for each bus.
    #[must_use]
    pub fn fingerprint_secret(mut self, secret: &[u8]) -> Self {
        self.fingerprints = Fingerprints::with_secret(secret);
        self
    }

    /// The multi-threaded tokio runtime on which handlers run. Defaults to the one that `start()` is called
    /// in; where there is none, or only a current-thread one, to a pool of Laneway's own.
    #[must_use]
    pub fn handler_runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// How long [`Bus::run_until`] lets running handlers finish. Defaults to 30 s.
    #[must_use]
    pub fn drain_deadline(mut self, deadline: Duration) -> Self {
        self.drain_deadline = deadline;
        self
    }

    /// Checks everything that can be checked without I/O.
    ///
    /// # Errors
    /// All problems at once.
    pub fn build(self) -> Result<ReadyBus, ConfigError> {
        let mut problems = Vec::new();
        let mut problem = |setting: &str, what: &str| {
            problems.push(Problem::new("", setting, what));
        };
        let local_only = !(self.local.handlers.is_empty() && self.local.retired.is_empty())
            && self.endpoints.is_empty()
            && self.routes.is_empty()
            && self.topology.is_empty();
        if self.transports_said == 0 && !local_only {
            problem(
                "transport",
                "none is chosen: use `memory(MemoryBroker::new())` or `rabbitmq(RabbitMq::at(url))`",
            );
        }
        if self.transports_said > 1 {
            problem("transport", "is chosen more than once; keep one");
        }
        if self.stores_said > 1 {
            problem("store", "is given more than once; keep one");
        }
        for what in self.topology.problems() {
            problem("topology", &what);
        }
        if self.rules_missing {
            problem("on_failure", "names no rule; add one or remove it");
        }
        if !self.rules.is_empty() && self.endpoints.is_empty() && self.local.handlers.is_empty() {
            problem(
                "on_failure",
                "has no effect without an endpoint; add one or remove it",
            );
        }
        for (name, _) in &self.type_rules {
            let mut endpoints = self.endpoints.iter();
            if !endpoints.any(|endpoint| endpoint.handles(name)) && !self.local.handles(name) {
                problem(
                    "on_failure_of",
                    &format!(
                        "no endpoint handles messages of type `{name}`, so its rules have no effect; add a handler or remove them"
                    ),
                );
            }
        }
        let taken = Taken {
            endpoints: self
                .endpoints
                .iter()
                .map(|one| &*one.settings.name)
                .collect(),
            topology: &self.topology,
        };
        let plan = self.local.plan(&taken, &mut problems);
        let mut topology = self.topology;
        let mut endpoints = self.endpoints;
        endpoints.extend(local::endpoint::on_broker(&plan, &mut topology));
        let mut problem = |setting: &str, what: &str| {
            problems.push(Problem::new("", setting, what));
        };
        if self.transport.is_none() && local_only && plan.on_broker().next().is_some() {
            problem(
                "transport",
                "a local queue is `on_broker()`, and no transport is chosen: use `memory(MemoryBroker::new())` or `rabbitmq(RabbitMq::at(url))`",
            );
        }
        for (number, endpoint) in endpoints.iter().enumerate() {
            let name = &endpoint.settings.name;
            if endpoints[..number]
                .iter()
                .any(|other| other.settings.name == *name)
            {
                problem("endpoint", &format!("two endpoints are named `{name}`"));
            }
            if let Some(other) = endpoints[..number]
                .iter()
                .find(|other| meet(other, endpoint, &topology))
            {
                problem(
                    "queue",
                    &format!(
                        "endpoints `{}` and `{name}` both consume queue `{}` and would take each other's messages; keep one, and give it the handlers of both",
                        other.settings.name, endpoint.queue
                    ),
                );
            }
        }
        let mut feeds = Vec::new();
        for endpoint in &mut endpoints {
            endpoint.share_rules(&self.type_rules, &self.rules);
            feeds.push(endpoint.finish(&topology, &mut problems));
        }
        let mut routes = Routes::default();
        let header_of_queue = |queue: &str| {
            endpoints
                .iter()
                .find(|endpoint| endpoint.queue == queue)
                .and_then(EndpointBuilder::key_header)
        };
        let entries = Entries::of(&topology);
        for add in self.routes {
            add(&mut routes, &header_of_queue, &entries, &mut problems);
        }
        for queue in plan.on_broker() {
            routes.add_on_broker(queue.message_type, &queue.name, &mut problems);
        }
        local::plan::check(&plan, &routes, &mut problems);
        let invocables = Invocables::of(&plan);
        let rules = (&self.type_rules[..], &self.rules);
        let mut store = self.store;
        retire(&plan, store.as_deref_mut(), &mut problems);
        let (locals, local_specs) =
            local_endpoints(plan, store.as_deref_mut(), rules, &mut problems);
        if let Some(transport) = &self.transport {
            problems.extend(transport.problems());
            for what in transport.topology_problems(&topology) {
                problems.push(Problem::new("", "topology", what));
            }
        }
        let port = self
            .transport
            .as_ref()
            .map(|transport| transport.publisher());
        let publisher = Arc::new(BusPublisher::new(routes, entries, locals, port));
        let events = Events::default();
        let mut specs = Vec::new();
        let mut parked = ParkedPlaces::new(self.fingerprints.clone());
        for (endpoint, feed) in endpoints.into_iter().zip(feeds) {
            let fed = feed
                .as_ref()
                .and_then(|feed| Some((feed, feed.queues.first()?)));
            let (Some((feed, queue)), Some(transport)) = (fed, &self.transport) else {
                // A problem already; the others are found without it.
                check_alone(&endpoint, feed.as_ref(), &mut problems);
                continue;
            };
            parked.add(&endpoint.settings.name, &feed.queues, &**transport);
            let names: Vec<_> = feed.queues.iter().map(|queue| queue.name.clone()).collect();
            let group = feed.group.as_ref();
            let membership = group.and_then(|group| transport.membership(group, &names));
            if group.is_some() && membership.is_none() {
                let what = "this transport knows no groups of instances that share several queues out; use a single queue";
                problems.push(Problem::new(&endpoint.settings.name, "transport", what));
            }
            let sources = feed.queues.iter().map(|queue| transport.source(queue));
            let spec = EndpointSpec {
                parking: transport.parking(queue),
                membership,
                mapping: feed.mapping,
                ..EndpointSpec::sharded(
                    endpoint.settings,
                    endpoint.queue.as_str().into(),
                    sources.collect(),
                    endpoint.handlers,
                )
            };
            specs.push(spec);
        }
        for spec in local_specs {
            parked.add_without(&spec.settings.name);
            specs.push(spec);
        }
        for spec in &mut specs {
            add_new(&mut problems, spec.check().err());
            spec.publisher = Some(Arc::clone(&publisher) as Arc<dyn ContextPublisher>);
            spec.events = events.clone();
            spec.fingerprints = self.fingerprints.clone();
            spec.runtime.clone_from(&self.runtime);
        }
        if !problems.is_empty() {
            return Err(ConfigError { problems });
        }
        Ok(ReadyBus {
            transport: self.transport,
            store,
            topology,
            specs,
            publisher,
            invocables,
            parked,
            fingerprints: self.fingerprints,
            events,
            drain_deadline: self.drain_deadline,
        })
    }
}

/// Tells the store which queues it empties, and which are none of its own.
fn retire(
    plan: &Plan,
    store: Option<&mut (dyn DurableQueues + 'static)>,
    problems: &mut Vec<Problem>,
) {
    if let Some(store) = store {
        let elsewhere = plan.queues.iter();
        let elsewhere = elsewhere.filter(|queue| queue.settings.storage != Storage::Durable);
        let elsewhere = elsewhere.map(|queue| Arc::clone(&queue.name)).collect();
        store.retire(plan.retired.clone(), elsewhere);
        return;
    }
    for name in &plan.retired {
        let what = "a retired queue is in a store, and the bus has none: give it one with `store(…)` (features `sqlite` and `postgres`), or remove it";
        problems.push(Problem::new(&**name, "retired_queue", what));
    }
}

/// The endpoints of the local queues, and the queues as publishers see them.
fn local_endpoints(
    plan: Plan,
    mut store: Option<&mut (dyn DurableQueues + 'static)>,
    (type_rules, bus_rules): (&[(&'static str, FailureRules)], &FailureRules),
    problems: &mut Vec<Problem>,
) -> (LocalQueues, Vec<EndpointSpec>) {
    let mut locals = LocalQueues::new(plan.keys.clone(), plan.any);
    locals.sink = store.as_ref().map(|store| store.sink());
    let mut specs = Vec::new();
    for queue in plan.local() {
        let share = |settings: &mut EndpointSettings| {
            let mine = type_rules.iter();
            let mine = mine.filter(|(name, _)| *name == queue.message_type);
            settings.type_rules = mine.cloned().collect();
            settings.bus_rules = bus_rules.clone();
        };
        match local::endpoint::spec(queue, store.as_deref_mut(), &mut locals, share) {
            Ok(spec) => specs.push(spec),
            Err(problem) => problems.push(problem),
        }
    }
    (locals, specs)
}

/// Whether two endpoints consume the same queue.
fn meet(one: &EndpointBuilder, other: &EndpointBuilder, topology: &Topology) -> bool {
    if one.queue == other.queue {
        return true;
    }
    let queues = |endpoint: &EndpointBuilder| Feed::of(&endpoint.queue, topology);
    let (Ok(one), Ok(other)) = (queues(one), queues(other)) else {
        return false;
    };
    let mut all = one.queues.iter();
    all.any(|queue| other.queues.iter().any(|known| known.name == queue.name))
}

/// The problems of an endpoint that has no source to be checked with.
fn check_alone(endpoint: &EndpointBuilder, feed: Option<&Feed>, problems: &mut Vec<Problem>) {
    let settings = &endpoint.settings;
    let has_parking = match feed.and_then(|feed| feed.queues.first()) {
        Some(queue) => queue.parking.is_some(),
        // Nobody knows: not a problem of its own.
        None => !settings.discard_poison,
    };
    let shards = feed.map_or(1, |feed| feed.queues.len());
    let found = check_endpoint(settings, &endpoint.handlers, has_parking, shards).err();
    add_new(problems, found);
}

/// What is wrong with a rule of the bus is found at each endpoint, and listed once.
fn add_new(problems: &mut Vec<Problem>, found: Option<Vec<Problem>>) {
    for problem in found.into_iter().flatten() {
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    }
}

/// A checked configuration, not started yet.
pub struct ReadyBus {
    transport: Option<Arc<dyn Transport>>,
    store: Option<Box<dyn DurableQueues>>,
    topology: Topology,
    specs: Vec<EndpointSpec>,
    publisher: Arc<BusPublisher>,
    invocables: Invocables,
    parked: ParkedPlaces,
    fingerprints: Fingerprints,
    events: Events,
    drain_deadline: Duration,
}

impl std::fmt::Debug for ReadyBus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadyBus").finish_non_exhaustive()
    }
}

impl ReadyBus {
    /// Connects, verifies the world, declares what is declared, and starts every endpoint. Resolves when
    /// each has its first session.
    ///
    /// # Errors
    /// All problems at once; nothing runs then.
    ///
    /// # Cancellation
    /// Dropping the future starts nothing.
    pub async fn start(mut self) -> Result<Bus, ConfigError> {
        // Known here, not on the actors' own thread.
        if let Ok(current) = Handle::try_current()
            && current.runtime_flavor() == tokio::runtime::RuntimeFlavor::MultiThread
        {
            for spec in &mut self.specs {
                spec.runtime.get_or_insert_with(|| current.clone());
            }
        }
        let to_error = |problems| ConfigError { problems };
        self.apply_topology().await.map_err(to_error)?;
        // Before the endpoints: their messages are in it. Dropped again if those do not start.
        let store = match self.store {
            Some(store) => {
                let started = store.start(Arc::clone(&self.publisher)).await;
                let problem = |what| to_error(vec![Problem::new("", "store", what)]);
                Some(started.map_err(problem)?)
            }
            None => None,
        };
        let (host, endpoints) = Host::start(self.specs).await.map_err(to_error)?;
        Ok(Bus {
            inner: Arc::new(Inner {
                endpoints,
                publisher: self.publisher,
                store,
                invocables: self.invocables,
                parked: self.parked,
                fingerprints: self.fingerprints,
                events: self.events,
                drain_deadline: self.drain_deadline,
                host: Mutex::new(Some(host)),
                _transport: self.transport,
            }),
        })
    }

    /// Declares what is declared and checks what is named, in the order that keeps maps of keys alive. The
    /// sources of the endpoints check their queues once more, as they do for whoever uses them alone.
    async fn apply_topology(&self) -> Result<(), Vec<Problem>> {
        let Some(transport) = &self.transport else {
            return Ok(());
        };
        let applied = transport.apply(&self.topology).await;
        let errors = applied.err().into_iter().flatten();
        let mut problems = Vec::new();
        for error in errors {
            let text = error.to_string();
            let found = match &error {
                // Every endpoint waits for the connection, so each is named.
                SourceError::Unavailable { .. } if !self.specs.is_empty() => {
                    let names = self.specs.iter().map(|spec| spec.settings.name.as_str());
                    names
                        .map(|name| Problem::new(name, "connection", text.clone()))
                        .collect()
                }
                SourceError::Unavailable { .. } => vec![Problem::new("", "connection", text)],
                _ => vec![Problem::new("", "topology", text)],
            };
            add_new(&mut problems, Some(found));
        }
        if problems.is_empty() {
            Ok(())
        } else {
            Err(problems)
        }
    }
}
