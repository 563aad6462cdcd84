//! Laneway's store: an ordered queue.

use std::sync::Arc;
use std::time::Duration;

use laneway::actors::ShardCount;
use laneway::actors::port::MemberId;
use laneway::store::postgres::{PostgresConfig, PostgresStore};
use laneway::store::sqlite::{SqliteConfig, SqliteStore};
use laneway::store::{
    Ending, NewMessage, QueueIdentity, QueueOrder, Settlement, Shard, Store, Window,
};
use laneway::{Encoding, Envelope};

use super::Insert;
use crate::Error;
use crate::record::Record;
use crate::workload::Message;

/// As many as an ordered queue has where nothing is said.
const SHARDS: u32 = 1;
/// How many are read at once.
const READ: u32 = 1_000;
/// Longer than reading takes.
const LEASE: Duration = Duration::from_secs(60);

/// An ordered queue in a store. Everything is at its default, durability included: each commit waits for the disk.
pub(super) struct Queue<S> {
    store: S,
    name: Arc<str>,
}

impl Queue<PostgresStore> {
    pub(super) async fn in_postgres(address: &str) -> Result<Self, Error> {
        Self::of(PostgresStore::start(PostgresConfig::at(address)).await?).await
    }
}

impl Queue<SqliteStore> {
    pub(super) async fn in_sqlite(file: &str) -> Result<Self, Error> {
        Self::of(SqliteStore::start(SqliteConfig::file(file)).await?).await
    }
}

impl<S: Store> Queue<S> {
    async fn of(store: S) -> Result<Self, Error> {
        let name: Arc<str> = "bench".into();
        let shards = ShardCount::new(SHARDS).ok_or("no shards")?;
        let queue = QueueIdentity {
            name: name.clone(),
            order: QueueOrder::Ordered(shards),
        };
        store.declare(&[queue]).await?;
        Ok(Self { store, name })
    }

    fn stored_as(&self, message: &Message) -> Result<NewMessage, Error> {
        Ok(NewMessage {
            queue: self.name.clone(),
            key: Some(u64::from(message.key).into()),
            envelope: Envelope::of(message, Encoding::Json)?,
            due: None,
        })
    }
}

impl<S: Store> Insert for Queue<S> {
    async fn insert(&self, messages: Vec<Message>) -> Result<(), Error> {
        let batch = messages.iter().map(|message| self.stored_as(message));
        let batch = batch.collect::<Result<_, _>>()?;
        self.store.enqueue(batch).await?.committed();
        Ok(())
    }

    /// As an owner would: by lease, in order, settling what was read.
    async fn read_back(&self, record: &Arc<Record>) -> Result<(), Error> {
        let owner = MemberId::unique();
        for shard in (0..SHARDS).map(Shard) {
            let lease = self.store.take(&self.name, shard, owner, LEASE).await?;
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
