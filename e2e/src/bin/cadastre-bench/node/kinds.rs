//! The programs that are compared: an empty process, host-local, and cadastre-ipam in its modes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use cadastre_core::Cidr;
use cadastre_core::node_allocation::{Block, NodeAllocation, PoolTerms};
use cadastre_e2e::assets::{self, Program};
use cadastre_e2e::daemon;
use cadastre_node::{Store, clock};
use serde_json::{Value, json};

use super::agents::Agent;

/// A CIDR large enough for the existing pods and for the concurrent ADDs.
const RANGE: &str = "10.1.0.0/22";

/// The name under which the CNI plugin is measured with an agent that has no other work.
pub const AGENT: &str = "cadastre-ipam, via the agent";

/// A measured program, with its arguments and input.
pub struct Kind {
    pub name: String,
    pub program: PathBuf,
    pub args: Vec<String>,
    /// The program's standard input: a CNI configuration, or empty
    pub config: String,
}

impl Kind {
    /// Returns all programs to compare. The first program is the empty process. The folder `memory` contains the store
    /// of the plugin that runs without an agent. No program has assigned an address before its first call.
    pub fn all(folder: &Path, memory: &Path, agent: &Agent, busy: &Agent) -> Result<Vec<Self>> {
        let plugin = daemon::plugin()?;
        let ours = |name: &str, ipam: Value| Self::plugin(name, plugin.clone(), &ipam);
        let ranges = |data: &str| {
            json!({
                "type": "host-local", "ranges": [[{"subnet": RANGE}]],
                "dataDir": folder.join(data),
            })
        };
        let alone = memory.join("alone/node.redb");
        fill(&alone)?;
        Ok(vec![
            floor()?,
            Self::plugin(
                "host-local",
                assets::find(Program::HostLocal)?,
                &ranges("theirs"),
            ),
            ours("cadastre-ipam, host-local's config", ranges("ours")),
            ours(AGENT, agent.ipam()),
            ours("cadastre-ipam, via an agent that publishes", busy.ipam()),
            ours(
                "cadastre-ipam, no agent",
                json!({
                    "type": "cadastre-ipam", "store": alone, "socket": folder.join("no.sock"),
                }),
            ),
        ])
    }

    fn plugin(name: &str, program: PathBuf, ipam: &Value) -> Self {
        let config = json!({"cniVersion": "1.0.0", "name": "pods", "type": "ptp", "ipam": ipam});
        Self {
            name: name.to_owned(),
            program,
            args: Vec::new(),
            config: config.to_string(),
        }
    }
}

/// Returns a static executable that does nothing. The measurement of this executable shows how long the start of a
/// process takes.
fn floor() -> Result<Kind> {
    let names = ["/bin/busybox", "/usr/bin/busybox", "/bin/true"];
    let program = names.map(PathBuf::from).into_iter().find(|it| it.is_file());
    let program = program.context("no busybox: apt-get install busybox-static")?;
    let busybox = program.ends_with("busybox");
    Ok(Kind {
        name: "a process that does nothing".to_owned(),
        args: busybox.then(|| "true".to_owned()).into_iter().collect(),
        program,
        config: String::new(),
    })
}

/// Creates a store with one block that covers the whole of [`RANGE`].
fn fill(path: &Path) -> Result<()> {
    let mut terms = PoolTerms::named("pods");
    terms.cooldown_seconds = 0;
    let holding = NodeAllocation {
        node_uid: "node".to_owned(),
        blocks: vec![Block {
            cidr: Cidr::parse_strict(RANGE)?,
            uid: "block".to_owned(),
            pool: "pods".to_owned(),
            draining: false,
            borrowed: false,
            reserved: Vec::new(),
            on_request: Vec::new(),
        }],
        pools: vec![terms],
        ..NodeAllocation::default()
    };
    Store::open(path, Duration::from_secs(1))?.set_allocation(&holding, &clock::now())?;
    Ok(())
}
