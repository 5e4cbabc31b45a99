//! Rows the broker does not take: exactly they are rejected, they come back, they are parked, and nothing waits for them.

use std::time::{Duration, Instant};

use lapin::types::{AMQPValue, FieldTable};
use serde_json::json;

use crate::support::{Database, PrivateBroker, RelayConfig, Stage, eventually, full};

/// Retries that follow each other at once, so that a row is parked within a test.
fn haste(config: RelayConfig, attempts: u64) -> RelayConfig {
    config
        .set("publish.max_attempts", attempts)
        .set("publish.retry_backoff_ms", 50)
        .set("publish.retry_backoff_max_ms", 100)
}

/// The ids of those whose type begins so, sorted.
fn of_kind(rows: &[(String, String)], kind: &str) -> Vec<String> {
    let mut ids: Vec<String> =
        rows.iter().filter(|(_, k)| k.starts_with(kind)).map(|(id, _)| id.clone()).collect();
    ids.sort_unstable();
    ids
}

/// The same ids, both sorted; says what differs, not all of them.
fn assert_same(got: &[String], expected: &[String], what: &str) {
    let beside = |a: &[String], b: &[String]| -> Vec<String> {
        a.iter().filter(|id| b.binary_search(id).is_err()).take(5).cloned().collect()
    };
    let (more, fewer) = (beside(got, expected), beside(expected, got));
    let counts = (got.len(), expected.len());
    assert!(got == expected, "{what}: {counts:?}, unexpected {more:?}, missing {fewer:?}");
}

const DELIVERED: &str =
    "SELECT id::text FROM outbox_messages WHERE processed_on_utc IS NOT NULL AND error IS NULL";
const RETRYING: &str = "SELECT message_id FROM postrider_retries";
const PARKED: &str = "SELECT message_id FROM postrider_dead_letters";

/// Waits until each row is recorded as delivered, waits for retry, or is parked.
async fn all_have_a_verdict(stage: &Stage, n: usize) {
    let sql = "SELECT count(*) FROM outbox_messages WHERE processed_on_utc IS NOT NULL OR error IS NOT NULL";
    eventually("every row has a verdict", async || (stage.number(sql).await == n as i64).then_some(())).await;
}

/// C01: returns and confirms are not mixed up, whatever the broker's version, the delivery mode and the source.
///
/// A window of 200 keeps returned and routed messages in flight together: where a return is taken for that of the
/// confirm it came with, some of these rows are recorded as delivered and good ones rejected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exactly_the_unroutable_rows_are_rejected() {
    for version in [3, 4] {
        let broker = PrivateBroker::start_version(version).await;
        for (mode, persistent) in [("wal", true), ("wal", false), ("poll", true), ("poll", false)] {
            for _ in 0..full(1, 10) {
                let (database, vhost) = (Database::fresh().await, broker.vhost().await);
                let stage = Stage::on(mode, database, vhost, |config| {
                    haste(config, 2).set("publish.window_messages", 200).set("publish.persistent", persistent)
                })
                .await;
                stage.vhost.unbind("all", "outbox", "#").await;
                stage.vhost.bind("all", "outbox", "good.#").await;
                let rows = full(4_000, 20_000);
                // every hundredth, by no pattern that the window could agree with
                let rows = stage
                    .write(rows, "CASE WHEN g * 7919 % 100 = 41 THEN 'lost.one' ELSE 'good.one' END")
                    .await;
                let (good, lost) = (of_kind(&rows, "good"), of_kind(&rows, "lost"));
                assert_eq!(lost.len() * 100, rows.len());
                let mut relay = stage.config.start_running().await;
                all_have_a_verdict(&stage, rows.len()).await;
                eventually("the unroutable are parked", async || {
                    (stage.texts(PARKED).await == lost && stage.texts(RETRYING).await.is_empty())
                        .then_some(())
                })
                .await;
                let what = format!("RabbitMQ {version}, {mode}, persistent {persistent}");
                assert_same(&stage.texts(DELIVERED).await, &good, &format!("recorded, {what}"));
                let others = "SELECT count(*) FROM postrider_dead_letters
                              WHERE reason <> 'unroutable' OR detail NOT LIKE '312 NO_ROUTE%' OR attempts <> 2";
                assert_eq!(stage.number(others).await, 0, "{what}: with the broker's words");
                relay.stop().await;
                stage.oracle.barrier().await;
                stage.oracle.assert_nothing_lost(&good);
                stage.oracle.assert_nothing_else(&good);
                stage.oracle.assert_no_duplicates();
            }
        }
    }
}

/// C02: what a full queue refuses is not recorded as delivered, by eight workers or by the stream.
async fn no_row_beyond_what_a_full_queue_holds_is_recorded(mode: &str) {
    let stage = Stage::with(mode, |config| config.set("source.poll.workers", 8)).await;
    stage.vhost.unbind("all", "outbox", "#").await;
    stage.vhost.bind("all", "outbox", "a").await;
    let mut limits = FieldTable::default();
    limits.insert("x-max-length".into(), AMQPValue::LongInt(1));
    limits.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    stage.vhost.declare_queue_with("tiny", limits).await;
    stage.vhost.bind("tiny", "outbox", "b").await;
    let rows = stage.write(full(3_000, 20_000), "CASE WHEN g % 2 = 0 THEN 'a' ELSE 'b' END").await;
    let (a, b) = (of_kind(&rows, "a"), of_kind(&rows, "b"));
    let mut relay = stage.config.start_running().await;
    stage.oracle.wait_for_all(&a).await;
    eventually("all of A are recorded, and B's have been tried", async || {
        let waiting = (stage.texts(RETRYING).await.len() + stage.texts(PARKED).await.len()) as i64;
        let tried = stage.recorded().await + waiting;
        (tried == rows.len() as i64).then_some(())
    })
    .await;
    relay.stop().await;
    let held = stage.vhost.oracle(&["tiny"]).await;
    eventually("it is drained", async || (stage.vhost.queue_depth("tiny").await == 0).then_some(())).await;
    held.barrier().await;
    let mut held = held.first_deliveries();
    held.sort_unstable();
    let recorded = stage.texts(&format!("{DELIVERED} AND type = 'b'")).await;
    assert_same(&recorded, &held, "recorded of B: exactly what it holds");
    assert!(recorded.len() < b.len() / 10, "the queue refused most of them");
    assert_same(&stage.texts(&format!("{DELIVERED} AND type = 'a'")).await, &a, "recorded of A");
    let other = "SELECT count(*) FROM postrider_retries WHERE reason <> 'nacked'";
    assert_eq!(stage.number(other).await, 0);
}

/// C07: a key that is unbound, bound, unbound under traffic, and caught by an alternate exchange.
async fn an_unbound_key_is_retried_parked_and_delivered_once_something_takes_it(mode: &str) {
    let stage = Stage::with(mode, |config| haste(config, 3)).await;
    let requeue = async || {
        let ran = stage.config.run(&["dead-letters", "requeue", "--all"]).await;
        assert_eq!(ran.code, Some(0), "{ran:?}");
    };
    stage.vhost.unbind("all", "outbox", "#").await;
    stage.vhost.bind("all", "outbox", "good").await;
    let mut relay = stage.config.start_running().await;
    let few = "CASE WHEN g % 50 = 17 THEN 'late' ELSE 'good' END";
    let rows = stage.write(full(500, 5_000), few).await;
    let (good, late) = (of_kind(&rows, "good"), of_kind(&rows, "late"));
    stage.oracle.wait_for_all(&good).await;
    eventually("the unbound are parked", async || (stage.texts(PARKED).await == late).then_some(())).await;
    let words = "SELECT count(*) FROM postrider_dead_letters WHERE detail NOT LIKE '312%' OR attempts <> 3";
    assert_eq!(stage.number(words).await, 0, "after three attempts, with the broker's words");

    // Bound: all arrive.
    stage.vhost.bind("all", "outbox", "late").await;
    requeue().await;
    stage.oracle.wait_for_all(&late).await;
    eventually("all are recorded", async || (stage.recorded().await == rows.len() as i64).then_some(()))
        .await;
    stage.oracle.assert_no_duplicates();

    // Unbound under traffic: each is either delivered and recorded or kept, and the good ones never wait.
    let mut more = Vec::new();
    for round in 0..20 {
        more.extend(stage.write(full(100, 1_000), few).await);
        if round == 10 {
            stage.vhost.unbind("all", "outbox", "late").await;
        }
    }
    let (good, late) = (of_kind(&more, "good"), of_kind(&more, "late"));
    stage.oracle.wait_for_all(&good).await;
    all_have_a_verdict(&stage, rows.len() + more.len()).await;
    eventually("no retry is left", async || stage.texts(RETRYING).await.is_empty().then_some(())).await;
    stage.oracle.barrier().await;
    let parked = stage.texts(PARKED).await;
    assert!(!parked.is_empty() && parked.len() < late.len(), "{} of {}", parked.len(), late.len());
    for id in &late {
        let delivered = stage.oracle.get(id).is_some();
        assert_ne!(delivered, parked.binary_search(id).is_ok(), "{id} is either delivered or parked");
    }

    // An alternate exchange takes what nothing else does: that is a delivery.
    stage.vhost.declare_exchange("rest", lapin::ExchangeKind::Fanout).await;
    stage.vhost.declare_queue("rest").await;
    stage.vhost.bind("rest", "rest", "").await;
    let policy =
        json!({"pattern": "^outbox$", "definition": {"alternate-exchange": "rest"}, "apply-to": "exchanges"});
    stage.vhost.api("PUT", &format!("/api/policies/{}/rest", stage.vhost.name()), Some(policy)).await;
    let rest = stage.vhost.oracle(&["rest"]).await;
    requeue().await;
    rest.wait_for_all(&parked).await;
    let all = (rows.len() + more.len()) as i64;
    eventually("everything is recorded as delivered", async || (stage.recorded().await == all).then_some(()))
        .await;
    assert!(stage.texts(RETRYING).await.is_empty() && stage.texts(PARKED).await.is_empty());
    relay.stop().await;
}

/// C14: rows that name exchanges which do not exist hold nothing back and close no publishing channel.
async fn rows_that_name_a_missing_exchange_are_parked_with_the_brokers_words(mode: &str) {
    let stage = Stage::with(mode, |config| haste(config, 3).set("outbox.columns.exchange", "exchange")).await;
    stage.app.batch_execute("ALTER TABLE outbox_messages ADD IF NOT EXISTS exchange text").await.unwrap();
    let mut relay = stage.config.start_running().await;
    let first = stage.insert("first", "{}").await;
    stage.oracle.wait_for_all(&[first]).await;
    let opened = relay.status().await["broker"]["channel_openings"].clone();
    let began = Instant::now();
    stage
        .app
        .batch_execute(
            "INSERT INTO outbox_messages (id, type, content, occurred_on_utc, exchange)
             SELECT gen_random_uuid(), 't', '{}', clock_timestamp(),
                    CASE WHEN g % 100 = 50 THEN 'nowhere-' || g % 300 END
             FROM generate_series(1, 1000) g",
        )
        .await
        .unwrap();
    stage.oracle.wait_for(991).await;
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    eventually("the ten are parked", async || {
        let sql = "SELECT count(*) FROM postrider_dead_letters
                   WHERE reason = 'exchange_missing' AND detail LIKE '404%no exchange ''nowhere-%' AND attempts = 3";
        (stage.number(sql).await == 10).then_some(())
    })
    .await;
    let openings = relay.status().await["broker"]["channel_openings"].clone();
    assert_eq!(openings, opened, "the publishing channel was never closed");
    relay.stop().await;
    stage.oracle.assert_no_duplicates();
}

async fn a_rejected_row_that_becomes_routable_is_delivered_as_it_was_written(mode: &str) {
    let stage = Stage::with(mode, |config| haste(config, 1_000)).await;
    stage.vhost.unbind("all", "outbox", "#").await;
    let mut relay = stage.config.start_running().await;
    let id = stage.insert("later", "{\"a\": 1.10}").await;
    eventually("it waits for another attempt", async || {
        (stage.number("SELECT count(*) FROM postrider_retries WHERE reason = 'unroutable'").await == 1)
            .then_some(())
    })
    .await;
    let waits = "SELECT count(*) FROM outbox_messages WHERE error IS NOT NULL AND processed_on_utc IS NULL";
    assert_eq!(stage.number(waits).await, 1);
    stage.vhost.bind("all", "outbox", "#").await;
    stage.oracle.wait_for_all(&[&id]).await;
    assert_eq!(stage.oracle.get(&id).unwrap().body, b"{\"a\": 1.10}");
    eventually("it is recorded", async || (stage.recorded().await == 1).then_some(())).await;
    assert!(stage.texts(RETRYING).await.is_empty());
    relay.stop().await;
}

both_modes!(
    no_row_beyond_what_a_full_queue_holds_is_recorded,
    an_unbound_key_is_retried_parked_and_delivered_once_something_takes_it,
    rows_that_name_a_missing_exchange_are_parked_with_the_brokers_words,
    a_rejected_row_that_becomes_routable_is_delivered_as_it_was_written,
);
