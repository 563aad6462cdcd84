//! Declares, checks and deletes queues and their parking places.
//!
//! Owns the full list of arguments with which a queue is declared. What the application declares
//! is created, or compared with what is there: the broker compares an active declaration argument
//! by argument, and absent is not the same as false (FACTS 16). What somebody else owns is asked for
//! passively, which proves only that it exists. Each question uses a channel of its own, because a
//! refusal closes the channel on which it was asked.

use std::future::Future;
use std::sync::Arc;

use laneway_actors::port::SourceError;
use lapin::options::{
    ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, ErrorKind, ExchangeKind};
use tokio::time::timeout;
use tracing::debug;

use super::connection::{LinkError, Live, Purpose, said};
use super::core::Core;
use super::properties::short;
use super::source::{refused, unavailable};
use crate::topology::{ParkingSpec, QueueSpec, QueueType};

/// Checks a queue and its parking place; creates what is declared and missing. To be called on the
/// own runtime.
pub(super) async fn verify(core: &Core, spec: &QueueSpec) -> Result<(), Vec<SourceError>> {
    let live = administrative(core).await.map_err(|why| vec![why])?;
    let mut problems = Vec::new();
    let mut note = |result: Result<(), SourceError>| problems.extend(result.err());

    note(queue(core, &live, spec).await);
    if let Some(parking) = &spec.parking {
        let exchange = exchange(core, &live, spec, parking).await;
        let queue = parking_queue(core, &live, spec, parking).await;
        let both = exchange.is_ok() && queue.is_ok();
        note(exchange);
        note(queue);
        // Whether an exchange that somebody else owns leads anywhere cannot be asked; parking finds
        // out, because its messages are mandatory.
        if both && spec.declared {
            note(bind(core, &live, parking).await);
        }
    }
    if problems.is_empty() {
        debug!(target: "laneway", queue = %spec.name, "queue verified");
        Ok(())
    } else {
        Err(problems)
    }
}

/// The arguments of a declared queue, all of them.
fn arguments(spec: &QueueSpec) -> FieldTable {
    let mut arguments = type_argument(spec.queue_type);
    if spec.single_active_consumer {
        arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
    }
    arguments
}

/// A classic queue has no type argument, so that queues declared by others compare equal.
fn type_argument(queue_type: QueueType) -> FieldTable {
    let mut arguments = FieldTable::default();
    if queue_type == QueueType::Quorum {
        arguments.insert(
            "x-queue-type".into(),
            AMQPValue::LongString("quorum".into()),
        );
    }
    arguments
}

async fn queue(core: &Core, live: &Live, spec: &QueueSpec) -> Result<(), SourceError> {
    let options = QueueDeclareOptions {
        passive: !spec.declared,
        durable: spec.durable,
        ..QueueDeclareOptions::default()
    };
    let name = named("queue", &spec.name)?;
    let arguments = arguments(spec);
    ask(
        core,
        live,
        &format!("queue `{}`", spec.name),
        async |channel| {
            channel
                .queue_declare(name, options, arguments)
                .await
                .map(drop)
        },
    )
    .await
}

/// Whether a declared queue is there and is what was declared. To be called on the own runtime, before each
/// session but the first: while there was none, somebody may have deleted the queue, and declared another
/// one that looks the same to a consumer and keeps no order (without a single active consumer).
///
/// A queue that is missing stays missing: who deleted it had a reason, and what was bound to it would not
/// be bound to a new one.
pub(super) async fn verify_again(core: &Core, spec: &QueueSpec) -> Result<(), SourceError> {
    if !spec.declared {
        return Ok(()); // the broker tells no arguments
    }
    let live = administrative(core).await?;
    let name = named("queue", &spec.name)?;
    let what = format!("queue `{}`", spec.name);
    ask(core, &live, &what, async |channel| {
        let options = QueueDeclareOptions::default().passive();
        let asked = channel.queue_declare(name, options, FieldTable::default());
        asked.await.map(drop)
    })
    .await?;
    queue(core, &live, spec).await
}

async fn exchange(
    core: &Core,
    live: &Live,
    spec: &QueueSpec,
    parking: &ParkingSpec,
) -> Result<(), SourceError> {
    let options = ExchangeDeclareOptions {
        passive: !spec.declared,
        durable: true,
        ..ExchangeDeclareOptions::default()
    };
    let name = named("parking exchange", &parking.exchange)?;
    let what = format!("parking exchange `{}`", parking.exchange);
    ask(core, live, &what, async |channel| {
        channel
            .exchange_declare(name, ExchangeKind::Fanout, options, FieldTable::default())
            .await
    })
    .await
}

async fn parking_queue(
    core: &Core,
    live: &Live,
    spec: &QueueSpec,
    parking: &ParkingSpec,
) -> Result<(), SourceError> {
    let options = QueueDeclareOptions {
        passive: !spec.declared,
        durable: true,
        ..QueueDeclareOptions::default()
    };
    let name = named("parking queue", &parking.queue)?;
    let arguments = type_argument(spec.queue_type);
    let what = format!("parking queue `{}`", parking.queue);
    ask(core, live, &what, async |channel| {
        channel
            .queue_declare(name, options, arguments)
            .await
            .map(drop)
    })
    .await
}

async fn bind(core: &Core, live: &Live, parking: &ParkingSpec) -> Result<(), SourceError> {
    let queue = named("parking queue", &parking.queue)?;
    let exchange = named("parking exchange", &parking.exchange)?;
    let what = format!(
        "binding of parking queue `{}` to exchange `{}`",
        parking.queue, parking.exchange
    );
    ask(core, live, &what, async |channel| {
        let options = QueueBindOptions::default();
        let key = ShortString::default();
        channel
            .queue_bind(queue, exchange, key, options, FieldTable::default())
            .await
    })
    .await
}

/// Asks one question on a channel of its own, within the operation time-out.
async fn ask<F>(
    core: &Core,
    live: &Live,
    what: &str,
    question: impl FnOnce(Channel) -> F,
) -> Result<(), SourceError>
where
    F: Future<Output = Result<(), lapin::Error>>,
{
    let bound = core.settings.operation_timeout;
    let asking = async {
        let channel = live.connection.create_channel().await?;
        question(channel.clone()).await?;
        // It answered; whether it closes in order does not matter.
        let _ = channel.close(200, "verified".into()).await;
        Ok(())
    };
    match timeout(bound, asking).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(why)) => Err(source_error(what, why)),
        Err(_) => {
            live.retire();
            Err(unavailable(
                format!("{what}: the broker did not answer within {bound:?}"),
                None,
            ))
        }
    }
}

/// How many messages are ready in a queue, and how many consumers it has. To be called on the own
/// runtime.
pub(super) async fn count(core: &Core, queue: &str) -> Result<(u32, u32), SourceError> {
    let live = administrative(core).await?;
    let name = named("queue", queue)?;
    let options = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::default()
    };
    let mut count = (0, 0);
    let what = format!("queue `{queue}`");
    ask(core, &live, &what, async |channel| {
        let declared = channel
            .queue_declare(name, options, FieldTable::default())
            .await?;
        count = (declared.message_count(), declared.consumer_count());
        Ok(())
    })
    .await?;
    Ok(count)
}

/// Deletes a declared queue with what it holds, and its parking place. To be called on the own
/// runtime.
pub(super) async fn delete(core: &Core, spec: &QueueSpec) -> Result<(), SourceError> {
    let live = administrative(core).await?;
    let mut result = delete_queue(core, &live, &spec.name).await;
    if let Some(parking) = &spec.parking {
        result = result.and(delete_queue(core, &live, &parking.queue).await);
        result = result.and(delete_exchange(core, &live, &parking.exchange).await);
    }
    result
}

async fn delete_exchange(core: &Core, live: &Live, exchange: &str) -> Result<(), SourceError> {
    let name = named("parking exchange", exchange)?;
    let what = format!("parking exchange `{exchange}`");
    ask(core, live, &what, async |channel| {
        let options = ExchangeDeleteOptions::default();
        channel.exchange_delete(name, options).await
    })
    .await
}

/// A queue that does not exist counts as deleted.
async fn delete_queue(core: &Core, live: &Live, queue: &str) -> Result<(), SourceError> {
    let name = named("queue", queue)?;
    let what = format!("queue `{queue}`");
    ask(core, live, &what, async |channel| {
        let options = QueueDeleteOptions::default();
        channel.queue_delete(name, options).await.map(drop)
    })
    .await
}

/// The connection on which questions are asked, and announcements heard.
pub(super) async fn administrative(core: &Core) -> Result<Arc<Live>, SourceError> {
    core.live(Purpose::Consuming)
        .await
        .map_err(|why| match why {
            LinkError::Refused(what) => refused(what, None),
            LinkError::Unavailable(what) => unavailable(what, None),
        })
}

pub(super) fn named(what: &str, name: &str) -> Result<ShortString, SourceError> {
    short(name).map_err(|why| refused(format!("{what} `{name}`: {why}"), None))
}

/// What a broker's answer about a thing means for the caller.
pub(super) fn source_error(what: &str, why: lapin::Error) -> SourceError {
    let ErrorKind::ProtocolError(error) = why.kind() else {
        return unavailable(format!("{what}: {why}"), Some(why));
    };
    let said = said(error).to_owned();
    match error.get_id() {
        404 => refused(
            format!("{what} does not exist: declare it, or create it ({said})"),
            Some(why),
        ),
        403 => refused(
            format!("{what}: access refused; check the permissions of the user in `url` ({said})"),
            Some(why),
        ),
        405 => refused(
            format!("{what} belongs to another connection alone ({said})"),
            Some(why),
        ),
        406 => refused(
            format!("{what} is there, and differs from what is declared ({said})"),
            Some(why),
        ),
        _ => unavailable(format!("{what}: {said}"), Some(why)),
    }
}
