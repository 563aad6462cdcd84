//! What an endpoint is made of, and whether it can be started.

use std::sync::Arc;
use std::time::Duration;

use actix::ArbiterHandle;
use tokio::runtime::{Handle, RuntimeFlavor};

use crate::config::{EndpointConfig, EndpointSettings, Problem};
use crate::handler::{ContextPublisher, HandlerSet};
use crate::key::Fingerprints;
use crate::mapping::MappingEpoch;
use crate::observe::Events;
use crate::port::{Attempts, Membership, Parking, Source};

/// Everything an endpoint is made of.
pub struct EndpointSpec {
    /// Its settings.
    pub settings: EndpointSettings,
    /// The queue that it consumes, for logs, events and errors: the source's own name, or that of all shards
    /// together.
    pub queue: Arc<str>,
    /// Where deliveries come from: one source, or one for each shard, in the order of the shards. A key must
    /// come from one and the same.
    pub sources: Vec<Arc<dyn Source>>,
    /// The group of the instances that share the sources out among them. `None`: this instance subscribes to
    /// all of them.
    pub membership: Option<Arc<dyn Membership>>,
    /// The map from keys to sources that this endpoint knows, where it can change: messages that were sent under
    /// another one are counted and reported.
    pub mapping: Option<MappingEpoch>,
    /// Where poison messages go.
    pub parking: Option<Arc<dyn Parking>>,
    /// What the source does around each attempt, if it does anything.
    pub attempts: Option<Arc<dyn Attempts>>,
    /// Its handlers.
    pub handlers: HandlerSet,
    /// Publishes for `Context::publish`, if handlers may publish.
    pub publisher: Option<Arc<dyn ContextPublisher>>,
    /// Where its events go.
    pub events: Events,
    /// How its keys are shown.
    pub fingerprints: Fingerprints,
    /// The multi-threaded runtime on which handlers run. `None`: the one the caller is in, or, where
    /// there is none or only a current-thread one, a pool that all such endpoints of the process share.
    pub runtime: Option<Handle>,
    /// Where the lanes run. Empty: on the current thread's `System`.
    pub arbiters: Vec<ArbiterHandle>,
}

impl EndpointSpec {
    /// An endpoint over one source, with every default.
    pub fn new(settings: EndpointSettings, source: Arc<dyn Source>, handlers: HandlerSet) -> Self {
        let queue = source.name().into();
        Self::sharded(settings, queue, vec![source], handlers)
    }

    /// An endpoint over several sources, with every default.
    pub fn sharded(
        settings: EndpointSettings,
        queue: Arc<str>,
        sources: Vec<Arc<dyn Source>>,
        handlers: HandlerSet,
    ) -> Self {
        Self {
            settings,
            queue,
            sources,
            membership: None,
            mapping: None,
            parking: None,
            attempts: None,
            handlers,
            publisher: None,
            events: Events::default(),
            fingerprints: Fingerprints::of_this_process(),
            runtime: None,
            arbiters: Vec::new(),
        }
    }

    /// All problems of the settings and the handlers. Pure.
    ///
    /// # Errors
    /// Each problem, naming its setting.
    pub fn check(&self) -> Result<EndpointConfig, Vec<Problem>> {
        let (parks, shards) = (self.parking.is_some(), self.sources.len());
        check_endpoint(&self.settings, &self.handlers, parks, shards)
    }
}

/// All problems of an endpoint's settings and handlers, also where there is no source yet; `shards` is the
/// number of its sources. Pure.
///
/// # Errors
/// Each problem, naming its setting.
pub fn check_endpoint(
    settings: &EndpointSettings,
    handlers: &HandlerSet,
    has_parking: bool,
    shards: usize,
) -> Result<EndpointConfig, Vec<Problem>> {
    let name = &settings.name;
    let mut problems = Vec::new();
    let config = match settings.check(has_parking, shards) {
        Ok(config) => Some(config),
        Err(found) => {
            problems = found;
            None
        }
    };
    for (setting, what) in handlers.problems() {
        problems.push(Problem::new(name, setting, what));
    }
    let typed = settings.ordering.as_ref().is_some_and(|key| key.typed);
    if handlers.has_selectors() && !typed {
        problems.push(Problem::new(
            name,
            "ordering",
            "a handler has a typed key, but the endpoint is not ordered by it; order by the typed key or remove it",
        ));
    }
    if typed && !handlers.has_selectors() {
        problems.push(Problem::new(
            name,
            "ordering",
            "the key is to come from the message, but no handler has a typed key",
        ));
    }
    config.filter(|_| problems.is_empty()).ok_or(problems)
}

/// A multi-threaded runtime for the handlers, with timers.
pub(super) fn handler_runtime(given: Option<Handle>) -> Result<Handle, String> {
    let current = || {
        Handle::try_current()
            .ok()
            .filter(|handle| handle.runtime_flavor() == RuntimeFlavor::MultiThread)
    };
    let handle = match given.or_else(current) {
        Some(handle) => handle,
        None => own_pool()?,
    };
    if handle.runtime_flavor() != RuntimeFlavor::MultiThread {
        return Err(
            "handlers need a multi-threaded runtime: a blocking handler would stop all others"
                .to_owned(),
        );
    }
    let entered = handle.enter();
    let timers = std::panic::catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO)));
    drop(entered);
    match timers {
        Ok(()) => Ok(handle),
        Err(_) => Err(
            "the runtime has no timers; build it with `enable_time()` or `enable_all()`".to_owned(),
        ),
    }
}

/// The pool for handlers of programs without a multi-threaded runtime of their own. It lives as long as
/// the process.
fn own_pool() -> Result<Handle, String> {
    static POOL: std::sync::OnceLock<Result<tokio::runtime::Runtime, String>> =
        std::sync::OnceLock::new();
    let pool = POOL.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread()
            .thread_name("laneway-handlers")
            .enable_all()
            .build()
            .map_err(|error| format!("the pool for handlers cannot be started: {error}"))
    });
    match pool {
        Ok(runtime) => Ok(runtime.handle().clone()),
        Err(what) => Err(what.clone()),
    }
}
