//! Failpoints: places where a test makes the relay panic, die, fail or stall. They are compiled out of release builds.
//!
//! Armed by `POINT=ACTION[@N]`, several separated by `;`: at its N-th pass (the first, if it does not say) the point
//! strikes, once. Actions are `panic`, `abort` (the process ends where it stands, as by SIGKILL), `error` and
//! `sleep(MILLISECONDS)`, which blocks the stage's thread: a machine that stalls.

macro_rules! points {
    ($($(#[$doc:meta])* $point:ident = $name:literal,)*) => {
        /// Where a failpoint is: every hand-over of the pipeline, and what is around a commit.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Point {
            $($(#[$doc])* $point,)*
        }

        impl Point {
            /// Every failpoint.
            pub const ALL: &[Point] = &[$(Point::$point,)*];

            /// Its name when it is armed.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Point::$point => $name,)*
                }
            }
        }
    };
}

points! {
    /// Rows are claimed and locked, nobody else knows of them; their claim commits much later.
    Claimed = "source.claimed",
    /// A batch goes from a source to the decoder.
    SourceDecode = "source.decode",
    /// A batch goes from the decoder to the publisher.
    DecodePublish = "decode.publish",
    /// A message is about to be sent.
    PublishBefore = "publish.before",
    /// A message is written to the connection, its confirm not waited for yet.
    PublishAfter = "publish.after",
    /// Confirms were received, and no verdict was made of them.
    Confirmed = "publish.confirmed",
    /// Verdicts go from the publisher to the acker.
    PublishAck = "publish.ack",
    /// Rejected rows are about to be copied into the retries.
    RetriesInsert = "ack.retries",
    /// A recording is complete but for its commit.
    CommitBefore = "ack.commit.before",
    /// A recording is committed, and nobody knows.
    CommitAfter = "ack.commit.after",
    /// An LSN is durable, and the server was not told.
    Feedback = "source.feedback",
}

#[cfg(debug_assertions)]
pub use armed::arm;
#[cfg(debug_assertions)]
pub(crate) use armed::{pass, strike};

/// Passes a failpoint.
///
/// # Errors
/// Where it is armed with `error`.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub(crate) fn pass(_: Point) -> crate::error::Result<()> {
    Ok(())
}

/// Passes a failpoint where no error can be told: there `error` panics.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub(crate) fn strike(_: Point) {}

#[cfg(debug_assertions)]
mod armed {
    use std::{
        sync::{
            OnceLock,
            atomic::{AtomicU64, Ordering::Relaxed},
        },
        time::Duration,
    };

    use super::Point;
    use crate::error::{Error, Kind, Result};

    /// Set once, before anything runs: the one global of this crate, and in no release build.
    static ARMED: OnceLock<Vec<Armed>> = OnceLock::new();

    #[derive(Debug)]
    struct Armed {
        point: Point,
        action: Action,
        at: u64,
        passes: AtomicU64,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Action {
        Panic,
        Abort,
        Error,
        Sleep(Duration),
    }

    /// Arms the failpoints that `text` names, for the life of the process.
    ///
    /// # Errors
    /// [`Kind::Config`] where `text` is not of the form above, or some are armed already.
    pub fn arm(text: &str) -> Result<()> {
        const OP: &str = "arm failpoints";
        let wrong = |what: &str| Error::new(Kind::Config, OP).with_source(what.to_owned());
        let parsed = text
            .split(';')
            .filter(|one| !one.trim().is_empty())
            .map(|one| parse(one.trim()).ok_or_else(|| wrong(one)))
            .collect::<Result<Vec<_>>>()?;
        ARMED.set(parsed).map_err(|_| wrong("they are armed already"))
    }

    /// Passes a failpoint.
    ///
    /// # Errors
    /// Where it is armed with `error`.
    pub(crate) fn pass(point: Point) -> Result<()> {
        let Some(armed) = ARMED.get() else { return Ok(()) };
        armed.iter().filter(|armed| armed.point == point).try_for_each(Armed::pass)
    }

    /// Passes a failpoint where no error can be told: there `error` panics.
    pub(crate) fn strike(point: Point) {
        pass(point).expect("an error is told by a panic here");
    }

    impl Armed {
        fn pass(&self) -> Result<()> {
            if self.passes.fetch_add(1, Relaxed) + 1 != self.at {
                return Ok(());
            }
            let point = self.point.as_str();
            tracing::warn!(point, action = ?self.action, "failpoint");
            match self.action {
                Action::Panic => panic!("failpoint {point}"),
                Action::Abort => std::process::abort(),
                Action::Error => Err(Error::new(Kind::Internal, format!("pass failpoint {point}"))),
                Action::Sleep(time) => {
                    std::thread::sleep(time);
                    Ok(())
                }
            }
        }
    }

    fn parse(one: &str) -> Option<Armed> {
        let (name, what) = one.split_once('=')?;
        let (action, at) = match what.split_once('@') {
            Some((action, at)) => (action, at.parse().ok().filter(|at| *at > 0)?),
            None => (what, 1),
        };
        let action = match action {
            "panic" => Action::Panic,
            "abort" => Action::Abort,
            "error" => Action::Error,
            other => {
                let time = other.strip_prefix("sleep(")?.strip_suffix(')')?;
                Action::Sleep(Duration::from_millis(time.parse().ok()?))
            }
        };
        let point = Point::ALL.iter().copied().find(|point| point.as_str() == name)?;
        Some(Armed { point, action, at, passes: AtomicU64::new(0) })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_point_strikes_at_its_pass_and_never_again() {
            let armed = parse("publish.before=error@3").unwrap();
            let failed: Vec<bool> = (0..6).map(|_| armed.pass().is_err()).collect();
            assert_eq!(failed, [false, false, true, false, false, false]);
        }

        #[test]
        fn what_cannot_be_armed_is_refused() {
            for text in
                ["nowhere=panic", "publish.before", "publish.before=panic@0", "publish.before=sleep(x)"]
            {
                assert!(parse(text).is_none(), "{text}");
            }
            let stalls = parse("ack.commit.after=sleep(20)@7").unwrap();
            assert_eq!((stalls.point, stalls.at), (Point::CommitAfter, 7));
            assert_eq!(stalls.action, Action::Sleep(Duration::from_millis(20)));
        }
    }
}
