//! Laneway, as a user would write it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use laneway::prelude::*;

use super::{Job, PREFETCH, Run, handle};
use crate::broker::{KEY_HEADER, Numbered};
use crate::order::Effects;

pub(super) async fn run(
    job: &Job,
    effects: &Arc<Effects>,
    start: Instant,
) -> Result<Run, Box<dyn std::error::Error>> {
    let (time, record) = (job.handler, Arc::clone(effects));
    let queue_type = if job.quorum {
        QueueType::Quorum
    } else {
        QueueType::Classic
    };
    let bus = Bus::builder()
        .rabbitmq(RabbitMq::at(&job.url))
        .topology(|t| {
            t.queue(&job.queue, |q| {
                q.durable().of_type(queue_type).single_active_consumer()
            })
        })
        .endpoint(&job.queue, |e| {
            e.ordered_by_header(KEY_HEADER)
                .transport_affinity(TransportAffinity::SingleActiveConsumer)
                .concurrency(job.concurrency)
                .max_in_flight(u32::from(PREFETCH))
                .discard_poison()
                .handler(move |message: Numbered, _: Context| {
                    let record = Arc::clone(&record);
                    async move {
                        handle(time).await;
                        record.record(message.key, message.seq);
                        Ok(())
                    }
                })
        })
        .build()?
        .start()
        .await?;
    effects.all().await;
    // Drains: the last acknowledgement is known to be processed when it returns.
    bus.shutdown(Duration::from_secs(10)).await;
    Ok(Run {
        time: start.elapsed(),
        inversions: effects.inversions(),
    })
}
