//! Indexes, and which of them serves a claim.

use tokio_postgres::{Client, types::Type};

use crate::config::Columns;

/// An index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    /// Its name, in the table's schema.
    pub name: String,
    /// `btree`, mostly.
    pub method: String,
    /// False for what an interrupted `CREATE INDEX CONCURRENTLY` leaves: written to and never read.
    pub valid: bool,
    /// The key columns or expressions, in order.
    pub keys: Vec<String>,
    /// The columns it merely carries.
    pub included: Vec<String>,
    /// The condition of a partial index.
    pub predicate: Option<String>,
}

impl Index {
    /// Whether it finds the rows a claim wants, in the order it wants them, without reading those already done.
    fn serves_claims(&self, columns: &Columns) -> bool {
        let waiting = format!("{} IS NULL", columns.processed_on);
        let untried = format!("{} IS NULL", columns.error);
        // `((a IS NULL) AND (b IS NULL))`, with quotes where a name needs them.
        let plain = |text: &str| text.replace(['(', ')', '"'], "");
        let terms = self.predicate.as_deref().map(plain).unwrap_or_default();
        let terms: Vec<&str> = terms.split(" AND ").collect();
        self.valid
            && self.method == "btree"
            && self.keys.first().is_some_and(|key| plain(key) == columns.occurred_on)
            && terms.contains(&waiting.as_str())
            && terms.iter().all(|term| *term == waiting || *term == untried)
    }
}

/// The index that serves claims, whoever made it.
pub fn claim_index<'a>(indexes: &'a [Index], columns: &Columns) -> Option<&'a Index> {
    indexes.iter().find(|index| index.serves_claims(columns))
}

/// The name of the index `migrate` makes on a table: one a table, since index names are the schema's.
pub fn waiting_index_name(table: &str) -> String {
    const PREFIX: &str = "postrider_waiting_";
    let name = format!("{PREFIX}{table}");
    if name.len() <= 63 {
        return name;
    }
    // Truncation alone could make two tables' indexes one; eight digits of FNV-1a keep them apart.
    let hash =
        table.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let mut end = 63 - 9;
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}_{hash:08x}", &name[..end])
}

/// The indexes of a table.
pub async fn indexes(client: &Client, table: u32) -> Result<Vec<Index>, tokio_postgres::Error> {
    let statement = "select c.relname::text, m.amname::text, i.indisvalid and i.indisready,
            (select array_agg(pg_get_indexdef(i.indexrelid, k, true) order by k)
               from generate_series(1, i.indnkeyatts::int) k),
            (select array_agg(pg_get_indexdef(i.indexrelid, k, true) order by k)
               from generate_series(i.indnkeyatts::int + 1, i.indnatts::int) k),
            pg_get_expr(i.indpred, i.indrelid)
        from pg_index i join pg_class c on c.oid = i.indexrelid join pg_am m on m.oid = c.relam
        where i.indrelid = $1 order by c.relname";
    let rows = client.query_typed(statement, &[(&table, Type::OID)]).await?;
    let indexes = rows.iter().map(|row| Index {
        name: row.get(0),
        method: row.get(1),
        valid: row.get(2),
        keys: row.get(3),
        included: row.get::<_, Option<Vec<String>>>(4).unwrap_or_default(),
        predicate: row.get(5),
    });
    Ok(indexes.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(predicate: Option<&str>) -> Index {
        Index {
            name: "i".into(),
            method: "btree".into(),
            valid: true,
            keys: vec!["occurred_on_utc".into(), "id".into()],
            included: Vec::new(),
            predicate: predicate.map(str::to_owned),
        }
    }

    #[test]
    fn an_index_on_unprocessed_rows_serves_claims_with_or_without_the_error_column() {
        let columns = Columns::default();
        for predicate in [
            "((processed_on_utc IS NULL) AND (error IS NULL))",
            "((error IS NULL) AND (processed_on_utc IS NULL))",
            "(processed_on_utc IS NULL)",
        ] {
            assert!(index(Some(predicate)).serves_claims(&columns), "{predicate}");
        }
    }

    #[test]
    fn an_index_that_is_invalid_whole_or_on_other_rows_does_not() {
        let columns = Columns::default();
        assert!(!index(None).serves_claims(&columns));
        assert!(!index(Some("(processed_on_utc IS NOT NULL)")).serves_claims(&columns));
        assert!(!index(Some("((processed_on_utc IS NULL) AND (tenant = 5))")).serves_claims(&columns));
        assert!(!Index { valid: false, ..index(Some("(processed_on_utc IS NULL)")) }.serves_claims(&columns));
        assert!(
            !Index { keys: vec!["id".into()], ..index(Some("(processed_on_utc IS NULL)")) }
                .serves_claims(&columns)
        );
    }

    #[test]
    fn long_table_names_get_index_names_that_fit_and_differ() {
        let one = waiting_index_name(&"x".repeat(63));
        let other = waiting_index_name(&format!("{}y", "x".repeat(62)));
        assert!(one.len() <= 63 && other.len() <= 63 && one != other);
        assert_eq!(waiting_index_name("outbox_messages"), "postrider_waiting_outbox_messages");
    }
}
