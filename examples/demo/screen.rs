//! The picture: in place on a terminal, a line a second elsewhere.

use std::{
    env,
    io::{IsTerminal, Write, stdout},
    time::Duration,
};

use crate::{
    Args, Mode, Wake,
    relay::{STAGES, Status},
    tally::{Figures, Latency},
};

/// Draws the figures once a second.
pub(crate) struct Screen {
    /// Whether the picture is drawn over the last one.
    in_place: bool,
    colour: bool,
    mode: Mode,
    rate: u32,
    seconds: Option<u64>,
    /// Lines of the last picture, to be drawn over.
    drawn: usize,
    /// What is going on besides.
    note: Option<String>,
    /// Totals and time of the last picture, for rates.
    before: (Duration, [u64; 3]),
}

impl Screen {
    pub(crate) fn new(args: &Args) -> Self {
        let in_place = stdout().is_terminal() && env::var_os("TERM").is_none_or(|term| term != "dumb");
        Self {
            in_place,
            colour: in_place && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
            mode: args.mode,
            rate: args.rate,
            seconds: args.seconds,
            drawn: 0,
            note: None,
            before: (Duration::ZERO, [0; 3]),
        }
    }

    /// What to expect, before it begins.
    pub(crate) fn explain(&self, args: &Args) {
        println!();
        match (args.mode, args.wake) {
            (Mode::Wal, _) => {}
            (Mode::Poll, Wake::Poll) => println!(
                "poll mode: each idle worker of the relay looks every {} ms, so latency is bound by that interval;\n\
                 --wake notify has the application wake the relay after each COMMIT\n",
                args.interval_ms
            ),
            (Mode::Poll, Wake::Notify) => println!(
                "poll mode, woken: the application sends NOTIFY postrider after each COMMIT; the look every {} ms\n\
                 is the safety net\n",
                args.interval_ms
            ),
        }
        let until = self.seconds.map_or("until Ctrl-C".to_owned(), |seconds| format!("for {seconds} s"));
        println!("placing {} orders a second {until}", self.rate);
        println!();
    }

    /// Says from now on what is going on besides.
    pub(crate) fn hold(&mut self, note: &str) {
        if !self.in_place {
            println!("{note}");
        }
        self.note = Some(note.to_owned());
    }

    /// Leaves the last picture standing.
    pub(crate) fn release(&mut self) {
        self.drawn = 0;
        println!();
    }

    /// Draws the figures after `elapsed`.
    pub(crate) fn draw(&mut self, elapsed: Duration, figures: &Figures, status: Option<&Status>) {
        let published = status.and_then(|status| status.delivered);
        let totals = [figures.committed, published.unwrap_or(0), figures.consumed];
        if !self.in_place {
            println!("{}", line(elapsed, figures, status));
            return;
        }
        let seconds = (elapsed - self.before.0).as_secs_f64().max(0.001);
        let rates = [0, 1, 2].map(|i| totals[i].saturating_sub(self.before.1[i]) as f64 / seconds);
        self.before = (elapsed, totals);

        let width = terminal_size::terminal_size().map_or(80, |(width, _)| usize::from(width.0));
        let mut picture = String::new();
        if self.drawn > 0 {
            picture.push_str(&format!("\x1b[{}A\x1b[J", self.drawn));
        }
        let lines = self.lines(elapsed, figures, status, rates);
        for (emphasis, line) in &lines {
            // A line that wraps would be drawn over only in part.
            let line: String = line.chars().take(width.saturating_sub(1)).collect();
            match emphasis.code().filter(|_| self.colour) {
                Some(code) => picture.push_str(&format!("\x1b[{code}m{line}\x1b[0m\n")),
                None => picture.push_str(&format!("{line}\n")),
            }
        }
        self.drawn = lines.len();
        let mut out = stdout().lock();
        let _drawn = out.write_all(picture.as_bytes()).and_then(|()| out.flush());
    }

    fn lines(
        &self,
        elapsed: Duration,
        figures: &Figures,
        status: Option<&Status>,
        rates: [f64; 3],
    ) -> Vec<(Emphasis, String)> {
        use Emphasis::{Bad, Faint, Good, Head, Plain};
        let of = self.seconds.map_or(String::new(), |seconds| format!(" of {seconds}"));
        let mode = if self.mode == Mode::Wal { "wal" } else { "poll" };
        let state = status.and_then(|status| status.state.as_deref());
        let mut lines = vec![(
            Head,
            format!(
                "postrider demo    {mode} mode    {} s{of}    {} orders a second    relay {}",
                elapsed.as_secs(),
                self.rate,
                state.unwrap_or("shows no status")
            ),
        )];
        let held =
            status.and_then(|status| Some((status.reason.as_ref()?, status.remedy.as_deref().unwrap_or(""))));
        if let Some((reason, remedy)) = held {
            lines.push((Bad, format!("{reason}: {remedy}")));
        }
        lines.push((Plain, String::new()));

        let published = status.and_then(|status| status.delivered);
        let row = |name: &str, cells: [String; 4]| {
            let [a, b, c, d] = cells;
            format!("{name:<18}{a:>12}{b:>12}{c:>12}{d:>13}")
        };
        let names = ["committed", "published", "consumed", "duplicates"].map(str::to_owned);
        lines.push((Faint, row("", names)));
        let level = if figures.repeated > 0 { Bad } else { Good };
        let totals = [Some(figures.committed), published, Some(figures.consumed), Some(figures.repeated)];
        lines.push((level, row("messages", totals.map(shown))));
        let [a, b, c] = rates.map(|rate| format!("{rate:.0}"));
        let b = if published.is_some() { b } else { shown(None) };
        lines.push((Plain, row("a second", [a, b, c, String::new()])));
        lines.push((Plain, String::new()));

        let names = ["p50 ms", "p99 ms", "max ms", "messages"].map(str::to_owned);
        lines.push((Faint, row("latency", names)));
        for (name, latency) in [("commit to consumer", figures.relayed), ("direct publish", figures.direct)] {
            let [p50, p99, max] = [latency.p50, latency.p99, latency.max].map(|time| ms(latency, time));
            lines.push((Plain, row(name, [p50, p99, max, latency.count.to_string()])));
        }
        lines.push((Plain, String::new()));

        lines.push((Faint, row("stage", STAGES.map(str::to_owned))));
        let depth = status.map_or([None; STAGES.len()], |status| status.depth);
        lines.push((Plain, row("batches waiting", depth.map(shown))));
        let (unconfirmed, exposed) =
            status.map_or((None, None), |status| (status.unconfirmed, status.exposed));
        let in_flight = format!(
            "{} sent and unconfirmed, {} sent and not yet recorded",
            shown(unconfirmed),
            shown(exposed)
        );
        lines.push((Plain, format!("{:<20}{in_flight}", "in flight")));
        if figures.failed + figures.skipped > 0 {
            let (failed, skipped) = (figures.failed, figures.skipped);
            lines.push((
                Bad,
                format!("orders: {failed} failed, {skipped} not sent, too many were unanswered"),
            ));
        }
        if let Some(note) = &self.note {
            lines.push((Faint, note.clone()));
        }
        lines
    }

    /// `text` in the colour of a good or a bad end.
    pub(crate) fn judged(&self, good: bool, text: &str) -> String {
        let code = if good { Emphasis::Good } else { Emphasis::Bad }.code().filter(|_| self.colour);
        code.map_or(text.to_owned(), |code| format!("\x1b[{code}m{text}\x1b[0m"))
    }
}

#[derive(Clone, Copy)]
enum Emphasis {
    Plain,
    Head,
    Faint,
    Good,
    Bad,
}

impl Emphasis {
    fn code(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Head => Some("1"),
            Self::Faint => Some("2"),
            Self::Good => Some("32"),
            Self::Bad => Some("31"),
        }
    }
}

/// A second in one line.
fn line(elapsed: Duration, figures: &Figures, status: Option<&Status>) -> String {
    let published = shown(status.and_then(|status| status.delivered));
    let depth = status.map_or([None; STAGES.len()], |status| status.depth);
    let depth: Vec<String> =
        STAGES.iter().zip(depth).map(|(stage, depth)| format!("{stage} {}", shown(depth))).collect();
    let path = |name: &str, latency: Latency| {
        format!("{name} p50 {} p99 {} ms", ms(latency, latency.p50), ms(latency, latency.p99))
    };
    let mut line = format!(
        "{:>4} s  committed {}  published {published}  consumed {}  duplicates {}  {}  {}  waiting: {}",
        elapsed.as_secs(),
        figures.committed,
        figures.consumed,
        figures.repeated,
        path("commit to consumer", figures.relayed),
        path("direct", figures.direct),
        depth.join(" "),
    );
    if let Some(reason) = status.and_then(|status| status.reason.as_ref()) {
        line.push_str(&format!("  {reason}"));
    }
    if figures.failed + figures.skipped > 0 {
        line.push_str(&format!("  orders failed {} not sent {}", figures.failed, figures.skipped));
    }
    line
}

fn shown(number: Option<u64>) -> String {
    number.map_or("-".to_owned(), |number| number.to_string())
}

/// Milliseconds, or a dash while nothing has been measured.
pub(crate) fn ms(latency: Latency, time: Duration) -> String {
    if latency.count == 0 { "-".to_owned() } else { format!("{:.2}", time.as_secs_f64() * 1000.0) }
}
