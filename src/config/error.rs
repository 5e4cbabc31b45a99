//! What is wrong with the configuration: where, which key, what was found and what is allowed.

use std::{fmt, path::PathBuf};

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The configuration file.
    File(PathBuf),
    /// An environment variable.
    Variable(String),
    /// Nobody set it.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Variable(name) => f.write_str(name),
            Self::Default => f.write_str("defaults"),
        }
    }
}

/// A configuration that cannot be used. One line, without secrets; the program exits with 2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    origin: Origin,
    problem: String,
    hint: Option<String>,
}

impl ConfigError {
    /// An error about a value from `origin`; `problem` names the key, what was found and what is allowed.
    pub fn new(origin: Origin, problem: impl Into<String>) -> Self {
        Self { origin, problem: problem.into(), hint: None }
    }

    /// Attaches what a person can do about it.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// What to do about it, where that is more than choosing an allowed value.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.origin, self.problem)
    }
}

impl std::error::Error for ConfigError {}
