//! Standard output: a reader that goes away (`postrider check | head`) is no failure.

use std::io::{ErrorKind, IsTerminal, Write, stderr, stdout};

use crate::failure::Failure;

/// Prints `text` as it stands.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Shows progress to a person; nobody else is told, and a later line replaces it.
pub(crate) fn progress(text: &str) {
    let mut err = stderr().lock();
    if err.is_terminal() {
        // Erases the line first: the last progress may have been longer.
        let _ = write!(err, "\r\x1b[2K{text}").and_then(|()| err.flush());
    }
}

/// Whether standard output is a terminal whose user has not asked for plain text (<https://no-color.org>).
pub(crate) fn colour() -> bool {
    stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}
