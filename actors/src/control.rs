//! Control is out of band: what the operator asks for, whether sources may take more, and the latest durable LSN travel
//! on `watch` channels, never through mailboxes, so they reach a stage however full the pipeline is.

use tokio::sync::watch;

use crate::position::Lsn;

/// What the operator asked for. Stored in `postrider_control`, so it holds for every process on the outbox and survives
/// a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Desired {
    /// Move messages.
    #[default]
    Run,
    /// Take nothing more; let what is in flight settle.
    Pause,
    /// Move everything up to the target, then take nothing more.
    Drain,
}

impl Desired {
    /// The word in `postrider_control.desired`.
    pub fn as_str(self) -> &'static str {
        match self {
            Desired::Run => "run",
            Desired::Pause => "pause",
            Desired::Drain => "drain",
        }
    }

    /// The request behind a word of `postrider_control.desired`.
    pub fn from_word(word: &str) -> Option<Self> {
        [Desired::Run, Desired::Pause, Desired::Drain].into_iter().find(|desired| desired.as_str() == word)
    }
}

/// Whether sources may take more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intake {
    /// Take what is there.
    Open,
    /// Take nothing; what was taken settles.
    Closed,
    /// Take what is at or before the drain's target: streamed transactions that committed up to this LSN, claims until
    /// the pipeline says otherwise.
    UpTo(Lsn),
}

impl Intake {
    /// Whether a claim may be made.
    pub fn claims(self) -> bool {
        !matches!(self, Intake::Closed)
    }
}

/// The watches of one generation. Cloning shares them.
#[derive(Debug, Clone)]
pub struct Controls {
    /// Whether sources may take more.
    pub intake: watch::Receiver<Intake>,
    /// The LSN up to which everything is durably recorded; written by the acker, told to the server by the source.
    pub durable: watch::Sender<Lsn>,
}
