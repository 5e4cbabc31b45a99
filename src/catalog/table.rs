//! A table and its columns.

use tokio_postgres::{Client, types::Type};

/// A column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Its name.
    pub name: String,
    /// Its type without modifiers: `character varying`, `timestamp with time zone`.
    pub type_name: String,
    /// Whether it must not be null.
    pub not_null: bool,
}

/// A table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Its OID.
    pub oid: u32,
    /// `r` for a table, `p` for a partitioned one; anything else is not a table.
    pub kind: String,
    /// The role that owns it.
    pub owner: String,
    /// Whether it is `UNLOGGED`, so that nothing of it is in the WAL.
    pub unlogged: bool,
    /// Its columns in their order.
    pub columns: Vec<Column>,
}

impl Table {
    /// The column called `name`.
    pub fn column(&self, name: &str) -> Option<&Column> {
        self.columns.iter().find(|column| column.name == name)
    }

    /// Whether it is partitioned.
    pub fn is_partitioned(&self) -> bool {
        self.kind == "p"
    }
}

/// Looks a table up, whatever kind of relation bears the name.
pub async fn table(
    client: &Client,
    schema: &str,
    name: &str,
) -> Result<Option<Table>, tokio_postgres::Error> {
    let relation = "select c.oid, c.relkind::text, pg_get_userbyid(c.relowner)::text, c.relpersistence = 'u'
        from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = $1 and c.relname = $2";
    let Some(row) = client.query_typed_opt(relation, &[(&schema, Type::TEXT), (&name, Type::TEXT)]).await?
    else {
        return Ok(None);
    };
    let oid: u32 = row.get(0);
    let columns = "select attname::text, format_type(atttypid, null), attnotnull from pg_attribute
        where attrelid = $1 and attnum > 0 and not attisdropped order by attnum";
    let columns = client.query_typed(columns, &[(&oid, Type::OID)]).await?;
    let columns =
        columns.iter().map(|row| Column { name: row.get(0), type_name: row.get(1), not_null: row.get(2) });
    Ok(Some(Table {
        oid,
        kind: row.get(1),
        owner: row.get(2),
        unlogged: row.get(3),
        columns: columns.collect(),
    }))
}
