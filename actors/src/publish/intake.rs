//! Takes batches from the inbox, spreads their messages over the lanes, and looks after claims.
//!
//! Two batches of the stream may be under way at once, so that groups are full across their border; a claim is begun
//! only when everything before it was sent, and the next batch only when the claim was. A claim holds an open
//! transaction, which must not idle: where the lanes cannot send, or nothing moves, it goes to the acker with the
//! verdicts it has.

use std::{
    cell::RefCell,
    collections::VecDeque,
    rc::Rc,
    time::{Duration, Instant},
};

use super::{
    hub::{Hub, lane_of},
    job::{Batch, Job, Ticket, abandoned, open_claim},
};
use crate::{
    credit::Cost,
    envelope::{Message, MessageBatch, Origin, Settlement},
    error::Result,
    outlet::Inbox,
};

/// How long nothing may move in a claim before it is cut. The transaction was open for a while when it came.
const CLAIM_PATIENCE: Duration = Duration::from_secs(4);
/// How long more of a claim is sent. Then what is under way may end, and the claim goes with it: a claim that moves
/// slowly, on and on, would be ended by the server ([`CLAIM_IDLE`](crate::deadlines::CLAIM_IDLE)), delivered rows and all.
const CLAIM_SENDS: Duration = Duration::from_secs(10);
/// How long a claim may be under way at all.
const CLAIM_LASTS: Duration = Duration::from_secs(16);
/// How long the lanes may be unable to send before claims are cut: longer than it takes to open another channel or
/// connection, so that a message that closes them is found out.
const STALL_PATIENCE: Duration = Duration::from_secs(2);
/// After waiting this long for room, batches are taken out of the inbox, so that claims among them are seen.
const LOOK_AHEAD: Duration = Duration::from_secs(2);
/// How often claims are looked at.
const TICK: Duration = Duration::from_millis(250);

/// The way from the inbox into the lanes.
#[derive(Debug)]
pub(super) struct Intake {
    hub: Rc<Hub>,
    inbox: Inbox<MessageBatch>,
    /// Taken and not begun.
    ahead: VecDeque<(MessageBatch, Instant)>,
    /// Begun and not settled.
    claims: Vec<Rc<Batch>>,
    /// Whether the batch begun last is a claim.
    in_claim: bool,
    /// Since when there has been no room.
    waiting_since: Option<Instant>,
}

impl Intake {
    pub(super) fn new(hub: Rc<Hub>, inbox: Inbox<MessageBatch>) -> Self {
        Self { hub, inbox, ahead: VecDeque::new(), claims: Vec::new(), in_claim: false, waiting_since: None }
    }

    /// Runs until the generation ends.
    pub(super) async fn run(&mut self) -> Result<()> {
        let stop = self.hub.shared.stop.clone();
        let hub = Rc::clone(&self.hub);
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let now = Instant::now();
            self.begin_what_may(now);
            let room = self.ahead.is_empty() && self.room();
            self.waiting_since = if room { None } else { self.waiting_since.or(Some(now)) };
            let take = room || self.waiting_since.is_some_and(|since| now.duration_since(since) > LOOK_AHEAD);
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                batch = self.inbox.recv(), if take => match batch {
                    Some(batch) => self.ahead.push_back(batch),
                    // The handler's end is gone, and so is the actor.
                    None => return Ok(()),
                },
                () = hub.moved.notified() => {}
                _ = tick.tick() => self.look_after_claims(),
            }
        }
    }

    /// Whether the lanes have been unable to send for too long.
    fn stalled(&self, now: Instant) -> bool {
        let stalled = |since: Instant| now.saturating_duration_since(since) > STALL_PATIENCE;
        self.hub.lines.iter().any(|line| line.stalled.get().is_some_and(stalled))
    }

    fn room(&self) -> bool {
        let waiting = self.hub.waiting();
        if self.in_claim { waiting == 0 } else { waiting < self.hub.shared.settings.publish.window as usize }
    }

    fn begin_what_may(&mut self, now: Instant) {
        let stalled = self.stalled(now);
        while let Some((batch, arrived)) = self.ahead.pop_front() {
            let claim = matches!(batch.origin, Origin::Claim(_));
            if claim && (stalled || now.saturating_duration_since(arrived) > CLAIM_PATIENCE) {
                self.cut_unbegun(batch);
            } else if !self.room() || (claim && self.hub.waiting() > 0) {
                self.ahead.push_front((batch, arrived));
                break;
            } else {
                self.begin(batch, now);
            }
        }
        self.cut_ahead(now, stalled);
    }

    /// Claims further back in what was taken have their patience too.
    fn cut_ahead(&mut self, now: Instant, stalled: bool) {
        let overdue = |batch: &MessageBatch, arrived: Instant| {
            matches!(batch.origin, Origin::Claim(_))
                && (stalled || now.saturating_duration_since(arrived) > CLAIM_PATIENCE)
        };
        if self.ahead.iter().any(|(batch, arrived)| overdue(batch, *arrived)) {
            for (batch, arrived) in std::mem::take(&mut self.ahead) {
                if overdue(&batch, arrived) {
                    self.cut_unbegun(batch);
                } else {
                    self.ahead.push_back((batch, arrived));
                }
            }
        }
    }

    fn begin(&mut self, batch: MessageBatch, now: Instant) {
        let MessageBatch { origin, mut messages, refused, passed, mut credit } = batch;
        self.hub.count_refused(&refused);
        match origin {
            Origin::Stream => {
                self.in_claim = false;
                if messages.is_empty() {
                    self.hub.news.passed(refused, passed, credit);
                    return;
                }
                if !refused.is_empty() || !passed.is_empty() {
                    let share = credit.split(cost(&refused));
                    self.hub.news.passed(refused, passed, share);
                }
                self.spread(messages, &Rc::new(Batch::Stream(RefCell::new(credit))));
            }
            Origin::Claim(claim) => {
                self.in_claim = true;
                let exposure = &self.hub.shared.exposure;
                // A claim keeps its exposure until it is settled as a whole, so more than all of it would wait for
                // itself.
                let beyond = messages.split_off(messages.len().min(exposure.size().messages as usize));
                self.hub.count_abandoned(beyond.len());
                let mut settled = open_claim(claim, refused, passed, credit, exposure.nothing());
                settled.settlements.extend(beyond.into_iter().map(abandoned));
                if messages.is_empty() {
                    self.hub.news.claim(settled);
                    return;
                }
                let batch = Rc::new(Batch::Claim(Ticket::new(settled, messages.len(), now)));
                self.spread(messages, &batch);
                self.claims.push(batch);
            }
        }
    }

    fn spread(&self, messages: Vec<Message>, batch: &Rc<Batch>) {
        let lines = &self.hub.lines;
        for message in messages {
            let lane = lane_of(&message.envelope, lines.len());
            let mut job =
                Job { message: Box::new(message), batch: Rc::clone(batch), exposed: false, suspect: false };
            self.hub.recall(&mut job);
            if let Some(line) = lines.get(lane) {
                line.push(job);
            }
        }
        self.hub.wake();
    }

    /// The broker cannot take it now: everything in it is released.
    fn cut_unbegun(&self, batch: MessageBatch) {
        let MessageBatch { origin, messages, refused, passed, credit } = batch;
        let Origin::Claim(claim) = origin else { return };
        self.hub.count_refused(&refused);
        self.hub.count_abandoned(messages.len());
        let mut settled = open_claim(claim, refused, passed, credit, self.hub.shared.exposure.nothing());
        settled.settlements.extend(messages.into_iter().map(abandoned));
        self.hub.news.claim(settled);
    }

    fn look_after_claims(&mut self) {
        let now = Instant::now();
        let stalled = self.stalled(now);
        self.claims.retain(|batch| {
            let Batch::Claim(ticket) = &**batch else { return false };
            if ticket.is_closed() {
                return false;
            }
            let (still, age) = (now.saturating_duration_since(ticket.moved()), now - ticket.begun());
            if !stalled && still <= CLAIM_PATIENCE && age <= CLAIM_LASTS {
                if age > CLAIM_SENDS {
                    self.hub.lines.iter().for_each(|line| line.withhold(batch, &self.hub));
                }
                return true;
            }
            tracing::info!(stalled, "cutting a claim: what was delivered is recorded, the rest released");
            for line in &self.hub.lines {
                line.withdraw(batch, &self.hub);
            }
            false
        });
    }
}

fn cost(settlements: &[Settlement]) -> Cost {
    settlements
        .iter()
        .fold(Cost::default(), |sum, settlement| sum + Cost { messages: 1, bytes: settlement.envelope.bytes })
}
