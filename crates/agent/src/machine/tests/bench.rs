//! A test bench: a machine, together with an environment that answers the machine's questions.

use serde_json::{Value, json};

use super::*;
use crate::cri::Sandbox;
use crate::files::others::PodNetworkOwner;
use crate::namespaces::Namespace;
use crate::pods::Pod;
use crate::pods::testing::pod;
use crate::publish::WriteOutcome;
use cadastre_daemon::watch::ObjectEvent;
use cadastre_daemon::watch::WatchStep;
use cadastre_node::{AddressCounts, BlockCount, BlockState, PoolCount};

/// The UID of the Node.
pub(super) const NODE: &str = "node";

pub(crate) struct Bench {
    pub machine: AgentMachine,
    pub now: Now,
    pub serving: ServiceView,
    /// The content of the store
    pub snapshot: Snapshot,
    /// The answer of the runtime
    pub sandboxes: Result<Vec<Sandbox>, String>,
    /// The result of writing files
    pub files: FilesReported,
    /// The question that has no answer yet
    pub open: Option<StoreQuestion>,
    /// What was published since the last call of [`Bench::told`]
    pub on_their_way: Vec<&'static str>,
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
                standing: Some(PodNetworkOwner::First),
                ..FilesReported::default()
            },
            open: None,
            on_their_way: Vec::new(),
        }
    }

    /// Returns a bench that has seen all objects and has not acted yet. The NodeSubnet has version 1.
    pub(super) fn seen(spec: Value) -> Self {
        let mut bench = Self::blank();
        bench.show_all(spec);
        bench
    }

    /// Returns a bench that has handled all objects and has nothing left to do.
    pub(super) fn resting(spec: Value) -> Self {
        let mut bench = Self::seen(spec);
        bench.run();
        if bench.machine.publisher.is_writing() {
            bench.on(AgentEvent::Written(WriteOutcome::Failed));
        }
        bench.told();
        bench
    }

    pub(crate) fn show_all(&mut self, spec: Value) {
        let uid = NODE.to_owned();
        self.on(AgentEvent::Node(WatchStep::Change(ObjectEvent::Applied(
            NodeSeen { uid },
        ))));
        self.subnet(1, spec);
        self.on(AgentEvent::Addresses(WatchStep::Change(
            ObjectEvent::Listed,
        )));
        self.on(AgentEvent::Pod(WatchStep::Change(ObjectEvent::Listed)));
    }

    /// Reports a NodeSubnet with this version and spec to the machine, as the watch would.
    pub(super) fn subnet(&mut self, version: u64, spec: Value) {
        let seen = subnet(version, spec);
        self.on(AgentEvent::Subnet(WatchStep::Change(ObjectEvent::Applied(
            seen,
        ))));
    }

    pub(super) fn pod(&mut self, uid: &str) {
        let pod: Pod = pod(uid, &[], &[]);
        self.on(AgentEvent::Pod(WatchStep::Change(ObjectEvent::Applied(
            pod,
        ))));
    }

    pub(super) fn on(&mut self, event: AgentEvent) {
        self.machine.on(event, &self.now);
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now.since_boot += time;
        self.now.wall_ms += i64::try_from(time.as_millis()).unwrap();
    }

    /// Runs one turn. If the machine asks a question, the question stays open.
    pub(super) fn turn(&mut self) -> Vec<AgentEffect> {
        let mut effects = Vec::new();
        let serving = self.serving.clone();
        let wake = self.machine.turn(serving, &self.now, &mut effects);
        assert!(
            wake > self.now.since_boot || self.machine.asked.is_none(),
            "it spins while it waits"
        );
        for effect in &effects {
            match effect {
                AgentEffect::Ask(question) => {
                    let before = self.open.replace(question.clone());
                    assert_eq!(before, None, "two questions in flight");
                }
                other => self.on_their_way.extend(told(other)),
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

    /// Runs turns, and answers questions, until a question comes for which `stop` returns true, or no more comes.
    /// Writes to the API stay unanswered.
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
        panic!("it does not come to rest: {all:#?}")
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

    /// Runs until files must be written. That write stays unanswered.
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

    /// Answers the request for the namespace `default`, which all pods are in.
    pub(crate) fn answer_namespace(&mut self) {
        let answer = Some(Namespace::default());
        self.on(AgentEvent::Namespace("default".to_owned(), answer));
    }

    /// Returns the answer to a question in an environment in which nothing fails.
    pub(crate) fn answer_to(&mut self, question: StoreQuestion) -> StoreAnswer {
        match question {
            StoreQuestion::Open => StoreAnswer::Opened(StoreFound::Open),
            StoreQuestion::Close(_) => StoreAnswer::Closed,
            StoreQuestion::Make { holding, .. } => {
                self.hold(&holding);
                StoreAnswer::Made(Ok(0))
            }
            StoreQuestion::Look => StoreAnswer::Looked(Ok(self.looked())),
            StoreQuestion::Transact(Transaction::Hold { holding, .. }) => {
                self.hold(&holding);
                StoreAnswer::Held(Ok(()))
            }
            StoreQuestion::Transact(Transaction::Release(cidr, _)) => {
                self.snapshot.blocks.retain(|it| it.cidr != cidr);
                StoreAnswer::Released(Ok(true))
            }
            StoreQuestion::Free(attachment) => {
                let tenants = &mut self.snapshot.attachments;
                tenants.retain(|it| it.attachment != attachment);
                StoreAnswer::Freed(Ok(()))
            }
            StoreQuestion::Transact(Transaction::ReadNotes) => StoreAnswer::Notes(Ok(Vec::new())),
            StoreQuestion::Transact(Transaction::Note(..)) => StoreAnswer::Noted(Ok(())),
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
        let block = |it: &cadastre_core::node_allocation::Block| BlockCount {
            cidr: it.cidr,
            uid: it.uid.clone(),
            pool: it.pool.clone(),
            state: BlockState::Active,
            counts: AddressCounts {
                free: 60,
                ..AddressCounts::default()
            },
            room: 60,
        };
        let pool = |terms: &cadastre_core::node_allocation::PoolTerms| PoolCount {
            terms: terms.clone(),
            counts: cadastre_core::Dual::default(),
        };
        self.snapshot = Snapshot {
            node_uid: Some(holding.node_uid.clone()),
            blocks: holding.blocks.iter().map(block).collect(),
            pools: holding.pools.iter().map(pool).collect(),
            attachments: mem::take(&mut self.snapshot.attachments),
        };
    }

    /// Returns what was published since the last call.
    pub(super) fn told(&mut self) -> Vec<&'static str> {
        mem::take(&mut self.on_their_way)
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

/// Returns the name of what an effect publishes; `None` if it publishes nothing.
fn told(effect: &AgentEffect) -> Option<&'static str> {
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

/// Returns the name of a question's kind.
pub(super) fn name(question: &StoreQuestion) -> &'static str {
    match question {
        StoreQuestion::Open => "open",
        StoreQuestion::Close(_) => "close",
        StoreQuestion::Make { .. } => "make",
        StoreQuestion::Look => "look",
        StoreQuestion::Transact(Transaction::Hold { .. }) => "hold",
        StoreQuestion::Transact(Transaction::Release(..)) => "release",
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

/// Returns the resource versions that the status writes among the effects require.
pub(crate) fn written_onto(effects: &[AgentEffect]) -> Vec<&str> {
    let versions = effects.iter().filter_map(|it| match it {
        AgentEffect::WriteStatus { version, .. } => Some(version.as_str()),
        _ => None,
    });
    versions.collect()
}
