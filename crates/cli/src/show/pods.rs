//! `show pod` and `show handle`: the addresses in use of a pod, or of the attachments with a handle.

use anyhow::bail;
use jiff::Timestamp;
use serde::Serialize;

use crate::address::{AddressState, describe};
use crate::inventory::{AddressInUse, Inventory};
use crate::render::{Columns, FactLines, Style, VerbReport, age, joined};
use cadastre_controller::cluster::objects::PodUid;
use cadastre_core::Addr;

/// An address in use, as an agent reports it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AllocationRow {
    pub address: Addr,
    /// The state of the address, normally `InUse`
    pub state: AddressState,
    /// The pool that contains the address
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The block or podCIDR that contains the address
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<String>,
    /// The node whose agent reports the address
    pub node: String,
    /// The pod as `namespace/name`; empty if the address belongs to no pod
    pub pod: String,
    /// The UID of the pod; empty if the agent does not know it
    #[serde(rename = "podUID")]
    pub pod_uid: String,
    pub interface: String,
    /// The network's name and the container id: `network/containerID`
    pub handle: String,
    /// The time at which the address was assigned
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
}

/// Returns a row for each address in use that `is_shown` accepts. The row contains the state of the address.
pub(super) fn allocations(
    is_shown: impl Fn(&AddressInUse) -> bool,
    inventory: &Inventory,
) -> Vec<AllocationRow> {
    let row = |(addr, entry): (Addr, &AddressInUse)| {
        let report = describe(addr, inventory);
        let allocation = entry.allocation.clone();
        AllocationRow {
            address: addr,
            state: report.state,
            pool: report.pool,
            range: report.range.map(|range| range.cidr.to_string()),
            node: entry.node.to_string(),
            pod: allocation.pod,
            pod_uid: allocation.pod_uid,
            interface: allocation.interface,
            handle: allocation.handle,
            since: allocation.since,
        }
    };
    let shown = inventory.addresses_in_use();
    shown.filter(|(_, it)| is_shown(it)).map(row).collect()
}

/// Formats the age of an agent's list of addresses. Returns an empty text if there is no list.
pub(super) fn as_of(listed_at: Option<Timestamp>, style: &Style) -> String {
    match listed_at {
        Some(_) => format!("as of {} ago", age(listed_at, style.now)),
        None => String::new(),
    }
}

/// Formats addresses in use as a table, or returns `nothing` if there are none.
pub(super) fn table(rows: &[AllocationRow], style: &Style, nothing: &str) -> String {
    let heads = [
        "ADDRESS",
        "STATE",
        "POOL",
        "RANGE",
        "NODE",
        "POD",
        "INTERFACE",
        "SINCE",
        "+HANDLE",
        "+POD UID",
    ];
    let mut table = Columns::new(&heads);
    for row in rows {
        table.row([
            row.address.to_string(),
            format!("{:?}", row.state),
            row.pool.clone().unwrap_or_default(),
            row.range.clone().unwrap_or_default(),
            row.node.clone(),
            row.pod.clone(),
            row.interface.clone(),
            age(row.since, style.now),
            row.handle.clone(),
            row.pod_uid.clone(),
        ]);
    }
    table.text(style, nothing)
}

/// A pod and its addresses, or the addresses with a handle.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodReport {
    /// The pod as `namespace/name`; empty if the report is about a handle
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// The UID of the pod; empty if the pod does not exist
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    /// The node to which the pod is bound
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The pod's `status.phase`
    #[serde(skip_serializing_if = "String::is_empty")]
    pub phase: String,
    /// Whether the pod uses the host network, so that its addresses are those of the node
    pub host_network: bool,
    /// The addresses in the pod's status
    pub reports: Vec<Addr>,
    /// The addresses that agents report for the pod or handle
    pub allocations: Vec<AllocationRow>,
    /// The time at which the agent of the pod's node made its list of addresses
    #[serde(skip_serializing_if = "Option::is_none")]
    pub as_of: Option<Timestamp>,
}

/// Returns what is known about a pod. Fails if the pod does not exist and no agent reports an address of it.
pub(crate) fn pod(name: &str, inventory: &Inventory) -> anyhow::Result<PodReport> {
    let found = inventory.pod(name);
    let uid = found.map_or("", |pod| pod.uid.as_str());
    let is_of_pod = |entry: &AddressInUse| {
        let allocation = &entry.allocation;
        allocation.pod == name
            || (!uid.is_empty() && PodUid::read(&allocation.pod_uid) == PodUid::read(uid))
    };
    let allocations = allocations(is_of_pod, inventory);
    if found.is_none() && allocations.is_empty() {
        bail!(
            "there is no pod {name}, and no node has an address assigned to it (kubectl get pods -A)"
        );
    }
    Ok(PodReport {
        pod: name.to_owned(),
        uid: uid.to_owned(),
        node: found.and_then(|pod| pod.node.clone()),
        phase: found.map_or("gone".to_owned(), |pod| pod.phase.clone()),
        host_network: found.is_some_and(|pod| pod.host_network),
        reports: found.map(|pod| pod.addresses.clone()).unwrap_or_default(),
        as_of: found
            .and_then(|pod| inventory.subnets.get(pod.node.as_deref()?))
            .and_then(|subnet| subnet.listed_at),
        allocations,
    })
}

/// Finds addresses by the beginning of their handle, or by at least 6 characters of the container id's beginning. Fails
/// if no address matches.
pub(crate) fn handle(text: &str, inventory: &Inventory) -> anyhow::Result<PodReport> {
    let has_handle = |entry: &AddressInUse| {
        let handle = entry.allocation.handle.as_str();
        let mut parts = handle.split(['/', ':', '.']);
        let begins = !text.is_empty() && handle.starts_with(text);
        begins || (text.len() >= 6 && parts.any(|part| part.starts_with(text)))
    };
    let allocations = allocations(has_handle, inventory);
    if allocations.is_empty() {
        bail!(
            "no node has an address with the handle \"{text}\": give its beginning, or at least 6 characters of the container id"
        );
    }
    Ok(PodReport {
        allocations,
        ..PodReport::default()
    })
}

impl VerbReport for PodReport {
    fn text(&self, style: &Style) -> String {
        let mut text = String::new();
        if !self.pod.is_empty() {
            let mut facts = FactLines::default();
            facts.add("Pod", self.pod.as_str());
            facts.add("UID", self.uid.as_str());
            facts.add("Node", self.node.clone().unwrap_or_default());
            facts.add("Phase", self.phase.as_str());
            facts.add("Reports", joined(&self.reports));
            facts.add("Listed", as_of(self.as_of, style));
            if self.host_network {
                facts.add("Network", "the node's: it needs no address of its own");
            }
            text = facts.text();
            text += "\n";
        }
        let nothing = "No agent lists an address for it.";
        text + &table(&self.allocations, style, nothing)
    }
}
