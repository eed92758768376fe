//! Why the kubelet cannot start a pod: the last event about the pod's sandbox.
//!
//! The pools and ranges of an inventory say little about a pod that fails on a second network, or in another plugin of
//! the chain. The text of the event names the network and the pool.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;

use super::Explanation;
use crate::inventory::{Inventory, PodFact};
use crate::lists::Readable;
use crate::render::age;
use cadastre_api::ipam_claim::NETWORKS_ANNOTATION;
use cadastre_core::inert;

/// The reason of the kubelet's events about sandboxes that it could not create.
pub(super) const REASON: &str = "FailedCreatePodSandBox";

/// Returns the pod with this name if it is bound to a node and its status has no address, so that its sandbox probably
/// does not exist yet. Returns `None` for pods that have finished or use the host network.
pub(super) fn waiting<'a>(name: &str, inventory: &'a Inventory) -> Option<&'a PodFact> {
    let pod = inventory.pod(name)?;
    let waits = !pod.finished && !pod.host_network && pod.addresses.is_empty();
    Some(pod).filter(|pod| waits && pod.node.is_some())
}

/// Adds the second networks of a pod to the explanation, and the last of `events`, or why events cannot be read.
pub(super) fn explain(
    pod: &PodFact,
    events: &Readable<Event>,
    now: Timestamp,
    explanation: &mut Explanation,
) {
    let networks = pod.meta.annotations.get(NETWORKS_ANNOTATION);
    let networks = networks.map(|it| it.split_whitespace().collect::<Vec<_>>().join(" "));
    explanation.add("Second networks", networks.into_iter().collect());
    let lines = match events {
        Err(why) => vec![format!("unknown: {why}")],
        Ok(events) => {
            let last = events.iter().max_by_key(|it| time(it));
            last.map(|it| line(it, now)).into_iter().collect()
        }
    };
    explanation.add(&format!("Last event {REASON}"), lines);
}

/// The time when the event was last observed.
fn time(event: &Event) -> Option<Timestamp> {
    let series = event.series.as_ref();
    let series = series.and_then(|it| it.last_observed_time.as_ref());
    let micro = series.or(event.event_time.as_ref()).map(|it| it.0);
    let last = event.last_timestamp.as_ref().map(|it| it.0);
    micro.max(last)
}

fn line(event: &Event, now: Timestamp) -> String {
    let message = event.message.as_deref().unwrap_or_default();
    let ago = age(time(event), now);
    format!("{ago} ago: {}", inert::line(message.trim()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::render::VerbReport as _;
    use crate::tests::{Cluster, assert_contains, style};

    /// Explains the pod as `explain pod` does, with these events.
    fn explained(name: &str, cluster: &Cluster, events: &Readable<Event>) -> String {
        let inventory = cluster.inventory();
        let mut explanation = super::super::pod(name, &inventory).unwrap();
        if let Some(pod) = waiting(name, &inventory) {
            explain(pod, events, inventory.now, &mut explanation);
        }
        explanation.text(&style())
    }

    fn event(at: &str, message: &str) -> Event {
        let event = json!({
            "metadata": {}, "involvedObject": {}, "reason": REASON,
            "lastTimestamp": at, "message": message,
        });
        serde_json::from_value(event).unwrap()
    }

    #[test]
    fn the_last_event_of_a_pod_that_waits_is_quoted_with_its_networks() {
        let mut cluster = Cluster::new();
        cluster.pod("shop/waits", "b", &[]);
        let networks = (NETWORKS_ANNOTATION.to_owned(), "backup,\n  lan".to_owned());
        let meta = &mut cluster.last_pod().metadata;
        meta.annotations.get_or_insert_default().extend([networks]);
        let refused =
            "plugin type=\"multus\" failed (add): [shop/waits:lan]: pool `lan` has none\n";
        let events = Ok(vec![
            event("2026-11-21T11:58:00Z", refused),
            event("2026-11-21T11:50:00Z", "no agent answers"),
        ]);
        let text = explained("shop/waits", &cluster, &events);
        let last = format!("Last event {REASON}:\n  2m ago: {}\n", refused.trim());
        assert_contains(&text, &["Second networks:\n  backup, lan\n", &last]);
        assert!(!text.contains("no agent answers"), "{text}");

        let text = explained("shop/waits", &cluster, &Ok(Vec::new()));
        assert!(!text.contains(REASON), "{text}");
        let unreadable = Err("no right to read events".to_owned());
        let text = explained("shop/waits", &cluster, &unreadable);
        assert_contains(&text, &["  unknown: no right to read events\n"]);

        // The sandbox of a pod with an address exists, so older events do not matter.
        let text = explained("shop/cart", &cluster, &events);
        assert!(!text.contains(REASON), "{text}");
    }

    #[test]
    fn a_repeated_event_is_as_old_as_its_last_repetition() {
        let mut repeated = event("2026-11-21T11:00:00Z", "a");
        let series = json!({"count": 3, "lastObservedTime": "2026-11-21T11:59:00.000000Z"});
        repeated.series = Some(serde_json::from_value(series).unwrap());
        let now = "2026-11-21T12:00:00Z".parse().unwrap();
        assert_eq!(line(&repeated, now), "60s ago: a");
    }
}
