//! The instances, as their parent sees them: started, killed, replaced, stopped.
//!
//! Promises that none outlives the fleet: dropping it kills them; and should this process itself be killed,
//! their standard input ends, upon which they drain.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use futures::future::select_all;
use laneway::testing::OrderLedger;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::instance::News;
use crate::plan::Plan;

/// Starting takes a second or two, a drain as long as a handler; on a busy machine longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// All instances of a run.
pub(crate) struct Fleet {
    plan: Plan,
    ledger: OrderLedger,
    instances: Vec<Instance>,
}

struct Instance {
    child: Child,
    state: watch::Receiver<State>,
    /// Kept open: its end tells the instance that nobody is there any more.
    _input: ChildStdin,
}

/// What is known of an instance.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    ready: bool,
    subscribed: usize,
    ended: bool,
}

impl Fleet {
    /// Starts so many instances, and waits until all of them are connected and share the queues.
    pub(crate) async fn start(
        plan: &Plan,
        ledger: &OrderLedger,
        instances: u32,
    ) -> Result<Self, String> {
        let mut fleet = Self {
            plan: plan.clone(),
            ledger: ledger.clone(),
            instances: Vec::new(),
        };
        for _ in 0..instances {
            fleet.instances.push(Instance::spawn(&fleet.plan)?);
        }
        for instance in &mut fleet.instances {
            instance.ready().await?;
        }
        fleet.attended().await?;
        Ok(fleet)
    }

    /// Waits until every queue has a subscriber. New instances listen for a second before they take any,
    /// which is no pause that a disturbance has caused.
    async fn attended(&mut self) -> Result<(), String> {
        let attended = timeout(PATIENCE, self.subscribed_to_all());
        let waited = attended.await;
        waited.map_err(|_| format!("nobody took some of the queues within {PATIENCE:?}"))?
    }

    async fn subscribed_to_all(&mut self) -> Result<(), String> {
        let queues = self.plan.queues().len();
        while self.subscriptions().iter().sum::<usize>() < queues {
            let states = self.instances.iter_mut().map(|one| &mut one.state);
            let (changed, ..) = select_all(states.map(|state| Box::pin(state.changed()))).await;
            changed.map_err(|_| "an instance has ended before it had any work".to_owned())?;
        }
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.instances.len()
    }

    /// How many queues each instance is subscribed to.
    pub(crate) fn subscriptions(&self) -> Vec<usize> {
        let states = self.instances.iter().map(|one| *one.state.borrow());
        states.map(|state| state.subscribed).collect()
    }

    /// An instance that has ended although nobody asked it to.
    ///
    /// # Errors
    /// That there is one.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut all = self.instances.iter();
        match all.position(|one| one.state.borrow().ended) {
            None => Ok(()),
            Some(number) => Err(format!("instance {number} has ended by itself")),
        }
    }

    /// Kills an instance, and starts another one in its place.
    pub(crate) async fn kill(&mut self, number: usize) -> Result<(), String> {
        self.instances[number].kill(&self.ledger)?;
        self.replace(number).await
    }

    /// Lets an instance drain, and starts another one in its place.
    pub(crate) async fn roll(&mut self, number: usize) -> Result<(), String> {
        self.instances[number].ask_to_stop()?;
        self.instances[number].stopped(&self.ledger).await?;
        self.replace(number).await
    }

    async fn replace(&mut self, number: usize) -> Result<(), String> {
        self.instances[number] = Instance::spawn(&self.plan)?;
        self.instances[number].ready().await
    }

    /// Lets all of them drain, at the same time.
    pub(crate) async fn stop(mut self) -> Result<(), String> {
        for instance in &self.instances {
            instance.ask_to_stop()?;
        }
        for instance in &mut self.instances {
            instance.stopped(&self.ledger).await?;
        }
        Ok(())
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for instance in &mut self.instances {
            if let Err(error) = instance.kill(&self.ledger) {
                eprintln!("{error}");
            }
        }
    }
}

impl Instance {
    fn spawn(plan: &Plan) -> Result<Self, String> {
        let cannot = |error: io::Error| format!("cannot start an instance: {error}");
        let program = std::env::current_exe().map_err(cannot)?;
        let mut command = Command::new(program);
        command.arg("--instance").stdin(Stdio::piped());
        // Ctrl-C on a terminal goes to the parent alone, which then lets the instances drain.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.stdout(Stdio::piped()).spawn().map_err(cannot)?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(mut input), Some(output)) = (input, output) else {
            unreachable!("both were asked for just above");
        };
        let (news, state) = watch::channel(State::default());
        // The pipe ends with the process.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                match line.map(|line| serde_json::from_str(&line)) {
                    Ok(Ok(News::Ready)) => news.send_modify(|state| state.ready = true),
                    Ok(Ok(News::Subscribed(count))) => {
                        news.send_modify(|state| state.subscribed = count);
                    }
                    // A line cut off by its death, most likely.
                    Ok(Err(error)) => eprintln!("an instance said something odd: {error}"),
                    Err(error) => eprintln!("an instance cannot be understood: {error}"),
                }
            }
            news.send_modify(|state| state.ended = true);
        });
        let instance = Self {
            child,
            state,
            _input: {
                let text = serde_json::to_string(plan).map_err(io::Error::from);
                text.and_then(|text| writeln!(input, "{text}"))
                    .map_err(cannot)?;
                input
            },
        };
        Ok(instance)
    }

    async fn ready(&mut self) -> Result<(), String> {
        let ready = self.state.wait_for(|state| state.ready || state.ended);
        match timeout(PATIENCE, ready).await {
            Ok(Ok(state)) if state.ready => Ok(()),
            Ok(_) => Err("an instance has ended before it was ready".to_owned()),
            Err(_) => Err(format!("an instance was not ready within {PATIENCE:?}")),
        }
    }

    fn ask_to_stop(&self) -> Result<(), String> {
        if self.state.borrow().ended {
            return Ok(()); // its number may be another process's by now
        }
        // The standard library sends no signal but SIGKILL.
        let sent = Command::new("kill")
            .args(["-TERM", &self.child.id().to_string()])
            .status();
        match sent {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("cannot ask an instance to stop: kill: {status}")),
            Err(error) => Err(format!("cannot ask an instance to stop: kill: {error}")),
        }
    }

    async fn stopped(&mut self, ledger: &OrderLedger) -> Result<(), String> {
        let ended = self.state.wait_for(|state| state.ended);
        if timeout(PATIENCE, ended).await.is_err() {
            return Err(format!("an instance did not drain within {PATIENCE:?}"));
        }
        let status = self.child.wait();
        ledger.died(self.child.id());
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("an instance did not stop in order: {status}")),
            Err(error) => Err(format!("an instance cannot be waited for: {error}")),
        }
    }

    fn kill(&mut self, ledger: &OrderLedger) -> Result<(), String> {
        let cannot = |error: io::Error| format!("cannot kill an instance: {error}");
        // Both do nothing to one that has been waited for.
        self.child.kill().map_err(cannot)?;
        self.child.wait().map_err(cannot)?;
        // After the wait: what it had started ended at the latest now.
        ledger.died(self.child.id());
        Ok(())
    }
}
