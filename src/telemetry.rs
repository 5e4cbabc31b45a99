//! Logs and metrics of the process: where they go and in which form.

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use postrider_actors::metrics::SECONDS_BUCKETS;
use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt};

/// The form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum LogFormat {
    /// For a person.
    #[default]
    Human,
    /// One JSON object a line.
    Json,
}

/// Never logged, whatever the filter asks for: lapin writes whole returned messages to this target, and payloads
/// belong in no log.
const SILENCED: [&str; 1] = ["lapin::returned_messages=off"];

/// Starts logging to standard error with `filter` (`info`, `warn,postrider=debug`, …).
pub fn log(format: LogFormat, filter: &str) -> Result<(), String> {
    let filter = filter_of(filter)?;
    let registry = tracing_subscriber::registry().with(filter);
    let started = match format {
        LogFormat::Human => registry.with(fmt::layer().with_writer(std::io::stderr)).try_init(),
        LogFormat::Json => {
            let layer =
                fmt::layer().json().flatten_event(true).with_current_span(false).with_span_list(false);
            registry.with(layer.with_writer(std::io::stderr)).try_init()
        }
    };
    started.map_err(|error| format!("start logging: {error}"))
}

fn filter_of(filter: &str) -> Result<EnvFilter, String> {
    let allowed = "allowed: error, warn, info, debug, trace, or target=level pairs separated by commas";
    let mut parsed = EnvFilter::try_new(filter)
        .map_err(|error| format!("log filter: found {filter:?} ({error}), {allowed}"))?;
    for directive in SILENCED {
        parsed = parsed.add_directive(directive.parse().expect("the silenced targets are directives"));
    }
    Ok(parsed)
}

/// Installs the process's metrics recorder; its handle renders `/metrics`.
///
/// Whoever holds the handle must call `run_upkeep` every few seconds: histograms are drained there.
pub fn metrics() -> Result<PrometheusHandle, BuildError> {
    // Without explicit buckets a histogram would be a summary, which cannot be added up over processes.
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS_BUCKETS)?
        .install_recorder()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returned_messages_are_never_logged_even_at_trace() {
        for filter in ["trace", "lapin=trace", "lapin::returned_messages=trace", "info"] {
            let parsed = filter_of(filter).unwrap().to_string();
            assert!(parsed.contains("lapin::returned_messages=off"), "{parsed}");
            assert!(!parsed.contains("lapin::returned_messages=trace"), "{parsed}");
        }
    }

    #[test]
    fn a_filter_that_is_none_says_what_is_allowed() {
        let error = filter_of("postrider=loud").unwrap_err();
        assert!(error.contains("postrider=loud") && error.contains("allowed: error, warn"), "{error}");
    }
}
