//! Requests of users about the addresses and blocks of a node, as annotations of the node's NodeSubnet. The value of
//! each annotation is a list of entries, separated by commas. These entries are possible:
//!
//! - `ADDRESS=PODUID` in [`RELEASE_ANNOTATION`]: release a leaked address without waiting for the grace period.
//! - `ADDRESS=container:NETWORK/CONTAINERID` in [`RELEASE_ANNOTATION`]: release the address although the node cannot
//!   tell whether this container is gone. With this entry, the user asserts that the container is gone.
//! - `ADDRESS=conflict:SINCE` in [`RELEASE_ANNOTATION`]: end the conflict that began at the time `SINCE` (milliseconds
//!   of Unix time), so that the address is probed again at once.
//! - The CIDR of a block in [`DRAIN_ANNOTATION`]: assign no new address from the block, and release the block once it
//!   is empty.
//! - An address or a CIDR inside of a block in [`WITHDRAW_ANNOTATION`]: assign no new address in this range, and
//!   withdraw the range once it is empty. The request ends when the entry is removed.
//!
//! # Guarantees
//! - No request releases an address that a pod still needs. Addresses of a living pod's newest sandbox are kept.
//!   Addresses whose sandbox still exists on the node are kept, too.
//! - An entry that no longer applies is ignored, so users need not remove requests in time. An old entry cannot match a
//!   later object by mistake, because a pod's UID, a container's ID, and a block's CIDR together with the node's name
//!   are unambiguous.
//! - An entry that cannot be parsed is ignored. The other entries are still read.

use std::collections::BTreeSet;

use super::names::{DRAIN_ANNOTATION, RELEASE_ANNOTATION, WITHDRAW_ANNOTATION};
use cadastre_core::{Addr, Cidr};

/// The maximum number of entries of an annotation that are read. Further entries are ignored.
pub(crate) const MOST_REQUESTS: usize = 1_024;

/// In an entry of [`RELEASE_ANNOTATION`], this prefix comes before the handle of a container. Without a prefix, the
/// text is the UID of a pod.
const CONTAINER: &str = "container:";

/// In an entry of [`RELEASE_ANNOTATION`], this prefix comes before the time at which a conflict began.
const CONFLICT: &str = "conflict:";

/// The requests that users have written to the annotations of one NodeSubnet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Addresses to release, each with the UID of the pod to which it was assigned
    pub release: BTreeSet<(Addr, String)>,
    /// Addresses to release, each with the handle (network and container ID) to which it was assigned. With the
    /// request, the user asserts that the container is gone.
    pub container_gone: BTreeSet<(Addr, String)>,
    /// Addresses whose conflict is over, each with the time when the conflict began, in milliseconds of Unix time
    pub conflict_over: BTreeSet<(Addr, i64)>,
    /// CIDRs of blocks to drain. No new address is assigned from such a block, and the block is released once it is
    /// empty
    pub drain: BTreeSet<Cidr>,
    /// Ranges inside of the node's blocks. The node assigns no address of these ranges until the request ends. A single
    /// address is a range of one address
    pub withdraw: BTreeSet<Cidr>,
}

impl Requests {
    /// Parses the requests. `annotation` returns the value of the annotation with the given name.
    pub fn read<'a>(annotation: impl Fn(&str) -> Option<&'a str>) -> Self {
        let entries = |name| {
            let text = annotation(name).unwrap_or_default();
            text.split(',').map(str::trim).take(MOST_REQUESTS)
        };
        let mut release = BTreeSet::new();
        let mut container_gone = BTreeSet::new();
        let mut conflict_over = BTreeSet::new();
        for entry in entries(RELEASE_ANNOTATION) {
            let Some((address, whose)) = entry.split_once('=') else {
                continue;
            };
            let Some(address) = Addr::parse_lenient(address) else {
                continue;
            };
            if let Some(since) = whose.strip_prefix(CONFLICT) {
                conflict_over.extend(since.parse().ok().map(|since: i64| (address, since)));
                continue;
            }
            let (whose, all, longest) = match whose.strip_prefix(CONTAINER) {
                Some(handle) => (handle, &mut container_gone, 512),
                None => (whose, &mut release, 128),
            };
            if !whose.is_empty() && whose.len() <= longest {
                all.insert((address, whose.to_owned()));
            }
        }
        Self {
            release,
            container_gone,
            conflict_over,
            drain: entries(DRAIN_ANNOTATION)
                .filter_map(|entry| Cidr::parse_strict(entry).ok())
                .collect(),
            withdraw: entries(WITHDRAW_ANNOTATION).filter_map(range).collect(),
        }
    }

    /// Returns the value for [`RELEASE_ANNOTATION`], or `None` if no release is requested.
    pub fn release_text(&self) -> Option<String> {
        let pods = self.release.iter();
        let pods = pods.map(|(address, pod)| format!("{address}={pod}"));
        let containers = self.container_gone.iter();
        let containers =
            containers.map(|(address, handle)| format!("{address}={CONTAINER}{handle}"));
        let conflicts = self.conflict_over.iter();
        let conflicts = conflicts.map(|(address, since)| format!("{address}={CONFLICT}{since}"));
        joined(pods.chain(containers).chain(conflicts))
    }

    /// Returns the value for [`DRAIN_ANNOTATION`], or `None` if no drain is requested.
    pub fn drain_text(&self) -> Option<String> {
        joined(self.drain.iter().map(ToString::to_string))
    }

    /// Returns the value for [`WITHDRAW_ANNOTATION`], or `None` if nothing is to be withdrawn.
    pub fn withdraw_text(&self) -> Option<String> {
        joined(self.withdraw.iter().map(ToString::to_string))
    }
}

/// Parses an address or a CIDR. An address becomes a CIDR of one address.
fn range(text: &str) -> Option<Cidr> {
    let address = Addr::parse_strict(text).map(Cidr::host);
    address.or_else(|| Cidr::parse_strict(text).ok())
}

fn joined(entries: impl Iterator<Item = String>) -> Option<String> {
    let entries: Vec<String> = entries.collect();
    (!entries.is_empty()).then(|| entries.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(release: &str, drain: &str) -> Requests {
        let (release, drain) = (release.to_owned(), drain.to_owned());
        Requests::read(|name| match name {
            RELEASE_ANNOTATION => Some(release.as_str()),
            DRAIN_ANNOTATION => Some(drain.as_str()),
            _ => None,
        })
    }

    #[test]
    fn written_requests_are_read_back() {
        let requests = read(
            "10.0.0.2=u2, 10.0.0.1=u1,fd00::1=u,10.0.0.1=container:net/c1,10.0.0.3=conflict:7",
            "10.1.0.0/26,fd00::/122",
        );
        assert_eq!(requests.release.len(), 3);
        let handles: Vec<&str> = requests.container_gone.iter().map(|it| &*it.1).collect();
        assert_eq!(handles, ["net/c1"]);
        assert_eq!(requests.conflict_over.len(), 1);
        assert_eq!(requests.drain.len(), 2);
        let (release, drain) = (requests.release_text(), requests.drain_text());
        let again = read(&release.unwrap(), &drain.unwrap());
        assert_eq!(again, requests);
    }

    #[test]
    fn invalid_entries_are_ignored() {
        let uid = "u".repeat(129);
        let requests = read(
            &format!("x,10.0.0.1,10.0.0.1=,10.0.0.300=u,10.0.0.4={uid},10.0.0.9=u"),
            "10.1.0.0/26,10.1.0.1/26,surplus,",
        );
        assert_eq!(requests.release_text().unwrap(), "10.0.0.9=u");
        assert_eq!(requests.drain_text().unwrap(), "10.1.0.0/26");
        assert_eq!(Requests::default().release_text(), None);
    }

    #[test]
    fn a_long_list_is_cut() {
        let many: Vec<String> = (0..2_000)
            .map(|n| format!("10.0.{}.{}=u", n / 250, n % 250))
            .collect();
        assert_eq!(read(&many.join(","), "").release.len(), MOST_REQUESTS);
    }
}
