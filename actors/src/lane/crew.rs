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
//!   attempts. Then nobody comes. [`Crew::look_after`], which lanes call while anything runs, sees that nothing
//!   was taken for a while, and calls a task for each attempt.
//! - *Its future panics when it is dropped.* That is caught here; the task goes on.
//! - *The runtime shuts down.* It drops the tasks (called ones too, at once); the first to be dropped empties the
//!   queue, and each attempt in it reports that it was dropped.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use tokio::runtime::Handle;

use super::attempt::Job;

/// For so long nothing may be taken from the queue before tasks are called again.
const PATIENCE: Duration = Duration::from_millis(250);
/// A task lets others of its thread run after so many attempts that waited for nothing.
const IN_A_ROW: usize = 32;

/// The queue of attempts, and the tasks that run them.
pub(crate) struct Crew {
    state: Mutex<State>,
    runtime: Handle,
    /// Threads of the runtime.
    threads: usize,
}

struct State {
    jobs: VecDeque<Job>,
    /// Jobs taken since the start.
    taken: u64,
    /// Tasks on their way: called, and not begun.
    coming: usize,
    /// What was seen of `taken`, and when, when somebody looked.
    seen: (u64, Instant),
}

impl Crew {
    pub(crate) fn new(runtime: Handle) -> Arc<Self> {
        Arc::new(Self {
            threads: runtime.metrics().num_workers().max(1),
            state: Mutex::new(State {
                jobs: VecDeque::new(),
                taken: 0,
                coming: 0,
                seen: (0, Instant::now()),
            }),
            runtime,
        })
    }

    /// Lets attempts start, in this order; leaves `jobs` empty. From a thread that runs no handlers.
    pub(super) fn put(self: &Arc<Self>, jobs: &mut Vec<Job>) {
        let tasks = {
            let mut state = self.lock();
            state.jobs.extend(jobs.drain(..));
            let wanted = state.jobs.len().min(self.threads);
            let tasks = wanted.saturating_sub(state.coming);
            state.coming += tasks;
            tasks
        };
        self.call(tasks);
    }

    /// Calls tasks for what waits, if nothing was taken for a while. From a thread that runs no handlers.
    pub(super) fn look_after(self: &Arc<Self>, now: Instant) {
        let tasks = {
            let mut state = self.lock();
            let (taken, at) = state.seen;
            if now.saturating_duration_since(at) < PATIENCE {
                return;
            }
            state.seen = (state.taken, now);
            if state.taken != taken {
                return;
            }
            let tasks = state.jobs.len().saturating_sub(state.coming);
            state.coming += tasks;
            tasks
        };
        self.call(tasks);
    }

    /// Tasks that are counted as coming.
    fn call(self: &Arc<Self>, tasks: usize) {
        for _ in 0..tasks {
            let member = Member {
                crew: Arc::clone(self),
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
        self.call(usize::from(waits));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A task of the crew.
struct Member {
    crew: Arc<Crew>,
    begun: bool,
    /// It has found nothing to do, or has called a successor.
    done: bool,
}

impl Member {
    async fn work(mut self) {
        let mut in_a_row = 0;
        while let Some(job) = self.next() {
            let attempt = AssertUnwindSafe(job.run()).catch_unwind();
            let mut attempt = pin!(attempt);
            let mut at_once = true;
            let ended = poll_fn(|cx| {
                let poll = attempt.as_mut().poll(cx);
                if poll.is_pending() && at_once {
                    at_once = false;
                    self.crew.call_successor();
                }
                poll
            });
            // A panic has been reported as the end of the attempt.
            let _ = ended.await;
            in_a_row = if at_once { in_a_row + 1 } else { 0 };
            if in_a_row >= IN_A_ROW {
                self.crew.call_successor();
                break;
            }
        }
        self.done = true;
    }

    fn next(&mut self) -> Option<Job> {
        let mut state = self.crew.lock();
        if !self.begun {
            self.begun = true;
            state.coming -= 1;
        }
        let job = state.jobs.pop_front();
        state.taken += u64::from(job.is_some());
        job
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        // The runtime is shutting down: nobody else comes for what is left.
        let jobs = {
            let mut state = self.crew.lock();
            if !self.begun {
                state.coming -= 1;
            }
            std::mem::take(&mut state.jobs)
        };
        drop(jobs);
    }
}
