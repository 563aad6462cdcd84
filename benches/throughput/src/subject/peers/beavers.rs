//! `beavers`: order is that of a queue, so the keys are spread over 32 ordered queues.

use std::sync::Arc;

use beavers::adapters::rabbitmq::{RabbitMq, RabbitMqRecord};
use beavers::{App, BoxError, CancellationToken, Json, ProcessingOrder, Sink, Subscription};

use crate::Error;
use crate::record::Record;
use crate::subject::{Job, PREFETCH, QUEUES};
use crate::workload::Message;

/// Every subscription publishes; these have nothing to say.
struct Nothing;

impl Sink<()> for Nothing {
    type Prepared = ();

    fn prepare(&self, (): ()) -> Result<(), BoxError> {
        Ok(())
    }

    async fn publish(&self, (): &()) -> Result<(), BoxError> {
        Ok(())
    }
}

pub(crate) async fn run(job: &Job, record: &Arc<Record>) -> Result<(), Error> {
    let rabbit = RabbitMq::new(&job.url);
    let prefetch = PREFETCH / u16::try_from(QUEUES)?;
    let mut app = App::new();
    for queue in job.queues() {
        let source = rabbit
            .source::<Json<Message>>(&queue)
            .prefetch(prefetch)
            .ordered(true);
        let record = Arc::clone(record);
        let handler = move |message: RabbitMqRecord<Message>| {
            let record = Arc::clone(&record);
            async move {
                if record.handle(&message.value).await {
                    Ok(())
                } else {
                    Err(beavers::HandlerError::Retry("it fails at each run".into()))
                }
            }
        };
        app = app.subscription(
            Subscription::new(queue, source, Nothing, handler)
                .ordering(ProcessingOrder::PerKey)
                .max_in_flight(usize::from(prefetch)),
        );
    }
    let stop = CancellationToken::new();
    let running = app.run_until(stop.clone());
    let stopping = async {
        record.all().await;
        stop.cancel();
    };
    let (ended, ()) = tokio::join!(running, stopping);
    Ok(ended?)
}
