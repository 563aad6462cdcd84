//! You will see order events among which some are poison (their handler fails, panics or takes too long, or
//! their body does not decode), and what becomes of each: it is parked, or holds its key first; the other
//! orders go on; and in the end it is replayed to a mended program and handled.
//!
//! ```text
//! cargo run --release --example poison_orders
//! cargo run --release --example poison_orders -- --poison-mode block --amqp amqp://guest:guest@localhost
//! ```
//!
//! [`start`] below is all that an application writes, and [`replay`](replay::replay) what its operator does
//! about parked events; [`rounds`] publishes and looks after held keys, the rest counts.

#[path = "../shared/broker.rs"]
mod broker;
mod events;
mod handlers;
mod options;
mod plan;
mod replay;
mod report;
mod rounds;
mod work;

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use laneway::actors::port::Publisher;
use laneway::parked::ParkedList;
use laneway::prelude::*;
use laneway::testing::OrderLedger;
use laneway::transport::Transport;
use laneway::{ConfigError, EndpointBuilder, RunError, ShutdownReport, Topology};

use broker::{Broker, fresh_run_id};
use events::{KEY_HEADER, OrderEvent};
use handlers::{HANDLER_TIMEOUT, MendedShip, Ship};
use options::Options;
use plan::Plan;
use report::Report;
use rounds::Rounds;
use work::Work;

/// How long running handlers may take after SIGTERM.
const DRAIN: Duration = Duration::from_secs(12);

/// The names of this run's queues.
struct Names {
    orders: String,
    parked: String,
}

impl Names {
    fn of(run: &str) -> Self {
        let orders = format!("poison-orders-{run}");
        Self {
            parked: format!("{orders}-parked"),
            orders,
        }
    }

    fn describe(&self, topology: Topology, options: &Options) -> Topology {
        topology.queue(&self.orders, |q| {
            q.durable()
                .of_type(options.queue_type.into())
                .single_active_consumer()
                .parking(&self.parked, &self.parked)
        })
    }
}

/// A run: where its queues are, and what has happened.
struct Run {
    options: Options,
    broker: Broker,
    names: Names,
    work: Arc<Work>,
    /// Of this run's own, so that both programs show a key alike.
    secret: [u8; 16],
}

impl Run {
    /// What an application writes.
    async fn start(
        &self,
        handler: impl FnOnce(EndpointBuilder) -> EndpointBuilder,
    ) -> Result<Bus, ConfigError> {
        let credits = self.work.plan.credits().min(Plan::MOST_CREDITS) as u32;
        self.broker
            .bus()
            .topology(|t| self.names.describe(t, &self.options))
            .endpoint(&self.names.orders, |e| {
                handler(
                    e.ordered_by_header(KEY_HEADER)
                        .transport_affinity(TransportAffinity::SingleActiveConsumer)
                        .concurrency(16)
                        .max_in_flight(credits)
                        .max_delivery_attempts(3)
                        .backoff(Backoff::constant(Duration::from_millis(50)))
                        .handler_timeout(HANDLER_TIMEOUT)
                        .poison_mode(self.options.poison_mode.into()),
                )
            })
            .publishes::<OrderEvent>(|r| {
                r.to_queue(&self.names.orders).keyed_by(|event| event.order)
            })
            .fingerprint_secret(&self.secret)
            .drain_deadline(DRAIN)
            .build()?
            .start()
            .await
    }

    /// The program that poison events break.
    async fn rounds(&self) -> Result<(), ConfigError> {
        let handler = Ship(Arc::clone(&self.work));
        let bus = self.start(|e| e.handler(handler)).await?;
        tokio::spawn(Arc::clone(&self.work).watch(bus.events()));
        let rounds = Rounds {
            bus: &bus,
            foreign: self.foreign(),
            orders: &self.names.orders,
            mode: self.options.poison_mode,
            work: &self.work,
        };
        // When it ends early, the work says why.
        let ended = bus.run_until(async { drop(rounds.run().await) }).await;
        self.note(ended);
        Ok(())
    }

    /// The mended program, to which what is parked is replayed.
    async fn replay(&self) -> Result<Option<ParkedList>, ConfigError> {
        let handler = MendedShip(Arc::clone(&self.work));
        let bus = self.start(|e| e.handler(handler)).await?;
        tokio::spawn(Arc::clone(&self.work).watch(bus.events()));
        let mut list = None;
        let ended = bus
            .run_until(async {
                list = replay::replay(&bus, &self.names.orders, &self.work)
                    .await
                    .ok();
            })
            .await;
        self.note(ended);
        Ok(list)
    }

    fn note(&self, ended: Result<ShutdownReport, RunError>) {
        match ended {
            Ok(report) if report.is_clean() => {}
            Ok(_) => drop(
                self.work
                    .fail(format!("handlers still ran after {DRAIN:?}")),
            ),
            Err(error) => drop(self.work.fail(error.to_string())),
        }
    }

    fn foreign(&self) -> Arc<dyn Publisher> {
        match &self.broker {
            Broker::Memory(memory) => memory.publisher(),
            Broker::RabbitMq(rabbitmq) => rabbitmq.publisher(),
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let (options, plan) = Options::read();
    match poison_orders(options, plan).await {
        Ok(exit_code) => exit_code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn poison_orders(options: Options, plan: Plan) -> Result<ExitCode, Box<dyn Error>> {
    let broker = Broker::at(options.amqp.as_deref())?;
    let id = options.run.clone().unwrap_or_else(fresh_run_id);
    let names = Names::of(&id);
    refuse_queues_of_another(&broker, &id, &names).await?;
    let work = Arc::new(Work::new(plan, open_ledger(options.ledger.as_deref())?));
    let run = Run {
        broker,
        names,
        work: Arc::clone(&work),
        secret: std::array::from_fn(|_| fastrand::u8(..)),
        options,
    };

    // SIGTERM or Ctrl-C: nothing new is published or started; what is under way is finished.
    let signal = tokio::spawn({
        let stop = work.stop.clone();
        async move {
            shutdown_signal().await;
            stop.cancel();
        }
    });
    // Where the first start fails nothing is removed: what is there can be somebody else's.
    run.rounds().await?;
    let replayed = if work.stop.is_cancelled() {
        Ok(None)
    } else {
        run.replay().await
    };
    signal.abort();

    let figures = work.ledger.figures()?;
    let queues = [&*run.names.orders, &*run.names.parked];
    let waiting = if work.is_interrupted() {
        run.broker.waiting(&queues, figures.lost).await.map(Some)
    } else {
        Ok(None)
    };
    let topology = run.names.describe(Topology::default(), &run.options);
    run.broker.remove(&topology).await;
    let list = replayed?;
    let report = Report::new(&work, figures, waiting?);
    if run.options.json {
        report.print_json();
    } else {
        if let Some(list) = list {
            replay::print(&list, &work);
        }
        report.print_for_people();
    }
    report.print_trouble();
    Ok(report.exit_code())
}

/// Removing queues at the end must not remove those of another run.
async fn refuse_queues_of_another(broker: &Broker, id: &str, names: &Names) -> Result<(), String> {
    let Broker::RabbitMq(rabbitmq) = broker else {
        return Ok(());
    };
    match rabbitmq.ready(&names.orders).await {
        Ok(_) => Err(format!(
            "--run {id}: queue `{}` is there already, from a run that is under way or was killed; choose another name, or delete the queue",
            names.orders
        )),
        // It is not there. If the broker cannot be reached, the start says so.
        Err(_) => Ok(()),
    }
}

/// In memory, unless a folder is named: one that holds no ledger yet, because all its files are counted.
fn open_ledger(folder: Option<&Path>) -> Result<OrderLedger, String> {
    let Some(folder) = folder else {
        return Ok(OrderLedger::in_memory());
    };
    let cannot = |error: std::io::Error| format!("--ledger {}: {error}", folder.display());
    if folder.exists() {
        for entry in folder.read_dir().map_err(cannot)? {
            let path = entry.map_err(cannot)?.path();
            if path.extension().is_some_and(|end| end == "jsonl") {
                return Err(format!(
                    "--ledger {}: holds the ledger of an earlier run; choose another folder",
                    folder.display()
                ));
            }
        }
    }
    OrderLedger::in_folder(folder).map_err(cannot)
}
