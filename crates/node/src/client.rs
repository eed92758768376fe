//! How the CNI plugin does an operation: it asks the agent, or works on the store directly if no agent answers.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::clock;
use super::ops::{Op, OpError, OpErrorKind, OpOutcome};
use super::store::{Store, StoreError};
use super::wire::{self, Greeting, Request, Response};

/// If the agent has not sent its greeting within this time, the CNI plugin regards the agent as hung.
const AWAKE: Duration = Duration::from_secs(1);
/// How long the CNI plugin waits for the store before it asks the agent again.
const TURN: Duration = Duration::from_millis(500);
/// Interval between attempts to connect while the queue of connections to the agent is full.
const POLL: Duration = Duration::from_millis(5);

/// Asks the agent to do an operation, or does it on the store directly if the agent is absent or hangs. Returns
/// within `timeout` plus the time that the disk takes.
pub fn ask(socket: &Path, store: &Path, op: &Op, timeout: Duration) -> Result<OpOutcome, OpError> {
    let asked = clock::since_boot();
    let end = asked + timeout;
    // The agent does not begin the operation after this time, so the last quarter of the timeout is left for the
    // store.
    let agents = end.saturating_sub(timeout / 4);
    let mut stranger = None;
    loop {
        match by_agent(socket, op, asked, agents) {
            Ok(response) => return response.into(),
            Err(Absent::Refused(refusal)) => return Err(refusal),
            Err(Absent::Silent) => {}
            Err(Absent::Stranger(version)) => stranger = Some(version),
        }
        let left = end.saturating_sub(clock::since_boot());
        match on_store(store, op, asked, left.min(TURN)) {
            Ok(result) => return result,
            Err(StoreError::Missing { .. }) if matches!(op, Op::Del(_)) => {
                return Ok(OpOutcome::Done);
            }
            Err(StoreError::Locked { .. }) if left > TURN => {}
            Err(StoreError::Locked { .. }) => {
                return Err(match stranger {
                    Some(version) => unexpected_version(socket, version),
                    None => hung(socket, store, timeout),
                });
            }
            Err(StoreError::Missing { .. }) => return Err(absent(socket, store)),
            Err(error) => return Err(error.refusal()),
        }
    }
}

fn on_store(
    path: &Path,
    op: &Op,
    asked: Duration,
    wait: Duration,
) -> Result<Result<OpOutcome, OpError>, StoreError> {
    let mut store = Store::open_existing(path, wait)?;
    store.transact(&clock::now(), |ledger| ledger.run_asked(op, asked))
}

fn hung(socket: &Path, store: &Path, timeout: Duration) -> OpError {
    OpError {
        why: OpErrorKind::Busy,
        text: format!(
            "this node's agent did not answer on {} for {timeout:?}, and {} is in use: try again; if this stays so, restart the agent.",
            socket.display(),
            store.display()
        ),
    }
}

fn unexpected_version(socket: &Path, version: u32) -> OpError {
    OpError {
        why: OpErrorKind::Busy,
        text: format!(
            "this node's agent speaks version {version} of the protocol on {} and this plugin version {}, and the agent has the store: put the plugin that came with the agent in place (cadastre install-cni).",
            socket.display(),
            wire::VERSION
        ),
    }
}

fn absent(socket: &Path, store: &Path) -> OpError {
    OpError {
        why: OpErrorKind::NothingHeld,
        text: format!(
            "no agent answers on {}, and {} is missing: no agent has run on this node yet, or it makes the file anew. See that `cadastre agent` runs on this node, with these paths (`socket` and `store` of the config's ipam).",
            socket.display(),
            store.display()
        ),
    }
}

/// Why the agent did not answer.
enum Absent {
    /// The agent is absent or hangs. It will not do the operation any more
    Silent,
    /// The agent has this other version of the protocol. It was not asked
    Stranger(u32),
    /// The operation cannot be encoded as a request, so the agent was not asked
    Refused(OpError),
}

/// After an I/O error on the connection, the agent is regarded as absent.
impl From<io::Error> for Absent {
    fn from(_: io::Error) -> Self {
        Self::Silent
    }
}

fn by_agent(
    socket: &Path,
    op: &Op,
    asked: Duration,
    deadline: Duration,
) -> Result<Response, Absent> {
    let awake = deadline.min(clock::since_boot() + AWAKE);
    let stream = connected(socket, awake)?;
    let mut until = Until {
        stream: &stream,
        end: awake,
    };
    let greeting: Greeting = wire::receive(&mut until)?;
    if greeting.version != wire::VERSION {
        return Err(Absent::Stranger(greeting.version));
    }
    let request = wire::encode(&Request::new(op.clone(), asked, deadline)).map_err(|error| {
        Absent::Refused(OpError {
            why: OpErrorKind::Store,
            text: format!("this call cannot be sent to the agent: {error}"),
        })
    })?;
    until.end = deadline;
    until.write_all(&request)?;
    Ok(wire::receive(&mut until)?)
}

/// Connects to the agent's socket. If the queue of connections is full because the agent does not accept any, it
/// retries until `end` instead of blocking.
fn connected(path: &Path, end: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::AGAIN | Errno::INTR) if clock::since_boot() < end => thread::sleep(POLL),
            Err(error) => return Err(error.into()),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Reads from and writes to a stream until `end`, a time since boot. After that, it fails with `TimedOut`.
struct Until<'a> {
    stream: &'a UnixStream,
    end: Duration,
}

impl Until<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.end.saturating_sub(clock::since_boot());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(Some(left))
    }
}

impl Read for Until<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(out)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
