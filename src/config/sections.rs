//! The sections of the configuration. A field's name is its key; its default and the reason are in [`super::defaults`].

use std::{net::SocketAddr, path::PathBuf};

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use super::{
    defaults,
    secret::Url,
    words::{AckRows, FirstStart, OnLostSlot, SourceMode, SslMode, Wake},
};

/// Declares a section: its fields, and the value each has when the key is absent.
macro_rules! section {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: $type:ty = $default:expr,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name { $($(#[$doc])* pub $field: $type,)+ }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }
    };
}

section! {
    /// `[database]`
    Database {
        /// For SQL; may lead through a transaction pooler.
        url: Url = defaults::DATABASE_URL.into(),
        /// A file that holds `url`.
        url_file: Option<PathBuf> = None,
        /// For replication, `LISTEN` and migrations; `url` where unset.
        direct_url: Option<Url> = None,
        /// A file that holds `direct_url`.
        direct_url_file: Option<PathBuf> = None,
        /// How TLS is used.
        sslmode: SslMode = SslMode::Prefer,
        /// Trusted authorities (PEM).
        ca_file: Option<PathBuf> = None,
        /// Our certificate (PEM).
        cert_file: Option<PathBuf> = None,
        /// Its key (PEM).
        key_file: Option<PathBuf> = None,
        /// Where postrider's own tables are.
        schema: String = defaults::SCHEMA.into(),
    }
}

section! {
    /// `[broker]`
    Broker {
        /// AMQP or AMQPS.
        url: Url = defaults::BROKER_URL.into(),
        /// A file that holds `url`.
        url_file: Option<PathBuf> = None,
        /// Trusted authorities (PEM).
        ca_file: Option<PathBuf> = None,
        /// Our certificate (PEM).
        cert_file: Option<PathBuf> = None,
        /// Its key (PEM).
        key_file: Option<PathBuf> = None,
    }
}

section! {
    /// `[outbox]`
    Outbox {
        /// `table` or `schema.table`.
        table: String = defaults::TABLE.into(),
        /// Column names by role.
        columns: Columns = Columns::default(),
    }
}

section! {
    /// `[outbox.columns]`
    Columns {
        /// Primary key.
        id: String = defaults::columns::ID.into(),
        /// Message type.
        r#type: String = defaults::columns::TYPE.into(),
        /// Payload.
        content: String = defaults::columns::CONTENT.into(),
        /// When it occurred.
        occurred_on: String = defaults::columns::OCCURRED_ON.into(),
        /// When it was recorded.
        processed_on: String = defaults::columns::PROCESSED_ON.into(),
        /// What the last rejection said.
        error: String = defaults::columns::ERROR.into(),
        /// For templates.
        key: Option<String> = None,
        /// AMQP headers (`jsonb`).
        headers: Option<String> = None,
        /// The row's own exchange.
        exchange: Option<String> = None,
        /// The row's own routing key.
        routing_key: Option<String> = None,
    }
}

section! {
    /// `[source]`
    Source {
        /// How rows arrive.
        mode: SourceMode = SourceMode::Wal,
        /// For `mode = "wal"`.
        wal: Wal = Wal::default(),
        /// For `mode = "poll"`.
        poll: Poll = Poll::default(),
    }
}

section! {
    /// `[source.wal]`
    Wal {
        /// The slot, which `run` creates.
        slot: String = defaults::SLOT.into(),
        /// The publication, which `migrate` creates.
        publication: String = defaults::PUBLICATION.into(),
        /// What to do about a lost slot.
        on_lost_slot: OnLostSlot = OnLostSlot::Halt,
        /// What to do about rows that were there before; unset means `sweep`, and is refused with `ack.rows = "keep"`.
        first_start: Option<FirstStart> = None,
    }
}

section! {
    /// `[source.poll]`
    Poll {
        /// Claims at a time.
        workers: u32 = defaults::WORKERS,
        /// Rows of a claim, at most.
        batch_messages: u32 = defaults::POLL_BATCH_MESSAGES,
        /// Pause after a claim that found nothing.
        interval_ms: u64 = defaults::POLL_INTERVAL_MS,
        /// What else ends that pause.
        wake: Wake = Wake::Poll,
    }
}

section! {
    /// `[publish]`
    Publish {
        /// Template of the exchange.
        exchange: String = defaults::EXCHANGE.into(),
        /// Template of the routing key.
        routing_key: String = defaults::ROUTING_KEY.into(),
        /// Declare the exchange at start.
        declare: bool = false,
        /// Unconfirmed messages, a lane.
        window_messages: u32 = defaults::WINDOW_MESSAGES,
        /// Sent and not yet recorded; unset depends on the mode.
        exposure_messages: Option<u32> = None,
        /// Confirm channels.
        lanes: u32 = defaults::LANES,
        /// Ask the broker to confirm.
        confirms: bool = true,
        /// Ask the broker to return what it cannot route.
        mandatory: bool = true,
        /// Ask the broker to store.
        persistent: bool = true,
        /// Rejections before a row is parked.
        max_attempts: u32 = defaults::MAX_ATTEMPTS,
        /// Before the second attempt.
        retry_backoff_ms: u64 = defaults::RETRY_BACKOFF_MS,
        /// Between attempts, at most.
        retry_backoff_max_ms: u64 = defaults::RETRY_BACKOFF_MAX_MS,
        /// Then the channel is thrown away.
        confirm_timeout_ms: u64 = defaults::CONFIRM_TIMEOUT_MS,
    }
}

section! {
    /// `[ack]`
    Ack {
        /// What becomes of a delivered row.
        rows: AckRows = AckRows::Update,
        /// Verdicts of a recording transaction, at most.
        batch_messages: u32 = defaults::ACK_BATCH_MESSAGES,
        /// LSN feedback, at most this late.
        interval_ms: u64 = defaults::ACK_INTERVAL_MS,
    }
}

section! {
    /// `[credits]`
    Credits {
        /// Messages held, at most.
        messages: u32 = defaults::CREDIT_MESSAGES,
        /// Their bytes, at most.
        bytes: u64 = defaults::CREDIT_BYTES,
    }
}

section! {
    /// `[cleanup]`
    Cleanup {
        /// Age at which recorded rows are deleted; 0 is never.
        retention_secs: u64 = defaults::RETENTION_SECS,
        /// Pause between looks.
        interval_secs: u64 = defaults::CLEANUP_INTERVAL_SECS,
        /// Rows of one transaction.
        batch_rows: u32 = defaults::CLEANUP_BATCH_ROWS,
    }
}

section! {
    /// `[admin]`
    Admin {
        /// Address and port.
        #[serde(deserialize_with = "address")]
        listen: SocketAddr = defaults::LISTEN.parse().expect("the default address is well-formed"),
        /// Tokens that may change things, one a line.
        token_file: Option<PathBuf> = None,
        /// Tokens that may look, one a line.
        read_token_file: Option<PathBuf> = None,
    }
}

section! {
    /// `[shutdown]`
    Shutdown {
        /// How long SIGTERM waits for what is in flight.
        timeout_ms: u64 = defaults::SHUTDOWN_TIMEOUT_MS,
    }
}

fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|_| {
        D::Error::custom(format!(
            "found {text:?}, allowed: an IP address and a port, such as \"127.0.0.1:9464\""
        ))
    })
}
