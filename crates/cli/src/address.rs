//! What an address is and who uses it, for any address, in a pool or not.

use std::fmt::Write as _;

use jiff::Timestamp;
use serde::Serialize;

use super::inventory::{Cover, Inventory, PodFact};
use super::render::{Facts, Report, Style, age, over};
use cadastre_api::node_allocation;
use cadastre_controller::cluster::objects::PodUid;
use cadastre_core::usable::usable;
use cadastre_core::{Addr, Cidr};

/// What an address is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum State {
    /// An agent reports it in use by a pod that lives.
    InUse,
    /// An agent reports it in use by a pod that is gone or has ended: a leak, or about to be released.
    WithoutPod,
    /// An agent keeps it for an earlier sandbox of a pod with a newer one, and releases it when that sandbox is gone.
    Superseded,
    /// An agent reports it in use by something that is no pod.
    InUseByOther,
    /// A pod reports it, but no agent does.
    ReportedByPod,
    /// Several pods or agents use it at once.
    Duplicate,
    /// It is an address of a node itself.
    NodeAddress,
    /// It is in a range of services.
    Service,
    /// It belonged to a node that is gone, and its range is in quarantine.
    Quarantine,
    /// Its pool never assigns it.
    Reserved,
    /// Its pool assigns it only to a pod that asks for it.
    OnRequest,
    /// Its block's gateway.
    Gateway,
    /// The lowest address of the range that its block is part of: the network address.
    Network,
    /// The highest address of the range that its block is part of: the broadcast address, IPv4 only.
    Broadcast,
    /// It is in the block of a node, and free or in cooldown.
    Free,
    /// It is in the podCIDR of a node, for which no agent reports addresses.
    InPodCidr,
    /// It is in a pool, but in no range of a node.
    NotCarved,
    /// It is in no pool.
    Outside,
}

impl State {
    /// Describes the state for users.
    pub(crate) fn words(self) -> &'static str {
        match self {
            State::InUse => "in use",
            State::WithoutPod => "in use according to the agent, but its pod is gone or has ended",
            State::Superseded => {
                "assigned to an earlier sandbox of a pod that has a newer one: released when the earlier one is gone"
            }
            State::InUseByOther => "in use by something that is no pod",
            State::ReportedByPod => "reported by a pod, but by no agent",
            State::Duplicate => "DUPLICATE: in use more than once",
            State::NodeAddress => "an address of a node itself",
            State::Service => "in the service range",
            State::Quarantine => "in quarantine: the node that had it is gone",
            State::Reserved => "reserved: never assigned",
            State::OnRequest => "reserved: assigned only to a pod that asks for it",
            State::Gateway => "the gateway of its block: never assigned",
            State::Network => "the network address of its block: never assigned",
            State::Broadcast => "the broadcast address of its block: never assigned",
            State::Free => "free in a node's block, or in cooldown",
            State::InPodCidr => "in a node's podCIDR; nothing reports it",
            State::NotCarved => "in a pool, not allocated to a node",
            State::Outside => "outside of every pool",
        }
    }
}

/// All that is known about an address.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AddressReport {
    /// The address that was looked up
    pub address: Addr,
    /// What the address is
    pub state: State,
    /// The pool that it is in
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The smallest range of a node that contains it
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<RangeFact>,
    /// Other ranges that contain it as well: normally none
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub more_ranges: Vec<RangeFact>,
    /// The users of the address that agents report
    pub holders: Vec<Holder>,
    /// The pods that report it, as `namespace/name`
    pub pods: Vec<String>,
    /// The nodes whose own address it is
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
}

/// A range of a node.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RangeFact {
    /// The range as a CIDR
    pub cidr: Cidr,
    /// `block` or `podCIDR`
    pub kind: &'static str,
    /// The node that has it, or had it before the quarantine
    pub node: String,
    /// Whether the range is in quarantine, as its node is gone
    pub resting: bool,
    /// Since when the block has belonged to this owner
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// When its quarantine ends at the earliest
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
    /// The number of addresses in use that the agent reports
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<i64>,
    /// The number of addresses in cooldown; only the agent knows which ones
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cooling: Option<i64>,
    /// The number of addresses that can be assigned now
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free: Option<i64>,
}

/// A user of an address, as an agent reports it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// The node of the agent
    pub node: String,
    /// `namespace/name`
    pub pod: String,
    /// The UID of that pod; empty for something that is no pod
    #[serde(rename = "podUID")]
    pub pod_uid: String,
    /// Whether that pod exists and has not finished
    pub lives: bool,
    /// Whether that pod has a newer sandbox
    pub superseded: bool,
    /// Network name and container id: `network/containerID`
    pub handle: String,
    /// The name of the interface in the pod
    pub interface: String,
    /// Since when the address has been assigned
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
}

/// Finds out what an address is and who uses it.
pub fn describe(addr: Addr, inventory: &Inventory) -> AddressReport {
    let range = Cidr::host(addr);
    let pool = inventory.registry.pools.of(&range);
    let mut ranges: Vec<RangeFact> = inventory
        .covers(addr)
        .iter()
        .map(|cover| RangeFact::of(cover, inventory))
        .collect();
    // The smallest of several ranges is the most specific one.
    let own = ranges.pop();
    let held = inventory.held_at(addr).iter();
    let holders: Vec<Holder> = held.map(|held| Holder::of(held, inventory)).collect();
    let pods: Vec<&str> = inventory
        .pods_at(addr)
        .map(|pod| pod.name.as_str())
        .collect();
    let nodes = inventory.cache.nodes.iter();
    let nodes = nodes.filter(|node| node.addresses.contains(&addr));
    let nodes: Vec<String> = nodes.map(|node| node.name.to_string()).collect();
    let services = inventory.cache.services.iter();
    let is_service = services
        .flat_map(|it| &it.cidrs)
        .any(|cidr| cidr.contains_addr(addr));
    let reserved = pool.is_some_and(|pool| pool.space.is_blocked(&range));
    let on_request =
        pool.is_some_and(|pool| pool.on_request.iter().any(|it| it.within(&range).is_some()));
    // An agent that does not report the pod's UID may still report its name.
    let is_of = |holder: &Holder, pod: &PodFact| match holder.pod_uid.as_str() {
        "" => holder.pod == pod.name,
        uid => PodUid::read(uid) == PodUid::read(&pod.uid),
    };
    let others = inventory.pods_at(addr);
    let others = others.filter(|pod| !holders.iter().any(|it| is_of(it, pod)));
    let known = holders
        .iter()
        .filter(|it| it.lives || it.pod_uid.is_empty());
    let users = others.count() + known.count();
    let state = if users > 1 || pods.len() > 1 || holders.len() > 1 {
        State::Duplicate
    } else if let Some(holder) = holders.first() {
        match (holder.lives, holder.pod_uid.is_empty()) {
            (true, false) if holder.superseded => State::Superseded,
            (true, _) => State::InUse,
            _ if !pods.is_empty() => State::InUse,
            (false, true) => State::InUseByOther,
            (false, false) => State::WithoutPod,
        }
    } else if !pods.is_empty() {
        State::ReportedByPod
    } else if !nodes.is_empty() {
        State::NodeAddress
    } else if is_service {
        State::Service
    } else if own.as_ref().is_some_and(|range| range.resting) {
        State::Quarantine
    } else if on_request {
        State::OnRequest
    } else if reserved {
        State::Reserved
    } else if let Some(range) = &own {
        if range.kind == BLOCK {
            role(addr, range, inventory).unwrap_or(State::Free)
        } else {
            State::InPodCidr
        }
    } else if pool.is_some() {
        State::NotCarved
    } else {
        State::Outside
    };
    AddressReport {
        address: addr,
        state,
        pool: pool.map(|pool| pool.name.to_string()),
        range: own,
        more_ranges: ranges,
        holders,
        pods: pods.into_iter().map(str::to_owned).collect(),
        nodes,
    }
}

/// Returns why the node's agent never assigns the address: gateway, network or broadcast address; else `None`.
fn role(addr: Addr, range: &RangeFact, inventory: &Inventory) -> Option<State> {
    let subnet = inventory.subnets.get(range.node.as_str())?;
    let spec = subnet.spec.as_ref().ok()?;
    let (holding, _) = node_allocation::read(spec, spec.node_uid.as_deref()?);
    let block = node_allocation
        .blocks
        .iter()
        .find(|it| it.cidr == range.cidr)?;
    let pool = node_allocation
        .pools
        .iter()
        .find(|it| it.name == block.pool);
    let usable = usable(block.cidr, pool);
    let never = usable.excluded.iter();
    never
        .map(|span| span.first()..=span.last())
        .find(|it| it.contains(&addr))?;
    Some(match addr {
        _ if usable.gateway == Some(addr) => State::Gateway,
        addr if addr == block.cidr.first() => State::Network,
        _ => State::Broadcast,
    })
}

const BLOCK: &str = "Block";
const POD_CIDR: &str = "PodCIDR";

impl RangeFact {
    pub(crate) fn of(cover: &Cover, inventory: &Inventory) -> Self {
        let plain = |cidr: &Cidr, kind, node: &str| RangeFact {
            cidr: *cidr,
            kind,
            node: node.to_owned(),
            resting: false,
            since: None,
            until: None,
            used: None,
            cooling: None,
            free: None,
        };
        match cover {
            Cover::Block(entry) => {
                let word = inventory.word(entry);
                RangeFact {
                    resting: entry.owner.quarantined,
                    since: Some(entry.since),
                    until: entry.until,
                    used: word.map(|word| word.used),
                    cooling: word.map(|word| word.cooling),
                    free: word.map(|word| word.free),
                    ..plain(&entry.cidr, BLOCK, &entry.owner.name)
                }
            }
            Cover::PodCidr(cidr, node) => plain(cidr, POD_CIDR, node),
            Cover::Rest(cidr, node, until) => RangeFact {
                resting: true,
                until: Some(*until),
                ..plain(cidr, POD_CIDR, node)
            },
        }
    }

    fn words(&self, style: &Style) -> String {
        format!("{} {}", self.cidr, self.told(style))
    }

    /// Describes the range, without its CIDR.
    pub(crate) fn told(&self, style: &Style) -> String {
        let mut text = self.kind.to_owned();
        if self.resting {
            let _ = write!(text, " in quarantine, was node {}'s", self.node);
            let over = over(self.until, style.now);
            if !over.is_empty() {
                let _ = write!(text, ", {over}");
            }
        } else {
            let _ = write!(text, " of node {}", self.node);
        }
        if let Some(since) = self.since {
            let _ = write!(text, ", since {}", age(Some(since), style.now));
        }
        if let (Some(used), Some(cooling), Some(free)) = (self.used, self.cooling, self.free) {
            let _ = write!(text, " ({used} used, {cooling} cooling, {free} free)");
        }
        text
    }
}

impl Holder {
    fn of(held: &super::inventory::Held, inventory: &Inventory) -> Self {
        let allocation = &held.allocation;
        let pod = Some(allocation.pod_uid.as_str()).filter(|uid| !uid.is_empty());
        let pod = pod.and_then(|uid| inventory.pod_by_uid(uid));
        Holder {
            node: held.node.to_string(),
            pod: allocation.pod.clone(),
            pod_uid: allocation.pod_uid.clone(),
            lives: pod.is_some_and(|pod| !pod.finished),
            superseded: allocation.superseded,
            handle: allocation.handle.clone(),
            interface: allocation.interface.clone(),
            since: allocation.since,
        }
    }
}

impl AddressReport {
    /// Lists all that is known, with a name for each value.
    pub(crate) fn facts(&self, style: &Style) -> Facts {
        let mut facts = Facts::default();
        facts.add("Address", self.address.to_string());
        facts.add("State", self.state.words());
        facts.add("Pool", self.pool.clone().unwrap_or_default());
        if let Some(range) = &self.range {
            facts.add("Range", range.words(style));
        }
        for range in &self.more_ranges {
            facts.add("Also in", range.words(style));
        }
        for holder in &self.holders {
            facts.add("Node", holder.node.as_str());
            facts.add("Pod", holder.pod.as_str());
            facts.add("Pod UID", holder.pod_uid.as_str());
            facts.add("Interface", holder.interface.as_str());
            facts.add("Handle", holder.handle.as_str());
            facts.add("Since", age(holder.since, style.now));
        }
        for pod in &self.pods {
            facts.add("Reported by", format!("pod {pod}"));
        }
        for node in &self.nodes {
            facts.add("Reported by", format!("node {node}"));
        }
        facts
    }
}

impl Report for AddressReport {
    fn text(&self, style: &Style) -> String {
        self.facts(style).text()
    }
}
