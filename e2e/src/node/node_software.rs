//! What assigns addresses to the pods of a machine: CNI plugins, their configuration, perhaps an agent.
//!
//! All of a node's software that a test can choose is installed here.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::daemon;

/// Files and a process of a machine, in addition to the reference plugins, which are always there.
#[derive(Clone, Debug, Default)]
pub struct NodeSide {
    /// Executables: their names in `/opt/cni/bin`, and the files that are copied there
    pub plugins: Vec<(String, PathBuf)>,
    /// Files of `/etc/cni`: name and text. Without one in `net.d` the node is not ready until the agent writes one
    pub configs: Vec<(String, String)>,
    /// The process that starts at each boot
    pub agent: Option<Agent>,
}

/// The agent's process.
#[derive(Clone, Debug)]
pub struct Agent {
    /// The program and its arguments. Its environment has `NODE_NAME` and `KUBECONFIG`.
    pub args: Vec<String>,
    /// Its user at the API server
    pub user: String,
}

impl NodeSide {
    /// The bridge plugin with host-local on a node's podCIDRs: what nodes use without Cadastre.
    pub fn host_local(pod_cidrs: &[String]) -> Self {
        let ranges = pod_cidrs.iter().map(|cidr| json!([{"subnet": cidr}]));
        let ranges: Vec<Value> = ranges.collect();
        let list = conflist(&json!({
            "type": "bridge", "bridge": "cni0", "isDefaultGateway": true,
            "ipam": {"type": "host-local", "ranges": ranges},
        }));
        Self {
            configs: vec![("net.d/10-pods.conflist".to_owned(), list)],
            ..Self::default()
        }
    }

    /// Our plugin and our agent, which writes the CNI configuration from the agent's built-in template of that name.
    pub fn shipped(template: &str, flags: &[&str], user: &str) -> Result<Self> {
        Ok(Self {
            plugins: vec![("cadastre-ipam".to_owned(), daemon::plugin()?)],
            configs: Vec::new(),
            agent: Some(Agent::cadastre(template, flags, user)?),
        })
    }

    /// Our plugin called by `main`, a main plugin's configuration without `ipam`, and our agent as `user` with
    /// additional `flags`. The agent writes the CNI configuration once the node has a range.
    pub fn cadastre(main: &Value, flags: &[&str], user: &str) -> Result<Self> {
        let mut main = main.clone();
        main["ipam"] = json!({"type": "cadastre-ipam"});
        Ok(Self {
            plugins: vec![("cadastre-ipam".to_owned(), daemon::plugin()?)],
            configs: vec![("template.json".to_owned(), conflist(&main))],
            agent: Some(Agent::cadastre("/etc/cni/template.json", flags, user)?),
        })
    }
}

impl Agent {
    fn cadastre(template: &str, flags: &[&str], user: &str) -> Result<Self> {
        let agent = daemon::binary()?.display().to_string();
        let fixed = [
            "agent",
            "--cri-socket",
            super::config::CRI,
            "--cni-conf",
            "/etc/cni/net.d/10-pods.conflist",
            "--cni-conf-template",
            template,
        ];
        let args = fixed.iter().chain(flags).map(ToString::to_string);
        Ok(Self {
            args: std::iter::once(agent).chain(args).collect(),
            user: user.to_owned(),
        })
    }
}

/// A conflist with one plugin, in a CNI version that has STATUS and GC.
fn conflist(plugin: &Value) -> String {
    json!({"cniVersion": "1.1.0", "name": "pods", "plugins": [plugin]}).to_string()
}

/// Replaces `old` by `new` in a machine's folder. Configurations are written after the plugins that they name.
pub(super) fn install(old: &NodeSide, new: &NodeSide, folder: &Path) -> Result<()> {
    for (name, from) in &new.plugins {
        let to = folder.join("opt/cni/bin").join(name);
        replace(&to, |path| fs::copy(from, path).map(|_| ()))?;
    }
    let configs = folder.join("cni");
    for (name, text) in &new.configs {
        replace(&configs.join(name), |path| fs::write(path, text))?;
    }
    for (name, _) in &old.configs {
        if new.configs.iter().all(|(it, _)| it != name) {
            fs::remove_file(configs.join(name))?;
        }
    }
    Ok(())
}

/// Replaces a file by renaming: containerd, which watches the folder, never sees half a file, and a running
/// executable stays intact.
fn replace(to: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    let temporary = to.with_extension("temp");
    write(&temporary)
        .and_then(|()| fs::rename(&temporary, to))
        .with_context(|| format!("cannot write {}", to.display()))
}
