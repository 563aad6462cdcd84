//! Consumers on the raw client.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use futures::StreamExt;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties, Consumer};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::{Job, PREFETCH, Run, handle};
use crate::broker::{KEY_HEADER, Numbered};
use crate::order::Effects;

type Outcome = Result<Run, Box<dyn std::error::Error>>;

async fn consume(job: &Job) -> lapin::Result<(Connection, Channel, Consumer)> {
    let connection = Connection::connect(&job.url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel
        .basic_qos(PREFETCH, BasicQosOptions::default())
        .await?;
    let consumer = channel
        .basic_consume(
            job.queue.as_str().into(),
            "bench".into(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await?;
    Ok((connection, channel, consumer))
}

/// Decodes, handles, records, acknowledges.
async fn process(delivery: &Delivery, job: &Work) -> Result<(), Error> {
    let message: Numbered = serde_json::from_slice(&delivery.data)?;
    handle(job.handler).await;
    job.effects.record(message.key, message.seq);
    delivery.acker.ack(BasicAckOptions::default()).await?;
    Ok(())
}

type Error = Box<dyn std::error::Error + Send + Sync>;

/// What the tasks of a run share.
struct Work {
    handler: std::time::Duration,
    effects: Arc<Effects>,
    permits: Arc<Semaphore>,
    keys: Mutex<HashMap<String, VecDeque<Delivery>>>,
}

impl Work {
    fn of(job: &Job, effects: &Arc<Effects>) -> Arc<Self> {
        Arc::new(Self {
            handler: job.handler,
            effects: Arc::clone(effects),
            permits: Arc::new(Semaphore::new(job.concurrency as usize)),
            keys: Mutex::default(),
        })
    }
}

async fn finish(
    channel: &Channel,
    mut tasks: JoinSet<Result<(), Error>>,
    effects: &Effects,
    start: Instant,
) -> Outcome {
    while let Some(ended) = tasks.join_next().await {
        ended?.map_err(|error| error.to_string())?;
    }
    channel.close(200, "done".into()).await?;
    Ok(Run {
        time: start.elapsed(),
        inversions: effects.inversions(),
    })
}

/// One task per message, in any order.
pub(super) async fn unordered(job: &Job, effects: &Arc<Effects>, start: Instant) -> Outcome {
    let (_connection, channel, mut consumer) = consume(job).await?;
    let work = Work::of(job, effects);
    let mut tasks = JoinSet::new();
    for _ in 0..job.messages {
        let delivery = consumer.next().await.ok_or("the queue ended")??;
        let permit = Arc::clone(&work.permits).acquire_owned().await?;
        let work = Arc::clone(&work);
        tasks.spawn(async move {
            process(&delivery, &work).await?;
            drop(permit);
            Ok(())
        });
        while tasks.try_join_next().is_some() {}
    }
    finish(&channel, tasks, effects, start).await
}

/// A queue per active key, one task per active key.
pub(super) async fn map_of_keys(job: &Job, effects: &Arc<Effects>, start: Instant) -> Outcome {
    let (_connection, channel, mut consumer) = consume(job).await?;
    let work = Work::of(job, effects);
    let mut tasks = JoinSet::new();
    for _ in 0..job.messages {
        let delivery = consumer.next().await.ok_or("the queue ended")??;
        let key = match delivery
            .properties
            .headers()
            .as_ref()
            .and_then(|headers| headers.inner().get(KEY_HEADER))
        {
            Some(AMQPValue::LongString(key)) => key.to_string(),
            _ => return Err("a message without a key".into()),
        };
        {
            let mut keys = work.keys.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(waiting) = keys.get_mut(&key) {
                waiting.push_back(delivery);
                continue;
            }
            keys.insert(key.clone(), VecDeque::new());
        }
        tasks.spawn(run_key(Arc::clone(&work), key, delivery));
        while tasks.try_join_next().is_some() {}
    }
    finish(&channel, tasks, effects, start).await
}

async fn run_key(work: Arc<Work>, key: String, mut delivery: Delivery) -> Result<(), Error> {
    loop {
        let permit = work.permits.acquire().await?;
        process(&delivery, &work).await?;
        drop(permit);
        let mut keys = work.keys.lock().unwrap_or_else(PoisonError::into_inner);
        match keys.get_mut(&key).and_then(VecDeque::pop_front) {
            Some(next) => delivery = next,
            None => {
                keys.remove(&key);
                return Ok(());
            }
        }
    }
}

/// One message after the other, every 64th acknowledged for all before it.
pub(super) async fn cumulative(job: &Job, effects: &Arc<Effects>, start: Instant) -> Outcome {
    let (_connection, channel, mut consumer) = consume(job).await?;
    for number in 1..=job.messages {
        let delivery = consumer.next().await.ok_or("the queue ended")??;
        let message: Numbered = serde_json::from_slice(&delivery.data)?;
        effects.record(message.key, message.seq);
        if number % 64 == 0 || number == job.messages {
            let options = BasicAckOptions { multiple: true };
            channel.basic_ack(delivery.delivery_tag, options).await?;
        }
    }
    finish(&channel, JoinSet::new(), effects, start).await
}
