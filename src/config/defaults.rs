//! Every default, with the reason for it.

/// A server on this machine, as its superuser: enough to try things out, and refused by any production server.
pub const DATABASE_URL: &str = "postgres://postgres@127.0.0.1:5432/postgres";
/// Present in every database; a schema of one's own is better and cannot be assumed.
pub const SCHEMA: &str = "public";
/// RabbitMQ's own default account, which the broker accepts from this machine alone.
pub const BROKER_URL: &str = "amqp://guest:guest@127.0.0.1:5672/%2f";

/// The name most outbox libraries of the .NET world create.
pub const TABLE: &str = "outbox_messages";
/// The columns those libraries create.
pub mod columns {
    /// Primary key.
    pub const ID: &str = "id";
    /// Message type.
    pub const TYPE: &str = "type";
    /// Payload.
    pub const CONTENT: &str = "content";
    /// When it occurred.
    pub const OCCURRED_ON: &str = "occurred_on_utc";
    /// When it was recorded.
    pub const PROCESSED_ON: &str = "processed_on_utc";
    /// What the last rejection said.
    pub const ERROR: &str = "error";
}

/// Slot and publication share the program's name, so that whoever finds them on a server knows whose they are.
pub const SLOT: &str = "postrider";
/// See [`SLOT`].
pub const PUBLICATION: &str = "postrider";

/// Enough that claiming, publishing and recording overlap; each is a connection, so not more than a pool affords.
pub const WORKERS: u32 = 5;
/// Amortises a claim's round trips; five of these are the default exposure in poll mode.
pub const POLL_BATCH_MESSAGES: u32 = 400;
/// What an idle relay costs the database: five queries a second. `wake = "notify"` shortens the wait without it.
pub const POLL_INTERVAL_MS: u64 = 1_000;

/// One exchange named after the pattern.
pub const EXCHANGE: &str = "outbox";
/// A topic exchange routes on the message's type.
pub const ROUTING_KEY: &str = "{type}";
/// Saturates the broker (measured: 256 → 49,000/s, 512 → 48,800/s); more only adds repetitions after a crash.
pub const WINDOW_MESSAGES: u32 = 256;
/// A crash repeats at most this many. About four windows, so that recording never stalls a full window.
pub const EXPOSURE_WAL: u32 = 1_000;
/// As [`EXPOSURE_WAL`]; all workers' claims in flight at once ([`WORKERS`] × [`POLL_BATCH_MESSAGES`]).
pub const EXPOSURE_POLL: u32 = 2_000;
/// One channel keeps commit order; more do not.
pub const LANES: u32 = 1;
/// With the backoff below the tenth attempt comes about three minutes after the first: longer than a deployment.
pub const MAX_ATTEMPTS: u32 = 10;
/// Long enough for a binding that is being created.
pub const RETRY_BACKOFF_MS: u64 = 500;
/// A row is never more than a minute from another attempt once its cause is mended.
pub const RETRY_BACKOFF_MAX_MS: u64 = 60_000;
/// Far above a healthy broker's worst (a quorum queue's leader election takes seconds).
pub const CONFIRM_TIMEOUT_MS: u64 = 30_000;

/// Amortises a recording transaction's commit; with 8,192 credits several are under way at once.
pub const ACK_BATCH_MESSAGES: u32 = 1_000;
/// WAL is released this promptly and no walsender is flooded: 100 positions a second at most.
pub const ACK_INTERVAL_MS: u64 = 10;

/// Two tenths of a second of work at full speed: the pipeline never starves, and its memory stays small.
pub const CREDIT_MESSAGES: u32 = 8_192;
/// 64 MiB: the same number of 8 KiB messages.
pub const CREDIT_BYTES: u64 = 64 * 1024 * 1024;

/// Deleting is for the operator to ask for.
pub const RETENTION_SECS: u64 = 0;
/// A table of an hour's rows is trimmed in small steps.
pub const CLEANUP_INTERVAL_SECS: u64 = 60;
/// A transaction of some tens of milliseconds, so that no lock or snapshot is held for long.
pub const CLEANUP_BATCH_ROWS: u32 = 5_000;

/// This machine only; 9464 is the port Prometheus exporters of this kind use.
pub const LISTEN: &str = "127.0.0.1:9464";
/// Below the 30 s that Kubernetes grants and equal to the 10 s that `docker stop` does.
pub const SHUTDOWN_TIMEOUT_MS: u64 = 10_000;
