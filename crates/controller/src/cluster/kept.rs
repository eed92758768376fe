//! Recognizes writes that the API server accepts but does not keep.
//!
//! An API server drops fields that its CRD lacks, and a mutating webhook can undo any change. The answer is then a
//! success, but its object lacks the written content. Loops must not repeat such a write at once, because the API
//! server would accept and drop it again.

use super::objects::NodeTaint;
use super::request::{ApiRequest, ObjectSpec, RequestOutcome};
use cadastre_api::{CLAIM_FINALIZER, FINALIZER, frr};

impl ApiRequest {
    /// Returns false if the answer to this write is an object that lacks a part of the written content. Answers to
    /// deletions and to creations of pools, blocks and claims are not checked.
    pub(crate) fn is_kept_in(&self, outcome: &RequestOutcome) -> bool {
        match (self, outcome) {
            (ApiRequest::AssignPodCidrs(_), RequestOutcome::Node(node)) => !node.is_empty(),
            (ApiRequest::SetTaints(change), RequestOutcome::Node(node)) => {
                let is_tainted = NodeTaint::is_any_of_exhaustion;
                is_tainted(&node.taints) == is_tainted(&change.after)
            }
            (ApiRequest::SetExhausted(change), RequestOutcome::Node(node)) => {
                node.exhausted == change.message
            }
            (ApiRequest::Create(_, spec) | ApiRequest::Replace(_, spec), _) => {
                match (spec, outcome) {
                    (ObjectSpec::Subnet(spec), RequestOutcome::Subnet(is)) => {
                        is.spec.as_ref() == Ok(spec) && !is.is_partial
                    }
                    (ObjectSpec::Routes(spec), RequestOutcome::Routes(is)) => is.spec == *spec,
                    (ObjectSpec::FrrConfiguration(spec), RequestOutcome::FrrConfiguration(is)) => {
                        frr::is_as_written(&is.spec, spec)
                    }
                    (ObjectSpec::Block(spec), RequestOutcome::Block(is)) => {
                        matches!(self, ApiRequest::Create(..)) || is.spec.as_ref() == Ok(spec)
                    }
                    _ => true,
                }
            }
            (ApiRequest::SetSubnetConditions(_, conditions), RequestOutcome::Subnet(is)) => {
                let kept = is.conditions();
                let mut pairs = kept.iter().zip(conditions);
                kept.len() == conditions.len() && pairs.all(|(a, b)| a.is_same_as(b))
            }
            (ApiRequest::SetFinalizers(_, _, all), RequestOutcome::Pool(pool)) => {
                let is_its = |it: &String| it == FINALIZER;
                pool.finalizers.iter().any(is_its) == all.iter().any(is_its)
            }
            (ApiRequest::SetFinalizers(_, _, all), RequestOutcome::Claim(claim)) => {
                claim.has_finalizer() == all.iter().any(|it| it == CLAIM_FINALIZER)
            }
            (ApiRequest::SetPoolStatus(_, status), RequestOutcome::Pool(pool)) => {
                pool.status.as_ref() == Some(status)
            }
            (ApiRequest::SetClaimStatus(_, status), RequestOutcome::Claim(claim)) => {
                claim.status.is(status)
            }
            (ApiRequest::FillIpamClaim(_, filled), RequestOutcome::IpamClaim(claim)) => {
                claim.ips == filled.ips
            }
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::objects::{Pool, Routes, Subnet};
    use crate::cluster::request::{ExhaustedChange, KnownObject, ObjectKind, TaintsChange};
    use crate::fixtures::{claim, node, pool, subnet};
    use cadastre_api::{IPClaimStatus, IPPoolStatus, NodeRoutesSpec, NodeSubnetSpec};

    fn known() -> KnownObject {
        KnownObject {
            name: "n".into(),
            uid: "n".into(),
            version: 1,
        }
    }

    /// Returns what the write sets, and the answer with an object that a webhook has left as it was.
    fn dropped() -> Vec<(ApiRequest, RequestOutcome)> {
        let is_node = || RequestOutcome::Node(node("n"));
        let taints = TaintsChange {
            name: "n".into(),
            uid: "n".into(),
            before: Box::default(),
            after: [NodeTaint::exhausted()].into(),
        };
        let exhausted = ExhaustedChange {
            name: "n".into(),
            uid: "n".into(),
            message: Some("full".into()),
            was_true: false,
        };
        let listed = NodeSubnetSpec {
            node_uid: Some("other".to_owned()),
            ..NodeSubnetSpec::default()
        };
        let routes = NodeRoutesSpec {
            via: vec!["192.0.2.1".to_owned()],
            ..NodeRoutesSpec::default()
        };
        let of_claim = IPClaimStatus {
            addresses: vec!["10.0.0.4".to_owned()],
            ..IPClaimStatus::default()
        };
        vec![
            (ApiRequest::SetTaints(taints), is_node()),
            (ApiRequest::SetExhausted(exhausted), is_node()),
            (
                ApiRequest::Replace(known(), ObjectSpec::Subnet(listed)),
                RequestOutcome::Subnet(subnet("n", &[], 0)),
            ),
            (
                ApiRequest::Replace(known(), ObjectSpec::Subnet(NodeSubnetSpec::default())),
                RequestOutcome::Subnet(Subnet {
                    spec: Ok(NodeSubnetSpec::default()),
                    is_partial: true,
                    ..subnet("n", &[], 0)
                }),
            ),
            (
                ApiRequest::Replace(known(), ObjectSpec::Routes(routes)),
                RequestOutcome::Routes(Routes {
                    name: "n".into(),
                    uid: "n".into(),
                    version: 1,
                    spec: NodeRoutesSpec::default(),
                }),
            ),
            (
                ApiRequest::SetFinalizers(ObjectKind::Pool, known(), vec![FINALIZER.to_owned()]),
                RequestOutcome::Pool(Pool {
                    finalizers: Vec::new(),
                    ..pool("n", "10.0.0.0/24")
                }),
            ),
            (
                ApiRequest::SetPoolStatus(known(), IPPoolStatus::default()),
                RequestOutcome::Pool(pool("n", "10.0.0.0/24")),
            ),
            (
                ApiRequest::SetClaimStatus(known(), of_claim),
                RequestOutcome::Claim(claim("n", "p", &[])),
            ),
        ]
    }

    #[test]
    fn a_change_that_the_answer_does_not_show_is_not_kept() {
        for (request, answer) in dropped() {
            assert!(!request.is_kept_in(&answer), "{request:?}");
            assert!(request.is_kept_in(&RequestOutcome::Gone), "{request:?}");
        }
    }

    #[test]
    fn a_change_that_the_answer_shows_is_kept() {
        let all = dropped().into_iter();
        let kept = all.map(|(request, mut answer)| {
            match (&request, &mut answer) {
                (ApiRequest::SetTaints(it), RequestOutcome::Node(node)) => {
                    // Another component may have added a taint since.
                    let other = NodeTaint {
                        key: "other".into(),
                        ..NodeTaint::exhausted()
                    };
                    node.taints = it.after.iter().cloned().chain([other]).collect();
                }
                (ApiRequest::SetExhausted(it), RequestOutcome::Node(node)) => {
                    node.exhausted = it.message.clone();
                }
                (ApiRequest::Replace(_, ObjectSpec::Subnet(spec)), RequestOutcome::Subnet(is)) => {
                    (is.spec, is.is_partial) = (Ok(spec.clone()), false);
                }
                (ApiRequest::Replace(_, ObjectSpec::Routes(spec)), RequestOutcome::Routes(is)) => {
                    is.spec = spec.clone();
                }
                (ApiRequest::SetFinalizers(_, _, all), RequestOutcome::Pool(pool)) => {
                    pool.finalizers.clone_from(all);
                }
                (ApiRequest::SetPoolStatus(_, status), RequestOutcome::Pool(pool)) => {
                    pool.status = Some(status.clone());
                }
                (ApiRequest::SetClaimStatus(_, status), RequestOutcome::Claim(claim)) => {
                    claim.status = status.into();
                }
                other => panic!("{other:?}"),
            }
            (request, answer)
        });
        for (request, answer) in kept {
            assert!(request.is_kept_in(&answer), "{request:?}");
        }
    }
}
