//! What the store says of messages: those that wait, and the dead letters.

use std::error::Error;
use std::sync::Arc;

use laneway::Encoding;
use laneway::actors::ShardCount;
use laneway::store::{QueueIdentity, QueueOrder, Store, StoreError};

use crate::life::SHARDS;
use crate::modules::QUEUES;
use crate::orders::OrderPlaced;
use crate::place::Place;

/// Dead letters that are read at once.
const PAGE: u32 = 1_000;

/// All messages that were not handled.
#[derive(Default)]
pub(crate) struct Census {
    /// Messages that wait to be handled, or were being handled when their process died.
    pub waiting: u64,
    /// Dead letters, by [`QUEUES`]. One whose body cannot be read stands for no order.
    pub dead: [Vec<Option<OrderPlaced>>; 2],
}

impl Census {
    /// Opens the store for the time of the count. Not while a bus uses the same SQLite file.
    pub(crate) async fn take(place: &Place) -> Result<Self, Box<dyn Error>> {
        let store = open(place).await?;
        let census = Self::of(&*store).await;
        store.close().await;
        Ok(census?)
    }

    async fn of(store: &dyn Store) -> Result<Self, StoreError> {
        let mut census = Self {
            waiting: waiting(store).await?,
            ..Self::default()
        };
        for (queue, dead) in QUEUES.into_iter().zip(&mut census.dead) {
            let mut after = 0;
            loop {
                let page = store.dead_letters(queue, after, PAGE).await?;
                let Some(last) = page.last() else { break };
                after = last.number;
                dead.extend(page.iter().map(|letter| {
                    let envelope = &letter.message.envelope;
                    let encoding = Encoding::of_content_type(envelope.content_type.as_deref());
                    encoding.ok()?.decode(&envelope.body).ok()
                }));
            }
        }
        Ok(census)
    }

    /// The number of dead letters.
    pub(crate) fn dead_letters(&self) -> u64 {
        self.dead.iter().map(|dead| dead.len() as u64).sum()
    }
}

/// The store with its queues, for who handles nothing.
pub(crate) async fn open(place: &Place) -> Result<Box<dyn Store>, StoreError> {
    let store = place.store().await?;
    let shards = ShardCount::new(SHARDS).expect("cannot fail because it is not 0");
    let queues = QUEUES.map(|name| QueueIdentity {
        name: Arc::from(name),
        order: QueueOrder::Ordered(shards),
    });
    store.declare(&queues).await?;
    Ok(store)
}

/// How many messages wait or are being handled.
pub(crate) async fn waiting(store: &dyn Store) -> Result<u64, StoreError> {
    let mut all = 0;
    for queue in QUEUES {
        let counts = store.count(queue).await?;
        all += counts.backlog + counts.scheduled;
    }
    Ok(all)
}
