//! What was measured, as a table on a terminal, as JSON, and as one HTML file with plots.

use std::fmt::Write as _;

use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};

use super::{
    arena::{Arena, failed},
    drain::Drained,
    options::Bench,
    plot::{self, Plot, Series},
};
use crate::failure::Failure;

/// Everything that is told at the end.
#[derive(Debug)]
pub(super) struct Report {
    subject: &'static str,
    /// Where and with what it was measured: key and value.
    environment: Vec<(&'static str, String)>,
    lines: Vec<Line>,
    plots: Vec<Plot>,
}

/// One system's figures.
#[derive(Debug)]
pub(super) struct Line {
    system: String,
    cells: Vec<Cell>,
    lost: u64,
}

#[derive(Debug)]
struct Cell {
    /// In JSON, with its unit.
    key: &'static str,
    /// On the table.
    title: &'static str,
    value: Value,
    text: String,
}

impl Report {
    /// An empty report about these servers.
    pub(super) async fn of(arena: &Arena, options: &Bench) -> Result<Self, Failure> {
        let row = arena
            .sql
            .query_typed_one(
                "SELECT current_setting('server_version'), current_setting('synchronous_commit')",
                &[],
            )
            .await
            .map_err(failed("ask for the version"))?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let publish = &arena.config.publish;
        let environment = vec![
            ("postrider", env!("CARGO_PKG_VERSION").to_owned()),
            ("PostgreSQL", row.get::<_, String>(0)),
            ("synchronous_commit", row.get::<_, String>(1)),
            ("cores", cores.to_string()),
            ("rows", options.rows.to_string()),
            ("rows a transaction", options.transaction.to_string()),
            ("body bytes", options.body.to_string()),
            ("exchange", format!("{:?}", options.exchange).to_lowercase()),
            ("window", publish.window_messages.to_string()),
            ("exposure", arena.config.exposure_messages().to_string()),
            ("credits", arena.config.credits.messages.to_string()),
            ("build", if cfg!(debug_assertions) { "debug: not for figures" } else { "release" }.to_owned()),
        ];
        Ok(Self { subject: options.subject.word(), environment, lines: Vec::new(), plots: Vec::new() })
    }

    /// Adds a system's figures.
    pub(super) fn add(&mut self, line: Line) {
        self.lines.push(line);
    }

    /// Adds a plot over time.
    pub(super) fn plot(&mut self, title: &str, unit: &'static str, series: Vec<Series>) {
        self.plots.push(Plot::Time { title: title.to_owned(), unit, series });
    }

    /// Adds a latency distribution.
    pub(super) fn distribution(&mut self, title: &str, series: &[(&str, &Histogram<u64>)]) {
        let series = series.iter().map(|(name, histogram)| Series::quantiles(name, histogram)).collect();
        self.plots.push(Plot::Quantiles { title: title.to_owned(), series });
    }

    /// Messages lost, over all systems.
    pub(super) fn lost(&self) -> u64 {
        self.lines.iter().map(|line| line.lost).sum()
    }

    /// For a script.
    pub(super) fn json(&self) -> String {
        let systems = self.lines.iter().map(|line| {
            let mut object = Map::new();
            object.insert("system".into(), json!(line.system));
            object.extend(line.cells.iter().map(|cell| (cell.key.to_owned(), cell.value.clone())));
            Value::Object(object)
        });
        let environment: Map<_, _> =
            self.environment.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
        let document = json!({
            "subject": self.subject, "environment": environment, "systems": systems.collect::<Vec<_>>(),
        });
        format!("{document:#}\n")
    }

    /// Titles of the columns, in order of first appearance.
    fn titles(&self) -> Vec<&'static str> {
        let mut titles = Vec::new();
        for cell in self.lines.iter().flat_map(|line| &line.cells) {
            if !titles.contains(&cell.title) {
                titles.push(cell.title);
            }
        }
        titles
    }

    /// The table's rows, titles first.
    fn rows(&self) -> Vec<Vec<String>> {
        let titles = self.titles();
        let head =
            std::iter::once(self.subject.to_owned()).chain(titles.iter().map(|title| (*title).to_owned()));
        let mut rows = vec![head.collect::<Vec<_>>()];
        for line in &self.lines {
            let text = |title| {
                line.cells.iter().find(|cell| cell.title == title).map_or("", |cell| cell.text.as_str())
            };
            let cells = titles.iter().map(|title| text(*title).to_owned());
            rows.push(std::iter::once(line.system.clone()).chain(cells).collect());
        }
        rows
    }

    /// For a terminal.
    pub(super) fn table(&self) -> String {
        let rows = self.rows();
        let width = |column: usize| {
            rows.iter().filter_map(|row| row.get(column)).map(|text| text.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..rows.first().map_or(0, Vec::len)).map(width).collect();
        let mut table = String::new();
        for row in &rows {
            for (column, (text, width)) in row.iter().zip(&widths).enumerate() {
                // Names to the left, figures to the right.
                let _ = match column {
                    0 => write!(table, "{text:<width$}"),
                    _ => write!(table, "  {text:>width$}"),
                };
            }
            table.truncate(table.trim_end().len());
            table.push('\n');
        }
        let environment = self.environment.iter().map(|(key, value)| format!("{key} {value}"));
        format!("{table}\n{}\n", environment.collect::<Vec<_>>().join(", "))
    }

    /// One file that needs nothing else.
    pub(super) fn html(&self) -> String {
        plot::page(self.subject, &self.environment, &self.rows(), &self.plots)
    }
}

impl Line {
    /// A line without figures yet.
    pub(super) fn new(system: impl Into<String>) -> Self {
        Self { system: system.into(), cells: Vec::new(), lost: 0 }
    }

    /// Adds a figure with so many decimals.
    pub(super) fn number(
        mut self,
        key: &'static str,
        title: &'static str,
        value: f64,
        decimals: usize,
    ) -> Self {
        let rounded = format!("{value:.decimals$}");
        let value = rounded.parse::<f64>().map_or(Value::Null, Value::from);
        self.cells.push(Cell { key, title, value, text: rounded });
        self
    }

    /// Adds a figure where there is one.
    pub(super) fn maybe(
        self,
        key: &'static str,
        title: &'static str,
        value: Option<f64>,
        decimals: usize,
    ) -> Self {
        match value {
            Some(value) => self.number(key, title, value, decimals),
            None => self,
        }
    }

    /// Adds words.
    pub(super) fn words(mut self, key: &'static str, title: &'static str, words: impl Into<String>) -> Self {
        let text: String = words.into();
        self.cells.push(Cell { key, title, value: json!(text), text });
        self
    }

    /// Adds how many were lost; more than none fails the benchmark.
    pub(super) fn lost(mut self, lost: u64) -> Self {
        self.lost += lost;
        self.number("lost", "lost", lost as f64, 0)
    }

    /// Quantiles in milliseconds.
    pub(super) fn latency(self, histogram: &Histogram<u64>) -> Self {
        let ms = |micros: u64| micros as f64 / 1000.0;
        self.number("p50_ms", "p50 ms", ms(histogram.value_at_quantile(0.5)), 2)
            .number("p90_ms", "p90 ms", ms(histogram.value_at_quantile(0.9)), 2)
            .number("p99_ms", "p99 ms", ms(histogram.value_at_quantile(0.99)), 2)
            .number("max_ms", "max ms", ms(histogram.max()), 2)
    }

    /// Figures of drained backlogs, as ratios to the bare publisher's run of the same round.
    pub(super) fn drained(name: &str, runs: &[Drained], bare: &[Drained]) -> Self {
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let cpu = |run: &Drained| run.used.relay * 1e6 / run.messages as f64;
        let per_100k = |seconds: fn(&Drained) -> Option<f64>| {
            let all: Option<Vec<f64>> =
                runs.iter().map(|run| Some(seconds(run)? * 100_000.0 / run.messages as f64)).collect();
            all.filter(|all| !all.is_empty()).map(mean)
        };
        let ratios: Vec<f64> = runs.iter().zip(bare).map(|(run, bare)| run.rate() / bare.rate()).collect();
        let low = ratios.iter().copied().fold(f64::MAX, f64::min);
        let high = ratios.iter().copied().fold(0.0, f64::max);
        let ratios_of_cpu = runs.iter().zip(bare).map(|(run, bare)| cpu(run) / cpu(bare)).collect();
        let mut line = Line::new(name)
            .number("messages_per_second", "msg/s", mean(runs.iter().map(Drained::rate).collect()), 0)
            .number("ratio_to_bare", "of bare", mean(ratios), 2)
            .words("ratio_range", "range", format!("{low:.2}-{high:.2}"))
            .number("cpu_ratio_to_bare", "CPU of bare", mean(ratios_of_cpu), 2)
            .number("relay_cpu_us_per_message", "CPU µs/msg", mean(runs.iter().map(cpu).collect()), 2)
            .maybe("relay_cpu_s_per_100k", "CPU s/100k", per_100k(|run| Some(run.used.relay)), 2)
            .maybe("postgres_cpu_s_per_100k", "PostgreSQL", per_100k(|run| run.used.postgres), 2)
            .maybe("broker_cpu_s_per_100k", "broker", per_100k(|run| run.used.broker), 2);
        let rss = runs.iter().map(|run| run.peak_rss).max().unwrap_or_default();
        if rss > 0 {
            line = line.number("peak_rss_mib", "RSS MiB", rss as f64 / (1 << 20) as f64, 0);
        }
        let duplicates: u64 = runs.iter().map(|run| run.held.saturating_sub(run.messages)).sum();
        line.lost(runs.iter().map(|run| run.lost() + run.left).sum()).number(
            "duplicates",
            "dup",
            duplicates as f64,
            0,
        )
    }
}
