//! Signals: the first asks the relay to settle and stop, the second to stop now.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Hears SIGTERM and SIGINT.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Starts hearing; from here on the signals no longer kill the process.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub fn hear() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// The next one's name.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
