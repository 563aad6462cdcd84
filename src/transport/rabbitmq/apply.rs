//! Applies a whole topology: identities, exchanges, queues, bindings, in this order.
//!
//! Promises that nothing is made when an identity differs or a name is taken by something else, and that a
//! second application changes nothing. RabbitMQ compares of an exchange its kind, its durability and its
//! alternate exchange, and no other argument (`hash-header` neither); what must be compared has a marker.

use laneway_actors::port::SourceError;
use lapin::options::{
    ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::FieldTable;
use lapin::{ErrorKind, ExchangeKind as AmqpKind};

use super::asker::Asker;
use super::connection::said;
use super::core::Core;
use super::source::refused;
use super::topology::{delete, named, source_error, table, verify_with};
use crate::topology::{BindingSpec, ExchangeKind, ExchangeSpec, Plan};

/// Applies a plan. To be called on the own runtime.
pub(super) async fn apply(core: &Core, plan: &Plan) -> Result<(), Vec<SourceError>> {
    let mut asker = Asker::on(core).await.map_err(|why| vec![why])?;
    let mut problems = Vec::new();
    for (whose, marker) in &plan.markers {
        problems.extend(identify(&mut asker, whose, marker).await.err());
    }
    for queue in &plan.absent {
        problems.extend(expect_absent(&mut asker, queue).await.err());
    }
    for (queue, marker) in &plan.plain {
        problems.extend(expect_plain(&mut asker, queue, marker).await.err());
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    for spec in &plan.exchanges {
        problems.extend(exchange(&mut asker, spec).await.err());
    }
    for queue in &plan.queues {
        problems.extend(
            verify_with(&mut asker, queue)
                .await
                .err()
                .into_iter()
                .flatten(),
        );
    }
    if !problems.is_empty() {
        // What is to be bound may not be there.
        return Err(problems);
    }
    for binding in &plan.bindings {
        problems.extend(bind(&mut asker, binding).await.err());
    }
    if problems.is_empty() {
        Ok(())
    } else {
        Err(problems)
    }
}

/// Declares an exchange that holds an identity.
async fn identify(
    asker: &mut Asker<'_>,
    whose: &str,
    marker: &ExchangeSpec,
) -> Result<(), SourceError> {
    let what = format!("exchange `{}`", marker.name);
    let answer = declare(asker, &what, marker).await?;
    let Err(why) = answer else { return Ok(()) };
    let there = match why.kind() {
        ErrorKind::ProtocolError(error) if error.get_id() == 406 => {
            current_value(said(error)).map(str::to_owned)
        }
        _ => None,
    };
    let Some(there) = there else {
        return Err(source_error(&what, why));
    };
    let wanted = marker.alternate.as_deref().unwrap_or_default();
    Err(refused(
        format!(
            "{whose} exists with another number of shards, another map or another key header (`{there}`), than is declared (`{wanted}`); it cannot be changed: declare that, or use another name"
        ),
        Some(why),
    ))
}

/// The value that is there, in `inequivalent arg 'alternate-exchange' …: received 'a' but current is 'b'`.
/// None in an answer of another form.
fn current_value(said: &str) -> Option<&str> {
    let (before, current) = said.split_once("but current is ")?;
    let value = current.split('\'').nth(1)?;
    before.contains("alternate-exchange").then_some(value)
}

async fn expect_absent(asker: &mut Asker<'_>, queue: &str) -> Result<(), SourceError> {
    let name = named("queue", queue)?;
    let what = format!("queue `{queue}`");
    let answer = asker
        .hear(&what, async |channel| {
            let options = QueueDeclareOptions::default().passive();
            let asked = channel.queue_declare(name, options, FieldTable::default());
            asked.await.map(drop)
        })
        .await?;
    match answer {
        Err(why) if id_of(&why) == Some(404) => Ok(()),
        Err(why) => Err(source_error(&what, why)),
        Ok(()) => Err(refused(
            format!(
                "{what} exists as a plain queue, and is declared as a sharded one: nothing would consume what is in it; empty and delete it, or use another name"
            ),
            None,
        )),
    }
}

async fn expect_plain(asker: &mut Asker<'_>, queue: &str, marker: &str) -> Result<(), SourceError> {
    let what = format!("exchange `{marker}`");
    // A name that is too long for an exchange belongs to none.
    let Ok(name) = named("exchange", marker) else {
        return Ok(());
    };
    let answer = asker
        .hear(&what, async |channel| {
            let options = ExchangeDeclareOptions {
                passive: true,
                ..ExchangeDeclareOptions::default()
            };
            let asked =
                channel.exchange_declare(name, AmqpKind::Fanout, options, FieldTable::default());
            asked.await
        })
        .await?;
    match answer {
        Err(why) if id_of(&why) == Some(404) => Ok(()),
        Err(why) => Err(source_error(&what, why)),
        Ok(()) => Err(refused(
            format!(
                "queue `{queue}` is a sharded queue at the broker ({what} is there), and is declared as a plain one: messages in its shards would be forgotten; use `sharded_queue`, or another name"
            ),
            None,
        )),
    }
}

fn id_of(why: &lapin::Error) -> Option<u16> {
    match why.kind() {
        ErrorKind::ProtocolError(error) => Some(error.get_id()),
        _ => None,
    }
}

async fn exchange(asker: &mut Asker<'_>, spec: &ExchangeSpec) -> Result<(), SourceError> {
    let what = format!("exchange `{}`", spec.name);
    let answer = declare(asker, &what, spec).await?;
    answer.map_err(|why| {
        if spec.kind == ExchangeKind::ConsistentHash && id_of(&why) == Some(503) {
            return refused(
                format!(
                    "{what}: the broker does not know the type x-consistent-hash; enable the plugin rabbitmq_consistent_hash_exchange"
                ),
                Some(why),
            );
        }
        source_error(&what, why)
    })
}

async fn declare(
    asker: &mut Asker<'_>,
    what: &str,
    spec: &ExchangeSpec,
) -> Result<Result<(), lapin::Error>, SourceError> {
    let name = named("exchange", &spec.name)?;
    let kind = match spec.kind {
        ExchangeKind::Direct => AmqpKind::Direct,
        ExchangeKind::Fanout => AmqpKind::Fanout,
        ExchangeKind::Topic => AmqpKind::Topic,
        ExchangeKind::Headers => AmqpKind::Headers,
        ExchangeKind::ConsistentHash => AmqpKind::Custom(spec.kind.name().to_owned()),
    };
    let options = ExchangeDeclareOptions {
        passive: !spec.declared,
        durable: spec.durable,
        internal: spec.internal,
        ..ExchangeDeclareOptions::default()
    };
    let arguments = table(&spec.all_arguments());
    asker
        .hear(what, async |channel| {
            channel
                .exchange_declare(name, kind, options, arguments)
                .await
        })
        .await
}

async fn bind(asker: &mut Asker<'_>, binding: &BindingSpec) -> Result<(), SourceError> {
    let what = format!(
        "binding of queue `{}` to exchange `{}`",
        binding.queue, binding.exchange
    );
    let queue = named("queue", &binding.queue)?;
    let exchange = named("exchange", &binding.exchange)?;
    let key = named("routing key", &binding.routing_key)?;
    let arguments = table(&binding.arguments);
    asker
        .ask(&what, async |channel| {
            let options = QueueBindOptions::default();
            channel
                .queue_bind(queue, exchange, key, options, arguments)
                .await
        })
        .await
}

/// Deletes what a plan declares, with every message. To be called on the own runtime.
pub(super) async fn remove(core: &Core, plan: &Plan) -> Result<(), SourceError> {
    let mut asker = Asker::on(core).await?;
    let mut result = Ok(());
    for queue in plan.queues.iter().filter(|queue| queue.declared) {
        result = result.and(delete(&mut asker, queue).await);
    }
    let markers = plan.markers.iter().map(|(_, marker)| marker);
    for exchange in plan
        .exchanges
        .iter()
        .chain(markers)
        .filter(|exchange| exchange.declared)
    {
        result = result.and(delete_exchange(&mut asker, &exchange.name).await);
    }
    for group in &plan.groups {
        result = result.and(delete_exchange(&mut asker, group).await);
    }
    result
}

/// An exchange that does not exist counts as deleted.
pub(super) async fn delete_exchange(
    asker: &mut Asker<'_>,
    exchange: &str,
) -> Result<(), SourceError> {
    let name = named("exchange", exchange)?;
    let what = format!("exchange `{exchange}`");
    asker
        .ask(&what, async |channel| {
            let options = ExchangeDeleteOptions::default();
            channel.exchange_delete(name, options).await
        })
        .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identity_that_is_there_is_read_from_the_brokers_answer() {
        // 3.10.8
        let said = "PRECONDITION_FAILED - inequivalent arg 'alternate-exchange' for exchange 'orders.shards' in vhost '/': received 'publisher-9' but current is 'publisher-8'";
        assert_eq!(current_value(said), Some("publisher-8"));
        let other = "PRECONDITION_FAILED - inequivalent arg 'type' for exchange 'orders.shards' in vhost '/': received 'fanout' but current is 'direct'";
        assert_eq!(current_value(other), None);
    }
}
