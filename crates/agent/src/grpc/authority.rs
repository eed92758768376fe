//! Replaces the `:authority` that clients send before the HTTP/2 server reads it, because some clients send an invalid
//! one.
//!
//! Clients of gRPC's C library (Python, C++, ...) and Go clients with their own dialer send the socket's path as
//! `:authority`. A path is no valid host name, so the crate h2 rejects such requests as malformed, and has no option
//! that allows them. The server does not depend on the name, so each name is replaced by [`NAME`] before h2 reads it.
//! This is done in HEADERS frames that contain a whole header block, where the field is a literal. Everything else
//! passes to h2 unchanged, also malformed frames and blocks that continue in CONTINUATION frames.
//!
//! # Why both ends still agree on the HPACK table
//! A literal may enter the dynamic table, whose size is counted by the length of names and values. The new value is
//! never longer than the old one, because empty values are left alone. So the server's table evicts no entry before the
//! peer's table does. Entries are counted from the newest one, so every entry of the peer's table is in the server's
//! table at the same index. Entries that the server's table keeps for longer come after all entries that the peer can
//! name.
//!
//! # Guarantees
//! - The output does not depend on how the input was cut into pieces.
//! - At most one frame of [`LONGEST`] bytes is buffered, besides the bytes of one [`Frames::put`].

use std::collections::VecDeque;

/// The authority that replaces all others: one character that is valid as a host name.
const NAME: u8 = b'a';
/// The length of the connection preface.
const PREFACE: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();
/// The length of a frame header: length, type, flags and stream.
const HEAD: usize = 9;
/// The longest payload that a peer may send; h2 rejects longer ones.
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

/// Rewrites the frames that a peer sends on one connection.
#[derive(Debug)]
pub(super) struct Frames {
    state: State,
    buffered: Vec<u8>,
    ready: VecDeque<u8>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// This many more bytes pass unchanged.
    Pass(usize),
    /// Bytes are buffered until there are this many.
    Hold(usize),
}

impl State {
    fn pass(length: usize) -> Self {
        match length {
            0 => Self::Hold(HEAD),
            length => Self::Pass(length),
        }
    }
}

impl Frames {
    /// Returns the state at the start of a connection, before the preface.
    pub(super) fn new() -> Self {
        Self {
            state: State::Pass(PREFACE),
            buffered: Vec::new(),
            ready: VecDeque::new(),
        }
    }

    /// Handles the next bytes from the peer.
    pub(super) fn put(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            bytes = match self.state {
                State::Pass(left) => self.pass(left, bytes),
                State::Hold(wanted) => self.buffer(wanted, bytes),
            };
        }
    }

    /// Marks the end of the input: buffered bytes pass unchanged.
    pub(super) fn end(&mut self) {
        self.ready.extend(self.buffered.drain(..));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// Passes at most `most` rewritten bytes to `take` and removes them.
    pub(super) fn give(&mut self, most: usize, take: impl FnOnce(&[u8])) {
        let (first, _) = self.ready.as_slices();
        let length = first.len().min(most);
        take(&first[..length]);
        self.ready.drain(..length);
    }

    fn pass<'a>(&mut self, left: usize, bytes: &'a [u8]) -> &'a [u8] {
        let (now, rest) = bytes.split_at(bytes.len().min(left));
        self.ready.extend(now);
        self.state = State::pass(left - now.len());
        rest
    }

    fn buffer<'a>(&mut self, wanted: usize, bytes: &'a [u8]) -> &'a [u8] {
        let missing = wanted.saturating_sub(self.buffered.len());
        let (now, rest) = bytes.split_at(bytes.len().min(missing));
        self.buffered.extend_from_slice(now);
        if now.len() == missing {
            self.state = self.all_buffered(wanted);
        }
        rest
    }

    /// Handles a buffer that now contains `wanted` bytes: a frame header or a whole HEADERS frame.
    fn all_buffered(&mut self, wanted: usize) -> State {
        let length = match *self.buffered.as_slice() {
            [a, b, c, ..] => u32::from_be_bytes([0, a, b, c]) as usize,
            _ => 0,
        };
        if wanted == HEAD && has_block(&self.buffered) && (1..=LONGEST).contains(&length) {
            return State::Hold(HEAD + length);
        }
        match renamed(&self.buffered) {
            Some(frame) if wanted > HEAD => self.ready.extend(frame),
            _ => self.ready.extend(&self.buffered),
        }
        self.buffered.clear();
        State::pass(if wanted == HEAD { length } else { 0 })
    }
}

/// Whether `head` is the header of a HEADERS frame that contains a whole header block.
fn has_block(head: &[u8]) -> bool {
    matches!(*head, [_, _, _, HEADERS, flags, ..] if flags & END_HEADERS != 0)
}

/// Replaces the authority in a HEADERS frame; `None` if the frame cannot be parsed.
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

/// Replaces the authority in a header block; `None` if the block cannot be parsed.
fn renamed_block(block: &[u8]) -> Option<Vec<u8>> {
    let mut all = Vec::with_capacity(block.len());
    let mut rest = block;
    while !rest.is_empty() {
        let field = rest;
        let name = name(&mut rest)?;
        let named = field.len() - rest.len();
        let value = match name {
            Name::Alone => &[],
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

/// The kind of a header field, as far as the bytes before its value show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name {
    Authority,
    Other,
    /// No value follows, because the field is indexed or changes the table's size
    Alone,
}

/// Reads a field up to where its value begins.
fn name(rest: &mut &[u8]) -> Option<Name> {
    let index = match rest.first()? {
        0x80.. => return integer(rest, 7).map(|_| Name::Alone),
        0x40.. => integer(rest, 6)?,
        0x20.. => return integer(rest, 5).map(|_| Name::Alone),
        _ => integer(rest, 4)?,
    };
    let is_ours = match index {
        0 => matches!(string(rest)?, (false, PLAIN) | (true, HUFFMAN)),
        index => index == INDEX,
    };
    Some(if is_ours {
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
