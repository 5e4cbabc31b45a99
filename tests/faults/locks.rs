//! Locks on the tables: said while they hold and not a moment longer, and nothing is published twice for them.

use crate::support::{Relay, Stage};

/// Rows that wait, a lock that is held on `table`, and a relay that works on them from then on.
async fn locked(stage: &Stage, relay: &mut Relay, table: &str) -> (Vec<String>, tokio_postgres::Client) {
    relay.post("/api/pause").await;
    relay.wait_state("paused").await;
    let waiting = stage.commit(0, 100).await;
    let locker = stage.database.connect().await;
    locker.batch_execute(&format!("BEGIN; LOCK TABLE {table} IN SHARE MODE")).await.unwrap();
    relay.post("/api/resume").await;
    relay.wait_status("blocked by the lock", |status| status["reason"] == "table_locked").await;
    (waiting, locker)
}

/// C18. `CREATE INDEX` takes this lock: rows can be claimed under it and not be marked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_cannot_be_marked_for_a_lock_are_not_published_again_and_again() {
    for mode in ["wal", "poll"] {
        let stage = Stage::set(mode).await;
        let mut relay = stage.config.start_running().await;
        let (all, locker) = locked(&stage, &mut relay, "outbox_messages").await;
        // the lock is met once more, after what a claim may wait for it
        tokio::time::sleep(std::time::Duration::from_secs(7)).await;
        locker.batch_execute("ROLLBACK").await.unwrap();
        relay.wait_state("running").await;
        stage.oracle.wait_for_all(&all).await;
        relay.stop().await;
        stage.oracle.barrier().await;
        stage.oracle.assert_no_duplicates();
        assert_eq!(stage.recorded().await, 100, "{mode}");
    }
}

/// C18. A rejection is copied to where another session locked everyone out: it is the acker that says so, and whoever
/// claimed the row that takes it back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_only_a_recording_meets_is_forgotten_when_it_is_gone() {
    for mode in ["wal", "poll"] {
        let stage = Stage::set(mode).await;
        let mut relay = stage.config.start_running().await;
        stage.vhost.unbind("all", "outbox", "#").await;
        let (all, locker) = locked(&stage, &mut relay, "postrider_retries").await;
        locker.batch_execute("ROLLBACK").await.unwrap();
        relay.wait_state("running").await;
        stage.vhost.bind("all", "outbox", "#").await;
        stage.oracle.wait_for_all(&all).await;
        relay.wait_state("running").await;
        relay.stop().await;
    }
}
