//! The replication stream of a real PostgreSQL, read and decoded by the first half of the pipeline.
//!
//! `POSTRIDER_TEST_DATABASE_URL` names a superuser on a server with `wal_level = logical`; each test makes a database of
//! its own.

mod flow;
mod rows;
mod slot;
mod support;
