//! AMQP's framing, as far as a proxy needs it.

/// Splits one direction of a connection into its protocol header and whole frames.
#[derive(Default)]
pub(super) struct Frames {
    begun: Vec<u8>,
}

/// `AMQP` and four bytes of version: the client's first words, and the server's where it refuses them.
const HEADER: usize = 8;

/// Type, channel and size before a frame's payload, and one byte behind it.
const AROUND: usize = 7 + 1;

impl Frames {
    /// The pieces that `bytes` completes.
    pub(super) fn split(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        self.begun.extend_from_slice(bytes);
        let mut pieces = Vec::new();
        while let Some(length) = self.first().filter(|length| *length <= self.begun.len()) {
            let rest = self.begun.split_off(length);
            pieces.push(std::mem::replace(&mut self.begun, rest));
        }
        pieces
    }

    fn first(&self) -> Option<usize> {
        match *self.begun.get(..7)? {
            [b'A', b'M', b'Q', b'P', ..] => Some(HEADER),
            [_, _, _, a, b, c, d] => Some(u32::from_be_bytes([a, b, c, d]) as usize + AROUND),
            _ => None,
        }
    }
}

/// Whether a frame carries this method: its class and its number in it.
pub(crate) fn is_method(frame: &[u8], class: u16, method: u16) -> bool {
    const METHOD: u8 = 1;
    frame.first() == Some(&METHOD)
        && frame.get(7..9) == Some(&class.to_be_bytes()[..])
        && frame.get(9..11) == Some(&method.to_be_bytes()[..])
}

/// Whether a frame is a broker's confirm: `basic.ack`.
pub(crate) fn is_confirm(frame: &[u8]) -> bool {
    is_method(frame, 60, 80)
}
