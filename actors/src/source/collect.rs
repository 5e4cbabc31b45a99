//! Collecting a batch: which events of the session go on, and what is paid for them.

use pgwire_replication::ReplicationEvent;

use crate::{
    control::Intake,
    credit::{Cost, Credit, Credits},
    envelope::{Origin, Raw, RawBatch, StreamEvent},
    position::Lsn,
};

/// Rows of a batch, at most. Enough that a batch's own cost (two hops, two wake-ups) vanishes, few enough that the next
/// stage starts while this one goes on.
const MOST_ROWS: usize = 256;

/// Events of a batch, at most: of single-row transactions each row brings three.
const MOST_EVENTS: usize = 3 * MOST_ROWS;

/// Microseconds from 1970-01-01, ours, to 2000-01-01, PostgreSQL's.
const POSTGRES_EPOCH: i64 = 946_684_800_000_000;

/// A batch being collected.
#[derive(Debug)]
pub(super) struct Batch {
    events: Vec<StreamEvent>,
    rows: usize,
    credit: Credit,
}

/// What became of an event that was offered.
#[derive(Debug)]
pub(super) enum Offered {
    /// It is in the batch, or needs not be.
    Taken,
    /// It is a row that costs this, and as much is not free.
    Unpaid(StreamEvent, Cost),
    /// It begins a transaction after the drain's target.
    Beyond(StreamEvent),
}

impl Batch {
    /// An empty batch, paid for out of `credits`.
    pub(super) fn new(credits: &Credits) -> Self {
        Self { events: Vec::new(), rows: 0, credit: credits.nothing() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.rows >= MOST_ROWS || self.events.len() >= MOST_EVENTS
    }

    /// Takes `event` if `intake` allows it and it is paid for.
    pub(super) fn offer(&mut self, event: StreamEvent, intake: Intake, credits: &Credits) -> Offered {
        match (&event, intake) {
            (StreamEvent::Begin { commit, .. }, Intake::UpTo(target)) if *commit > target => {
                return Offered::Beyond(event);
            }
            (StreamEvent::Change(message), _) if is_insert(message) => {
                let cost = Cost::message(message.len());
                match credits.try_acquire(cost) {
                    Some(credit) => self.take_paid(event, credit),
                    None => return Offered::Unpaid(event, cost),
                }
            }
            _ => self.take(event),
        }
        Offered::Taken
    }

    /// Takes a row that `credit` pays for.
    pub(super) fn take_paid(&mut self, row: StreamEvent, credit: Credit) {
        self.credit.merge(credit);
        self.events.push(row);
        self.rows += 1;
    }

    /// Takes an event that costs nothing. Of keepalives and empty transactions one after the other the last says it all:
    /// servers before 15 stream every transaction of the database.
    fn take(&mut self, event: StreamEvent) {
        let end = match (&event, self.events.last()) {
            (StreamEvent::Commit { end }, Some(StreamEvent::Begin { .. })) => {
                self.events.pop();
                *end
            }
            (StreamEvent::KeepAlive { end }, _) => *end,
            _ => return self.events.push(event),
        };
        match self.events.last_mut() {
            Some(StreamEvent::KeepAlive { end: last }) => *last = (*last).max(end),
            _ => self.events.push(StreamEvent::KeepAlive { end }),
        }
    }

    /// Says that everything up to `target` has been read.
    pub(super) fn reached(&mut self, target: Lsn) {
        self.take(StreamEvent::KeepAlive { end: target });
    }

    /// The batch as it goes on.
    pub(super) fn close(self) -> RawBatch {
        RawBatch { origin: Origin::Stream, raw: Raw::Stream(self.events), credit: self.credit }
    }
}

fn is_insert(message: &[u8]) -> bool {
    message.first() == Some(&b'I')
}

/// The event that goes on; `None` for what says nothing about rows or positions. Updates and deletes end here: they can
/// be as large as rows, and nobody has paid for them.
pub(super) fn translate(event: ReplicationEvent) -> Option<StreamEvent> {
    let lsn = |lsn: pgwire_replication::Lsn| Lsn(lsn.0);
    match event {
        ReplicationEvent::Begin { final_lsn, xid, commit_time_micros } => Some(StreamEvent::Begin {
            commit: lsn(final_lsn),
            xid,
            committed_at: commit_time_micros.saturating_add(POSTGRES_EPOCH),
        }),
        ReplicationEvent::XLogData { data, .. } if matches!(data.first(), Some(b'I' | b'R')) => {
            Some(StreamEvent::Change(data))
        }
        ReplicationEvent::Commit { end_lsn, .. } => Some(StreamEvent::Commit { end: lsn(end_lsn) }),
        ReplicationEvent::KeepAlive { wal_end, .. } => Some(StreamEvent::KeepAlive { end: lsn(wal_end) }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn begin(commit: u64) -> StreamEvent {
        StreamEvent::Begin { commit: Lsn(commit), xid: 1, committed_at: 0 }
    }

    fn row(length: usize) -> StreamEvent {
        let mut message = vec![b'I'];
        message.resize(length, 0);
        StreamEvent::Change(message.into())
    }

    fn collect(batch: &mut Batch, credits: &Credits, events: Vec<StreamEvent>) {
        for event in events {
            assert!(matches!(batch.offer(event, Intake::Open, credits), Offered::Taken));
        }
    }

    fn ends(batch: Batch) -> Vec<String> {
        let Raw::Stream(events) = batch.close().raw else { panic!("a stream") };
        let name = |event: &StreamEvent| match event {
            StreamEvent::Begin { commit, .. } => format!("begin {}", commit.0),
            StreamEvent::Change(_) => "change".to_owned(),
            StreamEvent::Commit { end } => format!("commit {}", end.0),
            StreamEvent::KeepAlive { end } => format!("keepalive {}", end.0),
        };
        events.iter().map(name).collect()
    }

    #[test]
    fn empty_transactions_and_keepalives_become_one_keepalive() {
        let credits = Credits::new(Cost { messages: 10, bytes: 1000 });
        let mut batch = Batch::new(&credits);
        let commit = |end| StreamEvent::Commit { end: Lsn(end) };
        let keepalive = |end| StreamEvent::KeepAlive { end: Lsn(end) };
        let events =
            vec![begin(1), commit(2), keepalive(3), begin(4), commit(5), begin(6), row(9), commit(7)];
        collect(&mut batch, &credits, events);
        assert_eq!(ends(batch), ["keepalive 5", "begin 6", "change", "commit 7"]);
    }

    #[test]
    fn a_row_is_taken_only_when_it_is_paid_for() {
        let credits = Credits::new(Cost { messages: 10, bytes: 100 });
        let mut batch = Batch::new(&credits);
        collect(&mut batch, &credits, vec![begin(1), row(60)]);
        let Offered::Unpaid(_, cost) = batch.offer(row(50), Intake::Open, &credits) else { panic!("unpaid") };
        assert_eq!(cost, Cost::message(50));
        assert_eq!(batch.close().credit.cost(), Cost::message(60));
        assert_eq!(credits.in_use(), Cost::default(), "a dropped batch gives its credits back");
    }

    #[test]
    fn a_drain_takes_what_committed_up_to_its_target_and_no_more() {
        let credits = Credits::new(Cost { messages: 10, bytes: 100 });
        let mut batch = Batch::new(&credits);
        let upto = Intake::UpTo(Lsn(20));
        assert!(matches!(batch.offer(begin(20), upto, &credits), Offered::Taken));
        assert!(matches!(batch.offer(row(5), upto, &credits), Offered::Taken));
        assert!(matches!(batch.offer(begin(21), upto, &credits), Offered::Beyond(_)));
    }

    #[test]
    fn updates_and_deletes_are_not_passed_on() {
        for (first, passes) in
            [(b'I', true), (b'R', true), (b'U', false), (b'D', false), (b'T', false), (b'Y', false)]
        {
            let event = ReplicationEvent::XLogData {
                wal_start: pgwire_replication::Lsn(0),
                wal_end: pgwire_replication::Lsn(0),
                server_time_micros: 0,
                data: Bytes::copy_from_slice(&[first, 0]),
            };
            assert_eq!(translate(event).is_some(), passes);
        }
    }
}
