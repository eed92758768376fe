//! What the pods of a node may have, as the agent found by their labels and annotations.
//!
//! The store keeps it, so that it is known too while the agent, or the API server, is away: a pod that nothing is
//! known of might have named another pool or an address of its own.

use serde::{Deserialize, Serialize};

use super::ops::{Add, PodRef};
use cadastre_core::Addr;

/// The interface that a pod's annotations speak of: others are other networks.
pub const OWN_INTERFACE: &str = "eth0";

/// What a pod may have.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PodNote {
    /// The pod
    pub pod: PodRef,
    /// The UID that runtimes know it by, where it mirrors a static pod
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mirrors: String,
    /// On its own interface
    pub own: PodChoice,
    /// On others
    pub other: PodChoice,
}

/// What a pod may have on an interface.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PodChoice {
    /// Pools to try, best first
    pub pools: Pools,
    /// These addresses and no others; empty: any
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Addr>,
    /// The pools for some namespaces only that are for its namespace
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bound: Vec<String>,
}

/// Pools to try, best first.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Pools {
    /// All that serve any pod
    #[default]
    All,
    /// Those that were asked for
    Named(Vec<String>),
    /// Those that select the pod
    Selected(Vec<String>),
    /// None selects it, for these reasons
    None(String),
}

impl PodNote {
    /// Whether it is of that pod, and not of an earlier one of its name.
    pub fn is_of(&self, pod: &PodRef) -> bool {
        let (uid, own) = (pod.uid.as_str(), self.pod.uid.as_str());
        uid.is_empty() || uid == own || uid == self.mirrors
    }

    /// What it may have on an interface of that name.
    pub fn choice(&self, ifname: &str) -> &PodChoice {
        if ifname == OWN_INTERFACE {
            &self.own
        } else {
            &self.other
        }
    }
}

impl Add {
    /// Whether labels or annotations of the pod or its namespace may say something else than what is asked for.
    /// `selects`: whether a pool here serves some pods only; `binds`: some namespaces only.
    pub fn depends_on_pod(&self, selects: bool, binds: bool) -> bool {
        let is_own = self.attachment.ifname == OWN_INTERFACE;
        let by_labels = selects && self.pools.is_empty();
        let is_open = self.addresses.is_empty() && (is_own || by_labels);
        !self.decided && self.pod.is_some() && (is_open || binds)
    }

    /// Asks for what the pod may have. What its network's configuration names goes before what selects it, and after
    /// what it names itself. Refused with why no pool serves it.
    pub fn decide(&mut self, choice: &PodChoice) -> Result<(), String> {
        self.decided = true;
        self.bound.clone_from(&choice.bound);
        if self.addresses.is_empty() {
            self.addresses.clone_from(&choice.addresses);
        }
        let is_open = self.pools.is_empty();
        match &choice.pools {
            Pools::Named(names) => self.pools.clone_from(names),
            Pools::Selected(names) if is_open => self.pools.clone_from(names),
            Pools::None(why) if is_open && self.addresses.is_empty() => {
                return Err(format!("no pool of this node serves the pod: {why}"));
            }
            Pools::Selected(_) | Pools::None(_) | Pools::All => {}
        }
        Ok(())
    }
}
