//! The delivery law of postrider: an actor pipeline from a PostgreSQL outbox to RabbitMQ.

pub mod database;
pub mod error;
