//! Each run is a process of its own, so that processor time and memory are those of one subject, and a
//! subject that hangs can be ended.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

use crate::Error;
use crate::broker::Broker;
use crate::database::Home;
use crate::machine;
use crate::record::{Record, Verdict};
use crate::subject::Job;
use crate::workload::Plan;

/// The argument that makes this program the process of a subject.
pub(crate) const ARGUMENT: &str = "--run-one-subject";

/// What a process tells of its run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) verdict: Verdict,
    /// Processor time for each message, from before it connects until it has closed.
    pub(crate) cpu_us: f64,
    /// At the end of the run, with the record of all messages (32 bytes each).
    pub(crate) resident_mib: Option<f64>,
}

/// The process of a subject: reads a job from standard input, writes the outcome to standard output.
pub(crate) async fn run() -> Result<(), Error> {
    let mut text = String::new();
    tokio::io::stdin().read_to_string(&mut text).await?;
    let job: Job = serde_json::from_str(&text)?;
    let record = Record::of(Plan::of(job.shape));
    job.subject.run(&job, &record).await?;
    let cpu_us = record.processor_us();
    let resident_mib = machine::resident_mib();
    if job.shape.poison {
        let broker = Broker::connect(&job.url).await?;
        for message in broker.take_all(&job.parked()).await? {
            record.parked(message.key, message.seq);
        }
    }
    let outcome = Outcome {
        verdict: record.verdict()?,
        cpu_us,
        resident_mib,
    };
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(())
}

/// Where jobs run.
pub(crate) struct Places {
    /// The broker, if a workload needs one.
    pub(crate) broker: Option<Broker>,
    /// For the files of SQLite.
    pub(crate) folder: PathBuf,
}

/// Runs a job in a process of its own; with `per_second` its messages are published while it runs, else
/// they are there before.
pub(crate) async fn measure(
    places: &Places,
    job: &Job,
    per_second: Option<u32>,
) -> Result<Outcome, Error> {
    if let Some(durable) = job.durable {
        let home = Home::create(durable.database, &job.url, &places.folder, &job.name).await?;
        let job = Job {
            url: home.address(),
            ..job.clone()
        };
        let result = outcome(&job, async { Ok(()) }).await;
        home.remove().await?;
        return result;
    }
    if job.queues().is_empty() {
        return outcome(job, async { Ok(()) }).await;
    }
    let broker = places.broker.as_ref().ok_or("no broker")?;
    broker.declare(job).await?;
    let result = measure_declared(broker, job, per_second).await;
    broker.delete(job).await?;
    result
}

async fn measure_declared(
    broker: &Broker,
    job: &Job,
    per_second: Option<u32>,
) -> Result<Outcome, Error> {
    let plan = Plan::of(job.shape);
    if per_second.is_none() {
        broker.publish(job, &plan, None).await?;
    }
    let publish = async {
        if per_second.is_some() {
            broker.consumed(job).await?;
            broker.publish(job, &plan, per_second).await?;
        }
        Ok(())
    };
    outcome(job, publish).await
}

/// Runs a job in a process of its own, and something beside it.
async fn outcome(
    job: &Job,
    beside: impl Future<Output = Result<(), Error>>,
) -> Result<Outcome, Error> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg(ARGUMENT)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut input = child.stdin.take().ok_or("no standard input")?;
    input.write_all(&serde_json::to_vec(job)?).await?;
    drop(input);
    let output = child.wait_with_output();
    let both = async {
        let (published, output) = tokio::join!(beside, output);
        published?;
        Ok::<_, Error>(output?)
    };
    // What the slow key takes, and five times what the slowest consumer has taken for the others.
    let bound = Duration::from_secs(120 + (job.shape.messages + job.shape.slow) / 200);
    let output = tokio::time::timeout(bound, both)
        .await
        .map_err(|_| format!("did not end within {} s", bound.as_secs()))??;
    if !output.status.success() {
        return Err(format!("its process ended with {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}
