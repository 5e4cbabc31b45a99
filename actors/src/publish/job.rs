//! A message in the publisher's hands, and the batch it came with.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    time::Instant,
};

use crate::{
    credit::{Cost, Credit},
    envelope::{Message, Passed, Settled, Settlement, Verdict},
    source::claim::Claim,
};

/// A message that waits or is under way.
#[derive(Debug)]
pub(super) struct Job {
    /// What is sent.
    /// Boxed: a job moves from queue to queue.
    pub message: Box<Message>,
    /// What it came with.
    pub batch: Rc<Batch>,
    /// Whether it was sent before and holds its share of the exposure.
    pub exposed: bool,
    /// Whether the broker closed a channel or a connection while this was among what was under way: it is sent alone.
    pub suspect: bool,
}

impl Job {
    /// What it takes of the batch's credit.
    pub(super) fn cost(&self) -> Cost {
        Cost { messages: 1, bytes: self.message.envelope.bytes }
    }
}

/// What messages of one batch share.
#[derive(Debug)]
pub(super) enum Batch {
    /// From the stream: verdicts go on as they become known, each with its share of the credit.
    Stream(RefCell<Credit>),
    /// A claim: verdicts wait here for each other.
    Claim(Ticket),
}

/// A claim under way. Exactly one [`Settled`] comes of it.
#[derive(Debug)]
pub(super) struct Ticket {
    /// Everything that goes with it to the acker; gone once it went.
    open: RefCell<Option<Settled>>,
    /// Messages without a verdict.
    missing: Cell<usize>,
    /// When it was begun.
    begun: Instant,
    /// When something about it last moved: its beginning, a send, a verdict.
    moved: Cell<Instant>,
}

impl Ticket {
    /// A claim whose `messages` have no verdict yet. `settled` holds what is known from the start.
    pub(super) fn new(settled: Settled, messages: usize, begun: Instant) -> Self {
        let (open, missing) = (RefCell::new(Some(settled)), Cell::new(messages));
        Self { open, missing, begun, moved: Cell::new(begun) }
    }

    /// When it was begun.
    pub(super) fn begun(&self) -> Instant {
        self.begun
    }

    /// Notes that something about it moved.
    pub(super) fn touch(&self, now: Instant) {
        self.moved.set(now);
    }

    /// When something about it last moved.
    pub(super) fn moved(&self) -> Instant {
        self.moved.get()
    }

    /// Whether it went to the acker.
    pub(super) fn is_closed(&self) -> bool {
        self.open.borrow().is_none()
    }

    /// Adds a verdict; returns the whole when it was the last one missing.
    pub(super) fn settle(&self, settlement: Settlement, exposure: Option<Credit>) -> Option<Settled> {
        let mut open = self.open.borrow_mut();
        let whole = open.as_mut()?;
        whole.settlements.push(settlement);
        if let Some(exposure) = exposure {
            whole.exposure.merge(exposure);
        }
        self.missing.set(self.missing.get().saturating_sub(1));
        if self.missing.get() == 0 { open.take() } else { None }
    }
}

/// What a claim is settled into, before anything is known of its messages.
pub(super) fn open_claim(
    claim: Box<Claim>,
    refused: Vec<Settlement>,
    passed: Vec<Passed>,
    credit: Credit,
    exposure: Credit,
) -> Settled {
    Settled { origin: crate::envelope::Origin::Claim(claim), settlements: refused, passed, credit, exposure }
}

/// A message with the verdict that its outcome is unknown.
pub(super) fn abandoned(message: Message) -> Settlement {
    Settlement { envelope: message.envelope, verdict: Verdict::Abandoned, exposed: false }
}
