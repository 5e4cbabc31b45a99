//! The broker is in a memory alarm: it takes nothing, and answers nothing.

use std::time::{Duration, Instant};

use futures_util::future::join;

use crate::support::{LOOK_EVERY, PrivateBroker, PrivatePostgres, Stage, full};

/// Idle transactions of this stage's database that are older than 5 s.
const IDLE: &str = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                     AND state LIKE 'idle in transaction%' AND clock_timestamp() - state_change > '5 s'";

/// The walsender that streams this database, or 0.
const WALSENDER: &str = "SELECT coalesce(max(pid), 0)::int8 FROM pg_stat_activity
                          WHERE datname = current_database() AND backend_type = 'walsender'";

/// C13, and C22 while the broker is blocked.
async fn a_blocked_broker_is_waited_for(mode: &str, server: &PrivatePostgres, broker: &PrivateBroker) {
    let stage = Stage::on(mode, server.database().await, broker.vhost().await, |config| {
        config.set("shutdown.timeout_ms", 3_000)
    })
    .await;
    let mut relay = stage.config.start_running().await;
    let mut all = stage.commit(0, 100).await;
    stage.oracle.wait_for_all(&all).await;
    let walsender = stage.number(WALSENDER).await;
    assert_eq!(walsender != 0, mode == "wal");

    broker.block().await;
    all.extend(stage.commit(all.len(), 1_000).await);
    let began = Instant::now();
    let status = relay.wait_state("blocked").await;
    assert!(began.elapsed() < Duration::from_secs(5), "{mode}: {:?}", began.elapsed());
    assert_eq!(status["reason"], "broker_alarm", "{mode}");
    relay.wait_unready().await;
    // more than three times the walsender's timeout, and two heartbeats in the full run
    while began.elapsed() < full(Duration::from_secs(8), Duration::from_secs(60)) {
        assert_eq!(stage.number(IDLE).await, 0, "{mode}: a transaction idles");
        assert_eq!(stage.number(WALSENDER).await, walsender, "{mode}: the stream stays");
        assert!(!relay.ready().await, "{mode}");
        tokio::time::sleep(LOOK_EVERY * 4).await;
    }
    broker.unblock().await;
    stage.oracle.wait_for_all(&all).await;
    relay.wait_state("running").await;
    assert_eq!(relay.metrics().await.sum("postrider_restarts_total"), 0.0, "{mode}: without a restart");
    assert_eq!(stage.number(WALSENDER).await, walsender, "{mode}: the stream stayed");

    broker.block().await;
    all.extend(stage.commit(all.len(), 1_000).await);
    relay.wait_state("blocked").await;
    relay.sigterm();
    let exit = relay.wait_exit().await;
    assert_eq!(exit.code, Some(0), "{mode}");
    assert!(exit.took < Duration::from_secs(6), "{mode}: {exit:?}");
    broker.unblock().await;
    stage.a_restart_delivers(&all).await;
}

/// A broker each: one side must not lift the other's alarm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blocked_broker_is_said_waited_for_and_left_in_time() {
    let (server, first, second) = (
        PrivatePostgres::start(&["wal_sender_timeout=2s"]).await,
        PrivateBroker::start().await,
        PrivateBroker::start().await,
    );
    join(
        a_blocked_broker_is_waited_for("wal", &server, &first),
        a_blocked_broker_is_waited_for("poll", &server, &second),
    )
    .await;
}

/// C17.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_huge_transaction_before_a_blocked_broker_costs_neither_the_stream_nor_memory() {
    let server = PrivatePostgres::start(&[full("wal_sender_timeout=2s", "wal_sender_timeout=5s")]).await;
    let broker = PrivateBroker::start().await;
    let stage = Stage::on("wal", server.database().await, broker.vhost().await, |config| config).await;
    let mut relay = stage.config.start_running().await;
    let walsender = stage.number(WALSENDER).await;
    let all = stage.commit(0, full(20_000, 1_000_000)).await;
    stage.oracle.wait_for(5_000).await;
    broker.block().await;
    relay.wait_state("blocked").await;
    let began = Instant::now();
    let mut most = 0;
    while began.elapsed() < full(Duration::from_secs(7), Duration::from_secs(30)) {
        assert_eq!(stage.number(WALSENDER).await, walsender, "the stream stays");
        most = relay.rss_bytes().max(most);
        tokio::time::sleep(LOOK_EVERY * 4).await;
    }
    broker.unblock().await;
    stage.oracle.wait_for_all(&all).await;
    assert_eq!(stage.number(WALSENDER).await, walsender, "the stream stayed");
    most = relay.rss_bytes().max(most);
    assert!(most < 150 << 20, "{} MiB", most >> 20);
    relay.stop().await;
    stage.oracle.barrier().await;
    stage.oracle.assert_order(&all);
    stage.oracle.assert_no_duplicates();
}
