//! What the lanes of one publisher share. All of it lives on one arbiter, so plain cells do.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeSet, HashSet},
    rc::Rc,
    sync::atomic::Ordering::Relaxed,
    time::Instant,
};

use bytes::Bytes;
use tokio::sync::Notify;

use super::{
    job::{Batch, Job, abandoned},
    line::Line,
    news::News,
    streak::{LIMIT, Streak},
};
use crate::{
    credit::{Cost, Credit},
    envelope::{Envelope, Reason, Rejection, Settlement, Verdict},
    metrics::{MessageMetrics, Stage, StageMetrics, rejections},
    pipeline::shared::Shared,
    status::Reason as StateReason,
};

/// Shared by the lanes, the intake and the hand-over.
#[derive(Debug)]
pub(super) struct Hub {
    /// The generation's handles.
    pub shared: Shared,
    /// Verdicts on their way out.
    pub news: News,
    /// What waits and is under way, a lane.
    pub lines: Vec<Rc<Line>>,
    /// Told when a lane has sent something, so the intake looks whether there is room.
    pub moved: Notify,
    /// Sent and not confirmed, over all lanes.
    unconfirmed: Cell<usize>,
    /// Messages that are to be sent alone, over all lanes.
    suspects: Cell<usize>,
    /// Ids of suspects that left without a verdict, with a claim that was cut: they come back as suspects.
    remembered: RefCell<HashSet<Bytes>>,
    /// Channels in confirm mode that are open.
    open_channels: Cell<usize>,
    streak: RefCell<Streak>,
    /// Configured exchanges that do not exist.
    missing: RefCell<BTreeSet<String>>,
    stage: StageMetrics,
    messages: MessageMetrics,
}

/// So many ids of suspects are kept: a claim's worth and more. Forgetting them costs another close, no more.
const REMEMBERED: usize = 4096;

/// One moment's time, read once for all verdicts of a drain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    /// By the monotonic clock.
    pub now: Instant,
    database_now: i64,
}

impl Hub {
    /// A hub of as many lanes as the settings say.
    pub(super) fn new(shared: Shared) -> Self {
        let lanes = shared.settings.publish.lanes.max(1);
        // A generation before this one may have left them; whether they hold is found out anew.
        shared.board.clear(StateReason::ExchangeMissing);
        shared.board.clear(StateReason::AllRejected);
        Self {
            news: News::new(shared.credits.clone(), shared.exposure.clone()),
            lines: (0..lanes).map(|_| Rc::default()).collect(),
            shared,
            moved: Notify::new(),
            unconfirmed: Cell::new(0),
            suspects: Cell::new(0),
            remembered: RefCell::default(),
            open_channels: Cell::new(0),
            streak: RefCell::default(),
            missing: RefCell::default(),
            stage: StageMetrics::of(Stage::Publish),
            messages: MessageMetrics::new(),
        }
    }

    /// This moment.
    pub(super) fn moment(&self) -> Moment {
        Moment { now: Instant::now(), database_now: self.shared.figures.database_now() }
    }

    /// Wakes every lane.
    pub(super) fn wake(&self) {
        for line in &self.lines {
            line.wake.notify_one();
        }
    }

    /// Messages that wait in any lane.
    pub(super) fn waiting(&self) -> usize {
        self.lines.iter().map(|line| line.waiting()).sum()
    }

    /// Sent and not confirmed, over all lanes.
    pub(super) fn unconfirmed(&self) -> usize {
        self.unconfirmed.get()
    }

    /// Notes that `more` were sent and `fewer` are not under way any more.
    pub(super) fn count_unconfirmed(&self, more: usize, fewer: usize) {
        let count = (self.unconfirmed.get() + more).saturating_sub(fewer);
        self.unconfirmed.set(count);
        self.shared.figures.unconfirmed.store(count as u64, Relaxed);
    }

    /// Whether one message at a time may be under way on the whole connection, to find out which one it does not bear.
    pub(super) fn alone(&self) -> bool {
        self.suspects.get() > 0
    }

    /// Marks a message as suspect: until it has its verdict, each message is sent alone.
    pub(super) fn suspect(&self, job: &mut Job) {
        if !std::mem::replace(&mut job.suspect, true) {
            self.suspects.set(self.suspects.get() + 1);
        }
    }

    /// Marks a message as suspect if it was when it left without a verdict, or if the broker closed a channel over it the
    /// last time: that costs one reopening an attempt, and no neighbour's.
    pub(super) fn recall(&self, job: &mut Job) {
        let row = &job.message.envelope.row;
        if self.remembered.borrow_mut().remove(&row.id) || row.refused {
            self.suspect(job);
        }
    }

    /// Notes that a message leaves the publisher.
    fn acquit(&self, job: &Job, verdict: bool) {
        if !job.suspect {
            return;
        }
        self.suspects.set(self.suspects.get().saturating_sub(1));
        if !verdict {
            let mut remembered = self.remembered.borrow_mut();
            if remembered.len() >= REMEMBERED {
                remembered.clear();
            }
            remembered.insert(job.message.envelope.row.id.clone());
        }
        self.wake();
    }

    /// Notes that a lane's channel opened or ended.
    pub(super) fn count_channels(&self, opened: bool) {
        let open =
            if opened { self.open_channels.get() + 1 } else { self.open_channels.get().saturating_sub(1) };
        self.open_channels.set(open);
        let figures = &self.shared.figures;
        figures.broker_connected.store(open > 0, Relaxed);
        if opened {
            figures.channel_openings.fetch_add(1, Relaxed);
        }
    }

    /// Whether only probes may be sent.
    pub(super) fn holds(&self) -> bool {
        self.streak.borrow().holds()
    }

    /// Takes the right to send one probe, if it is time.
    pub(super) fn probe(&self, now: Instant) -> bool {
        self.streak.borrow_mut().probe(now)
    }

    /// A message that was sent at `sent` has its verdict.
    pub(super) fn settle(
        &self,
        job: Job,
        verdict: Verdict,
        sent: Option<Instant>,
        exposure: Option<Credit>,
        at: Moment,
    ) {
        if let Some(sent) = sent {
            self.stage.seconds.record(at.now.saturating_duration_since(sent));
        }
        match &verdict {
            Verdict::Delivered => {
                self.shared.figures.delivered.fetch_add(1, Relaxed);
                self.messages.delivered.increment(1);
                if let Some(committed) = job.message.envelope.committed_at {
                    self.messages.observe_delivery(at.database_now - committed);
                }
                if self.streak.borrow_mut().delivered() {
                    self.shared.board.clear(StateReason::AllRejected);
                    self.wake();
                }
            }
            Verdict::Rejected(rejection) => {
                self.count_rejection(rejection.reason);
                if self.streak.borrow_mut().rejected(rejection.reason, at.now) {
                    self.all_rejected(rejection);
                }
            }
            Verdict::Abandoned => self.messages.abandoned.increment(1),
        }
        self.acquit(&job, true);
        let cost = job.cost();
        let Job { message, batch, .. } = job;
        let settlement = Settlement { envelope: message.envelope, verdict, exposed: exposure.is_some() };
        match &*batch {
            Batch::Stream(credit) => {
                let credit = credit.borrow_mut().split(cost);
                self.news.settled(settlement, credit, exposure);
            }
            Batch::Claim(ticket) => {
                ticket.touch(at.now);
                if let Some(whole) = ticket.settle(settlement, exposure) {
                    self.news.claim(whole);
                }
            }
        }
    }

    /// A message of a claim that is cut: its outcome is unknown.
    pub(super) fn abandon(&self, job: Job, exposure: Option<Credit>) {
        self.messages.abandoned.increment(1);
        self.acquit(&job, false);
        let Job { message, batch, .. } = job;
        if let Batch::Claim(ticket) = &*batch
            && let Some(whole) = ticket.settle(abandoned(*message), exposure)
        {
            self.news.claim(whole);
        }
    }

    /// A row that was refused by validation passes through: its verdict is counted here like any other.
    pub(super) fn count_refused(&self, refused: &[Settlement]) {
        for settlement in refused {
            if let Verdict::Rejected(rejection) = &settlement.verdict {
                self.count_rejection(rejection.reason);
            }
        }
    }

    /// What a claim that is cut before it was begun abandons.
    pub(super) fn count_abandoned(&self, messages: usize) {
        self.messages.abandoned.increment(messages as u64);
    }

    fn count_rejection(&self, reason: Reason) {
        self.shared.figures.rejected.fetch_add(1, Relaxed);
        self.messages.rejected.increment(1);
        rejections(reason).increment(1);
    }

    fn all_rejected(&self, last: &Rejection) {
        let detail =
            format!("{LIMIT} messages in a row were rejected ({}): {}", last.reason.as_str(), last.detail);
        let remedy = match last.reason {
            Reason::Nacked => {
                "make room in the queues that refuse messages; one message a while probes for it"
            }
            Reason::ExchangeMissing => {
                "declare the exchanges that the rows name; one message a while probes for them"
            }
            Reason::Refused => "read the broker's words and its log; one message a while probes for a change",
            Reason::Unroutable | Reason::Invalid => {
                "bind a queue to the exchange for these routing keys; one message a while probes for it"
            }
        };
        self.shared.board.raise(StateReason::AllRejected, detail, remedy);
    }

    /// The generation ends: what it says about itself is over. Conditions stay until the next one knows better.
    pub(super) fn leave(&self) {
        self.shared.figures.broker_connected.store(false, Relaxed);
        self.shared.figures.unconfirmed.store(0, Relaxed);
    }

    /// A configured exchange does not exist.
    pub(super) fn exchange_missing(&self, exchange: &str, words: &str) {
        self.missing.borrow_mut().insert(exchange.to_owned());
        self.shared.board.raise(
            StateReason::ExchangeMissing,
            format!("exchange '{exchange}' does not exist: {words}"),
            format!("declare exchange '{exchange}' on the broker, or set publish.declare = true"),
        );
    }

    /// A configured exchange exists, or nothing needs it any more.
    pub(super) fn exchange_found(&self, exchange: &str) {
        let mut missing = self.missing.borrow_mut();
        if missing.remove(exchange) && missing.is_empty() {
            self.shared.board.clear(StateReason::ExchangeMissing);
        }
    }
}

/// What a message costs of the exposure.
pub(super) fn exposure_of(messages: usize) -> Cost {
    Cost { messages: u32::try_from(messages).unwrap_or(u32::MAX), bytes: 0 }
}

/// The lane of a message: by its key where it has one, so that what belongs together stays in order.
pub(super) fn lane_of(envelope: &Envelope, lanes: usize) -> usize {
    if lanes <= 1 {
        return 0;
    }
    let by = envelope.row.key.as_ref().unwrap_or(&envelope.row.id);
    // FNV-1a: the lane of a key must not change between generations, which std's hasher does not promise.
    let hash = by.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    (hash % lanes as u64) as usize
}
