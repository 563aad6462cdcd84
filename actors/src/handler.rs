//! What the application writes: handlers, their context, their failures; and the set of handlers of
//! one endpoint, which finds the right one for a message.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;

use crate::cascade::{Cascade, Drafts};
use crate::envelope::{Delivery, DeliveryTag, Envelope, Headers, MessageId};
use crate::key::OrderingKey;
use crate::message::{CodecError, Encoding, Message};
use crate::port::{Draft, PublishError, Scope};
use crate::session::SessionState;

/// Handles messages of type `T`. Every `async fn(T, Context) -> Result<A, Failure>` is one, where `A` is `()` or
/// [messages to publish](Cascade); a struct with state implements the trait.
///
/// For messages of one key the calls never overlap; for different keys they do. A call can be
/// dropped at an `await` point: when it exceeds the handler time-out, when its session is lost, or
/// at the deadline of a drain.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not handle messages of type `{T}`",
    note = "a handler is an `async fn(message: {T}, cx: Context) -> Result<(), Failure>` or implements `Handler<{T}>`"
)]
pub trait Handler<T>: Send + Sync + 'static {
    /// What it returns: `()`, or messages to be published after its success.
    type Answer: Cascade;

    /// Handles one message.
    ///
    /// # Errors
    /// The failure decides what happens next: any error by `?` is retried, [`Failure::permanent`] is not.
    fn handle(
        &self,
        message: T,
        cx: Context,
    ) -> impl Future<Output = Result<Self::Answer, Failure>> + Send;
}

impl<T, F, Fut, A> Handler<T> for F
where
    F: Fn(T, Context) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<A, Failure>> + Send,
    A: Cascade,
{
    type Answer = A;

    fn handle(&self, message: T, cx: Context) -> impl Future<Output = Result<A, Failure>> + Send {
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

    /// A failure that every attempt will meet: the message is parked without further attempts (or
    /// discarded, where a failure rule or the endpoint says so).
    pub fn permanent(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::new(FailureKind::Permanent, error)
    }

    /// Asks for the next attempt after `delay`, instead of the pause that the endpoint's back-off or a failure
    /// rule would make. It adds no attempt: where those would give the message up, it is given up.
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

    /// The error and its causes, outermost first.
    pub(crate) fn chain(&self) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
        let outermost: &(dyn std::error::Error + 'static) = &*self.error;
        std::iter::successors(Some(outermost), |error| error.source())
    }

    /// The outermost error of type `E` among the error and its causes.
    pub fn find<E: std::error::Error + 'static>(&self) -> Option<&E> {
        self.chain().find_map(|error| error.downcast_ref())
    }

    /// The error with its causes, outermost first. May contain anything the handler put into it.
    pub fn detail(&self) -> String {
        let texts: Vec<_> = self.chain().map(ToString::to_string).collect();
        texts.join(": ")
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

    /// The ordering key that messages of the type have by configuration, or none. `message` is a
    /// reference to the typed payload.
    fn key_of(&self, message_type: &'static str, message: &dyn Any) -> Option<OrderingKey>;
}

/// What a handler knows about the attempt it is.
#[derive(Clone)]
pub struct Context {
    pub(crate) delivery: Arc<Delivery>,
    pub(crate) endpoint: Arc<str>,
    pub(crate) attempt: u32,
    pub(crate) deadline: Option<Instant>,
    /// Shared: to clone and drop the token itself takes a lock of the whole endpoint.
    pub(crate) cancel: Arc<tokio_util::sync::CancellationToken>,
    pub(crate) publisher: Option<Arc<dyn ContextPublisher>>,
    pub(crate) scope: Option<Arc<dyn Scope>>,
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

    /// What surrounds this attempt, where its source makes a transaction of it.
    pub fn scope(&self) -> Option<&Arc<dyn Scope>> {
        self.scope.as_ref()
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
    /// again (with another id). **In a transaction** it is only taken down here, and sent if, and when, that
    /// commits.
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
        let key = key.or_else(|| publisher.key_of(T::TYPE, message));
        match &self.scope {
            None => publisher.publish(T::TYPE, envelope, key).await,
            Some(scope) => {
                let message_type = T::TYPE;
                let draft = Draft {
                    message_type,
                    envelope,
                    key,
                };
                scope.publish(draft).await
            }
        }
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

/// What a handler that is called directly finds in its context.
pub struct Surroundings {
    /// Name of its endpoint.
    pub endpoint: Arc<str>,
    /// What is said about the message. Its body is not encoded.
    pub envelope: Envelope,
    /// Publishes for it.
    pub publisher: Option<Arc<dyn ContextPublisher>>,
    /// The transaction around it.
    pub scope: Option<Arc<dyn Scope>>,
}

impl Surroundings {
    fn context(self) -> Context {
        let delivery = Delivery::new(self.envelope, SessionState::start(), DeliveryTag(0));
        Context {
            delivery: Arc::new(delivery),
            endpoint: self.endpoint,
            attempt: 1,
            deadline: None,
            cancel: Arc::default(),
            publisher: self.publisher,
            scope: self.scope,
        }
    }
}

/// A handler with its message type erased.
trait AnyHandler: Send + Sync {
    fn handle(
        &self,
        delivery: Arc<Delivery>,
        cx: Context,
    ) -> BoxFuture<'static, Result<Vec<Draft>, Failure>>;

    /// Handles a payload of its type, and gives its answer, a [`Handler::Answer`].
    fn invoke(
        &self,
        payload: Box<dyn Any + Send>,
        cx: Context,
    ) -> BoxFuture<'static, Result<Box<dyn Any + Send>, Failure>>;

    /// The types of message that it may return.
    fn returns(&self, types: &mut Vec<&'static str>);
}

/// A typed key with its message type erased.
trait AnySelector: Send + Sync {
    /// Decodes, asks the selector, and keeps the payload in the delivery for the first attempt.
    fn key(&self, delivery: &mut Delivery) -> Result<OrderingKey, Failure>;
}

struct Typed<T, H> {
    handler: Arc<H>,
    payload: PhantomData<fn(T)>,
}

struct Selector<T, S> {
    selector: S,
    payload: PhantomData<fn(T)>,
}

impl<T: Message, H: Handler<T>> AnyHandler for Typed<T, H> {
    fn handle(
        &self,
        delivery: Arc<Delivery>,
        cx: Context,
    ) -> BoxFuture<'static, Result<Vec<Draft>, Failure>> {
        let handler = Arc::clone(&self.handler);
        Box::pin(async move {
            let message = match delivery.take_decoded().map(|any| any.downcast::<T>()) {
                Some(Ok(message)) => *message,
                _ => decode::<T>(delivery.envelope())?,
            };
            // Released before the handler runs: the context holds the delivery anyway.
            drop(delivery);
            if TypeId::of::<H::Answer>() == TypeId::of::<()>() {
                handler.handle(message, cx).await?;
                return Ok(Vec::new());
            }
            let answer = handler.handle(message, cx.clone()).await?;
            let mut drafts = Drafts::new(cx.publisher.as_deref(), cx.envelope());
            // Another attempt would return it again.
            answer.write(&mut drafts).map_err(Failure::permanent)?;
            Ok(drafts.into_drafts())
        })
    }

    fn invoke(
        &self,
        payload: Box<dyn Any + Send>,
        cx: Context,
    ) -> BoxFuture<'static, Result<Box<dyn Any + Send>, Failure>> {
        let handler = Arc::clone(&self.handler);
        Box::pin(async move {
            let message = payload
                .downcast::<T>()
                .map_err(|_| Failure::permanent("the payload is of another type"))?;
            let answer = handler.handle(*message, cx).await?;
            Ok(Box::new(answer) as Box<dyn Any + Send>)
        })
    }

    fn returns(&self, types: &mut Vec<&'static str>) {
        H::Answer::types(types);
    }
}

impl<T, S> AnySelector for Selector<T, S>
where
    T: Message,
    S: Fn(&T) -> OrderingKey + Send + Sync,
{
    fn key(&self, delivery: &mut Delivery) -> Result<OrderingKey, Failure> {
        let message = decode::<T>(delivery.envelope())?;
        let key =
            catch_unwind(AssertUnwindSafe(|| (self.selector)(&message))).map_err(|panic| {
                let text = format!("the key selector panicked: {}", panic_text(&*panic));
                Failure::new(FailureKind::Panicked, text)
            })?;
        delivery.decoded = std::sync::Mutex::new(Some(Box::new(message)));
        Ok(key)
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

/// The handlers of one endpoint, by message type, and the typed keys. A clone shares the handlers.
#[derive(Clone, Default)]
pub struct HandlerSet {
    by_type: HashMap<&'static str, Vec<Arc<dyn AnyHandler>>>,
    /// Several handlers of one type are meant to run together.
    together: bool,
    selectors: HashMap<&'static str, Arc<dyn AnySelector>>,
    untyped: Option<&'static str>,
    twice: Vec<&'static str>,
}

impl HandlerSet {
    /// No handlers yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the handler for messages whose type is `T::TYPE`.
    pub fn add<T: Message>(&mut self, handler: impl Handler<T>) {
        let handler = Arc::new(Typed {
            handler: Arc::new(handler),
            payload: PhantomData,
        });
        let handlers = self.by_type.entry(T::TYPE).or_default();
        if !handlers.is_empty() && !self.together {
            self.twice.push(T::TYPE);
        }
        handlers.push(handler);
    }

    /// Several handlers of one type are allowed from here on. They run one after the other, in the order in which
    /// they were added, as one attempt: if one fails, all run again.
    pub fn together(mut self) -> Self {
        self.together = true;
        self
    }

    /// The types of message that its handlers may return.
    pub fn returns(&self) -> Vec<&'static str> {
        let mut types = Vec::new();
        for handler in self.by_type.values().flatten() {
            handler.returns(&mut types);
        }
        types.sort_unstable();
        types.dedup();
        types
    }

    /// The ordering key of messages of type `T` is what `selector` says. A panic in it is a failure of
    /// the message.
    pub fn order_by<T: Message>(
        &mut self,
        selector: impl Fn(&T) -> OrderingKey + Send + Sync + 'static,
    ) {
        let selector = Arc::new(Selector {
            selector,
            payload: PhantomData,
        });
        if self.selectors.insert(T::TYPE, selector).is_some() {
            self.twice.push(T::TYPE);
        }
    }

    /// Declares that messages *without* a type are of type `T`: for publishers of other languages that
    /// send a bare body.
    pub fn untyped_as<T: Message>(&mut self) {
        self.untyped = Some(T::TYPE);
    }

    /// Whether any message type has a typed key.
    pub fn has_selectors(&self) -> bool {
        !self.selectors.is_empty()
    }

    /// The handled types.
    pub fn types(&self) -> impl Iterator<Item = &'static str> {
        self.by_type.keys().copied()
    }

    /// Everything that is wrong: (setting, what).
    pub(crate) fn problems(&self) -> Vec<(&'static str, String)> {
        let mut problems = Vec::new();
        if self.by_type.is_empty() {
            problems.push(("handler", "the endpoint has no handler".to_owned()));
        }
        for name in &self.twice {
            let what =
                format!("messages of type `{name}` have two handlers or two keys; remove one");
            problems.push(("handler", what));
        }
        for name in self.selectors.keys() {
            if !self.by_type.contains_key(name) {
                let what = format!("messages of type `{name}` have a key but no handler");
                problems.push(("ordered_by", what));
            }
        }
        if let Some(name) = self.untyped
            && !self.by_type.contains_key(name)
        {
            let what = format!(
                "messages without a type are declared to be `{name}`, which has no handler"
            );
            problems.push(("untyped", what));
        }
        problems
    }

    /// The type of a message: what it says, or what messages without one are declared to be.
    pub(crate) fn type_of<'a>(&self, envelope: &'a Envelope) -> Option<&'a str> {
        envelope.message_type.as_deref().or(self.untyped)
    }

    /// The key the payload itself has; none if its type has no typed key.
    pub(crate) fn typed_key(
        &self,
        delivery: &mut Delivery,
    ) -> Result<Option<OrderingKey>, Failure> {
        let selector = self
            .type_of(delivery.envelope())
            .and_then(|name| self.selectors.get(name));
        match selector {
            Some(selector) => Arc::clone(selector).key(delivery).map(Some),
            None => Ok(None),
        }
    }

    /// Calls the one handler of the type now, with this payload, and gives its answer (a [`Handler::Answer`]). No
    /// lane, no order and no retry: as if the caller called it. A panic is a failure.
    ///
    /// # Errors
    /// [`FailureKind::NoHandler`] if it has none, or several; else what the handler fails with.
    pub async fn invoke<T: Message>(
        &self,
        message: T,
        surroundings: Surroundings,
    ) -> Result<Box<dyn Any + Send>, Failure> {
        let none = |text| Err(Failure::new(FailureKind::NoHandler, text));
        let handler = match self.by_type.get(T::TYPE).map(|handlers| &handlers[..]) {
            Some([handler]) => Arc::clone(handler),
            Some([]) | None => {
                return none(format!("no handler for messages of type `{}`", T::TYPE));
            }
            Some(_) => {
                return none(format!(
                    "messages of type `{}` have several handlers, whose answers would be several",
                    T::TYPE
                ));
            }
        };
        let cx = surroundings.context();
        let called = AssertUnwindSafe(async { handler.invoke(Box::new(message), cx).await });
        called.catch_unwind().await.unwrap_or_else(|panic| {
            let text = panic_text(&*panic).to_owned();
            Err(Failure::new(FailureKind::Panicked, text))
        })
    }

    /// Runs the right handler. The future is not guarded against panics.
    pub(crate) fn handle(
        &self,
        delivery: Arc<Delivery>,
        cx: Context,
    ) -> Result<BoxFuture<'static, Result<Vec<Draft>, Failure>>, Failure> {
        if let Some((kind, text)) = &delivery.intake_failure {
            return Err(Failure::new(*kind, text.as_str()));
        }
        let name = self.type_of(delivery.envelope());
        match name.and_then(|name| self.by_type.get(name)) {
            Some(handlers) => match &handlers[..] {
                [handler] => Ok(handler.handle(delivery, cx)),
                several => {
                    let several = several.to_vec();
                    Ok(Box::pin(async move {
                        let mut drafts = Vec::new();
                        for handler in several {
                            drafts.extend(handler.handle(delivery.clone(), cx.clone()).await?);
                        }
                        Ok(drafts)
                    }))
                }
            },
            None => {
                let text = match name {
                    Some(name) => format!("no handler for messages of type `{name}`"),
                    None => "the message names no type, and none is declared for untyped messages"
                        .to_owned(),
                };
                Err(Failure::new(FailureKind::NoHandler, text))
            }
        }
    }
}

impl fmt::Debug for HandlerSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.types()).finish()
    }
}
