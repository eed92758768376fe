//! Nodes with podCIDRs that this process saw deleted, as leader or as standby.
//!
//! The podCIDRs of a deleted node are quarantined, and its NodeSubnet records the quarantine for the next leader. If
//! the node was deleted before its NodeSubnet was written, no object records the podCIDRs. So every process, even a
//! standby, remembers the nodes that it saw deleted, and quarantines their podCIDRs when it begins to lead.
//!
//! # Guarantees
//! - A deleted node is remembered until its quarantine is over, that is, until its NodeSubnet no longer records the
//!   node.
//! - At most [`MOST`] nodes are remembered.
//!
//! # Caveats
//! A node's range is free at once in one case: the Node is created and deleted before its NodeSubnet is written, and no
//! process that still runs has seen the Node.

use std::collections::VecDeque;
use std::time::Duration;

use crate::cluster::names::{NodeName, ObjectUid};
use crate::cluster::object_cache::ObjectUpdate;
use crate::cluster::objects::{MachineIdentity, Node, Subnet};
use cadastre_api::NodeSubnetSpec;
use cadastre_core::Cidr;

/// At most this many nodes are remembered. If there are more, the oldest are forgotten.
const MOST: usize = 16_384;

/// Nodes that this process saw deleted, the oldest deletion first.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeletedNodes(VecDeque<DeletedNode>);

/// A deleted node, with the data that the quarantine of its podCIDRs needs.
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
    /// Remembers the node if this change deleted the node and it had podCIDRs.
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

    /// Forgets the nodes whose quarantine is over. The NodeSubnet recorded these nodes before this change and does not
    /// record them any more.
    pub(crate) fn subnet_changed(&mut self, delta: &ObjectUpdate<Subnet>) {
        let Some(before) = &delta.before else { return };
        let was_recorded = |uid: &ObjectUid| before.spec.as_ref().is_ok_and(|it| records(it, uid));
        // An invalid spec may record any node, so no node is forgotten.
        let is_recorded = |uid: &ObjectUid| match &delta.after {
            Some(after) => after.spec.as_ref().map_or(true, |it| records(it, uid)),
            None => false,
        };
        self.0.retain(|gone| {
            gone.name != before.name || !was_recorded(&gone.uid) || is_recorded(&gone.uid)
        });
    }

    /// Returns the deleted nodes whose podCIDRs may still have to be quarantined.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &DeletedNode> {
        self.0.iter()
    }
}

fn records(spec: &NodeSubnetSpec, uid: &ObjectUid) -> bool {
    spec.quarantined.iter().any(|it| it.node_uid == **uid)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;
    use crate::cluster::cache::ClusterCache;
    use crate::fixtures::{node, node_with, subnet};
    use cadastre_api::QuarantinedNode;
    use cadastre_daemon::watch::ObjectEvent;

    fn update(before: Node, after: Option<Node>) -> ObjectUpdate<Node> {
        ObjectUpdate {
            before: Some(Arc::new(before)),
            after: after.map(Arc::new),
        }
    }

    fn with_podcidr(name: &str) -> Node {
        node_with(name, &["10.0.0.0/28"])
    }

    fn names_of(deleted: &DeletedNodes) -> Vec<&str> {
        deleted.iter().map(|it| &*it.name).collect()
    }

    #[test]
    fn nodes_that_were_deleted_with_podcidrs_are_remembered() {
        let mut deleted = DeletedNodes::default();
        let created_again = Node {
            uid: "another".into(),
            ..node("n3")
        };
        for (second, (before, after)) in (0..).zip([
            (with_podcidr("n1"), None),
            (node("n2"), None),
            (with_podcidr("n3"), Some(created_again)),
            (with_podcidr("n4"), Some(with_podcidr("n4"))),
        ]) {
            deleted.node_changed(&update(before, after), Duration::from_secs(second));
        }
        assert_eq!(names_of(&deleted), ["n1", "n3"]);
    }

    #[test]
    fn the_oldest_node_is_forgotten_beyond_the_maximum() {
        let mut deleted = DeletedNodes::default();
        for index in 0..=MOST {
            let gone = update(with_podcidr(&format!("n{index}")), None);
            deleted.node_changed(&gone, Duration::ZERO);
        }
        assert_eq!(deleted.iter().count(), MOST);
        assert_eq!(&*deleted.iter().next().unwrap().name, "n1");
    }

    #[test]
    fn a_node_that_its_node_subnet_no_longer_records_is_forgotten() {
        let mut deleted = DeletedNodes::default();
        deleted.node_changed(&update(with_podcidr("n1"), None), Duration::ZERO);
        let mut recording = subnet("n1", &[], 0);
        let spec = recording.spec.as_mut().unwrap();
        spec.node_uid = None;
        spec.quarantined = vec![QuarantinedNode {
            node_uid: "n1".to_owned(),
            provider_id: None,
            machine_id: None,
            pod_cidrs: Vec::new(),
            until: Time(Timestamp::UNIX_EPOCH),
        }];
        let mut cache = ClusterCache::default();
        let mut change = |deleted: &mut DeletedNodes, event| {
            for delta in cache.subnets.change(event) {
                deleted.subnet_changed(&delta);
            }
        };
        change(&mut deleted, ObjectEvent::Applied(recording.clone()));
        assert_eq!(names_of(&deleted), ["n1"]);
        change(&mut deleted, ObjectEvent::Deleted(recording));
        assert!(names_of(&deleted).is_empty());
    }
}
