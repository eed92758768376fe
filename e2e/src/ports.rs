//! Finds ports on loopback that stay free while a server is down.
//!
//! All ports are below 32768, because Linux takes the ports of outgoing connections from above. So an API server that
//! is killed and restarted finds its port free, even while its clients try to reconnect. Within one process, [`free`]
//! returns each port only once, until all have been used.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

use anyhow::{Result, bail};

const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// Returns a port on 127.0.0.1 on which nothing listens now.
///
/// Another process may still take the port before the caller does, but only if that process started its search at the
/// same random port.
pub fn free() -> Result<u16> {
    static NEXT: OnceLock<AtomicU16> = OnceLock::new();
    let next = NEXT.get_or_init(|| AtomicU16::new(random_below(COUNT)));
    for _ in 0..COUNT {
        let port = FIRST + next.fetch_add(1, Ordering::Relaxed) % COUNT;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    bail!(
        "no free port on 127.0.0.1 between {FIRST} and {}",
        FIRST + COUNT - 1
    )
}

fn random_below(limit: u16) -> u16 {
    let seed = RandomState::new().hash_one(std::process::id());
    u16::try_from(seed % u64::from(limit)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn ports_differ_are_not_ephemeral_and_not_in_use() {
        let ports: BTreeSet<u16> = (0..100).map(|_| free().unwrap()).collect();
        assert_eq!(ports.len(), 100);
        assert!(
            ports.iter().all(|port| (FIRST..32_768).contains(port)),
            "{ports:?}"
        );
        let port = *ports.first().unwrap();
        let _listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        for _ in 0..COUNT {
            assert_ne!(free().unwrap(), port);
        }
    }
}
