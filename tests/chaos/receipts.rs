//! The consumer's side: what arrived, in which order, how often, and whether it was what was written.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use uuid::Uuid;

use crate::load::digest;
use crate::support::Sink;

/// The first arrival of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Receipt {
    /// How many messages were here before it.
    pub(crate) place: usize,
    pub(crate) digest: u64,
    pub(crate) at: Instant,
}

/// Everything that arrived.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) first: HashMap<Uuid, Receipt>,
    /// Arrivals beyond the first, but for those the broker itself says it repeats.
    pub(crate) repeated: usize,
    /// Messages that came again with another body.
    pub(crate) altered: Vec<Uuid>,
    /// Messages whose id is none of ours.
    pub(crate) foreign: Vec<String>,
    /// When the last first arrival was.
    pub(crate) moved: Option<Instant>,
}

/// What the consumer and those who watch share.
#[derive(Debug, Default)]
pub(crate) struct Receipts(Mutex<Seen>);

impl Receipts {
    pub(crate) fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many different messages arrived.
    pub(crate) fn distinct(&self) -> usize {
        self.seen().first.len()
    }
}

impl Sink for Receipts {
    fn consuming(&self) {}

    fn receive(&self, _queue: &str, delivery: lapin::message::Delivery) {
        let id = delivery.properties.message_id().as_ref().map_or("", |id| id.as_str());
        let mut seen = self.seen();
        let Ok(id) = id.parse::<Uuid>() else { return seen.foreign.push(id.to_owned()) };
        let digest = digest(&delivery.data);
        let Some(first) = seen.first.get(&id).copied() else {
            let (place, at) = (seen.first.len(), Instant::now());
            seen.first.insert(id, Receipt { place, digest, at });
            seen.moved = Some(at);
            return;
        };
        if first.digest != digest {
            seen.altered.push(id);
        }
        // our acknowledgement was lost, not the relay's record
        if !delivery.redelivered {
            seen.repeated += 1;
        }
    }

    fn received(&self) {}
}
