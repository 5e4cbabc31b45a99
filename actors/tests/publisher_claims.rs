//! Claims in the publisher's hands, against a real PostgreSQL and RabbitMQ: each comes back exactly once, and none idles
//! while the broker cannot take messages.
//!
//! `POSTRIDER_TEST_RABBITMQCTL` is the command of a private broker that may be blocked, such as `./dev broker ctl x`.

mod publishing;
mod support;

use std::{
    process::Command,
    time::{Duration, Instant},
};

use futures_util::TryStreamExt;
use postrider_actors::{
    envelope::{Origin, Reason, Rejection, Verdict},
    source::claim::{Claim, Wanted},
    status::Reason as StateReason,
};
use publishing::{
    broker::Vhost,
    stage::{Stage3, message, settings},
};
use support::Database;

/// A claim of one row; what it claimed plays no part here.
async fn claim(database: &Database) -> Origin {
    let outbox = database.outbox().await;
    let (shared, _) = database.shared();
    let wanted = Wanted::Outbox { since: None };
    let (claim, rows, _) = Claim::open(&shared.pool, &outbox, wanted, 1).await.expect("a claim");
    rows.try_collect::<Vec<_>>().await.expect("rows");
    Origin::Claim(Box::new(claim))
}

async fn database() -> Option<Database> {
    if std::env::var("POSTRIDER_TEST_DATABASE_URL").is_err() {
        eprintln!("skipped: POSTRIDER_TEST_DATABASE_URL names no server");
        return None;
    }
    let database = Database::new().await;
    database.insert(20, "order", 1_000).await;
    Some(database)
}

#[actix::test]
async fn a_claim_comes_back_once_with_a_verdict_for_each_message() {
    let (Some(database), Some(vhost)) = (database().await, Vhost::fresh().await) else { return };
    vhost.exchange("outbox").await;
    vhost.queue("all", "outbox", "bound", &[]).await;
    let stage = Stage3::start(settings(&vhost.url, "outbox")).await;
    for n in 0..10u64 {
        let key = |m: u64| if m.is_multiple_of(50) { "unbound" } else { "bound" };
        let messages = (n * 400..(n + 1) * 400).map(|m| message(m, "outbox", key(m), true)).collect();
        stage.send_as(claim(&database).await, messages).await;
        stage.send((0..50).map(|m| message(100_000 + n * 50 + m, "outbox", "bound", true)).collect()).await;
    }
    let verdicts = stage.verdicts(4_500).await;
    let rejected = verdicts.iter().filter(|(_, verdict)| *verdict != Verdict::Delivered).count();
    assert_eq!(rejected, 80);
    assert_eq!(stage.claims(), vec![400; 10]);
    stage.stop().await;
    assert_eq!(vhost.drain("all").await.len(), 4_420);
    vhost.remove().await;
}

#[actix::test]
async fn a_claim_larger_than_the_exposure_releases_what_is_beyond_it() {
    let (Some(database), Some(vhost)) = (database().await, Vhost::fresh().await) else { return };
    vhost.exchange("outbox").await;
    vhost.queue("all", "outbox", "#", &[]).await;
    let mut settings = settings(&vhost.url, "outbox");
    settings.publish.exposure = 100;
    let stage = Stage3::start(settings).await;
    stage
        .send_as(claim(&database).await, (0..400).map(|m| message(m, "outbox", "key", true)).collect())
        .await;
    for (number, verdict) in stage.verdicts(400).await {
        let wanted = if number < 100 { Verdict::Delivered } else { Verdict::Abandoned };
        assert_eq!(verdict, wanted, "{number}");
    }
    stage.stop().await;
    vhost.remove().await;
}

#[actix::test]
async fn a_claim_that_meets_no_broker_is_released_in_time() {
    let Some(database) = database().await else { return };
    let closed =
        std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its address");
    let stage = Stage3::start(settings(&format!("amqp://guest:guest@{closed}/"), "outbox")).await;
    let begun = Instant::now();
    for n in 0..8u64 {
        let messages = (n * 10..(n + 1) * 10).map(|m| message(m, "outbox", "key", true)).collect();
        stage.send_as(claim(&database).await, messages).await;
    }
    let verdicts = stage.verdicts(80).await;
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert!(verdicts.iter().all(|(_, verdict)| *verdict == Verdict::Abandoned));
    stage.stop().await;
}

/// A message that closes the connection, in a claim: the claim may be cut while the connection is made again, but the
/// culprit is remembered and found.
#[actix::test]
async fn a_message_that_closes_the_connection_is_found_though_its_claims_come_and_go() {
    let (Some(database), Some(vhost)) = (database().await, Vhost::fresh().await) else { return };
    vhost.exchange("outbox").await;
    vhost.queue("all", "outbox", "#", &[]).await;
    let stage = Stage3::start(settings(&vhost.url, "outbox")).await;
    let culprit = || {
        let mut headers = lapin::types::FieldTable::default();
        headers.insert("big".into(), lapin::types::AMQPValue::LongString("x".repeat(140 * 1024).into()));
        let mut message = message(7, "outbox", "key", true);
        message.properties = message.properties.with_headers(headers);
        message
    };
    let until = Instant::now() + Duration::from_secs(40);
    let mut came = 0;
    let found = loop {
        assert!(Instant::now() < until, "never found");
        let mut messages: Vec<_> = (0..20).map(|m| message(m, "outbox", "key", true)).collect();
        messages[7] = culprit();
        stage.send_as(claim(&database).await, messages).await;
        came += 20;
        stage.reach(Duration::from_secs(10), |seen| seen.len() >= came).await;
        let verdicts = stage.verdicts.lock().expect("no panic");
        let refused = |verdict: &Verdict| {
            matches!(verdict, Verdict::Rejected(Rejection { reason: Reason::Invalid, .. }))
        };
        let found: Vec<u64> = verdicts.iter().filter(|(_, v)| refused(v)).map(|(n, _)| *n).collect();
        if !found.is_empty() {
            break found;
        }
    };
    assert_eq!(found, [7]);
    stage.stop().await;
    vhost.remove().await;
}

fn rabbitmqctl(arguments: &[&str]) -> Option<()> {
    let command = std::env::var("POSTRIDER_TEST_RABBITMQCTL").ok()?;
    let mut words = command.split_whitespace();
    let status = Command::new(words.next()?).args(words).args(arguments).status().expect("it runs");
    assert!(status.success());
    Some(())
}

/// C13, the publisher's part: while an alarm holds, claims are cut, the stream is kept, nothing times out; then it goes
/// on by itself. And a stop while blocked does not wait.
#[actix::test]
async fn a_blocked_broker_holds_the_stream_and_cuts_claims() {
    let (Some(database), Some(vhost)) = (database().await, Vhost::fresh().await) else { return };
    if rabbitmqctl(&["set_vm_memory_high_watermark", "absolute", "1MB"]).is_none() {
        eprintln!("skipped: POSTRIDER_TEST_RABBITMQCTL names no broker that may be blocked");
        return;
    }
    vhost.exchange("outbox").await;
    vhost.queue("all", "outbox", "#", &[]).await;
    let mut settings = settings(&vhost.url, "outbox");
    settings.publish.confirm_timeout = Duration::from_secs(3);
    let stage = Stage3::start(settings.clone()).await;
    stage.send((0..200).map(|m| message(m, "outbox", "key", true)).collect()).await;
    let begun = Instant::now();
    while !stage.shared.board.holds(StateReason::BrokerAlarm) {
        assert!(begun.elapsed() < Duration::from_secs(5), "blocked and nobody says so");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let begun = Instant::now();
    stage
        .send_as(claim(&database).await, (1000..1200).map(|m| message(m, "outbox", "key", true)).collect())
        .await;
    stage.reach(Duration::from_secs(5), |seen| seen.iter().filter(|(n, _)| *n >= 1000).count() == 200).await;
    assert!(begun.elapsed() < Duration::from_secs(5));
    tokio::time::sleep(Duration::from_secs(5)).await;
    let openings = || stage.shared.figures.channel_openings.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(openings(), 1, "no confirm can come, so none is late");

    let other = Stage3::start(settings).await;
    other.send((5000..5300).map(|m| message(m, "outbox", "key", true)).collect()).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let begun = Instant::now();
    other.stop().await;
    assert!(begun.elapsed() < Duration::from_secs(2), "a stop waits for no blocked broker");

    rabbitmqctl(&["set_vm_memory_high_watermark", "absolute", "1GB"]);
    stage.reach(Duration::from_secs(10), |seen| seen.len() >= 400).await;
    for (number, verdict) in stage.verdicts(400).await {
        let wanted = if number < 1000 { Verdict::Delivered } else { Verdict::Abandoned };
        assert_eq!(verdict, wanted, "{number}");
    }
    assert_eq!(openings(), 1, "it went on without a restart");
    assert!(!stage.shared.board.holds(StateReason::BrokerAlarm));
    stage.stop().await;
    vhost.remove().await;
}
