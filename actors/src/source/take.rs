//! Taking a claim's rows within the credits.
//!
//! Message credits and the bytes of one expected row are taken before the claim, so no lock is held while others'
//! verdicts are waited for. Bytes are known row by row: where they run out the batch is cut, and the rest stays locked
//! until this batch is recorded. A row that alone is more than what is free is waited for with nothing held, then claimed
//! again with its credits in hand.
//!
//! The server sends all the rows it was asked for, also those that do not fit and are thrown away: asking for 400 rows of
//! 5 MB would keep it busy for a minute. So a claim asks for what probably fits, by the largest of recent rows.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::TryStreamExt;

use super::{
    claim::{Claim, Done, Wanted},
    rows,
};
use crate::{
    credit::{Cost, Credit},
    database::{
        from_postgres,
        outbox::Outbox,
        pool::{answered, patiently},
    },
    envelope::Row,
    error::Result,
    failpoints::{self, Point},
    pipeline::shared::Shared,
};

const OP: &str = "read claimed rows";

/// Rows of a first claim, before anything is known of their size.
const FIRST: u32 = 8;

/// Rows with their claim and credits, and how to hear of their end.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) claim: Box<Claim>,
    pub(super) done: Done,
    pub(super) rows: Vec<Row>,
    pub(super) credit: Credit,
    /// Whether more rows probably wait: the claim found as many as it asked for, or was cut.
    pub(super) full: bool,
    /// When the claim was begun.
    pub(super) since: Instant,
    /// How long the first row took: the walk over what is not to be claimed.
    pub(super) first_after: Duration,
}

/// Takes claims for one loop, and knows how large rows have been.
#[derive(Debug)]
pub(super) struct Taker {
    shared: Shared,
    outbox: Arc<Outbox>,
    /// What a row may cost: the largest of late, in bytes; 0 before the first.
    expected: u32,
    /// Credits in hand: of a row that did not fit.
    reserve: Option<Credit>,
}

/// What came of one claim query.
enum Outcome {
    Nothing,
    Rows(Taken),
    /// The first row costs this much, which is not free.
    TooLarge(Cost),
}

impl Taker {
    pub(super) fn new(shared: &Shared, outbox: &Arc<Outbox>) -> Self {
        Self { shared: shared.clone(), outbox: Arc::clone(outbox), expected: 0, reserve: None }
    }

    /// Claims up to `limit` rows; `None` if there is nothing to claim. `wanted` is asked for after the wait for credits.
    ///
    /// # Errors
    /// The database's, and [`Kind::Stopped`](crate::error::Kind::Stopped); no row is held then.
    pub(super) async fn take(
        &mut self,
        wanted: impl Fn() -> Option<Wanted>,
        limit: u32,
    ) -> Result<Option<Taken>> {
        let most = limit.min(self.shared.exposure.size().messages).min(self.shared.credits.size().messages);
        loop {
            let reserve = match self.reserve.take() {
                Some(reserve) => reserve,
                None => {
                    let cost = Cost { messages: most.max(1), bytes: self.expected };
                    let cost = self.shared.credits.clamp(cost);
                    self.shared.credits.acquire(cost, &self.shared.stop).await?
                }
            };
            let Some(wanted) = wanted() else { return Ok(None) };
            match self.once(wanted, reserve).await? {
                Outcome::Nothing => return Ok(None),
                Outcome::Rows(taken) => return Ok(Some(taken)),
                Outcome::TooLarge(cost) => {
                    self.reserve = Some(self.shared.credits.acquire(cost, &self.shared.stop).await?);
                }
            }
        }
    }

    async fn once(&mut self, wanted: Wanted, mut reserve: Credit) -> Result<Outcome> {
        let since = Instant::now();
        let retries = wanted == Wanted::Retries;
        let limit = self.limit(reserve.cost());
        let opening = Claim::open(&self.shared.pool, &self.outbox, wanted, limit);
        let (mut claim, stream, done) = patiently(&self.shared.board, opening).await?;
        let mut stream = std::pin::pin!(stream);
        let mut credit = self.shared.credits.nothing();
        let mut taken = Vec::with_capacity(limit.min(1024) as usize);
        let (mut cut, mut first_after) = (None, None);
        while let Some(row) =
            answered(stream.try_next(), OP).await?.map_err(|error| from_postgres(error, OP))?
        {
            first_after.get_or_insert_with(|| since.elapsed());
            let row = if retries {
                let (seq, row) = rows::of_retries(&row, &self.outbox)?;
                claim.seqs.push(seq);
                row
            } else {
                rows::of_outbox(&row, &self.outbox)?
            };
            let cost = self.shared.credits.clamp(Cost::message(row.bytes()));
            self.learn(cost.bytes);
            let lacking = cost.bytes.saturating_sub(reserve.cost().bytes);
            if lacking > 0 {
                match self.shared.credits.try_acquire(Cost { messages: 0, bytes: lacking }) {
                    Some(more) => reserve.merge(more),
                    None => {
                        cut = Some(cost);
                        break;
                    }
                }
            }
            credit.merge(reserve.split(cost));
            taken.push(row);
        }
        claim.seqs.truncate(taken.len());
        // What was not needed is free for others before this batch is waited for.
        drop(reserve);
        let claim = Box::new(claim);
        if taken.is_empty() {
            claim.release().await?;
            return Ok(cut.map_or(Outcome::Nothing, Outcome::TooLarge));
        }
        failpoints::pass(Point::Claimed)?;
        let full = cut.is_some() || taken.len() as u32 >= limit;
        Ok(Outcome::Rows(Taken {
            claim,
            done,
            rows: taken,
            credit,
            full,
            since,
            first_after: first_after.unwrap_or_default(),
        }))
    }

    /// As many rows as are paid for, and as will probably fit the bytes: what is cut off stays locked for nothing.
    fn limit(&self, reserve: Cost) -> u32 {
        if self.expected == 0 {
            return reserve.messages.clamp(1, FIRST);
        }
        let (size, used) = (self.shared.credits.size(), self.shared.credits.in_use());
        let free = size.bytes.saturating_sub(used.bytes).saturating_add(reserve.bytes);
        reserve.messages.min(free / self.expected).max(1)
    }

    /// A large row is remembered for some dozens of smaller ones.
    fn learn(&mut self, bytes: u32) {
        self.expected = bytes.max(self.expected - self.expected / 16).max(1);
    }
}
