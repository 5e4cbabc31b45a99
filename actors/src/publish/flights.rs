//! The publishes of one channel as one set of futures, and the proof that everything ready has been collected.
//!
//! Each message is a single future from `basic_publish` to its confirm. Polled for the first time it takes its tag and
//! queues its frames, so polling in the order of pushing keeps the order; polled in groups it costs a quarter of what
//! awaiting each costs. A confirm that resolves before its publish was polled again is still found in order, because
//! lapin resolves a write before it reads the confirm, on the same thread, and so the future is already in the queue.
//!
//! [`FuturesUnordered`] keeps what is ready in a queue, first in first out, but may answer Pending with more in it: it
//! yields after as many polls as it holds futures, after two futures that were woken while being polled, and when a
//! wake-up is half way in. Each time it wakes the task that polls it, as every wake-up from lapin does. So the set is
//! polled with a waker of our own, which rings a bell: Pending without the bell having rung since means that the queue
//! was found empty.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    task::{Context, Poll, Wake, Waker},
};

use bytes::Bytes;
use futures_util::{
    stream::{FuturesUnordered, Stream},
    task::AtomicWaker,
};
use lapin::{BasicProperties, Channel, Confirmation, options::BasicPublishOptions, types::ShortString};

use crate::failpoints::{self, Point};

/// Publishes one message and waits for its confirm; `tag` says which it was.
pub(super) async fn publish(
    channel: &Channel,
    tag: u64,
    exchange: ShortString,
    routing_key: ShortString,
    options: BasicPublishOptions,
    body: Bytes,
    properties: BasicProperties,
) -> (u64, lapin::Result<Confirmation>) {
    let confirm = match channel.basic_publish(exchange, routing_key, options, &body, properties).await {
        Ok(confirm) => {
            failpoints::strike(Point::PublishAfter);
            confirm.await
        }
        Err(error) => Err(error),
    };
    (tag, confirm)
}

/// Rings when anything in the set may have become ready, and passes the wake-up on to the task.
#[derive(Debug, Default)]
struct Bell {
    rung: AtomicBool,
    task: AtomicWaker,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, SeqCst);
        self.task.wake();
    }
}

/// A set of futures of one type.
#[derive(Debug)]
pub(super) struct Flights<F> {
    set: FuturesUnordered<F>,
    bell: Arc<Bell>,
    waker: Waker,
}

impl<F: Future> Flights<F> {
    /// An empty set.
    pub(super) fn new() -> Self {
        let bell = Arc::new(Bell::default());
        Self { set: FuturesUnordered::new(), waker: Waker::from(Arc::clone(&bell)), bell }
    }

    /// Adds a future; it is polled at the next [`Flights::drain`].
    pub(super) fn push(&mut self, future: F) {
        self.set.push(future);
        self.bell.rung.store(true, SeqCst);
    }

    /// Hands everything that is ready to `each` until nothing is. Bounded by what the set holds: nothing is pushed
    /// meanwhile, and a future is woken once for its write and once for its confirm.
    ///
    /// None of these futures uses tokio's resources, so its cooperative budget cannot cut a drain short.
    pub(super) fn drain(&mut self, mut each: impl FnMut(F::Output)) {
        let mut cx = Context::from_waker(&self.waker);
        while self.bell.rung.swap(false, SeqCst) {
            while let Poll::Ready(Some(output)) = Pin::new(&mut self.set).poll_next(&mut cx) {
                each(output);
            }
        }
    }

    /// Waits until something may be ready.
    pub(super) fn ready(&self) -> impl Future<Output = ()> {
        poll_fn(|cx| {
            self.bell.task.register(cx.waker());
            if self.bell.rung.load(SeqCst) { Poll::Ready(()) } else { Poll::Pending }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// Is ready once told to; wakes itself while being polled, as a future does whose confirm arrives at that moment.
    struct Nervous(Arc<AtomicUsize>, usize);

    impl Future for Nervous {
        type Output = usize;
        fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<usize> {
            if self.0.fetch_add(1, SeqCst) >= self.1 {
                Poll::Ready(self.1)
            } else {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
        }
    }

    #[test]
    fn a_drain_collects_all_that_is_ready_however_often_the_set_yields() {
        let polls = Arc::new(AtomicUsize::new(0));
        let mut flights = Flights::new();
        for n in 0..500 {
            flights.push(Nervous(Arc::clone(&polls), n));
        }
        let mut got = 0;
        flights.drain(|_| got += 1);
        assert_eq!(got, 500);
    }

    #[tokio::test]
    async fn a_wake_up_between_drain_and_wait_is_not_lost() {
        let (give, take) = tokio::sync::oneshot::channel();
        let mut flights = Flights::new();
        flights.push(take);
        flights.drain(|_| unreachable!("nothing was given"));
        let _ = give.send(7);
        flights.ready().await;
        let mut got = Vec::new();
        flights.drain(|value: Result<u8, _>| got.extend(value));
        assert_eq!(got, [7]);
    }
}
