//! What waits in one lane and what is under way: owned by the lane's task, looked into by the intake when it adds to it
//! or cuts a claim. Never borrowed across an await.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    rc::Rc,
    time::Instant,
};

use tokio::sync::Notify;

use super::{
    hub::{Hub, exposure_of},
    job::{Batch, Job},
    verdict::Attribution,
};
use crate::credit::Credit;

/// A message that was sent.
#[derive(Debug)]
pub(super) struct Flight {
    /// `None`: an orphan, of a claim that was cut. Its confirm is dropped when it comes; until then its id must not be
    /// sent again on this channel.
    pub job: Option<Job>,
    /// When it was sent.
    pub sent: Instant,
    /// Whether nothing else was under way on the connection, and nothing else could be.
    pub alone: bool,
}

/// One lane's messages.
#[derive(Debug)]
pub(super) struct Line {
    waiting: RefCell<VecDeque<Job>>,
    /// What is under way on the lane's channel.
    pub under_way: RefCell<Attribution<Flight>>,
    /// The exposure of what is under way, and of what was and waits to be sent again.
    exposure: RefCell<Option<Credit>>,
    /// Since when the lane cannot send: no channel, a blocked broker, a missing exchange.
    pub stalled: Cell<Option<Instant>>,
    /// Told when there is something to look at.
    pub wake: Notify,
}

impl Default for Line {
    fn default() -> Self {
        Self {
            waiting: RefCell::default(),
            under_way: RefCell::default(),
            exposure: RefCell::default(),
            stalled: Cell::new(Some(Instant::now())),
            wake: Notify::new(),
        }
    }
}

impl Line {
    /// Messages that wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.borrow().len()
    }

    /// Puts a message at the end.
    pub(super) fn push(&self, job: Job) {
        self.waiting.borrow_mut().push_back(job);
    }

    /// Looks at what waits.
    pub(super) fn look<T>(&self, look: impl FnOnce(&VecDeque<Job>) -> T) -> T {
        look(&self.waiting.borrow())
    }

    /// Takes the first message that waits.
    pub(super) fn pop(&self) -> Option<Job> {
        self.waiting.borrow_mut().pop_front()
    }

    /// Puts what a dead channel left back before everything that waits, in its order.
    pub(super) fn put_back(&self, jobs: Vec<Job>) {
        let mut waiting = self.waiting.borrow_mut();
        for job in jobs.into_iter().rev() {
            waiting.push_front(job);
        }
    }

    /// Notes that the lane can send, or since when it cannot.
    pub(super) fn stall(&self, stalled: bool, now: Instant) {
        match (stalled, self.stalled.get()) {
            (true, None) => self.stalled.set(Some(now)),
            (false, Some(_)) => self.stalled.set(None),
            _ => {}
        }
    }

    /// Adds to the exposure that messages of this lane hold.
    pub(super) fn expose(&self, credit: Credit) {
        let mut exposure = self.exposure.borrow_mut();
        match exposure.as_mut() {
            Some(held) => held.merge(credit),
            None => *exposure = Some(credit),
        }
    }

    /// Takes a message's share of the exposure out, if it holds one.
    pub(super) fn share(&self, job: &Job) -> Option<Credit> {
        if !job.exposed {
            return None;
        }
        self.exposure.borrow_mut().as_mut().map(|held| held.split(exposure_of(1)))
    }

    /// Takes every message of `batch` out and abandons it. What was sent of it stays under way as orphans.
    pub(super) fn withdraw(&self, batch: &Rc<Batch>, hub: &Hub) {
        let mut out = Vec::new();
        self.under_way.borrow_mut().unsettled_mut().for_each(|flight| {
            if flight.job.as_ref().is_some_and(|job| Rc::ptr_eq(&job.batch, batch)) {
                out.extend(flight.job.take());
            }
        });
        self.abandon(out, hub);
        self.withhold(batch, hub);
    }

    /// Takes those messages of `batch` out that wait, and abandons them. What is under way goes on.
    pub(super) fn withhold(&self, batch: &Rc<Batch>, hub: &Hub) {
        let waiting = std::mem::take(&mut *self.waiting.borrow_mut());
        let (theirs, rest): (VecDeque<Job>, VecDeque<Job>) =
            waiting.into_iter().partition(|job| Rc::ptr_eq(&job.batch, batch));
        *self.waiting.borrow_mut() = rest;
        self.abandon(theirs, hub);
    }

    fn abandon(&self, jobs: impl IntoIterator<Item = Job>, hub: &Hub) {
        for job in jobs {
            let exposure = self.share(&job);
            hub.abandon(job, exposure);
        }
        self.wake.notify_one();
    }
}
