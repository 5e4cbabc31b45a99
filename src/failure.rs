//! What a command that failed says: one line, a hint where there is a remedy, and the exit code.

use std::{fmt, process::ExitCode};

use postrider_actors::error::{Error, Kind};

use crate::config::ConfigError;

/// Exit code of a command that failed.
const FAILED: u8 = 1;
/// Exit code for bad usage and bad configuration; clap uses the same for bad usage.
const USAGE: u8 = 2;

/// A command's failure, ready to be printed.
#[derive(Debug)]
pub struct Failure {
    message: String,
    hint: Option<String>,
    code: u8,
}

impl Failure {
    /// A failure with exit code 1.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, code: FAILED }
    }

    /// Bad usage or a configuration that cannot be used: exit code 2.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, code: USAGE }
    }

    /// Attaches what a person can do about it.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The exit code.
    pub fn code(&self) -> ExitCode {
        ExitCode::from(self.code)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self { message: error.to_string(), hint: error.hint().map(str::to_owned), code: USAGE }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = if error.kind() == Kind::Config { USAGE } else { FAILED };
        Self { message: error.chain(), hint: error.remedy().map(str::to_owned), code }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line_and_its_hint_another() {
        let failure =
            Failure::from(Error::new(Kind::DatabaseDown, "connect to the database").with_remedy("start it"));
        assert_eq!(
            failure.to_string(),
            "error: connect to the database: database unreachable\nhint: start it"
        );
    }
}
