//! The broker's connection ends in every way there is, again and again.

use std::time::{Duration, Instant};

use futures_util::future::join;
use serde_json::Value;

use crate::support::{Between, Cut, Database, Held, PrivateBroker, Relay, Vhost, Way, eventually, full};

/// What is done to the connection.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Restarted,
    Killed,
    ClosedByTheOperator,
    Silent,
    Reset,
    HalfClosed,
}

/// C15.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_end_of_the_connection_is_followed_by_a_new_one_in_confirm_mode_and_nothing_grows() {
    use Fault::{ClosedByTheOperator, HalfClosed, Killed, Reset, Restarted, Silent};
    let faults: &[Fault] = full(
        &[Killed, ClosedByTheOperator, Silent, Reset, HalfClosed],
        &[Restarted, Killed, ClosedByTheOperator, Silent, Reset, HalfClosed],
    );
    let broker = PrivateBroker::start().await;
    let (mut wal, mut poll) = join(Side::start("wal", &broker), Side::start("poll", &broker)).await;
    // Connections are opened as they are needed.
    join(wal.commit(500), poll.commit(500)).await;
    join(wal.recovers(), poll.recovers()).await;
    let before = join(settled(&wal.relay), settled(&poll.relay)).await;
    for round in 0..full(1, 20) {
        for fault in faults {
            join(wal.commit(50), poll.commit(50)).await;
            match fault {
                Restarted => broker.restart().await,
                Killed => {
                    broker.kill9().await;
                    broker.start_again().await;
                }
                other => drop(join(wal.suffer(*other), poll.suffer(*other)).await),
            }
            join(wal.recovers(), poll.recovers()).await;
            println!("round {round}: {fault:?} is over");
        }
    }
    let after = join(settled(&wal.relay), settled(&poll.relay)).await;
    for (side, before, after) in [(&mut wal, before.0, after.0), (&mut poll, before.1, after.1)] {
        assert!(
            after.descriptors <= before.descriptors + 6 && after.threads <= before.threads + 4,
            "{}: {before:?} has become {after:?}",
            side.mode
        );
        side.relay.stop().await;
        let charged = "SELECT count(*) FROM postrider_dead_letters";
        assert_eq!(side.between.stage.number(charged).await, 0, "{}: no row is to blame", side.mode);
        side.between.stage.oracle.repetitions();
    }
}

/// A relay in a mode, with a proxy before it, and what was committed for it.
struct Side {
    mode: &'static str,
    between: Between,
    relay: Relay,
    all: Vec<String>,
}

impl Side {
    async fn start(mode: &'static str, broker: &PrivateBroker) -> Self {
        let between = Between::on(mode, Database::fresh().await, broker.vhost().await, |config| {
            config.set("publish.confirm_timeout_ms", 2_000)
        })
        .await;
        let relay = between.stage.config.start_running().await;
        let mut side = Self { mode, between, relay, all: Vec::new() };
        side.commit(100).await;
        side.recovers().await;
        side
    }

    async fn commit(&mut self, n: usize) {
        self.all.extend(self.between.stage.commit(self.all.len(), n).await);
    }

    /// A connection can be had again when this returns.
    async fn suffer(&mut self, fault: Fault) {
        let vhost = &self.between.stage.vhost;
        match fault {
            Fault::ClosedByTheOperator => {
                for connection in connections(vhost).await {
                    vhost.api("DELETE", &format!("/api/connections/{}", encoded(&connection)), None).await;
                }
            }
            Fault::Silent => {
                self.between.broker.blackhole();
                self.commit(1).await;
                self.relay.wait_unready().await;
                self.between.broker.heal();
            }
            Fault::Reset => self.between.broker.cut(Cut::Rst),
            Fault::HalfClosed => self.between.broker.half_close(Way::Down),
            Fault::Restarted | Fault::Killed => unreachable!("the broker's own"),
        }
    }

    async fn recovers(&mut self) {
        self.commit(50).await;
        self.between.stage.oracle.wait_for_all(&self.all).await;
        self.relay.wait_state("running").await;
        confirming(&self.between.stage.vhost).await;
    }
}

/// The relay's connections, by the name the broker gives them.
async fn connections(vhost: &Vhost) -> Vec<String> {
    let path = format!("/api/vhosts/{}/connections", vhost.name());
    let named = |c: &Value| c["client_properties"]["connection_name"] == "postrider";
    // the broker's statistics are seconds late
    eventually("the relay's connection is listed", async || {
        let listed = listed(vhost, &path).await?;
        let names: Vec<String> = listed
            .as_array()?
            .iter()
            .filter(|c| named(c))
            .filter_map(|c| Some(c["name"].as_str()?.to_owned()))
            .collect();
        (!names.is_empty()).then_some(names)
    })
    .await
}

async fn listed(vhost: &Vhost, path: &str) -> Option<Value> {
    let answer = vhost.try_api("GET", path, None).await;
    (answer.status == 200).then(|| answer.json())
}

fn encoded(name: &str) -> String {
    name.replace(' ', "%20").replace('>', "%3E")
}

/// Waits until a channel in confirm mode is listed.
async fn confirming(vhost: &Vhost) {
    let path = format!("/api/vhosts/{}/channels", vhost.name());
    eventually("a channel in confirm mode is listed", async || {
        listed(vhost, &path).await?.as_array()?.iter().any(|c| c["confirm"] == true).then_some(())
    })
    .await;
}

/// What the relay holds once that rests.
async fn settled(relay: &Relay) -> Held {
    let mut last = (relay.held(), Instant::now());
    eventually("what it holds rests", async || {
        let held = relay.held();
        if held != last.0 {
            last = (held, Instant::now());
        }
        (last.1.elapsed() > Duration::from_secs(2)).then_some(held)
    })
    .await
}
