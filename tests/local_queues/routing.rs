//! Which queues follow from the handlers, and what is sent to them.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_type_with_a_handler_has_a_queue_of_its_own_and_needs_no_transport() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let bus = started(
        Bus::builder()
            .handler::<Paid, _>(tells!(tell, "paid", Paid))
            .handler::<Shipped, _>(tells!(tell, "shipped", Shipped)),
    )
    .await;
    bus.publish(&Paid::new(1, 1)).await.expect("published");
    bus.publish(&Shipped::new(1, 2)).await.expect("published");
    assert_eq!(next_of(&mut seen, 2).await, [("paid", 1), ("shipped", 2)]);
    let names: Vec<_> = bus
        .snapshot()
        .await
        .endpoints
        .into_iter()
        .map(|one| one.endpoint)
        .collect();
    assert_eq!(names, ["paid".into(), "shipped".into()]);
    nothing_more(&bus, &mut seen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn publish_reaches_every_subscriber_and_send_needs_at_least_one() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let bus = started(
        Bus::builder()
            .handler::<Paid, _>(tells!(tell, "own", Paid))
            .separated::<Paid, _>("billing", tells!(tell, "billing", Paid))
            .separated::<Paid, _>("mail", tells!(tell, "mail", Paid)),
    )
    .await;
    bus.send(&Paid::new(1, 1)).await.expect("sent");
    let expected = [("billing", 1), ("mail", 1), ("own", 1)];
    assert_eq!(next_of(&mut seen, 3).await, expected);
    // Nobody handles it: an event that nobody listens to, a command that cannot be carried out.
    bus.publish(&Billed::new(1, 1)).await.expect("no error");
    let error = bus.send(&Billed::new(1, 1)).await.expect_err("nobody");
    assert!(matches!(error, PublishError::NoHandler(name) if name == "billed"));
    let error = bus.send_keyed(&Billed::new(1, 1), "key").await;
    assert!(matches!(error, Err(PublishError::NoHandler(_))));
    nothing_more(&bus, &mut seen).await;
    let closed = bus.publish(&Paid::new(1, 2)).await;
    assert!(matches!(closed, Err(PublishError::ShutDown)));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_local_handlers_a_type_without_a_route_has_no_destination() {
    let bus = started(Bus::builder().memory(MemoryBroker::new())).await;
    let error = bus.publish(&Paid::new(1, 1)).await;
    assert!(matches!(error, Err(PublishError::NoDestination(_))));
    let error = bus.send(&Paid::new(1, 1)).await;
    assert!(matches!(error, Err(PublishError::NoHandler(_))));
    stop(&bus).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_for_both_sends_to_the_transport_and_to_the_local_queues() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let broker = MemoryBroker::new();
    let bus = started(
        Bus::builder()
            .memory(broker.clone())
            .topology(|t| t.queue("outside", |q| q.durable()))
            .handler::<Paid, _>(tells!(tell, "local", Paid))
            .publishes::<Paid>(|r| r.to_queue("outside").and_local_queues()),
    )
    .await;
    bus.publish(&Paid::new(1, 1)).await.expect("published");
    assert_eq!(next(&mut seen).await, ("local", 1));
    let sent = broker.messages("outside");
    assert_eq!(sent.len(), 1);
    // The route's encoding.
    assert_eq!(sent[0].content_type.as_deref(), Some("application/json"));
    nothing_more(&bus, &mut seen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn local_messages_are_message_pack_and_a_refused_route_leaves_nothing_in_buffered_queues() {
    let (content, mut contents) = mpsc::unbounded_channel();
    let (tell, mut seen) = mpsc::unbounded_channel();
    let broker = MemoryBroker::new();
    let bus = started(
        Bus::builder()
            .memory(broker.clone())
            .topology(|t| t.queue("outside", |q| q.durable()))
            .handler::<Billed, _>(move |_: Billed, cx: Context| {
                let content = content.clone();
                async move { Ok(content.send(cx.envelope().content_type.clone())?) }
            })
            .handler::<Paid, _>(tells!(tell, "local", Paid))
            .publishes::<Paid>(|r| r.to_queue("outside").and_local_queues()),
    )
    .await;
    bus.publish(&Billed::new(1, 1)).await.expect("published");
    let content = within("a message", contents.recv()).await.expect("open");
    assert_eq!(content.as_deref(), Some("application/msgpack"));
    broker.make_unreachable();
    let refused = bus.publish(&Paid::new(1, 1)).await;
    assert!(matches!(refused, Err(PublishError::Refused(_))));
    nothing_more(&bus, &mut seen).await;
}
