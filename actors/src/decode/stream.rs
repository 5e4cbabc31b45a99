//! From the replication stream to numbered rows: where each stands, which count, and what only moves the position.
//!
//! Pure: no connection, no clock. A batch goes through in two steps, [`StreamDecoder::read`] and
//! [`StreamDecoder::number`], so that in between rows which were recorded before may be taken out by asking the
//! database.
//!
//! What is numbered is bounded by what is paid for. Rows of the outbox and the ends of their transactions are; the rest
//! (transactions without such rows, keepalives, rows recorded before) costs no credits and could pile up in the ledger
//! behind one row that waits. So of ends without rows only the latest is kept, and it is numbered when the one before
//! has become durable: a later number for an earlier end is always safe, because everything before that end was
//! numbered before.

use crate::{
    credit::{Cost, Credits},
    decode::{
        pgoutput::{self, Message},
        relation::Relations,
    },
    envelope::{Envelope, Passed, Place, StreamEvent, UnixMicros},
    error::{Error, Kind, Result},
    ledger::Mark,
    position::{Lsn, Position},
    settings::OutboxSettings,
};

/// A row of the outbox, not numbered yet.
#[derive(Debug)]
pub struct Candidate {
    /// The row under way; its number is not valid yet.
    pub envelope: Envelope,
    /// A column that is null and must not be: then it cannot be published.
    pub null: Option<String>,
    /// Whether it was recorded before, so that only its position counts.
    pub recorded: bool,
}

/// An element of the stream that counts.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all are rows")]
pub enum Element {
    /// A row of the outbox.
    Row(Candidate),
    /// The end of a transaction, or a keepalive.
    End(Lsn),
}

/// A batch of the stream, numbered.
#[derive(Debug, Default)]
pub struct Numbered {
    /// Rows to publish or to refuse, in order.
    pub rows: Vec<Candidate>,
    /// What only moves the position.
    pub passed: Vec<Passed>,
    /// What was paid for rows that were recorded before.
    pub unused: Cost,
}

#[derive(Debug, Clone, Copy)]
struct Transaction {
    commit: Lsn,
    xid: u32,
    committed_at: UnixMicros,
    /// Inserts so far, into whatever table.
    inserts: u64,
}

/// Follows one stream from where it started.
#[derive(Debug)]
pub struct StreamDecoder {
    relations: Relations,
    /// Rows at or before it were recorded before this start.
    resume: Option<Position>,
    /// The open transaction; it may span any number of batches.
    transaction: Option<Transaction>,
    /// The ledger's next number.
    next: u64,
    /// Whether a row was numbered since the last end.
    rows_since_end: bool,
    /// The latest end without rows that is not numbered yet.
    held: Option<Lsn>,
    /// The end without rows that was numbered last: at most one of them waits in the ledger.
    outstanding: Option<Lsn>,
}

impl StreamDecoder {
    /// A decoder of a stream whose rows up to `resume` were recorded before.
    pub fn new(outbox: OutboxSettings, resume: Option<Position>) -> Self {
        Self {
            relations: Relations::new(outbox),
            resume,
            transaction: None,
            next: 0,
            rows_since_end: false,
            held: None,
            outstanding: None,
        }
    }

    /// The tables as described so far.
    pub fn relations(&self) -> &Relations {
        &self.relations
    }

    /// Reads `events`. What was paid for inserts into other tables comes back too.
    ///
    /// # Errors
    /// [`Kind::Protocol`] where the stream is malformed, [`Kind::SchemaChanged`] where the outbox is not as configured.
    pub fn read(&mut self, events: Vec<StreamEvent>, credits: &Credits) -> Result<(Vec<Element>, Cost)> {
        let mut elements = Vec::with_capacity(events.len());
        let mut unused = Cost::default();
        for event in events {
            match event {
                StreamEvent::Begin { commit, xid, committed_at } => {
                    self.transaction = Some(Transaction { commit, xid, committed_at, inserts: 0 });
                }
                StreamEvent::Change(message) => {
                    let paid = credits.clamp(Cost::message(message.len()));
                    match pgoutput::decode(message)? {
                        Message::Relation(relation) => self.relations.describe(&relation),
                        Message::Insert { relation, tuple } => {
                            let transaction = self.transaction.as_mut().ok_or_else(outside)?;
                            transaction.inserts += 1;
                            let row = self.relations.read(relation, tuple)?;
                            let Some(read) = row else {
                                unused = unused + paid;
                                continue;
                            };
                            let position = Position { commit: transaction.commit, row: transaction.inserts };
                            let recorded = self.resume.is_some_and(|resume| position <= resume);
                            let envelope = Envelope {
                                number: u64::MAX,
                                place: Some(Place { position, xid: transaction.xid }),
                                committed_at: Some(transaction.committed_at),
                                row: read.row,
                                bytes: paid.bytes,
                            };
                            elements.push(Element::Row(Candidate { envelope, null: read.null, recorded }));
                        }
                        Message::Other(_) => {}
                    }
                }
                StreamEvent::Commit { end } => {
                    self.transaction.take().ok_or_else(outside)?;
                    elements.push(Element::End(end));
                }
                StreamEvent::KeepAlive { end } => elements.push(Element::End(end)),
            }
        }
        Ok((elements, unused))
    }

    /// Numbers `elements`, in stream order. `durable` is the latest LSN known to be recorded.
    pub fn number(&mut self, elements: Vec<Element>, durable: Lsn) -> Numbered {
        let mut numbered = Numbered { rows: Vec::with_capacity(elements.len()), ..Numbered::default() };
        // Of rows recorded before, one after the other, the last says it all.
        let mut skipped = None;
        for element in elements {
            match element {
                Element::Row(row) if row.recorded => {
                    numbered.unused = numbered.unused + Cost { messages: 1, bytes: row.envelope.bytes };
                    skipped = row.envelope.place.map(|place| place.position);
                }
                Element::Row(mut row) => {
                    numbered.passed.extend(skipped.take().map(|position| self.passed(Mark::Row(position))));
                    row.envelope.number = self.take_number();
                    self.rows_since_end = true;
                    numbered.rows.push(row);
                }
                // A keepalive between the rows of a transaction ends nothing, but its LSN is before the commit, so to
                // number it with them is right, and there are no more of these than of rows.
                Element::End(end) if self.rows_since_end => {
                    self.rows_since_end = false;
                    self.held = self.held.filter(|held| *held > end);
                    numbered.passed.push(self.passed(Mark::End(end)));
                }
                Element::End(end) => self.held = self.held.max(Some(end)),
            }
        }
        numbered.passed.extend(skipped.map(|position| self.passed(Mark::Row(position))));
        numbered.passed.extend(self.release(durable));
        numbered
    }

    /// Whether an end waits for the one before to become durable.
    pub fn holds_an_end(&self) -> bool {
        self.held.is_some()
    }

    /// Numbers the end that waits, if the one before is durable now.
    pub fn release(&mut self, durable: Lsn) -> Option<Passed> {
        if self.outstanding.is_some_and(|outstanding| durable < outstanding) {
            return None;
        }
        let end = self.held.take()?;
        self.outstanding = Some(end);
        Some(self.passed(Mark::End(end)))
    }

    fn passed(&mut self, mark: Mark) -> Passed {
        Passed { number: self.take_number(), mark }
    }

    fn take_number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }
}

fn outside() -> Error {
    Error::new(Kind::Protocol, "decode the replication stream").with_source("a change outside a transaction")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::{pgoutput::build, testing::outbox};
    use bytes::Bytes;

    const OUTBOX: u32 = 7;
    const ORDERS: u32 = 8;

    fn begin(commit: u64) -> StreamEvent {
        StreamEvent::Begin { commit: Lsn(commit), xid: 700, committed_at: 1 }
    }

    fn commit(end: u64) -> StreamEvent {
        StreamEvent::Commit { end: Lsn(end) }
    }

    fn keepalive(end: u64) -> StreamEvent {
        StreamEvent::KeepAlive { end: Lsn(end) }
    }

    fn row(id: &str) -> StreamEvent {
        StreamEvent::Change(build::insert(
            OUTBOX,
            &[Some(id.as_bytes()), Some(b"placed"), Some(b"{}"), Some(b"2026-01-02 03:04:05+00")],
        ))
    }

    fn order() -> StreamEvent {
        StreamEvent::Change(build::insert(ORDERS, &[Some(b"1")]))
    }

    fn relations() -> [StreamEvent; 2] {
        let columns = [("id", 25), ("type", 1043), ("content", 3802), ("occurred_on_utc", 1184)];
        [
            StreamEvent::Change(build::relation(OUTBOX, "public", "outbox_messages", &columns)),
            StreamEvent::Change(build::relation(ORDERS, "public", "orders", &[("id", 23)])),
        ]
    }

    fn decoder(resume: Option<Position>) -> (StreamDecoder, Credits) {
        let credits = Credits::new(Cost { messages: 100, bytes: 10_000 });
        let mut decoder = StreamDecoder::new(outbox(), resume);
        let (elements, _) =
            decoder.read([vec![begin(1)], relations().into(), vec![commit(2)]].concat(), &credits).unwrap();
        assert_eq!(elements.len(), 1, "the end of a transaction without rows");
        (decoder, credits)
    }

    /// Ids and numbers of the rows, then what passed.
    fn run(
        decoder: &mut StreamDecoder,
        credits: &Credits,
        events: Vec<StreamEvent>,
        durable: u64,
    ) -> (Vec<(Bytes, u64)>, Vec<Passed>, Cost) {
        let (elements, unused) = decoder.read(events, credits).unwrap();
        let numbered = decoder.number(elements, Lsn(durable));
        let rows = numbered.rows.into_iter().map(|row| (row.envelope.row.id, row.envelope.number)).collect();
        (rows, numbered.passed, unused + numbered.unused)
    }

    fn ids(rows: &[(Bytes, u64)]) -> Vec<(&str, u64)> {
        rows.iter().map(|(id, number)| (std::str::from_utf8(id).unwrap(), *number)).collect()
    }

    fn end(number: u64, lsn: u64) -> Passed {
        Passed { number, mark: Mark::End(Lsn(lsn)) }
    }

    #[test]
    fn rows_and_ends_are_numbered_in_stream_order_across_batches() {
        let (mut decoder, credits) = decoder(None);
        let (rows, passed, _) = run(&mut decoder, &credits, vec![begin(10), row("a")], 0);
        assert_eq!((ids(&rows), passed.as_slice()), (vec![("a", 0)], &[][..]));
        let (rows, passed, _) =
            run(&mut decoder, &credits, vec![row("b"), commit(15), begin(20), row("c"), commit(25)], 0);
        assert_eq!(ids(&rows), [("b", 1), ("c", 3)]);
        assert_eq!(passed, [end(2, 15), end(4, 25)]);
    }

    #[test]
    fn inserts_into_other_tables_count_in_the_position_and_give_their_credits_back() {
        let (mut decoder, credits) = decoder(None);
        let events = vec![begin(10), order(), row("a"), order(), row("b"), commit(15)];
        let (elements, unused) = decoder.read(events, &credits).unwrap();
        let StreamEvent::Change(order) = order() else { panic!("a change") };
        assert_eq!(unused, Cost { messages: 2, bytes: 2 * order.len() as u32 });
        let numbered = decoder.number(elements, Lsn::ZERO);
        let places: Vec<_> = numbered.rows.iter().map(|row| row.envelope.place.unwrap()).collect();
        let place = |row| Place { position: Position { commit: Lsn(10), row }, xid: 700 };
        assert_eq!(places, [place(2), place(4)]);
    }

    #[test]
    fn rows_at_or_before_the_resume_position_are_passed_over_with_their_credits() {
        let (mut decoder, credits) = decoder(Some(Position { commit: Lsn(10), row: 2 }));
        let events = vec![begin(10), row("a"), row("b"), row("c"), commit(15)];
        let (rows, passed, unused) = run(&mut decoder, &credits, events, 0);
        assert_eq!(ids(&rows), [("c", 1)]);
        let skipped = Passed { number: 0, mark: Mark::Row(Position { commit: Lsn(10), row: 2 }) };
        assert_eq!(passed, [skipped, end(2, 15)]);
        assert_eq!(unused.messages, 2);
    }

    #[test]
    fn of_ends_without_rows_one_at_a_time_waits_in_the_ledger() {
        let (mut decoder, credits) = decoder(None);
        let (_, passed, _) = run(&mut decoder, &credits, vec![keepalive(30)], 0);
        assert_eq!(passed, [end(0, 30)]);
        let (_, passed, _) =
            run(&mut decoder, &credits, vec![keepalive(40), begin(45), order(), commit(50)], 0);
        assert!(passed.is_empty() && decoder.holds_an_end());
        assert_eq!(decoder.release(Lsn(29)), None);
        assert_eq!(decoder.release(Lsn(30)), Some(end(1, 50)));
        assert!(!decoder.holds_an_end());
    }

    #[test]
    fn the_end_of_rows_makes_a_waiting_earlier_end_superfluous() {
        let (mut decoder, credits) = decoder(None);
        run(&mut decoder, &credits, vec![keepalive(30)], 0);
        let (_, passed, _) =
            run(&mut decoder, &credits, vec![keepalive(40), begin(50), row("a"), commit(55)], 0);
        assert_eq!(passed, [end(2, 55)]);
        assert!(!decoder.holds_an_end());
    }

    #[test]
    fn a_change_outside_a_transaction_is_a_protocol_error() {
        let (mut decoder, credits) = decoder(None);
        assert_eq!(decoder.read(vec![row("a")], &credits).unwrap_err().kind(), Kind::Protocol);
        assert_eq!(decoder.read(vec![commit(9)], &credits).unwrap_err().kind(), Kind::Protocol);
    }
}
