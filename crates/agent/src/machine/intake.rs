//! Records events from the watches and the outcomes of effects in the state of the machine.

use std::sync::Arc;

use super::{AgentEvent, AgentMachine, Observed, PendingOffer};
use crate::pods::Pod;
use cadastre_core::mutation::Mutation;
use cadastre_daemon::watch::ObjectEvent;
use cadastre_daemon::watch::WatchStep;
use cadastre_node::Now;

impl AgentMachine {
    /// Records an event; [`AgentMachine::turn`] then decides what to do.
    pub fn on(&mut self, event: AgentEvent, now: &Now) {
        let now = now.since_boot;
        self.is_news |= !matches!(event, AgentEvent::Answer(_));
        match event {
            AgentEvent::Node(step) => {
                if let Some(told) = observe(step, &mut self.listed.0) {
                    self.node = told;
                    self.to_hold = true;
                }
            }
            AgentEvent::Subnet(step) => {
                self.followed = gets_through(&step, self.followed);
                let is_first = !self.listed.1;
                if is_first && matches!(step, WatchStep::Change(ObjectEvent::Applied(_))) {
                    self.relisted = true;
                }
                if let Some(told) = observe(step, &mut self.listed.1) {
                    self.subnet = told.map(Arc::new);
                    self.to_hold = true;
                }
            }
            AgentEvent::Addresses(step) => {
                if let Some(told) = observe(step, &mut self.listed.2) {
                    self.addresses = told;
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
            AgentEvent::Written(written) => self.status_written(written, now),
            AgentEvent::Listed(listed) => self.list_written(listed, now),
            AgentEvent::Files(report) => self.files.ends(report),
            AgentEvent::Masqueraded(trouble) => {
                if let Some(masquerade) = &mut self.masquerade {
                    masquerade.ends(trouble);
                }
            }
        }
    }

    fn on_pod(&mut self, step: WatchStep<Pod>) {
        if self.watched.pods_followed && matches!(step, WatchStep::Change(ObjectEvent::Reached(_)))
        {
            return;
        }
        let watched = self.watched_mut(PendingOffer::Changed);
        watched.pods_followed = gets_through(&step, watched.pods_followed);
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
        let some_gone = matches!(change, ObjectEvent::Listed | ObjectEvent::Deleted(_));
        let is_news = !matches!(
            change,
            ObjectEvent::Restarted { .. } | ObjectEvent::Reached(_)
        );
        watched.pods.change(change);
        if some_gone {
            watched.namespaces.keep_those_of(&watched.pods);
        }
        if is_news {
            self.watched_mut(PendingOffer::News);
            self.notes.changed();
            // The addresses of a deleted pod may be leaked, so the next look should come soon.
            self.look_soon();
        }
    }
}

/// Returns whether a watch is established after this step; `before`: whether it was established before. The start of a
/// list changes nothing until the API server answers.
fn gets_through<T>(step: &WatchStep<T>, before: bool) -> bool {
    match step {
        WatchStep::Trouble => false,
        WatchStep::Change(ObjectEvent::Restarted { .. }) => before,
        WatchStep::Change(_) | WatchStep::Recovered => true,
    }
}

/// Handles a step of the watch of one object. `listed`: whether the list under way has shown the object. Returns what
/// is known of the object now; `None` if the step says nothing new about it.
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
    fn a_list_that_begins_is_no_sign_that_a_watch_gets_through() {
        let begins = WatchStep::<u8>::Change(ObjectEvent::Restarted {
            asked: Duration::ZERO,
        });
        assert!(!gets_through(&WatchStep::<u8>::Trouble, true));
        assert!(!gets_through(&begins, false) && gets_through(&begins, true));
        assert!(gets_through(
            &WatchStep::Change(ObjectEvent::Applied(1)),
            false
        ));
        assert!(gets_through(&WatchStep::<u8>::Recovered, false));
    }
}
