//! Reports about calls that keep failing.

use super::Leader;
use crate::cluster::request::{Kind, Outcome};
use crate::cluster::seen::Text;
use crate::cluster::world::World;
use crate::purpose::Step;
use crate::reconcile::Answer;
use crate::refusals::{Call, News};
use crate::registry::blocks::Entry;
use crate::report::{About, Report, WRITE_ACCEPTED, WRITE_REJECTED};
use crate::{Now, Purpose};
use cadastre_api::FINALIZER;

impl Leader {
    /// Records the outcome of a call, and reports it if the call keeps failing or works again.
    pub(super) fn note(
        &mut self,
        answer: &Answer,
        world: &World,
        reports: &mut Vec<Report>,
        now: Now,
    ) {
        let Some(call) = Call::of(answer.purpose, answer.wrote) else {
            return;
        };
        let kept = self.is_kept(answer);
        let (purpose, outcome) = (answer.purpose, answer.outcome);
        let refusals = &mut self.registry.refusals;
        let before = refusals.why(&call).is_some();
        let news = refusals.note(&call, outcome, kept, now.mono);
        let is_refused = refusals.why(&call).is_some();
        let is_settled = is_refused || !refusals.is_failing(&call);
        // Conditions of pools and of NodeSubnets depend on it.
        if before != is_refused {
            self.loops.pools.mark();
        }
        if let Some(name) = self.node_of(&call, purpose) {
            if before != is_refused {
                self.loops.subnets.queue.add(name.clone());
            }
            if is_settled {
                self.loops.subnets.heard_of(name);
            }
        }
        let told = news.zip(self.subject(&call, purpose, world));
        let Some((news, (about, what))) = told else {
            return;
        };
        reports.push(match news {
            News::Refused(why) => {
                let note = format!(
                    "the API server does not take {what}: {why}. Look for an admission policy, a webhook or a quota that forbids it; it is tried again every half minute"
                );
                Report::warning(about, WRITE_REJECTED, note)
            }
            News::Accepted => {
                let note = format!("the API server has taken {what}");
                Report::info(about, WRITE_ACCEPTED, note)
            }
        });
    }

    /// Returns the node whose NodeSubnet reports that the call keeps failing.
    fn node_of(&self, call: &Call, purpose: &Purpose) -> Option<Text> {
        match (call, purpose) {
            (Call::AssignPodCidrs(_), Purpose::Assign { name, .. })
            | (Call::WriteSubnet(name), _) => Some(name.clone()),
            (Call::WriteBlock(cidr), _) => {
                let entry = self.registry.blocks.get(cidr)?;
                Some(entry.owner.name.clone())
            }
            _ => None,
        }
    }

    /// Returns whether the answer is about the object that was meant, with the content that was written.
    fn is_kept(&self, answer: &Answer) -> bool {
        match (answer.purpose, answer.outcome) {
            // If a read shows another UID, the watch is behind: reads are repeated until they agree.
            (Purpose::Assign { uid, .. }, Outcome::Node(node)) => {
                node.uid == *uid && !(answer.wrote && node.is_empty())
            }
            (Purpose::Subnet { .. }, Outcome::Subnet(is)) => self.loops.subnets.is_kept(is),
            (Purpose::Answer { .. }, Outcome::Subnet(is)) => {
                self.loops.subnets.are_conditions_kept(is)
            }
            (Purpose::PoolFinalizers { .. }, Outcome::Pool(pool)) => {
                let guarded = pool.finalizers.iter().any(|it| it == FINALIZER);
                guarded != pool.deleting
            }
            (Purpose::Block { cidr, step, .. }, Outcome::Block(block)) => {
                let entry = self.registry.blocks.get(cidr);
                let is_kept = |it: &Entry| it.step != Step::Replace || it.is_kept_in(block);
                *step != Some(Step::Replace) || entry.is_none_or(is_kept)
            }
            _ => true,
        }
    }

    /// Returns the object on which a failing call is reported, and what was to be written. Failures of a pool's
    /// finalizers are reported by its condition.
    fn subject(&self, call: &Call, purpose: &Purpose, world: &World) -> Option<(About, String)> {
        let node = |name: &Text| world.nodes.get(name).map(|node| About::node(node));
        Some(match (call, purpose) {
            (Call::AssignPodCidrs(_), Purpose::Assign { name, uid }) => {
                let about = About::new(Kind::Node, name, uid);
                (about, "podCIDRs for this node".to_owned())
            }
            (Call::WriteSubnet(name), _) => (node(name)?, "the spec of its NodeSubnet".to_owned()),
            (Call::SetSubnetConditions(name), _) => {
                (node(name)?, "the conditions of its NodeSubnet".to_owned())
            }
            (Call::WriteBlock(cidr), _) => {
                let owner = &self.registry.blocks.get(cidr)?.owner;
                let whose = if owner.resting {
                    " (the node is gone)"
                } else {
                    ""
                };
                let what = format!("IPAMBlock {cidr} of this node{whose}");
                (About::new(Kind::Node, &owner.name, &owner.uid), what)
            }
            (Call::SetPoolStatus(name), _) => {
                let about = About::new(Kind::Pool, name, &world.pools.get(name)?.uid);
                (about, "the status of this pool".to_owned())
            }
            _ => return None,
        })
    }
}
