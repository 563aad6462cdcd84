//! Declares, checks and deletes queues and their parking places.
//!
//! Owns the full list of arguments with which a queue is declared. What the application declares
//! is created, or compared with what is there: the broker compares an active declaration argument
//! by argument, and absent is not the same as false (FACTS 16). What somebody else owns is asked for
//! passively, which proves only that it exists. Exchanges and bindings are in [`apply`](super::apply).

use std::sync::Arc;

use laneway_actors::port::SourceError;
use lapin::options::{
    ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{ErrorKind, ExchangeKind};
use tracing::debug;

use super::asker::Asker;
use super::connection::{LinkError, Live, Purpose, said};
use super::core::Core;
use super::properties::short;
use super::source::{refused, unavailable};
use crate::topology::arguments::{DELIVERY_LIMIT, QUEUE_TYPE, SINGLE_ACTIVE_CONSUMER};
use crate::topology::{ArgumentValue, Arguments, ParkingSpec, QueueSpec, QueueType};

/// Checks a queue and its parking place; creates what is declared and missing. To be called on the
/// own runtime.
pub(super) async fn verify(core: &Core, spec: &QueueSpec) -> Result<(), Vec<SourceError>> {
    let mut asker = Asker::on(core).await.map_err(|why| vec![why])?;
    verify_with(&mut asker, spec).await
}

/// The same, with an asker that has more to ask.
pub(super) async fn verify_with(
    asker: &mut Asker<'_>,
    spec: &QueueSpec,
) -> Result<(), Vec<SourceError>> {
    let mut problems = Vec::new();
    let mut note = |result: Result<(), SourceError>| problems.extend(result.err());

    note(queue(asker, spec).await);
    if let Some(parking) = &spec.parking {
        let exchange = exchange(asker, spec, parking).await;
        let queue = parking_queue(asker, spec, parking).await;
        let both = exchange.is_ok() && queue.is_ok();
        note(exchange);
        note(queue);
        // Whether an exchange that somebody else owns leads anywhere cannot be asked; parking finds
        // out, because its messages are mandatory.
        if both && spec.declared {
            note(bind(asker, parking).await);
        }
    }
    if problems.is_empty() {
        debug!(target: "laneway", queue = %spec.name, "queue verified");
        Ok(())
    } else {
        Err(problems)
    }
}

/// Arguments in AMQP's types.
pub(super) fn table(arguments: &Arguments) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in arguments {
        let value = match value {
            ArgumentValue::Text(text) => AMQPValue::LongString(text.as_str().into()),
            ArgumentValue::Integer(number) => AMQPValue::LongLongInt(*number),
            ArgumentValue::Bool(truth) => AMQPValue::Boolean(*truth),
        };
        table.insert(name.as_str().into(), value);
    }
    table
}

/// The arguments of a declared queue, all of them. `unlimited`: the broker's own delivery limit is lifted.
fn arguments(spec: &QueueSpec, unlimited: bool) -> FieldTable {
    let mut arguments = spec.arguments.clone();
    if spec.single_active_consumer {
        arguments.insert(SINGLE_ACTIVE_CONSUMER.to_owned(), true.into());
    }
    // A classic queue has no type argument, so that queues declared by others compare equal.
    if spec.queue_type == QueueType::Quorum {
        arguments.insert(QUEUE_TYPE.to_owned(), "quorum".into());
        if unlimited {
            arguments.insert(DELIVERY_LIMIT.to_owned(), UNLIMITED.into());
        }
    }
    table(&arguments)
}

/// No delivery limit, for brokers that have one of their own.
const UNLIMITED: i64 = -1;

/// Whether the broker's own delivery limit must not apply: RabbitMQ 4 removes what a quorum queue has taken
/// back 20 times, and each lost session counts for everything that it held (FACTS 15).
fn wants_unlimited(spec: &QueueSpec) -> bool {
    spec.declared
        && spec.queue_type == QueueType::Quorum
        && !spec.gaps_accepted
        && !spec.arguments.contains_key(DELIVERY_LIMIT)
}

async fn queue(asker: &mut Asker<'_>, spec: &QueueSpec) -> Result<(), SourceError> {
    let unlimited = wants_unlimited(spec) && asker.has_limit_of_its_own(&spec.name).await?;
    let what = format!("queue `{}`", spec.name);
    declare(asker, &what, &spec.name, spec, arguments(spec, unlimited)).await
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
    let mut asker = Asker::on(core).await?;
    let name = named("queue", &spec.name)?;
    let what = format!("queue `{}`", spec.name);
    asker
        .ask(&what, async |channel| {
            let options = QueueDeclareOptions::default().passive();
            let asked = channel.queue_declare(name, options, FieldTable::default());
            asked.await.map(drop)
        })
        .await?;
    queue(&mut asker, spec).await
}

async fn declare(
    asker: &mut Asker<'_>,
    what: &str,
    name: &str,
    spec: &QueueSpec,
    arguments: FieldTable,
) -> Result<(), SourceError> {
    let options = QueueDeclareOptions {
        passive: !spec.declared,
        durable: spec.durable,
        ..QueueDeclareOptions::default()
    };
    let name = named("queue", name)?;
    let unlimited = wants_unlimited(spec) && arguments.contains_key(DELIVERY_LIMIT);
    let answer = asker
        .hear(what, async |channel| {
            channel
                .queue_declare(name, options, arguments)
                .await
                .map(drop)
        })
        .await?;
    answer.map_err(|why| match why.kind() {
        ErrorKind::ProtocolError(error) if unlimited && said(error).contains(DELIVERY_LIMIT) => {
            let text = format!(
                "{what} is there with a delivery limit, or with the broker's default one, at which it removes messages unseen; make it anew, set `delivery_limit(…)` as it is, or say `accept_unreported_gaps()` ({})",
                said(error)
            );
            refused(text, Some(why))
        }
        _ => source_error(what, why),
    })
}

async fn exchange(
    asker: &mut Asker<'_>,
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
    asker
        .ask(&what, async |channel| {
            channel
                .exchange_declare(name, ExchangeKind::Fanout, options, FieldTable::default())
                .await
        })
        .await
}

async fn parking_queue(
    asker: &mut Asker<'_>,
    spec: &QueueSpec,
    parking: &ParkingSpec,
) -> Result<(), SourceError> {
    let Some(mut parked) = spec.parking_queue() else {
        return Ok(());
    };
    parked.declared = spec.declared;
    let unlimited = wants_unlimited(&parked) && asker.has_limit_of_its_own(&parked.name).await?;
    let what = format!("parking queue `{}`", parking.queue);
    let arguments = arguments(&parked, unlimited);
    declare(asker, &what, &parking.queue, &parked, arguments).await
}

async fn bind(asker: &mut Asker<'_>, parking: &ParkingSpec) -> Result<(), SourceError> {
    let queue = named("parking queue", &parking.queue)?;
    let exchange = named("parking exchange", &parking.exchange)?;
    let what = format!(
        "binding of parking queue `{}` to exchange `{}`",
        parking.queue, parking.exchange
    );
    asker
        .ask(&what, async |channel| {
            let options = QueueBindOptions::default();
            let key = ShortString::default();
            channel
                .queue_bind(queue, exchange, key, options, FieldTable::default())
                .await
        })
        .await
}

/// How many messages are ready in a queue, and how many consumers it has. To be called on the own
/// runtime.
pub(super) async fn count(core: &Core, queue: &str) -> Result<(u32, u32), SourceError> {
    let mut asker = Asker::on(core).await?;
    let name = named("queue", queue)?;
    let options = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::default()
    };
    let mut count = (0, 0);
    let what = format!("queue `{queue}`");
    asker
        .ask(&what, async |channel| {
            let declared = channel
                .queue_declare(name, options, FieldTable::default())
                .await?;
            count = (declared.message_count(), declared.consumer_count());
            Ok(())
        })
        .await?;
    Ok(count)
}

/// Deletes a queue with what it holds, and its parking queue. To be called on the own runtime.
pub(super) async fn delete(asker: &mut Asker<'_>, spec: &QueueSpec) -> Result<(), SourceError> {
    let mut result = delete_queue(asker, &spec.name).await;
    if let Some(parking) = &spec.parking {
        result = result.and(delete_queue(asker, &parking.queue).await);
        result = result.and(super::apply::delete_exchange(asker, &parking.exchange).await);
    }
    result
}

/// A queue that does not exist counts as deleted.
async fn delete_queue(asker: &mut Asker<'_>, queue: &str) -> Result<(), SourceError> {
    let name = named("queue", queue)?;
    let what = format!("queue `{queue}`");
    asker
        .ask(&what, async |channel| {
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
        // Not worth another try: the broker closes the whole connection for what it does not know.
        503 => refused(
            format!("{what}: the broker does not know how to do this ({said})"),
            Some(why),
        ),
        _ => unavailable(format!("{what}: {said}"), Some(why)),
    }
}
