//! `postrider dead-letters`: straight to the database, so that it works while no relay does (see [`crate::letters`]).

use std::{
    io::{IsTerminal, Write, stderr, stdin},
    sync::Arc,
};

use clap::{Args, Subcommand};
use postrider_actors::database::{
    letters::{Filter, Letter, Opened, Selection, Shelf},
    pool,
};
use serde_json::json;

use super::{Form, output};
use crate::{
    config::Config,
    failure::Failure,
    letters::{Action, Desk, Refusal, filter, opened},
    settings::settings,
};

/// What is done with rejected rows.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// List them, newest first
    #[command(after_help = "Examples:
  postrider dead-letters list --reason unroutable --from 2h
  postrider dead-letters list --retrying
  postrider dead-letters list --json | jq -r '.dead_letters[].id'")]
    List {
        /// Those that wait for another attempt, instead of those that are parked
        #[arg(long)]
        retrying: bool,
        #[command(flatten)]
        filters: Filters,
        /// At most so many
        #[arg(long, value_name = "N", default_value_t = 50)]
        limit: u32,
        /// Where the page before ended, as it says
        #[arg(long, value_name = "CURSOR")]
        cursor: Option<i64>,
        #[command(flatten)]
        form: Form,
    },
    /// Show one of them with its content
    Show {
        /// The row's id
        #[arg(allow_negative_numbers = true)]
        id: String,
        #[command(flatten)]
        form: Form,
    },
    /// Publish parked rows again; each stays on record until it is delivered
    #[command(after_help = "Examples:
  postrider dead-letters requeue 0b8f3f6e-6f63-4d0e-9d6b-3a7f0b1c2d3e
  postrider dead-letters requeue --all --reason unroutable --dry-run

A row that is rejected again gets a new round of attempts, and is parked again after it.")]
    Requeue {
        #[command(flatten)]
        target: Target,
        #[command(flatten)]
        form: Form,
    },
    /// Give parked rows up: they are deleted here and never published
    Discard {
        #[command(flatten)]
        target: Target,
        /// Do not ask
        #[arg(long, short)]
        yes: bool,
        #[command(flatten)]
        form: Form,
    },
}

/// Which rows.
#[derive(Debug, Args)]
pub(super) struct Filters {
    /// Rejected for this last: unroutable, nacked, exchange_missing, refused or invalid
    #[arg(long)]
    reason: Option<String>,
    /// Of this message type
    #[arg(long)]
    r#type: Option<String>,
    /// Parked at this time or later: 2026-01-31T04:05:06Z, 2026-01-31, or 30m for half an hour ago
    #[arg(long, value_name = "TIME")]
    from: Option<String>,
    /// Parked before this time
    #[arg(long, value_name = "TIME")]
    to: Option<String>,
}

impl Filters {
    fn read(self) -> Result<Filter, Failure> {
        filter(self.reason.as_deref(), self.r#type, self.from.as_deref(), self.to.as_deref())
            .map_err(Failure::usage)
    }
}

/// What is moved.
#[derive(Debug, Args)]
#[group(skip)]
pub(super) struct Target {
    /// The rows' ids: all of them are moved, or none
    #[arg(value_name = "ID", required_unless_present = "all", conflicts_with_all = ["all", "reason", "type", "from", "to", "dry_run"], allow_negative_numbers = true)]
    ids: Vec<String>,
    /// Every parked row that the filters let through
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    filters: Filters,
    /// Say how many that are, and do nothing
    #[arg(long, requires = "all")]
    dry_run: bool,
}

impl Target {
    fn read(self) -> Result<(Selection, bool), Failure> {
        let filter = self.filters.read()?;
        let selection = if self.all { Selection::All(filter) } else { Selection::Ids(self.ids) };
        Ok((selection, self.dry_run))
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Bad(said) => Failure::usage(said),
            Refusal::NotFound(ids) => {
                Failure::new(format!("nothing was done; not waiting there: {}", ids.join(", "))).with_hint(
                    "`postrider dead-letters list` shows what is parked, with --retrying what is tried again",
                )
            }
            Refusal::Failed(error) => error.into(),
        }
    }
}

/// Does what was asked.
pub(super) async fn run(config: &Config, command: Command) -> Result<(), Failure> {
    let settings = Arc::new(settings(config)?);
    let pool = pool::pool(&settings.database, "postrider dead-letters", 1)?;
    let desk = Desk::new(settings, pool);
    match command {
        Command::List { retrying, filters, limit, cursor, form } => {
            let shelf = if retrying { Shelf::Retrying } else { Shelf::Parked };
            let (page, next) = desk.list(shelf, &filters.read()?, limit, cursor).await?;
            let name = if retrying { "retries" } else { "dead_letters" };
            output::print(&if form.json {
                format!("{:#}\n", json!({ name: page, "next_cursor": next }))
            } else {
                table(&page, next, shelf)
            })
        }
        Command::Show { id, form } => {
            let found = desk.show(&id).await?;
            output::print(&if form.json {
                format!("{:#}\n", json!(found.iter().map(opened).collect::<Vec<_>>()))
            } else {
                found.iter().map(sheet).collect::<Vec<_>>().join("\n")
            })
        }
        Command::Requeue { target, form } => act(&desk, Action::Requeue, target, form, true).await,
        Command::Discard { target, yes, form } => act(&desk, Action::Discard, target, form, yes).await,
    }
}

async fn act(desk: &Desk, action: Action, target: Target, form: Form, sure: bool) -> Result<(), Failure> {
    let (selection, dry_run) = target.read()?;
    let count = match &selection {
        Selection::All(filter) if dry_run => desk.count(filter).await?,
        _ => {
            if !sure {
                confirm(desk, &selection).await?;
            }
            desk.act(action, selection, &by()).await?
        }
    };
    let done = action.done();
    output::print(&if form.json {
        format!("{:#}\n", json!({ done: count, "dry_run": dry_run }))
    } else if dry_run {
        format!("{count} would be {done}\n")
    } else {
        format!("{count} {done}\n")
    })
}

/// Asks a person; a program has to be sure beforehand.
async fn confirm(desk: &Desk, selection: &Selection) -> Result<(), Failure> {
    if !stdin().is_terminal() {
        return Err(Failure::usage(
            "discard deletes rows that were never published, and nobody is here to ask",
        )
        .with_hint("add --yes"));
    }
    let count = match selection {
        Selection::Ids(ids) => ids.len() as u64,
        Selection::All(filter) => desk.count(filter).await?,
    };
    let mut err = stderr();
    // Where nothing can be asked, nothing is answered either.
    let _ = write!(err, "delete {count} rows that were never published ({selection})? [y/N] ")
        .and_then(|()| err.flush());
    let mut answer = String::new();
    let read = stdin().read_line(&mut answer);
    if read.is_ok() && matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes") {
        Ok(())
    } else {
        Err(Failure::new("nothing was discarded"))
    }
}

/// Who asks: for the log.
fn by() -> String {
    let user = ["SUDO_USER", "USER", "LOGNAME"].iter().find_map(|name| std::env::var(name).ok());
    format!("command line, user {}", user.as_deref().unwrap_or("unknown"))
}

/// One line a row. Ids are whole, so that they can be copied; the words come last and may be long.
fn table(page: &[Letter], next: Option<i64>, shelf: Shelf) -> String {
    if page.is_empty() {
        return "none\n".to_owned();
    }
    let time = match shelf {
        Shelf::Parked => "PARKED",
        Shelf::Retrying => "NEXT ATTEMPT",
    };
    let mut lines = vec![[time, "REASON", "ATTEMPTS", "TYPE", "ID", "DETAIL"].map(str::to_owned)];
    lines.extend(page.iter().map(|letter| {
        let at = letter.parked_at.as_ref().or(letter.next_attempt_at.as_ref());
        [
            at.cloned().unwrap_or_default(),
            letter.reason.clone(),
            letter.attempts.to_string(),
            plain(&letter.kind),
            plain(&letter.id),
            plain(&letter.detail),
        ]
    }));
    let widths: [usize; 5] = std::array::from_fn(|column| {
        lines.iter().map(|line| line[column].chars().count()).max().unwrap_or_default()
    });
    let mut text = String::new();
    for line in &lines {
        for (cell, width) in line.iter().zip(widths) {
            text.push_str(&format!("{cell:width$}  "));
        }
        text.push_str(&line[5]);
        text.push('\n');
    }
    if let Some(next) = next {
        text.push_str(&format!("more: --cursor {next}\n"));
    }
    text
}

/// One row as `key: value` lines, its content last.
fn sheet(opened: &Opened) -> String {
    let letter = &opened.letter;
    let state = match opened.shelf {
        Shelf::Parked => "parked",
        Shelf::Retrying => "retrying",
    };
    let attempts = letter.attempts.to_string();
    let lines = [
        ("id", Some(&letter.id)),
        ("type", Some(&letter.kind)),
        ("state", Some(&state.to_owned())),
        ("reason", Some(&letter.reason)),
        ("detail", Some(&letter.detail)),
        ("attempts", Some(&attempts)),
        ("exchange", letter.exchange.as_ref()),
        ("routing key", letter.routing_key.as_ref()),
        ("key", letter.key.as_ref()),
        ("headers", opened.headers.as_ref()),
        ("columns", opened.columns.as_ref()),
        ("occurred on", letter.occurred_on.as_ref()),
        ("first failed at", Some(&letter.first_failed_at)),
        ("last failed at", Some(&letter.last_failed_at)),
        ("parked at", letter.parked_at.as_ref()),
        ("next attempt at", letter.next_attempt_at.as_ref()),
    ]
    .into_iter()
    .filter_map(|(name, value)| value.map(|value| format!("{name}: {}\n", plain(value))))
    .collect::<String>();
    let content = match std::str::from_utf8(&opened.content) {
        Ok(text) => plain(text),
        Err(_) => "no text; --json shows it in hexadecimal".to_owned(),
    };
    format!("{lines}content ({}, {} bytes): {content}\n", letter.content_kind, letter.content_bytes)
}

/// Rows hold what strangers wrote: nothing in them may move a cursor or begin a line.
fn plain(text: &str) -> String {
    text.chars()
        .flat_map(|c| if c.is_control() { c.escape_default().collect::<Vec<_>>() } else { vec![c] })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter(id: &str) -> Letter {
        Letter {
            seq: 1,
            id: id.to_owned(),
            kind: "order\u{1b}[2J".to_owned(),
            reason: "unroutable".to_owned(),
            detail: "312 NO_ROUTE".to_owned(),
            attempts: 10,
            exchange: None,
            routing_key: None,
            key: None,
            occurred_on: None,
            first_failed_at: "a".to_owned(),
            last_failed_at: "b".to_owned(),
            parked_at: Some("2026-01-31T04:05:06.000Z".to_owned()),
            next_attempt_at: None,
            content_kind: "json".to_owned(),
            content_bytes: 2,
        }
    }

    #[test]
    fn a_table_is_aligned_and_shows_no_control_characters() {
        let text = table(&[letter("7"), letter("1234")], Some(7), Shelf::Parked);
        assert_eq!(
            text,
            "PARKED                    REASON      ATTEMPTS  TYPE              ID    DETAIL\n\
             2026-01-31T04:05:06.000Z  unroutable  10        order\\u{1b}[2J  7     312 NO_ROUTE\n\
             2026-01-31T04:05:06.000Z  unroutable  10        order\\u{1b}[2J  1234  312 NO_ROUTE\n\
             more: --cursor 7\n"
                .replace("TYPE              ID", "TYPE            ID")
        );
    }

    #[test]
    fn a_sheet_ends_with_the_content() {
        let opened = Opened {
            shelf: Shelf::Parked,
            letter: letter("7"),
            headers: None,
            columns: None,
            content: b"{}".to_vec(),
        };
        let text = sheet(&opened);
        assert!(text.starts_with("id: 7\ntype: order\\u{1b}[2J\nstate: parked\n"), "{text}");
        assert!(text.ends_with("\ncontent (json, 2 bytes): {}\n"), "{text}");
    }
}
