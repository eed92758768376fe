//! Persistent faults: the API server always rejects a kind of write or drops what is written, or an answer or a list
//! never arrives.
//!
//! A run has at most one persistent fault, which ends together with the other faults. In real clusters, admission
//! policies, quotas, webhooks and proxies cause such faults, for one object or for a whole kind of write.

use std::time::Duration;

use cadastre_controller::cluster::request::{ApiRequest, ObjectKind, ObjectSpec, Rejection};

use super::clock::{SECOND, Time};
use super::process::Watched;
use super::rng::Rng;
use super::run::{RunId, Sim};
use super::shell::Fate;

const BY_POLICY: &str = "a policy forbids it";

/// The kind of requests that a persistent fault concerns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Subject {
    /// Changes of the finalizers of pools.
    PoolFinalizers,
    /// The controller's writes of claims: finalizers, statuses, creations and deletions.
    Claims,
    PoolStatus,
    BlockCreations,
    /// Updates and deletions of blocks.
    BlockChanges,
    /// Allocations of podCIDRs, and touches of Nodes.
    Nodes,
    /// Taints and conditions of Nodes, and evictions.
    NodeMarks,
    /// Creations, deletions and other writes of NodeSubnets, except writes of their conditions.
    Subnets,
    SubnetConditions,
    /// Consistent lists of the pods of a node.
    Pods,
}

/// A fault that stays until all faults end.
#[derive(Clone, Debug, PartialEq)]
pub enum PersistentFault {
    Requests {
        subject: Subject,
        fate: Fate,
        /// Whether the fault concerns all requests of its kind, or only those about some objects.
        all: bool,
        from: Time,
    },
    /// A process receives neither lists nor watch events of the kind.
    SilentWatch { process: usize, kind: Watched },
}

impl PersistentFault {
    pub fn draw(rng: &mut Rng, processes: usize) -> Option<Self> {
        if rng.chance(4_000) {
            return Some(PersistentFault::Requests {
                subject: *rng.pick(&[
                    Subject::PoolFinalizers,
                    Subject::Claims,
                    Subject::PoolStatus,
                    Subject::BlockCreations,
                    Subject::BlockChanges,
                    Subject::Nodes,
                    Subject::NodeMarks,
                    Subject::Subnets,
                    Subject::SubnetConditions,
                    Subject::Pods,
                ]),
                fate: rng
                    .pick(&[
                        Fate::Refused(Rejection::Rejected(BY_POLICY.to_owned())),
                        Fate::Refused(Rejection::Guard(BY_POLICY.to_owned())),
                        Fate::Refused(Rejection::Busy(Some(Duration::from_secs(7)))),
                        Fate::Unanswered,
                        Fate::Dropped,
                    ])
                    .clone(),
                all: rng.chance(5_000),
                from: rng.below(120) * SECOND,
            });
        }
        rng.chance(500).then(|| PersistentFault::SilentWatch {
            process: rng.index(processes),
            kind: *rng.pick(&Watched::ALL),
        })
    }
}

impl Sim {
    /// Returns what happens to a request that the persistent fault of the run concerns; `None` for other requests.
    pub fn persistent_fate(&self, request: &ApiRequest) -> Option<Fate> {
        match &self.plan.persistent_fault {
            Some(PersistentFault::Requests {
                subject,
                fate,
                all,
                from,
            }) if self.has_faults && self.now >= *from => {
                let is_possible = *fate != Fate::Dropped || is_change(request);
                let is_it = is_possible && is_concerned(request, *subject, *all);
                is_it.then(|| fate.clone())
            }
            _ => None,
        }
    }

    /// Whether a process receives neither lists nor watch events of a kind.
    pub fn is_silent(&self, run_id: RunId, kind: Watched) -> bool {
        let silent = PersistentFault::SilentWatch {
            process: run_id.process,
            kind,
        };
        self.has_faults && self.plan.persistent_fault == Some(silent)
    }
}

/// Whether the request changes an object. Only changes can be dropped.
fn is_change(request: &ApiRequest) -> bool {
    request.is_write()
        && !matches!(
            request,
            ApiRequest::Create(..) | ApiRequest::Delete(..) | ApiRequest::Evict(_)
        )
}

/// Whether a fault of the kind `subject` concerns the request. If `all` is false, the fault concerns only requests
/// about a third of the objects.
fn is_concerned(request: &ApiRequest, subject: Subject, all: bool) -> bool {
    let (of, name): (_, &str) = match request {
        ApiRequest::SetFinalizers(ObjectKind::Pool, pool, _) => {
            (Subject::PoolFinalizers, &pool.name)
        }
        ApiRequest::SetFinalizers(ObjectKind::Claim, claim, _)
        | ApiRequest::Delete(ObjectKind::Claim, claim)
        | ApiRequest::SetClaimStatus(claim, _) => (Subject::Claims, &claim.name),
        ApiRequest::Create(name, ObjectSpec::Claim(_)) => (Subject::Claims, name),
        ApiRequest::ReadIpamClaim(name) => (Subject::Claims, name),
        ApiRequest::FillIpamClaim(it, _) => (Subject::Claims, &it.name),
        ApiRequest::SetPoolStatus(pool, _) => (Subject::PoolStatus, &pool.name),
        ApiRequest::Create(name, ObjectSpec::Block(_)) => (Subject::BlockCreations, name),
        ApiRequest::Replace(it, ObjectSpec::Block(_))
        | ApiRequest::Delete(ObjectKind::Block, it) => (Subject::BlockChanges, &it.name),
        ApiRequest::AssignPodCidrs(a) => (Subject::Nodes, &a.name),
        ApiRequest::TouchNode(touch) => (Subject::Nodes, &touch.name),
        ApiRequest::SetTaints(change) => (Subject::NodeMarks, &change.name),
        ApiRequest::Evict(pod) => (Subject::NodeMarks, &pod.name),
        ApiRequest::SetExhausted(change) => (Subject::NodeMarks, &change.name),
        ApiRequest::Create(
            name,
            ObjectSpec::Subnet(_) | ObjectSpec::Routes(_) | ObjectSpec::FrrConfiguration(_),
        ) => (Subject::Subnets, name),
        ApiRequest::Replace(
            it,
            ObjectSpec::Subnet(_) | ObjectSpec::Routes(_) | ObjectSpec::FrrConfiguration(_),
        )
        | ApiRequest::Delete(
            ObjectKind::Subnet | ObjectKind::Routes | ObjectKind::FrrConfiguration,
            it,
        ) => (Subject::Subnets, &it.name),
        ApiRequest::SetSubnetConditions(it, _) => (Subject::SubnetConditions, &it.name),
        ApiRequest::ListPodsOf { node, .. } => (Subject::Pods, node),
        _ => return false,
    };
    let sum: u32 = name.bytes().map(u32::from).sum();
    of == subject && (all || sum.is_multiple_of(3))
}
