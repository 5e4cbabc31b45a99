//! The real program, in its own process, as an operator would run it.

use std::{
    env,
    fs::{self, File, OpenOptions},
    io::Write,
    net::TcpListener,
    os::unix::{ffi::OsStrExt, fs::OpenOptionsExt},
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::{
    process::{Child, Command},
    task::spawn_blocking,
    time::{sleep, timeout},
};

use crate::{Args, Mode, Wake, database, messages};

/// How long the relay may take until it says it is ready.
const READY: Duration = Duration::from_secs(30);
/// Longer than `shutdown.timeout_ms`, after which the relay ends whatever is still in flight.
const STOP: Duration = Duration::from_secs(15);
/// A status that takes longer is left out of that second's picture.
const ANSWER: Duration = Duration::from_millis(500);

/// The stages, in the order rows pass them.
pub(crate) const STAGES: [&str; 4] = ["source", "decode", "publish", "ack"];

/// What the relay says about itself; what it does not say is absent.
#[derive(Debug, Clone, Default)]
pub(crate) struct Status {
    pub(crate) state: Option<String>,
    pub(crate) reason: Option<String>,
    pub(crate) remedy: Option<String>,
    /// Batches waiting before each of [`STAGES`].
    pub(crate) depth: [Option<u64>; STAGES.len()],
    pub(crate) delivered: Option<u64>,
    pub(crate) unconfirmed: Option<u64>,
    pub(crate) exposed: Option<u64>,
}

impl Status {
    fn of(json: &Value) -> Self {
        let word = |at: &str| json.pointer(at).and_then(Value::as_str).map(str::to_owned);
        let number = |at: &str| json.pointer(at).and_then(Value::as_u64);
        Self {
            state: word("/state"),
            reason: word("/reason"),
            remedy: word("/remedy"),
            depth: STAGES.map(|stage| number(&format!("/stages/{stage}/mailbox"))),
            delivered: number("/totals/delivered"),
            unconfirmed: number("/unconfirmed"),
            exposed: number("/exposed"),
        }
    }
}

/// The relay's program, its files and, once started, its process.
pub(crate) struct Relay {
    program: PathBuf,
    config: PathBuf,
    log: PathBuf,
    /// Names the running process, for the next run to find should this one be killed.
    pid: PathBuf,
    admin: String,
    agent: ureq::Agent,
    child: Option<Child>,
}

impl Relay {
    /// Finds the program and writes its configuration.
    pub(crate) fn prepare(args: &Args, database: &str, amqp: &str) -> anyhow::Result<Self> {
        // target/PROFILE/examples/demo
        let demo = env::current_exe()?;
        let profile = demo.parent().and_then(Path::parent).context("this program is in no target folder")?;
        let program = profile.join("postrider");
        if !program.is_file() {
            bail!("{} is missing: cargo build --release --bin postrider", program.display());
        }
        let folder = profile.parent().unwrap_or(profile).join("postrider-demo");
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        // The relay is here; a proxy configured for the outside world is not asked.
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(ANSWER))
            .http_status_as_error(false)
            .proxy(None)
            .build();
        let relay = Self {
            program,
            config: folder.join("config.toml"),
            log: folder.join("relay.log"),
            pid: folder.join("relay.pid"),
            admin: format!("http://127.0.0.1:{port}"),
            agent: agent.into(),
            child: None,
        };
        relay.end_leftover()?;
        // It holds passwords.
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&relay.config)?;
        file.write_all(config(args, database, amqp, port)?.as_bytes())?;
        File::create(&relay.log)?;
        Ok(relay)
    }

    /// The command line of `verb`, as a reader would type it.
    pub(crate) fn command(&self, verb: &str) -> String {
        format!("{} --config {} {verb}", shown(&self.program).display(), shown(&self.config).display())
    }

    /// Where its admin API is.
    pub(crate) fn admin(&self) -> &str {
        &self.admin
    }

    /// Where its logs go.
    pub(crate) fn log(&self) -> PathBuf {
        shown(&self.log)
    }

    /// Ends the relay of a run that was killed: it would come back to the new database and hold its slot.
    fn end_leftover(&self) -> anyhow::Result<()> {
        let Ok(pid) = fs::read_to_string(&self.pid) else { return Ok(()) };
        // The number may be another process's by now; ours has this configuration on its command line.
        let command = fs::read(format!("/proc/{}/cmdline", pid.trim())).unwrap_or_default();
        let config = self.config.as_os_str().as_bytes();
        if let Some(pid) = pid.trim().parse().ok().and_then(Pid::from_raw)
            && command.split(|byte| *byte == 0).any(|argument| argument == config)
        {
            println!("ending the relay of an earlier run (process {})", pid.as_raw_nonzero());
            kill_process(pid, Signal::KILL).context("cannot end the relay of an earlier run")?;
        }
        Ok(fs::remove_file(&self.pid)?)
    }

    fn spawn(&self, verb: &str) -> anyhow::Result<Child> {
        let log = OpenOptions::new().append(true).open(&self.log)?;
        let mut command = Command::new(&self.program);
        command.arg("--config").arg(&self.config).arg(verb);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // Settings of another relay in this shell are not the demo's.
        for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("POSTRIDER_")) {
            command.env_remove(name);
        }
        // Its log is a file, here read by people.
        command.env("NO_COLOR", "1");
        // Its own process group: Ctrl-C is the demo's to handle, which stops the relay last.
        command.process_group(0).kill_on_drop(true);
        command.spawn().with_context(|| format!("cannot start {}", self.program.display()))
    }

    /// Runs `postrider migrate`.
    pub(crate) async fn migrate(&self) -> anyhow::Result<()> {
        let exit = self.spawn("migrate")?.wait().await?;
        if !exit.success() {
            bail!("postrider migrate failed ({exit}){}", self.last_words());
        }
        Ok(())
    }

    /// Starts `postrider run` and waits until it is ready, saying what it waits for.
    pub(crate) async fn start(&mut self) -> anyhow::Result<()> {
        let child = self.spawn("run")?;
        if let Some(id) = child.id() {
            fs::write(&self.pid, id.to_string())?;
        }
        self.child = Some(child);
        let begun = Instant::now();
        let mut said = begun;
        let mut answered = false;
        while begun.elapsed() < READY {
            if let Some(exit) = self.child.as_mut().and_then(|child| child.try_wait().transpose()) {
                bail!("the relay did not start ({}){}", exit?, self.last_words());
            }
            match self.get("/readyz").await {
                Some((true, _)) => return Ok(()),
                Some((false, _)) => answered = true,
                None => {}
            }
            if said.elapsed() >= Duration::from_secs(2) {
                said = Instant::now();
                println!("waiting for the relay, {} s: {}", begun.elapsed().as_secs(), self.describe().await);
            }
            sleep(Duration::from_millis(50)).await;
        }
        if answered {
            bail!("the relay is not ready after {} s: {}", READY.as_secs(), self.describe().await);
        }
        println!("the relay shows no status at {}; going on without it", self.admin);
        Ok(())
    }

    async fn describe(&self) -> String {
        let Some(status) = self.status().await else { return "no status yet".to_owned() };
        let mut line = status.state.unwrap_or_else(|| "no state".to_owned());
        for part in [status.reason, status.remedy].into_iter().flatten() {
            line.push_str(": ");
            line.push_str(&part);
        }
        line
    }

    /// What it says about itself, if it answers.
    pub(crate) async fn status(&self) -> Option<Status> {
        let (_, body) = self.get("/api/status").await?;
        Some(Status::of(&serde_json::from_str(&body).ok()?))
    }

    /// Whether the answer is a success, and its body; nothing where there is no answer.
    async fn get(&self, path: &str) -> Option<(bool, String)> {
        let (agent, url) = (self.agent.clone(), format!("{}{path}", self.admin));
        let answer = spawn_blocking(move || {
            let mut response = agent.get(url).call().ok()?;
            Some((response.status().is_success(), response.body_mut().read_to_string().ok()?))
        });
        answer.await.ok().flatten()
    }

    /// Resolves when the relay ends without having been asked to.
    pub(crate) async fn exited(&mut self) -> String {
        match self.child.as_mut() {
            Some(child) => child.wait().await.map_or_else(|error| error.to_string(), |exit| exit.to_string()),
            None => std::future::pending().await,
        }
    }

    /// Whether its process is there.
    pub(crate) fn runs(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Asks it to stop, as a supervisor does, and waits for it. Returns whether it stopped cleanly.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<bool> {
        let Some(mut child) = self.child.take() else { return Ok(true) };
        if let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
            kill_process(pid, Signal::TERM).context("cannot signal the relay")?;
        }
        let clean = match timeout(STOP, child.wait()).await {
            Ok(exit) => exit?.success(),
            Err(_) => {
                child.kill().await?;
                false
            }
        };
        fs::remove_file(&self.pid)?;
        Ok(clean)
    }

    /// The end of its log, for an error that needs it.
    pub(crate) fn last_words(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(10)..].join("\n  ");
        if tail.is_empty() {
            String::new()
        } else {
            format!(", its log ({}) ends:\n  {tail}", self.log().display())
        }
    }
}

/// A path as seen from here, where that is shorter.
fn shown(path: &Path) -> PathBuf {
    let here = env::current_dir().unwrap_or_default();
    path.strip_prefix(here).unwrap_or(path).to_owned()
}

fn config(args: &Args, database: &str, amqp: &str, port: u16) -> anyhow::Result<String> {
    // A JSON string is a TOML string too.
    let text = |text: &str| serde_json::to_string(text);
    let (database, amqp) = (text(database)?, text(amqp)?);
    let source = match args.mode {
        Mode::Wal => format!(
            "mode = \"wal\"\n\n[source.wal]\nslot = \"{slot}\"\npublication = \"{slot}\"",
            slot = database::SLOT
        ),
        Mode::Poll => format!(
            "mode = \"poll\"\n\n[source.poll]\ninterval_ms = {}\nwake = \"{}\"",
            args.interval_ms,
            if args.wake == Wake::Notify { "notify" } else { "poll" }
        ),
    };
    Ok(format!(
        "# Written by the demo; all that is not here is at its default.
[database]
url = {database}

[broker]
url = {amqp}

[source]
{source}

[publish]
exchange = \"{exchange}\"
routing_key = \"{{type}}\"
declare = true

[admin]
listen = \"127.0.0.1:{port}\"
",
        exchange = messages::EXCHANGE,
    ))
}
