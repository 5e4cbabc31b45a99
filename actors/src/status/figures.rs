//! Levels and totals that `/api/status` shows and gauges copy: plain atomics, written by the stage they belong to.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use tokio::sync::Semaphore;

use crate::{
    credit::{Cost, Credits},
    metrics::Stage,
    position::Lsn,
};

/// How full each stage's mailbox is, read from the slots its senders share.
#[derive(Debug, Default)]
pub struct Mailboxes {
    capacity: usize,
    slots: Option<[Arc<Semaphore>; 3]>,
}

impl Mailboxes {
    /// Mailboxes of `capacity` batches each, in front of the decoder, the publisher and the acker.
    pub fn new(
        capacity: usize,
        decode: Arc<Semaphore>,
        publish: Arc<Semaphore>,
        ack: Arc<Semaphore>,
    ) -> Self {
        Self { capacity, slots: Some([decode, publish, ack]) }
    }

    /// Batches waiting in front of `stage`; a source has no mailbox.
    pub fn depth(&self, stage: Stage) -> usize {
        let index = match stage {
            Stage::Source => return 0,
            Stage::Decode => 0,
            Stage::Publish => 1,
            Stage::Ack => 2,
        };
        let free = self.slots.as_ref().map_or(self.capacity, |slots| slots[index].available_permits());
        self.capacity.saturating_sub(free)
    }
}

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
    /// The process id of the walsender of ours that may hold the slot; 0 before the first.
    pub walsender: AtomicI32,
    /// Where the server was writing, and when it was asked.
    server: Mutex<Option<(Lsn, Instant)>>,
    /// The mailboxes of the running generation.
    mailboxes: Mutex<Mailboxes>,
    /// The credits and the exposure of the running generation.
    budgets: Mutex<Option<(Credits, Credits)>>,
}

impl Figures {
    /// Figures at zero.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Batches waiting in front of `stage`.
    pub fn mailbox_depth(&self, stage: Stage) -> usize {
        self.mailboxes.lock().unwrap_or_else(PoisonError::into_inner).depth(stage)
    }

    /// Says which mailboxes are the running generation's.
    pub fn set_mailboxes(&self, mailboxes: Mailboxes) {
        *self.mailboxes.lock().unwrap_or_else(PoisonError::into_inner) = mailboxes;
    }

    /// Says which budgets are the running generation's.
    pub fn set_budgets(&self, credits: Credits, exposure: Credits) {
        *self.budgets.lock().unwrap_or_else(PoisonError::into_inner) = Some((credits, exposure));
    }

    /// Says where the server was writing when it was asked at `asked`.
    pub fn set_server(&self, lsn: Lsn, asked: Instant) {
        *self.server.lock().unwrap_or_else(PoisonError::into_inner) = Some((lsn, asked));
    }

    /// Where the server was writing, and when it was asked.
    pub fn server(&self) -> Option<(Lsn, Instant)> {
        *self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Credits held now.
    pub fn credits_in_use(&self) -> Cost {
        let budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
        budgets.as_ref().map(|(credits, _)| credits.in_use()).unwrap_or_default()
    }

    /// Messages sent and not durably recorded yet.
    pub fn exposed(&self) -> u32 {
        let budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
        budgets.as_ref().map(|(_, exposure)| exposure.in_use().messages).unwrap_or_default()
    }

    /// Now, by the database's clock, in microseconds since 1970.
    pub fn database_now(&self) -> i64 {
        let ours = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| i64::try_from(since.as_micros()).unwrap_or(i64::MAX));
        ours.saturating_add(self.clock_offset.load(Relaxed))
    }
}
