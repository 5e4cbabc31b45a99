//! One opaque error for the whole pipeline: what went wrong as a [`Kind`], what was being done, and why.
//!
//! Policy lives in one place: [`Kind::disposition`] is an exhaustive match, so a new kind of error cannot be
//! added without deciding what the relay does about it.

use std::{borrow::Cow, error::Error as StdError, fmt};

/// What went wrong, as far as the relay's behaviour depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The configuration cannot work, or a value outside it is of a form that cannot work.
    Config,
    /// The database cannot be reached, or a connection to it broke.
    DatabaseDown,
    /// The database answers and refuses us: password, database name, `pg_hba.conf`, privileges.
    DatabaseRefused,
    /// The server is read-only (a standby, or `default_transaction_read_only`).
    DatabaseReadonly,
    /// A lock was not granted within `lock_timeout`.
    TableLocked,
    /// The outbox table, one of its columns, or a table of ours is missing or of another type.
    SchemaChanged,
    /// The server lacks a setting or an object that only its administrator can provide (`wal_level`, a publication).
    DatabaseUnprepared,
    /// The slot is gone or invalidated: what it held is no longer streamed.
    SlotLost,
    /// Another session streams from the slot.
    SlotInUse,
    /// A session of our own that has ended still holds the slot: the server has not noticed yet.
    SlotLingers,
    /// The slot is not ours to use: another plugin or another database.
    SlotForeign,
    /// The broker cannot be reached, or a connection to it broke.
    BrokerDown,
    /// The broker answers and refuses us: credentials, virtual host, permissions.
    BrokerRefused,
    /// The configured exchange does not exist.
    ExchangeMissing,
    /// A peer sent something its protocol does not allow.
    Protocol,
    /// The stage was told to stop while it waited.
    Stopped,
    /// A stage does not stop: it holds what its successor would take.
    Stuck,
    /// An invariant of ours does not hold.
    Internal,
}

/// What the relay does about an error.
///
/// Parking one row is not among these: what is wrong with a row is never an error, but that row's
/// [`Rejection`](crate::envelope::Rejection).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disposition {
    /// Wait (backoff) and try again where it was met, as often as it takes; where that cannot be, as [`Self::Rebuild`].
    /// An outage is not a verdict.
    Retry,
    /// Tear the generation down, wait (backoff), build it again; as often as it takes. An outage is not a verdict.
    Rebuild,
    /// Stay up, not ready, and say which remedy a person has to apply; look again at a slow pace.
    Halt,
    /// Another relay works: wait for our turn.
    StandBy,
    /// Stop for good: going on cannot help. Consumes the restart budget first.
    Restart,
    /// End the process at once: going on could deliver twice or not at all.
    Exit,
    /// Nothing: the stage ended because it was asked to.
    Stop,
}

impl Kind {
    /// The one policy from kinds of error to what is done about them.
    pub fn disposition(self) -> Disposition {
        match self {
            Kind::DatabaseDown | Kind::DatabaseRefused | Kind::DatabaseReadonly | Kind::TableLocked => {
                Disposition::Retry
            }
            Kind::SlotLingers | Kind::BrokerDown | Kind::BrokerRefused | Kind::ExchangeMissing => {
                Disposition::Rebuild
            }
            Kind::SchemaChanged
            | Kind::DatabaseUnprepared
            | Kind::SlotLost
            | Kind::SlotForeign
            | Kind::Config => Disposition::Halt,
            Kind::SlotInUse => Disposition::StandBy,
            Kind::Protocol | Kind::Internal => Disposition::Restart,
            Kind::Stuck => Disposition::Exit,
            Kind::Stopped => Disposition::Stop,
        }
    }

    /// The kind as one lowercase word group, for logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Config => "unusable configuration",
            Kind::DatabaseDown => "database unreachable",
            Kind::DatabaseRefused => "database refuses",
            Kind::DatabaseReadonly => "database is read-only",
            Kind::TableLocked => "table locked",
            Kind::SchemaChanged => "schema changed",
            Kind::DatabaseUnprepared => "database not prepared",
            Kind::SlotLost => "slot lost",
            Kind::SlotInUse => "slot in use",
            Kind::SlotLingers => "slot still held by our last session",
            Kind::SlotForeign => "slot is not ours",
            Kind::BrokerDown => "broker unreachable",
            Kind::BrokerRefused => "broker refuses",
            Kind::ExchangeMissing => "exchange missing",
            Kind::Protocol => "protocol violated",
            Kind::Stopped => "stopped",
            Kind::Stuck => "stage does not stop",
            Kind::Internal => "internal error",
        }
    }
}

/// The error of every fallible operation in this crate.
///
/// `Display` prints what was being done, the kind and the remedy's subject, never row contents or secrets;
/// [`Error::chain`] prints the sources once, at the edge.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    op: Cow<'static, str>,
    remedy: Option<Cow<'static, str>>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind` met while doing `op` (lowercase, no full stop: `connect to the broker`).
    pub fn new(kind: Kind, op: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, op: op.into(), remedy: None, source: None }
    }

    /// Attaches what a person can do about it, as an instruction.
    #[must_use]
    pub fn with_remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    /// Attaches the error that caused this one.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The same error as another kind, for whoever knows better what it means where it was met.
    #[must_use]
    pub fn with_kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// The kind, on which all behaviour depends.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What a person can do about it, where that is known.
    pub fn remedy(&self) -> Option<&str> {
        self.remedy.as_deref()
    }

    /// The whole chain on one line: what was being done, the kind, then each source.
    pub fn chain(&self) -> String {
        let mut line = self.to_string();
        let mut next = self.source();
        while let Some(error) = next {
            let text = error.to_string();
            if !line.ends_with(&text) {
                line.push_str(": ");
                line.push_str(text.trim_end_matches('.'));
            }
            next = error.source();
        }
        line
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.op, self.kind.as_str())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chain_is_one_line_from_what_was_done_to_the_cause() {
        let error = Error::new(Kind::DatabaseDown, "connect to the database")
            .with_source(std::io::Error::other("connection refused"));
        assert_eq!(error.chain(), "connect to the database: database unreachable: connection refused");
    }

    #[test]
    fn an_outage_never_consumes_the_restart_budget() {
        for kind in [Kind::DatabaseDown, Kind::DatabaseRefused, Kind::DatabaseReadonly, Kind::TableLocked] {
            assert_eq!(kind.disposition(), Disposition::Retry);
        }
        for kind in [Kind::BrokerDown, Kind::BrokerRefused, Kind::ExchangeMissing, Kind::SlotLingers] {
            assert_eq!(kind.disposition(), Disposition::Rebuild);
        }
    }
}
