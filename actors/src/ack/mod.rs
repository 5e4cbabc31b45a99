//! The last stage: verdicts come in, durable state and released credits go out.
//!
//! The [`Acker`] promises that nothing is acknowledged before it is recorded: a claim's verdicts are recorded in its own
//! transaction ([`rows`]), the stream's in the order of the ledger ([`recorder`]), and only then are credits and exposure
//! given back and the durable LSN moved. Claims are recorded side by side, each on its own connection; the stream is
//! recorded one statement at a time, each taking what became ready while the last one ran.

pub mod attempt;
mod books;
pub mod recorder;
mod rejected;
pub mod rows;
mod snapshot;
pub mod stream;

use std::{collections::VecDeque, future::pending, time::Instant};

use actix::{Actor, ActorContext, ActorFutureExt, AsyncContext, Context, Handler, WrapFuture};
use futures_util::{StreamExt, future::LocalBoxFuture, stream::FuturesUnordered};

use crate::{
    credit::Credit,
    database::pool,
    envelope::{Origin, Settled, Settlement},
    error::{Disposition, Result},
    metrics::{Stage, StageMetrics},
    outlet::{Delivery, Inbox, InboxEntry},
    pipeline::{exit::ExitGuard, shared::Shared},
    source::claim::Claim,
};

use recorder::StreamRecorder;

/// Records verdicts.
pub struct Acker {
    entry: InboxEntry<Settled>,
    /// Taken by `started`; a restarted actor would find it gone, but stages are built anew, never restarted.
    run: Option<LocalBoxFuture<'static, Result<()>>>,
    exit: ExitGuard,
}

impl Acker {
    /// An acker that records the stream through `recorder` (`None` where nothing is streamed).
    pub fn new(
        shared: Shared,
        exit: ExitGuard,
        (entry, inbox): (InboxEntry<Settled>, Inbox<Settled>),
        recorder: Option<StreamRecorder>,
    ) -> Self {
        let run = Loop::new(shared, inbox, recorder).run();
        Self { entry, run: Some(Box::pin(run)), exit }
    }
}

impl Actor for Acker {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        let run = self.run.take().expect("an actor starts once");
        ctx.spawn(run.into_actor(self).map(|result, stage, ctx| {
            stage.exit.returned(result);
            ctx.stop();
        }));
    }
}

impl Handler<Delivery<Settled>> for Acker {
    type Result = ();

    fn handle(&mut self, delivery: Delivery<Settled>, _: &mut Context<Self>) {
        self.entry.put(delivery);
    }
}

/// News held at most beside the bound on messages: those of an idle stream carry none.
const READY_NEWS: usize = 1_000;

/// Streamed news taken from the mailbox and not recorded yet.
type Ready = VecDeque<(Settled, Instant)>;

struct Loop {
    shared: Shared,
    inbox: Inbox<Settled>,
    /// `None` while a recording runs (it has the recorder), and where nothing is streamed.
    recorder: Option<StreamRecorder>,
    ready: Ready,
    ready_messages: usize,
    metrics: StageMetrics,
}

impl Loop {
    fn new(shared: Shared, inbox: Inbox<Settled>, recorder: Option<StreamRecorder>) -> Self {
        let metrics = StageMetrics::of(Stage::Ack);
        Self { shared, inbox, recorder, ready: Ready::new(), ready_messages: 0, metrics }
    }

    async fn run(mut self) -> Result<()> {
        let stop = self.shared.stop.clone();
        let most = self.shared.settings.ack.batch_messages;
        let mut claims = FuturesUnordered::new();
        let mut recording: Option<LocalBoxFuture<'static, Result<StreamRecorder>>> = None;
        loop {
            if recording.is_none()
                && let Some(recorder) = self.recorder.take()
            {
                if self.ready.is_empty() && !recorder.owes_progress() {
                    self.recorder = Some(recorder);
                } else {
                    let batch = self.take_ready(most);
                    let metrics = self.metrics.clone();
                    recording = Some(Box::pin(record_stream(recorder, batch, metrics)));
                }
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                result = async { match recording.as_mut() { Some(recording) => recording.await, None => pending().await } } => {
                    recording = None;
                    self.recorder = Some(result?);
                }
                Some(result) = claims.next(), if !claims.is_empty() => result?,
                // The mailbox is left full while a batch's worth is ready: that is the backpressure.
                news = self.inbox.recv(), if self.ready_messages < most && self.ready.len() < READY_NEWS => {
                    let Some((settled, arrived)) = news else { return Ok(()) };
                    let Settled { origin, settlements, passed, credit, exposure } = settled;
                    match origin {
                        Origin::Claim(claim) => {
                            let held = (credit, exposure);
                            claims.push(record_claim(self.shared.clone(), claim, settlements, held, arrived, self.metrics.clone()));
                        }
                        Origin::Stream => {
                            self.ready_messages += settlements.len();
                            self.ready.push_back((
                                Settled { origin: Origin::Stream, settlements, passed, credit, exposure },
                                arrived,
                            ));
                        }
                    }
                }
            }
        }
    }

    /// What is ready, up to `most` messages (one batch at least).
    fn take_ready(&mut self, most: usize) -> Vec<(Settled, Instant)> {
        let mut taken = Vec::new();
        let mut messages = 0;
        while let Some((next, _)) = self.ready.front() {
            if !taken.is_empty() && messages + next.settlements.len() > most {
                break;
            }
            messages += next.settlements.len();
            taken.extend(self.ready.pop_front());
        }
        self.ready_messages -= messages;
        taken
    }
}

/// Records streamed news; the recorder comes back when it is durable.
async fn record_stream(
    mut recorder: StreamRecorder,
    batch: Vec<(Settled, Instant)>,
    metrics: StageMetrics,
) -> Result<StreamRecorder> {
    let (news, arrivals): (Vec<Settled>, Vec<Instant>) = batch.into_iter().unzip();
    recorder.record(news).await?;
    for arrived in arrivals {
        metrics.leave(arrived);
    }
    Ok(recorder)
}

/// Records a claim in its own transaction. What is `held` is given back when that is durable, or when it was rolled back
/// and this generation goes on.
async fn record_claim(
    shared: Shared,
    claim: Box<Claim>,
    settlements: Vec<Settlement>,
    (credit, exposure): (Credit, Credit),
    arrived: Instant,
    metrics: StageMetrics,
) -> Result<()> {
    let recording = claim.record(&settlements, &shared.settings.publish);
    let outcome = pool::patiently(&shared.board, recording).await;
    match outcome {
        Ok(recorded) => {
            drop(credit);
            exposure.give_back();
            shared.figures.recorded.fetch_add(recorded.moved(), std::sync::atomic::Ordering::Relaxed);
            metrics.leave(arrived);
            Ok(())
        }
        // The transaction rolled back: its rows are claimed again. What was delivered of it is repeated, once the
        // database is back; the claim's source waits for that.
        Err(error) if error.kind().disposition() == Disposition::Retry => {
            exposure.give_back();
            shared.board.raise_error(&error);
            Ok(())
        }
        Err(error) => Err(error),
    }
}
