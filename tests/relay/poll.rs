//! What `poll` mode promises beyond the common suite.

use crate::support::{Pgbouncer, Stage, eventually, full};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_works_behind_a_transaction_pooler() {
    let stage = Stage::set("poll").await;
    let bouncer = Pgbouncer::before(&stage.database).await;
    let config = stage
        .config
        .clone()
        .set("database.url", bouncer.url())
        .set("database.direct_url", stage.database.url())
        .set("source.poll.wake", "notify");
    let mut relay = config.start_running().await;
    let all = stage.commit(0, full(2_000, 50_000)).await;
    stage.oracle.wait_for_all(&all).await;
    eventually("every row is recorded", async || {
        (stage.recorded().await == i64::try_from(all.len()).unwrap()).then_some(())
    })
    .await;
    assert_eq!(relay.post("/api/pause").await.status, 200);
    relay.wait_state("paused").await;
    relay.stop().await;
    stage.oracle.assert_no_duplicates();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_notification_wakes_it_before_the_interval() {
    // An interval longer than a test may take: only the notification can deliver.
    let stage = Stage::with("poll", |config| {
        config.set("source.poll.interval_ms", 600_000).set("source.poll.wake", "notify")
    })
    .await;
    let mut relay = stage.config.start_running().await;
    let all = stage.commit(0, 10).await;
    eventually("the listener is there, and what was notified arrives", async || {
        stage.app.batch_execute("NOTIFY postrider").await.unwrap();
        (stage.oracle.count() == all.len()).then_some(())
    })
    .await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_relays_share_the_work_and_repeat_nothing() {
    let stage = Stage::set("poll").await;
    let mut first = stage.config.start_running().await;
    let mut second = stage.config.another().start_running().await;
    let mut all = Vec::new();
    for n in 0..20 {
        all.extend(stage.commit(n * 200, 200).await);
    }
    stage.oracle.wait_for_all(&all).await;
    first.stop().await;
    second.stop().await;
    stage.oracle.assert_no_duplicates();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recorded_rows_past_their_retention_are_deleted_and_waiting_ones_are_not() {
    let stage = Stage::with("poll", |config| {
        config
            .set("cleanup.retention_secs", 3_600)
            .set("cleanup.interval_secs", 1)
            .set("cleanup.batch_rows", 10)
            .set("publish.retry_backoff_ms", 3_600_000)
            .set("publish.retry_backoff_max_ms", 3_600_000)
    })
    .await;
    stage.vhost.unbind("all", "outbox", "#").await;
    stage.vhost.bind("all", "outbox", "order.#").await;
    let waits = stage.insert("nobody.takes.it", "{}").await;
    let old = stage.commit(0, 95).await;
    let mut relay = stage.config.start_running().await;
    stage.oracle.wait_for_all(&old).await;
    eventually("all are recorded", async || (stage.recorded().await == 95).then_some(())).await;
    stage
        .app
        .batch_execute("UPDATE outbox_messages SET processed_on_utc = processed_on_utc - interval '2 h'")
        .await
        .unwrap();
    let young = stage.commit(95, 5).await;
    stage.oracle.wait_for_all(&young).await;
    eventually("the old ones are gone", async || {
        (stage.number("SELECT count(*) FROM outbox_messages").await == 6).then_some(())
    })
    .await;
    let left = "SELECT count(*) FROM outbox_messages WHERE processed_on_utc IS NULL AND id = '";
    assert_eq!(stage.number(&format!("{left}{waits}'")).await, 1, "what waits for another attempt stays");
    relay.stop().await;
}
