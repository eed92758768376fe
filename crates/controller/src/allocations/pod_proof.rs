//! The proof that no pod uses an address of a deleted node: a list of the pods bound to the node's name that is newer
//! than the end of the node's quarantine.
//!
//! A consistent list is as new as its request, but it is slow: the API server waits until its cache has caught up with
//! etcd, some 50 ms. If many nodes are deleted together, one such list is enough, because its answer contains the
//! revision of etcd. The other lists may come from the API server's cache, as soon as the cache has reached this
//! revision.

use std::time::Duration;

use crate::Now;
use crate::cluster::names::NodeName;
use crate::cluster::request::{ApiRequest, RequestOutcome};
use crate::failing_calls::ObjectCall;

use super::AllocationState;
use cadastre_core::mutation::Mutation;

/// For how long lists may ask for a revision that an earlier list has shown. It bounds how old a list can be that comes
/// from an API server whose cache does not follow etcd.
const LIFETIME: Duration = Duration::from_secs(5);

/// The revision of etcd that the newest consistent list of pods has shown.
#[derive(Clone, Copy, Debug, Default)]
pub struct PodProof {
    newest: Option<ShownRevision>,
}

#[derive(Clone, Copy, Debug)]
struct ShownRevision {
    /// When the list was requested, by the monotonic clock. The list contains every change that was made before
    requested: Duration,
    revision: u64,
}

impl PodProof {
    /// Records the revision that a list of pods shows, if the list was consistent. `requested` is the monotonic time of
    /// its request.
    pub(crate) fn listed(&mut self, requested: Duration, outcome: &RequestOutcome) {
        if let RequestOutcome::Pods(_, Some(revision)) = *outcome
            && self.newest.is_none_or(|it| it.requested < requested)
        {
            self.newest = Some(ShownRevision {
                requested,
                revision,
            });
        }
    }

    /// Returns the newest revision, if the list that has shown it was requested after `since`, and not long ago.
    fn after(&self, since: Duration, now: Duration) -> Option<ShownRevision> {
        let mut newest = self.newest?;
        if Mutation::EarlierPodListCounts.is_on() {
            newest.requested = now;
        }
        let is_valid = newest.requested >= since && newest.requested + LIFETIME > now;
        is_valid.then_some(newest)
    }
}

impl AllocationState {
    /// Returns the request for the pods of a deleted node whose quarantine ended at `until`. Also returns the monotonic
    /// time up to which the list will contain all changes. If the last list for this node failed, the request asks for
    /// no revision, because the cache of the API server may never reach it.
    pub(crate) fn list_pods_of(
        &self,
        node: &NodeName,
        until: Duration,
        now: Now,
    ) -> (ApiRequest, Duration) {
        let failed = self
            .refusals
            .is_failing(&ObjectCall::ListPods(node.clone()));
        let shown = self.pod_proof.after(until, now.mono);
        let shown = shown.filter(|_| !failed);
        let request = ApiRequest::ListPodsOf {
            node: node.clone(),
            not_older_than: shown.map(|it| it.revision),
        };
        (request, shown.map_or(now.mono, |it| it.requested))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::request::Rejection;
    use crate::fixtures::at;

    const UNTIL: Duration = Duration::from_secs(100);

    /// Returns the revision and the time of the list of the pods of node `n`.
    fn list(allocations: &AllocationState, seconds: u64) -> (Option<u64>, u64) {
        let (request, as_of) = allocations.list_pods_of(&"n".into(), UNTIL, at(seconds));
        let ApiRequest::ListPodsOf { not_older_than, .. } = request else {
            panic!("{request:?}");
        };
        (not_older_than, as_of.as_secs())
    }

    fn listed(allocations: &mut AllocationState, seconds: u64, revision: Option<u64>) {
        let outcome = RequestOutcome::Pods(Vec::new(), revision);
        let proof = &mut allocations.pod_proof;
        proof.listed(Duration::from_secs(seconds), &outcome);
    }

    #[test]
    fn a_list_that_was_requested_after_the_quarantine_serves_other_nodes_for_some_seconds() {
        let mut allocations = AllocationState::default();
        assert_eq!(list(&allocations, 101), (None, 101));
        listed(&mut allocations, 99, Some(7));
        assert_eq!(list(&allocations, 101), (None, 101), "too early");
        listed(&mut allocations, 100, Some(8));
        assert_eq!(list(&allocations, 101), (Some(8), 100));
        listed(&mut allocations, 99, Some(7));
        assert_eq!(list(&allocations, 104), (Some(8), 100), "the newer one");
        assert_eq!(list(&allocations, 105), (None, 105), "too long ago");
    }

    #[test]
    fn a_list_from_a_cache_shows_no_revision_for_others() {
        let mut allocations = AllocationState::default();
        listed(&mut allocations, 100, None);
        assert_eq!(list(&allocations, 101), (None, 101));
    }

    #[test]
    fn after_a_failure_a_node_gets_a_consistent_list() {
        let mut allocations = AllocationState::default();
        listed(&mut allocations, 100, Some(7));
        let call = ObjectCall::ListPods("n".into());
        for (outcome, revision) in [
            (RequestOutcome::Rejected(Rejection::Busy(None)), None),
            (RequestOutcome::Indeterminate("504".to_owned()), None),
            (RequestOutcome::Pods(Vec::new(), None), Some(7)),
        ] {
            let now = at(101).mono;
            allocations.refusals.note(&call, &outcome, true, now);
            assert_eq!(list(&allocations, 101).0, revision, "{outcome:?}");
        }
    }
}
