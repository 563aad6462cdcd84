//! Parks poison messages by publishing them to their parking exchange.
//!
//! By publishing and not by rejecting: a message rejected to a dead-letter exchange that is missing,
//! unbound or full is lost without a sign (FACTS 14). Mandatory and confirmed, so that each of these
//! is an error here. A crash between the confirm and the acknowledgement of the original leaves a
//! second copy, never none.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use laneway_actors::port::{DeadLetter, ParkError, Parking};
use lapin::BasicProperties;
use lapin::types::ShortString;

use super::RabbitMq;
use super::connection::Purpose;
use super::properties::{Native, parked, short, write, write_value};
use super::sending::{Message, SendError, send};
use crate::transport::provenance;

/// The parking exchange of a queue.
pub(super) struct QueueParking {
    broker: RabbitMq,
    exchange: Arc<str>,
}

impl QueueParking {
    pub(super) fn new(broker: RabbitMq, exchange: &str) -> Self {
        Self {
            broker,
            exchange: exchange.into(),
        }
    }
}

impl Parking for QueueParking {
    fn name(&self) -> &str {
        &self.exchange
    }

    fn park(&self, letter: Arc<DeadLetter>) -> BoxFuture<'static, Result<(), ParkError>> {
        let broker = self.broker.clone();
        let exchange = Arc::clone(&self.exchange);
        async move {
            let core = broker.core().map_err(ParkError::Refused)?;
            let user = &core.settings.uri.authority.userinfo.username;
            let message = encode(&exchange, user, &letter).map_err(ParkError::Refused)?;
            let sending = {
                let core = Arc::clone(&core);
                async move { send(&core, Purpose::Parking, message).await }
            };
            match core.run(sending).await {
                Some(Ok(())) => Ok(()),
                Some(Err(SendError::Refused(why))) => Err(ParkError::Refused(why)),
                Some(Err(SendError::Unknown(why))) => Err(ParkError::Unknown(why)),
                None => Err(ParkError::Unknown(
                    "the connections have been shut down".to_owned(),
                )),
            }
        }
        .boxed()
    }
}

fn encode(exchange: &str, user: &str, letter: &DeadLetter) -> Result<Message, String> {
    let delivery = &letter.delivery;
    let added = provenance::headers(letter)
        .into_iter()
        .filter_map(|(name, value)| Some((ShortString::from(name), write_value(&value)?)));
    let properties: BasicProperties = match delivery.native::<Native>() {
        Some(Native(properties)) => parked(properties, user, added),
        // A delivery of another source (an embedder's own) has only its envelope.
        None => parked(&write(delivery.envelope())?, user, added),
    };
    Ok(Message {
        exchange: short(exchange).map_err(|why| format!("the parking exchange's name is {why}"))?,
        // A fanout exchange ignores it; any other can tell the queues apart by it.
        routing_key: short(&letter.queue).map_err(|why| format!("the queue's name is {why}"))?,
        properties,
        body: delivery.envelope().body.clone(),
    })
}
