//! `postrider migrate`, told as it happens.

use crate::{
    cli::output,
    config::Config,
    failure::Failure,
    migrate::{self, Event, Options},
};

/// Migrates. A dry run prints SQL that psql takes as it stands; otherwise each statement's purpose is printed.
pub(super) async fn run(config: &Config, options: &Options) -> Result<(), Failure> {
    let mut statements = 0_usize;
    let mut broken = None;
    let mut narrate = |event: Event| {
        let text = match event {
            Event::Statement { what, sql } => {
                statements += 1;
                told(&what, &sql, options.dry_run)
            }
            Event::Waiting => Some("waiting for another migrate to finish\n".to_owned()),
            Event::Note(note) if options.dry_run => Some(format!("-- note: {note}\n")),
            Event::Note(note) => Some(format!("note: {note}\n")),
        };
        if let Some(Err(failure)) = text.map(|text| output::print(&text)) {
            broken.get_or_insert(failure);
        }
    };
    migrate::migrate(config, options, &mut narrate).await?;
    if let Some(failure) = broken {
        return Err(failure);
    }
    output::print(match (options.dry_run, statements) {
        (true, 0) => "-- nothing to do\n",
        (true, _) => "",
        (false, 0) => "nothing to do\n",
        (false, _) => "done\n",
    })
}

fn told(what: &str, sql: &str, dry_run: bool) -> Option<String> {
    if dry_run {
        return Some(format!("-- {what}\n{sql};\n\n"));
    }
    // Settings and transaction brackets are no news.
    let plumbing = ["SET ", "BEGIN", "COMMIT", "INSERT INTO"].iter().any(|start| sql.starts_with(start));
    (!plumbing).then(|| format!("{what}\n"))
}
