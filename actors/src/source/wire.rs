//! What the replication connection's errors mean.
//!
//! `pgwire-replication` keeps a server's error as its message followed by `(SQLSTATE xxxxx)`; the message may be in any
//! language, so the code alone decides.

use pgwire_replication::PgWireError;
use tokio_postgres::error::SqlState;

use crate::{
    database::of_sql_state,
    error::{Error, Kind},
};

/// Classifies an error of the replication connection met while doing `op`.
pub(super) fn from_wire(error: PgWireError, op: &'static str) -> Error {
    let (kind, remedy) = match &error {
        PgWireError::Server(message) => of_state(sqlstate(message)),
        PgWireError::Auth(_) => (Kind::DatabaseRefused, Some("correct the password in database.direct_url")),
        PgWireError::Tls(_) => (
            Kind::DatabaseRefused,
            Some("check database.sslmode and database.ca_file against the server's certificate"),
        ),
        PgWireError::Protocol(_) | PgWireError::MessageTooLarge { .. } => (Kind::Protocol, None),
        // The socket, or the task that reads it, is gone.
        _ => (Kind::DatabaseDown, None),
    };
    let wrapped = Error::new(kind, op).with_source(error);
    match remedy {
        Some(remedy) => wrapped.with_remedy(remedy),
        None => wrapped,
    }
}

/// The SQLSTATE at the end of a server's error, if there is one.
pub(super) fn sqlstate(message: &str) -> Option<&str> {
    let (_, code) = message.strip_suffix(')')?.rsplit_once("(SQLSTATE ")?;
    (code.len() == 5).then_some(code)
}

fn of_state(code: Option<&str>) -> (Kind, Option<&'static str>) {
    match code {
        Some("28P01") => (Kind::DatabaseRefused, Some("correct the password in database.direct_url")),
        Some("28000") => (
            Kind::DatabaseRefused,
            Some(
                "correct the user in database.direct_url, or allow its replication connections in pg_hba.conf",
            ),
        ),
        Some("3D000") => {
            (Kind::DatabaseRefused, Some("create the database, or correct its name in database.direct_url"))
        }
        Some("42501") => {
            (Kind::DatabaseRefused, Some("as a superuser: ALTER ROLE <the relay's role> REPLICATION"))
        }
        Some("25006") => (Kind::DatabaseReadonly, None),
        Some("55006") => (Kind::SlotInUse, None),
        // Invalidated (`max_slot_wal_keep_size`, `idle_replication_slot_timeout`), or its WAL is gone.
        Some("55000" | "58P01") => (Kind::SlotLost, Some(super::slot::LOST)),
        Some("42704") => (Kind::DatabaseUnprepared, Some(super::slot::NO_PUBLICATION)),
        Some("53400") => (
            Kind::DatabaseUnprepared,
            Some("raise max_replication_slots (needs a restart), or drop a slot nobody uses"),
        ),
        // All others mean what they mean elsewhere.
        Some(code) => of_sql_state(&SqlState::from_code(code)),
        // What has no code may pass with time.
        None => (Kind::DatabaseDown, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_decides_in_whatever_language_the_message_is() {
        for (code, kind) in [
            ("55006", Kind::SlotInUse),
            ("55000", Kind::SlotLost),
            ("28P01", Kind::DatabaseRefused),
            ("57P01", Kind::DatabaseDown),
            ("53300", Kind::DatabaseDown),
            ("42704", Kind::DatabaseUnprepared),
            ("XX000", Kind::Internal),
        ] {
            let error = PgWireError::Server(format!("Slot »a« (aktiv) (SQLSTATE {code})"));
            assert_eq!(from_wire(error, "test").kind(), kind, "{code}");
        }
    }

    #[test]
    fn a_message_without_a_code_is_an_outage() {
        for message in ["unknown server error", "(SQLSTATE )", "SQLSTATE 55006"] {
            assert_eq!(sqlstate(message), None);
            let error = PgWireError::Server(message.to_owned());
            assert_eq!(from_wire(error, "test").kind(), Kind::DatabaseDown);
        }
    }
}
