//! RabbitMQ keeps the promises of the ports, on classic and on quorum queues.
#![cfg(feature = "rabbitmq")]

mod support;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use laneway::testing::conformance::Adapter;
use laneway::topology::{QueueSpec, QueueType};
use laneway::transport::Transport;
use laneway::transport::rabbitmq::RabbitMq;

use support::broker::shared_url;
use support::foreign::Foreign;
use support::proxy::Proxy;

/// A client of the shared broker behind a proxy of its own, so that only its connections are cut.
struct Broker {
    proxy: Proxy,
    broker: RabbitMq,
    queue_type: QueueType,
}

impl Broker {
    fn new(queue_type: QueueType) -> Self {
        let url = shared_url();
        let rest = url.strip_prefix("amqp://").expect("an amqp URL");
        let (userinfo, rest) = rest.split_once('@').unwrap_or(("guest:guest", rest));
        let (address, vhost) = rest.split_once('/').unwrap_or((rest, "%2f"));
        let proxy = Proxy::to(address);
        let broker = RabbitMq::at(format!("amqp://{userinfo}@{}/{vhost}", proxy.address()));
        Self {
            proxy,
            broker,
            queue_type,
        }
    }
}

impl Adapter for Broker {
    fn transport(&self) -> &dyn Transport {
        &self.broker
    }

    fn describe(&self, queue: QueueSpec) -> QueueSpec {
        queue.durable().of_type(self.queue_type)
    }

    fn cut<'a>(&'a self, _queue: &'a str) -> BoxFuture<'a, ()> {
        async move { self.proxy.cut() }.boxed()
    }

    fn remove_exchange<'a>(&'a self, exchange: &'a str) -> BoxFuture<'a, ()> {
        async move {
            let foreign = Foreign::connect(&shared_url()).await;
            foreign.delete_exchange(exchange).await;
        }
        .boxed()
    }

    fn clean_up<'a>(&'a self, queue: &'a QueueSpec) -> BoxFuture<'a, ()> {
        async move {
            let foreign = Foreign::connect(&shared_url()).await;
            foreign.delete(&queue.name).await;
            if let Some(parking) = &queue.parking {
                foreign.delete(&parking.queue).await;
                foreign.delete_exchange(&parking.exchange).await;
            }
        }
        .boxed()
    }
}

mod classic {
    async fn broker() -> impl laneway::testing::conformance::Adapter {
        super::Broker::new(super::QueueType::Classic)
    }

    laneway::conformance_suite!(broker);
    laneway::membership_conformance_suite!(broker);
}

mod quorum {
    async fn broker() -> impl laneway::testing::conformance::Adapter {
        super::Broker::new(super::QueueType::Quorum)
    }

    laneway::conformance_suite!(broker);
    laneway::membership_conformance_suite!(broker);
}
