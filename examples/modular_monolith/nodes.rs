//! Several processes of the program on one PostgreSQL: as their parent sees them, and as one of them lives.
//!
//! A node is told its plan by a line on standard input, and to stop by another one. Should its parent be killed, its
//! input ends without that, and it kills itself: the program has crashed as a whole.

use std::error::Error;
use std::io::{self, BufRead, Write, stdin};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

use laneway::prelude::shutdown_signal;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::Ended;
use crate::life::{self, Plan};
use crate::progress::until_done;
use crate::tables::Database;
use crate::{census, crash};

/// A drain takes as long as the handlers that run, which are short; on a busy machine longer.
const PATIENCE: Duration = Duration::from_secs(60);
const STOP: &str = "stop";

/// Starts so many nodes, lets them work until everything is done, and then drain. One that is killed is not
/// replaced: the others take over.
pub(crate) async fn together(
    plan: &Plan,
    database: &Database,
    nodes: u32,
) -> Result<Ended, String> {
    let store = census::open(&plan.place)
        .await
        .map_err(|error| error.to_string())?;
    let mut fleet = Fleet::start(plan, nodes)?;
    let ended = tokio::select! {
        done = until_done(database, &*store, plan.orders) => done.map(|()| Ended::Done),
        ended = fleet.all_ended() => ended,
        () = shutdown_signal() => Ok(Ended::Interrupted),
    };
    let stopped = fleet.stop().await;
    store.close().await;
    // What came first is the reason of what came after.
    let ended = ended?;
    stopped.map(|()| ended)
}

/// All nodes. Dropping it kills them, as the end of this process does.
struct Fleet {
    inputs: Vec<ChildStdin>,
    endings: mpsc::UnboundedReceiver<(usize, io::Result<ExitStatus>)>,
    living: usize,
}

impl Fleet {
    fn start(plan: &Plan, nodes: u32) -> Result<Self, String> {
        let cannot = |error: io::Error| format!("cannot start a node: {error}");
        let (ends, endings) = mpsc::unbounded_channel();
        let mut fleet = Self {
            inputs: Vec::new(),
            endings,
            living: 0,
        };
        for number in 1..=nodes as usize {
            let (mut child, input) = spawn(plan).map_err(cannot)?;
            fleet.inputs.push(input);
            fleet.living += 1;
            let ends = ends.clone();
            // An error means that nobody wants to know any more.
            std::thread::spawn(move || drop(ends.send((number, child.wait()))));
        }
        Ok(fleet)
    }

    /// Resolves when the last node has been killed.
    async fn all_ended(&mut self) -> Result<Ended, String> {
        while self.living > 0 {
            let (number, status) = self.next_ending().await?;
            if !was_killed(status) {
                return Err(format!("node {number} has ended by itself: {status}"));
            }
            eprintln!(
                "node {number} was killed; {} are left to take over",
                self.living
            );
        }
        Ok(Ended::Crashed)
    }

    async fn next_ending(&mut self) -> Result<(usize, ExitStatus), String> {
        let ending = self.endings.recv().await;
        let (number, status) = ending.ok_or("nobody waits for the nodes")?;
        self.living -= 1;
        let status = status.map_err(|error| format!("node {number}: {error}"))?;
        Ok((number, status))
    }

    /// Lets them drain, all at the same time.
    async fn stop(mut self) -> Result<(), String> {
        for input in &mut self.inputs {
            // An error means that it has ended.
            let _ = writeln!(input, "{STOP}");
        }
        let stopping = async {
            while self.living > 0 {
                let (number, status) = self.next_ending().await?;
                if !status.success() && !was_killed(status) {
                    return Err(format!("node {number} has failed: {status}"));
                }
            }
            Ok(())
        };
        let stopped = timeout(PATIENCE, stopping).await;
        stopped.map_err(|_| format!("a node did not stop within {PATIENCE:?}"))?
    }
}

fn spawn(plan: &Plan) -> io::Result<(Child, ChildStdin)> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--node").stdin(Stdio::piped());
    // Ctrl-C on a terminal goes to the parent alone, which then lets the nodes drain.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command.stdout(Stdio::null()).spawn()?;
    let Some(mut input) = child.stdin.take() else {
        unreachable!("it was asked for just above");
    };
    writeln!(input, "{}", serde_json::to_string(plan)?)?;
    Ok((child, input))
}

#[cfg(unix)]
fn was_killed(status: ExitStatus) -> bool {
    std::os::unix::process::ExitStatusExt::signal(&status).is_some()
}

#[cfg(not(unix))]
fn was_killed(status: ExitStatus) -> bool {
    !status.success()
}

/// The whole life of a node.
pub(crate) async fn be_one() -> Result<(), Box<dyn Error>> {
    let mut line = String::new();
    stdin().read_line(&mut line)?;
    let plan: Plan = serde_json::from_str(&line)?;
    let (stop, stopped) = oneshot::channel();
    // On a thread of its own, which nobody waits for: tokio's would hold up the end of this process.
    std::thread::spawn(move || {
        let mut line = String::new();
        match stdin().lock().read_line(&mut line) {
            Ok(_) if line.trim_end() == STOP => drop(stop.send(())),
            _ => crash::now(),
        }
    });
    let database = Database::open(&plan.place).await?;
    let bus = life::start(&plan, &database).await?;
    let until = async {
        let stopped = stopped.await;
        stopped.map_err(|_| "nobody listens to the parent".to_owned())
    };
    life::work(&bus, &plan, &database, until).await?;
    database.close().await;
    Ok(())
}
