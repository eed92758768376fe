//! JSON with what callers can see of Go in it.
//!
//! A network configuration is read by every plugin of a chain, the others in Go: keys without regard
//! to case, unknown keys, repeated keys, `null` for any value. So a [`Value`] keeps all members of an
//! object in their order and under the keys that are written, and `decode` reads them one over the
//! other. Bytes that are no UTF-8 become U+FFFD.
//!
//! The text itself is serde_json's business. It refuses three things that Go takes: half of a
//! surrogate pair, values more than 127 deep, and numbers beyond floating point.

mod decode;

pub(super) use decode::{Fault, cidr, fields, int, ip, list, string, text};

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter};

use super::golang;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Null,
    Bool(bool),
    /// A number written without fraction and exponent
    Int(i128),
    Float(f64),
    String(String),
    Array(Vec<Value>),
    Object(Vec<(String, Value)>),
}

impl Value {
    /// Reads one value and nothing behind it; the error says what is wrong, and where.
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        let text = zeros(golang::text(text));
        serde_json::from_str(&text).map_err(|error| error.to_string())
    }

    /// An object of keys in their order.
    pub(super) fn object(members: impl IntoIterator<Item = (&'static str, Self)>) -> Self {
        let members = members.into_iter();
        Self::Object(members.map(|(key, it)| (key.to_owned(), it)).collect())
    }

    /// A list of strings.
    pub(super) fn strings<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        let texts = texts.into_iter();
        Self::Array(texts.map(|text| Self::String(text.to_owned())).collect())
    }

    /// The value of an object's key, which is given in lower case; the last one of several. `None`
    /// for null.
    pub(super) fn get(&self, name: &str) -> Option<&Self> {
        let Self::Object(members) = self else {
            return None;
        };
        let (_, found) = members.iter().rfind(|(key, _)| golang::fold(key) == name)?;
        (*found != Self::Null).then_some(found)
    }

    /// The string that it is.
    pub(super) fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// The elements of the list that it is.
    pub(super) fn as_array(&self) -> Option<&[Self]> {
        match self {
            Self::Array(items) => Some(items),
            _ => None,
        }
    }

    /// The same with the keys of every object in their order by bytes.
    pub(super) fn sorted(self) -> Self {
        match self {
            Self::Array(items) => Self::Array(items.into_iter().map(Self::sorted).collect()),
            Self::Object(members) => {
                let members = members.into_iter().map(|(key, it)| (key, it.sorted()));
                let mut members: Vec<_> = members.collect();
                members.sort_by(|(one, _), (other, _)| one.cmp(other));
                Self::Object(members)
            }
            other => other,
        }
    }

    /// Over several lines, by four spaces.
    pub(super) fn pretty(&self) -> String {
        self.write(PrettyFormatter::with_indent(b"    "))
    }

    /// On one line, without spaces.
    pub(super) fn line(&self) -> String {
        self.write(CompactFormatter)
    }

    fn write(&self, formatter: impl Formatter) -> String {
        let mut out = Vec::new();
        let mut to = serde_json::Serializer::with_formatter(&mut out, formatter);
        // Into memory, and with strings for keys: there is nothing that could fail.
        let _ = self.serialize(&mut to);
        golang::escape_html(&golang::text(&out))
    }
}

/// Writes the whole number `-0` without its sign: Go reads it as the integer that it is, and serde_json
/// as a float, as which it is none.
fn zeros(text: String) -> String {
    if !text.contains("-0") {
        return text;
    }
    let mut out = String::with_capacity(text.len());
    let (mut inside, mut escaped) = (false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = inside,
            '"' => inside = !inside,
            '-' if !inside => {
                let mut next = text[at + 1..].bytes();
                let is_zero = next.next() == Some(b'0');
                let more = next.next().is_some_and(|it| b"0123456789.eE".contains(&it));
                let before = text[..at].bytes().next_back();
                let inner = |it: u8| it.is_ascii_alphanumeric() || b"+-.".contains(&it);
                let begins = !before.is_some_and(inner);
                if is_zero && !more && begins {
                    continue;
                }
            }
            _ => {}
        }
        out.push(c);
    }
    out
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => to.serialize_unit(),
            Self::Bool(value) => to.serialize_bool(*value),
            Self::Int(value) => to.serialize_i128(*value),
            Self::Float(value) => to.serialize_f64(*value),
            Self::String(text) => to.serialize_str(text),
            Self::Array(items) => to.collect_seq(items),
            Self::Object(members) => to.collect_map(members.iter().map(|(key, it)| (key, it))),
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Any)
    }
}

struct Any;

impl<'de> Visitor<'de> for Any {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Int(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Int(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Float(value))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::String(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = from.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = from.next_entry()? {
            members.push(member);
        }
        Ok(Value::Object(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Value {
        Value::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn keys_are_found_without_regard_to_case_and_the_last_one_counts() {
        let value = parse(r#"{"A": 1, "\u0061": [true, {"x": null}], "b": "c", "\u017fub": 3}"#);
        let a = value.get("a").unwrap();
        assert_eq!(a.as_array().unwrap().len(), 2);
        assert_eq!(a.as_array().unwrap()[1].get("x"), None, "null is nothing");
        assert_eq!(value.get("b").unwrap().as_str(), Some("c"));
        assert_eq!(value.get("sub"), Some(&Value::Int(3)));
        assert_eq!(
            (a.get("x"), a.as_str(), value.as_array()),
            (None, None, None)
        );
        let (first, second) = (parse(r#"{"a":1,"a":null}"#), parse(r#"{"a":null,"a":1}"#));
        assert_eq!(
            (first.get("a"), second.get("a")),
            (None, Some(&Value::Int(1)))
        );
    }

    #[test]
    fn a_whole_zero_has_no_sign() {
        for (text, value) in [
            ("-0", Value::Int(0)),
            (" [-0 ]", Value::Array(vec![Value::Int(0)])),
            ("-0.0", Value::Float(-0.0)),
            ("-0e1", Value::Float(-0.0)),
            (r#""a\\\"-0""#, Value::String("a\\\"-0".to_owned())),
        ] {
            assert_eq!(parse(text), value, "{text}");
        }
        for text in [
            "-01", "--0", "1-0", "1.-0", "1e+-0", "1e-0-0", "-", "[-0", "\"-0",
        ] {
            assert!(Value::parse(text.as_bytes()).is_err(), "{text}");
        }
        assert_eq!(parse("1e-0"), Value::Float(1.0));
    }

    #[test]
    fn bytes_that_are_no_utf8_are_replaced_one_by_one() {
        let value = Value::parse(b"\"a\xe2\x82b\xff\"").unwrap();
        assert_eq!(value.as_str(), Some("a\u{fffd}\u{fffd}b\u{fffd}"));
    }

    #[test]
    fn what_cannot_be_read_is_told_with_its_place() {
        let deep = "[".repeat(1_000_000);
        for (text, says) in [
            ("", "EOF while parsing a value at line 1 column 0"),
            ("{}\nx", "trailing characters at line 2 column 1"),
            (r#""\ud83d""#, "unexpected end of hex escape"),
            (r#""\ude00""#, "lone leading surrogate"),
            ("1e400", "number out of range"),
            (&deep, "recursion limit exceeded at line 1 column 128"),
        ] {
            let error = Value::parse(text.as_bytes()).unwrap_err();
            assert!(error.starts_with(says), "{error}");
        }
    }

    #[test]
    fn objects_are_indented_by_four_spaces_and_empty_ones_stay_on_their_line() {
        let value = Value::object([
            ("b", Value::Array(vec![Value::Int(1), Value::Null])),
            ("a", Value::object([])),
            ("c", Value::strings([])),
        ]);
        assert_eq!(
            value.pretty(),
            "{\n    \"b\": [\n        1,\n        null\n    ],\n    \"a\": {},\n    \"c\": []\n}"
        );
        assert_eq!(value.sorted().line(), r#"{"a":{},"b":[1,null],"c":[]}"#);
    }

    #[test]
    fn what_html_would_take_amiss_is_escaped() {
        let text = Value::String("<&>\u{2028}\"\\\n\u{1}\u{8}é\u{7f}".to_owned());
        assert_eq!(
            text.line(),
            "\"\\u003c\\u0026\\u003e\\u2028\\\"\\\\\\n\\u0001\\bé\u{7f}\""
        );
    }
}
