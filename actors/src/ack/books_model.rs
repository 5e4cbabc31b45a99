//! The model: the decoder's own numbers and the recorder's own books, between a log, a broker and a database that are a
//! few collections each.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::{
    ack::books::Books,
    credit::{Cost, Credits},
    decode::{stream::StreamDecoder, testing},
    envelope::{Envelope, Passed, Reason, Rejection, Settlement, StreamEvent, Verdict},
    ledger::Watermark,
    position::{Lsn, Position},
};

use super::log::{Transaction, commit_of, end_of, id, inserts, relations, row};

/// Rejections of a row before it is parked.
const ATTEMPTS: u32 = 3;

/// What a broker, or validation, answers about a message.
#[derive(Debug, Clone, Copy)]
pub(super) enum Answer {
    Ack,
    Return,
    Nack,
    /// It cannot be sent at all: parked at once.
    Invalid,
}

impl Answer {
    fn verdict(self) -> Verdict {
        let rejected = |reason| Verdict::Rejected(Rejection { reason, detail: String::new() });
        match self {
            Answer::Ack => Verdict::Delivered,
            Answer::Return => rejected(Reason::Unroutable),
            Answer::Nack => rejected(Reason::Nacked),
            Answer::Invalid => rejected(Reason::Invalid),
        }
    }
}

/// How a recording ends.
#[derive(Debug, Clone, Copy)]
pub(super) enum Commit {
    Done,
    /// The relay dies before it.
    KilledBefore,
    /// The relay dies before it hears of it.
    KilledAfter,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Step {
    /// So many events are streamed and decoded.
    Read(usize),
    /// So many messages are sent.
    Send(usize),
    /// The nth message under way is answered.
    Answer(usize, Answer),
    /// The nth message under way is dropped without a verdict.
    Abandon(usize),
    /// The channel closes; the bits say which of what was under way the broker has nevertheless.
    Close(u64),
    /// So many news are recorded. Of kept rows: whether progress is due.
    Record(usize, Commit, bool),
    /// The end that waits is numbered, if it may be.
    Release,
    /// The server hears what is durable.
    Tell,
    /// The nth row that waits for another attempt is sent again; it is recorded, or the relay dies before that.
    Retry(usize, Answer, bool),
    /// The server saves the slot's position (and what commits did not wait for).
    Checkpoint,
    /// The server dies, and with it what it had not saved.
    ServerCrash,
    /// The relay dies.
    Kill,
}

/// What became of a row, in the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recorded {
    Delivered,
    Waits,
    Parked,
}

/// What survives the relay.
pub(super) struct World {
    pub(super) log: Vec<Transaction>,
    pub(super) keep: bool,
    pub(super) confirmed: Lsn,
    pub(super) progress: Watermark,
    pub(super) recorded: BTreeMap<String, Recorded>,
    /// Rows that wait for another attempt, and their attempts.
    retries: BTreeMap<String, u32>,
    saved: (Lsn, Watermark),
    /// What the broker has.
    pub(super) received: BTreeSet<String>,
}

/// What does not.
pub(super) struct Relay {
    events: VecDeque<StreamEvent>,
    decoder: StreamDecoder,
    waiting: VecDeque<Envelope>,
    under_way: Vec<Envelope>,
    news: VecDeque<(Vec<Passed>, Vec<Settlement>)>,
    books: Books,
    durable: Lsn,
}

impl World {
    /// Nothing of `log` has been read.
    pub(super) fn of(log: Vec<Transaction>, keep: bool) -> Self {
        Self {
            log,
            keep,
            confirmed: Lsn::ZERO,
            progress: Watermark::default(),
            recorded: BTreeMap::new(),
            retries: BTreeMap::new(),
            saved: Default::default(),
            received: BTreeSet::new(),
        }
    }

    /// Every row of the outbox: its id, its position, and the end of its transaction.
    pub(super) fn rows(&self) -> impl Iterator<Item = (String, Position, Lsn)> {
        self.log.iter().enumerate().flat_map(|(n, transaction)| {
            let inserts = inserts(*transaction).zip(1u64..);
            inserts.filter(|(outbox, _)| *outbox).map(move |(_, insert)| {
                (id(n, insert), Position { commit: commit_of(n), row: insert }, end_of(n))
            })
        })
    }

    /// The log from where the slot stands: transactions that committed before are not streamed.
    fn stream(&self) -> VecDeque<StreamEvent> {
        let mut events = VecDeque::new();
        for (n, transaction) in self.log.iter().enumerate() {
            if commit_of(n) >= self.confirmed {
                events.push_back(StreamEvent::Begin { commit: commit_of(n), xid: n as u32, committed_at: 1 });
                events.extend(relations());
                events
                    .extend((1..).zip(inserts(*transaction)).map(|(insert, outbox)| row(n, insert, outbox)));
                events.push_back(StreamEvent::Commit { end: end_of(n) });
            }
            if transaction.keepalive {
                events.push_back(StreamEvent::KeepAlive { end: Lsn(commit_of(n).0 + 20) });
            }
        }
        events
    }

    pub(super) fn start(&self) -> Relay {
        let position = (self.progress.position != Position::default()).then_some(self.progress.position);
        Relay {
            events: self.stream(),
            decoder: StreamDecoder::new(testing::outbox(), position),
            waiting: VecDeque::new(),
            under_way: Vec::new(),
            news: VecDeque::new(),
            books: Books::behind(self.progress),
            durable: self.progress.flush,
        }
    }

    /// One transaction: what `record_stream` writes.
    fn commit(&mut self, settlements: &[Settlement], watermark: Watermark) {
        for Settlement { envelope, verdict, .. } in settlements {
            let id = text(envelope);
            match verdict {
                Verdict::Delivered if self.keep => {}
                Verdict::Delivered => {
                    assert!(self.received.contains(&id), "{id} is recorded as delivered");
                    self.recorded.insert(id, Recorded::Delivered);
                }
                Verdict::Rejected(why) if why.reason.is_final() => {
                    self.recorded.insert(id, Recorded::Parked);
                }
                Verdict::Rejected(_) => {
                    self.retries.entry(id.clone()).or_insert(1);
                    self.recorded.insert(id, Recorded::Waits);
                }
                Verdict::Abandoned => unreachable!("it is not recorded"),
            }
        }
        assert!(watermark.position >= self.progress.position, "progress never goes back");
        self.progress = watermark;
    }

    /// Whether this row's verdict is durable: then, and only then, may the relay forget it.
    fn safe(&self, id: &str) -> bool {
        self.recorded.contains_key(id) || (self.keep && self.received.contains(id))
    }

    pub(super) fn check(&self) {
        for (id, position, end) in self.rows() {
            assert!(end > self.confirmed || self.safe(&id), "the slot passed {id}: {}", self.confirmed);
            assert!(position > self.progress.position || self.safe(&id), "progress passed {id}");
        }
    }

    pub(super) fn run(&mut self, relay: &mut Relay, step: Step) {
        match step {
            Step::Read(n) => relay.read(n),
            Step::Send(n) => {
                let n = n.min(relay.waiting.len());
                relay.under_way.extend(relay.waiting.drain(..n));
            }
            Step::Answer(n, answer) => {
                if let Some(envelope) = take(&mut relay.under_way, n) {
                    if matches!(answer, Answer::Ack) {
                        self.received.insert(text(&envelope));
                    }
                    relay.settle(envelope, answer.verdict());
                }
            }
            Step::Abandon(n) => {
                if let Some(envelope) = take(&mut relay.under_way, n) {
                    relay.settle(envelope, Verdict::Abandoned);
                }
            }
            Step::Close(stored) => {
                for (n, envelope) in relay.under_way.drain(..).enumerate().rev().collect::<Vec<_>>() {
                    if stored >> (n % 64) & 1 == 1 {
                        self.received.insert(text(&envelope));
                    }
                    relay.waiting.push_front(envelope);
                }
            }
            Step::Record(n, commit, due) => self.record(relay, n, commit, due),
            Step::Release => relay.release(),
            Step::Tell => self.confirmed = self.confirmed.max(relay.durable),
            Step::Retry(n, answer, dies) => self.retry(relay, n, answer, dies),
            Step::Checkpoint => self.saved = (self.confirmed, self.progress),
            Step::ServerCrash => {
                self.confirmed = self.saved.0;
                // Only progress by itself is written by commits that do not wait.
                if self.keep && self.recorded.is_empty() {
                    self.progress = self.saved.1;
                }
                *relay = self.start();
            }
            Step::Kill => *relay = self.start(),
        }
    }

    /// What `StreamRecorder::record` does.
    fn record(&mut self, relay: &mut Relay, n: usize, commit: Commit, due: bool) {
        let n = n.min(relay.news.len());
        let (passed, settlements): (Vec<_>, Vec<_>) = relay.news.drain(..n).unzip();
        let (passed, mut settlements) =
            (passed.concat(), settlements.into_iter().flatten().collect::<Vec<_>>());
        relay.books.enter(&passed, &settlements).expect("all were streamed");
        settlements.retain(|settlement| settlement.verdict != Verdict::Abandoned);
        let delivered = settlements.iter().all(|settlement| settlement.verdict == Verdict::Delivered);
        if self.keep && delivered {
            settlements.clear();
            if !due {
                return;
            }
        }
        let watermark = relay.books.watermark();
        if !settlements.is_empty() || relay.books.moved() {
            if matches!(commit, Commit::KilledBefore) {
                *relay = self.start();
                return;
            }
            self.commit(&settlements, watermark);
            if matches!(commit, Commit::KilledAfter) {
                *relay = self.start();
                return;
            }
        }
        relay.durable = relay.durable.max(relay.books.durable(watermark));
    }

    /// A claim of the retries: what `Claim::record` writes.
    fn retry(&mut self, relay: &mut Relay, n: usize, answer: Answer, dies: bool) {
        let Some(id) = self.retries.keys().nth(n % self.retries.len().max(1)).cloned() else { return };
        if matches!(answer, Answer::Ack) {
            self.received.insert(id.clone());
        }
        if dies {
            *relay = self.start();
            return;
        }
        let attempts = self.retries.remove(&id).expect("it waits") + 1;
        let recorded = match answer {
            Answer::Ack => Recorded::Delivered,
            Answer::Return | Answer::Nack if attempts < ATTEMPTS => {
                self.retries.insert(id.clone(), attempts);
                Recorded::Waits
            }
            _ => Recorded::Parked,
        };
        self.recorded.insert(id, recorded);
    }

    /// A last restart, and then nothing goes wrong any more.
    pub(super) fn finish(&mut self) {
        let mut relay = self.start();
        loop {
            relay.read(usize::MAX);
            self.run(&mut relay, Step::Send(usize::MAX));
            while !relay.under_way.is_empty() {
                self.run(&mut relay, Step::Answer(0, Answer::Ack));
            }
            relay.release();
            if relay.news.is_empty() && !relay.books.owe() {
                break;
            }
            self.run(&mut relay, Step::Record(usize::MAX, Commit::Done, true));
            self.run(&mut relay, Step::Tell);
            self.check();
        }
        while !self.retries.is_empty() {
            self.run(&mut relay, Step::Retry(0, Answer::Ack, false));
        }
        assert_eq!(relay.books.exposed_ahead(), 0);
    }
}

impl Relay {
    fn read(&mut self, n: usize) {
        let events = self.events.drain(..n.min(self.events.len())).collect();
        let credits = Credits::new(Cost { messages: 1_000, bytes: 1 << 20 });
        let (elements, _) = self.decoder.read(events, &credits).expect("a sound stream");
        let numbered = self.decoder.number(elements, self.durable);
        self.waiting.extend(numbered.rows.into_iter().map(|row| row.envelope));
        if !numbered.passed.is_empty() {
            self.news.push_back((numbered.passed, Vec::new()));
        }
    }

    fn settle(&mut self, envelope: Envelope, verdict: Verdict) {
        self.news.push_back((Vec::new(), vec![Settlement { envelope, verdict, exposed: true }]));
    }

    fn release(&mut self) {
        let passed = Vec::from_iter(self.decoder.release(self.durable));
        if !passed.is_empty() {
            self.news.push_back((passed, Vec::new()));
        }
    }
}

fn text(envelope: &Envelope) -> String {
    String::from_utf8(envelope.row.id.to_vec()).expect("our own id")
}

fn take(under_way: &mut Vec<Envelope>, n: usize) -> Option<Envelope> {
    (!under_way.is_empty()).then(|| under_way.remove(n % under_way.len()))
}
