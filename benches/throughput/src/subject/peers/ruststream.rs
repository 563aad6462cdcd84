//! `ruststream-lapin` with keyed lanes.

use std::num::NonZeroUsize;
use std::sync::Arc;

use ruststream_lapin::prelude::*;

use crate::Error;
use crate::record::Record;
use crate::subject::{AT_ONCE, Job, PREFETCH, QueueType};
use crate::workload::Message;

struct Handler(Arc<Record>);

impl Handle<Message> for Handler {
    async fn handle(
        &self,
        message: &Message,
        _outs: &(),
        _ctx: &mut Context<'_>,
    ) -> Result<(), HandlerOutcome> {
        match self.0.handle(message).await {
            true => Ok(()),
            false => Err(HandlerOutcome::retry()),
        }
    }
}

pub(crate) async fn run(job: &Job, record: &Arc<Record>) -> Result<(), Error> {
    let lanes = NonZeroUsize::new(AT_ONCE as usize).ok_or("no lanes")?;
    let prefetch = PREFETCH.try_into()?;
    let handler = Handler(Arc::clone(record));
    let queue = job.name.clone();
    let broker = LapinBroker::new(&job.url).prefetch(prefetch);
    let app = RustStream::new(AppInfo::new("bench", "0.1.0"));
    let app = match job.queue_type {
        QueueType::Classic => app.with_broker(broker, |b| {
            let queue = RabbitQueue::new(queue).durable(true);
            b.include(subscriber(queue, handler).workers_by_key(lanes).build());
        }),
        QueueType::Quorum => app.with_broker(broker, |b| {
            let queue = RabbitQuorumQueue::new(queue);
            b.include(subscriber(queue, handler).workers_by_key(lanes).build());
        }),
    };
    let record = Arc::clone(record);
    app.run_until(async move { record.all().await }).await?;
    Ok(())
}
