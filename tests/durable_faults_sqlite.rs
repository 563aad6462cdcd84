//! Durable queues while the SQLite file is locked by somebody else, and while the disk is full: nothing is lost, nothing
//! runs twice, effects come once, and everything goes on afterwards. Case D4.
#![cfg(all(feature = "sqlite", feature = "postgres"))]

#[path = "support/effects.rs"]
mod effects;
#[path = "support/stores.rs"]
mod stores;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway::prelude::*;
use laneway::store::Store;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use effects::App;
use stores::Database;

/// Longer than any operation of the store waits.
const OUTAGE: Duration = Duration::from_secs(6);
const DRAIN: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(60);
const KEYS: u64 = 4;

/// Messages of each key before the fault, and as many while it is there.
fn half() -> u64 {
    match std::env::var_os("LANEWAY_SOAK") {
        Some(_) => 300,
        None => 15,
    }
}

macro_rules! work {
    ($name:ident, $text:literal) => {
        #[derive(Debug, Clone, Serialize, Deserialize)]
        struct $name {
            key: u64,
            number: u64,
        }

        impl Message for $name {
            const TYPE: &'static str = $text;
        }

        impl Keyed for $name {
            fn key(&self) -> OrderingKey {
                self.key.into()
            }
        }
    };
}

work!(Plain, "plain");
work!(Written, "written");

/// The numbers of each key, in order.
#[derive(Default)]
struct Seen {
    plain: Mutex<BTreeMap<u64, Vec<u64>>>,
    changed: Notify,
}

struct Stand {
    database: Database,
    bus: Bus,
    app: App,
    seen: Arc<Seen>,
}

impl Stand {
    async fn new() -> Self {
        let database = Database::sqlite();
        let seen = Arc::new(Seen::default());
        let taking = Arc::clone(&seen);
        let plain = move |plain: Plain, _: Context| {
            let taking = Arc::clone(&taking);
            async move {
                let mut numbers = taking.plain.lock().expect("unharmed");
                numbers.entry(plain.key).or_default().push(plain.number);
                taking.changed.notify_one();
                Ok::<_, Failure>(())
            }
        };
        let written = async |written: Written, cx: Context| {
            let mut own = cx.transaction::<sqlx::Sqlite>().await?;
            sqlx::query("INSERT INTO effects (key, number) VALUES (?, ?)")
                .bind(written.key as i64)
                .bind(written.number as i64)
                .execute(&mut *own)
                .await?;
            Ok::<_, Failure>(())
        };
        let app = App::of(&database).await;
        app.run("CREATE TABLE effects (place integer PRIMARY KEY, key bigint, number bigint)")
            .await;
        app.run("CREATE TABLE ballast (bytes blob)").await;
        let bus = database
            .under(Bus::builder())
            .keyed::<Plain>()
            .keyed::<Written>()
            .handler::<Plain, _>(plain)
            .handler::<Written, _>(written)
            .local_queue("plain", |q| q.durable().partitioned(4))
            .local_queue("written", |q| q.durable().partitioned(4).transactional())
            .build()
            .expect("a valid bus")
            .start()
            .await
            .expect("started");
        Self {
            database,
            bus,
            app,
            seen,
        }
    }

    /// Publishes these numbers of each key, one after the other.
    async fn publish(&self, numbers: std::ops::RangeInclusive<u64>) {
        let publishing = (0..KEYS).map(|key| {
            let numbers = numbers.clone();
            async move {
                for number in numbers {
                    let (plain, written) = (Plain { key, number }, Written { key, number });
                    self.bus.publish(&plain).await.expect("stored");
                    self.bus.publish(&written).await.expect("stored");
                }
            }
        });
        futures::future::join_all(publishing).await;
    }

    async fn reach(&self, plain: u64) {
        let all = async {
            while {
                let numbers = self.seen.plain.lock().expect("unharmed");
                (numbers.values().map(Vec::len).sum::<usize>() as u64) < plain
            } {
                self.seen.changed.notified().await;
            }
        };
        let in_time = tokio::time::timeout(PATIENCE, all).await;
        in_time.expect("all in time");
    }

    async fn end(self) {
        self.reach(KEYS * 2 * half()).await;
        let store = self.bus.store().expect("it runs");
        for queue in ["plain", "written"] {
            settled(&*store, queue).await;
            assert_eq!(store.count(queue).await.expect("counted").dead, 0);
        }
        let expected: Vec<u64> = (1..=2 * half()).collect();
        for numbers in self.seen.plain.lock().expect("unharmed").values() {
            assert_eq!(*numbers, expected, "in order, and none twice");
        }
        for key in 0..KEYS {
            let text = format!("SELECT number FROM effects WHERE key = {key} ORDER BY place");
            let effects = self.app.numbers(&text).await.into_iter();
            let effects: Vec<_> = effects.map(|number| number as u64).collect();
            assert_eq!(effects, expected, "effects in order and once");
        }
        assert!(self.bus.shutdown(DRAIN).await.is_clean());
        drop(store);
        self.app.close().await;
        self.database.clean_up().await;
    }
}

/// Waits until a queue is empty. The store tells nobody when it is.
async fn settled(store: &dyn Store, queue: &str) {
    let empty = async {
        while store.count(queue).await.expect("counted").backlog > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let in_time = tokio::time::timeout(PATIENCE, empty).await;
    in_time.expect("the queue is empty in time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_somebody_else_has_locked_is_waited_for() {
    let stand = Stand::new().await;
    stand.publish(1..=half()).await;
    let locking = async {
        let App::Sqlite(pool) = &stand.app else {
            panic!("it is one")
        };
        let locked = pool.begin_with("BEGIN EXCLUSIVE").await.expect("locked");
        // The fault itself.
        tokio::time::sleep(OUTAGE).await;
        locked.rollback().await.expect("unlocked");
    };
    futures::join!(locking, stand.publish(half() + 1..=2 * half()));
    stand.end().await;
}

/// The largest file that this process may write; none may be larger from now on.
#[cfg(target_os = "linux")]
fn limit_files(bytes: &str) {
    let limited = std::process::Command::new("prlimit")
        .arg(format!("--pid={}", std::process::id()))
        .arg(format!("--fsize={bytes}:"))
        .status();
    assert!(limited.expect("prlimit, of util-linux").success());
}

/// A disk that is full is, for one process, a limit of the size of its files. In a process of its own, which must not
/// be ended by the signal for that.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_is_full_is_waited_for() {
    if std::env::var_os("LANEWAY_FULL_DISK").is_none() {
        let own = std::env::current_exe().expect("a test has a path");
        let mut child = std::process::Command::new("sh");
        child
            .args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""])
            .arg(own)
            .args([
                "--exact",
                "a_disk_that_is_full_is_waited_for",
                "--nocapture",
            ])
            .env("LANEWAY_FULL_DISK", "1");
        let status = child.status().expect("it runs");
        assert!(status.success(), "{status}");
        return;
    }
    let stand = Stand::new().await;
    stand.publish(1..=half()).await;
    let filling = async {
        let log = stand.database.file().with_extension("db-wal");
        let size = std::fs::metadata(log).expect("there is a log").len();
        limit_files(&size.to_string());
        // Full when nobody can write any more.
        let App::Sqlite(pool) = &stand.app else {
            panic!("it is one")
        };
        while sqlx::query("INSERT INTO ballast VALUES (zeroblob(65536))")
            .execute(pool)
            .await
            .is_ok()
        {}
        // The fault itself.
        tokio::time::sleep(OUTAGE).await;
        limit_files("unlimited");
    };
    futures::join!(filling, stand.publish(half() + 1..=2 * half()));
    stand.end().await;
}
