//! `examples/modular_monolith`, killed again and again with SIGKILL, and each time started again: every effect of every
//! order is applied exactly once and in sequence. Cases D6, D7, D11 and D15. Figures are counted again from the
//! application's tables, by other code than the example's.
//!
//! `LANEWAY_SOAK=1` runs the full counts (20 kills during 20,000 orders), and three nodes on PostgreSQL.

#![cfg(all(unix, feature = "sqlite", feature = "postgres"))]

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::{Duration, Instant};

use sqlx::postgres::PgRow;
use sqlx::sqlite::{SqliteConnectOptions, SqliteRow};
use sqlx::{ConnectOptions as _, Connection as _, FromRow, PgConnection};

#[path = "support/job.rs"]
mod job;
#[path = "support/stores.rs"]
mod stores;
use job::{Ended, Job};
use stores::{Database, postgres_url};

/// How long nothing may be seen of what is waited for.
const PATIENCE: Duration = Duration::from_secs(180);

fn is_soak() -> bool {
    std::env::var_os("LANEWAY_SOAK").is_some()
}

/// Orders, and kills while they are handled.
fn counts() -> (u64, u64) {
    if is_soak() { (20_000, 20) } else { (1_500, 6) }
}

/// An order: customer and number.
type Order = (i64, i64);

/// The database of a loop, and how many nodes it has.
struct World {
    database: Database,
    nodes: Option<u64>,
}

impl World {
    fn start(&self, orders: u64, more: &[&str]) -> Job {
        let mut arguments = vec!["--json".to_owned(), format!("--orders={orders}")];
        match &self.database {
            Database::Sqlite(_) => {
                let file = self.database.file();
                arguments.push(format!("--sqlite={}", file.display()));
            }
            Database::Postgres { url, schema } => {
                arguments.push(format!("--postgres={url}"));
                arguments.push(format!("--schema={schema}"));
            }
        }
        if let Some(nodes) = self.nodes {
            arguments.push(format!("--nodes={nodes}"));
        }
        arguments.extend(more.iter().map(|&word| word.to_owned()));
        Job::of("modular_monolith", &arguments)
    }

    /// What a query answers. Each has a connection of its own, which cannot write: so it is never the one that repairs
    /// the file after a kill.
    async fn ask<T>(&self, query: &str) -> Result<Vec<T>, sqlx::Error>
    where
        T: for<'r> FromRow<'r, SqliteRow> + for<'r> FromRow<'r, PgRow> + Send + Unpin,
    {
        match &self.database {
            Database::Sqlite(_) => {
                let options = SqliteConnectOptions::new().filename(self.database.file());
                let mut connection = options.read_only(true).connect().await?;
                let rows = sqlx::query_as(query).fetch_all(&mut connection).await;
                connection.close().await?;
                rows
            }
            Database::Postgres { .. } => {
                let mut connection = PgConnection::connect(&postgres_url()).await?;
                let rows = sqlx::query_as(query).fetch_all(&mut connection).await;
                connection.close().await?;
                rows
            }
        }
    }

    /// The rows of a table of orders.
    async fn rows(&self, table: &str, order_by: &str) -> Vec<Order> {
        let table = self.database.table(table);
        let query = format!("SELECT customer, number FROM {table} ORDER BY {order_by}");
        self.ask(&query).await.expect("read")
    }

    /// How many effects there are; none as long as there are no tables.
    async fn effects(&self) -> u64 {
        let [shipments, invoices] = ["shipments", "invoices"].map(|name| self.database.table(name));
        let query = format!(
            "SELECT (SELECT count(*) FROM {shipments}) + (SELECT count(*) FROM {invoices})"
        );
        let rows: Vec<(i64,)> = self.ask(&query).await.unwrap_or_default();
        rows.first().map_or(0, |(count,)| *count as u64)
    }

    /// Waits until there are so many effects. The process must not end before.
    async fn until(&self, job: &mut Job, effects: u64) {
        let began = Instant::now();
        // Tables tell nobody when they grow.
        loop {
            let so_far = self.effects().await;
            if so_far >= effects {
                return;
            }
            assert!(
                began.elapsed() < PATIENCE && job.is_running(),
                "waited in vain for {effects} effects; there are {so_far}"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Who is killed, and by whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kill {
    /// The process, and with it its nodes, from outside.
    All,
    /// The process, or each of its nodes, by itself, in the middle of a handler's transaction.
    Itself,
    /// One of the nodes, from outside. The others go on.
    OneNode,
}

/// What the end of each of these processes looks like.
fn assert_was_killed(ended: &Ended) {
    let status = ended.status;
    assert!(
        status.signal() == Some(9) || status.code() == Some(137),
        "{ended:?}"
    );
    assert_eq!(ended.output, "", "{ended:?}");
}

/// One of the processes that this one has started.
fn a_child_of(job: &Job, random: &mut fastrand::Rng) -> String {
    let list = Command::new("ps").args(["-A", "-o", "pid=,ppid="]).output();
    let list = String::from_utf8(list.expect("the command ps is there").stdout).expect("text");
    let parent = job.id().to_string();
    let children = list.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let (pid, of) = (words.next()?, words.next()?);
        (of == parent).then(|| pid.to_owned())
    });
    let children: Vec<_> = children.collect();
    random.choice(children).expect("it has nodes")
}

async fn every_effect_is_applied_once_and_in_sequence(world: World) {
    let (orders, kills) = counts();
    let dead = orders / 500;
    let part = (2 * orders - dead) / (kills + 1);
    // Of the moments that are chosen here; when the processes reach them is another matter.
    let seed = if is_soak() { fastrand::u64(..) } else { 7 };
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let in_turn: &[Kill] = match world.nodes {
        Some(_) => &[Kill::OneNode, Kill::All, Kill::Itself],
        None => &[Kill::All, Kill::Itself],
    };
    let began = Instant::now();
    let mut running: Option<Job> = None;
    for (number, kill) in (0..kills).zip(in_turn.iter().cycle()) {
        // Somewhere in this part of the work; the last part is for who finishes it.
        let moment = part * number + random.u64(1..part);
        match kill {
            Kill::Itself => {
                let nodes = world.nodes.unwrap_or(1);
                let left = moment.saturating_sub(world.effects().await) / nodes;
                let after = format!("--crash-after={}", left.max(1));
                assert_was_killed(&world.start(orders, &[&after]).wait());
            }
            Kill::OneNode => {
                let mut job = world.start(orders, &[]);
                world.until(&mut job, moment).await;
                let node = a_child_of(&job, &mut random);
                let killed = Command::new("kill").args(["-KILL", &node]).status();
                assert!(killed.expect("the command kill is there").success());
                running = Some(job);
            }
            Kill::All => {
                let job = running.take();
                let mut job = job.unwrap_or_else(|| world.start(orders, &[]));
                world.until(&mut job, moment).await;
                job.signal("KILL");
                assert_was_killed(&job.wait());
                // And once more while it starts, at a moment that nothing shows from outside. Not a kill that counts.
                let job = world.start(orders, &[]);
                tokio::time::sleep(Duration::from_millis(random.u64(..150))).await;
                job.signal("KILL");
                assert_was_killed(&job.wait());
            }
        }
    }
    let last = running.unwrap_or_else(|| world.start(orders, &[]));
    let ended = last.wait();
    println!("{:.1?}: {}", began.elapsed(), ended.output.trim_end());
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let fields = [
        ("orders", orders),
        ("shipped", orders),
        ("billed", orders - dead),
        ("lost", 0),
        ("duplicates_of_effects", 0),
        ("inversions", 0),
        ("dead_letters", dead),
    ];
    for (field, promised) in fields {
        assert_eq!(ended.number(field), promised, "{field}: {ended:?}");
    }

    let placed = world.rows("orders", "customer, number").await;
    let placed: BTreeSet<Order> = placed.into_iter().collect();
    assert_eq!(placed.len() as u64, orders);
    for (table, without) in [("shipments", 0), ("invoices", dead)] {
        let mut last = BTreeMap::new();
        let rows = world.rows(table, "id").await;
        for &(customer, number) in &rows {
            assert!(placed.contains(&(customer, number)), "{table}: no order");
            let before = last.insert(customer, number);
            assert!(
                before.is_none_or(|before| before < number),
                "{table}: {number} after {before:?}, customer {customer}"
            );
        }
        // Each rises, so none is there twice.
        assert_eq!(rows.len() as u64, orders - without, "{table}");
    }
    world.database.clean_up().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_effect_is_applied_once_and_in_sequence_on_sqlite() {
    let database = Database::sqlite();
    let world = World {
        database,
        nodes: None,
    };
    every_effect_is_applied_once_and_in_sequence(world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_effect_is_applied_once_and_in_sequence_on_postgres() {
    let database = Database::postgres();
    let world = World {
        database,
        nodes: None,
    };
    every_effect_is_applied_once_and_in_sequence(world).await;
}

/// In the normal form of the test two nodes, which fit beside everything else on a small machine.
#[tokio::test(flavor = "multi_thread")]
async fn every_effect_is_applied_once_and_in_sequence_with_nodes_on_postgres() {
    let database = Database::postgres();
    let nodes = Some(if is_soak() { 3 } else { 2 });
    every_effect_is_applied_once_and_in_sequence(World { database, nodes }).await;
}

// ---- the command line

#[test]
fn a_finished_run_writes_one_object_of_exactly_the_promised_fields() {
    let ended = Job::of(
        "modular_monolith",
        &["--json", "--orders", "600", "--temporary"],
    );
    let ended = ended.wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let object = ended.object();
    let fields: BTreeSet<&str> = object.keys().map(String::as_str).collect();
    let promised = [
        "orders",
        "shipped",
        "billed",
        "lost",
        "duplicates_of_effects",
        "inversions",
        "dead_letters",
        "recovered",
        "seconds",
    ];
    assert_eq!(fields, BTreeSet::from(promised));
    let figures = ["orders", "shipped", "billed", "dead_letters", "recovered"];
    let figures = figures.map(|field| ended.number(field));
    assert_eq!(figures, [600, 600, 599, 1, 0], "{ended:?}");
    assert!(
        object["seconds"]
            .as_f64()
            .is_some_and(|seconds| seconds > 0.0)
    );
}

#[test]
fn a_finished_database_is_gone_on_with_when_more_orders_are_asked_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("orders.db").display().to_string();
    for orders in [200, 200, 300] {
        let orders_text = orders.to_string();
        let job = Job::of(
            "modular_monolith",
            &["--orders", &orders_text, "--json", "--sqlite", &file],
        );
        let ended = job.wait();
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
        let figures = ["orders", "shipped", "billed", "recovered"];
        let figures = figures.map(|field| ended.number(field));
        assert_eq!(figures, [orders, orders, orders, 0], "{ended:?}");
    }
}

/// An effect that is there twice, one without an order, one that was overtaken, and one that is gone.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_in_the_tables_is_counted_and_the_exit_status_says_so() {
    let database = Database::sqlite();
    let world = World {
        database,
        nodes: None,
    };
    let ended = world.start(404, &[]).wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let options = SqliteConnectOptions::new().filename(world.database.file());
    let mut connection = options.connect().await.expect("opened");
    let wrong = "\
        INSERT INTO shipments (customer, number) VALUES (1, 2), (1, 1000);
        UPDATE invoices SET id = (SELECT max(id) + 1 FROM invoices) WHERE customer = 2 AND number = 1;
        DELETE FROM invoices WHERE customer = 3 AND number = 4;";
    let done = sqlx::raw_sql(wrong).execute(&mut connection).await;
    done.expect("changed");
    connection.close().await.expect("closed");
    let ended = world.start(404, &[]).wait();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let figures = [
        "shipped",
        "billed",
        "lost",
        "duplicates_of_effects",
        "inversions",
    ];
    let figures = figures.map(|field| ended.number(field));
    assert_eq!(figures, [404, 403, 1, 2, 1], "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_drains_the_run_which_the_next_one_goes_on_with() {
    let database = Database::sqlite();
    let world = World {
        database,
        nodes: None,
    };
    let mut job = world.start(100_000, &[]);
    // It listens for signals from before its first order on.
    world.until(&mut job, 100).await;
    job.signal("TERM");
    let ended = job.wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let wrong = ["lost", "duplicates_of_effects", "inversions"];
    assert_eq!(wrong.map(|field| ended.number(field)), [0; 3], "{ended:?}");
    let (orders, waiting) = (ended.number("orders"), ended.number("waiting"));
    for (orders, recovered) in [(orders, waiting), (orders + 50, 0)] {
        let next = world.start(orders, &[]).wait();
        assert_eq!(next.status.code(), Some(0), "{next:?}");
        let figures = ["orders", "shipped", "recovered"].map(|field| next.number(field));
        assert_eq!(figures, [orders, orders, recovered], "{next:?}");
    }
}

#[test]
fn arguments_that_contradict_each_other_are_refused_with_what_to_do_instead() {
    let check = |arguments: &[&str], names: &[&str]| {
        let ended = Job::of("modular_monolith", arguments).wait();
        assert_eq!(ended.status.code(), Some(2), "{arguments:?}: {ended:?}");
        for name in names {
            assert!(ended.errors.contains(name), "{arguments:?}: {ended:?}");
        }
        assert!(!ended.errors.contains("s3cret"), "{arguments:?}: {ended:?}");
        assert_eq!(ended.output, "", "{arguments:?}");
    };
    let url = ["--postgres", "postgres://me:s3cret@127.0.0.1:1/none"];
    let with_url = |more: &[&'static str]| [&url[..], more].concat();
    check(&["--orders", "0"], &["--orders"]);
    check(&with_url(&["--sqlite", "file.db"]), &["remove one of them"]);
    check(&["--schema", "mine"], &["--schema", "add --postgres"]);
    check(&["--nodes", "2"], &["--nodes", "add --postgres"]);
    check(&with_url(&["--nodes", "9"]), &["--nodes", "1..=8"]);
    check(
        &with_url(&["--schema", "a; b"]),
        &["--schema", "plain name"],
    );
    check(&["--temporary", "--sqlite", "file.db"], &["--temporary"]);
    check(&["--temporary", "--crash-after", "5"], &["--crash-after"]);
    check(&["--crash-after", "0"], &["--crash-after"]);
    check(
        &["--orders", "10", "--crash-after", "20"],
        &["--crash-after 20", "20 messages", "raise the other"],
    );
}

#[test]
fn a_database_that_is_not_there_is_an_error_without_credentials() {
    let url = "postgres://me:s3cret@127.0.0.1:1/none";
    let ended = Job::of("modular_monolith", &["--json", "--postgres", url]).wait();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(ended.errors.contains("database"), "{ended:?}");
    assert!(!ended.errors.contains("s3cret"), "{ended:?}");
    assert_eq!(ended.output, "", "{ended:?}");
}
