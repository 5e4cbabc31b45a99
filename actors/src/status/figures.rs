//! Levels and totals that `/api/status` shows and gauges copy: plain atomics, written by the stage they belong to.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed},
};

/// Figures of one process, shared by all stages of all generations.
#[derive(Debug, Default)]
pub struct Figures {
    /// Sent and not confirmed yet.
    pub unconfirmed: AtomicU64,
    /// Delivered since the start.
    pub delivered: AtomicU64,
    /// Rejected since the start.
    pub rejected: AtomicU64,
    /// Durably recorded since the start (delivered and rejected).
    pub recorded: AtomicU64,
    /// Whether the broker has announced an alarm on our connection.
    pub broker_blocked: AtomicBool,
    /// Whether a channel in confirm mode is open.
    pub broker_connected: AtomicBool,
    /// Confirm channels opened since the start.
    pub channel_openings: AtomicU64,
    /// Whether the replication stream is open (wal), or the last claim query worked (poll).
    pub source_connected: AtomicBool,
    /// The server's last position as the stream told it.
    pub received_lsn: AtomicU64,
    /// The position the slot was told last: everything before it is recorded.
    pub durable_lsn: AtomicU64,
    /// Rows swept since the sweep began.
    pub swept: AtomicU64,
    /// The database's clock minus ours, in microseconds.
    pub clock_offset: AtomicI64,
    /// How often the pipeline was built.
    pub generation: AtomicU64,
}

impl Figures {
    /// Figures at zero.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Now, by the database's clock, in microseconds since 1970.
    pub fn database_now(&self) -> i64 {
        let ours = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| i64::try_from(since.as_micros()).unwrap_or(i64::MAX));
        ours.saturating_add(self.clock_offset.load(Relaxed))
    }
}
