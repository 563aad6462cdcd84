//! Handlers of local queues: together and apart, what they return, how they fail.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn handlers_of_one_type_run_together_and_separated_ones_have_retries_of_their_own() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let failing = |tell: &Sender, name: &'static str, failures: u32| {
        let (tell, left) = (tell.clone(), Arc::new(AtomicU32::new(failures)));
        move |message: Paid, cx: Context| {
            let (tell, left) = (tell.clone(), Arc::clone(&left));
            async move {
                tell.send((name, u64::from(cx.attempt())))?;
                let fails =
                    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
                match fails {
                    Ok(_) => Err(Failure::transient(format!("message {}", message.number))),
                    Err(_) => Ok(()),
                }
            }
        }
    };
    let bus = started(
        Bus::builder()
            .handler::<Paid, _>(failing(&tell, "first", 0))
            .handler::<Paid, _>(failing(&tell, "second", 1))
            .separated::<Paid, _>("billing", failing(&tell, "billing", 3))
            .separated::<Paid, _>("mail", failing(&tell, "mail", 0))
            .local_queues(|q| q.backoff(Backoff::constant(Duration::ZERO))),
    )
    .await;
    bus.publish(&Paid::new(1, 1)).await.expect("published");
    let all = next_of(&mut seen, 9).await;
    let mut attempts: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (name, attempt) in all {
        attempts.entry(name).or_default().push(attempt);
    }
    assert_eq!(attempts["first"], [1, 2], "both run again");
    assert_eq!(attempts["second"], [1, 2]);
    assert_eq!(attempts["billing"], [1, 2, 3, 4], "its own retries");
    assert_eq!(attempts["mail"], [1], "nobody else's");
    nothing_more(&bus, &mut seen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_handler_returns_is_published_after_its_success_and_only_then() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let held = Arc::new(Semaphore::new(0));
    let (begun, gate) = (Tally::new(), Arc::clone(&held));
    let begins = begun.clone();
    let several = move |paid: Paid, cx: Context| {
        let (begins, gate) = (begins.clone(), Arc::clone(&gate));
        async move {
            begins.add();
            gate.acquire().await?.forget();
            if cx.attempt() < 3 {
                return Err(Failure::transient("not yet"));
            }
            let bills = (1..=paid.number).map(|number| Billed::new(paid.account, number));
            let shipped = (paid.number > 1).then(|| Shipped::new(paid.account, paid.number));
            Ok((bills.collect::<Vec<_>>(), shipped))
        }
    };
    let bus = started(
        Bus::builder()
            .handler::<Paid, _>(several)
            .handler::<Billed, _>(tells!(tell, "billed", Billed))
            .handler::<Shipped, _>(tells!(tell, "shipped", Shipped))
            .local_queue("paid", |q| {
                q.sequential().backoff(Backoff::constant(Duration::ZERO))
            }),
    )
    .await;
    for number in [0, 1, 2] {
        bus.publish(&Paid::new(1, number)).await.expect("published");
    }
    for attempt in 1..=3 {
        begun.until("an attempt", attempt).await;
        assert_eq!(seen.try_recv().ok(), None, "before its success");
        held.add_permits(1);
    }
    held.add_permits(6);
    let expected = [("billed", 1), ("billed", 1), ("billed", 2), ("shipped", 2)];
    assert_eq!(next_of(&mut seen, 4).await, expected);
    nothing_more(&bus, &mut seen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_fails_for_good_is_a_gap_and_is_discarded() {
    let bus = started(
        Bus::builder()
            .handler::<Paid, _>(async |_: Paid, _: Context| -> Result<Billed, Failure> {
                Err(Failure::transient("never"))
            })
            .local_queue("paid", |q| {
                q.max_delivery_attempts(2)
                    .backoff(Backoff::constant(Duration::ZERO))
            }),
    )
    .await;
    let mut events = bus.events();
    bus.publish(&Paid::new(1, 1)).await.expect("published");
    let gap = within("the gap", async {
        loop {
            let event = events.recv().await.expect("open");
            if let EventKind::Gap {
                outcome, attempts, ..
            } = event.kind
            {
                return (event.endpoint, outcome, attempts);
            }
        }
    })
    .await;
    assert_eq!(gap, ("paid".into(), Outcome::Discarded, 2));
    assert!(bus.parked("paid").is_err());
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_queue_goes_on_in_its_order_with_what_it_had() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let failed = Arc::new(AtomicU32::new(0));
    let handler = move |paid: Paid, _: Context| {
        let (tell, failed): (Sender, _) = (tell.clone(), Arc::clone(&failed));
        async move {
            if paid.number == 3 && failed.fetch_add(1, Ordering::SeqCst) == 0 {
                return Err(Failure::transient("a pause"));
            }
            tell.send(("paid", paid.number))?;
            Ok(())
        }
    };
    let bus = started(Bus::builder().handler_with::<Paid, _>(handler, |q| {
        q.sequential().bound(5).on_failure(|p| {
            p.on_any()
                .pause_endpoint(Duration::from_millis(10))
                .discard()
        })
    }))
    .await;
    // More than there are places: those of the messages that came back are taken still.
    for number in 0..20 {
        let message = Paid::new(1, number);
        within("a place", bus.publish(&message))
            .await
            .expect("published");
    }
    for number in 0..20 {
        assert_eq!(next(&mut seen).await, ("paid", number));
    }
    nothing_more(&bus, &mut seen).await;
}
