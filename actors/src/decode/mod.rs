//! The second stage: rows come in as their source read them, messages ready to be sent go out.
//!
//! The [`Decoder`] promises that every row that comes in goes out as exactly one message or one refusal, in the same
//! order, and that what needs no publishing (ends of transactions, keepalives, rows recorded before) has its number in
//! the ledger. A claim stays one batch. Of the stream nothing is held back to fill one, but what waits already goes on
//! together: a batch costs the stages behind two wake-ups, however small it is.

pub mod headers;
pub mod message;
pub mod pgoutput;
pub mod recorded;
pub mod relation;
pub mod stream;
pub mod template;
pub mod timestamp;

#[cfg(test)]
pub(crate) mod testing;

use std::time::Instant;

use actix::{Actor, ActorContext, ActorFutureExt, AsyncContext, Context, Handler, WrapFuture};
use futures_util::future::LocalBoxFuture;

use crate::{
    credit::{Cost, Credit},
    envelope::{
        Envelope, Message, MessageBatch, Origin, Raw, RawBatch, Rejection, Row, Settlement, StreamEvent,
        Verdict,
    },
    error::{Error, Kind, Result},
    metrics::{Stage, StageMetrics},
    outlet::{Delivery, Inbox, InboxEntry, Outlet},
    pipeline::{exit::ExitGuard, shared::Shared},
    position::{Lsn, Position},
};

use message::{Composed, Composer, invalid};
use stream::{Element, Numbered, StreamDecoder};

/// Where a stream is taken up again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resume {
    /// Rows at or before it are recorded.
    pub position: Option<Position>,
    /// Transactions that committed up to here may have been swept: their rows are asked for before they are published.
    pub overlap: Option<Lsn>,
}

/// Turns rows into messages.
pub struct Decoder {
    entry: InboxEntry<RawBatch>,
    /// Taken by `started`; stages are built anew, never restarted.
    run: Option<LocalBoxFuture<'static, Result<()>>>,
    exit: ExitGuard,
}

impl Decoder {
    /// A decoder that hands over to `publisher` and takes the stream up at `resume`.
    pub fn new(
        shared: Shared,
        exit: ExitGuard,
        (entry, inbox): (InboxEntry<RawBatch>, Inbox<RawBatch>),
        publisher: Outlet<MessageBatch>,
        resume: Resume,
    ) -> Self {
        let run = Loop {
            composer: Composer::new(&shared.settings),
            stream: StreamDecoder::new(shared.settings.outbox.clone(), resume.position),
            overlap: resume.overlap,
            publisher,
            metrics: StageMetrics::of(Stage::Decode),
            shared,
        };
        Self { entry, run: Some(Box::pin(run.run(inbox))), exit }
    }
}

impl Actor for Decoder {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        let run = self.run.take().expect("an actor starts once");
        ctx.spawn(run.into_actor(self).map(|result, stage, ctx| {
            stage.exit.returned(result);
            ctx.stop();
        }));
    }
}

impl Handler<Delivery<RawBatch>> for Decoder {
    type Result = ();

    fn handle(&mut self, delivery: Delivery<RawBatch>, _: &mut Context<Self>) {
        self.entry.put(delivery);
    }
}

/// Rows of a batch of the stream, at most.
const MOST_ROWS: u32 = 256;

struct Loop {
    shared: Shared,
    composer: Composer,
    stream: StreamDecoder,
    /// `None` once the stream is beyond it.
    overlap: Option<Lsn>,
    publisher: Outlet<MessageBatch>,
    metrics: StageMetrics,
}

impl Loop {
    async fn run(self, inbox: Inbox<RawBatch>) -> Result<()> {
        let stop = self.shared.stop.clone();
        match self.decode_all(inbox).await {
            Err(error) if error.kind() == Kind::Stopped && stop.is_cancelled() => Ok(()),
            result => result,
        }
    }

    async fn decode_all(mut self, mut inbox: Inbox<RawBatch>) -> Result<()> {
        let stop = self.shared.stop.clone();
        let mut durable = self.shared.controls.durable.subscribe();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                next = inbox.recv() => {
                    let Some(next) = next else { return Ok(()) };
                    let mut next = Some(next);
                    while let Some((batch, arrived)) = next {
                        next = self.decode(batch, arrived, &mut inbox).await?;
                    }
                }
                Ok(()) = durable.changed(), if self.stream.holds_an_end() => {
                    let now = *durable.borrow_and_update();
                    let passed = Vec::from_iter(self.stream.release(now));
                    if !passed.is_empty() {
                        self.hand_over(empty(self.shared.credits.nothing(), passed), Instant::now()).await?;
                    }
                }
            }
        }
    }

    /// Decodes `batch`, and of a stream what fits with it and waits in `inbox` already. Returns what does not fit.
    async fn decode(
        &mut self,
        batch: RawBatch,
        arrived: Instant,
        inbox: &mut Inbox<RawBatch>,
    ) -> Result<Option<(RawBatch, Instant)>> {
        let RawBatch { origin, raw, credit } = batch;
        let (mut decoded, mut rows) = match raw {
            Raw::Rows(rows) => {
                let decoded = self.claimed(origin, rows, credit);
                return self.hand_over(decoded, arrived).await.map(|()| None);
            }
            Raw::Stream(events) => {
                let rows = credit.cost().messages;
                let mut decoded = empty(credit, Vec::new());
                self.streamed(events, &mut decoded).await?;
                (decoded, rows)
            }
        };
        let mut rest = None;
        while let Some((next, next_arrived)) = inbox.try_recv() {
            rows += next.credit.cost().messages;
            match next.raw {
                Raw::Stream(events) if rows <= MOST_ROWS => {
                    decoded.credit.merge(next.credit);
                    self.streamed(events, &mut decoded).await?;
                    self.metrics.leave(next_arrived);
                }
                raw => {
                    rest = Some((RawBatch { raw, ..next }, next_arrived));
                    break;
                }
            }
        }
        self.hand_over(decoded, arrived).await?;
        Ok(rest)
    }

    async fn hand_over(&self, decoded: MessageBatch, arrived: Instant) -> Result<()> {
        let nothing = decoded.messages.is_empty() && decoded.refused.is_empty() && decoded.passed.is_empty();
        // A claim is handed on even if nothing is left of it: its transaction must end.
        if !nothing || matches!(decoded.origin, Origin::Claim(_)) {
            self.publisher.hand_over(decoded, &self.shared.stop).await?;
        }
        self.metrics.leave(arrived);
        Ok(())
    }

    /// The rows of a claim, numbered by their place in it.
    fn claimed(&self, origin: Origin, rows: Vec<Row>, credit: Credit) -> MessageBatch {
        let mut decoded = MessageBatch { origin, ..empty(credit, Vec::new()) };
        decoded.messages.reserve_exact(rows.len());
        for (number, row) in (0..).zip(rows) {
            let bytes = self.shared.credits.clamp(Cost::message(row.bytes())).bytes;
            let envelope = Envelope { number, place: None, committed_at: row.occurred_on, row, bytes };
            self.compose(&mut decoded, envelope);
        }
        decoded
    }

    /// Reads and numbers events of the stream into `decoded`, which pays for them; what was paid for rows that are not
    /// published is given back.
    async fn streamed(&mut self, events: Vec<StreamEvent>, decoded: &mut MessageBatch) -> Result<()> {
        let (mut elements, unused) = self.stream.read(events, &self.shared.credits)?;
        drop(decoded.credit.split(unused));
        if self.overlap.is_some() {
            self.ask_for_recorded(&mut elements).await?;
        }
        let durable = *self.shared.controls.durable.borrow();
        let Numbered { rows, passed, unused } = self.stream.number(elements, durable);
        drop(decoded.credit.split(unused));
        decoded.passed.extend(passed);
        decoded.messages.reserve(rows.len());
        for row in rows {
            match row.null {
                Some(column) => refuse(decoded, row.envelope, format!("column {column} is null")),
                None => self.compose(decoded, row.envelope),
            }
        }
        Ok(())
    }

    /// While the stream repeats what was swept: finds out which rows were recorded by that.
    async fn ask_for_recorded(&mut self, elements: &mut [Element]) -> Result<()> {
        let Some(overlap) = self.overlap else { return Ok(()) };
        let mut beyond = false;
        let mut candidates: Vec<_> = elements
            .iter_mut()
            .filter_map(|element| match element {
                Element::Row(row) => Some(row),
                Element::End(end) => {
                    beyond |= *end > overlap;
                    None
                }
            })
            .filter(|row| {
                let within = row.envelope.place.is_some_and(|place| place.position.commit <= overlap);
                within && !row.recorded
            })
            .collect();
        let Some(id_type) = self.stream.relations().id_type() else { return Ok(()) };
        let (outbox, rows) = (&self.shared.settings.outbox, self.shared.settings.ack.rows);
        let asked = recorded::mark(&self.shared.pool, outbox, rows, id_type, &mut candidates);
        let stopped = || Error::new(Kind::Stopped, "ask which streamed rows were recorded before");
        self.shared.stop.run_until_cancelled(asked).await.ok_or_else(stopped)??;
        // The stream is in commit order: after an end beyond the overlap everything is.
        if beyond {
            self.overlap = None;
        }
        Ok(())
    }

    fn compose(&self, decoded: &mut MessageBatch, envelope: Envelope) {
        match self.composer.compose(&envelope.row) {
            Ok(Composed { exchange, own_exchange, routing_key, properties }) => {
                decoded.messages.push(Message { envelope, exchange, own_exchange, routing_key, properties })
            }
            Err(rejection) => {
                decoded.refused.push(refused(envelope, rejection));
            }
        }
    }
}

fn refuse(decoded: &mut MessageBatch, envelope: Envelope, detail: String) {
    decoded.refused.push(refused(envelope, invalid(detail)));
}

/// A row that is never sent.
fn refused(envelope: Envelope, rejection: Rejection) -> Settlement {
    Settlement { envelope, verdict: Verdict::Rejected(rejection), exposed: false }
}

fn empty(credit: Credit, passed: Vec<crate::envelope::Passed>) -> MessageBatch {
    MessageBatch { origin: Origin::Stream, messages: Vec::new(), refused: Vec::new(), passed, credit }
}
