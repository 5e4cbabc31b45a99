//! Everything the pipeline needs to know, validated by whoever fills it in. No environment, files or global state here.

use std::time::Duration;

use crate::{credit::Cost, database::DatabaseSettings};

/// Settings of one relay.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where PostgreSQL is.
    pub database: DatabaseSettings,
    /// Where RabbitMQ is.
    pub broker: BrokerSettings,
    /// Where messages are.
    pub outbox: OutboxSettings,
    /// How rows arrive.
    pub source: SourceSettings,
    /// How messages are sent.
    pub publish: PublishSettings,
    /// How verdicts are recorded.
    pub ack: AckSettings,
    /// The bound of everything held.
    pub credits: Cost,
    /// What becomes of recorded rows; `None` leaves them.
    pub cleanup: Option<CleanupSettings>,
    /// How long a stop waits for what is in flight.
    pub shutdown_timeout: Duration,
}

/// What becomes of recorded rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CleanupSettings {
    /// Age at which they are deleted.
    pub retention: Duration,
    /// Pause between looks.
    pub interval: Duration,
    /// Rows of one transaction, at most.
    pub batch_rows: u32,
}

/// The broker.
#[derive(Clone)]
pub struct BrokerSettings {
    /// `amqp://` or `amqps://`, with credentials and virtual host.
    pub url: String,
    /// PEM file of the authority that signed the broker's certificate; the system's where unset.
    pub ca_file: Option<std::path::PathBuf>,
    /// PEM file of our certificate, for mutual TLS.
    pub cert_file: Option<std::path::PathBuf>,
    /// PEM file of our key.
    pub key_file: Option<std::path::PathBuf>,
}

impl std::fmt::Debug for BrokerSettings {
    /// Leaves the URL out: it holds a password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BrokerSettings")
            .field("ca_file", &self.ca_file)
            .field("cert_file", &self.cert_file)
            .field("key_file", &self.key_file)
            .finish_non_exhaustive()
    }
}

/// The outbox table and its columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutboxSettings {
    /// Schema of the table.
    pub schema: String,
    /// Name of the table.
    pub table: String,
    /// The columns by role.
    pub columns: Columns,
    /// Further columns that templates name, in a fixed order.
    pub template_columns: Vec<String>,
}

impl OutboxSettings {
    /// `schema.table`, the key of our tables' rows.
    pub fn name(&self) -> String {
        format!("{}.{}", self.schema, self.table)
    }
}

/// Column names by role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Columns {
    /// Primary key: uuid, integer, bigint or text.
    pub id: String,
    /// Message type.
    pub kind: String,
    /// Payload: jsonb, json, text or bytea.
    pub content: String,
    /// When it occurred: timestamptz or timestamp (read as UTC).
    pub occurred_on: String,
    /// When it was recorded; null while it waits.
    pub processed_on: String,
    /// The last rejection's words.
    pub error: String,
    /// For templates and lanes.
    pub key: Option<String>,
    /// AMQP headers: jsonb.
    pub headers: Option<String>,
    /// The row's own exchange.
    pub exchange: Option<String>,
    /// The row's own routing key.
    pub routing_key: Option<String>,
}

/// How rows arrive.
#[derive(Debug, Clone)]
pub enum SourceSettings {
    /// From the write-ahead log.
    Wal(WalSettings),
    /// By claims.
    Poll(PollSettings),
}

/// The `wal` source.
#[derive(Debug, Clone)]
pub struct WalSettings {
    /// The logical replication slot.
    pub slot: String,
    /// The publication.
    pub publication: String,
    /// What to do about rows that are there before the first start.
    pub first_start: FirstStart,
    /// Recover from a lost slot by ourselves instead of halting.
    pub recover_lost_slot: bool,
}

/// What the first start does about rows that are there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstStart {
    /// Deliver them.
    Sweep,
    /// Begin with what commits from now on.
    Stream,
}

/// The `poll` source.
#[derive(Debug, Clone)]
pub struct PollSettings {
    /// Concurrent claims.
    pub workers: usize,
    /// Rows of a claim, at most.
    pub batch_messages: u32,
    /// Pause after a claim that found nothing.
    pub interval: Duration,
    /// Listen on channel `postrider` as well.
    pub notify: bool,
}

/// Rows of one claim by the retry and history sources, and of poll claims by default: enough to amortise a round trip,
/// few enough that a claim is recorded well within a second.
pub const CLAIM_MESSAGES: u32 = 400;

/// How messages are sent.
#[derive(Debug, Clone)]
pub struct PublishSettings {
    /// Template of the exchange.
    pub exchange: Template,
    /// Template of the routing key.
    pub routing_key: Template,
    /// Declare the configured exchange (durable topic) at start.
    pub declare: bool,
    /// Unconfirmed messages, a lane.
    pub window: u32,
    /// Sent and not durably recorded.
    pub exposure: u32,
    /// Confirm channels.
    pub lanes: usize,
    /// Ask for confirms.
    pub confirms: bool,
    /// Ask for returns.
    pub mandatory: bool,
    /// Delivery mode 2.
    pub persistent: bool,
    /// Rejections before a row is parked.
    pub max_attempts: u32,
    /// First pause before another attempt.
    pub retry_backoff: Duration,
    /// Longest pause before another attempt.
    pub retry_backoff_max: Duration,
    /// How long a confirm may take before the channel is thrown away.
    pub confirm_timeout: Duration,
}

/// A parsed template: literal text and `{placeholders}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template(pub Vec<Part>);

/// A piece of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Text as it stands.
    Text(String),
    /// `{id}`
    Id,
    /// `{type}`
    Type,
    /// `{key}`
    Key,
    /// `{column}`: index into [`OutboxSettings::template_columns`].
    Column(usize),
}

impl Template {
    /// The template's text, if it has no placeholder.
    pub fn fixed(&self) -> Option<&str> {
        match self.0.as_slice() {
            [] => Some(""),
            [Part::Text(text)] => Some(text),
            _ => None,
        }
    }
}

/// How verdicts are recorded.
#[derive(Debug, Clone)]
pub struct AckSettings {
    /// What becomes of a delivered row.
    pub rows: RowPolicy,
    /// Verdicts of one recording transaction, at most.
    pub batch_messages: usize,
    /// LSN feedback, and progress of kept rows, at most this late.
    pub interval: Duration,
}

/// What becomes of a delivered row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowPolicy {
    /// `processed_on` is set.
    Update,
    /// It is deleted.
    Delete,
    /// It is left as it is (wal only).
    Keep,
}
