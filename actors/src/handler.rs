//! What the application writes: handlers, their context, their failures; and the set of handlers of
//! one endpoint, which finds the right one for a message.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;

use crate::envelope::{Delivery, Envelope, Headers, MessageId};
use crate::key::{Keyed, OrderingKey};
use crate::message::{CodecError, Encoding, Message};
use crate::port::PublishError;

/// Handles messages of type `T`. Every `async fn(T, Context) -> Result<(), Failure>` is one; a
/// struct with state implements the trait.
///
/// For messages of one key the calls never overlap; for different keys they do. A call can be
/// dropped at an `await` point: when it exceeds the handler time-out, when its session is lost, or
/// at the deadline of a drain.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not handle messages of type `{T}`",
    note = "a handler is an `async fn(message: {T}, cx: Context) -> Result<(), Failure>` or implements `Handler<{T}>`"
)]
pub trait Handler<T>: Send + Sync + 'static {
    /// Handles one message.
    ///
    /// # Errors
    /// The failure decides what happens next: any error by `?` is retried, [`Failure::permanent`] is not.
    fn handle(&self, message: T, cx: Context) -> impl Future<Output = Result<(), Failure>> + Send;
}

impl<T, F, Fut> Handler<T> for F
where
    F: Fn(T, Context) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), Failure>> + Send,
{
    fn handle(&self, message: T, cx: Context) -> impl Future<Output = Result<(), Failure>> + Send {
        self(message, cx)
    }
}

/// What kind of failure; what a policy looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// An error that another attempt may not meet.
    Transient,
    /// Like transient, and the handler says how long to wait.
    RetryAfter(Duration),
    /// An error that every attempt will meet.
    Permanent,
    /// The handler panicked.
    Panicked,
    /// The handler ran longer than its time-out.
    TimedOut,
    /// The body cannot be decoded.
    Undecodable,
    /// Nobody handles messages of this type.
    NoHandler,
}

/// Why a handler failed.
///
/// Every error converts with `?` to a transient failure. Like `anyhow::Error`, a failure is not
/// itself a `std::error::Error`; that is what makes the conversion possible.
pub struct Failure {
    kind: FailureKind,
    error: Box<dyn std::error::Error + Send + Sync>,
}

impl Failure {
    pub(crate) fn new(
        kind: FailureKind,
        error: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self {
            kind,
            error: error.into(),
        }
    }

    /// A failure that another attempt may not meet.
    pub fn transient(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::new(FailureKind::Transient, error)
    }

    /// A failure that every attempt will meet: the message is parked without further attempts.
    pub fn permanent(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::new(FailureKind::Permanent, error)
    }

    /// Asks for the next attempt after `delay`, instead of the endpoint's own back-off.
    pub fn retry_after(
        delay: Duration,
        error: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::new(FailureKind::RetryAfter(delay), error)
    }

    /// What kind of failure it is.
    pub fn kind(&self) -> FailureKind {
        self.kind
    }

    /// The error with its causes, outermost first. May contain anything the handler put into it.
    pub fn detail(&self) -> String {
        let mut text = self.error.to_string();
        let mut cause = self.error.source();
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        text
    }
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::transient(error)
    }
}

/// Shows the kind only: the error's text is the application's and may hold a key.
impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Failure")
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

/// Publishes on behalf of a handler; the bus provides it.
pub trait ContextPublisher: Send + Sync + 'static {
    /// Sends an already encoded message of a type, with the key the payload has, if any.
    fn publish(
        &self,
        message_type: &'static str,
        envelope: Envelope,
        key: Option<OrderingKey>,
    ) -> BoxFuture<'static, Result<(), PublishError>>;

    /// How messages of a type are encoded.
    fn encoding(&self, message_type: &'static str) -> Encoding;
}

/// What a handler knows about the attempt it is.
#[derive(Clone)]
pub struct Context {
    pub(crate) delivery: Arc<Delivery>,
    pub(crate) endpoint: Arc<str>,
    pub(crate) attempt: u32,
    pub(crate) deadline: Option<Instant>,
    pub(crate) cancel: tokio_util::sync::CancellationToken,
    pub(crate) publisher: Option<Arc<dyn ContextPublisher>>,
}

impl Context {
    /// Name of the endpoint.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Which attempt this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The message with everything said about it.
    pub fn envelope(&self) -> &Envelope {
        self.delivery.envelope()
    }

    /// The message's headers.
    pub fn headers(&self) -> &Headers {
        &self.envelope().headers
    }

    /// The message's id, if its publisher gave it one.
    pub fn message_id(&self) -> Option<&MessageId> {
        self.envelope().id.as_ref()
    }

    /// The message's ordering key; `None` on an endpoint without ordering, and for a keyless message.
    pub fn key(&self) -> Option<&OrderingKey> {
        self.delivery.key()
    }

    /// Whether the broker has handed this message over before.
    pub fn is_redelivered(&self) -> bool {
        self.delivery.is_redelivered()
    }

    /// When this attempt times out; `None` without a handler time-out.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Resolves when this attempt should stop: its session is lost (its result cannot be settled, and
    /// another instance may already run the message), or the deadline of a drain has passed.
    pub async fn cancelled(&self) {
        tokio::select! {
            () = self.delivery.session().ended() => {}
            () = self.cancel.cancelled() => {}
        }
    }

    /// Whether [`cancelled`](Self::cancelled) would resolve at once.
    pub fn is_cancelled(&self) -> bool {
        self.delivery.session().has_ended() || self.cancel.is_cancelled()
    }

    /// Publishes a message as a consequence of this one: the correlation id is passed on, the causation
    /// id is this message's id. Resolves when the broker has confirmed it.
    ///
    /// It is sent whether or not the handler succeeds afterwards, and again when the handler runs
    /// again (with another id).
    ///
    /// # Errors
    /// As [`PublishError`] says.
    pub async fn publish<T: Message>(&self, message: &T) -> Result<(), PublishError> {
        self.publish_with(message, None).await
    }

    /// Like [`publish`](Self::publish), with the ordering key of the new message.
    ///
    /// # Errors
    /// As [`PublishError`] says.
    pub async fn publish_keyed<T: Message>(
        &self,
        message: &T,
        key: impl Into<OrderingKey>,
    ) -> Result<(), PublishError> {
        self.publish_with(message, Some(key.into())).await
    }

    async fn publish_with<T: Message>(
        &self,
        message: &T,
        key: Option<OrderingKey>,
    ) -> Result<(), PublishError> {
        let Some(publisher) = &self.publisher else {
            return Err(PublishError::NoDestination(T::TYPE.to_owned()));
        };
        let mut envelope = Envelope::of(message, publisher.encoding(T::TYPE))
            .map_err(|error| PublishError::Encode(error.to_string()))?;
        envelope.caused_by(self.envelope());
        publisher.publish(T::TYPE, envelope, key).await
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("endpoint", &self.endpoint)
            .field("attempt", &self.attempt)
            .field("message_id", &self.message_id())
            .finish_non_exhaustive()
    }
}

type TypedKey<T> = Arc<dyn Fn(&T) -> OrderingKey + Send + Sync>;

/// A handler with its message type erased.
trait AnyHandler: Send + Sync {
    fn handle(
        &self,
        delivery: Arc<Delivery>,
        cx: Context,
    ) -> BoxFuture<'static, Result<(), Failure>>;
    /// Decodes, asks the selector, and keeps the payload in the delivery for the first attempt.
    fn key(&self, delivery: &mut Delivery) -> Result<Option<OrderingKey>, Failure>;
}

struct Typed<T, H> {
    handler: Arc<H>,
    selector: Option<TypedKey<T>>,
    payload: PhantomData<fn(T)>,
}

impl<T: Message, H: Handler<T>> AnyHandler for Typed<T, H> {
    fn handle(
        &self,
        delivery: Arc<Delivery>,
        cx: Context,
    ) -> BoxFuture<'static, Result<(), Failure>> {
        let handler = Arc::clone(&self.handler);
        Box::pin(async move {
            let message = match delivery.take_decoded().map(|any| any.downcast::<T>()) {
                Some(Ok(message)) => *message,
                _ => decode::<T>(delivery.envelope())?,
            };
            // Released before the handler runs: the context holds the delivery anyway.
            drop(delivery);
            handler.handle(message, cx).await
        })
    }

    fn key(&self, delivery: &mut Delivery) -> Result<Option<OrderingKey>, Failure> {
        let Some(selector) = &self.selector else {
            return Ok(None);
        };
        let message = decode::<T>(delivery.envelope())?;
        let key = catch_unwind(AssertUnwindSafe(|| selector(&message))).map_err(|panic| {
            Failure::new(
                FailureKind::Panicked,
                format!("key selector: {}", panic_text(&*panic)),
            )
        })?;
        delivery.decoded = std::sync::Mutex::new(Some(Box::new(message)));
        Ok(Some(key))
    }
}

fn decode<T: Message>(envelope: &Envelope) -> Result<T, Failure> {
    let decoded =
        Encoding::of_content_type(envelope.content_type.as_deref()).and_then(|encoding| {
            // `Deserialize` may be the application's own code.
            catch_unwind(|| encoding.decode(&envelope.body)).unwrap_or(Err(CodecError::Panicked))
        });
    decoded.map_err(|error| Failure::new(FailureKind::Undecodable, error))
}

/// The text of a panic's payload.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&'static str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("panic without a text")
}

/// The handlers of one endpoint, by message type.
#[derive(Default)]
pub struct HandlerSet {
    by_type: HashMap<&'static str, Arc<dyn AnyHandler>>,
    untyped: Option<Arc<dyn AnyHandler>>,
    twice: Vec<&'static str>,
    has_selectors: bool,
}

impl HandlerSet {
    /// No handlers yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the handler for messages whose type header says `T::TYPE`.
    pub fn add<T: Message>(&mut self, handler: impl Handler<T>) {
        self.insert::<T, _>(handler, None);
    }

    /// Like [`add`](Self::add), and the message's key is what `selector` says.
    pub fn add_ordered_by<T: Message>(
        &mut self,
        selector: impl Fn(&T) -> OrderingKey + Send + Sync + 'static,
        handler: impl Handler<T>,
    ) {
        self.has_selectors = true;
        self.insert::<T, _>(handler, Some(Arc::new(selector)));
    }

    /// Like [`add`](Self::add), and the message's key is [`Keyed::key`].
    pub fn add_keyed<T: Message + Keyed>(&mut self, handler: impl Handler<T>) {
        self.add_ordered_by(T::key, handler);
    }

    /// Declares that messages *without* a type header are of type `T`, which has a handler already:
    /// for publishers of other languages that send a bare body.
    pub fn untyped_as<T: Message>(&mut self) {
        self.untyped = self.by_type.get(T::TYPE).cloned();
    }

    /// Whether messages without a type header find a handler.
    pub fn takes_untyped(&self) -> bool {
        self.untyped.is_some()
    }

    /// Types that were given more than one handler: an error of configuration.
    pub fn duplicates(&self) -> &[&'static str] {
        &self.twice
    }

    /// Whether any message type has a typed key.
    pub fn has_selectors(&self) -> bool {
        self.has_selectors
    }

    /// Whether there is no handler at all.
    pub fn is_empty(&self) -> bool {
        self.by_type.is_empty()
    }

    /// The handled types.
    pub fn types(&self) -> impl Iterator<Item = &'static str> {
        self.by_type.keys().copied()
    }

    fn insert<T: Message, H: Handler<T>>(&mut self, handler: H, selector: Option<TypedKey<T>>) {
        let typed: Arc<dyn AnyHandler> = Arc::new(Typed {
            handler: Arc::new(handler),
            selector,
            payload: PhantomData,
        });
        if self.by_type.insert(T::TYPE, typed).is_some() {
            self.twice.push(T::TYPE);
        }
    }

    fn find(&self, envelope: &Envelope) -> Result<&Arc<dyn AnyHandler>, Failure> {
        let found = match envelope.message_type.as_deref() {
            Some(name) => self.by_type.get(name),
            None => self.untyped.as_ref(),
        };
        found.ok_or_else(|| {
            let text = match &envelope.message_type {
                Some(name) => format!("no handler for messages of type `{name}`"),
                None => "the message names no type, and none is declared for untyped messages"
                    .to_owned(),
            };
            Failure::new(FailureKind::NoHandler, text)
        })
    }

    /// The key the payload itself has. A failure here is the message's: it will be met again, and
    /// counted, when the message is handled.
    pub(crate) fn typed_key(&self, delivery: &mut Delivery) -> Option<OrderingKey> {
        if !self.has_selectors {
            return None;
        }
        let handler = Arc::clone(self.find(delivery.envelope()).ok()?);
        handler.key(delivery).ok().flatten()
    }

    /// Runs the right handler. The future is not guarded against panics.
    pub(crate) fn handle(
        &self,
        delivery: Arc<Delivery>,
        cx: Context,
    ) -> Result<BoxFuture<'static, Result<(), Failure>>, Failure> {
        Ok(self.find(delivery.envelope())?.handle(delivery, cx))
    }
}

impl fmt::Debug for HandlerSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.types()).finish()
    }
}
