//! Templates of exchange and routing key, filled in from a row.

use lapin::types::ShortString;

use crate::{
    envelope::Row,
    settings::{OutboxSettings, Part, Template},
};

/// A template with what filling it in needs.
#[derive(Debug)]
pub struct Address {
    /// What it makes, for messages: `exchange` or `routing key`.
    what: &'static str,
    template: Template,
    /// Its text where it has no placeholder: by far the most common exchange.
    fixed: Option<ShortString>,
    /// The names of the columns it may use.
    columns: Vec<String>,
}

impl Address {
    /// The address that `template` makes.
    pub fn new(what: &'static str, template: &Template, outbox: &OutboxSettings) -> Self {
        Self {
            what,
            template: template.clone(),
            fixed: template.fixed().and_then(|text| ShortString::try_new(text).ok()),
            columns: outbox.template_columns.clone(),
        }
    }

    /// The address of `row`.
    ///
    /// # Errors
    /// Why there is none, without the row's contents.
    pub fn of(&self, row: &Row) -> Result<ShortString, String> {
        if let Some(fixed) = &self.fixed {
            return Ok(fixed.clone());
        }
        let mut address = String::new();
        for part in &self.template.0 {
            let (name, value) = match part {
                Part::Text(text) => {
                    address.push_str(text);
                    continue;
                }
                Part::Id => ("id", Some(&row.id)),
                Part::Type => ("type", Some(&row.kind)),
                Part::Key => ("key", row.key.as_ref()),
                Part::Column(index) => (
                    self.columns.get(*index).map_or("column", String::as_str),
                    row.columns.get(*index).and_then(Option::as_ref),
                ),
            };
            let Some(value) = value else {
                return Err(format!("the {} needs {{{name}}}, which is null", self.what));
            };
            let value = std::str::from_utf8(value).map_err(|_| format!("{{{name}}} is not UTF-8"))?;
            address.push_str(value);
        }
        let length = address.len();
        ShortString::try_new(address).map_err(|_| too_long(self.what, length))
    }
}

/// What is said of a short string that is none.
pub(super) fn too_long(what: &str, length: usize) -> String {
    format!("the {what} is {length} bytes long; AMQP allows 255")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::testing::outbox;
    use bytes::Bytes;

    fn address(parts: Vec<Part>) -> Address {
        let outbox = OutboxSettings { template_columns: vec!["tenant".to_owned()], ..outbox() };
        Address::new("routing key", &Template(parts), &outbox)
    }

    fn row() -> Row {
        Row {
            id: Bytes::from_static(b"5b"),
            kind: Bytes::from_static(b"placed"),
            columns: Box::new([Some(Bytes::from_static(b"acme"))]),
            ..Row::default()
        }
    }

    #[test]
    fn placeholders_are_filled_in_from_the_row() {
        let parts = vec![Part::Text("orders.".into()), Part::Column(0), Part::Text(".".into()), Part::Type];
        assert_eq!(address(parts).of(&row()).unwrap().as_str(), "orders.acme.placed");
        assert_eq!(address(vec![Part::Id]).of(&row()).unwrap().as_str(), "5b");
        assert_eq!(address(vec![Part::Text("fixed".into())]).of(&row()).unwrap().as_str(), "fixed");
        assert_eq!(address(vec![]).of(&row()).unwrap().as_str(), "");
    }

    #[test]
    fn a_placeholder_without_a_value_is_named() {
        let mut row = row();
        row.columns = Box::new([None]);
        assert_eq!(
            address(vec![Part::Key]).of(&row).unwrap_err(),
            "the routing key needs {key}, which is null"
        );
        assert!(address(vec![Part::Column(0)]).of(&row).unwrap_err().contains("{tenant}"));
    }

    #[test]
    fn an_address_may_take_255_bytes_whatever_its_characters() {
        for (kind, works) in [
            ("a".repeat(255), true),
            ("a".repeat(256), false),
            ("é".repeat(127), true),
            ("é".repeat(128), false),
        ] {
            let row = Row { kind: Bytes::from(kind), ..row() };
            assert_eq!(address(vec![Part::Type]).of(&row).is_ok(), works);
        }
    }
}
