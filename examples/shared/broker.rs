//! Where the queues of an example are, as its command line says: in the embedded broker or on RabbitMQ.

use std::time::{Duration, Instant};

use clap::ValueEnum;
use laneway::actors::port::SourceError;
use laneway::prelude::*;
use laneway::{BusBuilder, Topology};
use serde::{Deserialize, Serialize};

/// How long a queue may take to count what was given back to it.
const PATIENCE: Duration = Duration::from_secs(10);

/// The broker of a run.
pub(crate) enum Broker {
    /// In this process.
    Memory(MemoryBroker),
    /// At the address that `--amqp` names.
    RabbitMq(RabbitMq),
}

impl Broker {
    /// Connects nothing yet.
    ///
    /// # Errors
    /// What is wrong with the address, without credentials.
    pub(crate) fn at(amqp: Option<&str>) -> Result<Self, String> {
        let Some(url) = amqp else {
            return Ok(Self::Memory(MemoryBroker::new()));
        };
        let rabbitmq = RabbitMq::at(url);
        rabbitmq.check().map_err(|problems| {
            let problems: Vec<_> = problems.iter().map(ToString::to_string).collect();
            format!("--amqp: {}", problems.join("; "))
        })?;
        Ok(Self::RabbitMq(rabbitmq))
    }

    /// Begins to describe a bus on it.
    pub(crate) fn bus(&self) -> BusBuilder {
        match self {
            Self::Memory(memory) => Bus::builder().memory(memory.clone()),
            Self::RabbitMq(rabbitmq) => Bus::builder().rabbitmq(rabbitmq.clone()),
        }
    }

    /// Messages in these queues, after a drain. `expected` is how many there should be: a quorum queue counts
    /// what a session has given back only some moments after the session has ended, so fewer are not believed
    /// at once.
    ///
    /// # Errors
    /// When the broker cannot be reached, or a queue does not exist.
    pub(crate) async fn waiting(&self, queues: &[&str], expected: u64) -> Result<u64, SourceError> {
        let deadline = Instant::now() + PATIENCE;
        // A queue tells nobody when its count has changed; asking again is cheap.
        let mut looks = tokio::time::interval(Duration::from_millis(50));
        loop {
            looks.tick().await;
            let waiting = self.ready(queues).await?;
            if waiting >= expected || Instant::now() >= deadline {
                return Ok(waiting);
            }
        }
    }

    async fn ready(&self, queues: &[&str]) -> Result<u64, SourceError> {
        let mut ready = 0;
        for queue in queues {
            ready += match self {
                Self::Memory(memory) => memory.status(queue).total() as u64,
                Self::RabbitMq(rabbitmq) => rabbitmq.ready(queue).await?.into(),
            };
        }
        Ok(ready)
    }

    /// Deletes what a run has declared, and closes. What is in the embedded broker ends with the process.
    pub(crate) async fn remove(&self, topology: &Topology) {
        if let Self::RabbitMq(rabbitmq) = self {
            if let Err(error) = rabbitmq.delete(topology).await {
                eprintln!("cannot remove what this run declared: {error}");
            }
            rabbitmq.close().await;
        }
    }
}

/// The kind of a queue on RabbitMQ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// One node holds it.
    Classic,
    /// Replicated by a log.
    Quorum,
}

impl From<Kind> for QueueType {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Classic => Self::Classic,
            Kind::Quorum => Self::Quorum,
        }
    }
}

/// A name for a run that has none.
pub(crate) fn fresh_run_id() -> String {
    format!("{}-{:08x}", std::process::id(), fastrand::u32(..))
}

/// A run's name becomes part of the names of queues and folders.
pub(crate) fn run_id(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    if (1..=64).contains(&text.len()) && text.chars().all(allowed) {
        Ok(text.to_owned())
    } else {
        Err("1 to 64 letters, digits, `-` and `_`".to_owned())
    }
}
