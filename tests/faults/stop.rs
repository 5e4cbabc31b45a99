//! C22: SIGTERM at every bad moment. (While the broker is blocked: `blocked`.)

use std::time::Duration;

use futures_util::future::join;

use crate::support::{Exit, PrivatePostgres, Relay, Stage, Vhost, full};

/// What a stop may take beyond `shutdown.timeout_ms`: closing connections, and a busy machine.
const MARGIN: Duration = Duration::from_secs(3);

/// By default.
const TIMEOUT: Duration = Duration::from_secs(10);

async fn terminated(relay: &mut Relay, within: Duration) -> Exit {
    relay.sigterm();
    let exit = relay.wait_exit().await;
    assert_eq!((exit.code, exit.signal), (Some(0), None), "{exit:?}");
    assert!(exit.took < within, "{exit:?} is more than {within:?}");
    exit
}

async fn under_load(mode: &str) {
    let stage = Stage::set(mode).await;
    let mut all = Vec::new();
    for round in 1..=full(2, 20) {
        let mut relay = stage.config.start_running().await;
        all.extend(stage.commit(all.len(), 4_000).await);
        stage.oracle.wait_for(round * 1_000).await;
        terminated(&mut relay, TIMEOUT + MARGIN).await;
    }
    let mut relay = stage.config.start_running().await;
    stage.oracle.wait_for_all(&all).await;
    relay.stop().await;
    stage.oracle.barrier().await;
    stage.oracle.assert_no_duplicates();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_under_load_repeats_nothing() {
    join(under_load("wal"), under_load("poll")).await;
}

async fn while_paused_and_draining(mode: &str) {
    let stage = Stage::set(mode).await;
    let mut relay = stage.config.start_running().await;
    let mut all = stage.commit(0, 1_000).await;
    stage.oracle.wait_for_all(&all).await;
    relay.post("/api/pause").await;
    relay.wait_state("paused").await;
    all.extend(stage.commit(all.len(), 1_000).await);
    terminated(&mut relay, MARGIN).await;

    let mut relay = stage.config.start();
    relay.wait_state("paused").await;
    assert_eq!(stage.oracle.count(), 1_000, "{mode}: a pause outlives the process");
    relay.post("/api/resume").await;
    stage.oracle.wait_for_all(&all).await;

    all.extend(stage.commit(all.len(), 5_000).await);
    relay.post("/api/drain").await;
    terminated(&mut relay, TIMEOUT + MARGIN).await;
    let mut relay = stage.config.start();
    relay.wait_state("drained").await;
    stage.oracle.assert_nothing_lost(&all);
    terminated(&mut relay, MARGIN).await;
    stage.oracle.barrier().await;
    stage.oracle.assert_no_duplicates();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_while_paused_or_draining_is_quick_and_repeats_nothing() {
    join(while_paused_and_draining("wal"), while_paused_and_draining("poll")).await;
}

async fn before_a_frozen_database(mode: &str) {
    let server = PrivatePostgres::start(&[]).await;
    let stage = Stage::on(mode, server.database().await, Vhost::fresh().await, |config| {
        config.set("shutdown.timeout_ms", 2_000)
    })
    .await;
    let mut relay = stage.config.start_running().await;
    let mut all = stage.commit(0, 100).await;
    stage.oracle.wait_for_all(&all).await;
    // at work, with verdicts that cannot be recorded
    all.extend(stage.commit(all.len(), 5_000).await);
    stage.oracle.wait_for(500).await;
    server.freeze().await;
    terminated(&mut relay, Duration::from_secs(2) + MARGIN).await;
    // connecting
    let mut relay = stage.config.start();
    tokio::time::sleep(Duration::from_secs(1)).await;
    terminated(&mut relay, MARGIN).await;
    server.thaw().await;

    let mut relay = stage.config.start_running().await;
    all.extend(stage.commit(all.len(), 5_000).await);
    server.freeze().await;
    relay.sigterm();
    // a second one that came before the first was taken would be the same
    tokio::time::sleep(Duration::from_millis(500)).await;
    relay.sigterm();
    let exit = relay.wait_exit().await;
    assert!(exit.took < Duration::from_millis(1_500), "{mode}: a second signal ends it at once: {exit:?}");
    assert!(exit.signal.is_none() && exit.code == Some(1), "{mode}: {exit:?}");
    server.thaw().await;

    stage.a_restart_delivers(&all).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_does_not_wait_for_a_frozen_database_and_a_second_signal_for_nothing() {
    join(before_a_frozen_database("wal"), before_a_frozen_database("poll")).await;
}
