//! The delivery law of postrider, and the four stages that keep it.
//!
//! ```text
//!  Source ──RawBatch──▶ Decoder ──MessageBatch──▶ Publisher ──Settled──▶ Acker
//!     ▲                                                                    │
//!     └──────────── credits released; durable LSN (watch) ────────────────┘
//! ```
//!
//! 1. A position is acknowledged only after every message at or before it has a durable verdict ([`ledger`]).
//! 2. A message whose handling is dropped is abandoned, never delivered ([`envelope::Verdict`]).
//! 3. An unknown outcome means: publish again, with the same `message_id` and the same body ([`publish`]).
//! 4. Memory is bounded: every message holds credits until its verdict is recorded ([`credit`]).
//! 5. Repetition is bounded: so is what was sent and is not recorded yet ([`publish`]).
//! 6. Replication feedback never depends on flow ([`source::wal`]).
//! 7. An outage is not a verdict; only the broker's answer about this very message is ([`publish::verdict`]).
//! 8. One bad row holds nothing back: its rejection is recorded like a delivery, and it comes back later
//!    ([`ack::rows`], [`source::claims`]).
//!
//! This crate reads no environment, no files and no global state: [`settings::Settings`] is all it knows
//! (a debug build also has [`failpoints`], which a test's relay is armed with).

pub mod ack;
pub mod control;
pub mod credit;
pub mod database;
pub mod deadlines;
pub mod decode;
pub mod envelope;
pub mod error;
pub mod failpoints;
pub mod ledger;
pub mod metrics;
pub mod outlet;
pub mod pipeline;
pub mod position;
pub mod publish;
pub mod settings;
pub mod source;
pub mod status;
