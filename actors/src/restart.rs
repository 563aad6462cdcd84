//! Restart of an actor that panicked: back-off, intensity, escalation.
//!
//! `actix::Supervisor` restarts an actor after `stop()`, not after a panic, and a panic drops the
//! actor with everything in its mailbox. `start` polls the actor's future inside `catch_unwind`
//! instead: after a panic the actor's value and its mailbox are kept, `restarting()` is called so that
//! it rebuilds what may be half changed, and it goes on. Past the intensity it is given up and
//! `on_death` is called, which escalates.
//!
//! This is the second layer, for bugs of Laneway. A handler's panic is caught around the handler and
//! never comes here.

use std::collections::VecDeque;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, ready};
use std::time::{Duration, Instant};

use actix::dev::ContextFut;
use actix::dev::channel::channel;
use actix::{Actor, Addr, ArbiterHandle, Context, Supervised};
use tokio::time::Sleep;

/// How often an actor may panic before it is given up.
#[derive(Debug, Clone, Copy)]
pub struct Intensity {
    /// This many panics are survived…
    pub restarts: usize,
    /// …within this time; one more ends the actor.
    pub within: Duration,
    /// Pause before the first restart; doubled for each further panic within the time.
    pub backoff: Duration,
}

impl Default for Intensity {
    /// Three restarts within ten seconds, the first after 50 ms.
    fn default() -> Self {
        Self {
            restarts: 3,
            within: Duration::from_secs(10),
            backoff: Duration::from_millis(50),
        }
    }
}

/// Starts an actor that survives its panics, on `arbiter` or on the current thread's.
///
/// # Panics
/// Without an arbiter: when the current thread runs no actix `System`.
pub(crate) fn start<A>(
    arbiter: Option<&ArbiterHandle>,
    intensity: Intensity,
    make: impl FnOnce(&mut Context<A>) -> A + Send + 'static,
    on_death: impl FnOnce() + Send + 'static,
) -> Addr<A>
where
    A: Actor<Context = Context<A>> + Supervised,
{
    // The capacity bounds nothing (senders use `do_send`); bounds are the endpoint's credits.
    let (sender, receiver) = channel(16);
    let addr = Addr::new(sender);
    let run = move || {
        let mut context = Context::with_receiver(receiver);
        let actor = make(&mut context);
        actix::spawn(Survivor {
            actor: Box::pin(context.into_future(actor)),
            pause: None,
            panics: VecDeque::new(),
            intensity,
            on_death: Some(Box::new(on_death)),
        });
    };
    match arbiter {
        Some(arbiter) => {
            arbiter.spawn_fn(run);
        }
        None => run(),
    }
    addr
}

struct Survivor<A>
where
    A: Actor<Context = Context<A>> + Supervised,
{
    actor: Pin<Box<ContextFut<A, Context<A>>>>,
    pause: Option<Pin<Box<Sleep>>>,
    panics: VecDeque<Instant>,
    intensity: Intensity,
    on_death: Option<Box<dyn FnOnce()>>,
}

// Nothing in it is pinned in place: the actor's future and the pause are boxed.
impl<A> Unpin for Survivor<A> where A: Actor<Context = Context<A>> + Supervised {}

impl<A> Future for Survivor<A>
where
    A: Actor<Context = Context<A>> + Supervised,
{
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<()> {
        let this = self.get_mut();
        loop {
            if let Some(pause) = &mut this.pause {
                ready!(pause.as_mut().poll(cx)); // meanwhile the mailbox keeps the messages
                this.pause = None;
                if !this.actor.restart() {
                    return Poll::Ready(()); // nobody has its address any more
                }
            }
            match catch_unwind(AssertUnwindSafe(|| this.actor.as_mut().poll(cx))) {
                Ok(poll) => return poll,
                Err(_) => {
                    let now = Instant::now();
                    this.panics.push_back(now);
                    let within = this.intensity.within;
                    this.panics.retain(|&at| now.duration_since(at) <= within);
                    let recent = this.panics.len();
                    if recent > this.intensity.restarts {
                        if let Some(on_death) = this.on_death.take() {
                            on_death();
                        }
                        return Poll::Ready(());
                    }
                    let doubled = 1_u32 << (recent - 1).min(6);
                    let pause = tokio::time::sleep(this.intensity.backoff * doubled);
                    this.pause = Some(Box::pin(pause));
                }
            }
        }
    }
}
