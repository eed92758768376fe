//! Notes on which pools and addresses the pods of a node may have according to their labels and annotations. The agent
//! writes the notes.
//!
//! The notes are in the store, so that they are available while the agent or the API server is unavailable. Without a
//! note, a pod could get any address although it asks for another pool or for a specific address.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::ops::{Add, OpError, OpErrorKind, PodRef};
use cadastre_core::Addr;
use cadastre_core::node_allocation::is_claim;

/// The interface to which the annotations of a pod apply. A pod's other interfaces belong to other networks.
pub const OWN_INTERFACE: &str = "eth0";

/// The agent's note on which pools and addresses a pod may have.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PodNote {
    /// The pod, with the UID that it has in the API
    pub pod: PodRef,
    /// For the mirror pod of a static pod, the UID by which the container runtime knows the static pod; else empty
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mirrors: String,
    /// What the pod may have on the interface [`OWN_INTERFACE`]
    pub own: PodChoice,
    /// What the pod may have on every interface that is neither [`OWN_INTERFACE`] nor a key of `interfaces`
    pub other: PodChoice,
    /// What the pod may have on each interface for which the pod names an IPAMClaim. The keys are the interfaces' names
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub interfaces: BTreeMap<String, PodChoice>,
}

/// Which pools and addresses a pod may have on an interface.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PodChoice {
    /// The pools to try, in order
    pub pools: PoolOrder,
    /// The addresses that the pod requests and must get; if empty, the pod may get any address
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Addr>,
    /// Names of the pools whose namespace selector matches the pod's namespace. Also the pod's IPClaim, as
    /// `namespace/name`: the IPClaim that the pod uses, or the IPClaim that the controller creates if the pod or the
    /// CNI request asks for specific addresses
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bound: Vec<String>,
    /// Whether the pod may have only what this choice names, even if the network's configuration names other pools or
    /// addresses. This field is true for a pod that names an IPClaim
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub strict: bool,
}

/// Which pools to try for a pod, and in which order.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum PoolOrder {
    /// All pools that serve every pod, in the node's order of preference
    #[default]
    All,
    /// The pools that the pod asks for by name
    Named(Vec<String>),
    /// The pools whose selectors match the pod
    Selected(Vec<String>),
    /// No pool of the node serves the pod; the text says why
    None(String),
}

impl PodNote {
    /// Returns whether the note is about `pod`, and not about an earlier pod with the same name.
    pub fn is_of(&self, pod: &PodRef) -> bool {
        let (uid, own) = (pod.uid.as_str(), self.pod.uid.as_str());
        uid.is_empty() || uid == own || uid == self.mirrors
    }

    /// Returns what the pod may have on the interface with this name.
    pub fn choice(&self, ifname: &str) -> &PodChoice {
        let of_claim = self.interfaces.get(ifname);
        of_claim.unwrap_or(if ifname == OWN_INTERFACE {
            &self.own
        } else {
            &self.other
        })
    }
}

impl Add {
    /// Returns whether the result of this ADD depends on labels or annotations of the pod or of its namespace. `binds`
    /// says whether any pool is restricted to some namespaces.
    pub fn depends_on_pod(&self, binds: bool) -> bool {
        // The pod may name pools or a claim for its own interface, and an IPAMClaim for any other interface.
        let is_open = self.addresses.is_empty();
        !self.decided && self.pod.is_some() && (is_open || binds)
    }

    /// Returns the IPClaim through which the pod may get the addresses that it requests. The IPClaim matters only if no
    /// block outside of the IPClaim contains these addresses.
    pub fn claim_of_addresses(&self) -> Option<&str> {
        let mut claims = self.bound.iter().filter(|it| is_claim(it));
        let claim = claims.find(|it| !self.pools.contains(it));
        claim
            .filter(|_| !self.addresses.is_empty())
            .map(String::as_str)
    }

    /// Replaces the pools and addresses of the request by those that the pod may have. Pools that the pod names replace
    /// the pools in the network's configuration. Pools that are chosen by their selectors are used only if the
    /// configuration names no pools. Fails if no pool serves the pod. Also fails if the pod names addresses and the
    /// request names a different one.
    pub fn decide(&mut self, choice: &PodChoice) -> Result<(), OpError> {
        self.decided = true;
        self.bound.clone_from(&choice.bound);
        let is_other = |addr: &&Addr| !choice.addresses.contains(addr);
        if self.addresses.is_empty() {
            self.addresses.clone_from(&choice.addresses);
        } else if let Some(other) = self.addresses.iter().find(is_other)
            && !choice.addresses.is_empty()
        {
            let own: Vec<String> = choice.addresses.iter().map(Addr::to_string).collect();
            let text = format!(
                "the CNI request asks for {other}, and the pod's annotation cadastre.dev/addresses for {}: ask for the same, or by one of them only.",
                own.join(", ")
            );
            let why = OpErrorKind::NotInBlocks;
            return Err(OpError { why, text });
        }
        let is_open = self.pools.is_empty();
        match &choice.pools {
            PoolOrder::Named(names) => self.pools.clone_from(names),
            PoolOrder::Selected(names) if is_open => self.pools.clone_from(names),
            PoolOrder::None(why) if choice.strict || (is_open && self.addresses.is_empty()) => {
                let text = format!("no pool of this node serves the pod: {why}");
                let why = OpErrorKind::NoBlock;
                return Err(OpError { why, text });
            }
            PoolOrder::Selected(_) | PoolOrder::None(_) | PoolOrder::All => {}
        }
        Ok(())
    }
}
