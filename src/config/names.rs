//! What may name an object in PostgreSQL.

/// PostgreSQL silently truncates a longer name (`NAMEDATALEN` − 1), which would then name another object.
const MAX_BYTES: usize = 63;

/// Whether `name` can be an identifier; the error continues a sentence that names it.
pub fn identifier(name: &str) -> Result<(), String> {
    if name.is_empty() {
        Err("is empty, allowed: a name of 1 to 63 bytes".to_owned())
    } else if name.contains('\0') {
        Err("holds a NUL byte, allowed: a name of 1 to 63 bytes without it".to_owned())
    } else if name.len() > MAX_BYTES {
        Err(format!("is {} bytes long, allowed: 1 to {MAX_BYTES}", name.len()))
    } else {
        Ok(())
    }
}

/// Splits `table` or `schema.table`; a bare name is in `public`, whatever the search path.
pub fn table(name: &str) -> Result<(&str, &str), String> {
    let (schema, table) = name.split_once('.').unwrap_or((super::defaults::SCHEMA, name));
    if table.contains('.') {
        return Err("has more than one dot, allowed: table or schema.table".to_owned());
    }
    identifier(schema).and_then(|()| identifier(table))?;
    Ok((schema, table))
}

/// Whether PostgreSQL takes `name` for a replication slot.
pub fn slot(name: &str) -> Result<(), String> {
    identifier(name)?;
    match name.chars().find(|char| !matches!(char, 'a'..='z' | '0'..='9' | '_')) {
        None => Ok(()),
        Some(char) => Err(format!("holds {char:?}, allowed: lower case letters, digits and underscore")),
    }
}

/// Whether `name` can be asked for when streaming: the option is a list, so separators are out.
pub fn publication(name: &str) -> Result<(), String> {
    identifier(name)?;
    match name.chars().find(|char| *char == ',' || *char == '"' || char.is_whitespace()) {
        None => Ok(()),
        Some(char) => Err(format!("holds {char:?}, allowed: a name without commas, quotes and spaces")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_table_is_in_public() {
        assert_eq!(table("outbox"), Ok(("public", "outbox")));
        assert_eq!(table("sales.outbox"), Ok(("sales", "outbox")));
    }

    #[test]
    fn names_postgresql_would_refuse_or_truncate_are_refused() {
        let long = "x".repeat(64);
        for bad in ["", "a.", ".a", "a.b.c", "a\0b", long.as_str()] {
            assert!(table(bad).is_err(), "{bad:?}");
        }
        assert!(slot("Postrider").is_err() && slot("post_rider2").is_ok());
        assert!(publication("a,b").is_err() && publication("Orders").is_ok());
    }
}
