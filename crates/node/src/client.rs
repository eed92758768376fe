//! Performs an operation for the CNI plugin: sends the operation to the agent, or performs it on the store directly if
//! no agent answers.

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
const GREETING_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the CNI plugin waits for a locked store before it tries to reach the agent again.
const TURN: Duration = Duration::from_millis(500);
/// Interval between attempts to connect while the queue of connections to the agent is full.
const POLL: Duration = Duration::from_millis(5);

/// Sends an operation to the agent, or performs the operation on the store directly if the agent is absent or hangs.
/// Returns within `timeout` plus the time that the disk takes.
pub fn ask(socket: &Path, store: &Path, op: &Op, timeout: Duration) -> Result<OpOutcome, OpError> {
    let asked = clock::since_boot();
    let end = asked + timeout;
    // The agent does not begin the operation after `agent_end`. So the last quarter of the timeout is left for
    // performing the operation on the store.
    let agent_end = end.saturating_sub(timeout / 4);
    let mut other_version = None;
    loop {
        match ask_agent(socket, op, asked, agent_end) {
            Ok(response) => return response.into(),
            Err(NoAnswer::Absent) => {}
            Err(NoAnswer::OtherVersion(version)) => other_version = Some(version),
        }
        let left = end.saturating_sub(clock::since_boot());
        match on_store(store, op, asked, left.min(TURN)) {
            Ok(result) => return result,
            Err(StoreError::Missing { .. }) if matches!(op, Op::Del(_)) => {
                return Ok(OpOutcome::Done);
            }
            Err(StoreError::Locked { .. }) if left > TURN => {}
            Err(StoreError::Locked { .. }) => {
                let socket = socket.display();
                let text = match other_version {
                    Some(version) => format!(
                        "this node's agent speaks version {version} of the protocol on {socket} and this plugin version {}, and the agent has the store: put the plugin that came with the agent in place (cadastre install-cni).",
                        wire::VERSION
                    ),
                    None => format!(
                        "this node's agent did not answer on {socket} for {timeout:?}, and {} is in use: try again; if this stays so, restart the agent.",
                        store.display()
                    ),
                };
                let why = OpErrorKind::Busy;
                return Err(OpError { why, text });
            }
            Err(StoreError::Missing { .. }) => {
                return Err(OpError {
                    why: OpErrorKind::NoBlock,
                    text: format!(
                        "no agent answers on {}, and {} is missing: no agent has run on this node yet, or it is rebuilding the file. See that `cadastre agent` runs on this node, with these paths (`socket` and `store` of the config's ipam).",
                        socket.display(),
                        store.display()
                    ),
                });
            }
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
    let now = clock::now();
    // A store on a disk survives a reboot. After the reboot, the agent has to use the store first, and records the new
    // boot. Otherwise a later loss of the store would look like a reboot, which ends all assignments.
    if store.transact_ops(&now, |ledger| ledger.is_of_earlier_boot())? {
        return Err(StoreError::Busy {
            what: "it is from before the last reboot, and no agent has run since",
        });
    }
    store.transact_ops(&now, |ledger| ledger.run_asked(op, asked))
}

/// Why the agent did not answer. In each case it is certain that the agent will not begin the operation later, so the
/// CNI plugin may do the operation on the store.
enum NoAnswer {
    Absent,
    /// The agent has a different version of the protocol, given here, so the plugin sent no request
    OtherVersion(u32),
}

/// After an I/O error on the connection, the agent is regarded as absent.
impl From<io::Error> for NoAnswer {
    fn from(_: io::Error) -> Self {
        Self::Absent
    }
}

fn ask_agent(
    socket: &Path,
    op: &Op,
    asked: Duration,
    deadline: Duration,
) -> Result<Response, NoAnswer> {
    let greeting_end = deadline.min(clock::since_boot() + GREETING_TIMEOUT);
    let stream = connected(socket, greeting_end)?;
    let mut until = Until {
        stream: &stream,
        end: greeting_end,
    };
    let greeting: Greeting = wire::receive(&mut until)?;
    if greeting.version != wire::VERSION {
        return Err(NoAnswer::OtherVersion(greeting.version));
    }
    until.end = deadline;
    wire::send(&mut until, &Request::new(op.clone(), asked, deadline))?;
    Ok(wire::receive(&mut until)?)
}

/// Connects to the agent's socket. If the agent accepts no connections, the queue of connections fills up. In this
/// case, the function retries until `end` instead of blocking.
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

/// Reads from and writes to a stream until `end`, a time since boot. After `end`, reads and writes fail with
/// `TimedOut`.
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
