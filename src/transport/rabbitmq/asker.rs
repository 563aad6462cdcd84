//! Asks the broker one question after the other.
//!
//! Owns the channel on which is asked. A refusal closes the channel, and some close the connection: the next
//! question gets a new one. Every question is bounded by the operation time-out. The channel closes when it is
//! dropped.

use std::future::Future;
use std::sync::Arc;

use laneway_actors::port::SourceError;
use lapin::Channel;
use tokio::time::timeout;

use super::connection::Live;
use super::core::Core;
use super::source::unavailable;
use super::topology::{administrative, source_error};
use super::version;

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

    /// Whether the broker has a delivery limit of its own on quorum queues, which can be lifted.
    pub(super) async fn has_limit_of_its_own(&mut self, queue: &str) -> Result<bool, SourceError> {
        if let Some(known) = self.live.version.get() {
            return Ok(known.has_delivery_limit_of_its_own());
        }
        let version = version::ask(self.core).await.map_err(|why| {
            unavailable(
                format!(
                    "queue `{queue}`: the broker's version, on which the default delivery limit depends, cannot be found out ({why})"
                ),
                None,
            )
        })?;
        // Somebody else may have asked meanwhile, and got the same answer.
        let _ = self.live.version.set(version);
        Ok(version.has_delivery_limit_of_its_own())
    }
}
