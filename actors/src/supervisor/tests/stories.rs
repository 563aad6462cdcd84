//! One interleaving each.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::Arbiter;
use tokio::sync::watch;

use super::world::{Instance, Numbered, Script, Step, World, within};
use super::{AskInFlight, Poke};
use crate::config::EndpointSettings;
use crate::lane::ToLane;
use crate::observe::{EndpointState, EventKind, WaitReason};
use crate::policy::Backoff;
use crate::supervisor::FromLane;

const HOUR: Duration = Duration::from_secs(3_600);

/// One instance of which everything is scripted.
struct Stage {
    world: Arc<World>,
    instance: Instance,
    gate: watch::Sender<bool>,
}

impl Stage {
    /// Messages of the key `waits` wait for the gate, those of `fails` fail.
    fn of(shards: usize, describe: impl FnOnce(&mut EndpointSettings)) -> Self {
        let world = World::new(shards, false);
        let gate = watch::Sender::new(false);
        let waiting = gate.subscribe();
        let script: Script = Arc::new(move |message: &Numbered, _| match &*message.key {
            "waits" => Step::Wait(waiting.clone()),
            "fails" => Step::Fail,
            _ => Step::Succeed,
        });
        let instance = Instance::start(&world, 0, &script, Vec::new(), describe);
        Self {
            world,
            instance,
            gate,
        }
    }

    fn poke(&self, poke: Poke) {
        self.instance.handle.addr.do_send(poke);
    }

    /// Everything ends, with nothing left.
    async fn finish(self) {
        self.gate.send_replace(true);
        self.world.parking_fails.store(false, Ordering::SeqCst);
        self.world.empty().await;
        let report = self.instance.handle.drain(HOUR).await;
        assert_eq!((report.given_back, report.unfinished), (0, 0));
        self.world.check();
    }
}

/// Waits until the supervisor has taken in so many. It does not ask the lanes, unlike a snapshot.
async fn in_flight(instance: &Instance, number: usize) {
    while instance
        .handle
        .addr
        .send(AskInFlight)
        .await
        .expect("it is there")
        != number
    {
        tokio::task::yield_now().await;
    }
}

fn play(story: impl Future<Output = ()>) {
    actix::System::new().block_on(story);
}

fn connected(kind: &EventKind) -> bool {
    matches!(kind, EventKind::Connected { .. })
}

fn parking_failed(kind: &EventKind) -> bool {
    matches!(kind, EventKind::ParkingFailed { .. })
}

#[test]
fn a_session_that_is_lost_while_it_is_given_is_opened_again_without_waiting_for_what_runs() {
    play(async {
        let mut stage = Stage::of(1, |settings| {
            settings.abort_grace = HOUR;
            settings.handler_timeout = None;
        });
        stage.instance.until("a session", connected).await;
        stage.world.publish(0, "waits");
        stage.world.running("waits").await;
        stage.poke(Poke::Give(0));
        stage.world.cut(0, 0);
        stage.instance.until("the next session", connected).await;
        stage.world.publish(0, "other");
        stage.world.handled("other", 1).await;
        stage.finish().await;
    });
}

#[test]
fn a_poison_message_that_cannot_be_parked_does_not_hold_up_the_sessions_of_other_shards() {
    play(async {
        let mut stage = Stage::of(2, |settings| settings.handler_timeout = None);
        stage.world.parking_fails.store(true, Ordering::SeqCst);
        stage.world.publish(0, "fails");
        stage.instance.until("a failure", parking_failed).await;
        stage.world.cut(0, 0);
        stage.instance.until("the next session", connected).await;
        stage.poke(Poke::Give(1));
        stage.world.publish(1, "other");
        stage.world.handled("other", 1).await;
        stage.finish().await;
    });
}

#[test]
fn a_poison_message_that_cannot_be_parked_holds_up_the_giving_of_its_session_for_a_while_only() {
    play(async {
        let mut stage = Stage::of(1, |settings| {
            settings.handler_timeout = Some(Duration::from_millis(50));
        });
        stage.world.parking_fails.store(true, Ordering::SeqCst);
        stage.world.unclean.store(true, Ordering::SeqCst);
        stage.world.publish(0, "fails");
        stage.instance.until("a failure", parking_failed).await;
        stage.poke(Poke::Give(0));
        stage.world.publish(0, "other");
        stage.world.handled("other", 1).await;
        stage.finish().await;
    });
}

/// The lane panics; before the supervisor knows, the session of another shard ends, and the next message
/// arrives of a key whose first one the lane has just forgotten.
#[test]
fn the_end_of_one_shards_session_does_not_let_a_restarted_lane_take_messages_of_another() {
    play(async {
        let world = World::new(2, false);
        let first = AtomicBool::new(true);
        let script: Script = Arc::new(move |_, _| match first.swap(false, Ordering::SeqCst) {
            true => Step::Fail,
            false => Step::Succeed,
        });
        let arbiter = Arbiter::new();
        let describe = |settings: &mut EndpointSettings| {
            settings.lanes = Some(1);
            settings.ack_timeout = Some(24 * HOUR);
            settings.backoff = Backoff::constant(HOUR);
        };
        let mut instance = Instance::start(&world, 0, &script, vec![arbiter.handle()], describe);
        let failed = |kind: &EventKind| matches!(kind, EventKind::AttemptFailed { .. });
        world.publish(1, "a");
        instance.until("the first attempt", failed).await;
        // The lane's thread stands still while these gather for the lane, in this order.
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        arbiter
            .handle()
            .spawn_fn(move || wait.recv().expect("told"));
        let lane = Arc::clone(&instance.handle.lanes[0]);
        lane.tell(ToLane::Panic);
        world.cut(0, 0);
        let lost = |kind: &EventKind| matches!(kind, EventKind::Disconnected { .. });
        instance.until("the loss", lost).await;
        world.publish(1, "a");
        within("messages in flight", in_flight(&instance, 2)).await;
        // Now the lane restarts, while the supervisor, in this thread, hears nothing.
        go_on.send(()).expect("it waits");
        let asking = async move {
            loop {
                let left = lane.left().await;
                // The back-off of the first message is gone with the restart.
                if !left.iter().any(|what| what.starts_with("timers")) {
                    return left;
                }
            }
        };
        let answer = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build();
            runtime.expect("a runtime").block_on(asking)
        });
        assert_eq!(answer.join().expect("no panic"), ["forgetful: 1"]);
        world.empty().await;
        let report = instance.handle.drain(HOUR).await;
        assert_eq!((report.given_back, report.unfinished), (0, 0));
        world.check();
        arbiter.stop();
    });
}

/// What lies in one post behind the message that makes the lane panic is not lost with it. It is the end of the
/// only attempt of a key: the key would wait for it for ever. And what lies before it is told as ended: its copy
/// would run again.
#[test]
fn a_panic_of_a_lane_loses_nothing_else_of_its_post() {
    play(async {
        let world = World::new(1, false);
        let gates = ["before", "behind"].map(|key| (key, watch::Sender::new(false)));
        let waiting = gates.each_ref().map(|(key, gate)| (*key, gate.subscribe()));
        let script: Script = Arc::new(move |message: &Numbered, _| {
            let gate = waiting.iter().find(|(key, _)| *key == message.key);
            Step::Wait(gate.expect("a key with a gate").1.clone())
        });
        let arbiter = Arbiter::new();
        let arbiters = vec![arbiter.handle()];
        let mut instance = Instance::start(&world, 0, &script, arbiters, |settings| {
            settings.lanes = Some(1);
            settings.handler_timeout = None;
        });
        instance.until("a session", connected).await;
        for (key, _) in &gates {
            world.publish(0, key);
            world.running(key).await;
        }
        // The lane's thread stands still while these gather for it, in this order.
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let (tell_still, still) = std::sync::mpsc::channel();
        arbiter.handle().spawn_fn(move || {
            tell_still.send(()).expect("heard");
            wait.recv().expect("told");
        });
        still.recv().expect("it stands still");
        let lane = &instance.handle.lanes[0];
        for (number, (key, gate)) in gates.iter().enumerate() {
            gate.send_replace(true);
            world.handled(key, 1).await;
            within("an end in the post", posted(lane, 2 * number + 1)).await;
            if number == 0 {
                lane.tell(ToLane::Panic);
            }
        }
        go_on.send(()).expect("it waits");
        let restarted =
            |kind: &EventKind| matches!(kind, EventKind::ActorRestarted { actor: "lane" });
        instance.until("the restart", restarted).await;
        world.empty().await;
        assert_eq!(
            world.runs(),
            2,
            "both were handled, and the copies are known"
        );
        for (key, _) in &gates {
            world.publish(0, key);
            world.handled(key, 2).await;
        }
        world.empty().await;
        let report = instance.handle.drain(HOUR).await;
        assert_eq!((report.given_back, report.unfinished), (0, 0));
        world.check();
        arbiter.stop();
    });
}

/// A message without an id has ended, and its acknowledgement waits for the message before it, when a lane says that it
/// was restarted. It would come again with the next session, and nothing tells that it is the same: so it is acknowledged first.
#[test]
fn a_panic_of_a_lane_does_not_run_again_what_waits_to_be_acknowledged() {
    play(async {
        let mut stage = Stage::of(1, |settings| {
            settings.lanes = Some(1);
            settings.handler_timeout = None;
        });
        stage.instance.until("a session", connected).await;
        stage.world.publish(0, "waits");
        stage.world.running("waits").await;
        stage.world.publish(0, "nameless");
        stage.world.handled("nameless", 1).await;
        // Once the supervisor knows, the acknowledgement waits there, for ten milliseconds at most. (A panic, with the
        // printing of its trace, would take longer.)
        within("the end", in_flight(&stage.instance, 1)).await;
        stage.instance.handle.addr.do_send(FromLane::Restarted);
        let restarted =
            |kind: &EventKind| matches!(kind, EventKind::ActorRestarted { actor: "lane" });
        stage.instance.until("the restart", restarted).await;
        stage.instance.until("the next session", connected).await;
        stage.gate.send_replace(true);
        stage.world.empty().await;
        assert_eq!(stage.world.runs_of("nameless"), 1);
        stage.finish().await;
    });
}

/// As many handlers as the runtime has threads block in place, and all were put into the crew's queue at one
/// time. The runtime has another thread then, and what was put in with them starts on it.
#[test]
fn handlers_that_block_in_place_do_not_keep_others_from_starting() {
    play(async {
        let world = World::new(1, false);
        let (unblock, blocked) = std::sync::mpsc::channel();
        let blocked = Arc::new(Mutex::new(blocked));
        let script: Script =
            Arc::new(
                move |message: &Numbered, _| match message.key.starts_with("blocks") {
                    true => Step::BlockInPlace(Arc::clone(&blocked)),
                    false => Step::Succeed,
                },
            );
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let arbiter = Arbiter::new();
        let arbiters = vec![arbiter.handle()];
        let mut instance = Instance::start(&world, 0, &script, arbiters, |settings| {
            settings.lanes = Some(1);
            settings.concurrency = u32::try_from(threads).expect("few") + 1;
            settings.handler_timeout = None;
        });
        instance.until("a session", connected).await;
        // The lane's thread stands still while they gather for it.
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        arbiter
            .handle()
            .spawn_fn(move || wait.recv().expect("told"));
        let blocking: Vec<_> = (0..threads).map(|n| format!("blocks-{n}")).collect();
        for key in blocking.iter().map(String::as_str).chain(["other"]) {
            world.publish(0, key);
        }
        within("messages in flight", in_flight(&instance, threads + 1)).await;
        go_on.send(()).expect("it waits");
        world.handled("other", 1).await;
        for _ in &blocking {
            unblock.send(()).expect("it blocks");
        }
        world.empty().await;
        let report = instance.handle.drain(HOUR).await;
        assert_eq!((report.given_back, report.unfinished), (0, 0));
        world.check();
        arbiter.stop();
    });
}

/// Waits until as many messages lie in the post for a lane's thread.
async fn posted(lane: &crate::lane::LaneLink, many: usize) {
    while lane.posted() < many {
        tokio::task::yield_now().await;
    }
}

/// A handler that blocks its thread cannot be stopped: it overlaps with the heir, once, and is shown.
#[test]
fn a_stuck_handler_does_not_hold_up_the_giving_of_its_session_and_keeps_its_key_when_the_shard_comes_back()
 {
    play(async {
        let world = World::new(1, false);
        world.unclean.store(true, Ordering::SeqCst);
        let (unblock, blocked) = std::sync::mpsc::channel();
        let (blocked, first) = (Arc::new(Mutex::new(blocked)), AtomicBool::new(true));
        let script: Script = Arc::new(move |_, _| match first.swap(false, Ordering::SeqCst) {
            true => Step::Block(Arc::clone(&blocked)),
            false => Step::Succeed,
        });
        let start = |number| {
            Instance::start(&world, number, &script, Vec::new(), |settings| {
                settings.handler_timeout = Some(Duration::from_millis(50));
            })
        };
        let mut one = start(0);
        one.until("a session", connected).await;
        let mut two = start(1);
        two.until("a session that stands by", connected).await;
        world.publish(0, "a");
        one.until("it is shown", |kind| {
            matches!(kind, EventKind::Stuck { .. })
        })
        .await;
        one.rebalance(&[], &[0]);
        world.handled("a", 1).await;
        world.publish(0, "a");
        world.handled("a", 2).await;
        one.rebalance(&[0], &[]);
        one.until("a session that stands by", connected).await;
        two.rebalance(&[], &[0]);
        world.publish(0, "a");
        let behind = async {
            loop {
                let state = one.handle.snapshot().await;
                if let [stuck] = &state.waiting_keys[..]
                    && stuck.behind == 1
                {
                    assert_eq!((stuck.why, state.running), (WaitReason::Stuck, 1));
                    return;
                }
                tokio::task::yield_now().await;
            }
        };
        within("the next message to wait", behind).await;
        unblock.send(()).expect("it blocks");
        world.handled("a", 3).await;
        world.empty().await;
        for instance in [one, two] {
            let report = instance.handle.drain(HOUR).await;
            assert_eq!((report.given_back, report.unfinished), (0, 0));
        }
        world.check();
    });
}

#[test]
fn what_each_shard_gives_back_is_in_the_report_of_a_drain_during_a_pause() {
    play(async {
        let mut stage = Stage::of(2, |settings| {
            settings.concurrency = 1;
            settings.handler_timeout = None;
        });
        for _ in 0..2 {
            stage.instance.until("a session", connected).await;
        }
        stage.world.publish(0, "waits");
        stage.world.running("waits").await;
        for _ in 0..3 {
            stage.world.publish(0, "one");
        }
        for _ in 0..2 {
            stage.world.publish(1, "two");
        }
        within("messages in flight", in_flight(&stage.instance, 6)).await;
        let supervisor = stage.instance.handle.addr.clone();
        supervisor.do_send(FromLane::PauseEndpoint(HOUR));
        // Shard 1 is quiet at once, and closed before the drain begins; shard 0 waits for its handler.
        let closed =
            |kind: &EventKind| matches!(kind, EventKind::SessionClosed { given_back: 2, .. });
        stage.instance.until("the end of a session", closed).await;
        let state = stage.instance.handle.snapshot().await;
        assert_eq!(state.state, EndpointState::Paused);
        let subscribed = state.shards.iter().map(|shard| shard.subscribed);
        assert_eq!(subscribed.collect::<Vec<_>>(), [true, false]);
        let draining = stage.instance.handle.drain(HOUR);
        let opening = async {
            let mut state = stage.instance.handle.state();
            let draining = |state: &EndpointState| *state == EndpointState::Draining;
            state.wait_for(draining).await.expect("it is there");
            stage.gate.send_replace(true);
        };
        let (report, ()) = futures::join!(draining, opening);
        assert_eq!((report.given_back, report.unfinished), (3, 0));
    });
}

#[test]
fn a_drain_waits_for_what_runs_of_a_direct_sender_and_starts_nothing_more_of_it() {
    play(async {
        let stage = Stage::of(1, |settings| settings.handler_timeout = None);
        for _ in 0..2 {
            stage.instance.send(&stage.world, "waits");
        }
        stage.world.running("waits").await;
        let draining = stage.instance.handle.drain(HOUR);
        let opening = async {
            let mut state = stage.instance.handle.state();
            let draining = |state: &EndpointState| *state == EndpointState::Draining;
            state.wait_for(draining).await.expect("it is there");
            stage.gate.send_replace(true);
        };
        let (report, ()) = futures::join!(draining, opening);
        assert_eq!((report.given_back, report.unfinished), (0, 0));
        stage.world.handled("waits", 1).await;
        assert_eq!(stage.world.runs(), 1);
    });
}
