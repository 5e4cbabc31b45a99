//! What networks do: they are slow, forget connections, and lose what they carried.

use std::time::{Duration, Instant};

use futures_util::future::join;

use crate::support::{
    Between, Database, PrivateBroker, PrivatePostgres, Relay, RelayConfig, Vhost, Way, full, is_confirm,
};

/// A short heartbeat, so that a test need not wait for the default's two.
const HEARTBEAT: Duration = Duration::from_secs(2);

fn short_heartbeat(config: RelayConfig, between_url: &str) -> RelayConfig {
    config.set("broker.url", format!("{between_url}?heartbeat={}", HEARTBEAT.as_secs()))
}

async fn latency_changes_nothing(mode: &'static str) {
    let between = Between::set(mode, |config| config).await;
    for proxy in [&between.database, &between.broker] {
        proxy.latency(Way::Up, Duration::from_millis(25));
        proxy.latency(Way::Down, Duration::from_millis(25));
    }
    let stage = &between.stage;
    let mut all = stage.commit(0, 100).await;
    let mut relay = stage.config.start_running().await;
    for n in 0..full(5, 100) {
        all.extend(stage.commit(all.len(), 1 + n * 50).await);
    }
    stage.oracle.wait_for_all(&all).await;
    if mode == "wal" {
        stage.oracle.assert_order(&all);
    }
    relay.stop().await;
    stage.oracle.barrier().await;
    stage.oracle.assert_no_duplicates();
    assert_eq!(usize::try_from(stage.recorded().await), Ok(all.len()), "{mode}: all are recorded");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_milliseconds_to_either_service_change_nothing_but_the_time_it_takes() {
    join(latency_changes_nothing("wal"), latency_changes_nothing("poll")).await;
}

async fn a_forgotten_database_is_found_again(mode: &'static str, between: Between, mut relay: Relay) {
    let stage = &between.stage;
    let mut all = stage.commit(0, 100).await;
    stage.oracle.wait_for_all(&all).await;
    if full(mode == "wal", true) {
        // a firewall has forgotten the connections: both ends believe in them, new ones pass
        between.database.forget();
        all.extend(stage.commit(all.len(), 100).await);
        let began = Instant::now();
        relay.wait_unready().await;
        stage.oracle.wait_for_all(&all).await;
        relay.wait_state("running").await;
        println!("{mode}: recovered after {:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(30), "{mode}: {:?}", began.elapsed());
    }
    if full(mode == "poll", true) {
        // silent for all, and back
        between.database.blackhole();
        all.extend(stage.commit(all.len(), 100).await);
        relay.wait_unready().await;
        between.database.heal();
        stage.oracle.wait_for_all(&all).await;
        relay.wait_state("running").await;
    }
    relay.stop().await;
    stage.oracle.assert_same_again();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_to_the_database_that_fell_silent_are_noticed_and_made_anew() {
    let server = PrivatePostgres::start(&["wal_sender_timeout=3s"]).await;
    let started = async |mode: &'static str| {
        let between = Between::on(mode, server.database().await, Vhost::fresh().await, |config| config).await;
        let relay = between.stage.config.start_running().await;
        (between, relay)
    };
    // a slot is made before any transaction is left behind, for which it would wait
    let ((wal, first), (poll, second)) = join(started("wal"), started("poll")).await;
    join(
        a_forgotten_database_is_found_again("wal", wal, first),
        a_forgotten_database_is_found_again("poll", poll, second),
    )
    .await;
}

async fn a_forgotten_broker_is_found_again(mode: &'static str) {
    let between = Between::set(mode, |config| config).await;
    let stage = &between.stage;
    let config = short_heartbeat(stage.config.clone(), &between.broker.url_for(&stage.vhost.url()));
    let mut relay = config.start_running().await;
    let mut all = stage.commit(0, 100).await;
    stage.oracle.wait_for_all(&all).await;
    for _ in 0..full(1, 10) {
        between.broker.forget();
        all.extend(stage.commit(all.len(), 100).await);
        let began = Instant::now();
        // the confirm timeout, of 30 s, is not what notices
        stage.oracle.wait_for_all(&all).await;
        let took = began.elapsed();
        assert!(took < 2 * HEARTBEAT + Duration::from_secs(6), "{mode}: {took:?}");
        relay.wait_state("running").await;
    }
    relay.stop().await;
    stage.oracle.assert_same_again();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_to_the_broker_that_fell_silent_is_noticed_within_two_heartbeats() {
    join(a_forgotten_broker_is_found_again("wal"), a_forgotten_broker_is_found_again("poll")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_broker_is_noticed_though_nothing_is_sent_to_it() {
    let broker = PrivateBroker::start().await;
    let between = Between::on("wal", Database::fresh().await, broker.vhost().await, |config| config).await;
    let stage = &between.stage;
    let config = short_heartbeat(stage.config.clone(), &stage.vhost.url());
    let mut relay = config.start_running().await;
    let mut all = stage.commit(0, 100).await;
    stage.oracle.wait_for_all(&all).await;
    broker.freeze().await;
    let began = Instant::now();
    relay.wait_status("the frozen broker is noticed", |status| status["reason"] == "broker_down").await;
    let took = began.elapsed();
    assert!(took < 2 * HEARTBEAT + Duration::from_secs(3), "{took:?}");
    relay.wait_unready().await;
    broker.thaw().await;
    all.extend(stage.commit(all.len(), 100).await);
    stage.oracle.wait_for_all(&all).await;
    relay.wait_state("running").await;
    relay.stop().await;
    stage.oracle.assert_same_again();
}

async fn a_lost_confirm_is_asked_for_again(mode: &'static str) {
    let between = Between::set(mode, |config| config.set("publish.confirm_timeout_ms", 2_000)).await;
    let stage = &between.stage;
    let mut relay = stage.config.start_running().await;
    let first = stage.commit(0, 1).await;
    stage.oracle.wait_for_all(&first).await;
    relay.wait_status("the first is recorded", |status| status["totals"]["recorded"] == 1).await;
    let openings = relay.wait_metric("postrider_channel_openings", |n| n > 0.0).await;
    between.broker.swallow_frame(Way::Down, is_confirm);
    let second = stage.commit(1, 1).await;
    stage.oracle.wait_for(3).await;
    assert!(between.broker.swallowed(Way::Down), "{mode}: a confirm has vanished");
    relay.wait_metric("postrider_channel_openings", |n| n == openings + 1.0).await;
    relay.stop().await;
    stage.oracle.barrier().await;
    assert_eq!(stage.oracle.duplicates().into_iter().collect::<Vec<_>>(), [(second[0].clone(), 2)], "{mode}");
    stage.oracle.assert_same_again();
    assert_eq!(stage.recorded().await, 2, "{mode}: it is recorded once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_confirm_that_is_lost_makes_the_same_message_come_again_on_another_channel() {
    join(a_lost_confirm_is_asked_for_again("wal"), a_lost_confirm_is_asked_for_again("poll")).await;
}

/// While a service is down it is asked for a connection about once a second, by all parts of the relay together.
async fn attempts_are_paced(mode: &'static str) {
    let between = Between::set(mode, |config| config.set("source.poll.wake", "notify")).await;
    let stage = &between.stage;
    let mut relay = stage.config.start_running().await;
    let mut all = stage.commit(0, 100).await;
    stage.oracle.wait_for_all(&all).await;
    let began = Instant::now();
    for proxy in [&between.database, &between.broker] {
        proxy.shut();
        proxy.cut(crate::support::Cut::Rst);
    }
    tokio::time::sleep(full(Duration::from_secs(8), Duration::from_secs(60))).await;
    assert!(!relay.ready().await, "{mode}");
    let waited = began.elapsed();
    for (service, proxy) in [("database", &between.database), ("broker", &between.broker)] {
        let attempts: Vec<Instant> = proxy.attempts().into_iter().filter(|at| *at > began).collect();
        let rate = attempts.len() as f64 / waited.as_secs_f64();
        println!("{mode}: {rate:.2} attempts a second to the {service}");
        let closest = attempts.windows(2).map(|pair| pair[1] - pair[0]).min();
        let paced = closest.is_none_or(|gap| gap > Duration::from_millis(900));
        assert!(paced, "{mode}: {closest:?} between two attempts to the {service}");
        // without its database a relay that streams has no use for the broker
        let needed = (service, mode) != ("broker", "wal");
        assert!(attempts.len() > 1 || !needed, "{mode}: no attempts to the {service}");
        proxy.heal();
    }
    all.extend(stage.commit(all.len(), 100).await);
    stage.oracle.wait_for_all(&all).await;
    relay.wait_state("running").await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_is_down_is_asked_for_a_connection_once_a_second_at_most() {
    join(attempts_are_paced("wal"), attempts_are_paced("poll")).await;
}
