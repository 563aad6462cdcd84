//! Attempts on real threads: whatever one does, no other waits for which the runtime has a thread.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use futures::future::BoxFuture;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::{block_in_place, coop};

use super::*;

/// What one poll of a task may do before tokio has it give way.
const BUDGET: usize = 128;

/// Work that tells its end, or that it was dropped, once.
struct Told {
    work: Option<BoxFuture<'static, ()>>,
    number: usize,
    ends: Sender<End>,
    ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum End {
    Ended(usize),
    Dropped(usize),
}

impl Work for Told {
    async fn run(mut self) {
        if let Some(work) = self.work.take() {
            work.await;
        }
        self.ended = true;
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let end = match self.ended {
            true => End::Ended(self.number),
            false => End::Dropped(self.number),
        };
        // An error means that the test is over.
        let _ = self.ends.send(end);
    }
}

struct Stage {
    runtime: Runtime,
    crew: Arc<Crew<Told>>,
    sender: Sender<End>,
    ends: Receiver<End>,
    next: usize,
    now: Instant,
}

fn on(threads: usize) -> Stage {
    let runtime = Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .expect("threads are there");
    let (sender, ends) = channel();
    Stage {
        crew: Crew::new(runtime.handle().clone()),
        runtime,
        sender,
        ends,
        next: 0,
        now: Instant::now(),
    }
}

fn work(future: impl Future<Output = ()> + Send + 'static) -> BoxFuture<'static, ()> {
    Box::pin(future)
}

/// What comes, but not waited for without end.
fn receive<T>(what: &str, from: &Receiver<T>) -> T {
    match from.recv_timeout(Duration::from_secs(20)) {
        Ok(received) => received,
        Err(_) => panic!("waited in vain for {what}"),
    }
}

impl Stage {
    /// Puts in at one time, as a lane does.
    fn put(&mut self, works: impl IntoIterator<Item = BoxFuture<'static, ()>>) {
        let mut jobs = Vec::new();
        for work in works {
            jobs.push(Told {
                work: Some(work),
                number: self.next,
                ends: self.sender.clone(),
                ended: false,
            });
            self.next += 1;
        }
        self.crew.put(&mut jobs);
        assert!(jobs.is_empty());
    }

    /// A lane looks after the crew, a while later.
    fn look(&mut self) {
        self.now += PATIENCE;
        self.crew.look_after(self.now);
    }

    fn end(&self) -> End {
        receive("an end", &self.ends)
    }

    /// Everything put in has ended, once, and nothing was dropped.
    fn all_end(self) {
        let expected: HashSet<_> = (0..self.next).map(End::Ended).collect();
        let ended: HashSet<_> = (0..self.next).map(|_| self.end()).collect();
        assert_eq!(ended, expected);
        drop(self.runtime);
        assert_eq!(
            self.ends.try_recv(),
            Err(std::sync::mpsc::TryRecvError::Empty)
        );
    }
}

/// Occupies so many threads of the runtime until it is dropped.
fn occupy(runtime: &Runtime, threads: usize) -> Vec<Sender<()>> {
    let occupied = (0..threads).map(|_| {
        let ((begins, begun), (go_on, wait)) = (channel(), channel::<()>());
        runtime.spawn(async move {
            begins.send(()).expect("awaited");
            let _ = wait.recv();
        });
        receive("a thread", &begun);
        go_on
    });
    occupied.collect()
}

#[test]
fn on_one_thread_attempts_that_wait_for_nothing_end_in_the_order_in_which_they_were_put_in() {
    let mut stage = on(1);
    for _ in 0..20 {
        stage.put((0..50).map(|_| work(async {})));
    }
    for number in 0..1_000 {
        assert_eq!(stage.end(), End::Ended(number));
    }
}

#[test]
fn attempts_of_every_kind_all_end_once() {
    for threads in [1, 2, 4] {
        let mut stage = on(threads);
        for number in 0..400_usize {
            stage.put((0..number % 5).map(|nth| match (number + nth) % 6 {
                0 => work(async {}),
                1 => work(tokio::task::yield_now()),
                2 => work(async {
                    for _ in 0..3 * BUDGET {
                        coop::consume_budget().await;
                    }
                }),
                3 => work(async { tokio::time::sleep(Duration::from_micros(50)).await }),
                4 => work(async { block_in_place(|| ()) }),
                _ => work(async {
                    tokio::spawn(async {}).await.expect("it does not panic");
                }),
            }));
        }
        stage.all_end();
    }
}

/// A handler blocks its thread in its second poll, when it is in nobody's queue any more; the others were put in
/// with it, or later.
#[test]
fn an_attempt_that_blocks_after_it_has_waited_keeps_nobody_from_starting() {
    for threads in [2, 4] {
        for later in [false, true] {
            let mut stage = on(threads);
            let (go_on, waits) = oneshot::channel::<()>();
            let ((blocks, blocked), (unblock, block)) = (channel(), channel::<()>());
            let first = work(async move {
                waits.await.expect("told");
                blocks.send(()).expect("awaited");
                block.recv().expect("told");
            });
            let (others_end, others) = channel();
            let other = move |_| {
                let others_end = others_end.clone();
                work(async move { others_end.send(()).expect("awaited") })
            };
            if later {
                stage.put([first]);
                go_on.send(()).expect("awaited");
                receive("the block", &blocked);
                stage.put((0..100).map(other));
            } else {
                let others = (0..100).map(other);
                stage.put([first].into_iter().chain(others));
                go_on.send(()).expect("awaited");
                receive("the block", &blocked);
            }
            (0..100).for_each(|_| receive("another", &others));
            unblock.send(()).expect("awaited");
            stage.all_end();
        }
    }
}

/// One attempt uses up what tokio grants one poll of their task, so the next one is pending for nothing; then one
/// blocks the thread. Any thread must be able to go on with the second.
#[test]
fn an_attempt_that_only_finds_the_budget_used_up_does_not_wait_for_one_that_blocks() {
    for _ in 0..50 {
        let mut stage = on(2);
        let mut others = occupy(&stage.runtime, 1);
        let ((begins, begun), (ends, ended), (unblock, block)) =
            (channel(), channel(), channel::<()>());
        stage.put([
            work(async {
                for _ in 0..BUDGET {
                    coop::consume_budget().await;
                }
            }),
            work(async move {
                coop::consume_budget().await;
                ends.send(()).expect("awaited");
            }),
            work(async move {
                begins.send(()).expect("awaited");
                block.recv().expect("told");
            }),
        ]);
        receive("the one that blocks", &begun);
        others.clear();
        receive("the one that found no budget", &ended);
        unblock.send(()).expect("awaited");
        stage.all_end();
    }
}

/// All threads and more block in place; whatever was put in with them starts, since the runtime has others then.
#[test]
fn attempts_that_block_in_place_keep_nobody_from_starting() {
    for threads in [1, 2, 4] {
        let mut stage = on(threads);
        let (unblock, block) = channel::<()>();
        let block = Arc::new(Mutex::new(block));
        let blocking = (0..threads + 2).map(|_| {
            let block = Arc::clone(&block);
            work(async move {
                block_in_place(|| block.lock().expect("not poisoned").recv()).expect("told");
            })
        });
        let (starts, started) = channel();
        let other = work(async move { starts.send(()).expect("awaited") });
        stage.put(blocking.chain([other]));
        while started.try_recv().is_err() {
            stage.look();
            std::thread::yield_now();
        }
        (0..threads + 2).for_each(|_| unblock.send(()).expect("awaited"));
        stage.all_end();
    }
}

/// Two tasks, one of which blocks in place: so the runtime has a thread for which no task comes. That the other one
/// goes on with the queue, one attempt after the other, must not keep the free thread out.
#[test]
fn a_free_thread_is_used_although_another_one_goes_on_with_the_queue() {
    let mut stage = on(2);
    let (starts, started) = channel();
    let ((first_begins, begun), (unblock, block)) = (channel(), channel::<()>());
    let in_place = work(async move {
        first_begins.send(()).expect("awaited");
        block_in_place(|| block.recv()).expect("told");
    });
    let (go_on, others): (Vec<_>, Vec<_>) = (0..4)
        .map(|_| {
            let ((go_on, wait), starts) = (channel::<()>(), starts.clone());
            let waits = work(async move {
                starts.send(()).expect("awaited");
                wait.recv().expect("told");
            });
            (go_on, waits)
        })
        .unzip();
    stage.put([in_place].into_iter().chain(others));
    receive("the one that blocks in place", &begun);
    receive("the first of the others", &started);
    // Two were taken since the crew was made.
    stage.look();
    receive("another one, beside it", &started);
    let told = |go_on: &Sender<()>| go_on.send(()).expect("awaited");
    go_on.iter().for_each(told);
    unblock.send(()).expect("awaited");
    stage.all_end();
}

struct PanicsInDrop<T>(Option<T>);

impl<T> Drop for PanicsInDrop<T> {
    fn drop(&mut self) {
        if let Some(payload) = self.0.take() {
            // Two panics at a time end the process.
            if !std::thread::panicking() {
                std::panic::resume_unwind(Box::new(()));
            }
            drop(payload);
        }
    }
}

/// A future panics when it is dropped; or panics with a value that panics when it is dropped, and so on.
#[test]
fn whatever_panics_in_an_attempt_the_others_run() {
    for threads in [1, 2, 4] {
        let mut stage = on(threads);
        let run = Arc::new(AtomicUsize::new(0));
        let quiet = |run: &Arc<AtomicUsize>| {
            let run = Arc::clone(run);
            work(async move {
                run.fetch_add(1, Ordering::SeqCst);
            })
        };
        for _ in 0..20 {
            let in_drop = async {
                let _held = PanicsInDrop(Some(()));
                tokio::task::yield_now().await;
            };
            let with_a_bomb = async {
                std::panic::resume_unwind(Box::new(PanicsInDrop(Some(()))));
            };
            stage.put([work(in_drop), quiet(&run), work(with_a_bomb), quiet(&run)]);
        }
        let ends: Vec<_> = (0..80).map(|_| stage.end()).collect();
        let dropped = ends.iter().filter(|end| matches!(end, End::Dropped(_)));
        assert_eq!(dropped.count(), 40, "those that panic, and no other");
        assert_eq!(run.load(Ordering::SeqCst), 40);
    }
}

/// Ready again at once, behind what its thread has to run. (`yield_now` is not, while its thread has anything.)
async fn behind_others() {
    let mut first = true;
    poll_fn(|cx| match std::mem::take(&mut first) {
        true => {
            cx.waker().wake_by_ref();
            std::task::Poll::Pending
        }
        false => std::task::Poll::Ready(()),
    })
    .await;
}

/// An application's own task on the same, only thread gets its turn: after so many attempts, or sooner if they are
/// slow.
#[test]
fn other_tasks_of_the_runtime_get_their_turn() {
    for (slow, at_most) in [(false, 4 * IN_A_ROW), (true, 4)] {
        let mut stage = on(1);
        let run = Arc::new(AtomicUsize::new(0));
        let held = occupy(&stage.runtime, 1);
        let seen = Arc::clone(&run);
        let turns = stage.runtime.spawn(async move {
            let mut most = 0;
            loop {
                let before = seen.load(Ordering::SeqCst);
                behind_others().await;
                let after = seen.load(Ordering::SeqCst);
                most = most.max(after - before);
                if after == 1_000 {
                    return most;
                }
            }
        });
        stage.put((0..1_000).map(|_| {
            let run = Arc::clone(&run);
            work(async move {
                let begun = Instant::now();
                while slow && begun.elapsed() < SLICE {
                    std::hint::spin_loop();
                }
                run.fetch_add(1, Ordering::SeqCst);
            })
        }));
        drop(held);
        let most = stage.runtime.block_on(turns).expect("it does not panic");
        assert!(most <= at_most, "{most} attempts in a row");
        stage.all_end();
    }
}

tokio::task_local! {
    static OWN: usize;
}

#[test]
fn attempts_of_one_task_do_not_see_each_other() {
    let mut stage = on(1);
    stage.put((0..100).map(|number| {
        work(async move {
            assert!(OWN.try_with(|_| ()).is_err());
            OWN.scope(number, async move {
                if number % 3 == 0 {
                    tokio::task::yield_now().await;
                }
                OWN.with(|own| assert_eq!(*own, number));
            })
            .await;
        })
    }));
    stage.all_end();
}

#[test]
fn attempts_that_run_at_the_same_time_have_tasks_of_their_own() {
    for threads in [1, 2, 4] {
        let mut stage = on(threads);
        let (begins, begun) = channel();
        let gate = Arc::new(tokio::sync::Notify::new());
        let waiting = (0..50).map(|_| {
            let (begins, gate) = (begins.clone(), Arc::clone(&gate));
            work(async move {
                let notified = gate.notified();
                let mut notified = pin!(notified);
                notified.as_mut().enable();
                begins.send(tokio::task::id()).expect("awaited");
                notified.await;
            })
        });
        stage.put(waiting);
        let tasks: HashSet<_> = (0..50).map(|_| receive("a begin", &begun)).collect();
        assert_eq!(tasks.len(), 50);
        gate.notify_waiters();
        stage.all_end();
    }
}

/// What runs, what waits, and what is put in afterwards.
#[test]
fn with_its_runtime_every_attempt_is_dropped_and_says_so() {
    for threads in [1, 2, 4] {
        let mut stage = on(threads);
        let (begins, begun) = channel();
        let waiting = (0..10).map(|_| {
            let begins = begins.clone();
            work(async move {
                begins.send(()).expect("awaited");
                std::future::pending().await
            })
        });
        stage.put(waiting);
        (0..10).for_each(|_| receive("a begin", &begun));
        let held = occupy(&stage.runtime, threads);
        stage.put((0..10).map(|_| work(std::future::pending())));
        let Stage {
            runtime,
            crew,
            sender,
            ends,
            ..
        } = stage;
        runtime.shutdown_background();
        drop(held);
        let mut late = vec![Told {
            work: Some(work(std::future::pending())),
            number: 20,
            ends: sender,
            ended: false,
        }];
        crew.put(&mut late);
        let dropped: HashSet<_> = (0..21).map(|_| receive("a drop", &ends)).collect();
        assert_eq!(dropped, (0..21).map(End::Dropped).collect());
    }
}
