//! SQLite keeps the promises of the store, and those of a file.
#![cfg(feature = "sqlite")]

use std::collections::BTreeSet;
use std::task::Poll;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use laneway::actors::port::MemberId;
use laneway::actors::{Envelope, ShardCount};
use laneway::store::sqlite::{SqliteConfig, SqliteStore};
use laneway::store::{
    Ending, NewMessage, Provision, QueueIdentity, QueueOrder, Settlement, Shard, Start, Store as _,
    StoreError, TransactionalStore as _, Window,
};
use laneway::testing::conformance::store::StoreAdapter;
use sqlx::{ConnectOptions as _, Connection as _, Executor as _};

struct Sqlite {
    folder: tempfile::TempDir,
}

impl Sqlite {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        Self { folder }
    }

    fn config(&self) -> SqliteConfig {
        SqliteConfig::file(self.folder.path().join("store.db"))
    }
}

impl StoreAdapter for Sqlite {
    type Store = SqliteStore;

    fn open(&self) -> BoxFuture<'_, SqliteStore> {
        async move { SqliteStore::start(self.config()).await.expect("starts") }.boxed()
    }

    fn break_headers<'a>(&'a self, table: &'a str, id: &'a str) -> BoxFuture<'a, ()> {
        async move {
            let mut connection = sqlx::sqlite::SqliteConnectOptions::new()
                .filename(self.folder.path().join("store.db"))
                .connect()
                .await
                .expect("connects");
            sqlx::query(&format!(
                "UPDATE laneway_{table} SET headers = '{{' WHERE id = ?"
            ))
            .bind(id)
            .execute(&mut connection)
            .await
            .expect("breaks");
            connection.close().await.expect("closes");
        }
        .boxed()
    }

    fn clean_up(&self) -> BoxFuture<'_, ()> {
        // The folder goes with the adapter.
        async {}.boxed()
    }
}

async fn sqlite() -> impl StoreAdapter {
    Sqlite::new()
}

laneway::store_conformance_suite!(sqlite);

#[tokio::test]
async fn a_second_store_on_the_file_is_refused_until_the_first_is_closed() {
    let sqlite = Sqlite::new();
    let first = sqlite.open().await;
    let second = SqliteStore::start(sqlite.config()).await;
    let Err(StoreError::Refused { what }) = second else {
        panic!("{second:?}");
    };
    assert!(what.contains("one process per file"), "{what}");
    first.close().await;
    let third = SqliteStore::start(sqlite.config()).await;
    third.expect("the file is free").close().await;
}

#[tokio::test]
async fn of_eight_starters_at_once_one_has_the_file() {
    let sqlite = Sqlite::new();
    let starts = (0..8).map(|_| SqliteStore::start(sqlite.config()));
    let started = futures::future::join_all(starts).await;
    let (there, refused): (Vec<_>, Vec<_>) = started.into_iter().partition(Result::is_ok);
    assert_eq!(there.len(), 1);
    for refused in refused {
        assert!(
            matches!(refused, Err(StoreError::Refused { .. })),
            "{refused:?}"
        );
    }
}

#[tokio::test]
async fn missing_tables_are_refused_by_name_and_can_be_made_by_hand() {
    let sqlite = Sqlite::new();
    let check = || sqlite.config().provision(Provision::Check);
    let Err(StoreError::Refused { what }) = SqliteStore::start(check()).await else {
        panic!("an empty file has no tables");
    };
    assert!(what.contains("migration 1 (queues)"), "{what}");
    let mut connection = sqlx::sqlite::SqliteConnectOptions::new()
        .filename(sqlite.folder.path().join("store.db"))
        .connect()
        .await
        .expect("connects");
    let migrations = check().migrations().expect("plain names");
    connection
        .execute(&*migrations)
        .await
        .expect("the text is complete");
    connection.close().await.expect("closes");
    SqliteStore::start(check())
        .await
        .expect("all is there")
        .close()
        .await;
    SqliteStore::start(sqlite.config())
        .await
        .expect("nothing to do");
}

/// A trigger sees what the commit of each statement will wait for, also after a start that was cancelled anywhere.
#[tokio::test]
async fn a_start_does_not_wait_for_the_disk_and_everything_else_does() {
    use laneway::store::Durability;
    for (durability, start, others) in [
        (Durability::Full, NORMAL, FULL),
        (Durability::AcceptLossAtPowerFailure, NORMAL, NORMAL),
    ] {
        let sqlite = Sqlite::new();
        let config = sqlite.config().durability(durability);
        let store = SqliteStore::start(config).await.expect("starts");
        let order = QueueOrder::Ordered(ShardCount::new(1).expect("allowed"));
        let queue = QueueIdentity {
            name: "q".into(),
            order,
        };
        store.declare(&[queue]).await.expect("declares");
        let mut outside = sqlx::sqlite::SqliteConnectOptions::new()
            .filename(sqlite.folder.path().join("store.db"))
            .connect()
            .await
            .expect("connects");
        let look = "CREATE TABLE seen (what TEXT, waits INTEGER);
            CREATE TRIGGER started AFTER UPDATE ON laneway_messages BEGIN
                INSERT INTO seen SELECT 'start', synchronous FROM pragma_synchronous; END;
            CREATE TRIGGER settled AFTER DELETE ON laneway_messages BEGIN
                INSERT INTO seen SELECT 'settle', synchronous FROM pragma_synchronous; END";
        outside.execute(look).await.expect("watches");

        let minute = Duration::from_secs(60);
        let lease = store.take("q", Shard(0), MemberId::unique(), minute).await;
        let lease = lease.expect("answers").expect("it is free");
        // How many polls a start takes is up to the threads; so until several were cut short, and one was not.
        let (mut cut_short, mut whole) = (0, 0);
        for round in 0.. {
            let polls = 1 + round % 12;
            let message = NewMessage {
                queue: "q".into(),
                key: None,
                envelope: Envelope::default(),
                due: None,
            };
            let stored = store.enqueue(vec![message]).await;
            stored.expect("stores").committed();
            let read = store.read(&lease, &Window::of(9)).await.expect("reads");
            let sequence = [read[0].sequence];
            let start = [Start {
                sequence: sequence[0],
                attempt: 1,
            }];
            let mut starting = store.start(&lease, &start);
            let mut started = None;
            for _ in 0..polls {
                // Polled each time that it was woken, so that it stops in another place each time.
                let mut polled = false;
                let step = std::future::poll_fn(|context| {
                    if std::mem::replace(&mut polled, true) {
                        return Poll::Ready(None);
                    }
                    starting.as_mut().poll(context).map(Some)
                });
                if let Some(answer) = step.await {
                    started = Some(answer);
                    break;
                }
            }
            drop(starting);
            let handled = Settlement {
                sequence: sequence[0],
                ending: Ending::Handled,
            };
            let settled = store.settle(&lease, &[handled]).await;
            assert_eq!(settled.expect("settles").settled, 1);
            match started {
                Some(started) => {
                    started.expect("starts");
                    whole += 1;
                }
                None => cut_short += 1,
            }
            if cut_short >= 8 && whole >= 1 {
                break;
            }
        }
        let seen: Vec<(String, i64)> = sqlx::query_as("SELECT DISTINCT what, waits FROM seen")
            .fetch_all(&mut outside)
            .await
            .expect("has seen");
        let seen: BTreeSet<_> = seen.iter().map(|(what, waits)| (&**what, *waits)).collect();
        assert_eq!(seen, BTreeSet::from([("start", start), ("settle", others)]));
        outside.close().await.expect("closes");
        store.close().await;
    }
}

/// As `PRAGMA synchronous` says it.
const NORMAL: i64 = 1;
const FULL: i64 = 2;

#[tokio::test]
async fn a_prefix_that_is_no_identifier_is_refused() {
    let refused = SqliteStore::start(Sqlite::new().config().table_prefix("a; --")).await;
    assert!(matches!(refused, Err(StoreError::Refused { .. })));
}

#[tokio::test]
async fn a_transaction_of_the_applications_own_connection_enqueues_and_one_with_an_old_snapshot_conflicts()
 {
    let sqlite = Sqlite::new();
    let store = sqlite.open().await;
    let queue = QueueIdentity {
        name: "q".into(),
        order: QueueOrder::Unordered,
    };
    store.declare(&[queue]).await.expect("declares");
    let message = || NewMessage {
        queue: "q".into(),
        key: None,
        envelope: Envelope::default(),
        due: None,
    };
    let mut own = sqlx::sqlite::SqliteConnectOptions::new()
        .filename(sqlite.folder.path().join("store.db"))
        .connect()
        .await
        .expect("connects");
    let mut transaction = own.begin().await.expect("begins");
    (&mut *transaction)
        .execute("CREATE TABLE orders (number INTEGER)")
        .await
        .expect("writes");
    let enqueued = store.enqueue_in(&mut transaction, vec![message()]).await;
    transaction.commit().await.expect("commits");
    enqueued.expect("stores").committed();
    assert_eq!(store.count("q").await.expect("counts").backlog, 1);

    let mut transaction = own.begin().await.expect("begins");
    (&mut *transaction)
        .execute("SELECT * FROM orders")
        .await
        .expect("reads");
    let other = store.enqueue(vec![message()]).await;
    other.expect("stores").committed();
    let conflict = store.enqueue_in(&mut transaction, vec![message()]).await;
    assert!(
        matches!(conflict, Err(StoreError::Conflict { .. })),
        "{conflict:?}"
    );
    transaction.rollback().await.expect("rolls back");
    assert_eq!(store.count("q").await.expect("counts").backlog, 2);
}
