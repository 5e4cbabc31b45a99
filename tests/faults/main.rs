//! The delivery law under faults: the real relay, real servers, and everything that happens to them.
//! Each test is named after the right behaviour; `C01` and the like in its comment is the fault's number
//! in `docs/faults.md`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]
#![allow(clippy::disallowed_methods, reason = "tests speak to the server itself, with no pooler between")]

#[path = "../support/mod.rs"]
mod support;

/// Tests of these names, each in both source modes.
macro_rules! both_modes {
    ($($case:ident),+ $(,)?) => {
        mod wal { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $case() { super::$case("wal").await })+ }
        mod poll { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $case() { super::$case("poll").await })+ }
    };
}

mod blocked;
mod broker;
mod chaos;
mod database;
mod failpoints;
mod kills;
mod locks;
mod log;
mod network;
mod poison;
mod policy;
mod proxy;
mod reconnect;
mod rejections;
mod relays;
mod stop;
