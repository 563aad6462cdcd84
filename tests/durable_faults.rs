//! Durable queues while PostgreSQL is cut off or silent at each step, or ends connections at random: nothing is lost,
//! effects of transactional handlers exactly once, and everything goes on afterwards. Case D4.
//!
//! A **gate** in the database makes a statement of one step wait: so the fault meets exactly that step. What waits at
//! the gate takes place in the server after the fault has begun, and its outcome is unknown here.
#![cfg(all(feature = "sqlite", feature = "postgres"))]

#[path = "support/effects.rs"]
mod effects;
#[allow(dead_code, unreachable_pub, reason = "each test file uses its part")]
#[path = "support/proxy.rs"]
mod proxy;
#[path = "support/stores.rs"]
mod stores;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway::actors::EndpointState;
use laneway::prelude::*;
use laneway::store::Store;
use serde::{Deserialize, Serialize};
use sqlx::{Connection as _, Executor as _, PgConnection};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use effects::App;
use proxy::Proxy;
use stores::Database;

/// Longer than any operation of the store waits for an answer.
const OUTAGE: Duration = Duration::from_secs(6);
const DRAIN: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(60);
const KEYS: u64 = 8;

/// Messages of each key before the fault, and as many while it is there.
fn half() -> u64 {
    match std::env::var_os("LANEWAY_SOAK") {
        Some(_) => 500,
        None => 25,
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Work {
    key: u64,
    number: u64,
}

impl Message for Work {
    const TYPE: &'static str = "work";
}

impl Keyed for Work {
    fn key(&self) -> OrderingKey {
        self.key.into()
    }
}

/// What handlers have seen.
#[derive(Default)]
struct Seen {
    /// How often each message was run to its end.
    runs: Mutex<HashMap<(u64, u64), u32>>,
    /// The last number of each key, and what came after a higher one.
    last: Mutex<HashMap<u64, u64>>,
    wrong: Mutex<Vec<String>>,
    highest_attempt: AtomicU32,
    changed: Notify,
}

impl Seen {
    fn run(&self, work: &Work, cx: &Context) {
        self.highest_attempt
            .fetch_max(cx.attempt(), Ordering::SeqCst);
        let before = self
            .last
            .lock()
            .expect("unharmed")
            .insert(work.key, work.number);
        // An attempt again of the same one is in order.
        if before.is_some_and(|before| before > work.number) {
            self.wrong(format!("{work:?} after {before:?}"));
        }
        *self
            .runs
            .lock()
            .expect("unharmed")
            .entry((work.key, work.number))
            .or_default() += 1;
        self.changed.notify_one();
    }

    fn wrong(&self, what: String) {
        self.wrong.lock().expect("unharmed").push(what);
    }

    async fn reach(&self, messages: u64) {
        let reached = async {
            while (self.runs.lock().expect("unharmed").len() as u64) < messages {
                self.changed.notified().await;
            }
        };
        let in_time = tokio::time::timeout(PATIENCE, reached).await;
        let runs = self.runs.lock().expect("unharmed").len();
        assert!(in_time.is_ok(), "{runs} of {messages} messages in time");
    }

    /// Messages that ran more than once.
    fn again(&self) -> usize {
        let runs = self.runs.lock().expect("unharmed");
        runs.values().filter(|runs| **runs > 1).count()
    }
}

/// What is interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Publish,
    EnqueueIn,
    Read,
    Claim,
    Start,
    StartCommit,
    /// In the handler's transaction, before its commit.
    Handler,
    Commit,
    Settle,
    DeadLetter,
}

/// How the database is away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Connections break, and new ones too.
    Cut,
    /// Nobody answers.
    Stall,
    /// The server ends what waits at the gate, which is rolled back, and connections break.
    Terminated,
}

/// A bus on a schema of its own behind a proxy.
struct Stand {
    database: Database,
    schema: String,
    proxy: Proxy,
    bus: Bus,
    store: Arc<dyn Store>,
    seen: Arc<Seen>,
    app: App,
    /// Straight to the server.
    control: PgConnection,
    /// The same: in the other's transaction, what is seen of the server's activity does not change.
    looking: PgConnection,
    gate: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    Ordered,
    Unordered,
    Transactional,
}

/// Through the proxy.
fn url_of(proxy: &Proxy) -> String {
    let url = stores::postgres_url();
    let (scheme, rest) = url.split_once("://").expect("a URL");
    let (authority, path) = rest.split_once('/').expect("a database");
    let user = authority.rsplit_once('@').map(|(user, _)| user);
    let user = user.map_or_else(String::new, |user| format!("{user}@"));
    format!("{scheme}://{user}{}/{path}", proxy.address())
}

fn server() -> String {
    let url = stores::postgres_url();
    let (_, rest) = url.split_once("://").expect("a URL");
    let (authority, _) = rest.split_once('/').expect("a database");
    let host = authority
        .rsplit_once('@')
        .map_or(authority, |(_, host)| host);
    host.to_owned()
}

impl Stand {
    async fn new(queue: Queue, poison: bool) -> Self {
        let proxy = Proxy::to(&server());
        let database = Database::postgres_at(url_of(&proxy));
        let seen = Arc::new(Seen::default());
        let bus = start(&database, queue, Arc::clone(&seen), poison).await;
        Self {
            seen,
            ..Self::of(proxy, database, bus).await
        }
    }

    async fn of(proxy: Proxy, database: Database, bus: Bus) -> Self {
        let Database::Postgres { schema, .. } = &database else {
            panic!("it is one")
        };
        let schema = schema.clone();
        let app = App::at(&url_of(&proxy)).await;
        app.run(&format!(
            "CREATE TABLE {schema}.effects (place bigserial, key bigint, number bigint, n bigint); \
             CREATE TABLE {schema}.counters (key bigint PRIMARY KEY, n bigint NOT NULL); \
             CREATE TABLE {schema}.published (key bigint, number bigint, PRIMARY KEY (key, number));"
        ))
        .await;
        let url = stores::postgres_url();
        let control = PgConnection::connect(&url).await.expect("a server");
        let looking = PgConnection::connect(&url).await.expect("a server");
        Self {
            database,
            schema,
            proxy,
            store: bus.store().expect("it runs"),
            bus,
            seen: Arc::default(),
            app,
            control,
            looking,
            gate: i64::from(fastrand::i32(1..)),
        }
    }

    /// Puts a gate on a step, and closes it.
    async fn close_gate(&mut self, step: Step) {
        let (schema, gate) = (&self.schema, self.gate);
        let (event, table, when) = match step {
            Step::Publish | Step::EnqueueIn => ("BEFORE INSERT", "messages", ""),
            Step::Claim => ("BEFORE UPDATE OF claim", "messages", ""),
            Step::Start => ("BEFORE UPDATE OF attempts", "messages", ""),
            Step::StartCommit => (
                "AFTER UPDATE OF attempts",
                "messages",
                "DEFERRABLE INITIALLY DEFERRED",
            ),
            Step::Settle => ("BEFORE DELETE", "messages", ""),
            Step::DeadLetter => ("BEFORE INSERT", "dead_letters", ""),
            Step::Handler => ("BEFORE INSERT", "effects", ""),
            Step::Commit => ("AFTER INSERT", "effects", "DEFERRABLE INITIALLY DEFERRED"),
            Step::Read => {
                // A read has no trigger: its table is locked.
                let lock = format!("BEGIN; LOCK TABLE {schema}.leases IN ACCESS EXCLUSIVE MODE");
                self.control.execute(&*lock).await.expect("locked");
                return;
            }
        };
        let constraint = if when.is_empty() { "" } else { "CONSTRAINT" };
        let text = format!(
            "SELECT pg_advisory_lock({gate}); \
             CREATE FUNCTION {schema}.gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             PERFORM pg_advisory_xact_lock_shared({gate}); \
             IF TG_OP = 'DELETE' THEN RETURN OLD; END IF; RETURN NEW; END $$; \
             CREATE {constraint} TRIGGER gate {event} ON {schema}.{table} {when} \
             FOR EACH ROW EXECUTE FUNCTION {schema}.gate()"
        );
        self.control.execute(&*text).await.expect("made");
    }

    /// Who waits at the gate.
    fn waiting(&self, step: Step) -> String {
        match step {
            Step::Read => format!(
                "SELECT l.pid FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE NOT l.granted \
                 AND l.relation = to_regclass('{}.leases') AND a.query LIKE '%m.key_hash <> ALL%'",
                self.schema
            ),
            _ => format!(
                "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND classid = 0 \
                 AND objid = {} AND objsubid = 1",
                self.gate
            ),
        }
    }

    /// The database tells nobody who waits: it is asked until somebody does.
    async fn somebody_waits(&mut self, step: Step) {
        let waiting = self.waiting(step);
        let somebody = async {
            while (&mut self.looking)
                .fetch_optional(&*waiting)
                .await
                .expect("read")
                .is_none()
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let in_time = tokio::time::timeout(PATIENCE, somebody).await;
        in_time.expect("somebody comes to the gate");
    }

    async fn open_gate(&mut self, step: Step) {
        let text = match step {
            Step::Read => "ROLLBACK".to_owned(),
            _ => format!("SELECT pg_advisory_unlock({})", self.gate),
        };
        self.control.execute(&*text).await.expect("opened");
    }

    /// The database goes away while somebody is at this step, and comes back.
    async fn interrupt(&mut self, step: Step, fault: Fault) {
        self.somebody_waits(step).await;
        match fault {
            Fault::Stall => self.proxy.stall(),
            Fault::Cut | Fault::Terminated => {
                self.proxy.refuse(true);
                self.proxy.cut();
            }
        }
        if fault == Fault::Terminated {
            let text = format!(
                "SELECT pg_terminate_backend(pid) FROM ({}) AS w",
                self.waiting(step)
            );
            self.control.execute(&*text).await.expect("terminated");
        }
        self.open_gate(step).await;
        // The fault itself: so long nobody can reach the database.
        tokio::time::sleep(OUTAGE).await;
        self.proxy.resume();
        self.proxy.refuse(false);
    }

    /// Publishes in order within each key, half of it at once and the rest when told. An answer that is unknown is
    /// tried again only by the bus.
    fn publish(&self, step: Step, go: &watch::Sender<bool>) -> Vec<JoinHandle<()>> {
        let publishing = (0..KEYS).map(|key| {
            let (bus, app, mut go) = (self.bus.clone(), self.app.clone(), go.subscribe());
            let schema = self.schema.clone();
            tokio::spawn(async move {
                for number in 1..=2 * half() {
                    if number > half() {
                        let told = go.wait_for(|go| *go).await;
                        told.expect("the test is there");
                    }
                    let work = Work { key, number };
                    match step {
                        Step::EnqueueIn => enqueue(&bus, &app, &schema, work).await,
                        _ => bus.publish(&work).await.expect("stored"),
                    }
                }
            })
        });
        publishing.collect()
    }

    /// The effects of each key are all there, in order, and once.
    async fn assert_effects(&self) {
        let schema = &self.schema;
        let effects =
            format!("SELECT key * 1000000 + number FROM {schema}.effects ORDER BY key, n");
        let expected = (0..KEYS).flat_map(|key| (1..=2 * half()).map(move |n| (key, n)));
        let expected = expected.map(|(key, n)| (key * 1_000_000 + n) as i64);
        // Past the proxy.
        let app = App::at(&stores::postgres_url()).await;
        let found = app.numbers(&effects).await;
        assert_eq!(found, expected.collect::<Vec<_>>());
    }

    async fn end(self) {
        let report = self.bus.shutdown(DRAIN).await;
        assert!(report.is_clean(), "{report:?}");
        drop((self.store, self.bus));
        self.app.close().await;
        drop(self.proxy);
        self.database.clean_up().await;
    }
}

/// As an application does it: a transaction whose outcome is unknown is looked up by its own mark before it is tried
/// again.
async fn enqueue(bus: &Bus, app: &App, schema: &str, work: Work) {
    let App::Postgres(pool) = app else {
        panic!("it is one")
    };
    loop {
        let tried = async {
            let mut own = pool.begin().await?;
            let marked = sqlx::query(&format!(
                "INSERT INTO {schema}.published VALUES ($1, $2) ON CONFLICT DO NOTHING"
            ))
            .bind(work.key as i64)
            .bind(work.number as i64)
            .execute(&mut *own)
            .await?;
            if marked.rows_affected() == 0 {
                return Ok::<_, Box<dyn std::error::Error + Send + Sync>>(());
            }
            let enqueued = bus.enqueue_in(&mut own, work.clone()).await?;
            own.commit().await?;
            enqueued.committed();
            Ok(())
        };
        if tried.await.is_ok() {
            return;
        }
        // The database is away; asked again after a pause, as an application would.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The poison of each key, where there is any.
fn is_poison(number: u64) -> bool {
    number % 10 == 7
}

async fn start(database: &Database, queue: Queue, seen: Arc<Seen>, poison: bool) -> Bus {
    let effects = database.table("effects");
    let counters = database.table("counters");
    let handler = move |work: Work, cx: Context| {
        let seen = Arc::clone(&seen);
        let count = format!(
            "INSERT INTO {counters} VALUES ($1, 1) \
             ON CONFLICT (key) DO UPDATE SET n = counters.n + 1 RETURNING n"
        );
        let insert = format!("INSERT INTO {effects} (key, number, n) VALUES ($1, $2, $3)");
        async move {
            if poison && is_poison(work.number) {
                return Err(Failure::permanent("poison"));
            }
            if queue == Queue::Transactional {
                let mut own = cx.transaction::<sqlx::Postgres>().await?;
                let n: i64 = sqlx::query_scalar(&count)
                    .bind(work.key as i64)
                    .fetch_one(&mut *own)
                    .await?;
                sqlx::query(&insert)
                    .bind(work.key as i64)
                    .bind(work.number as i64)
                    .bind(n)
                    .execute(&mut *own)
                    .await?;
            }
            seen.run(&work, &cx);
            Ok(())
        }
    };
    database
        .under(Bus::builder())
        .keyed::<Work>()
        .handler::<Work, _>(handler)
        .local_queue("work", |q| match queue {
            Queue::Ordered => q.durable().partitioned(8).shards(2),
            Queue::Unordered => q.durable().max_parallel(8),
            // What waits for an answer that never comes.
            Queue::Transactional => {
                let q = q.durable().partitioned(8).shards(2).transactional();
                q.handler_timeout(Duration::from_secs(8))
            }
        })
        .build()
        .expect("a valid bus")
        .start()
        .await
        .expect("started")
}

/// Half of the work, then the fault at this step, with the other half under way.
async fn story(queue: Queue, step: Step, fault: Fault) {
    let poison = step == Step::DeadLetter;
    let mut stand = Stand::new(queue, poison).await;
    let go = watch::Sender::new(false);
    let publishing = stand.publish(step, &go);
    let healthy = |numbers: std::ops::RangeInclusive<u64>| {
        let numbers = numbers.filter(|number| !(poison && is_poison(*number)));
        KEYS * numbers.count() as u64
    };
    stand.seen.reach(healthy(1..=half())).await;
    if step == Step::Read {
        // Its gate is for everything that looks at a lease: nothing else may be under way.
        settled(&*stand.store).await;
    }
    stand.close_gate(step).await;
    go.send(true).expect("they publish");
    stand.interrupt(step, fault).await;
    for publishing in publishing {
        let published = tokio::time::timeout(PATIENCE, publishing).await;
        published.expect("in time").expect("published");
    }
    stand.seen.reach(healthy(1..=2 * half())).await;
    settled(&*stand.store).await;

    let all = healthy(1..=2 * half());
    let counts = stand.store.count("work").await.expect("counted");
    assert_eq!(counts.dead, KEYS * 2 * half() - all, "only the poison died");
    let seen = &stand.seen;
    if queue == Queue::Transactional {
        stand.assert_effects().await;
        let again = seen.highest_attempt.load(Ordering::SeqCst);
        assert!(again <= 2, "one outage cost {again} attempts");
    } else {
        match queue {
            // The lease was kept through the outage, and with it what was known of each message.
            Queue::Ordered => assert_eq!(seen.again(), 0, "nothing ran twice"),
            // Claims of which nobody knows are given back, and with them what was under way.
            _ => assert!(seen.again() <= 32, "{} ran twice", seen.again()),
        }
    }
    if queue != Queue::Unordered {
        let wrong = seen.wrong.lock().expect("unharmed");
        assert!(wrong.is_empty(), "{wrong:?}");
    }
    stand.end().await;
}

/// Waits until the queue is empty. The store tells nobody when it is.
async fn settled(store: &dyn Store) {
    let empty = async {
        while store.count("work").await.expect("counted").backlog > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let in_time = tokio::time::timeout(PATIENCE, empty).await;
    in_time.expect("the queue is empty in time");
}

/// A start whose commit is unknown is made again; the attempt counts once all the same. Seen in the numbers after a pause
/// that is spent in the store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_at_a_start_costs_no_attempt() {
    let proxy = Proxy::to(&server());
    let database = Database::postgres_at(url_of(&proxy));
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let made = Arc::clone(&attempts);
    let bus = database
        .under(Bus::builder())
        .keyed::<Work>()
        .handler::<Work, _>(move |_: Work, cx: Context| {
            let made = Arc::clone(&made);
            async move {
                made.lock().expect("unharmed").push(cx.attempt());
                Err::<(), _>(Failure::transient("always"))
            }
        })
        .local_queue("work", |q| {
            q.durable()
                .partitioned(1)
                .max_delivery_attempts(3)
                .backoff(Backoff::constant(Duration::from_millis(1_500)))
        })
        .build()
        .expect("a valid bus")
        .start()
        .await
        .expect("started");
    let mut stand = Stand::of(proxy, database, bus).await;
    stand.close_gate(Step::StartCommit).await;
    let work = Work { key: 1, number: 1 };
    stand.bus.publish(&work).await.expect("stored");
    stand.interrupt(Step::StartCommit, Fault::Cut).await;
    settled(&*stand.store).await;
    assert_eq!(*attempts.lock().expect("unharmed"), [1, 2, 3]);
    let dead = stand.store.dead_letters("work", 0, 10).await.expect("read");
    let past = dead.iter().flat_map(|dead| &dead.past);
    let past: Vec<_> = past.map(|one| one.attempt).collect();
    assert_eq!(past, [1, 2, 3]);
    assert_eq!(dead[0].message.attempts, 3);
    stand.end().await;
}

/// The program ends while what was read is being counted: the count is waited for, and taken back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_orderly_end_meets_a_count_under_way_and_takes_it_back() {
    let mut stand = Stand::new(Queue::Ordered, false).await;
    stand.close_gate(Step::Start).await;
    let work = Work { key: 1, number: 1 };
    stand.bus.publish(&work).await.expect("stored");
    stand.somebody_waits(Step::Start).await;
    let mut state = stand.bus.endpoint("work").expect("it exists").state();
    let (bus, control) = (&stand.bus, &mut stand.control);
    let open = format!("SELECT pg_advisory_unlock({})", stand.gate);
    let opening = async {
        let draining = state.wait_for(|state| *state == EndpointState::Draining);
        draining.await.expect("the endpoint is there");
        control.execute(&*open).await.expect("opened");
    };
    let (report, ()) = tokio::join!(bus.shutdown(DRAIN), opening);
    assert!(report.is_clean(), "{report:?}");
    assert!(stand.seen.runs.lock().expect("unharmed").is_empty());
    let schema = &stand.schema;
    let attempts = format!("SELECT CAST(attempts AS bigint) FROM {schema}.messages");
    let attempts: i64 = sqlx::query_scalar(&attempts)
        .fetch_one(&mut stand.looking)
        .await
        .expect("it is there");
    assert_eq!(attempts, 0);
    stand.end().await;
}

/// Connections that are open when the fault begins are silent for ever, as behind a firewall that has forgotten them; new
/// ones work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_are_silent_for_ever_are_given_up() {
    let mut stand = Stand::new(Queue::Transactional, false).await;
    let go = watch::Sender::new(false);
    let publishing = stand.publish(Step::Commit, &go);
    stand.seen.reach(KEYS * half()).await;
    stand.close_gate(Step::Commit).await;
    go.send(true).expect("they publish");
    stand.somebody_waits(Step::Commit).await;
    stand.proxy.forget();
    stand.open_gate(Step::Commit).await;
    for publishing in publishing {
        let published = tokio::time::timeout(PATIENCE, publishing).await;
        published.expect("in time").expect("published");
    }
    stand.seen.reach(KEYS * 2 * half()).await;
    settled(&*stand.store).await;
    stand.assert_effects().await;
    stand.end().await;
}

/// Each of Laneway's connections may be ended by the server at any moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_the_server_ends_at_random_lose_nothing() {
    let mut stand = Stand::new(Queue::Transactional, false).await;
    let go = watch::Sender::new(true);
    let publishing = stand.publish(Step::Publish, &go);
    let seen = Arc::clone(&stand.seen);
    let all = tokio::spawn(async move { seen.reach(KEYS * 2 * half()).await });
    let mut ended = 0;
    while !all.is_finished() {
        // Those of this test: only they come from these ports.
        let ports = stand.proxy.ports();
        if let Some(port) = fastrand::choice(ports) {
            let text = format!(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                 WHERE client_port = {port} AND application_name = 'laneway'"
            );
            let count: i64 = sqlx::query_scalar(&text)
                .fetch_one(&mut stand.looking)
                .await
                .expect("terminated");
            ended += count;
        }
        // How often connections are ended.
        tokio::time::sleep(Duration::from_millis(fastrand::u64(20..150))).await;
    }
    assert!(ended > 0, "some connections were ended");
    all.await.expect("all in time");
    for publishing in publishing {
        publishing.await.expect("published");
    }
    settled(&*stand.store).await;
    stand.assert_effects().await;
    stand.end().await;
}

macro_rules! stories {
    ($($name:ident: $queue:ident, $step:ident, $fault:ident;)+) => { $(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() { story(Queue::$queue, Step::$step, Fault::$fault).await; }
    )+ };
}

stories! {
    cut_at_a_publish: Ordered, Publish, Cut;
    silent_at_a_publish: Ordered, Publish, Stall;
    cut_at_an_enqueue_in: Ordered, EnqueueIn, Cut;
    silent_at_an_enqueue_in: Ordered, EnqueueIn, Stall;
    cut_at_a_read: Ordered, Read, Cut;
    silent_at_a_read: Ordered, Read, Stall;
    cut_at_a_claim: Unordered, Claim, Cut;
    silent_at_a_claim: Unordered, Claim, Stall;
    cut_at_a_start: Ordered, Start, Cut;
    silent_at_a_start: Ordered, Start, Stall;
    cut_at_a_start_without_order: Unordered, Start, Cut;
    silent_at_a_start_without_order: Unordered, Start, Stall;
    cut_at_a_start_that_takes_place: Ordered, StartCommit, Cut;
    cut_in_a_handlers_transaction: Transactional, Handler, Cut;
    silent_in_a_handlers_transaction: Transactional, Handler, Stall;
    cut_at_a_commit_that_takes_place: Transactional, Commit, Cut;
    silent_at_a_commit_that_takes_place: Transactional, Commit, Stall;
    cut_at_a_commit_that_does_not_take_place: Transactional, Commit, Terminated;
    cut_at_a_settling: Ordered, Settle, Cut;
    silent_at_a_settling: Ordered, Settle, Stall;
    cut_at_a_settling_without_order: Unordered, Settle, Cut;
    cut_at_a_dead_letter: Ordered, DeadLetter, Cut;
    silent_at_a_dead_letter: Ordered, DeadLetter, Stall;
}
