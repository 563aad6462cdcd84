//! Local queues that live on the broker.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn one_line_moves_a_type_to_the_transport() {
    for moved in [false, true] {
        let (tell, mut seen) = mpsc::unbounded_channel();
        let broker = MemoryBroker::new();
        let order = Order::default();
        let of = Arc::clone(&order);
        let handler = move |paid: Paid, cx: Context| {
            let (tell, order): (Sender, Order) = (tell.clone(), Arc::clone(&of));
            async move {
                assert_eq!(cx.key(), Some(&paid.account.into()));
                if paid.number == 99 {
                    return Err(Failure::permanent("ninety-nine"));
                }
                order
                    .lock()
                    .expect("no panic")
                    .entry(paid.account)
                    .or_default()
                    .push(paid.number);
                tell.send(("paid", paid.number))?;
                Ok(())
            }
        };
        let builder = Bus::builder()
            .memory(broker.clone())
            .keyed::<Paid>()
            .handler_with::<Paid, _>(handler, |q| q.partitioned(4));
        let bus = started(match moved {
            true => builder.local_queue("paid", |q| q.on_broker()),
            false => builder,
        })
        .await;
        for number in 0..20 {
            bus.publish(&Paid::new(number % 3, number))
                .await
                .expect("published");
        }
        next_of(&mut seen, 20).await;
        for (account, numbers) in order.lock().expect("no panic").iter() {
            let expected: Vec<_> = (0..20).filter(|number| number % 3 == *account).collect();
            assert_eq!(*numbers, expected);
        }
        assert_eq!(broker.status("paid").sessions, usize::from(moved));
        bus.publish(&Paid::new(1, 99)).await.expect("published");
        if moved {
            let parked = broker.wait_until("paid.parked", |status| status.ready == 1);
            within("the parked one", parked).await;
            assert!(bus.parked("paid").is_ok());
        }
        stop(&bus).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequential_queue_on_the_broker_is_in_order_whatever_the_keys() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let broker = MemoryBroker::new();
    let handler = move |paid: Paid, cx: Context| {
        let tell: Sender = tell.clone();
        async move {
            if paid.number.is_multiple_of(4) && cx.attempt() == 1 {
                return Err(Failure::transient("once"));
            }
            tell.send(("paid", paid.number))?;
            Ok(())
        }
    };
    let bus = started(
        Bus::builder()
            .memory(broker)
            .handler_with::<Paid, _>(handler, |q| {
                q.sequential()
                    .on_broker()
                    .backoff(Backoff::constant(Duration::ZERO))
            }),
    )
    .await;
    for number in 0..20 {
        bus.publish_keyed(&Paid::new(1, number), number)
            .await
            .expect("published");
    }
    for number in 0..20 {
        assert_eq!(next(&mut seen).await, ("paid", number));
    }
    stop(&bus).await;
}
