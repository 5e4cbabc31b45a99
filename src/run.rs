//! `postrider run`: the relay, the admin server, and the signals that end them.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, SystemTime},
};

use metrics_exporter_prometheus::PrometheusHandle;
use postrider_actors::{
    database::pool,
    pipeline::{Plane, Relay},
    settings::{RowPolicy, Settings, SourceSettings},
    status::{Board, figures::Figures},
};
use tokio_util::sync::CancellationToken;

use crate::{
    admin::{self, Admin, access::Tokens},
    config::Config,
    failure::Failure,
    letters::Desk,
    settings::settings,
    shutdown::Signals,
    telemetry,
};

/// How often the summary line is written while messages move.
const SUMMARY_INTERVAL: Duration = Duration::from_secs(60);

/// How often histograms are drained: a second's worth of observations is little memory.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(1);

/// How long the first line waits for the counts it should show.
const FIRST_READING: Duration = Duration::from_secs(3);

/// Threads for connections and the control plane; the stages have their own.
const CONNECTION_THREADS: usize = 2;

/// Runs the relay until it is told to stop or cannot go on.
///
/// # Errors
/// When the admin address cannot be bound, a token file cannot be read, or the relay gives up.
pub fn run(config: &Config) -> Result<(), Failure> {
    #[cfg(debug_assertions)]
    if let Ok(text) = std::env::var("POSTRIDER_FAILPOINTS") {
        postrider_actors::failpoints::arm(&text).map_err(|error| Failure::usage(error.chain()))?;
    }
    let settings = Arc::new(settings(config)?);
    let tokens = Tokens::read(config.admin.token_file.as_deref(), config.admin.read_token_file.as_deref())
        .map_err(|error| Failure::usage(error.to_string()))?;
    let metrics =
        telemetry::metrics().map_err(|error| Failure::new(format!("install the metrics: {error}")))?;
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(CONNECTION_THREADS)
            .thread_name("connections")
            .enable_all()
            .build()
            .expect("the system gives threads")
    };
    let system = actix_rt::System::with_tokio_rt(runtime);
    system.block_on(serve(config, settings, tokens, metrics))
}

async fn serve(
    config: &Config,
    settings: Arc<Settings>,
    tokens: Tokens,
    metrics: PrometheusHandle,
) -> Result<(), Failure> {
    let mut signals = Signals::hear().map_err(|error| Failure::new(format!("hear signals: {error}")))?;
    postrider_actors::metrics::register();
    let board = Board::new();
    let figures = Figures::new();
    let pool = pool::pool(&settings.database, "postrider", connections(&settings))?;
    let plane = Plane::new(Arc::clone(&settings), pool.clone(), board.clone(), Arc::clone(&figures));
    let listen = config.admin.listen;
    let server = admin::serve(
        listen,
        Admin {
            settings: Arc::clone(&settings),
            board: board.clone(),
            figures: Arc::clone(&figures),
            plane: Arc::clone(&plane),
            metrics: metrics.clone(),
            letters: Desk::new(Arc::clone(&settings), pool.clone()),
            tokens,
            started: SystemTime::now(),
        },
    )
    .map_err(|error| {
        Failure::new(format!("admin.listen {listen}: {error}"))
            .with_hint("choose another address, or end the process that holds this one")
    })?;
    let admin = server.handle();
    actix_rt::spawn(server);

    let shutdown = CancellationToken::new();
    let relay = Relay {
        settings: Arc::clone(&settings),
        pool,
        board,
        figures: Arc::clone(&figures),
        plane: Arc::clone(&plane),
    };
    actix_rt::spawn(introduce(config.clone(), Arc::clone(&settings), plane));
    actix_rt::spawn(summarise(figures));
    actix_rt::spawn(upkeep(metrics.clone()));
    let mut running = std::pin::pin!(relay.run(shutdown.clone()));
    let result = tokio::select! {
        result = &mut running => result,
        name = signals.next() => {
            tracing::info!(signal = name, "settling what is in flight, then stopping; a second signal stops now");
            shutdown.cancel();
            tokio::select! {
                result = &mut running => result,
                name = signals.next() => {
                    let message = format!("stopped at once by a second signal ({name})");
                    return Err(Failure::new(message).with_hint("what was in flight is repeated at the next start"));
                }
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(1), admin.stop(false)).await.ok();
    result?;
    tracing::info!("stopped");
    Ok(())
}

/// Drains what histograms collected, so that memory does not grow between scrapes.
async fn upkeep(metrics: PrometheusHandle) {
    let mut ticks = tokio::time::interval(UPKEEP_INTERVAL);
    loop {
        ticks.tick().await;
        metrics.run_upkeep();
    }
}

/// SQL connections at most: one a claim, one for retries, and one each for the acker, the decoder and the control plane.
fn connections(settings: &Settings) -> usize {
    let workers = match &settings.source {
        SourceSettings::Wal(_) => 0,
        SourceSettings::Poll(poll) => poll.workers,
    };
    workers + 8
}

/// One line with every effective choice, and what waits.
async fn introduce(config: Config, settings: Arc<Settings>, plane: Arc<Plane>) {
    let deadline = tokio::time::Instant::now() + FIRST_READING;
    while plane.reading().is_none() && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let health = plane.reading().map(|reading| reading.health);
    let count = |count: Option<u64>| count.map_or_else(|| "unknown".to_owned(), |count| count.to_string());
    let (mode, from) = match &settings.source {
        SourceSettings::Wal(wal) => ("wal", format!("slot {} publication {}", wal.slot, wal.publication)),
        SourceSettings::Poll(poll) => (
            "poll",
            format!(
                "{} workers of {} every {} ms",
                poll.workers,
                poll.batch_messages,
                poll.interval.as_millis()
            ),
        ),
    };
    let rows = match settings.ack.rows {
        RowPolicy::Update => "update",
        RowPolicy::Delete => "delete",
        RowPolicy::Keep => "keep",
    };
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        mode,
        from,
        outbox = settings.outbox.name(),
        database = config.database.url.masked(),
        broker = config.broker.url.masked(),
        exchange = config.publish.exchange,
        routing_key = config.publish.routing_key,
        rows,
        window = settings.publish.window,
        lanes = settings.publish.lanes,
        exposure = settings.publish.exposure,
        credit_messages = settings.credits.messages,
        credit_bytes = settings.credits.bytes,
        confirms = settings.publish.confirms,
        mandatory = settings.publish.mandatory,
        persistent = settings.publish.persistent,
        admin = %config.admin.listen,
        unprocessed = count(health.as_ref().and_then(|health| health.unprocessed)),
        retries = count(health.as_ref().map(|health| health.retries)),
        dead_letters = count(health.as_ref().map(|health| health.dead_letters)),
        "postrider runs"
    );
    if !settings.publish.confirms {
        tracing::warn!("publish.confirms is off: what the broker loses, nobody will know");
    }
    if !settings.publish.mandatory {
        tracing::warn!("publish.mandatory is off: messages without a queue count as delivered");
    }
}

/// One line a minute while messages move.
async fn summarise(figures: Arc<Figures>) {
    let mut ticks = tokio::time::interval(SUMMARY_INTERVAL);
    ticks.tick().await;
    let totals =
        || (figures.delivered.load(Relaxed), figures.rejected.load(Relaxed), figures.recorded.load(Relaxed));
    let mut before = totals();
    loop {
        ticks.tick().await;
        let now = totals();
        if now != before {
            tracing::info!(
                delivered = now.0 - before.0,
                rejected = now.1 - before.1,
                recorded = now.2 - before.2,
                in_flight = figures.credits_in_use().messages,
                exposed = figures.exposed(),
                "last minute"
            );
        }
        before = now;
    }
}
