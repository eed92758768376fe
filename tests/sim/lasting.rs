//! What does not pass by itself: a write that is refused for good, an answer that never comes, a list that
//! never comes.
//!
//! One of these lasts from a moment on until the run turns calm. Admission policies, quotas, webhooks and
//! proxies do such things, to one object or to a whole kind of write.

use std::time::Duration;

use cadastre_controller::cluster::request::{Kind, Refusal, Request, Spec};

use super::clock::{SECOND, Time};
use super::process::Watched;
use super::rng::Rng;
use super::run::{Sim, Where};

/// What the server takes offence at.
#[derive(Clone, Debug, PartialEq)]
pub enum Subject {
    /// Finalizers of pools.
    PoolFinalizers,
    PoolStatus,
    BlockCreations,
    /// Blocks are neither changed nor deleted.
    BlockChanges,
    /// podCIDRs of nodes, and touches.
    Nodes,
    /// Specs of NodeSubnets.
    Subnets,
    SubnetConditions,
    /// Consistent looks at the pods of a node.
    Pods,
}

/// How it shows.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// A policy says no.
    Rejected,
    /// A refusal that looks like a failed guard.
    Guard,
    /// Come again later, and when.
    Busy(Duration),
    /// There is none: the request times out.
    None,
}

/// One such trouble.
#[derive(Clone, Debug)]
pub struct Trouble {
    pub subject: Subject,
    pub answer: Answer,
    /// Whether it concerns everything of that kind, not only what chance says.
    pub all: bool,
    pub from: Time,
}

/// A process that gets no list of a kind while it lasts.
#[derive(Clone, Debug)]
pub struct Silence {
    pub process: usize,
    pub kind: Watched,
}

/// What lasts in one run.
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
    /// Whether the request is concerned: every one of its kind, or those of every third object.
    fn concerns(&self, request: &Request) -> bool {
        let (subject, name) = match request {
            Request::SetPoolFinalizers(pool, _) => (Subject::PoolFinalizers, &pool.name),
            Request::SetPoolStatus(pool, _) => (Subject::PoolStatus, &pool.name),
            Request::Create(name, Spec::Block(_)) => (Subject::BlockCreations, name),
            Request::Replace(it, Spec::Block(_)) | Request::Delete(Kind::Block, it) => {
                (Subject::BlockChanges, &it.name)
            }
            Request::AssignPodCidrs(a) => (Subject::Nodes, &a.name),
            Request::TouchNode(touch) => (Subject::Nodes, &touch.name),
            Request::Create(name, Spec::Subnet(_)) => (Subject::Subnets, name),
            Request::Replace(it, Spec::Subnet(_)) | Request::Delete(Kind::Subnet, it) => {
                (Subject::Subnets, &it.name)
            }
            Request::SetSubnetConditions(it, _) => (Subject::SubnetConditions, &it.name),
            Request::ListPodsOf { node } => (Subject::Pods, node),
            _ => return false,
        };
        let sum: u32 = name.bytes().map(u32::from).sum();
        subject == self.subject && (self.all || sum.is_multiple_of(3))
    }
}

impl Sim {
    /// What the server has against a request for good.
    pub fn objection(&self, request: &Request) -> Option<Answer> {
        let trouble = self.plan.lasting.trouble.as_ref().filter(|_| self.rough)?;
        (self.now >= trouble.from && trouble.concerns(request)).then(|| trouble.answer.clone())
    }

    /// Whether a process gets nothing of a kind, not even the first list.
    pub fn is_silent(&self, place: Where, kind: Watched) -> bool {
        let silence = self.plan.lasting.silence.as_ref().filter(|_| self.rough);
        silence.is_some_and(|it| (it.process, it.kind) == (place.process, kind))
    }
}

impl Answer {
    pub fn refusal(&self) -> Option<Refusal> {
        match self {
            Answer::Rejected => Some(Refusal::Rejected("a policy forbids it".to_owned())),
            Answer::Guard => Some(Refusal::Guard("a policy forbids it".to_owned())),
            Answer::Busy(after) => Some(Refusal::Busy(Some(*after))),
            Answer::None => None,
        }
    }
}
