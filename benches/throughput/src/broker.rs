//! The queues that are measured: declared, filled, deleted with the raw client.

use std::collections::VecDeque;

use lapin::options::{
    BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use serde::{Deserialize, Serialize};

/// The header that carries the key.
pub(crate) const KEY_HEADER: &str = "ordering-key";
/// Publishes under way at once while filling.
const WINDOW: usize = 500;

/// A message: its key, its number within the key from 1, and padding to 256 bytes.
#[derive(Serialize, Deserialize)]
pub(crate) struct Numbered {
    pub(crate) key: u64,
    pub(crate) seq: u64,
    padding: String,
}

impl laneway::Message for Numbered {
    const TYPE: &'static str = "numbered";
}

/// A connection to fill queues with.
pub(crate) struct Broker {
    connection: Connection,
    quorum: bool,
}

impl Broker {
    pub(crate) async fn connect(url: &str, quorum: bool) -> lapin::Result<Self> {
        let connection = Connection::connect(url, ConnectionProperties::default()).await?;
        Ok(Self { connection, quorum })
    }

    async fn channel(&self) -> lapin::Result<Channel> {
        self.connection.create_channel().await
    }

    /// A fresh queue with a backlog, the keys one after the other.
    pub(crate) async fn fill(
        &self,
        queue: &str,
        messages: u64,
        keys: u64,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let channel = self.channel().await?;
        let mut arguments = FieldTable::default();
        let queue_type = if self.quorum { "quorum" } else { "classic" };
        arguments.insert(
            "x-queue-type".into(),
            AMQPValue::LongString(queue_type.into()),
        );
        arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
        channel
            .queue_declare(queue.into(), QueueDeclareOptions::durable(), arguments)
            .await?;
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await?;
        let mut confirms = VecDeque::new();
        for number in 0..messages {
            let (key, seq) = (number % keys, number / keys + 1);
            let mut message = Numbered {
                key,
                seq,
                padding: String::new(),
            };
            let bare = serde_json::to_vec(&message)?.len();
            message.padding = "x".repeat(256_usize.saturating_sub(bare));
            let mut headers = FieldTable::default();
            headers.insert(
                KEY_HEADER.into(),
                AMQPValue::LongString(key.to_string().into()),
            );
            let properties = BasicProperties::default()
                .with_delivery_mode(2)
                .with_type("numbered".into())
                .with_content_type("application/json".into())
                .with_message_id(number.to_string().into())
                .with_headers(headers);
            let body = serde_json::to_vec(&message)?;
            let options = BasicPublishOptions::default();
            confirms.push_back(
                channel
                    .basic_publish("".into(), queue.into(), options, &body, properties)
                    .await?,
            );
            if confirms.len() >= WINDOW
                && let Some(oldest) = confirms.pop_front()
            {
                oldest.await?;
            }
        }
        for confirm in confirms {
            confirm.await?;
        }
        Ok(())
    }

    pub(crate) async fn delete(&self, queue: &str) -> lapin::Result<()> {
        let channel = self.channel().await?;
        channel
            .queue_delete(queue.into(), QueueDeleteOptions::default())
            .await?;
        Ok(())
    }
}
