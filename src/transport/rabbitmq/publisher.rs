//! Sends envelopes out.
//!
//! Owns the translation of a destination; how a message is sent and what its outcome means is in
//! [`sending`](super::sending). Sends nothing twice, and keeps no order between two messages that are
//! under way at the same time: who needs order waits for the first confirm.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use laneway_actors::port::{Destination, Outgoing, PublishError, Publisher};

use super::RabbitMq;
use super::connection::Purpose;
use super::properties::{short, write};
use super::sending::{Message, SendError, send};

/// Publishes on the publishing connection.
pub(super) struct BrokerPublisher {
    broker: RabbitMq,
}

impl BrokerPublisher {
    pub(super) fn new(broker: RabbitMq) -> Self {
        Self { broker }
    }
}

impl Publisher for BrokerPublisher {
    fn publish(&self, outgoing: Outgoing) -> BoxFuture<'static, Result<(), PublishError>> {
        let broker = self.broker.clone();
        async move {
            let message = encode(outgoing)?;
            let core = broker.core().map_err(PublishError::Refused)?;
            let sending = {
                let core = Arc::clone(&core);
                async move { send(&core, Purpose::Publishing, message).await }
            };
            match core.run(sending).await {
                Some(Ok(())) => Ok(()),
                Some(Err(SendError::Refused(why))) => Err(PublishError::Refused(why)),
                Some(Err(SendError::Unknown(why))) => Err(PublishError::Unknown(why)),
                None => Err(PublishError::Unknown(
                    "the connections have been shut down".to_owned(),
                )),
            }
        }
        .boxed()
    }
}

fn encode(outgoing: Outgoing) -> Result<Message, PublishError> {
    // A queue is reached through the default exchange, which routes by the queue's name.
    let (exchange, routing_key) = match &outgoing.destination {
        Destination::Queue(queue) => ("", queue),
        Destination::Exchange {
            exchange,
            routing_key,
        } => (exchange.as_ref(), routing_key),
        other => {
            return Err(PublishError::Refused(format!(
                "not sent: RabbitMQ has no destination {other:?}"
            )));
        }
    };
    let name = |what: &str, text: &str| {
        short(text).map_err(|why| PublishError::Encode(format!("{what} is {why}")))
    };
    Ok(Message {
        exchange: name("the exchange's name", exchange)?,
        // It may be an ordering key, so the error does not show it.
        routing_key: name("the routing key", routing_key)?,
        properties: write(&outgoing.envelope).map_err(PublishError::Encode)?,
        body: outgoing.envelope.body,
    })
}
