//! `postrider bench` on the servers of a user: it measures what it says, and leaves nothing behind.

use serde_json::Value;

use crate::support::{Database, RelayConfig, Stage, Vhost, eventually};

async fn bench(config: &RelayConfig, args: &[&str]) -> Value {
    let ran = config.run(&[&["bench", "--json"], args].concat()).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {ran:?}"))
}

/// What the benchmark makes, by what would be left of it.
async fn left_behind(stage: &Stage) -> i64 {
    stage
        .number(
            "SELECT (SELECT count(*) FROM pg_namespace WHERE nspname = 'postrider_bench')
                  + (SELECT count(*) FROM pg_publication WHERE pubname = 'postrider_bench')
                  + (SELECT count(*) FROM pg_replication_slots
                     WHERE database = current_database() AND slot_name LIKE 'postrider_bench%')",
        )
        .await
}

async fn queues(vhost: &Vhost) -> String {
    vhost.api("GET", &format!("/api/queues/{}", vhost.name()), None).await.json().to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backlog_is_drained_beside_a_bare_publisher_and_nothing_is_left_behind() {
    for mode in ["wal", "poll"] {
        let stage = Stage::set(mode).await;
        let mine = stage.commit(0, 3).await;
        let report = stage.config.folder().join("report.html");
        let args = ["drain", "--rows", "2000", "--rounds", "1", "--html", report.to_str().unwrap()];
        let said = bench(&stage.config, &args).await;
        let [bare, ours] = said["systems"].as_array().unwrap().as_slice() else { panic!("{said}") };
        assert_eq!(bare["system"], "bare publisher");
        for system in [bare, ours] {
            assert_eq!((&system["lost"], &system["duplicates"]), (&0.0.into(), &0.0.into()), "{said}");
            assert!(system["messages_per_second"].as_f64().unwrap() > 0.0, "{said}");
        }
        assert!(std::fs::read_to_string(report).unwrap().contains("<svg"));
        assert_eq!(left_behind(&stage).await, 0);
        assert!(!queues(&stage.vhost).await.contains("postrider_bench"));
        assert_eq!(
            stage.number("SELECT count(*) FROM outbox_messages").await,
            3,
            "the user's rows: {mine:?}"
        );
        assert_eq!(stage.recorded().await, 0, "the user's rows were not touched");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn latency_users_idle_and_a_crash_are_measured() {
    let stage = Stage::set("wal").await;
    let said = bench(&stage.config, &["latency", "--seconds", "2"]).await;
    let [direct, ours] = said["systems"].as_array().unwrap().as_slice() else { panic!("{said}") };
    assert!(direct["p50_ms"].as_f64().unwrap() > 0.0 && ours["p99_ms"].as_f64().unwrap() > 0.0, "{said}");
    assert_eq!(ours["lost"], 0.0, "{said}");
    let said = bench(&stage.config, &["users", "--seconds", "2", "--users", "4", "--rounds", "1"]).await;
    assert!(said["systems"][1]["orders_per_second"].as_f64().unwrap() > 0.0, "{said}");
    let said = bench(&stage.config, &["idle", "--seconds", "2"]).await;
    assert!(said["systems"][0]["statements_per_minute"].is_number(), "{said}");
    let said = bench(&stage.config, &["crash", "--rows", "5000", "--rounds", "1"]).await;
    let crash = &said["systems"][0];
    assert_eq!(crash["lost"], 0.0, "{said}");
    assert!(crash["duplicates_worst"].as_f64().unwrap() <= crash["exposure"].as_f64().unwrap(), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bench_that_is_told_to_stop_ends_its_relay_and_leaves_nothing_behind() {
    let stage = Stage::set("wal").await;
    let relays = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                  AND application_name LIKE 'postrider%'";
    let mut bench = stage.config.start_command(&["bench", "latency", "--seconds", "3600"]);
    eventually("its relay is at work", async || (stage.number(relays).await > 3).then_some(())).await;
    bench.sigterm();
    assert_eq!(bench.wait_exit().await.code, Some(1));
    assert!(bench.log().contains("interrupted by SIGTERM"), "{}", bench.log());
    assert_eq!(left_behind(&stage).await, 0);
    eventually("its relay is gone", async || (stage.number(relays).await == 0).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_of_that_name_which_is_somebody_elses_is_not_touched() {
    let (database, vhost) = (Database::fresh().await, Vhost::fresh().await);
    let app = database.connect().await;
    app.batch_execute("CREATE SCHEMA postrider_bench; CREATE TABLE postrider_bench.precious ()")
        .await
        .unwrap();
    let ran = RelayConfig::new(&database, &vhost).run(&["bench", "--rows", "100"]).await;
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("schema postrider_bench exists and is not the benchmark's"), "{ran:?}");
    app.batch_execute("SELECT FROM postrider_bench.precious").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_does_not_exist_is_bad_usage() {
    let (database, vhost) = (Database::fresh().await, Vhost::fresh().await);
    let ran = RelayConfig::new(&database, &vhost).run(&["bench", "--set", "publish.lines=2"]).await;
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("publish.lines=2: no such key"), "{ran:?}");
}
