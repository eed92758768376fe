//! Requests of the CNI plugin to the agent, and what the plugin does if the agent does not answer.
//!
//! The rules are those of the real plugin. An agent that sends no greeting within a second counts as hung. A request
//! without an answer after three quarters of the plugin's timeout counts as lost. In both cases the plugin works on the
//! store's file itself, unless another process has the file open.

use std::sync::Arc;
use std::time::Duration;

use cadastre_agent::service::adding::{AddStep, begin};
use cadastre_agent::service::is_news;
use cadastre_node::store_thread::{CallTimes, StoreRequest};
use cadastre_node::{AddressLedger, Op, OpError, OpErrorKind, OpOutcome, StoreError};

use super::kubelet::KubeletAct;
use super::process::{Out, ProcessAct, Waiting};
use super::store::{open, set_fate};
use crate::checks::Verdict;
use crate::clock::{MS, SECOND, Time};
use crate::memory_disk::Fate;
use crate::run::{Due, Sim};

/// The total time for which the plugin tries to get an answer.
const TIMEOUT: Time = 10 * SECOND;
/// How long the plugin waits for the agent's greeting.
const AWAKE: Time = SECOND;
/// How long the plugin waits for the lock of the store's file before it tries to reach the agent again.
const TURN: Time = 500 * MS;
/// How long an ADD waits for a block.
const ADD_WAIT: Duration = Duration::from_secs(5);

pub struct Call {
    pub op: Op,
    /// The time on the host's clock at which the plugin was started.
    asked: Duration,
    /// The time on the host's clock until which the plugin accepts the agent's answer.
    agents: Duration,
    /// The virtual time at which the plugin gives up.
    end: Time,
    /// `Some` only while the plugin waits for the agent.
    listening: Option<Arc<()>>,
}

impl Call {
    /// Stops waiting for the agent; returns whether the plugin was waiting.
    pub(super) fn stop_listening(&mut self) -> bool {
        self.listening.take().is_some()
    }
}

impl Sim {
    pub(super) fn call_plugin(&mut self, id: usize, op: Op) {
        let asked = self.host_now(id).since_boot;
        let end = self.now + TIMEOUT;
        let host = self.host_mut(id);
        let number = host.number();
        let call = Call {
            op,
            asked,
            agents: asked + Duration::from_micros(TIMEOUT / 4 * 3),
            end,
            listening: None,
        };
        host.calls.insert(number, call);
        self.look_for_agent(id, number);
    }

    /// Connects the plugin to the agent. If no agent runs, or the agent is paused, the plugin will work on the store
    /// itself.
    pub(super) fn look_for_agent(&mut self, id: usize, number: u64) {
        let is_paused = self.machines.hosts[id].paused_until > self.now;
        let lag = self.rng.stretch(MS / 10, 5 * MS);
        let Some(call) = self.host(id).calls.get(&number) else {
            return;
        };
        let agents = call.agents;
        let until = self.host_until(id, agents);
        let host = self.host_mut(id);
        let is_there = host.process.is_some();
        if is_there && !is_paused && until > 0 {
            if let Some(call) = host.calls.get_mut(&number) {
                call.listening = Some(Arc::default());
            }
            self.process_due(id, lag, ProcessAct::Request(number));
            self.kubelet_due(id, until, KubeletAct::Patience(number));
        } else {
            let lag = if is_there { AWAKE } else { lag };
            self.kubelet_due(id, lag, KubeletAct::Alone(number));
        }
    }

    pub(super) fn plugin_asks(&mut self, id: usize, number: u64) {
        let now = self.host_now(id).since_boot;
        let host = self.host_mut(id);
        let Some(call) = host.calls.get(&number) else {
            return;
        };
        if call.listening.is_none() {
            return;
        }
        let (op, deadline) = (call.op.clone(), call.agents);
        let Some(process) = &mut host.process else {
            return;
        };
        match op {
            Op::Add(add) => {
                let (shown, desk) = (&process.shown, &mut process.desk);
                let step = begin(add, deadline, ADD_WAIT, shown, desk, now);
                self.step_add(id, number, step);
            }
            Op::Del(attachment) => {
                process.desk.pending_adds.remove(&attachment);
                self.ask_store(id, number, Op::Del(attachment));
            }
            other => self.ask_store(id, number, other),
        }
    }

    /// Queues a plugin's request for the store thread.
    fn ask_store(&mut self, id: usize, number: u64, op: Op) {
        let host = self.host_mut(id);
        let Some(call) = host.calls.get(&number) else {
            return;
        };
        let Some(process) = &mut host.process else {
            return;
        };
        let (asked, deadline) = (call.asked, call.agents);
        let listening = call
            .listening
            .as_ref()
            .map(Arc::downgrade)
            .unwrap_or_default();
        if let Err(why) = &process.worker {
            let refusal = refused(why);
            self.store_answers(id, number, Err(refusal));
            return;
        }
        let out = Arc::clone(&process.out);
        let reply = Box::new(move |result| {
            out.lock().unwrap().push(Out::Plugin(number, result));
        });
        let call = CallTimes::at(asked, deadline);
        let call = call.while_waited_for(move || listening.strong_count() > 0);
        self.queue_store(id, StoreRequest::op(op, call, reply));
    }

    pub(super) fn store_answers(
        &mut self,
        id: usize,
        number: u64,
        result: Result<OpOutcome, OpError>,
    ) {
        let now = self.host_now(id).since_boot;
        let host = self.host_mut(id);
        let Some(process) = &mut host.process else {
            return;
        };
        if let Err(refusal) = &result
            && refusal.why == OpErrorKind::Store
        {
            process.trouble = Some(refusal.text.clone());
        }
        if let Some(Waiting::Store(asked)) = process.adds.remove(&number) {
            let (shown, desk) = (&process.shown, &mut process.desk);
            let step = asked.answered(result, shown, desk, now);
            self.step_add(id, number, step);
            return;
        }
        let deleted = host.calls.get(&number).and_then(|call| match &call.op {
            Op::Del(attachment) => Some(attachment.clone()),
            _ => None,
        });
        self.answer_plugin(id, number, result);
        if let Some(attachment) = deleted {
            let is_of =
                |call: &Call| matches!(&call.op, Op::Add(add) if add.attachment == attachment);
            let calls = self.host(id).calls.iter();
            let calls = calls.filter(|(_, call)| is_of(call));
            let same: Vec<u64> = calls.map(|(number, _)| *number).collect();
            self.wake_adds(id, |number, it| {
                matches!(it, Waiting::Block(_)) && same.contains(&number)
            });
        }
    }

    /// Retries the pending ADDs for which `which` returns true.
    pub(super) fn wake_adds(&mut self, id: usize, which: impl Fn(u64, &Waiting) -> bool) {
        let process = self.host(id).process.as_ref();
        let adds = process.into_iter().flat_map(|process| &process.adds);
        let adds = adds.filter(|(number, it)| which(**number, it));
        let adds: Vec<u64> = adds.map(|(number, _)| *number).collect();
        for number in adds {
            self.wake_add(id, number, true);
        }
    }

    /// Continues an ADD if something that it waits for has changed (`is_news`) or its waiting time is over.
    pub(super) fn wake_add(&mut self, id: usize, number: u64, is_news: bool) {
        let now = self.host_now(id).since_boot;
        let process = self.process(id);
        let Some(process) = process else { return };
        let waits = |it: &Waiting| match it {
            Waiting::Store(_) | Waiting::Probe(_) => true,
            Waiting::Pod(pod) => !is_news && now < pod.until(),
            Waiting::Block(block) => !is_news && now < block.until(),
        };
        if process.adds.get(&number).is_none_or(waits) {
            return;
        }
        let (shown, desk) = (&process.shown, &mut process.desk);
        let step = match process.adds.remove(&number) {
            Some(Waiting::Pod(pod)) => pod.go(shown, desk, now),
            Some(Waiting::Block(block)) => block.go(is_news, desk, now),
            Some(Waiting::Store(_) | Waiting::Probe(_)) | None => return,
        };
        self.step_add(id, number, step);
    }

    fn step_add(&mut self, id: usize, number: u64, step: AddStep) {
        let process = self.process(id);
        let Some(process) = process else { return };
        let (waiting, until) = match step {
            AddStep::Done(result) => return self.answer_plugin(id, number, result),
            AddStep::Ask(add, asked) => {
                process.adds.insert(number, Waiting::Store(asked));
                return self.ask_store(id, number, Op::Add(*add));
            }
            AddStep::Probe(add, probing) => {
                process.adds.insert(number, Waiting::Probe(probing));
                let out = Arc::clone(&process.out);
                let work = move |it: &mut AddressLedger<'_>| it.to_probe(&add);
                let request = StoreRequest::work(None, work, move |targets: Result<_, _>| {
                    let targets = targets.map_err(|error: Arc<StoreError>| error.to_string());
                    out.lock().unwrap().push(Out::ToProbe(number, targets));
                });
                return self.queue_store(id, request);
            }
            AddStep::ForPod(pod) => {
                let until = pod.until();
                (Waiting::Pod(pod), until)
            }
            AddStep::ForBlock(block) => {
                let until = block.until();
                (Waiting::Block(block), until)
            }
        };
        process.adds.insert(number, waiting);
        let delay = self.host_until(id, until);
        self.process_due(id, delay, ProcessAct::Woken(number));
    }

    /// Continues an ADD whose addresses were probed.
    pub(super) fn add_probed(&mut self, id: usize, number: u64, probed: Result<(), String>) {
        let Some(process) = self.process(id) else {
            return;
        };
        if let Some(Waiting::Probe(probing)) = process.adds.remove(&number) {
            self.step_add(id, number, probing.probed(probed));
        }
    }

    fn answer_plugin(&mut self, id: usize, number: u64, result: Result<OpOutcome, OpError>) {
        let lag = self.rng.stretch(MS / 10, 5 * MS);
        let host = self.host_mut(id);
        if let Some(process) = &mut host.process {
            process.desk.is_changed |= is_news(true, &result);
        }
        if host
            .calls
            .get(&number)
            .is_some_and(|call| call.listening.is_some())
        {
            self.kubelet_due(id, lag, KubeletAct::Answered(number, Box::new(result)));
        }
    }

    /// Handles the end of the agent's process. All connections end, and plugins that waited for the agent work on the
    /// store themselves.
    pub(super) fn hang_up_plugins(&mut self, id: usize) {
        let host = self.host_mut(id);
        let mut alone = Vec::new();
        for (number, call) in &mut host.calls {
            if call.listening.take().is_some() {
                alone.push(*number);
            }
        }
        for number in alone {
            let lag = self.rng.stretch(MS / 10, 20 * MS);
            self.kubelet_due(id, lag, KubeletAct::Alone(number));
        }
    }

    pub(super) fn plugin_gives_up_on_agent(&mut self, id: usize, number: u64) {
        let host = self.host_mut(id);
        let call = host.calls.get_mut(&number);
        if call.is_some_and(|call| call.listening.take().is_some()) {
            if let Some(process) = &mut host.process {
                process.adds.remove(&number);
            }
            self.kubelet_due(id, 0, KubeletAct::Alone(number));
        }
    }

    /// Lets the plugin work on the store's file itself. While the agent has the file open, the plugin retries.
    pub(super) fn plugin_alone(&mut self, id: usize, number: u64) -> Verdict {
        let now = self.host_now(id);
        let virtual_now = self.now;
        let at = self.rng.below(12);
        let fate = self.host(id).disk_trouble.fate(virtual_now, at);
        let host = self.host_mut(id);
        let Some(call) = host.calls.get(&number) else {
            return Ok(());
        };
        if call.listening.is_some() {
            return Ok(());
        }
        let process = host.process.as_ref();
        let is_taken = process.is_some_and(|it| matches!(&it.worker, Ok(it) if it.has_file()));
        if is_taken {
            if virtual_now + TURN < call.end {
                self.kubelet_due(id, TURN, KubeletAct::Look(number));
                return Ok(());
            }
            let refusal = refused("the agent hangs, and has the file");
            return self.answered(id, number, Err(refusal));
        }
        let (op, asked) = (call.op.clone(), call.asked);
        set_fate(&host.slot, fate);
        let done = open(&host.slot)
            .and_then(|mut store| store.transact_ops(&now, |ledger| ledger.run_asked(&op, asked)));
        set_fate(&host.slot, Fate::Lasts);
        self.log_host(id, || format!("a plugin works alone: {}", outline(&op)));
        let result = match done {
            Ok(result) => result,
            Err(StoreError::Missing { .. }) if matches!(op, Op::Del(_)) => Ok(OpOutcome::Done),
            Err(error) => Err(error.refusal()),
        };
        self.mirror(id)?;
        self.answered(id, number, result)
    }

    pub(super) fn kubelet_due(&mut self, id: usize, delay: Time, act: KubeletAct) {
        let boot = self.host(id).boot;
        self.after(delay, Due::Kubelet(id, boot, Box::new(act)));
    }
}

/// Returns the error of a request for which the store's file cannot be opened.
fn refused(why: &str) -> OpError {
    OpError {
        why: OpErrorKind::Busy,
        text: why.to_owned(),
    }
}

pub(super) fn outline(op: &Op) -> String {
    match op {
        Op::Add(add) => format!("ADD {}", add.attachment.container_id),
        Op::Del(attachment) => format!("DEL {}", attachment.container_id),
        other => format!("{other:?}"),
    }
}
