//! Finds out what an address is and who uses it. This works for any address, in a pool or not.

use std::fmt::Write as _;

use jiff::Timestamp;
use serde::Serialize;

use super::claims::ClaimFact;
use super::inventory::{AddressInUse, Cover, Inventory, PodFact};
use super::render::{FactLines, Style, VerbReport, age, over, some};
use cadastre_api::{AddressConflict, node_allocation};
use cadastre_controller::cluster::objects::PodUid;
use cadastre_core::{Addr, Cidr};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum AddressState {
    /// An agent reports that the address is in use by a pod. The pod exists and has not ended.
    InUse,
    /// An agent reports that the address is in use by a pod, but the pod is gone or has ended. The address is leaked,
    /// or is about to be released.
    WithoutPod,
    /// An agent keeps the address for an earlier sandbox of a pod, and releases the address when that sandbox is gone.
    Superseded,
    /// An agent reports that the address is in use, but not by a pod.
    InUseByOther,
    /// A pod reports the address, but no agent does.
    ReportedByPod,
    /// Several pods use the address, or agents report the address more than once.
    Duplicate,
    /// The address belongs to a node itself.
    NodeAddress,
    /// The address is in a range of services.
    Service,
    /// The address is in a range that is in quarantine, because its node was deleted.
    Quarantine,
    /// A claim has the address, and nothing uses the address.
    Claimed,
    /// The pool never assigns the address.
    Reserved,
    /// The pool assigns the address only to a pod that asks for it.
    OnRequest,
    /// The address is the gateway of its block.
    Gateway,
    /// The address is the network address, the lowest of its block.
    Network,
    /// The address is the IPv4 broadcast address, the highest of its block.
    Broadcast,
    /// The address is in a block of a node, but a user took it out of the node with `pop`, so no pod gets the address.
    TakenOut,
    /// The address is in a block of a node. The node has set the address aside, because another host answered the
    /// node's probe for the address.
    Conflict,
    /// The address is in a block of a node, and in cooldown.
    Cooling,
    /// The address is in a block of a node, and no pod uses it. The address is free, or it is in cooldown and the
    /// agent's counts do not prove the cooldown.
    Free,
    /// The address is in a node's podCIDR, and neither an agent nor a pod reports that the address is in use.
    InPodCidr,
    /// The address is in a pool, but in no range of a node.
    NotCarved,
    /// The address is in no pool.
    Outside,
}

impl AddressState {
    /// Returns the text that is shown to users.
    pub(crate) fn description(self) -> &'static str {
        match self {
            AddressState::InUse => "in use",
            AddressState::WithoutPod => {
                "in use according to the agent, but its pod is gone or has ended"
            }
            AddressState::Superseded => {
                "assigned to an earlier sandbox of a pod that has a newer one: released when the earlier one is gone"
            }
            AddressState::InUseByOther => "in use by something that is no pod",
            AddressState::ReportedByPod => "reported by a pod, but by no agent",
            AddressState::Duplicate => "DUPLICATE: in use more than once",
            AddressState::NodeAddress => "an address of a node itself",
            AddressState::Service => "in the service range",
            AddressState::Quarantine => "in quarantine: the node that had it is gone",
            AddressState::Claimed => "of a claim, and not in use",
            AddressState::Reserved => "reserved: never assigned",
            AddressState::OnRequest => "reserved: assigned only to a pod that asks for it",
            AddressState::Gateway => "the gateway of its block: never assigned",
            AddressState::Network => "the network address of its block: never assigned",
            AddressState::Broadcast => "the broadcast address of its block: never assigned",
            AddressState::TakenOut => {
                "taken out of its node (kubectl cadastre pop): no pod gets it"
            }
            AddressState::Conflict => "in conflict: another host answers for it, so no pod gets it",
            AddressState::Cooling => "in cooldown in a node's block",
            AddressState::Free => "free in a node's block, or in cooldown",
            AddressState::InPodCidr => "in a node's podCIDR; nothing reports it",
            AddressState::NotCarved => "in a pool, not allocated to a node",
            AddressState::Outside => "outside of every pool",
        }
    }
}

/// The report of `show ip`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AddressReport {
    pub address: Addr,
    pub state: AddressState,
    /// The pool whose ranges contain the address; `None` if the address is in no pool
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The smallest range that contains the address. The range's node may be live or deleted
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<RangeFact>,
    /// Ranges that contain the address and are larger than `range`; normally there are none
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub more_ranges: Vec<RangeFact>,
    /// The claim that has the address
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<ClaimUse>,
    /// The host that answered the node's probe for the address. Set only if the node has set the address aside because
    /// of that answer
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conflict: Option<ConflictFact>,
    /// Claims other than `claim` that record the address or ask for it
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub other_claims: Vec<ClaimUse>,
    /// The agents' entries for the address; normally there is at most one
    pub holders: Vec<AddressHolder>,
    /// The pods that report the address in their status, as `namespace/name`
    pub pods: Vec<String>,
    /// The nodes that have the address as their own
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
}

/// A host that answers for an address although the address belongs to a node. The node probed the address, got an
/// answer from this host, and has set the address aside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ConflictFact {
    pub address: String,
    /// The link-layer address of the host that answers
    pub by: String,
    /// When the host with the link-layer address in `by` answered a probe for the first time
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
}

impl ConflictFact {
    pub(crate) fn of(conflict: &AddressConflict) -> Self {
        Self {
            address: conflict.address.clone(),
            by: conflict.by.clone(),
            since: Timestamp::from_millisecond(conflict.since_ms).ok(),
        }
    }

    pub(crate) fn words(&self, style: &Style) -> String {
        format!("{} answers, since {}", self.by, age(self.since, style.now))
    }
}

/// A claim, and its state as the controller describes it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClaimUse {
    /// `namespace/name`
    pub name: String,
    /// The reason of the condition Ready; empty if no controller has looked at the claim yet
    pub reason: String,
    /// The reason and the message of the condition Ready
    pub state: String,
    pub deleting: bool,
    /// The pods that name the claim, each with its node
    pub pods: Vec<String>,
}

/// A range of a node, and how many addresses of the range are in use.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RangeFact {
    pub cidr: Cidr,
    /// `Block` or `PodCIDR`
    pub kind: &'static str,
    /// The node that has the range, or that had it before the quarantine
    pub node: String,
    /// The claim that has the block's address, as `namespace/name`; `None` if the block is not the address of a claim
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// Whether the range is in quarantine, because its node was deleted
    pub quarantined: bool,
    /// When the block was allocated to this node, or when its quarantine began; `None` for a podCIDR
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// The earliest time at which the quarantine can end. The quarantine lasts longer if a pod still reports an address
    /// in the range at that time
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
    /// How many addresses of the range the agent reports as in use
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<i64>,
    /// How many addresses of the range are in cooldown. The agent does not report which addresses these are
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cooling: Option<i64>,
    /// How many addresses of the range the agent can assign now
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free: Option<i64>,
}

/// A user of an address, as an agent reports it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AddressHolder {
    /// The node whose agent reports the address
    pub node: String,
    /// The pod as `namespace/name`; empty if the agent does not know the pod
    pub pod: String,
    /// The UID of the pod; empty if the agent does not know the UID, or if no pod uses the address
    #[serde(rename = "podUID")]
    pub pod_uid: String,
    /// Whether a pod with the UID `pod_uid` exists and has not ended
    pub lives: bool,
    /// Whether the pod has a newer sandbox than the one to which the address was assigned
    pub superseded: bool,
    /// The network's name and the container id: `network/containerID`
    pub handle: String,
    /// The name of the interface in the pod
    pub interface: String,
    /// When the address was assigned
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
}

pub(crate) fn describe(addr: Addr, inventory: &Inventory) -> AddressReport {
    let range = Cidr::host(addr);
    let pool = inventory.registry.pools.of(&range);
    let covers = inventory.covers(addr);
    let ranges = covers.iter().map(|cover| RangeFact::of(cover, inventory));
    let mut ranges: Vec<RangeFact> = ranges.collect();
    // `covers` returns the widest range first, so the last range is the smallest.
    let own = ranges.pop();
    let holders = inventory.in_use_at(addr).iter();
    let holders = holders.map(|entry| AddressHolder::of(entry, inventory));
    let holders: Vec<AddressHolder> = holders.collect();
    let pods: Vec<&PodFact> = inventory.pods_at(addr).collect();
    let claim = inventory.claim_of(addr);
    let is_other = |it: &&ClaimFact| claim.is_none_or(|claim| claim.name != it.name);
    let other_claims = inventory.claims_at(addr).filter(is_other);
    let other_claims = other_claims.map(|it| ClaimUse::of(it, inventory));
    let other_claims: Vec<ClaimUse> = other_claims.collect();
    // The address of a claim can lie in a node's larger range. Until that node's agent reports the address as
    // withdrawn, the address still counts as the node's.
    let is_part = own.as_ref().is_some_and(|it| it.cidr != range);
    let is_claimed = claim.is_some() && (!is_part || inventory.is_handed_over(addr));
    let nodes = inventory.cache.nodes.iter();
    let nodes = nodes.filter(|node| node.addresses.contains(&addr));
    let nodes: Vec<String> = nodes.map(|node| node.name.to_string()).collect();
    let services = inventory.cache.services.iter();
    let mut services = services.flat_map(|it| &it.cidrs);
    let is_service = services.any(|cidr| cidr.contains_addr(addr));
    let subnet = own
        .as_ref()
        .and_then(|it| inventory.subnets.get(it.node.as_str()));
    let conflict = subnet.and_then(|it| it.conflict_at(addr));
    let reserved = pool.is_some_and(|pool| pool.space.is_blocked(&range));
    let on_request =
        pool.is_some_and(|pool| pool.on_request.iter().any(|it| it.within(&range).is_some()));
    // If the agent does not know the pod's UID, the pods' names are compared.
    let is_of = |holder: &AddressHolder, pod: &PodFact| match holder.pod_uid.as_str() {
        "" => holder.pod == pod.name,
        uid => PodUid::read(uid) == PodUid::read(&pod.uid),
    };
    let unrecorded = pods.iter();
    let unrecorded = unrecorded.filter(|pod| !holders.iter().any(|it| is_of(it, pod)));
    let recorded = holders.iter();
    let recorded = recorded.filter(|it| it.lives || it.pod_uid.is_empty());
    let users = unrecorded.count() + recorded.count();
    let state = if users > 1 || pods.len() > 1 || holders.len() > 1 {
        AddressState::Duplicate
    } else if let Some(holder) = holders.first() {
        match (holder.lives, holder.pod_uid.is_empty()) {
            (true, false) if holder.superseded => AddressState::Superseded,
            (true, _) => AddressState::InUse,
            _ if !pods.is_empty() => AddressState::InUse,
            (false, true) => AddressState::InUseByOther,
            (false, false) => AddressState::WithoutPod,
        }
    } else if !pods.is_empty() {
        AddressState::ReportedByPod
    } else if !nodes.is_empty() {
        AddressState::NodeAddress
    } else if is_service {
        AddressState::Service
    } else if own.as_ref().is_some_and(|range| range.quarantined) {
        AddressState::Quarantine
    } else if conflict.is_some() {
        AddressState::Conflict
    } else if is_claimed {
        AddressState::Claimed
    } else if on_request {
        AddressState::OnRequest
    } else if reserved {
        AddressState::Reserved
    } else if let Some(range) = &own {
        if range.kind == BLOCK {
            role(addr, range, inventory).unwrap_or_else(|| idle(addr, range, inventory))
        } else {
            AddressState::InPodCidr
        }
    } else if pool.is_some() {
        AddressState::NotCarved
    } else {
        AddressState::Outside
    };
    AddressReport {
        address: addr,
        state,
        pool: pool.map(|pool| pool.name.to_string()),
        range: own,
        more_ranges: ranges,
        conflict: conflict.map(ConflictFact::of),
        claim: claim.map(|it| ClaimUse::of(it, inventory)),
        other_claims,
        holders,
        pods: pods.iter().map(|pod| pod.name.clone()).collect(),
        nodes,
    }
}

/// Returns why an agent never assigns this address of a block: the address is the gateway, network or broadcast
/// address. Returns `None` if the agent may assign the address.
fn role(addr: Addr, range: &RangeFact, inventory: &Inventory) -> Option<AddressState> {
    let subnet = inventory.subnets.get(range.node.as_str())?;
    let spec = subnet.spec.as_ref().ok()?;
    let (allocation, _) = node_allocation::read(spec, spec.node_uid.as_deref()?);
    let block = allocation.blocks.iter().find(|it| it.cidr == range.cidr)?;
    let pool = allocation.pools.iter().find(|it| it.name == block.pool);
    let usable = block.usable(pool);
    let mut excluded = usable.excluded.iter();
    excluded.find(|span| (span.first()..=span.last()).contains(&addr))?;
    Some(match addr {
        _ if usable.gateway == Some(addr) => AddressState::Gateway,
        addr if addr == block.cidr.first() => AddressState::Network,
        _ => AddressState::Broadcast,
    })
}

/// Returns the state of an address that is in a block and that no pod uses. The agent reports only how many addresses
/// of a block are free and how many are in cooldown, not which addresses these are. So the state is `Cooling` only if
/// no address of the block is free.
fn idle(addr: Addr, range: &RangeFact, inventory: &Inventory) -> AddressState {
    let subnet = inventory.subnets.get(range.node.as_str());
    let mut taken_out = subnet
        .into_iter()
        .flat_map(|it| it.withdrawn.iter().chain(&it.withdrawing));
    match (range.cooling, range.free) {
        _ if taken_out.any(|it| it.contains_addr(addr)) => AddressState::TakenOut,
        (Some(1..), Some(0)) => AddressState::Cooling,
        _ => AddressState::Free,
    }
}

const BLOCK: &str = "Block";
const POD_CIDR: &str = "PodCIDR";

impl RangeFact {
    pub(crate) fn of(cover: &Cover, inventory: &Inventory) -> Self {
        let range = |cidr: &Cidr, kind| RangeFact {
            cidr: *cidr,
            kind,
            node: cover.node().to_string(),
            claim: None,
            quarantined: cover.is_quarantined(),
            since: None,
            until: None,
            used: None,
            cooling: None,
            free: None,
        };
        match cover {
            Cover::Block(entry) => {
                let status = inventory.block_status(entry);
                RangeFact {
                    since: Some(entry.since),
                    claim: inventory.claim_of_block(entry),
                    until: entry.until,
                    used: status.map(|it| it.used),
                    cooling: status.map(|it| it.cooling),
                    free: status.map(|it| it.free),
                    ..range(&entry.cidr, BLOCK)
                }
            }
            Cover::PodCidr(cidr, _) => range(cidr, POD_CIDR),
            Cover::QuarantinedPodCidr(cidr, _, until) => RangeFact {
                until: Some(*until),
                ..range(cidr, POD_CIDR)
            },
        }
    }

    fn words(&self, style: &Style) -> String {
        format!("{} {}", self.cidr, self.describe(style))
    }

    /// Describes the range for users, without its CIDR.
    pub(crate) fn describe(&self, style: &Style) -> String {
        let mut text = self.kind.to_owned();
        if self.quarantined {
            let _ = write!(text, " in quarantine, was node {}'s", self.node);
            if self.until.is_some() {
                let _ = write!(text, ", {}", over(self.until, style.now));
            }
        } else {
            let _ = write!(text, " of node {}", self.node);
        }
        if let Some(claim) = &self.claim {
            let _ = write!(text, ", of claim {claim}");
        }
        if self.since.is_some() {
            let _ = write!(text, ", since {}", age(self.since, style.now));
        }
        if let (Some(used), Some(cooling), Some(free)) = (self.used, self.cooling, self.free) {
            let _ = write!(text, " ({used} used, {cooling} cooling, {free} free)");
        }
        text
    }
}

impl ClaimUse {
    fn of(claim: &ClaimFact, inventory: &Inventory) -> Self {
        let pods = inventory.pods_of_claim(&claim.name).into_iter();
        let pods = pods.map(|it| match &it.node {
            Some(node) => format!("{} on node {node}", it.pod),
            None => format!("{}, which is not scheduled", it.pod),
        });
        ClaimUse {
            name: claim.name.clone(),
            reason: claim.reason().to_owned(),
            state: claim.words(),
            deleting: claim.deleted_at.is_some(),
            pods: pods.collect(),
        }
    }

    fn add(&self, what: &str, facts: &mut FactLines) {
        let deleting = if self.deleting { ", being deleted" } else { "" };
        facts.add(what, format!("{}{deleting}", self.name));
        facts.add("Claim state", self.state.as_str());
        if !self.pods.is_empty() {
            facts.add("Named by", some(&self.pods, 4));
        }
    }
}

impl AddressHolder {
    fn of(entry: &AddressInUse, inventory: &Inventory) -> Self {
        let allocation = entry.allocation.clone();
        let pod = inventory.pod_by_uid(&allocation.pod_uid);
        let lives = pod.is_some_and(|pod| !pod.finished);
        AddressHolder {
            node: entry.node.to_string(),
            pod: allocation.pod,
            lives: lives && !allocation.pod_uid.is_empty(),
            pod_uid: allocation.pod_uid,
            superseded: allocation.superseded,
            handle: allocation.handle,
            interface: allocation.interface,
            since: allocation.since,
        }
    }
}

impl AddressReport {
    pub(crate) fn facts(&self, style: &Style) -> FactLines {
        let mut facts = FactLines::default();
        facts.add("Address", self.address.to_string());
        facts.add("State", self.state.description());
        facts.add("Pool", self.pool.clone().unwrap_or_default());
        if let Some(range) = &self.range {
            facts.add("Range", range.words(style));
        }
        for range in &self.more_ranges {
            facts.add("Also in", range.words(style));
        }
        if let Some(conflict) = &self.conflict {
            facts.add("Conflict", conflict.words(style));
        }
        if let Some(claim) = &self.claim {
            claim.add("Claim", &mut facts);
        }
        for claim in &self.other_claims {
            claim.add("Wanted by", &mut facts);
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

impl VerbReport for AddressReport {
    fn text(&self, style: &Style) -> String {
        self.facts(style).text()
    }
}
