//! Names that Cadastre uses in objects of the API server.
//!
//! The names are part of the API. Objects in clusters contain them, so a name must never change.

/// API group of all kinds that Cadastre defines.
pub const GROUP: &str = "cadastre.dev";

/// API version of all kinds that Cadastre defines.
pub const VERSION: &str = "v1alpha1";

/// Annotation of the CRDs. Its value is the release to which the CRD belongs, so that installers can compare releases.
pub(crate) const VERSION_ANNOTATION: &str = "cadastre.dev/version";

/// Finalizer of an IPPool. The controller removes the finalizer once no range of the pool is allocated or quarantined.
pub const FINALIZER: &str = "cadastre.dev/ranges-allocated";

/// Annotation of a Node. It fences earlier leaders, that is, it makes their late writes fail. A leader writes a podCIDR
/// on the condition that the annotation still has the value that the leader read. So if a new leader changes the
/// annotation, the API server rejects all podCIDR writes that an earlier leader still has in flight.
pub const TERM_ANNOTATION: &str = "cadastre.dev/term";

/// Annotation of a Node. Its value is the AS number of the node in its FRRConfiguration (see [`frr`](super::frr)).
/// Nodes without this annotation have the AS number of the flag `--frr-asn`.
pub const ASN_ANNOTATION: &str = "cadastre.dev/asn";

/// Key of the taint of a Node that has no free address for another pod.
pub const EXHAUSTED_TAINT: &str = "cadastre.dev/addresses-exhausted";
/// Type of the condition of a Node that has no free address for another pod.
pub const EXHAUSTED_CONDITION: &str = "AddressesExhausted";

/// Annotation of the Lease. It says that a write with an indeterminate outcome was in flight when the last holder of
/// the Lease stopped. In this case, the next holder must fence earlier leaders, even after a clean handover.
pub const UNSETTLED_ANNOTATION: &str = "cadastre.dev/unsettled";

/// Annotation of the Lease. It lists the podCIDR allocations that the holder of the Lease may have in flight.
pub const INTENTS_ANNOTATION: &str = "cadastre.dev/intents";

/// Annotation of the Lease. Its value is the time of the last renewal before a gap (a time of over a minute without a
/// leader). The first leader after the gap sets the annotation, and removes it once agents have had time to report.
pub const GAP_ANNOTATION: &str = "cadastre.dev/gap-since";

/// Field manager of all writes of the controller.
pub const FIELD_MANAGER: &str = "cadastre-controller";

/// Name of the controller's Lease. The Lease is in the controller's namespace.
pub const LEASE_NAME: &str = "cadastre-controller";

/// Field manager of all writes of agents.
pub const AGENT_MANAGER: &str = "cadastre-agent";

/// Annotation of a pod or a namespace. It lists the names of the pools to use, separated by commas, best first. The
/// annotation of a namespace applies to each pod in the namespace that does not have the annotation itself.
pub const POOLS_ANNOTATION: &str = "cadastre.dev/pools";

/// Annotation of a pod. It lists the addresses to assign to the pod: at most one of each family, separated by a comma.
pub const ADDRESSES_ANNOTATION: &str = "cadastre.dev/addresses";

/// Annotation of a pod. It names the IPClaim whose addresses the pod gets. The claim is in the pod's namespace.
pub const CLAIM_ANNOTATION: &str = "cadastre.dev/claim";

/// Annotation of a pod of a StatefulSet. If it is `true`, the pod uses the IPClaim that has the name of the pod. If no
/// claim has this name, the controller creates the claim. So each ordinal of the StatefulSet keeps its addresses.
pub const STICKY_ANNOTATION: &str = "cadastre.dev/sticky";

/// Annotation of a pod that also has the annotation `cadastre.dev/sticky`. The value becomes `spec.ttlSecondsAfterUse`
/// of the claim that the controller creates.
pub const STICKY_TTL_ANNOTATION: &str = "cadastre.dev/sticky-ttl-seconds";

/// Annotation that KubeVirt sets on the target pod of a live migration when the virtual machine runs there.
pub const MIGRATION_READY_ANNOTATION: &str = "kubevirt.io/migration-target-ready-timestamp";

/// Finalizer of an IPClaim. The controller removes the finalizer once no node has an address of the claim.
pub const CLAIM_FINALIZER: &str = "cadastre.dev/addresses-allocated";

/// Annotation of a NodeSubnet. In it, users list leaked addresses to release without the grace period (see
/// [`requests`](super::requests)).
pub const RELEASE_ANNOTATION: &str = "cadastre.dev/release";

/// Annotation of a NodeSubnet. In it, users list blocks to drain (see [`requests`](super::requests)).
pub const DRAIN_ANNOTATION: &str = "cadastre.dev/drain";

/// Annotation of a NodeSubnet. In it, users list addresses and ranges to withdraw from the node (see
/// [`requests`](super::requests)).
pub const WITHDRAW_ANNOTATION: &str = "cadastre.dev/withdraw";
