//! Splits the JSON text of a list into its objects while it arrives.

use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Deserializer;

use super::{ListError, Part};
use crate::encoding::LONGEST;

#[derive(Debug, Default)]
enum State {
    /// The scanner has not reached the list yet
    #[default]
    Start,
    /// The scanner is between two fields of the list
    Fields,
    /// The scanner has read this name of a field
    Name(String),
    /// The scanner has reached the value of the field with this name
    Value(String),
    /// The scanner is between two objects of the list
    Items,
    /// The scanner has read the whole list
    End,
}

/// Parses the objects and the metadata of a list, in any order. Keeps only the text that has not been parsed yet.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    state: State,
    text: Vec<u8>,
    /// How many bytes at the beginning of `text` have been parsed
    parsed: usize,
    /// After an attempt to parse an incomplete value, the scanner makes the next attempt only when `text` has this many
    /// bytes. The number doubles with each attempt. So the cost of a large object does not depend on the size of the
    /// pieces in which the object arrives
    needed: usize,
}

impl Scanner {
    /// Adds text that has arrived. An empty text means that the end of the input is reached.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<(), ListError> {
        self.text.drain(..std::mem::take(&mut self.parsed));
        self.text.extend_from_slice(bytes);
        if bytes.is_empty() {
            self.needed = 0;
        }
        if self.text.len() > LONGEST {
            return Err(unreadable("an object of more than 32 MiB"));
        }
        Ok(())
    }

    /// Returns the next part; `None` if more text is needed.
    pub(super) fn next<K: DeserializeOwned, M: DeserializeOwned>(
        &mut self,
    ) -> Result<Option<Part<K, M>>, ListError> {
        loop {
            let rest = &self.text[self.parsed..];
            self.parsed += rest.len() - rest.trim_ascii_start().len();
            let Some(byte) = self.text.get(self.parsed) else {
                return Ok(None);
            };
            self.state = match (&self.state, byte) {
                (State::Start, b'{') | (State::Fields, b',') | (State::Items, b']') => {
                    State::Fields
                }
                (State::Fields, b'}') => State::End,
                (State::Name(name), b':') => State::Value(name.clone()),
                (State::Value(name), b'[') if name == "items" => State::Items,
                (State::Items, b',') => State::Items,
                (State::Items, _) => return Ok(self.value()?.map(Part::Item)),
                (State::Fields, b'"') => match self.value()? {
                    Some(name) => {
                        self.state = State::Name(name);
                        continue;
                    }
                    None => return Ok(None),
                },
                (State::Value(name), _) if name == "metadata" => {
                    let metadata = self.value()?.map(Part::Metadata);
                    if metadata.is_some() {
                        self.state = State::Fields;
                    }
                    return Ok(metadata);
                }
                (State::Value(_), _) => {
                    if self.value::<IgnoredAny>()?.is_none() {
                        return Ok(None);
                    }
                    self.state = State::Fields;
                    continue;
                }
                _ => return Err(unreadable("it is no list in JSON")),
            };
            self.parsed += 1;
        }
    }

    /// Whether the list is complete.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::End)
    }

    /// Parses a value; `None` if more text is needed.
    fn value<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ListError> {
        let rest = &self.text[self.parsed..];
        if rest.len() < self.needed {
            return Ok(None);
        }
        let mut values = Deserializer::from_slice(rest).into_iter();
        match (values.next(), values.byte_offset()) {
            // A number at the end of the text may continue in the next piece.
            (Some(Ok(value)), end) if end < rest.len() => {
                self.parsed += end;
                self.needed = 0;
                Ok(Some(value))
            }
            (Some(Err(error)), _) if !error.is_eof() => Err(unreadable(&error.to_string())),
            _ => {
                self.needed = 2 * rest.len();
                Ok(None)
            }
        }
    }
}

fn unreadable(why: &str) -> ListError {
    ListError::Unreadable(why.to_owned())
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
        for piece in text.as_bytes().chunks(piece).chain([&b""[..]]) {
            scanner.push(piece)?;
            while let Some(part) = scanner.next()? {
                match part {
                    Part::Item(item) => items.push(item),
                    Part::Metadata(value) => metadata.push(value),
                }
            }
        }
        if scanner.is_over() {
            Ok((items, metadata))
        } else {
            Err(unreadable("it ends early"))
        }
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
            let found = parts(&list, piece).unwrap();
            prop_assert_eq!(found, (items, vec![metadata]));
        }
    }

    #[test]
    fn a_list_without_objects_may_say_null() {
        let (items, metadata) = parts("{\"items\":null,\"metadata\":{}}", 3).unwrap();
        assert_eq!((items, metadata), (vec![], vec![json!({})]));
    }

    #[test]
    fn a_text_that_is_no_list_or_ends_early_is_an_error() {
        let cut = "{\"items\":[{},{\"a\":1}";
        for text in ["[]", "<html>", cut, "{\"items\" [1]}", "{}}"] {
            assert!(parts(text, 4).is_err(), "{text}");
        }
    }
}
