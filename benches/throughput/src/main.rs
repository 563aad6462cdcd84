//! Measures Laneway against consumers written by hand on the raw client: same queue, same messages, same
//! handler, interleaved rounds in one run. Ratios are the result; absolute figures are this machine's.
//!
//! `cargo run --release -p laneway-bench -- --workload w2 --queue-type quorum`
//!
//! Each round gives every subject a fresh queue with the same backlog (256-byte bodies, persistent) and
//! takes the time from its start to the last acknowledged message. After every run the order of the
//! effects is checked; a run out of order has no figure.

mod broker;
mod order;
mod subject;

use std::collections::BTreeMap;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use broker::Broker;
use subject::{Job, Subject};

/// Options.
#[derive(Parser)]
struct Options {
    /// What the handler does.
    #[arg(long, value_enum, default_value = "w1")]
    workload: Workload,
    /// Messages per run.
    #[arg(long, default_value_t = 60_000, value_parser = clap::value_parser!(u64).range(1_000..))]
    messages: u64,
    /// Different keys, evenly used.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    keys: u64,
    /// Handlers at once.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=512))]
    concurrency: u32,
    /// Rounds; the median counts.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Kind of the queue.
    #[arg(long, value_enum, default_value = "classic")]
    queue_type: QueueType,
    /// The broker. Never printed.
    #[arg(
        long,
        env = "LANEWAY_AMQP_URL",
        hide_env_values = true,
        default_value = "amqp://guest:guest@127.0.0.1:5672"
    )]
    amqp: String,
}

/// BENCH W1 and W2.
#[derive(Clone, Copy, ValueEnum)]
enum Workload {
    /// The handler waits 1 ms, like one that does I/O.
    W1,
    /// The handler does nothing: the cost of the framework.
    W2,
}

/// Kind of a queue.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum QueueType {
    /// Held by one node.
    Classic,
    /// Replicated by a log.
    Quorum,
}

/// One subject's rates, and its processor time per message.
#[derive(Default)]
struct Rates {
    per_second: Vec<f64>,
    cpu_us: Vec<f64>,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    let broker = Broker::connect(&options.amqp, options.queue_type == QueueType::Quorum).await?;
    let mut rates: BTreeMap<Subject, Rates> = BTreeMap::new();
    for round in 1..=options.rounds {
        for subject in Subject::ALL {
            let queue = format!("laneway-bench-{}-{}", std::process::id(), subject.name());
            broker.fill(&queue, options.messages, options.keys).await?;
            let job = Job {
                url: options.amqp.clone(),
                queue: queue.clone(),
                quorum: options.queue_type == QueueType::Quorum,
                messages: options.messages,
                keys: options.keys,
                concurrency: options.concurrency,
                handler: match options.workload {
                    Workload::W1 => Duration::from_millis(1),
                    Workload::W2 => Duration::ZERO,
                },
            };
            let cpu_before = cpu_seconds()?;
            let run = subject.run(&job).await?;
            let cpu = (cpu_seconds()? - cpu_before) * 1e6 / options.messages as f64;
            broker.delete(&queue).await?;
            let per_second = options.messages as f64 / run.time.as_secs_f64();
            let order = match (run.inversions, subject.keeps_order()) {
                (0, _) => String::new(),
                (n, true) => return Err(format!("{}: {n} inversions", subject.name()).into()),
                (n, false) => format!(", {n} inversions"),
            };
            eprintln!(
                "round {round}: {:<28} {per_second:>8.0}/s, {cpu:.1} µs of processor time per message{order}",
                subject.name()
            );
            let rates = rates.entry(subject).or_default();
            rates.per_second.push(per_second);
            rates.cpu_us.push(cpu);
        }
    }
    let laneway = median(&rates[&Subject::Laneway].per_second);
    println!(
        "| subject | messages/s (range) | Laneway's ratio to it | µs per message | order per key |"
    );
    println!("|---|---|---|---|---|");
    for (subject, rates) in &rates {
        let (low, high) = rates
            .per_second
            .iter()
            .fold((f64::MAX, 0.0_f64), |(low, high), &rate| {
                (low.min(rate), high.max(rate))
            });
        let rate = median(&rates.per_second);
        println!(
            "| {} | {rate:.0} ({low:.0}–{high:.0}) | {:.2} | {:.1} | {} |",
            subject.name(),
            laneway / rate,
            median(&rates.cpu_us),
            if subject.keeps_order() { "yes" } else { "no" },
        );
    }
    Ok(())
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Processor time of this process so far: user and system, from `/proc` in ticks of 10 ms.
fn cpu_seconds() -> Result<f64, Box<dyn std::error::Error>> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // The second field is the program's name in parentheses, and may hold spaces.
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let fields: Vec<_> = after_name.split_whitespace().collect();
    let ticks = |at: usize| -> Result<f64, Box<dyn std::error::Error>> {
        Ok(fields.get(at).ok_or("a short /proc/self/stat")?.parse()?)
    };
    Ok((ticks(11)? + ticks(12)?) / 100.0)
}
