//! A publication, as far as it concerns the outbox table.

use tokio_postgres::{Client, types::Type};

/// A publication.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publication {
    /// Whether it publishes inserts.
    pub insert: bool,
    /// Whether it publishes anything else, which costs WAL decoding and is not used.
    pub more: bool,
    /// Whether a partitioned table is published under its own name.
    pub via_root: bool,
    /// Whether the outbox table is in it.
    pub has_table: bool,
    /// The condition that keeps rows of the outbox table out of it.
    pub row_filter: Option<String>,
    /// The columns of the outbox table it is limited to.
    pub column_list: Option<Vec<String>>,
    /// Other tables in it, which are streamed to us and dropped.
    pub others: i64,
}

/// Looks the publication called `name` up and what it does with `schema.table`.
pub async fn publication(
    client: &Client,
    name: &str,
    schema: &str,
    table: &str,
) -> Result<Option<Publication>, tokio_postgres::Error> {
    let statement = "select p.pubinsert, p.pubupdate or p.pubdelete or p.pubtruncate, p.pubviaroot,
            coalesce(p.puballtables or t.mine, false), t.filter, t.columns, coalesce(t.others, 0)
        from pg_publication p left join lateral (
            select bool_or(mine) as mine, count(*) filter (where not mine) as others,
                   max(filter) filter (where mine) as filter,
                   -- A publication without a column list shows all columns here; only a shorter list is one.
                   (array_agg(columns::text) filter (where mine and shorter))[1]::text[] as columns
            from (select t.schemaname = $2 and t.tablename = $3 as mine, t.rowfilter as filter, t.attnames as columns,
                         cardinality(t.attnames) < (select count(*) from pg_attribute a
                             where a.attrelid = format('%I.%I', t.schemaname, t.tablename)::regclass
                               and a.attnum > 0 and not a.attisdropped) as shorter
                  from pg_publication_tables t where t.pubname = p.pubname) as listed
        ) t on true
        where p.pubname = $1";
    let parameters = [(&name as _, Type::TEXT), (&schema as _, Type::TEXT), (&table as _, Type::TEXT)];
    let row = client.query_typed_opt(statement, &parameters).await?;
    Ok(row.map(|row| Publication {
        insert: row.get(0),
        more: row.get(1),
        via_root: row.get(2),
        has_table: row.get(3),
        row_filter: row.get(4),
        column_list: row.get(5),
        others: row.get(6),
    }))
}
