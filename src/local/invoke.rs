//! Calling a handler inline, with its answer.

use std::any::TypeId;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use laneway_actors::{
    ContextPublisher, EndpointSettings, Envelope, Failure, HandlerSet, Message, MessageId,
    Surroundings,
};

use super::describe::Answer;
use super::plan::{Plan, PlannedQueue};
use super::settings::{QueueOrder, Storage};
use crate::bus::Bus;

/// Why [`Bus::invoke`] gives no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvokeError {
    /// Nobody handles messages of this type in this program.
    #[error("there is no local handler for messages of type `{0}`")]
    NoHandler(String),
    /// Its handler cannot be called inline. Nothing ran.
    #[error("messages of type `{message_type}` cannot be invoked: {why}")]
    Refused {
        /// The type of the message.
        message_type: String,
        /// Why not, and what to do instead.
        why: String,
    },
    /// The handler answers otherwise. Nothing ran.
    #[error("the handler of `{message_type}` answers `{answers}`, not `{asked}`")]
    Answer {
        /// The type of the message.
        message_type: String,
        /// The Rust type that it answers.
        answers: &'static str,
        /// The Rust type that was asked for.
        asked: &'static str,
    },
    /// The handler took longer than its time-out, and was dropped at an `await`.
    #[error("the handler took longer than its time-out of {0:?}")]
    TimedOut(Duration),
    /// The handler failed, or panicked. It is not tried again.
    #[error("the handler failed ({:?}); see the failure for its error", .0.kind())]
    Failed(Failure),
    /// The bus has been shut down. Nothing ran.
    #[error("not invoked: the bus has been shut down")]
    ShutDown,
}

/// The handlers that may be called inline, by message type.
#[derive(Default)]
pub(crate) struct Invocables {
    by_type: HashMap<&'static str, Result<Invocable, &'static str>>,
}

struct Invocable {
    queue: Arc<str>,
    handlers: HandlerSet,
    answer: Answer,
    timeout: Option<Duration>,
    transactional: bool,
}

impl Invocables {
    pub(crate) fn of(plan: &Plan) -> Self {
        // The default of any endpoint.
        let timeout = EndpointSettings::named("").handler_timeout;
        let mut by_type = HashMap::new();
        for queue in &plan.queues {
            let more = by_type.contains_key(queue.message_type);
            let entry = if more {
                Err(SEVERAL)
            } else {
                invocable(queue, timeout)
            };
            by_type.insert(queue.message_type, entry);
        }
        Self { by_type }
    }
}

const SEVERAL: &str =
    "they have several handlers, whose answers would be several; use `publish` or `send`";

fn invocable(queue: &PlannedQueue, timeout: Option<Duration>) -> Result<Invocable, &'static str> {
    let said = &queue.settings;
    let [answer] = queue.answers[..] else {
        return Err(SEVERAL);
    };
    if said.storage == Storage::Broker {
        return Err(
            "their queue is on the broker, and who handles them is decided there; use `send`",
        );
    }
    if said.order != QueueOrder::Unordered {
        return Err(
            "their queue is ordered, and an inline call would overtake what waits in it; use `send`",
        );
    }
    Ok(Invocable {
        queue: Arc::clone(&queue.name),
        handlers: queue.handlers.clone(),
        answer,
        timeout: said.handler_timeout.unwrap_or(timeout),
        transactional: said.transactional,
    })
}

impl Bus {
    /// Calls the one local handler of messages of type `T` now, in the caller's task, and gives its answer, which is
    /// what the handler returns: it is **not** published. As if the caller called it: past the queue, whose parallelism
    /// does not count it; without retries; a drain does not wait for it. The handler's time-out holds.
    ///
    /// Where its queue is transactional, the call has a transaction of its own, which commits before the answer is given.
    /// If that commit is not answered, it is a failure, and whether it took place is unknown.
    ///
    /// The handlers of ordered queues, and of queues on the broker, cannot be invoked; nor can several.
    ///
    /// ```
    /// # use laneway::prelude::*;
    /// # use serde::{Deserialize, Serialize};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// #[derive(Serialize, Deserialize)]
    /// struct Quote { items: u32 }
    /// impl Message for Quote { const TYPE: &'static str = "quote"; }
    /// #[derive(Serialize, Deserialize)]
    /// struct Price { cents: u32 }
    /// impl Message for Price { const TYPE: &'static str = "price"; }
    ///
    /// let bus = Bus::builder()
    ///     .handler::<Quote, _>(async |quote: Quote, _: Context| Ok(Price { cents: quote.items * 250 }))
    ///     .build()?
    ///     .start()
    ///     .await?;
    /// let price: Price = bus.invoke(Quote { items: 3 }).await?;
    /// assert_eq!(price.cents, 750);
    /// # bus.shutdown(std::time::Duration::from_secs(5)).await;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`InvokeError`].
    ///
    /// # Cancellation
    /// Dropping the future drops the handler at its `await`.
    pub async fn invoke<T: Message, A: 'static>(&self, message: T) -> Result<A, InvokeError> {
        let message_type = || T::TYPE.to_owned();
        let publisher = &self.inner.publisher;
        if publisher.is_closed() {
            return Err(InvokeError::ShutDown);
        }
        let found = self.inner.invocables.by_type.get(T::TYPE);
        let found = found.ok_or_else(|| InvokeError::NoHandler(message_type()))?;
        let invocable = found.as_ref().map_err(|why| InvokeError::Refused {
            message_type: message_type(),
            why: (*why).to_owned(),
        })?;
        let mismatch = || InvokeError::Answer {
            message_type: message_type(),
            answers: invocable.answer.name,
            asked: std::any::type_name::<A>(),
        };
        if invocable.answer.id != TypeId::of::<A>() {
            return Err(mismatch());
        }
        let scope = match invocable.transactional {
            true => {
                let store = self.inner.store.as_ref();
                let scope = store.and_then(|store| store.scope());
                Some(scope.ok_or(InvokeError::ShutDown)?)
            }
            false => None,
        };
        let surroundings = Surroundings {
            endpoint: Arc::clone(&invocable.queue),
            envelope: Envelope {
                id: Some(MessageId::unique()),
                message_type: Some(T::TYPE.into()),
                sent_at: Some(SystemTime::now()),
                ..Envelope::default()
            },
            publisher: Some(Arc::clone(publisher) as Arc<dyn ContextPublisher>),
            scope: scope.clone(),
        };
        let called = invocable.handlers.invoke(message, surroundings);
        let answer = match invocable.timeout {
            Some(bound) => tokio::time::timeout(bound, called)
                .await
                .map_err(|_| InvokeError::TimedOut(bound))?,
            None => called.await,
        };
        let answer = answer.map_err(InvokeError::Failed)?;
        if let Some(scope) = scope {
            let committed = scope.commit(Vec::new()).await;
            committed.map_err(|error| InvokeError::Failed(Failure::transient(error)))?;
        }
        answer
            .downcast()
            .map(|answer| *answer)
            .map_err(|_| mismatch())
    }
}
