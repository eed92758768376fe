//! Converts Kubernetes objects to the fields that decisions need. Invalid fields cause no failure, because no object in
//! the API server may stop the controller.

use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::agent_report;
use super::names::{NodeName, ObjectUid, PoolName};
use super::objects::{
    AskedAddresses, Block, BlockSpec, Claim, ClaimSource, ClaimSpec, ClaimStatus, FrrConfiguration,
    IpamClaim, MachineIdentity, Node, NodeTaint, OnlyPod, Owner, Parent, Pod, PodClaim, Pool,
    Routes, ServiceRange, Sticky, Subnet, Text, VirtualMachine,
};
use super::request::NewClaim;
use cadastre_api::frr::{FRR_API_VERSION, FRR_KIND, FRR_PREFIX, MANAGED_BY};
use cadastre_api::ipam_claim;
use cadastre_api::pod_claim::{self, ClaimOfPod, is_object_name};
use cadastre_api::{
    ASN_ANNOTATION, AllocatedBlock, AllocatedRange, BlockOwner, CLAIM_FINALIZER,
    EXHAUSTED_CONDITION, EXHAUSTED_TAINT, FRRConfigurationLite, IPAMBlock, IPAMBlockLite,
    IPAMBlockSpec, IPAMClaimLite, IPClaim, IPClaimLite, IPClaimSpec, IPClaimStatus, IPPoolLite,
    LeakCandidate, MIGRATION_READY_ANNOTATION, MIRROR_ANNOTATION, NodeAddressLite, NodeLite,
    NodePool, NodeRoutesLite, NodeSubnetLite, NodeSubnetSpec, OwnerKind, POOLS_ANNOTATION, PodLite,
    PodLiteSpec, QuarantinedNode, Requests, TERM_ANNOTATION, sticky,
};
use cadastre_core::{Addr, Cidr};

/// A Node's addresses beyond this number are ignored. Otherwise whoever can write one Node could exclude any number of
/// addresses from all pools.
const MOST_NODE_ADDRESSES: usize = 16;
/// A node keeps addresses for at most this many pods, whatever its kubelet says. Otherwise one kubelet could get all
/// addresses of a pool with `warm.minimum: MaxPods`.
const MOST_PODS: u16 = 1_024;
/// Maximum number of characters that are kept of the annotation with a node's AS number. No AS number is longer.
const LONGEST_ASN: usize = 32;
/// Maximum length of a machine's identity, in bytes. A longer identity is ignored, because identities are copied into
/// other objects.
const LONGEST_MACHINE_ID: usize = 256;

/// Converts a Node. Entries of its podCIDRs that are not CIDRs are kept as text in `unreadable`.
pub fn node(node: NodeLite) -> Node {
    let spec = node.spec.unwrap_or_default();
    let status = node.status.unwrap_or_default();
    let mut texts = spec.pod_cidrs.unwrap_or_default();
    if texts.is_empty() {
        texts.extend(spec.pod_cidr.filter(|text| !text.is_empty()));
    }
    let mut pod_cidrs = Vec::with_capacity(texts.len());
    let mut unreadable = Vec::new();
    for text in texts {
        match Cidr::parse_lenient(&text) {
            Ok(cidr) => pod_cidrs.push(cidr),
            Err(_) => unreadable.push(Text::from(text)),
        }
    }
    let meta = node.metadata;
    let annotations = meta.annotations.unwrap_or_default();
    let labels = meta.labels.unwrap_or_default();
    let own = |kind: &str| kind == "InternalIP" || kind == "ExternalIP";
    Node {
        version: version(meta.resource_version.as_deref()),
        name: meta.name.unwrap_or_default().into(),
        uid: meta.uid.unwrap_or_default().into(),
        // The labels come from a BTreeMap, so they are sorted.
        labels: labels
            .into_iter()
            .map(|(key, value)| (key.into(), value.into()))
            .collect(),
        term: annotations
            .get(TERM_ANNOTATION)
            .map(|term| term.as_str().into()),
        asn: annotations.get(ASN_ANNOTATION).map(|it| asn_text(it)),
        annotated: !annotations.is_empty(),
        deleting: meta.deletion_timestamp.is_some(),
        pod_cidrs: pod_cidrs.into(),
        unreadable: unreadable.into(),
        addresses: internal_first(status.addresses.unwrap_or_default())
            .iter()
            .filter(|address| own(&address.type_))
            .filter_map(|address| addr(&address.address))
            .take(MOST_NODE_ADDRESSES)
            .collect(),
        machine: MachineIdentity {
            provider_id: spec.provider_id.and_then(machine_text),
            machine_id: status
                .node_info
                .and_then(|info| machine_text(info.machine_id)),
        },
        taints: spec
            .taints
            .unwrap_or_default()
            .into_iter()
            .map(|taint| NodeTaint {
                key: taint.key.into(),
                value: taint.value.map(Text::from),
                effect: taint.effect.into(),
                time_added: taint.time_added.map(Text::from),
            })
            .collect(),
        exhausted: status
            .conditions
            .unwrap_or_default()
            .into_iter()
            .find(|it| it.type_ == EXHAUSTED_CONDITION && it.status == "True")
            .map(|it| it.message.unwrap_or_default().into()),
        max_pods: max_pods(status.capacity.and_then(|it| it.pods).as_deref()),
    }
}

/// Cuts the annotation with the AS number to [`LONGEST_ASN`] characters.
fn asn_text(text: &str) -> Text {
    text.chars().take(LONGEST_ASN).collect::<String>().into()
}

/// Returns how many pods a node may run, at most [`MOST_PODS`]. Returns 0 for a quantity that is no plain number, which
/// no kubelet writes.
fn max_pods(quantity: Option<&str>) -> u16 {
    let number = quantity.and_then(|it| it.parse::<u64>().ok()).unwrap_or(0);
    u16::try_from(number).unwrap_or(MOST_PODS).min(MOST_PODS)
}

/// Returns a machine's identity. A text that is too long is ignored, not shortened, because the shortened text may
/// equal the shortened text of another machine.
fn machine_text(id: String) -> Option<Text> {
    let is_one = !id.is_empty() && id.len() <= LONGEST_MACHINE_ID;
    is_one.then(|| Text::from(id))
}

/// Converts a Pod. Addresses of finished pods and of hostNetwork pods are left out.
pub fn pod(pod: PodLite) -> Pod {
    let spec = pod.spec.unwrap_or_default();
    let status = pod.status.unwrap_or_default();
    let over = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    let mut addresses: Vec<Addr> = Vec::new();
    let is_host = spec.host_network.unwrap_or_default();
    if !over && !is_host {
        let all = status
            .pod_ips
            .unwrap_or_default()
            .into_iter()
            .map(|ip| ip.ip)
            .chain(status.pod_ip);
        addresses.extend(all.filter_map(|text| addr(&text)));
        addresses.sort_unstable();
        addresses.dedup();
    }
    let meta = pod.metadata;
    let name = full_name(&meta);
    let annotations = meta.annotations.unwrap_or_default();
    let is_mirror = annotations.contains_key(MIRROR_ANNOTATION);
    let mirror_of = spec.node_name.clone().filter(|_| is_mirror);
    let node = spec.node_name.clone().filter(|_| !is_mirror && !is_host);
    // A kubelet can create mirror pods in any namespace, so a mirror pod must not get a claim of that namespace.
    let own_name = meta.name.as_deref().unwrap_or_default();
    let uid = meta.uid.as_deref().unwrap_or_default();
    let owners = meta.owner_references.as_deref().unwrap_or_default();
    let (owner, vmi) = (sticky::stateful_set(owners), pod_claim::vmi_of(owners));
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    let uses = |claim: &str, source: ClaimSource, has_machine: bool| PodClaim {
        claim: format!("{namespace}/{claim}").into(),
        pod: own_name.into(),
        uid: uid.into(),
        node: spec.node_name.as_deref().map(NodeName::from),
        created: seconds(meta.creation_timestamp.as_ref()),
        source,
        machine: vmi.filter(|_| has_machine).map(|vmi| {
            Box::new(VirtualMachine {
                vmi: vmi.into(),
                is_migrated_to: annotations.contains_key(MIGRATION_READY_ANNOTATION),
            })
        }),
    };
    let sticky = |owner: &OwnerReference| Sticky {
        owner: owner.name.as_str().into(),
        owner_uid: owner.uid.as_str().into(),
        pools: sticky::pools(&annotations).map(PoolName::from).collect(),
        ttl: sticky::ttl(&annotations),
    };
    let claim = pod_claim::claim_of(own_name, uid, &annotations, owner.is_some());
    let claim = claim.filter(|_| !is_mirror && !is_host).map(|claim| {
        let name = claim.name().to_owned();
        // Only a claim that an annotation names can belong to a virtual machine. A claim for addresses ends with its
        // pod, and a pod of a StatefulSet runs no virtual machine.
        let is_annotated = matches!(claim, ClaimOfPod::Annotated(_));
        let source = match (claim, owner) {
            (ClaimOfPod::Sticky(_), Some(owner)) => ClaimSource::Sticky(Box::new(sticky(owner))),
            (
                ClaimOfPod::Addresses {
                    addresses: asked, ..
                },
                _,
            ) => ClaimSource::Addresses(Box::new(AskedAddresses {
                is_served: !addresses.is_empty(),
                is_by_cni: false,
                addresses: asked.into(),
            })),
            _ => ClaimSource::User,
        };
        Box::new(uses(&name, source, is_annotated))
    });
    let interfaces = ipam_claim::interface_claims(&annotations).into_iter();
    let interfaces = interfaces.filter(|it| !is_mirror && !is_host && is_object_name(&it.claim));
    let interface_claims = interfaces.map(|it| uses(&it.claim, ClaimSource::IpamClaim, true));
    let interface_claims = interface_claims.collect();
    let is_deleting = meta.deletion_timestamp.is_some();
    let is_replaceable = is_replaceable(owners) && !tolerates_exhaustion(&spec);
    let replaceable = is_replaceable.then(|| seconds(meta.creation_timestamp.as_ref()));
    Pod {
        name: name.into(),
        interface_claims,
        claim,
        uid: meta.uid.unwrap_or_default().into(),
        version: version(meta.resource_version.as_deref()),
        finished: over,
        replaceable,
        needs_default: !annotations.contains_key(POOLS_ANNOTATION) && !is_deleting,
        addresses: addresses.into(),
        mirror_of: mirror_of.map(NodeName::from),
        node: node.map(NodeName::from),
    }
}

/// Returns whether an evicted pod is replaced by its controller, and the scheduler chooses the node of the new pod.
fn is_replaceable(owners: &[OwnerReference]) -> bool {
    let mut controllers = owners.iter().filter(|it| it.controller == Some(true));
    controllers.any(|it| matches!(&*it.kind, "ReplicaSet" | "StatefulSet" | "Job"))
}

/// Returns whether the scheduler would bind the pod to a node with the taint of exhausted nodes.
fn tolerates_exhaustion(spec: &PodLiteSpec) -> bool {
    let mut all = spec.tolerations.iter().flatten();
    let is_of_key = |key: &str| key.is_empty() || key == EXHAUSTED_TAINT;
    let is_of_effect = |effect: &str| effect.is_empty() || effect == "NoSchedule";
    all.any(|it| is_of_key(&it.key) && is_of_effect(&it.effect))
}

/// Converts an IPAMClaim to the fields that decisions need.
pub fn ipam_claim(claim: IPAMClaimLite) -> IpamClaim {
    let meta = claim.metadata;
    IpamClaim {
        version: version(meta.resource_version.as_deref()),
        uid: meta.uid.unwrap_or_default().into(),
        network: claim.spec.network,
        ips: claim.status.ips,
    }
}

/// Converts a ServiceCIDR. Ranges that are not CIDRs are left out.
pub fn service_range(object: ServiceCIDR) -> ServiceRange {
    let cidrs = object.spec.and_then(|spec| spec.cidrs).unwrap_or_default();
    let meta = object.metadata;
    ServiceRange {
        name: meta.name.unwrap_or_default().into(),
        uid: meta.uid.unwrap_or_default().into(),
        version: version(meta.resource_version.as_deref()),
        cidrs: cidrs
            .iter()
            .filter_map(|text| Cidr::parse_lenient(text).ok())
            .collect(),
    }
}

/// Converts an IPPool. If the spec is invalid, the result contains the error instead.
pub fn pool(pool: IPPoolLite) -> Pool {
    let meta = pool.metadata;
    Pool {
        name: meta.name.unwrap_or_default().into(),
        uid: meta.uid.unwrap_or_default().into(),
        version: version(meta.resource_version.as_deref()),
        generation: meta.generation.unwrap_or_default(),
        created: seconds(meta.creation_timestamp.as_ref()),
        deleting: meta.deletion_timestamp.is_some(),
        finalizers: meta.finalizers.unwrap_or_default(),
        spec: read(pool.spec).map_err(|why| format!("spec: {why}")),
        status: read(pool.status).ok(),
    }
}

/// Converts a NodeSubnet. Invalid parts of the spec are left out. If the spec cannot be read even without these parts,
/// the result contains the error.
pub fn subnet(subnet: NodeSubnetLite) -> Subnet {
    let meta = subnet.metadata;
    let annotations = meta.annotations.unwrap_or_default();
    let (spec, lacks_parts) = subnet_spec(subnet.spec);
    Subnet {
        name: meta.name.unwrap_or_default().into(),
        uid: meta.uid.unwrap_or_default().into(),
        version: version(meta.resource_version.as_deref()),
        spec,
        is_partial: lacks_parts,
        has_managed_fields: meta.managed_fields.is_some(),
        requests: Requests::read(|name| annotations.get(name).map(String::as_str)),
        report: agent_report::read(&subnet.status),
    }
}

/// Reads the spec of a NodeSubnet without its invalid parts. Also returns whether there were invalid parts. One invalid
/// part must not hide the valid ones, because the spec is the only record of quarantined ranges.
fn subnet_spec(mut spec: Value) -> (Result<NodeSubnetSpec, String>, bool) {
    let why = match NodeSubnetSpec::deserialize(&spec) {
        Ok(spec) => return (Ok(spec), false),
        Err(why) => why.to_string(),
    };
    let Some(fields) = spec.as_object_mut() else {
        return (Err(why), false);
    };
    for name in ["nodeUID", "providerID", "machineID"] {
        keep_text(fields, name);
    }
    if let Some(Value::Array(previous)) = fields.get_mut("quarantined") {
        for holder in previous.iter_mut().filter_map(Value::as_object_mut) {
            keep_text(holder, "providerID");
            keep_text(holder, "machineID");
            keep_entries::<AllocatedRange>(holder, "podCIDRs");
            // The end of the quarantine is unknown, so the quarantine starts again. The placeholder [`LATE`] is later
            // replaced by an end after the pool's full quarantine time.
            if holder
                .get("until")
                .is_none_or(|it| Time::deserialize(it).is_err())
            {
                holder.insert("until".to_owned(), Value::from(LATE));
            }
        }
    }
    keep_entries::<AllocatedRange>(fields, "podCIDRs");
    keep_entries::<AllocatedBlock>(fields, "blocks");
    keep_entries::<QuarantinedNode>(fields, "quarantined");
    keep_entries::<NodePool>(fields, "pools");
    keep_entries::<LeakCandidate>(fields, "leakCandidates");
    (NodeSubnetSpec::deserialize(&spec).map_err(|_| why), true)
}

/// A time after the end of any quarantine, for quarantines whose end is unknown.
const LATE: &str = "2999-12-31T00:00:00Z";

fn keep_text(fields: &mut Map<String, Value>, name: &str) {
    if fields.get(name).is_some_and(|it| !it.is_string()) {
        fields.remove(name);
    }
}

fn keep_entries<T: DeserializeOwned>(fields: &mut Map<String, Value>, name: &str) {
    match fields.get_mut(name) {
        Some(Value::Array(entries)) => entries.retain(|entry| T::deserialize(entry).is_ok()),
        _ => _ = fields.remove(name),
    }
}

/// Sorts InternalIP addresses first. Other nodes send packets for a node's pods to its first address of that family.
fn internal_first(mut addresses: Vec<NodeAddressLite>) -> Vec<NodeAddressLite> {
    addresses.sort_by_key(|it| it.type_ != "InternalIP");
    addresses
}

/// Converts a NodeRoutes. If the spec is invalid, the result has no routes, so that the controller replaces the spec.
pub fn routes(routes: NodeRoutesLite) -> Routes {
    let meta = routes.metadata;
    Routes {
        name: meta.name.unwrap_or_default().into(),
        uid: meta.uid.unwrap_or_default().into(),
        version: version(meta.resource_version.as_deref()),
        spec: read(routes.spec).unwrap_or_default(),
    }
}

/// Converts an FRRConfiguration. If the object's name lacks the prefix, `name` is the full name.
pub fn frr_configuration(object: FRRConfigurationLite) -> FrrConfiguration {
    let meta = object.metadata;
    let name = meta.name.unwrap_or_default();
    let node = name.strip_prefix(FRR_PREFIX);
    let (label, value) = MANAGED_BY;
    let labels = meta.labels.unwrap_or_default();
    let has_label = labels.get(label).is_some_and(|it| it == value);
    FrrConfiguration {
        is_ours: has_label && node.is_some(),
        name: node.unwrap_or(&name).into(),
        uid: meta.uid.unwrap_or_default().into(),
        version: version(meta.resource_version.as_deref()),
        spec: object.spec,
    }
}

/// Builds the FRRConfiguration that a create request sends.
pub(crate) fn frr_object(node: &str, spec: &Value) -> Value {
    let (label, value) = MANAGED_BY;
    json!({
        "apiVersion": FRR_API_VERSION, "kind": FRR_KIND,
        "metadata": {"name": format!("{FRR_PREFIX}{node}"), "labels": {label: value}},
        "spec": spec,
    })
}

/// Converts an IPAMBlock. If the spec is invalid, the result contains the error instead.
pub fn block(block: IPAMBlockLite) -> Block {
    let meta = block.metadata;
    Block {
        name: meta.name.unwrap_or_default().into(),
        uid: meta.uid.unwrap_or_default().into(),
        version: version(meta.resource_version.as_deref()),
        touched: meta.generation.unwrap_or_default() > 1,
        spec: read(block.spec).and_then(block_spec),
    }
}

fn owner(owner: BlockOwner) -> Owner {
    Owner {
        quarantined: owner.kind == OwnerKind::Quarantine,
        name: owner.name.into(),
        uid: owner.uid.into(),
        machine: MachineIdentity {
            provider_id: owner.provider_id.map(Text::from),
            machine_id: owner.machine_id.map(Text::from),
        },
    }
}

fn block_spec(spec: IPAMBlockSpec) -> Result<BlockSpec, String> {
    Ok(BlockSpec {
        cidr: Cidr::parse_strict(&spec.cidr).map_err(|error| error.to_string())?,
        pool: spec.pool.into(),
        number: spec.owner.number,
        owner: owner(spec.owner),
        parent: spec.parent.as_ref().map(Parent::read).transpose()?,
        since: spec.since.0,
        until: spec.until.map(|until| until.0),
        vmi: spec.vmi_uid.map(ObjectUid::from),
        standby: {
            let standby = spec.standby.into_iter();
            standby
                .map(|it| (it.number, owner(it)))
                .map(|(number, it)| (it, number))
                .collect()
        },
        last_number: spec.last_number,
    })
}

fn block_owner(owner: &Owner, number: u32) -> BlockOwner {
    let text = |text: &Text| text.to_string();
    BlockOwner {
        kind: if owner.quarantined {
            OwnerKind::Quarantine
        } else {
            OwnerKind::Node
        },
        name: owner.name.to_string(),
        uid: owner.uid.to_string(),
        provider_id: owner.machine.provider_id.as_ref().map(text),
        machine_id: owner.machine.machine_id.as_ref().map(text),
        number,
    }
}

/// Builds the IPAMBlock that a create or replace request sends. This is the inverse of [`block`].
pub(crate) fn block_object(name: &str, spec: &BlockSpec) -> IPAMBlock {
    let spec = IPAMBlockSpec {
        cidr: spec.cidr.to_string(),
        pool: spec.pool.to_string(),
        owner: block_owner(&spec.owner, spec.number),
        parent: spec.parent.as_ref().map(Parent::text),
        since: Time(spec.since),
        until: spec.until.map(Time),
        vmi_uid: spec.vmi.as_ref().map(ToString::to_string),
        standby: {
            let standby = spec.standby.iter();
            standby
                .map(|(owner, number)| block_owner(owner, *number))
                .collect()
        },
        last_number: spec.last_number,
    };
    IPAMBlock::new(name, spec)
}

/// Converts an IPClaim. If the spec is invalid, the result contains the error instead.
pub fn claim(claim: IPClaimLite) -> Claim {
    let meta = claim.metadata;
    let status: IPClaimStatus = read(claim.status).unwrap_or_default();
    let only_pod = only_pod(&meta).map(Box::new);
    let owners = meta.owner_references.as_deref().unwrap_or_default();
    let ipam_claim = ipam_claim::ipam_claim_of(owners);
    let ipam_claim = ipam_claim.filter(|it| meta.name.as_ref() == Some(&it.name));
    let ipam_claim = ipam_claim.map(|it| it.uid.as_str().into());
    let spec = read(claim.spec).and_then(claim_spec);
    let mut status = ClaimStatus::from(&status);
    let asked = spec.as_ref().ok().and_then(|it| it.pool.as_ref());
    if let Some(pool) = asked.filter(|it| status.pool.as_ref() == Some(it)) {
        // `spec.pool` and `status.pool` share one text in memory.
        status.pool = Some(pool.clone());
    }
    Claim {
        name: full_name(&meta).into(),
        uid: meta.uid.unwrap_or_default().into(),
        version: version(meta.resource_version.as_deref()),
        generation: meta.generation.unwrap_or_default(),
        created: seconds(meta.creation_timestamp.as_ref()),
        deleting: meta.deletion_timestamp.is_some(),
        finalizers: meta.finalizers.unwrap_or_default().into(),
        spec,
        status,
        only_pod,
        ipam_claim,
    }
}

/// Returns the pod that is the only owner of the claim. Returns `None` if the claim does not have the name of a claim
/// for the addresses that this pod asks for.
fn only_pod(claim: &ObjectMeta) -> Option<OnlyPod> {
    let [owner] = claim.owner_references.as_deref()? else {
        return None;
    };
    let of_addresses = pod_claim::claim_of_addresses(&owner.name, &owner.uid);
    let is_pod = owner.api_version == "v1" && owner.kind == "Pod";
    let is_its = is_pod && claim.name.as_ref() == Some(&of_addresses);
    is_its.then(|| OnlyPod {
        name: owner.name.as_str().into(),
        uid: owner.uid.as_str().into(),
    })
}

fn claim_spec(spec: IPClaimSpec) -> Result<ClaimSpec, String> {
    let addresses = spec.addresses.iter().map(|text| {
        let address = Addr::parse_strict(text);
        address.ok_or_else(|| format!("spec.addresses: {text} is no address"))
    });
    let mut addresses: Vec<Addr> = addresses.collect::<Result<_, _>>()?;
    addresses.sort_unstable();
    if addresses.windows(2).any(|it| it[0].family == it[1].family) {
        return Err("spec.addresses: two addresses of one family".to_owned());
    }
    if spec.pool.is_none() && addresses.is_empty() {
        return Err("spec: neither a pool nor addresses".to_owned());
    }
    Ok(ClaimSpec {
        pool: spec.pool.map(Into::into),
        addresses,
        ttl: spec.ttl_seconds_after_use,
    })
}

/// Builds the IPClaim to create for a pod. The garbage collector deletes the claim after its owner is deleted.
pub(crate) fn claim_object(name: &str, new: NewClaim) -> IPClaim {
    let (namespace, name) = name.split_once('/').unwrap_or(("", name));
    let owner = new.owner.map(|owner| OwnerReference {
        api_version: owner.kind.api_version().to_owned(),
        kind: owner.kind.name().to_owned(),
        name: owner.name.to_string(),
        uid: owner.uid.to_string(),
        ..OwnerReference::default()
    });
    let mut claim = IPClaim::new(name, new.spec);
    claim.metadata.namespace = Some(namespace.to_owned());
    claim.metadata.owner_references = owner.map(|it| vec![it]);
    // No address becomes a block before the claim has its finalizer. A claim that is created with the finalizer needs
    // no second write.
    claim.metadata.finalizers = Some(vec![CLAIM_FINALIZER.to_owned()]);
    claim
}

/// Returns `namespace/name` of a namespaced object.
fn full_name(meta: &ObjectMeta) -> String {
    let text = |it: &Option<String>| it.clone().unwrap_or_default();
    format!("{}/{}", text(&meta.namespace), text(&meta.name))
}

/// Returns a time in seconds since 1970; 0 if there is none.
fn seconds(time: Option<&Time>) -> i64 {
    time.map_or(0, |time| time.0.as_second())
}

fn read<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_json::from_value(value).map_err(|error| error.to_string())
}

fn addr(text: &str) -> Option<Addr> {
    text.parse::<std::net::IpAddr>().ok().map(Addr::from)
}

/// Parses a resourceVersion, or returns 0 if the text is invalid. Within one kind, resourceVersions are growing
/// numbers.
fn version(text: Option<&str>) -> u64 {
    text.and_then(|text| text.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use cadastre_api::{CLAIM_ANNOTATION, STICKY_ANNOTATION};

    use crate::cluster::request::{ClaimOwner, ClaimOwnerKind};
    use serde_json::json;

    use super::*;

    #[test]
    fn an_frr_configuration_belongs_to_the_controller_by_its_label_and_its_name() {
        let read = |name: &str, labels: Value| {
            let object = json!({
                "metadata": {"name": name, "labels": labels, "uid": "u", "resourceVersion": "7"},
                "spec": {"bgp": {}},
            });
            frr_configuration(serde_json::from_value(object).unwrap())
        };
        let own = || json!({"app.kubernetes.io/managed-by": "cadastre"});
        let found = read("cadastre-n1.example", own());
        assert_eq!((&*found.name, found.is_ours), ("n1.example", true));
        assert_eq!((found.version, found.spec), (7, json!({"bgp": {}})));
        let helm = json!({"app.kubernetes.io/managed-by": "Helm"});
        for (name, labels) in [
            ("cadastre-n1", helm),
            ("cadastre-n1", json!({})),
            ("n1", own()),
        ] {
            assert!(!read(name, labels.clone()).is_ours, "{name} {labels}");
        }
        let written = frr_object("n1", &json!({"bgp": {}}));
        let read = frr_configuration(serde_json::from_value(written).unwrap());
        assert!(read.is_ours && &*read.name == "n1");
    }

    #[test]
    fn an_as_number_is_kept_as_text() {
        let node_of = |annotations: Value| {
            node(serde_json::from_value(json!({"metadata": {"annotations": annotations}})).unwrap())
        };
        let asn = node_of(json!({"cadastre.dev/asn": "64512"})).asn;
        assert_eq!(asn.as_deref(), Some("64512"));
        assert_eq!(node_of(json!({"a": "b"})).asn, None);
        let long = node_of(json!({"cadastre.dev/asn": "1".repeat(1_000)})).asn;
        assert_eq!(long.map(|it| it.len()), Some(LONGEST_ASN));
    }

    #[test]
    fn a_mirror_pod_names_its_node() {
        let read = |annotations: Value| {
            let pod_of_node = json!({
                "metadata": {"name": "p", "namespace": "d", "uid": "u", "annotations": annotations},
                "spec": {"nodeName": "n"},
                "status": {"podIPs": [{"ip": "10.0.0.1"}]},
            });
            pod(serde_json::from_value(pod_of_node).unwrap())
        };
        assert_eq!(read(json!({})).mirror_of, None);
        let image = read(json!({MIRROR_ANNOTATION: "hash"}));
        assert_eq!(image.mirror_of.as_deref(), Some("n"));
        assert_eq!(image.addresses.len(), 1);
    }

    #[test]
    fn neither_mirror_pods_nor_pods_on_the_host_s_network_can_claim() {
        let claim = |annotations: Value, host_network: bool| {
            let of_node = json!({
                "metadata": {"name": "p", "namespace": "d", "uid": "u", "annotations": annotations},
                "spec": {"nodeName": "n", "hostNetwork": host_network},
            });
            pod(serde_json::from_value(of_node).unwrap()).claim
        };
        let names = || json!({CLAIM_ANNOTATION: " db "});
        let claimed = claim(names(), false).unwrap();
        assert_eq!(
            (&*claimed.claim, claimed.node.as_deref()),
            ("d/db", Some("n"))
        );
        assert_eq!(claim(json!({}), false), None);
        assert_eq!(claim(names(), true), None, "it has its node's addresses");
        let mirror = json!({CLAIM_ANNOTATION: "db", MIRROR_ANNOTATION: "hash"});
        assert_eq!(claim(mirror, false), None, "a kubelet writes what it likes");
    }

    #[test]
    fn a_sticky_pod_of_a_stateful_set_names_the_claim_of_its_own_name() {
        let claim = |annotations: Value, owner: &str| {
            let of_set = json!({
                "metadata": {
                    "name": "web-0", "namespace": "d", "uid": "u", "annotations": annotations,
                    "ownerReferences": [
                        {"apiVersion": "apps/v1", "kind": owner, "name": "web", "uid": "w", "controller": true},
                    ],
                },
                "spec": {"nodeName": "n"},
            });
            pod(serde_json::from_value(of_set).unwrap()).claim
        };
        let annotations = json!({
            STICKY_ANNOTATION: "true", "cadastre.dev/pools": "a, b",
            "cadastre.dev/sticky-ttl-seconds": "60",
        });
        let named = claim(annotations.clone(), "StatefulSet").unwrap();
        assert_eq!((&*named.claim, &*named.pod), ("d/web-0", "web-0"));
        let expected = Sticky {
            owner: "web".into(),
            owner_uid: "w".into(),
            pools: ["a".into(), "b".into()].into(),
            ttl: Some(60),
        };
        assert_eq!(named.source, ClaimSource::Sticky(Box::new(expected)));
        assert_eq!(claim(annotations, "ReplicaSet"), None);
        let both = json!({STICKY_ANNOTATION: "true", CLAIM_ANNOTATION: "db"});
        let named = claim(both, "StatefulSet").unwrap();
        assert_eq!((&*named.claim, named.source), ("d/db", ClaimSource::User));
        let mirror = json!({STICKY_ANNOTATION: "true", MIRROR_ANNOTATION: "hash"});
        assert_eq!(claim(mirror, "StatefulSet"), None);
    }

    #[test]
    fn a_pod_that_asks_for_addresses_has_a_claim_that_ends_with_it() {
        let of_pod = |addresses: &str, has: &[&str], host_network: bool| {
            let ips: Vec<Value> = has.iter().map(|ip| json!({"ip": ip})).collect();
            let asks = json!({
                "metadata": {
                    "name": "web", "namespace": "d", "uid": "u",
                    "annotations": {"cadastre.dev/addresses": addresses},
                },
                "spec": {"nodeName": "n", "hostNetwork": host_network}, "status": {"podIPs": ips},
            });
            pod(serde_json::from_value(asks).unwrap()).claim
        };
        let both = "10.0.0.7,fd00::7";
        let is_served = |has: &[&str]| of_pod(both, has, false).unwrap().is_served();
        assert!(is_served(&["fd00::7", "10.0.0.7"]) && is_served(&["10.0.0.9"]));
        assert!(!is_served(&[]));
        assert_eq!(of_pod(both, &[], true), None);
        assert_eq!(of_pod("10.0.0.0/24", &[], false), None);

        let named = of_pod(both, &[], false).unwrap();
        let new = NewClaim {
            spec: IPClaimSpec {
                addresses: vec!["10.0.0.7".to_owned()],
                ..IPClaimSpec::default()
            },
            owner: Some(ClaimOwner {
                kind: ClaimOwnerKind::Pod,
                name: "web".into(),
                uid: "u".into(),
            }),
        };
        let object = serde_json::to_value(claim_object(&named.claim, new)).unwrap();
        let is_of_one_pod = |change: fn(&mut Value)| {
            let mut object = object.clone();
            change(&mut object["metadata"]);
            let read = claim(serde_json::from_value(object).unwrap());
            read.only_pod.is_some()
        };
        assert!(is_of_one_pod(|_| ()));
        assert!(
            !is_of_one_pod(|meta| meta["name"] = json!("web")),
            "a user's claim"
        );
        assert!(!is_of_one_pod(
            |meta| meta["ownerReferences"][0]["uid"] = json!("v")
        ));
        assert!(!is_of_one_pod(
            |meta| meta["ownerReferences"][0]["kind"] = json!("Job")
        ));
        assert!(!is_of_one_pod(
            |meta| _ = meta.as_object_mut().unwrap().remove("ownerReferences")
        ));
    }

    #[test]
    fn quarantined_ranges_are_read_beside_invalid_parts() {
        let spec = |extra: Value| {
            let mut spec = json!({
                "nodeUID": 7,
                "podCIDRs": [{"cidr": 3}, {"cidr": "10.0.1.0/24"}],
                "quarantined": [
                    {"nodeUID": "u1", "podCIDRs": [{"cidr": "10.0.2.0/24"}, 5], "until": "soon"},
                    {"nodeUID": 4},
                ],
                "leakCandidates": {},
            });
            spec.as_object_mut()
                .unwrap()
                .extend(extra.as_object().unwrap().clone());
            subnet_spec(spec)
        };
        let read = |extra: Value| {
            let (read, lacks_parts) = spec(extra);
            assert!(lacks_parts);
            read.unwrap()
        };
        let block = json!({"cidr": "10.0.3.0/26", "uid": "b", "pool": "p"});
        let blocks = read(json!({"blocks": [{"cidr": 3}, block]}));
        assert_eq!((blocks.blocks.len(), blocks.quarantined.len()), (1, 1));
        let read = read(json!({}));
        assert_eq!((read.node_uid, read.pod_cidrs.len()), (None, 1));
        assert_eq!(read.quarantined.len(), 1);
        assert_eq!(read.quarantined[0].pod_cidrs[0].cidr, "10.0.2.0/24");
        assert!(
            read.quarantined[0].until.0 > jiff::Timestamp::from_second(10_000_000_000).unwrap()
        );
        assert!(subnet_spec(json!("x")).0.is_err());
        assert!(!subnet_spec(json!({"nodeUID": "u1"})).1);
    }
}
