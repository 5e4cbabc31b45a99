//! The broker dies, is killed, blocks and comes back.

use crate::support::{PrivateBroker, Stage, full};

/// C10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_killed_at_full_flow_costs_nothing_and_repeats_no_more_than_the_exposure() {
    for mode in ["wal", "poll"] {
        let broker = PrivateBroker::start().await;
        let vhost = broker.vhost().await;
        let stage = Stage::on(mode, crate::support::Database::fresh().await, vhost, |config| config).await;
        let mut relay = stage.config.start_running().await;
        let kills = full(2, 20);
        let mut all = Vec::new();
        for n in 0..kills {
            all.extend(stage.commit(n * 3_000, 3_000).await);
            stage.oracle.wait_for(all.len() - 2_500).await;
            broker.kill9().await;
            broker.start_again().await;
        }
        stage.oracle.wait_for_all(&all).await;
        relay.stop().await;
    }
}
