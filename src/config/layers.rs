//! The file, then the environment over it: one table of values, each remembering where it came from.

use std::{collections::BTreeMap, fs, path::Path};

use toml::{Table, Value};

use super::{
    ENV_PREFIX,
    error::{ConfigError, Origin},
    keys::{self, Form, KEYS},
};

/// Keys whose value may stand in a file of its own, named by the key with `_file` appended.
pub(super) const SECRETS: [&str; 3] = ["database.url", "database.direct_url", "broker.url"];

/// Values by section and name, and where each came from.
#[derive(Debug, Default)]
pub(super) struct Layers {
    pub(super) values: Table,
    origins: BTreeMap<String, Origin>,
}

impl Layers {
    /// Where the value of `key` came from.
    pub(super) fn origin(&self, key: &str) -> Origin {
        self.origins.get(key).cloned().unwrap_or(Origin::Default)
    }

    /// The value of `key`, if somebody set it.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        let mut names = key.split('.');
        let first = self.values.get(names.next()?)?;
        names.try_fold(first, |value, name| value.get(name))
    }

    /// Reads a file over what is there.
    pub(super) fn read_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let origin = Origin::File(path.to_owned());
        let text = fs::read_to_string(path)
            .map_err(|error| ConfigError::new(origin.clone(), format!("cannot read the file: {error}")))?;
        let table = text.parse::<Table>().map_err(|error| {
            let line =
                error.span().map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
            // The message names what was expected, never the text of the line: that may be a URL.
            let message = error.message().replace('\n', ", ");
            ConfigError::new(origin.clone(), format!("line {line} is not TOML: {message}"))
        })?;
        self.merge("", table, &origin)
    }

    /// Reads the variables that name a key; others that begin like them are left alone.
    pub(super) fn read_variables(
        &mut self,
        env: impl Iterator<Item = (String, String)>,
    ) -> Result<(), ConfigError> {
        // Sorted, so that which of two mistakes is reported does not depend on the environment's order.
        let variables: BTreeMap<_, _> = env.collect();
        for (name, text) in variables {
            let Some(path) = name.strip_prefix(ENV_PREFIX).filter(|path| path.contains("__")) else {
                continue;
            };
            let key = path.to_lowercase().replace("__", ".");
            let origin = Origin::Variable(name.clone());
            let Some(form) = KEYS.get(&key) else {
                return Err(unknown(origin, &key, keys::nearest(&key).map(keys::variable)));
            };
            let value = match form {
                Form::Text => Some(Value::String(text.clone())),
                Form::Number => text.parse().ok().filter(|number| *number >= 0).map(Value::Integer),
                Form::Flag => text.parse().ok().map(Value::Boolean),
            };
            match value {
                Some(value) => self.set(&key, value, origin),
                None => return Err(mismatch(origin, &key, &format!("{text:?}"), *form)),
            }
        }
        Ok(())
    }

    fn merge(&mut self, section: &str, table: Table, origin: &Origin) -> Result<(), ConfigError> {
        for (name, value) in table {
            let key = keys::join(section, &name);
            match (KEYS.get(&key), value) {
                (Some(form), value) => match (form, &value) {
                    (Form::Text, Value::String(_)) | (Form::Flag, Value::Boolean(_)) => {
                        self.set(&key, value, origin.clone());
                    }
                    (Form::Number, Value::Integer(number)) if *number >= 0 => {
                        self.set(&key, value, origin.clone())
                    }
                    _ => return Err(mismatch(origin.clone(), &key, &found(&value), *form)),
                },
                (None, Value::Table(inner)) if keys::is_section(&key) => self.merge(&key, inner, origin)?,
                (None, value) if keys::is_section(&key) => {
                    let problem = format!("{key}: found {}, allowed: a table", found(&value));
                    return Err(ConfigError::new(origin.clone(), problem));
                }
                (None, _) => {
                    return Err(unknown(origin.clone(), &key, keys::nearest(&key).map(str::to_owned)));
                }
            }
        }
        Ok(())
    }

    /// Sets what a `*_file` key's file holds.
    pub(super) fn set_secret(&mut self, key: &str, secret: String, origin: Origin) {
        self.insert(key, Value::String(secret), origin);
    }

    fn set(&mut self, key: &str, value: Value, origin: Origin) {
        // A later layer's `url` also replaces an earlier one's `url_file`, and the other way round.
        for secret in SECRETS {
            let file = format!("{secret}_file");
            let other = if key == secret {
                file.as_str()
            } else if key == file {
                secret
            } else {
                continue;
            };
            if self.origins.get(other).is_some_and(|earlier| !same_layer(earlier, &origin)) {
                self.remove(other);
            }
        }
        self.insert(key, value, origin);
    }

    fn insert(&mut self, key: &str, value: Value, origin: Origin) {
        let (sections, name) = key.rsplit_once('.').unwrap_or(("", key));
        let mut table = &mut self.values;
        for section in sections.split('.').filter(|section| !section.is_empty()) {
            let next = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
            let Value::Table(inner) = next else { return };
            table = inner;
        }
        table.insert(name.to_owned(), value);
        self.origins.insert(key.to_owned(), origin);
    }

    fn remove(&mut self, key: &str) {
        self.origins.remove(key);
        if let Some((section, name)) = key.split_once('.')
            && let Some(Value::Table(table)) = self.values.get_mut(section)
        {
            table.remove(name);
        }
    }
}

fn same_layer(one: &Origin, other: &Origin) -> bool {
    std::mem::discriminant(one) == std::mem::discriminant(other)
}

fn unknown(origin: Origin, key: &str, meant: Option<String>) -> ConfigError {
    let meant = meant.map(|key| format!("; did you mean {key}?")).unwrap_or_default();
    ConfigError::new(origin, format!("unknown key {key}{meant}"))
}

fn mismatch(origin: Origin, key: &str, found: &str, form: Form) -> ConfigError {
    ConfigError::new(origin, format!("{key}: found {found}, allowed: {}", form.allowed()))
}

/// A value as an error may show it: lists and tables by name, since they may hold a URL.
fn found(value: &Value) -> String {
    match value {
        Value::String(text) => format!("{text:?}"),
        Value::Array(_) => "a list".to_owned(),
        Value::Table(_) => "a table".to_owned(),
        plain => plain.to_string(),
    }
}
