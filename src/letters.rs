//! Rejected rows for the command line and the admin API, which differ only in how they ask and show.
//!
//! The command line goes to the database itself, not through the relay: at three in the morning the relay may be down,
//! blocked or on another machine, and the dead letters are in the database all the same.

use std::{sync::Arc, time::SystemTime};

use deadpool_postgres::Pool;
use postrider_actors::{
    database::{
        letters::{self, Filter, Letter, Moved, Opened, Selection, Shelf, spell_id},
        outbox::Outbox,
        pool,
    },
    envelope::Reason,
    error::Error,
    settings::Settings,
};
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// At most so many are listed at once.
pub const MOST: u32 = 1000;

/// Why nothing was done.
#[derive(Debug)]
pub enum Refusal {
    /// The request is wrong; one line about how.
    Bad(String),
    /// These ids are not where they were looked for.
    NotFound(Vec<String>),
    /// The database failed us.
    Failed(Error),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// What an operator does with rejected rows.
#[derive(Clone)]
pub struct Desk {
    settings: Arc<Settings>,
    pool: Pool,
}

/// What is done with dead letters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Publish them again.
    Requeue,
    /// Give them up.
    Discard,
}

impl Action {
    /// Done, in a word.
    pub fn done(self) -> &'static str {
        match self {
            Action::Requeue => "requeued",
            Action::Discard => "discarded",
        }
    }
}

impl Desk {
    /// A desk of the outbox behind `settings`.
    pub fn new(settings: Arc<Settings>, pool: Pool) -> Self {
        Self { settings, pool }
    }

    async fn outbox(&self) -> Result<Arc<Outbox>, Error> {
        const OP: &str = "read the outbox table's columns";
        let load = async |client: &_| Outbox::load(client, &self.settings).await;
        pool::ask(&self.pool, OP, load).await.map(Arc::new)
    }

    /// A page of them, newest first, and where the next one begins.
    pub async fn list(
        &self,
        shelf: Shelf,
        filter: &Filter,
        limit: u32,
        cursor: Option<i64>,
    ) -> Result<(Vec<Letter>, Option<i64>), Refusal> {
        if limit == 0 || limit > MOST {
            return Err(Refusal::Bad(format!("limit must be from 1 to {MOST}")));
        }
        let outbox = self.outbox().await?;
        // One more than asked for says whether there is another page.
        let look = async |client: &_| {
            letters::list(client, &outbox, shelf, filter, limit.saturating_add(1), cursor).await
        };
        let mut page = pool::ask(&self.pool, "list rejected rows", look).await?;
        let more = page.len() > limit as usize;
        page.truncate(limit as usize);
        let next = page.last().map(|letter| letter.seq).filter(|_| more);
        Ok((page, next))
    }

    /// Everything about one message.
    pub async fn show(&self, id: &str) -> Result<Vec<Opened>, Refusal> {
        let outbox = self.outbox().await?;
        let id = spell_id(id, &outbox.id_type).map_err(Refusal::Bad)?;
        let look = async |client: &_| letters::show(client, &outbox, &id).await;
        let found = pool::ask(&self.pool, "show a rejected row", look).await?;
        if found.is_empty() { Err(Refusal::NotFound(vec![id])) } else { Ok(found) }
    }

    /// How many a filter lets through.
    pub async fn count(&self, filter: &Filter) -> Result<u64, Refusal> {
        let outbox = self.outbox().await?;
        let count = async |client: &_| letters::count(client, &outbox, filter).await;
        Ok(pool::ask(&self.pool, "count dead letters", count).await?)
    }

    /// Moves dead letters, and leaves a line about it in the log: `by` says who asked. Returns how many.
    pub async fn act(&self, action: Action, selection: Selection, by: &str) -> Result<u64, Refusal> {
        let outbox = self.outbox().await?;
        let selection = match selection {
            Selection::Ids(ids) if ids.is_empty() => return Err(Refusal::Bad("no id is given".to_owned())),
            Selection::Ids(ids) => {
                let ids: Result<_, _> = ids.iter().map(|id| spell_id(id, &outbox.id_type)).collect();
                Selection::Ids(ids.map_err(Refusal::Bad)?)
            }
            all => all,
        };
        let moved = match action {
            Action::Requeue => letters::requeue(&self.pool, &outbox, &selection).await,
            Action::Discard => letters::discard(&self.pool, &outbox, &selection).await,
        };
        let (action, outbox) = (action.done(), &outbox.name);
        match moved {
            Ok(Moved::Done(count)) => {
                tracing::warn!(target: "postrider::audit", %by, count, %selection, outbox, "dead letters {action}");
                Ok(count)
            }
            Ok(Moved::NotParked(missing)) => Err(Refusal::NotFound(missing)),
            Err(error) => {
                tracing::warn!(
                    target: "postrider::audit", %by, %selection, outbox, error = %error.chain(),
                    "dead letters {action} in part, or not at all"
                );
                Err(error.into())
            }
        }
    }
}

/// A filter from its words.
///
/// # Errors
/// One line about the first that cannot be read.
pub fn filter(
    reason: Option<&str>,
    kind: Option<String>,
    from: Option<&str>,
    to: Option<&str>,
) -> Result<Filter, String> {
    let now = OffsetDateTime::from(SystemTime::now());
    let time = |text: Option<&str>| text.map(|text| moment(text, now)).transpose();
    Ok(Filter { reason: reason.map(reason_of).transpose()?, kind, from: time(from)?, to: time(to)? })
}

fn reason_of(word: &str) -> Result<Reason, String> {
    Reason::ALL.into_iter().find(|reason| reason.as_str() == word).ok_or_else(|| {
        let known = Reason::ALL.map(Reason::as_str).join(", ");
        format!("{word:?} is no reason; one of {known} is")
    })
}

/// A time as microseconds since 1970: RFC 3339, a day (its beginning in UTC), or how long ago (`90s`, `30m`, `2h`, `7d`).
fn moment(text: &str, now: OffsetDateTime) -> Result<i64, String> {
    let refused = || {
        format!("{text:?} is no time: write 2026-01-31T04:05:06Z, 2026-01-31, or 30m for half an hour ago")
    };
    let ago = || {
        let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
        let unit = match unit {
            "s" => 1,
            "m" => 60,
            "h" => 3600,
            "d" => 86_400,
            _ => return None,
        };
        let seconds = number.parse::<u32>().ok()?;
        now.checked_sub(time::Duration::seconds(i64::from(seconds).checked_mul(unit)?))
    };
    let day = || OffsetDateTime::parse(&format!("{text}T00:00:00Z"), &Rfc3339).ok();
    let time = OffsetDateTime::parse(text, &Rfc3339).ok().or_else(day).or_else(ago).ok_or_else(refused)?;
    i64::try_from(time.unix_timestamp_nanos() / 1000).map_err(|_| refused())
}

/// A rejected row with its content, as JSON: the content as a string where it is UTF-8, in hexadecimal where it is not.
pub fn opened(letter: &Opened) -> Value {
    let mut value = json!(letter.letter);
    let text = |text: &Option<String>| text.as_ref().map(|text| parsed(text));
    value["state"] = json!(letter.shelf);
    value["headers"] = json!(text(&letter.headers));
    value["columns"] = json!(text(&letter.columns));
    match std::str::from_utf8(&letter.content) {
        Ok(text) => value["content"] = json!(text),
        Err(_) => value["content_hex"] = json!(hex(&letter.content)),
    }
    value
}

/// JSON that came as text; the text itself where it is none.
fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| json!(text))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_moment_a_day_or_how_long_ago() {
        let now = OffsetDateTime::from_unix_timestamp(1_000_000).unwrap();
        for (text, seconds) in [
            ("1970-01-02T00:00:00Z", 86_400),
            ("1970-01-02T01:00:00+01:00", 86_400),
            ("1970-01-03", 172_800),
            ("90s", 999_910),
            ("2h", 992_800),
            ("1d", 913_600),
        ] {
            assert_eq!(moment(text, now), Ok(seconds * 1_000_000), "{text}");
        }
        for text in ["", "h", "ü", "-3h", "2 h", "yesterday", "1970-13-01"] {
            assert!(moment(text, now).unwrap_err().contains("is no time"), "{text}");
        }
    }

    #[test]
    fn an_unknown_reason_is_told_the_known_ones() {
        assert_eq!(reason_of("nacked"), Ok(Reason::Nacked));
        assert!(reason_of("nack").unwrap_err().contains("unroutable, nacked"));
    }
}
