//! What was committed, what was consumed, and how long it took in between.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use uuid::Uuid;

use crate::consumer::Outcome;

/// Told of each event by whoever sees it; asked for the figures once a second.
pub(crate) struct Tally(Mutex<Inner>);

struct Inner {
    committed: u64,
    failed: u64,
    skipped: u64,
    consumed: u64,
    repeated: u64,
    relayed: Histogram<u64>,
    direct: Histogram<u64>,
    /// Messages seen at one end only. Either may come first: the consumer can have a message before the thread that
    /// committed it has run again.
    halves: HashMap<Uuid, Half>,
    /// Direct publishes under way.
    sent: HashMap<Uuid, Instant>,
}

enum Half {
    Committed(Instant),
    Received(Instant),
}

/// A copy of the figures.
#[derive(Debug, Clone)]
pub(crate) struct Figures {
    /// Orders whose COMMIT returned.
    pub(crate) committed: u64,
    /// Orders the API answered with an error, or not at all.
    pub(crate) failed: u64,
    /// Orders not sent because too many were unanswered.
    pub(crate) skipped: u64,
    /// Messages applied.
    pub(crate) consumed: u64,
    /// Messages that came again, and were found in the inbox.
    pub(crate) repeated: u64,
    /// From COMMIT's return to the consumer.
    pub(crate) relayed: Latency,
    /// From a direct publish to its consumer.
    pub(crate) direct: Latency,
}

/// Quantiles of one path.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Latency {
    pub(crate) count: u64,
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
    pub(crate) max: Duration,
}

impl Tally {
    pub(crate) fn new() -> Self {
        // Three digits over 1 µs to 10 min.
        let histogram = || Histogram::new_with_bounds(1, 600_000_000, 3).expect("constant bounds are valid");
        Self(Mutex::new(Inner {
            committed: 0,
            failed: 0,
            skipped: 0,
            consumed: 0,
            repeated: 0,
            relayed: histogram(),
            direct: histogram(),
            halves: HashMap::new(),
            sent: HashMap::new(),
        }))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The COMMIT of outbox row `id` returned at `at`.
    pub(crate) fn committed(&self, id: Uuid, at: Instant) {
        let mut inner = self.inner();
        inner.committed += 1;
        match inner.halves.remove(&id) {
            Some(Half::Received(received)) => record(&mut inner.relayed, at, received),
            _ => {
                inner.halves.insert(id, Half::Committed(at));
            }
        }
    }

    /// The consumer has handled message `id`, which reached it at `at`.
    pub(crate) fn handled(&self, id: Uuid, at: Instant, outcome: Outcome) {
        let mut inner = self.inner();
        if outcome == Outcome::Repeated {
            inner.repeated += 1;
            return;
        }
        inner.consumed += 1;
        match inner.halves.remove(&id) {
            Some(Half::Committed(committed)) => record(&mut inner.relayed, committed, at),
            _ => {
                inner.halves.insert(id, Half::Received(at));
            }
        }
    }

    /// A direct publish of `id` begins.
    pub(crate) fn sent(&self, id: Uuid) {
        self.inner().sent.insert(id, Instant::now());
    }

    /// A directly published message came at `at`.
    pub(crate) fn received(&self, id: Uuid, at: Instant) {
        let mut inner = self.inner();
        if let Some(sent) = inner.sent.remove(&id) {
            record(&mut inner.direct, sent, at);
        }
    }

    /// Direct publishes that have not come yet.
    pub(crate) fn direct_under_way(&self) -> usize {
        self.inner().sent.len()
    }

    /// An order failed.
    pub(crate) fn failed(&self) {
        self.inner().failed += 1;
    }

    /// An order was not sent.
    pub(crate) fn skipped(&self) {
        self.inner().skipped += 1;
    }

    /// The figures now.
    pub(crate) fn figures(&self) -> Figures {
        let inner = self.inner();
        Figures {
            committed: inner.committed,
            failed: inner.failed,
            skipped: inner.skipped,
            consumed: inner.consumed,
            repeated: inner.repeated,
            relayed: Latency::of(&inner.relayed),
            direct: Latency::of(&inner.direct),
        }
    }
}

/// A consumer that was faster than the COMMIT's return counts as the shortest time there is.
fn record(histogram: &mut Histogram<u64>, from: Instant, to: Instant) {
    let micros = u64::try_from(to.saturating_duration_since(from).as_micros()).unwrap_or(u64::MAX);
    histogram.saturating_record(micros.max(1));
}

impl Latency {
    fn of(histogram: &Histogram<u64>) -> Self {
        let at = |quantile| Duration::from_micros(histogram.value_at_quantile(quantile));
        Self {
            count: histogram.len(),
            p50: at(0.5),
            p99: at(0.99),
            max: Duration::from_micros(histogram.max()),
        }
    }
}
