//! The log of the model: transactions one after the other, as the decoder is given them.

use crate::{decode::pgoutput::build, envelope::StreamEvent, position::Lsn};

const OUTBOX: u32 = 7;
const ORDERS: u32 = 8;
/// A transaction that was committed: rows of the outbox, rows of another table between them, and whether the server has
/// nothing for us after it and says so.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transaction {
    pub(super) rows: u8,
    pub(super) others: u8,
    pub(super) keepalive: bool,
}

pub(super) fn commit_of(n: usize) -> Lsn {
    Lsn(100 * (n as u64 + 1))
}

pub(super) fn end_of(n: usize) -> Lsn {
    Lsn(commit_of(n).0 + 10)
}

/// The row's id says where it is: its transaction, and which insert of that it is.
pub(super) fn id(n: usize, insert: u64) -> String {
    format!("{n}.{insert}")
}

/// The inserts of a transaction: whether each is into the outbox.
pub(super) fn inserts(transaction: Transaction) -> impl Iterator<Item = bool> {
    let Transaction { rows, others, .. } = transaction;
    (0..rows.max(others))
        .flat_map(move |n| [(n < others).then_some(false), (n < rows).then_some(true)].into_iter().flatten())
}

pub(super) fn relations() -> [StreamEvent; 2] {
    let columns = [("id", 25), ("type", 1043), ("content", 3802), ("occurred_on_utc", 1184)];
    [
        StreamEvent::Change(build::relation(OUTBOX, "public", "outbox_messages", &columns)),
        StreamEvent::Change(build::relation(ORDERS, "public", "orders", &[("id", 23)])),
    ]
}

pub(super) fn row(n: usize, insert: u64, outbox: bool) -> StreamEvent {
    let id = id(n, insert);
    let time: &[u8] = b"2026-01-02 03:04:05+00";
    StreamEvent::Change(if outbox {
        build::insert(OUTBOX, &[Some(id.as_bytes()), Some(b"placed"), Some(b"{}"), Some(time)])
    } else {
        build::insert(ORDERS, &[Some(b"1")])
    })
}
