//! Replaces the `:authority` of requests before the HTTP/2 server reads it, because some clients send an invalid value.
//!
//! Clients of gRPC's C library (Python, C++, ...) and Go clients with their own dialer send the socket's path as
//! `:authority`. A path is no valid host name, so the crate h2 rejects such requests as malformed, and h2 has no option
//! to accept them. The server does not use the value, so [`AuthorityDecoder`] replaces every value by [`NAME`]. The
//! decoder changes only literal fields, and only in HEADERS frames that contain a complete header block. Everything
//! else passes unchanged, even malformed frames and header blocks that continue in CONTINUATION frames.
//!
//! # Why client and server still agree on the HPACK table
//! The client and the server each have a dynamic table of earlier fields, to which later fields refer by index. A
//! literal may enter the table, whose size is counted by the length of names and values. The new value is never longer
//! than the old one, because empty values are left alone. So the server's table never evicts an entry before the
//! client's table does. Entries are counted from the newest one, so every entry of the client's table has the same
//! index in the server's table. Entries that only the server's table still has are older and have higher indexes, to
//! which the client cannot refer.
//!
//! # Guarantees
//! - The output does not depend on how the input is split into pieces.
//! - After a call of `decode`, the input buffer contains less than one frame with a payload of [`LONGEST`] bytes.

use std::io;

use tokio_util::bytes::{Bytes, BytesMut};
use tokio_util::codec::Decoder;

/// The value that replaces every `:authority`: one character that is valid as a host name.
const NAME: u8 = b'a';
/// The length in bytes of the preface with which every HTTP/2 connection begins.
const PREFACE: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();
/// The length in bytes of a frame header, which consists of length, type, flags and stream.
const HEAD: usize = 9;
/// The longest payload in bytes that a client may send; h2 rejects longer payloads.
const LONGEST: usize = 16_384;

const HEADERS: u8 = 1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// The index of `:authority` in HPACK's static table.
const INDEX: usize = 1;
/// `:authority` as a plain literal.
const PLAIN: &[u8] = b":authority";
/// `:authority` as a literal in HPACK's Huffman code.
const HUFFMAN: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];

/// Decodes the bytes that a client sends on one connection.
#[derive(Debug)]
pub(super) struct AuthorityDecoder {
    /// How many of the next bytes pass unchanged
    unchanged: usize,
}

impl AuthorityDecoder {
    /// Returns a decoder for a new connection, which begins with the preface.
    pub(super) fn new() -> Self {
        let unchanged = PREFACE;
        Self { unchanged }
    }
}

impl Decoder for AuthorityDecoder {
    type Item = Bytes;
    type Error = io::Error;

    fn decode(&mut self, bytes: &mut BytesMut) -> io::Result<Option<Bytes>> {
        if self.unchanged == 0 {
            let [a, b, c, kind, flags, ..] = **bytes else {
                return Ok(None);
            };
            let length = HEAD + u32::from_be_bytes([0, a, b, c]) as usize;
            let has_block = kind == HEADERS && flags & END_HEADERS != 0;
            if has_block && length <= HEAD + LONGEST {
                if bytes.len() < length {
                    return Ok(None);
                }
                let frame = bytes.split_to(length).freeze();
                return Ok(Some(renamed(&frame).map_or(frame, Bytes::from)));
            }
            self.unchanged = length;
        }
        let passed = bytes.len().min(self.unchanged);
        self.unchanged -= passed;
        Ok((passed > 0).then(|| bytes.split_to(passed).freeze()))
    }

    /// At the end of the input, passes on an incomplete frame without changes.
    fn decode_eof(&mut self, bytes: &mut BytesMut) -> io::Result<Option<Bytes>> {
        let decoded = self.decode(bytes)?;
        Ok(decoded.or_else(|| (!bytes.is_empty()).then(|| bytes.split().freeze())))
    }
}

/// Replaces the authority in a HEADERS frame. Returns `None` if the frame cannot be parsed.
fn renamed(frame: &[u8]) -> Option<Vec<u8>> {
    let (head, payload) = frame.split_at_checked(HEAD)?;
    let has = |flag| head[4] & flag != 0;
    let start = usize::from(has(PADDED)) + if has(PRIORITY) { 5 } else { 0 };
    let padding = if has(PADDED) { *payload.first()? } else { 0 };
    let end = payload.len().checked_sub(padding.into())?;
    let block = renamed_block(payload.get(start..end)?)?;
    let payload = [&payload[..start], &block, &payload[end..]].concat();
    let [_, length @ ..] = u32::try_from(payload.len()).ok()?.to_be_bytes();
    Some([&length, &head[3..], &payload].concat())
}

/// Replaces the authority in a header block. Returns `None` if the block cannot be parsed.
fn renamed_block(block: &[u8]) -> Option<Vec<u8>> {
    let mut all = Vec::with_capacity(block.len());
    let mut rest = block;
    while !rest.is_empty() {
        let field = rest;
        let name = name(&mut rest)?;
        let named = field.len() - rest.len();
        let value = match name {
            Name::NoValue => &[],
            Name::Authority | Name::Other => string(&mut rest)?.1,
        };
        if name == Name::Authority && !value.is_empty() {
            all.extend_from_slice(&field[..named]);
            all.extend_from_slice(&[1, NAME]);
        } else {
            all.extend_from_slice(&field[..field.len() - rest.len()]);
        }
    }
    Some(all)
}

/// The kind of a header field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name {
    Authority,
    Other,
    /// No value follows, because the field is indexed or only changes the table's size
    NoValue,
}

/// Reads a field up to the beginning of its value.
fn name(rest: &mut &[u8]) -> Option<Name> {
    let index = match rest.first()? {
        0x80.. => return integer(rest, 7).map(|_| Name::NoValue),
        0x40.. => integer(rest, 6)?,
        0x20.. => return integer(rest, 5).map(|_| Name::NoValue),
        _ => integer(rest, 4)?,
    };
    let is_authority = match index {
        0 => matches!(string(rest)?, (false, PLAIN) | (true, HUFFMAN)),
        index => index == INDEX,
    };
    Some(if is_authority {
        Name::Authority
    } else {
        Name::Other
    })
}

/// Reads a string; returns whether it is Huffman-coded, and its bytes.
fn string<'a>(rest: &mut &'a [u8]) -> Option<(bool, &'a [u8])> {
    let huffman = rest.first()? & 0x80 != 0;
    let length = integer(rest, 7)?;
    Some((huffman, rest.split_off(..length)?))
}

/// Reads an HPACK integer that begins in the last `bits` bits of the first byte. Like h2, accepts at most five bytes.
fn integer(rest: &mut &[u8], bits: u32) -> Option<usize> {
    let most = (1 << bits) - 1;
    let mut number = usize::from(*rest.split_off_first()?) & most;
    if number < most {
        return Some(number);
    }
    for shift in [0, 7, 14, 21] {
        let byte = *rest.split_off_first()?;
        number += usize::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests;
