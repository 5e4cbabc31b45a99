//! The `./dev` script, and the services it runs.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// Where the shared services are.
pub(super) struct Services {
    pub(super) database_url: String,
    pub(super) amqp_url: String,
    pub(super) management_url: String,
}

pub(super) fn services() -> &'static Services {
    static SERVICES: OnceLock<Services> = OnceLock::new();
    SERVICES.get_or_init(|| {
        let given = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        if let (Some(database_url), Some(amqp_url), Some(management_url)) = (
            given("POSTRIDER_TEST_DATABASE_URL"),
            given("POSTRIDER_TEST_AMQP_URL"),
            given("POSTRIDER_TEST_MANAGEMENT_URL"),
        ) {
            return Services { database_url, amqp_url, management_url };
        }
        let env = run(&["env"]).unwrap_or_else(|e| panic!("no services to test against: ./dev up ({e})"));
        let url = |name: &str| {
            let prefix = format!("export {name}=");
            env.lines().find_map(|l| l.strip_prefix(&prefix)).expect("./dev env names every URL").to_owned()
        };
        Services {
            database_url: url("DATABASE_URL"),
            amqp_url: url("AMQP_URL"),
            management_url: url("MANAGEMENT_URL"),
        }
    })
}

/// Runs `./dev ARGS` and returns what it printed.
pub(super) fn run(args: &[&str]) -> Result<String, String> {
    let script = std::env::var_os("POSTRIDER_DEV")
        .map_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/dev")), PathBuf::from);
    let output =
        Command::new(&script).args(args).output().map_err(|e| format!("{}: {e}", script.display()))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    } else {
        Err(format!("./dev {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
    }
}

/// The same from async code, panicking where it fails.
pub(super) async fn call(args: &[&str]) -> String {
    let args: Vec<String> = args.iter().map(|a| (*a).to_owned()).collect();
    tokio::task::spawn_blocking(move || run(&args.iter().map(String::as_str).collect::<Vec<_>>()))
        .await
        .expect("./dev was called")
        .unwrap_or_else(|e| panic!("{e}"))
}
