//! Addresses that the CNI configuration or the runtime requests for pods.
//!
//! Only the agent of the pod's node receives such a request. The agent reports the request while the pod waits, and the
//! controller creates a claim for this pod. From then on, the claim itself records the request, for as long as the pod
//! exists.
//!
//! A compromised node may report anything, but must not be able to cause claims in any namespace. So a request counts
//! only if a pod with the UID in the request exists, has the namespace and name in the request, and can use a claim. If
//! an agent reports the request, the pod must also be bound to the agent's node.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, RandomState};

use super::names::{ClaimName, NodeName};
use super::objects::{AddressRequest, AskedAddresses, ClaimSource, PodClaim, PodUid};
use cadastre_api::pod_claim::claim_of_addresses;
use cadastre_core::mutation::Mutation;

/// Where a request was found. If a claim and an agent both have a request for the same pod, the claim's request counts,
/// because the addresses of a claim cannot change.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RequestSource {
    /// The claim that was created for the request
    Claim(ClaimName),
    /// The agent of this node
    Agent(NodeName),
}

/// All requests, and the data about pods with which the requests are compared.
#[derive(Clone, Debug, Default)]
pub(crate) struct AddressRequests {
    by_pod: BTreeMap<PodUid, BTreeMap<RequestSource, AddressRequest>>,
    /// The key for hashes of pod names. The key is random, so that nobody can choose a name that has the same hash as
    /// another name
    key: RandomState,
    /// The nodes of all pods that can use a claim, each with the number of these pods. Through this map, all pods of a
    /// node share one copy of the node's name
    nodes: BTreeMap<NodeName, usize>,
}

/// The data about a pod with which requests are compared. Every pod that can use a claim has such a record, so the
/// record is kept small.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestedPod {
    /// The node to which the pod is bound
    node: NodeName,
    /// A hash of namespace and name, because the texts would take several times as many bytes
    name: u64,
}

impl RequestedPod {
    /// Returns the node to which the pod is bound.
    pub(crate) fn node(&self) -> &NodeName {
        &self.node
    }
}

impl AddressRequests {
    /// Counts a pod at its node, and returns the record with which requests for the pod are compared. `name` is the pod's
    /// `namespace/name`. When the caller drops the record, it must call [`AddressRequests::forget`], which takes the pod
    /// off the count.
    pub(crate) fn pod(&mut self, name: &str, node: NodeName) -> RequestedPod {
        let node = match self.nodes.get_key_value(&node) {
            Some((known, _)) => known.clone(),
            None => node,
        };
        *self.nodes.entry(node.clone()).or_default() += 1;
        let name = self.key.hash_one(name);
        RequestedPod { node, name }
    }

    /// Subtracts a pod from the count to which [`AddressRequests::pod`] has added it.
    pub(crate) fn forget(&mut self, pod: &RequestedPod) {
        if let Some(count) = self.nodes.get_mut(&pod.node) {
            *count -= 1;
            if *count == 0 {
                self.nodes.remove(&pod.node);
            }
        }
    }

    /// Replaces the requests from a source. Returns the pods whose requests have changed.
    pub(crate) fn change(
        &mut self,
        source: &RequestSource,
        before: &[AddressRequest],
        after: &[AddressRequest],
    ) -> BTreeSet<PodUid> {
        let mut changed = BTreeSet::new();
        for request in before {
            let uid = PodUid::read(&request.uid);
            changed.insert(uid);
            if let Some(of_pod) = self.by_pod.get_mut(&uid) {
                of_pod.remove(source);
                if of_pod.is_empty() {
                    self.by_pod.remove(&uid);
                }
            }
        }
        for request in after {
            let uid = PodUid::read(&request.uid);
            changed.insert(uid);
            let of_pod = self.by_pod.entry(uid).or_default();
            of_pod.insert(source.clone(), request.clone());
        }
        changed
    }

    /// Returns the claim that a pod uses because CNI requests addresses for the pod; `None` if no request counts.
    pub(crate) fn claim_of(
        &self,
        uid: PodUid,
        pod: &RequestedPod,
        has_addresses: bool,
    ) -> Option<Box<PodClaim>> {
        let requests = self.by_pod.get(&uid)?;
        let counts = |(source, request): &(&RequestSource, &AddressRequest)| {
            let is_of_node = match source {
                RequestSource::Claim(_) => true,
                RequestSource::Agent(node) => {
                    *node == pod.node || Mutation::RequestOfAnyNodeBelieved.is_on()
                }
            };
            let is_same = self.key.hash_one(&*request.pod) == pod.name;
            is_of_node && (is_same || Mutation::RequestForAnyNameBelieved.is_on())
        };
        let (_, request) = requests.iter().find(counts)?;
        let (namespace, name) = request.pod.split_once('/')?;
        let claim = claim_of_addresses(name, &request.uid);
        Some(Box::new(PodClaim {
            claim: format!("{namespace}/{claim}").into(),
            pod: name.into(),
            uid: request.uid.clone(),
            node: Some(pod.node.clone()),
            created: 0,
            source: ClaimSource::Addresses(Box::new(AskedAddresses {
                addresses: request.addresses.clone(),
                is_served: has_addresses,
                is_by_cni: true,
            })),
            machine: None,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::objects::Pod;
    use crate::cluster::pods::PodIndex;
    use crate::fixtures::{claiming_pod, pod};
    use cadastre_core::Addr;
    use cadastre_daemon::watch::ObjectEvent;

    fn request(pod: &str, address: &str) -> AddressRequest {
        AddressRequest {
            pod: pod.into(),
            uid: "u".into(),
            addresses: [Addr::parse_strict(address).unwrap()].into(),
        }
    }

    /// Returns the pod default/web of node a. The pod has no annotation.
    fn web() -> Pod {
        Pod {
            name: "default/web".into(),
            uid: "u".into(),
            node: Some("a".into()),
            ..pod(1, &[])
        }
    }

    fn agent(node: &str) -> RequestSource {
        RequestSource::Agent(node.into())
    }

    fn index(pod: Pod) -> PodIndex {
        let mut pods = PodIndex::default();
        pods.change(ObjectEvent::Applied(pod));
        pods
    }

    /// Returns the claim that the pod uses, and the first address that the pod asks for.
    fn claim(pods: &PodIndex) -> Option<(String, String)> {
        let claim = pods.claim_of(PodUid::read("u"))?;
        let ClaimSource::Addresses(asked) = &claim.source else {
            return Some((claim.claim.to_string(), String::new()));
        };
        Some((claim.claim.to_string(), asked.addresses[0].to_string()))
    }

    fn own(address: &str) -> (String, String) {
        let claim = format!("default/{}", claim_of_addresses("web", "u"));
        (claim, address.to_owned())
    }

    #[test]
    fn a_node_can_request_addresses_for_its_own_pods_only() {
        let all = [request("default/web", "10.0.0.7")];
        let mut pods = index(web());
        pods.change_requests(&agent("b"), &[], &all);
        assert_eq!(claim(&pods), None);
        pods.change_requests(&agent("a"), &[], &all);
        assert_eq!(claim(&pods), Some(own("10.0.0.7")));
        let changed = pods.take_claims();
        assert!(changed.contains(&*own("").0), "{changed:?}");
        let [user] = pods.of_claim(&own("").0.into())[..] else {
            panic!("one pod");
        };
        assert_eq!((&*user.pod, user.node.as_deref()), ("web", Some("a")));
        pods.change_requests(&agent("a"), &all, &[]);
        assert_eq!(claim(&pods), None);
        // The agent may report the request before the watch delivers the pod.
        let mut pods = PodIndex::default();
        pods.change_requests(&agent("a"), &[], &all);
        pods.change(ObjectEvent::Applied(web()));
        assert_eq!(claim(&pods), Some(own("10.0.0.7")));
        // Mirror pods and pods on the host's network can use no claim.
        let mut pods = index(Pod {
            node: None,
            ..web()
        });
        pods.change_requests(&agent("a"), &[], &all);
        assert_eq!(claim(&pods), None);
    }

    #[test]
    fn a_request_counts_only_under_the_name_of_its_pod() {
        for wrong in ["kube-system/web", "default/db"] {
            let mut pods = index(web());
            pods.change_requests(&agent("a"), &[], &[request(wrong, "10.0.0.7")]);
            assert_eq!(claim(&pods), None);
        }
    }

    #[test]
    fn the_claim_shows_the_request_when_the_agent_no_longer_does() {
        let mut pods = index(web());
        let all = [request("default/web", "10.0.0.7")];
        pods.change_requests(&agent("a"), &[], &all);
        let of_claim = RequestSource::Claim(own("").0.into());
        pods.change_requests(&of_claim, &[], &all);
        pods.change_requests(&agent("a"), &all, &[]);
        assert_eq!(claim(&pods), Some(own("10.0.0.7")));
        // The addresses of the claim cannot change.
        pods.change_requests(&agent("a"), &[], &[request("default/web", "10.0.0.9")]);
        assert_eq!(claim(&pods), Some(own("10.0.0.7")));
        pods.change_requests(&of_claim, &all, &[]);
        assert_eq!(claim(&pods), Some(own("10.0.0.9")));
        let is_served = |pods: &PodIndex| pods.claim_of(PodUid::read("u")).unwrap().is_served();
        assert!(!is_served(&pods));
        let addresses = pod(1, &["10.0.0.9"]).addresses;
        pods.change(ObjectEvent::Applied(Pod { addresses, ..web() }));
        assert!(is_served(&pods));
        pods.change(ObjectEvent::Deleted(web()));
        assert!(pods.of_claim(&own("").0.into()).is_empty());
    }

    #[test]
    fn a_claim_that_the_pod_names_is_the_only_one_that_it_uses() {
        let mut names = claiming_pod("web", "default/db", Some("a"));
        names.uid = "u".into();
        let mut pods = index(names);
        pods.change_requests(&agent("a"), &[], &[request("default/web", "10.0.0.7")]);
        let is = claim(&pods).map(|(claim, _)| claim);
        assert_eq!(is.as_deref(), Some("default/db"));
    }

    #[test]
    fn the_name_of_a_node_is_kept_while_the_node_has_pods() {
        let mut requests = AddressRequests::default();
        let (one, other) = (
            requests.pod("default/a", "n".into()),
            requests.pod("default/b", "n".into()),
        );
        requests.forget(&one);
        assert_eq!(requests.nodes.len(), 1);
        requests.forget(&other);
        assert!(requests.nodes.is_empty());
    }
}
