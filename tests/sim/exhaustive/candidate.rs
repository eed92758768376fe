//! One run of a controller process: the shipped controller and elector, and their requests in flight.

use std::collections::BTreeMap;
use std::time::Duration;

use cadastre_controller::cluster::lease::{
    Elector, Leadership, LeaseAnswer, LeaseCall, LeaseRecord,
};
use cadastre_controller::cluster::request::{Rejection, RequestId, RequestOutcome};
use cadastre_controller::{Controller, ControllerEvent, ControllerSettings, Now, OutgoingRequest};

use super::super::checks::{Violation, wrong};
use super::super::process::{lease_settings, may_send};

/// If the controller and the elector take more steps than this at one moment, a loop spins.
const SPIN: u32 = 500;

#[derive(Clone, Debug)]
pub struct Candidate {
    controller: Controller,
    elector: Elector,
    /// The leadership that was last passed to the controller
    observed: Option<Leadership>,
    is_lease_asked: bool,
    /// Whether the process has read the Lease. Before that, it starts no watch
    pub has_read_lease: bool,
    in_flight: BTreeMap<RequestId, OutgoingRequest>,
    /// Requests that wait because no write of the Lease has followed their decision yet
    awaiting_lease: Vec<OutgoingRequest>,
}

/// What a process receives.
#[derive(Debug)]
pub enum Input {
    /// The process starts or resumes, or the time has come for which it has planned something.
    Time,
    Answer(RequestId, Box<RequestOutcome>),
    LeaseAnswer(LeaseAnswer),
    /// The Lease, from its watch.
    Lease(Box<LeaseRecord>),
    /// All pending events of a watch.
    Events(Vec<ControllerEvent>),
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
            observed: None,
            is_lease_asked: false,
            has_read_lease: false,
            in_flight: BTreeMap::new(),
            awaiting_lease: Vec::new(),
        }
    }

    /// Passes the input to the controller or the elector, and calls both until they have nothing more to send.
    pub fn receive(&mut self, input: Input, now: Now) -> Result<Sent, Violation> {
        match input {
            Input::Time => {}
            Input::Answer(id, outcome) => self.answered(id, *outcome, now),
            Input::LeaseAnswer(answer) => self.lease_answered(answer, now),
            Input::Lease(lease) => {
                self.elector.watch_applied(&lease, now.mono);
            }
            Input::Events(events) => {
                for event in events {
                    self.controller.on(event, now);
                }
            }
        }
        self.work(now)
    }

    fn work(&mut self, now: Now) -> Result<Sent, Violation> {
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

    fn answered(&mut self, id: RequestId, outcome: RequestOutcome, now: Now) {
        if self.in_flight.remove(&id).is_some() {
            self.controller
                .on(ControllerEvent::Answer(id, outcome), now);
        }
    }

    fn lease_answered(&mut self, answer: LeaseAnswer, now: Now) {
        self.is_lease_asked = false;
        self.has_read_lease |= !matches!(answer, LeaseAnswer::Unclear | LeaseAnswer::Failed);
        self.elector.answer(answer, now.mono);
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
