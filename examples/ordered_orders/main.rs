//! You will see order events published and handled, the events of one order strictly in order and
//! different orders in parallel, with a bar while it runs and a proof in figures at the end.
//!
//! ```text
//! cargo run --release --example ordered_orders
//! cargo run --release --example ordered_orders -- --amqp amqp://guest:guest@localhost --poison 20
//! ```
//!
//! [`start`] below is all that an application writes; the rest publishes, watches and counts.

#[path = "../shared/broker.rs"]
mod broker;
mod options;
mod progress;
mod publish;
mod report;
mod run;
mod work;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use laneway::prelude::*;
use laneway::{ConfigError, Topology};
use tokio_util::sync::CancellationToken;

use broker::Broker;
use options::Options;
use progress::Progress;
use report::Report;
use run::Run;
use work::{NoteParked, OrderEvent, Ship, Work};

/// How long running handlers may take after SIGTERM. The longest `--handler-ms` fits in.
const DRAIN: Duration = Duration::from_secs(12);
/// With everything published, connected, and no handler called for so long, nothing will come.
const SILENCE: Duration = Duration::from_secs(60);

/// The names of this run's queues.
struct Names {
    orders: String,
    parked: String,
}

impl Names {
    fn of(run: &Run) -> Self {
        let orders = format!("ordered-orders-{}", run.id);
        Self {
            parked: format!("{orders}-parked"),
            orders,
        }
    }

    fn describe(&self, topology: Topology, options: &Options) -> Topology {
        let kind = options.queue_type.into();
        topology
            .queue(&self.orders, |q| {
                q.durable()
                    .of_type(kind)
                    .single_active_consumer()
                    .parking(&self.parked, &self.parked)
            })
            .queue(&self.parked, |q| q.durable().of_type(kind))
    }
}

/// What an application writes.
async fn start(
    broker: &Broker,
    names: &Names,
    options: &Options,
    work: &Arc<Work>,
) -> Result<Bus, ConfigError> {
    broker
        .bus()
        .topology(|t| names.describe(t, options))
        .endpoint(&names.orders, |e| {
            e.ordered_by_header("order")
                .transport_affinity(TransportAffinity::SingleActiveConsumer)
                .concurrency(options.concurrency)
                .max_delivery_attempts(3)
                .backoff(Backoff::constant(Duration::from_millis(10)))
                .handler(Ship(Arc::clone(work)))
        })
        .endpoint(&names.parked, |e| {
            e.discard_poison().handler(NoteParked(Arc::clone(work)))
        })
        .publishes::<OrderEvent>(|r| r.to_queue(&names.orders).keyed_by(|event| event.order))
        .drain_deadline(DRAIN)
        .build()?
        .start()
        .await
}

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::read();
    match orders(&options).await {
        Ok(report) => {
            report.print(&options);
            report.exit_code()
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn orders(options: &Options) -> Result<Report, Box<dyn std::error::Error>> {
    let broker = Broker::at(options.amqp.as_deref())?;
    let run = Run::open(options)?;
    let names = Names::of(&run);
    let work = Arc::new(Work::new(options, run.ledger.clone(), &run.earlier));
    let bus = match start(&broker, &names, options, &work).await {
        Ok(bus) => bus,
        Err(error) => {
            run.remove_unused();
            return Err(error.into());
        }
    };
    let progress = Progress::start(&work, options, bus.events());

    // SIGTERM or Ctrl-C: nothing new is published or started; what is under way is finished.
    let stop = CancellationToken::new();
    let signal = {
        let stop = stop.clone();
        tokio::spawn(async move {
            shutdown_signal().await;
            stop.cancel();
        })
    };
    let mut trouble = None;
    let ended = bus
        .run_until(async {
            let publishing = publish::publish_all(&bus, &work, &run.earlier.published, &stop);
            match publishing.await {
                Err(error) => trouble = Some(format!("cannot publish: {error}")),
                Ok(()) => tokio::select! {
                    () = work.all_done() => {}
                    () = stop.cancelled() => {}
                    () = silence(&bus, &names, &work) => {
                        trouble = Some(format!("nothing came for {SILENCE:?}"));
                    }
                },
            }
        })
        .await;
    // The drain has acknowledged everything that was handled: this is the last settle.
    let tail = work.since_last_end();
    signal.abort();
    progress.finish();
    let clean = match ended {
        Ok(report) => report.is_clean(),
        Err(error) => {
            trouble = Some(error.to_string());
            false
        }
    };

    let figures = run.ledger.figures()?;
    let complete = work.done_count.load(Relaxed) == options.messages;
    // An interrupted run leaves its queues, and the messages in them.
    let waiting = if stop.is_cancelled() && !complete {
        let queues = [&*names.orders, &*names.parked];
        Some(broker.waiting(&queues, figures.lost).await?)
    } else {
        None
    };
    let report = Report::new(options, figures, tail, waiting, clean, trouble);
    match &broker {
        Broker::RabbitMq(_) if waiting.is_some() => {
            eprintln!(
                "stopped; what is left waits in `{}`. To continue: the same command with {}",
                names.orders,
                run.to_continue(options)
            );
        }
        Broker::RabbitMq(_) => {
            let topology = names.describe(Topology::default(), options);
            broker.remove(&topology).await;
            run.remove_temporary();
        }
        Broker::Memory(_) => {
            if waiting.is_some() {
                eprintln!("stopped; what was left in the embedded broker ends with this process");
            }
        }
    }
    Ok(report)
}

/// Resolves when deliveries flow and yet no handler was called for [`SILENCE`]. (A broker that is away is
/// waited for; SIGTERM ends that.)
async fn silence(bus: &Bus, names: &Names, work: &Work) {
    let mut checks = tokio::time::interval(Duration::from_secs(1));
    let mut silent = Duration::ZERO;
    let mut seen = work.attempts.load(Relaxed);
    while silent < SILENCE {
        checks.tick().await;
        let attempts = work.attempts.load(Relaxed);
        let snapshot = bus.snapshot().await;
        let flows = snapshot
            .endpoint(&names.orders)
            .is_some_and(|endpoint| endpoint.state == laneway::EndpointState::Running);
        silent = if flows && attempts == seen {
            silent + Duration::from_secs(1)
        } else {
            Duration::ZERO
        };
        seen = attempts;
    }
}
