//! The queues that are measured: declared, filled, deleted with the raw client.

use std::collections::VecDeque;
use std::time::Duration;

use lapin::options::{
    BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use lapin::{Confirmation, PublisherConfirm};

use crate::Error;
use crate::machine::now;
use crate::subject::{Job, QueueType};
use crate::workload::{KEY_HEADER, Message, PARTITION_HEADER, Plan};

/// Publishes under way at once.
const WINDOW: usize = 500;

/// A connection to fill queues with.
pub(crate) struct Broker {
    connection: Connection,
}

impl Broker {
    pub(crate) async fn connect(url: &str) -> lapin::Result<Self> {
        let connection = Connection::connect(url, ConnectionProperties::default()).await?;
        Ok(Self { connection })
    }

    async fn channel(&self) -> lapin::Result<Channel> {
        self.connection.create_channel().await
    }

    /// Declares the queues of a job, empty.
    pub(crate) async fn declare(&self, job: &Job) -> lapin::Result<()> {
        let channel = self.channel().await?;
        for queue in job.queues() {
            let mut arguments = FieldTable::default();
            let queue_type = match job.queue_type {
                QueueType::Classic => "classic",
                QueueType::Quorum => "quorum",
            };
            arguments.insert(
                "x-queue-type".into(),
                AMQPValue::LongString(queue_type.into()),
            );
            arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
            channel
                .queue_declare(queue.into(), QueueDeclareOptions::durable(), arguments)
                .await?;
        }
        channel.close(200, "done".into()).await
    }

    /// Publishes the messages of a plan, in its order, at most `per_second` if that is given.
    pub(crate) async fn publish(
        &self,
        job: &Job,
        plan: &Plan,
        per_second: Option<u32>,
    ) -> Result<(), Error> {
        let channel = self.channel().await?;
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await?;
        let queues = job.queues();
        let mut confirms = VecDeque::new();
        let mut tick = per_second.map(|rate| {
            let mut tick = tokio::time::interval(Duration::from_secs(1) / rate);
            tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
            tick
        });
        for (number, (key, seq)) in plan.messages().enumerate() {
            if let Some(tick) = &mut tick {
                tick.tick().await;
            }
            let queue = &queues[key as usize % queues.len()];
            let body = Message::json(key, seq, now())?;
            let confirm = channel
                .basic_publish(
                    "".into(),
                    queue.as_str().into(),
                    BasicPublishOptions::default(),
                    &body,
                    properties(number, key),
                )
                .await?;
            confirms.push_back(confirm);
            if confirms.len() >= WINDOW
                && let Some(oldest) = confirms.pop_front()
            {
                taken(oldest).await?;
            }
        }
        for confirm in confirms {
            taken(confirm).await?;
        }
        Ok(channel.close(200, "done".into()).await?)
    }

    /// Waits until somebody consumes every queue of a job.
    pub(crate) async fn consumed(&self, job: &Job) -> lapin::Result<()> {
        let channel = self.channel().await?;
        for queue in job.queues() {
            let passive = QueueDeclareOptions {
                passive: true,
                ..QueueDeclareOptions::default()
            };
            while channel
                .queue_declare(queue.as_str().into(), passive, FieldTable::default())
                .await?
                .consumer_count()
                == 0
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        channel.close(200, "done".into()).await
    }

    /// Takes everything out of a queue.
    pub(crate) async fn take_all(&self, queue: &str) -> Result<Vec<Message>, Error> {
        let channel = self.channel().await?;
        let mut messages = Vec::new();
        while let Some(got) = channel
            .basic_get(queue.into(), BasicGetOptions::default())
            .await?
        {
            messages.push(serde_json::from_slice(&got.data)?);
            got.acker.ack(BasicAckOptions::default()).await?;
        }
        channel.close(200, "done".into()).await?;
        Ok(messages)
    }

    pub(crate) async fn delete(&self, job: &Job) -> lapin::Result<()> {
        let channel = self.channel().await?;
        for queue in job.queues().into_iter().chain([job.parked()]) {
            channel
                .queue_delete(queue.into(), QueueDeleteOptions::default())
                .await?;
        }
        channel
            .exchange_delete(job.parking_exchange().into(), Default::default())
            .await?;
        channel.close(200, "done".into()).await
    }
}

fn properties(number: usize, key: u32) -> BasicProperties {
    let mut headers = FieldTable::default();
    for header in [KEY_HEADER, PARTITION_HEADER] {
        let key = AMQPValue::LongString(key.to_string().into());
        headers.insert(header.into(), key);
    }
    BasicProperties::default()
        .with_delivery_mode(2)
        .with_type("bench-message".into())
        .with_content_type("application/json".into())
        .with_message_id(number.to_string().into())
        .with_headers(headers)
}

/// Waits for the broker's word.
async fn taken(confirm: PublisherConfirm) -> Result<(), Error> {
    match confirm.await? {
        Confirmation::Ack(None) => Ok(()),
        other => Err(format!("the broker did not take a message: {other:?}").into()),
    }
}
