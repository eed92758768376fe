//! Decides which pools serve a pod on this node, and which addresses the pod asks for.
//!
//! - A pod with a claim gets pools and addresses from an IPClaim. This is the IPClaim that the pod's annotation
//!   `cadastre.dev/claim` names, or the IPClaim with the pod's name (`cadastre.dev/sticky`).
//! - An interface for which the pod names an IPAMClaim (`ipam-claim-reference`) gets addresses from the IPClaim that
//!   has the name of the IPAMClaim.
//! - Any other pod gets its pools from the first of these that names pools: the pod's annotation `cadastre.dev/pools`,
//!   the same annotation of the pod's namespace, and the CNI config. If none of them names pools, the pools' selectors
//!   decide.
//! - The addresses that any other pod asks for are named by the CNI config, the runtime, or the pod's annotation
//!   `cadastre.dev/addresses`. The addresses are in a block of the node, or they come from an IPClaim of the pod's own.
//!
//! Annotations other than these apply only to the pod's interface `eth0`, because other interfaces belong to other
//! networks, whose CNI configs name their pools. An IPClaim of the pod's own applies only to `eth0`, too, because a pod
//! has only one such IPClaim. If an annotation and the CNI request ask for different addresses,
//! [`Add::decide`](cadastre_node::Add::decide) refuses the ADD.
//!
//! # Guarantees
//! - An annotation that cannot be parsed is ignored and reported, so that a typo keeps no pod from starting. The
//!   exception is `cadastre.dev/claim`: if it is wrong, the pod gets no address, because users expect the claim's
//!   address.
//! - A pool that selects by labels serves no pod whose labels are unknown.

use std::collections::BTreeSet;

use super::namespaces::Namespace;
use super::pods::Pod;
use cadastre_api::choice::{PodLabels, PoolCandidate, PoolStanding, Requester, Selector, choose};
use cadastre_api::pod_claim::{self, ClaimOfPod, is_object_name};
use cadastre_api::{
    ADDRESSES_ANNOTATION as ADDRESSES, AssignmentMode, CLAIM_ANNOTATION as CLAIM, NodePool,
    POOLS_ANNOTATION as POOLS, STICKY_ANNOTATION as STICKY, STICKY_TTL_ANNOTATION as STICKY_TTL,
    sticky,
};
use cadastre_core::Dual;
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::pool_of_claim;
use cadastre_node::{OWN_INTERFACE, PodChoice, PoolOrder};

/// The annotations in the domain `cadastre.dev` that pods may have. Other annotations in this domain are reported as
/// errors.
const KNOWN: [&str; 5] = [POOLS, ADDRESSES, CLAIM, STICKY, STICKY_TTL];

/// How error messages name the place of an IPAMClaim's name: the annotation, and the key in an element of the
/// annotation.
const IPAM_CLAIM: &str = "k8s.v1.cni.cncf.io/networks, ipam-claim-reference";

/// An annotation with more pools than this is rejected as a mistake.
const MOST_POOLS: usize = 16;
/// At most this many characters of a wrong annotation are quoted.
const QUOTED: usize = 100;

/// A pool from which pods of this node can get addresses.
#[derive(Clone, Debug, Default)]
pub struct ServingPool {
    /// The name of the IPPool, by which pods can ask for it
    pub name: String,
    /// Selects the namespaces whose pods the pool serves; the default selector selects all
    pub namespace: Selector,
    /// Selects the pods that the pool serves; the default selector selects all
    pub pod: Selector,
    /// Whether the pool serves only pods that ask for it by name
    pub manual: bool,
}

/// The parts of an ADD, apart from the requested addresses, on which the choice of pools depends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PodRequest<'a> {
    /// The name of the interface in the container
    pub ifname: &'a str,
    /// The pools that the CNI config names
    pub pools: &'a [String],
    /// The pod, if the agent knows it
    pub pod: Option<&'a Pod>,
    /// The namespace of the pod, if the agent knows it
    pub namespace: Option<&'a Namespace>,
}

impl ServingPool {
    /// Whether the pool serves only some namespaces.
    pub(crate) fn is_bound(&self) -> bool {
        self.namespace.specificity() > 0
    }

    /// Whether the pool serves only some pods, because it has a namespace selector or a pod selector.
    pub(crate) fn is_selective(&self) -> bool {
        self.is_bound() || self.pod.specificity() > 0
    }
}

/// The reason why a pool with selectors does not serve a pod whose labels are unknown. The labels might match, so the
/// reason must not speak of a mismatch.
const UNKNOWN_LABELS: &str = "it selects by labels that the agent does not know (is the API server reachable, and may the agent read pods and namespaces?)";

/// Returns the pools that can serve pods on this node, in order of preference. Also returns errors about selectors that
/// cannot be parsed. `allocating` are the pools that have a block on this node from which new addresses are assigned. A
/// retained pool is a pool from which the node gets no new blocks. It serves pods only if it is in `allocating`.
pub(crate) fn serving(
    pools: &[NodePool],
    allocating: &BTreeSet<String>,
) -> (Vec<ServingPool>, Vec<String>) {
    let mut wrong = Vec::new();
    let mut serving = Vec::with_capacity(pools.len());
    for pool in pools {
        if pool.retained && !allocating.contains(&pool.name) {
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

/// Chooses pools and addresses for an ADD. Also returns what is wrong with the annotations of the pod and its
/// namespace. `serving` is sorted best first. `others` are the pools that have ranges on this node but are not in
/// `serving`, such as the pool of a podCIDR. The pools in `others` serve any pod, but are tried last.
pub(crate) fn decide(
    request: &PodRequest,
    serving: &[ServingPool],
    others: &[String],
) -> (PodChoice, Vec<String>) {
    let mut errors = Vec::new();
    // Annotations apply only to the pod's interface `eth0`. For other interfaces they are ignored.
    let pod = request.pod.filter(|_| request.ifname == OWN_INTERFACE);
    let of_pod = |name| pod.and_then(|pod| pod.annotations.get(name));
    let keys = pod.into_iter().flat_map(|pod| pod.annotations.keys());
    let unknown = keys.filter(|key| !KNOWN.contains(&key.as_str()));
    errors.extend(unknown.map(|key| {
        let key: String = key.chars().take(QUOTED).collect();
        let known = KNOWN.join(", ");
        format!("annotation {key} means nothing: pods may have {known}")
    }));
    if let Some((pod, claim)) = interface_claim(request) {
        let choice = by_claim(pod, claim, IPAM_CLAIM, &mut errors);
        return (choice, errors);
    }
    if let Some(pod) = pod {
        let (annotations, is_of_stateful_set) = (&pod.annotations, pod.is_of_stateful_set);
        errors.extend(sticky::sticky_errors(annotations, is_of_stateful_set));
        let claim = claim_of(pod);
        let decides: Option<(_, &[&str])> = match claim {
            Some(ClaimOfPod::Annotated(_)) => Some((CLAIM, &[POOLS, ADDRESSES])),
            // For a sticky pod, the annotation about pools still counts, because the controller takes the claim's
            // addresses from these pools.
            Some(ClaimOfPod::Sticky(_)) => Some((STICKY, &[ADDRESSES])),
            Some(ClaimOfPod::Addresses { .. }) | None => None,
        };
        if let Some((claim, (decides, besides))) = claim.zip(decides) {
            let besides = besides.iter().filter(|it| annotations.contains_key(**it));
            errors.extend(besides.map(|it| {
                format!(
                    "annotation {it} is left out of account: {decides} decides. Remove one of them"
                )
            }));
            let choice = by_claim(pod, claim.name(), CLAIM, &mut errors);
            return (choice, errors);
        }
    }
    let of_namespace = request.namespace.filter(|_| pod.is_some());
    let by_pod = of_pod(POOLS).map(|text| (text, "annotation"));
    let by_namespace = of_namespace.and_then(|it| it.pools.as_ref());
    let by_namespace = by_namespace.map(|text| (text, "the namespace's annotation"));
    let mut names = request.pools.to_vec();
    for (text, whose) in [by_pod, by_namespace].into_iter().flatten() {
        match pod_claim::read_annotation(text, pool_names) {
            Ok(annotated) => {
                names = annotated;
                break;
            }
            Err(why) => errors.push(format!("{whose} {POOLS} {why}")),
        }
    }
    let asked = pod.and_then(|pod| pod_claim::addresses(&pod.annotations));
    let addresses = match asked.transpose() {
        Ok(addresses) => addresses.unwrap_or_default(),
        Err(why) => {
            errors.push(format!("annotation {ADDRESSES} {why}"));
            Vec::new()
        }
    };
    // The pod may use this claim even if its annotations ask for no addresses, because the CNI config or the runtime
    // may ask for addresses. The controller creates no claim for a mirror pod, because a kubelet can create mirror pods
    // in any namespace.
    let claim = pod.filter(|pod| pod.mirrors.is_none()).map(|pod| {
        let name = pod_claim::claim_of_addresses(&pod.name, &pod.uid);
        format!("{}/{name}", pod.namespace)
    });
    let is_open = |it: &&ServingPool| {
        let namespace = request.namespace;
        it.is_bound() && namespace.is_some_and(|of| it.namespace.matches(&of.labels))
    };
    let bound = serving.iter().filter(is_open).map(|it| it.name.clone());
    let choice = PodChoice {
        bound: bound.chain(claim).collect(),
        pools: if names.is_empty() {
            by_selectors(request, serving, others)
        } else {
            PoolOrder::Named(names)
        },
        addresses,
        strict: false,
    };
    (choice, errors)
}

fn claim_of(pod: &Pod) -> Option<ClaimOfPod<'_>> {
    pod_claim::claim_of(
        &pod.name,
        &pod.uid,
        &pod.annotations,
        pod.is_of_stateful_set,
    )
}

/// Returns the pod, and the name of the IPAMClaim that the pod names for the interface. Returns `None` for a mirror
/// pod, because a kubelet can create mirror pods in any namespace.
fn interface_claim<'a>(request: &PodRequest<'a>) -> Option<(&'a Pod, &'a str)> {
    let pod = request.pod.filter(|pod| pod.mirrors.is_none())?;
    if Mutation::InterfaceClaimIgnored.is_on() {
        return None;
    }
    let mut claims = pod.interface_claims.iter();
    let claim = claims.find(|it| it.interface == request.ifname)?;
    Some((pod, &claim.claim))
}

/// Returns the choice for a pod that asks for the claim `name`. If `name` is not a valid name, the pod gets no address,
/// because for such a pod a wrong address is worse than none.
fn by_claim(pod: &Pod, name: &str, annotation: &str, errors: &mut Vec<String>) -> PodChoice {
    let mut choice = PodChoice {
        strict: true,
        ..PodChoice::default()
    };
    if is_object_name(name) {
        let claim = pool_of_claim(&format!("{}/{name}", pod.namespace), pod.vmi.as_deref());
        choice.bound = vec![claim.clone()];
        choice.pools = PoolOrder::Named(vec![claim]);
    } else {
        let name: String = name.chars().take(QUOTED).collect();
        let error = format!(
            "annotation {annotation} (\"{name}\") is no name of an IPClaim, and the pod gets no address: name an IPClaim of the pod's namespace"
        );
        errors.push(error.clone());
        choice.pools = PoolOrder::None(error);
    }
    choice
}

fn by_selectors(request: &PodRequest, serving: &[ServingPool], others: &[String]) -> PoolOrder {
    if !serving.iter().any(ServingPool::is_selective) {
        return PoolOrder::All;
    }
    let any = Selector::default();
    let candidates = serving.iter().enumerate().map(|(rank, pool)| {
        let is_unknown = (pool.pod.specificity() > 0 && request.pod.is_none())
            || (pool.is_bound() && request.namespace.is_none());
        let (namespace, pod, standing) = if is_unknown {
            (&any, &any, PoolStanding::Barred(&UNKNOWN_LABELS))
        } else {
            (&pool.namespace, &pool.pod, PoolStanding::Serving)
        };
        PoolCandidate {
            name: &pool.name,
            node: &any,
            namespace,
            pod,
            priority: -i32::try_from(rank).unwrap_or(i32::MAX),
            families: Dual::default(),
            created: 0,
            manual: pool.manual,
            standing,
        }
    });
    let candidates: Vec<PoolCandidate> = candidates.collect();
    let requester = Requester {
        node: &[],
        pod: Some(PodLabels {
            namespace: request.namespace.map_or(&[], |it| &it.labels),
            pod: request.pod.map_or(&[], |it| &it.labels),
        }),
        by_name: &[],
    };
    let choice = choose(&candidates, &requester, |_| 0);
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
            let name: String = name.chars().take(QUOTED).collect();
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

#[cfg(test)]
mod tests;
