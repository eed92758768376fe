//! Limits how often a process may send requests. So no loop may spin, even if requests are rejected or unanswered, or
//! if watches deliver nothing.
//!
//! Four counts over a minute are limited: writes of an object that have no effect, reads of an object, all requests of
//! a process, and how often only the clock wakes the process. After a successful write of an object, or when a new
//! object has its name, the counts of the object start again.

use std::collections::{BTreeMap, VecDeque};

use cadastre_controller::cluster::names::NodeName;
use cadastre_controller::cluster::objects::Text;
use cadastre_controller::cluster::request::{ApiRequest, ObjectKind, Rejection, RequestOutcome};

use super::checks::{Verdict, wrong};
use super::clock::{SECOND, Time};
use super::describe::{name_of, of_request, verb};
use super::run::RunId;

const MINUTE: Time = 60 * SECOND;

/// The maximum number of ineffective writes of one kind, per object and minute.
const WRITES: usize = 16;
/// The maximum number of reads of one object in a minute without a successful write of the object.
const READS: usize = 40;
/// The maximum number of requests of one process in a minute.
const ALL: usize = 6_000;
/// The maximum number of times in a minute that a process is woken only by its clock.
const WAKES: usize = 2_400;

/// The times of the events in the last minute.
#[derive(Default)]
struct RecentEvents(VecDeque<Time>);

impl RecentEvents {
    /// Adds an event; returns the number of events in the last minute.
    fn add(&mut self, now: Time) -> usize {
        while self.0.front().is_some_and(|at| at + MINUTE <= now) {
            self.0.pop_front();
        }
        self.0.push_back(now);
        self.0.len()
    }
}

type Key = (RunId, String, Text);

/// The recent requests of each process.
#[derive(Default)]
pub struct Budget {
    /// How many times faster than true time clocks may run
    pace: usize,
    fruitless: BTreeMap<Key, RecentEvents>,
    all: BTreeMap<RunId, RecentEvents>,
    wakes: BTreeMap<RunId, RecentEvents>,
}

impl Budget {
    /// A budget for clocks that run at most `pace` times as fast as true time.
    pub fn of_pace(pace: usize) -> Self {
        Budget {
            pace,
            ..Budget::default()
        }
    }

    /// Counts an answered request, and checks the counts against the limits. `is_dropped` is true if the server has
    /// accepted the request and dropped the change.
    pub fn answered(
        &mut self,
        run_id: RunId,
        request: &ApiRequest,
        (outcome, is_dropped): (&RequestOutcome, bool),
        now: Time,
    ) -> Verdict {
        let all = self.all.entry(run_id).or_default().add(now);
        if all > ALL * self.pace {
            let text = format!("{run_id} asks {all} times in a minute");
            return wrong("budget", text, None::<&str>);
        }
        // A request that was not sent costs the server nothing, so it does not count against its object.
        if matches!(outcome, RequestOutcome::Rejected(Rejection::NotSent)) {
            return Ok(());
        }
        let Some(name) = object(request) else {
            return Ok(());
        };
        let fruitless = is_dropped
            || matches!(
                outcome,
                RequestOutcome::Rejected(_) | RequestOutcome::Indeterminate(_)
            );
        let write = request.is_write();
        if write && !fruitless {
            let kind = verb(request);
            let is_another = matches!(request, ApiRequest::Create(..) | ApiRequest::Delete(..));
            self.fruitless.retain(|(of, counted, about), _| {
                let is_it = *of == run_id && *about == name;
                !is_it || !is_another && !counted.is_empty() && *counted != kind
            });
            return Ok(());
        }
        let (kind, most) = if write {
            (verb(request), WRITES)
        } else {
            (String::new(), READS)
        };
        let row = self
            .fruitless
            .entry((run_id, kind, name.clone()))
            .or_default();
        let count = row.add(now);
        if count > most * self.pace {
            let text = format!(
                "{run_id} asks {count} times in a minute for what comes to nothing: {}",
                of_request(request)
            );
            return wrong("budget", text, name_of(request));
        }
        Ok(())
    }

    /// Handles the creation of a Node. Earlier reads of this name were about another Node, so they no longer count.
    pub fn born(&mut self, name: &NodeName) {
        let of_it: [Text; 2] = [
            format!("read of node {name}").into(),
            format!("pods of {name}").into(),
        ];
        self.fruitless.retain(|(_, _, key), _| !of_it.contains(key));
    }

    /// Counts that a process was woken only by its clock, and checks the count against the limit.
    pub fn woke(&mut self, run_id: RunId, now: Time) -> Verdict {
        let count = self.wakes.entry(run_id).or_default().add(now);
        if count > WAKES * self.pace {
            let text = format!("{run_id} wakes {count} times in a minute by its clock alone");
            return wrong("budget", text, None::<&str>);
        }
        Ok(())
    }
}

/// The key under which a request's object is counted. For writes of a Node this is the Node's UID, otherwise the kind
/// and the name.
fn object(request: &ApiRequest) -> Option<Text> {
    let of = |kind: &str, name: &str| Some(format!("{kind} {name}").into());
    match request {
        ApiRequest::AssignPodCidrs(a) => of("node", &a.uid),
        ApiRequest::TouchNode(touch) => of("node", &touch.uid),
        ApiRequest::SetTaints(change) => of("taints of node", &change.uid),
        ApiRequest::SetExhausted(change) => of("condition of node", &change.uid),
        ApiRequest::Read(ObjectKind::Node, name) => of("read of node", name),
        ApiRequest::ListPodsOf { node, .. } => of("pods of", node),
        _ => {
            let (kind, name) = request.about()?;
            of(kind.name(), name?)
        }
    }
}
