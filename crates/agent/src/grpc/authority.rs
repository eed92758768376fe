//! Whatever a peer calls the agent, it means this socket.
//!
//! Clients of the C library (Python, C++, ...) and Go clients with a dialer of their own send the socket's path as
//! `:authority` of their requests, which is no host's name: the crate h2 refuses such requests as malformed, and
//! none of its options allows them. Nothing here depends on the name, so it is replaced by [`NAME`] before h2 reads
//! it: in HEADERS frames that hold a whole header block, where the field is a literal. All else passes as it came,
//! also what cannot be read and blocks that go on in CONTINUATION frames: h2 judges it.
//!
//! # Why the two ends still agree on the table of HPACK
//! A literal may enter the dynamic table, whose room is counted by the length of names and values. The new value
//! is never longer than the old one, which is not empty where it is replaced. So whatever is in the peer's table is
//! in ours, at the same place: entries are counted from the newest one, and ours evicts none before the peer does.
//! What it keeps for longer stands behind all that the peer can name.
//!
//! # Guarantees
//! - What is given does not depend on how the bytes were cut on their way.
//! - No more is kept than one frame of [`LONGEST`] bytes and what was put in at once.

use std::collections::VecDeque;

/// What stands for every name: one character, valid as a host's name.
const NAME: u8 = b'a';
/// What every connection begins with.
const PREFACE: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();
/// Length, type, flags and stream of a frame.
const HEAD: usize = 9;
/// The longest payload that a peer may send; h2 refuses longer ones.
const LONGEST: usize = 16_384;

const HEADERS: u8 = 1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// The index of `:authority` in the static table.
const INDEX: usize = 1;
/// The same name, spelt out.
const PLAIN: &[u8] = b":authority";
/// And in the Huffman code of HPACK.
const HUFFMAN: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];

/// The frames of a connection, on their way from the peer.
#[derive(Debug)]
pub(super) struct Frames {
    state: State,
    held: Vec<u8>,
    ready: VecDeque<u8>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// So many bytes pass as they come.
    Pass(usize),
    /// Bytes are held until there are so many.
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
    /// Of a connection that begins.
    pub(super) fn new() -> Self {
        Self {
            state: State::Pass(PREFACE),
            held: Vec::new(),
            ready: VecDeque::new(),
        }
    }

    /// Takes what the peer has sent.
    pub(super) fn put(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            bytes = match self.state {
                State::Pass(left) => self.pass(left, bytes),
                State::Hold(wanted) => self.hold(wanted, bytes),
            };
        }
    }

    /// Nothing more comes: what is held is as good as it gets.
    pub(super) fn end(&mut self) {
        self.ready.extend(self.held.drain(..));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// Gives at most so many bytes of what is ready to `take`.
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

    fn hold<'a>(&mut self, wanted: usize, bytes: &'a [u8]) -> &'a [u8] {
        let missing = wanted.saturating_sub(self.held.len());
        let (now, rest) = bytes.split_at(bytes.len().min(missing));
        self.held.extend_from_slice(now);
        if now.len() == missing {
            self.state = self.held_all(wanted);
        }
        rest
    }

    /// A head is there, or a whole frame of headers.
    fn held_all(&mut self, wanted: usize) -> State {
        let length = match *self.held.as_slice() {
            [a, b, c, ..] => u32::from_be_bytes([0, a, b, c]) as usize,
            _ => 0,
        };
        if wanted == HEAD && has_block(&self.held) && (1..=LONGEST).contains(&length) {
            return State::Hold(HEAD + length);
        }
        match renamed(&self.held) {
            Some(frame) if wanted > HEAD => self.ready.extend(frame),
            _ => self.ready.extend(&self.held),
        }
        self.held.clear();
        State::pass(if wanted == HEAD { length } else { 0 })
    }
}

/// Whether a frame that begins so has a whole block of headers.
fn has_block(head: &[u8]) -> bool {
    matches!(*head, [_, _, _, HEADERS, flags, ..] if flags & END_HEADERS != 0)
}

/// A frame of headers with another name, if it can be read.
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

/// A block of headers with another name, if it can be read.
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

/// What a field begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name {
    Authority,
    Other,
    /// Without a value: a field of a table, or the table's new size
    Alone,
}

/// Reads a field up to its value.
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

/// Reads a string: whether it is in the Huffman code, and its bytes.
fn string<'a>(rest: &mut &'a [u8]) -> Option<(bool, &'a [u8])> {
    let huffman = rest.first()? & 0x80 != 0;
    let length = integer(rest, 7)?;
    Some((huffman, rest.split_off(..length)?))
}

/// Reads an integer of which so many bits are in the first byte, and which has at most five bytes, as
/// h2 takes them.
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
