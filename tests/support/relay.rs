//! The relay as its users run it: the program, a configuration file, its admin port and signals.

use super::{DEADLINE, Database, LOOK_EVERY, Vhost, eventually, http};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// A configuration to run commands with. Every value of design's names can be set by its dotted key.
#[derive(Clone, Debug)]
pub(crate) struct RelayConfig {
    values: BTreeMap<String, Value>,
    folder: Arc<Folder>,
    port: u16,
    env: BTreeMap<String, String>,
}

/// Where the configuration and the logs are; kept for whoever looks into a failure.
#[derive(Debug)]
struct Folder(PathBuf);

impl Folder {
    fn fresh() -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(super::unique());
        fs::create_dir_all(&path).expect("a folder for the relay");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

/// How a process ended, and how long after the wait began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exit {
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) took: Duration,
}

/// What a command printed.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl RelayConfig {
    /// The defaults, pointed at this database and this vhost, with a slot and an admin port of its own.
    pub(crate) fn new(database: &Database, vhost: &Vhost) -> Self {
        let (folder, port) = place();
        Self { values: BTreeMap::new(), folder, port, env: BTreeMap::new() }
            .set("database.url", database.url())
            .set("broker.url", vhost.url())
            .set("source.wal.slot", database.name())
            .set("admin.listen", format!("127.0.0.1:{port}"))
    }

    /// The same relay once more: the same outbox and slot, an admin port of its own.
    pub(crate) fn another(&self) -> Self {
        let (folder, port) = place();
        let other = Self { folder, port, ..self.clone() };
        other.set("admin.listen", format!("127.0.0.1:{port}"))
    }

    pub(crate) fn set(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.values.insert(key.to_owned(), value.into());
        self
    }

    pub(crate) fn unset(mut self, key: &str) -> Self {
        self.values.remove(key);
        self
    }

    pub(crate) fn mode(self, mode: &str) -> Self {
        self.set("source.mode", mode)
    }

    /// A variable of the relay's environment.
    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// The TOML: dotted keys, one a line. JSON's strings, numbers, booleans and arrays are TOML's too.
    pub(crate) fn toml(&self) -> String {
        self.values.iter().map(|(key, value)| format!("{key} = {value}\n")).collect()
    }

    /// Where its files are.
    pub(crate) fn folder(&self) -> &std::path::Path {
        &self.folder.0
    }

    fn command(&self, args: &[&str]) -> Command {
        let file = self.folder.0.join("config.toml");
        fs::write(&file, self.toml()).expect("the configuration is written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("POSTRIDER_")) {
            command.env_remove(name);
        }
        command.args(args).arg("--config").arg(file).envs(&self.env).stdin(Stdio::null());
        command
    }

    /// Runs one command of the program to its end.
    pub(crate) async fn run(&self, args: &[&str]) -> Ran {
        let mut command = self.command(args);
        let ran = tokio::task::spawn_blocking(move || command.output()).await.expect("the command was run");
        let output = ran.expect("the program starts");
        Ran {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// The folder of its configuration and logs, which stays from here on.
    pub(crate) fn keep(&self) -> &Path {
        std::mem::forget(self.folder.clone());
        &self.folder.0
    }

    pub(crate) async fn migrate(&self) {
        let ran = self.run(&["migrate"]).await;
        assert_eq!(ran.code, Some(0), "migrate: {ran:?}");
    }

    /// Starts `postrider run`, and waits for nothing.
    pub(crate) fn start(&self) -> Relay {
        self.start_command(&["run"])
    }

    /// Starts a command of the program that lasts, and waits for nothing.
    pub(crate) fn start_command(&self, args: &[&str]) -> Relay {
        let log = self.folder.0.join(format!("{}.log", super::unique()));
        let out = File::create(&log).expect("a log file");
        let err = out.try_clone().expect("one file for both");
        let child = self.command(args).stdout(out).stderr(err).spawn().expect("the relay starts");
        Relay { child, config: self.clone(), log, exit: None }
    }

    /// Starts it and waits until it is running.
    pub(crate) async fn start_running(&self) -> Relay {
        let mut relay = self.start();
        relay.wait_state("running").await;
        relay
    }
}

/// A folder and an admin port that no other relay has.
fn place() -> (Arc<Folder>, u16) {
    (Arc::new(Folder::fresh()), free_port())
}

/// A running relay; killed when dropped. A failing test shows the end of its log.
#[derive(Debug)]
pub(crate) struct Relay {
    child: Child,
    config: RelayConfig,
    log: PathBuf,
    exit: Option<(Option<i32>, Option<i32>)>,
}

impl Relay {
    pub(crate) fn config(&self) -> &RelayConfig {
        &self.config
    }

    pub(crate) fn admin(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.config.port)
    }

    /// An error where nothing answers: while it starts, when it is frozen or gone.
    pub(crate) async fn try_get(&self, path: &str) -> Result<http::Answer, String> {
        http::call("GET", self.admin(path), None).await
    }

    pub(crate) async fn get(&self, path: &str) -> http::Answer {
        self.try_get(path).await.unwrap_or_else(|e| panic!("{e}"))
    }

    pub(crate) async fn post(&self, path: &str) -> http::Answer {
        self.post_json(path, None).await
    }

    pub(crate) async fn post_json(&self, path: &str, body: Option<Value>) -> http::Answer {
        let answer = http::call("POST", self.admin(path), body).await;
        answer.unwrap_or_else(|e| panic!("{e}"))
    }

    /// `GET /api/status`.
    pub(crate) async fn status(&self) -> Value {
        self.get("/api/status").await.json()
    }

    pub(crate) async fn metrics(&self) -> Metrics {
        Metrics::parse(&self.get("/metrics").await.body)
    }

    /// Looks at the status until its `state` is this one; returns that status.
    pub(crate) async fn wait_state(&mut self, state: &str) -> Value {
        self.wait_status(&format!("state {state}"), |status| status["state"] == state).await
    }

    /// Looks at the status until `wanted`; panics with the last one seen, or where the process is gone.
    pub(crate) async fn wait_status(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let began = Instant::now();
        loop {
            let last = match self.try_get("/api/status").await {
                Ok(answer) if answer.status == 200 => {
                    let status = answer.json();
                    if wanted(&status) {
                        return status;
                    }
                    status.to_string()
                }
                Ok(answer) => format!("{answer:?}"),
                Err(error) => error,
            };
            if let Some(exit) = self.exited() {
                panic!("the relay ended ({exit:?}) before {what}");
            }
            assert!(began.elapsed() < DEADLINE, "not within {DEADLINE:?}: {what}; last: {last}");
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Looks at one metric until `wanted`.
    pub(crate) async fn wait_metric(&self, name: &str, wanted: impl Fn(f64) -> bool) -> f64 {
        eventually(&format!("metric {name}"), async || {
            let body = self.try_get("/metrics").await.ok()?.body;
            Metrics::parse(&body).get(name).filter(|v| wanted(*v))
        })
        .await
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn signal(&self, signal: Signal) {
        if self.exit.is_none() {
            let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a process id");
            kill_process(pid, signal).expect("the signal is sent");
        }
    }

    pub(crate) fn sigterm(&self) {
        self.signal(Signal::TERM);
    }

    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// SIGKILL, and the process is gone when this returns.
    pub(crate) fn kill9(&mut self) {
        if self.exit.is_none() {
            let _ = self.child.kill();
            let status = self.child.wait().expect("the relay is our child");
            self.exit = Some((status.code(), status.signal()));
        }
    }

    /// Its code and signal, where it has ended.
    pub(crate) fn exited(&mut self) -> Option<(Option<i32>, Option<i32>)> {
        if self.exit.is_none() {
            let status = self.child.try_wait().expect("the relay is our child");
            self.exit = status.map(|s| (s.code(), s.signal()));
        }
        self.exit
    }

    /// Waits for its end.
    pub(crate) async fn wait_exit(&mut self) -> Exit {
        let began = Instant::now();
        loop {
            if let Some((code, signal)) = self.exited() {
                return Exit { code, signal, took: began.elapsed() };
            }
            assert!(began.elapsed() < DEADLINE, "the relay did not end in {DEADLINE:?}");
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// SIGTERM, and it ends with code 0.
    pub(crate) async fn stop(&mut self) -> Exit {
        self.sigterm();
        let exit = self.wait_exit().await;
        assert_eq!(exit.code, Some(0), "a clean stop: {exit:?}");
        exit
    }

    /// Its resident memory now.
    pub(crate) fn rss_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("the relay lives");
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).expect("a VmRSS line");
        line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("a number of kB") * 1024
    }

    /// The processor time it has used, all threads.
    pub(crate) fn cpu(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).expect("the relay lives");
        let fields: Vec<&str> = stat.rsplit_once(") ").expect("a name").1.split(' ').collect();
        let ticks: u64 =
            fields[11].parse::<u64>().expect("utime") + fields[12].parse::<u64>().expect("stime");
        Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        format!(
            "── the relay's log, {} ──\n{}",
            self.log.display(),
            lines[lines.len().saturating_sub(60)..].join("\n")
        )
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.kill9();
        if std::thread::panicking() {
            eprintln!("{}", self.log_tail());
        }
    }
}

/// A scrape: each sample by its name and labels as they are written, `postrider_messages_total{verdict="delivered"}`.
#[derive(Clone, Debug)]
pub(crate) struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    pub(crate) fn parse(text: &str) -> Self {
        let samples = text.lines().filter(|l| !l.starts_with('#') && !l.is_empty());
        Self(samples.filter_map(|l| l.rsplit_once(' ')).map(|(n, v)| (n.to_owned(), number(v))).collect())
    }

    pub(crate) fn get(&self, sample: &str) -> Option<f64> {
        self.0.get(sample).copied()
    }

    /// Over all labels.
    pub(crate) fn sum(&self, name: &str) -> f64 {
        let of = |sample: &str| sample.split('{').next() == Some(name);
        self.0.iter().filter(|(sample, _)| of(sample)).map(|(_, v)| v).sum()
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

fn number(text: &str) -> f64 {
    text.parse().unwrap_or_else(|e| panic!("metric value {text}: {e}"))
}

/// A port that nobody listens on, below those that `./dev` and outgoing connections take; no two in one process.
fn free_port() -> u16 {
    const FIRST: u16 = 11_000;
    const COUNT: u16 = 9_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // processes that run side by side begin far from one another
    let start = u16::try_from(u64::from(std::process::id()) * 97 % u64::from(COUNT)).unwrap_or_default();
    for _ in 0..COUNT {
        let offset = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = FIRST + (start + offset % COUNT) % COUNT;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no free port from {FIRST} on");
}
