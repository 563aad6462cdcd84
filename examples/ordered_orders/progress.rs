//! What can be seen while it runs: a bar on a terminal, else a line every few seconds. On standard
//! error, so that standard output holds the summary alone.

use std::io::{IsTerminal, stderr};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use laneway::{Event, EventKind};
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio::task::JoinHandle;

use crate::options::Options;
use crate::work::Work;

/// Shows the progress until it is finished.
pub(crate) struct Progress {
    bar: ProgressBar,
    tasks: [JoinHandle<()>; 2],
}

impl Progress {
    pub(crate) fn start(work: &Arc<Work>, options: &Options, events: Receiver<Event>) -> Self {
        let bar = ProgressBar::new(options.messages).with_style(style());
        let tasks = if stderr().is_terminal() {
            bar.enable_steady_tick(Duration::from_millis(100));
            [
                tokio::spawn(draw(Arc::clone(work), bar.clone())),
                tokio::spawn(tell(events, bar.clone())),
            ]
        } else {
            bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
            [
                tokio::spawn(lines(Arc::clone(work), options.messages)),
                tokio::spawn(tell(events, bar.clone())),
            ]
        };
        Self { bar, tasks }
    }

    pub(crate) fn finish(self) {
        for task in &self.tasks {
            task.abort();
        }
        self.bar.finish_and_clear();
    }
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("{wide_bar} {human_pos}/{human_len}  {msg}  {eta} left")
        .expect("cannot fail because the template is well-formed")
}

async fn draw(work: Arc<Work>, bar: ProgressBar) {
    let mut ticks = tokio::time::interval(Duration::from_millis(100));
    loop {
        ticks.tick().await;
        bar.set_position(work.done_count.load(Relaxed));
        bar.set_message(format!("{:.0}/s  {}", bar.per_sec(), state(&work)));
    }
}

async fn lines(work: Arc<Work>, messages: u64) {
    let mut ticks = tokio::time::interval(Duration::from_secs(3));
    let mut last = (Instant::now(), work.done_count.load(Relaxed));
    ticks.tick().await; // the first comes at once
    loop {
        ticks.tick().await;
        let now = (Instant::now(), work.done_count.load(Relaxed));
        let rate = (now.1 - last.1) as f64 / (now.0 - last.0).as_secs_f64();
        eprintln!(
            "{} of {} events done, {rate:.0} per second, {}",
            HumanCount(now.1),
            HumanCount(messages),
            state(&work)
        );
        last = now;
    }
}

fn state(work: &Work) -> String {
    format!(
        "{} orders in flight, {} parked",
        work.running.load(Relaxed),
        HumanCount(work.parked_count.load(Relaxed))
    )
}

/// Says what a person should know at once. Failed attempts and gaps are only counted here.
async fn tell(mut events: Receiver<Event>, bar: ProgressBar) {
    loop {
        let event = match events.recv().await {
            Ok(event) => event,
            Err(RecvError::Lagged(_)) => continue, // the summary does not depend on events
            Err(RecvError::Closed) => return,
        };
        let endpoint = &event.endpoint;
        let line = match event.kind {
            EventKind::Connected { reconnects, .. } if reconnects > 0 => {
                format!("{endpoint}: connected again")
            }
            EventKind::Disconnected {
                reason, retry_in, ..
            } => {
                format!("{endpoint}: disconnected ({reason}), next try in {retry_in:.1?}")
            }
            EventKind::ParkingFailed { error, .. } => format!("{endpoint}: cannot park: {error}"),
            EventKind::Stuck { .. } => format!("{endpoint}: a handler blocks"),
            EventKind::ActorRestarted { actor } => format!("{endpoint}: {actor} restarted"),
            EventKind::Failed { reason } => format!("{endpoint}: failed: {reason}"),
            _ => continue,
        };
        bar.suspend(|| eprintln!("{line}"));
    }
}
