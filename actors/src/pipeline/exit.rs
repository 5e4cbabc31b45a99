//! How a stage ends, reported whatever the way: a return, an error, a panic, a dropped arbiter.

use tokio::sync::mpsc;

use crate::{error::Result, metrics::Stage};

/// How a stage ended, like a process's exit status.
#[derive(Debug)]
pub enum ExitStatus {
    /// Its loop returned: `Ok` when it was told to stop, an error otherwise.
    Returned(Result<()>),
    /// It was dropped before its loop returned: a panic, or an arbiter that went away under it.
    Vanished,
}

/// A stage's end, as the generation hears of it.
#[derive(Debug)]
pub struct Exit {
    /// Which stage.
    pub stage: Stage,
    /// How.
    pub status: ExitStatus,
}

/// Owned by each stage's actor; reports the stage's end when it is dropped, so no way of ending goes unheard.
#[derive(Debug)]
pub struct ExitGuard {
    stage: Stage,
    status: Option<ExitStatus>,
    to: mpsc::Sender<Exit>,
}

impl ExitGuard {
    /// A guard for `stage`. The channel must have room for every stage of a generation: a drop cannot wait.
    pub fn new(stage: Stage, to: mpsc::Sender<Exit>) -> Self {
        Self { stage, status: None, to }
    }

    /// Says how the loop returned; reported when the guard is dropped.
    pub fn returned(&mut self, result: Result<()>) {
        self.status = Some(ExitStatus::Returned(result));
    }
}

impl Drop for ExitGuard {
    fn drop(&mut self) {
        let status = self.status.take().unwrap_or(ExitStatus::Vanished);
        let _ = self.to.try_send(Exit { stage: self.stage, status });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_heard_as_vanished_and_a_return_as_what_it_returned() {
        let (to, mut exits) = mpsc::channel(2);
        let guard = ExitGuard::new(Stage::Decode, to.clone());
        let task = tokio::spawn(async move {
            let _guard = guard;
            panic!("a stage panics");
        });
        assert!(task.await.is_err());
        assert!(matches!(
            exits.recv().await,
            Some(Exit { stage: Stage::Decode, status: ExitStatus::Vanished })
        ));

        let mut guard = ExitGuard::new(Stage::Ack, to);
        guard.returned(Ok(()));
        drop(guard);
        assert!(matches!(exits.recv().await, Some(Exit { status: ExitStatus::Returned(Ok(())), .. })));
    }
}
