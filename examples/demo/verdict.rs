//! How it ended.

use crate::{
    Args, Mode, Wake,
    database::Rows,
    relay::{Relay, Status},
    screen::{Screen, ms},
    tally::Figures,
};

/// Everything the end is judged by.
pub(crate) struct Verdict {
    pub(crate) figures: Figures,
    /// The relay's last word before it was stopped.
    pub(crate) status: Option<Status>,
    pub(crate) rows: Rows,
    /// Whether the relay ended cleanly when asked to.
    pub(crate) stopped: bool,
}

impl Verdict {
    /// What the relay says it has delivered; of one that shows no figures, what it has recorded.
    fn published(&self) -> u64 {
        self.status.as_ref().and_then(|status| status.delivered).unwrap_or(self.rows.recorded)
    }

    /// Everything committed was published, applied once and recorded, nothing else was, and the relay stopped as asked.
    pub(crate) fn holds(&self) -> bool {
        self.agrees() && self.complaints().is_empty()
    }

    fn agrees(&self) -> bool {
        let committed = self.rows.orders;
        committed > 0 && self.published() == committed && self.figures.consumed == committed
    }

    fn complaints(&self) -> Vec<String> {
        let (figures, rows) = (&self.figures, &self.rows);
        let mut complaints = Vec::new();
        if rows.applied != figures.consumed {
            complaints.push(format!("{} effects in the consumer's table", rows.applied));
        }
        if rows.recorded != rows.orders {
            complaints.push(format!("{} of {} outbox rows recorded", rows.recorded, rows.orders));
        }
        if figures.failed > 0 {
            complaints.push(format!("{} orders failed", figures.failed));
        }
        if figures.skipped > 0 {
            complaints.push(format!("{} orders not sent, too many were unanswered", figures.skipped));
        }
        if !self.stopped {
            complaints.push("the relay did not stop cleanly".to_owned());
        }
        complaints
    }

    /// Prints the verdict, the figures, and how to go on.
    pub(crate) fn print(&self, args: &Args, screen: &Screen, relay: &Relay) {
        let Self { figures, rows, .. } = self;
        let published = self.published();
        let repeated = figures.repeated;
        let line = if self.agrees() {
            format!("committed = published = consumed = {}, duplicates {repeated}", rows.orders)
        } else {
            let (committed, consumed) = (rows.orders, figures.consumed);
            format!(
                "committed {committed}, published {published}, consumed {consumed}, duplicates {repeated}: not equal"
            )
        };
        println!();
        println!("{}", screen.judged(self.agrees(), &line));
        if self.status.as_ref().is_none_or(|status| status.delivered.is_none()) {
            println!("(the relay shows no status: published is counted by the rows it recorded)");
        }
        for complaint in self.complaints() {
            println!("{}", screen.judged(false, &complaint));
        }

        println!();
        for (name, latency) in [("commit to consumer", figures.relayed), ("direct publish", figures.direct)] {
            let (p50, p99) = (ms(latency, latency.p50), ms(latency, latency.p99));
            println!("{name:<20}p50 {p50:>8} ms   p99 {p99:>8} ms   {:>7} messages", latency.count);
        }
        if figures.relayed.count > 0 && figures.direct.count > 0 {
            let (relayed, direct) = (figures.relayed, figures.direct);
            let ratio = |a: std::time::Duration, b: std::time::Duration| a.as_secs_f64() / b.as_secs_f64();
            let (p50, p99) = (ratio(relayed.p50, direct.p50), ratio(relayed.p99, direct.p99));
            println!("{:<20}p50 {p50:>8.2} x    p99 {p99:>8.2} x", "ratio");
        }
        if args.mode == Mode::Poll && args.wake == Wake::Poll {
            println!("(poll mode: bound by the interval of {} ms; see --wake notify)", args.interval_ms);
        }

        println!();
        println!("relay's log         {}", relay.log().display());
        println!("run it again        {}", relay.command("run"));
        println!("status and metrics  curl {0}/api/status    curl {0}/metrics", relay.admin());
        let other = if args.mode == Mode::Wal { "poll" } else { "wal" };
        println!("the other mode      ./dev demo --mode {other}");
    }
}
