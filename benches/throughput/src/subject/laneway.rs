//! Laneway, as a user would write it.

use std::sync::Arc;
use std::time::Duration;

use laneway::prelude::*;

use super::{AT_ONCE, Job, PREFETCH};
use crate::Error;
use crate::record::Record;
use crate::workload::{KEY_HEADER, Message, PAUSES};

pub(super) async fn run(job: &Job, record: &Arc<Record>) -> Result<(), Error> {
    let queue_type = match job.queue_type {
        super::QueueType::Classic => QueueType::Classic,
        super::QueueType::Quorum => QueueType::Quorum,
    };
    let handled = Arc::clone(record);
    let bus = Bus::builder()
        .rabbitmq(RabbitMq::at(&job.url))
        .topology(|t| {
            t.queue(&job.name, |q| {
                q.durable()
                    .of_type(queue_type)
                    .single_active_consumer()
                    .parking(&job.parking_exchange(), &job.parked())
            })
        })
        .endpoint(&job.name, |e| {
            e.ordered_by_header(KEY_HEADER)
                .transport_affinity(TransportAffinity::SingleActiveConsumer)
                .concurrency(AT_ONCE)
                .max_in_flight(u32::from(PREFETCH))
                .on_failure(|rules| rules.on_any().retry_after(PAUSES).park())
                .handler(move |message: Message, _: Context| {
                    let record = Arc::clone(&handled);
                    async move {
                        match record.handle(&message).await {
                            true => Ok(()),
                            false => Err(Failure::transient("it fails at each run")),
                        }
                    }
                })
        })
        .build()?
        .start()
        .await?;
    record.all().await;
    let poisoned = record.plan.poisoned().len() as u64;
    while bus.snapshot().await.endpoints[0].parked < poisoned {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    // Drains: the last acknowledgement is known to be processed when it returns.
    bus.shutdown(Duration::from_secs(10)).await;
    Ok(())
}
