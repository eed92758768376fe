//! Unix sockets that only root and the agent's own user may use.
//!
//! # Guarantees
//! - A socket file on which a process listens is never replaced. A socket file that a killed process has left behind is
//!   replaced.
//! - Only the agent that has locked the file `agent.lock` beside the sockets uses the sockets. The kernel releases the
//!   lock when the agent's process ends.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use prometheus::IntGauge;
use rustix::process::geteuid;
use tokio::net::UnixListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::{debug, warn};

use super::files::FileError;
use crate::metrics::Counted;

/// The pause after an error of `accept`, for example because there are no free file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Why the sockets or the store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another agent runs on this node.
    #[error(
        "another agent of this node is at work: {} {what}. One agent a node: stop this one, or that one first",
        path.display()
    )]
    Taken {
        /// The socket or lock of the other agent
        path: PathBuf,
        /// How the other agent was noticed
        what: &'static str,
    },
    /// An operation on the socket's file, the lock file or their directory failed.
    #[error(transparent)]
    Io(#[from] FileError),
}

/// The lock that makes this process the only agent of the node. The lock is released when this value is dropped.
#[derive(Debug)]
pub struct OnlyOne(#[expect(dead_code, reason = "the open file has the lock")] File);

impl OnlyOne {
    /// Locks the file `agent.lock` in `folder`. Fails if another process has locked the file.
    pub fn lock(folder: &Path) -> Result<Self, SocketError> {
        make_folder(folder)?;
        let path = folder.join("agent.lock");
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&path).map_err(FileError::at("open", &path))?;
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(TryLockError::WouldBlock) => Err(SocketError::Taken {
                path,
                what: "is locked",
            }),
            Err(TryLockError::Error(error)) => Err(FileError::at("lock", &path)(error).into()),
        }
    }
}

/// Creates the folder with mode 0700 if it is missing.
fn make_folder(folder: &Path) -> Result<(), FileError> {
    if folder.is_dir() {
        return Ok(());
    }
    let mut builder = DirBuilder::new();
    let created = builder.recursive(true).mode(0o700).create(folder);
    created.map_err(FileError::at("create", folder))
}

/// A listening socket. Its file is removed when this value is dropped.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
    slots: Arc<Semaphore>,
    open: IntGauge,
}

/// A connection of a process that may use the socket.
#[derive(Debug)]
pub(crate) struct Peer {
    pub stream: tokio::net::UnixStream,
    /// The peer's slot, which must be kept until the connection is closed
    pub slot: Slot,
}

/// A place among the bounded number of connections that a socket can have at a time. Dropping this value frees the
/// slot.
pub(crate) type Slot = (OwnedSemaphorePermit, Counted);

impl Socket {
    /// Listens on `path` with mode 0600. At most `connections` connections are open at a time, and `open` counts them.
    /// A socket file on which no process listens is removed first.
    pub fn bind(path: &Path, connections: usize, open: IntGauge) -> Result<Self, SocketError> {
        if let Some(folder) = path.parent() {
            make_folder(folder)?;
        }
        match UnixStream::connect(path) {
            Ok(_) => {
                return Err(SocketError::Taken {
                    path: path.to_owned(),
                    what: "has a listener",
                });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(FileError::at("remove the stale socket", path))?;
            }
            Err(error) => return Err(FileError::at("use the socket", path)(error).into()),
        }
        // The socket is created under another name, so that nobody can connect to `path` before the socket's mode is
        // set.
        let new = path.with_extension("new");
        let _ = fs::remove_file(&new);
        let listener = UnixListener::bind(&new).map_err(FileError::at("listen on", &new))?;
        let placed = fs::set_permissions(&new, Permissions::from_mode(0o600))
            .and_then(|()| fs::rename(&new, path));
        placed.map_err(FileError::at("put in place the socket", path))?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            slots: Arc::new(Semaphore::new(connections)),
            open,
        })
    }

    /// Waits for a free slot, and then for the next peer that is root or the agent's own user. Connections of other
    /// peers are closed.
    pub(crate) async fn accept(&self) -> Peer {
        loop {
            let permit = match Arc::clone(&self.slots).acquire_owned().await {
                Ok(permit) => permit,
                // The semaphore is never closed.
                Err(_) => std::future::pending().await,
            };
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    warn!("{} cannot take a connection: {error}", self.path.display());
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            match stream.peer_cred() {
                Ok(peer) if may_ask(peer.uid(), geteuid().as_raw()) => {
                    let slot = (permit, Counted::new(&self.open));
                    return Peer { stream, slot };
                }
                Ok(peer) => {
                    warn!(
                        peer.uid = peer.uid(),
                        peer.pid = peer.pid(),
                        "refused on {}: only root and the agent's own user are served",
                        self.path.display()
                    );
                }
                Err(error) => debug!("a peer without credentials: {error}"),
            }
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Whether an agent with the user id `own` handles requests of a peer with the user id `peer`.
fn may_ask(peer: u32, own: u32) -> bool {
    peer == 0 || peer == own
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gauge() -> IntGauge {
        IntGauge::new("g", "g").unwrap()
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let folder = crate::files::temp_folder();
        let path = folder.join("run/x.sock");
        let first = Socket::bind(&path, 4, gauge()).unwrap();
        assert_eq!((mode(&path), mode(&folder.join("run"))), (0o600, 0o700));
        let error = Socket::bind(&path, 4, gauge()).unwrap_err().to_string();
        assert!(error.contains("another agent"), "{error}");
        drop(first);
        assert!(!path.exists(), "removed at the end");
        // A process that is killed leaves its socket file behind.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        Socket::bind(&path, 4, gauge()).unwrap();
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn only_one_process_has_the_lock() {
        let folder = crate::files::temp_folder();
        let first = OnlyOne::lock(&folder).unwrap();
        let error = OnlyOne::lock(&folder).unwrap_err().to_string();
        assert!(error.contains("One agent a node"), "{error}");
        drop(first);
        OnlyOne::lock(&folder).unwrap();
        fs::remove_dir_all(folder).unwrap();
    }

    #[tokio::test]
    async fn no_more_peers_are_accepted_than_there_are_slots() {
        let folder = crate::files::temp_folder();
        let path = folder.join("x.sock");
        let open = gauge();
        let socket = Socket::bind(&path, 1, open.clone()).unwrap();
        let (_one, _two) = (
            UnixStream::connect(&path).unwrap(),
            UnixStream::connect(&path).unwrap(),
        );
        let first = socket.accept().await;
        assert_eq!(open.get(), 1);
        let soon = Duration::from_millis(50);
        let second = tokio::time::timeout(soon, socket.accept()).await;
        assert!(second.is_err(), "there is one slot");
        drop(first);
        socket.accept().await;
        assert_eq!(open.get(), 0);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn only_root_and_the_user_of_the_agent_may_ask() {
        assert!(may_ask(0, 1000) && may_ask(1000, 1000) && !may_ask(1001, 1000));
    }
}
