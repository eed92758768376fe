//! The addresses that the CNI configuration or the runtime requests for pods, and that no range of the node contains.
//! The ADDs of these pods wait.
//!
//! The NodeSubnet's status lists the requests, and the controller creates an IPClaim for each request. A request
//! outlives its ADD, so that the status is not written again each time the runtime repeats the ADD.

use std::collections::BTreeMap;
use std::time::Duration;

use cadastre_api::{AddressRequest, MOST_ADDRESS_REQUESTS};

/// How long a request is kept after the last ADD that made it.
const LIFE: Duration = Duration::from_secs(60);

/// The address requests, at most one per pod, by the pod's UID.
#[derive(Debug, Default)]
pub struct AddressRequestBook(BTreeMap<String, Entry>);

#[derive(Debug)]
struct Entry {
    request: AddressRequest,
    since: Duration,
    until: Duration,
}

impl AddressRequestBook {
    /// Records a request. If there are [`MOST_ADDRESS_REQUESTS`] already, the oldest of them is removed. The controller
    /// has most likely created an IPClaim for that request.
    pub fn add(&mut self, request: AddressRequest, now: Duration) {
        let known = self.0.get(&request.pod_uid);
        let since = known.map_or(now, |it| it.since);
        if known.is_none() && self.0.len() >= MOST_ADDRESS_REQUESTS {
            let first = self.0.iter().min_by_key(|(_, it)| it.since);
            if let Some(uid) = first.map(|(uid, _)| uid.clone()) {
                self.0.remove(&uid);
            }
        }
        let entry = Entry {
            since,
            until: now + LIFE,
            request,
        };
        self.0.insert(entry.request.pod_uid.clone(), entry);
    }

    /// Removes the request of a pod that has got its addresses. Returns whether there was a request.
    pub fn remove(&mut self, pod_uid: &str) -> bool {
        self.0.remove(pod_uid).is_some()
    }

    /// Removes expired requests. Returns the others, sorted by pod UID, and the time at which the next one expires.
    pub fn current(&mut self, now: Duration) -> (Vec<AddressRequest>, Option<Duration>) {
        self.0.retain(|_, it| it.until > now);
        let all = self.0.values().map(|it| it.request.clone()).collect();
        (all, self.0.values().map(|it| it.until).min())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(uid: &str) -> AddressRequest {
        AddressRequest {
            pod_uid: uid.to_owned(),
            ..AddressRequest::default()
        }
    }

    #[test]
    fn a_request_ends_with_its_success_or_a_while_after_its_last_add() {
        let second = Duration::from_secs;
        let mut book = AddressRequestBook::default();
        for (uid, at) in [("a", 0), ("b", 3), ("a", 5)] {
            book.add(request(uid), second(at));
        }
        let (all, end) = book.current(second(6));
        assert_eq!(
            (all, end),
            (vec![request("a"), request("b")], Some(second(63)))
        );
        assert_eq!(book.current(second(63)).0, [request("a")]);
        assert!(book.remove("a") && !book.remove("a"));
        assert_eq!(book.current(second(64)), (Vec::new(), None));
    }

    #[test]
    fn the_first_request_makes_room_for_one_too_many() {
        let mut book = AddressRequestBook::default();
        for n in 0..100 {
            let at = Duration::from_millis(n);
            book.add(request(&format!("{n:03}")), at);
            book.add(request(&format!("{n:03}")), at);
        }
        let (all, _) = book.current(Duration::ZERO);
        assert_eq!((all.len(), &*all[0].pod_uid), (64, "036"));
    }
}
