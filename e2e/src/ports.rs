//! Finds ports on loopback that stay free while a server is down.
//!
//! All ports are below 32768, because Linux chooses the ports of outgoing connections from 32768 upwards. So an API
//! server that is killed and restarted finds its port free, even while its clients try to reconnect. Within one
//! process, [`free`] returns each port only once, until all have been used.
//!
//! Several processes may look for ports at the same time. Each process reserves its ports until it ends. To reserve a
//! port, the process listens on a socket in the abstract namespace, whose name contains the port. So nothing is left
//! behind.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::{Result, bail};

const PORTS: Range<u16> = 20_000..32_000;

/// Returns a port on 127.0.0.1 on which nothing listens now, and which no other test process gets while this one runs.
pub fn free() -> Result<u16> {
    static OWN: OnceLock<Mutex<Ports>> = OnceLock::new();
    let own = OWN.get_or_init(|| Mutex::new(Ports::new(PORTS)));
    own.lock().unwrap_or_else(PoisonError::into_inner).free()
}

/// The ports from which this process chooses, and the ports that it has reserved.
struct Ports {
    range: Range<u16>,
    /// The port at which the next search begins
    next: u16,
    reserved: BTreeMap<u16, UnixListener>,
}

impl Ports {
    fn new(range: Range<u16>) -> Self {
        let len = u64::try_from(range.len()).unwrap_or(1);
        let random = RandomState::new().hash_one(std::process::id()) % len;
        Ports {
            next: range.start + u16::try_from(random).unwrap_or_default(),
            range,
            reserved: BTreeMap::new(),
        }
    }

    fn free(&mut self) -> Result<u16> {
        for _ in self.range.clone() {
            let port = self.next;
            self.next = if port + 1 < self.range.end {
                port + 1
            } else {
                self.range.start
            };
            if let Entry::Vacant(port) = self.reserved.entry(port) {
                let Ok(reservation) = UnixListener::bind_addr(&name(*port.key())?) else {
                    continue;
                };
                port.insert(reservation);
            }
            if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
                return Ok(port);
            }
        }
        bail!("no port is free on 127.0.0.1 in {:?}", self.range)
    }
}

fn name(port: u16) -> Result<SocketAddr> {
    let name = format!("cadastre-e2e-port-{port}");
    Ok(SocketAddr::from_abstract_name(name)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn ports_differ_are_not_ephemeral_and_neither_in_use_nor_reserved() {
        let mut ports = Ports::new(31_900..32_000);
        let found: BTreeSet<u16> = (0..10).map(|_| ports.free().unwrap()).collect();
        assert_eq!(found.len(), 10);
        assert!(
            found.iter().all(|it| (31_900..32_000).contains(it)),
            "{found:?}"
        );
        let port = *found.first().unwrap();
        let _listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        let mut of_others = Ports::new(31_900..32_000);
        for _ in 0..200 {
            assert_ne!(ports.free().unwrap(), port);
        }
        assert!(
            of_others.free().is_err(),
            "the first process has all of them"
        );
    }
}
