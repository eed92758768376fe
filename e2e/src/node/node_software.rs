//! The software that assigns addresses to the pods of a machine: CNI plugins, their configuration, and an agent if
//! there is one.
//!
//! A test chooses this software with a [`NodeSide`]. This module installs all of it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::daemon;

/// The files and the agent of a machine. The reference CNI plugins need not be listed, because every machine has them.
#[derive(Clone, Debug, Default)]
pub struct NodeSide {
    /// Executables: names in `/opt/cni/bin`, and the files that are copied there
    pub plugins: Vec<(String, PathBuf)>,
    /// Files of `/etc/cni`, as name and text. If none is in `net.d`, the node is not ready until the agent writes one
    pub configs: Vec<(String, String)>,
    /// The agent, which is started at each boot
    pub agent: Option<Agent>,
}

/// How the agent's process is started.
#[derive(Clone, Debug)]
pub struct Agent {
    /// The program and its arguments. The environment variables `NODE_NAME` and `KUBECONFIG` are set for it.
    pub args: Vec<String>,
    /// The user as which the agent authenticates to the API server
    pub user: String,
}

impl NodeSide {
    /// Returns the software of nodes without Cadastre: the reference plugin bridge, with host-local on the node's
    /// podCIDRs.
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

    /// Returns Cadastre's CNI plugin and agent. The agent writes the CNI configuration from its built-in template named
    /// `template`.
    pub fn shipped(template: &str, flags: &[&str], user: &str) -> Result<Self> {
        Ok(Self {
            plugins: vec![("cadastre-ipam".to_owned(), daemon::plugin()?)],
            configs: Vec::new(),
            agent: Some(Agent::cadastre(template, flags, user)?),
        })
    }

    /// Returns Cadastre's CNI plugin and agent. `main` is the configuration of the main plugin that calls the CNI
    /// plugin, but without the field `ipam`. The agent runs as `user` with additional `flags`, and writes the CNI
    /// configuration once the node has a range.
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

/// Returns a CNI configuration list with one plugin, in a CNI version that has the verbs STATUS and GC.
fn conflist(plugin: &Value) -> String {
    json!({"cniVersion": "1.1.0", "name": "pods", "plugins": [plugin]}).to_string()
}

/// Replaces the files of `old` by those of `new` in a machine's folder. The plugins are written first, because the
/// configurations name them.
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

/// Replaces a file by renaming. So containerd, which watches the folder, never reads an incomplete file, and a running
/// executable is not overwritten.
fn replace(to: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    let temporary = to.with_extension("temp");
    write(&temporary)
        .and_then(|()| fs::rename(&temporary, to))
        .with_context(|| format!("cannot write {}", to.display()))
}
