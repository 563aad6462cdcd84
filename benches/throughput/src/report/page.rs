//! The page: machine, versions, commands, targets, every row, and what no row guarantees.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use super::table::with_range;
use super::{Row, chart, table};
use crate::options::{MAIN_REPORT, Options, Workload};
use crate::subject::Subject;
use crate::{Error, greeting, machine};

/// What was tried, where the time goes: written by hand.
const NOTES: &str = include_str!("../../notes.md");

/// Writes the page and its chart.
pub(crate) fn write(
    folder: &Path,
    name: &str,
    rows: &[Row],
    options: &Options,
    load_before: &str,
) -> Result<(), Error> {
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join(format!("{name}.svg")), chart::svg(rows))?;
    let page = page(name, rows, options, load_before)?;
    std::fs::write(folder.join(format!("{name}.md")), page)?;
    Ok(())
}

fn page(name: &str, rows: &[Row], options: &Options, load_before: &str) -> Result<String, Error> {
    let mut page = String::from(
        "# Benchmarks\n\nWritten by the bench program: do not edit; what is written by hand is in \
         `benches/throughput/notes.md`.\n\n",
    );
    run(&mut page, rows, options, load_before)?;
    write!(page, "\n![Ratios]({name}.svg)\n\n## Targets\n\n")?;
    page += "| workload | queue | Laneway | target | |\n|---|---|---|---|---|\n";
    for target in rows.iter().flat_map(targets) {
        writeln!(page, "{target}")?;
    }
    let mut suites: Vec<&str> = rows.iter().map(|row| row.workload.as_str()).collect();
    suites.sort_by_key(|name| rows.iter().position(|row| row.workload == *name));
    suites.dedup();
    let mut explained = None;
    for suite in suites {
        let of_suite: Vec<_> = rows.iter().filter(|row| row.workload == suite).collect();
        writeln!(page, "\n## {suite}\n")?;
        let workload = of_suite.first().map(|row| row.workload_id);
        // A workload of several suites is explained at the first of them.
        if let Some(workload) = workload.filter(|_| workload != explained) {
            writeln!(page, "{}\n", about(workload))?;
            explained = Some(workload);
        }
        writeln!(page, "{}", table(&of_suite))?;
        for row in of_suite.iter().filter(|row| row.failure.is_some()) {
            let what = row.failure.as_deref().unwrap_or_default();
            let what = what.lines().take(3).collect::<Vec<_>>().join("; ");
            writeln!(page, "\n`{}` ({}): {what}", row.subject, row.queue_type)?;
        }
    }
    page += "\n## The subjects, and what they do not guarantee\n\n";
    page += "| subject | what it is | what it does not guarantee |\n|---|---|---|\n";
    for subject in SUBJECTS {
        let [name, what] = [subject.name(), subject.description()];
        writeln!(page, "| {name} | {what} | {} |", subject.missing())?;
    }
    if name == MAIN_REPORT {
        write!(page, "\n{NOTES}")?;
    } else {
        page += "\nHow it is measured, what is not reached and why, and what was tried: \
                 [benchmarks.md](benchmarks.md).\n";
    }
    Ok(page)
}

const SUBJECTS: [Subject; 17] = [
    Subject::RawSequential,
    Subject::RawUnordered,
    Subject::RawCumulative,
    Subject::HandWrittenHash,
    Subject::HandWrittenMap,
    Subject::Laneway,
    Subject::RuststreamLapin,
    Subject::Beavers,
    Subject::LocalChannels,
    Subject::LocalLaneway,
    Subject::RawSql,
    Subject::DurableLaneway,
    Subject::DurableLanewayTransactional,
    Subject::GraphileWorker,
    Subject::GraphileWorkerKeyed,
    Subject::Riverqueue,
    Subject::Awa,
];

fn run(page: &mut String, rows: &[Row], options: &Options, load_before: &str) -> Result<(), Error> {
    // Options that carry an address are left out.
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let is_address = |text: &String| {
        ["--amqp", "--postgres"]
            .iter()
            .any(|name| text.starts_with(name))
    };
    let arguments = match arguments.iter().any(is_address) {
        true => "… (with an address)".to_owned(),
        false => arguments.join(" "),
    };
    let features = if cfg!(feature = "peers") {
        " --features peers"
    } else {
        ""
    };
    let command = format!("cargo run --release --package laneway-bench{features} -- {arguments}");
    writeln!(page, "- **When**: {}", machine::first_line_of("date", "-u"))?;
    writeln!(page, "- **Machine**: {}", machine::description())?;
    writeln!(
        page,
        "- **Load averages** (1, 5, 15 minutes): {load_before} before, {} after. A machine that does something \
         else at the same time widens the ranges and moves ratios; a run for the record starts below 0.5.",
        machine::load()
    )?;
    let busy = load_before
        .split(' ')
        .next()
        .and_then(|load| load.parse().ok());
    if busy.is_none_or(|load: f64| load >= 0.5) || options.rounds() < 3 {
        writeln!(
            page,
            "- **Not for the record**: the machine was busy, or there were fewer than three rounds. The figures show \
             the form of the report, and no more."
        )?;
    }
    let lock = include_str!("../../../../Cargo.lock");
    let version = |name: &str| {
        let mut lines = lock.lines();
        let found = lines.find(|line| *line == format!("name = \"{name}\""));
        found.and_then(|_| lines.next()?.split('"').nth(1))
    };
    let broker = match options.needs_broker() {
        true => greeting::version(&options.amqp) + ", ",
        false => String::new(),
    };
    writeln!(
        page,
        "- **Versions**: {broker}lapin {}, tokio {}, {}",
        version("lapin").unwrap_or("?"),
        version("tokio").unwrap_or("?"),
        machine::first_line_of("rustc", "--version"),
    )?;
    let databases: BTreeSet<&str> = rows
        .iter()
        .filter_map(|row| row.database.as_deref())
        .collect();
    for database in databases {
        writeln!(page, "- **Database**: {database}")?;
    }
    if options.peers {
        let peers = [
            "ruststream-lapin",
            "beavers",
            "graphile_worker",
            "riverqueue",
            "awa",
        ];
        let peers = peers.map(|name| format!("{name} {}", version(name).unwrap_or("?")));
        writeln!(page, "- **Peers**: {}", peers.join(", "))?;
    }
    writeln!(page, "- **Command**: `{command}`")?;
    writeln!(
        page,
        "- **Size**: {} messages per run, {} rounds",
        options.messages(),
        options.rounds()
    )?;
    Ok(())
}

fn about(workload: Workload) -> &'static str {
    match workload {
        Workload::W1 => {
            "10,000 uniform keys, an async handler that waits 1 ms, 256 at once. Rates are of a backlog; \
             latencies, from publishing to the end of the handler, of a steady 2,000 messages a second. The \
             ratio is to the raw client without order."
        }
        Workload::W2 => {
            "The same with a handler that does nothing: what the framework costs for each message. The \
             cumulative consumer runs one handler at a time and acknowledges every 64th message."
        }
        Workload::W3 => {
            "Few busy keys (Zipf over 10,000). The ideal is what the busiest key allows: the rate of a loop \
             that runs one key alone, measured in the same round, divided by that key's share."
        }
        Workload::W4 => {
            "W1, and in one key of a hundred a message that always fails: 5 attempts, pauses of 0.1 s, then \
             1 s, then parked; spread evenly over the run. Rates and latencies are of the other keys, rates of a \
             backlog, latencies of a steady 2,000 messages a second; the \
             ratio is to the same subject's run without poison. The parked set is compared message by message."
        }
        Workload::W5 => {
            "500 messages of one key that take 100 ms each, spread over 20,000 messages of other keys that \
             take 1 ms; prefetch 512. The ratio is how many times longer the *other* keys take than in a run \
             without the slow key: lower is better, 1 is perfect."
        }
        Workload::W7 => {
            "Durable queues, each run in a database of its own; what a commit waits for is stated above. Insert: one \
             producer, one transaction for each batch; the ratio is to a table written by hand, and what is \
             stored is read back for the ledger. Drain: a backlog, analysed before, and a handler that does \
             nothing but record; the ratio is to `graphile_worker` with a named queue for each key (in SQLite to `riverqueue`, \
             without peers to Laneway's own plain handlers). Mixed: 800 messages \
             a second of 10,000 keys, stored singly by 8 producers, each with keys of its own, while 64 handlers run; \
             latencies are from before the insert to the end of the handler."
        }
        Workload::W10 => {
            "No broker: prepared messages come in batches of 64 to 4 lanes, and the handler does nothing but \
             record. This is the path that every delivery takes, from a source's batch through the supervisor \
             and the lanes to the acknowledgement (a direct `LaneAddr::send` is one actor message for each \
             delivery, so it could not have the same batching). The channels group the same batches by the \
             same function, decode the same bodies, and send each lane its part through a bounded channel."
        }
    }
}

/// The lines of a row in the table of BENCH's targets.
fn targets(row: &Row) -> Vec<String> {
    if row.subject != "laneway" {
        return Vec::new();
    }
    let to = row.ratio_to.as_deref().unwrap_or_default();
    let [workload, queue] = [row.workload.as_str(), row.queue_type];
    let line = |shown: &str, reached: Option<bool>, target: &str| {
        let word = match reached {
            Some(true) => "reached",
            Some(false) => "**not reached**",
            None => "no figure",
        };
        format!("| {workload} | {queue} | {shown} | {target} | {word} |")
    };
    let ratio = with_range(row.ratio, row.ratio_range, 2);
    let at_least = |bound: f64| {
        let reached = row.ratio.map(|ratio| ratio >= bound);
        line(&ratio, reached, &format!("≥ {bound:.2} of {to}"))
    };
    let below = |value: Option<f64>, bound: f64, what: &str| {
        let shown = value.map_or_else(|| "–".to_owned(), |value| format!("{value:.2}"));
        let reached = value.map(|value| value <= bound);
        line(&shown, reached, &format!("{what} ≤ {bound:.1}"))
    };
    let above = |value: Option<f64>, bound: f64, what: &str| {
        let shown = value.map_or_else(|| "–".to_owned(), |value| format!("{value:.2}"));
        let reached = value.map(|value| value >= bound);
        line(&shown, reached, &format!("≥ {bound:.2} {what}"))
    };
    match (row.workload_id, to) {
        (Workload::W1, _) => vec![at_least(0.97)],
        (Workload::W2, "raw-unordered") => vec![
            at_least(1.0),
            below(row.cpu_ratio, 1.2, "processor time, of raw-unordered,"),
        ],
        (Workload::W2, _) => vec![at_least(0.9)],
        (Workload::W3, _) => vec![at_least(0.95)],
        (Workload::W4, _) => vec![
            at_least(0.95),
            above(
                row.steady_ratio,
                0.95,
                &format!("of {to}, at a steady pace"),
            ),
            below(
                row.p99_ratio,
                1.5,
                "p99 of healthy keys, of that without poison,",
            ),
        ],
        (Workload::W5, _) => vec![below(row.ratio, 2.2, "times longer")],
        (Workload::W7, "best peer") if row.workload.contains("insert") => vec![at_least(1.0)],
        (Workload::W7, "graphile-worker-keyed") if row.workload.contains("drain") => {
            vec![at_least(1.1)]
        }
        (Workload::W7, _) => Vec::new(),
        (Workload::W10, _) => {
            let rate = with_range(row.messages_per_second, row.messages_per_second_range, 0);
            let reached = row.messages_per_second.map(|rate| rate >= 1e6);
            vec![at_least(0.5), line(&rate, reached, "≥ 1,000,000/s")]
        }
    }
}
