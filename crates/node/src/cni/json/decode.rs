//! Values into variables, as Go reads them.
//!
//! Members are read in their order over what is there, so the last of several equal keys counts and
//! objects merge. A value of the wrong type does not end the reading, the first of them is the error;
//! a text that its type refuses (an address, a CIDR) does, and is the error then.

use std::fmt;

use super::Value;
use crate::cni::golang::{self, IpNet};
use cadastre_core::Addr;

/// Why a value could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cni) enum Fault {
    /// A value of the wrong type
    Type {
        /// Where it stands, as it is written
        path: String,
        /// What has to stand there
        wanted: &'static str,
    },
    /// A text that its type refuses, in host-local's words
    Text(String),
}

type Done = Result<(), Fault>;

impl Fault {
    fn wanted(wanted: &'static str) -> Self {
        let path = String::new();
        Self::Type { path, wanted }
    }

    /// The same seen from outside of a key or an element.
    pub(in crate::cni) fn inside(self, outer: &str) -> Self {
        match self {
            Self::Type { path, wanted } => {
                let dot = if path.is_empty() || path.starts_with('[') {
                    ""
                } else {
                    "."
                };
                let path = format!("{outer}{dot}{path}");
                Self::Type { path, wanted }
            }
            text @ Self::Text(_) => text,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Type { path, wanted } if path.is_empty() => {
                write!(f, "the network config is no {wanted}: write one")
            }
            Self::Type { path, wanted } => write!(
                f,
                "{path} of the network config is no {wanted}: write one, or leave it out"
            ),
            Self::Text(text) => f.write_str(text),
        }
    }
}

/// Reads one after the other: the first wrong type, or the text that ended it.
fn all(read: impl Iterator<Item = Done>) -> Done {
    let mut done = Ok(());
    for one in read {
        match one {
            Err(Fault::Text(_)) => return one,
            one => done = done.and(one),
        }
    }
    done
}

/// Each key of an object, in lower case, and its value. Null is nothing.
pub(in crate::cni) fn fields(value: &Value, mut field: impl FnMut(&str, &Value) -> Done) -> Done {
    match value {
        Value::Null => Ok(()),
        Value::Object(members) => all(members.iter().map(|(key, value)| {
            field(&golang::fold(key), value).map_err(|fault| fault.inside(key))
        })),
        _ => Err(Fault::wanted("object")),
    }
}

/// A list, read over what is there; null empties it.
pub(in crate::cni) fn list<T: Default>(
    value: &Value,
    list: &mut Vec<T>,
    mut element: impl FnMut(&Value, &mut T) -> Done,
) -> Done {
    match value {
        Value::Null => list.clear(),
        Value::Array(items) => {
            list.resize_with(items.len(), T::default);
            let items = items.iter().zip(list).enumerate();
            return all(items.map(|(at, (item, into))| {
                element(item, into).map_err(|fault| fault.inside(&format!("[{at}]")))
            }));
        }
        _ => return Err(Fault::wanted("list")),
    }
    Ok(())
}

/// A string; null leaves it.
pub(in crate::cni) fn string(value: &Value, into: &mut String) -> Done {
    match value {
        Value::Null => {}
        Value::String(text) => into.clone_from(text),
        _ => return Err(Fault::wanted("string")),
    }
    Ok(())
}

/// A whole number of 64 bits; null leaves it.
pub(in crate::cni) fn int(value: &Value, into: &mut i64) -> Done {
    let wrong = || Fault::wanted("whole number of 64 bits");
    match value {
        Value::Null => {}
        Value::Int(number) => *into = i64::try_from(*number).map_err(|_| wrong())?,
        _ => return Err(wrong()),
    }
    Ok(())
}

/// A text that knows itself what it takes; null clears it.
pub(in crate::cni) fn text<T>(
    value: &Value,
    into: &mut Option<T>,
    read: impl FnOnce(&str) -> Result<Option<T>, String>,
) -> Done {
    *into = match value {
        Value::Null => None,
        Value::String(text) => read(text).map_err(Fault::Text)?,
        _ => return Err(Fault::wanted("string")),
    };
    Ok(())
}

/// An address; an empty text and null are none.
pub(in crate::cni) fn ip(value: &Value, into: &mut Option<Addr>) -> Done {
    text(value, into, |text| {
        if text.is_empty() {
            return Ok(None);
        }
        let ip = golang::parse_ip(text);
        ip.map(Some)
            .ok_or_else(|| format!("invalid IP address: {text}"))
    })
}

/// An address with its prefix length. Null is an empty text, and so an error.
pub(in crate::cni) fn cidr(value: &Value, into: &mut Option<IpNet>) -> Done {
    let empty = Value::String(String::new());
    let value = if *value == Value::Null { &empty } else { value };
    text(value, into, |text| {
        let net = IpNet::parse(text);
        net.map(Some)
            .ok_or_else(|| format!("invalid CIDR address: {text}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<(String, Vec<i64>, Option<Addr>), String> {
        let value = Value::parse(text.as_bytes()).unwrap();
        let (mut name, mut numbers, mut address) = (String::new(), Vec::new(), None);
        let done = fields(&value, |key, value| match key {
            "name" => string(value, &mut name),
            "numbers" => list(value, &mut numbers, int),
            "ip" => ip(value, &mut address),
            _ => Ok(()),
        });
        done.map_err(|fault| fault.to_string())?;
        Ok((name, numbers, address))
    }

    #[test]
    fn the_first_wrong_type_is_told_and_a_refused_text_wins_over_it() {
        for (text, says) in [
            (
                r#"{"Name": 1, "NUMBERS": {}}"#,
                "Name of the network config is no string",
            ),
            (
                r#"{"numbers": [1, 1.5]}"#,
                "numbers[1] of the network config is no whole number",
            ),
            (
                r#"{"numbers": [9223372036854775808]}"#,
                "numbers[0] of the network config is no whole",
            ),
            ("[]", "the network config is no object"),
            (r#"{"name": 1, "ip": "x"}"#, "invalid IP address: x"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.starts_with(says), "{error}");
        }
    }

    #[test]
    fn repeated_keys_are_read_over_each_other_and_null_is_nothing() {
        let text =
            r#"{"name": "a", "NAME": null, "numbers": [1, 2, 3], "numbers": [null, 5], "ip": ""}"#;
        assert_eq!(read(text), Ok(("a".to_owned(), vec![1, 5], None)));
        assert_eq!(read("null"), Ok((String::new(), vec![], None)));
    }
}
