//! The keys there are. Read off the default configuration itself, so that no second list can fall behind.

use std::{collections::BTreeMap, sync::LazyLock};

use serde_json::Value;

use super::Config;

/// What a key's value looks like, before words, names and ranges are considered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A whole number, 0 or more.
    Number,
    /// `true` or `false`.
    Flag,
    /// A string.
    Text,
}

impl Form {
    /// The form in words, for errors.
    pub fn allowed(self) -> &'static str {
        match self {
            Self::Number => "a whole number, 0 or more",
            Self::Flag => "true, false",
            Self::Text => "a string",
        }
    }
}

/// Numbers that have no default of their own, so that the default configuration does not show their form.
const OPTIONAL_NUMBERS: [&str; 1] = ["publish.exposure_messages"];

/// Every key with its form, dotted.
pub static KEYS: LazyLock<BTreeMap<String, Form>> = LazyLock::new(|| {
    let mut keys = BTreeMap::new();
    let defaults = serde_json::to_value(Config::default()).expect("the default configuration is plain data");
    collect("", &defaults, &mut keys);
    keys
});

fn collect(path: &str, value: &Value, keys: &mut BTreeMap<String, Form>) {
    let form = match value {
        Value::Object(section) => {
            for (name, value) in section {
                collect(&join(path, name), value, keys);
            }
            return;
        }
        Value::Number(_) => Form::Number,
        Value::Bool(_) => Form::Flag,
        _ if OPTIONAL_NUMBERS.contains(&path) => Form::Number,
        _ => Form::Text,
    };
    keys.insert(path.to_owned(), form);
}

/// Whether `path` is a section: some key lies below it.
pub(super) fn is_section(path: &str) -> bool {
    KEYS.keys().any(|key| key.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
}

/// `section.name`, or `name` at the top.
pub(super) fn join(section: &str, name: &str) -> String {
    if section.is_empty() { name.to_owned() } else { format!("{section}.{name}") }
}

/// The environment variable that overrides a key.
pub fn variable(key: &str) -> String {
    format!("{}{}", super::ENV_PREFIX, key.replace('.', "__").to_uppercase())
}

/// The key somebody who wrote `unknown` most likely meant.
pub(super) fn nearest(unknown: &str) -> Option<&'static str> {
    // Below this two names have little in common but their length (`publish.windw` and its key: 0.97).
    const ALIKE: f64 = 0.8;
    let score = |key: &str| {
        let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
        let whole = strsim::jaro_winkler(unknown, key);
        // The right name in the wrong section.
        let name = if last(unknown) == last(key) { 0.9 } else { 0.0 };
        whole.max(name)
    };
    let best = KEYS.keys().map(|key| (score(key), key.as_str())).max_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|(score, _)| *score >= ALIKE).map(|(_, key)| key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_forms_are_read_off_the_configuration() {
        assert_eq!(KEYS.get("source.wal.slot"), Some(&Form::Text));
        assert_eq!(KEYS.get("publish.exposure_messages"), Some(&Form::Number));
        assert_eq!(KEYS.get("publish.confirms"), Some(&Form::Flag));
        assert!(is_section("source.wal") && !is_section("source.wal.slot") && !is_section("sour"));
    }

    #[test]
    fn a_typo_and_a_key_in_the_wrong_section_find_what_was_meant() {
        assert_eq!(nearest("publish.windw"), Some("publish.window_messages"));
        assert_eq!(nearest("publish.sslmode"), Some("database.sslmode"));
        assert_eq!(nearest("zzz"), None);
    }
}
