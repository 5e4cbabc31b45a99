//! Consumes the benchmark's queue and measures how long each message was under way.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures_util::StreamExt;
use hdrhistogram::Histogram;
use lapin::{
    options::{BasicConsumeOptions, BasicQosOptions},
    types::FieldTable,
};
use tokio::task::JoinHandle;

use super::arena::{Arena, NAME, refused};
use crate::failure::Failure;

/// What is known of messages by their id: when each began, and when it came.
#[derive(Clone)]
pub(super) struct Clock(Arc<Mutex<Inner>>);

struct Inner {
    /// Seen at one end only. Either may come first: a message can be here before the task that committed it has run.
    halves: HashMap<String, Half>,
    began: u64,
    came: u64,
    again: u64,
    seen: Histogram<u64>,
}

enum Half {
    Began(Instant),
    Came(Instant),
}

/// A histogram of microseconds, 1 µs to 10 min, three digits.
pub(super) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 600_000_000, 3).expect("constant bounds are valid")
}

impl Clock {
    /// Nothing known yet.
    pub(super) fn new() -> Self {
        let (halves, seen) = (HashMap::new(), histogram());
        Self(Arc::new(Mutex::new(Inner { halves, began: 0, came: 0, again: 0, seen })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A message began its way at `at`.
    pub(super) fn began(&self, id: String, at: Instant) {
        let mut inner = self.inner();
        inner.began += 1;
        match inner.halves.remove(&id) {
            Some(Half::Came(came)) => inner.record(at, came),
            _ => drop(inner.halves.insert(id, Half::Began(at))),
        }
    }

    fn came(&self, id: String, at: Instant) {
        let mut inner = self.inner();
        match inner.halves.remove(&id) {
            Some(Half::Began(began)) => inner.record(began, at),
            Some(half) => {
                inner.again += 1;
                inner.halves.insert(id, half);
            }
            None => drop(inner.halves.insert(id, Half::Came(at))),
        }
    }

    /// Messages that began.
    pub(super) fn count(&self) -> u64 {
        self.inner().began
    }

    /// Messages that began and have not come.
    pub(super) fn under_way(&self) -> u64 {
        let inner = self.inner();
        inner.began.saturating_sub(inner.came)
    }

    /// Latencies so far, in microseconds.
    pub(super) fn latencies(&self) -> Histogram<u64> {
        self.inner().seen.clone()
    }
}

impl Inner {
    /// A consumer that was faster than the COMMIT's return counts as the shortest time there is.
    fn record(&mut self, began: Instant, came: Instant) {
        self.came += 1;
        let micros = u64::try_from(came.saturating_duration_since(began).as_micros()).unwrap_or(u64::MAX);
        self.seen.saturating_record(micros.max(1));
    }
}

/// Consumes until dropped. Messages whose id the direct publisher made go to its own clock.
pub(super) struct Consumer {
    task: JoinHandle<()>,
    _connection: lapin::Connection,
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What ids of directly published messages begin with.
pub(super) const DIRECT: &str = "direct-";

/// Begins to consume.
pub(super) async fn consume(arena: &Arena, relayed: Clock, direct: Clock) -> Result<Consumer, Failure> {
    let connection = arena.dial().await?;
    let channel = connection.create_channel().await.map_err(refused)?;
    channel.basic_qos(1000, BasicQosOptions::default()).await.map_err(refused)?;
    let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
    let tag = "postrider-bench".into();
    let mut deliveries =
        channel.basic_consume(NAME.into(), tag, options, FieldTable::default()).await.map_err(refused)?;
    let task = tokio::spawn(async move {
        while let Some(Ok(delivery)) = deliveries.next().await {
            let at = Instant::now();
            let id = delivery.properties.message_id().as_ref().map(ToString::to_string).unwrap_or_default();
            let clock = if id.starts_with(DIRECT) { &direct } else { &relayed };
            clock.came(id, at);
        }
    });
    Ok(Consumer { task, _connection: connection })
}

/// Waits until all that began has come; the number that has not after `patience`.
pub(super) async fn arrived(clock: &Clock, patience: Duration) -> u64 {
    let until = Instant::now() + patience;
    while clock.under_way() > 0 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    clock.under_way()
}
