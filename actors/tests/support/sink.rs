//! In the place of decoder, publisher and acker: gives each claimed row the verdict a function says, and records.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use actix::{Actor, Context, Handler};
use postrider_actors::{
    envelope::{Origin, Raw, RawBatch, Row, Verdict},
    metrics::Stage,
    outlet::{Delivery, Inbox, InboxEntry, Outlet},
    pipeline::shared::Shared,
};

use super::settle;

struct Entry(InboxEntry<RawBatch>);

impl Actor for Entry {
    type Context = Context<Self>;
}

impl Handler<Delivery<RawBatch>> for Entry {
    type Result = ();
    fn handle(&mut self, delivery: Delivery<RawBatch>, _: &mut Context<Self>) {
        self.0.put(delivery);
    }
}

/// What the sink saw.
#[derive(Default)]
pub struct Seen {
    /// Ids in the order they came.
    pub ids: Mutex<Vec<String>>,
    pub batches: AtomicUsize,
    pub largest: AtomicUsize,
    /// Whole batches: what `drop_claim` said yes to was dropped instead of recorded.
    pub dropped: AtomicUsize,
}

/// Starts the sink; `verdict` is asked about each row, an answer of `None` drops the whole claim.
pub fn start(
    shared: &Shared,
    verdict: impl Fn(&Row) -> Option<Verdict> + 'static,
) -> (Arc<Outlet<RawBatch>>, Arc<Seen>) {
    let (entry, mut inbox, slots) = Inbox::<RawBatch>::new(4);
    let seen = Arc::new(Seen::default());
    let (settings, told) = (Arc::clone(&shared.settings), Arc::clone(&seen));
    actix::spawn(async move {
        while let Some((batch, _)) = inbox.recv().await {
            let (Origin::Claim(claim), Raw::Rows(rows)) = (batch.origin, batch.raw) else {
                panic!("a claim")
            };
            told.batches.fetch_add(1, Ordering::SeqCst);
            told.largest.fetch_max(rows.len(), Ordering::SeqCst);
            assert!(batch.credit.cost().messages as usize == rows.len(), "each row is paid for");
            let settled: Option<Vec<_>> = rows
                .into_iter()
                .enumerate()
                .map(|(n, row)| {
                    let answer = verdict(&row)?;
                    let id = String::from_utf8(row.id.to_vec()).expect("text");
                    told.ids.lock().expect("no panic").push(id);
                    Some(settle(n, row, answer))
                })
                .collect();
            match settled {
                Some(settled) => {
                    claim.record(&settled, &settings.publish).await.expect("recorded");
                }
                None => {
                    told.dropped.fetch_add(1, Ordering::SeqCst);
                    drop(claim);
                }
            }
            drop(batch.credit);
        }
    });
    #[allow(clippy::disallowed_methods, reason = "the outlet's own recipient")]
    let recipient = Entry(entry).start().recipient();
    (Arc::new(Outlet::new(Stage::Source, recipient, slots)), seen)
}
