//! The command line: what can be asked, and who answers.

mod dead_letters;
mod migrate;
pub(crate) mod output;
mod remote;

use std::{path::PathBuf, process::ExitCode};

use clap::{CommandFactory, Parser, Subcommand};

use crate::{
    bench::Bench,
    config::Config,
    doctor,
    failure::Failure,
    telemetry::{self, LogFormat},
};

/// Moves messages from a PostgreSQL outbox table into RabbitMQ, and loses none.
#[derive(Debug, Parser)]
#[command(
    version,
    propagate_version = true,
    arg_required_else_help = true,
    after_help = "Examples:
  postrider migrate --dry-run        show the SQL that prepares the database
  postrider check                    say what is wrong, and the statement that mends it
  postrider drain                    publish what is there, stop taking more, and wait for that

Every key of the configuration can be set as a variable: POSTRIDER_SOURCE__MODE=poll.
Exit codes: 0 done, 1 failed, 2 bad usage or configuration."
)]
pub struct Cli {
    /// The configuration file [default: config.toml, where it exists]
    #[arg(long, short, global = true, value_name = "FILE", env = "POSTRIDER_CONFIG")]
    config: Option<PathBuf>,

    /// The form of log lines
    #[arg(long, global = true, value_enum, default_value_t, env = "POSTRIDER_LOG_FORMAT")]
    log_format: LogFormat,

    /// What to log: a level, or target=level pairs [default: info for `run`, our own warnings otherwise]
    #[arg(long, global = true, value_name = "FILTER", env = "RUST_LOG")]
    log: Option<String>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Move messages until told to stop
    #[command(after_help = "Examples:
  postrider run
  postrider run --config /etc/postrider/orders.toml --log-format json

SIGTERM and SIGINT settle what is in flight, then stop; a second signal stops now.")]
    Run,
    /// Create or complete what the relay needs in the database
    #[command(after_help = "Examples:
  postrider migrate --dry-run
  postrider migrate --role postrider
  POSTRIDER_DATABASE__URL=postgres://owner@db/orders postrider migrate

Run it as the owner of the outbox table. It may be interrupted and repeated; it never changes a column of yours.")]
    Migrate {
        /// Print the SQL that would run, and change nothing
        #[arg(long)]
        dry_run: bool,
        /// Grant this role what the relay needs
        #[arg(long, value_name = "NAME")]
        role: Option<String>,
    },
    /// Examine database, broker and configuration; exit 1 if anything would keep the relay from working
    #[command(after_help = "Examples:
  postrider check
  postrider check --json | jq -r '.checks[] | select(.verdict != \"ok\") | .remedy'")]
    Check(Form),
    /// Show what the running relay is doing
    #[command(after_help = "Example:
  postrider status --json | jq -r .state")]
    Status(Form),
    /// Stop taking messages; what is in flight settles
    #[command(
        after_help = "A pause holds for every process on this outbox and survives restarts. `postrider resume` ends it."
    )]
    Pause(Form),
    /// End a pause or a drain
    Resume(Form),
    /// Publish everything that is there now, then take no more
    #[command(
        after_help = "Waits until it is drained; interrupting that does not end the drain. `postrider resume` does."
    )]
    Drain {
        #[command(flatten)]
        form: Form,
        /// Ask for it and return at once
        #[arg(long)]
        no_wait: bool,
    },
    /// Look at rejected rows, have them published again, or give them up
    #[command(name = "dead-letters", subcommand)]
    DeadLetters(dead_letters::Command),
    /// Measure this relay on the configured database and broker, in a place of its own that is removed afterwards
    #[command(after_help = "Examples:
  postrider bench                                 a backlog, beside a bare publisher
  postrider bench drain --mode poll --set source.poll.workers=1
  postrider bench latency --html latency.html
  postrider bench article --rows 50000 --seconds 10

Needs a role that may create a schema, a publication and, in wal mode, a slot.")]
    Bench(Bench),
    /// Print a completion script
    #[command(after_help = "Example:
  postrider completions bash > /etc/bash_completion.d/postrider")]
    Completions {
        /// The shell to complete in
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Clone, Copy, clap::Args)]
struct Form {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What `run` logs: a line a change of state. The libraries' own lines tell the same again, at length.
const RUN_LOG: &str = "info,lapin=off,pgwire_replication=off,actix_server=warn,actix_http=warn";

/// What other commands log. They print their error themselves, once; the libraries would tell it a second time.
const COMMAND_LOG: &str = "off,postrider=warn,postrider_actors=warn";

/// Does what was asked.
pub fn dispatch(cli: Cli) -> Result<ExitCode, Failure> {
    if let Command::Completions { shell } = cli.command {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "postrider", &mut script);
        return output::print(&String::from_utf8_lossy(&script)).map(|()| ExitCode::SUCCESS);
    }
    if let Command::Bench(bench) = &cli.command {
        telemetry::log(cli.log_format, cli.log.as_deref().unwrap_or(COMMAND_LOG)).map_err(Failure::usage)?;
        return block_on(crate::bench::run(bench, cli.config.as_deref()))?;
    }
    let level = if matches!(cli.command, Command::Run) { RUN_LOG } else { COMMAND_LOG };
    telemetry::log(cli.log_format, cli.log.as_deref().unwrap_or(level)).map_err(Failure::usage)?;
    let config = Config::load(cli.config.as_deref(), std::env::vars())?;
    match cli.command {
        Command::Run => crate::run::run(&config).map(|()| ExitCode::SUCCESS),
        Command::Migrate { dry_run, role } => {
            let options = crate::migrate::Options { role, dry_run };
            block_on(migrate::run(&config, &options))?.map(|()| ExitCode::SUCCESS)
        }
        Command::Check(Form { json }) => {
            let findings = block_on(doctor::examine(&config))?;
            let text =
                if json { doctor::json(&findings) } else { doctor::human(&findings, output::colour()) };
            output::print(&text)?;
            Ok(if doctor::passed(&findings) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Command::Status(Form { json }) => remote::status(&config, json).map(|()| ExitCode::SUCCESS),
        Command::Pause(Form { json }) => remote::ask(&config, "pause", json).map(|()| ExitCode::SUCCESS),
        Command::Resume(Form { json }) => remote::ask(&config, "resume", json).map(|()| ExitCode::SUCCESS),
        Command::Drain { form, no_wait: true } => {
            remote::ask(&config, "drain", form.json).map(|()| ExitCode::SUCCESS)
        }
        Command::Drain { form, no_wait: false } => {
            remote::drain(&config, form.json).map(|()| ExitCode::SUCCESS)
        }
        Command::DeadLetters(command) => {
            block_on(dead_letters::run(&config, command))?.map(|()| ExitCode::SUCCESS)
        }
        Command::Completions { .. } | Command::Bench(_) => unreachable!("answered above"),
    }
}

/// Runs a command that talks to the servers, on a runtime of one thread.
fn block_on<T>(command: impl Future<Output = T>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::new(format!("start the runtime: {error}")))?;
    Ok(runtime.block_on(command))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_configuration_may_be_named_before_or_after_the_command() {
        for line in
            [["postrider", "--config", "a.toml", "check"], ["postrider", "check", "--config", "a.toml"]]
        {
            assert_eq!(Cli::try_parse_from(line).unwrap().config, Some("a.toml".into()));
        }
    }

    #[test]
    fn an_unknown_command_is_bad_usage() {
        assert_eq!(Cli::try_parse_from(["postrider", "fly"]).unwrap_err().exit_code(), 2);
    }
}
