//! Asks the broker one question after the other.
//!
//! Owns the channel on which is asked. A refusal closes the channel, and some close the connection: the next
//! question gets a new one. Every question is bounded by the operation time-out. The channel closes when it is
//! dropped.

use std::future::Future;
use std::sync::Arc;

use laneway_actors::port::SourceError;
use lapin::options::QueueDeclareOptions;
use lapin::{Channel, ErrorKind};
use tokio::time::timeout;

use super::connection::{Live, said};
use super::core::Core;
use super::source::{refused, unavailable};
use super::topology::{UNLIMITED, administrative, named, source_error, table};
use crate::topology::{Arguments, DELIVERY_LIMIT, QUEUE_TYPE};

/// Asks on the consuming connection.
pub(super) struct Asker<'a> {
    core: &'a Core,
    live: Arc<Live>,
    channel: Option<Channel>,
}

impl<'a> Asker<'a> {
    /// To be called on the own runtime.
    pub(super) async fn on(core: &'a Core) -> Result<Self, SourceError> {
        Ok(Self {
            core,
            live: administrative(core).await?,
            channel: None,
        })
    }

    /// Asks one question about a thing.
    pub(super) async fn ask<F>(
        &mut self,
        what: &str,
        question: impl FnOnce(Channel) -> F,
    ) -> Result<(), SourceError>
    where
        F: Future<Output = Result<(), lapin::Error>>,
    {
        let answer = self.hear(what, question).await?;
        answer.map_err(|why| source_error(what, why))
    }

    /// Asks one question, and gives the broker's own answer.
    ///
    /// # Errors
    /// When there was none.
    pub(super) async fn hear<F>(
        &mut self,
        what: &str,
        question: impl FnOnce(Channel) -> F,
    ) -> Result<Result<(), lapin::Error>, SourceError>
    where
        F: Future<Output = Result<(), lapin::Error>>,
    {
        if !self.live.is_usable() {
            self.channel = None;
            self.live = administrative(self.core).await?;
        }
        let bound = self.core.settings.operation_timeout;
        let known = self
            .channel
            .take()
            .filter(|channel| channel.status().connected());
        let connection = &self.live.connection;
        let asking = async {
            let channel = match known {
                Some(channel) => channel,
                None => connection.create_channel().await?,
            };
            question(channel.clone()).await?;
            Ok(channel)
        };
        match timeout(bound, asking).await {
            Ok(Ok(channel)) => {
                self.channel = Some(channel);
                Ok(Ok(()))
            }
            Ok(Err(why)) => Ok(Err(why)),
            Err(_) => {
                self.live.retire();
                Err(unavailable(
                    format!("{what}: the broker did not answer within {bound:?}"),
                    None,
                ))
            }
        }
    }

    /// Whether the broker knows how to say that a quorum queue has no delivery limit. Those that do not
    /// (before RabbitMQ 4) have no limit by default.
    ///
    /// `lapin` does not tell the broker's version, so it is asked: by declaring a quorum queue that is not
    /// durable, which every version refuses, but only after it has looked at the arguments. Nothing is
    /// created. `queue` gives the probe a name that the user may declare.
    pub(super) async fn knows_unlimited(&mut self, queue: &str) -> Result<bool, SourceError> {
        if let Some(known) = self.live.knows_unlimited.get() {
            return Ok(*known);
        }
        let name = named("queue", &format!("{queue}.limit-probe"))?;
        let arguments = Arguments::from([
            (QUEUE_TYPE.to_owned(), "quorum".into()),
            (DELIVERY_LIMIT.to_owned(), UNLIMITED.into()),
        ]);
        let what = format!("queue `{queue}`");
        let answer = self
            .hear(&what, async |channel| {
                let options = QueueDeclareOptions::default();
                let asked = channel.queue_declare(name, options, table(&arguments));
                asked.await.map(drop)
            })
            .await?;
        let known = match &answer {
            Err(why) => match why.kind() {
                ErrorKind::ProtocolError(error) => {
                    let text = said(error).to_owned();
                    unlimited_from(&text).ok_or(text)
                }
                _ => Err(why.to_string()),
            },
            Ok(()) => Err("a quorum queue that is not durable was created".to_owned()),
        };
        let known = known.map_err(|text| {
            refused(
                format!(
                    "{what}: whether the broker can be told to have no delivery limit cannot be found out ({text}); set `delivery_limit(…)`, or say `accept_unreported_gaps()`"
                ),
                None,
            )
        })?;
        // Somebody else may have asked meanwhile, and got the same answer.
        let _ = self.live.knows_unlimited.set(known);
        Ok(known)
    }
}

/// What the broker's refusal of the probe says about its knowledge: it complains about the argument, or has
/// accepted it and complains about the rest.
fn unlimited_from(said: &str) -> Option<bool> {
    if said.contains(DELIVERY_LIMIT) {
        Some(false)
    } else if said.contains("non-durable") {
        Some(true)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_brokers_own_words_tell_whether_it_knows_no_limit() {
        let cases = [
            // 3.10.8
            (
                "PRECONDITION_FAILED - invalid arg 'x-delivery-limit' for queue 'q' in vhost '/': {value_negative,-1}",
                Some(false),
            ),
            // 4.x looks at the arguments first, and takes this one
            (
                "PRECONDITION_FAILED - invalid property 'non-durable' for queue 'q' in vhost '/'",
                Some(true),
            ),
            (
                "ACCESS_REFUSED - access to queue 'q' in vhost '/' refused for user 'u'",
                None,
            ),
        ];
        for (said, known) in cases {
            assert_eq!(unlimited_from(said), known, "{said}");
        }
    }
}
