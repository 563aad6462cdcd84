//! Laneway's durable queue: ordered, of one shard, with plain handlers or with transactional ones.

use std::num::NonZeroU32;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use laneway::actors::ShardCount;
use laneway::actors::port::MemberId;
use laneway::durable::{DurableStore, StoreConfig};
use laneway::prelude::*;
use laneway::store::postgres::PostgresConfig;
use laneway::store::sqlite::SqliteConfig;
use laneway::store::{
    self, Ending, NewMessage, QueueIdentity, Settlement, Shard, Store as _, Window,
};
use laneway::{Envelope, Message as _};

use super::Insert;
use super::handling::Handle;
use crate::Error;
use crate::record::Record;
use crate::workload::Message;

/// As many as an ordered queue has where nothing is said.
const SHARDS: u32 = 1;
/// How many are read at once for the ledger.
const READ: u32 = 1_000;
/// Longer than reading takes.
const LEASE: Duration = Duration::from_secs(60);
/// Longer than what handlers of this bench take to end.
const DRAIN: Duration = Duration::from_secs(60);
/// What peers have.
const CONNECTIONS: NonZeroU32 = NonZeroU32::new(20).expect("not zero");

/// What handlers are around.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Handlers {
    Plain,
    /// Each run is a transaction in which its message is marked as handled.
    Transactional,
}

/// An ordered queue. Everything is at its default, durability included: each commit waits for the disk.
///
/// Before there are handlers its store is used by itself, since a bus would handle what it stores.
pub(super) struct Queue<C: StoreConfig> {
    config: C,
    handlers: Handlers,
    store: C::Store,
    bus: OnceLock<Bus>,
}

impl Queue<PostgresConfig> {
    pub(super) async fn in_postgres(address: &str, handlers: Handlers) -> Result<Self, Error> {
        let config = PostgresConfig::at(address);
        let config = match handlers {
            Handlers::Plain => config,
            Handlers::Transactional => config.work_connections(CONNECTIONS),
        };
        Self::of(config, handlers).await
    }
}

impl Queue<SqliteConfig> {
    pub(super) async fn in_sqlite(file: &str, handlers: Handlers) -> Result<Self, Error> {
        Self::of(SqliteConfig::file(file), handlers).await
    }
}

impl<C: StoreConfig + Clone> Queue<C> {
    async fn of(config: C, handlers: Handlers) -> Result<Self, Error> {
        let store = config.clone().start().await?;
        let shards = ShardCount::new(SHARDS).ok_or("no shards")?;
        let queue = QueueIdentity {
            name: Message::TYPE.into(),
            order: store::QueueOrder::Ordered(shards),
        };
        store.declare(&[queue]).await?;
        Ok(Self {
            config,
            handlers,
            store,
            bus: OnceLock::new(),
        })
    }
}

fn stored_as(message: &Message) -> Result<NewMessage, Error> {
    Ok(NewMessage {
        queue: Message::TYPE.into(),
        key: Some(u64::from(message.key).into()),
        envelope: Envelope::of(message, Encoding::Json)?,
        due: None,
    })
}

impl<C: StoreConfig> Insert for Queue<C> {
    async fn insert(&self, messages: Vec<Message>) -> Result<(), Error> {
        match self.bus.get() {
            Some(bus) => {
                for message in &messages {
                    bus.publish(message).await?;
                }
            }
            None => {
                let batch = messages.iter().map(stored_as);
                let batch = batch.collect::<Result<_, _>>()?;
                self.store.enqueue(batch).await?.committed();
            }
        }
        Ok(())
    }

    /// As an owner would: by lease, in order, settling what was read.
    async fn read_back(&self, record: &Arc<Record>) -> Result<(), Error> {
        let owner = MemberId::unique();
        for shard in (0..SHARDS).map(Shard) {
            let lease = self.store.take(Message::TYPE, shard, owner, LEASE).await?;
            let lease = lease.ok_or("somebody else has the shard")?;
            loop {
                let stored = self.store.read(&lease, &Window::of(READ)).await?;
                if stored.is_empty() {
                    break;
                }
                let mut settlements = Vec::with_capacity(stored.len());
                for message in stored {
                    record.handle_now(&serde_json::from_slice(&message.envelope.body)?);
                    settlements.push(Settlement {
                        sequence: message.sequence,
                        ending: Ending::Handled,
                    });
                }
                let settled = self.store.settle(&lease, &settlements).await?;
                if settled.missing > 0 {
                    return Err("what was read was settled by somebody else".into());
                }
            }
        }
        self.store.close().await;
        Ok(())
    }
}

impl<C: StoreConfig + Clone> Handle for Queue<C>
where
    DurableStore: From<C>,
{
    type Running = Bus;

    async fn start(&self, handlers: u32, record: &Arc<Record>) -> Result<Bus, Error> {
        // A file has one store at a time.
        self.store.close().await;
        let record = Arc::clone(record);
        let bus = Bus::builder()
            .store(self.config.clone())
            .key_by(|message: &Message| u64::from(message.key))
            .handler(move |message: Message, _: Context| {
                let record = Arc::clone(&record);
                async move {
                    record.handle_now(&message);
                    Ok(())
                }
            })
            .local_queue(Message::TYPE, |queue| {
                let queue = queue.durable().partitioned(handlers).shards(SHARDS);
                match self.handlers {
                    Handlers::Plain => queue,
                    Handlers::Transactional => queue.transactional(),
                }
            })
            .build()?
            .start()
            .await?;
        owned(&bus).await?;
        // Messages that are inserted from now on are published.
        let _ = self.bus.set(bus.clone());
        Ok(bus)
    }

    async fn stop(&self, running: Bus) -> Result<(), Error> {
        let report = running.shutdown(DRAIN).await;
        match report.is_clean() {
            true => Ok(()),
            false => Err("the bus did not drain".into()),
        }
    }
}

/// Waits until every shard has its owner, which is this process: nodes wait for one another before they take what others
/// may have. The store tells nobody.
async fn owned(bus: &Bus) -> Result<(), Error> {
    let store = bus.store().ok_or("the bus has no store")?;
    loop {
        let owners = store.owners(Message::TYPE).await?;
        if owners.iter().all(|owner| owner.fresh) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
