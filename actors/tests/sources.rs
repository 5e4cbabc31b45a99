//! `ClaimSource` and the sweep against a real PostgreSQL, with a stand-in for the stages behind them.

mod support;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, atomic::Ordering},
    time::{Duration, Instant},
};

use actix::Actor;
use postrider_actors::{
    control::Intake,
    credit::Cost,
    database::progress::{Sweep, load_progress},
    envelope::{Reason, Row, Verdict},
    metrics::Stage,
    pipeline::exit::{Exit, ExitGuard, ExitStatus},
    settings::{RowPolicy, SourceSettings},
    source::{claims::ClaimSource, sweep::sweep},
    status::Reason as Held,
};
use support::{Database, rejected, sink, until};
use tokio::sync::mpsc;

const SOON: Duration = Duration::from_secs(5);
const ALL_DONE: &str = "SELECT NOT EXISTS (SELECT FROM outbox_messages WHERE processed_on_utc IS NULL)";

fn start(
    shared: &postrider_actors::pipeline::shared::Shared,
    decoder: Arc<postrider_actors::outlet::Outlet<postrider_actors::envelope::RawBatch>>,
    workers: usize,
) -> mpsc::Receiver<Exit> {
    let (to, exits) = mpsc::channel(4);
    ClaimSource::new(shared.clone(), ExitGuard::new(Stage::Source, to), decoder, workers).start();
    exits
}

#[actix::test]
async fn poison_at_the_head_of_the_table_is_parked_while_good_rows_flow() {
    let database = Database::new().await;
    database.insert(150, "poison", 1_000).await;
    database.insert(300, "good", 2_000).await;
    let (shared, _intake) = database.shared();
    let (decoder, _) = sink::start(&shared, |row| {
        Some(if row.kind == "poison" { rejected(Reason::Unroutable) } else { Verdict::Delivered })
    });
    let mut exits = start(&shared, decoder, 3);
    let good =
        "SELECT count(*) = 300 FROM outbox_messages WHERE type = 'good' AND processed_on_utc IS NOT NULL";
    until(&database, good, SOON).await;
    until(&database, "SELECT count(*) = 150 FROM postrider_dead_letters WHERE attempts = 3", SOON).await;
    assert_eq!(database.count("postrider_retries").await, 0);
    let parked = "outbox_messages WHERE processed_on_utc IS NOT NULL AND error = 'unroutable: no route'";
    assert_eq!(database.count(parked).await, 150);
    shared.stop.cancel();
    let exit = exits.recv().await.expect("an exit");
    assert!(matches!(exit.status, ExitStatus::Returned(Ok(()))), "{exit:?}");
    assert_eq!(shared.credits.in_use(), Cost::default());
}

#[actix::test]
async fn a_retried_row_comes_back_exactly_as_it_was() {
    for (id, content) in [("bigint", "jsonb"), ("text", "json"), ("integer", "text"), ("uuid", "bytea")] {
        let database = Database::of(id, content).await;
        let id = match id {
            "uuid" => "gen_random_uuid()".to_owned(),
            "text" => format!("'{}'", "x".repeat(5_000)),
            _ => "7".to_owned(),
        };
        let content = match content {
            "bytea" => r"'\x00ff10000a'::bytea",
            "text" => "E'no json, a tab\\t and ☂'",
            "json" => r#"'{"b": 1,  "a": [1.50, 1e3]}'"#,
            _ => r#"'{"b": 1, "a": "ü☂\\n"}'"#,
        };
        database
            .run(&format!(
                "INSERT INTO outbox_messages (id, type, content, occurred_on_utc, key, headers, exchange, routing_key, tenant) \
                 VALUES ({id}, 'a \"type\"', {content}, '2026-01-02 03:04:05.678901+00', 'k', '{{\"h\": [1]}}', NULL, '', 't\"1')"
            ))
            .await;
        let (shared, _intake) = database.shared();
        let came: Arc<Mutex<Vec<Row>>> = Arc::default();
        let keep = Arc::clone(&came);
        let (decoder, _) = sink::start(&shared, move |row| {
            keep.lock().expect("no panic").push(row.clone());
            Some(if row.attempts < 2 { rejected(Reason::Nacked) } else { Verdict::Delivered })
        });
        let _exits = start(&shared, decoder, 1);
        until(&database, ALL_DONE, SOON).await;
        shared.stop.cancel();
        let came = came.lock().expect("no panic").clone();
        assert_eq!(came.iter().map(|row| row.attempts).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(came[0].occurred_on, Some(1_767_323_045_678_901));
        assert_eq!(Row { attempts: 0, ..came[2].clone() }, came[0]);
        let same: bool = match came[0].content_kind.as_str() {
            "bytes" => came[0].content == [0u8, 0xff, 0x10, 0, 0x0a][..],
            _ => {
                database.value::<String>("SELECT content::text FROM outbox_messages").await.as_bytes()
                    == came[0].content
            }
        };
        assert!(same, "the content is the column's text, byte for byte");
        assert_eq!(database.count("outbox_messages WHERE error IS NULL").await, 1);
        assert_eq!(database.count("postrider_retries").await, 0);
    }
}

#[actix::test]
async fn rows_larger_than_the_whole_budget_travel_alone() {
    let mut database = Database::of("uuid", "text").await;
    database.settings.credits = Cost { messages: 50, bytes: 20_000 };
    database
        .run(
            "INSERT INTO outbox_messages (id, type, content, occurred_on_utc) SELECT gen_random_uuid(), 't', \
             repeat('x', CASE WHEN n % 10 = 0 THEN 100000 ELSE 900 END), now() + n * interval '1 ms' \
             FROM generate_series(1, 100) AS n",
        )
        .await;
    let (shared, _intake) = database.shared();
    let (decoder, seen) = sink::start(&shared, |_| Some(Verdict::Delivered));
    let _exits = start(&shared, decoder, 3);
    until(&database, ALL_DONE, Duration::from_secs(20)).await;
    shared.stop.cancel();
    let ids = seen.ids.lock().expect("no panic");
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 100);
    assert_eq!(ids.len(), 100, "none was sent twice");
    assert!(seen.largest.load(Ordering::SeqCst) <= 50);
}

#[actix::test]
async fn a_pause_stops_claims_and_a_dropped_claim_is_claimed_again() {
    let database = Database::new().await;
    let (shared, intake) = database.shared();
    intake.send_replace(Intake::Closed);
    let dropped = std::cell::Cell::new(0);
    let (decoder, seen) = sink::start(&shared, move |_| {
        dropped.set(dropped.get() + 1);
        (dropped.get() > 5).then_some(Verdict::Delivered)
    });
    let _exits = start(&shared, decoder, 2);
    database.insert(10, "order", 1_000).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(seen.batches.load(Ordering::SeqCst), 0);
    intake.send_replace(Intake::Open);
    until(&database, ALL_DONE, SOON).await;
    assert!(seen.dropped.load(Ordering::SeqCst) >= 1);
    shared.stop.cancel();
}

#[actix::test]
async fn a_notification_is_faster_than_the_poll() {
    let mut database = Database::new().await;
    if let SourceSettings::Poll(poll) = &mut database.settings.source {
        (poll.interval, poll.notify) = (Duration::from_secs(30), true);
    }
    let (shared, _intake) = database.shared();
    let (decoder, _) = sink::start(&shared, |_| Some(Verdict::Delivered));
    let _exits = start(&shared, decoder, 2);
    let listening = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%')";
    until(&database, listening, SOON).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let began = Instant::now();
    database.insert(1, "order", 1_000).await;
    database.run("NOTIFY postrider").await;
    until(&database, ALL_DONE, SOON).await;
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    shared.stop.cancel();
}

#[actix::test]
async fn an_outage_is_waited_out_and_said() {
    let database = Database::new().await;
    let (shared, _intake) = database.shared();
    let (decoder, _) = sink::start(&shared, |_| Some(Verdict::Delivered));
    let mut exits = start(&shared, decoder, 2);
    database.insert(5, "order", 1_000).await;
    until(&database, ALL_DONE, SOON).await;
    let other = Database::new().await;
    let name = &database.name;
    other.run(&format!("ALTER DATABASE {name} ALLOW_CONNECTIONS false")).await;
    let end = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND application_name = 'postrider test'"
    );
    let down = async {
        while !shared.board.holds(Held::DatabaseDown) {
            other.run(&end).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(SOON, down).await.expect("said");
    assert!(!shared.figures.source_connected.load(Ordering::Relaxed));
    other.run(&format!("ALTER DATABASE {name} ALLOW_CONNECTIONS true")).await;
    database.insert(5, "order", 2_000).await;
    until(&database, ALL_DONE, Duration::from_secs(15)).await;
    let up = async {
        while shared.board.holds(Held::DatabaseDown) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, up).await.expect("taken back by the next answer");
    assert!(exits.try_recv().is_err(), "the stage lives");
    shared.stop.cancel();
}

#[actix::test]
async fn a_missing_column_ends_the_stage() {
    let database = Database::new().await;
    database.run("ALTER TABLE outbox_messages DROP COLUMN tenant").await;
    let (shared, _intake) = database.shared();
    let (decoder, _) = sink::start(&shared, |_| Some(Verdict::Delivered));
    let mut exits = start(&shared, decoder, 1);
    let exit = tokio::time::timeout(SOON, exits.recv()).await.expect("soon").expect("an exit");
    let ExitStatus::Returned(Err(error)) = exit.status else { panic!("{exit:?}") };
    assert_eq!(error.kind(), postrider_actors::error::Kind::SchemaChanged);
}

#[actix::test]
async fn a_sweep_delivers_history_waits_for_what_others_hold_and_ends_under_inserts() {
    let database = Database::new().await;
    database.insert(2_000, "order", 1_000).await;
    let (shared, _intake) = database.shared();
    let (decoder, seen) = sink::start(&shared, |_| Some(Verdict::Delivered));
    let other = Database::new().await;
    // Another relay's claim, and an application that goes on inserting.
    database.run("BEGIN; SELECT FROM outbox_messages ORDER BY occurred_on_utc LIMIT 10 FOR UPDATE").await;
    drop(other);
    let inserting = actix::spawn({
        let pool = shared.pool.clone();
        async move {
            loop {
                let client = pool.get().await.expect("a connection");
                let sql = "INSERT INTO outbox_messages (id, type, content, occurred_on_utc) \
                           SELECT gen_random_uuid(), 'new', '{}', clock_timestamp() FROM generate_series(1, 20)";
                client.execute_typed(sql, &[]).await.expect("rows");
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    });
    let sweeping = sweep(&shared, &decoder);
    tokio::pin!(sweeping);
    assert!(tokio::time::timeout(Duration::from_millis(1500), &mut sweeping).await.is_err(), "ten are held");
    assert_eq!(database.count("outbox_messages WHERE type = 'order' AND processed_on_utc IS NULL").await, 10);
    database.run("ROLLBACK").await;
    let end = tokio::time::timeout(SOON, sweeping).await.expect("it ends").expect("swept");
    inserting.abort();
    assert_eq!(database.count("outbox_messages WHERE type = 'order' AND processed_on_utc IS NULL").await, 0);
    assert_eq!(
        shared.figures.swept.load(Ordering::Relaxed) as usize,
        seen.ids.lock().expect("no panic").len()
    );
    let outbox = database.outbox().await;
    let stored = load_progress(&database.client, &outbox).await.expect("read").expect("a row");
    assert_eq!((stored.sweep, stored.sweep_end), (Sweep::Done, Some(end)));
}

#[actix::test]
async fn a_sweep_of_kept_rows_goes_on_at_its_cursor_and_touches_none() {
    let mut database = Database::of("bigint GENERATED ALWAYS AS IDENTITY", "jsonb").await;
    database.settings.ack.rows = RowPolicy::Keep;
    database
        .run(
            "INSERT INTO outbox_messages (type, content, occurred_on_utc) \
             SELECT 't', '{}', now() FROM generate_series(1, 1000)",
        )
        .await;
    let (shared, _intake) = database.shared();
    let batches = std::cell::Cell::new(0u32);
    let kill = shared.stop.clone();
    let (decoder, first) = sink::start(&shared, move |row| {
        batches.set(batches.get() + 1);
        match batches.get() {
            5 => Some(rejected(Reason::Nacked)),
            // In the middle of the third page (the first is of 8 rows, then 400): everything dies.
            600 => {
                kill.cancel();
                None
            }
            _ if row.id == "7" => Some(rejected(Reason::Invalid)),
            _ => Some(Verdict::Delivered),
        }
    });
    sweep(&shared, &decoder).await.expect_err("killed");
    let outbox = database.outbox().await;
    let stored = load_progress(&database.client, &outbox).await.expect("read").expect("a row");
    assert_eq!((stored.sweep_cursor.as_deref(), stored.sweep), (Some("408"), Sweep::Pending));
    let (shared, _intake) = database.shared();
    let (decoder, second) = sink::start(&shared, |_| Some(Verdict::Delivered));
    sweep(&shared, &decoder).await.expect("swept");
    assert_eq!(second.ids.lock().expect("no panic").len(), 592);
    let mut all: HashSet<String> = first.ids.lock().expect("no panic").iter().cloned().collect();
    all.extend(second.ids.lock().expect("no panic").iter().cloned());
    assert_eq!(all.len(), 1000);
    assert_eq!(
        database.count("outbox_messages WHERE processed_on_utc IS NULL AND error IS NULL").await,
        1000
    );
    assert_eq!(database.count("postrider_retries").await, 1);
    assert_eq!(database.count("postrider_dead_letters").await, 1);
}
