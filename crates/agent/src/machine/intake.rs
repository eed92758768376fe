//! Records events in the state.

use std::sync::Arc;

use super::{Event, Machine, Offer, Told};
use crate::pods::Pod;
use cadastre_core::mutation::Mutation;
use cadastre_daemon::watch::Change;
use cadastre_daemon::watch::Step;
use cadastre_node::Now;

impl Machine {
    /// Records an event; [`Machine::turn`] then decides what to do.
    pub fn on(&mut self, event: Event, now: &Now) {
        let now = now.since_boot;
        self.is_news |= !matches!(event, Event::Answer(_));
        match event {
            Event::Node(step) => {
                if let Some(told) = take_in(step, &mut self.listed.0) {
                    self.node = told;
                    self.to_hold = true;
                }
            }
            Event::Subnet(step) => {
                self.followed = gets_through(&step, self.followed);
                let is_first = !self.listed.1;
                if is_first && matches!(step, Step::Change(Change::Applied(_))) {
                    self.relisted = true;
                }
                if let Some(told) = take_in(step, &mut self.listed.1) {
                    self.subnet = told.map(Arc::new);
                    self.to_hold = true;
                }
            }
            Event::Addresses(step) => {
                if let Some(told) = take_in(step, &mut self.listed.2) {
                    self.addresses = told;
                }
            }
            Event::Pod(step) => self.on_pod(step),
            Event::Namespace(name, answer) => {
                let shown = self.show(Offer::News);
                shown.namespaces.answered(&name, answer, now);
                self.notes.changed();
            }
            Event::Changed => self.look_soon(),
            Event::Answer(answer) => self.answer = Some(answer),
            Event::Proven(proven) => {
                self.is_proving = false;
                if !Mutation::LeaksNotFreed.is_on() {
                    self.proven.extend(proven);
                }
            }
            Event::Written(written) => self.status_written(written, now),
            Event::Listed(listed) => self.list_written(listed, now),
            Event::Files(told) => self.files.written(told),
            Event::Masqueraded(trouble) => {
                if let Some(masquerade) = &mut self.masquerade {
                    masquerade.written(trouble);
                }
            }
        }
    }

    fn on_pod(&mut self, step: Step<Pod>) {
        if self.shown.pods_followed && matches!(step, Step::Change(Change::Reached(_))) {
            return;
        }
        let shown = self.show(Offer::Changed);
        shown.pods_followed = gets_through(&step, shown.pods_followed);
        shown.pods_troubled |= matches!(step, Step::Trouble);
        shown.pods_troubled &= !shown.pods_followed;
        let Step::Change(change) = step else {
            return;
        };
        if let Change::Applied(pod) = &change
            && shown.pods.by_uid(&pod.uid).is_none()
        {
            shown.namespaces.pod_came(&pod.namespace);
        }
        let some_gone = matches!(change, Change::Listed | Change::Deleted(_));
        let is_news = !matches!(change, Change::Restarted { .. } | Change::Reached(_));
        shown.pods.change(change);
        if some_gone {
            shown.namespaces.keep_those_of(&shown.pods);
        }
        if is_news {
            self.show(Offer::News);
            self.notes.changed();
            // The addresses of a deleted pod may be leaked.
            self.look_soon();
        }
    }
}

/// Whether a watch is established after this step. A list that has begun changes nothing until it is answered.
fn gets_through<T>(step: &Step<T>, before: bool) -> bool {
    match step {
        Step::Trouble => false,
        Step::Change(Change::Restarted { .. }) => before,
        Step::Change(_) | Step::Recovered => true,
    }
}

/// Handles a step of the watch of one object. `listed`: whether the list under way has shown the object.
fn take_in<T>(step: Step<T>, listed: &mut bool) -> Option<Told<T>> {
    let Step::Change(change) = step else {
        return None;
    };
    match change {
        Change::Restarted { .. } => {
            *listed = false;
            None
        }
        Change::Applied(object) => {
            *listed = true;
            Some(Told::There(object))
        }
        Change::Listed => (!*listed).then_some(Told::Absent),
        Change::Deleted(_) => Some(Told::Absent),
        Change::Reached(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_object_is_absent_when_a_list_does_not_show_it() {
        let mut listed = false;
        let mut step = |change| take_in(Step::Change(change), &mut listed);
        let asked = Duration::ZERO;
        assert!(step(Change::Restarted { asked }).is_none());
        assert!(matches!(step(Change::Listed), Some(Told::Absent)));
        assert!(matches!(step(Change::Applied(1)), Some(Told::There(1))));
        assert!(matches!(step(Change::Deleted(1)), Some(Told::Absent)));
        assert!(step(Change::Restarted { asked }).is_none());
        assert!(matches!(step(Change::Applied(2)), Some(Told::There(2))));
        assert!(step(Change::Listed).is_none(), "it was shown");
        assert!(take_in(Step::<u8>::Trouble, &mut listed).is_none());
    }

    #[test]
    fn a_list_that_begins_is_no_sign_that_a_watch_gets_through() {
        let begins = Step::<u8>::Change(Change::Restarted {
            asked: Duration::ZERO,
        });
        assert!(!gets_through(&Step::<u8>::Trouble, true));
        assert!(!gets_through(&begins, false) && gets_through(&begins, true));
        assert!(gets_through(&Step::Change(Change::Applied(1)), false));
        assert!(gets_through(&Step::<u8>::Recovered, false));
    }
}
