//! Unix sockets that only root and the agent's own user may use.
//!
//! # Guarantees
//! - A socket that a live process listens on is left alone; what a killed one left is replaced.
//! - Two agents cannot take each other's sockets: a lock on a file beside them decides, which goes
//!   with its process.

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

use cadastre_node::advice;

/// Pause after a connection could not be taken, as when file descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Why the sockets cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another agent runs here.
    #[error(
        "another agent of this node is at work: {} {what}. One agent a node: stop this one, or that one first",
        path.display()
    )]
    Taken {
        /// Its socket or lock
        path: PathBuf,
        /// How that is known
        what: &'static str,
    },
    /// The path cannot be used.
    #[error(
        "cannot {what} {}: {error}. {}",
        path.display(),
        advice(error).unwrap_or("Check the path and its owner.")
    )]
    Io {
        /// What was tried
        what: &'static str,
        /// On which path
        path: PathBuf,
        /// What the system says
        error: io::Error,
    },
}

fn at<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> SocketError + 'a {
    move |error| SocketError::Io {
        what,
        path: path.to_owned(),
        error,
    }
}

/// Held while this process is the node's agent.
#[derive(Debug)]
pub struct OnlyOne(#[expect(dead_code, reason = "the lock goes with it")] File);

impl OnlyOne {
    /// Becomes the node's agent, unless another process is.
    pub fn lock(folder: &Path) -> Result<Self, SocketError> {
        make_folder(folder)?;
        let path = folder.join("agent.lock");
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&path).map_err(at("open", &path))?;
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(TryLockError::WouldBlock) => Err(SocketError::Taken {
                path,
                what: "is locked",
            }),
            Err(TryLockError::Error(error)) => Err(at("lock", &path)(error)),
        }
    }
}

/// Makes the folder of sockets for its owner, where it is missing.
pub fn make_folder(folder: &Path) -> Result<(), SocketError> {
    if folder.is_dir() {
        return Ok(());
    }
    let mut builder = DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(folder);
    made.map_err(at("create", folder))
}

/// A socket that is removed when this is dropped.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
    slots: Arc<Semaphore>,
    open: IntGauge,
}

/// A connection of a peer that may be served. The place that it takes is free again when it is
/// dropped.
#[derive(Debug)]
pub struct Peer {
    /// The connection
    pub stream: tokio::net::UnixStream,
    /// Its place
    pub slot: Slot,
}

/// A place among the connections of a socket.
#[derive(Debug)]
pub struct Slot {
    _permit: OwnedSemaphorePermit,
    open: IntGauge,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.open.dec();
    }
}

impl Socket {
    /// Listens on `path`, mode 0600, for at most so many connections at a time. What nobody listens
    /// on any more is removed first.
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
                fs::remove_file(path).map_err(at("remove the stale socket", path))?;
            }
            Err(error) => return Err(at("use the socket", path)(error)),
        }
        // Nobody can connect before it has its name and its mode.
        let new = path.with_extension("new");
        let _ = fs::remove_file(&new);
        let listener = UnixListener::bind(&new).map_err(at("listen on", &new))?;
        let placed = fs::set_permissions(&new, Permissions::from_mode(0o600))
            .and_then(|()| fs::rename(&new, path));
        placed.map_err(at("put in place the socket", path))?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            slots: Arc::new(Semaphore::new(connections)),
            open,
        })
    }

    /// The next peer that may be served; others are sent away.
    pub async fn accept(&self) -> Peer {
        loop {
            let permit = match Arc::clone(&self.slots).acquire_owned().await {
                Ok(permit) => permit,
                // It is never closed.
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
                    self.open.inc();
                    let open = self.open.clone();
                    let slot = Slot {
                        _permit: permit,
                        open,
                    };
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

/// Whether a peer of that user is served by an agent of this one.
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
        // As a killed process leaves it.
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
    async fn no_more_peers_than_there_are_places() {
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
        assert!(second.is_err(), "a second place");
        drop(first);
        socket.accept().await;
        assert_eq!(open.get(), 0);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn root_and_the_own_user_may_ask() {
        assert!(may_ask(0, 1000) && may_ask(1000, 1000) && !may_ask(1001, 1000));
    }
}
