//! What an error of a channel or a connection says about the messages that were under way.

use lapin::{
    ErrorKind,
    protocol::{AMQPError, AMQPErrorKind},
};

/// Why a channel ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ending {
    /// Nothing to do with any message: the peer went away, was told to, or did not answer.
    Outage(String),
    /// The broker closed it over something that was sent.
    Blamed {
        /// Whether the whole connection was closed, with every channel on it.
        connection: bool,
        /// The AMQP code.
        code: u16,
        /// Code and text, such as `406 PRECONDITION_FAILED - ...`.
        words: String,
    },
}

impl Ending {
    /// Classifies an error.
    pub(super) fn of(error: &lapin::Error) -> Self {
        match error.kind() {
            ErrorKind::ProtocolError(said) => Self::said(said),
            _ => Ending::Outage(error.to_string()),
        }
    }

    fn said(error: &AMQPError) -> Self {
        let (code, words) = (error.get_id(), words(error));
        match error.kind() {
            AMQPErrorKind::Soft(_) => Ending::Blamed { connection: false, code, words },
            // Malformed or forbidden frames, and a broker that fails over one. 320 is an operator's doing; 504 answers
            // frames that were queued behind a channel's close; 506 and 530 speak of limits and of the virtual host.
            AMQPErrorKind::Hard(_) if matches!(code, 501 | 502 | 503 | 505 | 540 | 541) => {
                Ending::Blamed { connection: true, code, words }
            }
            AMQPErrorKind::Hard(_) => Ending::Outage(words),
        }
    }

    /// In words, for logs and the board.
    pub(super) fn words(&self) -> &str {
        match self {
            Ending::Outage(words) | Ending::Blamed { words, .. } => words,
        }
    }

    /// Whether this says more than `other`: the broker's own words beat what lapin makes of their consequences.
    pub(super) fn says_more_than(&self, other: &Ending) -> bool {
        matches!((self, other), (Ending::Blamed { .. }, Ending::Outage(_)))
    }
}

/// The broker's code and words as one text.
pub(super) fn words(error: &AMQPError) -> String {
    format!("{} {}", error.get_id(), error.get_message())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: u16, text: &str) -> lapin::Error {
        ErrorKind::ProtocolError(AMQPError::from_id(code, text.into()).expect("an AMQP code")).into()
    }

    #[test]
    fn an_outage_is_not_a_verdict() {
        for code in [320, 504, 506, 530] {
            assert!(matches!(Ending::of(&error(code, "x")), Ending::Outage(_)), "{code}");
        }
        let broken: lapin::Error = std::io::Error::from(std::io::ErrorKind::BrokenPipe).into();
        assert!(matches!(Ending::of(&broken), Ending::Outage(_)));
        assert!(matches!(Ending::of(&ErrorKind::MissingHeartbeatError.into()), Ending::Outage(_)));
    }

    #[test]
    fn a_close_over_what_was_sent_keeps_the_brokers_words() {
        for (code, whole) in
            [(311, false), (403, false), (404, false), (406, false), (501, true), (502, true)]
        {
            let ending = Ending::of(&error(code, "SOME - words"));
            let words = format!("{code} SOME - words");
            assert_eq!(ending, Ending::Blamed { connection: whole, code, words });
        }
    }
}
