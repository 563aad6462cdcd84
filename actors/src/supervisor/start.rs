//! The start of an endpoint's actors.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::sync::{Semaphore, watch};

use crate::balance::Subscriptions;
use crate::balancer::{Balancer, BalancerSpec};
use crate::config::Problem;
use crate::endpoint::{Counters, Endpoint};
use crate::holds::Holds;
use crate::key::LaneIndex;
use crate::lane::{Crew, Lane, LaneGate, LaneLink, Mail, Outbox};
use crate::mapping::MappingWatch;
use crate::observe::{EndpointState, EventKind};
use crate::permits::Permits;
use crate::poison::PoisonHandler;
use crate::restart;

use super::shard::{Shard, split_credits};
use super::{EndpointHandle, EndpointSpec, EndpointSupervisor, FromLane, Rebalance};

impl EndpointSupervisor {
    /// Starts an endpoint in the current thread's actix `System`.
    ///
    /// # Errors
    /// Every problem of the settings; nothing is started then.
    ///
    /// # Panics
    /// When the current thread runs no actix `System`.
    pub fn start(spec: EndpointSpec) -> Result<EndpointHandle, Vec<Problem>> {
        let config = spec.check()?;
        let runtime = super::spec::handler_runtime(spec.runtime)
            .map_err(|what| vec![Problem::new(&*config.name, "runtime", what)])?;
        // An endpoint without ordering has no use for lanes: one per thread that runs them is enough.
        let lane_count = match config.ordering {
            Some(_) => config.lanes.get() as usize,
            None => spec.arbiters.len().max(1),
        };
        let intensity = config.intensity;
        let lane_depth = config.lane_depth;
        let credits: Vec<_> = split_credits(config.credits, spec.sources.len()).collect();
        let endpoint = Arc::new(Endpoint {
            permits: Permits::new(config.concurrency),
            queue: spec.queue,
            queues: spec
                .sources
                .iter()
                .map(|source| source.name().into())
                .collect(),
            handlers: spec.handlers,
            publisher: spec.publisher,
            attempts: spec.attempts,
            events: spec.events,
            fingerprints: spec.fingerprints,
            crew: Crew::new(runtime),
            counters: Counters::default(),
            holds: Holds::new(&credits),
            cancel: Arc::default(),
            config,
        });
        let shards = spec.sources.into_iter().zip(credits);
        // In a group the balance says which.
        let all = spec.membership.is_none();
        let shards = shards.map(|(source, credits)| Shard::new(source, credits, all));
        let shards: Vec<_> = shards.collect();
        let (subscriptions, subscribed) = watch::channel(Subscriptions::default());
        let draining_flag = Arc::new(AtomicBool::new(false));
        let index = |lane: usize| LaneIndex::new(u32::try_from(lane).unwrap_or(u32::MAX));
        let threads = spec.arbiters.len().max(1);
        let mails: Vec<_> = (0..threads).map(|_| Arc::new(Mail::default())).collect();
        let outboxes: Vec<_> = (0..threads).map(|_| Arc::new(Outbox::default())).collect();
        let lanes: Arc<Vec<_>> = Arc::new(
            (0..lane_count)
                .map(|lane| LaneLink::new(index(lane), lane / threads, &mails[lane % threads]))
                .collect(),
        );
        let gates: Arc<Vec<_>> = Arc::new(
            (0..lane_count)
                .map(|_| {
                    Arc::new(LaneGate {
                        slots: Arc::new(Semaphore::new(lane_depth)),
                        draining: Arc::clone(&draining_flag),
                    })
                })
                .collect(),
        );
        let (state, state_receiver) = watch::channel(EndpointState::Starting);
        let actor = Self {
            endpoint: Arc::clone(&endpoint),
            shards,
            lanes: Arc::clone(&lanes),
            mails: mails.clone(),
            outboxes: outboxes.clone(),
            settled: VecDeque::new(),
            gates: Arc::clone(&gates),
            draining_flag,
            loads: vec![0; lane_count],
            by_lane: vec![Vec::new(); lane_count],
            earlier_attempts: HashMap::new(),
            flush_scheduled: false,
            look_scheduled: false,
            any_paused: false,
            paused_until: None,
            dead_lanes: Vec::new(),
            first_session: Vec::new(),
            // In a group nothing may be to open, and that is no reason to wait.
            first_result: (!all).then_some(Ok(())),
            subscriptions,
            mapping: spec.mapping.map(MappingWatch::new),
            drain: None,
            state,
        };
        let dying = Arc::clone(&endpoint);
        let state_on_death = actor.state.clone();
        let addr = restart::start(
            None,
            intensity,
            move |_| actor,
            move || {
                // Without its supervisor nothing can be settled: handlers are cancelled, nothing starts.
                dying.cancel.cancel();
                state_on_death.send_replace(EndpointState::Failed);
                let reason = "the endpoint's supervisor panicked too often".to_owned();
                dying.emit(EventKind::Failed { reason });
            },
        );
        let died = |message: FromLane| {
            let addr = addr.clone();
            move || addr.do_send(message)
        };
        let poison = {
            let (endpoint, parking, supervisor) =
                (Arc::clone(&endpoint), spec.parking, addr.clone());
            restart::start(
                None,
                intensity,
                move |_| PoisonHandler::new(endpoint, parking, supervisor),
                died(FromLane::PoisonHandlerDied),
            )
        };
        if let Some(membership) = spec.membership {
            let supervisor = addr.clone();
            Balancer::start(BalancerSpec {
                membership,
                endpoint: Arc::clone(&endpoint.config.name),
                shards: endpoint.queues.len(),
                intensity,
                subscriptions: subscribed,
                decide: Box::new(move |decision| supervisor.do_send(Rebalance(decision))),
                died: Box::new(died(FromLane::BalancerDied)),
            });
        }
        for (number, mail) in mails.iter().enumerate() {
            let arbiter = spec.arbiters.get(number);
            let own = lanes.iter().skip(number).step_by(threads);
            let own = own.cloned().collect();
            mail.start_carrier(arbiter, own, intensity, died(FromLane::CarrierDied));
        }
        for (number, link) in lanes.iter().enumerate() {
            let arbiter = spec.arbiters.get(number % threads);
            let (endpoint, own_link) = (Arc::clone(&endpoint), Arc::clone(link));
            let outbox = Arc::clone(&outboxes[number % threads]);
            let (supervisor, poison) = (addr.clone(), poison.clone());
            link.connect(restart::start(
                arbiter,
                intensity,
                move |_| Lane::new(endpoint, own_link, outbox, supervisor, poison),
                died(FromLane::LaneDied(index(number))),
            ));
        }
        Ok(EndpointHandle {
            addr,
            endpoint,
            lanes,
            gates,
            state: state_receiver,
        })
    }
}
