//! The templates of exchange and routing key: text with `{id}`, `{type}`, `{key}` and `{column}` in it.

/// One piece of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text as it stands.
    Text(String),
    /// What stood in braces: `id`, `type`, `key`, or a column's name.
    Placeholder(String),
}

/// Splits a template; `{{` and `}}` stand for the braces themselves.
pub fn parse(template: &str) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    let mut text = String::new();
    let mut chars = template.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '{' | '}' if chars.peek() == Some(&char) => {
                chars.next();
                text.push(char);
            }
            '{' => {
                let mut name = String::new();
                loop {
                    match chars.next() {
                        Some('}') => break,
                        Some('{') | None => {
                            return Err("a `{` is never closed (write `{{` for a brace)".to_owned());
                        }
                        Some(other) => name.push(other),
                    }
                }
                super::names::identifier(&name)
                    .map_err(|problem| format!("the placeholder {{{name}}} {problem}"))?;
                if !text.is_empty() {
                    pieces.push(Piece::Text(std::mem::take(&mut text)));
                }
                pieces.push(Piece::Placeholder(name));
            }
            '}' => return Err("a `}` closes nothing (write `}}` for a brace)".to_owned()),
            other => text.push(other),
        }
    }
    if !text.is_empty() {
        pieces.push(Piece::Text(text));
    }
    Ok(pieces)
}

/// The text of a template without placeholders.
pub fn fixed(pieces: &[Piece]) -> Option<&str> {
    match pieces {
        [] => Some(""),
        [Piece::Text(text)] => Some(text),
        _ => None,
    }
}

/// The columns a template needs beside those that have a role.
pub fn columns(pieces: &[Piece]) -> impl Iterator<Item = &str> {
    pieces.iter().filter_map(|piece| match piece {
        Piece::Placeholder(name) if !matches!(name.as_str(), "id" | "type" | "key") => Some(name.as_str()),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_splits_into_text_and_placeholders() {
        let pieces = parse("orders.{tenant}.{type}").unwrap();
        assert_eq!(
            pieces,
            [
                Piece::Text("orders.".into()),
                Piece::Placeholder("tenant".into()),
                Piece::Text(".".into()),
                Piece::Placeholder("type".into()),
            ]
        );
        assert_eq!(columns(&pieces).collect::<Vec<_>>(), ["tenant"]);
    }

    #[test]
    fn doubled_braces_are_text_and_the_empty_template_is_the_default_exchange() {
        assert_eq!(fixed(&parse("a{{b}}").unwrap()), Some("a{b}"));
        assert_eq!(fixed(&parse("").unwrap()), Some(""));
    }

    #[test]
    fn unbalanced_or_empty_braces_are_refused() {
        for bad in ["{type", "a}", "{}", "{{type}", "{a{b}"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
