//! Groups of instances on RabbitMQ: what happens to them under an alarm, on a silent broker, beside
//! strangers; and how several balancers spread the shards of one endpoint.
#![cfg(feature = "rabbitmq")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use laneway::actors::balance::{Decision, Subscriptions};
use laneway::actors::port::{
    Ack, Announcement, Destination, Joined, MemberId, Membership, OpenSession, Outgoing, Source,
    SourceError,
};
use laneway::actors::restart::Intensity;
use laneway::actors::{Balancer, BalancerSpec, Envelope, SessionState};
use laneway::topology::{QueueSpec, Topology};
use laneway::transport::Transport;
use laneway::transport::rabbitmq::RabbitMq;
use lapin::options::BasicPublishOptions;
use lapin::{BasicProperties, ExchangeKind};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use support::broker::{PrivateBroker, shared_url, unique};
use support::foreign::Foreign;

/// Private brokers one at a time: several would only slow one another down.
static ONE_BROKER: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

const PATIENCE: Duration = Duration::from_secs(30);

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    let waited = timeout(PATIENCE, future).await;
    waited.unwrap_or_else(|_| panic!("waited {PATIENCE:?} for {what}"))
}

fn shards(name: &str, count: usize) -> Vec<QueueSpec> {
    let mut topology = Topology::default();
    for shard in 0..count {
        topology = topology.queue(&format!("{name}.{shard:02}"), |queue| {
            queue.durable().single_active_consumer()
        });
    }
    topology.queues().to_vec()
}

fn membership(broker: &RabbitMq, group: &str, queues: &[QueueSpec]) -> Arc<dyn Membership> {
    let names: Vec<_> = queues.iter().map(|queue| queue.name.clone()).collect();
    let membership = broker.membership(group, &names);
    membership.expect("RabbitMQ has groups")
}

async fn join(membership: &Arc<dyn Membership>) -> Joined {
    membership.join().await.expect("joined")
}

fn announcement(sequence: u64) -> Announcement {
    Announcement {
        member: MemberId::from_u128(7),
        sequence,
        of: 1,
        shards: BTreeSet::from([0]),
        willing: true,
    }
}

async fn hear(joined: &mut Joined, sequence: u64) {
    within("the announcement", async {
        loop {
            let heard = joined.heard.next().await.expect("the place is not lost");
            if heard.sequence == sequence {
                return;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn an_alarm_silences_the_members_and_blocks_nothing_else() {
    let _one = ONE_BROKER.lock().await;
    let node = PrivateBroker::start();
    let broker = RabbitMq::at(node.url())
        .operation_timeout(Duration::from_secs(1))
        .confirm_timeout(Duration::from_secs(2));
    let queues = shards(&unique("alarm"), 2);
    let source = broker.source(&queues[0]);
    source.verify().await.expect("declared");
    broker.source(&queues[1]).verify().await.expect("declared");
    let sending = broker.publisher().publish(Outgoing {
        destination: Destination::Queue(queues[0].name.as_str().into()),
        envelope: Envelope::default(),
        key: None,
    });
    sending.await.expect("sent");
    let membership = membership(&broker, "alarm", &queues);
    let (mut one, mut two) = (join(&membership).await, join(&membership).await);
    one.announcer.announce(announcement(1)).await.expect("sent");
    hear(&mut one, 1).await;
    hear(&mut two, 1).await;
    let state = SessionState::start();
    let mut session = source.open(Arc::clone(&state), 5).await.expect("opened");
    let held = session.deliveries.next().await.expect("one").expect("is");

    node.raise_memory_alarm();
    for sequence in 2..5 {
        let announcing = one.announcer.announce(announcement(sequence));
        let why = within("a bounded try", announcing).await;
        why.expect_err("nobody can publish");
    }
    // Meanwhile shards are looked at, and settled.
    let asked = BTreeSet::from([0, 1]);
    let deserted = membership.unattended(asked).await.expect("answered");
    assert_eq!(deserted, BTreeSet::from([1]));
    session.control.acknowledge(&[Ack {
        tag: held[0].tag(),
        multiple: false,
    }]);
    session.control.barrier().await.expect("processed");

    node.end_memory_alarm();
    within("the end of the alarm", async {
        while one.announcer.announce(announcement(5)).await.is_err() {}
    })
    .await;
    // On the same places: nothing was lost but what was said meanwhile.
    hear(&mut one, 5).await;
    hear(&mut two, 5).await;
    broker.close().await;
}

#[tokio::test]
async fn a_silent_broker_ends_the_place_within_two_heartbeats() {
    let _one = ONE_BROKER.lock().await;
    let node = PrivateBroker::start();
    let broker = RabbitMq::at(node.url()).heartbeat(Duration::from_secs(2));
    let membership = membership(&broker, "silent", &[]);
    let mut joined = join(&membership).await;
    node.freeze();
    let frozen = Instant::now();
    within("the end", async {
        while joined.heard.next().await.is_some() {}
    })
    .await;
    let took = frozen.elapsed();
    node.thaw();
    println!("noticed after {took:?}");
    assert!(took < Duration::from_secs(5), "{took:?}");
    // The announcing connection may have died too; the next try opens another.
    let mut again = within("a new place", async {
        loop {
            if let Ok(joined) = membership.join().await {
                return joined;
            }
        }
    })
    .await;
    within("the announcement to be sent", async {
        while again.announcer.announce(announcement(1)).await.is_err() {}
    })
    .await;
    hear(&mut again, 1).await;
    broker.close().await;
}

#[tokio::test]
async fn what_cannot_be_read_is_ignored() {
    let broker = RabbitMq::at(shared_url());
    let group = unique("strangers");
    let mut joined = join(&membership(&broker, &group, &[])).await;
    let foreign = Foreign::connect(&shared_url()).await;
    let channel = foreign.channel().await;
    let exchange = format!("{group}.members");
    for body in [r#"{"v":2,"members":[]}"#, "nonsense", ""] {
        channel
            .basic_publish(
                exchange.as_str().into(),
                "".into(),
                BasicPublishOptions::default(),
                body.as_bytes(),
                BasicProperties::default(),
            )
            .await
            .expect("written")
            .await
            .expect("confirmed");
    }
    joined
        .announcer
        .announce(announcement(1))
        .await
        .expect("sent");
    let heard = within("the announcement", joined.heard.next()).await;
    assert_eq!(heard, Some(announcement(1)));
    foreign.delete_exchange(&exchange).await;
    broker.close().await;
}

#[tokio::test]
async fn an_exchange_of_another_kind_is_refused_by_the_name_of_the_group() {
    let broker = RabbitMq::at(shared_url());
    let group = unique("kind");
    let exchange = format!("{group}.members");
    let foreign = Foreign::connect(&shared_url()).await;
    let channel = foreign.channel().await;
    channel
        .exchange_declare(
            exchange.as_str().into(),
            ExchangeKind::Direct,
            Default::default(),
            Default::default(),
        )
        .await
        .expect("declared");
    match membership(&broker, &group, &[]).join().await {
        Err(SourceError::Refused { what, .. }) => {
            assert!(what.contains(&group) && what.contains("differs"), "{what}");
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("joined"),
    }
    foreign.delete_exchange(&exchange).await;
    broker.close().await;
}

// ---- balancers

/// An instance that opens and closes sessions as its balancer decides.
struct Instance {
    broker: RabbitMq,
    own: Arc<watch::Sender<Subscriptions>>,
}

impl Instance {
    fn start(group: &str, queues: &[QueueSpec]) -> Self {
        let broker = RabbitMq::at(shared_url());
        let own = Arc::new(watch::Sender::new(Subscriptions {
            shards: BTreeMap::new(),
            willing: true,
        }));
        let (decide, decisions) = mpsc::unbounded_channel();
        Balancer::start(BalancerSpec {
            membership: membership(&broker, group, queues),
            endpoint: "orders".into(),
            shards: queues.len(),
            intensity: Intensity::default(),
            subscriptions: own.subscribe(),
            decide: Box::new(move |decision| drop(decide.send(decision))),
            died: Box::new(|| panic!("the balancer died")),
        });
        let sources = queues.iter().map(|queue| broker.source(queue)).collect();
        actix::spawn(obey(Arc::clone(&own), sources, decisions));
        Self { broker, own }
    }

    fn count(&self) -> usize {
        self.own.borrow().shards.len()
    }

    async fn comes_to(&self, shards: usize) {
        let mut own = self.own.subscribe();
        let reached = own.wait_for(|own| own.shards.len() == shards);
        let reached = timeout(PATIENCE, reached).await;
        assert!(reached.is_ok(), "{} shards, not {shards}", self.count());
    }
}

/// Carries out decisions, one after the other. A supervisor would drain before it closes.
async fn obey(
    own: Arc<watch::Sender<Subscriptions>>,
    sources: Vec<Arc<dyn Source>>,
    mut decisions: mpsc::UnboundedReceiver<Decision>,
) {
    let mut sessions: BTreeMap<usize, OpenSession> = BTreeMap::new();
    while let Some(decision) = decisions.recv().await {
        for shard in decision.subscribe {
            if sessions.contains_key(&shard) {
                continue;
            }
            if let Ok(session) = sources[shard].open(SessionState::start(), 5).await {
                sessions.insert(shard, session);
                own.send_modify(|own| {
                    own.shards.insert(shard, Instant::now());
                });
            }
        }
        for shard in decision.give {
            if let Some(session) = sessions.remove(&shard) {
                own.send_modify(|own| {
                    own.shards.remove(&shard);
                });
                session.control.close().await;
            }
        }
    }
}

/// Joins, leaves and a death, in this order; prints how long each takes to become even.
#[test]
fn balancers_spread_the_shards_whoever_comes_and_goes() {
    const SHARDS: usize = 8;
    actix::System::new().block_on(async {
        let group = unique("balance");
        let queues = shards(&group, SHARDS);
        let eye = RabbitMq::at(shared_url());
        for queue in &queues {
            eye.source(queue).verify().await.expect("declared");
        }
        let look = membership(&eye, &group, &queues);
        let everything: BTreeSet<_> = (0..SHARDS).collect();

        let began = Instant::now();
        let one = Instance::start(&group, &queues);
        one.comes_to(SHARDS).await;
        println!("the first has everything after {:?}", began.elapsed());

        let began = Instant::now();
        let two = Instance::start(&group, &queues);
        let even = async {
            two.comes_to(SHARDS / 2).await;
            one.comes_to(SHARDS / 2).await;
        };
        let mut looks = 0;
        let attended = async {
            loop {
                let deserted = look.unattended(everything.clone()).await.expect("answered");
                assert_eq!(deserted, BTreeSet::new(), "a join leaves no shard alone");
                looks += 1;
            }
        };
        tokio::select! {
            () = even => {}
            () = attended => {}
        }
        println!("even after a join in {:?} ({looks} looks)", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(10));

        let began = Instant::now();
        two.own.send_modify(|own| own.willing = false);
        one.comes_to(SHARDS).await;
        println!("inherited after a goodbye in {:?}", began.elapsed());
        two.broker.close().await;
        drop(two);

        let began = Instant::now();
        let three = Instance::start(&group, &queues);
        three.comes_to(SHARDS / 2).await;
        one.comes_to(SHARDS / 2).await;
        println!(
            "even after a join that follows a leave in {:?}",
            began.elapsed()
        );
        assert!(began.elapsed() < Duration::from_secs(10));

        let began = Instant::now();
        // Its connections end, and it says nothing.
        three.broker.close().await;
        one.comes_to(SHARDS).await;
        println!("inherited after a death in {:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(10));
        let deserted = look.unattended(everything).await.expect("answered");
        assert_eq!(deserted, BTreeSet::new());

        one.broker.close().await;
        let foreign = Foreign::connect(&shared_url()).await;
        for queue in &queues {
            foreign.delete(&queue.name).await;
        }
        foreign.delete_exchange(&format!("{group}.members")).await;
        eye.close().await;
    });
}
