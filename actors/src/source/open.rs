//! Opening the stream: from settings to a session that holds the slot.

use std::{sync::atomic::AtomicI32, time::Duration};

use pgwire_replication::{PgWireError, ReplicationClient};

use super::{
    slot::{self, Ours, text},
    wire::from_wire,
};
use crate::{
    database::{quote_identifier, replication_config},
    deadlines::STEP,
    error::{Error, Kind, Result},
    position::{Lsn, StreamIdentity},
    settings::{Settings, WalSettings},
};

/// The slowest clock of feedback. A second is what PostgreSQL's own receiver could afford (its default is ten), keeps a
/// monitor's lag figures fresh, and costs one small packet.
const SLOWEST_STATUS: Duration = Duration::from_secs(1);

/// A replication session that has been started: from now on it holds the slot.
///
/// It answers the server on its own clock, repeating the last durable position, also while nobody reads it.
pub struct Stream {
    pub(super) client: ReplicationClient,
    pub(super) identity: StreamIdentity,
    /// What the slot was told before: feedback never goes back behind it.
    pub(super) confirmed: Lsn,
    /// How often the session reports.
    pub(super) status_interval: Duration,
    /// The walsender's process.
    pub(super) pid: i32,
    created: bool,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("identity", &self.identity)
            .field("pid", &self.pid)
            .finish_non_exhaustive()
    }
}

impl Stream {
    /// Which stream it is.
    pub fn identity(&self) -> &StreamIdentity {
        &self.identity
    }

    /// Whether the slot was created by this opening: what was written before is not in the stream.
    pub fn created(&self) -> bool {
        self.created
    }

    /// Where the slot stood when the stream was opened.
    pub fn confirmed(&self) -> Lsn {
        self.confirmed
    }
}

/// Opens the stream: connects, makes sure of the slot (`slot::ensure`) and starts replication where the slot stands.
///
/// `known` is the stream that earlier starts have recorded progress of, if any: if it was read from this slot of this
/// cluster, then a slot that is missing was lost. `holder` is the walsender of ours
/// that may still hold the slot, and becomes this session's when it may.
///
/// # Errors
/// Those of `slot::ensure`, and of the connection.
pub async fn open(
    settings: &Settings,
    wal: &WalSettings,
    known: Option<&StreamIdentity>,
    holder: &AtomicI32,
) -> Result<Stream> {
    let (mut client, status_interval) = connect(settings, wal).await?;
    let system = asking(client.identify_system(), "identify the server").await?;
    let pid = asking(client.simple_query("SELECT pg_backend_pid()"), "identify the session").await?;
    let pid = pid.first().and_then(|row| text(row, 0).parse().ok()).unwrap_or_default();
    let known =
        known.is_some_and(|known| known.slot == wal.slot && known.system_identifier == system.system_id);
    let ours = Ours { this: pid, last: holder };
    let slot = slot::ensure(&mut client, &settings.outbox, wal, known, &ours).await?;
    ours.takes_the_slot();
    // Where the slot stands: the configuration's start LSN is 0/0, which the server reads so.
    let started = async {
        client.start().await?;
        client.wait_started().await
    };
    match tokio::time::timeout(STEP, started).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return Err(slot::refused(error, &wal.slot)),
        Err(elapsed) => return Err(Error::new(Kind::DatabaseDown, "start replication").with_source(elapsed)),
    }
    Ok(Stream {
        client,
        identity: StreamIdentity {
            slot: wal.slot.clone(),
            system_identifier: system.system_id,
            timeline: system.timeline,
        },
        confirmed: slot.confirmed,
        status_interval,
        pid,
        created: slot.created,
    })
}

/// A session that has not started, and how often to report: what the server's `wal_sender_timeout` bears.
async fn connect(settings: &Settings, wal: &WalSettings) -> Result<(ReplicationClient, Duration)> {
    let mut interval = SLOWEST_STATUS;
    loop {
        // Both names end in statements of the session as identifiers.
        let (slot, publication) = (quote_identifier(&wal.slot), quote_identifier(&wal.publication));
        let config = replication_config(&settings.database, &slot, &publication, interval)?
            .with_application_name(&wal.slot);
        let connecting = async {
            let mut client = ReplicationClient::connect_gated(config).await?;
            let sql = "SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout'";
            let rows = client.simple_query(sql).await?;
            Ok((client, rows))
        };
        let connecting = settings.database.link.attempt(connecting);
        let (client, rows) = asking(connecting, "connect for replication").await?;
        let millis = rows.first().and_then(|row| text(row, 0).parse().ok()).unwrap_or_default();
        let timeout = Duration::from_millis(millis);
        let needed = if timeout.is_zero() { SLOWEST_STATUS } else { SLOWEST_STATUS.min(timeout / 3) };
        // The interval belongs to the connection: where the server is stricter, connect once more.
        if needed >= interval {
            return Ok((client, interval));
        }
        interval = needed;
    }
}

/// Waits for an answer of the replication session, at most [`STEP`].
pub(super) async fn asking<T>(
    answer: impl Future<Output = Result<T, PgWireError>>,
    op: &'static str,
) -> Result<T> {
    match tokio::time::timeout(STEP, answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(from_wire(error, op)),
        Err(elapsed) => Err(Error::new(Kind::DatabaseDown, op).with_source(elapsed)),
    }
}
