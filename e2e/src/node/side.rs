//! What serves the pods of a machine with addresses: plugins, a CNI configuration, perhaps an agent.
//!
//! This is the one place where a node's own software enters a machine.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::daemon;

/// Files and a process of a machine. The reference plugins are there in any case.
#[derive(Clone, Debug, Default)]
pub struct NodeSide {
    /// Executables, and their names in `/opt/cni/bin`
    pub plugins: Vec<(String, PathBuf)>,
    /// A file of `/etc/cni/net.d` and its text; without one the node is not ready until somebody
    /// writes one
    pub conflist: Option<(String, String)>,
    /// What is started at each boot
    pub agent: Option<Agent>,
}

/// A process of the node side.
#[derive(Clone, Debug)]
pub struct Agent {
    /// The program and its arguments. `NODE_NAME` and `KUBECONFIG` are in its environment.
    pub args: Vec<String>,
    /// Who it is to the API server
    pub user: String,
}

impl NodeSide {
    /// The bridge plugin with host-local over a node's podCIDRs: what there was before.
    pub fn host_local(pod_cidrs: &[String]) -> Self {
        let ranges: Vec<Value> = pod_cidrs
            .iter()
            .map(|cidr| json!([{"subnet": cidr}]))
            .collect();
        Self {
            conflist: Some(conflist(&json!({
                "type": "bridge", "bridge": "cni0", "isDefaultGateway": true,
                "ipam": {"type": "host-local", "ranges": ranges},
            }))),
            ..Self::default()
        }
    }

    /// Our plugin behind `main`, a main plugin without its `ipam`, and our agent, with these flags
    /// besides, as `user`.
    pub fn cadastre(main: Value, flags: &[&str], user: &str) -> Result<Self> {
        let mut main = main;
        main["ipam"] = json!({"type": "cadastre-ipam"});
        let cri = format!("unix://{}", super::config::CRI);
        let agent = daemon::binary()?.display().to_string();
        let fixed = [&agent, "agent", "--cri-socket", &cri];
        let args = fixed.into_iter().chain(flags.iter().copied());
        Ok(Self {
            plugins: vec![("cadastre-ipam".to_owned(), daemon::plugin()?)],
            conflist: Some(conflist(&main)),
            agent: Some(Agent {
                args: args.map(str::to_owned).collect(),
                user: user.to_owned(),
            }),
        })
    }
}

/// `10-pods.conflist` with one plugin, in the version of CNI that has STATUS and GC.
pub fn conflist(plugin: &Value) -> (String, String) {
    let list = json!({"cniVersion": "1.1.0", "name": "pods", "plugins": [plugin]});
    ("10-pods.conflist".to_owned(), list.to_string())
}

/// Puts `new` in the place of `old`, in the folder of a machine. The configuration comes last.
pub(super) fn install(old: &NodeSide, new: &NodeSide, folder: &Path) -> Result<()> {
    for (name, from) in &new.plugins {
        let to = folder.join("opt/cni/bin").join(name);
        replace(&to, |path| fs::copy(from, path).map(|_| ()))?;
    }
    let configs = folder.join("cni/net.d");
    if let Some((name, text)) = &new.conflist {
        replace(&configs.join(name), |path| fs::write(path, text))?;
    }
    if let Some((name, _)) = &old.conflist
        && new.conflist.as_ref().is_none_or(|(it, _)| it != name)
    {
        fs::remove_file(configs.join(name))?;
    }
    Ok(())
}

/// Writes a file beside `to` and renames it: containerd watches the folder, and what runs stays whole.
fn replace(to: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    let temporary = to.with_extension("temp");
    write(&temporary)
        .and_then(|()| fs::rename(&temporary, to))
        .with_context(|| format!("cannot write {}", to.display()))
}
