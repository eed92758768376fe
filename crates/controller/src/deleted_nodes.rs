//! Nodes with podCIDRs that this process saw deleted, as leader or as standby.
//!
//! The podCIDRs of a deleted node are quarantined, and its NodeSubnet records the quarantine for the next leader. If
//! the node was deleted before its NodeSubnet was written, no object records the podCIDRs. So every process, also a
//! standby, remembers the nodes that it saw deleted, and quarantines their podCIDRs when it begins to lead.
//!
//! # Guarantees
//! - A deleted node is remembered until its quarantine is over: then its NodeSubnet no longer records it.
//! - At most [`MOST`] nodes are remembered.
//!
//! # Caveats
//! A node may be created and deleted without being seen by any process that still runs, before its NodeSubnet was
//! written. Such a node leaves no trace, and its range is free at once.

use std::collections::VecDeque;
use std::time::Duration;

use crate::cluster::names::{NodeName, ObjectUid};
use crate::cluster::object_cache::ObjectUpdate;
use crate::cluster::objects::{MachineIdentity, Node, Subnet};
use cadastre_api::NodeSubnetSpec;
use cadastre_core::Cidr;

/// At most this many nodes are remembered. The oldest are dropped first.
const MOST: usize = 16_384;

/// The remembered nodes, oldest first.
#[derive(Debug, Default)]
pub(crate) struct DeletedNodes(VecDeque<DeletedNode>);

/// What must be known of a deleted node to quarantine its podCIDRs.
#[derive(Clone, Debug)]
pub(crate) struct DeletedNode {
    pub name: NodeName,
    pub uid: ObjectUid,
    pub machine: MachineIdentity,
    pub ranges: Vec<Cidr>,
    /// When this process saw the deletion, by the monotonic clock
    pub at: Duration,
}

impl DeletedNodes {
    /// Remembers the node if this change deleted it and it had podCIDRs.
    pub(crate) fn node_changed(&mut self, delta: &ObjectUpdate<Node>, now: Duration) {
        let Some(before) = delta.before.as_deref() else {
            return;
        };
        let stays = delta.after.as_ref().is_some_and(|it| it.uid == before.uid);
        if stays || before.pod_cidrs.is_empty() {
            return;
        }
        if self.0.len() >= MOST {
            self.0.pop_front();
        }
        self.0.push_back(DeletedNode {
            name: before.name.clone(),
            uid: before.uid.clone(),
            machine: before.machine.clone(),
            ranges: before.pod_cidrs.to_vec(),
            at: now,
        });
    }

    /// Forgets the nodes that the NodeSubnet recorded before this change and no longer does: their quarantine is over.
    pub(crate) fn subnet_changed(&mut self, delta: &ObjectUpdate<Subnet>) {
        if self.0.is_empty() {
            return;
        }
        let Some(Ok(before)) = delta.before.as_ref().map(|subnet| &subnet.spec) else {
            return;
        };
        let after = match &delta.after {
            Some(subnet) => match &subnet.spec {
                Ok(spec) => Some(spec),
                // An invalid spec may record any node, so no node is forgotten.
                Err(_) => return,
            },
            None => None,
        };
        let name = delta.before.as_ref().map(|subnet| &subnet.name);
        self.0.retain(|gone| {
            Some(&gone.name) != name
                || !rests(before, &gone.uid)
                || after.is_some_and(|after| rests(after, &gone.uid))
        });
    }

    /// Returns the deleted nodes whose podCIDRs may still have to be quarantined.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &DeletedNode> {
        self.0.iter()
    }
}

fn rests(spec: &NodeSubnetSpec, uid: &ObjectUid) -> bool {
    spec.quarantined.iter().any(|it| it.node_uid == **uid)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;
    use crate::cluster::cache::ClusterCache;
    use crate::demand::tests::{node, subnet};
    use cadastre_api::QuarantinedNode;
    use cadastre_daemon::watch::ObjectEvent;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn gone(name: &str) -> ObjectUpdate<Node> {
        let before = Node {
            pod_cidrs: [Cidr::parse_strict("10.0.0.0/28").unwrap()].into(),
            ..node(name)
        };
        ObjectUpdate {
            before: Some(Arc::new(before)),
            after: None,
        }
    }

    fn names_of(departed: &DeletedNodes) -> Vec<&str> {
        departed.iter().map(|it| &*it.name).collect()
    }

    #[test]
    fn who_went_with_podcidrs_is_kept() {
        let mut departed = DeletedNodes::default();
        departed.node_changed(&gone("n1"), seconds(0));
        let empty = ObjectUpdate {
            before: Some(Arc::new(node("n2"))),
            after: None,
        };
        departed.node_changed(&empty, seconds(1));
        let anew = ObjectUpdate {
            after: Some(Arc::new(Node {
                uid: "another".into(),
                ..node("n3")
            })),
            ..gone("n3")
        };
        departed.node_changed(&anew, seconds(2));
        let stays = ObjectUpdate {
            after: gone("n4").before,
            ..gone("n4")
        };
        departed.node_changed(&stays, seconds(3));
        assert_eq!(names_of(&departed), ["n1", "n3"]);
    }

    #[test]
    fn no_more_are_kept_than_there_is_room_for() {
        let mut departed = DeletedNodes::default();
        for index in 0..=MOST {
            departed.node_changed(&gone(&format!("n{index}")), seconds(0));
        }
        assert_eq!(departed.iter().count(), MOST);
        assert_eq!(&*departed.iter().next().unwrap().name, "n1");
    }

    #[test]
    fn whose_record_has_left_the_node_subnet_has_rested() {
        let mut departed = DeletedNodes::default();
        departed.node_changed(&gone("n1"), seconds(0));
        let mut told = subnet("n1", &[], 0);
        let spec = told.spec.as_mut().unwrap();
        spec.node_uid = None;
        spec.quarantined = vec![QuarantinedNode {
            node_uid: "n1".to_owned(),
            provider_id: None,
            machine_id: None,
            pod_cidrs: Vec::new(),
            until: Time(Timestamp::UNIX_EPOCH),
        }];
        let mut cache = ClusterCache::default();
        let mut tell = |departed: &mut DeletedNodes, change| {
            for delta in cache.subnets.change(change) {
                departed.subnet_changed(&delta);
            }
        };
        tell(&mut departed, ObjectEvent::Applied(told.clone()));
        assert_eq!(names_of(&departed), ["n1"]);
        tell(&mut departed, ObjectEvent::Deleted(told));
        assert!(names_of(&departed).is_empty());
    }
}
