//! No broker: what the lanes themselves cost. The same prepared messages come in batches of 64 to Laneway's
//! supervisor, which sends them on to its lanes, and to a loop that sends them on to a bounded channel for
//! each lane. Both find the lane of a key by the same function, decode the same bodies, run the same handler.

#[path = "../../../shared/batches.rs"]
mod batches;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use laneway::actors::{LaneCount, LaneIndex};
use laneway::prelude::*;
use laneway::{Envelope, Message as _};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::PREFETCH;
use crate::Error;
use crate::record::Record;
use crate::workload::{KEY_HEADER, Message};
use batches::Batches;

/// Messages handed over at once.
const BATCH: usize = 64;
const LANES: u32 = 4;
/// What the channel of a lane holds, in parts of batches: as many messages as the prefetch.
const DEPTH: usize = PREFETCH as usize / (BATCH / LANES as usize);
const QUEUE: &str = "local";

/// The messages, made before anything is measured.
fn prepare(record: &Record) -> Result<Vec<Envelope>, Error> {
    let messages = record.plan.messages();
    let prepared = messages
        .map(|(key, seq)| {
            let message = Message::short(key, seq);
            let mut envelope = Envelope::of(&message, Encoding::MessagePack)?;
            envelope.set_key(KEY_HEADER, &u64::from(key).into());
            Ok(envelope)
        })
        .collect();
    record.begin();
    prepared
}

/// Laneway.
pub(super) async fn laneway(record: &Arc<Record>) -> Result<(), Error> {
    let batches = Batches::of(BATCH, prepare(record)?);
    let handled = Arc::clone(record);
    let bus = Bus::builder()
        .transport(batches)
        .topology(|t| t.queue(QUEUE, |q| q))
        .endpoint(QUEUE, |e| {
            e.ordered_by_header(KEY_HEADER)
                .local_partitioned()
                .lanes(LANES)
                .concurrency(u32::from(PREFETCH))
                .max_in_flight(u32::from(PREFETCH))
                .discard_poison()
                .handler(move |message: Message, _: Context| {
                    let record = Arc::clone(&handled);
                    async move {
                        record.handle_now(&message);
                        Ok(())
                    }
                })
        })
        .build()?
        .start()
        .await?;
    record.all().await;
    bus.shutdown(Duration::from_secs(10)).await;
    Ok(())
}

/// Channels.
pub(super) async fn channels(record: &Arc<Record>) -> Result<(), Error> {
    let messages = prepare(record)?;
    let count = LaneCount::new(NonZeroU32::new(LANES).ok_or("no lanes")?);
    let mut tasks = JoinSet::new();
    let lanes: Vec<_> = (0..LANES)
        .map(|_| {
            let (lane, mut batches) = mpsc::channel(DEPTH);
            let record = Arc::clone(record);
            tasks.spawn(async move {
                while let Some(batch) = batches.recv().await {
                    for envelope in batch {
                        let envelope: Envelope = envelope;
                        assert_eq!(envelope.message_type.as_deref(), Some(Message::TYPE));
                        let message = Encoding::MessagePack.decode(&envelope.body)?;
                        record.handle_now(&message);
                    }
                }
                Ok::<_, Error>(())
            });
            lane
        })
        .collect();
    let mut messages = messages.into_iter();
    loop {
        let mut batch: Vec<Vec<Envelope>> = lanes.iter().map(|_| Vec::new()).collect();
        for envelope in messages.by_ref().take(BATCH) {
            let key = envelope.headers.text(KEY_HEADER).ok_or("no key")?;
            let lane = LaneIndex::of(&key.into(), count);
            batch[lane.get()].push(envelope);
        }
        if batch.iter().all(Vec::is_empty) {
            break;
        }
        for (lane, batch) in lanes.iter().zip(batch) {
            if !batch.is_empty() {
                lane.send(batch).await?;
            }
        }
    }
    drop(lanes);
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}
