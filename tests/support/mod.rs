//! What the integration tests stand on: a database and a vhost of its own for each test, an oracle that records
//! every delivery, the relay as a process, private servers that may be frozen, blocked and killed, and a proxy that
//! does what networks do.
//!
//! Services come from `./dev test`, or from a `./dev up` before a plain `cargo test`.
#![allow(dead_code, unused_imports, reason = "a toolbox: each test takes what it needs")]

mod between;
mod database;
mod dev;
mod http;
mod oracle;
mod private;
mod process;
mod proxy;
mod relay;
mod stage;
mod vhost;

pub(crate) use between::Between;
pub(crate) use database::{Database, connect};
pub(crate) use http::{Answer, call as http_call};
pub(crate) use oracle::{Delivery, Oracle, Sink, consume_for_ever};
pub(crate) use private::{Pgbouncer, PrivateBroker, PrivatePostgres};
pub(crate) use process::{Held, UNREADY_WITHIN};
pub(crate) use proxy::{Cut, Proxy, Way, is_confirm, is_method};
pub(crate) use relay::{Exit, Metrics, Relay, RelayConfig};
pub(crate) use stage::{Stage, commit};
pub(crate) use vhost::Vhost;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long anything may take before a test fails: generous, for two busy cores.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Between two looks at something that sends no signal.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(25);

/// The count a test runs at: `reduced`, or `full` under `./dev test --full`.
pub(crate) fn full<T>(reduced: T, full: T) -> T {
    if std::env::var_os("POSTRIDER_TEST_FULL").is_some_and(|v| v == "1") { full } else { reduced }
}

/// A name nothing else on this machine has: `t<pid>-<n>`.
fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("t{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Looks until `look` finds something, and panics with `what` after [`DEADLINE`].
pub(crate) async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(began.elapsed() < DEADLINE, "not within {DEADLINE:?}: {what}");
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
