//! Which pools serve a pod on this node, and which addresses the pod asks for.
//!
//! | what | comes from |
//! |---|---|
//! | pools | the annotation `cadastre.dev/pools` of the pod, else of its namespace, else the CNI config, else the pools' selectors |
//! | addresses | the CNI config or the runtime, else the pod's annotation `cadastre.dev/addresses` |
//!
//! Annotations apply only to the pod's own interface, `eth0`: other interfaces belong to other networks, whose
//! CNI configs name their own pools. Addresses from a CNI config or the runtime are meant for one attachment, so
//! they take precedence.
//!
//! # Guarantees
//! - An annotation that cannot be parsed is ignored and reported, so that a typo keeps no pod from starting.
//! - A pool that selects by labels serves no pod whose labels are unknown.

use std::collections::BTreeSet;
use std::fmt;

use super::namespaces::Namespace;
use super::pods::Pod;
use cadastre_api::choice::{PodLabels, PoolCandidate, PoolStanding, Requester, Selector, choose};
use cadastre_api::{
    ADDRESSES_ANNOTATION as ADDRESSES, AssignmentMode, NodePool, POOLS_ANNOTATION as POOLS,
};
use cadastre_core::{Addr, Dual};
use cadastre_node::{OWN_INTERFACE, PodChoice, PoolOrder};

/// An annotation that names more pools than this is rejected as a mistake.
const MOST_POOLS: usize = 16;
/// At most this many characters of a wrong annotation are quoted.
const SHOWN: usize = 100;

/// A pool that may serve pods of this node.
#[derive(Clone, Debug, Default)]
pub struct ServingPool {
    /// The name of the IPPool
    pub name: String,
    /// Selects the namespaces whose pods the pool serves
    pub namespace: Selector,
    /// Selects the pods that the pool serves
    pub pod: Selector,
    /// Whether the pool serves only pods that ask for it by name
    pub manual: bool,
}

/// What an ADD asks for, and for which pod.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PodRequest<'a> {
    /// The name of the interface in the container
    pub ifname: &'a str,
    /// The pools that the CNI config names
    pub pools: &'a [String],
    /// The addresses that the CNI config or the runtime asks for
    pub addresses: &'a [Addr],
    /// The pod, if the agent knows it
    pub pod: Option<&'a Pod>,
    /// The namespace of the pod, if the agent knows it
    pub namespace: Option<&'a Namespace>,
}

/// The pools and addresses to try for an ADD.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PodPools {
    /// Pools, best first
    pub pools: PoolOrder,
    /// The only addresses that may be assigned; empty: any address
    pub addresses: Vec<Addr>,
    /// Pools with a namespace selector that matches the pod's namespace
    pub bound: Vec<String>,
    /// What is wrong with the annotations of the pod and its namespace
    pub complaints: Vec<String>,
}

impl PodPools {
    /// Returns what the store needs of the choice, without the complaints.
    pub(crate) fn into_choice(self) -> PodChoice {
        PodChoice {
            pools: self.pools,
            addresses: self.addresses,
            bound: self.bound,
        }
    }
}

impl ServingPool {
    /// Whether the pool serves only some namespaces.
    pub(crate) fn is_bound(&self) -> bool {
        self.namespace.specificity() > 0
    }

    /// Whether the pool serves only some pods, by its namespace selector or its pod selector.
    pub(crate) fn is_selective(&self) -> bool {
        self.is_bound() || self.pod.specificity() > 0
    }
}

/// Why a pool is barred for a pod with unknown labels: that the agent does not know them does not prove that they
/// mismatch.
struct Unknown;

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it selects by labels that the agent does not know (is the API server reachable, and may the agent read pods and namespaces?)")
    }
}

/// Returns the pools that may serve pods on this node, in their order, and errors about selectors that cannot be
/// parsed. `giving`: pools with a block on this node that still assigns addresses. A retained pool is left out if it is
/// not in `giving`.
pub(crate) fn serving(
    pools: &[NodePool],
    giving: &BTreeSet<String>,
) -> (Vec<ServingPool>, Vec<String>) {
    let mut wrong = Vec::new();
    let mut serving = Vec::with_capacity(pools.len());
    for pool in pools {
        if pool.retained && !giving.contains(&pool.name) {
            continue;
        }
        let selectors = Selector::new(pool.namespace_selector.as_deref())
            .and_then(|namespace| Ok((namespace, Selector::new(pool.pod_selector.as_deref())?)));
        match selectors {
            Ok((namespace, pod)) => serving.push(ServingPool {
                name: pool.name.clone(),
                namespace,
                pod,
                manual: pool.assignment == AssignmentMode::Manual,
            }),
            Err(why) => wrong.push(format!(
                "pools: {}: {why}: it serves only who asks for it by name",
                pool.name
            )),
        }
    }
    (serving, wrong)
}

/// Chooses pools and addresses for an ADD. `serving` is sorted best first. `others` are pools with ranges on this node
/// that are not in `serving`, such as the pool of a podCIDR; they serve any pod, but are tried last.
pub(crate) fn decide(asked: &PodRequest, serving: &[ServingPool], others: &[String]) -> PodPools {
    let mut chosen = PodPools::default();
    // Annotations apply only to the pod's own interface and only to a known pod, so the pod is ignored otherwise.
    let pod = asked.pod.filter(|_| asked.ifname == OWN_INTERFACE);
    let namespace = asked.namespace.filter(|_| pod.is_some());
    let of_pod = |name| pod.and_then(|pod| pod.annotations.get(name));
    let mut named = asked.pools.to_vec();
    let by_pod = of_pod(POOLS).map(|text| (text, "annotation"));
    let by_namespace = namespace.and_then(|it| it.pools.as_ref());
    let by_namespace = by_namespace.map(|text| (text, "the namespace's annotation"));
    for (text, whose) in [by_pod, by_namespace].into_iter().flatten() {
        match read(text, pool_names) {
            Ok(names) => {
                named = names;
                break;
            }
            Err(why) => chosen.complaints.push(format!("{whose} {POOLS} {why}")),
        }
    }
    let unknown = pod.into_iter().flat_map(|pod| pod.annotations.keys());
    let unknown = unknown.filter(|key| ![POOLS, ADDRESSES].contains(&key.as_str()));
    chosen.complaints.extend(unknown.map(|key| {
        let key: String = key.chars().take(SHOWN).collect();
        format!("annotation {key} means nothing: pods may have {POOLS} and {ADDRESSES}")
    }));
    let mut wanted = asked.addresses.to_vec();
    match of_pod(ADDRESSES).map(|text| read(text, address_list)) {
        Some(Ok(list)) if wanted.is_empty() => wanted = list,
        Some(Err(why)) => {
            let complaint = format!("annotation {ADDRESSES} {why}");
            chosen.complaints.push(complaint);
        }
        _ => {}
    }
    chosen.addresses = wanted;
    let labels = asked.namespace.map(|it| it.labels.as_slice());
    let bound = serving.iter().filter(|it| it.is_bound());
    let bound = bound.filter(|it| labels.is_some_and(|labels| it.namespace.matches(labels)));
    chosen.bound = bound.map(|it| it.name.clone()).collect();
    chosen.pools = if named.is_empty() {
        by_selectors(asked, serving, others)
    } else {
        PoolOrder::Named(named)
    };
    chosen
}

/// Parses an annotation, or returns what is wrong with it.
fn read<T>(text: &str, read: fn(&str) -> Result<T, String>) -> Result<T, String> {
    let text = text.trim();
    if text.is_empty() {
        return Err("is empty: remove it, or fill it".to_owned());
    }
    read(text).map_err(|why| {
        let text: String = text.chars().take(SHOWN).collect();
        format!("(\"{text}\") is left out of account: {why}")
    })
}

fn by_selectors(asked: &PodRequest, serving: &[ServingPool], others: &[String]) -> PoolOrder {
    if !serving.iter().any(ServingPool::is_selective) {
        return PoolOrder::All;
    }
    let any_node = Selector::default();
    let unknown = Unknown;
    let candidate = |(rank, pool): (usize, &'_ ServingPool)| {
        let is_unknown = (pool.pod.specificity() > 0 && asked.pod.is_none())
            || (pool.namespace.specificity() > 0 && asked.namespace.is_none());
        (rank, is_unknown)
    };
    let judged: Vec<(usize, bool)> = serving.iter().enumerate().map(candidate).collect();
    let candidates: Vec<PoolCandidate> = judged
        .iter()
        .map(|&(rank, is_unknown)| {
            let pool = &serving[rank];
            // With unknown labels no selector can be said to mismatch. So each selector counts as matched, and its pool
            // as barred.
            let known = |selector| if is_unknown { &any_node } else { selector };
            PoolCandidate {
                name: &pool.name,
                node: &any_node,
                namespace: known(&pool.namespace),
                pod: known(&pool.pod),
                priority: -i32::try_from(rank).unwrap_or(i32::MAX),
                families: Dual::default(),
                created: 0,
                manual: pool.manual,
                standing: if is_unknown {
                    PoolStanding::Barred(&unknown)
                } else {
                    PoolStanding::Serving
                },
            }
        })
        .collect();
    let asker = Requester {
        node: &[],
        pod: Some(PodLabels {
            namespace: asked
                .namespace
                .map(|it| it.labels.as_slice())
                .unwrap_or_default(),
            pod: asked
                .pod
                .map(|pod| pod.labels.as_slice())
                .unwrap_or_default(),
        }),
        by_name: &[],
    };
    let choice = choose(&candidates, &asker, |_| 0);
    let mut names: Vec<String> = choice.chosen.iter().map(|it| it.name.to_owned()).collect();
    names.extend(others.iter().cloned());
    if names.is_empty() {
        return PoolOrder::None(choice.to_string().trim().replace('\n', "; "));
    }
    PoolOrder::Selected(names)
}

fn pool_names(text: &str) -> Result<Vec<String>, String> {
    let mut names: Vec<String> = Vec::new();
    for name in text.split(',').map(str::trim) {
        let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
        if name.is_empty() || name.len() > 253 || !name.chars().all(legal) {
            let name: String = name.chars().take(SHOWN).collect();
            return Err(format!(
                "\"{name}\" is no name of a pool: write names separated by commas"
            ));
        }
        if !names.iter().any(|it| it == name) {
            names.push(name.to_owned());
        }
    }
    if names.len() > MOST_POOLS {
        return Err(format!(
            "it names {} pools: name at most {MOST_POOLS}",
            names.len()
        ));
    }
    Ok(names)
}

fn address_list(text: &str) -> Result<Vec<Addr>, String> {
    let mut list: Vec<Addr> = Vec::new();
    for word in text.split(',').map(str::trim) {
        let Some(addr) = Addr::parse_strict(word) else {
            let word: String = word.chars().take(SHOWN).collect();
            return Err(format!(
                "\"{word}\" is no address: write one of each family at most, separated by a comma, without a prefix length"
            ));
        };
        if list.contains(&addr) {
            continue;
        }
        if list.iter().any(|it| it.family == addr.family) {
            return Err(format!(
                "it names two {} addresses: an interface gets one of each family",
                addr.family
            ));
        }
        list.push(addr);
    }
    list.sort_unstable();
    Ok(list)
}

#[cfg(test)]
mod tests;
