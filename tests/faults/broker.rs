//! The broker dies, is stopped, and comes back: to a relay in each mode at once.

use std::time::Duration;

use futures_util::future::join;

use crate::support::{Database, PrivateBroker, Relay, RelayConfig, Stage, full};

/// Unconfirmed messages at most, by default: what an end of the connection makes the relay send again.
const WINDOW: usize = 256;

/// A relay in a mode, and what was committed for it.
struct Side {
    mode: &'static str,
    stage: Stage,
    relay: Relay,
    all: Vec<String>,
}

impl Side {
    async fn start(
        mode: &'static str,
        broker: &PrivateBroker,
        change: impl FnOnce(RelayConfig) -> RelayConfig,
    ) -> Self {
        let stage = Stage::on(mode, Database::fresh().await, broker.vhost().await, change).await;
        let relay = stage.config.start_running().await;
        Self { mode, stage, relay, all: Vec::new() }
    }

    async fn commit(&mut self, n: usize) {
        self.all.extend(self.stage.commit(self.all.len(), n).await);
    }

    /// No row was charged an attempt, not even one that has been forgotten since.
    async fn no_row_is_to_blame(&self) {
        let charged =
            "SELECT (SELECT count(*) FROM postrider_retries) + (SELECT count(*) FROM postrider_dead_letters)
                            + (SELECT count(*) FROM outbox_messages WHERE error IS NOT NULL)";
        assert_eq!(self.stage.number(charged).await, 0, "{}", self.mode);
        assert_eq!(self.relay.status().await["totals"]["rejected"], 0, "{}", self.mode);
    }

    async fn all_arrive(&self) {
        self.stage.oracle.wait_for_all(&self.all).await;
    }
}

/// C10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_killed_at_full_flow_costs_nothing_and_repeats_no_more_than_the_window() {
    let broker = PrivateBroker::start().await;
    let (wal, poll) = join(Side::start("wal", &broker, |c| c), Side::start("poll", &broker, |c| c)).await;
    let mut sides = [wal, poll];
    let kills = full(1, 20);
    for _ in 0..kills {
        for side in &mut sides {
            side.commit(5_000).await;
        }
        for side in &sides {
            side.stage.oracle.wait_for(side.all.len() - 4_500).await;
        }
        broker.kill9().await;
        broker.start_again().await;
    }
    for side in &mut sides {
        side.all_arrive().await;
        side.no_row_is_to_blame().await;
        let Side { mode, stage, relay, all } = side;
        relay.stop().await;
        stage.oracle.barrier().await;
        let repeated = stage.oracle.repetitions();
        assert!(repeated <= kills * WINDOW, "{mode}: {repeated} repetitions after {kills} kills");
        stage.oracle.assert_nothing_else(all);
        let left = "SELECT count(*) FROM outbox_messages WHERE processed_on_utc IS NULL";
        assert_eq!(stage.number(left).await, 0, "{mode}: everything is recorded");
    }
}

/// C09.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_of_the_broker_is_no_attempt_of_any_row() {
    let broker = PrivateBroker::start().await;
    let few = |c: RelayConfig| c.set("publish.max_attempts", 5).set("publish.retry_backoff_ms", 50);
    let (wal, poll) = join(Side::start("wal", &broker, few), Side::start("poll", &broker, few)).await;
    let mut sides = [wal, poll];
    for side in &mut sides {
        side.commit(100).await;
        side.all_arrive().await;
    }
    // a whole window is under way when it goes
    broker.freeze().await;
    for side in &mut sides {
        side.commit(1_000).await;
        side.relay.wait_metric("postrider_unconfirmed_messages", |n| n >= 100.0).await;
    }
    broker.kill9().await;
    for side in &mut sides {
        side.relay.wait_unready().await;
        let status = side.relay.wait_state("blocked").await;
        assert_eq!(status["reason"], "broker_down", "{status}");
    }
    tokio::time::sleep(full(Duration::from_secs(3), Duration::from_secs(120))).await;
    for side in &sides {
        assert!(!side.relay.ready().await, "{}", side.mode);
        side.no_row_is_to_blame().await;
    }
    broker.start_again().await;
    for side in &mut sides {
        side.all_arrive().await;
        side.relay.wait_state("running").await;
        side.no_row_is_to_blame().await;
        side.relay.stop().await;
        side.stage.oracle.barrier().await;
        assert!(side.stage.oracle.repetitions() <= WINDOW, "{}", side.mode);
    }
}
