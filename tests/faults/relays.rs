//! Two relays on one outbox: one works and the other stands by, or both work; one stops, or is frozen.

use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::support::{Database, LOOK_EVERY, PrivatePostgres, Relay, Stage, Vhost, commit, connect, full};

/// How long a standby may take after the other's clean exit.
const TAKE_OVER: Duration = Duration::from_secs(10);

/// Until the server gives a frozen relay up; and what a standby may take beyond that.
const SENDER_TIMEOUT: Duration = Duration::from_secs(5);
const AND: Duration = Duration::from_secs(5);

/// `publish.exposure_messages`, and a poll relay's whole of it.
const EXPOSURE: usize = 200;

/// An application that commits until it is told to stop; then it says which rows.
struct Writer {
    stop: CancellationToken,
    task: JoinHandle<Vec<String>>,
}

impl Writer {
    async fn start(stage: &Stage) -> Self {
        let (app, stop) = (stage.database.connect().await, CancellationToken::new());
        let until = stop.clone();
        let task = tokio::spawn(async move {
            let mut all = Vec::new();
            while !until.is_cancelled() {
                all.extend(commit(&app, all.len(), 20).await);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            all
        });
        Self { stop, task }
    }

    async fn stop(self) -> Vec<String> {
        self.stop.cancel();
        self.task.await.expect("rows were written")
    }
}

/// Looks at the slot and the stored progress again and again: neither may ever go back.
fn watch(database: &Database, slot: &str, stop: CancellationToken) -> JoinHandle<()> {
    let (url, slot) = (database.url(), slot.to_owned());
    tokio::spawn(async move {
        let client = connect(&url).await.expect("the server is there");
        let sql = "SELECT pg_wal_lsn_diff(s.confirmed_flush_lsn, '0/0')::int8,
                          pg_wal_lsn_diff(coalesce(p.commit_lsn, '0/0'), '0/0')::int8, coalesce(p.rows_done, 0)
                   FROM pg_replication_slots s LEFT JOIN postrider_progress p ON p.slot = s.slot_name
                   WHERE s.slot_name = $1";
        let (mut confirmed, mut progress) = (0i64, (0i64, 0i64));
        while !stop.is_cancelled() {
            let row = client.query_one(sql, &[&slot]).await.expect("the slot is there");
            let (lsn, position): (i64, (i64, i64)) = (row.get(0), (row.get(1), row.get(2)));
            assert!(lsn >= confirmed, "the slot went back: {confirmed} to {lsn}");
            assert!(position >= progress, "progress went back: {progress:?} to {position:?}");
            (confirmed, progress) = (lsn, position);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
}

/// C24.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_takes_over_in_time_and_a_frozen_relay_that_thaws_does_no_harm() {
    let server = PrivatePostgres::start(&["wal_sender_timeout=5s"]).await;
    let stage = Stage::on("wal", server.database().await, Vhost::fresh().await, |config| {
        config.set("publish.exposure_messages", EXPOSURE).set("publish.window_messages", EXPOSURE)
    })
    .await;
    let mut active = stage.config.start_running().await;
    let mut other = stage.config.another().start();
    other.wait_state("standby").await;
    let stop = CancellationToken::new();
    let watcher = watch(&stage.database, stage.database.name(), stop.clone());
    let writer = Writer::start(&stage).await;

    for _ in 0..full(2, 20) {
        tokio::time::sleep(Duration::from_millis(300)).await;
        active.stop().await;
        let began = Instant::now();
        other.wait_state("running").await;
        assert!(began.elapsed() < TAKE_OVER, "took over after {:?}", began.elapsed());
        std::mem::swap(&mut active, &mut other);
        other = other.config().start();
        other.wait_state("standby").await;
        assert_eq!(other.get("/readyz").await.status, 200);
    }
    assert_eq!(stage.oracle.repetitions(), 0, "clean swaps repeat nothing");

    for _ in 0..full(1, 5) {
        let before = stage.oracle.repetitions();
        active.freeze();
        let began = Instant::now();
        other.wait_state("running").await;
        assert!(began.elapsed() < SENDER_TIMEOUT + AND, "took over after {:?}", began.elapsed());
        tokio::time::sleep(Duration::from_secs(1)).await;
        std::mem::swap(&mut active, &mut other);
        other.thaw();
        other.wait_state("standby").await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let repeated = stage.oracle.repetitions() - before;
        println!("{repeated} repeated around a freeze");
        // What it had sent and nobody recorded, and as much once more when it goes on before it hears of its loss.
        assert!(repeated <= 2 * EXPOSURE, "{repeated} repeated");
    }

    let all = writer.stop().await;
    stage.oracle.wait_for_all(&all).await;
    stage.all_recorded().await;
    other.stop().await;
    active.stop().await;
    stop.cancel();
    watcher.await.expect("neither went back");
    stage.oracle.barrier().await;
    stage.oracle.assert_nothing_else(&all);
}

/// Sessions that have idled in an open transaction for a while.
async fn idlers(stage: &Stage) -> i64 {
    stage
        .number(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
             AND state = 'idle in transaction' AND state_change < clock_timestamp() - interval '1 s'",
        )
        .await
}

/// C24, in poll mode. What a frozen relay has claimed is released by the server after 25 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_claimers_rows_are_released_and_delivered_by_the_other() {
    let stage = Stage::with("poll", |config| {
        config
            .set("publish.exposure_messages", EXPOSURE)
            .set("publish.window_messages", EXPOSURE)
            .set("source.poll.batch_messages", 40)
    })
    .await;
    let mut first = stage.config.start_running().await;
    let mut second = stage.config.another().start_running().await;
    let writer = Writer::start(&stage).await;
    // Until it is caught with rows in its hands.
    loop {
        tokio::time::sleep(Duration::from_millis(50)).await;
        first.freeze();
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        if idlers(&stage).await > 0 {
            break;
        }
        first.thaw();
    }
    let mut all = writer.stop().await;
    let held = stage.number("SELECT count(*) FROM outbox_messages WHERE processed_on_utc IS NULL").await;
    let began = Instant::now();
    while idlers(&stage).await > 0 {
        assert!(began.elapsed() < Duration::from_secs(35), "its claims are still open");
        tokio::time::sleep(10 * LOOK_EVERY).await;
    }
    stage.oracle.wait_for_all(&all).await;
    stage.all_recorded().await;
    println!("at most {held} rows were held for {:?}", began.elapsed());
    first.thaw();
    both_work(&stage, [&first, &second], &mut all).await;
    first.stop().await;
    second.stop().await;
    stage.oracle.barrier().await;
    stage.oracle.assert_nothing_else(&all);
    let repeated = stage.oracle.repetitions();
    assert!(repeated <= EXPOSURE, "{repeated} repeated");
}

/// Commits until each of them has recorded some more.
async fn both_work(stage: &Stage, relays: [&Relay; 2], all: &mut Vec<String>) {
    const DELIVERED: &str = "postrider_messages_total{verdict=\"delivered\"}";
    for relay in relays {
        let before = relay.metrics().await.get(DELIVERED).unwrap_or_default();
        let began = Instant::now();
        while relay.metrics().await.get(DELIVERED).is_none_or(|now| now <= before) {
            assert!(began.elapsed() < crate::support::DEADLINE, "it claims nothing");
            all.extend(stage.commit(all.len(), 200).await);
        }
    }
    stage.oracle.wait_for_all(all).await;
}
