//! The ranges from which a node may assign addresses, and the terms of their pools, as last read from its NodeSubnet.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::mutation::Mutation;
use crate::{Addr, Cidr, Family, IpRange};

/// All ranges and pool terms of one node. The agent's store keeps a copy, so the allocation survives a restart of the
/// agent.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NodeAllocation {
    /// UID of the Node object that the ranges are allocated to
    #[serde(rename = "nodeUID")]
    pub node_uid: String,
    /// The blocks and podCIDRs to assign from. They are disjoint, with one exception: the block of a claim may lie in a
    /// block from which the claim's address is withdrawn
    pub blocks: Vec<Block>,
    /// The terms of the pools, in order of preference. A pool can be listed although the node has no block of it. A
    /// block whose pool is not listed has the default terms.
    pub pools: Vec<PoolTerms>,
    /// Parts of the blocks that the controller withdraws from the node. No new address is assigned in these parts
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub withdraw: Vec<Cidr>,
    /// Parts that were withdrawn and that the node may use again
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub returned: Vec<Cidr>,
}

/// A range to assign addresses from: an IPAMBlock or a podCIDR.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Block {
    /// The range as a CIDR; it includes the addresses that are never assigned
    pub cidr: Cidr,
    /// UID of the IPAMBlock; for a podCIDR, the UID of the Node. If the UID changes but the CIDR does not, the object
    /// was recreated and still stands for the same block.
    pub uid: String,
    /// Name of the pool, or empty for a podCIDR that lies in no pool. The address of an IPClaim has a pool of its own
    /// ([`is_claim`])
    pub pool: String,
    /// Whether no new address may be assigned from this block
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
    /// Whether the node has borrowed the block. If so, the block is a part of another node's block
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub borrowed: bool,
    /// Addresses that are never assigned
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<IpRange>,
    /// Addresses that are assigned only to a pod that asks for them
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_request: Vec<IpRange>,
}

/// The terms of a pool: which pods may get its addresses, its cooldown and warm marks, and what CNI results contain.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[expect(clippy::struct_excessive_bools, reason = "they are independent")]
pub struct PoolTerms {
    /// Name of the IPPool; for the pool of a claim, see [`pool_of_claim`]
    pub name: String,
    /// Whether a pod that names no pool may get addresses of this pool, regardless of the pod's labels
    pub automatic: bool,
    /// Whether only pods of certain namespaces may get addresses, even if a pod names the pool or an address of the
    /// pool. True for a pool with a `namespaceSelector`, and for the pool of a claim
    #[serde(default)]
    pub bound: bool,
    /// Whether the pool also serves pods that the agent does not know (`unknownPods: Serve`)
    #[serde(default)]
    pub serves_unknown: bool,
    /// Whether an ADD that requests a specific address of the pool is rejected (`explicitAddresses: Deny`)
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub denies_explicit: bool,
    /// Whether a free address must be probed before it is assigned (`conflictProbe: BeforeUse`). If another host
    /// answers for the address, the address is not assigned
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub probes_conflicts: bool,
    /// How long a released address waits before it is assigned again
    pub cooldown_seconds: u32,
    /// The marks `low` and `high` for the number of free addresses: below `low` the agent asks for a block; above
    /// `high` the agent releases an empty block
    pub warm: (u32, u32),
    /// Minimum number of addresses, in use or free, that the node keeps once it has a block of the pool
    #[serde(default, skip_serializing_if = "is_zero")]
    pub min_addresses: u32,
    /// The pool's IPv4 ranges and gateway; `None` if the pool has no IPv4
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<FamilyTerms>,
    /// The pool's IPv6 ranges and gateway; `None` if the pool has no IPv6
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<FamilyTerms>,
    /// Addresses that the IPPool reserves, in all of its ranges. [`Block::reserved`] decides which addresses of a block
    /// are not assigned
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<IpRange>,
    /// Routes that CNI results contain, in addition to the routes of the CNI configuration
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    /// DNS settings that CNI results contain. Kubernetes ignores them
    #[serde(default, skip_serializing_if = "Dns::is_empty")]
    pub dns: Dns,
    /// The prefix length of addresses in CNI results
    #[serde(default)]
    pub prefix: Prefix,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The ranges and the gateway of one address family of a pool.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FamilyTerms {
    /// All ranges of the pool in this family, including those in which the node has no block
    pub cidrs: Vec<Cidr>,
    /// The gateway that CNI results name for addresses of this family
    #[serde(default)]
    pub gateway: Gateway,
}

/// The gateway that CNI results name.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gateway {
    /// The first usable address of each block. The gateway is not assigned to pods
    #[default]
    FirstOfBlock,
    /// No gateway; every address of a block may be assigned
    None,
    /// The given address, which is not assigned to pods
    Address(Addr),
}

/// How the prefix length of addresses in CNI results is chosen.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefix {
    /// The length of an address: 32 or 128
    Host,
    /// The prefix length of the block
    #[default]
    Block,
    /// The prefix length of the pool's range that contains the block
    Pool,
}

/// A route of a CNI result.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The destination; `0.0.0.0/0` or `::/0` for a default route
    pub dst: Cidr,
    /// The next hop; if absent, the CNI plugin that sets up the interface uses the gateway of the address
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
}

/// DNS settings of a CNI result.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Dns {
    /// Addresses of name servers, in order of preference
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    /// The domain that is added to short host names; empty if not set
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// Domains that are tried for short host names, in this order
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Options of the resolver, such as `ndots:5`
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

impl Dns {
    /// Whether no setting is present. If so, the field that contains the settings is not serialized
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Returns whether a pool is the pool of an IPClaim ([`pool_of_claim`]). The name of such a pool contains a slash, and
/// the name of an IPPool never does.
pub fn is_claim(pool: &str) -> bool {
    pool.contains('/')
}

/// Returns the name of the pool that consists of the addresses of an IPClaim. `claim` is the claim's `NAMESPACE/NAME`,
/// and `vmi` is the UID of the VirtualMachineInstance whose pods may use the addresses. The name contains the UID, so
/// the pods of two virtual machines never share a pool, and no pod outside of a virtual machine shares a pool with a
/// virtual machine.
pub fn pool_of_claim(claim: &str, vmi: Option<&str>) -> String {
    match vmi {
        Some(vmi) if !Mutation::ClaimServesEveryVmi.is_on() => format!("{claim}/{vmi}"),
        _ => claim.to_owned(),
    }
}

/// Returns the `NAMESPACE/NAME` of the claim to which the pool belongs.
pub fn claim_of_pool(pool: &str) -> &str {
    let slashes = pool.match_indices('/');
    slashes.map(|it| it.0).nth(1).map_or(pool, |at| &pool[..at])
}

impl PoolTerms {
    /// Returns the default terms of a pool of which only the name is known. The pool of a claim serves only pods that
    /// name the claim. The addresses of a claim do not cool, because every new pod of the claim is to have them at
    /// once.
    pub fn named(name: &str) -> Self {
        let is_claim = is_claim(name);
        Self {
            name: name.to_owned(),
            automatic: !is_claim,
            bound: is_claim && !Mutation::ClaimServesEveryPod.is_on(),
            // An empty name stands for a podCIDR outside every pool. No pool's selectors apply to such a podCIDR, so a
            // pod gets an address at once, even if the agent does not know the pod.
            serves_unknown: name.is_empty(),
            denies_explicit: false,
            probes_conflicts: false,
            cooldown_seconds: if is_claim { 0 } else { 30 },
            warm: if is_claim { (0, 0) } else { (3, 50) },
            min_addresses: 0,
            ipv4: None,
            ipv6: None,
            reserved: Vec::new(),
            routes: Vec::new(),
            dns: Dns::default(),
            prefix: Prefix::default(),
        }
    }

    /// Returns the terms of a family; `None` if the pool has no ranges of that family.
    pub fn family(&self, family: Family) -> Option<&FamilyTerms> {
        match family {
            Family::V4 => self.ipv4.as_ref(),
            Family::V6 => self.ipv6.as_ref(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_of_a_claim_is_named_after_the_claim_and_the_virtual_machine() {
        for (claim, vmi, pool) in [
            ("shop/web-0", None, "shop/web-0"),
            ("shop/vm", Some("u1"), "shop/vm/u1"),
        ] {
            assert_eq!(pool_of_claim(claim, vmi), pool);
            assert!(is_claim(pool));
            assert_eq!(claim_of_pool(pool), claim);
        }
        assert!(!is_claim("default"));
    }

    #[test]
    fn the_pool_of_a_claim_serves_only_pods_that_name_the_claim() {
        let terms = PoolTerms::named("shop/web-0");
        let served = (terms.automatic, terms.bound, terms.serves_unknown);
        assert_eq!(served, (false, true, false));
        assert_eq!((terms.cooldown_seconds, terms.warm), (0, (0, 0)));
        let terms = PoolTerms::named("default");
        let served = (terms.automatic, terms.bound, terms.serves_unknown);
        assert_eq!(served, (true, false, false));
        let terms = PoolTerms::named("");
        let served = (terms.automatic, terms.bound, terms.serves_unknown);
        assert_eq!(served, (true, false, true));
    }

    #[test]
    fn a_pool_has_terms_of_the_families_that_it_has() {
        let terms = PoolTerms {
            ipv6: Some(FamilyTerms::default()),
            ..PoolTerms::named("default")
        };
        assert!(terms.family(Family::V4).is_none());
        assert!(terms.family(Family::V6).is_some());
    }

    #[test]
    fn dns_settings_are_empty_if_none_is_set() {
        assert!(Dns::default().is_empty());
        let domain = "cluster.local".to_owned();
        let dns = Dns {
            domain,
            ..Dns::default()
        };
        assert!(!dns.is_empty());
        assert!(is_zero(&0) && !is_zero(&1));
    }
}
