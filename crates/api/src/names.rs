//! Names that Cadastre uses in objects of the API server.
//!
//! They are part of the API: objects in clusters contain them, so none of them may change.

/// API group of all kinds.
pub const GROUP: &str = "cadastre.dev";

/// API version of all kinds.
pub const VERSION: &str = "v1alpha1";

/// Annotation of the CRDs: the release that they belong to, for installers.
pub(crate) const VERSION_ANNOTATION: &str = "cadastre.dev/version";

/// Finalizer of an IPPool. It is removed once no node has a range of the pool and no range of it is in quarantine.
pub const FINALIZER: &str = "cadastre.dev/ranges-allocated";

/// Annotation of a Node that fences leaders. A podCIDR is written on the condition that the annotation is still what
/// the leader read, so a change of it makes the API server reject all writes that an earlier leader has in flight.
pub const TERM_ANNOTATION: &str = "cadastre.dev/term";

/// Annotation of the Lease: a write with an indeterminate outcome was in flight when the last holder stopped,
/// so the next one must fence, even after a clean handover.
pub const UNSETTLED_ANNOTATION: &str = "cadastre.dev/unsettled";

/// Annotation of the Lease: the allocations of podCIDRs that its holder may have in flight.
pub const INTENTS_ANNOTATION: &str = "cadastre.dev/intents";

/// Annotation of the Lease, set for the first minute of a leader that found the Lease unattended for a long
/// time: when it had last been renewed.
pub const GAP_ANNOTATION: &str = "cadastre.dev/gap-since";

/// Field manager of all writes of the controller.
pub const FIELD_MANAGER: &str = "cadastre-controller";

/// Name of the controller's Lease, which is in the controller's namespace.
pub const LEASE_NAME: &str = "cadastre-controller";

/// Field manager of all writes of agents.
pub const AGENT_MANAGER: &str = "cadastre-agent";

/// Annotation of a pod, or of a namespace for its pods without the annotation: names of pools to use, separated
/// by commas, best first.
pub const POOLS_ANNOTATION: &str = "cadastre.dev/pools";

/// Annotation of a pod: the addresses to assign, separated by a comma, at most one of each family.
pub const ADDRESSES_ANNOTATION: &str = "cadastre.dev/addresses";

/// Annotation of a NodeSubnet: leaked addresses to release without waiting for the grace period, see
/// [`requests`](super::requests).
pub const RELEASE_ANNOTATION: &str = "cadastre.dev/release";

/// Annotation of a NodeSubnet: blocks to drain, see [`requests`](super::requests).
pub const DRAIN_ANNOTATION: &str = "cadastre.dev/drain";
