//! The messages of `pgoutput`, protocol version 1, as far as an outbox needs them.
//!
//! What comes in is one message as the stream carried it, undecoded; what goes out borrows nothing and copies nothing:
//! values are slices of the message. Every length is checked against what is there, so arbitrary bytes end in an error
//! that names the message and the offset, never in a panic. BEGIN and COMMIT are read by the transport; messages that
//! say nothing about inserted rows (type, origin, logical message, truncate, update, delete) are passed over unread.

use bytes::Bytes;

use crate::error::{Error, Kind, Result};

/// One message of a transaction.
#[derive(Debug)]
pub enum Message {
    /// A table is described, before its first row and after each change of it.
    Relation(Relation),
    /// A row was inserted.
    Insert {
        /// The table, by the id of an earlier [`Relation`].
        relation: u32,
        /// The row's values, in the order of the table's columns.
        tuple: Tuple,
    },
    /// Something that inserts no row; its first byte.
    Other(u8),
}

/// A table as the stream describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relation {
    /// What later messages call it: its OID.
    pub id: u32,
    /// Its schema; empty for `pg_catalog`.
    pub schema: String,
    /// Its name.
    pub table: String,
    /// Its published columns.
    pub columns: Vec<Column>,
}

/// A column of a [`Relation`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Its name.
    pub name: String,
    /// The OID of its type.
    pub type_oid: u32,
}

/// The values of a row, read one after the other.
#[derive(Debug)]
pub struct Tuple {
    reader: Reader,
    left: u16,
}

/// A value of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// NULL.
    Null,
    /// The text form of the value.
    Text(Bytes),
}

impl Tuple {
    /// How many values are left.
    pub fn len(&self) -> usize {
        usize::from(self.left)
    }

    /// Whether all values were read.
    pub fn is_empty(&self) -> bool {
        self.left == 0
    }

    /// The next value, `None` after the last.
    ///
    /// # Errors
    /// [`Kind::Protocol`] where the message is not one of an insert in text form.
    pub fn next_value(&mut self) -> Result<Option<Value>> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(None) };
        self.left = left;
        match self.reader.u8()? {
            b'n' => Ok(Some(Value::Null)),
            b't' => {
                let length = self.reader.u32()?;
                Ok(Some(Value::Text(self.reader.bytes(length)?)))
            }
            // `u` (unchanged TOAST) occurs in updates alone, and `b` (binary) where it was asked for.
            _ => Err(self.reader.error("a value that is neither null nor text")),
        }
    }
}

/// Decodes one message.
///
/// # Errors
/// [`Kind::Protocol`] where `message` ends too soon or holds what its type does not allow.
pub fn decode(message: Bytes) -> Result<Message> {
    let mut reader = Reader { message, at: 0 };
    match reader.u8()? {
        b'R' => relation(&mut reader).map(Message::Relation),
        b'I' => {
            let relation = reader.u32()?;
            if reader.u8()? != b'N' {
                return Err(reader.error("an insert without a new tuple"));
            }
            let left = reader.u16()?;
            Ok(Message::Insert { relation, tuple: Tuple { reader, left } })
        }
        other => Ok(Message::Other(other)),
    }
}

fn relation(reader: &mut Reader) -> Result<Relation> {
    let id = reader.u32()?;
    let schema = reader.text()?;
    let table = reader.text()?;
    let _replica_identity = reader.u8()?;
    let count = reader.u16()?;
    // Not reserved from `count`: that is the sender's claim, and the columns are what proves it.
    let mut columns = Vec::new();
    for _ in 0..count {
        let _flags = reader.u8()?;
        let name = reader.text()?;
        let type_oid = reader.u32()?;
        let _type_modifier = reader.u32()?;
        columns.push(Column { name, type_oid });
    }
    Ok(Relation { id, schema, table, columns })
}

/// A message and how far it was read.
#[derive(Debug)]
struct Reader {
    message: Bytes,
    at: usize,
}

impl Reader {
    fn error(&self, what: &'static str) -> Error {
        let name = self.message.first().map_or('?', |byte| char::from(*byte)).escape_default();
        Error::new(Kind::Protocol, "decode the replication stream").with_source(format!(
            "message '{name}' of {} bytes has {what} at offset {}",
            self.message.len(),
            self.at
        ))
    }

    fn take(&mut self, length: usize) -> Result<std::ops::Range<usize>> {
        match self.at.checked_add(length) {
            Some(end) if end <= self.message.len() => {
                let range = self.at..end;
                self.at = end;
                Ok(range)
            }
            _ => Err(self.error("too few bytes")),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let range = self.take(N)?;
        self.message[range].try_into().map_err(|_| self.error("too few bytes"))
    }

    fn u8(&mut self) -> Result<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn bytes(&mut self, length: u32) -> Result<Bytes> {
        let range = self.take(length as usize)?;
        Ok(self.message.slice(range))
    }

    /// A zero-terminated string. Names are ours to compare, so they must be what `client_encoding` promises.
    fn text(&mut self) -> Result<String> {
        let rest = &self.message[self.at..];
        let Some(length) = rest.iter().position(|byte| *byte == 0) else {
            return Err(self.error("an unterminated string"));
        };
        let text = std::str::from_utf8(&rest[..length]).map(str::to_owned);
        let text = text.map_err(|_| self.error("a name that is not UTF-8"))?;
        self.take(length + 1)?;
        Ok(text)
    }
}

/// Messages as a server would send them, for the tests of everything that reads them.
#[cfg(test)]
pub(crate) mod build {
    use bytes::{BufMut, Bytes, BytesMut};

    pub(crate) fn relation(id: u32, schema: &str, table: &str, columns: &[(&str, u32)]) -> Bytes {
        let mut message = BytesMut::new();
        message.put_u8(b'R');
        message.put_u32(id);
        for name in [schema, table] {
            message.put_slice(name.as_bytes());
            message.put_u8(0);
        }
        message.put_u8(b'd');
        message.put_u16(columns.len() as u16);
        for (name, type_oid) in columns {
            message.put_u8(0);
            message.put_slice(name.as_bytes());
            message.put_u8(0);
            message.put_u32(*type_oid);
            message.put_i32(-1);
        }
        message.freeze()
    }

    pub(crate) fn insert(relation: u32, values: &[Option<&[u8]>]) -> Bytes {
        let mut message = BytesMut::new();
        message.put_u8(b'I');
        message.put_u32(relation);
        message.put_u8(b'N');
        message.put_u16(values.len() as u16);
        for value in values {
            match value {
                None => message.put_u8(b'n'),
                Some(text) => {
                    message.put_u8(b't');
                    message.put_u32(text.len() as u32);
                    message.put_slice(text);
                }
            }
        }
        message.freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Decodes a message and everything in it.
    fn decode_all(message: Bytes) -> Result<Vec<Value>> {
        let mut values = Vec::new();
        if let Message::Insert { mut tuple, .. } = decode(message)? {
            while let Some(value) = tuple.next_value()? {
                values.push(value);
            }
        }
        Ok(values)
    }

    fn corpus() -> Vec<Bytes> {
        vec![
            build::relation(16_385, "public", "outbox_messages", &[("id", 2950), ("content", 3802)]),
            build::insert(16_385, &[Some(b"5b1e"), None, Some(b"{\"a\": 1}"), Some(b"")]),
            Bytes::from_static(b"Y\0\0\x40\x05public\0mood\0"),
            Bytes::from_static(b"O\0\0\0\0\0\0\0\x01origin\0"),
            Bytes::from_static(b"M\x01\0\0\0\0\0\0\0\x01prefix\0\0\0\0\x02hi"),
            Bytes::from_static(b"T\0\0\0\x01\0\0\0\x40\x01"),
            Bytes::from_static(b"U\0\0\x40\x01N\0\x02u\x74\0\0\0\x01a"),
            Bytes::from_static(b"D\0\0\x40\x01K\0\x01t\0\0\0\x01a"),
        ]
    }

    #[test]
    fn a_relation_is_read_with_the_names_and_types_of_its_columns() {
        let Message::Relation(relation) = decode(corpus().remove(0)).unwrap() else { panic!("a relation") };
        assert_eq!((relation.schema.as_str(), relation.table.as_str()), ("public", "outbox_messages"));
        let content = Column { name: "content".to_owned(), type_oid: 3802 };
        assert_eq!((relation.id, relation.columns.len(), &relation.columns[1]), (16_385, 2, &content));
    }

    #[test]
    fn values_are_slices_of_the_message_and_null_is_not_empty() {
        let message = corpus().remove(1);
        let values = decode_all(message.clone()).unwrap();
        assert_eq!(values[1], Value::Null);
        assert_eq!(values[3], Value::Text(Bytes::new()));
        let Value::Text(content) = &values[2] else { panic!("text") };
        assert_eq!(content.as_ref(), b"{\"a\": 1}");
        assert!(message.as_ptr_range().contains(&content.as_ptr()), "the value was copied");
    }

    #[test]
    fn messages_that_insert_no_row_are_passed_over() {
        for message in corpus().split_off(2) {
            let first = message[0];
            assert!(matches!(decode(message).unwrap(), Message::Other(kind) if kind == first));
        }
    }

    #[test]
    fn every_truncation_of_a_message_is_an_error_that_names_it() {
        for message in corpus().into_iter().take(2) {
            for length in 0..message.len() {
                let error = decode_all(message.slice(..length)).unwrap_err();
                assert_eq!(error.kind(), Kind::Protocol);
                let name = if length == 0 { '?' } else { char::from(message[0]) };
                assert!(error.chain().contains(&format!("message '{name}'")), "{}", error.chain());
                assert!(error.chain().contains("at offset"), "{}", error.chain());
            }
        }
    }

    #[test]
    fn a_length_beyond_the_message_is_refused_without_reserving_it() {
        let mut message = corpus().remove(1).to_vec();
        message[9..13].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(decode_all(message.into()).unwrap_err().kind(), Kind::Protocol);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_all(bytes.into());
        }

        #[test]
        fn a_damaged_message_never_panics(
            which in 0usize..8, at: prop::sample::Index, byte: u8, cut: prop::sample::Index
        ) {
            let mut message = corpus().remove(which).to_vec();
            let at = at.index(message.len());
            message[at] = byte;
            message.truncate(cut.index(message.len()) + 1);
            let _ = decode_all(message.into());
        }

        #[test]
        fn what_was_inserted_comes_out(
            values in prop::collection::vec(prop::option::of(prop::collection::vec(any::<u8>(), 0..50)), 0..20)
        ) {
            let borrowed: Vec<Option<&[u8]>> = values.iter().map(Option::as_deref).collect();
            let read = decode_all(build::insert(7, &borrowed)).unwrap();
            let read: Vec<Option<Vec<u8>>> = read.into_iter().map(|value| match value {
                Value::Null => None,
                Value::Text(text) => Some(text.to_vec()),
            }).collect();
            prop_assert_eq!(read, values);
        }
    }
}
