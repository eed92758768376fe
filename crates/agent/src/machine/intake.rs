//! Records events from the watches and the outcomes of effects in the state of the machine.

use std::sync::Arc;

use super::{AgentEvent, AgentMachine, Observed, PendingOffer};
use crate::pods::Pod;
use cadastre_core::mutation::Mutation;
use cadastre_daemon::watch::ObjectEvent;
use cadastre_daemon::watch::WatchStep;
use cadastre_node::Now;

impl AgentMachine {
    /// Records an event. The next [`AgentMachine::turn`] decides what to do about it.
    pub fn on(&mut self, event: AgentEvent, now: &Now) {
        let now = now.since_boot;
        self.is_news |= !matches!(event, AgentEvent::Answer(_));
        match event {
            AgentEvent::Node(step) => {
                if let Some(node) = observe(step, &mut self.listed.0) {
                    self.node = node;
                    self.ranges_changed = true;
                }
            }
            AgentEvent::Subnet(step) => {
                self.subnet_followed = is_established(&step, self.subnet_followed);
                let is_first = !self.listed.1;
                if is_first && matches!(step, WatchStep::Change(ObjectEvent::Applied(_))) {
                    self.relisted = true;
                }
                if let Some(subnet) = observe(step, &mut self.listed.1) {
                    self.subnet = subnet.map(Arc::new);
                    self.ranges_changed = true;
                }
            }
            AgentEvent::Addresses(step) => {
                if let Some(addresses) = observe(step, &mut self.listed.2) {
                    self.addresses = addresses;
                }
            }
            AgentEvent::Pod(step) => self.on_pod(step),
            AgentEvent::Namespace(name, answer) => {
                let watched = self.watched_mut(PendingOffer::News);
                watched.namespaces.answered(&name, answer, now);
                self.notes.changed();
            }
            AgentEvent::Changed => self.look_soon(),
            AgentEvent::Answer(answer) => self.answer = Some(answer),
            AgentEvent::Proven(proven) => {
                self.is_proving = false;
                if !Mutation::LeaksNotFreed.is_on() {
                    self.proven.extend(proven);
                }
            }
            AgentEvent::Probed(probed) => self.probed(probed, now),
            AgentEvent::Written(written) => self.status_written(written, now),
            AgentEvent::Listed(listed) => self.list_written(listed, now),
            AgentEvent::Files(report) => self.files.ends(report),
            AgentEvent::Masqueraded(trouble) => {
                if let Some(masquerade) = &mut self.masquerade {
                    masquerade.ends(trouble);
                }
            }
            AgentEvent::Announced(report) => self.announced(report),
            AgentEvent::Routes(report) => self.routes = report,
        }
    }

    fn on_pod(&mut self, step: WatchStep<Pod>) {
        if self.watched.pods_followed && matches!(step, WatchStep::Change(ObjectEvent::Reached(_)))
        {
            return;
        }
        let watched = self.watched_mut(PendingOffer::Changed);
        watched.pods_followed = is_established(&step, watched.pods_followed);
        watched.pods_troubled |= matches!(step, WatchStep::Trouble);
        watched.pods_troubled &= !watched.pods_followed;
        let WatchStep::Change(change) = step else {
            return;
        };
        if let ObjectEvent::Applied(pod) = &change
            && watched.pods.by_uid(&pod.uid).is_none()
        {
            watched.namespaces.pod_came(&pod.namespace);
        }
        let may_have_removed = matches!(change, ObjectEvent::Listed | ObjectEvent::Deleted(_));
        let is_news = !matches!(
            change,
            ObjectEvent::Restarted { .. } | ObjectEvent::Reached(_)
        );
        watched.pods.change(change);
        if may_have_removed {
            watched.namespaces.keep_those_of(&watched.pods);
        }
        if is_news {
            self.watched_mut(PendingOffer::News);
            self.notes.changed();
            // The addresses of a deleted pod may be leaked, so a look at the store is due soon.
            self.look_soon();
        }
    }
}

/// Returns whether a watch is established after this step. `before` says whether the watch was established until this
/// step. After the start of a list (`Restarted`), the result is `before`, because the API server has not answered yet.
fn is_established<T>(step: &WatchStep<T>, before: bool) -> bool {
    match step {
        WatchStep::Trouble | WatchStep::Absent => false,
        WatchStep::Change(ObjectEvent::Restarted { .. }) => before,
        WatchStep::Change(_) | WatchStep::Recovered => true,
    }
}

/// Handles a step of the watch of one object, and updates `listed`. `listed` says whether the list under way has shown
/// the object. Returns the new state of the object; `None` if the step does not change the state.
fn observe<T>(step: WatchStep<T>, listed: &mut bool) -> Option<Observed<T>> {
    let WatchStep::Change(change) = step else {
        return None;
    };
    match change {
        ObjectEvent::Restarted { .. } => {
            *listed = false;
            None
        }
        ObjectEvent::Applied(object) => {
            *listed = true;
            Some(Observed::There(object))
        }
        ObjectEvent::Listed => (!*listed).then_some(Observed::Absent),
        ObjectEvent::Deleted(_) => Some(Observed::Absent),
        ObjectEvent::Reached(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_object_is_absent_when_a_list_does_not_show_it() {
        let mut listed = false;
        let mut step = |change| observe(WatchStep::Change(change), &mut listed);
        let asked = Duration::ZERO;
        assert!(step(ObjectEvent::Restarted { asked }).is_none());
        assert!(matches!(step(ObjectEvent::Listed), Some(Observed::Absent)));
        assert!(matches!(
            step(ObjectEvent::Applied(1)),
            Some(Observed::There(1))
        ));
        assert!(matches!(
            step(ObjectEvent::Deleted(1)),
            Some(Observed::Absent)
        ));
        assert!(step(ObjectEvent::Restarted { asked }).is_none());
        assert!(matches!(
            step(ObjectEvent::Applied(2)),
            Some(Observed::There(2))
        ));
        assert!(step(ObjectEvent::Listed).is_none(), "it was shown");
        assert!(observe(WatchStep::<u8>::Trouble, &mut listed).is_none());
    }

    #[test]
    fn the_start_of_a_list_does_not_establish_a_watch() {
        let begins = WatchStep::<u8>::Change(ObjectEvent::Restarted {
            asked: Duration::ZERO,
        });
        assert!(!is_established(&WatchStep::<u8>::Trouble, true));
        assert!(!is_established(&begins, false) && is_established(&begins, true));
        assert!(is_established(
            &WatchStep::Change(ObjectEvent::Applied(1)),
            false
        ));
        assert!(is_established(&WatchStep::<u8>::Recovered, false));
    }
}
