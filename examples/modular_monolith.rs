//! You will see one program of three modules, in which every order that Orders places is shipped and billed exactly
//! once and in sequence, however often the program is killed and started again.
//!
//! ```text
//! cargo run --release --example modular_monolith --features sqlite,postgres
//! cargo run --release --example modular_monolith --features sqlite,postgres -- --crash-after 500
//! cargo run --release --example modular_monolith --features sqlite,postgres -- --postgres postgres://postgres@localhost/test --nodes 3
//! ```
//!
//! What an application writes is in `orders.rs` and `modules.rs`, and [`start`](life::start) in `life.rs`; `tables.rs`
//! has its tables. The rest starts nodes, waits and counts.

#[path = "modular_monolith/census.rs"]
mod census;
#[path = "modular_monolith/crash.rs"]
mod crash;
#[path = "modular_monolith/life.rs"]
mod life;
#[path = "modular_monolith/modules.rs"]
mod modules;
#[path = "modular_monolith/nodes.rs"]
mod nodes;
#[path = "modular_monolith/options.rs"]
mod options;
#[path = "modular_monolith/orders.rs"]
mod orders;
#[path = "modular_monolith/place.rs"]
mod place;
#[path = "modular_monolith/progress.rs"]
mod progress;
#[path = "modular_monolith/report.rs"]
mod report;
#[path = "modular_monolith/tables.rs"]
mod tables;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use census::Census;
use life::Plan;
use options::Options;
use place::{Place, Temporary};
use report::Report;
use tables::Database;

/// How the work of a run ended.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    /// Everything is done.
    Done,
    /// SIGTERM or Ctrl-C came first; what was running has finished.
    Interrupted,
    /// Every node was killed. There is nobody left who could report.
    Crashed,
}

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::read();
    let ended = if options.node {
        nodes::be_one().await.map(|()| ExitCode::SUCCESS)
    } else {
        run(&options).await
    };
    ended.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

async fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    let temporary = match options.temporary {
        true => Some(Temporary::new(options.postgres.as_deref())?),
        false => None,
    };
    let place = match &temporary {
        Some(temporary) => temporary.place(),
        None => options.place(),
    };
    let counted = run_at(options, place).await;
    if let Some(temporary) = temporary {
        temporary.remove().await?;
    }
    counted
}

async fn run_at(options: &Options, place: Place) -> Result<ExitCode, Box<dyn Error>> {
    let began = Instant::now();
    // The store first: it refuses a database that it cannot use, before anything is created there.
    let recovered = Census::take(&place).await?.waiting;
    let database = Database::open(&place).await?;
    let plan = Plan {
        place,
        orders: options.orders,
        shares: orders::shares(database.orders_by_customer().await?, options.orders),
        crash_after: options.crash_after,
    };
    if !options.json {
        report::print_goal(options, &plan, database.orders().await?, recovered);
    }
    let worked = match options.nodes {
        None => life::alone(&plan, &database).await,
        Some(nodes) => nodes::together(&plan, &database, nodes).await,
    };
    if matches!(worked, Ok(Ended::Crashed)) {
        // As if this process had been killed: a shell reports the death by a signal as 128 and its number.
        return Ok(ExitCode::from(128 + 9));
    }
    // Nothing runs any more, so that all of this is of one moment.
    let census = Census::take(&plan.place).await?;
    let tally = database.tally().await?;
    database.close().await;
    let report = Report::new(census, &tally, recovered, began.elapsed(), worked);
    report.print(options.json);
    Ok(report.exit_code())
}
