//! What the system and the probes say about a running relay.

use std::fs;
use std::time::{Duration, Instant};

use super::{LOOK_EVERY, Relay};

/// What a process holds of the system's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) descriptors: usize,
    pub(crate) threads: usize,
}

/// An outage must show in `/readyz` within this: 5 s of grace, a few until it is noticed, and a busy machine.
pub(crate) const UNREADY_WITHIN: Duration = Duration::from_secs(15);

impl Relay {
    /// Open descriptors and threads now.
    pub(crate) fn held(&self) -> Held {
        let entries =
            |of: &str| fs::read_dir(format!("/proc/{}/{of}", self.pid())).expect("the relay lives").count();
        Held { descriptors: entries("fd"), threads: entries("task") }
    }

    /// What `/readyz` says.
    pub(crate) async fn ready(&self) -> bool {
        self.get("/readyz").await.status == 200
    }

    /// Waits until `/readyz` says no, at most [`UNREADY_WITHIN`]; returns how long that took.
    pub(crate) async fn wait_unready(&self) -> Duration {
        let began = Instant::now();
        while self.ready().await {
            let status = self.status().await;
            assert!(began.elapsed() < UNREADY_WITHIN, "ready though nothing can move: {status}");
            tokio::time::sleep(LOOK_EVERY).await;
        }
        began.elapsed()
    }
}
