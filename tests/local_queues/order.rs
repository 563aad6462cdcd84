//! The order of each kind of queue, and where a message has its key from.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_queue_runs_handlers_off_the_publishers_task_and_5_at_once() {
    let running = Running::new();
    let of = running.clone();
    let bus = started(Bus::builder().handler_with::<Paid, _>(
        move |_: Paid, _: Context| {
            let running = of.clone();
            async move { running.run().await }
        },
        |q| q.max_parallel(5),
    ))
    .await;
    // All publishes return although no handler has: nothing is let go yet.
    for number in 0..20 {
        within("a publish", bus.publish(&Paid::new(number, number)))
            .await
            .expect("published");
    }
    running.begun.until("5 at once", 5).await;
    for ended in 1..=20 {
        running.permits.add_permits(1);
        let begun = (ended + 5).min(20);
        running.begun.until("the next one", begun).await;
    }
    stop(&bus).await;
    assert_eq!(running.most.load(Ordering::SeqCst), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partitioned_queue_keeps_the_order_of_each_key_and_runs_keys_in_parallel() {
    let order = Order::default();
    let (count, of) = (Tally::new(), Arc::clone(&order));
    let counted = count.clone();
    let failed = Arc::new(AtomicU32::new(0));
    let handler = move |paid: Paid, cx: Context| {
        let (order, counted, failed) = (Arc::clone(&of), counted.clone(), Arc::clone(&failed));
        async move {
            assert_eq!(cx.key(), Some(&paid.account.into()));
            // Every seventh fails once: its key waits for it.
            if paid.number.is_multiple_of(7) && cx.attempt() == 1 {
                failed.fetch_add(1, Ordering::SeqCst);
                return Err(Failure::transient("once"));
            }
            tokio::task::yield_now().await;
            order
                .lock()
                .expect("no panic")
                .entry(paid.account)
                .or_default()
                .push(paid.number);
            counted.add();
            Ok(())
        }
    };
    let bus = started(
        Bus::builder()
            .keyed::<Paid>()
            .handler_with::<Paid, _>(handler, |q| {
                q.partitioned(8)
                    .backoff(Backoff::constant(Duration::from_millis(1)))
            }),
    )
    .await;
    for number in 0..50 {
        for account in 0..20 {
            bus.publish(&Paid::new(account, number))
                .await
                .expect("published");
        }
    }
    count.until("all", 1_000).await;
    stop(&bus).await;
    for numbers in order.lock().expect("no panic").values() {
        assert_eq!(*numbers, (0..50).collect::<Vec<_>>());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_waits_with_a_long_backlog_delays_no_other_key() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let handler = move |paid: Paid, _: Context| {
        let tell: Sender = tell.clone();
        async move {
            if paid.account == 1 {
                return Err(Failure::transient("not now"));
            }
            tell.send(("paid", paid.number))?;
            Ok(())
        }
    };
    let bus = started(
        Bus::builder()
            .keyed::<Paid>()
            .handler_with::<Paid, _>(handler, |q| {
                q.partitioned(2)
                    .backoff(Backoff::constant(Duration::from_secs(3_600)))
            }),
    )
    .await;
    for number in 0..1_000 {
        bus.publish(&Paid::new(1, number)).await.expect("published");
    }
    bus.publish(&Paid::new(2, 7)).await.expect("published");
    assert_eq!(next(&mut seen).await, ("paid", 7));
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequential_queue_handles_one_at_a_time_in_order_also_through_retries() {
    let running = Running::new();
    running.permits.add_permits(1_000);
    let (tell, mut seen) = mpsc::unbounded_channel();
    let of = running.clone();
    let handler = move |paid: Paid, cx: Context| {
        let (running, tell) = (of.clone(), tell.clone());
        async move {
            running.run().await?;
            if paid.number.is_multiple_of(5) && cx.attempt() < 3 {
                return Err(Failure::transient("twice"));
            }
            tell.send(("paid", paid.number))?;
            Ok(())
        }
    };
    let bus = started(Bus::builder().handler_with::<Paid, _>(handler, |q| {
        q.sequential().backoff(Backoff::constant(Duration::ZERO))
    }))
    .await;
    for number in 0..100 {
        // Whatever key it has.
        bus.publish_keyed(&Paid::new(1, number), number)
            .await
            .expect("published");
    }
    for number in 0..100 {
        assert_eq!(next(&mut seen).await, ("paid", number));
    }
    stop(&bus).await;
    assert_eq!(running.most.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_key_is_the_explicit_one_else_the_rules() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    fn tells_key<T: Message>(
        tell: &mpsc::UnboundedSender<(&'static str, Option<OrderingKey>)>,
    ) -> impl laneway::Handler<T> {
        let tell = tell.clone();
        move |_: T, cx: Context| {
            let tell = tell.clone();
            async move {
                let sent = tell.send((T::TYPE, cx.key().cloned()));
                sent.map_err(|_| Failure::permanent("the test has ended"))
            }
        }
    }
    let bus = started(
        Bus::builder()
            .key_by::<Paid, _>(|paid: &Paid| format!("rule-{}", paid.account))
            .keyed::<(Shipped, Billed)>()
            .handler::<Paid, _>(tells_key::<Paid>(&tell))
            .handler::<Shipped, _>(tells_key::<Shipped>(&tell))
            .handler_with::<Billed, _>(
                async |billed: Billed, _: Context| {
                    // Returned under a key of its own.
                    Ok(WithKey::new(
                        Paid::new(9, 9),
                        format!("returned-{}", billed.account),
                    ))
                },
                |q| q.partitioned(2),
            )
            .local_queue("paid", |q| q.partitioned(2))
            .local_queue("shipped", |q| q.partitioned(2)),
    )
    .await;
    let mut key_of_next = async || within("a key", seen.recv()).await.expect("open");
    bus.publish(&Paid::new(1, 1)).await.expect("published");
    assert_eq!(key_of_next().await, ("paid", Some("rule-1".into())));
    bus.publish_keyed(&Paid::new(1, 1), "explicit")
        .await
        .expect("published");
    assert_eq!(key_of_next().await, ("paid", Some("explicit".into())));
    bus.publish(&Shipped::new(2, 1)).await.expect("published");
    assert_eq!(key_of_next().await, ("shipped", Some("2".into())));
    bus.publish(&Billed::new(3, 1)).await.expect("published");
    assert_eq!(key_of_next().await, ("paid", Some("returned-3".into())));
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_without_a_key_is_counted_where_publishers_give_the_keys() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let handler = tells!(tell, "paid", Paid);
    let bus = started(
        Bus::builder().handler_with::<Paid, _>(handler, |q| q.partitioned(2).keys_from_publisher()),
    )
    .await;
    let mut events = bus.events();
    bus.publish_keyed(&Paid::new(1, 1), 1_u64)
        .await
        .expect("published");
    bus.publish(&Paid::new(1, 2)).await.expect("published");
    next_of(&mut seen, 2).await;
    assert_eq!(snapshot(&bus, "paid").await.keyless, 1);
    within("the event", async {
        while !matches!(
            events.recv().await.expect("open").kind,
            EventKind::KeyMissing { .. }
        ) {}
    })
    .await;
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_without_order_runs_messages_of_one_key_in_parallel() {
    let running = Running::new();
    let of = running.clone();
    let handler = move |_: Paid, cx: Context| {
        let running = of.clone();
        async move {
            assert_eq!(cx.key(), None);
            running.run().await
        }
    };
    let bus = started(Bus::builder().keyed::<Paid>().handler::<Paid, _>(handler)).await;
    for number in 0..5 {
        bus.publish(&Paid::new(1, number)).await.expect("published");
    }
    running.begun.until("all of one key at once", 5).await;
    running.permits.add_permits(5);
    stop(&bus).await;
}
