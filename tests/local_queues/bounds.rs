//! How much a queue takes, and who waits for a place.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_holds_up_publishers_from_outside_until_a_message_has_ended() {
    let running = Running::new();
    let of = running.clone();
    let bus = started(Bus::builder().handler_with::<Paid, _>(
        move |_: Paid, _: Context| {
            let running = of.clone();
            async move { running.run().await }
        },
        |q| q.bound(2),
    ))
    .await;
    let messages: Vec<_> = (0..4).map(|number| Paid::new(1, number)).collect();
    for message in &messages[..2] {
        bus.publish(message).await.expect("there is a place");
    }
    running.begun.until("both to begin", 2).await;
    let mut third = Box::pin(bus.publish(&messages[2]));
    assert!((&mut third).now_or_never().is_none(), "no place");
    // Given up: nothing of it stays behind.
    drop(third);
    let mut fourth = Box::pin(bus.publish(&messages[3]));
    assert!((&mut fourth).now_or_never().is_none(), "no place");
    running.permits.add_permits(1);
    within("a place", fourth).await.expect("published");
    running.permits.add_permits(2);
    running.begun.until("three", 3).await;
    stop(&bus).await;
    assert_eq!(running.begun.get(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_cascades_20_000_messages_to_its_own_queue_and_another_loses_none() {
    const MANY: u64 = 20_000;
    let (own, other) = (Tally::new(), Tally::new());
    let (owns, others) = (own.clone(), other.clone());
    let paid = move |paid: Paid, cx: Context| {
        let owns = owns.clone();
        async move {
            owns.add();
            let mut returned = Vec::new();
            if paid.number == 0 {
                for number in 1..=MANY {
                    cx.publish(&Paid::new(1, number)).await?;
                    returned.push(Billed::new(1, number));
                }
            }
            Ok(returned)
        }
    };
    let billed = move |_: Billed, _: Context| {
        let others = others.clone();
        async move {
            others.add();
            Ok(())
        }
    };
    // A single handler at a time and a small bound: whoever waited for a place would wait for ever.
    let bus = started(
        Bus::builder()
            .handler_with::<Paid, _>(paid, |q| q.bound(10).max_parallel(1))
            .handler_with::<Billed, _>(billed, |q| q.bound(10)),
    )
    .await;
    bus.publish(&Paid::new(1, 0)).await.expect("published");
    own.until("its own", 20_001).await;
    other.until("the other's", 20_000).await;
    // And the bound holds again for who comes from outside.
    bus.publish(&Paid::new(1, 1)).await.expect("published");
    own.until("one more", 20_002).await;
    stop(&bus).await;
    assert_eq!((own.get(), other.get()), (20_002, 20_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_lets_nobody_wait_for_a_place() {
    let running = Running::new();
    let of = running.clone();
    let bus = started(Bus::builder().handler_with::<Paid, _>(
        move |_: Paid, _: Context| {
            let running = of.clone();
            async move { running.run().await }
        },
        |q| q.bound(1),
    ))
    .await;
    bus.publish(&Paid::new(1, 1)).await.expect("published");
    running.begun.until("it to begin", 1).await;
    let message = Paid::new(1, 2);
    let mut waiting = Box::pin(bus.publish(&message));
    assert!((&mut waiting).now_or_never().is_none(), "no place");
    within("the shutdown", bus.shutdown(Duration::ZERO)).await;
    let result = within("the publisher", waiting).await;
    assert!(matches!(result, Err(PublishError::ShutDown)), "{result:?}");
}
