//! The headers column: a JSON object becomes an AMQP field table.
//!
//! | JSON | AMQP field | |
//! |---|---|---|
//! | string | long string `S` | |
//! | integer that fits 64 bits | signed 64-bit `l` | |
//! | other number | double `d` | where a double holds exactly its decimal digits |
//! | | long string `S` | its digits otherwise: no digit is lost, the type is |
//! | `true`, `false` | boolean `t` | |
//! | `null` | void `V` | |
//! | object | field table `F` | of a key that occurs twice the last counts |
//! | array | field array `A` | |
//!
//! Headers stay headers: none becomes a property. `CC` and `BCC` are the broker's own: it closes the channel over one
//! that is no array (RabbitMQ's `rabbit_basic:header_routes`), so what it would refuse is refused here, as this row's
//! fault alone.

use std::collections::BTreeMap;

use lapin::types::{AMQPValue, FieldArray, FieldTable, ShortString};
use serde_json::value::RawValue;

/// Objects and arrays within one another, at most. Brokers and clients parse recursively; nobody nests headers this
/// deep on purpose.
const MAX_DEPTH: usize = 32;

/// Headers the broker reads as further routing keys.
const ROUTED: [&str; 2] = ["CC", "BCC"];

/// A field table and how many bytes it takes on the wire.
#[derive(Debug, Clone, PartialEq)]
pub struct Headers {
    /// The fields.
    pub table: FieldTable,
    /// Their encoded size, length prefix included.
    pub encoded: usize,
}

/// Reads the JSON text of a headers column whose table may take `limit` bytes on the wire.
///
/// # Errors
/// Why AMQP cannot carry it, without its contents.
pub fn parse(json: &[u8], limit: usize) -> Result<Headers, String> {
    // No JSON text shrinks by more than a factor of six (`\u0001` becomes one byte), so what is far too long need not be
    // read at all.
    if json.len() > limit.saturating_mul(6) {
        return Err(format!("headers of {} bytes are larger than AMQP's {limit}", json.len()));
    }
    let json = std::str::from_utf8(json).map_err(|_| "headers are not UTF-8".to_owned())?;
    if !json.trim_start().starts_with('{') {
        return Err("headers are not a JSON object".to_owned());
    }
    let fields: BTreeMap<String, &RawValue> =
        serde_json::from_str(json).map_err(|_| "headers are not valid JSON".to_owned())?;
    let (table, encoded) = table(fields, 1)?;
    for name in ROUTED {
        match table.inner().get(name) {
            None => {}
            Some(AMQPValue::FieldArray(routes))
                if routes.as_slice().iter().all(|route| matches!(route, AMQPValue::LongString(_))) => {}
            Some(_) => return Err(format!("header {name} must be an array of strings")),
        }
    }
    Ok(Headers { table, encoded })
}

fn table(fields: BTreeMap<String, &RawValue>, depth: usize) -> Result<(FieldTable, usize), String> {
    let mut table = FieldTable::default();
    let mut encoded = 4;
    for (name, raw) in fields {
        let length = name.len();
        let name = ShortString::try_new(name)
            .map_err(|_| format!("a header's name is {length} bytes long; AMQP allows 255"))?;
        let (value, size) = value(raw, depth)?;
        encoded += 1 + length + size;
        table.insert(name, value);
    }
    Ok((table, encoded))
}

/// A value and its encoded size, type octet included.
fn value(raw: &RawValue, depth: usize) -> Result<(AMQPValue, usize), String> {
    let text = raw.get();
    let invalid = |_| "headers are not valid JSON".to_owned();
    if depth >= MAX_DEPTH && text.starts_with(['{', '[']) {
        return Err(format!("headers are nested more than {MAX_DEPTH} deep"));
    }
    let (value, size) = match text.as_bytes().first() {
        Some(b'{') => {
            let (table, size) = table(serde_json::from_str(text).map_err(invalid)?, depth + 1)?;
            (AMQPValue::FieldTable(table), size)
        }
        Some(b'[') => {
            let raws: Vec<&RawValue> = serde_json::from_str(text).map_err(invalid)?;
            let mut items = Vec::with_capacity(raws.len());
            let mut size = 4;
            for raw in raws {
                let (item, item_size) = self::value(raw, depth + 1)?;
                size += item_size;
                items.push(item);
            }
            (AMQPValue::FieldArray(FieldArray::from(items)), size)
        }
        Some(b'"') => long_string(serde_json::from_str(text).map_err(invalid)?),
        Some(b't') => (AMQPValue::Boolean(true), 1),
        Some(b'f') => (AMQPValue::Boolean(false), 1),
        Some(b'n') => (AMQPValue::Void, 0),
        _ => number(text),
    };
    Ok((value, 1 + size))
}

fn long_string(text: String) -> (AMQPValue, usize) {
    let size = 4 + text.len();
    (AMQPValue::LongString(text.into()), size)
}

fn number(text: &str) -> (AMQPValue, usize) {
    if let Ok(integer) = text.parse::<i64>() {
        return (AMQPValue::LongLongInt(integer), 8);
    }
    match text.parse::<f64>() {
        // `{:e}` writes the shortest digits that read back as this very double.
        Ok(double) if double.is_finite() && decimal(&format!("{double:e}")) == decimal(text) => {
            (AMQPValue::Double(double), 8)
        }
        _ => long_string(text.to_owned()),
    }
}

/// A decimal number as its significant digits and the power of ten of the last one: equal numbers, equal pairs.
/// `None` where the exponent is beyond anything a double or PostgreSQL's `numeric` knows.
fn decimal(text: &str) -> Option<(String, i64)> {
    let unsigned = text.trim_start_matches('-');
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i64>().ok()?),
        None => (unsigned, 0),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{whole}{fraction}");
    let significant = digits.trim_end_matches('0');
    let dropped = (digits.len() - significant.len()) as i64;
    let power = exponent.checked_sub(fraction.len() as i64)?.checked_add(dropped)?;
    let significant = significant.trim_start_matches('0');
    let power = if significant.is_empty() { 0 } else { power };
    Some((significant.to_owned(), power))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMIT: usize = 131_072;

    fn field(json: &str) -> AMQPValue {
        let headers = parse(format!("{{\"h\": {json}}}").as_bytes(), LIMIT).expect("valid headers");
        headers.table.inner().get("h").cloned().expect("the header")
    }

    fn text(text: &str) -> AMQPValue {
        AMQPValue::LongString(text.into())
    }

    #[test]
    fn each_json_type_has_its_field_type() {
        assert_eq!(field("\"a\\u00e9\\n\""), text("aé\n"));
        assert_eq!(field("-9223372036854775808"), AMQPValue::LongLongInt(i64::MIN));
        assert_eq!(field("true"), AMQPValue::Boolean(true));
        assert_eq!(field("false"), AMQPValue::Boolean(false));
        assert_eq!(field("null"), AMQPValue::Void);
        let AMQPValue::FieldArray(array) = field("[1, \"x\", []]") else { panic!("an array") };
        assert_eq!(array.as_slice()[..2], [AMQPValue::LongLongInt(1), text("x")]);
        let AMQPValue::FieldTable(table) = field("{\"a\": {\"b\": 2}}") else { panic!("a table") };
        assert!(matches!(table.inner().get("a"), Some(AMQPValue::FieldTable(_))));
    }

    #[test]
    fn a_number_is_a_double_only_where_that_holds_its_digits() {
        for (json, double) in
            [("1.5", 1.5), ("1.10", 1.1), ("-0.1", -0.1), ("1e2", 100.0), ("1E400", f64::NAN), ("0.0", 0.0)]
        {
            match field(json) {
                AMQPValue::Double(found) => assert_eq!(found, double, "{json}"),
                found => assert!(double.is_nan() && found == text(json), "{json}: {found:?}"),
            }
        }
        for json in ["9223372036854775808", "0.1234567890123456789", "123456789012345678901234567890"] {
            assert_eq!(field(json), text(json));
        }
    }

    #[test]
    fn what_is_no_object_or_no_json_is_refused_without_its_contents() {
        for json in ["[]", "\"secret\"", "1", "null", "", "{\"secret\": }", "{\"a\": 1} x"] {
            let error = parse(json.as_bytes(), LIMIT).unwrap_err();
            assert!(error.starts_with("headers are not"), "{json}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
        assert!(parse(b"{\"a\": \"\xff\"}", LIMIT).is_err());
    }

    #[test]
    fn carbon_copies_must_be_arrays_of_strings() {
        for name in ROUTED {
            assert!(parse(format!("{{\"{name}\": [\"a\", \"b\"]}}").as_bytes(), LIMIT).is_ok());
            for bad in ["\"a\"", "[1]", "{}", "null"] {
                let error = parse(format!("{{\"{name}\": {bad}}}").as_bytes(), LIMIT).unwrap_err();
                assert!(error.contains(name), "{error}");
            }
        }
        assert!(parse(b"{\"cc\": 1}", LIMIT).is_ok(), "the broker's names are in capitals");
    }

    #[test]
    fn names_may_take_255_bytes() {
        for (name, works) in [("a".repeat(255), true), ("a".repeat(256), false), ("é".repeat(128), false)] {
            assert_eq!(parse(format!("{{\"{name}\": 1}}").as_bytes(), LIMIT).is_ok(), works);
        }
    }

    #[test]
    fn deep_nesting_is_refused() {
        let nested = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        assert!(parse(format!("{{\"h\": {}}}", nested(MAX_DEPTH - 1)).as_bytes(), LIMIT).is_ok());
        for depth in [MAX_DEPTH, 100_000] {
            assert!(parse(format!("{{\"h\": {}}}", nested(depth)).as_bytes(), LIMIT).is_err());
        }
    }

    #[test]
    fn the_encoded_size_is_what_the_protocol_writes() {
        // 4 of length; "a" 2, "S" 1, 4 + 2; "b" 2, "l" 1, 8; "c" 2, "A" 1, 4, "t" 1 + 1, "V" 1.
        let headers = parse(b"{\"a\": \"xy\", \"b\": 1, \"c\": [true, null]}", LIMIT).unwrap();
        assert_eq!(headers.encoded, 4 + (2 + 1 + 6) + (2 + 1 + 8) + (2 + 1 + 4 + 2 + 1));
    }

    #[test]
    fn five_megabytes_are_refused_unread() {
        let json = format!("{{\"a\": \"{}\"}}", "x".repeat(5_000_000));
        assert!(parse(json.as_bytes(), LIMIT).unwrap_err().contains("larger"));
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(json in "\\{[\\[\\]{}\":,0-9eE.+-]{0,60}") {
            let _ = parse(json.as_bytes(), LIMIT);
        }

        #[test]
        fn no_number_loses_a_digit(number in "-?(0|[1-9][0-9]{0,25})(\\.[0-9]{1,25})?") {
            let kept = match field(&number) {
                AMQPValue::LongLongInt(integer) => decimal(&integer.to_string()),
                AMQPValue::Double(double) => decimal(&format!("{double:e}")),
                AMQPValue::LongString(digits) => decimal(std::str::from_utf8(digits.as_bytes()).unwrap()),
                other => panic!("{other:?}"),
            };
            prop_assert_eq!(kept, decimal(&number));
        }
    }
}
