//! A parking place that is watched: what became of each try, and a fault at the moment a test wants it.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file uses its own part of it"
)]

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use laneway::QueueSpec;
use laneway::actors::port::{DeadLetter, ParkError, ParkedMessages, Parking, Publisher, Source};
use laneway::prelude::*;
use laneway::transport::Transport;
use tokio::sync::watch;

use crate::orders::{numbered, within};
use crate::stand::Name;

/// One try to park. Nothing is sent before it is polled.
pub type Try = BoxFuture<'static, Result<(), ParkError>>;

type Around = Arc<dyn Fn(Name, Try) -> Try + Send + Sync>;

/// RabbitMQ, with something around each try to park.
#[derive(Clone)]
pub struct Watched {
    inner: RabbitMq,
    around: Around,
}

impl Watched {
    /// Each try is made by `around`.
    pub fn new(inner: RabbitMq, around: impl Fn(Name, Try) -> Try + Send + Sync + 'static) -> Self {
        Self {
            inner,
            around: Arc::new(around),
        }
    }
}

impl Transport for Watched {
    fn source(&self, queue: &QueueSpec) -> Arc<dyn Source> {
        self.inner.source(queue)
    }
    fn parking(&self, queue: &QueueSpec) -> Option<Arc<dyn Parking>> {
        Some(Arc::new(WatchedParking {
            inner: self.inner.parking(queue)?,
            around: Arc::clone(&self.around),
        }))
    }
    fn parked(&self, queue: &QueueSpec) -> Option<Arc<dyn ParkedMessages>> {
        self.inner.parked(queue)
    }
    fn publisher(&self) -> Arc<dyn Publisher> {
        self.inner.publisher()
    }
}

struct WatchedParking {
    inner: Arc<dyn Parking>,
    around: Around,
}

impl Parking for WatchedParking {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn park(&self, letter: Arc<DeadLetter>) -> Try {
        let message = numbered(letter.delivery.envelope());
        (self.around)((message.key, message.seq), self.inner.park(letter))
    }
}

/// How often parking a message ended in which way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tries {
    /// The broker has it.
    pub confirmed: u32,
    /// The broker may have it.
    pub unknown: u32,
    /// The broker does not have it.
    pub refused: u32,
}

/// What became of all tries.
#[derive(Clone)]
pub struct Record(Arc<watch::Sender<BTreeMap<Name, Tries>>>);

impl Record {
    /// Nothing yet.
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(BTreeMap::new())))
    }

    /// Writes down how a try ends.
    pub fn of(&self, message: Name, attempt: Try) -> Try {
        let record = self.clone();
        async move {
            let result = attempt.await;
            record.note(message, &result);
            result
        }
        .boxed()
    }

    /// Writes down how a try has ended.
    pub fn note(&self, message: Name, result: &Result<(), ParkError>) {
        self.0.send_modify(|all| {
            let tries = all.entry(message).or_default();
            match result {
                Ok(()) => tries.confirmed += 1,
                Err(ParkError::Refused(_)) => tries.refused += 1,
                Err(_) => tries.unknown += 1,
            }
        });
    }

    /// What became of the tries with a message.
    pub fn tries(&self, message: &Name) -> Tries {
        self.0.borrow().get(message).copied().unwrap_or_default()
    }

    /// Waits until the broker has confirmed this many messages.
    pub async fn until_confirmed(&self, number: usize) {
        let mut all = self.0.subscribe();
        let enough = all.wait_for(|all| {
            let confirmed = all.values().filter(|tries| tries.confirmed > 0);
            confirmed.count() >= number
        });
        within(&format!("{number} parked messages"), enough)
            .await
            .expect("the record is there");
    }
}

/// Messages that ran although a poison predecessor of their key was not parked yet.
#[derive(Clone)]
pub struct Early(Arc<std::sync::Mutex<Vec<Name>>>);

impl Early {
    /// None so far.
    pub fn none() -> Self {
        Self(Arc::default())
    }

    /// Looks at a message that is about to run, in a key whose poison messages have these numbers.
    pub fn check(&self, record: &Record, key: &str, seq: u64, is_poison: impl Fn(u64) -> bool) {
        let waits = |before: &u64| {
            let before = (key.to_owned(), *before);
            record.tries(&before).confirmed == 0
        };
        if (1..seq)
            .filter(|seq| is_poison(*seq))
            .any(|seq| waits(&seq))
        {
            let mut early = self.0.lock().expect("no panic under this lock");
            early.push((key.to_owned(), seq));
        }
    }

    /// All of them.
    pub fn all(&self) -> Vec<Name> {
        self.0.lock().expect("no panic under this lock").clone()
    }
}
