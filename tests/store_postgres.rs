//! PostgreSQL keeps the promises of the store, and those among several nodes.
//!
//! Needs a server: `LANEWAY_POSTGRES_URL`, or by default the database `test` on this machine. Each test has a schema
//! of its own.
#![cfg(feature = "postgres")]

use std::num::NonZeroU32;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use laneway::actors::port::{Announcement, MemberId};
use laneway::actors::{Envelope, ShardCount};
use laneway::store::postgres::{PostgresConfig, PostgresStore};
use laneway::store::{
    Counts, Ending, NewMessage, Provision, QueueIdentity, QueueOrder, Settlement, Shard, Start,
    Store as _, StoreError, TransactionalStore as _, Window,
};
use laneway::testing::conformance::store::StoreAdapter;
use sqlx::{Connection as _, Executor as _, PgConnection};

fn url() -> String {
    std::env::var("LANEWAY_POSTGRES_URL")
        .unwrap_or_else(|_| "postgres://postgres@127.0.0.1:5432/test".to_owned())
}

async fn connection() -> PgConnection {
    let connection = PgConnection::connect(&url()).await;
    connection.expect("a PostgreSQL server; see LANEWAY_POSTGRES_URL")
}

struct Postgres {
    schema: String,
}

impl Postgres {
    fn new() -> Self {
        Self {
            schema: format!("laneway_{:016x}", fastrand::u64(..)),
        }
    }

    fn config(&self) -> PostgresConfig {
        PostgresConfig::at(url())
            .schema(&self.schema)
            .work_connections(NonZeroU32::new(16).expect("not zero"))
            .timeout(Duration::from_secs(10))
    }
}

impl StoreAdapter for Postgres {
    type Store = PostgresStore;

    fn open(&self) -> BoxFuture<'_, PostgresStore> {
        async move { PostgresStore::start(self.config()).await.expect("starts") }.boxed()
    }

    fn break_headers<'a>(&'a self, table: &'a str, id: &'a str) -> BoxFuture<'a, ()> {
        async move {
            let mut connection = connection().await;
            let table = format!("{}.{table}", self.schema);
            sqlx::query(&format!("UPDATE {table} SET headers = '{{' WHERE id = $1"))
                .bind(id)
                .execute(&mut connection)
                .await
                .expect("breaks");
        }
        .boxed()
    }

    fn clean_up(&self) -> BoxFuture<'_, ()> {
        async move {
            let drop = format!("DROP SCHEMA IF EXISTS {} CASCADE", self.schema);
            let mut connection = connection().await;
            let dropped = connection.execute(&*drop).await;
            dropped.expect("drops the schema");
        }
        .boxed()
    }
}

async fn postgres() -> impl StoreAdapter {
    Postgres::new()
}

laneway::store_conformance_suite!(postgres);

fn queue() -> [QueueIdentity; 1] {
    let one = ShardCount::new(1).expect("allowed");
    [QueueIdentity {
        name: "q".into(),
        order: QueueOrder::Ordered(one),
    }]
}

fn message(key: &str, body: &'static str) -> NewMessage {
    NewMessage {
        queue: "q".into(),
        key: Some(key.into()),
        envelope: Envelope {
            body: body.into(),
            ..Envelope::default()
        },
        due: None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_starters_at_once_migrate_once() {
    let postgres = Postgres::new();
    let few = NonZeroU32::new(1).expect("not zero");
    let starts = (0..8).map(|_| PostgresStore::start(postgres.config().work_connections(few)));
    let started = futures::future::join_all(starts).await;
    for store in started {
        let store = store.expect("starts");
        store.declare(&queue()).await.expect("declares");
        store.close().await;
    }
    postgres.clean_up().await;
}

#[tokio::test]
async fn missing_tables_are_refused_by_name_and_can_be_made_by_hand() {
    let postgres = Postgres::new();
    let check = || postgres.config().provision(Provision::Check);
    let Err(StoreError::Refused { what }) = PostgresStore::start(check()).await else {
        panic!("there is no schema yet");
    };
    assert!(what.contains("migration 1 (queues)"), "{what}");
    let migrations = check().migrations().expect("plain names");
    let made = connection().await.execute(&*migrations).await;
    made.expect("the text is complete");
    PostgresStore::start(check())
        .await
        .expect("all is there")
        .close()
        .await;
    postgres.open().await.close().await;
    postgres.clean_up().await;
}

#[tokio::test]
async fn a_commit_that_does_not_wait_for_the_disk_is_refused_unless_stated() {
    use laneway::store::Durability;
    let postgres = Postgres::new();
    let separator = if url().contains('?') { '&' } else { '?' };
    let weak = || {
        let url = format!("{}{separator}options=-c%20synchronous_commit%3Doff", url());
        PostgresConfig::at(url).schema(&postgres.schema)
    };
    let Err(StoreError::Refused { what }) = PostgresStore::start(weak()).await else {
        panic!("commits do not wait");
    };
    assert!(what.contains("synchronous_commit = off"), "{what}");
    let stated = weak().durability(Durability::AcceptLossAtPowerFailure);
    PostgresStore::start(stated)
        .await
        .expect("stated")
        .close()
        .await;
    postgres.clean_up().await;
}

#[tokio::test]
async fn an_open_transaction_of_one_key_does_not_hide_what_comes_later_of_another() {
    let postgres = Postgres::new();
    let store = postgres.open().await;
    store.declare(&queue()).await.expect("declares");
    let lease = store
        .take("q", Shard(0), MemberId::unique(), Duration::from_secs(60))
        .await;
    let lease = lease.expect("answers").expect("it is free");
    let mut open = store.begin().await.expect("begins");
    let early = store
        .enqueue_in(&mut open, vec![message("a", "early")])
        .await;
    let later = store.enqueue(vec![message("b", "later")]).await;
    later.expect("stores").committed();
    let bodies = async || {
        let read = store.read(&lease, &Window::of(9)).await.expect("reads");
        read.into_iter()
            .map(|m| m.envelope.body)
            .collect::<Vec<_>>()
    };
    assert_eq!(bodies().await, ["later"]);
    open.commit().await.expect("commits");
    early.expect("stores").committed();
    // It is read although its place is below one that was read before.
    assert_eq!(bodies().await, ["early", "later"]);
    store.close().await;
    postgres.clean_up().await;
}

#[tokio::test]
async fn an_older_snapshot_is_refused() {
    let postgres = Postgres::new();
    let store = postgres.open().await;
    store.declare(&queue()).await.expect("declares");
    let mut transaction = store.begin().await.expect("begins");
    (&mut *transaction)
        .execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        .await
        .expect("sets");
    let refused = store
        .enqueue_in(&mut transaction, vec![message("a", "x")])
        .await;
    let Err(StoreError::Refused { what }) = refused else {
        panic!("{refused:?}");
    };
    assert!(what.contains("READ COMMITTED"), "{what}");
    drop(transaction);
    store.close().await;
    postgres.clean_up().await;
}

/// It waits in the server, where nobody else would end it. Who stores after it waits behind it: if it were stored, it
/// would stand before that.
#[tokio::test]
async fn what_was_given_up_while_it_waited_is_not_stored_later() {
    let postgres = Postgres::new();
    let config = postgres.config().timeout(Duration::from_secs(1));
    let hasty = PostgresStore::start(config).await.expect("starts");
    let store = postgres.open().await;
    for node in [&hasty, &store] {
        node.declare(&queue()).await.expect("declares");
    }
    let mut open = store.begin().await.expect("begins");
    let first = store
        .enqueue_in(&mut open, vec![message("a", "first")])
        .await;
    let given_up = hasty.enqueue(vec![message("a", "given up")]).await;
    assert!(given_up.is_err_and(|error| error.is_retryable()));
    open.commit().await.expect("commits");
    first.expect("stores").committed();
    let last = store.enqueue(vec![message("a", "last")]).await;
    last.expect("stores").committed();
    assert_eq!(store.count("q").await.expect("counted").backlog, 2);
    hasty.close().await;
    store.close().await;
    postgres.clean_up().await;
}

/// A copy is not seen as new because its statement looks through an older snapshot.
#[tokio::test]
async fn another_default_isolation_is_not_ours() {
    let postgres = Postgres::new();
    let (url, default) = (
        url(),
        "options[default_transaction_isolation]=repeatable%5C%20read",
    );
    let url = match url.contains('?') {
        true => format!("{url}&{default}"),
        false => format!("{url}?{default}"),
    };
    let store = PostgresStore::start(PostgresConfig::at(url).schema(&postgres.schema)).await;
    let store = store.expect("starts");
    let mut transaction = store.begin().await.expect("begins");
    let shown: String = sqlx::query_scalar("SELECT current_setting('transaction_isolation')")
        .fetch_one(&mut *transaction)
        .await
        .expect("shown");
    assert_eq!(shown, "read committed");
    transaction.rollback().await.expect("rolls back");
    store.close().await;
    postgres.clean_up().await;
}

#[tokio::test]
async fn another_node_hears_of_a_commit() {
    let postgres = Postgres::new();
    let (here, there) = (postgres.open().await, postgres.open().await);
    for store in [&here, &there] {
        store.declare(&queue()).await.expect("declares");
    }
    let mut hints = there.watch("q");
    // The listener starts in the background: until it listens, hints are lost, as they may be.
    let hint = async {
        let heard = hints.next();
        tokio::pin!(heard);
        loop {
            here.enqueue(vec![message("a", "x")])
                .await
                .expect("stores")
                .committed();
            if tokio::time::timeout(Duration::from_millis(50), &mut heard)
                .await
                .is_ok()
            {
                return;
            }
        }
    };
    let hint = tokio::time::timeout(Duration::from_secs(20), hint).await;
    hint.expect("a hint");
    here.close().await;
    there.close().await;
    postgres.clean_up().await;
}

#[tokio::test]
async fn an_error_holds_no_password() {
    let wrong = "postgres://somebody:marked-secret@127.0.0.1:1/none";
    let error =
        PostgresStore::start(PostgresConfig::at(wrong).timeout(Duration::from_secs(1))).await;
    let error = error.expect_err("nobody listens there");
    assert!(error.is_retryable());
    let shown = format!("{error} {error:?} {:?}", PostgresConfig::at(wrong));
    assert!(!shown.contains("marked"), "{shown}");
}

#[tokio::test]
async fn members_on_two_nodes_hear_each_other_and_old_rows_go_a_few_at_a_time() {
    let postgres = Postgres::new();
    let (here, there) = (postgres.open().await, postgres.open().await);
    for store in [&here, &there] {
        store.declare(&queue()).await.expect("declares");
    }
    let said = |member| Announcement {
        member: MemberId::from_u128(member),
        sequence: 1,
        of: 1,
        shards: Default::default(),
        willing: true,
    };
    let minute = Duration::from_secs(60);
    for member in 0..20 {
        let announced = here.announce("q", &said(member), minute).await;
        announced.expect("announces");
    }
    let mut outside = connection().await;
    let age = format!(
        "UPDATE {}.members SET expires = now() - interval '1 hour' WHERE member LIKE '%0'",
        postgres.schema
    );
    outside.execute(&*age).await.expect("ages");
    let age = format!(
        "UPDATE {}.members SET expires = now() - interval '1 hour' WHERE member > $1",
        postgres.schema
    );
    let aged = sqlx::query(&age)
        .bind(MemberId::from_u128(1).to_string())
        .execute(&mut outside)
        .await
        .expect("ages");
    assert_eq!(aged.rows_affected(), 18);
    let count = format!("SELECT count(*) FROM {}.members", postgres.schema);
    let mut before: i64 = 20;
    while before > 1 {
        let heard = there.announcements("q").await.expect("answers");
        assert_eq!(heard, [said(1)]);
        let left: i64 = sqlx::query_scalar(&count)
            .fetch_one(&mut outside)
            .await
            .expect("counts");
        assert!(left < before && before - left < 10, "{before}, then {left}");
        before = left;
    }
    here.close().await;
    there.close().await;
    postgres.clean_up().await;
}

/// A trigger sees what the commit of each statement will wait for.
#[tokio::test]
async fn a_start_does_not_wait_for_the_disk_and_everything_else_does() {
    let postgres = Postgres::new();
    let store = postgres.open().await;
    store.declare(&queue()).await.expect("declares");
    let mut outside = connection().await;
    let spy = "CREATE TABLE {s}.seen (what text, waits text);
        CREATE FUNCTION {s}.look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO {s}.seen VALUES (TG_OP, current_setting('synchronous_commit'));
            RETURN COALESCE(NEW, OLD); END $$;
        CREATE TRIGGER look BEFORE INSERT OR UPDATE OR DELETE ON {s}.messages
            FOR EACH ROW EXECUTE FUNCTION {s}.look()";
    let spy = spy.replace("{s}", &postgres.schema);
    outside.execute(&*spy).await.expect("watches");

    let minute = Duration::from_secs(60);
    let lease = store.take("q", Shard(0), MemberId::unique(), minute).await;
    let lease = lease.expect("answers").expect("it is free");
    let batch = (0..4).map(|_| message("a", "x")).collect();
    store.enqueue(batch).await.expect("stores").committed();
    let read = store.read(&lease, &Window::of(9)).await.expect("reads");
    // More often than the pool has connections, so that each of them has started and then settles.
    for message in &read {
        let start = Start {
            sequence: message.sequence,
            attempt: 1,
        };
        let started = store.start(&lease, &[start]).await;
        started.expect("starts");
    }
    for message in &read {
        let handled = Settlement {
            sequence: message.sequence,
            ending: Ending::Handled,
        };
        let settled = store.settle(&lease, &[handled]).await;
        assert_eq!(settled.expect("settles").settled, 1);
    }
    let seen = format!("SELECT what, waits FROM {}.seen", postgres.schema);
    let seen: Vec<(String, String)> = sqlx::query_as(&seen)
        .fetch_all(&mut outside)
        .await
        .expect("has seen");
    let seen: Vec<_> = seen
        .iter()
        .map(|(what, waits)| (&**what, &**waits))
        .collect();
    let each = [("INSERT", "on"), ("UPDATE", "off"), ("DELETE", "on")];
    let expected: Vec<_> = each.into_iter().flat_map(|one| [one; 4]).collect();
    assert_eq!(seen, expected);
    store.close().await;
    postgres.clean_up().await;
}

/// The server ends every connection of the store, again and again, while it works.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_the_server_ends_cost_retries_and_no_message() {
    let postgres = Postgres::new();
    let store = postgres.open().await;
    store.declare(&queue()).await.expect("declares");
    let owner = MemberId::unique();
    let minute = Duration::from_secs(60);
    let lease = store.take("q", Shard(0), owner, minute).await;
    let lease = lease.expect("answers").expect("it is free");
    let working = std::sync::atomic::AtomicBool::new(true);
    let work = async {
        let mut retries = 0;
        let (mut stored, mut settled) = (0, 0);
        while stored < 300 || settled < 300 {
            if stored < 300 {
                let mut message = message("a", "x");
                // With an id, so that a repetition after an unknown outcome is recognised.
                message.envelope.id = Some(format!("m{stored}").as_str().into());
                match store.enqueue(vec![message]).await {
                    Ok(enqueued) => {
                        enqueued.committed();
                        stored += 1;
                    }
                    Err(error) => {
                        assert!(error.is_retryable(), "{error:?}");
                        retries += 1;
                    }
                }
            }
            let done = async {
                let lost = store.renew(std::slice::from_ref(&lease), minute).await?;
                assert!(lost.is_empty());
                let read = store.read(&lease, &Window::of(3)).await?;
                let endings: Vec<_> = read
                    .iter()
                    .map(|message| Settlement {
                        sequence: message.sequence,
                        ending: Ending::Handled,
                    })
                    .collect();
                // Each is settled once: after an unknown outcome it may be gone.
                let _ = store.settle(&lease, &endings).await?;
                Ok::<_, StoreError>(())
            };
            if let Err(error) = done.await {
                assert!(error.is_retryable(), "{error:?}");
                retries += 1;
            }
            if let Ok(counts) = store.count("q").await {
                settled = stored - counts.backlog.min(stored);
            }
        }
        working.store(false, std::sync::atomic::Ordering::Relaxed);
        retries
    };
    let cut = async {
        let mut killer = connection().await;
        let mut killed = 0_usize;
        while working.load(std::sync::atomic::Ordering::Relaxed) {
            // Those of this schema, by their last statement.
            let ended = sqlx::query(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                 WHERE query LIKE '%' || $1 || '.%' AND pid <> pg_backend_pid()",
            )
            .bind(&postgres.schema)
            .fetch_all(&mut killer)
            .await
            .expect("ends connections");
            killed += ended.len();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        killed
    };
    let work = tokio::time::timeout(minute, work);
    let (retries, killed) = futures::join!(work, cut);
    retries.expect("it ends");
    assert!(killed > 3, "{killed}");
    let counts = store.count("q").await.expect("counts");
    assert_eq!(counts, Counts::default());
    let pruned = store.prune(Duration::ZERO, 1000).await.expect("prunes");
    assert_eq!(pruned, 300);
    store.close().await;
    postgres.clean_up().await;
}
