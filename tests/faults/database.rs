//! C18: PostgreSQL ends sessions, restarts, refuses, and turns read-only: to a relay in each mode at once.

use std::time::{Duration, Instant};

use futures_util::future::join;
use tokio_postgres::Client;

use crate::support::{
    LOOK_EVERY, PrivatePostgres, Relay, RelayConfig, Stage, Vhost, commit, connect, eventually, full,
};

/// A relay in a mode with a role of its own, and what was committed for it.
struct Side {
    mode: &'static str,
    stage: Stage,
    app: Client,
    relay: Relay,
    all: Vec<String>,
}

impl Side {
    async fn start(mode: &'static str, server: &PrivatePostgres) -> Self {
        let stage = Stage::on(mode, server.database().await, Vhost::fresh().await, |config| config).await;
        let role = format!("relay_{mode}");
        let create = format!("CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'relay'");
        stage.app.batch_execute(&create).await.unwrap();
        let granted = stage.config.run(&["migrate", "--role", &role]).await;
        assert_eq!(granted.code, Some(0), "{granted:?}");
        let (_, address) = server.url().rsplit_once('@').unwrap();
        let (address, _) = address.rsplit_once('/').unwrap();
        let url = format!("postgres://{role}:relay@{address}/{}", stage.database.name());
        let config: RelayConfig = stage.config.clone().set("database.url", url);
        let relay = config.start_running().await;
        let app = stage.database.connect().await;
        let mut side = Self { mode, stage, app, relay, all: Vec::new() };
        side.recovers().await;
        side
    }

    async fn commit(&mut self, n: usize) {
        self.all.extend(commit(&self.app, self.all.len(), n).await);
    }

    /// Ends every session of the relay's role, the walsender's too.
    async fn terminate(&self) {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1";
        self.app.query(sql, &[&format!("relay_{}", self.mode)]).await.unwrap();
    }

    /// Changes the relay's role, for sessions from now on.
    async fn alter(&self, change: &str) {
        self.app.batch_execute(&format!("ALTER ROLE relay_{} {change}", self.mode)).await.unwrap();
        self.terminate().await;
    }

    /// Says that nothing moves, and why, and is not ready.
    async fn is_stuck(&mut self, reason: &str) {
        let what = format!("{}: blocked by {reason}", self.mode);
        self.relay.wait_status(&what, |s| s["state"] == "blocked" && s["reason"] == reason).await;
        self.relay.wait_unready().await;
        let until = Instant::now() + full(Duration::from_secs(4), Duration::from_secs(30));
        while Instant::now() < until {
            assert!(!self.relay.ready().await, "{}: {}", self.mode, self.relay.status().await);
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn recovers(&mut self) {
        self.commit(200).await;
        self.stage.oracle.wait_for_all(&self.all).await;
        self.relay.wait_state("running").await;
        assert!(self.relay.ready().await);
    }

    /// The application's session anew: the server was away.
    async fn reconnect(&mut self) {
        let url = self.stage.database.url();
        self.app = eventually("the server accepts connections", async || connect(&url).await.ok()).await;
    }

    async fn end(mut self) {
        self.relay.stop().await;
        self.stage.oracle.barrier().await;
        self.stage.oracle.assert_nothing_else(&self.all);
        self.stage.oracle.assert_same_again();
        let left = "SELECT count(*) FROM outbox_messages WHERE processed_on_utc IS NULL";
        let left: i64 = self.app.query_one(left, &[]).await.unwrap().get(0);
        assert_eq!(left, 0, "{}: everything is recorded", self.mode);
    }
}

async fn sides(server: &PrivatePostgres) -> (Side, Side) {
    join(Side::start("wal", server), Side::start("poll", server)).await
}

async fn ended_and_restarted(side: &mut Side) {
    for _ in 0..full(3, 20) {
        side.commit(500).await;
        side.terminate().await;
        side.recovers().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_that_are_ended_and_a_server_that_restarts_cost_nothing() {
    let server = PrivatePostgres::start(&[]).await;
    let (mut wal, mut poll) = sides(&server).await;
    join(ended_and_restarted(&mut wal), ended_and_restarted(&mut poll)).await;
    for _ in 0..full(1, 10) {
        join(wal.commit(2_000), poll.commit(2_000)).await;
        server.restart().await;
        join(wal.reconnect(), poll.reconnect()).await;
        join(wal.recovers(), poll.recovers()).await;
    }
    join(wal.commit(200), poll.commit(200)).await;
    server.stop().await;
    join(wal.is_stuck("database_down"), poll.is_stuck("database_down")).await;
    server.start_again().await;
    join(wal.reconnect(), poll.reconnect()).await;
    join(wal.recovers(), poll.recovers()).await;
    join(wal.end(), poll.end()).await;
}

async fn refused(side: &mut Side) {
    side.commit(200).await;
    side.alter("CONNECTION LIMIT 0").await;
    side.commit(200).await;
    side.is_stuck("database_down").await;
    side.alter("CONNECTION LIMIT -1").await;
    side.recovers().await;
}

async fn read_only(side: &mut Side) {
    side.alter("SET default_transaction_read_only = on").await;
    side.commit(200).await;
    side.is_stuck("database_readonly").await;
    side.alter("RESET default_transaction_read_only").await;
    side.recovers().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_connections_and_a_server_that_is_read_only_are_said_and_waited_out() {
    let server = PrivatePostgres::start(&[]).await;
    let (mut wal, mut poll) = sides(&server).await;
    join(refused(&mut wal), refused(&mut poll)).await;
    join(read_only(&mut wal), read_only(&mut poll)).await;

    // the server itself, as a standby: what a failover leaves behind for a while
    let demote = "COPY (SELECT 1) TO PROGRAM 'cat > standby.signal'";
    wal.app.batch_execute(demote).await.unwrap();
    server.restart().await;
    join(wal.is_stuck("database_readonly"), poll.is_stuck("database_readonly")).await;
    join(wal.reconnect(), poll.reconnect()).await;
    wal.app.query("SELECT pg_promote()", &[]).await.unwrap();
    join(wal.recovers(), poll.recovers()).await;
    join(wal.end(), poll.end()).await;
}

/// The slot cannot be finished before transactions that are open have ended. The session that waits for that is ours, and
/// outlives our patience: no other relay works.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_our_own_session_is_still_creating_is_no_reason_to_stand_by() {
    let server = PrivatePostgres::start(&[]).await;
    let stage = Stage::on("wal", server.database().await, Vhost::fresh().await, |config| config).await;
    let writer = stage.database.connect().await;
    writer.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.unwrap();
    let mut relay = stage.config.start();
    relay.wait_status("the slot is waited for", |status| status["reason"] == "slot_in_use").await;
    let until = Instant::now() + full(Duration::from_secs(4), Duration::from_secs(30));
    while Instant::now() < until {
        let status = relay.status().await;
        assert!(status["ready"] == false && status["state"] != "standby", "{status}");
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let all = stage.commit(0, 100).await;
    writer.batch_execute("COMMIT").await.unwrap();
    stage.oracle.wait_for_all(&all).await;
    relay.wait_state("running").await;
    relay.stop().await;
}
