//! Values from [`Doc`](super::Doc), with Go's rules for types.
//!
//! Two kinds of fault: a value of the wrong type is noted, the first one wins, and reading goes on;
//! a text that its type refuses (an address, a CIDR) ends it at once and wins over what was noted.

use super::{Item, Kind};
use crate::cni::golang::{self, IpNet};
use crate::ipam::Addr;

/// Why reading ended early.
#[derive(Debug)]
pub(in crate::cni) enum Stop {
    /// A value of the wrong type, inside a type that reads itself
    Type(Mismatch),
    /// A text that its type refuses
    Text(String),
}

/// A value of the wrong type.
#[derive(Debug)]
pub(in crate::cni) struct Mismatch {
    value: String,
    into: &'static str,
    /// The struct and the path of the field; `None` outside of any
    field: Option<(&'static str, String)>,
}

impl Mismatch {
    fn text(&self) -> String {
        let Self { value, into, field } = self;
        match field {
            Some((of, path)) if !(of.is_empty() && path.is_empty()) => format!(
                "json: cannot unmarshal {value} into Go struct field {of}.{path} of type {into}"
            ),
            _ => format!("json: cannot unmarshal {value} into Go value of type {into}"),
        }
    }
}

/// Reads values into variables and remembers where it is.
#[derive(Default)]
pub(in crate::cni) struct Decoder {
    saved: Option<Mismatch>,
    of: Option<&'static str>,
    path: Vec<&'static str>,
}

type Done = Result<(), Stop>;

impl Decoder {
    /// Runs `read` on a fresh decoder; the error is Go's text.
    pub(in crate::cni) fn run(read: impl FnOnce(&mut Self) -> Done) -> Result<(), String> {
        let mut decoder = Self::default();
        match (read(&mut decoder), decoder.saved) {
            (Err(Stop::Text(text)), _) => Err(text),
            (Err(Stop::Type(mismatch)), _) | (Ok(()), Some(mismatch)) => Err(mismatch.text()),
            (Ok(()), None) => Ok(()),
        }
    }

    fn here(&self, value: String, into: &'static str) -> Mismatch {
        let field = self.of.map(|of| (of, self.path.join(".")));
        Mismatch { value, into, field }
    }

    fn note(&mut self, value: String, into: &'static str) {
        let mismatch = self.here(value, into);
        self.saved.get_or_insert(mismatch);
    }

    /// Notes that `item` is not what `into` takes.
    fn wrong(&mut self, item: Item<'_>, into: &'static str) {
        self.note(what(item), into);
    }

    /// Each key of a struct: its name in lower case and its value. `of` is the struct's own name,
    /// `into` its type's full one. Null is nothing.
    pub(in crate::cni) fn fields(
        &mut self,
        item: Item<'_>,
        of: &'static str,
        into: &'static str,
        mut field: impl FnMut(&mut Self, &str, Item<'_>) -> Done,
    ) -> Done {
        match item.kind() {
            Kind::Null => {}
            Kind::Object => {
                let outer = self.of.replace(of);
                for (key, value) in item.members() {
                    field(self, &key, value)?;
                }
                self.of = outer;
            }
            _ => self.wrong(item, into),
        }
        Ok(())
    }

    /// Reads inside of a field, whose name is `path` (with that of an embedded struct before it).
    pub(in crate::cni) fn at(
        &mut self,
        path: &'static str,
        read: impl FnOnce(&mut Self) -> Done,
    ) -> Done {
        self.path.push(path);
        read(self)?;
        self.path.pop();
        Ok(())
    }

    /// A list; null empties it, and a repeated one is read over what is there.
    pub(in crate::cni) fn list<T: Default>(
        &mut self,
        item: Item<'_>,
        into: &'static str,
        list: &mut Vec<T>,
        mut element: impl FnMut(&mut Self, Item<'_>, &mut T) -> Done,
    ) -> Done {
        match item.kind() {
            Kind::Null => list.clear(),
            Kind::Array => {
                let mut length = 0;
                for (at, item) in item.elements().enumerate() {
                    if at >= list.len() {
                        list.push(T::default());
                    }
                    length = at + 1;
                    element(self, item, &mut list[at])?;
                }
                list.truncate(length);
            }
            _ => self.wrong(item, into),
        }
        Ok(())
    }

    /// A string; null leaves it.
    pub(in crate::cni) fn string(&mut self, item: Item<'_>, into: &mut String) {
        match item.string() {
            Some(text) => *into = text,
            None if item.kind() == Kind::Null => {}
            None => self.wrong(item, "string"),
        }
    }

    /// A whole number; null leaves it.
    pub(in crate::cni) fn int(&mut self, item: Item<'_>, into: &mut i64) {
        match item.kind() {
            Kind::Null => {}
            Kind::Number => {
                let raw = golang::text(item.raw());
                match raw.parse() {
                    Ok(value) => *into = value,
                    Err(_) => self.note(format!("number {raw}"), "int"),
                }
            }
            _ => self.wrong(item, "int"),
        }
    }

    /// A text that knows itself what it takes. Null clears it, if it is `nullable`.
    pub(in crate::cni) fn text<T>(
        &mut self,
        item: Item<'_>,
        into: &'static str,
        value: &mut Option<T>,
        read: impl FnOnce(&str) -> Result<Option<T>, String>,
    ) -> Done {
        match item.string() {
            Some(text) => *value = read(&text).map_err(Stop::Text)?,
            None if item.kind() == Kind::Null => *value = None,
            None => self.wrong(item, into),
        }
        Ok(())
    }

    /// An address; an empty text and null are none.
    pub(in crate::cni) fn ip(&mut self, item: Item<'_>, value: &mut Option<Addr>) -> Done {
        self.text(item, "net.IP", value, |text| {
            if text.is_empty() {
                return Ok(None);
            }
            let ip = golang::parse_ip(text);
            ip.map(Some)
                .ok_or_else(|| format!("invalid IP address: {text}"))
        })
    }

    /// An address with its prefix length, of a type that reads itself: null is an empty text to it,
    /// and another type ends the reading.
    pub(in crate::cni) fn cidr(&mut self, item: Item<'_>, value: &mut Option<IpNet>) -> Done {
        let text = match item.string() {
            Some(text) => text,
            None if item.kind() == Kind::Null => String::new(),
            None => return Err(Stop::Type(self.here(what(item), "string"))),
        };
        let net = IpNet::parse(&text);
        let net = net.ok_or_else(|| Stop::Text(format!("invalid CIDR address: {text}")))?;
        *value = Some(net);
        Ok(())
    }

    /// Reads a struct of a type that reads itself: faults of type end the reading, and name the
    /// struct that it is a field of.
    pub(in crate::cni) fn whole(&mut self, read: impl FnOnce(&mut Self) -> Done) -> Done {
        let before = self.saved.take();
        let of = self.of;
        let done = read(self);
        let inner = std::mem::replace(&mut self.saved, before);
        let outer = |mut mismatch: Mismatch| {
            if let (Some(of), Some(field)) = (of, mismatch.field.as_mut()) {
                field.0 = of;
            }
            Stop::Type(mismatch)
        };
        match (done, inner) {
            (Err(Stop::Type(mismatch)), _) | (Ok(()), Some(mismatch)) => Err(outer(mismatch)),
            (done, _) => done,
        }
    }
}

/// A value as an error names it.
fn what(item: Item<'_>) -> String {
    match item.kind() {
        Kind::Null => "null",
        Kind::Bool => "bool",
        Kind::Number => "number",
        Kind::String => "string",
        Kind::Array => "array",
        Kind::Object => "object",
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::Doc;
    use super::*;

    fn read(text: &str) -> Result<(String, Vec<i64>, Option<Addr>), String> {
        let doc = Doc::parse(text.as_bytes()).unwrap();
        let (mut name, mut numbers, mut ip) = (String::new(), Vec::new(), None);
        Decoder::run(|d| {
            d.fields(doc.root(), "Net", "a.Net", |d, key, item| match key {
                "name" => d.at("name", |d| {
                    d.string(item, &mut name);
                    Ok(())
                }),
                "numbers" => d.at("numbers", |d| {
                    d.list(item, "[]int", &mut numbers, |d, item, into| {
                        d.int(item, into);
                        Ok(())
                    })
                }),
                "ip" => d.at("ip", |d| d.ip(item, &mut ip)),
                _ => Ok(()),
            })
        })?;
        Ok((name, numbers, ip))
    }

    #[test]
    fn the_first_wrong_type_is_told_and_a_refused_text_wins_over_it() {
        assert_eq!(
            read(r#"{"name": 1, "NUMBERS": {}}"#).unwrap_err(),
            "json: cannot unmarshal number into Go struct field Net.name of type string"
        );
        assert_eq!(
            read(r#"{"numbers": [1, 1.5]}"#).unwrap_err(),
            "json: cannot unmarshal number 1.5 into Go struct field Net.numbers of type int"
        );
        assert_eq!(
            read("[]").unwrap_err(),
            "json: cannot unmarshal array into Go value of type a.Net"
        );
        assert_eq!(
            read(r#"{"name": 1, "ip": "x"}"#).unwrap_err(),
            "invalid IP address: x"
        );
    }

    #[test]
    fn repeated_keys_are_read_over_each_other_and_null_is_nothing() {
        let text =
            r#"{"name": "a", "name": null, "numbers": [1, 2, 3], "numbers": [null, 5], "ip": ""}"#;
        assert_eq!(read(text), Ok(("a".to_owned(), vec![1, 5], None)));
        assert_eq!(read("null"), Ok((String::new(), vec![], None)));
    }
}
