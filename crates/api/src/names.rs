//! Every name by which Cadastre is known to an API server, in one place.
//!
//! These are part of the API: objects in clusters carry them, so none of them may change.

/// API group of all kinds.
pub const GROUP: &str = "cadastre.dev";

/// Version of all kinds.
pub const VERSION: &str = "v1alpha1";

/// Annotation of the CRDs: the version of the release that they are of, for those who install it.
pub(crate) const VERSION_ANNOTATION: &str = "cadastre.dev/version";

/// Finalizer of an IPPool: it stays while a node holds a range of the pool, or one of its ranges is
/// in quarantine.
pub const FINALIZER: &str = "cadastre.dev/ranges-held";

/// Annotation of a Node that fences leaders: a podCIDR is written only if it still is what the
/// leader read, so a change of it refuses everything that an earlier leader has in flight.
pub const TERM_ANNOTATION: &str = "cadastre.dev/term";

/// Annotation of the Lease: a write of unknown outcome was in flight when the last holder stopped,
/// so the next one must fence even though the lease was handed over.
pub const UNSETTLED_ANNOTATION: &str = "cadastre.dev/unsettled";

/// Annotation of the Lease: the assignments of podCIDRs that its holder may have in flight.
pub const INTENTS_ANNOTATION: &str = "cadastre.dev/intents";

/// On the Lease, in the first minute of a leader that found it long unattended: when it was renewed last
/// before.
pub const GAP_ANNOTATION: &str = "cadastre.dev/gap-since";

/// Field manager of all writes of the controller.
pub const FIELD_MANAGER: &str = "cadastre-controller";

/// Name of the Lease of the controller, in its own namespace.
pub const LEASE_NAME: &str = "cadastre-controller";

/// Field manager of all writes of an agent.
pub const AGENT_MANAGER: &str = "cadastre-agent";

/// Annotation of a pod, or of a namespace for its pods that have none: names of the pools that serve
/// them, separated by commas, best first.
pub const POOLS_ANNOTATION: &str = "cadastre.dev/pools";

/// Annotation of a pod: its addresses, separated by a comma, at most one of each family.
pub const ADDRESSES_ANNOTATION: &str = "cadastre.dev/addresses";

/// Annotation of a NodeSubnet: leaked addresses to release without waiting, see
/// [`requests`](super::requests).
pub const RELEASE_ANNOTATION: &str = "cadastre.dev/release";

/// Annotation of a NodeSubnet: blocks to drain, see [`requests`](super::requests).
pub const DRAIN_ANNOTATION: &str = "cadastre.dev/drain";
