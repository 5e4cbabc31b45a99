//! Which message a confirm and a return speak about: pure bookkeeping, no broker needed to test it.
//!
//! lapin 4 hands a returned message to whichever confirm completes first. It keeps returns in a queue, first in first
//! out, and *every* completion (ack or nack, one by one also for a multiple ack, in no particular order) takes the
//! front of it. So `Ack(Some(returned))` is about two messages: the one acknowledged and the one returned.
//!
//! RabbitMQ sends a message's return before its confirm, and lapin handles frames in order on one thread. From that:
//!
//! 1. *A completion that carries nothing found the queue empty.* Every return received before it was taken by a
//!    completion that resolved earlier. Its own return, had there been one, was received before it. So once everything
//!    that had resolved by then has been seen, a message that completed with nothing and whose id is not among the
//!    returned ones was not returned.
//! 2. *The queue is never longer than the number of returned messages whose own confirm is outstanding.* A return adds
//!    one to both. A completion takes one from the queue if there is one, and one from the number only if its message
//!    was returned; where the queue is empty it cannot become shorter than the number. So both changes keep the order.
//! 3. *A completion that carries another message's return leaves its own message suspect*: its own return may still be
//!    in the queue, behind at most as many as there are outstanding returned messages (2). Those were all published
//!    before the completion was seen. When every message published before that moment has completed, the queue has been
//!    taken from at least that often, and the suspect's own return has been seen, or there is none.
//!
//! Both conclusions need what resolved earlier to be seen first: [`Attribution::settle`] may be called only when
//! everything that is ready has been collected (see `super::flights`).

use std::collections::{HashMap, HashSet, VecDeque};

use bytes::Bytes;

/// What the broker's answers amount to for one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Acknowledged and not returned.
    Delivered,
    /// Returned, with the broker's words. Whether it was then acknowledged or not says nothing more.
    Returned(String),
    /// Negatively acknowledged and not returned.
    Nacked,
}

/// A returned message as a completion carried it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Returned {
    /// The `message_id` inside it: the only thing that says whose return it is.
    pub id: Bytes,
    /// The broker's code and text, such as `312 NO_ROUTE`.
    pub words: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No confirm yet.
    Outstanding,
    /// Confirmed; final once everything before `barrier` has completed.
    Resolved { acked: bool, barrier: u64 },
    /// Its outcome was given out.
    Settled,
}

#[derive(Debug)]
struct Entry<P> {
    id: Bytes,
    stage: Stage,
    payload: Option<P>,
}

/// What is under way on one channel: from sending to a settled outcome. `P` is what the caller needs to know about each
/// message.
///
/// Tags are our own count of what was published on this channel, in order.
#[derive(Debug)]
pub struct Attribution<P> {
    /// Tag of `entries[0]`.
    first: u64,
    entries: VecDeque<Entry<P>>,
    /// The lowest tag that is outstanding; the next tag if none is.
    lowest: u64,
    outstanding: usize,
    /// Tags that are resolved and not settled.
    resolved: Vec<u64>,
    /// Ids of everything not settled.
    ids: HashSet<Bytes>,
    /// Returns whose message is not settled yet. Outlives a collection: a return may be carried by a confirm that
    /// resolves long before the message's own.
    returned: HashMap<Bytes, String>,
}

impl<P> Default for Attribution<P> {
    fn default() -> Self {
        Self {
            first: 0,
            entries: VecDeque::new(),
            lowest: 0,
            outstanding: 0,
            resolved: Vec::new(),
            ids: HashSet::new(),
            returned: HashMap::new(),
        }
    }
}

impl<P> Attribution<P> {
    /// Whether a message with this id is not settled yet. Two at once could not be told apart.
    pub fn contains(&self, id: &Bytes) -> bool {
        self.ids.contains(id)
    }

    /// Sent and not confirmed.
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Whether nothing is under way.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Notes that a message is being sent and gives its tag. Its id must not be under way already.
    pub fn sent(&mut self, id: Bytes, payload: P) -> u64 {
        let tag = self.next_tag();
        let fresh = self.ids.insert(id.clone());
        debug_assert!(fresh, "the same message_id twice on one channel");
        self.entries.push_back(Entry { id, stage: Stage::Outstanding, payload: Some(payload) });
        self.outstanding += 1;
        tag
    }

    /// Notes a completion: the message's own ack or nack, and what return it carried.
    pub fn completed(&mut self, tag: u64, acked: bool, carried: Option<Returned>) {
        let next = self.next_tag();
        let Some(entry) = self.entry(tag) else { return };
        if entry.stage != Stage::Outstanding {
            return;
        }
        // A completion with its own return is settled by the returned set; the barrier does no harm to it.
        let barrier = if carried.is_some() { next } else { 0 };
        entry.stage = Stage::Resolved { acked, barrier };
        self.outstanding -= 1;
        self.resolved.push(tag);
        if let Some(Returned { id, words }) = carried
            && self.ids.contains(&id)
        {
            self.returned.insert(id, words);
        }
        while self.lowest < next && self.stage(self.lowest) != Some(Stage::Outstanding) {
            self.lowest += 1;
        }
    }

    /// Gives out every outcome that is certain. Call it only when all that is ready has been noted.
    pub fn settle(&mut self, mut give: impl FnMut(P, Outcome)) {
        if self.resolved.is_empty() {
            return;
        }
        let mut resolved = std::mem::take(&mut self.resolved);
        resolved.retain(|&tag| {
            let lowest = self.lowest;
            let Some(index) = tag.checked_sub(self.first).and_then(|index| usize::try_from(index).ok())
            else {
                return false;
            };
            let Some(entry) = self.entries.get_mut(index) else { return false };
            let Stage::Resolved { acked, barrier } = entry.stage else { return false };
            let returned = if self.returned.is_empty() { None } else { self.returned.remove(&entry.id) };
            let outcome = match returned {
                Some(words) => Outcome::Returned(words),
                None if lowest < barrier => return true,
                None if acked => Outcome::Delivered,
                None => Outcome::Nacked,
            };
            entry.stage = Stage::Settled;
            self.ids.remove(&entry.id);
            if let Some(payload) = entry.payload.take() {
                give(payload, outcome);
            }
            false
        });
        self.resolved = resolved;
        while self.entries.front().is_some_and(|entry| entry.stage == Stage::Settled) {
            self.entries.pop_front();
            self.first += 1;
        }
    }

    /// What is not settled, in the order it was sent.
    pub fn unsettled_mut(&mut self) -> impl Iterator<Item = &mut P> {
        self.entries.iter_mut().filter_map(|entry| entry.payload.as_mut())
    }

    /// Ends the channel: everything not settled, in the order it was sent, and whether it was outstanding.
    pub fn take_back(&mut self) -> Vec<(P, bool)> {
        let ended = std::mem::take(self);
        ended
            .entries
            .into_iter()
            .filter_map(|entry| Some((entry.payload?, entry.stage == Stage::Outstanding)))
            .collect()
    }

    fn next_tag(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    fn entry(&mut self, tag: u64) -> Option<&mut Entry<P>> {
        let index = usize::try_from(tag.checked_sub(self.first)?).ok()?;
        self.entries.get_mut(index)
    }

    fn stage(&self, tag: u64) -> Option<Stage> {
        let index = usize::try_from(tag.checked_sub(self.first)?).ok()?;
        self.entries.get(index).map(|entry| entry.stage)
    }
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
