//! Consumers on the raw client, without order or one message at a time.

use std::sync::Arc;

use futures::StreamExt;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ConnectionProperties, Consumer};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::{AT_ONCE, Job, PREFETCH};
use crate::Error;
use crate::record::Record;
use crate::workload::Message;

/// A consumer of the job's queue.
pub(super) struct Queue {
    pub(super) connection: Connection,
    pub(super) channel: Channel,
    consumer: Consumer,
}

impl Queue {
    pub(super) async fn consume(job: &Job) -> lapin::Result<Self> {
        let connection = Connection::connect(&job.url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel
            .basic_qos(PREFETCH, BasicQosOptions::default())
            .await?;
        let consumer = channel
            .basic_consume(
                job.name.as_str().into(),
                "bench".into(),
                BasicConsumeOptions::default(),
                FieldTable::default(),
            )
            .await?;
        Ok(Self {
            connection,
            channel,
            consumer,
        })
    }

    pub(super) async fn next(&mut self) -> Result<Delivery, Error> {
        Ok(self.consumer.next().await.ok_or("the queue ended")??)
    }

    /// Waits for the tasks, then closes, which comes after every acknowledgement.
    pub(super) async fn finish(self, mut tasks: JoinSet<Result<(), Error>>) -> Result<(), Error> {
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        Ok(self.channel.close(200, "done".into()).await?)
    }
}

/// Decodes, handles, acknowledges.
pub(super) async fn process(delivery: &Delivery, record: &Record) -> Result<(), Error> {
    let message: Message = serde_json::from_slice(&delivery.data)?;
    if !record.handle(&message).await {
        return Err("this consumer has no answer to a failure".into());
    }
    delivery.acker.ack(BasicAckOptions::default()).await?;
    Ok(())
}

/// One message after the other.
pub(super) async fn sequential(job: &Job, record: &Arc<Record>) -> Result<(), Error> {
    let mut queue = Queue::consume(job).await?;
    for _ in 0..record.plan.len() {
        process(&queue.next().await?, record).await?;
    }
    queue.finish(JoinSet::new()).await
}

/// One message after the other, every 64th acknowledged for all before it.
pub(super) async fn cumulative(job: &Job, record: &Arc<Record>) -> Result<(), Error> {
    let mut queue = Queue::consume(job).await?;
    for number in 1..=record.plan.len() {
        let delivery = queue.next().await?;
        let message: Message = serde_json::from_slice(&delivery.data)?;
        record.handle(&message).await;
        if number % 64 == 0 || number == record.plan.len() {
            let options = BasicAckOptions { multiple: true };
            let tag = delivery.delivery_tag;
            queue.channel.basic_ack(tag, options).await?;
        }
    }
    queue.finish(JoinSet::new()).await
}

/// One task per message, in any order.
pub(super) async fn unordered(job: &Job, record: &Arc<Record>) -> Result<(), Error> {
    let mut queue = Queue::consume(job).await?;
    let permits = Arc::new(Semaphore::new(AT_ONCE as usize));
    let mut tasks = JoinSet::new();
    for _ in 0..record.plan.len() {
        let delivery = queue.next().await?;
        let permit = Arc::clone(&permits).acquire_owned().await?;
        let record = Arc::clone(record);
        tasks.spawn(async move {
            process(&delivery, &record).await?;
            drop(permit);
            Ok(())
        });
        while let Some(ended) = tasks.try_join_next() {
            ended??;
        }
    }
    queue.finish(tasks).await
}
