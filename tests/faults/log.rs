//! What else is in the write-ahead log: other operations, other columns, other origins, other databases.

use crate::support::{Database, Relay, Stage, eventually, full};

/// Publishes everything a publication can, as a DBA may have set it.
const EVERYTHING: &str = "ALTER PUBLICATION postrider SET (publish = 'insert, update, delete, truncate')";

async fn set(publish: &str) -> (Stage, Relay) {
    let stage = Stage::set("wal").await;
    stage.app.batch_execute(publish).await.unwrap();
    let relay = stage.config.start_running().await;
    (stage, relay)
}

/// Everything came once, nothing was restarted, and the slot was told of all of it.
async fn nothing_disturbed(stage: &Stage, relay: &mut Relay, all: &[String]) {
    stage.oracle.wait_for_all(all).await;
    let tip: String = stage.app.query_one("SELECT pg_current_wal_lsn()::text", &[]).await.unwrap().get(0);
    let behind = format!(
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{}' AND confirmed_flush_lsn < '{tip}'",
        stage.database.name()
    );
    eventually("all of it is acknowledged", async || (stage.number(&behind).await == 0).then_some(())).await;
    let status = relay.status().await;
    assert_eq!(status["generation"], 1, "nothing was restarted: {status}");
    assert_eq!(stage.number("SELECT count(*) FROM postrider_retries").await, 0, "nothing was rejected");
    relay.stop().await;
    stage.oracle.barrier().await;
    stage.oracle.assert_nothing_else(all);
    stage.oracle.assert_no_duplicates();
}

fn body(stage: &Stage, id: &str) -> serde_json::Value {
    serde_json::from_slice(&stage.oracle.get(id).unwrap().body).unwrap()
}

/// C25.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_its_own_transaction_changes_or_deletes_is_one_message_with_what_was_inserted() {
    let (stage, mut relay) = set(EVERYTHING).await;
    let mut all = stage.commit(0, 2).await;
    let id = |n: u32| format!("00000000-0000-0000-0000-00000000000{n}");
    stage
        .app
        .batch_execute(
            "BEGIN;
             INSERT INTO outbox_messages (id, type, content, occurred_on_utc) VALUES
                 ('00000000-0000-0000-0000-000000000001', 'order.deleted', '{\"was\": 1}', now()),
                 ('00000000-0000-0000-0000-000000000002', 'order.changed', '{\"was\": 2}', now());
             DELETE FROM outbox_messages WHERE type = 'order.deleted';
             UPDATE outbox_messages SET content = '{\"was\": \"changed\"}', type = 'other' WHERE type = 'order.changed';
             COMMIT",
        )
        .await
        .unwrap();
    all.extend([id(1), id(2)]);
    all.extend(stage.commit(2, 2).await);
    stage.oracle.wait_for_all(&all).await;
    assert_eq!(body(&stage, &id(1)), serde_json::json!({"was": 1}));
    assert_eq!(body(&stage, &id(2)), serde_json::json!({"was": 2}));
    assert_eq!(stage.oracle.get(id(2)).unwrap().routing_key, "order.changed");
    eventually("the others are recorded", async || (stage.recorded().await == 5).then_some(())).await;
    relay.wait_metric("postrider_vanished_total", |vanished| vanished == 1.0).await;
    stage.oracle.assert_order(&all);
    nothing_disturbed(&stage, &mut relay, &all).await;
}

/// C25. An update leaves an unchanged large value out of the log: that is no message, and no trouble.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_update_of_a_row_with_a_large_unchanged_column_is_passed_over() {
    for identity in ["DEFAULT", "FULL"] {
        let alter = format!("{EVERYTHING}; ALTER TABLE outbox_messages REPLICA IDENTITY {identity}");
        let (stage, mut relay) = set(&alter).await;
        // Incompressible, so that it is stored out of line.
        let sql = "INSERT INTO outbox_messages (id, type, content, occurred_on_utc)
                   SELECT gen_random_uuid(), 'order.large', jsonb_build_object('text', string_agg(md5(random()::text), '')),
                          clock_timestamp() FROM generate_series(1, 4000) RETURNING id::text, content::text";
        let row = stage.app.query_one(sql, &[]).await.unwrap();
        let (id, content): (String, String) = (row.get(0), row.get(1));
        stage.app.batch_execute("UPDATE outbox_messages SET type = 'order.renamed'").await.unwrap();
        let all = [vec![id.clone()], stage.commit(0, 3).await].concat();
        stage.oracle.wait_for_all(&all).await;
        assert_eq!(stage.oracle.get(&id).unwrap().body, content.as_bytes());
        nothing_disturbed(&stage, &mut relay, &all).await;
    }
}

/// C16. Rows that replication brought are rows all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_another_origin_arrive_with_those_around_them() {
    let (stage, mut relay) = set(EVERYTHING).await;
    let mut all = stage.commit(0, 3).await;
    let replica = stage.database.connect().await;
    let origin = stage.database.name();
    replica.query("SELECT pg_replication_origin_create($1)", &[&origin]).await.unwrap();
    replica.query("SELECT pg_replication_origin_session_setup($1)", &[&origin]).await.unwrap();
    replica.batch_execute("BEGIN; SELECT pg_replication_origin_xact_setup('0/1234', now())").await.unwrap();
    all.extend(crate::support::commit(&replica, 3, 4).await);
    replica.batch_execute("COMMIT").await.unwrap();
    all.extend(crate::support::commit(&replica, 7, 2).await);
    replica.query("SELECT pg_replication_origin_session_reset()", &[]).await.unwrap();
    all.extend(stage.commit(9, 3).await);
    stage.oracle.wait_for_all(&all).await;
    stage.oracle.assert_order(&all);
    nothing_disturbed(&stage, &mut relay, &all).await;
    // Origins belong to the server, not to the database that goes with this test.
    stage.app.query("SELECT pg_replication_origin_drop($1)", &[&origin]).await.unwrap();
}

/// C16. The server describes a type of the user's before the rows that have it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_column_of_an_enumerated_type_in_the_outbox_is_no_trouble() {
    let (stage, mut relay) = set(EVERYTHING).await;
    let mut all = stage.commit(0, 3).await;
    stage
        .app
        .batch_execute(
            "CREATE TYPE mood AS ENUM ('sad', 'happy');
             ALTER TABLE outbox_messages ADD COLUMN feels mood DEFAULT 'happy'",
        )
        .await
        .unwrap();
    all.extend(stage.commit(3, 3).await);
    stage.app.batch_execute("ALTER TYPE mood ADD VALUE 'so so'").await.unwrap();
    stage
        .app
        .batch_execute("ALTER TABLE outbox_messages ALTER COLUMN feels SET DEFAULT 'so so'")
        .await
        .unwrap();
    all.extend(stage.commit(6, 3).await);
    stage.oracle.wait_for_all(&all).await;
    stage.oracle.assert_order(&all);
    nothing_disturbed(&stage, &mut relay, &all).await;
}

/// C16.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_truncated_outbox_is_passed_over_and_what_was_inserted_before_and_after_arrives() {
    let (stage, mut relay) = set(EVERYTHING).await;
    let mut all = stage.commit(0, 5).await;
    stage.oracle.wait_for_all(&all).await;
    stage.app.batch_execute("TRUNCATE outbox_messages").await.unwrap();
    all.extend(stage.commit(5, 5).await);
    // In one transaction with what it takes away: committed, streamed, and gone.
    stage.app.batch_execute("BEGIN").await.unwrap();
    all.extend(stage.commit(10, 5).await);
    stage.app.batch_execute("TRUNCATE outbox_messages; COMMIT").await.unwrap();
    all.extend(stage.commit(15, 5).await);
    stage.oracle.wait_for_all(&all).await;
    eventually("what is there is recorded", async || (stage.recorded().await == 5).then_some(())).await;
    stage.oracle.assert_order(&all);
    nothing_disturbed(&stage, &mut relay, &all).await;
}

/// C26. A slot that nobody writes for must not hold the whole server's log back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_without_outbox_traffic_follows_what_another_database_writes() {
    let (stage, mut relay) = set("SELECT 1").await;
    let first = stage.commit(0, 1).await;
    stage.oracle.wait_for_all(&first).await;
    let elsewhere = Database::fresh().await;
    let rows = full(60_000, 1_000_000);
    let sql = format!("CREATE TABLE big AS SELECT g, repeat('x', 1000) FROM generate_series(1, {rows}) g");
    elsewhere.connect().await.batch_execute(&sql).await.unwrap();
    let behind = format!(
        "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::int8 FROM pg_replication_slots
         WHERE slot_name = '{}'",
        stage.database.name()
    );
    eventually("confirmed within 16 MB of the tip", async || {
        (stage.number(&behind).await < 16 << 20).then_some(())
    })
    .await;
    nothing_disturbed(&stage, &mut relay, &first).await;
}
