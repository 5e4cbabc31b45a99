//! The program as a person meets it, against a real PostgreSQL: `migrate`, `check`, and what goes wrong on a first start.
//!
//! `./dev test` says where PostgreSQL is (`POSTRIDER_TEST_DATABASE_URL`, a superuser's); each test has a database of
//! its own.

mod check;
mod database;
mod migrate;
mod usage;
