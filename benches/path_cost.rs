//! What a message costs, in instructions and allocations: on an endpoint without order and on one with; and
//! from a source that delivers in batches of 1, 16 and 64 to the lanes and back.
//!
//! ```text
//! cargo bench --bench path_cost
//! ```
//! runs itself under valgrind, for two numbers of messages each, and takes the difference, so that
//! starting and stopping cancel out; then it subtracts what making the messages (and putting them into the
//! broker) costs. Counts do not depend on what else the machine does, unlike time. It fails when an endpoint
//! that did not ask for order pays for it, and when the path costs more than its budget.
//!
//! With arguments, `path_cost PATH N`, it is what is measured: N messages of [`KEYS`] keys, all with the key in a
//! header, and a handler that does nothing. `plain` and `ordered` go through the embedded broker, into which
//! `nothing` only puts them; `batches-1`, `-16` and `-64` come from a source without any broker, for which
//! `made` only makes them.

#[path = "shared/batches.rs"]
mod batches;

use std::process::{Command, ExitCode};

use laneway::actors::Encoding;
use laneway::actors::port::{Destination, Outgoing};
use laneway::prelude::*;
use laneway::transport::Transport;
use laneway::{BusBuilder, EndpointBuilder, Envelope, Topology};
use serde::{Deserialize, Serialize};

use batches::Batches;

const QUEUE: &str = "orders";
const HEADER: &str = "order";
/// Enough that a key is rarely met twice among the messages in flight.
const KEYS: u64 = 1_000;
/// The difference of these is what is counted.
const FEW: u64 = 2_000;
const MANY: u64 = 10_000;

/// A message without order costs 0.69 to 0.87 of one with order. More means that it does what only order needs.
const SHARE_AT_MOST: f64 = 0.93;
/// It takes 4.4 allocations less: the key, its track in the lane, and smaller batches for more lanes. To look a key
/// up is one.
const ALLOCATIONS_LESS: f64 = 2.5;

/// What a message may cost from a source to its lane and back, by how many come at once: instructions and
/// allocations, about a tenth more than was measured.
const BUDGETS: [(Path, f64, f64); 3] = [
    (Path::Batches(1), 16_900.0, 11.0),
    (Path::Batches(16), 15_400.0, 9.6),
    (Path::Batches(64), 13_500.0, 8.0),
];

#[derive(Serialize, Deserialize)]
struct OrderEvent {
    order: u64,
    seq: u64,
}

impl Message for OrderEvent {
    const TYPE: &'static str = "order-event";
}

async fn handle(_: OrderEvent, _: Context) -> Result<(), Failure> {
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        [] | ["--bench"] => measure(),
        [path, messages] => match (Path::named(path), messages.parse()) {
            (Some(path), Ok(messages)) => {
                run(path, messages);
                Ok(())
            }
            _ => Err("no such path, or no number".to_owned()),
        },
        _ => Err("arguments: none, or a path and a number".to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("path_cost: {what}");
            ExitCode::FAILURE
        }
    }
}

// ---- what is measured

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Path {
    /// Into the embedded broker.
    Nothing,
    Plain,
    Ordered,
    /// Into memory.
    Made,
    /// From a source in batches of so many.
    Batches(usize),
}

impl Path {
    fn name(self) -> String {
        match self {
            Self::Nothing => "nothing".to_owned(),
            Self::Plain => "plain".to_owned(),
            Self::Ordered => "ordered".to_owned(),
            Self::Made => "made".to_owned(),
            Self::Batches(size) => format!("batches-{size}"),
        }
    }

    fn named(name: &str) -> Option<Self> {
        let others = [Self::Nothing, Self::Plain, Self::Ordered, Self::Made];
        let budgeted = BUDGETS.map(|(path, ..)| path);
        let mut all = others.into_iter().chain(budgeted);
        all.find(|path| path.name() == name)
    }
}

fn run(path: Path, messages: u64) {
    // The fewest threads there can be: one for handlers, one of the actors, and this one.
    let handlers = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime starts");
    let here = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime starts");
    let with_handlers = |builder: BusBuilder| builder.handler_runtime(handlers.handle().clone());
    here.block_on(async {
        if let Path::Batches(size) = path {
            let batches = Batches::of(size, (0..messages).map(envelope));
            let builder = Bus::builder().transport(batches.clone());
            let builder = with_handlers(builder);
            return consume(builder, true, messages, batches.settled()).await;
        }
        if path == Path::Made {
            drop(Batches::of(1, (0..messages).map(envelope)));
            return;
        }
        let broker = MemoryBroker::new();
        fill(&broker, messages).await;
        if path == Path::Nothing {
            return;
        }
        let builder = with_handlers(Bus::builder().memory(broker.clone()));
        let ordered = path == Path::Ordered;
        consume(builder, ordered, messages, broker.wait_empty(QUEUE)).await;
    });
}

async fn consume(builder: BusBuilder, ordered: bool, messages: u64, all: impl Future<Output = ()>) {
    let order = |e: EndpointBuilder| match ordered {
        true => e.ordered_by_header(HEADER).local_partitioned(),
        false => e,
    };
    let bus = builder
        .topology(queue)
        .endpoint(QUEUE, |e| {
            order(e)
                .concurrency(16)
                .max_in_flight(256)
                .discard_poison()
                .handler(handle)
        })
        .build()
        .expect("valid")
        .start()
        .await
        .expect("starts");
    all.await;
    let handled = bus.snapshot().await.endpoints[0].handled;
    assert_eq!(handled, messages);
    bus.shutdown(std::time::Duration::from_secs(10)).await;
}

fn queue(topology: Topology) -> Topology {
    topology.queue(QUEUE, |q| q)
}

async fn fill(broker: &MemoryBroker, messages: u64) {
    let topology = queue(Topology::default());
    broker
        .declare_queue(&topology.queues()[0])
        .expect("nothing has this name");
    let publisher = broker.publisher();
    for number in 0..messages {
        let outgoing = Outgoing {
            destination: Destination::Queue(QUEUE.into()),
            envelope: envelope(number),
            key: None,
        };
        publisher.publish(outgoing).await.expect("taken");
    }
}

fn envelope(number: u64) -> Envelope {
    let message = OrderEvent {
        order: number % KEYS,
        seq: number / KEYS + 1,
    };
    let mut envelope = Envelope::of(&message, Encoding::Json).expect("encodes");
    envelope.set_key(HEADER, &message.order.into());
    envelope
}

// ---- measuring

/// What a message costs.
#[derive(Debug, Clone, Copy)]
struct Cost {
    instructions: f64,
    allocations: f64,
    bytes: f64,
}

fn measure() -> Result<(), String> {
    println!("per message      instructions  allocations   bytes");
    let order = without_order();
    let budgets = within_budgets();
    order.and(budgets)
}

/// What the paths through the embedded broker cost, and whether the one without order pays for order.
fn without_order() -> Result<(), String> {
    let nothing = per_message(Path::Nothing)?;
    let plain = per_message(Path::Plain)?.beyond(nothing);
    let ordered = per_message(Path::Ordered)?.beyond(nothing);
    plain.print("not ordered");
    ordered.print("ordered");
    let share = plain.instructions / ordered.instructions;
    let less = ordered.allocations - plain.allocations;
    println!("without order: {share:.3} of the instructions, {less:.2} allocations less");
    if share > SHARE_AT_MOST || less < ALLOCATIONS_LESS {
        return Err(format!(
            "an endpoint without order pays for it: at most {SHARE_AT_MOST} of the instructions and at \
             least {ALLOCATIONS_LESS} allocations less are right"
        ));
    }
    Ok(())
}

/// What the path from a source to the lanes and back costs, and whether that is within its budgets.
fn within_budgets() -> Result<(), String> {
    let made = per_message(Path::Made)?;
    let mut too_much = Vec::new();
    for (path, instructions, allocations) in BUDGETS {
        let cost = per_message(path)?.beyond(made);
        cost.print(&path.name());
        if cost.instructions > instructions || cost.allocations > allocations {
            too_much.push(format!(
                "{} costs more than its budget of {instructions} instructions and {allocations} allocations",
                path.name()
            ));
        }
    }
    match too_much.is_empty() {
        true => Ok(()),
        false => Err(too_much.join("; ")),
    }
}

impl Cost {
    fn print(self, name: &str) {
        let Self {
            instructions,
            allocations,
            bytes,
        } = self;
        println!("{name:<16} {instructions:>12.0} {allocations:>12.2} {bytes:>7.0}");
    }

    fn beyond(self, other: Self) -> Self {
        Self {
            instructions: self.instructions - other.instructions,
            allocations: self.allocations - other.allocations,
            bytes: self.bytes - other.bytes,
        }
    }
}

fn per_message(path: Path) -> Result<Cost, String> {
    let few = total(path, FEW)?;
    let many = total(path, MANY)?;
    let each = |few: u64, many: u64| (many as f64 - few as f64) / (MANY - FEW) as f64;
    Ok(Cost {
        instructions: each(few[0], many[0]),
        allocations: each(few[1], many[1]),
        bytes: each(few[2], many[2]),
    })
}

/// Instructions, allocations and bytes allocated of a whole run.
fn total(path: Path, messages: u64) -> Result<[u64; 3], String> {
    let text = valgrind(
        path,
        messages,
        "callgrind",
        "--callgrind-out-file=/dev/null",
    )?;
    let instructions = numbers_after(&text, "Collected :")?;
    let text = valgrind(path, messages, "dhat", "--dhat-out-file=/dev/null")?;
    let heap = numbers_after(&text, "Total:")?;
    match (&instructions[..], &heap[..]) {
        (&[instructions], &[bytes, blocks]) => Ok([instructions, blocks, bytes]),
        _ => Err(format!("this valgrind reports differently:\n{text}")),
    }
}

fn valgrind(path: Path, messages: u64, tool: &str, option: &str) -> Result<String, String> {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    // On one processor, so that there is one thread of the actors on every machine.
    let output = Command::new("taskset")
        .args(["--cpu-list", &a_processor()?, "valgrind"])
        .args([&format!("--tool={tool}"), option])
        .arg(own)
        .args([path.name(), messages.to_string()])
        .output()
        .map_err(|error| format!("taskset (Debian: util-linux) does not run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() {
        Ok(text)
    } else {
        Err(format!(
            "valgrind (Debian: apt-get install valgrind) failed: {}\n{text}",
            output.status
        ))
    }
}

/// The first processor that this process may use.
fn a_processor() -> Result<String, String> {
    let status = std::fs::read_to_string("/proc/self/status")
        .map_err(|error| format!("/proc/self/status: {error}"))?;
    status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .and_then(|list| list.trim().split([',', '-']).next())
        .map(str::to_owned)
        .ok_or_else(|| "/proc/self/status names no processor".to_owned())
}

/// The numbers in the line of valgrind's output that has `mark`.
fn numbers_after(text: &str, mark: &str) -> Result<Vec<u64>, String> {
    let line = text
        .lines()
        .find_map(|line| line.split_once(mark))
        .ok_or_else(|| format!("valgrind printed no `{mark}`:\n{text}"))?
        .1;
    Ok(line
        .split_whitespace()
        .filter_map(|word| word.replace(',', "").parse().ok())
        .collect())
}
