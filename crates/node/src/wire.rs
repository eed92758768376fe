//! The protocol between the CNI plugin and the agent: frames on a Unix stream socket.
//!
//! A frame is a length (32 bits, big endian) and that many bytes of JSON. A connection is used for one operation:
//!
//! ```text
//! agent   {"version":1}                                    at once: it is awake
//! plugin  {"version":1,"deadlineMs":123456,"askedUs":108456000,"op":{...}}
//! agent   {"answer":...} or {"refusal":{...}}
//! ```
//!
//! The agent sends its greeting as soon as it accepts the connection. The greeting shows the CNI plugin that the agent
//! works. A connection alone does not show this, because the kernel accepts connections even for an agent that hangs.
//! If no greeting comes, the CNI plugin uses the store directly and sends no request, so that no old request awaits the
//! agent when it recovers.
//!
//! `deadlineMs` is a time since boot (`CLOCK_BOOTTIME`) after which the agent must not begin the operation. `askedUs`
//! is the time since boot at which the operation was requested: an ADD is rejected if a DEL of the same attachment was
//! requested later.

use std::io::{self, Read, Write};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::ops::{Op, OpError, OpOutcome};

/// The version of the protocol. The CNI plugin and the agent must have the same version.
pub const VERSION: u32 = 1;
/// Maximum length of a message in bytes. The longest operation is a GC that lists all attachments of a node.
pub const MOST_BYTES: usize = 1 << 20;

/// The first message of a connection, from the agent.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The agent's [`VERSION`]
    pub version: u32,
}

/// The message that the CNI plugin sends after it has received the greeting.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    /// The CNI plugin's [`VERSION`]
    pub version: u32,
    /// Until when the CNI plugin waits for the agent, in milliseconds since boot
    pub deadline_ms: u64,
    /// Time at which the operation was requested, in microseconds since boot. CNI plugins of earlier versions do not
    /// send this field
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_us: Option<u64>,
    /// The operation, which the agent performs unless the deadline has passed
    pub op: Op,
}

/// The answer of the agent, which is the last message of a connection.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Response {
    /// The operation was done
    Answer(OpOutcome),
    /// The operation was rejected, and nothing has changed
    Refusal(OpError),
}

impl Request {
    /// Returns a request that was made at `asked` and whose caller waits until `deadline`. Both are times since boot.
    pub fn new(op: Op, asked: Duration, deadline: Duration) -> Self {
        Self {
            version: VERSION,
            deadline_ms: u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX),
            asked_us: u64::try_from(asked.as_micros()).ok(),
            op,
        }
    }

    /// Returns until when the CNI plugin waits for the agent, as a time since boot.
    pub fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms)
    }

    /// Returns the time since boot at which the operation was requested; `None` if the CNI plugin is too old to send
    /// this time.
    pub fn asked(&self) -> Option<Duration> {
        self.asked_us.map(Duration::from_micros)
    }
}

impl From<Result<OpOutcome, OpError>> for Response {
    fn from(result: Result<OpOutcome, OpError>) -> Self {
        match result {
            Ok(answer) => Self::Answer(answer),
            Err(refusal) => Self::Refusal(refusal),
        }
    }
}

impl From<Response> for Result<OpOutcome, OpError> {
    fn from(response: Response) -> Self {
        match response {
            Response::Answer(answer) => Ok(answer),
            Response::Refusal(refusal) => Err(refusal),
        }
    }
}

/// Encodes the agent's greeting as a frame.
pub fn greeting() -> io::Result<Vec<u8>> {
    encode(&Greeting { version: VERSION })
}

/// Encodes a message as a frame. Fails if the message is longer than [`MOST_BYTES`].
pub fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message)?;
    let len = frame.len() - 4;
    check(len)?;
    let head = u32::try_from(len).map_err(io::Error::other)?;
    frame[..4].copy_from_slice(&head.to_be_bytes());
    Ok(frame)
}

/// Decodes the head of a frame, and returns the number of bytes that follow the head. Fails if the number exceeds
/// [`MOST_BYTES`].
pub fn body_len(head: [u8; 4]) -> io::Result<usize> {
    let len = usize::try_from(u32::from_be_bytes(head)).map_err(io::Error::other)?;
    check(len)?;
    Ok(len)
}

/// Decodes the body of a frame, that is, the frame without its first four bytes.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> io::Result<T> {
    Ok(serde_json::from_slice(body)?)
}

/// Writes a message as one frame. Fails if the message is longer than [`MOST_BYTES`].
pub fn send<T: Serialize>(to: &mut impl Write, message: &T) -> io::Result<()> {
    to.write_all(&encode(message)?)
}

/// Reads one frame and decodes its message. Fails if the frame is longer than [`MOST_BYTES`].
pub fn receive<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<T> {
    let mut head = [0; 4];
    from.read_exact(&mut head)?;
    let mut body = vec![0; body_len(head)?];
    from.read_exact(&mut body)?;
    decode(&body)
}

fn check(len: usize) -> io::Result<()> {
    if len <= MOST_BYTES {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidData,
        format!("a message of {len} bytes is too long: at most {MOST_BYTES} are taken"),
    ))
}
