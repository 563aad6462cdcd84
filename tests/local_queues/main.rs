//! Local queues: which queues follow from the handlers, what reaches them, and that they are endpoints like any other.

mod bounds;
mod handlers;
mod invoking;
mod moving;
mod order;
mod routing;
#[path = "../support/orders.rs"]
mod support;
#[path = "../support/workload.rs"]
mod workload;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use laneway::prelude::*;
use laneway::{EventKind, InvokeError, Outcome, PublishError, WithKey};
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, mpsc};

use support::{Tally, started, stop, within};

macro_rules! messages {
    ($($name:ident $text:literal),*) => {$(
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        struct $name {
            account: u64,
            number: u64,
        }
        impl Message for $name {
            const TYPE: &'static str = $text;
        }
        impl Keyed for $name {
            fn key(&self) -> OrderingKey {
                self.account.into()
            }
        }
        impl $name {
            fn new(account: u64, number: u64) -> Self {
                Self { account, number }
            }
        }
    )*};
}
messages!(Paid "paid", Shipped "shipped", Billed "billed");

type Seen = mpsc::UnboundedReceiver<(&'static str, u64)>;
type Sender = mpsc::UnboundedSender<(&'static str, u64)>;

/// Numbers of one account that were handled, by account.
type Order = Arc<Mutex<BTreeMap<u64, Vec<u64>>>>;

/// A handler that tells its name and the number of each message.
macro_rules! tells {
    ($seen:expr, $name:literal, $message:ty) => {{
        let seen: Sender = $seen.clone();
        move |message: $message, _: Context| {
            let seen = seen.clone();
            async move {
                seen.send(($name, message.number))?;
                Ok(())
            }
        }
    }};
}
use tells;

async fn next(seen: &mut Seen) -> (&'static str, u64) {
    within("a handled message", seen.recv())
        .await
        .expect("open")
}

async fn next_of(seen: &mut Seen, count: usize) -> Vec<(&'static str, u64)> {
    let mut all = Vec::new();
    for _ in 0..count {
        all.push(next(seen).await);
    }
    all.sort_unstable();
    all
}

/// Nothing more comes: everything has drained.
async fn nothing_more(bus: &Bus, seen: &mut Seen) {
    stop(bus).await;
    assert_eq!(seen.try_recv().ok(), None);
}

async fn snapshot(bus: &Bus, queue: &str) -> laneway::EndpointSnapshot {
    let snapshot = within("a snapshot", bus.snapshot()).await;
    snapshot.endpoint(queue).expect("it exists").clone()
}

/// Counts how many run at once and holds them until `permits` lets them go.
#[derive(Clone)]
struct Running {
    permits: Arc<Semaphore>,
    now: Arc<AtomicU32>,
    most: Arc<AtomicU32>,
    begun: Tally,
}

impl Running {
    fn new() -> Self {
        Self {
            permits: Arc::new(Semaphore::new(0)),
            now: Arc::default(),
            most: Arc::default(),
            begun: Tally::new(),
        }
    }

    async fn run(&self) -> Result<(), Failure> {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        self.begun.add();
        self.permits.acquire().await?.forget();
        self.now.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }
}
