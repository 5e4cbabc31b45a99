//! A lane: one task that owns one confirm channel, for as long as the generation lives.
//!
//! It opens a channel, drives it until it ends ([`super::drive`]), puts what was under way back to the front of what
//! waits, in its order, and opens the next. An outage is not a verdict; a close that was caused by a message is, once
//! it is certain which.

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use lapin::{
    Channel,
    options::{BasicPublishOptions, ConfirmSelectOptions},
    types::ShortString,
};

use super::{
    broker::{Broker, Link},
    close::Ending,
    exchanges::{Exchanges, Presence},
    hub::Hub,
    job::Job,
    line::{Flight, Line},
};
use crate::{
    credit::Credit,
    deadlines::STEP,
    envelope::{Reason, Rejection, Verdict},
    status::Reason as StateReason,
};

/// Messages that are published together: polled as a group they cost a quarter of what one by one does, and 16 are
/// enough for that; more only delays the first confirm.
const GROUP: usize = 64;
/// The first and the longest pause before a channel is opened again that ended without having settled anything.
const REOPEN_PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Closes over a missing exchange in a row, without a verdict between, before a message is suspected: the exchange is
/// looked for again each time, and once it is known to be missing no message is to blame.
const MISSING_IN_A_ROW: u32 = 3;
/// AMQP's code for a broker that failed.
const INTERNAL_ERROR: u16 = 541;

/// A channel that is open, and the connection it is on.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) link: Rc<Link>,
    pub(super) channel: Channel,
}

/// One lane.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) hub: Rc<Hub>,
    pub(super) broker: Rc<Broker>,
    pub(super) line: Rc<Line>,
    pub(super) options: BasicPublishOptions,
    pub(super) window: usize,
    pub(super) group: usize,
    /// The configured exchange, where it is one for all and not the default exchange.
    pub(super) fixed: Option<ShortString>,
    pub(super) exchanges: Exchanges,
    /// A configured exchange that was missing when last looked for.
    pub(super) lacking: Option<ShortString>,
    /// Exposure that was taken and is not used yet.
    pub(super) spare: Option<Credit>,
    /// When a confirm came last, or the wait for one began.
    pub(super) moved: Instant,
    /// Whether the board says that confirms do not come.
    pub(super) silent: bool,
    /// Whether the broker forbids us the configured exchange.
    pub(super) forbidden: bool,
    /// Whether anything got a verdict on this channel.
    pub(super) settled: bool,
    pause: Duration,
    missing_in_a_row: u32,
}

impl Lane {
    pub(super) fn new(hub: Rc<Hub>, broker: Rc<Broker>, line: Rc<Line>) -> Self {
        let settings = &hub.shared.settings.publish;
        let window = settings.window.max(1) as usize;
        let group = GROUP.min(window).min(hub.shared.exposure.size().messages as usize);
        // Without confirms lapin keeps returns for a call we never make, and nothing would be done about them.
        let mandatory = settings.mandatory && settings.confirms;
        let fixed = settings
            .exchange
            .fixed()
            .filter(|name| !name.is_empty())
            .and_then(|name| ShortString::try_new(name).ok());
        Self {
            broker,
            line,
            options: BasicPublishOptions { mandatory, ..BasicPublishOptions::default() },
            window,
            group,
            fixed,
            exchanges: Exchanges::default(),
            lacking: None,
            spare: None,
            moved: Instant::now(),
            silent: false,
            forbidden: false,
            settled: false,
            pause: Duration::ZERO,
            missing_in_a_row: 0,
            hub,
        }
    }

    /// Opens channels and drives them; never returns.
    pub(super) async fn run(mut self) {
        loop {
            let session = self.open().await;
            let ending = self.drive(&session).await;
            self.hub.count_channels(false);
            self.line.stall(true, Instant::now());
            let usable = session.link.usable();
            tracing::warn!(reason = ending.words(), connection_lost = !usable, "channel ended");
            if !usable {
                self.broker.lost(ending.words());
            }
            self.take_back(&ending);
        }
    }

    async fn open(&mut self) -> Session {
        loop {
            tokio::time::sleep(self.pause.mul_f64(0.8 + 0.4 * fastrand::f64())).await;
            self.pause = (self.pause * 2).clamp(REOPEN_PAUSE.0, REOPEN_PAUSE.1);
            let link = self.broker.link().await;
            if link.blocked() {
                // Opening a channel would hang until the alarm is over.
                continue;
            }
            let blocked = || link.blocked();
            let opening = self.broker.patiently("channel.open", &blocked, self.open_on(&link));
            match tokio::time::timeout(STEP, opening).await {
                Ok(Ok(channel)) => {
                    self.hub.count_channels(true);
                    self.broker.found(self.forbidden);
                    self.exchanges.renew();
                    self.settled = false;
                    self.silent = false;
                    self.moved = Instant::now();
                    return Session { link, channel };
                }
                Ok(Err(error)) => {
                    tracing::debug!(error = %error, "cannot open a channel");
                    if !link.usable() {
                        self.broker.lost(Ending::of(&error).words());
                    }
                }
                Err(_) => {
                    link.discard();
                    self.broker.lost(&format!("no answer to channel.open within {} s", STEP.as_secs()));
                }
            }
        }
    }

    async fn open_on(&self, link: &Link) -> lapin::Result<Channel> {
        let channel = link.connection().create_channel().await?;
        if self.hub.shared.settings.publish.confirms {
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
        }
        Ok(channel)
    }

    /// Puts back what was under way when a channel ended. Orphans vanish with it.
    fn take_back(&mut self, ending: &Ending) {
        let left = self.line.under_way.borrow_mut().take_back();
        let outstanding = left.iter().filter(|(_, outstanding)| *outstanding).count();
        self.hub.count_unconfirmed(0, outstanding);
        if self.settled {
            self.pause = Duration::ZERO;
            self.missing_in_a_row = 0;
        }
        let blamed = match ending {
            Ending::Blamed { code: 404, .. } if self.missing_in_a_row < MISSING_IN_A_ROW => {
                self.missing_in_a_row += 1;
                None
            }
            Ending::Blamed { connection, code, words } => Some((*connection, *code, words.as_str())),
            Ending::Outage(_) => None,
        };
        let mut back = Vec::with_capacity(left.len());
        for (flight, unconfirmed) in left {
            let Flight { job: Some(mut job), sent, alone } = flight else { continue };
            if let Some((connection, code, words)) = blamed
                && unconfirmed
            {
                let certain = outstanding == 1 && (alone || !connection || self.hub.lines.len() == 1);
                // The broker's code does not tell an exchange from a topic, which is the row's own routing key.
                let forbidden = code == 403 && words.contains("access to exchange");
                if certain && forbidden && !job.message.own_exchange {
                    self.forbid(words);
                } else if certain {
                    if forbidden {
                        let presence = Presence::Forbidden(words.to_owned());
                        self.exchanges.note(job.message.exchange.clone(), &presence, Instant::now());
                    }
                    // What a broker fails over now it may take another time; what it cannot read it never will.
                    let reason =
                        if connection && code != INTERNAL_ERROR { Reason::Invalid } else { Reason::Refused };
                    self.condemn(job, sent, Rejection { reason, detail: words.to_owned() });
                    continue;
                }
                self.hub.suspect(&mut job);
            }
            back.push(job);
        }
        self.line.put_back(back);
    }

    /// The broker closed over this very message: that is its verdict.
    fn condemn(&mut self, job: Job, sent: Instant, rejection: Rejection) {
        let exposure = self.line.share(&job);
        self.hub.settle(job, Verdict::Rejected(rejection), Some(sent), exposure, self.hub.moment());
        self.hub.news.ring();
        self.pause = Duration::ZERO;
    }

    /// The broker does not let us publish to the configured exchange: no row is to blame for that.
    fn forbid(&mut self, words: &str) {
        self.forbidden = true;
        self.hub.shared.board.raise(
            StateReason::BrokerRefused,
            format!("publishing is forbidden: {words}"),
            "grant the relay's user write permission on the exchange; the relay keeps trying",
        );
    }
}
