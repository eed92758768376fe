//! The file of a host's store: requests, content, and faults.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cadastre_agent::cri::Sandbox;
use cadastre_agent::ledger::look;
use cadastre_agent::machine::{
    AgentEvent, LeakScan, StoreAnswer, StoreFound, StoreQuestion, StoreTrouble,
};
use cadastre_controller::cluster::names::ObjectUid;
use cadastre_core::{Addr, Cidr};
use cadastre_node::store_thread::{self, CallTimes, StoreRequest};
use cadastre_node::{
    AddressLedger, BlockCount, BlockState, HoldingsFile, Now, Op, OpError, Snapshot, Store,
    StoreError,
};

use super::process::{Out, ProcessAct};
use super::{Held, Key, Slot};
use crate::checks::Verdict;
use crate::clock::{MS, SECOND, Time};
use crate::memory_disk::{Fate, FileFate, MemoryDisk};
use crate::run::Sim;

/// After this time without work, the agent closes the store's file.
const IDLE: Time = SECOND;
/// The maximum time that the release of a leak may take.
const FREE_LIMIT: Duration = Duration::from_secs(10);

const PATH: &str = "in memory";

/// The shortest pause between two writes of changed notes on pods, while the store thread has work.
const NOTES_PAUSE: Time = 3 * SECOND;

pub(super) fn open(slot: &Slot) -> Result<Store, StoreError> {
    let disk: Option<MemoryDisk> = slot.lock().unwrap().clone();
    match disk {
        Some(disk) => disk.open(),
        None => Err(StoreError::Missing { path: PATH.into() }),
    }
}

/// Sets which fault the store's disk has from now on.
pub(super) fn set_fate(slot: &Slot, fate: Fate) {
    if let Some(disk) = &*slot.lock().unwrap() {
        disk.set_fate(fate);
    }
}

/// Opens the store. If the host has rebooted since, creates the store from the holdings file. Returns whether the store
/// was created.
fn find(slot: &Slot, holdings: &HoldingsFile, fate: Fate, now: &Now) -> Result<bool, StoreError> {
    let opened = open(slot);
    if let Err(StoreError::Missing { .. }) = &opened
        && let Some(before) = holdings.before_reboot(now).unwrap()
    {
        let disk = MemoryDisk::default();
        disk.set_fate(fate);
        let store = disk.create()?;
        store
            .recording(holdings.clone())
            .transact(now, |ledger| ledger.restore(&before))?;
        disk.set_fate(Fate::Lasts);
        *slot.lock().unwrap() = Some(disk);
        return Ok(true);
    }
    opened?.recording(holdings.clone()).record_ranges(now)?;
    Ok(false)
}

fn trouble(error: &StoreError) -> StoreTrouble {
    StoreTrouble {
        is_lost: error.is_lost(),
        text: error.to_string(),
    }
}

impl Sim {
    pub(super) fn ask_question(&mut self, id: usize, question: StoreQuestion, lag: Time) {
        let now = self.host_now(id);
        let Some(process) = self.process(id) else {
            return;
        };
        let out = Arc::clone(&process.out);
        let put = move |answer| out.lock().unwrap().push(Out::Answer(answer));
        let request = match question {
            StoreQuestion::Open
            | StoreQuestion::Close(_)
            | StoreQuestion::Make { .. }
            | StoreQuestion::Sandboxes => {
                self.process_due(id, lag, ProcessAct::Do(Box::new(question)));
                return;
            }
            StoreQuestion::Look => {
                let had_trouble = process.trouble.is_some();
                let look = move |it: &mut AddressLedger<'_>| look(it, had_trouble);
                StoreRequest::work(None, look, move |result: Result<_, Arc<StoreError>>| {
                    let looked = result.map(|(snapshot, _)| LeakScan {
                        snapshot,
                        gone: BTreeSet::new(),
                    });
                    put(StoreAnswer::Looked(looked.map_err(|error| trouble(&error))));
                })
            }
            StoreQuestion::Free(attachment) => {
                let call = CallTimes::at(now.since_boot, now.since_boot + FREE_LIMIT);
                let reply = move |result: Result<_, OpError>| {
                    let freed = result.map(|_| ()).map_err(|refusal| refusal.to_string());
                    put(StoreAnswer::Freed(freed));
                };
                StoreRequest::op(Op::Del(attachment), call, Box::new(reply))
            }
            StoreQuestion::Transact(transaction) => transaction.request(move |result| {
                put(result.unwrap_or_else(|error| StoreAnswer::Failed(trouble(&error))));
            }),
        };
        self.queue_store(id, request);
    }

    /// Queues a request for the store thread.
    pub(super) fn queue_store(&mut self, id: usize, request: StoreRequest) {
        let lag = self.rng.stretch(MS / 10, 10 * MS);
        let process = self.process(id);
        let Some(process) = process else { return };
        process.queue.push(request);
        if process.queue.len() == 1 {
            self.process_due(id, lag, ProcessAct::Serve);
        }
    }

    /// Lets the store thread execute all waiting requests in one transaction.
    pub(super) fn serve_store(&mut self, id: usize) -> Verdict {
        let now = self.host_now(id);
        let (dies, at) = self.rng.chance_at(if self.has_faults { 60 } else { 0 }, 12);
        let fate = if dies {
            Fate::Dies(at)
        } else {
            self.host(id).disk_trouble.fate(self.now, at)
        };
        let file_fate = self.file_fate(id, dies);
        let virtual_now = self.now;
        let host = self.host_mut(id);
        let disk = host.disk();
        let Some(process) = &mut host.process else {
            return Ok(());
        };
        set_fate(&host.slot, fate);
        host.file.set_fate(file_fate);
        let queue = std::mem::take(&mut process.queue);
        let syncs = disk.as_ref().map_or(0, MemoryDisk::syncs);
        if let Ok(worker) = &mut process.worker {
            worker.serve(queue, || now.clone());
        } else {
            let what = "the store is not open";
            let mut worker = store_thread::StoreWorker::new(|| Err(StoreError::Busy { what }));
            worker.serve(queue, || now.clone());
        }
        process.worked += 1;
        if dies && let Some(disk) = &disk {
            // The process is killed during the transaction, so answers that the process has not sent are lost.
            host.file.set_fate(FileFate::Lasts);
            *host.slot.lock().unwrap() = Some(disk.after_kill());
            let out: Vec<Out> = std::mem::take(&mut *process.out.lock().unwrap());
            self.kill_process(id);
            for out in out {
                // A successful answer to a plugin was sent before the process was killed, so the plugin gets it.
                if let Out::Plugin(call, Ok(answer)) = out {
                    self.answered(id, call, Ok(answer))?;
                }
            }
            let back = self.absence();
            self.start_process_later(id, back);
            return self.mirror(id);
        }
        let out: Vec<Out> = std::mem::take(&mut *process.out.lock().unwrap());
        set_fate(&host.slot, Fate::Lasts);
        if process.notes_at <= virtual_now {
            self.record_notes(id, &now);
        }
        self.host(id).file.set_fate(FileFate::Lasts);
        self.close_when_idle(id);
        if disk.is_some_and(|disk| disk.syncs() != syncs) {
            self.mirror(id)?;
        }
        for out in out {
            match out {
                Out::Answer(answer) => {
                    if let StoreAnswer::Looked(looked) = &answer
                        && let Some(process) = self.process(id)
                    {
                        process.trouble = looked.as_ref().err().map(|it| it.text.clone());
                    }
                    let lag = self.rng.stretch(MS / 10, 5 * MS);
                    let event = Box::new(AgentEvent::Answer(answer));
                    self.process_due(id, lag, ProcessAct::Tell(event));
                }
                Out::Plugin(call, result) => self.store_answers(id, call, result),
                Out::ToProbe(call, targets) => match targets {
                    Ok(targets) if !targets.addresses.is_empty() => {
                        self.probe_host(id, Some(call), &targets);
                    }
                    other => self.add_probed(id, call, other.map(drop)),
                },
                Out::Probed(call, recorded) => {
                    let probed = recorded.map(|it| self.found_in_conflict(id, &it));
                    if let Some(call) = call {
                        self.add_probed(id, call, probed);
                    } else {
                        let event = Box::new(AgentEvent::Probed(probed));
                        self.process_due(id, MS / 10, ProcessAct::Tell(event));
                    }
                }
            }
        }
        Ok(())
    }

    /// Draws what happens to writes of the holdings file. `dies` says whether the process is killed.
    fn file_fate(&mut self, id: usize, dies: bool) -> FileFate {
        match if dies { self.rng.below(3) } else { 0 } {
            0 => self.host(id).disk_trouble.file_fate(self.now),
            1 => FileFate::Fails,
            _ => FileFate::FailsUnsynced,
        }
    }

    /// Writes changed notes on pods to the holdings file.
    pub(super) fn record_notes(&mut self, id: usize, now: &Now) {
        let fate = self.file_fate(id, false);
        let at = self.now + NOTES_PAUSE;
        let host = self.host_mut(id);
        host.file.set_fate(fate);
        if let Some(process) = &mut host.process
            && let Ok(worker) = &mut process.worker
        {
            process.notes_at = at;
            if let Some(draft) = worker.stale_holdings(now) {
                // The agent reports the problem, and another draft follows.
                _ = process.holdings.write(&draft);
            }
        }
        host.file.set_fate(FileFate::Lasts);
    }

    /// Schedules that the agent closes the store's file after [`IDLE`].
    pub(super) fn close_when_idle(&mut self, id: usize) {
        let process = self.process(id);
        if let Some(process) = process.filter(|it| !it.closing) {
            process.closing = true;
            let worked = process.worked;
            self.process_due(id, IDLE, ProcessAct::Idle(worked));
        }
    }

    /// Answers a question about the store's file or about the runtime.
    pub(super) fn do_question(&mut self, id: usize, question: StoreQuestion) -> Verdict {
        let now = self.host_now(id);
        let is_silent = self.has_faults && self.rng.chance(500);
        let at = self.rng.below(12);
        let fate = self.host(id).disk_trouble.fate(self.now, at);
        let file_fate = self.file_fate(id, false);
        let host = self.host_mut(id);
        let slot = Arc::clone(&host.slot);
        let Some(process) = &mut host.process else {
            return Ok(());
        };
        let holdings = process.holdings.clone();
        let worker = || {
            let (slot, holdings) = (Arc::clone(&slot), holdings.clone());
            store_thread::StoreWorker::new(move || Ok(open(&slot)?.recording(holdings.clone())))
        };
        set_fate(&slot, fate);
        host.file.set_fate(file_fate);
        let mut is_new = false;
        let answer = match question {
            StoreQuestion::Open => StoreAnswer::Opened(match find(&slot, &holdings, fate, &now) {
                Ok(is_made) => {
                    process.worker = Ok(worker());
                    is_new = is_made;
                    StoreFound::Open
                }
                Err(StoreError::Missing { .. }) => StoreFound::Nothing,
                Err(error @ StoreError::Damaged { .. }) => {
                    *slot.lock().unwrap() = None;
                    StoreFound::Damaged {
                        aside: Path::new(PATH).into(),
                        what: error.to_string(),
                    }
                }
                Err(error) => StoreFound::Unclear(error.to_string()),
            }),
            StoreQuestion::Close(why) => {
                process.worker = Err(why.to_owned());
                StoreAnswer::Closed
            }
            StoreQuestion::Make {
                holding,
                known,
                has_addresses_outside,
            } => {
                let disk = MemoryDisk::default();
                disk.set_fate(fate);
                let before = holdings.read().ok().flatten();
                let made = disk.create().and_then(|store| {
                    store.recording(holdings.clone()).transact(&now, |ledger| {
                        let before = before.as_ref();
                        ledger.rebuild(&holding, &known, has_addresses_outside, before)
                    })
                });
                if made.is_ok() {
                    *slot.lock().unwrap() = Some(disk);
                    process.worker = Ok(worker());
                    is_new = true;
                }
                let lost = made.map(|lost| lost.len());
                StoreAnswer::Made(lost.map_err(|error| error.to_string()))
            }
            StoreQuestion::Sandboxes if is_silent => {
                StoreAnswer::Sandboxes(Err("the runtime does not answer".to_owned()))
            }
            StoreQuestion::Sandboxes => {
                let all: Vec<Sandbox> = host.kubelet.sandboxes();
                StoreAnswer::Sandboxes(Ok(all))
            }
            other => unreachable!("{other:?} is the store thread's"),
        };
        if let Some(process) = self.process(id) {
            process.machine.on(AgentEvent::Answer(answer), &now);
        }
        set_fate(&slot, Fate::Lasts);
        self.host(id).file.set_fate(FileFate::Lasts);
        if !is_new {
            return Ok(());
        }
        self.log_host(id, || format!("agent {id} has a new store"));
        self.mirror(id)
    }

    pub fn contents(&mut self, id: usize) -> Option<Snapshot> {
        let now = self.host_now(id);
        let host = self.host_mut(id);
        let taken: Arc<Mutex<Option<Snapshot>>> = Arc::default();
        let out = Arc::clone(&taken);
        let look = |it: &mut AddressLedger<'_>| it.snapshot();
        let request = StoreRequest::work(None, look, move |result: Result<_, Arc<StoreError>>| {
            *out.lock().unwrap() = result.ok();
        });
        let request = request.without_disk();
        if let Some(Ok(worker)) = host.process.as_mut().map(|process| &mut process.worker) {
            worker.serve(vec![request], || now.clone());
        } else {
            let slot = Arc::clone(&host.slot);
            store_thread::StoreWorker::new(move || open(&slot))
                .serve(vec![request], || now.clone());
        }
        taken.lock().unwrap().take()
    }

    /// Copies the content of the store's file to the host's fields, and checks the content against the guarantees and
    /// against other hosts.
    pub fn mirror(&mut self, id: usize) -> Verdict {
        let Some(snapshot) = self.contents(id) else {
            return Ok(());
        };
        let live = self.machines.live_node(id, &self.api);
        let nodes = &self.machines.of_node;
        let agent = &mut self.machines.hosts[id];
        let node: ObjectUid = snapshot.node_uid.as_deref().unwrap_or_default().into();
        let before = std::mem::take(&mut agent.blocks);
        agent.cooling.clear();
        agent.withdrawn.clone_from(&snapshot.withdrawn);
        for block in &snapshot.blocks {
            // Ranges that are not blocks are skipped. These are podCIDRs, whose UID is that of a present or earlier
            // Node, and adopted ranges without a UID, which are not listed yet.
            if nodes.contains_key(&*block.uid) || block.uid.is_empty() {
                continue;
            }
            let key: Key = (block.cidr, block.uid.as_str().into());
            let listed = block.state.is_listed();
            // A block that is no longer listed stays a block of the Node for which it was listed.
            let old = before.get(&key).filter(|_| !listed);
            let held = Held {
                node: old.map_or(&node, |old| &old.node).clone(),
                listed,
                released: block.state == BlockState::Released,
            };
            agent.cooling.insert(key.clone(), block.counts.cooling);
            agent.blocks.insert(key, held);
        }
        let uid_of = |cidr: Cidr| {
            let mut blocks = snapshot.blocks.iter();
            let block = blocks.find(|it| it.cidr == cidr);
            block.map_or("", |it| it.uid.as_str()).into()
        };
        let mut given = std::mem::take(&mut agent.given);
        if std::mem::take(&mut agent.is_store_lost) {
            given.clear();
        }
        for entry in &snapshot.attachments {
            for given in &entry.given.addresses {
                let key = (given.block, uid_of(given.block));
                agent.given.insert(given.address, key);
            }
        }
        // After a reboot the addresses of all sandboxes are free since the power was lost.
        let now = agent.off_since.take().unwrap_or(self.now);
        let cooldown = |addr: &Addr, of: &Key| {
            let mut blocks = snapshot.blocks.iter();
            let block = blocks.find(|block| block.cidr == of.0);
            // Addresses of an earlier Node are quarantined, so they have no cooldown.
            let is_live = |it: &&BlockCount| it.state.is_listed() && live.as_ref() == Some(&node);
            let block = block.filter(is_live)?;
            let mut pools = snapshot.pools.iter().map(|pool| &pool.terms);
            let terms = pools.find(|terms| block.pool == terms.name)?;
            let until = now + u64::from(terms.cooldown_seconds) * SECOND;
            Some((*addr, (id, node.clone(), until)))
        };
        let freed = given.iter();
        let freed = freed.filter(|(addr, _)| !agent.given.contains_key(addr));
        let freed = freed.filter_map(|(addr, it)| cooldown(addr, it));
        self.checks.cooling.extend(freed);
        let known: BTreeSet<Addr> = given.keys().copied().collect();
        let agent = &mut self.machines.hosts[id];
        let uses = |held: &Held| held.listed && !held.released;
        let is_new = |(key, held): &(&Key, &Held)| {
            let was = before.get(*key);
            uses(held) && was.is_none_or(|was| !uses(was) || was.node != held.node)
        };
        let taken = agent.blocks.iter().filter(is_new);
        let taken: Vec<Key> = taken.map(|(key, _)| key.clone()).collect();
        let is_ended = |(key, held): &(&Key, &Held)| {
            let is = agent.blocks.get(*key);
            !held.released && is.is_none_or(|is| is.released)
        };
        let ended = before.iter().filter(is_ended);
        let ended: Vec<Key> = ended.map(|(key, _)| key.clone()).collect();
        for key in ended {
            self.log_host(id, || format!("agent {id} releases {} {}", key.0, key.1));
        }
        for key in taken {
            self.log_host(id, || format!("agent {id} takes over {} {}", key.0, key.1));
            self.judge(self.check_taken(id, &key))?;
        }
        let verdict = self.check_probed(id, &snapshot, &known);
        self.judge(verdict)?;
        let verdict = self.check_kept(id, &snapshot);
        self.judge(verdict)
    }
}
