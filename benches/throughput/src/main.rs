//! Measures Laneway beside consumers written by hand on the raw client, and other libraries.
//!
//! ```text
//! cargo run --release -p laneway-bench -- --quick
//! ```
//!
//! In each round every subject gets a fresh queue, or a fresh database, with the same messages (256-byte bodies, persistent) and
//! runs in a process of its own. After each run the order ledger judges; a run that fails has no figure.
//! Ratios are taken within a round. `--help` lists the options; `docs/benchmarks.md` says what was measured
//! and how.

mod broker;
mod child;
mod database;
mod greeting;
mod machine;
mod options;
mod record;
mod report;
mod rounds;
mod subject;
mod suite;
mod workload;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Parser;

use broker::Broker;
use child::Places;
use options::{Options, Workload};
use report::{Row, table};
use subject::Durable;
use suite::Suite;

type Error = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    if std::env::args().nth(1).as_deref() == Some(child::ARGUMENT) {
        return child::run().await;
    }
    let options = Options::parse();
    if options.peers && !cfg!(feature = "peers") {
        return Err("--peers needs a build with `--features peers`".into());
    }
    let load_before = machine::load();
    let rows = measure(&options).await?;
    if let Some(name) = &options.report {
        let folder = root().join("docs");
        report::write(&folder, name, &rows, &options, &load_before)?;
    }
    match rows
        .iter()
        .find(|row| row.subject == "laneway" && !row.ledger_ok)
    {
        Some(row) => Err(format!("{}: the ledger says no to Laneway", row.workload).into()),
        None => Ok(()),
    }
}

/// The folder of the workspace.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

async fn measure(options: &Options) -> Result<Vec<Row>, Error> {
    let folder = root().join("target");
    std::fs::create_dir_all(&folder)?;
    let mut file = File::create(folder.join("bench-report.jsonl"))?;
    let broker = match options.needs_broker() {
        true => Some(Broker::connect(&options.amqp).await?),
        false => None,
    };
    let places = Places { broker, folder };
    let mut all = Vec::new();
    for queue_type in options.queue_types() {
        for workload in options.workloads() {
            // No queue of the broker, so no kind of queue: once is enough.
            if !workload.needs_broker() && has(&all, workload) {
                continue;
            }
            for suite in Suite::of(workload, options) {
                let database = match suite.durable {
                    Some(Durable { database, .. }) => {
                        Some(database.description(&options.postgres).await?)
                    }
                    None => None,
                };
                let results = rounds::run(&suite, queue_type, options, &places).await?;
                let rows = report::rows(&suite, queue_type, database.as_deref(), &results);
                for row in &rows {
                    let line = serde_json::to_string(row)?;
                    writeln!(file, "{line}")?;
                    if options.json {
                        println!("{line}");
                    }
                }
                if !options.json {
                    let refs: Vec<_> = rows.iter().collect();
                    let database = database.map_or_else(String::new, |text| format!(" ({text})"));
                    println!("\n{}{database}\n{}\n", suite.name, table(&refs));
                }
                all.extend(rows);
            }
        }
    }
    Ok(all)
}

fn has(rows: &[Row], workload: Workload) -> bool {
    rows.iter().any(|row| row.workload_id == workload)
}
