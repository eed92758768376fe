//! Nodes that were seen to go with podCIDRs, whoever led at the time.
//!
//! The podCIDRs of a dead node rest, and its NodeSubnet tells the next leader so. Where the node died before its
//! NodeSubnet was written, nothing durable tells: so every process, a standby too, remembers what it saw go, and
//! lays it to rest when it begins to lead.
//!
//! # Guarantees
//! - What was seen to go is kept until the end of its rest was seen: its record has left the NodeSubnet.
//! - Memory is bounded by [`MOST`].
//!
//! A node that came and went unseen by every process that is left, and before its NodeSubnet was written, leaves
//! no trace: its range is free at once.

use std::collections::VecDeque;
use std::time::Duration;

use crate::cluster::seen::{Machine, Node, Subnet, Text};
use crate::cluster::table::Delta;
use cadastre_api::NodeSubnetSpec;
use cadastre_core::Cidr;

/// More are not kept; the oldest go first.
const MOST: usize = 16_384;

/// What was seen to go, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Departed(VecDeque<Gone>);

/// A node that is gone.
#[derive(Clone, Debug)]
pub(crate) struct Gone {
    /// Its name
    pub name: Text,
    /// Its UID
    pub uid: Text,
    /// Its machine
    pub machine: Machine,
    /// Its podCIDRs
    pub ranges: Vec<Cidr>,
    /// When it was seen to go, monotonic
    pub at: Duration,
}

impl Departed {
    /// A Node has changed.
    pub(crate) fn node_changed(&mut self, delta: &Delta<Node>, now: Duration) {
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
        self.0.push_back(Gone {
            name: before.name.clone(),
            uid: before.uid.clone(),
            machine: before.machine.clone(),
            ranges: before.pod_cidrs.to_vec(),
            at: now,
        });
    }

    /// A NodeSubnet has changed: whose record has left it has rested.
    pub(crate) fn subnet_changed(&mut self, delta: &Delta<Subnet>) {
        if self.0.is_empty() {
            return;
        }
        let Some(Ok(before)) = delta.before.as_ref().map(|subnet| &subnet.spec) else {
            return;
        };
        let after = match &delta.after {
            Some(subnet) => match &subnet.spec {
                Ok(spec) => Some(spec),
                // It may name anybody.
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

    /// What was seen to go and may still have to rest.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Gone> {
        self.0.iter()
    }
}

fn rests(spec: &NodeSubnetSpec, uid: &str) -> bool {
    spec.previous.iter().any(|it| it.node_uid == uid)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;
    use crate::cluster::world::World;
    use crate::demand::tests::{node, subnet};
    use cadastre_api::PreviousHolder;
    use cadastre_daemon::watch::Change;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn gone(name: &str) -> Delta<Node> {
        let before = Node {
            pod_cidrs: [Cidr::parse_strict("10.0.0.0/28").unwrap()].into(),
            ..node(name)
        };
        Delta {
            before: Some(Arc::new(before)),
            after: None,
        }
    }

    fn names_of(departed: &Departed) -> Vec<&str> {
        departed.iter().map(|it| &*it.name).collect()
    }

    #[test]
    fn who_went_with_podcidrs_is_kept() {
        let mut departed = Departed::default();
        departed.node_changed(&gone("n1"), seconds(0));
        let empty = Delta {
            before: Some(Arc::new(node("n2"))),
            after: None,
        };
        departed.node_changed(&empty, seconds(1));
        let anew = Delta {
            after: Some(Arc::new(Node {
                uid: "another".into(),
                ..node("n3")
            })),
            ..gone("n3")
        };
        departed.node_changed(&anew, seconds(2));
        let stays = Delta {
            after: gone("n4").before,
            ..gone("n4")
        };
        departed.node_changed(&stays, seconds(3));
        assert_eq!(names_of(&departed), ["n1", "n3"]);
    }

    #[test]
    fn no_more_are_kept_than_there_is_room_for() {
        let mut departed = Departed::default();
        for index in 0..=MOST {
            departed.node_changed(&gone(&format!("n{index}")), seconds(0));
        }
        assert_eq!(departed.iter().count(), MOST);
        assert_eq!(&*departed.iter().next().unwrap().name, "n1");
    }

    #[test]
    fn whose_record_has_left_the_node_subnet_has_rested() {
        let mut departed = Departed::default();
        departed.node_changed(&gone("n1"), seconds(0));
        let mut told = subnet("n1", &[], 0);
        let spec = told.spec.as_mut().unwrap();
        spec.node_uid = None;
        spec.previous = vec![PreviousHolder {
            node_uid: "n1".to_owned(),
            provider_id: None,
            machine_id: None,
            pod_cidrs: Vec::new(),
            until: Time(Timestamp::UNIX_EPOCH),
        }];
        let mut world = World::default();
        let mut tell = |departed: &mut Departed, change| {
            for delta in world.subnets.change(change) {
                departed.subnet_changed(&delta);
            }
        };
        tell(&mut departed, Change::Applied(told.clone()));
        assert_eq!(names_of(&departed), ["n1"]);
        tell(&mut departed, Change::Deleted(told));
        assert!(names_of(&departed).is_empty());
    }
}
