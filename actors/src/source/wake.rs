//! Waking workers by `NOTIFY`: sooner than the next poll, which stays the safety net.

use std::time::Duration;

use tokio::sync::Notify;

use crate::{database::listen, deadlines::LISTEN_SILENCE, error::Result, pipeline::shared::Shared};

/// The channel that applications notify.
pub(super) const CHANNEL: &str = "postrider";

const FIRST: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(10);

/// Listens on one connection of its own, through `direct_url`, and wakes one worker for each change; a worker that finds
/// more than it can take wakes the next. Ends only with the generation: without notifications, polling goes on.
pub(super) async fn listen_and_wake(shared: &Shared, wake: &Notify) -> Result<()> {
    let mut pause = FIRST;
    while !shared.stop.is_cancelled() {
        match listen(&shared.settings.database, "postrider listen", CHANNEL).await {
            Ok(mut listener) => {
                pause = FIRST;
                // What was notified before we listened was not heard.
                wake.notify_one();
                let listening = async {
                    loop {
                        match tokio::time::timeout(LISTEN_SILENCE, listener.arrivals.changed()).await {
                            Ok(Ok(())) => wake.notify_one(),
                            Ok(Err(_ended)) => return,
                            Err(_silence) => {
                                if let Err(error) = listener.look_after().await {
                                    tracing::debug!(error = %error.chain(), "no longer listening");
                                    return;
                                }
                            }
                        }
                    }
                };
                shared.stop.run_until_cancelled(listening).await;
            }
            Err(error) => tracing::debug!(error = %error.chain(), "cannot listen, polling instead"),
        }
        let rest = pause.mul_f64(0.5 + fastrand::f64());
        pause = (pause * 2).min(LONGEST);
        let _ = shared.stop.run_until_cancelled(tokio::time::sleep(rest)).await;
    }
    Ok(())
}
