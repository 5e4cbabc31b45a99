//! The relay against real PostgreSQL and RabbitMQ, each test in its own database and vhost.
//! One binary: every further one would cost a link.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]
#![allow(clippy::disallowed_methods, reason = "tests speak to the server itself, with no pooler between")]

#[path = "../support/mod.rs"]
mod support;

mod bench;
mod conformance;
mod dead_letters;
mod poll;
mod refusals;
mod rejections;
mod toolbox;
mod wal;
