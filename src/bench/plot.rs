//! Plots as SVG in one self-contained page: no script, no outside resource.

use std::fmt::Write as _;

use hdrhistogram::Histogram;

/// A named line.
#[derive(Debug, Clone)]
pub(super) struct Series {
    /// What it is.
    pub name: String,
    /// In the plot's units.
    pub points: Vec<(f64, f64)>,
}

/// One plot.
#[derive(Debug)]
pub(super) enum Plot {
    /// Over seconds.
    Time {
        /// What is shown.
        title: String,
        /// Of the vertical axis.
        unit: &'static str,
        /// The lines.
        series: Vec<Series>,
    },
    /// Latency in milliseconds by quantile, both axes logarithmic, so that the rare slow ones are seen.
    Quantiles {
        /// What is shown.
        title: String,
        /// The lines.
        series: Vec<Series>,
    },
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 64.0;
const BOTTOM: f64 = 36.0;
const TOP: f64 = 12.0;
const COLOURS: [&str; 6] = ["#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#475569"];

impl Series {
    /// Latency in milliseconds over "one in so many".
    pub(super) fn quantiles(name: &str, histogram: &Histogram<u64>) -> Self {
        let steps = (0..=60).map(|step| 10_f64.powf(f64::from(step) / 15.0));
        let reach = histogram.len().max(1) as f64;
        let points = steps.take_while(|one_in| *one_in <= reach.max(2.0)).map(|one_in| {
            let micros = histogram.value_at_quantile(1.0 - 1.0 / one_in);
            (one_in, (micros as f64 / 1000.0).max(0.001))
        });
        Self { name: name.to_owned(), points: points.collect() }
    }
}

struct Axis {
    low: f64,
    high: f64,
    logarithmic: bool,
}

impl Axis {
    fn linear(values: impl Iterator<Item = f64>) -> Self {
        Self { low: 0.0, high: values.fold(0.0, f64::max).max(1e-9) * 1.05, logarithmic: false }
    }

    fn logarithmic(values: impl Iterator<Item = f64>) -> Self {
        let (low, high) =
            values.fold((f64::MAX, 1e-9_f64), |(low, high), value| (low.min(value), high.max(value)));
        let low = low.min(high).max(1e-6);
        Self {
            low: 10_f64.powf(low.log10().floor()),
            high: 10_f64.powf(high.log10().ceil()).max(low * 10.0),
            logarithmic: true,
        }
    }

    /// Where a value lies, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let part = if self.logarithmic {
            (value.max(self.low) / self.low).log10() / (self.high / self.low).log10()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        part.clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<f64> {
        if self.logarithmic {
            let (from, to) = (self.low.log10().round() as i32, self.high.log10().round() as i32);
            return (from..=to).map(|power| 10_f64.powi(power)).collect();
        }
        let rough = self.high / 5.0;
        let magnitude = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .into_iter()
            .map(|by| by * magnitude)
            .find(|step| *step >= rough)
            .unwrap_or(rough);
        (0..).map(|n| f64::from(n) * step).take_while(|tick| *tick <= self.high).collect()
    }
}

fn svg(title: &str, series: &[Series], (x, y): (&Axis, &Axis), (x_unit, y_unit): (&str, &str)) -> String {
    let px = |value| LEFT + x.place(value) * (WIDTH - LEFT - 12.0);
    let py = |value| HEIGHT - BOTTOM - y.place(value) * (HEIGHT - BOTTOM - TOP);
    let mut svg = format!(
        "<figure><figcaption>{}</figcaption><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">",
        escape(title),
        escape(title)
    );
    for tick in y.ticks() {
        let at = py(tick);
        let _ = write!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\" class=\"grid\"/><text x=\"{}\" y=\"{:.1}\" class=\"y\">{}</text>",
            WIDTH - 12.0,
            LEFT - 6.0,
            at + 4.0,
            short(tick)
        );
    }
    for tick in x.ticks() {
        let at = px(tick);
        let _ = write!(
            svg,
            "<text x=\"{at:.1}\" y=\"{:.1}\" class=\"x\">{}</text>",
            HEIGHT - BOTTOM + 16.0,
            short(tick)
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{}\" y=\"{}\" class=\"x\">{}</text><text x=\"{LEFT}\" y=\"{}\" class=\"unit\">{}</text>",
        WIDTH / 2.0,
        HEIGHT - 4.0,
        escape(x_unit),
        TOP - 2.0,
        escape(y_unit)
    );
    for (series, colour) in series.iter().zip(COLOURS.iter().cycle()) {
        let points: Vec<String> =
            series.points.iter().map(|(a, b)| format!("{:.1},{:.1}", px(*a), py(*b))).collect();
        let _ = write!(svg, "<polyline points=\"{}\" stroke=\"{colour}\"/>", points.join(" "));
    }
    svg.push_str("</svg><p>");
    for (series, colour) in series.iter().zip(COLOURS.iter().cycle()) {
        let _ = write!(svg, "<span style=\"color:{colour}\">\u{25a0}</span> {} ", escape(&series.name));
    }
    svg.push_str("</p></figure>");
    svg
}

fn draw(plot: &Plot) -> String {
    match plot {
        Plot::Time { title, unit, series } => {
            let points = || series.iter().flat_map(|series| &series.points);
            let (x, y) =
                (Axis::linear(points().map(|point| point.0)), Axis::linear(points().map(|point| point.1)));
            svg(title, series, (&x, &y), ("seconds", unit))
        }
        Plot::Quantiles { title, series } => {
            let points = || series.iter().flat_map(|series| &series.points);
            let x = Axis::logarithmic(points().map(|point| point.0));
            let y = Axis::logarithmic(points().map(|point| point.1));
            svg(title, series, (&x, &y), ("one message in so many is slower", "ms"))
        }
    }
}

/// A figure without more digits than a tick needs.
fn short(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{} M", value / 1e6),
        value if value >= 1e3 => format!("{} k", value / 1e3),
        value => {
            let text = format!("{value:.3}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The whole page.
pub(super) fn page(
    subject: &str,
    environment: &[(&str, String)],
    rows: &[Vec<String>],
    plots: &[Plot],
) -> String {
    let mut body = String::new();
    for (n, row) in rows.iter().enumerate() {
        let cell = if n == 0 { "th" } else { "td" };
        let cells: String = row.iter().map(|text| format!("<{cell}>{}</{cell}>", escape(text))).collect();
        let _ = write!(body, "<tr>{cells}</tr>");
    }
    let plots: String = plots.iter().map(draw).collect();
    let facts: String = environment
        .iter()
        .map(|(key, value)| format!("<li>{}: {}</li>", escape(key), escape(value)))
        .collect();
    format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>postrider bench {subject}</title><style>\
         :root{{color-scheme:light dark}}body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}\
         div{{overflow-x:auto}}table{{border-collapse:collapse}}td,th{{padding:.2rem .7rem;text-align:right;white-space:nowrap}}\
         td:first-child,th:first-child{{text-align:left}}tr+tr{{border-top:1px solid #8884}}figure{{margin:2rem 0}}\
         figcaption{{font-weight:600}}svg{{width:100%}}polyline{{fill:none;stroke-width:1.8}}.grid{{stroke:#8883}}\
         text{{font-size:11px;fill:currentColor}}.x{{text-anchor:middle}}.y{{text-anchor:end}}</style>\
         <h1>postrider bench {subject}</h1><div><table>{body}</table></div>{plots}<h2>Measured with</h2><ul>{facts}</ul></html>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_axis_has_round_ticks_and_holds_its_values() {
        let axis = Axis::linear([0.0, 43_000.0].into_iter());
        assert_eq!(axis.ticks(), [0.0, 10_000.0, 20_000.0, 30_000.0, 40_000.0]);
        assert!(axis.place(43_000.0) < 1.0);
    }

    #[test]
    fn a_logarithmic_axis_covers_whole_decades() {
        let axis = Axis::logarithmic([0.3, 42.0].into_iter());
        assert_eq!(axis.ticks(), [0.1, 1.0, 10.0, 100.0]);
        assert!((axis.place(1.0) - 1.0 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn a_page_escapes_what_it_shows_and_asks_for_nothing_outside() {
        let series = Series { name: "a<b".to_owned(), points: vec![(0.0, 1.0), (1.0, 2.0)] };
        let plot = Plot::Time { title: "t".to_owned(), unit: "msg/s", series: vec![series] };
        let page = page("drain", &[("k", "<v>".to_owned())], &[vec!["x".to_owned()]], &[plot]);
        assert!(page.contains("a&lt;b") && page.contains("&lt;v&gt;"));
        assert!(!page.contains("http") && !page.contains("<script"));
    }
}
