//! Hints across nodes: LISTEN and NOTIFY.
//!
//! A NOTIFY takes a lock of the whole server at its commit. Within a writer's transaction it would make all
//! commits wait for one another; here it is sent after them, by one task, for all queues that were hinted at since
//! its last one. A hint can be lost (this process dies between commit and hint, the listener's connection breaks):
//! then polling finds the row.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::PgPool;
use sqlx::postgres::PgListener;
use tokio::sync::Notify;

use super::connect::Guarded;
use super::fault::Fault;
use crate::store::Known;
use crate::store::wake::{LocalWakes, Wake};

/// How long hints are gathered before they are sent: far below what a poll would take, and long enough that
/// a busy writer sends some hundred notifications a second at most.
const GATHER: Duration = Duration::from_millis(5);

/// Pause after a listener or a notification failed.
const PAUSE: Duration = Duration::from_secs(1);

/// Hints to this process at once, and to the others a moment later.
pub(super) struct Wakes {
    pub(super) local: LocalWakes,
    pending: Mutex<BTreeSet<String>>,
    news: Notify,
}

impl Wakes {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            local: LocalWakes::default(),
            pending: Mutex::default(),
            news: Notify::new(),
        })
    }

    fn take_pending(&self) -> BTreeSet<String> {
        std::mem::take(&mut *self.pending.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Wake for Wakes {
    fn wake(&self, queue: &str) {
        self.local.wake(queue);
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if pending.insert(queue.to_owned()) {
            self.news.notify_one();
        }
    }
}

/// Sends hints until it is aborted.
pub(super) async fn notify(wakes: Arc<Wakes>, known: Arc<Known>, pool: PgPool, channel: String) {
    loop {
        wakes.news.notified().await;
        tokio::time::sleep(GATHER).await;
        let queues = wakes.take_pending();
        // A queue is named by its number: a payload is limited to 8,000 bytes, a name is not.
        let numbers = queues.iter().filter_map(|queue| known.number(queue).ok());
        let numbers: Vec<String> = numbers.map(|number| number.to_string()).collect();
        if let Err(Fault(error)) = send(&pool, &channel, &numbers).await {
            tracing::debug!(%error, "a hint to other nodes was not sent; they find the messages by polling");
            tokio::time::sleep(PAUSE).await;
        }
    }
}

async fn send(pool: &PgPool, channel: &str, numbers: &[String]) -> Result<(), Fault> {
    let mut connection = Guarded::from(pool).await?;
    sqlx::query("SELECT pg_notify($1, number) FROM unnest($2::text[]) AS n(number)")
        .bind(channel)
        .bind(numbers)
        .execute(&mut *connection)
        .await?;
    connection.done();
    Ok(())
}

/// Passes on the hints of other nodes until it is aborted. `pool` has one connection, for this.
pub(super) async fn listen(wakes: Arc<Wakes>, known: Arc<Known>, pool: PgPool, channel: String) {
    loop {
        if let Err(Fault(error)) = listen_once(&wakes, &known, &pool, &channel).await {
            tracing::debug!(%error, "hints of other nodes are not heard; messages are found by polling");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn listen_once(
    wakes: &Wakes,
    known: &Known,
    pool: &PgPool,
    channel: &str,
) -> Result<(), Fault> {
    let mut listener = PgListener::connect_with(pool).await?;
    listener.listen(channel).await?;
    // What was sent while nobody listened is lost.
    wakes.local.wake_all();
    while let Some(notification) = listener.try_recv().await? {
        let number = notification.payload().parse();
        match number.ok().and_then(|number| known.name(number)) {
            Some(queue) => wakes.local.wake(&queue),
            // Another store whose channel has the same hash, or a queue that only other nodes have.
            None => continue,
        }
    }
    Ok(())
}
