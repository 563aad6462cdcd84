//! Publishing to durable queues outside of transactions: what waits while one commit is under way goes into the next
//! one together.
//!
//! Promises that messages are stored in the order of the calls; that one call's messages are stored together or not at
//! all; and that a call whose outcome is unknown is made again without storing anything twice: every message has an id.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use laneway_actors::MessageId;
use laneway_actors::port::PublishError;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

use crate::local::address::ToQueue;
use crate::store::{NewMessage, Placed, Store, StoreError};

/// Messages of one commit at most, unless a single call has more.
const MOST_AT_ONCE: usize = 1_000;
/// Pause before the database is asked again.
const AGAIN: Duration = Duration::from_millis(100);
/// For how long a call is made again while the database does not answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Takes messages for durable queues.
#[derive(Clone)]
pub(super) struct Sink(mpsc::UnboundedSender<Request>);

struct Request {
    rows: Vec<NewMessage>,
    since: Instant,
    done: oneshot::Sender<Result<(), PublishError>>,
}

impl Sink {
    pub(super) fn start(store: Arc<dyn Store>, runtime: &Handle) -> Self {
        let (requests, asked) = mpsc::unbounded_channel();
        runtime.spawn(run(store, asked));
        Self(requests)
    }

    /// Stores messages, all or none. Their place in the order is that of the call, not of the first poll.
    pub(super) fn enqueue(
        &self,
        batch: Vec<ToQueue>,
    ) -> BoxFuture<'static, Result<(), PublishError>> {
        let rows = batch.into_iter().map(|message| {
            let (mut row, _) = super::into_row(message);
            row.envelope.id.get_or_insert_with(MessageId::unique);
            row
        });
        let (done, answer) = oneshot::channel();
        let request = Request {
            rows: rows.collect(),
            since: Instant::now(),
            done,
        };
        let sent = self.0.send(request);
        Box::pin(async move {
            if sent.is_err() {
                return Err(PublishError::ShutDown);
            }
            let gone = PublishError::Unknown("the store was closed meanwhile".to_owned());
            answer.await.unwrap_or(Err(gone))
        })
    }
}

async fn run(store: Arc<dyn Store>, mut asked: mpsc::UnboundedReceiver<Request>) {
    while let Some(first) = asked.recv().await {
        let mut count = first.rows.len();
        let mut requests = vec![first];
        while count < MOST_AT_ONCE
            && let Ok(next) = asked.try_recv()
        {
            count += next.rows.len();
            requests.push(next);
        }
        store_all(&*store, requests).await;
    }
}

async fn store_all(store: &dyn Store, mut requests: Vec<Request>) {
    let together = rows(&requests);
    match enqueue(store, together, &requests).await {
        Ok(placed) => answer(requests, &placed),
        // One of them is not acceptable: each alone, so that it harms no other.
        Err(StoreError::Refused { .. }) if requests.len() > 1 => {
            for request in requests {
                let alone = std::slice::from_ref(&request);
                let result = enqueue(store, rows(alone), alone).await;
                match result {
                    Ok(placed) => answer(vec![request], &placed),
                    Err(error) => fail(request, &error),
                }
            }
        }
        Err(error) => {
            for request in requests.drain(..) {
                fail(request, &error);
            }
        }
    }
}

fn rows(requests: &[Request]) -> Vec<NewMessage> {
    let rows = requests.iter().flat_map(|request| &request.rows);
    rows.cloned().collect()
}

/// Until it is answered. What an earlier try has stored is recognised by its id.
async fn enqueue(
    store: &dyn Store,
    rows: Vec<NewMessage>,
    requests: &[Request],
) -> Result<Vec<Placed>, StoreError> {
    let mut told = false;
    loop {
        let error = match store.enqueue(rows.clone()).await {
            Ok(enqueued) => return Ok(enqueued.committed()),
            Err(error) => error,
        };
        let given_up = requests
            .iter()
            .all(|request| request.done.is_closed() || request.since.elapsed() > PATIENCE);
        if !error.is_retryable() || given_up {
            return Err(error);
        }
        if !told {
            tracing::warn!(target: "laneway", store = store.name(), %error, "messages cannot be stored; trying again");
        }
        told = true;
        tokio::time::sleep(AGAIN).await;
    }
}

fn answer(requests: Vec<Request>, placed: &[Placed]) {
    let mut placed = placed.iter();
    for request in requests {
        let mut of_request = placed.by_ref().take(request.rows.len());
        let reused = of_request.any(|placed| *placed == Placed::IdReused);
        of_request.for_each(drop);
        let result = match reused {
            true => Err(PublishError::Refused(
                "its id belongs to another message of the queue; it is among the dead letters"
                    .to_owned(),
            )),
            false => Ok(()),
        };
        // Nobody waits for it any more.
        let _ = request.done.send(result);
    }
}

fn fail(request: Request, error: &StoreError) {
    let text = error.to_string();
    let error = match error {
        StoreError::Unavailable { .. } => PublishError::Unknown(text),
        _ => PublishError::Refused(text),
    };
    let _ = request.done.send(Err(error));
}
