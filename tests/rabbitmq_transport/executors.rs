//! The ports need no runtime of the application's.

use super::*;

/// The smallest executor there is.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn the_ports_work_on_any_executor() {
    // No tokio runtime here: the futures bring none and need none.
    let broker = RabbitMq::at(shared_url());
    let queue = unique("executor");
    let spec = declared(&queue, |q| q);
    block_on(async {
        let source = verified(&broker, &spec).await;
        let sent = broker.publisher().publish(to_queue(&queue, "here")).await;
        sent.expect("sent");
        let (mut session, _) = open(&source, 1).await;
        let taken = take(&mut session, 1).await;
        session.control.acknowledge(&[Ack {
            tag: taken[0].tag(),
            multiple: false,
        }]);
        session.control.barrier().await.expect("processed");
        session.control.close().await;
        broker.close().await;
    });
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        Foreign::connect(&shared_url()).await.delete(&queue).await;
        // The last handle may go anywhere, also where waiting is not allowed.
        let broker = RabbitMq::at(shared_url());
        broker
            .source(&existing("laneway-none", |q| q))
            .verify()
            .await
            .expect_err("missing");
        drop(broker);
    });
}
