//! Driving one channel from its opening to its end: collect confirms, settle what is certain, send what fits.

use std::{
    future::{Future, pending, poll_fn},
    pin::Pin,
    rc::Rc,
    task::Poll,
    time::{Duration, Instant},
};

use bytes::Bytes;
use lapin::{BasicProperties, Confirmation, types::ShortString};

use super::{
    close::Ending,
    exchanges::{Presence, look},
    flights::{Flights, publish},
    hub::exposure_of,
    job::Batch,
    lane::{Lane, Session},
    line::Flight,
    plan::{Admission, Plan},
    verdict::{Outcome, Returned},
};
use crate::{
    credit::Credit,
    deadlines::PATIENCE,
    envelope::{Reason, Rejection, Verdict},
    error::Result,
    failpoints::{self, Point},
    status::Reason as StateReason,
};

/// How often what no event tells is looked at: a confirm that does not come, a probe that is due.
const TICK: Duration = Duration::from_millis(250);
/// How long the other messages of a channel that ends may take to say why.
const LAST_WORDS: Duration = Duration::from_millis(100);

type Local<T> = Pin<Box<dyn Future<Output = T>>>;

/// What one publish needs.
struct Ready {
    tag: u64,
    exchange: ShortString,
    routing_key: ShortString,
    body: Bytes,
    properties: BasicProperties,
}

impl Lane {
    /// Drives a channel until it ends. What is under way then is left in the line.
    pub(super) async fn drive(&mut self, session: &Session) -> Ending {
        let mut flights = Flights::new();
        let mut exposure: Option<Local<Result<Credit>>> = None;
        let mut looking: Option<Local<(ShortString, Presence)>> = None;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            if let Some(ending) = self.collect(&mut flights) {
                return self.last_words(&mut flights, ending).await;
            }
            if !session.channel.status().connected() {
                let ending = Ending::Outage("the channel is closed".to_owned());
                return self.last_words(&mut flights, ending).await;
            }
            if exposure.is_none() && looking.is_none() {
                match self.plan(session) {
                    Plan::Send(count) => {
                        let now = Instant::now();
                        let before = self.line.under_way.borrow().outstanding();
                        for _ in 0..count {
                            let Some(ready) = self.next(now) else { break };
                            let Ready { tag, exchange, routing_key, body, properties } = ready;
                            let channel = &session.channel;
                            let options = self.options;
                            flights.push(publish(
                                channel,
                                tag,
                                exchange,
                                routing_key,
                                options,
                                body,
                                properties,
                            ));
                        }
                        self.hub.count_unconfirmed(self.line.under_way.borrow().outstanding() - before, 0);
                        self.hub.moved.notify_one();
                        continue;
                    }
                    Plan::Expose(count) => {
                        let (budget, stop) = (self.hub.shared.exposure.clone(), self.hub.shared.stop.clone());
                        exposure =
                            Some(Box::pin(async move { budget.acquire(exposure_of(count), &stop).await }));
                    }
                    Plan::Look(exchange, configured) => {
                        let declare = configured && self.hub.shared.settings.publish.declare;
                        let (broker, link) = (Rc::clone(&self.broker), Rc::clone(&session.link));
                        looking = Some(Box::pin(async move {
                            let looked = look(Rc::clone(&link), exchange, declare);
                            broker.patiently("exchange.declare", &|| link.blocked(), looked).await
                        }));
                    }
                    Plan::Wait => {}
                }
            }
            tokio::select! {
                biased;
                () = flights.ready() => give_way().await,
                credit = some(&mut exposure) => {
                    exposure = None;
                    match credit {
                        Ok(credit) => self.keep(credit),
                        // The generation ends, and this task with it. To ask again would be answered at once, and again:
                        // the thread would never come to ending it.
                        Err(_) => pending().await,
                    }
                }
                (exchange, presence) = some(&mut looking) => {
                    looking = None;
                    self.note(exchange, &presence);
                }
                () = self.line.wake.notified() => {}
                _ = tick.tick() => {
                    if let Some(ending) = self.overdue(session) {
                        return ending;
                    }
                }
            }
        }
    }

    /// Collects everything that is ready and settles what is certain. An error ends the channel.
    fn collect<F>(&mut self, flights: &mut Flights<F>) -> Option<Ending>
    where
        F: Future<Output = (u64, lapin::Result<Confirmation>)>,
    {
        let mut ending: Option<Ending> = None;
        let mut confirmed = 0;
        let mut under_way = self.line.under_way.borrow_mut();
        flights.drain(|(tag, result)| match result {
            Ok(confirmation) => {
                confirmed += 1;
                let acked = !confirmation.is_nack();
                under_way.completed(tag, acked, confirmation.take_message().map(returned));
            }
            Err(error) => {
                let said = Ending::of(&error);
                if ending.as_ref().is_none_or(|known| said.says_more_than(known)) {
                    ending = Some(said);
                }
            }
        });
        if confirmed > 0 {
            failpoints::strike(Point::Confirmed);
            let at = self.hub.moment();
            let (hub, line) = (&self.hub, &self.line);
            let (mut settled, mut delivered) = (false, false);
            under_way.settle(|flight, outcome| {
                settled = true;
                let Some(job) = flight.job else { return };
                let exposure = line.share(&job);
                delivered |= outcome == Outcome::Delivered;
                hub.settle(job, verdict(outcome), Some(flight.sent), exposure, at);
            });
            drop(under_way);
            self.hub.count_unconfirmed(0, confirmed);
            self.moved = at.now;
            self.settled |= settled;
            self.heard();
            if delivered && std::mem::take(&mut self.forbidden) {
                self.hub.shared.board.clear(StateReason::BrokerRefused);
            }
            self.hub.news.ring();
            if self.hub.alone() {
                self.hub.wake();
            }
        }
        ending
    }

    /// The first error of a channel that ends may be only a consequence: waits a moment for the broker's words.
    async fn last_words<F>(&mut self, flights: &mut Flights<F>, mut ending: Ending) -> Ending
    where
        F: Future<Output = (u64, lapin::Result<Confirmation>)>,
    {
        let until = tokio::time::Instant::now() + LAST_WORDS;
        while matches!(ending, Ending::Outage(_)) && self.line.under_way.borrow().outstanding() > 0 {
            if tokio::time::timeout_at(until, flights.ready()).await.is_err() {
                break;
            }
            if let Some(said) = self.collect(flights)
                && said.says_more_than(&ending)
            {
                ending = said;
            }
        }
        ending
    }

    /// Takes the next message off the line if it may be sent now.
    fn next(&mut self, now: Instant) -> Option<Ready> {
        let admitted = self.line.look(|waiting| {
            waiting.front().is_some_and(|job| matches!(self.admit(job, now), Admission::Now))
        });
        if !admitted {
            return None;
        }
        let mut job = self.line.pop()?;
        failpoints::strike(Point::PublishBefore);
        if !job.exposed {
            self.line.expose(self.spare.as_mut()?.split(exposure_of(1)));
            job.exposed = true;
        }
        if let Batch::Claim(ticket) = &*job.batch {
            ticket.touch(now);
        }
        let message = &job.message;
        let id = message.envelope.row.id.clone();
        let (exchange, routing_key) = (message.exchange.clone(), message.routing_key.clone());
        let (body, properties) = (message.envelope.row.content.clone(), message.properties.clone());
        let mut under_way = self.line.under_way.borrow_mut();
        if under_way.outstanding() == 0 {
            self.moved = now;
        }
        let tag = under_way.sent(id, Flight { job: Some(job), sent: now, alone: self.hub.alone() });
        Some(Ready { tag, exchange, routing_key, body, properties })
    }

    /// The first message that waits names an exchange of its own that does not exist or is forbidden.
    pub(super) fn reject_head(&mut self, reason: Reason, detail: String) {
        let Some(job) = self.line.pop() else { return };
        let exposure = self.line.share(&job);
        let verdict = Verdict::Rejected(Rejection { reason, detail });
        self.hub.settle(job, verdict, None, exposure, self.hub.moment());
        self.hub.news.ring();
        self.settled = true;
    }

    /// Keeps exposure that was granted.
    pub(super) fn keep(&mut self, credit: Credit) {
        match &mut self.spare {
            Some(spare) => spare.merge(credit),
            None => self.spare = Some(credit),
        }
    }

    fn note(&mut self, exchange: ShortString, presence: &Presence) {
        let now = Instant::now();
        self.exchanges.note(exchange.clone(), presence, now);
        if *presence != Presence::Unknown {
            self.broker.answered();
        }
        let configured = self.fixed.as_ref() == Some(&exchange)
            || self.line.look(|waiting| {
                waiting
                    .front()
                    .is_some_and(|job| job.message.exchange == exchange && !job.message.own_exchange)
            });
        match presence {
            Presence::Missing(words) if configured => {
                self.hub.exchange_missing(exchange.as_str(), words);
                self.lacking = Some(exchange);
                self.line.stall(true, now);
            }
            Presence::There if self.lacking.as_ref() == Some(&exchange) => {
                self.hub.exchange_found(exchange.as_str());
                self.lacking = None;
            }
            _ => {}
        }
    }

    /// Whether confirms have failed to come for too long. While the broker is blocked none can.
    fn overdue(&mut self, session: &Session) -> Option<Ending> {
        if session.link.blocked() {
            self.moved = Instant::now();
            self.heard();
        }
        let limit = self.hub.shared.settings.publish.confirm_timeout;
        let waiting = self.line.under_way.borrow().outstanding() > 0;
        let silence = self.moved.elapsed();
        if waiting && silence > PATIENCE {
            self.silent = true;
            self.broker.silent(self.moved, &format!("no confirm for {} s", silence.as_secs()));
        }
        (waiting && silence > limit)
            .then(|| Ending::Outage(format!("no confirm within {} ms", limit.as_millis())))
    }

    /// Confirms come, or an alarm explains why they do not.
    fn heard(&mut self) {
        if std::mem::take(&mut self.silent) {
            self.broker.answered();
        }
    }
}

fn returned(message: lapin::message::BasicReturnMessage) -> Returned {
    let id = message.delivery.properties.message_id().as_ref();
    Returned {
        id: id.map(|id| Bytes::copy_from_slice(id.as_str().as_bytes())).unwrap_or_default(),
        words: format!("{} {}", message.reply_code, message.reply_text),
    }
}

fn verdict(outcome: Outcome) -> Verdict {
    match outcome {
        Outcome::Delivered => Verdict::Delivered,
        Outcome::Returned(detail) => Verdict::Rejected(Rejection { reason: Reason::Unroutable, detail }),
        Outcome::Nacked => Verdict::Rejected(Rejection {
            reason: Reason::Nacked,
            detail: "negatively acknowledged: a queue did not take it".to_owned(),
        }),
    }
}

/// The future's output; never, if there is none.
async fn some<T>(future: &mut Option<Local<T>>) -> T {
    match future {
        Some(future) => future.await,
        None => pending().await,
    }
}

/// Lets the arbiter's other tasks run, without a trip through its reactor.
async fn give_way() {
    let mut gave = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut gave, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
