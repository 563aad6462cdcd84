//! A wrong setting or another world is refused with words that say what to change.

use super::*;

fn with_userinfo(userinfo: &str) -> String {
    let url = shared_url();
    let host = url.rsplit('@').next().expect("a host");
    let host = host.strip_prefix("amqp://").unwrap_or(host);
    format!("amqp://{userinfo}@{host}")
}

#[tokio::test]
async fn refusals_name_the_setting_and_never_the_password() {
    let nowhere = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = nowhere.local_addr().expect("bound").port();
    drop(nowhere);
    let vhost = format!("{}/laneway-no-such-vhost", with_userinfo("guest:guest"));
    for (url, refused, contains) in [
        (with_userinfo("guest:sesame"), true, "password in `url`"),
        (vhost, true, "virtual host `laneway-no-such-vhost`"),
        (
            format!("amqp://guest:sesame@127.0.0.1:{port}"),
            false,
            "127.0.0.1:",
        ),
        ("http://guest:sesame@127.0.0.1".to_owned(), true, "url: "),
    ] {
        let broker = RabbitMq::at(&url);
        let source = broker.source(&existing("q", |q| q));
        let mut errors = source.verify().await.expect_err("it cannot work");
        let opened = source.open(SessionState::start(), 1).await;
        errors.push(opened.err().expect("it cannot work"));
        for error in errors {
            let (was_refused, text) = text_of(&error);
            assert_eq!(was_refused, refused, "{text}");
            assert!(text.contains(contains), "{text}");
            assert!(
                !format!("{error:?} {broker:?}").contains("sesame"),
                "{error:?}"
            );
        }
        let published = broker.publisher().publish(to_queue("q", "")).await;
        match published {
            Err(PublishError::Refused(why)) => {
                assert!(why.contains(contains) && !why.contains("sesame"), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn verify_lists_every_difference() {
    let broker = RabbitMq::at(shared_url());
    let foreign = Foreign::connect(&shared_url()).await;
    let queue = unique("differs");
    let (exchange, parked) = (format!("{queue}-dlx"), format!("{queue}-parked"));

    // Missing, and owned by somebody else.
    let spec = existing(&queue, |q| q.durable().parking(&exchange, &parked));
    let errors = broker
        .source(&spec)
        .verify()
        .await
        .expect_err("nothing is there");
    let texts: Vec<_> = errors.iter().map(text_of).collect();
    assert_eq!(texts.len(), 3, "{texts:?}");
    for ((refused, text), name) in texts.iter().zip([&queue, &exchange, &parked]) {
        assert!(*refused && text.contains(name.as_str()), "{text}");
    }
    let opened = broker.source(&spec).open(SessionState::start(), 1).await;
    let (refused, text) = text_of(&opened.err().expect("nothing is there"));
    assert!(refused && text.contains(&queue), "{text}");

    // There, and different: one argument of the queue, the type of the parking queue.
    foreign.declare(&queue, FieldTable::default()).await;
    foreign.declare(&parked, FieldTable::default()).await;
    let spec = declared(&queue, |q| {
        q.quorum()
            .single_active_consumer()
            .parking(&exchange, &parked)
    });
    let errors = broker.source(&spec).verify().await.expect_err("it differs");
    let texts: Vec<_> = errors.iter().map(text_of).collect();
    assert_eq!(texts.len(), 2, "{texts:?}");
    for ((refused, text), name) in texts.iter().zip([&queue, &parked]) {
        assert!(*refused && text.contains(name.as_str()), "{text}");
        assert!(text.contains("inequivalent arg"), "{text}");
    }
    let spec = declared(&queue, |q| q.durable().single_active_consumer());
    let errors = broker.source(&spec).verify().await.expect_err("it differs");
    let (refused, text) = text_of(&errors[0]);
    assert!(
        refused && text.contains("x-single-active-consumer") && text.contains(&queue),
        "{text}"
    );

    // The refusals have not harmed the connection; what is as declared is verified, again and again.
    let spec = declared(&queue, |q| q.durable());
    let source = verified(&broker, &spec).await;
    source.verify().await.expect("verified again");
    foreign.delete(&queue).await;
    foreign.delete(&parked).await;
    foreign.delete_exchange(&exchange).await;
}
