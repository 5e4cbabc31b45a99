//! The relay, or PostgreSQL, is killed at full flow.

use std::time::{Duration, Instant};

use crate::support::{Database, PrivateBroker, PrivatePostgres, Relay, Stage, Vhost, full};

/// `publish.exposure_messages` by default: what a crash may repeat.
fn exposure(mode: &str) -> usize {
    if mode == "wal" { 1_000 } else { 2_000 }
}

/// C23.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_in_the_stream_repeats_no_more_than_the_exposure_whatever_the_size_of_transactions() {
    kills_in_the_middle("wal").await;
}

/// C23.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_among_claims_repeats_no_more_than_the_exposure_whatever_the_size_of_transactions() {
    kills_in_the_middle("poll").await;
}

async fn kills_in_the_middle(mode: &str) {
    let rows = full(10_000, 200_000);
    for each in [1, 2_000, rows] {
        let stage = Stage::set(mode).await;
        let mut relay = stage.config.start_running().await;
        let mut all = Vec::new();
        for kill in 0..full(1, 10) {
            let what = format!("{mode}, transactions of {each}, kill {kill}");
            let (count, before) = (stage.oracle.count(), stage.oracle.repetitions());
            let killed = async {
                arrive(&stage, count + rows / 2).await;
                relay.kill9();
            };
            let (ids, ()) = tokio::join!(stage.load(all.len(), rows, each), killed);
            all.extend(ids);
            relay = stage.config.start();
            arrive(&stage, count + rows).await;
            let repeated = balance(&stage, &mut relay, &all).await - before;
            println!("{what}: {repeated} repeated");
            assert!(repeated <= exposure(mode), "{what}: {repeated} repeated");
            // A clean start and stop, with something between them.
            relay = stage.config.start_running().await;
            all.extend(stage.commit(all.len(), 10).await);
            assert_eq!(
                balance(&stage, &mut relay, &all).await - before,
                repeated,
                "{what}: a clean stop repeats"
            );
            relay = stage.config.start_running().await;
        }
        if mode == "wal" {
            stage.oracle.assert_order(&all);
        }
    }
}

/// C03, the second half: whatever a relay is doing when it is killed, starting included.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_at_random_moments_lose_nothing_and_repeat_no_more_than_the_exposure_each() {
    const EXPOSURE: usize = 64;
    const SEED: u64 = 3;
    let kills = full(8, 100);
    println!("seed {SEED}");
    let each_mode = ["wal", "poll"].map(async |mode| {
        let mut random = fastrand::Rng::with_seed(SEED);
        let stage = Stage::with(mode, |config| {
            config
                .set("publish.exposure_messages", EXPOSURE)
                .set("publish.window_messages", EXPOSURE)
                .set("source.poll.batch_messages", 40)
        })
        .await;
        let mut all = Vec::new();
        for _ in 0..kills {
            let mut relay = stage.config.start();
            let moment = Instant::now() + Duration::from_millis(random.u64(20..900));
            while Instant::now() < moment {
                let n = random.usize(1..60);
                all.extend(stage.commit(all.len(), n).await);
            }
            relay.kill9();
        }
        let mut relay = stage.config.start();
        let repeated = balance(&stage, &mut relay, &all).await;
        println!("{mode}: {repeated} of {} repeated after {kills} kills", all.len());
        assert!(repeated <= kills * EXPOSURE, "{mode}: {repeated} repeated");
    });
    futures_util::future::join_all(each_mode).await;
}

/// C03. The slot must not be told of what goes on elsewhere while a message waits for a broker that is blocked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_waits_for_a_blocked_broker_holds_the_slot_and_survives_a_kill() {
    let broker = PrivateBroker::start().await;
    let stage = Stage::on("wal", Database::fresh().await, broker.vhost().await, |config| config).await;
    let mut relay = stage.config.start_running().await;
    let mut all = stage.commit(0, 1).await;
    stage.oracle.wait_for_all(&all).await;
    broker.block().await;
    // The first to arrive makes the broker say that it is blocked, and may yet pass.
    all.extend(stage.commit(1, 1).await);
    relay.wait_status("blocked", |status| status["reason"] == "broker_alarm").await;
    all.extend(stage.commit(2, 1).await);
    let after_a: String =
        stage.app.query_one("SELECT pg_current_wal_insert_lsn()::text", &[]).await.unwrap().get(0);
    let rows = full(50_000, 1_000_000);
    stage
        .app
        .batch_execute(&format!(
            "CREATE TABLE elsewhere AS SELECT g, repeat('x', 100) FROM generate_series(1, {rows}) g; CHECKPOINT"
        ))
        .await
        .unwrap();
    let confirmed = format!(
        "SELECT count(*) FROM pg_replication_slots
         WHERE slot_name = '{}' AND confirmed_flush_lsn < '{after_a}'",
        stage.database.name()
    );
    // The session reports every second at the latest.
    for _ in 0..5 {
        assert_eq!(stage.number(&confirmed).await, 1, "confirmed beyond what was delivered");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    relay.kill9();
    assert_eq!(stage.number(&confirmed).await, 1, "confirmed beyond what was delivered");
    broker.unblock().await;
    relay = stage.config.start();
    balance(&stage, &mut relay, &all).await;
}

/// C30. What the server forgot of the slot's position is covered by the progress in the table.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_killed_at_full_flow_costs_nothing_and_repeats_no_more_than_the_exposure() {
    let server = PrivatePostgres::start(&[]).await;
    let (rows, kills) = (full(10_000, 50_000), full(2, 10));
    for mode in ["wal", "poll"] {
        let mut stage = Stage::on(mode, server.database().await, Vhost::fresh().await, |config| config).await;
        let mut relay = stage.config.start_running().await;
        let mut all = Vec::new();
        for kill in 0..kills {
            let (count, before) = (stage.oracle.count(), stage.oracle.repetitions());
            all.extend(stage.load(all.len(), rows, 100).await);
            arrive(&stage, count + rows / 2).await;
            server.kill9().await;
            server.start_again().await;
            stage.app = stage.database.connect().await;
            arrive(&stage, count + rows).await;
            stage.oracle.wait_for_all(&all).await;
            stage.all_recorded().await;
            stage.oracle.barrier().await;
            let repeated = stage.oracle.repetitions() - before;
            println!("{mode}, kill {kill}: {repeated} repeated");
            assert!(repeated <= exposure(mode), "{mode}, kill {kill}: {repeated} repeated");
        }
        balance(&stage, &mut relay, &all).await;
    }
}

/// Waits for so many deliveries, in steps each of which has its own deadline.
async fn arrive(stage: &Stage, count: usize) {
    for step in (stage.oracle.count()..count).step_by(10_000).skip(1) {
        stage.oracle.wait_for(step).await;
    }
    stage.oracle.wait_for(count).await;
}

/// Everything committed has arrived and nothing else, everything is recorded, and the relay has stopped; returns how
/// many deliveries were repetitions, each the same as the first.
async fn balance(stage: &Stage, relay: &mut Relay, all: &[String]) -> usize {
    stage.oracle.wait_for_all(all).await;
    stage.all_recorded().await;
    relay.stop().await;
    stage.oracle.barrier().await;
    stage.oracle.assert_nothing_else(all);
    stage.oracle.repetitions()
}
