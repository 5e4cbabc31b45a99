//! Rows that no broker takes, among rows that it does: found, parked, and nothing waits for them.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{Database, PrivateBroker, Relay, Stage, eventually, full};

/// Columns for a row's own headers and address, and types of any length.
async fn stage_on(mode: &str, database: Database, vhost: crate::support::Vhost) -> Stage {
    let stage = Stage::on(mode, database, vhost, |config| {
        config
            .set("outbox.columns.headers", "headers")
            .set("outbox.columns.exchange", "exchange")
            .set("outbox.columns.routing_key", "routing_key")
            .set("publish.max_attempts", 3)
            .set("publish.retry_backoff_ms", 50)
            .set("publish.retry_backoff_max_ms", 100)
    })
    .await;
    let columns =
        "ALTER TABLE outbox_messages ADD IF NOT EXISTS headers jsonb, ADD IF NOT EXISTS exchange text,
                   ADD IF NOT EXISTS routing_key text, ALTER type TYPE text";
    stage.app.batch_execute(columns).await.unwrap();
    stage
}

async fn stage(mode: &str) -> Stage {
    stage_on(mode, Database::fresh().await, crate::support::Vhost::fresh().await).await
}

async fn openings(relay: &Relay) -> u64 {
    relay.status().await["broker"]["channel_openings"].as_u64().unwrap()
}

/// Delivers one row, so that what the start itself opens is open; returns how many openings that were.
async fn settled(stage: &Stage, relay: &Relay) -> u64 {
    let sql = "INSERT INTO outbox_messages (id, type, content, occurred_on_utc)
               VALUES ('00000000-0000-4000-8000-000000000000', 'first', '{}', clock_timestamp())";
    stage.app.execute(sql, &[]).await.unwrap();
    stage.oracle.wait_for(1).await;
    openings(relay).await
}

async fn parked(stage: &Stage, reason: &str, n: i64) {
    let sql = format!("SELECT count(*) FROM postrider_dead_letters WHERE reason = '{reason}'");
    eventually(&format!("{n} are parked as {reason}"), async || {
        (stage.number(&sql).await == n).then_some(())
    })
    .await;
}

/// C19: 150 rows that always fail stand at the head of the table, in claims of 100; good rows behind them arrive within
/// 5 s, attempts and parking survive kills, and a requeue delivers once the cause is mended.
async fn rows_that_always_fail_at_the_head_hold_nothing_back(mode: &str) {
    let stage = Stage::with(mode, |config| {
        config
            .set("source.poll.workers", 1)
            .set("source.poll.batch_messages", 100)
            .set("publish.max_attempts", 5)
            .set("publish.retry_backoff_ms", 300)
            .set("publish.retry_backoff_max_ms", 300)
    })
    .await;
    stage.vhost.unbind("all", "outbox", "#").await;
    stage.vhost.bind("all", "outbox", "good").await;
    let bad = stage.write(150, "'bad'").await;
    let mut relay = stage.config.start_running().await;
    let good = stage.write(full(500, 5_000), "'good'").await;
    let began = Instant::now();
    let good: Vec<String> = good.into_iter().map(|(id, _)| id).collect();
    stage.oracle.wait_for_all(&good).await;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());

    // What is counted stays counted.
    let attempts = "SELECT coalesce(sum(attempts), 0)::int8 FROM
                    (SELECT attempts FROM postrider_retries UNION ALL SELECT attempts FROM postrider_dead_letters) a";
    let known = "SELECT count(DISTINCT message_id) FROM
                 (SELECT message_id FROM postrider_retries UNION ALL SELECT message_id FROM postrider_dead_letters) a";
    for round in 0..4 {
        eventually("another round of attempts", async || {
            (stage.number(attempts).await >= 150 * (round + 1)).then_some(())
        })
        .await;
        relay.kill9();
        let before = stage.number(attempts).await;
        assert_eq!(stage.number(known).await, 150, "each waits or is parked");
        relay = stage.config.start_running().await;
        assert!(stage.number(attempts).await >= before, "round {round}: attempts were forgotten");
    }
    parked(&stage, "unroutable", 150).await;
    let exact = "SELECT count(*) FROM postrider_dead_letters WHERE attempts = 5 AND detail LIKE '312%'";
    assert_eq!(stage.number(exact).await, 150);
    relay.kill9();
    relay = stage.config.start_running().await;
    let again = stage.write(10, "'good'").await;
    stage.oracle.wait_for_all(&again.iter().map(|(id, _)| id).collect::<Vec<_>>()).await;
    assert_eq!(stage.number(exact).await, 150, "parked is parked");

    stage.vhost.bind("all", "outbox", "bad").await;
    let ran = stage.config.run(&["dead-letters", "requeue", "--all", "--reason", "unroutable"]).await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "150 requeued\n"), "{ran:?}");
    stage.oracle.wait_for_all(&bad.iter().map(|(id, _)| id).collect::<Vec<_>>()).await;
    let all = (150 + good.len() + 10) as i64;
    eventually("all are recorded", async || (stage.recorded().await == all).then_some(())).await;
    assert_eq!(stage.number(known).await, 0);
    relay.stop().await;
}

const INSERT: &str = "INSERT INTO outbox_messages (id, type, content, occurred_on_utc, headers, routing_key)
                      VALUES (gen_random_uuid(), $1, '{}', clock_timestamp(), $2::text::jsonb, $3) RETURNING id::text";

/// C20, and other properties the broker would close a channel or a connection over: refused before they are sent.
async fn headers_that_amqp_cannot_carry_park_their_row_and_close_nothing(mode: &str) {
    let stage = stage(mode).await;
    let mut relay = stage.config.start_running().await;
    let opened = settled(&stage, &relay).await;
    let first = stage.commit(0, 500).await;
    let huge = |bytes: usize| json!({ "h": "x".repeat(bytes) }).to_string();
    let bad = [
        huge(140_000),
        huge(5_000_000),
        json!({"CC": "no list"}).to_string(),
        json!(["no", "object"]).to_string(),
    ];
    for headers in &bad {
        stage.app.query_one(INSERT, &[&"t", headers, &"k"]).await.unwrap();
    }
    let more = stage.commit(500, 500).await;
    let fits: String = stage.app.query_one(INSERT, &[&"t", &huge(120_000), &"k"]).await.unwrap().get(0);
    stage.oracle.wait_for_all(&first).await;
    stage.oracle.wait_for_all(&more).await;
    stage.oracle.wait_for_all(&[&fits]).await;
    parked(&stage, "invalid", bad.len() as i64).await;
    let said = "SELECT count(*) FROM postrider_dead_letters WHERE attempts = 1 AND detail LIKE '%bytes%'";
    assert_eq!(stage.number(said).await, 2, "the size is said, at the first attempt");
    assert_eq!(openings(&relay).await, opened, "no channel was closed");
    relay.stop().await;
    stage.oracle.assert_no_duplicates();
}

/// C21: 255 bytes is what a type, a routing key or an id may have.
async fn a_type_key_or_id_of_255_bytes_is_sent_and_one_of_256_is_that_rows_rejection(mode: &str) {
    let stage = stage(mode).await;
    stage.app.batch_execute("ALTER TABLE outbox_messages ALTER id TYPE text USING NULL").await.unwrap();
    let mut relay = stage.config.start_running().await;
    let opened = settled(&stage, &relay).await;
    let sql = "INSERT INTO outbox_messages (id, type, content, occurred_on_utc, routing_key)
               VALUES ($1, $2, '{}', clock_timestamp(), $3)";
    let ascii = |bytes: usize| "x".repeat(bytes);
    // two bytes a letter
    let utf8 = |bytes: usize| format!("{}{}", "ü".repeat(bytes / 2), "x".repeat(bytes % 2));
    // three bytes a letter: characters and bytes differ more
    let wide = |bytes: usize| format!("{}{}", "€".repeat(bytes / 3), "x".repeat(bytes % 3));
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    for (n, text) in [&ascii as &dyn Fn(usize) -> String, &utf8, &wide].into_iter().enumerate() {
        for bytes in [254, 255, 256] {
            let rows = if bytes > 255 { &mut bad } else { &mut good };
            // ids differ in their beginning
            let id = format!("{n}{}", text(bytes - 1));
            assert_eq!((id.len(), text(bytes).len()), (bytes, bytes));
            rows.push((id, "t".to_owned(), "k".to_owned()));
            rows.push((format!("type-{n}-{bytes}"), text(bytes), "k".to_owned()));
            rows.push((format!("key-{n}-{bytes}"), "t".to_owned(), text(bytes)));
        }
    }
    let mut all: Vec<_> = good.iter().chain(&bad).collect();
    all.sort_unstable();
    for (id, kind, key) in all {
        stage.app.execute(sql, &[id, kind, key]).await.unwrap();
    }
    stage.oracle.wait_for_all(&good.iter().map(|(id, ..)| id).collect::<Vec<_>>()).await;
    parked(&stage, "invalid", bad.len() as i64).await;
    for (id, kind, key) in &good {
        let delivery = stage.oracle.get(id).unwrap();
        assert_eq!(delivery.properties.kind().as_ref().unwrap().as_str(), kind);
        assert_eq!(&delivery.routing_key, key);
    }
    let mut ids: Vec<String> = bad.into_iter().map(|(id, ..)| id).collect();
    ids.sort_unstable();
    assert_eq!(stage.texts("SELECT message_id FROM postrider_dead_letters").await, ids);
    eventually("the others are recorded", async || {
        (stage.recorded().await == good.len() as i64 + 1).then_some(())
    })
    .await;
    assert_eq!(openings(&relay).await, opened, "no channel was closed");
    // A long id can be named by an operator.
    let ran = stage.config.run(&["dead-letters", "discard", "--yes", &ids[0]]).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    relay.stop().await;
    stage.oracle.assert_no_duplicates();
}

/// What our own validation cannot know is traced by sending suspects alone: bodies over the broker's limit, and exchanges
/// that the relay may not write to. Ten culprits among a thousand rows cost few reopenings, and full speed returns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn culprits_the_broker_closes_channels_over_are_found_and_parked() {
    let broker = PrivateBroker::start_with(&["-c", "max_message_size=100000"]).await;
    for mode in ["wal", "poll"] {
        culprits_of_channels(mode, &broker).await;
    }
}

async fn culprits_of_channels(mode: &str, broker: &PrivateBroker) {
    let stage = stage_on(mode, Database::fresh().await, broker.vhost().await).await;
    stage.vhost.declare_exchange("private", lapin::ExchangeKind::Topic).await;
    let name = stage.vhost.name();
    let permission = json!({"configure": ".*", "write": "^(outbox|all)$", "read": ".*"});
    stage.vhost.api("PUT", &format!("/api/permissions/{name}/guest"), Some(permission)).await;
    let mut relay = stage.config.start_running().await;
    let opened = settled(&stage, &relay).await;
    stage
        .app
        .batch_execute(
            "INSERT INTO outbox_messages (id, type, content, occurred_on_utc, exchange)
             SELECT gen_random_uuid(), 't',
                    CASE WHEN g % 200 = 50 THEN to_jsonb(repeat('x', 100001)) ELSE to_jsonb(g) END, clock_timestamp(),
                    CASE WHEN g % 200 = 150 THEN 'private' END
             FROM generate_series(1, 1000) g",
        )
        .await
        .unwrap();
    let began = Instant::now();
    stage.oracle.wait_for(991).await;
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    parked(&stage, "refused", 10).await;
    let words = "SELECT count(*) FROM postrider_dead_letters WHERE attempts = 3 AND
                 (exchange IS NULL AND detail LIKE '406 PRECONDITION_FAILED%size%' OR
                  exchange = 'private' AND detail LIKE '403 ACCESS_REFUSED%private%')";
    assert_eq!(stage.number(words).await, 10, "with the broker's words, after three attempts");
    eventually("the others are recorded", async || (stage.recorded().await == 991).then_some(())).await;
    // Each culprit costs at most one close among others, and one alone for each attempt.
    let closed = openings(&relay).await - opened;
    assert!(closed <= 10 * (1 + 3), "{closed} channels were closed for 10 culprits of 3 attempts");
    full_speed_returned(&stage, &relay).await;
    relay.stop().await;
    stage
        .oracle
        .assert_nothing_lost(&stage.texts("SELECT id::text FROM outbox_messages WHERE error IS NULL").await);
}

/// A connection that breaks over a row does so once among others and once alone: then the row is parked at once, because
/// every further attempt would stop all rows for a reconnection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_culprit_the_broker_closes_the_connection_over_is_found_and_parked() {
    // Our validation knows the broker's default of 128 KiB for a frame.
    let broker = PrivateBroker::start_with(&["-c", "frame_max=16384"]).await;
    for mode in ["wal", "poll"] {
        culprits_of_connections(mode, &broker).await;
    }
}

async fn culprits_of_connections(mode: &str, broker: &PrivateBroker) {
    let stage = stage_on(mode, Database::fresh().await, broker.vhost().await).await;
    let mut relay = stage.config.start_running().await;
    let opened = settled(&stage, &relay).await;
    let first = stage.commit(0, 500).await;
    let headers = json!({ "h": "x".repeat(20_000) }).to_string();
    for _ in 0..2 {
        stage.app.query_one(INSERT, &[&"t", &headers, &"k"]).await.unwrap();
    }
    let more = stage.commit(500, 500).await;
    stage.oracle.wait_for_all(&first).await;
    stage.oracle.wait_for_all(&more).await;
    parked(&stage, "invalid", 2).await;
    let words =
        "SELECT count(*) FROM postrider_dead_letters WHERE attempts = 1 AND detail LIKE '501 FRAME_ERROR%'";
    assert_eq!(stage.number(words).await, 2, "with the broker's words, at the first attempt");
    eventually("the others are recorded", async || (stage.recorded().await == 1_001).then_some(())).await;
    let closed = openings(&relay).await - opened;
    assert!(closed <= 2 * 2, "{closed} connections were closed for 2 culprits");
    full_speed_returned(&stage, &relay).await;
    relay.stop().await;
}

/// Once the culprits are out, messages are in flight together again: sent one by one each would wait for its confirm.
async fn full_speed_returned(stage: &Stage, relay: &Relay) {
    let before = openings(relay).await;
    let rows = stage.commit(5_000, 4_000).await;
    let mut together = 0;
    while stage.oracle.get(rows.last().unwrap()).is_none() {
        let unconfirmed = relay.status().await["unconfirmed"].as_u64().unwrap();
        together = together.max(unconfirmed);
    }
    stage.oracle.wait_for_all(&rows).await;
    assert!(together > 1, "never more than {together} in flight");
    assert_eq!(openings(relay).await, before, "nothing is closed any more");
}

both_modes!(
    rows_that_always_fail_at_the_head_hold_nothing_back,
    headers_that_amqp_cannot_carry_park_their_row_and_close_nothing,
    a_type_key_or_id_of_255_bytes_is_sent_and_one_of_256_is_that_rows_rejection,
);
