//! A foreign client: what other programs do at the broker, without Laneway.

use lapin::options::{
    BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions,
    ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, ExchangeKind,
};

/// A connection with one channel in confirm mode.
pub struct Foreign {
    connection: Connection,
    channel: Channel,
}

impl Foreign {
    /// Connects.
    pub async fn connect(url: &str) -> Self {
        let connection = Connection::connect(url, ConnectionProperties::default())
            .await
            .expect("the broker is there");
        let channel = confirming(&connection).await;
        Self {
            connection,
            channel,
        }
    }

    /// Declares a durable queue.
    pub async fn declare(&self, queue: &str, arguments: FieldTable) {
        let options = QueueDeclareOptions::durable();
        self.channel
            .queue_declare(queue.into(), options, arguments)
            .await
            .expect("declared");
    }

    /// Declares a durable fanout exchange, and binds a queue to it if one is named.
    pub async fn declare_exchange(&self, exchange: &str, queue: Option<&str>) {
        let options = ExchangeDeclareOptions {
            durable: true,
            ..Default::default()
        };
        let arguments = FieldTable::default();
        self.channel
            .exchange_declare(exchange.into(), ExchangeKind::Fanout, options, arguments)
            .await
            .expect("declared");
        if let Some(queue) = queue {
            let options = QueueBindOptions::default();
            self.channel
                .queue_bind(
                    queue.into(),
                    exchange.into(),
                    "".into(),
                    options,
                    FieldTable::default(),
                )
                .await
                .expect("bound");
        }
    }

    /// Publishes to a queue and waits for the confirm.
    pub async fn publish(&self, queue: &str, body: &[u8], properties: BasicProperties) {
        assert!(
            self.try_publish(queue, body, properties).await,
            "queue `{queue}` took no message"
        );
    }

    /// Publishes to a queue and waits for the answer: whether it was confirmed or refused (nack).
    pub async fn try_publish(&self, queue: &str, body: &[u8], properties: BasicProperties) -> bool {
        let confirm = self
            .channel
            .basic_publish(
                "".into(),
                queue.into(),
                BasicPublishOptions::default(),
                body,
                properties,
            )
            .await
            .expect("written")
            .await
            .expect("answered");
        match confirm {
            Confirmation::Ack(None) => true,
            Confirmation::Nack(_) => false,
            other => panic!("{other:?}"),
        }
    }

    /// Publishes the numbers from `from` to `to`, as decimal text, persistent.
    pub async fn publish_numbers(&self, queue: &str, numbers: std::ops::Range<u64>) {
        let mut confirms = Vec::new();
        for number in numbers {
            let properties = BasicProperties::default()
                .with_delivery_mode(2)
                .with_message_id(number.to_string().into());
            let confirm = self
                .channel
                .basic_publish(
                    "".into(),
                    queue.into(),
                    BasicPublishOptions::default(),
                    number.to_string().as_bytes(),
                    properties,
                )
                .await
                .expect("written");
            confirms.push(confirm);
        }
        for confirm in confirms {
            assert_eq!(confirm.await.expect("confirmed"), Confirmation::Ack(None));
        }
    }

    /// Publishes numbered messages over `keys` keys round robin, the key in a header, and records them.
    pub async fn publish_numbered(
        &self,
        queue: &str,
        header: &str,
        ledger: &laneway::testing::OrderLedger,
        messages: u64,
        keys: u64,
    ) {
        let mut confirms = std::collections::VecDeque::new();
        for number in 0..messages {
            let (key, seq) = (format!("key-{}", number % keys), number / keys + 1);
            let (body, properties) = numbered(header, &key, seq);
            let confirm = self
                .channel
                .basic_publish(
                    "".into(),
                    queue.into(),
                    BasicPublishOptions::default(),
                    &body,
                    properties,
                )
                .await
                .expect("written");
            ledger.published(&key, seq);
            confirms.push_back(confirm);
            if confirms.len() >= 500
                && let Some(oldest) = confirms.pop_front()
            {
                assert_eq!(oldest.await.expect("confirmed"), Confirmation::Ack(None));
            }
        }
        for confirm in confirms {
            assert_eq!(confirm.await.expect("confirmed"), Confirmation::Ack(None));
        }
    }

    /// Takes one message away, if there is one.
    pub async fn get(&self, queue: &str) -> Option<lapin::message::Delivery> {
        let got = self.try_get(queue).await.expect("the queue is there")?;
        got.ack(BasicAckOptions::default())
            .await
            .expect("acknowledged");
        Some(got.delivery)
    }

    /// Gets one message, if there is one, without acknowledging it.
    pub async fn try_get(
        &self,
        queue: &str,
    ) -> lapin::Result<Option<lapin::message::BasicGetMessage>> {
        self.channel
            .basic_get(queue.into(), BasicGetOptions::default())
            .await
    }

    /// Number of messages ready in a queue.
    pub async fn ready(&self, queue: &str) -> u32 {
        let options = QueueDeclareOptions::default().passive();
        self.channel
            .queue_declare(queue.into(), options, FieldTable::default())
            .await
            .expect("the queue is there")
            .message_count()
    }

    /// Deletes a queue, whatever is in it.
    pub async fn delete(&self, queue: &str) {
        self.channel
            .queue_delete(queue.into(), QueueDeleteOptions::default())
            .await
            .expect("deleted");
    }

    /// Deletes an exchange.
    pub async fn delete_exchange(&self, exchange: &str) {
        self.channel
            .exchange_delete(exchange.into(), ExchangeDeleteOptions::default())
            .await
            .expect("deleted");
    }

    /// Another channel of the connection, in confirm mode.
    pub async fn channel(&self) -> Channel {
        confirming(&self.connection).await
    }
}

/// Body and properties of a numbered message, as Laneway would publish it: persistent, with id and type.
pub fn numbered(header: &str, key: &str, seq: u64) -> (Vec<u8>, BasicProperties) {
    let mut headers = FieldTable::default();
    headers.insert(header.into(), AMQPValue::LongString(key.into()));
    let properties = BasicProperties::default()
        .with_delivery_mode(2)
        .with_message_id(format!("{key}-{seq}").into())
        .with_type("numbered".into())
        .with_headers(headers);
    let body = format!(r#"{{"key":"{key}","seq":{seq}}}"#);
    (body.into_bytes(), properties)
}

async fn confirming(connection: &Connection) -> Channel {
    let channel = connection.create_channel().await.expect("a channel");
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await
        .expect("confirm mode");
    channel
}
