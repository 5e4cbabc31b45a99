//! The systems of a published comparison of outbox relays, each as nearly as it can be had here, with the figure that was
//! published for it. The published ones were measured elsewhere: compare rows of one table, not figures across machines.

use super::{
    arena::{Arena, NAME, failed},
    bare,
    crash::{crash, crashed},
    drain::{Drained, describe, drain},
    idle::idle,
    options::Bench,
    plain::{self, Plain},
    report::{Line, Report},
    users::{Notify, order, ordered},
};
use crate::{
    cli::output,
    config::{AckRows, Config, FirstStart, SourceMode, Wake},
    failure::Failure,
};

/// Everything, in the table's order.
pub(super) async fn measure(arena: &Arena, options: &Bench, report: &mut Report) -> Result<(), Failure> {
    let bare = [bare::publish(arena, options).await?];
    report.add(Line::drained("bare publisher", &bare, &bare));
    throughput(arena, options, report, &bare).await?;
    notifications(arena, options, report).await?;
    idleness(arena, options, report).await?;
    crashes(arena, options, report).await
}

fn with(config: &Config, change: impl FnOnce(&mut Config)) -> Config {
    let mut config = config.clone();
    change(&mut config);
    config
}

fn poll(config: &Config, workers: u32) -> Config {
    with(config, |config| {
        config.source.mode = SourceMode::Poll;
        config.source.poll.workers = workers;
        config.ack.rows = AckRows::Update;
    })
}

fn wal(config: &Config, rows: AckRows) -> Config {
    with(config, |config| {
        config.source.mode = SourceMode::Wal;
        config.source.wal.first_start = Some(FirstStart::Stream);
        config.ack.rows = rows;
    })
}

async fn throughput(
    arena: &Arena,
    options: &Bench,
    report: &mut Report,
    bare: &[Drained],
) -> Result<(), Failure> {
    let simplest = Plain { workers: 1, index: false, pipelined: false, one_update: false };
    let batched = Plain { index: true, one_update: true, ..simplest };
    let pipelined = Plain { pipelined: true, ..batched };
    for (name, published, plain) in [
        ("poller: a publish, a confirm, an UPDATE at a time, no index", "1,350 msg/s", simplest),
        ("poller: with index and one UPDATE a batch", "2,700 msg/s", batched),
        ("poller: the same, 5 workers", "2,983 msg/s", Plain { workers: 5, ..batched }),
        ("poller: confirms of a batch together", "15,000 msg/s", pipelined),
        ("poller: the same, 5 workers", "23,000-32,500 msg/s", Plain { workers: 5, ..pipelined }),
    ] {
        let run = plain::drain(arena, plain, options, name).await?;
        report.add(Line::drained(name, &[run], bare).words("published", "published", published));
    }
    let ours = &arena.config;
    for (name, published, config) in [
        ("postrider with confirms off", "37,000 msg/s", with(&poll(ours, 5), |c| c.publish.confirms = false)),
        (
            "postrider with a window of 1",
            "1,600 msg/s",
            with(&wal(ours, AckRows::Keep), |c| c.publish.window_messages = 1),
        ),
        ("postrider", "31,000 msg/s", wal(ours, AckRows::Update)),
        ("postrider", "57,600 msg/s", wal(ours, AckRows::Keep)),
        ("postrider", "15,000 msg/s", poll(ours, 1)),
        ("postrider", "23,000-32,500 msg/s", poll(ours, 5)),
    ] {
        let name = format!("{name}, {}", describe(&config));
        let run = drain(arena, &config, options, &name).await?;
        report.add(Line::drained(&name, &[run], bare).words("published", "published", published));
    }
    Ok(())
}

async fn notifications(arena: &Arena, options: &Bench, report: &mut Report) -> Result<(), Failure> {
    output::progress("users, no relay");
    let alone = order(arena, options, None, Notify::Never).await?.rate;
    let add = |report: &mut Report, name: &str, published: &str, rate: f64| {
        let line = Line::new(name).number("orders_per_second", "orders/s", rate, 0).number(
            "ratio_to_no_relay",
            "of no relay",
            rate / alone,
            2,
        );
        report.add(line.words("published", "published", published));
    };
    add(report, "users: no relay", "8,070 orders/s", alone);
    output::progress("users, a trigger that notifies");
    trigger(arena, true).await?;
    let triggered = order(arena, options, None, Notify::Never).await;
    trigger(arena, false).await?;
    add(report, "users: a trigger notifies inside the transaction", "256 orders/s", triggered?.rate);
    let notified = with(&poll(&arena.config, 5), |config| config.source.poll.wake = Wake::Notify);
    for (name, published, config, notify) in [
        (
            "users: postrider, poll, NOTIFY after COMMIT",
            "7,674 orders/s, 1.91 ms",
            notified,
            Notify::AfterCommit,
        ),
        ("users: postrider, wal", "8.6 ms", wal(&arena.config, AckRows::Update), Notify::Never),
    ] {
        output::progress(name);
        let run = order(arena, options, Some(&config), notify).await?;
        let (line, _) = ordered(name, &[run], Some(alone));
        report.add(line.words("published", "published", published));
    }
    Ok(())
}

/// The trigger that many write first: it serialises commits.
async fn trigger(arena: &Arena, there: bool) -> Result<(), Failure> {
    let sql = if there {
        format!(
            "CREATE FUNCTION {NAME}.notify() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN PERFORM pg_notify('postrider_bench', ''); RETURN NULL; END $$;
             CREATE TRIGGER notify AFTER INSERT ON {NAME}.outbox_messages
             FOR EACH STATEMENT EXECUTE FUNCTION {NAME}.notify()"
        )
    } else {
        format!("DROP FUNCTION {NAME}.notify CASCADE")
    };
    arena.sql.batch_execute(&sql).await.map_err(failed("change the trigger"))
}

async fn idleness(arena: &Arena, options: &Bench, report: &mut Report) -> Result<(), Failure> {
    output::progress("idle poller without a pause");
    let spun = plain::spin(arena, options.seconds.min(10)).await?;
    let line =
        Line::new("idle poller without a pause").number("statements_per_minute", "statements/min", spun, 0);
    report.add(line.words("published", "published", "289,000 statements/min"));
    for (published, config) in
        [("305 statements/min", poll(&arena.config, 5)), ("", wal(&arena.config, AckRows::Update))]
    {
        let line = idle(arena, &config, options).await?;
        report.add(line.words("published", "published", published));
    }
    Ok(())
}

async fn crashes(arena: &Arena, options: &Bench, report: &mut Report) -> Result<(), Failure> {
    for (published, config) in [
        ("31,095 duplicates", wal(&arena.config, AckRows::Update)),
        ("4,536 duplicates", poll(&arena.config, 5)),
    ] {
        let name = format!("killed: postrider, {}", describe(&config));
        let cost = crash(arena, &config, options, &name).await?;
        report.add(crashed(&name, &config, &[cost]).words("published", "published", published));
    }
    Ok(())
}
