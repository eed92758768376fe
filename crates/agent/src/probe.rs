//! Carries out probes. A probe asks the link, through the kernel's table of neighbours, whether another host has an
//! address.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard};

use super::neighbours::{self, Link};
use cadastre_core::{Addr, Family};
use cadastre_node::{ProbeRound, ProbeTargets, clock};

/// The time within which a host must answer. The kernel asks once in this time.
const ANSWERED_WITHIN: Duration = Duration::from_millis(200);

/// Probes addresses in rounds. Only one round is under way at a time, so that no round removes another round's entries
/// from the kernel's table of neighbours.
#[derive(Default)]
pub struct Prober {
    turn: Mutex<()>,
    rounds: AtomicU64,
}

impl Prober {
    /// Returns how many rounds have ended since the agent started. A round that could not probe its addresses is not
    /// counted.
    pub(crate) fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Acquire)
    }

    /// Waits until no other round is under way. No other round begins before the returned guard is dropped.
    pub(crate) async fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// Counts a round that has probed its addresses, even if the answers could not be recorded.
    pub(crate) fn ended(&self) {
        self.rounds.fetch_add(1, Ordering::Release);
    }
}

/// Probes all addresses at the same time. Fails if an address cannot be probed.
pub(crate) async fn probe(targets: &ProbeTargets) -> Result<ProbeRound, String> {
    let begun = clock::since_boot();
    let mut links: BTreeMap<Family, Link> = BTreeMap::new();
    for addr in &targets.addresses {
        ask(&targets.interface, *addr, &mut links).map_err(|error| {
            let advice = match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    ": the agent needs the capability NET_ADMIN (agent.conflictProbes of the chart)"
                }
                _ => "",
            };
            format!("{addr} cannot be probed: {error}{advice}")
        })?;
    }
    tokio::time::sleep(ANSWERED_WITHIN).await;
    let mut answers = Vec::new();
    for addr in &targets.addresses {
        let Some(link) = links.get(&addr.family) else {
            continue;
        };
        let answer = neighbours::answer(link, IpAddr::from(*addr));
        let answer = answer.map_err(|error| format!("{addr} cannot be probed: {error}"))?;
        answers.push((*addr, answer));
    }
    Ok(ProbeRound {
        interface: targets.interface.clone(),
        begun,
        answers,
    })
}

/// Makes the kernel ask the hosts on the link for an address. The interface is looked up once for each family, and kept
/// in `links`.
fn ask(interface: &str, addr: Addr, links: &mut BTreeMap<Family, Link>) -> io::Result<()> {
    let link = match links.entry(addr.family) {
        Entry::Occupied(link) => link.into_mut(),
        Entry::Vacant(place) => place.insert(link(interface, addr.family)?),
    };
    neighbours::ask(link, IpAddr::from(addr))
}

fn link(interface: &str, family: Family) -> io::Result<Link> {
    let name = match interface {
        "" => default_interface(family)?,
        name => name.to_owned(),
    };
    if family == Family::V6 {
        neighbours::check_ipv6(&name)?;
    }
    neighbours::link(&name)
}

/// Returns the interface of the node's default route of this family. If there is no such route, returns the interface
/// of the other family's default route.
fn default_interface(family: Family) -> io::Result<String> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let (v4, v6) = (read("/proc/net/route"), read("/proc/net/ipv6_route"));
    let (v4, v6) = (default_v4(&v4), default_v6(&v6));
    let found = match family {
        Family::V4 => v4.or(v6),
        Family::V6 => v6.or(v4),
    };
    let absent = "the node has no default route whose interface could be probed, and the CNI configuration names no `master`";
    found.ok_or_else(|| io::Error::other(absent))
}

/// Finds the default route with the lowest metric in `/proc/net/route`.
fn default_v4(routes: &str) -> Option<String> {
    let any = format!("{:08X}", u32::from(Ipv4Addr::UNSPECIFIED));
    let defaults = routes.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_default =
            fields.get(1) == Some(&any.as_str()) && fields.get(7) == Some(&any.as_str());
        let metric: u32 = fields.get(6)?.parse().ok()?;
        is_default.then(|| (metric, fields[0].to_owned()))
    });
    defaults.min().map(|(_, name)| name)
}

/// Finds the default route with the lowest metric in `/proc/net/ipv6_route`. Skips default routes of the loopback
/// interface, because they only reject packets.
fn default_v6(routes: &str) -> Option<String> {
    let any = format!("{:032x}", u128::from(Ipv6Addr::UNSPECIFIED));
    let defaults = routes.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [dst, "00", _, _, _, metric, .., name] = fields[..] else {
            return None;
        };
        let metric = u32::from_str_radix(metric, 16).ok()?;
        (dst == any && name != "lo").then(|| (metric, name.to_owned()))
    });
    defaults.min().map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_route_with_the_lowest_metric_counts() {
        let v4 = "\
Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth1 00000000 010AA8C0 0003 0 0 200 00000000 0 0 0
eth0 00000000 0100A8C0 0003 0 0 100 00000000 0 0 0
eth2 0000A8C0 00000000 0001 0 0 0 00FFFFFF 0 0 0
";
        assert_eq!(default_v4(v4).as_deref(), Some("eth0"));
        assert_eq!(default_v4(""), None);
        let zeros = "0".repeat(32);
        let route = |dst: &str, len: &str, metric: &str, name: &str| {
            format!("{dst} {len} {zeros} 00 {zeros} {metric} 00000001 00000000 00000003 {name}\n")
        };
        let v6 = [
            route(&zeros, "00", "ffffffff", "lo"),
            route(&zeros, "00", "00000400", "eth0"),
            route(&format!("fe80{}", "0".repeat(28)), "40", "00000100", "eth1"),
        ];
        assert_eq!(default_v6(&v6.concat()).as_deref(), Some("eth0"));
    }
}
