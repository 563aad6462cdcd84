//! From what was said of handlers, modules and queues to the queues themselves, with everything that is wrong.
//!
//! Pure. The first stage ([`LocalBuilder::plan`]) knows handlers and settings; the second ([`check`]) runs when it is
//! known which types have a route.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use laneway_actors::{HandlerSet, KeySelector, Problem};

use super::describe::{Answer, LocalHandler, ModuleBuilder};
use super::settings::{
    self, KEYS_FROM_PUBLISHER, Merged, QueueOrder, QueueSettings, Storage, Voice, VoiceId,
};
use crate::routing::Routes;
use crate::topology::Topology;

/// What the builder of a bus was told about local queues.
#[derive(Default)]
pub(crate) struct LocalBuilder {
    pub(crate) handlers: Vec<LocalHandler>,
    modules: Vec<Module>,
    pub(crate) queues: Vec<(String, QueueSettings)>,
    pub(crate) all: Vec<QueueSettings>,
    pub(crate) keys: Vec<(&'static str, KeySelector)>,
    /// Queues whose messages become dead letters.
    pub(crate) retired: Vec<String>,
}

struct Module {
    name: String,
    settings: Vec<QueueSettings>,
    is_empty: bool,
}

/// The local queues of a bus.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) queues: Vec<PlannedQueue>,
    pub(crate) keys: HashMap<&'static str, KeySelector>,
    /// Whether there is any handler.
    pub(crate) any: bool,
    pub(crate) retired: Vec<Arc<str>>,
}

/// One local queue.
pub(crate) struct PlannedQueue {
    pub(crate) name: Arc<str>,
    pub(crate) message_type: &'static str,
    pub(crate) handlers: HandlerSet,
    /// Of its handlers, in their order.
    pub(crate) answers: Vec<Answer>,
    pub(crate) order_by: fn(&mut HandlerSet, KeySelector),
    pub(crate) settings: Merged,
}

/// The names that a queue must not meet.
pub(crate) struct Taken<'a> {
    pub(crate) endpoints: Vec<&'a str>,
    pub(crate) topology: &'a Topology,
}

impl Taken<'_> {
    fn endpoint(&self, name: &str) -> bool {
        self.endpoints.contains(&name)
    }

    fn queue(&self, name: &str) -> bool {
        self.topology.find(name).is_some() || self.topology.find_sharded(name).is_some()
    }
}

impl LocalBuilder {
    pub(crate) fn add_module(&mut self, name: &str, module: ModuleBuilder) {
        let number = self.modules.len();
        self.modules.push(Module {
            name: name.to_owned(),
            settings: module.settings,
            is_empty: module.handlers.is_empty(),
        });
        for mut handler in module.handlers {
            handler.module = Some(number);
            self.handlers.push(handler);
        }
    }

    pub(crate) fn handles(&self, message_type: &str) -> bool {
        let mut handlers = self.handlers.iter();
        handlers.any(|handler| handler.message_type == message_type)
    }

    /// The queues that follow from it.
    pub(crate) fn plan(self, taken: &Taken<'_>, problems: &mut Vec<Problem>) -> Plan {
        self.check_modules(problems);
        self.check_voices(problems);
        let keys = self.keys(problems);
        let names = self.queue_names();
        for (name, _) in &self.queues {
            if !names.contains(name) {
                let what = format!(
                    "no handler has this queue, so its settings have no effect; {}",
                    known(&names)
                );
                problems.push(Problem::new(name, "local_queue", what));
            }
        }
        let default_parallel =
            settings::default_parallel(std::thread::available_parallelism().ok());
        let mut reached = BTreeSet::new();
        let mut merged = Vec::new();
        for name in &names {
            self.check_name(name, problems);
            let voices = self.voices(Some(name));
            let settings = settings::merge(&voices, default_parallel);
            for (setting, what) in &settings.problems {
                problems.push(Problem::new(name, *setting, what));
            }
            reached.extend(settings.reached.iter().copied());
            self.check_taken(name, &settings, taken, problems);
            merged.push(settings);
        }
        self.check_reach(&reached, problems);
        self.check_retired(&names, &merged, problems);
        let retired = self.retired.iter().map(|name| name.as_str().into());
        let retired = retired.collect();
        let any = !self.handlers.is_empty();
        let mut handlers: HashMap<String, Vec<LocalHandler>> = HashMap::new();
        for handler in self.handlers {
            let of = handlers.entry(handler.queue().to_owned()).or_default();
            of.push(handler);
        }
        let queues = names.iter().zip(merged).filter_map(|(name, settings)| {
            planned(name, handlers.remove(name).unwrap_or_default(), settings)
        });
        Plan {
            queues: queues.collect(),
            keys,
            any,
            retired,
        }
    }

    /// In the order in which their first handlers were said.
    fn queue_names(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for handler in &self.handlers {
            if !names.iter().any(|name| name == handler.queue()) {
                names.push(handler.queue().to_owned());
            }
        }
        names
    }

    /// Who speaks about a queue, or about anything.
    fn voices(&self, queue: Option<&str>) -> Vec<Voice<'_>> {
        let mut voices = Vec::new();
        for (number, (name, said)) in self.queues.iter().enumerate() {
            if queue.is_none_or(|queue| queue == name) {
                voices.push((VoiceId::Queue(number), said));
            }
        }
        let mut modules = BTreeSet::new();
        for (number, handler) in self.handlers.iter().enumerate() {
            if queue.is_none_or(|queue| queue == handler.queue()) {
                let said = handler.settings.iter();
                voices.extend(said.map(|said| (VoiceId::Handler(number), said)));
                modules.extend(handler.module);
            }
        }
        let mut number = 0;
        for (module, of) in self.modules.iter().enumerate() {
            for said in &of.settings {
                if modules.contains(&module) {
                    voices.push((VoiceId::Module(number), said));
                }
                number += 1;
            }
        }
        let all = self.all.iter().enumerate();
        voices.extend(all.map(|(number, said)| (VoiceId::All(number), said)));
        voices
    }

    /// Whom a problem of a voice concerns: a queue, and the setting that it was said with.
    fn place(&self, id: VoiceId) -> (&str, String) {
        match id {
            VoiceId::Queue(number) => (&self.queues[number].0, "local_queue".to_owned()),
            VoiceId::Handler(number) => (self.handlers[number].queue(), "handler".to_owned()),
            VoiceId::Module(number) => {
                let of_all = self.modules.iter();
                let mut names = of_all.flat_map(|of| of.settings.iter().map(|_| &of.name));
                let name = names.nth(number).map_or("", String::as_str);
                ("", format!("module `{name}`"))
            }
            VoiceId::All(_) => ("", "local_queues".to_owned()),
        }
    }

    fn check_modules(&self, problems: &mut Vec<Problem>) {
        for (number, module) in self.modules.iter().enumerate() {
            let mut problem = |what: &str| {
                let setting = format!("module `{}`", module.name);
                problems.push(Problem::new("", setting, what));
            };
            if module.name.is_empty() {
                problem("its name must not be empty");
            }
            if module.is_empty {
                problem(
                    "has no handlers, so what is said of its queues has no effect; add a handler or remove it",
                );
            }
            if self.modules[..number]
                .iter()
                .any(|other| other.name == module.name)
            {
                problem("two modules have this name; make them one, or name them apart");
            }
        }
        if self.handlers.is_empty() && !self.all.is_empty() {
            let what = "there is no local handler, so it has no effect; add one or remove it";
            problems.push(Problem::new("", "local_queues", what));
        }
    }

    fn check_voices(&self, problems: &mut Vec<Problem>) {
        for (id, said) in self.voices(None) {
            let (queue, setting) = self.place(id);
            let mut problem = |what: String| {
                let known = problems.iter().any(|known: &Problem| {
                    known.endpoint == queue && known.setting == setting && known.what == what
                });
                if !known {
                    problems.push(Problem::new(queue, &setting, what));
                }
            };
            if said.rules_missing {
                problem("`on_failure` names no rule; add one or remove it".to_owned());
            } else if said.said().is_empty() {
                problem("says nothing about the queue; set something or remove it".to_owned());
            }
            for twice in &said.twice {
                problem(format!(
                    "`{twice}` is said twice, and differently; keep one"
                ));
            }
        }
    }

    fn check_reach(
        &self,
        reached: &BTreeSet<(VoiceId, &'static str)>,
        problems: &mut Vec<Problem>,
    ) {
        if self.handlers.is_empty() {
            return;
        }
        for (id, what) in settings::unreached(&self.voices(None), reached) {
            // What is said of a queue that does not exist is told already.
            if !matches!(id, VoiceId::Queue(_)) {
                let (queue, setting) = self.place(id);
                let what =
                    format!("`{what}` fits none of its queues, so it has no effect; remove it");
                problems.push(Problem::new(queue, setting, what));
            }
        }
    }

    fn check_retired(&self, names: &[String], settings: &[Merged], problems: &mut Vec<Problem>) {
        for (number, name) in self.retired.iter().enumerate() {
            let mut problem = |what: &str| problems.push(Problem::new(name, "retired_queue", what));
            if name.is_empty() {
                problem("no queue has an empty name");
            }
            if self.retired[..number].contains(name) {
                problem("is said twice; remove one");
            }
            let of_name = names.iter().zip(settings).find(|(other, _)| *other == name);
            match of_name.map(|(_, settings)| settings.storage) {
                None => {}
                Some(Storage::Durable) => problem(
                    "the queue has a handler here, and its messages go to that; remove one of them",
                ),
                Some(_) => problem(
                    "the queue has a handler here, but is not durable: say `durable()` of it until its messages in the database are handled, and remove `retired_queue`",
                ),
            }
        }
    }

    fn check_name(&self, name: &str, problems: &mut Vec<Problem>) {
        let mut problem = |what: String| problems.push(Problem::new(name, "separated", what));
        let of_name = self
            .handlers
            .iter()
            .filter(|handler| handler.queue() == name);
        let separated = of_name
            .filter(|handler| handler.separated.is_some())
            .count();
        if separated == 0 {
            return;
        }
        if separated > 1 {
            problem(format!(
                "two handlers are separated under the name `{name}`; each has a queue of its own, so give them two names"
            ));
        }
        if self.handles(name) {
            problem(format!(
                "`{name}` is the name of a message type, and so of that type's own queue; choose another name"
            ));
        }
    }

    fn check_taken(
        &self,
        name: &str,
        settings: &Merged,
        taken: &Taken<'_>,
        problems: &mut Vec<Problem>,
    ) {
        let own = self.handles(name);
        let setting = if own { "handler" } else { "separated" };
        if taken.endpoint(name) {
            let way = if own {
                "name the endpoint otherwise"
            } else {
                "choose another name"
            };
            let what = format!("an endpoint is named `{name}` too; {way}");
            problems.push(Problem::new(name, setting, what));
        }
        if !own && settings.storage != Storage::Broker && taken.queue(name) {
            let what = format!(
                "the topology has a queue `{name}`; choose another name, or say `on_broker()` of it"
            );
            problems.push(Problem::new(name, setting, what));
        }
    }

    fn keys(&self, problems: &mut Vec<Problem>) -> HashMap<&'static str, KeySelector> {
        let mut keys = HashMap::new();
        for (message_type, selector) in &self.keys {
            if keys.insert(*message_type, Arc::clone(selector)).is_some() {
                let what = "messages of this type have two rules for their key; remove one";
                problems.push(key_problem(message_type, what));
            }
        }
        keys
    }
}

fn key_problem(message_type: &str, what: &str) -> Problem {
    Problem::new("", format!("key_by::<{message_type}>"), what)
}

fn known(names: &[String]) -> String {
    if names.is_empty() {
        return "there is no local queue at all".to_owned();
    }
    let quoted: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    format!("the local queues are {}", quoted.join(", "))
}

fn planned(name: &str, of: Vec<LocalHandler>, settings: Merged) -> Option<PlannedQueue> {
    let first = of.first()?;
    let (message_type, order_by) = (first.message_type, first.order_by);
    let answers = of.iter().map(|handler| handler.answer).collect();
    let mut handlers = HandlerSet::new().together();
    for handler in of {
        handler.add_to(&mut handlers);
    }
    Some(PlannedQueue {
        name: name.into(),
        message_type,
        handlers,
        answers,
        order_by,
        settings,
    })
}

impl Plan {
    /// The queues that live on the transport.
    pub(crate) fn on_broker(&self) -> impl Iterator<Item = &PlannedQueue> {
        let queues = self.queues.iter();
        queues.filter(|queue| queue.settings.storage == Storage::Broker)
    }

    /// The queues that do not.
    pub(crate) fn local(&self) -> impl Iterator<Item = &PlannedQueue> {
        let queues = self.queues.iter();
        queues.filter(|queue| queue.settings.storage != Storage::Broker)
    }
}

/// What is wrong with the queues beside these routes, those to queues on the transport included.
pub(crate) fn check(plan: &Plan, routes: &Routes, problems: &mut Vec<Problem>) {
    for queue in &plan.queues {
        check_queue(plan, queue, routes, problems);
    }
    let local: HashSet<_> = plan.local().map(|queue| queue.message_type).collect();
    let mut routed: Vec<_> = routes.iter().collect();
    routed.sort_by_key(|(message_type, _)| *message_type);
    for (message_type, route) in routed {
        let mut problem = |what: String| {
            let setting = format!("publishes::<{message_type}>");
            problems.push(Problem::new("", setting, what));
        };
        if route.and_local && !local.contains(message_type) {
            problem("`and_local_queues()` has no effect, because messages of this type have no local queue; remove it".to_owned());
        }
        if !route.and_local && !route.on_broker && local.contains(message_type) {
            problem("a route wins, so the local queues of this type would get nothing; say `and_local_queues()` of the route for both, or remove it or the handlers".to_owned());
        }
        if route.has_key() && plan.keys.contains_key(message_type) {
            problem(
                "the route and `key_by` or `keyed` both say the key of this type; remove one"
                    .to_owned(),
            );
        }
    }
    let mut ruled: Vec<_> = plan.keys.keys().collect();
    ruled.sort_unstable();
    for message_type in ruled {
        if !local.contains(message_type) && routes.get(message_type).is_none() {
            let what = "messages of this type have neither a local queue nor a route, so their key has no effect; remove it";
            problems.push(key_problem(message_type, what));
        }
    }
}

fn check_queue(plan: &Plan, queue: &PlannedQueue, routes: &Routes, problems: &mut Vec<Problem>) {
    let mut problem = |setting: &str, what: String| {
        problems.push(Problem::new(&*queue.name, setting, what));
    };
    let message_type = queue.message_type;
    let has_rule = plan.keys.contains_key(message_type)
        || routes
            .get(message_type)
            .is_some_and(|route| route.has_key());
    let settings = &queue.settings;
    if matches!(settings.order, QueueOrder::Partitioned(_)) {
        if !has_rule && !settings.keys_from_publisher {
            problem(
                "partitioned",
                format!(
                    "messages of type `{message_type}` have no key: say `key_by` or `keyed` of the type, or `keys_from_publisher()` of the queue"
                ),
            );
        }
        if has_rule && settings.keys_from_publisher {
            problem(
                KEYS_FROM_PUBLISHER,
                format!(
                    "messages of type `{message_type}` have a rule for their key, so it has no effect (a key given on publishing wins all the same); remove it"
                ),
            );
        }
    }
    if settings.transactional {
        for returned in queue.handlers.returns() {
            if routes.get(returned).is_some() {
                problem(
                    "transactional",
                    format!(
                        "a handler returns messages of type `{returned}`, which go to the transport: a transaction cannot send there without an outbox, which does not exist yet; keep that type in a local queue, or remove `transactional()`"
                    ),
                );
            }
        }
    }
}
