//! The whole path, live: orders over HTTP into PostgreSQL, the relay, RabbitMQ, a consumer; and what it costs.
//!
//! `./dev demo` brings the servers and calls this. By hand, with `DATABASE_URL` and `AMQP_URL` exported:
//!
//! ```text
//! cargo build --release --bin postrider
//! cargo run --release --example demo -- --mode wal --seconds 20
//! ```
//!
//! It recreates the database `postrider_demo` on that server and the queues `demo.orders` and `demo.direct` on that
//! broker, and touches nothing else. The relay is the real program in its own process; the order API and the consumer
//! are the files next to this folder, in this process, so that the latency from COMMIT to consumer is read from one
//! clock.

mod database;
mod load;
mod messages;
mod relay;
mod screen;
mod tally;
mod verdict;

// Their `main` and what only it uses is for those who run them alone.
#[allow(dead_code)]
#[path = "../consumer.rs"]
mod consumer;
#[allow(dead_code)]
#[path = "../order_api.rs"]
mod order_api;

use std::{
    env,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;
use clap::{Parser, ValueEnum};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::{MissedTickBehavior, interval, sleep},
};

use crate::{load::Load, messages::Broker, relay::Relay, screen::Screen, tally::Tally, verdict::Verdict};

/// Shows postrider at work on real servers.
#[derive(Debug, Parser)]
#[command(name = "demo")]
struct Args {
    /// How the relay learns of new rows.
    #[arg(long, value_enum, default_value_t = Mode::Wal)]
    mode: Mode,
    /// How long orders are placed; without it, until Ctrl-C.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: Option<u64>,
    /// Orders a second, placed on time whether or not earlier ones have been answered.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=5000))]
    rate: u32,
    /// In poll mode: what ends the relay's wait for new rows early.
    #[arg(long, value_enum, default_value_t = Wake::Poll)]
    wake: Wake,
    /// In poll mode: how long an idle relay waits between two looks at the table.
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    interval_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// A replication slot streams them.
    Wal,
    /// It looks for them.
    Poll,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Wake {
    /// Nothing: the interval.
    Poll,
    /// A NOTIFY by the application, after its COMMIT.
    Notify,
}

/// How long the consumer may take to catch up once orders have stopped.
const CATCH_UP: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let args = Args::parse();
    if args.mode == Mode::Wal && args.wake == Wake::Notify {
        eprintln!("demo: --wake notify goes with --mode poll: in wal mode there is no wait to end");
        return ExitCode::from(2);
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("demo: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(async {
        let (signals, seen) = watch::channel(0);
        tokio::spawn(count_signals(signals));
        let mut second = seen.clone();
        tokio::select! {
            result = demo(args, seen) => match result {
                Ok(verdict) if verdict.holds() => ExitCode::SUCCESS,
                Ok(_) => ExitCode::FAILURE,
                Err(error) => {
                    eprintln!("demo: {error:#}");
                    ExitCode::FAILURE
                }
            },
            Ok(_) = second.wait_for(|count| *count > 1) => {
                eprintln!("demo: stopped at once");
                ExitCode::from(130)
            }
        }
    });
    runtime.shutdown_background();
    code
}

/// Counts SIGINT and SIGTERM: the first ends the run in order, the second at once.
async fn count_signals(count: watch::Sender<u32>) -> anyhow::Result<()> {
    let (mut int, mut term) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    loop {
        tokio::select! {
            _ = int.recv() => {}
            _ = term.recv() => {}
        }
        count.send_modify(|count| *count += 1);
    }
}

/// Everything that runs while orders are placed.
struct Scene {
    relay: Relay,
    broker: Broker,
    load: Load,
    tally: Arc<Tally>,
    database: String,
}

async fn demo(args: Args, mut signals: watch::Receiver<u32>) -> anyhow::Result<Verdict> {
    let mut screen = Screen::new(&args);
    let mut scene = tokio::select! {
        scene = set_up(&args, &screen) => scene?,
        Ok(_) = signals.wait_for(|count| *count > 0) => anyhow::bail!("interrupted while setting up"),
    };

    let started = Instant::now();
    scene.load.start(args.rate);
    scene.broker.start_direct(&scene.tally);
    let deadline = async {
        match args.seconds {
            Some(seconds) => sleep(Duration::from_secs(seconds)).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(deadline);
    let mut tick = interval(Duration::from_secs(1));
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    tick.tick().await;
    loop {
        tokio::select! {
            () = &mut deadline => break,
            Ok(_) = signals.wait_for(|count| *count > 0) => break,
            exit = scene.relay.exited() => anyhow::bail!("the relay ended by itself ({exit}){}", scene.relay.last_words()),
            _ = tick.tick() => {
                let status = scene.relay.status().await;
                screen.draw(started.elapsed(), &scene.tally.figures(), status.as_ref());
            }
        }
    }

    scene.load.stop().await;
    scene.broker.stop_direct();
    screen.hold(&format!("orders stopped, waiting up to {} s for the consumer", CATCH_UP.as_secs()));
    let status = catch_up(&mut scene, &mut screen, started).await;
    scene.broker.settle(&scene.tally).await;
    screen.draw(started.elapsed(), &scene.tally.figures(), status.as_ref());
    screen.release();

    println!("stopping the relay (SIGTERM)");
    let stopped = scene.relay.stop().await?;
    let rows = database::count(&scene.database).await?;
    let verdict = Verdict { figures: scene.tally.figures(), status, rows, stopped };
    verdict.print(&args, &screen, &scene.relay);
    Ok(verdict)
}

async fn set_up(args: &Args, screen: &Screen) -> anyhow::Result<Scene> {
    let server =
        env::var("DATABASE_URL").context("DATABASE_URL is not set; ./dev demo brings the servers")?;
    let amqp = env::var("AMQP_URL").context("AMQP_URL is not set; ./dev demo brings the servers")?;

    let database = database::url(&server)?;
    let mut relay = Relay::prepare(args, &database, &amqp)?;
    println!("creating the database {}", database::NAME);
    database::recreate(&server).await?;
    println!(
        "declaring exchange {}, queues {} and {}",
        messages::EXCHANGE,
        messages::ORDERS,
        messages::DIRECT
    );
    let tally = Arc::new(Tally::new());
    let broker = Broker::open(&amqp, &database, &tally).await?;

    println!("{}", relay.command("migrate"));
    relay.migrate().await?;
    let load = Load::open(&database, args.wake == Wake::Notify, &tally).await?;
    println!("order API    http://{}/orders", load.address());
    println!("{}   (log: {})", relay.command("run"), relay.log().display());
    relay.start().await?;
    println!("status       curl {}/api/status", relay.admin());
    println!("metrics      curl {}/metrics", relay.admin());
    screen.explain(args);
    Ok(Scene { relay, broker, load, tally, database })
}

/// Waits until what was committed has been published and consumed, or the deadline is over, or the relay is. Returns
/// the relay's last word.
async fn catch_up(scene: &mut Scene, screen: &mut Screen, started: Instant) -> Option<relay::Status> {
    let deadline = Instant::now() + CATCH_UP;
    let mut drawn = Instant::now();
    loop {
        let figures = scene.tally.figures();
        let status = scene.relay.status().await;
        // A relay that shows no figures is judged by what it recorded, once it has stopped.
        let published = status.as_ref().and_then(|status| status.delivered);
        let done = figures.consumed >= figures.committed && published.is_none_or(|n| n >= figures.committed);
        if done || Instant::now() >= deadline || !scene.relay.runs() {
            return status;
        }
        if drawn.elapsed() >= Duration::from_secs(1) {
            drawn = Instant::now();
            screen.draw(started.elapsed(), &figures, status.as_ref());
        }
        sleep(Duration::from_millis(50)).await;
    }
}
