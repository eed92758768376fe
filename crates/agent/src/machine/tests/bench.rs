//! A bench for tests, which consists of the state machine and an environment that answers its questions.

use serde_json::Value;

use super::*;
use crate::namespaces::Namespace;
use crate::publish::WriteOutcome;
use crate::snapshot::testing::{block, snapshot};
use cadastre_core::node_allocation::Block;
use cadastre_node::BlockCount;

/// The UID of the Node in all tests.
pub(super) const NODE: &str = "node";

pub(crate) struct Bench {
    pub machine: AgentMachine,
    pub now: Now,
    pub serving: ServiceView,
    /// The content of the store
    pub snapshot: Snapshot,
    /// The answer of the runtime
    pub sandboxes: Result<Vec<Sandbox>, String>,
    /// The report that the machine gets after each write of the conflist and the other files of the node
    pub files: FilesReported,
    /// The question that has no answer yet
    pub open: Option<StoreQuestion>,
    /// The effects that published something since the last call of [`Bench::published`]
    pub published: Vec<&'static str>,
}

impl Bench {
    /// Returns a bench whose watches have shown nothing yet.
    pub(crate) fn blank() -> Self {
        let now = Now {
            boot: "boot".to_owned(),
            since_boot: Duration::from_secs(1000),
            wall_ms: 1_800_000_000_000,
        };
        let settings = MachineSettings {
            node: "n1".to_owned(),
            publish_interval: Duration::from_secs(30),
            addresses_interval: Duration::from_secs(300),
            leak_grace: Duration::from_secs(60),
            masquerade: false,
            announces: false,
            cni_conf: Some("/net.d/05-cadastre.conflist".into()),
            network: Some("net".to_owned()),
        };
        Self {
            machine: AgentMachine::new(settings, 7, &now),
            now,
            serving: ServiceView::default(),
            snapshot: Snapshot::default(),
            sandboxes: Ok(Vec::new()),
            files: FilesReported {
                network_owner: Some(PodNetworkOwner::First),
                ..FilesReported::default()
            },
            open: None,
            published: Vec::new(),
        }
    }

    /// Returns a bench whose machine has seen all objects and has not acted yet. The NodeSubnet has version 1.
    pub(super) fn seen(spec: Value) -> Self {
        let mut bench = Self::blank();
        bench.show_all(spec);
        bench
    }

    /// Returns a bench whose machine has handled all objects and has nothing left to do.
    pub(super) fn idle(spec: Value) -> Self {
        let mut bench = Self::seen(spec);
        bench.run();
        if bench.machine.publisher.is_writing() {
            bench.on(AgentEvent::Written(WriteOutcome::Failed));
        }
        bench.published();
        bench
    }

    pub(crate) fn show_all(&mut self, spec: Value) {
        self.node();
        self.subnet(1, spec);
        self.on(AgentEvent::Addresses(Change(Listed)));
        self.on(AgentEvent::Pod(Change(Listed)));
    }

    pub(super) fn node(&mut self) {
        self.on(AgentEvent::Node(Change(Applied(NODE.to_owned()))));
    }

    /// Reports a NodeSubnet with this version and spec to the machine, as its watch does.
    pub(super) fn subnet(&mut self, version: u64, spec: Value) {
        let seen = subnet(version, spec);
        self.on(AgentEvent::Subnet(Change(Applied(seen))));
    }

    pub(super) fn pod(&mut self, uid: &str) {
        self.on(AgentEvent::Pod(Change(Applied(pod(uid, &[], &[])))));
    }

    pub(super) fn on(&mut self, event: AgentEvent) {
        self.machine.on(event, &self.now);
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now.since_boot += time;
        self.now.wall_ms += i64::try_from(time.as_millis()).unwrap();
    }

    /// Runs one turn. If the machine asks a question, the question is not answered.
    pub(super) fn turn(&mut self) -> Vec<AgentEffect> {
        let mut effects = Vec::new();
        let serving = self.serving.clone();
        let wake = self.machine.turn(serving, &self.now, &mut effects);
        assert!(
            wake > self.now.since_boot || self.machine.in_flight.is_none(),
            "it spins while it waits"
        );
        for effect in &effects {
            match effect {
                AgentEffect::Ask(question) => {
                    let before = self.open.replace(question.clone());
                    assert_eq!(before, None, "two questions in flight");
                }
                other => self.published.extend(published(other)),
            }
        }
        effects
    }

    /// Answers the open question, and runs a turn.
    pub(super) fn answer(&mut self, answer: StoreAnswer) -> Vec<AgentEffect> {
        assert!(self.open.take().is_some(), "nothing was asked");
        self.on(AgentEvent::Answer(answer));
        self.turn()
    }

    /// Runs turns and answers questions. Stops at a question for which `stop` returns true, or when no question comes
    /// any more. Writes to the API stay unanswered.
    pub(crate) fn run_until(&mut self, stop: impl Fn(&StoreQuestion) -> bool) -> Vec<AgentEffect> {
        let mut all = Vec::new();
        let mut effects = if self.open.is_some() {
            Vec::new()
        } else {
            self.turn()
        };
        for _ in 0..100 {
            let mut is_news = false;
            for effect in &effects {
                let answer = match effect {
                    AgentEffect::WriteFiles { .. } => AgentEvent::Files(self.files.clone()),
                    AgentEffect::Masquerade { .. } => AgentEvent::Masqueraded(None),
                    _ => continue,
                };
                self.on(answer);
                is_news = true;
            }
            all.append(&mut effects);
            if let Some(question) = self.open.clone() {
                if stop(&question) {
                    return all;
                }
                let answer = self.answer_to(question);
                effects = self.answer(answer);
            } else if is_news {
                effects = self.turn();
            } else {
                return all;
            }
        }
        panic!("there are always further effects: {all:#?}")
    }

    pub(super) fn run(&mut self) -> Vec<AgentEffect> {
        self.run_until(|_| false)
    }

    /// Runs until a question of this kind is open.
    pub(crate) fn run_to(&mut self, kind: &str) -> Vec<AgentEffect> {
        let effects = self.run_until(|question| name(question) == kind);
        let is = self.open.as_ref().map(name);
        assert_eq!(is, Some(kind), "never asked: {effects:#?}");
        effects
    }

    /// Runs until the machine writes files. That write stays unanswered.
    pub(crate) fn run_until_files(&mut self) -> Vec<AgentEffect> {
        let mut all = self.turn();
        while let Some(question) = self.open.clone() {
            let answer = self.answer_to(question);
            all.extend(self.answer(answer));
        }
        let is_last = |it: &AgentEffect| matches!(it, AgentEffect::WriteFiles { .. });
        assert!(all.iter().any(is_last), "{all:#?}");
        all
    }

    /// Answers the request for the namespace `default`, in which all pods are.
    pub(crate) fn answer_namespace(&mut self) {
        let answer = Some(Namespace::default());
        self.on(AgentEvent::Namespace("default".to_owned(), answer));
    }

    /// Returns the answer that an environment without failures gives to a question.
    pub(crate) fn answer_to(&mut self, question: StoreQuestion) -> StoreAnswer {
        match question {
            StoreQuestion::Open => StoreAnswer::Opened(StoreFound::Open),
            StoreQuestion::Close(_) => StoreAnswer::Closed,
            StoreQuestion::Make {
                holding,
                has_addresses_outside,
                ..
            } => {
                self.hold(&holding);
                self.snapshot.has_addresses_outside = has_addresses_outside;
                StoreAnswer::Made(Ok(0))
            }
            StoreQuestion::Look => StoreAnswer::Looked(Ok(self.looked())),
            StoreQuestion::Transact(Transaction::Hold { holding, .. }) => {
                self.hold(&holding);
                StoreAnswer::Held
            }
            StoreQuestion::Transact(Transaction::Restrict(_)) => StoreAnswer::Restricted,
            StoreQuestion::Transact(Transaction::Release(cidr, _)) => {
                self.snapshot.blocks.retain(|it| it.cidr != cidr);
                StoreAnswer::Released(true)
            }
            StoreQuestion::Transact(Transaction::Withdraw) => StoreAnswer::Withdrawn(false),
            StoreQuestion::Transact(Transaction::EndConflicts(ended)) => {
                let conflicts = &mut self.snapshot.conflicts;
                conflicts.retain(|it| !ended.contains(&(it.address, it.since_ms)));
                StoreAnswer::ConflictsEnded(true)
            }
            StoreQuestion::Free(attachment) => {
                let records = &mut self.snapshot.attachments;
                records.retain(|it| it.attachment != attachment);
                StoreAnswer::Freed(Ok(()))
            }
            StoreQuestion::Transact(Transaction::ReadNotes) => StoreAnswer::Notes(Vec::new()),
            StoreQuestion::Transact(Transaction::Note(..)) => StoreAnswer::Noted,
            StoreQuestion::Sandboxes => StoreAnswer::Sandboxes(self.sandboxes.clone()),
        }
    }

    pub(super) fn looked(&self) -> LeakScan {
        LeakScan {
            snapshot: self.snapshot.clone(),
            gone: BTreeSet::new(),
        }
    }

    fn hold(&mut self, holding: &NodeAllocation) {
        let block = |it: &Block| block(&it.cidr.to_string(), &it.pool, 0, 0, 60);
        let mut blocks: Vec<BlockCount> = holding.blocks.iter().map(block).collect();
        for (block, held) in blocks.iter_mut().zip(&holding.blocks) {
            block.uid.clone_from(&held.uid);
        }
        self.snapshot = Snapshot {
            node_uid: Some(holding.node_uid.clone()),
            attachments: mem::take(&mut self.snapshot.attachments),
            has_addresses_outside: self.snapshot.has_addresses_outside,
            ..snapshot(&holding.pools, &blocks)
        };
    }

    /// Returns what was published since the last call.
    pub(super) fn published(&mut self) -> Vec<&'static str> {
        mem::take(&mut self.published)
    }
}

/// Returns a NodeSubnet with this version and spec.
pub(super) fn subnet(version: u64, mut spec: Value) -> SubnetSeen {
    spec["nodeUID"] = json!(NODE);
    SubnetSeen {
        uid: "subnet".to_owned(),
        version: version.to_string(),
        spec: serde_json::from_value(spec).map_err(|it: serde_json::Error| it.to_string()),
        status: cadastre_api::NodeSubnetStatus::default(),
        named: BTreeSet::new(),
        container_gone: BTreeSet::new(),
        conflict_over: BTreeSet::new(),
    }
}

/// Returns a spec with blocks of the pool `p`.
pub(super) fn blocks(blocks: &[&str]) -> Value {
    let block = |cidr: &&str| json!({"cidr": cidr, "uid": format!("uid-{cidr}"), "pool": "p"});
    let blocks: Vec<Value> = blocks.iter().map(block).collect();
    let pool = json!({
        "name": "p", "ipv4": {"cidrs": ["10.0.0.0/16"]}, "warm": {"low": 3, "high": 100},
    });
    json!({"blocks": blocks, "pools": [pool]})
}

/// Returns a spec with podCIDRs.
pub(super) fn pod_cidrs(cidrs: &[&str]) -> Value {
    let cidrs: Vec<Value> = cidrs.iter().map(|it| json!({"cidr": it})).collect();
    json!({"podCIDRs": cidrs})
}

/// Returns a name for an effect that publishes something; `None` for other effects.
fn published(effect: &AgentEffect) -> Option<&'static str> {
    match effect {
        AgentEffect::WriteStatus { .. } => Some("status"),
        AgentEffect::WriteList { .. } => Some("list"),
        AgentEffect::WriteFiles { .. } => Some("files"),
        AgentEffect::Masquerade { .. } => Some("masquerade"),
        AgentEffect::Ready(true, _) => Some("ready"),
        AgentEffect::Ready(false, _) => Some("not ready"),
        _ => None,
    }
}

/// Returns the name by which the tests refer to questions of this kind.
pub(super) fn name(question: &StoreQuestion) -> &'static str {
    match question {
        StoreQuestion::Open => "open",
        StoreQuestion::Close(_) => "close",
        StoreQuestion::Make { .. } => "make",
        StoreQuestion::Look => "look",
        StoreQuestion::Transact(Transaction::Hold { .. }) => "hold",
        StoreQuestion::Transact(Transaction::Restrict(_)) => "restrict",
        StoreQuestion::Transact(Transaction::Release(..)) => "release",
        StoreQuestion::Transact(Transaction::Withdraw) => "withdraw",
        StoreQuestion::Transact(Transaction::EndConflicts(_)) => "end conflicts",
        StoreQuestion::Free(_) => "free",
        StoreQuestion::Transact(Transaction::ReadNotes) => "read notes",
        StoreQuestion::Transact(Transaction::Note(..)) => "note",
        StoreQuestion::Sandboxes => "sandboxes",
    }
}

/// Returns the names of the kinds of questions among the effects, in order.
pub(super) fn asked(effects: &[AgentEffect]) -> Vec<&'static str> {
    let questions = effects.iter().filter_map(|it| match it {
        AgentEffect::Ask(question) => Some(name(question)),
        _ => None,
    });
    questions.collect()
}

/// Returns the resourceVersion that each write of the status among the effects requires.
pub(crate) fn target_versions(effects: &[AgentEffect]) -> Vec<&str> {
    let versions = effects.iter().filter_map(|it| match it {
        AgentEffect::WriteStatus { version, .. } => Some(version.as_str()),
        _ => None,
    });
    versions.collect()
}
