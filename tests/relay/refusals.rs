//! Bad input: one clear line with what to do, the right exit code, or waiting where the thing can come back.

use crate::support::{Database, PrivatePostgres, RelayConfig, Stage, Vhost, full};

/// Starts the relay and waits until it says `reason`; then checks that a remedy goes with it and that it is not ready.
async fn says(config: &RelayConfig, reason: &str, detail: &str) -> crate::support::Relay {
    let mut relay = config.start();
    let status = relay.wait_status(reason, |status| status["reason"] == reason).await;
    let text = status["detail"].as_str().unwrap_or_default();
    assert!(text.contains(detail), "{detail:?} in {text:?}");
    assert!(status["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty()), "{status}");
    assert!(!text.contains("secret"), "{text}");
    let began = std::time::Instant::now();
    while relay.get("/readyz").await.status == 200 {
        assert!(began.elapsed() < crate::support::DEADLINE, "never unready");
        tokio::time::sleep(crate::support::LOOK_EVERY).await;
    }
    assert_eq!(relay.get("/livez").await.status, 200, "it lives to say so");
    relay
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_database_is_waited_for() {
    for mode in ["wal", "poll"] {
        let server = PrivatePostgres::start(&[]).await;
        let stage = Stage::on(mode, server.database().await, Vhost::fresh().await, |config| config).await;
        let waiting = stage.commit(0, 10).await;
        server.stop().await;
        let mut relay = says(&stage.config, "database_down", "").await;
        server.start_again().await;
        stage.oracle.wait_for_all(&waiting).await;
        relay.wait_state("running").await;
        relay.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_broker_is_waited_for_and_a_wrong_password_is_named() {
    for mode in ["wal", "poll"] {
        let stage = Stage::set(mode).await;
        let waiting = stage.commit(0, 10).await;
        let nowhere = stage.config.clone().set("broker.url", "amqp://guest:secret@127.0.0.1:1/%2f");
        says(&nowhere, "broker_down", "127.0.0.1").await;
        let (address, vhost) =
            stage.vhost.url().rsplit_once('/').map(|(a, v)| (a.to_owned(), v.to_owned())).unwrap();
        let host = address.rsplit_once('@').map(|(_, host)| host.to_owned()).unwrap();
        let wrong = stage.config.clone().set("broker.url", format!("amqp://guest:secret@{host}/{vhost}"));
        says(&wrong, "broker_refused", "").await;
        let mut relay = stage.config.start_running().await;
        stage.oracle.wait_for_all(&waiting).await;
        relay.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_database_password_is_named() {
    let stage = Stage::set("poll").await;
    let url = stage.database.url();
    let (scheme, rest) = url.split_once("://").unwrap();
    let (user, host) = rest.split_once('@').unwrap();
    let user = user.split(':').next().unwrap();
    let wrong = format!("{scheme}://{user}:secret@{host}");
    let config = stage.config.clone().set("database.url", wrong);
    says(&config, "database_down", "password").await;
    let wal = config.mode("wal");
    says(&wal, "database_down", "password").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_outbox_table_is_named_and_waited_for() {
    for mode in ["wal", "poll"] {
        let stage = Stage::set(mode).await;
        stage.app.batch_execute("ALTER TABLE outbox_messages RENAME TO elsewhere").await.unwrap();
        let mut relay = says(&stage.config, "schema_changed", "outbox_messages").await;
        stage.app.batch_execute("ALTER TABLE elsewhere RENAME TO outbox_messages").await.unwrap();
        let all = stage.commit(0, 10).await;
        stage.oracle.wait_for_all(&all).await;
        relay.wait_state("running").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_content_column_of_another_type_is_named() {
    for mode in ["wal", "poll"] {
        let stage = Stage::set(mode).await;
        stage
            .app
            .batch_execute(
                "ALTER TABLE outbox_messages DROP content; ALTER TABLE outbox_messages ADD content inet",
            )
            .await
            .unwrap();
        stage
            .app
            .batch_execute(
                "INSERT INTO outbox_messages (id, type, content, occurred_on_utc)
                 VALUES (gen_random_uuid(), 't', '127.0.0.1', now())",
            )
            .await
            .unwrap();
        says(&stage.config, "schema_changed", "content").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_logical_decoding_is_told_the_statement() {
    let server = PrivatePostgres::start(&["wal_level=replica"]).await;
    let stage = Stage::on("wal", server.database().await, Vhost::fresh().await, |config| config).await;
    let relay = says(&stage.config, "schema_changed", "wal_level").await;
    let remedy = relay.status().await["remedy"].as_str().unwrap().to_owned();
    assert!(remedy.contains("ALTER SYSTEM SET wal_level"), "{remedy}");
    let check = stage.config.run(&["check"]).await;
    assert_eq!(check.code, Some(1), "{check:?}");
    assert!(check.stdout.contains("ALTER SYSTEM SET wal_level"), "{check:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_of_another_plugin_is_refused_by_name_and_left_alone() {
    let stage = Stage::set("wal").await;
    let create = "SELECT pg_create_logical_replication_slot($1::text::name, 'test_decoding')";
    stage.app.query(create, &[&stage.database.name()]).await.unwrap();
    says(&stage.config, "slot_lost", "test_decoding").await;
    assert_eq!(
        stage.number("SELECT count(*) FROM pg_replication_slots WHERE plugin = 'test_decoding'").await,
        1
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_slot_halts_loudly_and_loses_nothing_meanwhile() {
    let stage = Stage::set("wal").await;
    let mut relay = stage.config.start_running().await;
    let before = stage.commit(0, 10).await;
    stage.oracle.wait_for_all(&before).await;
    relay.stop().await;
    stage
        .app
        .query("SELECT pg_drop_replication_slot($1::text::name)", &[&stage.database.name()])
        .await
        .unwrap();
    stage.commit(10, full(10, 100)).await;
    let relay = says(&stage.config, "slot_lost", stage.database.name()).await;
    assert_eq!(relay.status().await["state"], "failed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_exchange_blocks_charges_nothing_and_clears() {
    for mode in ["wal", "poll"] {
        let stage = Stage::set(mode).await;
        stage.vhost.delete_exchange("outbox").await;
        let waiting = stage.commit(0, 100).await;
        let mut relay = says(&stage.config, "exchange_missing", "outbox").await;
        assert_eq!(stage.number("SELECT count(*) FROM postrider_retries").await, 0);
        stage.vhost.declare_exchange("outbox", lapin::ExchangeKind::Topic).await;
        stage.vhost.bind("all", "outbox", "#").await;
        stage.oracle.wait_for_all(&waiting).await;
        relay.wait_state("running").await;
        relay.stop().await;
        stage.oracle.assert_no_duplicates();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_key_and_a_port_in_use_end_the_program_with_one_clear_line() {
    let (database, vhost) = (Database::fresh().await, Vhost::fresh().await);
    let config = RelayConfig::new(&database, &vhost);
    let unknown = config.clone().set("publish.windw", 5).run(&["run"]).await;
    assert_eq!(unknown.code, Some(2), "{unknown:?}");
    assert!(
        unknown.stderr.contains("config.toml") && unknown.stderr.contains("publish.windw"),
        "{unknown:?}"
    );
    assert!(unknown.stderr.contains("publish.window_messages"), "it says what is meant: {unknown:?}");

    let wrong = config.clone().set("source.mode", "wall").run(&["run"]).await;
    assert_eq!(wrong.code, Some(2), "{wrong:?}");
    for word in ["config.toml", "source.mode", "wall", "poll"] {
        assert!(wrong.stderr.contains(word), "{word} in {wrong:?}");
    }

    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let in_use = config.set("admin.listen", address.as_str()).run(&["run"]).await;
    assert_eq!(in_use.code, Some(1), "{in_use:?}");
    assert!(in_use.stderr.contains(&address) && in_use.stderr.contains("admin.listen"), "{in_use:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_slot_is_made_anew_where_configured_and_every_row_arrives() {
    let stage = Stage::with("wal", |config| config.set("source.wal.on_lost_slot", "recover")).await;
    let mut relay = stage.config.start_running().await;
    let before = stage.commit(0, 10).await;
    stage.oracle.wait_for_all(&before).await;
    relay.stop().await;
    let drop = "SELECT pg_drop_replication_slot($1::text::name)";
    stage.app.query(drop, &[&stage.database.name()]).await.unwrap();
    let missed = stage.commit(10, 100).await;
    let mut relay = stage.config.start_running().await;
    let after = stage.commit(110, 10).await;
    stage.oracle.wait_for_all(&[before, missed, after].concat()).await;
    relay.stop().await;
    stage.oracle.assert_no_duplicates();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalidated_slot_halts_and_is_made_anew_where_configured() {
    let server = PrivatePostgres::start(&["max_slot_wal_keep_size=1MB", "checkpoint_timeout=1h"]).await;
    let stage = Stage::on("wal", server.database().await, Vhost::fresh().await, |config| config).await;
    let mut relay = stage.config.start_running().await;
    let before = stage.commit(0, 10).await;
    stage.oracle.wait_for_all(&before).await;
    relay.stop().await;
    let missed = stage.commit(10, 100).await;
    let lost = format!(
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{}' AND wal_status = 'lost'",
        stage.database.name()
    );
    crate::support::eventually("the slot is invalidated", async || {
        stage
            .app
            .batch_execute(
                "CREATE TABLE IF NOT EXISTS filler (t text);
                 INSERT INTO filler SELECT repeat('x', 1000) FROM generate_series(1, 20000);",
            )
            .await
            .unwrap();
        stage.app.batch_execute("SELECT pg_switch_wal()").await.unwrap();
        stage.app.batch_execute("CHECKPOINT").await.unwrap();
        (stage.number(&lost).await == 1).then_some(())
    })
    .await;
    let halted = says(&stage.config, "slot_lost", stage.database.name()).await;
    assert_eq!(halted.status().await["state"], "failed");
    drop(halted);
    let config = stage.config.clone().set("source.wal.on_lost_slot", "recover");
    let mut relay = config.start_running().await;
    let after = stage.commit(110, 10).await;
    stage.oracle.wait_for_all(&[before, missed, after].concat()).await;
    relay.stop().await;
    stage.oracle.assert_no_duplicates();
}
