//! How the plugin asks the agent: frames on a unix stream socket.
//!
//! A frame is a length (32 bits, big endian) and as many bytes of JSON. A connection serves one operation:
//!
//! ```text
//! agent   {"version":1}                                    at once: it is awake
//! plugin  {"version":1,"deadlineMs":123456,"askedUs":108456000,"op":{...}}
//! agent   {"answer":...} or {"refusal":{...}}
//! ```
//!
//! The agent speaks first, so that a plugin tells a hung agent, whose connections the kernel still takes,
//! from one that is at work, and has not asked it for anything when it helps itself. `deadlineMs` is a time
//! since boot (`CLOCK_BOOTTIME`): later the agent must not begin any more. So is `askedUs`: an ADD gives
//! nothing if a DEL of the same attachment was asked for after it.

use std::io::{self, Read, Write};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::ops::{Answer, Op, Refusal};

/// The version of the protocol.
pub const VERSION: u32 = 1;
/// The longest frame. The longest operation is a GC of all attachments of a node.
pub const MOST_BYTES: usize = 1 << 20;

/// What the agent says first.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// Its [`VERSION`]
    pub version: u32,
}

/// What the plugin says.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    /// Its [`VERSION`]
    pub version: u32,
    /// Until when it waits, in milliseconds since boot
    pub deadline_ms: u64,
    /// When it was asked, in microseconds since boot; a plugin of an older version does not say
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_us: Option<u64>,
    /// What it asks for
    pub op: Op,
}

/// What the agent answers.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Response {
    /// It was done
    Answer(Answer),
    /// It was not
    Refusal(Refusal),
}

impl Request {
    /// What was asked for at one time since boot, and is waited for until another.
    pub fn new(op: Op, asked: Duration, deadline: Duration) -> Self {
        Self {
            version: VERSION,
            deadline_ms: u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX),
            asked_us: u64::try_from(asked.as_micros()).ok(),
            op,
        }
    }

    /// Until when the plugin waits, as a time since boot.
    pub fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms)
    }

    /// When it was asked, as a time since boot.
    pub fn asked(&self) -> Option<Duration> {
        self.asked_us.map(Duration::from_micros)
    }
}

impl From<Result<Answer, Refusal>> for Response {
    fn from(result: Result<Answer, Refusal>) -> Self {
        match result {
            Ok(answer) => Self::Answer(answer),
            Err(refusal) => Self::Refusal(refusal),
        }
    }
}

impl From<Response> for Result<Answer, Refusal> {
    fn from(response: Response) -> Self {
        match response {
            Response::Answer(answer) => Ok(answer),
            Response::Refusal(refusal) => Err(refusal),
        }
    }
}

/// The greeting as a frame.
pub fn greeting() -> io::Result<Vec<u8>> {
    encode(&Greeting { version: VERSION })
}

/// A message as a frame; an error if it is too long.
pub fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message)?;
    let len = frame.len() - 4;
    check(len)?;
    let head = u32::try_from(len).map_err(io::Error::other)?;
    frame[..4].copy_from_slice(&head.to_be_bytes());
    Ok(frame)
}

/// How many bytes follow the first four of a frame; an error if that is too many.
pub fn body_len(head: [u8; 4]) -> io::Result<usize> {
    let len = usize::try_from(u32::from_be_bytes(head)).map_err(io::Error::other)?;
    check(len)?;
    Ok(len)
}

/// The message in a frame, without its first four bytes.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> io::Result<T> {
    Ok(serde_json::from_slice(body)?)
}

/// Writes a frame.
pub fn send<T: Serialize>(to: &mut impl Write, message: &T) -> io::Result<()> {
    to.write_all(&encode(message)?)
}

/// Reads a frame.
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
