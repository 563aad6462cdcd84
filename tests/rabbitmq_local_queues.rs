//! A local queue that was moved to RabbitMQ is declared there and keeps its order and its poison messages.
#![cfg(feature = "rabbitmq")]

use laneway::prelude::*;
use laneway::topology::Topology;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

#[path = "support/orders.rs"]
mod orders;
mod support;
#[path = "support/workload.rs"]
mod workload;
use orders::{started, stop, within};
use support::broker::{shared_url, unique};

#[derive(Serialize, Deserialize)]
struct Paid {
    account: u64,
    number: u64,
}
impl Message for Paid {
    const TYPE: &'static str = "paid";
}
impl Keyed for Paid {
    fn key(&self) -> OrderingKey {
        self.account.into()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_on_the_broker_keeps_its_order_and_parks_what_fails() {
    let rabbitmq = || RabbitMq::at(shared_url());
    let queue = unique("local");
    let (tell, mut seen) = mpsc::unbounded_channel();
    let handler = move |paid: Paid, cx: Context| {
        let tell = tell.clone();
        async move {
            assert_eq!(cx.key(), Some(&paid.account.into()));
            if paid.number == 5 {
                return Err(Failure::permanent("five"));
            }
            tell.send((paid.account, paid.number))?;
            Ok(())
        }
    };
    let bus = started(
        Bus::builder()
            .rabbitmq(rabbitmq())
            .keyed::<Paid>()
            // Under a name that no other run has; a type's own queue would be named `paid`.
            .separated_with::<Paid, _>(&queue, handler, |q| q.partitioned(4).on_broker()),
    )
    .await;
    for number in 0..20 {
        for account in 0..3 {
            let message = Paid { account, number };
            let sent = within("a confirm", bus.send(&message)).await;
            sent.expect("confirmed");
        }
    }
    let mut of_account = [const { Vec::new() }; 3];
    for _ in 0..3 * 19 {
        let (account, number) = within("a message", seen.recv()).await.expect("open");
        of_account[usize::try_from(account).expect("small")].push(number);
    }
    for numbers in of_account {
        let expected: Vec<u64> = (0..20).filter(|number| *number != 5).collect();
        assert_eq!(numbers, expected);
    }
    let endpoint = within("a snapshot", bus.snapshot()).await;
    assert_eq!(endpoint.endpoint(&queue).expect("it exists").parked, 3);
    stop(&bus).await;
    let (rabbitmq, parking) = (rabbitmq(), format!("{queue}.parked"));
    let parked = within("the parked ones", rabbitmq.ready(&parking)).await;
    assert_eq!(parked.expect("it is there"), 3);
    let topology = Topology::default().queue(&queue, |q| {
        q.durable()
            .single_active_consumer()
            .parking(&parking, &parking)
    });
    let deleted = within("the clean-up", rabbitmq.delete(&topology)).await;
    deleted.expect("deleted");
}
