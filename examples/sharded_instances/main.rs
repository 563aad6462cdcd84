//! You will see several instances of one program share the shards of a queue, each order's events strictly
//! in order across all of them, while instances are killed, replaced or cut off; and a proof in figures.
//!
//! ```text
//! cargo run --release --example sharded_instances -- --chaos roll
//! cargo run --release --example sharded_instances -- --chaos kill --affinity sac --queue-type quorum
//! ```
//!
//! What an application writes is in `instance.rs` and `plan.rs`; the rest starts, disturbs and counts.

#[path = "../shared/broker.rs"]
#[allow(dead_code, reason = "other examples use the rest of it")]
mod broker;
mod chaos;
mod fleet;
mod history;
mod instance;
mod options;
mod plan;
// Private brokers, as the tests start them.
#[path = "../../tests/support/broker.rs"]
#[allow(dead_code, unreachable_pub, reason = "the tests use the rest of it")]
mod private;
mod publish;
mod report;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use laneway::actors::{ShardCount, ShardIndex};
use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::{ConfigError, Topology};
use tempfile::TempDir;

use broker::Broker;
use fleet::Fleet;
use history::History;
use options::{Affinity, Chaos, DISTURBANCES, Options};
use plan::{KEY_HEADER, OrderEvent, Plan};
use private::PrivateBroker;
use publish::Pace;
use report::{Measured, Report};

/// How soon after a disturbance the subscriptions must be even again.
const EVEN_AFTER: Duration = Duration::from_secs(10);
/// With events published and none handled for so long, none will be.
const SILENCE: Duration = Duration::from_secs(60);
/// Pause between two looks into the files of the ledger: they tell nobody when they grow.
const LOOK_EVERY: Duration = Duration::from_millis(50);

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::read();
    if options.instance {
        return match instance::live().await {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: instance: {error}");
                ExitCode::FAILURE
            }
        };
    }
    match run(&options).await {
        Ok(report) => {
            report.print(options.json);
            report.exit_code()
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The files of the ledger: kept, or gone in the end.
enum Folder {
    Kept(PathBuf),
    Temporary(TempDir),
}

impl Folder {
    fn open(kept: Option<&PathBuf>) -> Result<Self, Box<dyn Error>> {
        let Some(folder) = kept else {
            return Ok(Self::Temporary(tempfile::tempdir()?));
        };
        if folder.exists() && folder.read_dir()?.next().is_some() {
            let folder = folder.display();
            return Err(format!("--ledger {folder}: is not empty; choose another folder").into());
        }
        Ok(Self::Kept(folder.clone()))
    }

    fn path(&self) -> &Path {
        match self {
            Self::Kept(folder) => folder,
            Self::Temporary(folder) => folder.path(),
        }
    }
}

async fn run(options: &Options) -> Result<Report, Box<dyn Error>> {
    let folder = Folder::open(options.ledger.as_ref())?;
    let ledger = OrderLedger::in_folder(folder.path())?;
    let private = match options.chaos.needs_own_broker() {
        false => None,
        true => {
            eprintln!("starting a private broker");
            let starting = tokio::task::spawn_blocking(PrivateBroker::start).await;
            let private = starting.map_err(|_| "a private broker cannot be started; see above")?;
            Some(Arc::new(private))
        }
    };
    let url = match (&private, &options.amqp) {
        (Some(private), _) => private.url(),
        (None, Some(url)) => url.clone(),
        (None, None) => private::shared_url(),
    };
    let plan = Plan::new(options, url, folder.path().to_owned());
    let broker = Broker::at(Some(&plan.url))?;
    let declared = plan.topology(Topology::default());
    let bus = match publisher(&plan, &broker).await {
        Ok(bus) => bus,
        Err(error) => {
            broker.remove(&declared).await;
            return Err(error.into());
        }
    };

    let mut history = History::new(folder.path(), options.messages, options.keys());
    let mut measured = Measured::default();
    let trouble = work(
        options,
        &plan,
        &ledger,
        &bus,
        private.as_ref(),
        &mut history,
        &mut measured,
    )
    .await
    .err();
    let trouble = match trouble {
        Some(error) => Some(error),
        None => nothing_left(&plan, &broker).await.err(),
    };
    bus.shutdown(Duration::from_secs(5)).await;
    broker.remove(&declared).await;
    history.read_on()?;
    measured.longest_pause = longest_pause(&plan, &history);
    let trouble = trouble.map(|error| error.to_string());
    Ok(Report::new(options, ledger.figures()?, &measured, trouble))
}

/// Copies that nobody ran would be missing among the duplicates.
async fn nothing_left(plan: &Plan, broker: &Broker) -> Result<(), Box<dyn Error>> {
    let queues = plan.queues();
    let queues: Vec<_> = queues.iter().map(String::as_str).collect();
    match broker.waiting(&queues, 0).await? {
        0 => Ok(()),
        left => Err(format!("{left} messages are left in the queues").into()),
    }
}

/// A bus that only publishes.
async fn publisher(plan: &Plan, broker: &Broker) -> Result<Bus, ConfigError> {
    broker
        .bus()
        .topology(|t| plan.topology(t))
        .publishes::<OrderEvent>(|r| {
            let to_queue = r.to_queue(&plan.queue).key_header(KEY_HEADER);
            to_queue.keyed_by(|event| event.order)
        })
        .build()?
        .start()
        .await
}

/// Publishes, disturbs, waits until all is handled, and lets the instances drain.
async fn work(
    options: &Options,
    plan: &Plan,
    ledger: &OrderLedger,
    bus: &Bus,
    private: Option<&Arc<PrivateBroker>>,
    history: &mut History,
    measured: &mut Measured,
) -> Result<(), Box<dyn Error>> {
    let mut fleet = Fleet::start(plan, ledger, options.instances).await?;
    let pace = Pace::new();
    let counts = (options.messages, options.keys());
    let publishing = publish::publish_all(bus, ledger, counts, &pace);
    let disturbing = async {
        // The work comes in parts, one more than there are disturbances. Each disturbance comes when half of
        // a part is handled, and as the next part is being published: so there is always work when it comes.
        let parts = DISTURBANCES + 1;
        let part = |halves: u64| options.messages * halves / (2 * parts);
        pace.allow(part(2));
        for number in 0..DISTURBANCES {
            handled(history, &fleet, part(2 * number + 1)).await?;
            pace.allow(part(2 * number + 4));
            if options.chaos != Chaos::None {
                let done =
                    chaos::disturb(options.chaos, number, &mut fleet, private, &pace).await?;
                measured.disturbances += 1;
                eprintln!(
                    "{} of {DISTURBANCES}: {done}; subscriptions {:?}, {} events handled",
                    number + 1,
                    fleet.subscriptions(),
                    history.handled()
                );
            }
        }
        let even = Instant::now() + EVEN_AFTER;
        tokio::time::sleep_until(even.into()).await;
        let subscriptions = fleet.subscriptions();
        eprintln!("{EVEN_AFTER:?} later: subscriptions {subscriptions:?}");
        measured.subscriptions = Some(subscriptions);
        handled(history, &fleet, options.messages).await?;
        Ok::<_, Box<dyn Error>>(())
    };
    let publishing = async {
        let published = publishing.await;
        published.map_err(|error| format!("cannot publish: {error}").into())
    };
    let ended = tokio::select! {
        done = async { tokio::try_join!(publishing, disturbing) } => done.map(|_| ()),
        () = shutdown_signal() => Err("interrupted, which proves nothing".into()),
    };
    let stopped = fleet.stop().await;
    // What came first is the reason of what came after.
    ended.and(stopped.map_err(Into::into))
}

/// Waits until so many events have been handled.
async fn handled(history: &mut History, fleet: &Fleet, events: u64) -> Result<(), Box<dyn Error>> {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    let mut moved = (Instant::now(), history.handled());
    loop {
        history.read_on()?;
        let count = history.handled();
        if count >= events {
            return Ok(());
        }
        if count > moved.1 {
            moved = (Instant::now(), count);
        }
        if moved.0.elapsed() > SILENCE {
            return Err(format!("nothing was handled for {SILENCE:?}").into());
        }
        fleet.check()?;
        looks.tick().await;
    }
}

fn longest_pause(plan: &Plan, history: &History) -> Duration {
    match ShardCount::new(plan.shards) {
        Some(count) if plan.affinity == Affinity::Sharded => {
            let shards = usize::try_from(plan.shards).unwrap_or(usize::MAX);
            history.longest_pause(shards, |order| ShardIndex::of(&order.into(), count).get())
        }
        // One queue, or a map that only the broker knows.
        _ => history.longest_pause(1, |_| 0),
    }
}
