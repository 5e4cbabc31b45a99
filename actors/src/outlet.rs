//! The only legal way from one stage to the next.
//!
//! A mailbox's capacity bounds almost nothing in actix 0.13: `do_send` and `Addr::send` ignore it, and every fresh
//! clone of an address gets a free slot. So an [`Outlet`] owns one un-cloned recipient behind a semaphore of the
//! mailbox's capacity, and the slot travels with the batch until the receiving stage's loop has taken it. The time
//! spent waiting for a slot is the *sending* stage's backpressure.

use std::{sync::Arc, time::Instant};

use actix::Recipient;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::{
    error::{Error, Kind, Result},
    failpoints::{self, Point},
    metrics::{Stage, StageMetrics},
};

/// A batch on its way into a stage's mailbox, with the slot it occupies there.
#[derive(Debug)]
pub struct Delivery<B: Send + 'static> {
    batch: B,
    /// Given back when the receiving loop takes the batch, not when the handler sees it.
    slot: OwnedSemaphorePermit,
    /// When the batch arrived, for the stage's latency.
    arrived: Instant,
}

impl<B: Send + 'static> actix::Message for Delivery<B> {
    type Result = ();
}

impl<B: Send + 'static> Delivery<B> {
    /// Takes the batch out, which frees its slot.
    pub fn take(self) -> (B, Instant) {
        drop(self.slot);
        (self.batch, self.arrived)
    }
}

/// The way into the next stage. Several sources may share one through an `Arc`; it is never cloned.
pub struct Outlet<B: Send + 'static> {
    to: Recipient<Delivery<B>>,
    slots: Arc<Semaphore>,
    failpoint: Option<Point>,
    /// Of the sending stage: a wait here is its backpressure.
    metrics: StageMetrics,
}

impl<B: Send + 'static> std::fmt::Debug for Outlet<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outlet").field("free_slots", &self.slots.available_permits()).finish_non_exhaustive()
    }
}

impl<B: Send + 'static> Outlet<B> {
    /// An outlet of stage `from` into the mailbox behind `to`, which holds at most `slots` batches.
    ///
    /// The slots belong to the receiver (see [`Inbox::new`]), so that senders of several kinds share them.
    pub fn new(from: Stage, to: Recipient<Delivery<B>>, slots: Arc<Semaphore>) -> Self {
        let failpoint = match from {
            Stage::Source => Some(Point::SourceDecode),
            Stage::Decode => Some(Point::DecodePublish),
            Stage::Publish => Some(Point::PublishAck),
            Stage::Ack => None,
        };
        Self { to, slots, failpoint, metrics: StageMetrics::of(from) }
    }

    /// Waits for a slot, then hands `batch` over.
    ///
    /// # Errors
    /// [`Kind::Stopped`] when `stop` is cancelled first or the next stage is gone. The batch is dropped then, which
    /// abandons its messages and gives their credits back.
    pub async fn hand_over(&self, batch: B, stop: &CancellationToken) -> Result<()> {
        self.reserve(stop).await?.hand_over(batch)
    }

    /// Waits for a slot and holds it, for a batch that may still grow meanwhile. Cancel safe.
    ///
    /// # Errors
    /// [`Kind::Stopped`] when `stop` is cancelled first.
    pub async fn reserve(&self, stop: &CancellationToken) -> Result<Slot<'_, B>> {
        let slots = Arc::clone(&self.slots);
        let permit = match Arc::clone(&slots).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                let waiting = self.metrics.backpressure();
                let permit = stop.run_until_cancelled(slots.acquire_owned()).await;
                drop(waiting);
                permit.ok_or_else(stopped)?.map_err(|_| stopped())?
            }
        };
        Ok(Slot { outlet: self, permit })
    }

    #[allow(clippy::disallowed_methods, reason = "the one place: a slot of the mailbox is held")]
    fn offer(&self, delivery: Delivery<B>) -> Result<(), ()> {
        self.to.try_send(delivery).map_err(|_| ())
    }
}

/// A slot of the next stage's mailbox, held for a batch.
#[derive(Debug)]
pub struct Slot<'a, B: Send + 'static> {
    outlet: &'a Outlet<B>,
    permit: OwnedSemaphorePermit,
}

impl<B: Send + 'static> Slot<'_, B> {
    /// Hands `batch` over, without waiting.
    ///
    /// # Errors
    /// [`Kind::Stopped`] when the next stage is gone. The batch is dropped then.
    pub fn hand_over(self, batch: B) -> Result<()> {
        self.outlet.failpoint.map_or(Ok(()), failpoints::pass)?;
        let delivery = Delivery { batch, slot: self.permit, arrived: Instant::now() };
        self.outlet.offer(delivery).map_err(|()| stopped())
    }
}

fn stopped() -> Error {
    Error::new(Kind::Stopped, "hand a batch to the next stage")
}

/// The receiving end of a stage: what its handler puts in, its loop takes out.
///
/// Work is awaited in the loop, never in a handler: a handler that waits either drains the mailbox into unbounded
/// futures or stops the actor's timers.
#[derive(Debug)]
pub struct Inbox<B: Send + 'static> {
    queue: mpsc::Receiver<Delivery<B>>,
}

/// The handler's end of an [`Inbox`].
#[derive(Debug)]
pub struct InboxEntry<B: Send + 'static> {
    queue: mpsc::Sender<Delivery<B>>,
}

impl<B: Send + 'static> Inbox<B> {
    /// An inbox of `capacity` batches: the handler's end, the loop's end, and the slots its outlets share.
    pub fn new(capacity: usize) -> (InboxEntry<B>, Inbox<B>, Arc<Semaphore>) {
        let (sender, queue) = mpsc::channel(capacity.max(1));
        (InboxEntry { queue: sender }, Inbox { queue }, Arc::new(Semaphore::new(capacity.max(1))))
    }

    /// The next batch and when it arrived; `None` when the actor is gone.
    pub async fn recv(&mut self) -> Option<(B, Instant)> {
        self.queue.recv().await.map(Delivery::take)
    }

    /// The next batch if one is there already.
    pub fn try_recv(&mut self) -> Option<(B, Instant)> {
        self.queue.try_recv().ok().map(Delivery::take)
    }
}

impl<B: Send + 'static> InboxEntry<B> {
    /// Puts a delivery where the loop finds it. There is always room: the delivery holds a slot.
    pub fn put(&self, delivery: Delivery<B>) {
        // A closed queue means that the loop has ended: dropping the batch abandons it, as the law asks.
        let _ = self.queue.try_send(delivery);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix::{Actor, Context, Handler};
    use std::sync::atomic::{AtomicUsize, Ordering};

    struct Slow {
        entry: InboxEntry<u32>,
        peak: Arc<AtomicUsize>,
        queued: Arc<AtomicUsize>,
    }

    impl Actor for Slow {
        type Context = Context<Self>;
    }

    impl Handler<Delivery<u32>> for Slow {
        type Result = ();
        fn handle(&mut self, delivery: Delivery<u32>, _: &mut Context<Self>) {
            let queued = self.queued.fetch_add(1, Ordering::SeqCst) + 1;
            self.peak.fetch_max(queued, Ordering::SeqCst);
            self.entry.put(delivery);
        }
    }

    #[actix::test]
    async fn many_producers_never_hold_more_than_the_capacity_and_all_arrive() {
        let (entry, mut inbox, slots) = Inbox::new(8);
        let (peak, queued) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let addr = Slow { entry, peak: Arc::clone(&peak), queued: Arc::clone(&queued) }.start();
        #[allow(clippy::disallowed_methods, reason = "the outlet's own recipient")]
        let outlet = Arc::new(Outlet::new(Stage::Source, addr.recipient(), slots));
        let stop = CancellationToken::new();
        for producer in 0..4u32 {
            let (outlet, stop) = (Arc::clone(&outlet), stop.clone());
            actix::spawn(async move {
                for n in 0..100 {
                    outlet.hand_over(producer * 100 + n, &stop).await.expect("the stage is there");
                }
            });
        }
        let mut got = Vec::new();
        while got.len() < 400 {
            let (n, _) = inbox.recv().await.expect("the actor is there");
            queued.fetch_sub(1, Ordering::SeqCst);
            got.push(n);
            tokio::task::yield_now().await;
        }
        got.sort_unstable();
        assert_eq!(got, (0..400).collect::<Vec<_>>());
        assert!(peak.load(Ordering::SeqCst) <= 9, "one more may be between the slot and the queue's count");
    }

    #[actix::test]
    async fn a_wait_for_a_slot_ends_when_the_generation_stops() {
        let (entry, _inbox, slots) = Inbox::new(1);
        let addr = Slow { entry, peak: Arc::default(), queued: Arc::default() }.start();
        #[allow(clippy::disallowed_methods, reason = "the outlet's own recipient")]
        let outlet = Outlet::new(Stage::Source, addr.recipient(), slots);
        let stop = CancellationToken::new();
        outlet.hand_over(1, &stop).await.expect("one slot is free");
        stop.cancel();
        assert_eq!(outlet.hand_over(2, &stop).await.unwrap_err().kind(), Kind::Stopped);
    }
}
