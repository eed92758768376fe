//! The commands that the demo suggests to run in another terminal, ready to copy.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use cadastre_e2e::assets::{Program, find};
use cadastre_e2e::daemon::kubectl_plugin;

/// Commands, in the order in which they are shown.
const COMMANDS: [&str; 8] = [
    "kubectl cadastre status",
    "kubectl cadastre map pods",
    "kubectl cadastre map --web",
    "kubectl cadastre show nodes --watch",
    "kubectl cadastre explain pool edge",
    "kubectl get ippools.cadastre.dev,nodesubnets.cadastre.dev,ipamblocks.cadastre.dev",
    "kubectl describe ippools.cadastre.dev edge",
    "kubectl delete node node-00000",
];

/// Links kubectl and the kubectl plugin into a folder, and returns the folder for use in `PATH`.
pub fn tools(folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let plugin = kubectl_plugin()?;
    for (name, target) in [
        ("kubectl", find(Program::Kubectl)?),
        ("kubectl-cadastre", plugin),
    ] {
        symlink(&target, folder.join(name))
            .with_context(|| format!("cannot link {name} in {}", folder.display()))?;
    }
    Ok(folder.to_owned())
}

pub fn text(kubeconfig: &Path, tools: &Path, admin: &str) -> String {
    let commands: Vec<String> = COMMANDS.iter().map(|it| format!("  {it}")).collect();
    format!(
        "In another terminal, with kubectl and its plugin of this checkout:\n\n  \
         export KUBECONFIG={} PATH={}:$PATH\n{}\n  curl {admin}/metrics\n\n\
         Pods come and go now, on nodes without a machine: blocks of pool \"pods\" grow and return.\n\
         Ctrl-C ends everything.\n",
        kubeconfig.display(),
        tools.display(),
        commands.join("\n"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plugin_and_its_map_are_named_with_commands_to_copy() {
        let text = text(Path::new("/k"), Path::new("/b"), "http://127.0.0.1:1");
        for line in [
            "  export KUBECONFIG=/k PATH=/b:$PATH\n  kubectl cadastre status\n",
            "  curl http://127.0.0.1:1/metrics\n",
            "\n  kubectl cadastre map --web\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }
}
