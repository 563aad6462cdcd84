//! Handlers that are called for their answer.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn invoke_answers_inline_and_publishes_nothing_of_the_answer() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let bus = started(
        Bus::builder()
            .handler::<Paid, _>(async |paid: Paid, cx: Context| {
                assert_eq!((cx.endpoint(), cx.attempt()), ("paid", 1));
                match paid.number {
                    0 => Err(Failure::permanent("zero")),
                    1 => panic!("one"),
                    2 => std::future::pending().await,
                    number => {
                        cx.publish(&Shipped::new(paid.account, number)).await?;
                        Ok(Billed::new(paid.account, number))
                    }
                }
            })
            .handler::<Billed, _>(tells!(tell, "billed", Billed))
            .handler::<Shipped, _>(tells!(tell, "shipped", Shipped))
            .local_queue("paid", |q| q.handler_timeout(Duration::from_millis(20))),
    )
    .await;
    let answer: Billed = bus.invoke(Paid::new(7, 3)).await.expect("answers");
    assert_eq!(answer, Billed::new(7, 3));
    assert_eq!(next(&mut seen).await, ("shipped", 3));
    bus.invoke::<_, ()>(Billed::new(1, 1))
        .await
        .expect("answers");
    assert_eq!(
        next(&mut seen).await,
        ("billed", 1),
        "called, not published"
    );
    for (number, kind) in [
        (0, laneway::FailureKind::Permanent),
        (1, laneway::FailureKind::Panicked),
    ] {
        match bus.invoke::<_, Billed>(Paid::new(1, number)).await {
            Err(InvokeError::Failed(failure)) => assert_eq!(failure.kind(), kind),
            other => panic!("{other:?}"),
        }
    }
    let late = bus.invoke::<_, Billed>(Paid::new(1, 2)).await;
    assert!(matches!(late, Err(InvokeError::TimedOut(_))), "{late:?}");
    match bus.invoke::<_, Shipped>(Paid::new(1, 3)).await {
        Err(error @ InvokeError::Answer { .. }) => {
            let text = error.to_string();
            assert!(
                text.contains("Billed") && text.contains("Shipped"),
                "{text}"
            );
        }
        other => panic!("{other:?}"),
    }
    // Not counted as the queue's, and nothing of it in the queue.
    assert_eq!(snapshot(&bus, "paid").await.handled, 0);
    nothing_more(&bus, &mut seen).await;
    let ended = bus.invoke::<_, Billed>(Paid::new(7, 3)).await;
    assert!(matches!(ended, Err(InvokeError::ShutDown)), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_invoked_is_refused_with_the_reason() {
    async fn idle<T: Message>(_: T, _: Context) -> Result<(), Failure> {
        Ok(())
    }
    let broker = MemoryBroker::new();
    let bus = started(
        Bus::builder()
            .memory(broker)
            .handler_with::<Paid, _>(idle::<Paid>, |q| q.sequential())
            .handler::<Shipped, _>(idle::<Shipped>)
            .separated::<Shipped, _>("mail", idle::<Shipped>)
            .handler_with::<Billed, _>(idle::<Billed>, |q| q.on_broker()),
    )
    .await;
    let refused = |result: Result<(), InvokeError>, word: &str| match result {
        Err(InvokeError::Refused { why, .. }) => assert!(why.contains(word), "{why}"),
        other => panic!("{other:?}"),
    };
    refused(bus.invoke(Paid::new(1, 1)).await, "ordered");
    refused(bus.invoke(Shipped::new(1, 1)).await, "several");
    refused(bus.invoke(Billed::new(1, 1)).await, "broker");
    let nobody = bus
        .invoke::<_, ()>(workload::Numbered {
            key: "a".into(),
            seq: 1,
        })
        .await;
    assert!(
        matches!(nobody, Err(InvokeError::NoHandler(_))),
        "{nobody:?}"
    );
    stop(&bus).await;
}
