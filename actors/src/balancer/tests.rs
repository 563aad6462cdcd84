//! Balancers with a group in memory, in an actix `System` whose clock is paused: time passes when all
//! wait for it.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::{broadcast, mpsc, oneshot};

use super::*;
use crate::balance::{EXPIRY, STABLE};

const SHARDS: usize = 6;

/// A group in memory, and how often each shard is subscribed to.
struct Group {
    sender: Mutex<broadcast::Sender<Announcement>>,
    subscribers: Mutex<BTreeMap<usize, usize>>,
    reachable: AtomicBool,
    silent: AtomicBool,
    joins: AtomicUsize,
    panics_left: AtomicUsize,
}

impl Group {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            sender: Mutex::new(broadcast::channel(64).0),
            subscribers: Mutex::default(),
            reachable: AtomicBool::new(true),
            silent: AtomicBool::new(false),
            joins: AtomicUsize::new(0),
            panics_left: AtomicUsize::new(0),
        })
    }

    fn sender(&self) -> broadcast::Sender<Announcement> {
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        sender.clone()
    }

    /// Ends everybody's place.
    fn cut(&self) {
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        *sender = broadcast::channel(64).0;
    }

    fn count(&self, shard: usize, change: impl FnOnce(&mut usize)) {
        let mut subscribers = self
            .subscribers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        change(subscribers.entry(shard).or_default());
    }
}

/// The group as one instance sees it.
struct View(Arc<Group>);

struct Speaker(Arc<Group>);

fn away() -> SourceError {
    SourceError::Unavailable {
        what: "away".to_owned(),
        source: None,
    }
}

impl Membership for View {
    fn name(&self) -> &str {
        "group"
    }

    fn join(&self) -> BoxFuture<'_, Result<Joined, SourceError>> {
        async {
            self.0.joins.fetch_add(1, Ordering::Relaxed);
            if !self.0.reachable.load(Ordering::Relaxed) {
                return Err(away());
            }
            let heard = futures::stream::unfold(self.0.sender().subscribe(), async |mut heard| {
                let announcement = heard.recv().await.ok()?;
                Some((announcement, heard))
            });
            Ok(Joined {
                heard: heard.boxed(),
                announcer: Arc::new(Speaker(Arc::clone(&self.0))),
            })
        }
        .boxed()
    }

    fn unattended(
        &self,
        mut shards: BTreeSet<usize>,
    ) -> BoxFuture<'_, Result<BTreeSet<usize>, SourceError>> {
        shards.retain(|shard| {
            let mut deserted = false;
            self.0.count(*shard, |count| deserted = *count == 0);
            deserted
        });
        futures::future::ready(Ok(shards)).boxed()
    }
}

impl Announcer for Speaker {
    fn announce(&self, announcement: Announcement) -> BoxFuture<'static, Result<(), SourceError>> {
        let group = Arc::clone(&self.0);
        async move {
            if group.silent.load(Ordering::Relaxed) {
                return Err(away());
            }
            group
                .sender()
                .send(announcement)
                .map(drop)
                .map_err(|_| away())
        }
        .boxed()
    }
}

/// An instance whose sessions open and drain at once.
struct Instance {
    own: Arc<watch::Sender<Subscriptions>>,
    group: Arc<Group>,
    /// Each decision, after it was carried out.
    decisions: mpsc::UnboundedReceiver<Decision>,
    died: oneshot::Receiver<()>,
}

impl Instance {
    fn start(group: &Arc<Group>) -> Self {
        let own = Arc::new(watch::Sender::new(Subscriptions {
            shards: BTreeMap::new(),
            willing: true,
        }));
        let (told, decisions) = mpsc::unbounded_channel();
        let (dead, died) = oneshot::channel();
        let subscriptions = own.subscribe();
        // Weak, so that the test decides when the sender is dropped.
        let (obeying, counted) = (Arc::downgrade(&own), Arc::clone(group));
        Balancer::start(BalancerSpec {
            membership: Arc::new(View(Arc::clone(group))),
            endpoint: "orders".into(),
            shards: SHARDS,
            intensity: Intensity::default(),
            subscriptions,
            decide: Box::new(move |decision| {
                let panics = counted.panics_left.fetch_update(
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                    |left| left.checked_sub(1),
                );
                assert!(panics.is_err(), "on purpose");
                if let Some(own) = obeying.upgrade() {
                    own.send_modify(|own| {
                        for &shard in &decision.subscribe {
                            own.shards.insert(shard, now());
                            counted.count(shard, |count| *count += 1);
                        }
                        for shard in &decision.give {
                            own.shards.remove(shard);
                            counted.count(*shard, |count| *count -= 1);
                        }
                    });
                }
                // An error means that the test looks at no more decisions.
                let _ = told.send(decision);
            }),
            died: Box::new(move || dead.send(()).expect("the test waits")),
        });
        Self {
            own,
            group: Arc::clone(group),
            decisions,
            died,
        }
    }

    fn has(&self) -> usize {
        self.own.borrow().shards.len()
    }

    async fn decision(&mut self) -> Decision {
        let decision = tokio::time::timeout(Duration::from_secs(60), self.decisions.recv());
        let decision = decision.await.expect("a decision within a minute");
        decision.expect("the balancer lives")
    }

    /// Waits until the instance has so many shards.
    async fn has_come_to(&mut self, shards: usize) {
        while self.has() != shards {
            self.decision().await;
        }
    }

    /// Ends its sessions, and drops the sender of its subscriptions.
    fn say_goodbye(self) {
        for shard in self.own.borrow().shards.keys() {
            self.group.count(*shard, |count| *count -= 1);
        }
    }
}

fn in_paused_time(test: impl Future<Output = ()>) {
    actix::System::new().block_on(async {
        tokio::time::pause();
        test.await;
    });
}

#[test]
fn one_instance_takes_everything_after_it_has_listened() {
    in_paused_time(async {
        let started = now();
        let mut one = Instance::start(&Group::new());
        one.has_come_to(SHARDS).await;
        let took = now() - started;
        assert!(
            (LISTEN..LISTEN + Duration::from_millis(100)).contains(&took),
            "{took:?}"
        );
    });
}

#[test]
fn two_that_start_together_take_half_each() {
    in_paused_time(async {
        let group = Group::new();
        let (mut one, mut two) = (Instance::start(&group), Instance::start(&group));
        one.has_come_to(SHARDS / 2).await;
        two.has_come_to(SHARDS / 2).await;
        while one.decisions.try_recv().is_ok() || two.decisions.try_recv().is_ok() {}
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert!(one.decisions.try_recv().is_err() && two.decisions.try_recv().is_err());
    });
}

#[test]
fn one_that_joins_gets_its_share_within_a_few_seconds() {
    in_paused_time(async {
        let group = Group::new();
        let mut one = Instance::start(&group);
        one.has_come_to(SHARDS).await;
        let started = now();
        let mut two = Instance::start(&group);
        two.has_come_to(SHARDS / 2).await;
        one.has_come_to(SHARDS / 2).await;
        let took = now() - started;
        assert!(
            (STABLE..STABLE + Duration::from_secs(1)).contains(&took),
            "{took:?}"
        );
        let (ours, theirs) = (one.own.borrow(), two.own.borrow());
        assert!(
            ours.shards
                .keys()
                .all(|shard| !theirs.shards.contains_key(shard))
        );
    });
}

#[test]
fn a_goodbye_is_heard_at_once() {
    in_paused_time(async {
        let group = Group::new();
        let (mut one, mut two) = (Instance::start(&group), Instance::start(&group));
        one.has_come_to(SHARDS / 2).await;
        two.has_come_to(SHARDS / 2).await;
        let started = now();
        two.say_goodbye();
        one.has_come_to(SHARDS).await;
        assert!(now() - started < ANNOUNCE_EVERY);
    });
}

#[test]
fn an_unwilling_instance_is_told_nothing_until_it_is_willing_again() {
    in_paused_time(async {
        let group = Group::new();
        let (mut one, mut two) = (Instance::start(&group), Instance::start(&group));
        one.has_come_to(SHARDS / 2).await;
        two.has_come_to(SHARDS / 2).await;
        two.own.send_modify(|own| {
            own.willing = false;
            for shard in std::mem::take(&mut own.shards).into_keys() {
                group.count(shard, |count| *count -= 1);
            }
        });
        one.has_come_to(SHARDS).await;
        while two.decisions.try_recv().is_ok() {}
        one.own.send_modify(|own| own.shards.clear());
        one.has_come_to(SHARDS).await;
        assert!(two.decisions.try_recv().is_err());

        two.own.send_modify(|own| own.willing = true);
        two.has_come_to(SHARDS / 2).await;
        one.has_come_to(SHARDS / 2).await;
    });
}

#[test]
fn a_lost_group_is_joined_again_and_nothing_is_decided_meanwhile() {
    in_paused_time(async {
        let group = Group::new();
        let mut one = Instance::start(&group);
        one.has_come_to(SHARDS).await;
        group.reachable.store(false, Ordering::Relaxed);
        group.cut();
        // Several tries, each after a longer pause.
        let before = group.joins.load(Ordering::Relaxed);
        while group.joins.load(Ordering::Relaxed) < before + 4 {
            one.own.send_if_modified(|own| {
                let noticed = group.joins.load(Ordering::Relaxed) > before;
                if noticed {
                    own.shards.clear();
                }
                noticed
            });
            tokio::time::sleep(ANNOUNCE_EVERY).await;
        }
        assert_eq!(one.has(), 0);

        group.reachable.store(true, Ordering::Relaxed);
        one.has_come_to(SHARDS).await;
    });
}

#[test]
fn while_nobody_can_announce_only_deserted_shards_are_taken() {
    in_paused_time(async {
        let group = Group::new();
        let (mut one, mut two) = (Instance::start(&group), Instance::start(&group));
        one.has_come_to(SHARDS / 2).await;
        two.has_come_to(SHARDS / 2).await;
        group.silent.store(true, Ordering::Relaxed);
        tokio::time::sleep(EXPIRY * 4).await;
        assert_eq!((one.has(), two.has()), (SHARDS / 2, SHARDS / 2));
        // One of two's sessions is gone, and with it the only subscriber of its shard.
        let shard = *two.own.borrow().shards.keys().next().expect("it has some");
        two.own
            .send_if_modified(|own| own.shards.remove(&shard).is_none());
        group.count(shard, |count| *count -= 1);
        // Whoever looks first takes it; the other one may, too.
        while one.has() + two.has() < SHARDS {
            tokio::time::sleep(ANNOUNCE_EVERY).await;
        }
        group.silent.store(false, Ordering::Relaxed);
        one.has_come_to(SHARDS / 2).await;
        two.has_come_to(SHARDS / 2).await;
    });
}

#[test]
fn a_panic_is_survived_and_too_many_are_told() {
    in_paused_time(async {
        let group = Group::new();
        group.panics_left.store(2, Ordering::Relaxed);
        let mut one = Instance::start(&group);
        one.has_come_to(SHARDS).await;

        group.panics_left.store(usize::MAX, Ordering::Relaxed);
        let mut two = Instance::start(&group);
        (&mut two.died).await.expect("told");
    });
}
