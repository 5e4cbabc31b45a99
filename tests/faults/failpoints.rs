//! The relay panics or dies at every hand-over between its stages and around every commit.

use std::time::Duration;

use postrider_actors::failpoints::Point;

use crate::support::{Relay, Stage, eventually, full};

/// What a crash may repeat. Small, so that a few hundred rows can exceed it.
const EXPOSURE: usize = 64;

/// The signal of a process that ended itself.
const SIGABRT: i32 = 6;

/// A failpoint, the pass it strikes at, and the modes that have it.
struct Case {
    point: Point,
    at: u32,
    modes: &'static [&'static str],
}

const BOTH: &[&str] = &["wal", "poll"];

/// How a point is passed in the middle of the load. A `match`, so that a new point cannot be left out.
fn case(point: Point) -> Case {
    let (at, modes) = match point {
        Point::Claimed => (3, &["poll"] as &[_]),
        Point::SourceDecode | Point::DecodePublish => (3, BOTH),
        Point::PublishBefore | Point::PublishAfter => (70, BOTH),
        Point::Confirmed | Point::PublishAck => (3, BOTH),
        Point::CommitBefore | Point::CommitAfter => (3, BOTH),
        Point::RetriesInsert => (2, BOTH),
        Point::Feedback => (2, &["wal"] as &[_]),
    };
    Case { point, at, modes }
}

/// C12. The process lives: what the generation held is abandoned, and the next one publishes it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stage_that_panics_anywhere_loses_nothing_and_the_next_generation_repeats_no_more_than_the_exposure()
 {
    each_point("panic").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_dies_anywhere_loses_nothing_and_the_next_one_repeats_no_more_than_the_exposure() {
    each_point("abort").await;
}

/// An error is a stage's own way of ending.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recording_that_fails_around_its_commit_loses_nothing_and_repeats_no_more_than_the_exposure() {
    let points = [Point::CommitBefore, Point::CommitAfter, Point::RetriesInsert];
    tokio::join!(strike_each("wal", &points, "error"), strike_each("poll", &points, "error"));
}

/// In several stages side by side: a strike is mostly waiting.
async fn each_point(action: &str) {
    let groups = Point::ALL.chunks(Point::ALL.len().div_ceil(3));
    let strikes = groups.flat_map(|points| BOTH.iter().map(move |mode| strike_each(mode, points, action)));
    futures_util::future::join_all(strikes).await;
}

async fn strike_each(mode: &str, points: &[Point], action: &str) {
    let stage = stage(mode).await;
    for _ in 0..full(1, 5) {
        for case in points.iter().map(|point| case(*point)).filter(|case| case.modes.contains(&mode)) {
            strike(&stage, &case, action).await;
        }
    }
}

/// Nobody takes `nobody.#` yet. The relay has run once, so that in wal mode its slot is there.
async fn stage(mode: &str) -> Stage {
    let stage = Stage::with(mode, |config| {
        config
            .set("publish.exposure_messages", EXPOSURE)
            .set("publish.window_messages", 32)
            .set("publish.max_attempts", 1_000)
            .set("publish.retry_backoff_ms", 50)
            .set("publish.retry_backoff_max_ms", 200)
            .set("source.poll.batch_messages", 40)
    })
    .await;
    stage.vhost.bind("all", "outbox", "order.#").await;
    stage.vhost.unbind("all", "outbox", "#").await;
    stage.config.start_running().await.stop().await;
    stage
}

/// One strike under load, a restart where it needs one, and the balance.
async fn strike(stage: &Stage, case: &Case, action: &str) {
    let name = case.point.as_str();
    let what = format!("{name}={action}@{}", case.at);
    let before = stage.oracle.repetitions();
    let mut all = stage.commit(0, 100).await;
    let mut relay = stage.config.clone().env("POSTRIDER_FAILPOINTS", &what).start();
    let rejected = case.point == Point::RetriesInsert;
    for n in 0..10 {
        all.extend(stage.commit(100 + n * 20, 20).await);
        if rejected {
            all.push(stage.insert("nobody.yet", "{}").await);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    if action == "abort" {
        let exit = relay.wait_exit().await;
        assert_eq!(exit.signal, Some(SIGABRT), "{what}: {exit:?}");
        relay = stage.config.start();
    } else {
        relay.wait_status(&what, |status| status["generation"].as_u64() > Some(1)).await;
        assert!(struck(&relay, name), "{what} struck");
    }
    if rejected {
        stage.vhost.bind("all", "outbox", "nobody.#").await;
    }
    stage.oracle.wait_for_all(&all).await;
    let left = "SELECT (SELECT count(*) FROM outbox_messages WHERE processed_on_utc IS NULL)
                     + (SELECT count(*) FROM postrider_retries)";
    eventually("everything is recorded", async || (stage.number(left).await == 0).then_some(())).await;
    relay.stop().await;
    if rejected {
        stage.vhost.unbind("all", "outbox", "nobody.#").await;
    }
    stage.oracle.barrier().await;
    let repeated = stage.oracle.repetitions() - before;
    assert!(repeated <= EXPOSURE, "{what}: {repeated} repeated");
    assert_eq!(stage.number("SELECT count(*) FROM postrider_dead_letters").await, 0, "{what}");
}

fn struck(relay: &Relay, name: &str) -> bool {
    relay.log().lines().any(|line| line.contains("failpoint") && line.contains(name))
}
