//! Splits the JSON text of a list into its objects while it arrives.

use super::ListError;

/// The maximum size of an object in bytes. API servers store no object of even a tenth of this size.
const LONGEST: usize = 32 << 20;

/// The kind of a part of the list that has been read completely; [`Scanner::text`] returns the part's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// An object of the list
    Item,
    /// The metadata of the list
    Metadata,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Before the list
    #[default]
    Start,
    /// Between the fields of the list
    Fields,
    /// In the name of a field
    Name,
    /// After the name of a field
    Colon,
    /// Before the value of a field
    Before,
    /// In the value of a field
    Value,
    /// Between objects
    Items,
    /// In an object
    Item,
    /// After the list
    End,
}

/// Finds the objects and the metadata of a list, in whatever order they come. Keeps the text of one part at a time.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    state: State,
    name: Vec<u8>,
    text: Vec<u8>,
    is_told: bool,
    depth: u32,
    in_string: bool,
    is_escaped: bool,
}

impl Scanner {
    /// Reads bytes up to the end of a part. Returns how many bytes were used, and the part if its end was reached.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<(usize, Option<Part>), ListError> {
        if std::mem::take(&mut self.is_told) {
            self.text.clear();
        }
        let mut at = 0;
        while at < bytes.len() {
            if matches!(self.state, State::Value | State::Item) {
                let (used, is_whole) = self.value(&bytes[at..]);
                if self.text.len() + used > LONGEST {
                    return Err(ListError::Unreadable(
                        "an object of more than 32 MiB".into(),
                    ));
                }
                self.text.extend_from_slice(&bytes[at..at + used]);
                at += used;
                if is_whole {
                    let part = self.whole();
                    if part.is_some() {
                        self.is_told = true;
                        return Ok((at, part));
                    }
                    self.text.clear();
                }
                continue;
            }
            if self.between(bytes[at])? {
                at += 1;
            }
        }
        Ok((at, None))
    }

    /// Returns the text of the part that was found last, until `feed` is called again.
    pub(super) fn text(&self) -> &[u8] {
        &self.text
    }

    /// Whether the list is complete.
    pub(super) fn is_over(&self) -> bool {
        self.state == State::End
    }

    /// Handles a byte outside of values. Returns false if a value begins with the byte, which then is still to be read.
    fn between(&mut self, byte: u8) -> Result<bool, ListError> {
        if byte.is_ascii_whitespace() && self.state != State::Name {
            return Ok(true);
        }
        self.state = match (self.state, byte) {
            (State::Start, b'{') | (State::Fields, b',') | (State::Items, b']') => State::Fields,
            (State::Fields, b'"') => {
                self.name.clear();
                State::Name
            }
            (State::Fields, b'}') => State::End,
            (State::Name, b'"') => State::Colon,
            (State::Name, _) if self.name.len() < 64 => {
                self.name.push(byte);
                State::Name
            }
            (State::Colon, b':') => State::Before,
            (State::Before, b'[') if self.name == b"items" => State::Items,
            (State::Items, b',') => State::Items,
            (State::Before | State::Items, _) => {
                self.state = if self.state == State::Before {
                    State::Value
                } else {
                    State::Item
                };
                return Ok(false);
            }
            _ => return Err(ListError::Unreadable("it is no list in JSON".into())),
        };
        Ok(true)
    }

    /// Returns how many of the bytes belong to the value, and whether the value ends with them.
    fn value(&mut self, bytes: &[u8]) -> (usize, bool) {
        for (at, byte) in bytes.iter().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.is_escaped => self.is_escaped = false,
                    b'\\' => self.is_escaped = true,
                    b'"' => {
                        self.in_string = false;
                        if self.depth == 0 {
                            return (at + 1, true);
                        }
                    }
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                // The end of a number, or of `true`, `false` or `null`.
                b'}' | b']' | b',' | b' ' | b'\t' | b'\n' | b'\r' if self.depth == 0 => {
                    return (at, true);
                }
                b'}' | b']' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return (at + 1, true);
                    }
                }
                _ => {}
            }
        }
        (bytes.len(), false)
    }

    fn whole(&mut self) -> Option<Part> {
        if self.state == State::Item {
            self.state = State::Items;
            return Some(Part::Item);
        }
        self.state = State::Fields;
        (self.name == b"metadata").then_some(Part::Metadata)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    /// Returns the objects and the metadata of a list that arrives in pieces of `piece` bytes.
    fn parts(text: &str, piece: usize) -> Result<(Vec<Value>, Vec<Value>), ListError> {
        let mut scanner = Scanner::default();
        let (mut items, mut metadata) = (Vec::new(), Vec::new());
        for mut piece in text.as_bytes().chunks(piece) {
            while !piece.is_empty() {
                let (used, part) = scanner.feed(piece)?;
                piece = &piece[used..];
                let into = match part {
                    Some(Part::Item) => &mut items,
                    Some(Part::Metadata) => &mut metadata,
                    None => continue,
                };
                into.push(serde_json::from_slice(scanner.text()).unwrap());
            }
        }
        if !scanner.is_over() {
            return Err(ListError::Unreadable("it ends early".into()));
        }
        Ok((items, metadata))
    }

    fn anything() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            "[\\PC\"\\\\{}\\[\\],: \n]{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 12, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::hash_map("[a-z\"\\\\]{0,4}", inner, 0..4)
                    .prop_map(|it| Value::Object(it.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn objects_are_found_in_whatever_pieces_they_come(
            items in prop::collection::vec(anything(), 0..5),
            metadata in anything(),
            (piece, spaced, first) in (1usize..40, any::<bool>(), any::<bool>()),
        ) {
            let text = |value: &Value| if spaced {
                serde_json::to_string_pretty(value).unwrap()
            } else {
                value.to_string()
            };
            let (meta, all) = (text(&metadata), text(&Value::from(items.clone())));
            let list = if first {
                format!("{{\"kind\": \"NodeList\", \"n\":12,\"metadata\":{meta},\"items\":{all}}}\n")
            } else {
                format!(" {{\"items\" : {all} ,\"kind\":null,\"metadata\":{meta}}}")
            };
            let (found, told) = parts(&list, piece).unwrap();
            prop_assert_eq!((found, told), (items, vec![metadata]));
        }
    }

    #[test]
    fn a_list_without_objects_may_say_null() {
        let (items, metadata) = parts("{\"items\":null,\"metadata\":{}}", 3).unwrap();
        assert_eq!((items, metadata), (vec![], vec![json!({})]));
    }

    #[test]
    fn what_is_no_list_or_ends_early_is_an_error() {
        for text in [
            "[]",
            "<html>",
            "{\"items\":[{},{\"a\":1}",
            "{\"items\" [1]}",
            "{}}",
        ] {
            assert!(parts(text, 4).is_err(), "{text}");
        }
    }
}
