//! What a person meets who writes the file or sets the variables.

use std::{collections::BTreeMap, fs, path::PathBuf};

use super::*;

/// A file of a test's own, removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(text: &str) -> Self {
        let unique = format!("postrider-config-{}-{}", std::process::id(), uuid::Uuid::new_v4());
        let path = std::env::temp_dir().join(unique);
        fs::write(&path, text).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn load(text: &str, env: &[(&str, &str)]) -> Result<Config, String> {
    let file = Scratch::new(text);
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Config::load(Some(&file.0), env)
        .map_err(|error| error.to_string().replace(&file.0.display().to_string(), "config.toml"))
}

fn refused(text: &str, env: &[(&str, &str)]) -> String {
    load(text, env).expect_err("the configuration must be refused")
}

#[test]
fn an_empty_file_is_the_defaults() {
    assert_eq!(load("", &[]), Ok(Config::default()));
}

#[test]
fn a_wrong_word_is_answered_with_the_allowed_ones() {
    let error = refused("[source]\nmode = \"wall\"", &[]);
    assert_eq!(error, r#"config.toml: source.mode: found "wall", allowed: "wal", "poll""#);
}

#[test]
fn an_unknown_key_is_answered_with_the_key_that_was_meant() {
    let error = refused("[publish]\nwindw = 5", &[]);
    assert_eq!(error, "config.toml: unknown key publish.windw; did you mean publish.window_messages?");
    let error = refused("", &[("POSTRIDER_PUBLISH__WINDW", "5")]);
    assert!(
        error.ends_with("unknown key publish.windw; did you mean POSTRIDER_PUBLISH__WINDOW_MESSAGES?"),
        "{error}"
    );
}

#[test]
fn a_value_of_the_wrong_type_names_what_was_found() {
    assert_eq!(
        refused("[publish]\nlanes = 1.5", &[]),
        "config.toml: publish.lanes: found 1.5, allowed: a whole number, 0 or more"
    );
    assert_eq!(
        refused("[publish]\nconfirms = 5", &[]),
        "config.toml: publish.confirms: found 5, allowed: true, false"
    );
    assert_eq!(refused("source = 5", &[]), "config.toml: source: found 5, allowed: a table");
    assert_eq!(
        refused("", &[("POSTRIDER_PUBLISH__LANES", "two")]),
        "POSTRIDER_PUBLISH__LANES: publish.lanes: found \"two\", allowed: a whole number, 0 or more"
    );
}

#[test]
fn a_number_out_of_range_names_the_range() {
    assert_eq!(
        refused("[credits]\nbytes = 4294967296", &[]),
        "config.toml: credits.bytes: found 4294967296, allowed: 1048576 to 4294967295"
    );
}

#[test]
fn a_line_that_is_not_toml_is_named_by_number() {
    assert!(refused("[source]\nmode = ", &[]).starts_with("config.toml: line 2 is not TOML: "));
}

#[test]
fn the_environment_overrides_the_file_and_other_variables_are_left_alone() {
    let env = [
        ("POSTRIDER_SOURCE__WAL__SLOT", "orders"),
        ("POSTRIDER_PUBLISH__CONFIRMS", "false"),
        ("POSTRIDER_TEST_DATABASE_URL", "elsewhere"),
        ("PATH", "/bin"),
    ];
    let config = load("[source.wal]\nslot = \"file\"\npublication = \"kept\"", &env).unwrap();
    assert_eq!((config.source.wal.slot.as_str(), config.publish.confirms), ("orders", false));
    assert_eq!(config.source.wal.publication, "kept");
}

#[test]
fn a_secret_is_read_from_its_file_without_the_newline() {
    let secret = Scratch::new("postgres://u:geheim@h/db\n");
    let text = format!("[database]\nurl_file = {:?}", secret.0);
    let config = load(&text, &[]).unwrap();
    assert_eq!(config.database.url.expose(), "postgres://u:geheim@h/db");
    assert!(!format!("{config:?}").contains("geheim"));
    let both = format!("{text}\nurl = \"postgres://u@h/db\"");
    assert!(refused(&both, &[]).contains("database.url_file: set together with database.url"));
}

#[test]
fn a_url_in_the_environment_replaces_a_url_file_in_the_file() {
    let env = [("POSTRIDER_DATABASE__URL", "postgres://u@h/db")];
    let config = load("[database]\nurl_file = \"/nowhere\"", &env).unwrap();
    assert_eq!(config.database.url.expose(), "postgres://u@h/db");
}

#[test]
fn no_error_about_a_url_shows_its_password() {
    for url in ["postgres://u:geheim@h:port/db", "postgres://u:geheim@h/db?sslmode=require", "//u:geheim@h"] {
        let error = refused("", &[("POSTRIDER_DATABASE__URL", url)]);
        assert!(error.contains("database.url") && !error.contains("geheim"), "{error}");
    }
    for url in ["http://u:geheim@h", "amqp://u:geheim@h:port/x"] {
        let error = refused("", &[("POSTRIDER_BROKER__URL", url)]);
        assert!(error.contains("broker.url") && !error.contains("geheim"), "{error}");
    }
}

#[test]
fn keys_that_cannot_work_together_are_refused_where_one_was_set() {
    for (text, expected) in [
        (
            "[source]\nmode = \"poll\"\n[ack]\nrows = \"keep\"",
            "ack.rows: found \"keep\", allowed with source.mode",
        ),
        (
            "[source.wal]\non_lost_slot = \"recover\"\n[ack]\nrows = \"keep\"",
            "source.wal.on_lost_slot: found \"recover\", allowed with ack.rows",
        ),
        ("[ack]\nrows = \"keep\"", "source.wal.first_start: unset, allowed with ack.rows"),
        (
            "[publish]\nwindow_messages = 2000",
            "publish.window_messages: found 2000, allowed: at most publish.exposure",
        ),
        (
            "[source]\nmode = \"poll\"\n[publish]\nexposure_messages = 300",
            "source.poll.batch_messages: found 400",
        ),
        ("[credits]\nmessages = 500", "ack.batch_messages: found 1000, allowed: at most credits.messages"),
        ("[publish]\nretry_backoff_max_ms = 100", "publish.retry_backoff_ms: found 500, allowed: at most"),
        ("[admin]\nlisten = \"0.0.0.0:9464\"", "admin.listen: found 0.0.0.0:9464 without admin.token_file"),
        (
            "[publish]\nrouting_key = \"{key}\"",
            "publish.routing_key: found \"{key}\": {key} needs outbox.columns.key",
        ),
        ("[publish]\nexchange = \"{type}\"\ndeclare = true", "publish.exchange: has placeholders"),
        ("[database]\ncert_file = \"a\"", "database.cert_file: set without database.key_file"),
        ("[outbox]\ntable = \"a.b.c\"", "outbox.table: has more than one dot"),
    ] {
        let error = refused(text, &[]);
        assert!(error.starts_with("config.toml: ") && error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn exposure_follows_the_mode_where_it_is_unset() {
    assert_eq!(load("", &[]).unwrap().exposure_messages(), defaults::EXPOSURE_WAL);
    assert_eq!(load("[source]\nmode = \"poll\"", &[]).unwrap().exposure_messages(), defaults::EXPOSURE_POLL);
}

#[test]
fn a_file_named_explicitly_must_exist() {
    let error = Config::load(Some(Path::new("/nowhere/config.toml")), std::iter::empty()).unwrap_err();
    assert!(error.to_string().starts_with("/nowhere/config.toml: cannot read the file"), "{error}");
}

/// What the example shows for keys whose value is worked out when unset, and for those that have none.
fn shown(key: &str) -> Option<toml::Value> {
    let text = |text: &str| Some(toml::Value::String(text.to_owned()));
    match key {
        "database.url" | "database.direct_url" => text(defaults::DATABASE_URL),
        "broker.url" => text(defaults::BROKER_URL),
        "source.wal.first_start" => text("sweep"),
        "publish.exposure_messages" => Some(toml::Value::Integer(defaults::EXPOSURE_WAL.into())),
        _ => None,
    }
}

#[test]
fn the_example_file_shows_every_key_once_at_its_default() {
    let example = include_str!("../../config.toml");
    assert_eq!(load(example, &[]), Ok(Config::default()), "as shipped it changes nothing");

    // Uncommented: `#key = value` is a key, `# words` is prose.
    let lines = example.lines().filter(|line| !line.starts_with("# ") && *line != "#");
    let uncommented: String =
        lines.map(|line| format!("{}\n", line.strip_prefix('#').unwrap_or(line))).collect();
    let table: toml::Table = uncommented.parse().expect("no key twice, all of it TOML");
    let mut found = BTreeMap::new();
    flatten("", &toml::Value::Table(table), &mut found);

    let defaults = toml::Value::try_from(Config::default()).unwrap();
    let mut expected = BTreeMap::new();
    flatten("", &defaults, &mut expected);
    for key in KEYS.keys() {
        let value = found.remove(key).unwrap_or_else(|| panic!("config.toml does not show {key}"));
        if let Some(default) = shown(key).or_else(|| expected.get(key).cloned()) {
            assert_eq!(value, default, "{key}");
        }
    }
    assert!(found.is_empty(), "config.toml shows keys that do not exist: {:?}", found.keys());
}

fn flatten(path: &str, value: &toml::Value, into: &mut BTreeMap<String, toml::Value>) {
    match value {
        toml::Value::Table(table) => {
            for (name, value) in table {
                flatten(&keys::join(path, name), value, into);
            }
        }
        plain => {
            into.insert(path.to_owned(), plain.clone());
        }
    }
}
