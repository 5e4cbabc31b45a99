//! From what PostgreSQL says to what the relay does about it: by SQLSTATE, never by text.

use std::{borrow::Cow, fmt};

use tokio_postgres::error::{DbError, SqlState};

use crate::error::{Error, Kind};

/// Classifies an error of a connection or a statement met while doing `op`.
///
/// A refusal is an answer about us (password, name); everything else that ends a connection is an outage, and worth
/// another try. What the server said is kept without its DETAIL, which may quote a row.
pub fn from_postgres(error: tokio_postgres::Error, op: impl Into<Cow<'static, str>>) -> Error {
    let (kind, remedy) = match error.code() {
        Some(code) => of_state(code),
        None => of_connection(&error),
    };
    let wrapped = Error::new(kind, op);
    let wrapped = match error.as_db_error() {
        Some(said) => wrapped.with_source(Said::from(said)),
        None => wrapped.with_source(error),
    };
    match remedy {
        Some(remedy) => wrapped.with_remedy(remedy),
        None => wrapped,
    }
}

/// Classifies an error met while connecting: an answer that means nothing else to us is a refusal (a database that does
/// not accept connections just now, say), and worth another try.
pub(super) fn while_connecting(error: tokio_postgres::Error, op: &'static str) -> Error {
    let error = from_postgres(error, op);
    match error.kind() {
        Kind::DatabaseDown | Kind::DatabaseRefused | Kind::DatabaseReadonly => error,
        _ => error.with_kind(Kind::DatabaseRefused).with_remedy(
            "the server's words say why it does not take this connection; the relay keeps trying",
        ),
    }
}

/// tokio-postgres keeps its own kinds private; these two texts of its own, not of the server, are the only sign of them.
fn of_connection(error: &tokio_postgres::Error) -> (Kind, Option<&'static str>) {
    match error.to_string() {
        text if text.starts_with("error performing TLS handshake") => {
            let hint = "check database.sslmode and database.ca_file against the server's certificate";
            (Kind::DatabaseRefused, Some(hint))
        }
        text if text.starts_with("invalid configuration") => {
            (Kind::DatabaseRefused, Some("put the user's password into database.url or database.url_file"))
        }
        // The server and we disagree about a value's type: the column has changed under us.
        text if text.starts_with("error deserializing column")
            || text.starts_with("error serializing parameter") =>
        {
            (Kind::SchemaChanged, None)
        }
        _ => (Kind::DatabaseDown, None),
    }
}

/// The kind of error a SQLSTATE stands for, and what a person can do where that is more than the kind says.
pub(crate) fn of_state(code: &SqlState) -> (Kind, Option<&'static str>) {
    match *code {
        SqlState::INVALID_PASSWORD => (Kind::DatabaseRefused, Some("correct the password in database.url")),
        SqlState::INVALID_AUTHORIZATION_SPECIFICATION => {
            (Kind::DatabaseRefused, Some("correct the user in database.url, or allow it in pg_hba.conf"))
        }
        SqlState::INVALID_CATALOG_NAME => {
            (Kind::DatabaseRefused, Some("create the database, or correct its name in database.url"))
        }
        SqlState::READ_ONLY_SQL_TRANSACTION => (Kind::DatabaseReadonly, None),
        // The server ends the session itself in these; the claim is gone with it. Whether a commit came through is
        // unknown in the last one: what it held is repeated.
        SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT | SqlState::T_R_STATEMENT_COMPLETION_UNKNOWN => {
            (Kind::DatabaseDown, None)
        }
        // Trying again is the answer to a deadlock and to a lock alike.
        SqlState::LOCK_NOT_AVAILABLE => (Kind::TableLocked, None),
        SqlState::INSUFFICIENT_PRIVILEGE => (
            Kind::SchemaChanged,
            Some("let `postrider migrate --role NAME` grant what the relay's role needs"),
        ),
        // A statement of ours that no server could read is a fault of ours.
        SqlState::SYNTAX_ERROR => (Kind::Internal, None),
        SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE => (
            Kind::SchemaChanged,
            Some("run `postrider check`; a table that publishes updates needs a replica identity"),
        ),
        SqlState::T_R_INTEGRITY_CONSTRAINT_VIOLATION => (Kind::SchemaChanged, Some(REFUSED)),
        SqlState::DATA_CORRUPTED | SqlState::INDEX_CORRUPTED => (
            Kind::DatabaseUnprepared,
            Some("the server reports damaged data: its administrator has to repair or restore it"),
        ),
        ref other => match other.code() {
            // `transaction_timeout`, since PostgreSQL 17.
            "25P04" => (Kind::DatabaseDown, None),
            code => of_class(code.get(..2).unwrap_or_default()),
        },
    }
}

/// What to do where the outbox table itself stands against the relay.
const REFUSED: &str = "find the trigger, constraint or type of the outbox table that refuses the relay's statement (the \
                       server's log has its words), and mend that; `postrider check` helps";

/// A class of SQLSTATEs: its first two characters.
fn of_class(class: &str) -> (Kind, Option<&'static str>) {
    match class {
        // Connection, resources, operator intervention, system: these pass with time.
        "08" | "53" | "57" | "58" => (Kind::DatabaseDown, None),
        "28" => (Kind::DatabaseRefused, None),
        // Rolled back for somebody else's sake.
        "40" => (Kind::TableLocked, None),
        // Data, constraints, triggered changes, functions, `RAISE`: what the table's owner put there.
        "09" | "22" | "23" | "27" | "2F" | "38" | "39" | "44" | "54" | "P0" => {
            (Kind::SchemaChanged, Some(REFUSED))
        }
        // Names and types that are not what they were.
        "3F" | "42" => (Kind::SchemaChanged, Some("run `postrider check`")),
        "0A" => {
            (Kind::DatabaseUnprepared, Some("run `postrider check`: this server cannot do what is needed"))
        }
        _ => (Kind::Internal, None),
    }
}

/// What the server said, without what it may quote of a row: DETAIL always, and the message of a data exception
/// (class 22: `invalid input syntax for type uuid: "…"`) or of a `RAISE` (class P0: whatever its author put there).
#[derive(Debug)]
struct Said {
    code: SqlState,
    message: Option<String>,
}

impl From<&DbError> for Said {
    fn from(error: &DbError) -> Self {
        let quotes = ["22", "P0"].iter().any(|class| error.code().code().starts_with(class));
        Self { code: error.code().clone(), message: (!quotes).then(|| error.message().to_owned()) }
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.message {
            Some(message) => write!(f, "{message} (SQLSTATE {})", self.code.code()),
            None => write!(f, "SQLSTATE {}", self.code.code()),
        }
    }
}

impl std::error::Error for Said {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Disposition;

    #[test]
    fn the_disposition_follows_the_sqlstate() {
        use Disposition::{Halt, Restart, Retry};
        let cases = [
            // Passes with time: waited out where it was met.
            ("08006", Kind::DatabaseDown, Retry),
            ("08P01", Kind::DatabaseDown, Retry),
            ("57P01", Kind::DatabaseDown, Retry),
            ("57P03", Kind::DatabaseDown, Retry),
            ("57014", Kind::DatabaseDown, Retry),
            ("53300", Kind::DatabaseDown, Retry),
            ("53100", Kind::DatabaseDown, Retry),
            ("58030", Kind::DatabaseDown, Retry),
            ("25P03", Kind::DatabaseDown, Retry),
            ("25P04", Kind::DatabaseDown, Retry),
            ("40003", Kind::DatabaseDown, Retry),
            ("28P01", Kind::DatabaseRefused, Retry),
            ("28000", Kind::DatabaseRefused, Retry),
            ("3D000", Kind::DatabaseRefused, Retry),
            ("25006", Kind::DatabaseReadonly, Retry),
            ("55P03", Kind::TableLocked, Retry),
            ("40P01", Kind::TableLocked, Retry),
            ("40001", Kind::TableLocked, Retry),
            // Needs a person: said with a remedy.
            ("42P01", Kind::SchemaChanged, Halt),
            ("42703", Kind::SchemaChanged, Halt),
            ("42804", Kind::SchemaChanged, Halt),
            ("42883", Kind::SchemaChanged, Halt),
            ("42704", Kind::SchemaChanged, Halt),
            ("42501", Kind::SchemaChanged, Halt),
            ("3F000", Kind::SchemaChanged, Halt),
            ("55000", Kind::SchemaChanged, Halt),
            ("22P02", Kind::SchemaChanged, Halt),
            ("22001", Kind::SchemaChanged, Halt),
            ("23505", Kind::SchemaChanged, Halt),
            ("23514", Kind::SchemaChanged, Halt),
            ("27000", Kind::SchemaChanged, Halt),
            ("40002", Kind::SchemaChanged, Halt),
            ("44000", Kind::SchemaChanged, Halt),
            ("54000", Kind::SchemaChanged, Halt),
            ("P0001", Kind::SchemaChanged, Halt),
            ("0A000", Kind::DatabaseUnprepared, Halt),
            ("XX001", Kind::DatabaseUnprepared, Halt),
            ("XX002", Kind::DatabaseUnprepared, Halt),
            // Nobody has an explanation.
            ("25P02", Kind::Internal, Restart),
            ("26000", Kind::Internal, Restart),
            ("42601", Kind::Internal, Restart),
            ("XX000", Kind::Internal, Restart),
        ];
        for (code, kind, disposition) in cases {
            let (got, remedy) = of_state(&SqlState::from_code(code));
            assert_eq!((got, got.disposition()), (kind, disposition), "{code}");
            assert!(disposition != Halt || remedy.is_some(), "{code} halts without a remedy");
        }
    }
}
