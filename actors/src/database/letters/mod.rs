//! Rejected rows as an operator sees and moves them: those that wait for another attempt, and those that are parked.
//!
//! A requeue moves a dead letter into the retries in one statement, which also sets its outbox row back to *waiting for
//! retry*; from there it is published as any retry is. So at each moment it is in exactly one of the two tables until
//! its delivery is recorded, whatever is killed when. The copy is complete: the outbox row may be gone meanwhile.

mod look;
mod moves;

use std::fmt;

use serde::Serialize;

use crate::envelope::{Reason, UnixMicros};

pub use look::{list, show};
pub use moves::{count, discard, requeue};

/// Where rejected rows are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Shelf {
    /// In `postrider_dead_letters`, until a person requeues or discards them.
    Parked,
    /// In `postrider_retries`, until their next attempt.
    Retrying,
}

/// Which of them; everything that is set must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// The class of the last rejection.
    pub reason: Option<Reason>,
    /// The message type, exactly.
    pub kind: Option<String>,
    /// Parked (waiting ones: last rejected) at this time or later.
    pub from: Option<UnixMicros>,
    /// Before this time.
    pub to: Option<UnixMicros>,
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("all")?;
        if let Some(reason) = self.reason {
            write!(f, " of reason {}", reason.as_str())?;
        }
        if let Some(kind) = &self.kind {
            write!(f, " of type {kind:?}")?;
        }
        if let Some(from) = self.from {
            write!(f, " from {from} µs")?;
        }
        match self.to {
            Some(to) => write!(f, " before {to} µs"),
            None => Ok(()),
        }
    }
}

/// A rejected row without its content. Times are RFC 3339 in UTC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Letter {
    /// Its place in its table: newer ones have higher ones.
    #[serde(skip)]
    pub seq: i64,
    /// The row's id, which is the message's `message_id`.
    pub id: String,
    /// The message type.
    #[serde(rename = "type")]
    pub kind: String,
    /// The class of the last rejection.
    pub reason: String,
    /// The words it came with.
    pub detail: String,
    /// How often it was rejected, since its last requeue.
    pub attempts: i32,
    /// The row's own exchange, where it names one.
    pub exchange: Option<String>,
    /// The row's own routing key, where it names one.
    pub routing_key: Option<String>,
    /// Its key column.
    pub key: Option<String>,
    /// When the row says it occurred.
    pub occurred_on: Option<String>,
    /// The first rejection of all.
    pub first_failed_at: String,
    /// The last one.
    pub last_failed_at: String,
    /// When it was parked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parked_at: Option<String>,
    /// When the next attempt is due.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_attempt_at: Option<String>,
    /// `json`, `text` or `bytes`.
    pub content_kind: String,
    /// The size of its content.
    pub content_bytes: i64,
}

/// A rejected row with everything it is published from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened {
    /// Where it is.
    pub shelf: Shelf,
    /// What the list shows of it.
    pub letter: Letter,
    /// The JSON text of its headers column.
    pub headers: Option<String>,
    /// JSON object text of further columns that templates name.
    pub columns: Option<String>,
    /// The body, byte for byte.
    pub content: Vec<u8>,
}

/// What is to be moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// These, all of them or none.
    Ids(Vec<String>),
    /// Whatever the filter lets through, up to the newest there is when the move begins.
    All(Filter),
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Selection::All(filter) => filter.fmt(f),
            Selection::Ids(ids) => {
                const SHOWN: usize = 20;
                write!(f, "{:?}", &ids[..ids.len().min(SHOWN)])?;
                match ids.len().saturating_sub(SHOWN) {
                    0 => Ok(()),
                    more => write!(f, " and {more} more"),
                }
            }
        }
    }
}

/// What a move came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Moved {
    /// So many dead letters were moved.
    Done(u64),
    /// Nothing was: these ids are not parked.
    NotParked(Vec<String>),
}

/// An id as the tables spell it, from how a person may: `id_type` is the type of the outbox table's id column.
///
/// # Errors
/// One line that names the id, where it cannot be one of that type.
pub fn spell_id(given: &str, id_type: &str) -> Result<String, String> {
    let given = given.trim();
    if given.is_empty() {
        return Err("an id is empty".to_owned());
    }
    let refused = |what: &str| format!("{given:?} is no id of this outbox: its ids are {what}");
    match id_type {
        "uuid" => {
            let digits: String = given.chars().filter(|c| !matches!(c, '-' | '{' | '}')).collect();
            if digits.len() != 32 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(refused("UUIDs"));
            }
            let digits = digits.to_ascii_lowercase();
            let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &digits[part]);
            Ok(parts.join("-"))
        }
        "smallint" | "integer" | "bigint" => {
            given.parse::<i64>().map(|number| number.to_string()).map_err(|_| refused("whole numbers"))
        }
        _ if given.contains('\0') => Err(refused("text, which holds no NUL")),
        _ => Ok(given.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_spelled_as_the_tables_do() {
        let uuid = "0b8f3f6e-6f63-4d0e-9d6b-3a7f0b1c2d3e";
        for given in [uuid, &uuid.to_uppercase(), &format!(" {{{uuid}}} "), &uuid.replace('-', "")] {
            assert_eq!(spell_id(given, "uuid").as_deref(), Ok(uuid), "{given}");
        }
        assert_eq!(spell_id("+007", "bigint").as_deref(), Ok("7"));
        assert_eq!(spell_id("A-7 b", "text").as_deref(), Ok("A-7 b"));
    }

    #[test]
    fn what_cannot_be_an_id_is_named() {
        for (given, id_type, said) in [
            ("17", "uuid", "\"17\" is no id of this outbox: its ids are UUIDs"),
            ("x", "integer", "\"x\" is no id of this outbox: its ids are whole numbers"),
            ("ü", "uuid", "UUIDs"),
            ("a\0", "text", "NUL"),
            ("  ", "text", "an id is empty"),
        ] {
            let refused = spell_id(given, id_type).unwrap_err();
            assert!(refused.contains(said), "{refused}");
        }
    }
}
