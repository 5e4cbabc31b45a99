//! Which of the stream's tables is the outbox, and where in its rows each column is.
//!
//! Columns are found by name, and found again whenever the stream describes the table anew, so a column that is added,
//! dropped or moved while we stream changes nothing. A table that lacks a column, or has it with a type that cannot
//! work, is an error only once a row of it arrives: an update or a truncate must not stop the relay.

use std::collections::HashMap;

use bytes::Bytes;

use super::{
    pgoutput::{Relation, Tuple, Value},
    timestamp,
};
use crate::{
    envelope::{ContentKind, Row},
    error::{Error, Kind, Result},
    settings::OutboxSettings,
};

/// OIDs of built-in types: fixed, part of PostgreSQL's catalogue (`pg_type.dat`).
mod oid {
    pub(super) const BYTEA: u32 = 17;
    pub(super) const INT8: u32 = 20;
    pub(super) const INT4: u32 = 23;
    pub(super) const TEXT: u32 = 25;
    pub(super) const JSON: u32 = 114;
    pub(super) const BPCHAR: u32 = 1042;
    pub(super) const VARCHAR: u32 = 1043;
    pub(super) const TIMESTAMP: u32 = 1114;
    pub(super) const TIMESTAMPTZ: u32 = 1184;
    pub(super) const UUID: u32 = 2950;
    pub(super) const JSONB: u32 = 3802;

    /// Names as `\d` shows them, for messages.
    const NAMES: [(u32, &str); 11] = [
        (BYTEA, "bytea"),
        (INT8, "bigint"),
        (INT4, "integer"),
        (TEXT, "text"),
        (JSON, "json"),
        (BPCHAR, "character"),
        (VARCHAR, "character varying"),
        (TIMESTAMP, "timestamp"),
        (TIMESTAMPTZ, "timestamptz"),
        (UUID, "uuid"),
        (JSONB, "jsonb"),
    ];

    pub(super) fn name(oid: u32) -> Option<&'static str> {
        NAMES.iter().find(|(known, _)| *known == oid).map(|(_, name)| *name)
    }
}

const IDS: &[u32] = &[oid::UUID, oid::INT4, oid::INT8, oid::TEXT, oid::VARCHAR];
const CONTENTS: &[u32] = &[oid::JSONB, oid::JSON, oid::TEXT, oid::VARCHAR, oid::BPCHAR, oid::BYTEA];
const TIMES: &[u32] = &[oid::TIMESTAMPTZ, oid::TIMESTAMP];
const HEADERS: &[u32] = &[oid::JSONB, oid::JSON];

/// What a column of the outbox is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Id,
    Kind,
    Content,
    OccurredOn,
    Key,
    Headers,
    Exchange,
    RoutingKey,
    /// A column that templates name, by its index.
    Template(usize),
}

impl Role {
    /// The column's name, if a row cannot be published without a value in it.
    fn required(self, outbox: &OutboxSettings) -> Option<&str> {
        match self {
            Role::Id => Some(&outbox.columns.id),
            Role::Kind => Some(&outbox.columns.kind),
            Role::Content => Some(&outbox.columns.content),
            _ => None,
        }
    }
}

/// The tables described so far.
#[derive(Debug)]
pub struct Relations {
    outbox: OutboxSettings,
    known: HashMap<u32, Table>,
    id_type: Option<&'static str>,
}

/// A table of the stream.
#[derive(Debug)]
enum Table {
    /// Not the outbox: its rows are passed over.
    Other,
    /// The outbox, and how its rows are read.
    Outbox(Layout),
    /// The outbox as it cannot be read: the column, and what is wrong with it.
    Unfit { column: String, fault: String },
}

/// A row, and the first column that is null and must not be.
#[derive(Debug)]
pub struct Read {
    /// The row.
    pub row: Row,
    /// The name of that column.
    pub null: Option<String>,
}

impl Relations {
    /// Nothing described yet; the table of `outbox` is the one whose rows are read.
    pub fn new(outbox: OutboxSettings) -> Self {
        Self { outbox, known: HashMap::new(), id_type: None }
    }

    /// Takes note of a table, or of its new shape.
    pub fn describe(&mut self, relation: &Relation) {
        let table = if (&relation.schema, &relation.table) == (&self.outbox.schema, &self.outbox.table) {
            let id = relation.columns.iter().find(|column| column.name == self.outbox.columns.id);
            self.id_type = id.and_then(|column| oid::name(column.type_oid));
            Layout::of(relation, &self.outbox)
                .map_or_else(|(column, fault)| Table::Unfit { column, fault }, Table::Outbox)
        } else {
            Table::Other
        };
        self.known.insert(relation.id, table);
    }

    /// The type of the outbox's id, as a cast names it, once it was described.
    pub fn id_type(&self) -> Option<&'static str> {
        self.id_type
    }

    /// Reads a row inserted into the table `relation`; `None` where that is not the outbox.
    ///
    /// # Errors
    /// [`Kind::SchemaChanged`] where the outbox is not as configured, [`Kind::Protocol`] where the row is malformed or
    /// its table was never described.
    pub fn read(&self, relation: u32, tuple: Tuple) -> Result<Option<Read>> {
        match self.known.get(&relation) {
            Some(Table::Other) => Ok(None),
            Some(Table::Outbox(layout)) => layout.read(tuple, &self.outbox).map(Some),
            Some(Table::Unfit { column, fault }) => Err(self.unfit(column, fault)),
            None => Err(malformed("a row of a table that was not described")),
        }
    }

    fn unfit(&self, column: &str, fault: &str) -> Error {
        Error::new(Kind::SchemaChanged, "read a streamed row")
            .with_source(format!("table {} column {column}: {fault}", self.outbox.name()))
            .with_remedy("run `postrider check`, and mend the table, the publication or [outbox.columns]")
    }
}

/// Where in a row the columns are.
#[derive(Debug)]
struct Layout {
    /// How many columns the table has.
    width: usize,
    /// Which column serves what, in the order of the columns; one may serve several.
    places: Vec<(usize, Role)>,
    content: ContentKind,
    content_is_hex: bool,
}

impl Layout {
    fn of(relation: &Relation, outbox: &OutboxSettings) -> Result<Self, (String, String)> {
        let mut layout = Layout {
            width: relation.columns.len(),
            places: Vec::new(),
            content: ContentKind::Json,
            content_is_hex: false,
        };
        let columns = &outbox.columns;
        let required = [
            (Role::Id, &columns.id, Some(IDS)),
            (Role::Kind, &columns.kind, None),
            (Role::Content, &columns.content, Some(CONTENTS)),
            (Role::OccurredOn, &columns.occurred_on, Some(TIMES)),
        ];
        let optional = [
            (Role::Key, &columns.key, None),
            (Role::Headers, &columns.headers, Some(HEADERS)),
            (Role::Exchange, &columns.exchange, None),
            (Role::RoutingKey, &columns.routing_key, None),
        ];
        let optional =
            optional.into_iter().filter_map(|(role, name, types)| Some((role, name.as_ref()?, types)));
        for (role, name, types) in required.into_iter().chain(optional) {
            let found = layout.place(relation, role, name, types)?;
            if role == Role::Content {
                layout.content_is_hex = found == oid::BYTEA;
                layout.content = match found {
                    oid::JSON | oid::JSONB => ContentKind::Json,
                    oid::BYTEA => ContentKind::Bytes,
                    _ => ContentKind::Text,
                };
            }
        }
        for (index, name) in outbox.template_columns.iter().enumerate() {
            layout.place(relation, Role::Template(index), name, None)?;
        }
        layout.places.sort_by_key(|(column, _)| *column);
        Ok(layout)
    }

    /// Finds the column `name` for `role` and returns its type.
    fn place(
        &mut self,
        relation: &Relation,
        role: Role,
        name: &str,
        types: Option<&[u32]>,
    ) -> Result<u32, (String, String)> {
        let Some(index) = relation.columns.iter().position(|column| column.name == name) else {
            return Err((name.to_owned(), "is not in the publication's stream".to_owned()));
        };
        let found = relation.columns[index].type_oid;
        match types {
            Some(allowed) if !allowed.contains(&found) => {
                let allowed = allowed.iter().map(|oid| type_name(*oid)).collect::<Vec<_>>().join(", ");
                return Err((name.to_owned(), format!("is of {}; it must be {allowed}", type_name(found))));
            }
            _ => {}
        }
        self.places.push((index, role));
        Ok(found)
    }

    fn read(&self, mut tuple: Tuple, outbox: &OutboxSettings) -> Result<Read> {
        if tuple.len() != self.width {
            return Err(malformed("a row of another number of columns than its table"));
        }
        let mut row = Row {
            content_kind: self.content,
            columns: vec![None; outbox.template_columns.len()].into(),
            ..Row::default()
        };
        let mut null = None;
        let mut places = self.places.iter().peekable();
        for column in 0..self.width {
            let Some(value) = tuple.next_value()? else { break };
            while let Some((_, role)) = places.next_if(|(at, _)| *at == column) {
                let Value::Text(text) = &value else {
                    null = null.or(role.required(outbox));
                    continue;
                };
                let text = text.clone();
                match *role {
                    Role::Id => row.id = text,
                    Role::Kind => row.kind = text,
                    Role::Content if self.content_is_hex => row.content = from_hex(&text)?,
                    Role::Content => row.content = text,
                    Role::OccurredOn => row.occurred_on = timestamp::parse(&text),
                    Role::Key => row.key = Some(text),
                    Role::Headers => row.headers = Some(text),
                    Role::Exchange => row.exchange = Some(text),
                    Role::RoutingKey => row.routing_key = Some(text),
                    Role::Template(index) => row.columns[index] = Some(text),
                }
            }
        }
        Ok(Read { row, null: null.map(str::to_owned) })
    }
}

/// `bytea` in the form that `bytea_output = hex` gives it.
fn from_hex(text: &[u8]) -> Result<Bytes> {
    fn digit(byte: u8) -> Option<u8> {
        char::from(byte).to_digit(16).map(|digit| digit as u8)
    }
    let decode = || {
        let digits = text.strip_prefix(b"\\x")?;
        let (pairs, []) = digits.as_chunks::<2>() else { return None };
        pairs.iter().map(|[high, low]| Some((digit(*high)? << 4) | digit(*low)?)).collect::<Option<Vec<u8>>>()
    };
    decode().map(Bytes::from).ok_or_else(|| malformed("bytea that is not in hexadecimal form"))
}

fn type_name(oid: u32) -> String {
    oid::name(oid).map_or_else(|| format!("the type with OID {oid}"), str::to_owned)
}

fn malformed(what: &'static str) -> Error {
    Error::new(Kind::Protocol, "decode the replication stream").with_source(what)
}

#[cfg(test)]
mod tests {
    use super::{super::pgoutput, *};
    use crate::decode::pgoutput::{Message, build};
    use crate::decode::testing::outbox;

    const COLUMNS: [(&str, u32); 6] = [
        ("id", oid::UUID),
        ("type", oid::VARCHAR),
        ("content", oid::JSONB),
        ("occurred_on_utc", oid::TIMESTAMPTZ),
        ("processed_on_utc", oid::TIMESTAMPTZ),
        ("error", oid::TEXT),
    ];

    fn describe(relations: &mut Relations, table: &str, columns: &[(&str, u32)]) {
        let message = pgoutput::decode(build::relation(7, "public", table, columns)).unwrap();
        let Message::Relation(relation) = message else { panic!("a relation") };
        relations.describe(&relation);
    }

    fn insert(relations: &Relations, values: &[Option<&[u8]>]) -> Result<Option<Read>> {
        let message = pgoutput::decode(build::insert(7, values)).unwrap();
        let Message::Insert { relation, tuple } = message else { panic!("an insert") };
        relations.read(relation, tuple)
    }

    const ROW: [Option<&[u8]>; 6] =
        [Some(b"5b"), Some(b"order"), Some(b"{}"), Some(b"2026-01-02 03:04:05+00"), None, None];

    #[test]
    fn columns_are_found_by_name_also_after_the_table_changed() {
        let mut relations = Relations::new(outbox());
        describe(&mut relations, "outbox_messages", &COLUMNS);
        let read = insert(&relations, &ROW).unwrap().unwrap();
        assert_eq!((read.row.id.as_ref(), read.row.kind.as_ref()), (&b"5b"[..], &b"order"[..]));
        assert_eq!(read.row.occurred_on, Some(1_767_323_045_000_000));

        let mut moved = COLUMNS.to_vec();
        moved.reverse();
        moved.insert(2, ("mood", 99_999));
        describe(&mut relations, "outbox_messages", &moved);
        let mut values = ROW.to_vec();
        values.reverse();
        values.insert(2, Some(b"sad"));
        assert_eq!(insert(&relations, &values).unwrap().unwrap().row, read.row);
    }

    #[test]
    fn rows_of_other_tables_are_passed_over() {
        let mut relations = Relations::new(outbox());
        describe(&mut relations, "orders", &COLUMNS[..1]);
        assert!(insert(&relations, &ROW[..1]).unwrap().is_none());
    }

    #[test]
    fn a_missing_column_is_named_when_a_row_arrives_and_not_before() {
        let mut relations = Relations::new(outbox());
        describe(&mut relations, "outbox_messages", &COLUMNS[1..]);
        let error = insert(&relations, &ROW[1..]).unwrap_err();
        assert_eq!(error.kind(), Kind::SchemaChanged);
        assert!(error.chain().contains("table public.outbox_messages column id"), "{}", error.chain());
    }

    #[test]
    fn a_column_of_another_type_is_named_with_what_is_allowed() {
        let mut relations = Relations::new(outbox());
        let mut columns = COLUMNS;
        columns[2].1 = 600;
        describe(&mut relations, "outbox_messages", &columns);
        let chain = insert(&relations, &ROW).unwrap_err().chain();
        assert!(
            chain.contains("column content: is of the type with OID 600; it must be jsonb, json"),
            "{chain}"
        );
    }

    #[test]
    fn bytea_is_decoded_and_what_is_not_hexadecimal_is_refused() {
        assert_eq!(from_hex(b"\\x00fFA0").unwrap().as_ref(), b"\x00\xff\xa0");
        assert_eq!(from_hex(b"\\x").unwrap().as_ref(), b"");
        for bad in [&b""[..], b"x00", b"\\x0", b"\\x0g", b"\\000"] {
            assert_eq!(from_hex(bad).unwrap_err().kind(), Kind::Protocol);
        }
    }

    #[test]
    fn a_null_that_must_not_be_is_reported_by_its_column() {
        let mut relations = Relations::new(outbox());
        describe(&mut relations, "outbox_messages", &COLUMNS);
        let mut values = ROW;
        values[2] = None;
        values[3] = None;
        let read = insert(&relations, &values).unwrap().unwrap();
        assert_eq!((read.null.as_deref(), read.row.occurred_on), (Some("content"), None));
    }

    #[test]
    fn a_row_that_does_not_fit_its_table_is_a_protocol_error() {
        let mut relations = Relations::new(outbox());
        assert_eq!(insert(&relations, &ROW).unwrap_err().kind(), Kind::Protocol);
        describe(&mut relations, "outbox_messages", &COLUMNS);
        assert_eq!(insert(&relations, &ROW[..5]).unwrap_err().kind(), Kind::Protocol);
    }
}
