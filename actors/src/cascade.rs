//! What a handler returns: messages that are published after it has succeeded.
//!
//! Owns [`Cascade`], which says what of a return value is published. Which it is, is seen from the type, so that a
//! bus can check before it starts where each goes.

use crate::handler::ContextPublisher;
use crate::key::OrderingKey;
use crate::message::{CodecError, Message};
use crate::port::Draft;
use crate::{Encoding, Envelope};

/// What a handler returns when it succeeds: one message, several, or none. They are published after its success,
/// after the commit where it has a transaction, in this order, each as a consequence of the message handled
/// ([`Context::publish`](crate::Context::publish)).
///
/// `()` is none; a [`Message`] is one; an [`Option`], a [`Vec`] and a tuple are what they hold; a [`Keyed`
/// message](WithKey) has a key of its own.
#[diagnostic::on_unimplemented(
    message = "a handler cannot return `{Self}`",
    note = "it returns `()`, a message, an `Option` or a `Vec` of messages, or a tuple of those"
)]
pub trait Cascade: Send + 'static {
    /// Writes the messages down.
    ///
    /// # Errors
    /// If one cannot be encoded.
    fn write(&self, drafts: &mut Drafts<'_>) -> Result<(), CodecError>;

    /// The types of message that there can be.
    fn types(types: &mut Vec<&'static str>);
}

/// A message with its ordering key, to be returned by a handler. The key wins over every rule.
#[derive(Debug, Clone)]
pub struct WithKey<M> {
    /// The message.
    pub message: M,
    /// Its key.
    pub key: OrderingKey,
}

impl<M> WithKey<M> {
    /// A message with its key.
    pub fn new(message: M, key: impl Into<OrderingKey>) -> Self {
        Self {
            message,
            key: key.into(),
        }
    }
}

/// Collects what a handler returned.
pub struct Drafts<'a> {
    publisher: Option<&'a dyn ContextPublisher>,
    cause: &'a Envelope,
    drafts: Vec<Draft>,
}

impl<'a> Drafts<'a> {
    pub(crate) fn new(publisher: Option<&'a dyn ContextPublisher>, cause: &'a Envelope) -> Self {
        Self {
            publisher,
            cause,
            drafts: Vec::new(),
        }
    }

    /// Adds one message, encoded as its route says, as a consequence of the message that was handled.
    ///
    /// # Errors
    /// If it cannot be encoded.
    pub fn add<M: Message>(
        &mut self,
        message: &M,
        key: Option<OrderingKey>,
    ) -> Result<(), CodecError> {
        let encoding = self
            .publisher
            .map_or(Encoding::default(), |publisher| publisher.encoding(M::TYPE));
        let mut envelope = Envelope::of(message, encoding)?;
        envelope.caused_by(self.cause);
        let of_payload = || self.publisher?.key_of(M::TYPE, message);
        self.drafts.push(Draft {
            message_type: M::TYPE,
            envelope,
            key: key.or_else(of_payload),
        });
        Ok(())
    }

    pub(crate) fn into_drafts(self) -> Vec<Draft> {
        self.drafts
    }
}

impl Cascade for () {
    fn write(&self, _: &mut Drafts<'_>) -> Result<(), CodecError> {
        Ok(())
    }

    fn types(_: &mut Vec<&'static str>) {}
}

impl<M: Message> Cascade for M {
    fn write(&self, drafts: &mut Drafts<'_>) -> Result<(), CodecError> {
        drafts.add(self, None)
    }

    fn types(types: &mut Vec<&'static str>) {
        types.push(M::TYPE);
    }
}

impl<M: Message> Cascade for WithKey<M> {
    fn write(&self, drafts: &mut Drafts<'_>) -> Result<(), CodecError> {
        drafts.add(&self.message, Some(self.key.clone()))
    }

    fn types(types: &mut Vec<&'static str>) {
        types.push(M::TYPE);
    }
}

impl<C: Cascade> Cascade for Option<C> {
    fn write(&self, drafts: &mut Drafts<'_>) -> Result<(), CodecError> {
        self.as_ref().map_or(Ok(()), |some| some.write(drafts))
    }

    fn types(types: &mut Vec<&'static str>) {
        C::types(types);
    }
}

impl<C: Cascade> Cascade for Vec<C> {
    fn write(&self, drafts: &mut Drafts<'_>) -> Result<(), CodecError> {
        self.iter().try_for_each(|one| one.write(drafts))
    }

    fn types(types: &mut Vec<&'static str>) {
        C::types(types);
    }
}

macro_rules! tuples {
    ($(($($name:ident $at:tt),+)),+) => {$(
        impl<$($name: Cascade),+> Cascade for ($($name,)+) {
            fn write(&self, drafts: &mut Drafts<'_>) -> Result<(), CodecError> {
                $(self.$at.write(drafts)?;)+
                Ok(())
            }

            fn types(types: &mut Vec<&'static str>) {
                $($name::types(types);)+
            }
        }
    )+};
}

tuples!((A 0, B 1), (A 0, B 1, C 2), (A 0, B 1, C 2, D 3));
