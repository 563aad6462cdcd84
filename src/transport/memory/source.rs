//! The source and its sessions.
//!
//! Owns the stream of deliveries and the answering side. Acknowledgements are processed when they
//! are called, so a barrier has nothing to wait for, and closing is one step.
//!
//! A session ends when it is closed, when the broker cuts it, when it acknowledges a tag that is not
//! outstanding, or when both its halves have been dropped. Each gives back what it held.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::future::BoxFuture;
use futures::{FutureExt as _, Stream, StreamExt as _};
use laneway_actors::port::{Ack, OpenSession, Session, SessionLost, Source, SourceError};
use laneway_actors::{Delivery, SessionState};

use super::broker::MemoryBroker;
use super::live_queue::{End, LiveQueue};
use super::queue::{ConsumerId, UnknownTag};
use crate::topology::QueueSpec;

/// A queue of the embedded broker as a source.
pub(super) struct MemorySource {
    broker: MemoryBroker,
    spec: QueueSpec,
}

impl MemorySource {
    pub(super) fn new(broker: MemoryBroker, spec: QueueSpec) -> Self {
        Self { broker, spec }
    }

    fn open_now(&self, state: Arc<SessionState>, credits: u16) -> Result<OpenSession, SourceError> {
        if state.has_ended() {
            // It could neither be read nor settle, and would still hold messages.
            return Err(SourceError::Unavailable {
                what: format!(
                    "the session ended before it was opened (queue `{}`)",
                    self.name()
                ),
                source: None,
            });
        }
        let (queue, consumer) = self.broker.open(&self.spec.name, &state, credits)?;
        let life = Arc::new(Life {
            queue,
            consumer,
            state,
        });
        Ok(OpenSession {
            deliveries: Deliveries {
                life: Arc::clone(&life),
                ended: false,
            }
            .boxed(),
            control: Arc::new(MemorySession { life }),
        })
    }
}

impl Source for MemorySource {
    fn name(&self) -> &str {
        &self.spec.name
    }

    fn verify(&self) -> BoxFuture<'_, Result<(), Vec<SourceError>>> {
        async {
            if self.spec.declared {
                self.broker.declare_queue(&self.spec)
            } else {
                self.broker.check(&self.spec)
            }
        }
        .boxed()
    }

    fn open(
        &self,
        state: Arc<SessionState>,
        credits: u16,
    ) -> BoxFuture<'_, Result<OpenSession, SourceError>> {
        async move { self.open_now(state, credits) }.boxed()
    }
}

impl fmt::Debug for MemorySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MemorySource").field(&self.spec).finish()
    }
}

/// One session's place at its queue, shared by both halves; the last one to go ends it. A session
/// that nobody can read or settle must not keep its messages, nor stay the active consumer.
struct Life {
    queue: Arc<LiveQueue>,
    consumer: ConsumerId,
    state: Arc<SessionState>,
}

impl Life {
    fn end(&self, end: End) {
        self.queue.end(self.consumer, &self.state, end);
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.end(End::Closed);
        self.queue.forget(self.consumer);
    }
}

struct Deliveries {
    life: Arc<Life>,
    ended: bool,
}

impl Stream for Deliveries {
    type Item = Result<Vec<Delivery>, SourceError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let life = &self.life;
        Poll::Ready(match ready!(life.queue.poll_fetch(life.consumer, cx)) {
            Ok(batch) => {
                // Copied here, outside the queue's lock.
                let deliveries = batch.into_iter().map(|fetched| {
                    let envelope = Arc::unwrap_or_clone(fetched.message);
                    Delivery::new(envelope, Arc::clone(&life.state), fetched.tag)
                        .redelivered(fetched.redelivered)
                });
                Some(Ok(deliveries.collect()))
            }
            Err(end) => {
                self.ended = true;
                match end {
                    End::Closed => None,
                    End::Lost(what) => Some(Err(SourceError::Unavailable { what, source: None })),
                }
            }
        })
    }
}

struct MemorySession {
    life: Arc<Life>,
}

impl Session for MemorySession {
    fn acknowledge(&self, acks: &[Ack]) {
        let life = &self.life;
        if let Err(UnknownTag(tag)) = life.queue.acknowledge(life.consumer, acks) {
            // As RabbitMQ does: the two sides disagree about what is outstanding, so nothing that is
            // said on this session can be trusted any more.
            life.end(End::Lost(format!(
                "PRECONDITION_FAILED (406): unknown delivery tag {} on queue `{}`",
                tag.0,
                life.queue.name()
            )));
        }
    }

    /// As with RabbitMQ, though here it saves little.
    fn gathers_acknowledgements(&self) -> bool {
        true
    }

    fn barrier(&self) -> BoxFuture<'static, Result<(), SessionLost>> {
        let life = Arc::clone(&self.life);
        async move {
            if life.state.has_ended() {
                Err(SessionLost)
            } else {
                Ok(())
            }
        }
        .boxed()
    }

    fn close(&self) -> BoxFuture<'static, ()> {
        let life = Arc::clone(&self.life);
        async move { life.end(End::Closed) }.boxed()
    }
}
