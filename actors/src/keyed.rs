//! Message types that know their own key, named by their types alone: one, or several in a tuple.

use std::any::Any;
use std::sync::Arc;

use crate::key::{Keyed, OrderingKey};
use crate::message::Message;

/// Gives the key of a payload, if the payload is of the type that it is for.
pub type KeySelector = Arc<dyn Fn(&dyn Any) -> Option<OrderingKey> + Send + Sync>;

/// One [`Keyed`] message type, or a tuple of two to eight of them.
#[diagnostic::on_unimplemented(
    message = "the messages of `{Self}` do not know their keys",
    note = "implement `Message` and `Keyed` for the type, or for each type of the tuple"
)]
pub trait KeyedMessages {
    /// Adds for each type its name and how its key is found.
    fn selectors(to: &mut Vec<(&'static str, KeySelector)>);
}

impl<T: Message + Keyed> KeyedMessages for T {
    fn selectors(to: &mut Vec<(&'static str, KeySelector)>) {
        to.push((
            T::TYPE,
            Arc::new(|message| message.downcast_ref::<T>().map(T::key)),
        ));
    }
}

macro_rules! tuples {
    ($(($($name:ident),+)),+) => {$(
        impl<$($name: KeyedMessages),+> KeyedMessages for ($($name,)+) {
            fn selectors(to: &mut Vec<(&'static str, KeySelector)>) {
                $($name::selectors(to);)+
            }
        }
    )+};
}

tuples!(
    (A, B),
    (A, B, C),
    (A, B, C, D),
    (A, B, C, D, E),
    (A, B, C, D, E, F),
    (A, B, C, D, E, F, G),
    (A, B, C, D, E, F, G, H)
);
