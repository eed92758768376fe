//! Finds the addresses in use from sources other than the store. The agent needs these addresses
//! - to replace a lost store;
//! - for a podCIDR from which another program may have assigned addresses;
//! - for a block that the node gets after its store was replaced, if at the time of the replacement pods used addresses
//!   outside of the node's ranges.
//!
//! The sources are:
//! - The NodeAddresses lists attachments with all names that a DEL needs. It may lack assignments since its last write.
//! - The runtime lists the sandboxes with the addresses that they use now. It does not name their network.
//! - The pods of this node report their addresses, and Multus reports their addresses on second networks. Pods that are
//!   just starting may not report their addresses yet.
//!
//! The runtime does not know addresses on second networks. These addresses come from the last published list and from
//! Multus' annotations. If a pod asks for second networks and no source shows which addresses the pod has there (see
//! [`unknown`]), a lost store is not replaced yet. The agent waits as long as a sandbox may still be in setup.
//!
//! The published list can be several minutes old. If the runtime reports that an address belongs to another sandbox
//! than the list says, the agent follows the runtime.
//!
//! An address that any source shows counts as in use. If such an address is not in use, the agent later releases it as
//! a leak. But an address in use that no source shows would be assigned a second time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;

use super::attached::SecondNetworks;
use super::cri::Sandbox;
use super::pods::{Pod, Pods};
use cadastre_api::{AddressEntry, NodeAddressesSpec};
use cadastre_core::Addr;
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_node::{Attachment, OWN_INTERFACE, PodRef, RememberedAttachment};

/// Returns the attachments in use. Attachments that only the runtime or the API shows get the network that most entries
/// of `list` have. If `list` names no network, these attachments get the network `network`.
pub(crate) fn known(
    holding: &NodeAllocation,
    list: Option<&NodeAddressesSpec>,
    sandboxes: &[Sandbox],
    pods: &Pods,
    network: &str,
) -> Vec<RememberedAttachment> {
    let mut known: Vec<RememberedAttachment> = Vec::new();
    let list = list.filter(|_| !Mutation::AddressListIgnored.is_on());
    for entry in list.into_iter().flat_map(NodeAddressesSpec::entries) {
        let boot = list.map_or("", |it| it.boot_id.as_str());
        remember(&mut known, entry, boot);
    }
    let network = usual_network(&known).unwrap_or_else(|| network.to_owned());
    let told = sandboxes.iter();
    let told = told.filter(|_| !Mutation::SandboxesIgnored.is_on());
    let now_of = told.clone().flat_map(|it| {
        let addresses = it.addresses.iter();
        addresses.map(|addr| (*addr, it.id.as_str()))
    });
    let now_of: BTreeMap<Addr, &str> = now_of.collect();
    known.retain_mut(|it| {
        let id = it.attachment.container_id.as_str();
        let is_of = |addr: &Addr| now_of.get(addr).is_none_or(|now| *now == id);
        it.addresses.retain(is_of);
        !it.addresses.is_empty()
    });
    let mut taken: BTreeSet<Addr> = known.iter().flat_map(|it| it.addresses.clone()).collect();
    let first = |id: String| Attachment {
        network: network.clone(),
        container_id: id,
        ifname: OWN_INTERFACE.to_owned(),
    };
    let of_sandboxes = sandboxes.iter().map(|it| first(it.id.clone()));
    let of_others: BTreeSet<Attachment> = known
        .iter()
        .map(|it| it.attachment.clone())
        .chain(of_sandboxes)
        .collect();
    let mut more = |attachment: Attachment, pod: PodRef, addresses: &[Addr]| {
        let new = addresses.iter().filter(|addr| is_in(holding, addr));
        let new: Vec<Addr> = new.filter(|addr| taken.insert(**addr)).copied().collect();
        if !new.is_empty() {
            known.push(RememberedAttachment {
                attachment,
                addresses: new,
                pod: Some(pod),
                netns: String::new(),
                since_ms: 0,
                boot: String::new(),
                superseded: false,
            });
        }
    };
    for sandbox in told {
        let attachment = first(sandbox.id.clone());
        more(attachment, sandbox.pod.clone(), &sandbox.addresses);
    }
    for pod in pods.iter().filter(|pod| !pod.finished) {
        let uid = pod.mirrors.clone().unwrap_or_else(|| pod.uid.clone());
        let named = PodRef {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid,
        };
        // An attachment that belongs to no known sandbox gets this id. No container has an id of this form.
        let no_id = format!("pod-{}", pod.uid);
        if let SecondNetworks::Known(all) = &pod.second_networks {
            let mut own = sandboxes.iter().filter(|it| it.pod.uid == named.uid);
            // If the pod has a single sandbox, the annotation describes that sandbox, so a later DEL will name the
            // sandbox's id.
            let id = match (own.next(), own.next()) {
                (Some(one), None) => one.id.clone(),
                _ => no_id.clone(),
            };
            for it in all {
                let mut attachment = Attachment {
                    network: it.network.clone(),
                    container_id: id.clone(),
                    ifname: it.interface.clone(),
                };
                // If a more reliable source shows this attachment, the annotation adds no address to the attachment.
                // Instead, the address in the annotation gets an attachment of its own.
                if of_others.contains(&attachment) {
                    attachment.container_id.clone_from(&no_id);
                }
                more(attachment, named.clone(), &it.addresses);
            }
        }
        more(first(no_id), named, &pod.addresses);
    }
    known
}

/// Returns whether a pod uses an address outside of the node's ranges, according to the runtime or the API. Such an
/// address may belong to another network. But it may also belong to a range that the node gets back later: after a Node
/// was deleted and registered again, its pods still use addresses of its earlier ranges.
pub(crate) fn has_addresses_outside(
    holding: &NodeAllocation,
    sandboxes: &[Sandbox],
    pods: &Pods,
) -> bool {
    let of_sandboxes = sandboxes.iter().flat_map(|it| &it.addresses);
    let living = || pods.iter().filter(|pod| !pod.finished);
    let of_pods = living().flat_map(|pod| &pod.addresses);
    let attached = living().flat_map(|pod| match &pod.second_networks {
        SecondNetworks::Known(all) => all.as_slice(),
        _ => &[],
    });
    let on_second_networks = attached.flat_map(|it| &it.addresses);
    let mut all = of_sandboxes.chain(of_pods).chain(on_second_networks);
    all.any(|addr| !is_in(holding, addr)) && !Mutation::AddressesOutsideForgotten.is_on()
}

fn is_in(holding: &NodeAllocation, addr: &Addr) -> bool {
    let mut blocks = holding.blocks.iter();
    blocks.any(|block| block.cidr.contains_addr(*addr))
}

/// Returns each pod that asks for second networks, if no source shows which addresses the pod has on these networks.
pub(crate) fn unknown(pods: &Pods) -> Vec<Arc<Pod>> {
    let living = pods.iter().filter(|it| !it.finished);
    let unknown = living.filter(|it| it.second_networks == SecondNetworks::Unknown);
    unknown.cloned().collect()
}

/// Adds an entry of the published list. `boot` is the id of the boot in which the list was written. An attachment with
/// a pod keeps this boot. A container without a pod may have been restarted under the same id since that boot, so its
/// attachment counts as set up in the current boot.
fn remember(known: &mut Vec<RememberedAttachment>, entry: AddressEntry, boot: &str) {
    // If the entry's handle was truncated, no DEL can name the attachment. But the entry's addresses are in use, so the
    // attachment gets an id that is made from the first address.
    let (network, id) = entry.handle.split_once('/').unwrap_or(("", ""));
    let id = match (id, entry.addresses.first()) {
        ("", Some(addr)) => format!("address-{addr}"),
        _ => id.to_owned(),
    };
    let attachment = Attachment {
        network: network.to_owned(),
        container_id: id,
        ifname: entry.interface,
    };
    if let Some(same) = known.iter_mut().find(|it| it.attachment == attachment) {
        same.addresses.extend(entry.addresses);
        return;
    }
    let (namespace, name) = entry.pod.split_once('/').unwrap_or(("", ""));
    let boot = if entry.pod_uid.is_empty() { "" } else { boot };
    let pod = PodRef {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: entry.pod_uid,
    };
    known.push(RememberedAttachment {
        attachment,
        addresses: entry.addresses,
        pod: (pod != PodRef::default()).then_some(pod),
        netns: String::new(),
        since_ms: entry.since.map_or(0, Timestamp::as_millisecond),
        boot: boot.to_owned(),
        superseded: entry.superseded,
    });
}

/// Returns the network that most attachments have; `None` if no attachment names a network.
fn usual_network(known: &[RememberedAttachment]) -> Option<String> {
    let networks = known.iter().map(|it| it.attachment.network.as_str());
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for network in networks.filter(|it| !it.is_empty()) {
        *counts.entry(network).or_default() += 1;
    }
    let usual = counts.into_iter().max_by_key(|(_, count)| *count);
    usual.map(|(network, _)| network.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addresses::list;
    use crate::attached::Attached;
    use crate::pods::testing::pod;
    use crate::snapshot::testing::{addr, allocation, record, snapshot};
    use cadastre_daemon::watch::ObjectEvent;
    use cadastre_node::Snapshot;

    fn listed(entries: &[&str]) -> NodeAddressesSpec {
        NodeAddressesSpec {
            addresses: entries.iter().map(ToString::to_string).collect(),
            ..NodeAddressesSpec::default()
        }
    }

    fn sandbox(id: &str, uid: &str, addresses: &[&str]) -> Sandbox {
        Sandbox {
            id: id.to_owned(),
            pod: PodRef {
                uid: uid.to_owned(),
                ..PodRef::default()
            },
            addresses: addresses.iter().map(|it| addr(it)).collect(),
        }
    }

    /// Returns the attachments in use on a node with the block 10.0.0.0/26.
    fn remembered(
        list: Option<&NodeAddressesSpec>,
        sandboxes: &[Sandbox],
        pods: &Pods,
    ) -> Vec<RememberedAttachment> {
        known(&allocation(&["10.0.0.0/26"]), list, sandboxes, pods, "conf")
    }

    #[test]
    fn what_was_published_comes_back_as_it_was() {
        let mut it = snapshot(&[], &[]);
        it.attachments = vec![
            record("c1", "u1", &["10.0.0.1", "fd00::1"]),
            record("c2", "", &["10.0.0.2"]),
        ];
        let published = list(&it, "boot");
        let known = remembered(Some(&published), &[], &Pods::default());
        assert_eq!(known.len(), 2);
        for (known, record) in known.iter().zip(&it.attachments) {
            assert_eq!(known.attachment, record.attachment);
            assert_eq!(known.pod, record.pod);
            assert_eq!(known.since_ms, record.since_ms);
            assert!(!known.superseded);
            let has = record.given.addresses.iter().map(|it| it.address);
            assert_eq!(known.addresses, has.collect::<Vec<_>>());
        }
    }

    #[test]
    fn addresses_of_pods_come_back_with_the_boot_of_the_list() {
        let mut old = record("c1", "u1", &["10.0.0.1"]);
        old.order = 2;
        let mut new = record("c2", "u1", &["10.0.0.2"]);
        new.order = 3;
        let it = Snapshot {
            attachments: vec![old, new, record("c3", "", &["10.0.0.3"])],
            ..snapshot(&[], &[])
        };
        let published = list(&it, "boot");
        let sandboxes = [sandbox("c4", "", &["10.0.0.4"])];
        let known = remembered(Some(&published), &sandboxes, &Pods::default());
        let read = |it: &RememberedAttachment| {
            let id = it.attachment.container_id.clone();
            (id, it.boot.clone(), it.superseded)
        };
        let expected = [
            ("c1", "boot", true),
            ("c2", "boot", false),
            // A container without a pod may have been restarted under the same id after the list was written. So its
            // attachment does not get the boot id of the list.
            ("c3", "", false),
            ("c4", "", false),
        ];
        let expected = expected.map(|(id, boot, old)| (id.to_owned(), boot.to_owned(), old));
        assert_eq!(known.iter().map(read).collect::<Vec<_>>(), expected);
    }

    /// If the address stayed with the earlier sandbox, the agent would release it as a leak while the new sandbox uses
    /// it.
    #[test]
    fn an_address_belongs_to_the_sandbox_that_has_it_now_although_the_list_names_an_earlier_one() {
        let published = listed(&["10.0.0.1,10.0.0.2 net/c1 eth0", "10.0.0.3 net/c2 eth0"]);
        let sandboxes = [
            sandbox("c3", "uid-c3", &["10.0.0.1"]),
            sandbox("c4", "uid-c4", &["10.0.0.3"]),
        ];
        let known = remembered(Some(&published), &sandboxes, &Pods::default());
        let read = |it: &RememberedAttachment| {
            let id = it.attachment.container_id.clone();
            (id, it.addresses.clone())
        };
        let expected = [("c1", "10.0.0.2"), ("c3", "10.0.0.1"), ("c4", "10.0.0.3")];
        let expected = expected.map(|(id, it)| (id.to_owned(), vec![addr(it)]));
        assert_eq!(known.iter().map(read).collect::<Vec<_>>(), expected);
        assert!(known.iter().all(|it| it.attachment.network == "net"));
    }

    #[test]
    fn sandboxes_and_pods_add_addresses_that_the_list_lacks() {
        let published = listed(&["10.0.0.1 net/c1 eth0"]);
        let sandboxes = [
            sandbox("c1", "uid-c1", &["10.0.0.1"]),
            sandbox("c2", "uid-c2", &["10.0.0.2"]),
            sandbox("c3", "uid-c3", &["192.0.2.1"]),
        ];
        let mut pods = Pods::default();
        for (uid, address, finished) in [
            ("p2", "10.0.0.2", false),
            ("p3", "10.0.0.3", false),
            ("p4", "10.0.0.4", true),
        ] {
            pods.change(ObjectEvent::Applied(Pod {
                addresses: vec![addr(address)],
                finished,
                ..pod(uid, &[], &[])
            }));
        }
        let known = remembered(Some(&published), &sandboxes, &pods);
        let ids: Vec<&str> = known
            .iter()
            .map(|it| it.attachment.container_id.as_str())
            .collect();
        assert_eq!(ids, ["c1", "c2", "pod-p3"]);
        assert!(known.iter().all(|it| it.attachment.network == "net"));
        assert_eq!(known[2].pod.as_ref().unwrap().uid, "p3");
        // Without a published list, the network's name comes from the configuration.
        let known = remembered(None, &sandboxes, &pods);
        assert_eq!(known[0].attachment.network, "conf");
    }

    #[test]
    fn addresses_in_multus_annotations_are_in_use_if_no_better_source_contradicts() {
        let published = listed(&["10.0.0.1 storage/c1 net1 u1 default/pod-u1"]);
        let sandboxes = [("c1", "u1"), ("c2", "u2"), ("c3", "u3"), ("c4", "u3")];
        let sandboxes = sandboxes.map(|(id, uid)| sandbox(id, uid, &[]));
        let mut pods = Pods::default();
        for (uid, address, finished) in [
            // The published list has this attachment with another address, so the annotation's address gets an
            // attachment of its own.
            ("u1", "10.0.0.9", false),
            ("u2", "10.0.0.2", false),
            // The pod has two sandboxes, and the annotation does not say which of them has the address. So the
            // attachment names neither sandbox.
            ("u3", "10.0.0.3", false),
            // A more reliable source shows that another pod has the address, so the annotation does not count.
            ("u4", "10.0.0.1", false),
            // The address is in no range of this node, so it is ignored.
            ("u5", "10.0.7.1", false),
            ("u6", "10.0.0.6", true),
        ] {
            let attached = Attached {
                network: "storage".to_owned(),
                interface: "net1".to_owned(),
                addresses: vec![addr(address)],
            };
            pods.change(ObjectEvent::Applied(Pod {
                second_networks: SecondNetworks::Known(vec![attached]),
                finished,
                ..pod(uid, &[], &[])
            }));
        }
        let known = remembered(Some(&published), &sandboxes, &pods);
        let read = |RememberedAttachment {
                        attachment: of,
                        addresses,
                        ..
                    }: &_| {
            let (network, id, ifname) = (&of.network, &of.container_id, &of.ifname);
            format!("{network}/{id}/{ifname} {}", addresses[0])
        };
        let read: Vec<String> = known.iter().map(read).collect();
        assert_eq!(
            read,
            [
                "storage/c1/net1 10.0.0.1",
                "storage/pod-u1/net1 10.0.0.9",
                "storage/c2/net1 10.0.0.2",
                "storage/pod-u3/net1 10.0.0.3",
            ]
        );
        assert!(unknown(&pods).is_empty());
        for (uid, finished) in [("u7", false), ("u8", true)] {
            pods.change(ObjectEvent::Applied(Pod {
                second_networks: SecondNetworks::Unknown,
                finished,
                ..pod(uid, &[], &[])
            }));
        }
        let unknown = unknown(&pods);
        assert_eq!((unknown.len(), &*unknown[0].uid), (1, "u7"));
    }

    #[test]
    fn an_entry_without_a_handle_is_in_use_as_well() {
        let published = listed(&["10.0.0.1", "10.0.0.2", "nonsense"]);
        let known = remembered(Some(&published), &[], &Pods::default());
        let addresses: Vec<Addr> = known.iter().flat_map(|it| it.addresses.clone()).collect();
        assert_eq!(addresses, [addr("10.0.0.1"), addr("10.0.0.2")]);
    }
}
