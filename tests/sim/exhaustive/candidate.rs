//! One run of a controller process: the shipped controller and elector, and their requests in flight.

use std::collections::BTreeMap;
use std::time::Duration;

use cadastre_controller::cluster::lease::{Elector, Leadership, LeaseAnswer, LeaseCall};
use cadastre_controller::cluster::request::{Rejection, RequestId, RequestOutcome};
use cadastre_controller::{Controller, ControllerEvent, ControllerSettings, Now, OutgoingRequest};

use super::super::api::Api;
use super::super::checks::{Violation, wrong};
use super::super::process::{Feeds, Watched, lease_settings, may_send};

/// If the controller and the elector take more steps than this at one moment, a loop spins.
const SPIN: u32 = 500;

#[derive(Clone, Debug)]
pub struct Candidate {
    pub controller: Controller,
    pub elector: Elector,
    pub feeds: Feeds,
    /// The leadership that was last passed to the controller
    observed: Option<Leadership>,
    is_lease_asked: bool,
    /// Whether the process has read the Lease. Before that, it starts no watch
    pub has_read_lease: bool,
    in_flight: BTreeMap<RequestId, OutgoingRequest>,
    /// Requests that wait because no write of the Lease has followed their decision yet
    awaiting_lease: Vec<OutgoingRequest>,
}

/// The requests that a process sends after an event.
#[derive(Default)]
pub struct Sent {
    pub requests: Vec<OutgoingRequest>,
    pub lease: Option<LeaseCall>,
}

impl Candidate {
    pub fn new(process: usize, incarnation: u32) -> Self {
        Candidate {
            controller: Controller::new(ControllerSettings::default()),
            elector: Elector::new(lease_settings(process, incarnation)),
            feeds: Feeds::default(),
            observed: None,
            is_lease_asked: false,
            has_read_lease: false,
            in_flight: BTreeMap::new(),
            awaiting_lease: Vec::new(),
        }
    }

    /// Calls the controller and the elector until they have nothing more to send.
    pub fn work(&mut self, now: Now) -> Result<Sent, Violation> {
        let mut sent = Sent::default();
        for _ in 0..SPIN {
            if !self.step(now, &mut sent) {
                return Ok(sent);
            }
        }
        let text = format!("a controller asks without end: {:?}", sent.requests.last());
        wrong("spin", text, None::<&str>).map(|()| sent)
    }

    /// Takes one step of the controller or the elector. Returns false if there was nothing to do.
    fn step(&mut self, now: Now, sent: &mut Sent) -> bool {
        let leadership = self.elector.leadership();
        if self.observed.as_ref() != Some(&leadership) {
            self.observed = Some(leadership.clone());
            self.controller
                .on(ControllerEvent::Leadership(leadership), now);
            let awaiting = std::mem::take(&mut self.awaiting_lease);
            for request in awaiting {
                self.send(request, now, sent);
            }
            return true;
        }
        if let Some(request) = self.controller.poll(now) {
            self.in_flight.insert(request.id, request.clone());
            self.send(request, now, sent);
            return true;
        }
        self.controller.take_reports();
        if let Some(wanted) = self.controller.take_wanted() {
            self.elector.want(wanted, now.mono);
            return true;
        }
        if !self.is_lease_asked
            && let Some(call) = self.elector.poll(now.mono)
        {
            self.is_lease_asked = true;
            sent.lease = Some(call);
            return true;
        }
        false
    }

    fn send(&mut self, request: OutgoingRequest, now: Now, sent: &mut Sent) {
        match may_send(&self.elector.leadership(), &request, now.mono) {
            Some(false) if request.request.is_write() => {
                self.in_flight.remove(&request.id);
                let outcome = RequestOutcome::Rejected(Rejection::NotSent);
                let answer = ControllerEvent::Answer(request.id, outcome);
                self.controller.on(answer, now);
            }
            None if request.request.is_write() => self.awaiting_lease.push(request),
            _ => sent.requests.push(request),
        }
    }

    pub fn answered(&mut self, id: RequestId, outcome: RequestOutcome, now: Now) {
        if self.in_flight.remove(&id).is_some() {
            self.controller
                .on(ControllerEvent::Answer(id, outcome), now);
        }
    }

    pub fn lease_answered(&mut self, answer: LeaseAnswer, now: Now) {
        self.is_lease_asked = false;
        self.has_read_lease |= !matches!(answer, LeaseAnswer::Unclear | LeaseAnswer::Failed);
        self.elector.answer(answer, now.mono);
    }

    /// Delivers all pending events of a watch to the controller.
    pub fn deliver(&mut self, kind: Watched, api: &Api, now: Now) {
        while self.feeds.of(kind).has_next(api) {
            let Some(event) = self.feeds.next(kind, api, now.mono) else {
                continue;
            };
            self.controller.on(event, now);
        }
    }

    pub fn leads(&self) -> bool {
        matches!(self.elector.leadership(), Leadership::Leading(_))
    }

    /// Whether the process leads, and knows the outcome of all its requests.
    pub fn is_settled(&self) -> bool {
        self.controller.is_allocating() && self.controller.is_settled() && self.in_flight.is_empty()
    }

    /// The first time after `after` at which the controller or the elector has to be called.
    pub fn wakes_at(&self, after: Duration) -> Option<Duration> {
        let times = [self.controller.wake_at(), self.elector.wake_at()];
        times.into_iter().flatten().filter(|at| *at > after).min()
    }
}
