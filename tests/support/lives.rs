//! Lives of a program with durable queues, each a process of its own: the test program started again, to run one test.
//!
//! A test file has `lives::one_life!();`, and starts [`Life`]s. A life handles [`Step`]s (and [`Loose`] ones, without
//! order, and [`Seed`]s, which cascade), writes each run into the ledger of the folder, and drains on SIGTERM.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use laneway::actors::{Envelope, ShardCount};
use laneway::prelude::*;
use laneway::store::postgres::{PostgresConfig, PostgresStore};
use laneway::store::sqlite::{SqliteConfig, SqliteStore};
use laneway::store::{NewMessage, QueueIdentity, QueueOrder, Store};
use laneway::testing::OrderLedger;
use laneway::{BusBuilder, LocalQueueBuilder, WithKey};
use serde::{Deserialize, Serialize};
use sqlx::{Connection as _, PgConnection, Postgres, SqliteConnection};

use crate::job::Job;
use crate::stores::Database;

/// Handled in order within its key.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Step {
    pub key: u64,
    pub number: u64,
}

impl Message for Step {
    const TYPE: &'static str = "step";
}

impl Keyed for Step {
    fn key(&self) -> OrderingKey {
        self.key.into()
    }
}

/// Handled in no order.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Loose(pub u64);

impl Message for Loose {
    const TYPE: &'static str = "loose";
}

/// Becomes so many steps of key 0, numbered from 1.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Seed(pub u64);

impl Message for Seed {
    const TYPE: &'static str = "seed";
}

/// Shards of the steps' queue.
pub const SHARDS: u32 = 4;
/// How long a life drains.
pub const DRAIN: Duration = Duration::from_secs(3);
const PATIENCE: Duration = Duration::from_secs(120);

pub fn soak() -> bool {
    std::env::var_os("LANEWAY_SOAK").is_some()
}

/// Where the database is, for whoever opens it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Place {
    Sqlite(PathBuf),
    Postgres { url: String, schema: String },
}

impl Place {
    pub fn of(database: &Database) -> Self {
        match database {
            Database::Sqlite(_) => Self::Sqlite(database.file()),
            Database::Postgres { url, schema } => Self::Postgres {
                url: url.clone(),
                schema: schema.clone(),
            },
        }
    }

    fn under(&self, builder: BusBuilder) -> BusBuilder {
        match self {
            Self::Sqlite(file) => builder.store(SqliteConfig::file(file)),
            Self::Postgres { url, schema } => builder.store(Self::config(url, schema)),
        }
    }

    /// The server has room for all nodes of all tests.
    fn config(url: &str, schema: &str) -> PostgresConfig {
        PostgresConfig::at(url)
            .schema(schema)
            .work_connections(NonZeroU32::new(3).expect("not zero"))
    }

    /// The store by itself, without a bus, with the queues of a life declared. On SQLite only while no life has it.
    pub async fn open(&self) -> Arc<dyn Store> {
        let store: Arc<dyn Store> = match self {
            Self::Sqlite(file) => {
                let store = SqliteStore::start(SqliteConfig::file(file)).await;
                Arc::new(store.expect("opened"))
            }
            Self::Postgres { url, schema } => {
                let store = PostgresStore::start(Self::config(url, schema)).await;
                Arc::new(store.expect("opened"))
            }
        };
        let ordered = QueueOrder::Ordered(ShardCount::new(SHARDS).expect("allowed"));
        let queues = [
            (Step::TYPE, ordered),
            (Loose::TYPE, QueueOrder::Unordered),
            (Seed::TYPE, QueueOrder::Unordered),
        ];
        let queues = queues.map(|(name, order)| QueueIdentity {
            name: name.into(),
            order,
        });
        store.declare(&queues).await.expect("declared");
        store
    }

    /// Creates the table of the effects of handlers in transactions.
    pub async fn create_effects(&self) {
        let Self::Postgres { url, .. } = self else {
            panic!("only on PostgreSQL")
        };
        let mut connection = PgConnection::connect(url).await.expect("a server");
        let create = self.fill("CREATE TABLE {t}effects (number bigint, life text)");
        let created = sqlx::query(&create).execute(&mut connection).await;
        created.expect("created");
    }

    /// With the names of the store's tables.
    fn fill(&self, text: &str) -> String {
        match self {
            Self::Sqlite(_) => text.replace("{t}", "laneway_"),
            Self::Postgres { schema, .. } => text.replace("{t}", &format!("{schema}.")),
        }
    }

    /// Looks into the tables, past the store.
    pub async fn look(&self) -> Look {
        let connection = match self {
            Self::Sqlite(file) => {
                let url = format!("sqlite:{}", file.display());
                let connection = SqliteConnection::connect(&url).await;
                AnyConnection::Sqlite(connection.expect("opened"))
            }
            Self::Postgres { url, .. } => {
                let connection = PgConnection::connect(url).await;
                AnyConnection::Postgres(connection.expect("a server"))
            }
        };
        Look {
            place: self.clone(),
            connection,
        }
    }
}

/// A look into the tables, past the store.
pub struct Look {
    place: Place,
    connection: AnyConnection,
}

enum AnyConnection {
    Sqlite(SqliteConnection),
    Postgres(PgConnection),
}

impl Look {
    /// The number that a query finds; `{t}` is what the names of the tables begin with.
    pub async fn number(&mut self, query: &str) -> i64 {
        let query = self.place.fill(query);
        match &mut self.connection {
            AnyConnection::Sqlite(connection) => sqlx::query_scalar(&query)
                .fetch_one(connection)
                .await
                .expect("read"),
            AnyConnection::Postgres(connection) => sqlx::query_scalar(&query)
                .fetch_one(connection)
                .await
                .expect("read"),
        }
    }

    /// Waits until a query finds this number: tables tell nobody when they change.
    pub async fn until(&mut self, query: &str, number: i64) {
        let began = std::time::Instant::now();
        loop {
            let found = self.number(query).await;
            if found == number {
                return;
            }
            assert!(
                began.elapsed() < PATIENCE,
                "waited in vain for {number}, found {found}: {query}"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Messages of a queue that are not settled.
    pub async fn until_backlog(&mut self, queue: &str, count: i64) {
        let query = format!(
            "SELECT count(*) FROM {{t}}messages AS m JOIN {{t}}queues AS q ON q.number = m.queue WHERE q.name = '{queue}'"
        );
        self.until(&query, count).await;
    }
}

/// A message to be stored while nobody runs.
pub fn new_step(key: u64, number: u64) -> NewMessage {
    let step = Step { key, number };
    NewMessage {
        queue: Step::TYPE.into(),
        key: Some(step.key()),
        envelope: Envelope::of(&step, Encoding::MessagePack).expect("encoded"),
        due: None,
    }
}

pub fn new_loose(number: u64) -> NewMessage {
    NewMessage {
        queue: Loose::TYPE.into(),
        key: None,
        envelope: Envelope::of(&Loose(number), Encoding::MessagePack).expect("encoded"),
        due: None,
    }
}

pub fn new_seed(count: u64) -> NewMessage {
    NewMessage {
        queue: Seed::TYPE.into(),
        key: None,
        envelope: Envelope::of(&Seed(count), Encoding::MessagePack).expect("encoded"),
        due: None,
    }
}

/// One process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Life {
    pub place: Place,
    /// For the ledger, and the files that let handlers go on.
    pub folder: PathBuf,
    pub name: String,
    /// Steps with this number end the process.
    pub kills: Option<u64>,
    /// Steps with this number wait until `go-<name>` is in the folder.
    pub waits: Option<u64>,
    /// How long each handler takes.
    pub takes: Duration,
    /// Attempts that a message has.
    pub attempts: u32,
    /// Handlers have a transaction; those of steps write into the table of effects.
    pub transactional: bool,
}

/// Names the variable with which a test program is one life.
pub const LIFE: &str = "LANEWAY_TEST_LIFE";

/// The test that a life is. Without the variable it is none, and ends at once.
#[macro_export]
macro_rules! one_life {
    () => {
        #[test]
        fn one_life() {
            if let Ok(life) = std::env::var($crate::lives::LIFE) {
                let life: $crate::lives::Life = serde_json::from_str(&life).expect("it is ours");
                let runtime = tokio::runtime::Runtime::new().expect("a runtime starts");
                runtime.block_on(life.live());
            }
        }
    };
}

impl Life {
    pub fn new(place: &Place, folder: &Path, name: &str) -> Self {
        Self {
            place: place.clone(),
            folder: folder.to_owned(),
            name: name.to_owned(),
            kills: None,
            waits: None,
            takes: Duration::ZERO,
            attempts: 3,
            transactional: false,
        }
    }

    /// Starts it.
    pub fn start(&self) -> Job {
        let mut command = Command::new(std::env::current_exe().expect("a test has a path"));
        command
            .args(["--exact", "one_life", "--nocapture"])
            .env(LIFE, serde_json::to_string(self).expect("text"));
        Job::running(command)
    }

    fn gate(&self) -> PathBuf {
        self.folder.join(format!("go-{}", self.name))
    }

    /// Is there once the life knows that it is to end.
    pub fn told(&self) -> PathBuf {
        self.folder.join(format!("told-{}", self.name))
    }

    /// Lets the handlers that wait go on.
    pub fn let_go(&self) {
        std::fs::write(self.gate(), "").expect("written");
    }

    /// Handles until SIGTERM.
    pub async fn live(self) {
        let ledger = OrderLedger::in_folder(&self.folder).expect("a folder");
        let life = Arc::new(self);
        let (transactional, attempts) = (life.transactional, life.attempts);
        let bus = life
            .place
            .under(Bus::builder())
            .keyed::<Step>()
            .handler::<Step, _>(steps(&life, &ledger))
            .handler::<Loose, _>(loose(&life, &ledger))
            .handler::<Seed, _>(|Seed(count): Seed, _: Context| async move {
                let step = |number| WithKey::new(Step { key: 0, number }, 0_u64);
                Ok((1..=count).map(step).collect::<Vec<_>>())
            })
            .local_queues(|q| {
                let q = q.durable().max_delivery_attempts(attempts);
                let q = q.backoff(Backoff::constant(Duration::from_millis(1)));
                if transactional { q.transactional() } else { q }
            })
            .local_queue(Step::TYPE, ordered_steps)
            .drain_deadline(DRAIN)
            .build()
            .expect("a valid bus")
            .start()
            .await
            .expect("started");
        let signal = async {
            shutdown_signal().await;
            std::fs::write(life.told(), "").expect("written");
        };
        let ended = bus.run_until(signal).await;
        ended.expect("no endpoint failed");
    }

    async fn pass_gate(&self, number: u64) {
        if self.waits == Some(number) {
            while !self.gate().exists() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
}

/// The queue of the steps, in every life and beside it.
pub fn ordered_steps(queue: LocalQueueBuilder) -> LocalQueueBuilder {
    queue.partitioned(8).shards(SHARDS)
}

fn steps(life: &Arc<Life>, ledger: &OrderLedger) -> impl Handler<Step> + use<> {
    let (life, ledger) = (Arc::clone(life), ledger.clone());
    move |step: Step, cx: Context| {
        let (life, ledger) = (Arc::clone(&life), ledger.clone());
        async move {
            let run = ledger.run(&step.key.to_string(), step.number, cx.attempt());
            if life.kills == Some(step.number) {
                kill_oneself().await;
            }
            if life.transactional {
                let mut transaction = cx.transaction::<Postgres>().await?;
                let insert = life.place.fill("INSERT INTO {t}effects VALUES ($1, $2)");
                sqlx::query(&insert)
                    .bind(step.number as i64)
                    .bind(&life.name)
                    .execute(&mut *transaction)
                    .await?;
            }
            life.pass_gate(step.number).await;
            tokio::time::sleep(life.takes).await;
            run.end(true);
            Ok(())
        }
    }
}

fn loose(life: &Arc<Life>, ledger: &OrderLedger) -> impl Handler<Loose> + use<> {
    let (life, ledger) = (Arc::clone(life), ledger.clone());
    move |Loose(number): Loose, cx: Context| {
        let (life, ledger) = (Arc::clone(&life), ledger.clone());
        async move {
            // A key for each: nothing is in order here.
            let run = ledger.run(&format!("loose-{number}"), number, cx.attempt());
            tokio::time::sleep(life.takes).await;
            run.end(true);
            Ok(())
        }
    }
}

async fn kill_oneself() {
    let id = std::process::id().to_string();
    let _ = Command::new("kill").args(["-KILL", &id]).status();
    // Until the signal has come.
    std::future::pending::<()>().await;
}
