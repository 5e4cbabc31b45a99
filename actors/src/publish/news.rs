//! What has become known and is not on its way to the acker yet.
//!
//! Lanes put verdicts in without waiting; one loop takes everything there is and hands it over. While the acker is
//! busy the news of the stream gather into one larger batch, bounded by the exposure.

use std::{cell::RefCell, collections::VecDeque};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::{
    credit::{Credit, Credits},
    envelope::{Origin, Passed, Settled, Settlement},
    error::Result,
    outlet::Outlet,
};

/// The news of one publisher.
#[derive(Debug)]
pub(super) struct News {
    credits: Credits,
    exposure: Credits,
    stream: RefCell<Option<Settled>>,
    claims: RefCell<VecDeque<Settled>>,
    arrived: Notify,
}

impl News {
    /// No news yet. The budgets are those whose credits go along.
    pub(super) fn new(credits: Credits, exposure: Credits) -> Self {
        Self {
            credits,
            exposure,
            stream: RefCell::default(),
            claims: RefCell::default(),
            arrived: Notify::new(),
        }
    }

    fn stream(&self, add: impl FnOnce(&mut Settled)) {
        let mut stream = self.stream.borrow_mut();
        let settled = stream.get_or_insert_with(|| Settled {
            origin: Origin::Stream,
            settlements: Vec::new(),
            passed: Vec::new(),
            credit: self.credits.nothing(),
            exposure: self.exposure.nothing(),
        });
        add(settled);
    }

    /// A streamed message has its verdict. [`News::ring`] tells the loop.
    pub(super) fn settled(&self, settlement: Settlement, credit: Credit, exposure: Option<Credit>) {
        self.stream(|settled| {
            settled.settlements.push(settlement);
            settled.credit.merge(credit);
            if let Some(exposure) = exposure {
                settled.exposure.merge(exposure);
            }
        });
    }

    /// What needs no publishing came with a batch of the stream.
    pub(super) fn passed(&self, refused: Vec<Settlement>, passed: Vec<Passed>, credit: Credit) {
        self.stream(|settled| {
            settled.settlements.extend(refused);
            settled.passed.extend(passed);
            settled.credit.merge(credit);
        });
        self.ring();
    }

    /// A claim has all its verdicts.
    pub(super) fn claim(&self, settled: Settled) {
        self.claims.borrow_mut().push_back(settled);
        self.ring();
    }

    /// Tells the loop that there is something.
    pub(super) fn ring(&self) {
        self.arrived.notify_one();
    }

    fn take(&self) -> Option<Settled> {
        self.claims.borrow_mut().pop_front().or_else(|| self.stream.borrow_mut().take())
    }

    /// Hands over what there is, until the generation ends.
    pub(super) async fn hand_over(&self, acker: &Outlet<Settled>, stop: &CancellationToken) -> Result<()> {
        loop {
            match self.take() {
                Some(settled) => acker.hand_over(settled, stop).await?,
                None => self.arrived.notified().await,
            }
        }
    }
}
