//! The pods of this node, as the API shows them.
//!
//! # Caveats
//! - The kubelet generates a UID for a static pod. The API shows the static pod as a mirror pod, which has another UID.
//!   An annotation of the mirror pod contains the static pod's UID. [`Pods`] finds such a pod by either UID.
//! - If a pod is not found, either the pod is deleted, or the watch has not shown it yet because the watch is delayed
//!   or interrupted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::attached::{self, SecondNetworks};
use cadastre_api::choice::Label;
use cadastre_api::{InterfaceClaim, MIRROR_ANNOTATION, PodLite, ipam_claim, pod_claim, sticky};
use cadastre_core::Addr;
use cadastre_daemon::watch::ObjectEvent;
use cadastre_node::PodRef;

/// The parts of a Pod object that the agent needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pod {
    /// `metadata.namespace`; never empty in a pod from the API
    pub namespace: String,
    /// `metadata.name`; a later pod may have the same name
    pub name: String,
    /// `metadata.uid`; for a static pod, the UID of its mirror pod
    pub uid: String,
    /// The UID of the static pod, if this is a mirror pod
    pub mirrors: Option<String>,
    /// The labels of the Pod object, sorted by key
    pub labels: Vec<Label>,
    /// The annotations in the domain `cadastre.dev`, each with its value
    pub annotations: BTreeMap<String, String>,
    /// Whether a StatefulSet controls the pod
    pub is_of_stateful_set: bool,
    /// The UID of the VirtualMachineInstance that controls the pod, if one does
    pub vmi: Option<String>,
    /// Whether the pod's phase is Succeeded or Failed
    pub finished: bool,
    /// The addresses in the pod's status; empty for a pod on the host network
    pub addresses: Vec<Addr>,
    /// The addresses on second networks, according to Multus' annotations
    pub second_networks: SecondNetworks,
    /// The IPAMClaims that the pod names for its interfaces
    pub interface_claims: Vec<InterfaceClaim>,
}

/// The pods of this node, kept up to date by watch events.
#[derive(Clone, Debug, Default)]
pub struct Pods {
    by_uid: BTreeMap<String, Arc<Pod>>,
    mirrored: BTreeMap<String, String>,
    by_name: BTreeMap<(String, String), String>,
    unseen: Option<BTreeSet<String>>,
    listed: bool,
}

impl Pods {
    /// Applies one watch event. When a list is complete, the pods that are not in the list are removed.
    pub fn change(&mut self, change: ObjectEvent<Pod>) {
        match change {
            ObjectEvent::Restarted { .. } => {
                self.unseen = Some(self.by_uid.keys().cloned().collect());
            }
            ObjectEvent::Applied(pod) => {
                if let Some(unseen) = &mut self.unseen {
                    unseen.remove(&pod.uid);
                }
                self.put(pod);
            }
            ObjectEvent::Listed => {
                self.listed = true;
                for uid in self.unseen.take().unwrap_or_default() {
                    self.remove(&uid);
                }
            }
            ObjectEvent::Deleted(pod) => self.remove(&pod.uid),
            ObjectEvent::Reached(_) => {}
        }
    }

    /// Whether a list was completed and no other list is under way.
    pub(crate) fn is_complete(&self) -> bool {
        self.listed && self.unseen.is_none()
    }

    /// Finds a pod by the UID in `pod`, which the runtime has passed. If that UID is empty, finds the pod by namespace
    /// and name.
    pub fn find(&self, pod: &PodRef) -> Option<&Arc<Pod>> {
        if !pod.uid.is_empty() {
            return self.by_uid(&pod.uid);
        }
        let name = (pod.namespace.clone(), pod.name.clone());
        self.by_uid.get(self.by_name.get(&name)?)
    }

    /// Finds a pod by its own UID or by the UID of the static pod that it mirrors.
    pub(crate) fn by_uid(&self, uid: &str) -> Option<&Arc<Pod>> {
        let own = self.by_uid.get(uid);
        own.or_else(|| self.by_uid.get(self.mirrored.get(uid)?))
    }

    /// Whether any pod that has not finished reports this address, on its interface `eth0` or on a second network.
    pub(crate) fn report(&self, addr: Addr) -> bool {
        let has = |pod: &Arc<Pod>| {
            let others = match &pod.second_networks {
                SecondNetworks::Known(all) => all.as_slice(),
                _ => &[],
            };
            let mut others = others.iter().flat_map(|it| &it.addresses);
            pod.addresses.contains(&addr) || others.any(|it| *it == addr)
        };
        self.iter().any(|pod| !pod.finished && has(pod))
    }

    /// Iterates over all pods, sorted by UID.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Pod>> {
        self.by_uid.values()
    }

    fn put(&mut self, pod: Pod) {
        self.remove(&pod.uid);
        if let Some(mirrors) = &pod.mirrors {
            self.mirrored.insert(mirrors.clone(), pod.uid.clone());
        }
        let name = (pod.namespace.clone(), pod.name.clone());
        self.by_name.insert(name, pod.uid.clone());
        self.by_uid.insert(pod.uid.clone(), Arc::new(pod));
    }

    fn remove(&mut self, uid: &str) {
        let Some(pod) = self.by_uid.remove(uid) else {
            return;
        };
        let name = (pod.namespace.clone(), pod.name.clone());
        if self.by_name.get(&name).is_some_and(|it| it == uid) {
            self.by_name.remove(&name);
        }
        if let Some(mirrors) = &pod.mirrors
            && self.mirrored.get(mirrors).is_some_and(|it| it == uid)
        {
            self.mirrored.remove(mirrors);
        }
    }
}

/// Extracts the parts that the agent needs from a Pod object.
pub fn read(pod: PodLite) -> Pod {
    let PodLite {
        metadata,
        spec,
        status,
    } = pod;
    let status = status.unwrap_or_default();
    let finished = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    let reported = status.pod_ips.unwrap_or_default();
    let reported = reported.into_iter().map(|it| it.ip).chain(status.pod_ip);
    let mut addresses: Vec<Addr> = reported.filter_map(|it| Addr::parse_lenient(&it)).collect();
    addresses.sort_unstable();
    addresses.dedup();
    let mut annotations = metadata.annotations.unwrap_or_default();
    let mut second_networks = attached::read(|name| annotations.get(name).map(String::as_str));
    let mut interface_claims = ipam_claim::interface_claims(&annotations);
    if spec.is_some_and(|spec| spec.host_network == Some(true)) {
        addresses.clear();
        interface_claims.clear();
        second_networks = SecondNetworks::None;
    }
    let owners = metadata.owner_references.unwrap_or_default();
    let labels = metadata.labels.unwrap_or_default().into_iter();
    let labels = labels.map(|(key, value)| (key.into(), value.into()));
    let mirrors = annotations.remove(MIRROR_ANNOTATION);
    annotations.retain(|key, _| key.starts_with(cadastre_api::GROUP));
    Pod {
        namespace: metadata.namespace.unwrap_or_default(),
        name: metadata.name.unwrap_or_default(),
        uid: metadata.uid.unwrap_or_default(),
        mirrors,
        labels: labels.collect(),
        annotations,
        is_of_stateful_set: sticky::stateful_set(&owners).is_some(),
        vmi: pod_claim::vmi_of(&owners).map(str::to_owned),
        finished,
        addresses,
        second_networks,
        interface_claims,
    }
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;

    /// Returns a pod in the namespace `default`.
    pub(crate) fn pod(uid: &str, labels: &[(&str, &str)], annotations: &[(&str, &str)]) -> Pod {
        Pod {
            namespace: "default".to_owned(),
            name: format!("pod-{uid}"),
            uid: uid.to_owned(),
            labels: labels
                .iter()
                .map(|(k, v)| ((*k).into(), (*v).into()))
                .collect(),
            annotations: annotations
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
            ..Pod::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::testing::pod;
    use super::*;

    #[test]
    fn the_ipam_claims_of_a_pod_s_interfaces_are_read() {
        let pod = |spec: serde_json::Value| {
            let networks = r#"[{"name": "vlan7", "ipam-claim-reference": "vm.vlan7"}]"#;
            let annotations = json!({"k8s.v1.cni.cncf.io/networks": networks});
            let pod = json!({"metadata": {"name": "p", "annotations": annotations}, "spec": spec});
            read(serde_json::from_value(pod).unwrap()).interface_claims
        };
        let expected = InterfaceClaim {
            interface: "net1".to_owned(),
            claim: "vm.vlan7".to_owned(),
        };
        assert_eq!(pod(json!({})), [expected]);
        assert!(pod(json!({"hostNetwork": true})).is_empty());
    }

    #[test]
    fn a_pod_is_found_by_uid_by_name_and_by_the_static_pod_that_it_mirrors() {
        let mut pods = Pods::default();
        let mut mirror = pod("api", &[], &[]);
        mirror.mirrors = Some("static".to_owned());
        pods.change(ObjectEvent::Applied(mirror));
        let find = |uid: &str, name: &str| {
            let found = pods.find(&PodRef {
                namespace: "default".to_owned(),
                name: name.to_owned(),
                uid: uid.to_owned(),
            });
            found.map(|it| it.uid.clone())
        };
        assert_eq!(find("static", "").as_deref(), Some("api"));
        assert_eq!(find("api", "").as_deref(), Some("api"));
        assert_eq!(find("", "pod-api").as_deref(), Some("api"));
        assert_eq!(find("other", "pod-api"), None, "a UID decides");
        pods.change(ObjectEvent::Deleted(pod("api", &[], &[])));
        assert!(pods.by_uid("static").is_none() && pods.iter().next().is_none());
    }

    #[test]
    fn a_recreated_pod_replaces_the_earlier_pod_of_its_name() {
        let mut pods = Pods::default();
        let named = |uid: &str| Pod {
            name: "web-0".to_owned(),
            ..pod(uid, &[], &[])
        };
        pods.change(ObjectEvent::Applied(named("a")));
        pods.change(ObjectEvent::Applied(named("b")));
        pods.change(ObjectEvent::Deleted(named("a")));
        let by_name = PodRef {
            namespace: "default".to_owned(),
            name: "web-0".to_owned(),
            uid: String::new(),
        };
        assert_eq!(pods.find(&by_name).unwrap().uid, "b");
    }

    #[test]
    fn a_new_list_removes_pods_that_it_lacks() {
        let mut pods = Pods::default();
        pods.change(ObjectEvent::Applied(pod("a", &[], &[])));
        assert!(!pods.is_complete());
        pods.change(ObjectEvent::Listed);
        assert!(pods.is_complete());
        pods.change(ObjectEvent::Restarted {
            asked: Duration::ZERO,
        });
        assert!(!pods.is_complete() && pods.by_uid("a").is_some());
        pods.change(ObjectEvent::Listed);
        assert!(pods.is_complete() && pods.by_uid("a").is_none());
    }

    #[test]
    fn only_the_needed_parts_of_a_pod_are_kept() {
        let lite: PodLite = serde_json::from_value(json!({
            "metadata": {
                "name": "p", "namespace": "ns", "uid": "u", "labels": {"b": "2", "a": "1"},
                "ownerReferences": [
                    {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "s", "uid": "s", "controller": true},
                ],
                "annotations": {"cadastre.dev/pools": "x", "other": "y", MIRROR_ANNOTATION: "m"},
            },
            "spec": {"nodeName": "n1"},
            "status": {"phase": "Succeeded", "podIP": "10.0.0.2", "podIPs": [{"ip": "10.0.0.2"}, {"ip": "fd00::2"}, {"ip": "?"}]},
        }))
        .unwrap();
        let seen = read(lite.clone());
        assert_eq!(
            (
                seen.namespace.as_str(),
                seen.name.as_str(),
                seen.uid.as_str()
            ),
            ("ns", "p", "u")
        );
        assert_eq!(seen.mirrors.as_deref(), Some("m"));
        assert!(seen.finished && seen.addresses.len() == 2 && &*seen.labels[0].0 == "a");
        assert_eq!(seen.annotations.len(), 1);
        assert!(seen.is_of_stateful_set);
        let mut own_address = lite;
        own_address.spec.as_mut().unwrap().host_network = Some(true);
        assert!(read(own_address).addresses.is_empty());
    }
}
