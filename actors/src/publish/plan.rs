//! What a lane does next: how much it may send, and what it waits for.

use std::time::Instant;

use lapin::types::ShortString;

use super::{
    exchanges::Presence,
    hub::exposure_of,
    job::Job,
    lane::{Lane, Session},
};
use crate::envelope::Reason;

/// What a lane does next.
#[derive(Debug)]
pub(super) enum Plan {
    /// Send so many.
    Send(usize),
    /// Wait for exposure for so many.
    Expose(usize),
    /// Find out whether an exchange exists, and whether it is a configured one.
    Look(ShortString, bool),
    /// Nothing, until something happens.
    Wait,
}

/// Whether a message may be sent now.
#[derive(Debug)]
pub(super) enum Admission {
    /// Yes.
    Now,
    /// Not yet.
    Later,
    /// Not before its exchange was looked for.
    Look,
    /// It would be refused.
    Never(Reason, String),
}

impl Lane {
    /// What to do now.
    pub(super) fn plan(&mut self, session: &Session) -> Plan {
        let now = Instant::now();
        let blocked = session.link.blocked();
        self.line.stall(blocked || self.lacking.is_some(), now);
        if blocked {
            return Plan::Wait;
        }
        if let Some(fixed) = self.fixed.clone() {
            match self.exchanges.presence(&fixed, now) {
                // Whether we may write to it is found out by writing to it.
                Presence::There | Presence::Forbidden(_) => {}
                Presence::Missing(_) => return Plan::Wait,
                Presence::Unknown => return Plan::Look(fixed, true),
            }
        }
        loop {
            let head = self.line.look(|waiting| waiting.front().map(|job| self.admit(job, now)));
            match head {
                None => {
                    if let Some(spare) = self.spare.take() {
                        spare.give_back();
                    }
                    if let Some(exchange) = self.lacking.take() {
                        self.hub.exchange_found(exchange.as_str());
                    }
                    return Plan::Wait;
                }
                Some(Admission::Later) => return Plan::Wait,
                Some(Admission::Look) => {
                    let head = self.line.look(|waiting| {
                        waiting.front().map(|job| (job.message.exchange.clone(), !job.message.own_exchange))
                    });
                    return head
                        .map_or(Plan::Wait, |(exchange, configured)| Plan::Look(exchange, configured));
                }
                Some(Admission::Never(reason, words)) => self.reject_head(reason, words),
                Some(Admission::Now) => break,
            }
        }
        if let Some(exchange) = self.lacking.take() {
            // What needed it left with its claim; it is looked for again when something needs it again.
            self.hub.exchange_found(exchange.as_str());
            self.line.stall(false, now);
        }
        let one_by_one = self.hub.alone() || self.hub.holds();
        let count = if one_by_one { 1 } else { self.group.min(self.line.waiting()) };
        let room = if one_by_one {
            usize::from(self.hub.unconfirmed() == 0)
        } else {
            self.window.saturating_sub(self.line.under_way.borrow().outstanding())
        };
        if count > room {
            return Plan::Wait;
        }
        let needed = self.line.look(|waiting| waiting.iter().take(count).filter(|job| !job.exposed).count());
        let spare = self.spare.as_ref().map_or(0, |spare| spare.cost().messages as usize);
        if needed > spare {
            let Some(credit) = self.hub.shared.exposure.try_acquire(exposure_of(needed - spare)) else {
                return Plan::Expose(needed - spare);
            };
            self.keep(credit);
        }
        if self.hub.holds() && !self.hub.probe(now) {
            return Plan::Wait;
        }
        Plan::Send(count)
    }

    /// Whether `job` may be sent now.
    pub(super) fn admit(&self, job: &Job, now: Instant) -> Admission {
        if self.line.under_way.borrow().contains(&job.message.envelope.row.id) {
            return Admission::Later;
        }
        match self.exchanges.presence(&job.message.exchange, now) {
            Presence::There => Admission::Now,
            Presence::Unknown => Admission::Look,
            Presence::Missing(words) if job.message.own_exchange => {
                Admission::Never(Reason::ExchangeMissing, words)
            }
            Presence::Missing(_) => Admission::Later,
            Presence::Forbidden(words) if job.message.own_exchange => {
                Admission::Never(Reason::Refused, words)
            }
            Presence::Forbidden(_) => Admission::Now,
        }
    }
}
