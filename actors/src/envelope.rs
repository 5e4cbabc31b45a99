//! What travels through the pipeline: rows, messages, verdicts, and the batches that carry them from stage to stage.
//!
//! ```text
//!  Source ──RawBatch──▶ Decoder ──MessageBatch──▶ Publisher ──Settled──▶ Acker
//! ```
//!
//! A batch knows its [`Origin`], which no stage between source and acker looks into: a claim travels through them as
//! one owned value, and what must be recorded is recorded by whom it belongs to.

use bytes::Bytes;
use lapin::{BasicProperties, types::ShortString};

use crate::{
    credit::Credit,
    ledger::Mark,
    position::{Lsn, Position},
    source::claim::Claim,
};

/// Microseconds since 1970-01-01 00:00 UTC.
pub type UnixMicros = i64;

/// What the content column holds, by its type: decides the message's `content_type`, and how the content is read back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ContentKind {
    /// `json` or `jsonb`: the content is its text.
    #[default]
    Json,
    /// A character type: the content is its text.
    Text,
    /// `bytea`: the content is its bytes.
    Bytes,
}

impl ContentKind {
    /// The word in `postrider_retries.content_kind` and `postrider_dead_letters.content_kind`.
    pub fn as_str(self) -> &'static str {
        match self {
            ContentKind::Json => "json",
            ContentKind::Text => "text",
            ContentKind::Bytes => "bytes",
        }
    }

    /// The kind behind a word of our tables.
    pub fn from_word(word: &str) -> Option<Self> {
        [ContentKind::Json, ContentKind::Text, ContentKind::Bytes]
            .into_iter()
            .find(|kind| kind.as_str() == word)
    }

    /// The kind of a column of type `name` as `pg_type.typname` spells it: what is neither JSON nor `bytea` is text.
    pub fn of_type(name: &str) -> Self {
        match name {
            "json" | "jsonb" => ContentKind::Json,
            "bytea" => ContentKind::Bytes,
            _ => ContentKind::Text,
        }
    }
}

/// One outbox row as its source read it: the text of each column that is used, nothing parsed yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Row {
    /// The id's text; the message's `message_id`.
    pub id: Bytes,
    /// The type's text.
    pub kind: Bytes,
    /// The content as it is published, byte for byte.
    pub content: Bytes,
    /// What the content column holds.
    pub content_kind: ContentKind,
    /// When the row says it occurred.
    pub occurred_on: Option<UnixMicros>,
    /// The key column, where configured.
    pub key: Option<Bytes>,
    /// The headers column's JSON text, where configured.
    pub headers: Option<Bytes>,
    /// The exchange column, where configured.
    pub exchange: Option<Bytes>,
    /// The routing key column, where configured.
    pub routing_key: Option<Bytes>,
    /// Further columns that templates name, in the order of [`OutboxSettings::template_columns`].
    ///
    /// [`OutboxSettings::template_columns`]: crate::settings::OutboxSettings::template_columns
    pub columns: Box<[Option<Bytes>]>,
    /// How often this row was rejected before (0 unless it comes from the retries).
    pub attempts: u32,
    /// Whether the broker closed a channel over it the last time: it is sent alone from the start.
    pub refused: bool,
}

impl Row {
    /// What the row costs in bytes: what it keeps in memory, with a little for the bookkeeping around it.
    pub fn bytes(&self) -> usize {
        let optional = [&self.key, &self.headers, &self.exchange, &self.routing_key];
        self.id.len()
            + self.kind.len()
            + self.content.len()
            + optional.iter().copied().chain(self.columns.iter()).flatten().map(Bytes::len).sum::<usize>()
            + 64
    }
}

/// Where a streamed row stands; claimed rows have no place in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Its position in the stream.
    pub position: Position,
    /// The 32-bit id of its transaction, as BEGIN carries it (no epoch).
    pub xid: u32,
}

/// A row under way, with what is needed to record its verdict.
#[derive(Debug)]
pub struct Envelope {
    /// Its number among everything of its origin: the ledger's, or the index within the claim.
    pub number: u64,
    /// Its place in the log, if it was streamed.
    pub place: Option<Place>,
    /// When it was committed (streamed) or says it occurred (claimed), by the database's clock.
    pub committed_at: Option<UnixMicros>,
    /// The row itself, kept until the verdict: a rejection copies it.
    pub row: Row,
    /// What it costs of `credits.bytes`; 1 of `credits.messages` goes with it.
    pub bytes: u32,
}

/// A row that passed validation, ready to be sent.
#[derive(Debug)]
pub struct Message {
    /// The row under way. Its `row.content` is the body, its `row.id` the `message_id`.
    pub envelope: Envelope,
    /// The exchange to publish to.
    pub exchange: ShortString,
    /// Whether `exchange` is the row's own (its column) rather than the configured one: then its absence is the row's
    /// fault, otherwise the world's.
    pub own_exchange: bool,
    /// The routing key.
    pub routing_key: ShortString,
    /// All properties, `message_id` among them.
    pub properties: BasicProperties,
}

/// The durable answer to what became of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The broker acknowledged it and did not return it.
    Delivered,
    /// The broker's answer about this very message, or our own validation, says no.
    Rejected(Rejection),
    /// The outcome is unknown: publish again, with the same `message_id` and body.
    Abandoned,
}

/// Why a message was rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// What kind of answer it was: a closed set, for labels and filters.
    pub reason: Reason,
    /// The broker's own words, or what validation found; never row contents.
    pub detail: String,
}

/// The kinds of rejection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Returned by the broker: no queue is bound for it (312).
    Unroutable,
    /// Negatively acknowledged, by a queue that is full and rejects for example.
    Nacked,
    /// The row's own exchange does not exist (404).
    ExchangeMissing,
    /// The broker closed the channel over this very message.
    Refused,
    /// AMQP cannot carry it, or not within this broker's frames: refused before it was sent, or by a close of the whole
    /// connection. Trying again cannot help, and would cost every row a reconnection.
    Invalid,
}

impl Reason {
    /// Every reason, for metrics that are present from the start.
    pub const ALL: [Reason; 5] =
        [Reason::Unroutable, Reason::Nacked, Reason::ExchangeMissing, Reason::Refused, Reason::Invalid];

    /// The name in tables, labels and filters.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Unroutable => "unroutable",
            Reason::Nacked => "nacked",
            Reason::ExchangeMissing => "exchange_missing",
            Reason::Refused => "refused",
            Reason::Invalid => "invalid",
        }
    }

    /// Whether another attempt could end otherwise. If not, the row is parked at its first rejection.
    pub fn is_final(self) -> bool {
        matches!(self, Reason::Invalid)
    }
}

/// A message and its verdict.
#[derive(Debug)]
pub struct Settlement {
    /// The row under way.
    pub envelope: Envelope,
    /// What became of it.
    pub verdict: Verdict,
    /// Whether it was sent, and holds a share of the exposure until it is recorded.
    pub exposed: bool,
}

/// An element of the stream that needs no publishing: the end of a transaction, a keepalive, a row that was recorded
/// before a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Passed {
    /// Its number in the stream.
    pub number: u64,
    /// What settling it lets the relay say.
    pub mark: Mark,
}

/// Where a batch comes from, and so who records it.
#[derive(Debug)]
pub enum Origin {
    /// The replication stream: recorded by position.
    Stream,
    /// A claim: its connection and open transaction travel with the batch. Dropping it rolls back.
    Claim(Box<Claim>),
}

/// One event of the replication stream, as it came.
#[derive(Debug, Clone)]
pub enum StreamEvent {
    /// BEGIN of a transaction that commits at `commit`.
    Begin {
        /// Its commit LSN (`final_lsn`).
        commit: Lsn,
        /// Its 32-bit transaction id.
        xid: u32,
        /// When it committed, by the database's clock.
        committed_at: UnixMicros,
    },
    /// One `pgoutput` message other than BEGIN and COMMIT, undecoded.
    Change(Bytes),
    /// COMMIT; `end` is the LSN after it, the only one a slot may resume on.
    Commit {
        /// The LSN after the commit record.
        end: Lsn,
    },
    /// Nothing for us up to here: the server's `wal_end` in a keepalive.
    KeepAlive {
        /// The server's position.
        end: Lsn,
    },
}

/// What a source took, undecoded.
#[derive(Debug)]
pub enum Raw {
    /// Events of the replication stream, in stream order.
    Stream(Vec<StreamEvent>),
    /// Rows of a claim, in claim order.
    Rows(Vec<Row>),
}

/// From a source to the decoder.
#[derive(Debug)]
pub struct RawBatch {
    /// Who records it.
    pub origin: Origin,
    /// What was taken.
    pub raw: Raw,
    /// Pays for every message in it.
    pub credit: Credit,
}

/// From the decoder to the publisher.
#[derive(Debug)]
pub struct MessageBatch {
    /// Who records it.
    pub origin: Origin,
    /// To be published, in order.
    pub messages: Vec<Message>,
    /// Refused by validation: their verdict is known already.
    pub refused: Vec<Settlement>,
    /// Needs no publishing.
    pub passed: Vec<Passed>,
    /// Pays for `messages` and `refused`.
    pub credit: Credit,
}

/// From the publisher to the acker: verdicts, as they become known.
///
/// Of a claim there is exactly one, with a verdict for each of its messages; of the stream there are as many as there
/// were moments with news.
#[derive(Debug)]
pub struct Settled {
    /// Who records it.
    pub origin: Origin,
    /// Verdicts. A streamed message never comes back `Abandoned`: it is published again by the lane that has it, or
    /// dropped with its generation.
    pub settlements: Vec<Settlement>,
    /// Needs no recording but a place in the ledger.
    pub passed: Vec<Passed>,
    /// Pays for `settlements` until they are recorded.
    pub credit: Credit,
    /// Their share of the exposure, until they are durably recorded.
    pub exposure: Credit,
}
