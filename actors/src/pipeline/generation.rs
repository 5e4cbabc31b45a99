//! One generation of the pipeline: four stages built sink first, watched together, torn down together.
//!
//! All for one: whichever stage ends first, for whatever reason, ends the generation. A half-restarted chain is never
//! legal, because what the missing stage held is abandoned and only a whole rebuild takes it again.

use std::sync::Arc;

use actix::{Actor, ArbiterHandle};
use actix_rt::Arbiter;
use tokio::sync::mpsc;

use crate::{
    ack::{Acker, recorder::StreamRecorder},
    deadlines::STOP,
    decode::{Decoder, Resume},
    envelope::RawBatch,
    error::{Error, Kind, Result},
    metrics::Stage,
    outlet::{Inbox, Outlet},
    pipeline::{
        exit::{Exit, ExitGuard, ExitStatus},
        shared::Shared,
    },
    publish::Publisher,
    source::ClaimSource,
    status::figures::Mailboxes,
};

/// Batches a stage's mailbox holds. Two keep a stage busy while the next one is formed; a few more ride out a wake-up.
/// What is in them is paid for by credits, so this bounds latency, not memory.
pub const MAILBOX_BATCHES: usize = 8;

/// The threads the stages run on, one each. They outlive generations: a panic ends an actor, not its thread.
pub struct Arbiters {
    source: Arbiter,
    decode: Arbiter,
    publish: Arbiter,
    ack: Arbiter,
}

impl Arbiters {
    /// Starts them. Called within an actix `System`.
    pub fn start() -> Self {
        Self { source: Arbiter::new(), decode: Arbiter::new(), publish: Arbiter::new(), ack: Arbiter::new() }
    }

    /// The thread of `stage`.
    pub fn of(&self, stage: Stage) -> ArbiterHandle {
        match stage {
            Stage::Source => self.source.handle(),
            Stage::Decode => self.decode.handle(),
            Stage::Publish => self.publish.handle(),
            Stage::Ack => self.ack.handle(),
        }
    }

    /// Ends the threads.
    pub fn stop(&self) {
        for arbiter in [&self.source, &self.decode, &self.publish, &self.ack] {
            arbiter.stop();
        }
    }
}

/// What ended a generation.
#[derive(Debug)]
pub struct Ended {
    /// The stage that ended first; `None` when the generation was told to stop.
    pub stage: Option<Stage>,
    /// Why.
    pub cause: Error,
}

/// A running generation.
pub struct Generation {
    shared: Shared,
    arbiters: Arc<Arbiters>,
    /// Into the decoder, shared by every source.
    decoder: Arc<Outlet<RawBatch>>,
    exits: mpsc::Receiver<Exit>,
    report: mpsc::Sender<Exit>,
    /// Stages started and not heard of yet; two sources are two.
    alive: Vec<Stage>,
}

impl Generation {
    /// Builds the acker, the publisher, the decoder and the source of retries, in this order; `workers` claim the outbox
    /// as well. A `WalSource` joins by [`Generation::start_source`].
    pub fn start(
        shared: Shared,
        arbiters: Arc<Arbiters>,
        recorder: Option<StreamRecorder>,
        resume: Resume,
        workers: usize,
    ) -> Self {
        // Room for every stage's report: five guards at most.
        let (report, exits) = mpsc::channel(8);
        let guard = |stage| ExitGuard::new(stage, report.clone());

        let (entry, inbox, ack_slots) = Inbox::new(MAILBOX_BATCHES);
        let (exit, given) = (guard(Stage::Ack), shared.clone());
        let acker = Acker::start_in_arbiter(&arbiters.of(Stage::Ack), move |_| {
            Acker::new(given, exit, (entry, inbox), recorder)
        });
        let to_acker = outlet(Stage::Publish, acker, &ack_slots);

        let (entry, inbox, publish_slots) = Inbox::new(MAILBOX_BATCHES);
        let (exit, given) = (guard(Stage::Publish), shared.clone());
        let publisher = Publisher::start_in_arbiter(&arbiters.of(Stage::Publish), move |_| {
            Publisher::new(given, exit, (entry, inbox), to_acker)
        });
        let to_publisher = outlet(Stage::Decode, publisher, &publish_slots);

        let (entry, inbox, decode_slots) = Inbox::new(MAILBOX_BATCHES);
        let (exit, given) = (guard(Stage::Decode), shared.clone());
        let decoder = Decoder::start_in_arbiter(&arbiters.of(Stage::Decode), move |_| {
            Decoder::new(given, exit, (entry, inbox), to_publisher, resume)
        });
        let decoder = Arc::new(outlet(Stage::Source, decoder, &decode_slots));
        shared.figures.set_mailboxes(Mailboxes::new(MAILBOX_BATCHES, decode_slots, publish_slots, ack_slots));

        let mut generation = Self {
            shared,
            arbiters,
            decoder,
            exits,
            report,
            alive: vec![Stage::Ack, Stage::Publish, Stage::Decode],
        };
        generation.start_source(move |given, exit, decoder| ClaimSource::new(given, exit, decoder, workers));
        generation
    }

    /// Starts a further source on the source's thread.
    pub fn start_source<S>(
        &mut self,
        build: impl FnOnce(Shared, ExitGuard, Arc<Outlet<RawBatch>>) -> S + Send + 'static,
    ) where
        S: Actor<Context = actix::Context<S>>,
    {
        let (given, decoder) = (self.shared.clone(), Arc::clone(&self.decoder));
        let exit = ExitGuard::new(Stage::Source, self.report.clone());
        S::start_in_arbiter(&self.arbiters.of(Stage::Source), move |_| build(given, exit, decoder));
        self.alive.push(Stage::Source);
    }

    /// The way into the decoder, for a sweep.
    pub fn decoder(&self) -> Arc<Outlet<RawBatch>> {
        Arc::clone(&self.decoder)
    }

    /// Waits until a stage ends, and says which and why. Cancel safe.
    pub async fn ended(&mut self) -> Ended {
        match self.exits.recv().await {
            Some(exit) => {
                self.gone(exit.stage);
                Ended { stage: Some(exit.stage), cause: cause(exit) }
            }
            None => Ended { stage: None, cause: Error::new(Kind::Internal, "watch the stages") },
        }
    }

    /// Waits until everything taken is recorded: all credits and all exposure are back.
    ///
    /// # Errors
    /// When a stage ends first: what it held is abandoned.
    pub async fn settle(&mut self) -> Result<(), Ended> {
        let (credits, exposure, stop) =
            (self.shared.credits.clone(), self.shared.exposure.clone(), self.shared.stop.clone());
        let settled = async move {
            credits.settle(&stop).await?;
            exposure.settle(&stop).await
        };
        tokio::select! {
            ended = self.ended() => Err(ended),
            result = settled => result.map_err(|cause| Ended { stage: None, cause }),
        }
    }

    /// Tells every stage to stop and waits for each.
    ///
    /// # Errors
    /// [`Kind::Stuck`] when one has not stopped within [`STOP`].
    pub async fn stop(mut self) -> Result<()> {
        self.shared.stop.cancel();
        let all = async {
            while !self.alive.is_empty() {
                let Some(exit) = self.exits.recv().await else { break };
                self.gone(exit.stage);
                if let ExitStatus::Vanished = exit.status {
                    tracing::error!(stage = exit.stage.as_str(), "stage panicked while stopping");
                }
            }
        };
        let stopped = tokio::time::timeout(STOP, all).await;
        stopped.map_err(|elapsed| {
            let left: Vec<&str> = self.alive.iter().map(|stage| stage.as_str()).collect();
            Error::new(Kind::Stuck, format!("wait for {} to stop", left.join(" and "))).with_source(elapsed)
        })
    }

    fn gone(&mut self, stage: Stage) {
        if let Some(at) = self.alive.iter().position(|alive| *alive == stage) {
            self.alive.swap_remove(at);
        }
    }
}

fn cause(exit: Exit) -> Error {
    match exit.status {
        ExitStatus::Returned(Err(error)) => error,
        ExitStatus::Returned(Ok(())) => {
            Error::new(Kind::Stopped, format!("run stage {}", exit.stage.as_str()))
        }
        ExitStatus::Vanished => Error::new(Kind::Internal, format!("run stage {}", exit.stage.as_str()))
            .with_source("it panicked"),
    }
}

#[allow(clippy::disallowed_methods, reason = "the outlet's own recipient, made once and never cloned")]
fn outlet<A, B>(from: Stage, to: actix::Addr<A>, slots: &Arc<tokio::sync::Semaphore>) -> Outlet<B>
where
    B: Send + 'static,
    A: Actor<Context = actix::Context<A>> + actix::Handler<crate::outlet::Delivery<B>>,
{
    Outlet::new(from, to.recipient(), Arc::clone(slots))
}
