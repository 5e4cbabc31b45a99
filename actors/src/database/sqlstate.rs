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
    match from_postgres(error, op) {
        error if error.kind() == Kind::Internal => error.with_kind(Kind::DatabaseRefused),
        error => error,
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
fn of_state(code: &SqlState) -> (Kind, Option<&'static str>) {
    match *code {
        SqlState::INVALID_PASSWORD => (Kind::DatabaseRefused, Some("correct the password in database.url")),
        SqlState::INVALID_AUTHORIZATION_SPECIFICATION => {
            (Kind::DatabaseRefused, Some("correct the user in database.url, or allow it in pg_hba.conf"))
        }
        SqlState::INVALID_CATALOG_NAME => {
            (Kind::DatabaseRefused, Some("create the database, or correct its name in database.url"))
        }
        SqlState::READ_ONLY_SQL_TRANSACTION => (Kind::DatabaseReadonly, None),
        // The server ends the session itself in these; the claim is gone with it.
        SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT => (Kind::DatabaseDown, None),
        // Trying again is the answer to a deadlock and to a lock alike.
        SqlState::LOCK_NOT_AVAILABLE
        | SqlState::T_R_DEADLOCK_DETECTED
        | SqlState::T_R_SERIALIZATION_FAILURE => (Kind::TableLocked, None),
        SqlState::INSUFFICIENT_PRIVILEGE => (
            Kind::SchemaChanged,
            Some("let `postrider migrate --role NAME` grant what the relay's role needs"),
        ),
        SqlState::UNDEFINED_TABLE
        | SqlState::UNDEFINED_COLUMN
        | SqlState::UNDEFINED_FUNCTION
        | SqlState::INVALID_SCHEMA_NAME
        | SqlState::DATATYPE_MISMATCH
        | SqlState::CANNOT_COERCE
        | SqlState::INVALID_TEXT_REPRESENTATION
        | SqlState::WRONG_OBJECT_TYPE => (Kind::SchemaChanged, Some("run `postrider check`")),
        // Classes 08 (connection), 53 (resources), 57 (operator intervention) and 58 (system) pass with time.
        ref other => match other.code().get(..2) {
            Some("08" | "53" | "57" | "58") => (Kind::DatabaseDown, None),
            Some("28") => (Kind::DatabaseRefused, None),
            _ => (Kind::Internal, None),
        },
    }
}

/// What the server said, without what it may quote of a row: DETAIL always, and the message of a data exception
/// (class 22: `invalid input syntax for type uuid: "…"`).
#[derive(Debug)]
struct Said {
    code: SqlState,
    message: Option<String>,
}

impl From<&DbError> for Said {
    fn from(error: &DbError) -> Self {
        let quotes = error.code().code().starts_with("22");
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

    #[test]
    fn the_kind_follows_the_sqlstate() {
        let cases = [
            ("08006", Kind::DatabaseDown),
            ("08P01", Kind::DatabaseDown),
            ("57P01", Kind::DatabaseDown),
            ("57P03", Kind::DatabaseDown),
            ("53300", Kind::DatabaseDown),
            ("25P03", Kind::DatabaseDown),
            ("28P01", Kind::DatabaseRefused),
            ("28000", Kind::DatabaseRefused),
            ("3D000", Kind::DatabaseRefused),
            ("25006", Kind::DatabaseReadonly),
            ("55P03", Kind::TableLocked),
            ("40P01", Kind::TableLocked),
            ("42P01", Kind::SchemaChanged),
            ("42703", Kind::SchemaChanged),
            ("42804", Kind::SchemaChanged),
            ("42501", Kind::SchemaChanged),
            ("25P02", Kind::Internal),
        ];
        for (code, kind) in cases {
            assert_eq!(of_state(&SqlState::from_code(code)).0, kind, "{code}");
        }
    }
}
