//! The embedded broker keeps the promises of the ports.

use futures::FutureExt as _;
use futures::future::BoxFuture;
use laneway::testing::conformance::Adapter;
use laneway::transport::Transport;
use laneway::transport::memory::MemoryBroker;

struct Memory {
    broker: MemoryBroker,
}

impl Adapter for Memory {
    fn transport(&self) -> &dyn Transport {
        &self.broker
    }

    fn cut<'a>(&'a self, queue: &'a str) -> BoxFuture<'a, ()> {
        async move { self.broker.cut_sessions(queue) }.boxed()
    }

    fn cut_members<'a>(&'a self, group: &'a str) -> BoxFuture<'a, ()> {
        async move { self.broker.cut_members(group) }.boxed()
    }

    fn remove_exchange<'a>(&'a self, exchange: &'a str) -> BoxFuture<'a, ()> {
        async move { self.broker.remove_exchange(exchange) }.boxed()
    }
}

async fn memory() -> impl Adapter {
    Memory {
        broker: MemoryBroker::new(),
    }
}

laneway::conformance_suite!(memory);

mod membership {
    laneway::membership_conformance_suite!(super::memory);
}
