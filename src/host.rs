//! The thread that runs the actors.
//!
//! An actix `System` cannot live inside a tokio runtime, so it has a thread of its own, with
//! max(1, cores − 1) Arbiters for the endpoints: more make each other slower. The thread ends when the
//! last endpoint has drained, or when the bus is dropped.

use std::num::NonZeroUsize;
use std::sync::Arc;

use actix::{Actor, Arbiter, ArbiterHandle, System};
use laneway_actors::port::Source;
use laneway_actors::{
    ConfigActor, EndpointHandle, EndpointSpec, EndpointSupervisor, Problem, VerifyWorld,
};
use tokio::sync::oneshot;

/// The running actors of a bus.
pub(crate) struct Host {
    system: System,
    ended: Option<oneshot::Receiver<()>>,
}

impl Host {
    /// Verifies the world, then starts every endpoint and waits until each has its first session.
    pub(crate) async fn start(
        specs: Vec<EndpointSpec>,
    ) -> Result<(Self, Vec<EndpointHandle>), Vec<Problem>> {
        let (started, has_started) = oneshot::channel();
        let (ending, ended) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new().name("laneway".to_owned());
        let spawned = thread.spawn(move || {
            run(specs, started);
            drop(ending);
        });
        if let Err(error) = spawned {
            let what = format!("the actors' thread cannot be started: {error}");
            return Err(vec![Problem::new("", "threads", what)]);
        }
        match has_started.await {
            Ok(result) => result.map(|(system, handles)| {
                let host = Self {
                    system,
                    ended: Some(ended),
                };
                (host, handles)
            }),
            Err(_) => Err(vec![Problem::new(
                "",
                "threads",
                "the actors' thread ended while starting",
            )]),
        }
    }

    /// Stops the actors and waits until their threads have ended.
    pub(crate) async fn stop(&mut self) {
        self.system.stop();
        if let Some(ended) = self.ended.take() {
            // The sender is only ever dropped, when the thread ends.
            let _ = ended.await;
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.system.stop();
    }
}

type Started = Result<(System, Vec<EndpointHandle>), Vec<Problem>>;

fn run(specs: Vec<EndpointSpec>, started: oneshot::Sender<Started>) {
    let runner = System::new();
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let arbiters: Vec<_> = runner.block_on(async {
        (0..cores.saturating_sub(1).max(1))
            .map(|_| Arbiter::new())
            .collect()
    });
    let handles: Vec<ArbiterHandle> = arbiters.iter().map(Arbiter::handle).collect();
    let result = runner.block_on(boot(specs, &handles));
    let failed = result.is_err();
    let answer = result.map(|endpoints| (System::current(), endpoints));
    // An error means that whoever started the bus has gone away: then nothing shall run.
    let unwanted = started.send(answer).is_err();
    if !(failed || unwanted)
        && let Err(error) = runner.run()
    {
        tracing::error!(%error, "the actors' system ended with an error");
    }
    for arbiter in arbiters {
        arbiter.stop();
        if arbiter.join().is_err() {
            tracing::error!("a thread of the actors panicked");
        }
    }
}

async fn boot(
    specs: Vec<EndpointSpec>,
    arbiters: &[ArbiterHandle],
) -> Result<Vec<EndpointHandle>, Vec<Problem>> {
    let sources = specs
        .iter()
        .flat_map(|spec| {
            let name = &spec.settings.name;
            let sources = spec.sources.iter();
            sources.map(|source| (name.clone(), Arc::clone(source)))
        })
        .collect::<Vec<(String, Arc<dyn Source>)>>();
    let memberships = specs.iter().filter_map(|spec| {
        let membership = Arc::clone(spec.membership.as_ref()?);
        Some((spec.settings.name.clone(), membership))
    });
    let world = VerifyWorld {
        sources,
        memberships: memberships.collect(),
    };
    match ConfigActor.start().send(world).await {
        Ok(verified) => verified?,
        Err(error) => {
            return Err(vec![Problem::new("", "boot", error.to_string())]);
        }
    }
    let mut endpoints = Vec::new();
    for (number, spec) in specs.into_iter().enumerate() {
        // The supervisor shares a thread with lanes: on two cores that is the fastest way there is.
        let arbiter = &arbiters[number % arbiters.len()];
        endpoints.push(start_on(arbiter, spec, arbiters.to_vec()).await?);
    }
    let mut problems = Vec::new();
    for endpoint in &endpoints {
        if let Err(what) = endpoint.connected().await {
            problems.push(Problem::new(endpoint.name(), "connection", what));
        }
    }
    if problems.is_empty() {
        return Ok(endpoints);
    }
    for endpoint in &endpoints {
        endpoint.drain(std::time::Duration::ZERO).await;
    }
    Err(problems)
}

async fn start_on(
    arbiter: &ArbiterHandle,
    mut spec: EndpointSpec,
    arbiters: Vec<ArbiterHandle>,
) -> Result<EndpointHandle, Vec<Problem>> {
    let (sender, receiver) = oneshot::channel();
    spec.arbiters = arbiters;
    arbiter.spawn_fn(move || {
        // An error means that the start was given up.
        let _ = sender.send(EndpointSupervisor::start(spec));
    });
    let gone = || {
        vec![Problem::new(
            "",
            "threads",
            "a thread of the actors has ended",
        )]
    };
    receiver.await.map_err(|_| gone())?
}
