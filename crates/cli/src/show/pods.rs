//! Addresses in use: of a pod, of a handle, of a node.

use anyhow::bail;
use jiff::Timestamp;
use serde::Serialize;

use crate::address::{State, describe};
use crate::inventory::{Held, Inventory};
use crate::render::{Columns, Facts, Report, Style, age};
use cadastre_core::Addr;

/// An address in use.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AllocationRow {
    /// The address
    pub address: Addr,
    /// How it stands
    pub state: State,
    /// The pool that it counts to
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The block or podCIDR that it is in
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<String>,
    /// The node
    pub node: String,
    /// `namespace/name`
    pub pod: String,
    /// Its UID
    #[serde(rename = "podUID")]
    pub pod_uid: String,
    /// The interface in the pod
    pub interface: String,
    /// Network name and container id
    pub handle: String,
    /// Since when
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
}

/// What agents say, with the state of each address.
pub(super) fn allocations<'a>(
    held: impl Iterator<Item = (Addr, &'a Held)>,
    inventory: &Inventory,
) -> Vec<AllocationRow> {
    held.map(|(addr, held)| {
        let report = describe(addr, inventory);
        let allocation = &held.allocation;
        AllocationRow {
            address: addr,
            state: report.state,
            pool: report.pool,
            range: report.range.map(|range| range.cidr.to_string()),
            node: held.node.to_string(),
            pod: allocation.pod.clone(),
            pod_uid: allocation.pod_uid.clone(),
            interface: allocation.interface.clone(),
            handle: allocation.handle.clone(),
            since: allocation.since,
        }
    })
    .collect()
}

/// How old a list of addresses is, in words.
pub(super) fn as_of(listed_at: Option<Timestamp>, style: &Style) -> String {
    match listed_at {
        Some(_) => format!("as of {} ago", age(listed_at, style.now)),
        None => String::new(),
    }
}

/// Addresses as a table.
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

/// A pod and its addresses.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodReport {
    /// `namespace/name`; empty where a handle was asked for
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// Its UID; empty where no such pod exists
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    /// Where it is bound to
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Its phase
    #[serde(skip_serializing_if = "String::is_empty")]
    pub phase: String,
    /// Whether its addresses are the node's
    pub host_network: bool,
    /// The addresses that it reports
    pub reports: Vec<Addr>,
    /// The addresses that agents hold for it
    pub allocations: Vec<AllocationRow>,
    /// When the list of its node was right
    #[serde(skip_serializing_if = "Option::is_none")]
    pub as_of: Option<Timestamp>,
}

/// Looks a pod up: one that exists, or one that agents still hold addresses for.
pub fn pod(name: &str, inventory: &Inventory) -> anyhow::Result<PodReport> {
    let found = inventory.pod(name);
    let uid = found.map_or("", |pod| pod.uid.as_str());
    let is_its = |held: &Held| {
        held.allocation.pod == name || (!uid.is_empty() && held.allocation.pod_uid == uid)
    };
    let held = inventory.held().filter(|(_, held)| is_its(held));
    let allocations = allocations(held, inventory);
    if found.is_none() && allocations.is_empty() {
        bail!("there is no pod {name}, and no node holds an address for one (kubectl get pods -A)");
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

/// Looks up what was given under a handle: all of it, or how it or its container id begins.
pub fn handle(text: &str, inventory: &Inventory) -> anyhow::Result<PodReport> {
    let is_it = |held: &Held| {
        let handle = held.allocation.handle.as_str();
        let parts = handle.split(['/', ':', '.']);
        let whole = !text.is_empty() && handle.starts_with(text);
        whole || (text.len() >= 6 && parts.into_iter().any(|part| part.starts_with(text)))
    };
    let held = inventory.held().filter(|(_, held)| is_it(held));
    let allocations = allocations(held, inventory);
    if allocations.is_empty() {
        bail!(
            "no node holds an address under the handle \"{text}\": give its beginning, or at least 6 characters of the container id"
        );
    }
    Ok(PodReport {
        pod: String::new(),
        uid: String::new(),
        node: None,
        phase: String::new(),
        host_network: false,
        reports: Vec::new(),
        as_of: None,
        allocations,
    })
}

impl Report for PodReport {
    fn text(&self, style: &Style) -> String {
        let mut text = String::new();
        if !self.pod.is_empty() {
            let reports: Vec<String> = self.reports.iter().map(ToString::to_string).collect();
            let mut facts = Facts::default();
            facts.add("Pod", self.pod.as_str());
            facts.add("UID", self.uid.as_str());
            facts.add("Node", self.node.clone().unwrap_or_default());
            facts.add("Phase", self.phase.as_str());
            facts.add("Reports", reports.join(", "));
            facts.add("Listed", as_of(self.as_of, style));
            if self.host_network {
                facts.add("Network", "the node's: it needs no address of its own");
            }
            text = facts.text();
            text += "\n";
        }
        text + &table(
            &self.allocations,
            style,
            "No agent's list has an address for it.",
        )
    }
}
