//! What exists at the broker, in the application's own words: queues and their parking places.
//!
//! Nothing is created unless it is declared here with [`Topology::queue`]; a queue that somebody
//! else owns is named with [`Topology::existing_queue`] and only checked.

/// The kind of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum QueueType {
    /// A classic queue: one node holds it.
    #[default]
    Classic,
    /// A quorum queue: replicated by a log.
    Quorum,
}

/// The queues of an application.
#[derive(Debug, Clone, Default)]
pub struct Topology {
    queues: Vec<QueueSpec>,
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

    /// All queues, in the order in which they were named.
    pub fn queues(&self) -> &[QueueSpec] {
        &self.queues
    }

    /// The queue of a name.
    pub fn find(&self, name: &str) -> Option<&QueueSpec> {
        self.queues.iter().find(|queue| queue.name == name)
    }
}

/// One queue.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueSpec {
    /// Its name.
    pub name: String,
    /// Whether Laneway creates it (`true`) or only checks that it exists.
    pub declared: bool,
    /// Its kind.
    pub queue_type: QueueType,
    /// Whether it survives a restart of the broker.
    pub durable: bool,
    /// Whether the broker delivers to one consumer at a time (`x-single-active-consumer`).
    pub single_active_consumer: bool,
    /// Where its poison messages go.
    pub parking: Option<ParkingSpec>,
}

/// Where poison messages of a queue go: published to the exchange, kept in the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParkingSpec {
    /// The (fanout) exchange.
    pub exchange: String,
    /// The queue bound to it.
    pub queue: String,
}

impl QueueSpec {
    fn new(name: &str, declared: bool) -> Self {
        Self {
            name: name.to_owned(),
            declared,
            queue_type: QueueType::Classic,
            durable: false,
            single_active_consumer: false,
            parking: None,
        }
    }

    /// It survives a restart of the broker. A quorum queue is always durable.
    #[must_use]
    pub fn durable(mut self) -> Self {
        self.durable = true;
        self
    }

    /// It is a quorum queue (and so durable).
    #[must_use]
    pub fn quorum(mut self) -> Self {
        self.queue_type = QueueType::Quorum;
        self.durable = true;
        self
    }

    /// It is a queue of this type; a quorum queue is durable too.
    #[must_use]
    pub fn of_type(self, queue_type: QueueType) -> Self {
        match queue_type {
            QueueType::Classic => Self { queue_type, ..self },
            QueueType::Quorum => self.quorum(),
        }
    }

    /// The broker delivers to one consumer at a time, and moves on to another when that one goes.
    #[must_use]
    pub fn single_active_consumer(mut self) -> Self {
        self.single_active_consumer = true;
        self
    }

    /// Poison messages are published to this durable fanout exchange, to which this durable queue of
    /// the same type is bound. Declared with the queue; for an existing queue only checked.
    #[must_use]
    pub fn parking(mut self, exchange: &str, queue: &str) -> Self {
        self.parking = Some(ParkingSpec {
            exchange: exchange.to_owned(),
            queue: queue.to_owned(),
        });
        self
    }

    /// Its parking queue, as a queue to read from.
    pub(crate) fn parking_queue(&self) -> Option<Self> {
        let parking = self.parking.as_ref()?;
        Some(Self {
            durable: true,
            queue_type: self.queue_type,
            ..Self::new(&parking.queue, false)
        })
    }

    /// What is wrong with its parking place, whatever the broker.
    pub(crate) fn parking_problems(&self) -> Vec<String> {
        let Some(ParkingSpec { exchange, queue }) = &self.parking else {
            return Vec::new();
        };
        let name = &self.name;
        let mut problems = Vec::new();
        if exchange.is_empty() {
            problems.push(format!(
                "the parking exchange of queue `{name}` has an empty name"
            ));
        }
        if queue.is_empty() {
            problems.push(format!(
                "the parking queue of queue `{name}` has an empty name"
            ));
        }
        if queue == name {
            problems.push(format!(
                "queue `{name}` parks in itself, so a poison message would come again for ever; park in another queue"
            ));
        }
        problems
    }
}
