//! Rows the broker does not take: they come back, they are parked, and nothing waits for them.

use serde_json::json;

use crate::support::{Stage, eventually, full};

/// Retries that follow each other at once, so that a row is parked within a test.
const HASTE: [(&str, u64); 3] =
    [("publish.max_attempts", 3), ("publish.retry_backoff_ms", 50), ("publish.retry_backoff_max_ms", 100)];

async fn stage(mode: &str) -> Stage {
    Stage::with(mode, |config| HASTE.iter().fold(config, |config, (key, value)| config.set(key, *value)))
        .await
}

async fn unroutable_rows_are_retried_then_parked_and_hold_nothing_back(mode: &str) {
    let stage = stage(mode).await;
    stage.vhost.unbind("all", "outbox", "#").await;
    stage.vhost.bind("all", "outbox", "good.#").await;
    let mut relay = stage.config.start_running().await;
    let mut good = Vec::new();
    let mut bad = Vec::new();
    for n in 0..full(300, 3_000) {
        if n % 10 == 3 {
            bad.push(stage.insert("bad.one", &format!("{{\"n\":  {n}}}")).await);
        } else {
            good.push(stage.insert("good.one", &format!("{{\"n\": {n}}}")).await);
        }
    }
    stage.oracle.wait_for_all(&good).await;
    eventually("the bad ones are parked", async || {
        (stage.number("SELECT count(*) FROM postrider_dead_letters").await == bad.len() as i64).then_some(())
    })
    .await;
    assert_eq!(stage.number("SELECT count(*) FROM postrider_retries").await, 0);
    let wrong = "SELECT count(*) FROM postrider_dead_letters
                 WHERE attempts <> 3 OR reason <> 'unroutable' OR detail NOT LIKE '%312%'";
    assert_eq!(stage.number(wrong).await, 0, "parked after three attempts, with the broker's words");
    let parked =
        "SELECT count(*) FROM outbox_messages WHERE error IS NOT NULL AND processed_on_utc IS NOT NULL
                  AND type = 'bad.one'";
    assert_eq!(stage.number(parked).await, bad.len() as i64);
    assert_eq!(stage.recorded().await, good.len() as i64);
    relay.stop().await;
    stage.oracle.assert_nothing_else(&good);
    stage.oracle.assert_no_duplicates();
}

async fn a_rejected_row_that_becomes_routable_is_delivered_as_it_was_written(mode: &str) {
    let stage = stage(mode).await;
    let config = stage.config.clone().set("publish.max_attempts", 1_000);
    stage.vhost.unbind("all", "outbox", "#").await;
    let mut relay = config.start_running().await;
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
    assert_eq!(stage.number("SELECT count(*) FROM postrider_retries").await, 0);
    relay.stop().await;
}

async fn what_amqp_cannot_carry_is_parked_at_once_and_closes_nothing(mode: &str) {
    let stage = Stage::with(mode, |config| {
        config.set("outbox.columns.headers", "headers").set("outbox.columns.routing_key", "routing_key")
    })
    .await;
    stage
        .app
        .batch_execute(
            "ALTER TABLE outbox_messages ADD IF NOT EXISTS headers jsonb, ADD IF NOT EXISTS routing_key text, ALTER type TYPE text",
        )
        .await
        .unwrap();
    let mut relay = stage.config.start_running().await;
    let first = stage.commit(0, 100).await;
    stage.oracle.wait_for_all(&first).await;
    let openings = relay.status().await["broker"]["channel_openings"].clone();
    let long = "ü".repeat(128);
    let fits = "x".repeat(255);
    let headers = json!({ "h": "x".repeat(140_000) }).to_string();
    let sql = "INSERT INTO outbox_messages (id, type, content, occurred_on_utc, headers, routing_key)
               VALUES (gen_random_uuid(), $1, '{}', now(), $2::text::jsonb, $3) RETURNING id::text";
    let bad: [(&str, &str, &str); 4] =
        [(&long, "{}", "k"), ("t", "{}", &long), ("t", &headers, "k"), ("t", "{\"CC\": \"no list\"}", "k")];
    for (kind, headers, key) in bad {
        stage.app.query_one(sql, &[&kind, &headers, &key]).await.unwrap();
    }
    let good: String = stage.app.query_one(sql, &[&fits, &"{}", &fits]).await.unwrap().get(0);
    let more = stage.commit(100, 100).await;
    stage.oracle.wait_for_all(&more).await;
    stage.oracle.wait_for_all(&[&good]).await;
    eventually("the bad ones are parked", async || {
        (stage.number("SELECT count(*) FROM postrider_dead_letters WHERE reason = 'invalid'").await == 4)
            .then_some(())
    })
    .await;
    assert_eq!(relay.status().await["broker"]["channel_openings"], openings, "no channel was closed");
    relay.stop().await;
    stage.oracle.assert_no_duplicates();
}

async fn rows_that_name_a_missing_exchange_are_parked_with_the_brokers_words(mode: &str) {
    let stage = Stage::with(mode, |config| {
        HASTE
            .iter()
            .fold(config, |config, (key, value)| config.set(key, *value))
            .set("outbox.columns.exchange", "exchange")
    })
    .await;
    stage.app.batch_execute("ALTER TABLE outbox_messages ADD IF NOT EXISTS exchange text").await.unwrap();
    let mut relay = stage.config.start_running().await;
    stage.oracle.wait_for_all(&stage.commit(0, 1).await).await;
    let openings = relay.status().await["broker"]["channel_openings"].clone();
    stage
        .app
        .batch_execute(
            "INSERT INTO outbox_messages (id, type, content, occurred_on_utc, exchange)
             SELECT gen_random_uuid(), 't', '{}', clock_timestamp(), CASE WHEN g % 100 = 50 THEN 'nowhere' END
             FROM generate_series(1, 1000) g",
        )
        .await
        .unwrap();
    stage.oracle.wait_for(991).await;
    eventually("the ten are parked", async || {
        let sql = "SELECT count(*) FROM postrider_dead_letters
                   WHERE reason = 'exchange_missing' AND detail LIKE '%nowhere%'";
        (stage.number(sql).await == 10).then_some(())
    })
    .await;
    let after = relay.status().await["broker"]["channel_openings"].clone();
    assert_eq!(after, openings, "the publishing channel was never closed");
    relay.stop().await;
    stage.oracle.assert_no_duplicates();
}

macro_rules! both_modes {
    ($($case:ident),+ $(,)?) => {
        mod wal { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $case() { super::$case("wal").await })+ }
        mod poll { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $case() { super::$case("poll").await })+ }
    };
}

both_modes!(
    unroutable_rows_are_retried_then_parked_and_hold_nothing_back,
    a_rejected_row_that_becomes_routable_is_delivered_as_it_was_written,
    what_amqp_cannot_carry_is_parked_at_once_and_closes_nothing,
    rows_that_name_a_missing_exchange_are_parked_with_the_brokers_words,
);
