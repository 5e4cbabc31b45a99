//! The replication slot: found, created where that is right, and refused by name where it cannot be ours.
//!
//! Everything is asked on the replication session itself, so what is read describes the very server that then streams.
//! No slot that holds anything is dropped here and no other session is ended: what it holds may be all that is left of
//! rows.

use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

use pgwire_replication::{ReplicationClient, client::QueryRow};

use super::{open::asking, wire};
use crate::{
    database::{quote_identifier, quote_literal},
    error::{Error, Kind, Result},
    position::Lsn,
    settings::{OutboxSettings, WalSettings},
};

const OP: &str = "check the replication slot";

/// What a lost slot needs.
pub(super) const LOST: &str = "rows may wait that the slot no longer shows: set source.wal.on_lost_slot = \"recover\" and start \
                               the relay; it makes the slot anew and delivers every unprocessed row";

/// What a missing publication needs.
pub(super) const NO_PUBLICATION: &str = "run `postrider migrate`, which creates the publication; where it was dropped while the \
                                         slot was there, drop the slot too and set source.wal.on_lost_slot = \"recover\"";

/// A slot that may be streamed from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotState {
    /// Whether it was created just now.
    pub created: bool,
    /// What it was told last; feedback never goes back behind it.
    pub confirmed: Lsn,
}

/// Our sessions, by the process ids of their walsenders: the server may not have noticed yet that one has ended.
pub(super) struct Ours<'a> {
    /// This one.
    pub(super) this: i32,
    /// The last that may hold the slot; 0 before the first.
    pub(super) last: &'a AtomicI32,
}

impl Ours<'_> {
    /// From here on this session may hold the slot, whether we hear of it or not.
    pub(super) fn takes_the_slot(&self) {
        self.last.store(self.this, Relaxed);
    }
}

/// Makes sure that the server is prepared and the slot is ours to use, creating it where nothing can be lost by that:
/// on a first start, and where the operator asked for recovery. `known` says that this slot was streamed from before.
///
/// # Errors
/// With the remedy: [`Kind::DatabaseUnprepared`], [`Kind::DatabaseReadonly`], [`Kind::SlotForeign`],
/// [`Kind::SlotInUse`], [`Kind::SlotLingers`], [`Kind::SlotLost`].
pub(super) async fn ensure(
    client: &mut ReplicationClient,
    outbox: &OutboxSettings,
    wal: &WalSettings,
    known: bool,
    ours: &Ours<'_>,
) -> Result<SlotState> {
    server(client).await?;
    publication(client, outbox, wal).await?;
    match find(client, wal, ours).await {
        Ok(Some(state)) => return Ok(state),
        Ok(None) => {}
        // An invalidated slot holds nothing any more: the server has removed what it kept. Where recovery is asked for, it
        // makes room for a new one.
        Err(lost) if lost.kind() == Kind::SlotLost && wal.recover_lost_slot => {
            tracing::warn!(slot = wal.slot, "dropping an invalidated slot to make it anew, as configured");
            asking(
                client.simple_query(&format!("DROP_REPLICATION_SLOT {}", quote_identifier(&wal.slot))),
                OP,
            )
            .await?;
        }
        Err(error) => return Err(error),
    }
    if known && !wal.recover_lost_slot {
        return Err(Error::new(Kind::SlotLost, OP)
            .with_source(format!("slot {} was streamed from before and does not exist", wal.slot))
            .with_remedy(LOST));
    }
    create(client, wal, ours).await
}

/// The server writes logical WAL and is no standby.
async fn server(client: &mut ReplicationClient) -> Result<()> {
    let row = one(client, "SELECT pg_is_in_recovery(), current_setting('wal_level')").await?;
    if text(&row, 0) == "t" {
        return Err(Error::new(Kind::DatabaseReadonly, OP)
            .with_source("the server is a standby")
            .with_remedy("name the primary in database.direct_url"));
    }
    let level = text(&row, 1);
    if level == "logical" {
        return Ok(());
    }
    Err(Error::new(Kind::DatabaseUnprepared, OP)
        .with_source(format!("wal_level is {level}"))
        .with_remedy("as a superuser: ALTER SYSTEM SET wal_level = logical, then restart PostgreSQL"))
}

/// The publication is there before the slot, or the slot could not decode what came before it; and it has our rows.
async fn publication(
    client: &mut ReplicationClient,
    outbox: &OutboxSettings,
    wal: &WalSettings,
) -> Result<()> {
    let name = quote_literal(&wal.publication);
    let (schema, table) = (quote_literal(&outbox.schema), quote_literal(&outbox.table));
    let sql = format!(
        "SELECT p.pubinsert, EXISTS (SELECT FROM pg_publication_tables t WHERE t.pubname = p.pubname \
         AND t.schemaname = {schema} AND t.tablename = {table}) FROM pg_publication p WHERE p.pubname = {name}"
    );
    let rows = asking(client.simple_query(&sql), OP).await?;
    let fault = match rows.first() {
        None => "does not exist".to_owned(),
        Some(row) if text(row, 0) != "t" => "does not publish inserts".to_owned(),
        Some(row) if text(row, 1) != "t" => format!("does not publish table {}", outbox.name()),
        Some(_) => return Ok(()),
    };
    Err(Error::new(Kind::DatabaseUnprepared, OP)
        .with_source(format!("publication {} {fault}", wal.publication))
        .with_remedy(NO_PUBLICATION))
}

/// The slot, if there is one that we may use.
async fn find(
    client: &mut ReplicationClient,
    wal: &WalSettings,
    ours: &Ours<'_>,
) -> Result<Option<SlotState>> {
    let name = quote_literal(&wal.slot);
    let sql = format!(
        "SELECT slot_type, plugin, database, current_database(), active_pid, wal_status, confirmed_flush_lsn \
         FROM pg_replication_slots WHERE slot_name = {name}"
    );
    let rows = asking(client.simple_query(&sql), OP).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let [slot_type, plugin, database, here, active_pid, wal_status, confirmed] =
        std::array::from_fn(|column| text(row, column));
    let foreign = |what: String| {
        Error::new(Kind::SlotForeign, OP)
            .with_source(format!("slot {} {what}", wal.slot))
            .with_remedy("name another slot in source.wal.slot, or drop this one if nobody needs it")
    };
    if slot_type != "logical" {
        return Err(foreign(format!("is a {slot_type} slot, not a logical one")));
    }
    if plugin != "pgoutput" {
        return Err(foreign(format!("belongs to output plugin {plugin}, not pgoutput")));
    }
    if database != here {
        return Err(foreign(format!("belongs to database {database}, not {here}")));
    }
    if wal_status == "lost" {
        return Err(Error::new(Kind::SlotLost, OP)
            .with_source(format!("slot {} was invalidated by the server", wal.slot))
            .with_remedy(LOST));
    }
    if active_pid == ours.last.load(Relaxed).to_string() {
        return Err(Error::new(Kind::SlotLingers, OP)
            .with_source(format!("slot {} is held by process {active_pid}, our last session", wal.slot))
            .with_remedy(
                "wait: the server ends that session after wal_sender_timeout, or, where it was still creating the slot, \
                 once the transactions that were open then have ended",
            ));
    }
    if !active_pid.is_empty() {
        return Err(Error::new(Kind::SlotInUse, OP)
            .with_source(format!("slot {} is held by process {active_pid}", wal.slot)));
    }
    Ok(Some(SlotState { created: false, confirmed: confirmed.parse().unwrap_or_default() }))
}

async fn create(client: &mut ReplicationClient, wal: &WalSettings, ours: &Ours<'_>) -> Result<SlotState> {
    const OP: &str = "create the replication slot";
    let name = &wal.slot;
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if name.is_empty() || name.len() > 63 || !name.chars().all(allowed) {
        return Err(
            Error::new(Kind::Config, OP).with_source("source.wal.slot may hold a-z, 0-9 and _, 63 at most")
        );
    }
    let sql = format!("CREATE_REPLICATION_SLOT \"{name}\" LOGICAL pgoutput NOEXPORT_SNAPSHOT");
    // It waits for transactions that were open before; when the deadline passes the server goes on and the slot is there
    // at a later attempt.
    ours.takes_the_slot();
    let created = asking(client.simple_query(&sql), OP).await.map_err(|error| match error.kind() {
        Kind::DatabaseDown => error.with_remedy("end transactions that have been open for long"),
        _ => error,
    });
    match created {
        Ok(_) => {
            let state = find(client, wal, ours).await?;
            let state = state.ok_or_else(|| Error::new(Kind::SlotLost, OP).with_remedy(LOST))?;
            Ok(SlotState { created: true, ..state })
        }
        Err(error) => Err(error),
    }
}

async fn one(client: &mut ReplicationClient, sql: &str) -> Result<QueryRow> {
    let rows = asking(client.simple_query(sql), OP).await?;
    rows.into_iter().next().ok_or_else(|| Error::new(Kind::Protocol, OP).with_source("no row came back"))
}

/// The text in a column; empty where it is null.
pub(super) fn text(row: &QueryRow, column: usize) -> String {
    let value = row.get(column).and_then(Option::as_ref);
    value.map(|value| String::from_utf8_lossy(value).into_owned()).unwrap_or_default()
}

/// What a refused START_REPLICATION means, now that the slot was there a moment ago.
pub(super) fn refused(error: pgwire_replication::PgWireError, slot: &str) -> Error {
    const OP: &str = "start replication";
    let missing =
        matches!(&error, pgwire_replication::PgWireError::Server(m) if wire::sqlstate(m) == Some("42704"));
    if missing {
        return Error::new(Kind::SlotLost, OP).with_source(format!("slot {slot} is gone")).with_remedy(LOST);
    }
    wire::from_wire(error, OP)
}
