//! The relay under measurement: this program, in a process of its own.

use std::{
    io::Write,
    os::unix::fs::OpenOptionsExt,
    process::Stdio,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::{
    admin::status::Status,
    config::{Config, variable},
    failure::Failure,
};

/// How long it may take to get under way, and to stop.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running relay; killed when dropped.
pub(super) struct Relay {
    child: Child,
    pid: u32,
    folder: TempDir,
    status: String,
    agent: ureq::Agent,
}

impl Relay {
    /// Starts it with this configuration.
    pub(super) fn start(config: &Config) -> Result<Self, Failure> {
        let cannot = |what: &str| {
            let what = what.to_owned();
            move |error: std::io::Error| Failure::new(format!("{what}: {error}"))
        };
        let folder = tempfile::Builder::new()
            .prefix("postrider-bench-")
            .tempdir()
            .map_err(cannot("make a folder for the relay"))?;
        let path = folder.path().join("config.toml");
        let text = toml::to_string(config)
            .map_err(|error| Failure::new(format!("write the relay's configuration: {error}")))?;
        std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(cannot("write the relay's configuration"))?;
        let log = std::fs::File::create(folder.path().join("log")).map_err(cannot("make the relay's log"))?;
        let program = std::env::current_exe().map_err(cannot("find this program"))?;
        let mut command = Command::new(program);
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("POSTRIDER_"))
        {
            command.env_remove(name);
        }
        // Written out, a URL's password is masked; the process's environment is as private as the process.
        command.env(variable("database.url"), config.database.url.expose());
        command.env(variable("broker.url"), config.broker.url.expose());
        if let Some(direct) = &config.database.direct_url {
            command.env(variable("database.direct_url"), direct.expose());
        }
        command.arg("--config").arg(&path).arg("run");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // Ctrl-C is the benchmark's to handle.
        command.process_group(0).kill_on_drop(true).env("NO_COLOR", "1");
        let child = command.spawn().map_err(cannot("start the relay"))?;
        let agent =
            ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(5))).proxy(None).build();
        let pid = child.id().unwrap_or_default();
        let status = format!("http://{}/api/status", config.admin.listen);
        Ok(Self { child, pid, folder, status, agent: agent.into() })
    }

    /// Starts it and waits until it runs.
    pub(super) async fn start_running(config: &Config) -> Result<Self, Failure> {
        let mut relay = Self::start(config)?;
        let began = Instant::now();
        loop {
            match relay.status().await {
                Some(status) if status.state == "running" => return Ok(relay),
                _ => relay.alive(began, "run")?,
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Fails where it has ended, or its patience is over.
    pub(super) fn alive(&mut self, since: Instant, what: &str) -> Result<(), Failure> {
        if let Ok(Some(exit)) = self.child.try_wait() {
            return Err(self.failed(&format!("the relay ended ({exit})")));
        }
        if since.elapsed() > PATIENCE {
            return Err(self.failed(&format!("the relay did not {what} within {} s", PATIENCE.as_secs())));
        }
        Ok(())
    }

    fn failed(&self, what: &str) -> Failure {
        let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(3)..].join("\n  ");
        Failure::new(format!("{what}; its last words:\n  {last}"))
    }

    /// Its status; none while it starts.
    pub(super) async fn status(&self) -> Option<Status> {
        let (agent, url) = (self.agent.clone(), self.status.clone());
        let ask = move || agent.get(&url).call().ok()?.body_mut().read_json().ok();
        tokio::task::spawn_blocking(ask).await.ok()?
    }

    /// Its process.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// SIGKILL, and gone.
    pub(super) async fn kill(mut self) {
        let _ = self.child.kill().await;
    }

    /// SIGTERM, and gone: everything that was delivered is recorded.
    pub(super) async fn stop(mut self) -> Result<(), Failure> {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            // It may have ended by itself.
            let _ = kill_process(pid, Signal::TERM);
        }
        match tokio::time::timeout(PATIENCE, self.child.wait()).await {
            Ok(Ok(exit)) if exit.success() => Ok(()),
            Ok(Ok(exit)) => Err(self.failed(&format!("the relay did not stop cleanly ({exit})"))),
            _ => Err(self.failed("the relay did not stop")),
        }
    }
}
