//! Does what the schedule says, and tells what is wrong at the moment.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::time::sleep;

use crate::schedule::{Episode, Fault, Kind, Peer, Target};
use crate::subject::Subject;
use crate::support::{Cut, PrivateBroker, PrivatePostgres, Proxy, Way, http_call};
use crate::watch::STALL_LIMIT;

/// One way over a network that is far away.
const LATENCY: Duration = Duration::from_millis(100);

/// What a dripping connection lets through each way.
const DRIP_BYTES_PER_SECOND: usize = 8_000;

/// What is wrong now, when the last thing went wrong and when the last was over.
#[derive(Clone, Debug)]
pub(crate) struct Weather {
    pub(crate) now: Vec<Kind>,
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
}

/// Whoever strikes.
pub(crate) struct Fate<'a> {
    broker: &'a PrivateBroker,
    postgres: &'a PrivatePostgres,
    subjects: &'a [Subject],
    weather: Mutex<Weather>,
}

impl<'a> Fate<'a> {
    pub(crate) fn new(
        broker: &'a PrivateBroker,
        postgres: &'a PrivatePostgres,
        subjects: &'a [Subject],
    ) -> Self {
        let now = Instant::now();
        let weather = Mutex::new(Weather { now: Vec::new(), began: now, ended: now });
        Self { broker, postgres, subjects, weather }
    }

    fn weather_mut(&self) -> MutexGuard<'_, Weather> {
        self.weather.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn weather(&self) -> Weather {
        self.weather_mut().clone()
    }

    /// Returns when the last fault is over. On a slow machine faults come late, never more than one at a time.
    pub(crate) async fn run(&self, schedule: &[Episode]) {
        let start = tokio::time::Instant::now();
        for Episode { fault, meanwhile } in schedule {
            tokio::time::sleep_until(start + fault.at).await;
            tokio::join!(self.strike(fault), async {
                if let Some(second) = meanwhile {
                    sleep(second.at - fault.at).await;
                    self.strike(second).await;
                }
            });
        }
    }

    async fn strike(&self, fault: &Fault) {
        {
            let mut weather = self.weather_mut();
            weather.now.push(fault.kind);
            weather.began = Instant::now();
        }
        self.inject(fault).await;
        let mut weather = self.weather_mut();
        let at = weather.now.iter().position(|kind| *kind == fault.kind).expect("it was put there");
        weather.now.remove(at);
        weather.ended = Instant::now();
    }

    async fn inject(&self, fault: &Fault) {
        let lasts = sleep(fault.lasts);
        let Self { broker, postgres, .. } = self;
        match fault.kind {
            Kind::BrokerKilled => {
                broker.kill9().await;
                lasts.await;
                broker.start_again().await;
            }
            Kind::BrokerFrozen => {
                broker.freeze().await;
                lasts.await;
                broker.thaw().await;
            }
            Kind::BrokerBlocked => {
                broker.block().await;
                lasts.await;
                broker.unblock().await;
            }
            Kind::PostgresKilled => {
                postgres.kill9().await;
                lasts.await;
                postgres.start_again().await;
            }
            Kind::PostgresFrozen => {
                postgres.freeze().await;
                lasts.await;
                postgres.thaw().await;
            }
            Kind::PostgresRestarted => postgres.restart().await,
            kind => {
                join_all(self.targets(fault.target).map(|subject| subject.suffer(kind, fault.lasts))).await;
            }
        }
    }

    fn targets(&self, target: Target) -> impl Iterator<Item = &Subject> {
        let mode = match target {
            Target::Wal => "wal",
            Target::Poll => "poll",
            Target::Both => "",
        };
        let everyone = self.subjects.len() == 1 || mode.is_empty();
        self.subjects.iter().filter(move |subject| everyone || subject.mode == mode)
    }
}

impl Subject {
    async fn suffer(&self, kind: Kind, lasts: Duration) {
        match kind {
            Kind::RelayKilled => {
                let mut relay = self.relay.lock().await;
                relay.kill9();
                *relay = self.config.start();
            }
            Kind::RelayStopped => {
                let mut relay = self.relay.lock().await;
                relay.sigterm();
                let exit = relay.wait_exit().await;
                if exit.code != Some(0) || exit.took > Duration::from_secs(15) {
                    self.complain(format!("a stop ended as {exit:?}"));
                }
                *relay = self.config.start();
            }
            Kind::RelayFrozen => {
                self.relay.lock().await.freeze();
                sleep(lasts).await;
                self.relay.lock().await.thaw();
            }
            Kind::RelayPaused => {
                self.ask("/api/pause").await;
                sleep(lasts).await;
                self.ask("/api/resume").await;
            }
            Kind::ConnectionsClosed => self.vhost.close_connections().await,
            Kind::Unbound => self.unbind(lasts).await,
            Kind::SessionsEnded => {
                // the relay's sessions have names, the writers' have none
                let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                           WHERE datname = current_database() AND application_name <> ''";
                self.database.connect().await.query(sql, &[]).await.expect("sessions are ended");
            }
            Kind::TableLocked => {
                let locker = self.database.connect().await;
                let sql = "BEGIN; LOCK TABLE outbox_messages IN ACCESS EXCLUSIVE MODE";
                locker.batch_execute(sql).await.expect("the table is locked");
                sleep(lasts).await;
            }
            Kind::Slow(peer) => {
                self.network(peer, lasts, |line| {
                    line.latency(Way::Up, LATENCY);
                    line.latency(Way::Down, LATENCY);
                })
                .await;
            }
            Kind::Cut(peer) => {
                self.network(peer, lasts, |line| {
                    line.shut();
                    line.cut(Cut::Rst);
                })
                .await;
            }
            Kind::Silent(peer) => self.network(peer, lasts, Proxy::blackhole).await,
            Kind::Dripping(peer) => {
                self.network(peer, lasts, |line| {
                    line.drip(Way::Up, DRIP_BYTES_PER_SECOND);
                    line.drip(Way::Down, DRIP_BYTES_PER_SECOND);
                })
                .await;
            }
            other => unreachable!("{other} is for servers"),
        }
    }

    async fn network(&self, peer: Peer, lasts: Duration, spoil: impl Fn(&Proxy)) {
        let line = if peer == Peer::Broker { &self.to_broker } else { &self.to_postgres };
        spoil(line);
        sleep(lasts).await;
        line.heal();
    }

    /// Asks as an operator does: again, until it is done.
    async fn ask(&self, path: &str) {
        let url = self.url(path).await;
        let asked = tokio::time::timeout(STALL_LIMIT, async {
            while http_call("POST", url.clone(), None).await.is_ok_and(|answer| answer.status != 200) {
                sleep(Duration::from_millis(100)).await;
            }
        });
        if asked.await.is_err() {
            self.complain(format!("{path} could not be had in {STALL_LIMIT:?}"));
        }
    }
}
