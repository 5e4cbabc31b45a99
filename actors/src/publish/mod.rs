//! The publisher: sends messages, and finds out for each what became of it.
//!
//! In come batches of messages, out go [`Settled`]s. It promises:
//!
//! - A verdict is the broker's answer about this very message ([`verdict`]), never an outage, never another's answer.
//! - An outcome that is unknown because a channel or a connection ended is found out by publishing again, in order,
//!   with the same `message_id` and the same body. A generation survives a restart of the broker.
//! - What was sent and is not recorded is bounded by the exposure, what is unconfirmed by the window.
//! - A claim comes back exactly once, and does not idle while the broker cannot take messages.
//!
//! ```text
//!  inbox ──▶ Intake ──▶ Line ──▶ Lane (one confirm channel) ──▶ News ──▶ acker
//!                       a lane: what waits, what is under way
//! ```
//!
//! Everything lives on one arbiter. Only loops await; the handler puts a batch into the inbox.

mod broker;
mod close;
mod dial;
mod drive;
mod exchanges;
mod flights;
mod hub;
mod intake;
mod job;
mod lane;
mod line;
mod news;
mod plan;
pub mod streak;
pub mod verdict;

use std::rc::Rc;

use actix::{Actor, ActorContext, AsyncContext, Context, Handler, WrapFuture, fut::ActorFutureExt};
use tokio::task::{JoinError, JoinSet};

use crate::{
    envelope::{MessageBatch, Settled},
    error::{Error, Kind, Result},
    outlet::{Delivery, Inbox, InboxEntry, Outlet},
    pipeline::{exit::ExitGuard, shared::Shared},
};

use self::{broker::Broker, hub::Hub, intake::Intake, lane::Lane};

/// The third stage.
#[derive(Debug)]
pub struct Publisher {
    entry: InboxEntry<MessageBatch>,
    /// What the loop needs; taken when it starts.
    parts: Option<Parts>,
    /// Reports the stage's end when the actor is dropped.
    exit: ExitGuard,
}

#[derive(Debug)]
struct Parts {
    shared: Shared,
    inbox: Inbox<MessageBatch>,
    acker: Outlet<Settled>,
}

impl Publisher {
    /// A publisher of one generation.
    pub fn new(
        shared: Shared,
        exit: ExitGuard,
        (entry, inbox): (InboxEntry<MessageBatch>, Inbox<MessageBatch>),
        acker: Outlet<Settled>,
    ) -> Self {
        Self { entry, parts: Some(Parts { shared, inbox, acker }), exit }
    }
}

impl Actor for Publisher {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let Some(parts) = self.parts.take() else { return };
        ctx.spawn(run(parts).into_actor(self).map(|result, publisher, ctx| {
            publisher.exit.returned(result);
            ctx.stop();
        }));
    }
}

impl Handler<Delivery<MessageBatch>> for Publisher {
    type Result = ();

    fn handle(&mut self, delivery: Delivery<MessageBatch>, _: &mut Self::Context) {
        self.entry.put(delivery);
    }
}

async fn run(Parts { shared, inbox, acker }: Parts) -> Result<()> {
    if !shared.settings.publish.confirms {
        tracing::warn!(
            "publisher confirms are off: messages count as delivered when they are written, and an outage loses some"
        );
    }
    let stop = shared.stop.clone();
    let hub = Rc::new(Hub::new(shared));
    let broker = Rc::new(Broker::new(&hub.shared.settings.broker, Rc::clone(&hub))?);
    // Dropping the set aborts what it holds: nothing of this generation outlives its loop.
    let mut tasks = JoinSet::new();
    for line in &hub.lines {
        let lane = Lane::new(Rc::clone(&hub), Rc::clone(&broker), Rc::clone(line));
        tasks.spawn_local(async move {
            lane.run().await;
            Ok(())
        });
    }
    let (news, until) = (Rc::clone(&hub), stop.clone());
    tasks.spawn_local(async move { news.news.hand_over(&acker, &until).await });
    let mut intake = Intake::new(Rc::clone(&hub), inbox);
    let result = tokio::select! {
        result = intake.run() => result,
        ended = tasks.join_next() => ended.map_or(Ok(()), passed_on),
    };
    drop(tasks);
    broker.close().await;
    hub.leave();
    if stop.is_cancelled() { Ok(()) } else { result }
}

/// A task's panic is the stage's panic.
fn passed_on(ended: Result<Result<()>, JoinError>) -> Result<()> {
    match ended {
        Ok(result) => result,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(error) => Err(Error::new(Kind::Internal, "run a lane").with_source(error)),
    }
}
