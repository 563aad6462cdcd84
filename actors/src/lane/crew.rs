//! The crew: the tasks that run the attempts of an endpoint, on the handlers' runtime.
//!
//! A task for each attempt cost more than all decisions on its message. Most attempts wait for nothing, or
//! not at their first poll; so attempts that may start go into one queue, and a few tasks run them *one after
//! the other*, each until it ends. Promises that an attempt delays no other one for which the runtime has a
//! thread, as with a task for each:
//!
//! - *It waits (its first poll is pending).* Before that poll returns, its task calls a successor, which goes on
//!   with the queue. The successor cannot be stuck behind it: the thread is given back at once.
//! - *It blocks its thread.* When attempts are put in, as many tasks are on their way as attempts wait, or as the
//!   runtime has threads; a task ends only when it finds the queue empty. So for whatever waits a task is still
//!   on its way, or each thread of the runtime is inside an attempt that blocks. (Tasks are called from the thread
//!   of the lanes, so that any thread of the runtime may take them. One called from inside an attempt would lie
//!   in a place of that thread's own, behind the attempt that blocks it, where nobody can steal it.)
//! - *It blocks and says so (`block_in_place`),* and the runtime has another thread although all tasks are inside
//!   attempts. Then nobody comes, or fewer than there are threads. [`Crew::look_after`], which lanes call while
//!   anything runs, calls tasks again for what has waited for a while; for each attempt if none was taken meanwhile.
//!   Successors do not count there: one may lie in the place of a thread that blocks.
//! - *It finds the task's budget used up* (tokio's, for one poll of a task) by attempts before it, and is pending for
//!   nothing else. The runtime would poll it again only after what its thread runs next, and no other thread could
//!   take it. So its task is woken at once: any thread may.
//! - *Its future panics when it is dropped,* or what it panics with does. That is caught here; the task goes on.
//! - *The runtime shuts down.* It drops the tasks (called ones too, at once); the first to be dropped empties the
//!   queue, and each attempt in it reports that it was dropped.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use tokio::runtime::Handle;
use tokio::task::coop;

use super::attempt::Job;

/// For so long nothing may be taken from the queue before tasks are called again.
const PATIENCE: Duration = Duration::from_millis(250);
/// A task lets others of its thread run after so many attempts that waited for nothing, …
const IN_A_ROW: usize = 32;
/// … or when they have taken so long. (The runtime runs up to three successors before the others, and each may take
/// as long.)
const SLICE: Duration = Duration::from_micros(500);

/// What the crew runs.
pub(crate) trait Work: Send + 'static {
    /// Runs it to its end. Dropped before or in between, it reports that itself.
    fn run(self) -> impl Future<Output = ()> + Send;
}

impl Work for Job {
    fn run(self) -> impl Future<Output = ()> + Send {
        self.run()
    }
}

/// The queue of attempts, and the tasks that run them.
pub(crate) struct Crew<W = Job> {
    state: Mutex<State<W>>,
    runtime: Handle,
    /// Threads of the runtime.
    threads: usize,
}

struct State<W> {
    jobs: VecDeque<W>,
    /// Jobs taken since the start.
    taken: u64,
    /// Tasks on their way: called, and not begun.
    coming: usize,
    /// Those of them that any thread of the runtime may take: no successors.
    for_any: usize,
    /// What was seen of `taken`, and when, when somebody looked.
    seen: (u64, Instant),
}

impl<W: Work> Crew<W> {
    pub(crate) fn new(runtime: Handle) -> Arc<Self> {
        Arc::new(Self {
            threads: runtime.metrics().num_workers().max(1),
            state: Mutex::new(State {
                jobs: VecDeque::new(),
                taken: 0,
                coming: 0,
                for_any: 0,
                seen: (0, Instant::now()),
            }),
            runtime,
        })
    }

    /// Lets attempts start, in this order; leaves `jobs` empty. From a thread that runs no handlers.
    pub(super) fn put(self: &Arc<Self>, jobs: &mut Vec<W>) {
        let tasks = {
            let mut state = self.lock();
            state.jobs.extend(jobs.drain(..));
            let wanted = state.jobs.len().min(self.threads);
            let tasks = wanted.saturating_sub(state.coming);
            state.coming += tasks;
            state.for_any += tasks;
            tasks
        };
        self.call(tasks, true);
    }

    /// Calls tasks for what has waited for a while. From a thread that runs no handlers.
    pub(super) fn look_after(self: &Arc<Self>, now: Instant) {
        let tasks = {
            let mut state = self.lock();
            let (taken, at) = state.seen;
            if now.saturating_duration_since(at) < PATIENCE {
                return;
            }
            let wanted = match state.taken == taken {
                true => state.jobs.len(),
                // Some thread takes them; another one may be free.
                false => state.jobs.len().min(self.threads),
            };
            state.seen = (state.taken, now);
            let tasks = wanted.saturating_sub(state.for_any);
            state.coming += tasks;
            state.for_any += tasks;
            tasks
        };
        self.call(tasks, true);
    }

    /// Tasks that are counted as coming.
    fn call(self: &Arc<Self>, tasks: usize, for_any: bool) {
        for _ in 0..tasks {
            let member = Member {
                crew: Arc::clone(self),
                for_any,
                begun: false,
                done: false,
            };
            self.runtime.spawn(member.work());
        }
    }

    /// Calls one task if anything waits.
    fn call_successor(self: &Arc<Self>) {
        let waits = {
            let mut state = self.lock();
            let waits = !state.jobs.is_empty();
            state.coming += usize::from(waits);
            waits
        };
        self.call(usize::from(waits), false);
    }

    fn lock(&self) -> MutexGuard<'_, State<W>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<W> State<W> {
    /// One of those that are coming is not any more.
    fn begins(&mut self, for_any: bool) {
        self.coming -= 1;
        self.for_any -= usize::from(for_any);
    }
}

/// A task of the crew.
struct Member<W: Work> {
    crew: Arc<Crew<W>>,
    for_any: bool,
    begun: bool,
    /// It has found nothing to do, or has called a successor.
    done: bool,
}

impl<W: Work> Member<W> {
    async fn work(mut self) {
        let (mut in_a_row, mut since) = (0, Instant::now());
        while let Some(job) = self.next() {
            let attempt = AssertUnwindSafe(job.run()).catch_unwind();
            let mut attempt = pin!(attempt);
            let mut at_once = true;
            let ended = poll_fn(|cx| {
                let poll = attempt.as_mut().poll(cx);
                if poll.is_pending() && at_once {
                    at_once = false;
                    self.crew.call_successor();
                    if !coop::has_budget_remaining() {
                        cx.waker().wake_by_ref();
                    }
                }
                poll
            });
            // A panic has been reported as the end of the attempt.
            if let Err(panic) = ended.await
                && let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(panic)))
            {
                // Whatever its drop does, it shall not end this task.
                std::mem::forget(another);
            }
            in_a_row += 1;
            if !at_once {
                (in_a_row, since) = (0, Instant::now());
            } else if in_a_row >= IN_A_ROW || since.elapsed() >= SLICE {
                self.crew.call_successor();
                break;
            }
        }
        self.done = true;
    }

    fn next(&mut self) -> Option<W> {
        let mut state = self.crew.lock();
        if !self.begun {
            self.begun = true;
            state.begins(self.for_any);
        }
        let job = state.jobs.pop_front();
        state.taken += u64::from(job.is_some());
        job
    }
}

impl<W: Work> Drop for Member<W> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        // The runtime is shutting down: nobody else comes for what is left.
        let jobs = {
            let mut state = self.crew.lock();
            if !self.begun {
                state.begins(self.for_any);
            }
            std::mem::take(&mut state.jobs)
        };
        drop(jobs);
    }
}

#[cfg(test)]
mod tests;
