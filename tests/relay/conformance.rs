//! What both modes promise, told once: every committed row arrives, nothing else does, and it arrives as it was written.

use lapin::types::{AMQPValue, ShortString};

use crate::support::{Database, PrivateBroker, Stage, commit, eventually, full};

/// Each case as a test of `wal` and a test of `poll`.
macro_rules! both_modes {
    ($($case:ident),+ $(,)?) => {
        mod wal { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $case() { super::$case("wal").await })+ }
        mod poll { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $case() { super::$case("poll").await })+ }
    };
}

both_modes!(
    every_committed_row_arrives_and_no_rolled_back_one,
    rows_that_waited_before_the_first_start_are_delivered,
    bodies_are_byte_identical_to_their_jsonb_text,
    bodies_are_byte_identical_to_json_text_and_bytea_columns,
    properties_and_headers_are_the_rows_own,
    a_clean_stop_and_start_repeats_nothing,
    a_kill_loses_nothing_and_repeats_at_most_the_exposure,
    a_blocked_broker_holds_the_relay_within_its_credits,
    a_pause_stops_intake_survives_a_restart_and_resumes,
    a_drain_moves_what_is_there_and_then_stops,
    delivered_rows_are_deleted_where_configured,
);

async fn every_committed_row_arrives_and_no_rolled_back_one(mode: &str) {
    let stage = Stage::set(mode).await;
    let mut relay = stage.config.start_running().await;
    let transactions = full(20, 200);
    let writers = (0..4).map(|writer| {
        let database = &stage.database;
        async move {
            let mut app = database.connect().await;
            let mut committed = Vec::new();
            for n in 0..transactions {
                let transaction = app.transaction().await.unwrap();
                let ids = commit(transaction.client(), n, 1 + (n + writer) % 7).await;
                if n % 5 == 4 {
                    transaction.rollback().await.unwrap();
                } else {
                    transaction.commit().await.unwrap();
                    committed.extend(ids);
                }
            }
            committed
        }
    });
    let committed: Vec<String> = futures_util::future::join_all(writers).await.concat();
    stage.oracle.wait_for_all(&committed).await;
    stage.oracle.barrier().await;
    stage.oracle.assert_nothing_else(&committed);
    stage.oracle.assert_no_duplicates();
    eventually("every row is recorded", async || {
        (stage.recorded().await == i64::try_from(committed.len()).unwrap()).then_some(())
    })
    .await;
    relay.stop().await;
}

async fn rows_that_waited_before_the_first_start_are_delivered(mode: &str) {
    let stage = Stage::set(mode).await;
    let waiting = stage.commit(0, full(5_000, 200_000)).await;
    let mut relay = stage.config.start_running().await;
    let fresh = stage.commit(waiting.len(), 10).await;
    let all = [waiting, fresh].concat();
    stage.oracle.wait_for_all(&all).await;
    relay.stop().await;
    stage.oracle.assert_nothing_else(&all);
    stage.oracle.assert_no_duplicates();
    assert_eq!(stage.recorded().await, i64::try_from(all.len()).unwrap());
}

/// JSON whose text survives only if nobody parses it.
const CORNERS: [&str; 9] = [
    "{\"big\": 123456789012345678901234567890, \"tiny\": 1e-400, \"exact\": 1.10}",
    "null",
    "\"text with \\\"quotes\\\", ünïcode and 🚚\"",
    "[]",
    "{}",
    "[1, [2, [3, [4, [5, [6, [7, [8, [9, [10]]]]]]]]]]",
    "{\"a\": 1, \"a\": 2}",
    "-0.0",
    "  {\"spaced\" :   true }  ",
];

async fn bodies_are_byte_identical_to_their_jsonb_text(mode: &str) {
    let stage = Stage::set(mode).await;
    let mut relay = stage.config.start_running().await;
    let deep = format!("{}1{}", "[".repeat(500), "]".repeat(500));
    let large = format!("\"{}\"", "x".repeat(300_000));
    for content in CORNERS.iter().copied().chain([deep.as_str(), large.as_str()]) {
        let id = stage.insert("corner", content).await;
        stage.oracle.wait_for_all(&[&id]).await;
        let sql = "SELECT content::text FROM outbox_messages WHERE id = $1::text::uuid";
        let text: String = stage.app.query_one(sql, &[&id]).await.unwrap().get(0);
        let delivery = stage.oracle.get(&id).unwrap();
        assert!(delivery.body == text.as_bytes(), "{content:.60}");
        assert_eq!(
            delivery.properties.content_type().as_ref().map(ShortString::as_str),
            Some("application/json")
        );
    }
    relay.stop().await;
}

async fn bodies_are_byte_identical_to_json_text_and_bytea_columns(mode: &str) {
    for (kind, content_type) in [
        ("json", "application/json"),
        ("text", "text/plain; charset=utf-8"),
        ("bytea", "application/octet-stream"),
    ] {
        let (database, vhost) = (Database::fresh().await, crate::support::Vhost::fresh().await);
        let app = database.connect().await;
        app.batch_execute(&format!(
            "CREATE TABLE outbox_messages (id bigint PRIMARY KEY, type text NOT NULL, content {kind} NOT NULL,
             occurred_on_utc timestamp NOT NULL, processed_on_utc timestamp, error text)"
        ))
        .await
        .unwrap();
        let stage = Stage::on(mode, database, vhost, |config| config).await;
        let mut relay = stage.config.start_running().await;
        let bodies: Vec<Vec<u8>> = match kind {
            "json" => CORNERS
                .iter()
                .map(|corner| corner.as_bytes().to_vec())
                .chain([b"{\"nul\": \"\\u0000\"}".to_vec()])
                .collect(),
            "text" => vec![b"".to_vec(), "plain ünïcode\n\ttabs \\ 'quotes'".into(), vec![b'x'; 200_000]],
            _ => vec![vec![], (0..=255).collect(), vec![0; 100_000]],
        };
        for (id, body) in bodies.iter().enumerate() {
            let id = i64::try_from(id).unwrap();
            let value =
                if kind == "bytea" { "$2".to_owned() } else { format!("convert_from($2, 'UTF8')::{kind}") };
            let sql = format!(
                "INSERT INTO outbox_messages VALUES ($1, 'raw', {value}, timestamp '2026-01-02 03:04:05.678')"
            );
            app.execute(&sql, &[&id, body]).await.unwrap();
        }
        stage.oracle.wait_for(bodies.len()).await;
        for (id, body) in bodies.iter().enumerate() {
            let delivery = stage.oracle.get(id).unwrap();
            assert!(&delivery.body == body, "{kind} {id}: {} bytes", delivery.body.len());
            assert_eq!(
                delivery.properties.content_type().as_ref().map(ShortString::as_str),
                Some(content_type)
            );
            assert_eq!(
                delivery.properties.timestamp(),
                &Some(1_767_323_045),
                "a timestamp without zone is UTC"
            );
        }
        relay.stop().await;
    }
}

async fn properties_and_headers_are_the_rows_own(mode: &str) {
    let stage = Stage::with(mode, |config| {
        config
            .set("outbox.columns.headers", "headers")
            .set("outbox.columns.exchange", "exchange")
            .set("outbox.columns.routing_key", "routing_key")
            .set("outbox.columns.key", "key")
            .set("publish.routing_key", "{tenant}.{key}.{type}")
    })
    .await;
    stage
        .app
        .batch_execute(
            "ALTER TABLE outbox_messages ADD IF NOT EXISTS headers jsonb, ADD IF NOT EXISTS exchange text,
             ADD IF NOT EXISTS routing_key text, ADD IF NOT EXISTS key text,
             ADD IF NOT EXISTS tenant text",
        )
        .await
        .unwrap();
    stage.vhost.declare_exchange("other", lapin::ExchangeKind::Topic).await;
    stage.vhost.bind("all", "other", "#").await;
    let mut relay = stage.config.start_running().await;
    stage
        .app
        .batch_execute(
            r#"INSERT INTO outbox_messages (id, type, content, occurred_on_utc, headers, exchange, routing_key, key, tenant)
               VALUES ('00000000-0000-0000-0000-000000000001', 'order.paid', '{"n": 1}', '2026-01-02T03:04:05.678Z',
                       '{"text": "a", "whole": 42, "yes": true, "nothing": null, "list": [1, "b"], "map": {"k": "v"}}',
                       NULL, NULL, 'k7', 'acme'),
                      ('00000000-0000-0000-0000-000000000002', 'order.paid', '{"n": 2}', now(), NULL, 'other', 'mine', 'k', 't')"#,
        )
        .await
        .unwrap();
    stage.oracle.wait_for(2).await;
    let first = stage.oracle.get("00000000-0000-0000-0000-000000000001").unwrap();
    assert_eq!((first.exchange.as_str(), first.routing_key.as_str()), ("outbox", "acme.k7.order.paid"));
    let properties = &first.properties;
    let text = |value: &Option<ShortString>| value.as_ref().map(|text| text.as_str().to_owned());
    assert_eq!(text(properties.kind()).as_deref(), Some("order.paid"));
    assert_eq!(text(properties.app_id()).as_deref(), Some("postrider"));
    assert_eq!(text(properties.content_type()).as_deref(), Some("application/json"));
    assert_eq!(properties.timestamp(), &Some(1_767_323_045));
    assert_eq!(properties.delivery_mode(), &Some(2));
    let headers = properties.headers().as_ref().expect("headers").inner();
    assert_eq!(headers.get("text"), Some(&AMQPValue::LongString("a".into())));
    assert_eq!(headers.get("whole"), Some(&AMQPValue::LongLongInt(42)));
    assert_eq!(headers.get("yes"), Some(&AMQPValue::Boolean(true)));
    assert_eq!(headers.get("nothing"), Some(&AMQPValue::Void));
    assert!(matches!(headers.get("list"), Some(AMQPValue::FieldArray(list)) if list.as_slice().len() == 2));
    assert!(matches!(headers.get("map"), Some(AMQPValue::FieldTable(map)) if map.inner().len() == 1));
    let second = stage.oracle.get("00000000-0000-0000-0000-000000000002").unwrap();
    assert_eq!((second.exchange.as_str(), second.routing_key.as_str()), ("other", "mine"));
    relay.stop().await;
}

async fn a_clean_stop_and_start_repeats_nothing(mode: &str) {
    let stage = Stage::set(mode).await;
    let mut all = Vec::new();
    for round in 0..full(2, 5) {
        let mut relay = stage.config.start_running().await;
        let batches = 10;
        for batch in 0..batches {
            all.extend(stage.commit((round * batches + batch) * 100, 100).await);
        }
        // Stopped while they move.
        relay.stop().await;
    }
    let mut relay = stage.config.start_running().await;
    stage.oracle.wait_for_all(&all).await;
    relay.stop().await;
    stage.oracle.barrier().await;
    stage.oracle.assert_no_duplicates();
    stage.oracle.assert_nothing_else(&all);
}

async fn a_kill_loses_nothing_and_repeats_at_most_the_exposure(mode: &str) {
    let stage = Stage::set(mode).await;
    let n = full(10_000, 200_000);
    let exposure = if mode == "wal" { 1_000 } else { 2_000 };
    let mut relay = stage.config.start_running().await;
    let mut all = Vec::new();
    for transaction in 0..10 {
        all.extend(stage.commit(transaction * n / 10, n / 10).await);
    }
    relay
        .wait_status("a third is delivered", |status| {
            status["totals"]["delivered"].as_u64().is_some_and(|delivered| delivered >= n as u64 / 3)
        })
        .await;
    relay.kill9();
    let mut relay = stage.config.start_running().await;
    stage.oracle.wait_for_all(&all).await;
    relay.stop().await;
    stage.oracle.barrier().await;
    stage.oracle.assert_nothing_else(&all);
    let repeated = stage.oracle.duplicates().len();
    assert!(repeated <= exposure, "{repeated} repeated, exposure is {exposure}");
    for id in stage.oracle.duplicates().keys() {
        let bodies: Vec<Vec<u8>> =
            stage.oracle.deliveries().into_iter().filter(|d| &d.message_id == id).map(|d| d.body).collect();
        assert!(bodies.windows(2).all(|pair| pair[0] == pair[1]), "a repetition has the same body");
    }
}

async fn a_blocked_broker_holds_the_relay_within_its_credits(mode: &str) {
    let broker = PrivateBroker::start().await;
    let (database, vhost) = (Database::fresh().await, broker.vhost().await);
    let stage = Stage::on(mode, database, vhost, |config| config.set("credits.messages", 2_048)).await;
    let mut relay = stage.config.start_running().await;
    let mut all = stage.commit(0, 100).await;
    stage.oracle.wait_for_all(&all).await;

    broker.block().await;
    let n = full(20_000, 200_000);
    all.extend(stage.commit(100, n).await);
    let status = relay.wait_state("blocked").await;
    assert_eq!(status["reason"], "broker_alarm", "{status}");
    assert!(status["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty()));
    let before = relay.rss_bytes();
    for _ in 0..full(40, 200) {
        let status = relay.status().await;
        let held = status["credits"]["messages"]["now"].as_u64().unwrap();
        assert!(held <= 2_048, "{held} messages held");
        tokio::time::sleep(crate::support::LOOK_EVERY).await;
    }
    let idle = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                AND state LIKE 'idle in transaction%' AND now() - state_change > interval '5 s'";
    assert_eq!(stage.number(idle).await, 0, "no transaction idles while the broker is blocked");
    let grown = relay.rss_bytes().saturating_sub(before);
    assert!(grown < 32 << 20, "memory grew by {grown} bytes while blocked");

    broker.unblock().await;
    stage.oracle.wait_for_all(&all).await;
    relay.wait_state("running").await;
    relay.stop().await;
    stage.oracle.assert_nothing_else(&all);
}

async fn a_pause_stops_intake_survives_a_restart_and_resumes(mode: &str) {
    let stage = Stage::set(mode).await;
    let mut relay = stage.config.start_running().await;
    let before = stage.commit(0, 10).await;
    stage.oracle.wait_for_all(&before).await;
    assert_eq!(relay.post("/api/pause").await.status, 200);
    relay.wait_state("paused").await;
    relay.wait_status("everything settled", |status| status["credits"]["messages"]["now"] == 0).await;
    let during = stage.commit(10, 10).await;
    relay.stop().await;
    let mut relay = stage.config.start();
    relay.wait_state("paused").await;
    stage.oracle.barrier().await;
    stage.oracle.assert_nothing_else(&before);
    assert_eq!(relay.get("/readyz").await.status, 200, "a pause is no fault");
    assert_eq!(relay.post("/api/resume").await.status, 200);
    let all = [before, during].concat();
    stage.oracle.wait_for_all(&all).await;
    relay.wait_state("running").await;
    relay.stop().await;
    stage.oracle.assert_no_duplicates();
}

async fn a_drain_moves_what_is_there_and_then_stops(mode: &str) {
    let stage = Stage::set(mode).await;
    let there = stage.commit(0, full(2_000, 50_000)).await;
    let mut relay = stage.config.start_running().await;
    assert_eq!(relay.post("/api/drain").await.status, 200);
    relay.wait_state("drained").await;
    stage.oracle.wait_for_all(&there).await;
    let later = stage.commit(there.len(), 10).await;
    stage.oracle.barrier().await;
    stage.oracle.assert_nothing_else(&there);
    assert_eq!(relay.post("/api/resume").await.status, 200);
    let all = [there, later].concat();
    stage.oracle.wait_for_all(&all).await;
    relay.stop().await;
    stage.oracle.assert_no_duplicates();
}

async fn delivered_rows_are_deleted_where_configured(mode: &str) {
    let stage = Stage::with(mode, |config| config.set("ack.rows", "delete")).await;
    let waiting = stage.commit(0, 500).await;
    let mut relay = stage.config.start_running().await;
    let fresh = stage.commit(500, 500).await;
    let all = [waiting, fresh].concat();
    stage.oracle.wait_for_all(&all).await;
    eventually("the table is empty", async || {
        (stage.number("SELECT count(*) FROM outbox_messages").await == 0).then_some(())
    })
    .await;
    relay.stop().await;
    stage.oracle.assert_no_duplicates();
}
