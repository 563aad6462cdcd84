//! Where published messages go: message type to destination.

use std::any::Any;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::Arc;

use laneway_actors::port::Destination;
use laneway_actors::{Encoding, Keyed, Message, OrderingKey, Problem, header};

use crate::entries::Entries;

/// Describes where messages of type `T` are published to.
pub struct RouteBuilder<T> {
    destination: Option<Destination>,
    encoding: Encoding,
    key_header: Option<Arc<str>>,
    key: Option<KeyOf>,
    and_local: bool,
    message: PhantomData<fn(&T)>,
}

type KeyOf = Box<dyn Fn(&dyn Any) -> Option<OrderingKey> + Send + Sync>;

impl<T: Message> RouteBuilder<T> {
    pub(crate) fn new() -> Self {
        Self {
            destination: None,
            encoding: Encoding::default(),
            key_header: None,
            key: None,
            and_local: false,
            message: PhantomData,
        }
    }

    /// To a queue, by its name. To a [sharded queue](crate::Topology::sharded_queue) and to a
    /// [consistent-hash exchange](crate::Topology::consistent_hash_exchange) in the same way: the message's
    /// key chooses the queue. A message without a key goes to any of them.
    #[must_use]
    pub fn to_queue(mut self, queue: &str) -> Self {
        self.destination = Some(Destination::Queue(queue.into()));
        self
    }

    /// To an exchange that exists, with a fixed routing key.
    #[must_use]
    pub fn to_exchange(mut self, exchange: &str, routing_key: &str) -> Self {
        self.destination = Some(Destination::Exchange {
            exchange: exchange.into(),
            routing_key: routing_key.into(),
        });
        self
    }

    /// The message's ordering key. Messages of one key are published one after the other.
    #[must_use]
    pub fn keyed_by<K: Into<OrderingKey>>(
        mut self,
        key: impl Fn(&T) -> K + Send + Sync + 'static,
    ) -> Self {
        self.key = Some(Box::new(move |message| {
            message
                .downcast_ref::<T>()
                .map(|message| key(message).into())
        }));
        self
    }

    /// The message's own [`Keyed::key`].
    #[must_use]
    pub fn keyed(self) -> Self
    where
        T: Keyed,
    {
        self.keyed_by(T::key)
    }

    /// The header that carries the key. Defaults to the header by which this bus's own endpoint on the
    /// destination queue orders, else to `laneway-key`.
    #[must_use]
    pub fn key_header(mut self, header: &str) -> Self {
        self.key_header = Some(header.into());
        self
    }

    /// Messages go to the local queues of the type too. Without this a route wins over local queues, and so a type
    /// with both is refused.
    #[must_use]
    pub fn and_local_queues(mut self) -> Self {
        self.and_local = true;
        self
    }

    /// How the body is encoded. Defaults to JSON.
    #[must_use]
    pub fn encoding(mut self, encoding: Encoding) -> Self {
        self.encoding = encoding;
        self
    }
}

/// Where messages of one type go.
pub(crate) struct Route {
    pub(crate) destination: Destination,
    pub(crate) encoding: Encoding,
    pub(crate) key_header: Arc<str>,
    /// It does not stand instead of local queues.
    pub(crate) and_local: bool,
    /// It leads to the type's queue that lives on the transport.
    pub(crate) on_broker: bool,
    key: Option<KeyOf>,
}

impl Route {
    pub(crate) fn key_of(&self, message: &dyn Any) -> Option<OrderingKey> {
        self.key.as_ref().and_then(|key| key(message))
    }

    pub(crate) fn has_key(&self) -> bool {
        self.key.is_some()
    }
}

/// All routes of a bus.
#[derive(Default)]
pub(crate) struct Routes {
    by_type: HashMap<&'static str, Route>,
}

impl Routes {
    pub(crate) fn get(&self, message_type: &str) -> Option<&Route> {
        self.by_type.get(message_type)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, &Route)> {
        self.by_type.iter().map(|(name, route)| (*name, route))
    }

    /// Adds the route to the queue of a type that lives on the transport.
    pub(crate) fn add_on_broker(
        &mut self,
        message_type: &'static str,
        queue: &str,
        problems: &mut Vec<Problem>,
    ) {
        if let Some(known) = self.by_type.get(message_type) {
            let what = if known.on_broker {
                "messages of its type have another queue `on_broker()`, and one of a type may live there: keep this one local, or declare an exchange with `topology(…)`, publish to it, and consume its queues with `endpoint(…)`"
            } else {
                "messages of its type have a route already (`publishes`), which is not where this queue is; remove one of them"
            };
            problems.push(Problem::new(queue, "on_broker", what));
            return;
        }
        let route = Route {
            destination: Destination::Queue(queue.into()),
            encoding: Encoding::MessagePack,
            key_header: header::ORDERING_KEY.into(),
            and_local: false,
            on_broker: true,
            key: None,
        };
        self.by_type.insert(message_type, route);
    }

    /// Adds a route. `header_of_queue` gives the header by which an endpoint of this bus orders a queue;
    /// `entries` are the queues that are reached together.
    pub(crate) fn add<T: Message>(
        &mut self,
        route: RouteBuilder<T>,
        header_of_queue: impl Fn(&str) -> Option<Arc<str>>,
        entries: &Entries,
        problems: &mut Vec<Problem>,
    ) {
        let setting = format!("publishes::<{}>", T::TYPE);
        let Some(destination) = route.destination else {
            let what = "names no destination: use `to_queue` or `to_exchange`";
            problems.push(Problem::new("", setting, what));
            return;
        };
        let entry = match entries.find(&destination) {
            Ok(entry) => entry,
            Err(why) => {
                problems.push(Problem::new("", setting, why));
                return;
            }
        };
        if let Some(entry) = entry {
            if route.key.is_some() && !entry.takes_key() {
                let what = "the exchange hashes by a property, so a key would not choose the queue; remove `keyed_by`, or use `hash_header(…)`";
                problems.push(Problem::new("", setting, what));
                return;
            }
            if let (Some(said), Some(known)) = (&route.key_header, entry.key_header())
                && said != known
            {
                let what = format!(
                    "`{said}` is not the header by which the queue is chosen and ordered; use `{known}`, or remove `key_header`"
                );
                problems.push(Problem::new("", setting, what));
                return;
            }
        }
        let default_header = || match &destination {
            Destination::Queue(queue) => header_of_queue(queue),
            _ => None,
        };
        let key_header = match route.key_header {
            Some(header) if header.is_empty() => {
                let what = "the name of the key header must not be empty";
                problems.push(Problem::new("", setting, what));
                return;
            }
            Some(header) => header,
            None => default_header().unwrap_or_else(|| header::ORDERING_KEY.into()),
        };
        let known = self.by_type.insert(
            T::TYPE,
            Route {
                destination,
                encoding: route.encoding,
                key_header,
                and_local: route.and_local,
                on_broker: false,
                key: route.key,
            },
        );
        if known.is_some() {
            let what = "messages of this type have two destinations; remove one";
            problems.push(Problem::new("", setting, what));
        }
    }
}
