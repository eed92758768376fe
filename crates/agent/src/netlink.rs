//! Requests to the kernel about links, neighbours and routes (`NETLINK_ROUTE`).
//!
//! # Guarantees
//! - No function here waits: the kernel answers a request before `send` returns, and each part of a dump before `recv`
//!   returns.

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};

/// `NLM_F_DUMP_INTR`: the objects changed during the dump, so objects may be missing from it.
const INTERRUPTED: u16 = 0x10;
/// The maximum number of attempts to get a dump that is not interrupted.
const MOST_DUMPS: u32 = 4;
/// The lowest type of messages that describe an object. Messages of lower types are errors and the ends of dumps.
const FIRST_OBJECT: u16 = 0x10;

/// Whether the kernel has answered with this error.
pub(crate) fn is_errno(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// Sends a request to the kernel and returns the messages of its answer.
pub(crate) fn exchange(
    request: RouteNetlinkMessage,
    flags: u16,
) -> io::Result<Vec<RouteNetlinkMessage>> {
    let mut answers = Vec::new();
    // The kernel sends the acknowledgement as the last message.
    converse(request, NLM_F_ACK | flags, |_, bytes| {
        Ok(match message(bytes)?.payload {
            NetlinkPayload::InnerMessage(answer) => {
                answers.push(answer);
                false
            }
            NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
            NetlinkPayload::Error(_) => true,
            _ => false,
        })
    })?;
    Ok(answers)
}

/// Returns all objects that `request` asks for, such as all routes of a family. Objects that cannot be parsed are left
/// out, because other programs have added them.
pub(crate) fn dump(request: &RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
    for _ in 0..MOST_DUMPS {
        let (mut objects, mut is_interrupted) = (Vec::new(), false);
        converse(request.clone(), NLM_F_DUMP, |header, bytes| {
            is_interrupted |= header.flags & INTERRUPTED != 0;
            if header.message_type >= FIRST_OBJECT {
                if let Ok(message) = message(bytes)
                    && let NetlinkPayload::InnerMessage(object) = message.payload
                {
                    objects.push(object);
                }
                return Ok(false);
            }
            match message(bytes)?.payload {
                NetlinkPayload::Done(done) if done.code < 0 => {
                    Err(io::Error::from_raw_os_error(done.code.saturating_neg()))
                }
                NetlinkPayload::Done(_) => Ok(true),
                NetlinkPayload::Error(error) => Err(error.to_io()),
                _ => Ok(false),
            }
        })?;
        if !is_interrupted {
            return Ok(objects);
        }
    }
    Err(io::Error::other(
        "the kernel's tables change faster than they can be read",
    ))
}

fn message(bytes: &[u8]) -> io::Result<NetlinkMessage<RouteNetlinkMessage>> {
    NetlinkMessage::deserialize(bytes).map_err(io::Error::other)
}

/// Sends a request, and passes each message of the answer to `read`, until `read` returns true or an error.
fn converse(
    request: RouteNetlinkMessage,
    flags: u16,
    mut read: impl FnMut(&Header, &[u8]) -> io::Result<bool>,
) -> io::Result<()> {
    let socket = ask(request, flags)?;
    let mut buffer = vec![0; 65_536];
    loop {
        let (length, _) = match recv(&socket, &mut buffer[..], RecvFlags::empty()) {
            Err(Errno::AGAIN) => return Err(io::Error::other("the kernel does not answer")),
            received => received?,
        };
        let mut rest = buffer.get(..length).unwrap_or_default();
        while !rest.is_empty() {
            let header = Header::read(rest)?;
            let message = rest.get(..header.length).unwrap_or(rest);
            if read(&header, message)? {
                return Ok(());
            }
            let next = header.length.next_multiple_of(4);
            rest = rest.get(next..).unwrap_or_default();
        }
    }
}

fn ask(request: RouteNetlinkMessage, flags: u16) -> io::Result<OwnedFd> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(request));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // `None` stands for protocol 0 (`NETLINK_ROUTE`), which is the protocol for links, neighbours and routes.
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    send(&socket, &bytes, SendFlags::empty())?;
    Ok(socket)
}

/// The header of a message, which can be read even if the content of the message is unknown.
struct Header {
    /// The length of the message in bytes, including the header
    length: usize,
    message_type: u16,
    flags: u16,
}

impl Header {
    fn read(bytes: &[u8]) -> io::Result<Self> {
        // The check includes that the length is at least that of a header.
        let header = NetlinkBuffer::new_checked(bytes).map_err(io::Error::other)?;
        Ok(Self {
            length: usize::try_from(header.length()).unwrap_or(usize::MAX),
            message_type: header.message_type(),
            flags: header.flags(),
        })
    }
}
