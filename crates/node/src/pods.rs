//! What the labels and annotations of a node's pods entitle them to, as determined by the agent.
//!
//! The store keeps these notes, so that they are available while the agent or the API server is not: an unknown
//! pod might have asked for another pool or for a certain address.

use serde::{Deserialize, Serialize};

use super::ops::{Add, PodRef};
use cadastre_core::Addr;

/// The interface to which the annotations of a pod apply; others belong to other networks.
pub const OWN_INTERFACE: &str = "eth0";

/// Which pools and addresses a pod may have.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PodNote {
    /// The pod in the API
    pub pod: PodRef,
    /// The UID by which the runtime knows the pod, if it is the mirror of a static pod; else empty
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mirrors: String,
    /// What applies to the interface [`OWN_INTERFACE`]
    pub own: PodChoice,
    /// What applies to every other interface
    pub other: PodChoice,
}

/// Which pools and addresses a pod may have on an interface.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PodChoice {
    /// The pools to try
    pub pools: PoolOrder,
    /// Exactly these addresses; if empty, any
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Addr>,
    /// Pools restricted to some namespaces that are open to the pod's namespace
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bound: Vec<String>,
}

/// The pools to try, best first.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum PoolOrder {
    /// All pools that serve every pod
    #[default]
    All,
    /// The pools that the pod asks for by name
    Named(Vec<String>),
    /// The pools whose selectors match the pod
    Selected(Vec<String>),
    /// No pool selects the pod, for these reasons
    None(String),
}

impl PodNote {
    /// Whether the note is about this pod, and not an earlier one of the same name.
    pub fn is_of(&self, pod: &PodRef) -> bool {
        let (uid, own) = (pod.uid.as_str(), self.pod.uid.as_str());
        uid.is_empty() || uid == own || uid == self.mirrors
    }

    /// What the pod may have on the interface of this name.
    pub fn choice(&self, ifname: &str) -> &PodChoice {
        if ifname == OWN_INTERFACE {
            &self.own
        } else {
            &self.other
        }
    }
}

impl Add {
    /// Whether labels or annotations of the pod or its namespace may change what this ADD asks for. `selects` says
    /// whether any pool on the node is restricted to some pods, `binds` whether any is restricted to some namespaces.
    pub fn depends_on_pod(&self, selects: bool, binds: bool) -> bool {
        let is_own = self.attachment.ifname == OWN_INTERFACE;
        let by_labels = selects && self.pools.is_empty();
        let is_open = self.addresses.is_empty() && (is_own || by_labels);
        !self.decided && self.pod.is_some() && (is_open || binds)
    }

    /// Replaces what is asked for by what the pod may have. Pools named by the pod come before those of the network's
    /// configuration, and these before pools that select the pod. Fails with the reason if no pool serves the pod.
    pub fn decide(&mut self, choice: &PodChoice) -> Result<(), String> {
        self.decided = true;
        self.bound.clone_from(&choice.bound);
        if self.addresses.is_empty() {
            self.addresses.clone_from(&choice.addresses);
        }
        let is_open = self.pools.is_empty();
        match &choice.pools {
            PoolOrder::Named(names) => self.pools.clone_from(names),
            PoolOrder::Selected(names) if is_open => self.pools.clone_from(names),
            PoolOrder::None(why) if is_open && self.addresses.is_empty() => {
                return Err(format!("no pool of this node serves the pod: {why}"));
            }
            PoolOrder::Selected(_) | PoolOrder::None(_) | PoolOrder::All => {}
        }
        Ok(())
    }
}
