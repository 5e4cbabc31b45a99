//! The delivery law under faults: the real relay, real servers, and everything that happens to them.
//! Each test is named after the right behaviour; `C01` and the like in its comment is the fault's number in the list
//! that `docs/develop.md` keeps.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]
#![allow(clippy::disallowed_methods, reason = "tests speak to the server itself, with no pooler between")]

#[path = "../support/mod.rs"]
mod support;

mod blocked;
mod broker;
mod chaos;
mod database;
mod failpoints;
mod locks;
mod network;
mod proxy;
mod reconnect;
mod stop;
