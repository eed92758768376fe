//! Lasting faults: a write that is always rejected, an answer or a list that never arrives.
//!
//! A run has at most one of them, and it ends together with the other faults. In reality, admission policies, quotas,
//! webhooks and proxies cause lasting faults, for one object or for a whole kind of write.

use std::time::Duration;

use cadastre_controller::cluster::request::{ApiRequest, ObjectKind, ObjectSpec, Rejection};

use super::clock::{SECOND, Time};
use super::process::Watched;
use super::rng::Rng;
use super::run::{Sim, Where};

/// The kind of requests that a lasting fault concerns.
#[derive(Clone, Debug, PartialEq)]
pub enum Subject {
    /// Changes of the finalizers of pools.
    PoolFinalizers,
    PoolStatus,
    BlockCreations,
    /// Updates and deletions of blocks.
    BlockChanges,
    /// podCIDRs of nodes, and touches.
    Nodes,
    /// Specs of NodeSubnets.
    Subnets,
    SubnetConditions,
    /// Consistent lists of the pods of a node.
    Pods,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// A policy rejects the request.
    Rejected,
    /// The request is rejected as if a precondition had failed.
    Guard,
    /// The server is busy, and names the time after which to retry.
    Busy(Duration),
    /// No answer: the request times out.
    None,
}

/// A lasting fault of one kind of request.
#[derive(Clone, Debug)]
pub struct Trouble {
    pub subject: Subject,
    pub answer: Answer,
    /// Whether the fault concerns all requests of that kind, or only those about some objects.
    pub all: bool,
    pub from: Time,
}

/// A process that receives neither lists nor watch events of one kind, until the faults end.
#[derive(Clone, Debug)]
pub struct Silence {
    pub process: usize,
    pub kind: Watched,
}

/// The lasting faults of one run.
#[derive(Clone, Debug, Default)]
pub struct Lasting {
    pub trouble: Option<Trouble>,
    pub silence: Option<Silence>,
}

impl Lasting {
    pub fn draw(rng: &mut Rng, processes: usize) -> Self {
        let trouble = rng.chance(4_000).then(|| Trouble {
            subject: rng
                .pick(&[
                    Subject::PoolFinalizers,
                    Subject::PoolStatus,
                    Subject::BlockCreations,
                    Subject::BlockChanges,
                    Subject::Nodes,
                    Subject::Subnets,
                    Subject::SubnetConditions,
                    Subject::Pods,
                ])
                .clone(),
            answer: rng
                .pick(&[
                    Answer::Rejected,
                    Answer::Guard,
                    Answer::Busy(Duration::from_secs(7)),
                    Answer::None,
                ])
                .clone(),
            all: rng.chance(5_000),
            from: rng.below(120) * SECOND,
        });
        let silence = (trouble.is_none() && rng.chance(500)).then(|| Silence {
            process: rng.index(processes),
            kind: *rng.pick(&Watched::ALL),
        });
        Lasting { trouble, silence }
    }
}

impl Trouble {
    /// Whether the fault concerns the request: all requests of its kind, or only those about a third of the objects.
    fn concerns(&self, request: &ApiRequest) -> bool {
        let (subject, name): (_, &str) = match request {
            ApiRequest::SetPoolFinalizers(pool, _) => (Subject::PoolFinalizers, &pool.name),
            ApiRequest::SetPoolStatus(pool, _) => (Subject::PoolStatus, &pool.name),
            ApiRequest::Create(name, ObjectSpec::Block(_)) => (Subject::BlockCreations, name),
            ApiRequest::Replace(it, ObjectSpec::Block(_))
            | ApiRequest::Delete(ObjectKind::Block, it) => (Subject::BlockChanges, &it.name),
            ApiRequest::AssignPodCidrs(a) => (Subject::Nodes, &a.name),
            ApiRequest::TouchNode(touch) => (Subject::Nodes, &touch.name),
            ApiRequest::Create(name, ObjectSpec::Subnet(_)) => (Subject::Subnets, name),
            ApiRequest::Replace(it, ObjectSpec::Subnet(_))
            | ApiRequest::Delete(ObjectKind::Subnet, it) => (Subject::Subnets, &it.name),
            ApiRequest::SetSubnetConditions(it, _) => (Subject::SubnetConditions, &it.name),
            ApiRequest::ListPodsOf { node } => (Subject::Pods, node),
            _ => return false,
        };
        let sum: u32 = name.bytes().map(u32::from).sum();
        subject == self.subject && (self.all || sum.is_multiple_of(3))
    }
}

impl Sim {
    /// Returns how the server answers a request that a lasting fault concerns; `None` if no fault concerns it.
    pub fn objection(&self, request: &ApiRequest) -> Option<Answer> {
        let trouble = self.plan.lasting.trouble.as_ref().filter(|_| self.rough)?;
        (self.now >= trouble.from && trouble.concerns(request)).then(|| trouble.answer.clone())
    }

    /// Whether a process receives nothing of a kind, not even the first list.
    pub fn is_silent(&self, place: Where, kind: Watched) -> bool {
        let silence = self.plan.lasting.silence.as_ref().filter(|_| self.rough);
        silence.is_some_and(|it| (it.process, it.kind) == (place.process, kind))
    }
}

impl Answer {
    pub fn refusal(&self) -> Option<Rejection> {
        match self {
            Answer::Rejected => Some(Rejection::Rejected("a policy forbids it".to_owned())),
            Answer::Guard => Some(Rejection::Guard("a policy forbids it".to_owned())),
            Answer::Busy(after) => Some(Rejection::Busy(Some(*after))),
            Answer::None => None,
        }
    }
}
