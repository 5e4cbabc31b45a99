//! The publisher against a real RabbitMQ.

mod publishing;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use lapin::types::AMQPValue;
use postrider_actors::{
    envelope::{Reason, Rejection, Verdict},
    status::Reason as StateReason,
};
use publishing::{
    broker::Vhost,
    fake::{self, Confirm},
    stage::{Stage3, message, settings},
};

fn reason(verdict: &Verdict) -> Option<Reason> {
    match verdict {
        Verdict::Rejected(Rejection { reason, .. }) => Some(*reason),
        _ => None,
    }
}

/// C01: the unroutable rows, and no others, are rejected; none is lost.
#[actix::test]
async fn every_unroutable_message_is_rejected_and_no_other() {
    let Some(vhost) = Vhost::fresh().await else { return };
    vhost.exchange("outbox").await;
    vhost.queue("all", "outbox", "bound", &[]).await;
    for (every, persistent) in [(100, true), (100, false), (2, true), (2, false)] {
        let stage = Stage3::start(settings(&vhost.url, "outbox")).await;
        let unroutable = |n: u64| n % every == every - 1;
        for batch in 0..50u64 {
            let key = |n| if unroutable(n) { "unbound" } else { "bound" };
            stage
                .send(
                    (batch * 100..(batch + 1) * 100)
                        .map(|n| message(n, "outbox", key(n), persistent))
                        .collect(),
                )
                .await;
            // A whole world that rejects is another story: see the streak.
        }
        let verdicts = stage.verdicts(5000).await;
        for (number, verdict) in &verdicts {
            if unroutable(*number) {
                let no = Rejection { reason: Reason::Unroutable, detail: "312 NO_ROUTE".to_owned() };
                assert_eq!(*verdict, Verdict::Rejected(no), "{number}");
            } else {
                assert_eq!(*verdict, Verdict::Delivered, "{number}");
            }
        }
        stage.stop().await;
        let received = vhost.drain("all").await;
        let wanted: Vec<String> = (0..5000).filter(|n| !unroutable(*n)).map(|n| format!("{n:08}")).collect();
        assert_eq!(received, wanted, "all arrive, once, in order");
    }
    vhost.remove().await;
}

/// C02: what a full queue refuses is not recorded as delivered.
#[actix::test]
async fn what_a_full_queue_refuses_is_rejected() {
    let Some(vhost) = Vhost::fresh().await else { return };
    vhost.exchange("outbox").await;
    vhost.queue("a", "outbox", "a", &[]).await;
    let full = [
        ("x-max-length", AMQPValue::LongInt(1)),
        ("x-overflow", AMQPValue::LongString("reject-publish".into())),
    ];
    vhost.queue("b", "outbox", "b", &full).await;
    let mut settings = settings(&vhost.url, "outbox");
    settings.publish.lanes = 4;
    let stage = Stage3::start(settings).await;
    for batch in 0..40u64 {
        let key = |n: u64| if n.is_multiple_of(2) { "a" } else { "b" };
        stage
            .send((batch * 100..(batch + 1) * 100).map(|n| message(n, "outbox", key(n), true)).collect())
            .await;
    }
    let verdicts = stage.verdicts(4000).await;
    stage.stop().await;
    let held: BTreeSet<String> = vhost.drain("b").await.into_iter().collect();
    for (number, verdict) in &verdicts {
        if number.is_multiple_of(2) {
            assert_eq!(*verdict, Verdict::Delivered, "{number}");
        } else if *verdict == Verdict::Delivered {
            assert!(
                held.contains(&format!("{number:08}")),
                "{number} is recorded as delivered and not there"
            );
        } else {
            assert_eq!(reason(verdict), Some(Reason::Nacked), "{number}");
        }
    }
    assert_eq!(vhost.drain("a").await.len(), 2000);
    vhost.remove().await;
}

/// C14: rows that name an exchange which does not exist are rejected with the broker's words, and close nothing.
#[actix::test]
async fn a_rows_own_missing_exchange_is_its_own_fault_and_closes_no_channel() {
    let Some(vhost) = Vhost::fresh().await else { return };
    vhost.exchange("outbox").await;
    vhost.queue("all", "outbox", "#", &[]).await;
    let stage = Stage3::start(settings(&vhost.url, "outbox")).await;
    let begun = Instant::now();
    let messages = (0..1000u64).map(|n| {
        let own = n % 100 == 50;
        let mut message = message(n, if own { "nowhere" } else { "outbox" }, "key", true);
        message.own_exchange = own;
        message
    });
    stage.send(messages.collect()).await;
    let verdicts = stage.verdicts(1000).await;
    assert!(begun.elapsed() < Duration::from_secs(30));
    let rejected: BTreeMap<u64, &Verdict> =
        verdicts.iter().filter(|(_, v)| *v != Verdict::Delivered).map(|(n, v)| (*n, v)).collect();
    assert_eq!(rejected.len(), 10);
    for (number, verdict) in rejected {
        assert_eq!(number % 100, 50);
        let Verdict::Rejected(Rejection { reason: Reason::ExchangeMissing, detail }) = verdict else {
            panic!("{verdict:?}")
        };
        assert!(detail.starts_with("404 NOT_FOUND"), "{detail}");
    }
    assert_eq!(stage.shared.figures.channel_openings.load(std::sync::atomic::Ordering::Relaxed), 1);
    assert!(stage.shared.board.conditions().is_empty());
    stage.stop().await;
    assert_eq!(vhost.drain("all").await.len(), 990);
    vhost.remove().await;
}

/// With `publish.declare` the configured exchange is made when it is missing; a row's own never is.
#[actix::test]
async fn the_configured_exchange_is_declared_where_that_is_asked_for() {
    let Some(vhost) = Vhost::fresh().await else { return };
    let mut settings = settings(&vhost.url, "outbox");
    settings.publish.declare = true;
    let stage = Stage3::start(settings).await;
    let mut own = message(0, "nowhere", "key", true);
    own.own_exchange = true;
    stage.send(vec![own, message(1, "outbox", "key", true)]).await;
    let verdicts = stage.verdicts(2).await;
    assert_eq!(reason(&verdicts[0].1), Some(Reason::ExchangeMissing));
    assert_eq!(reason(&verdicts[1].1), Some(Reason::Unroutable), "there, and nothing bound to it");
    stage.stop().await;
    vhost.remove().await;
}

/// A missing configured exchange charges nothing: the relay says so, waits, and goes on when it is there.
#[actix::test]
async fn a_missing_configured_exchange_holds_everything_and_charges_nothing() {
    let Some(vhost) = Vhost::fresh().await else { return };
    let stage = Stage3::start(settings(&vhost.url, "outbox")).await;
    stage.send((0..100).map(|n| message(n, "outbox", "key", true)).collect()).await;
    until(|| stage.shared.board.holds(StateReason::ExchangeMissing)).await;
    let (_, condition) = stage.shared.board.conditions().into_iter().next().expect("one is up");
    assert!(condition.detail.contains("'outbox'"), "{condition:?}");
    vhost.exchange("outbox").await;
    vhost.queue("all", "outbox", "#", &[]).await;
    let verdicts = stage.verdicts(100).await;
    assert!(verdicts.iter().all(|(_, verdict)| *verdict == Verdict::Delivered));
    assert!(stage.shared.board.conditions().is_empty());
    // Under traffic it vanishes: the channel is closed with messages under way, and none is charged.
    vhost.channel.exchange_delete("outbox".into(), Default::default()).await.expect("deleted");
    stage.send((100..200).map(|n| message(n, "outbox", "key", true)).collect()).await;
    until(|| stage.shared.board.holds(StateReason::ExchangeMissing)).await;
    vhost.exchange("outbox").await;
    vhost.queue("all", "outbox", "#", &[]).await;
    let verdicts = stage.verdicts(200).await;
    assert!(verdicts.iter().all(|(_, verdict)| *verdict == Verdict::Delivered));
    assert!(stage.shared.board.conditions().is_empty());
    stage.stop().await;
    vhost.remove().await;
}

/// C15: an operator closes the connection under full flow, again and again.
#[actix::test]
async fn a_connection_that_is_closed_under_flow_loses_nothing_and_keeps_the_order() {
    let Some(vhost) = Vhost::fresh().await else { return };
    vhost.exchange("outbox").await;
    vhost.queue("all", "outbox", "#", &[]).await;
    let stage = Stage3::start(settings(&vhost.url, "outbox")).await;
    let total = 30_000u64;
    let feed = async {
        for batch in 0..total / 100 {
            stage
                .send((batch * 100..(batch + 1) * 100).map(|n| message(n, "outbox", "key", true)).collect())
                .await;
        }
    };
    let kill = async {
        for after in [1_000, 10_000, 20_000] {
            stage.reach(Duration::from_secs(60), |seen| seen.len() >= after).await;
            vhost.kill_publisher();
        }
    };
    tokio::join!(feed, kill);
    let verdicts = stage.verdicts(total as usize).await;
    assert!(verdicts.iter().all(|(_, verdict)| *verdict == Verdict::Delivered));
    assert!(!stage.shared.board.holds(StateReason::BrokerDown));
    stage.stop().await;
    let received = vhost.drain("all").await;
    let mut seen = BTreeSet::new();
    let first: Vec<&String> = received.iter().filter(|id| seen.insert((*id).clone())).collect();
    let wanted: Vec<String> = (0..total).map(|n| format!("{n:08}")).collect();
    assert!(first.into_iter().eq(wanted.iter()), "all arrive, first deliveries in order");
    assert!(received.len() - wanted.len() <= 3 * 256, "what is repeated is at most a window a close");
    vhost.remove().await;
}

/// A message that the broker closes the channel over is found and rejected; its neighbours are delivered.
#[actix::test]
async fn a_message_that_closes_the_channel_is_found_among_its_neighbours() {
    let Some(vhost) = Vhost::fresh().await else { return };
    vhost.exchange("outbox").await;
    vhost.queue("all", "outbox", "#", &[]).await;
    let stage = Stage3::start(settings(&vhost.url, "outbox")).await;
    let messages = (0..1000u64).map(|n| {
        let mut message = message(n, "outbox", "key", true);
        if n == 333 {
            // 406: the expiration is no number.
            message.properties = message.properties.with_expiration("soon".into());
        }
        if n == 666 {
            // 501: the header frame is larger than frame_max, which closes the whole connection.
            let mut headers = lapin::types::FieldTable::default();
            headers.insert("big".into(), AMQPValue::LongString("x".repeat(140 * 1024).into()));
            message.properties = message.properties.with_headers(headers);
        }
        message
    });
    stage.send(messages.collect()).await;
    let verdicts = stage.verdicts(1000).await;
    for (number, verdict) in &verdicts {
        match number {
            333 => assert!(
                matches!(verdict, Verdict::Rejected(r) if r.reason == Reason::Refused && r.detail.starts_with("406")),
                "{verdict:?}"
            ),
            666 => assert_eq!(reason(verdict), Some(Reason::Invalid), "{verdict:?}"),
            _ => assert_eq!(*verdict, Verdict::Delivered, "{number}"),
        }
    }
    stage.stop().await;
    let received: BTreeSet<String> = vhost.drain("all").await.into_iter().collect();
    assert_eq!(received.len(), 998);
    vhost.remove().await;
}

/// A thousand rejections in a row hold everything; a binding lets it go on.
#[actix::test]
async fn a_world_that_rejects_everything_stops_the_flow_until_it_is_mended() {
    let Some(vhost) = Vhost::fresh().await else { return };
    vhost.exchange("outbox").await;
    let stage = Stage3::start(settings(&vhost.url, "outbox")).await;
    for batch in 0..30u64 {
        stage
            .send((batch * 100..(batch + 1) * 100).map(|n| message(n, "outbox", "key", true)).collect())
            .await;
    }
    until(|| stage.shared.board.holds(StateReason::AllRejected)).await;
    vhost.queue("all", "outbox", "#", &[]).await;
    let verdicts = stage.verdicts(3000).await;
    let rejected = verdicts.iter().filter(|(_, verdict)| *verdict != Verdict::Delivered).count();
    assert!((1000..1300).contains(&rejected), "{rejected} were charged");
    assert!(!stage.shared.board.holds(StateReason::AllRejected));
    stage.stop().await;
    vhost.remove().await;
}

/// C04. Confirms in ranges, mixed and out of order, are each message's own.
#[actix::test]
async fn confirms_in_ranges_and_out_of_order_are_each_messages_own() {
    let script =
        vec![Confirm::Ack(2, false), Confirm::Nack(1, true), Confirm::Nack(4, false), Confirm::Ack(5, true)];
    let stage = Stage3::start(settings(&fake::broker(5, script), "outbox")).await;
    stage.send((0..5).map(|n| message(n, "outbox", "bound", true)).collect()).await;
    let verdicts: Vec<_> = stage.verdicts(5).await.iter().map(|(_, verdict)| reason(verdict)).collect();
    let nacked = Some(Reason::Nacked);
    assert_eq!(verdicts, [nacked, None, None, nacked, None]);
    stage.stop().await;
}

/// C04. A nack of what a range has acknowledged is against the protocol: the channel is given up and the next one used.
#[actix::test]
async fn a_nack_that_comes_after_its_ack_costs_the_channel_and_no_other_message() {
    let script =
        vec![Confirm::Ack(2, false), Confirm::Nack(1, true), Confirm::Ack(5, true), Confirm::Nack(4, false)];
    let stage = Stage3::start(settings(&fake::broker(5, script), "outbox")).await;
    stage.send((0..5).map(|n| message(n, "outbox", "bound", true)).collect()).await;
    let verdicts: Vec<_> = stage.verdicts(5).await.iter().map(|(_, verdict)| reason(verdict)).collect();
    assert_eq!(verdicts, [Some(Reason::Nacked), None, None, None, None]);
    let opened = || stage.shared.figures.channel_openings.load(std::sync::atomic::Ordering::Relaxed);
    until(|| opened() == 2).await;
    stage.send(vec![message(5, "outbox", "bound", true)]).await;
    assert_eq!(reason(&stage.verdicts(6).await[5].1), None);
    stage.stop().await;
}

/// The same id twice waits for its first verdict instead of being told apart by guessing.
#[actix::test]
async fn the_same_id_is_never_under_way_twice() {
    let Some(vhost) = Vhost::fresh().await else { return };
    vhost.exchange("outbox").await;
    vhost.queue("all", "outbox", "bound", &[]).await;
    let stage = Stage3::start(settings(&vhost.url, "outbox")).await;
    let twice = (0..200u64).flat_map(|n| {
        let mut second = message(n, "outbox", "unbound", true);
        second.envelope.number = n + 1000;
        [message(n, "outbox", "bound", true), second]
    });
    stage.send(twice.collect()).await;
    for (number, verdict) in stage.verdicts(400).await {
        let unbound = number >= 1000;
        assert_eq!(reason(&verdict), unbound.then_some(Reason::Unroutable), "{number}");
    }
    stage.stop().await;
    vhost.remove().await;
}

/// Exposure that comes back only when something is recorded does not come back when the acker has ended.
#[actix::test]
async fn a_publisher_that_waits_for_exposure_stops_when_it_is_told_to() {
    let Some(vhost) = Vhost::fresh().await else { return };
    vhost.exchange("outbox").await;
    vhost.queue("all", "outbox", "bound", &[]).await;
    let stage = Stage3::start(settings(&vhost.url, "outbox")).await;
    stage.send(vec![message(0, "outbox", "bound", true)]).await;
    stage.verdicts(1).await;
    let all = stage.shared.exposure.clone();
    let _held = all.acquire(all.size(), &stage.shared.stop).await.expect("not stopped yet");
    stage.send(vec![message(1, "outbox", "bound", true)]).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    stage.stop().await;
    vhost.remove().await;
}

/// A broker that refuses us, or is not there, is said on the board by name, without the password.
#[actix::test]
async fn a_refusal_and_an_outage_are_told_apart_and_name_the_host() {
    let Some(vhost) = Vhost::fresh().await else { return };
    let password = vhost.url.replace("guest:guest@", "guest:geheim@");
    let elsewhere = format!("{}-not-there", vhost.url);
    let closed =
        std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its address");
    let nobody = format!("amqp://guest:geheim@{closed}/");
    let cases = [
        (password, StateReason::BrokerRefused),
        (elsewhere, StateReason::BrokerRefused),
        (nobody, StateReason::BrokerDown),
    ];
    for (url, reason) in cases {
        let stage = Stage3::start(settings(&url, "outbox")).await;
        until(|| stage.shared.board.holds(reason)).await;
        let conditions = stage.shared.board.conditions();
        assert_eq!(conditions.len(), 1, "{conditions:?}");
        let said = format!("{conditions:?}");
        assert!(said.contains("127.0.0.1:") && !said.contains("geheim"), "{said}");
        stage.stop().await;
    }
    vhost.remove().await;
}

async fn until(condition: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < until, "it never came to that");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
