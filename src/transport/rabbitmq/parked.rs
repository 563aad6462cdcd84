//! The messages in a parking queue: read with a consumer of a session, never one by one.
//!
//! Single gets would not do: on a quorum queue each is a consumer of its own, and what several
//! consumers held is not given back in one order. A session is closed by closing its channel, which
//! gives everything back in its original order (FACTS 11, 13).

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use laneway_actors::port::{
    OpenSession, ParkedCount, ParkedMessages, PublishError, Source, SourceError,
};
use laneway_actors::{Delivery, SessionState};
use lapin::types::ShortString;

use super::RabbitMq;
use super::connection::Purpose;
use super::properties::{Native, replayed, short, write};
use super::sending::{Message, SendError, send};
use super::source::{QueueSource, refused, stopped};
use super::topology;
use crate::topology::QueueSpec;

/// One parking queue.
pub(super) struct QueueParked {
    broker: RabbitMq,
    source: QueueSource,
}

impl QueueParked {
    /// `parking` is the parking queue itself.
    pub(super) fn new(broker: RabbitMq, parking: QueueSpec) -> Self {
        Self {
            source: QueueSource::new(broker.clone(), parking),
            broker,
        }
    }
}

impl ParkedMessages for QueueParked {
    fn name(&self) -> &str {
        self.source.name()
    }

    fn count(&self) -> BoxFuture<'_, Result<ParkedCount, SourceError>> {
        async move {
            let core = self.broker.core().map_err(|why| refused(why, None))?;
            let asking = {
                let (core, queue) = (Arc::clone(&core), self.name().to_owned());
                async move { topology::count(&core, &queue).await }
            };
            let (ready, sessions) = core.run(asking).await.unwrap_or_else(|| Err(stopped()))?;
            Ok(ParkedCount { ready, sessions })
        }
        .boxed()
    }

    fn open(
        &self,
        state: Arc<SessionState>,
        credits: u16,
    ) -> BoxFuture<'_, Result<OpenSession, SourceError>> {
        self.source.open(state, credits)
    }

    fn send_back(
        &self,
        parked: Arc<Delivery>,
        queue: Arc<str>,
        replay: i64,
    ) -> BoxFuture<'static, Result<(), PublishError>> {
        let broker = self.broker.clone();
        async move {
            let core = broker.core().map_err(PublishError::Refused)?;
            let user = &core.settings.uri.authority.userinfo.username;
            let message = encode(&parked, &queue, user, replay).map_err(PublishError::Encode)?;
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

fn encode(parked: &Delivery, queue: &str, user: &str, replay: i64) -> Result<Message, String> {
    let properties = match parked.native::<Native>() {
        Some(Native(properties)) => replayed(properties, user, replay),
        None => replayed(&write(parked.envelope())?, user, replay),
    };
    Ok(Message {
        // The default exchange routes by the queue's name.
        exchange: ShortString::default(),
        routing_key: short(queue).map_err(|why| format!("the queue's name is {why}"))?,
        properties,
        body: parked.envelope().body.clone(),
    })
}
