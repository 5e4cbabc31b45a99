//! What `wal` mode promises beyond the common suite.

use crate::support::{PrivatePostgres, Stage, Vhost, eventually, full};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_one_lane_arrive_in_commit_order() {
    let stage = Stage::set("wal").await;
    let mut relay = stage.config.start_running().await;
    let mut committed = Vec::new();
    for n in 0..full(300, 5_000) {
        committed.extend(stage.commit(n * 10, 1 + n % 9).await);
    }
    stage.oracle.wait_for_all(&committed).await;
    stage.oracle.assert_order(&committed);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kept_rows_are_left_as_they_are_and_a_restart_repeats_nothing() {
    let stage =
        Stage::with("wal", |config| config.set("ack.rows", "keep").set("source.wal.first_start", "sweep"))
            .await;
    let waiting = stage.commit(0, 1_000).await;
    let mut relay = stage.config.start_running().await;
    let streamed = stage.commit(1_000, 1_000).await;
    let all = [waiting, streamed].concat();
    stage.oracle.wait_for_all(&all).await;
    relay.stop().await;
    let mut relay = stage.config.start_running().await;
    let more = stage.commit(2_000, 10).await;
    stage.oracle.wait_for_all(&more).await;
    relay.stop().await;
    stage.oracle.assert_no_duplicates();
    let touched =
        "SELECT count(*) FROM outbox_messages WHERE processed_on_utc IS NOT NULL OR error IS NOT NULL";
    assert_eq!(stage.number(touched).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_transaction_larger_than_all_credits_passes_with_kept_rows() {
    let stage = Stage::with("wal", |config| {
        config.set("ack.rows", "keep").set("source.wal.first_start", "stream").set("credits.messages", 8_192)
    })
    .await;
    let mut relay = stage.config.start_running().await;
    let all = stage.commit(0, full(20_000, 200_000)).await;
    stage.oracle.wait_for_all(&all).await;
    stage.oracle.assert_order(&all);
    relay.stop().await;
    stage.oracle.assert_no_duplicates();
}

/// The ends of transactions are known long before their rows are sent, and must not count as sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_of_one_row_pass_however_small_the_exposure() {
    let stage = Stage::with("wal", |config| {
        config.set("publish.exposure_messages", 16).set("publish.window_messages", 16)
    })
    .await;
    stage.config.start_running().await.stop().await;
    let all = stage.load(0, full(1_000, 20_000), 1).await;
    let mut relay = stage.config.start_running().await;
    stage.oracle.wait_for_all(&all).await;
    stage.oracle.assert_order(&all);
    relay.stop().await;
    stage.oracle.assert_no_duplicates();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_slot_follows_the_server() {
    let stage = Stage::set("wal").await;
    let mut relay = stage.config.start_running().await;
    let first = stage.commit(0, 1).await;
    stage.oracle.wait_for_all(&first).await;
    stage
        .app
        .batch_execute(
            "CREATE TABLE elsewhere AS SELECT g, repeat('x', 1000) FROM generate_series(1, 20000) g",
        )
        .await
        .unwrap();
    let target: String = stage.app.query_one("SELECT pg_current_wal_lsn()::text", &[]).await.unwrap().get(0);
    let behind = format!(
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{}' AND confirmed_flush_lsn < '{target}'",
        stage.database.name()
    );
    eventually("the slot has followed", async || (stage.number(&behind).await == 0).then_some(())).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_operations_and_other_tables_are_passed_over() {
    let stage = Stage::set("wal").await;
    stage
        .app
        .batch_execute(
            "CREATE TYPE mood AS ENUM ('sad', 'happy');
             CREATE TABLE other (id int PRIMARY KEY, m mood);
             ALTER PUBLICATION postrider ADD TABLE other;
             ALTER PUBLICATION postrider SET (publish = 'insert, update, delete, truncate');
             ALTER TABLE outbox_messages REPLICA IDENTITY FULL",
        )
        .await
        .unwrap();
    let mut relay = stage.config.start_running().await;
    let mut all = stage.commit(0, 3).await;
    stage
        .app
        .batch_execute(
            "INSERT INTO other VALUES (1, 'happy'); UPDATE other SET m = 'sad'; DELETE FROM other;
             SELECT pg_logical_emit_message(true, 'app', 'hello'), pg_logical_emit_message(false, 'app', 'hello');
             TRUNCATE other;
             BEGIN;
             INSERT INTO outbox_messages (id, type, content, occurred_on_utc)
             VALUES ('00000000-0000-0000-0000-0000000000aa', 'gone', '{}', now());
             DELETE FROM outbox_messages WHERE type = 'gone';
             COMMIT;
             ALTER TABLE outbox_messages ADD COLUMN extra text",
        )
        .await
        .unwrap();
    all.push("00000000-0000-0000-0000-0000000000aa".to_owned());
    all.extend(stage.commit(3, 3).await);
    stage.oracle.wait_for_all(&all).await;
    stage.oracle.assert_nothing_else(&all);
    let status = relay.status().await;
    assert_eq!(status["generation"], 1, "nothing was restarted: {status}");
    relay.wait_metric("postrider_vanished_total", |vanished| vanished == 1.0).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_is_streamed_before_it_is_visible_is_published_once_and_marked_when_it_is() {
    let server =
        PrivatePostgres::start(&["synchronous_standby_names=nobody", "synchronous_commit=local"]).await;
    let stage = Stage::on("wal", server.database().await, Vhost::fresh().await, |config| config).await;
    let mut relay = stage.config.start_running().await;
    let writer = stage.database.connect().await;
    let pid: i32 = writer.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let hanging = tokio::spawn(async move {
        writer
            .batch_execute(
                "SET synchronous_commit = on;
                 INSERT INTO outbox_messages (id, type, content, occurred_on_utc)
                 VALUES ('00000000-0000-0000-0000-000000000001', 'hanging', '{}', now())",
            )
            .await
    });
    stage.oracle.wait_for(1).await;
    let status = relay.wait_status("the mark waits", |status| status["reason"] == "mark_waiting").await;
    assert_eq!(status["state"], "blocked");
    assert_eq!(stage.recorded().await, 0);
    // The wait is cancelled: the transaction is committed and becomes visible.
    stage.app.execute("SELECT pg_cancel_backend($1)", &[&pid]).await.unwrap();
    hanging.await.unwrap().unwrap();
    eventually("the row is marked", async || (stage.recorded().await == 1).then_some(())).await;
    relay.wait_state("running").await;
    relay.stop().await;
    assert_eq!(stage.oracle.count(), 1, "published once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_relay_stands_by_and_takes_over_after_a_clean_exit() {
    let stage = Stage::set("wal").await;
    let mut first = stage.config.start_running().await;
    let second = stage.config.another();
    let mut second = second.start();
    second.wait_state("standby").await;
    assert_eq!(second.get("/readyz").await.status, 200);
    let before = stage.commit(0, 10).await;
    stage.oracle.wait_for_all(&before).await;
    first.stop().await;
    second.wait_state("running").await;
    let after = stage.commit(10, 10).await;
    stage.oracle.wait_for_all(&after).await;
    second.stop().await;
    stage.oracle.assert_no_duplicates();
}
