//! Decides which addresses are probed before a pod needs them, and reports addresses in conflict. An address is in
//! conflict if another host uses it.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::conditions::set;
use super::snapshot::terms;
use cadastre_api::{ADDRESS_CONFLICT, AddressConflict, MOST_CONFLICTS};
use cadastre_core::Addr;
use cadastre_node::{Conflict, MOST_PROBES, ProbeTargets, Snapshot};

/// The reason of the events and of the condition about addresses in conflict.
pub(crate) const REASON: &str = "AddressConflict";
/// The maximum number of addresses that the message of the condition names.
const MOST_NAMED: usize = 8;

/// Returns the addresses to probe now, all on one interface; `None` if no probe is needed. For each pool that requires
/// probes, `warm.low` probed addresses are kept ready, but at most [`MOST_PROBES`] of each family. If all pools have
/// enough probed addresses, addresses in conflict are probed again when their next probe is due.
pub(crate) fn to_probe(snapshot: &Snapshot) -> Option<ProbeTargets> {
    let lacking = snapshot.probes.iter().find_map(|it| {
        let low = terms(snapshot, &it.pool).map_or(0, |terms| terms.warm.0);
        let wanted = usize::try_from(low).unwrap_or(MOST_PROBES).min(MOST_PROBES);
        let ready = usize::try_from(it.ready).unwrap_or(MOST_PROBES);
        let count = wanted.saturating_sub(ready);
        let addresses: Vec<Addr> = it.next.iter().take(count).copied().collect();
        (!addresses.is_empty()).then(|| ProbeTargets {
            interface: it.interface.clone(),
            addresses,
        })
    });
    lacking.or_else(|| {
        let mut due = snapshot.conflicts.iter().filter(|it| it.is_due).peekable();
        let interface = due.peek()?.interface.clone();
        let due = due.filter(|it| it.interface == interface);
        let addresses = due.take(MOST_PROBES).map(|it| it.address).collect();
        Some(ProbeTargets {
            interface,
            addresses,
        })
    })
}

/// Returns those conflicts of the node that a user has declared to be over, each with the time at which the conflict
/// began.
pub(crate) fn ended(snapshot: &Snapshot, by_people: &BTreeSet<(Addr, i64)>) -> Vec<(Addr, i64)> {
    let all = snapshot.conflicts.iter();
    let all = all.map(|it| (it.address, it.since_ms));
    all.filter(|it| by_people.contains(it)).collect()
}

/// Returns the text of the event about a conflict.
pub(crate) fn text(it: &Conflict) -> String {
    let interface = match it.interface.as_str() {
        "" => "the node's interface".to_owned(),
        name => format!("interface {name}"),
    };
    format!(
        "{} of pool {} is set aside: the host {} answers for it on {interface}. Remove the address from that host, or reserve it in the pool. To have it probed again at once: kubectl cadastre release {}",
        it.address, it.pool, it.by, it.address
    )
}

/// Returns at most [`MOST_CONFLICTS`] conflicts for NodeSubnet.status.
pub(crate) fn listed(snapshot: &Snapshot) -> Vec<AddressConflict> {
    let all = snapshot.conflicts.iter().take(MOST_CONFLICTS);
    let all = all.map(|it| AddressConflict {
        address: it.address.to_string(),
        pool: it.pool.clone(),
        by: it.by.chars().take(64).collect(),
        since_ms: it.since_ms,
    });
    all.collect()
}

/// Returns the condition about addresses in conflict; [`merged`](super::conditions::merged) sets its timestamp. Returns
/// `None` if there is nothing to report. The condition is set to `False` only if `before` contains it already.
pub(crate) fn condition(snapshot: &Snapshot, before: &[Condition]) -> Option<Condition> {
    let conflicts = &snapshot.conflicts;
    let is_true = !conflicts.is_empty();
    let (reason, message) = if is_true {
        let named = conflicts.iter().take(MOST_NAMED);
        let named = named.map(|it| format!("{} ({})", it.address, it.by));
        let named: Vec<String> = named.collect();
        let more = match conflicts.len().saturating_sub(MOST_NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        (
            REASON,
            format!(
                "other hosts answer for addresses of this node, which are set aside: {}{more}",
                named.join(", ")
            ),
        )
    } else {
        (
            "NoConflict",
            "no other host answers for an address of this node".to_owned(),
        )
    };
    set(ADDRESS_CONFLICT, (is_true, reason, message), before)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::snapshot::testing::{addr, pool, snapshot};
    use cadastre_node::PoolProbes;

    pub(crate) fn conflict(address: &str, since_ms: i64) -> Conflict {
        Conflict {
            address: addr(address),
            pool: "a".to_owned(),
            by: "02:00:00:00:00:07".to_owned(),
            interface: String::new(),
            since_ms,
            is_due: false,
        }
    }

    fn probes(ready: u64, next: &[&str]) -> PoolProbes {
        PoolProbes {
            pool: "a".to_owned(),
            interface: "eth1".to_owned(),
            ready,
            next: next.iter().map(|it| addr(it)).collect(),
        }
    }

    #[test]
    fn as_many_addresses_are_probed_ahead_as_the_low_mark_asks_for() {
        let mut it = snapshot(&[pool("a", (3, 50), true, false)], &[]);
        assert_eq!(to_probe(&it), None);
        it.probes = vec![probes(1, &["10.0.0.2", "10.0.0.3", "10.0.0.4"])];
        let targets = to_probe(&it).unwrap();
        assert_eq!(targets.interface, "eth1");
        assert_eq!(targets.addresses, [addr("10.0.0.2"), addr("10.0.0.3")]);
        it.conflicts = vec![conflict("10.0.0.9", 1)];
        it.probes[0].ready = 3;
        assert_eq!(to_probe(&it), None);
        it.conflicts[0].is_due = true;
        let targets = to_probe(&it).unwrap();
        assert_eq!(targets.interface, "");
        assert_eq!(targets.addresses, [addr("10.0.0.9")]);
    }

    #[test]
    fn the_condition_names_addresses_and_hosts_and_becomes_false() {
        let mut it = snapshot(&[], &[]);
        assert_eq!(condition(&it, &[]), None);
        it.conflicts = (1..=9)
            .map(|n| conflict(&format!("10.0.0.{n}"), 1))
            .collect();
        let is = condition(&it, &[]).unwrap();
        assert_eq!((&*is.type_, &*is.status), ("AddressConflict", "True"));
        assert!(
            is.message
                .contains("10.0.0.8 (02:00:00:00:00:07) and 1 more"),
            "{}",
            is.message
        );
        it.conflicts.clear();
        assert_eq!(condition(&it, &[is]).unwrap().status, "False");
    }

    #[test]
    fn an_operator_ends_only_the_conflict_that_was_seen() {
        let mut it = snapshot(&[], &[]);
        it.conflicts = vec![conflict("10.0.0.1", 7), conflict("10.0.0.2", 7)];
        let said = BTreeSet::from([(addr("10.0.0.1"), 6), (addr("10.0.0.2"), 7)]);
        assert_eq!(ended(&it, &said), [(addr("10.0.0.2"), 7)]);
    }
}
