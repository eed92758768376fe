//! Netlink messages. Messages, and the attributes in them, are byte strings that begin with their length. They are
//! aligned to four bytes. Attributes can contain attributes.

use std::io;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

/// `NLM_F_REQUEST`: the message is a request.
pub(super) const REQUEST: u16 = 1;
/// `NLM_F_ACK`: the kernel must acknowledge the message.
pub(super) const ACK: u16 = 4;
/// `NLM_F_EXCL`: the request fails if the object exists.
pub(super) const EXCLUSIVE: u16 = 0x200;
/// `NLM_F_CREATE`: the request creates the object if the object does not exist.
pub(super) const CREATE: u16 = 0x400;
/// `NLM_F_APPEND`: the request appends the object to a list.
pub(super) const APPEND: u16 = 0x800;

const ERROR: u16 = 2;
const HEADER: usize = 16;
/// `NLA_F_NESTED`: the attribute contains attributes
const NESTED: u16 = 0x8000;

/// A sequence of messages, or of the attributes in a message.
#[derive(Debug, Default)]
pub(super) struct Bytes(Vec<u8>);

impl Bytes {
    /// Appends an `nfnetlink` message with `body`.
    pub(super) fn message(
        mut self,
        kind: u16,
        flags: u16,
        family: u8,
        resource: u16,
        body: &Self,
    ) -> Self {
        let length = u32::try_from(HEADER + 4 + body.0.len()).unwrap_or(u32::MAX);
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend((flags | REQUEST).to_ne_bytes());
        // Sequence number and port are zero. They are not needed to match answers, because each exchange has its own
        // socket.
        self.0.extend([0; 8]);
        self.0.extend([family, 0]);
        self.0.extend(resource.to_be_bytes());
        self.0.extend(&body.0);
        self
    }

    /// Appends an attribute, padded to four bytes.
    pub(super) fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Appends an attribute with a number in network byte order, as nf_tables expects.
    pub(super) fn number(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// Appends an attribute with a zero-terminated string.
    pub(super) fn text(self, kind: u16, value: &str) -> Self {
        self.bytes(kind, &[value.as_bytes(), &[0]].concat())
    }

    /// Appends an attribute that contains other attributes.
    pub(super) fn nested(self, kind: u16, inner: &Self) -> Self {
        self.bytes(kind | NESTED, &inner.0)
    }
}

/// Sends messages, and returns the first error among the answers. At least one message must ask for an answer. The
/// kernel processes and answers the messages while `send` runs, so afterwards all answers can be received without a
/// wait.
pub(super) fn exchange(messages: &Bytes) -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let netfilter = Some(netlink::NETFILTER);
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, netfilter)?;
    rustix::net::sockopt::set_socket_send_buffer_size(&socket, messages.0.len() * 2 + 65_536)?;
    send(&socket, &messages.0, SendFlags::empty())?;
    let mut answered = false;
    loop {
        let mut answer = vec![0; 16_384];
        let length = match recv(&socket, &mut answer[..], RecvFlags::empty()) {
            Ok((length, _)) => length,
            Err(rustix::io::Errno::AGAIN) if answered => return Ok(()),
            Err(rustix::io::Errno::AGAIN) => {
                return Err(io::Error::other("the kernel does not answer"));
            }
            Err(error) => return Err(error.into()),
        };
        for code in codes(answer.get(..length).unwrap_or_default()) {
            answered = true;
            if code != 0 {
                return Err(io::Error::from_raw_os_error(code.saturating_neg()));
            }
        }
    }
}

/// Returns the error codes of all answers; 0 means success.
fn codes(mut answers: &[u8]) -> Vec<i32> {
    let mut codes = Vec::new();
    let word =
        |at: usize, from: &[u8]| -> Option<[u8; 4]> { from.get(at..at + 4)?.try_into().ok() };
    while let Some(length) = word(0, answers).map(u32::from_ne_bytes) {
        let length = usize::try_from(length).unwrap_or(usize::MAX).max(HEADER);
        let kind = word(4, answers).map(|it| u16::from_ne_bytes([it[0], it[1]]));
        if kind == Some(ERROR) {
            codes.extend(word(HEADER, answers).map(i32::from_ne_bytes));
        }
        answers = answers
            .get(length.next_multiple_of(4)..)
            .unwrap_or_default();
    }
    codes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_have_their_length_in_front_and_end_at_a_word() {
        let inner = Bytes::default().number(1, 7);
        let all = Bytes::default().text(2, "ab").nested(3, &inner);
        let length = |n: u16| n.to_ne_bytes();
        let mut wanted = Vec::new();
        wanted.extend([length(7), length(2)].concat());
        wanted.extend(b"ab\0\0");
        wanted.extend([length(12), length(0x8003), length(8), length(1)].concat());
        wanted.extend([0, 0, 0, 7]);
        assert_eq!(all.0, wanted);
    }

    #[test]
    fn answers_that_are_cut_short_are_no_error() {
        let error = |code: i32| {
            let mut bytes = 36_u32.to_ne_bytes().to_vec();
            bytes.extend([ERROR.to_ne_bytes(), [0, 0]].concat());
            bytes.extend([0; 8]);
            bytes.extend(code.to_ne_bytes());
            bytes.extend([0; 16]);
            bytes
        };
        let both = [error(0), error(-17)].concat();
        assert_eq!(codes(&both), [0, -17]);
        for end in 0..both.len() {
            assert!(codes(&both[..end]).len() <= 2);
        }
        assert_eq!(codes(&[0; 64]), [0; 0]);
    }
}
