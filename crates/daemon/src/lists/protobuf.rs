//! Splits a list in protobuf into its objects while it arrives.
//!
//! The envelope's field 2 is the list. Field 1 of the list is its metadata, and each field 2 is an object.

use prost::{DecodeError, Message as _};

use super::{ListError, Metadata, Part};
use crate::encoding::{Decode, LONGEST, MAGIC};

#[derive(Debug, Default)]
enum State {
    /// The scanner has not reached the envelope yet
    #[default]
    Start,
    /// The scanner is between two fields of the envelope, before the list
    Envelope,
    /// The scanner is between two fields of the list, of which `rest` bytes are left
    List { rest: usize },
    /// The scanner is between two fields of the envelope, after the list
    End,
}

/// Reads the objects and the metadata of a list, in any order. Keeps only the bytes that have not been read yet.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    state: State,
    bytes: Vec<u8>,
    /// How many bytes at the beginning of `bytes` have been read
    read: usize,
}

#[derive(prost::Message)]
struct ListMetaMessage {
    #[prost(string, tag = "2")]
    resource_version: String,
    #[prost(string, tag = "3")]
    next: String,
}

/// Where a field with a length begins and ends.
struct Field {
    number: usize,
    /// Size of the number and the length
    head: usize,
    /// Size of the whole field
    size: usize,
}

impl Scanner {
    /// Adds bytes that have arrived.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..std::mem::take(&mut self.read));
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next part; `None` if more bytes are needed.
    pub(super) fn next<K>(
        &mut self,
        decode: Decode<K>,
    ) -> Result<Option<Part<K, Metadata>>, ListError> {
        loop {
            let bytes = &self.bytes[self.read..];
            match self.state {
                State::Start if bytes.len() < MAGIC.len() => return Ok(None),
                State::Start if !bytes.starts_with(&MAGIC) => {
                    return Err(unreadable("it does not begin like protobuf"));
                }
                State::Start => {
                    self.read += MAGIC.len();
                    self.state = State::Envelope;
                }
                State::List { rest: 0 } => self.state = State::End,
                State::Envelope | State::End => {
                    let Some(field) = Field::at(bytes)? else {
                        return Ok(None);
                    };
                    if field.number == 2 && matches!(self.state, State::Envelope) {
                        self.read += field.head;
                        let rest = field.size - field.head;
                        self.state = State::List { rest };
                    } else if field.value(bytes)?.is_some() {
                        self.read += field.size;
                    } else {
                        return Ok(None);
                    }
                }
                State::List { rest } => {
                    let Some(field) = Field::at(bytes)? else {
                        return Ok(None);
                    };
                    let Some(rest) = rest.checked_sub(field.size) else {
                        return Err(unreadable("an object is longer than the list"));
                    };
                    let Some(value) = field.value(bytes)? else {
                        return Ok(None);
                    };
                    let part = match field.number {
                        1 => Some(Part::Metadata(metadata(value)?)),
                        2 => Some(Part::Item(
                            decode(value).map_err(|error| undecodable(&error))?,
                        )),
                        _ => None,
                    };
                    self.read += field.size;
                    self.state = State::List { rest };
                    if part.is_some() {
                        return Ok(part);
                    }
                }
            }
        }
    }

    /// Whether the list is complete.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::End) && self.read == self.bytes.len()
    }
}

impl Field {
    /// Reads the number and the length of the field at the beginning of `bytes`; `None` if more bytes are needed.
    fn at(bytes: &[u8]) -> Result<Option<Field>, ListError> {
        let Some((key, key_size)) = number(bytes)? else {
            return Ok(None);
        };
        let Some((length, length_size)) = number(&bytes[key_size..])? else {
            return Ok(None);
        };
        // The last three bits of the key say how the value is encoded. Here, all values have a length.
        if key & 7 != 2 {
            return Err(unreadable("a field has no length"));
        }
        let head = key_size + length_size;
        Ok(Some(Field {
            number: key >> 3,
            head,
            size: head.saturating_add(length),
        }))
    }

    /// Returns the value of this field at the beginning of `bytes`; `None` if more bytes are needed.
    fn value<'a>(&self, bytes: &'a [u8]) -> Result<Option<&'a [u8]>, ListError> {
        if self.size > LONGEST {
            return Err(unreadable("an object of more than 32 MiB"));
        }
        Ok(bytes.get(self.head..self.size))
    }
}

/// Reads a number of variable length. Returns it with its size; `None` if more bytes are needed.
fn number(bytes: &[u8]) -> Result<Option<(usize, usize)>, ListError> {
    let Some(last) = bytes.iter().take(10).position(|byte| *byte < 0x80) else {
        return if bytes.len() < 10 {
            Ok(None)
        } else {
            Err(unreadable("a number is too long"))
        };
    };
    let number =
        prost::decode_length_delimiter(&bytes[..=last]).map_err(|error| undecodable(&error))?;
    Ok(Some((number, last + 1)))
}

fn metadata(value: &[u8]) -> Result<Metadata, ListError> {
    let metadata = ListMetaMessage::decode(value).map_err(|error| undecodable(&error))?;
    Ok(Metadata {
        resource_version: metadata.resource_version,
        next: metadata.next,
    })
}

fn unreadable(why: &str) -> ListError {
    ListError::Unreadable(why.to_owned())
}

fn undecodable(error: &DecodeError) -> ListError {
    ListError::Unreadable(error.to_string())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;

    #[derive(Message)]
    struct Envelope {
        #[prost(string, optional, tag = "1")]
        type_meta: Option<String>,
        #[prost(message, optional, tag = "2")]
        list: Option<List>,
        #[prost(string, tag = "3")]
        content_encoding: String,
    }

    #[derive(Clone, Message)]
    struct List {
        #[prost(message, optional, tag = "1")]
        metadata: Option<ListMetaMessage>,
        #[prost(bytes = "vec", repeated, tag = "2")]
        items: Vec<Vec<u8>>,
        #[prost(string, tag = "3")]
        unknown: String,
    }

    impl Clone for ListMetaMessage {
        fn clone(&self) -> Self {
            ListMetaMessage {
                resource_version: self.resource_version.clone(),
                next: self.next.clone(),
            }
        }
    }

    fn answer(envelope: &Envelope) -> Vec<u8> {
        [&MAGIC[..], &envelope.encode_to_vec()].concat()
    }

    /// Returns the objects of a list and the versions in its metadata. The list arrives in pieces of `piece` bytes.
    fn parts(bytes: &[u8], piece: usize) -> Result<(Vec<Vec<u8>>, Vec<String>), ListError> {
        let mut scanner = Scanner::default();
        let (mut items, mut versions) = (Vec::new(), Vec::new());
        for piece in bytes.chunks(piece) {
            scanner.push(piece);
            while let Some(part) = scanner.next(|item| Ok(item.to_vec()))? {
                match part {
                    Part::Item(item) => items.push(item),
                    Part::Metadata(it) => versions.push(it.resource_version + " " + &it.next),
                }
            }
        }
        if scanner.is_over() {
            Ok((items, versions))
        } else {
            Err(unreadable("it ends early"))
        }
    }

    proptest! {
        #[test]
        fn objects_are_found_in_whatever_pieces_they_come(
            items in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..5),
            (version, next, other) in ("[0-9]{0,9}", "[a-z]{0,9}", "[a-z]{0,9}"),
            (piece, is_typed) in (1usize..400, any::<bool>()),
        ) {
            let metadata = ListMetaMessage { resource_version: version.clone(), next: next.clone() };
            let bytes = answer(&Envelope {
                type_meta: is_typed.then(|| other.clone()),
                list: Some(List { metadata: Some(metadata), items: items.clone(), unknown: other.clone() }),
                content_encoding: other,
            });
            let found = parts(&bytes, piece).unwrap();
            prop_assert_eq!(found, (items, vec![version + " " + &next]));
        }

        #[test]
        fn a_list_that_ends_early_is_an_error(
            items in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..30), 0..5),
            missing in 1usize..50,
        ) {
            let list = List { metadata: None, items, unknown: String::new() };
            let bytes = answer(&Envelope { type_meta: None, list: Some(list), content_encoding: String::new() });
            let end = bytes.len().saturating_sub(missing);
            prop_assert!(parts(&bytes[..end], 7).is_err());
        }

        #[test]
        fn other_bytes_are_an_error_or_another_list(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parts(&[&MAGIC[..], &bytes].concat(), 9);
        }
    }

    #[test]
    fn a_list_that_cannot_be_one_is_an_error() {
        let begins = |bytes: &[u8]| {
            let mut scanner = Scanner::default();
            scanner.push(&[&MAGIC[..], bytes].concat());
            scanner.next(|item| Ok(item.to_vec())).map(|_| ())
        };
        let text = |bytes: &[u8]| begins(bytes).unwrap_err().to_string();
        // A list of 3 bytes with an object of 5.
        assert!(text(&[0x12, 3, 0x12, 5, 0]).contains("longer than the list"));
        // A list of 256 MiB whose first object has nearly as much.
        let huge = [
            0x12, 0xff, 0xff, 0xff, 0x7f, 0x12, 0xf0, 0xff, 0xff, 0x7f, 0,
        ];
        assert!(text(&huge).contains("32 MiB"));
        assert!(text(&[0x10, 1]).contains("no length"));
        assert!(text(&[0xff; 12]).contains("too long"));
        assert!(parts(b"{\"items\":[]}", 5).is_err());
        assert!(begins(&[0x12]).is_ok(), "more may come");
    }
}
