//! Writes the files for other programs whenever the node's ranges have changed, and restores them when others change
//! them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing::{info, warn};

use super::conflist::{Facts, Template};
use super::others::{OtherConfigs, PodNetworkOwner};
use super::put;
use super::subnet_env::{self, Links};
use cadastre_core::node_allocation::NodeAllocation;

/// Changes that other programs made to the files are undone within this time.
const CHECK_PAUSE: Duration = Duration::from_secs(60);
/// It is noticed within this time that other CNI configurations appear or disappear in the same directory.
const LOOK_PAUSE: Duration = Duration::from_secs(5);

/// The files to keep up to date, and the values in them.
#[derive(Clone, Debug, Default)]
pub struct WantedFiles {
    /// The path of `subnet.env`, and the values in it besides ranges
    pub subnet_env: Option<(PathBuf, Links)>,
    /// The path of the CNI configuration, its template, and the values for the template's placeholders
    pub cni_conf: Option<(PathBuf, Template, Facts)>,
    /// Whether to write the CNI configuration even if another network is configured
    pub over_others: bool,
}

/// The files, and what was last written to them.
#[derive(Debug)]
pub struct KeptFiles {
    wanted: WantedFiles,
    subnet_env: Option<String>,
    cni_conf: Option<String>,
    /// Whether the runtime uses the agent's CNI configuration or another one
    standing: PodNetworkOwner,
    look_at: Duration,
    /// When the files were last compared with the disk, since boot
    checked_at: Duration,
    trouble: String,
    /// The part of `trouble` that keeps a file from being written
    unwritten: Option<String>,
}

impl KeptFiles {
    /// Returns a value that has not written anything yet.
    pub fn new(wanted: WantedFiles) -> Self {
        Self {
            wanted,
            subnet_env: None,
            cni_conf: None,
            standing: PodNetworkOwner::Open,
            look_at: Duration::ZERO,
            checked_at: Duration::ZERO,
            trouble: String::new(),
            unwritten: None,
        }
    }

    /// Returns why a wanted file is missing or out of date; `None` if all files are up to date.
    pub(crate) fn unwritten(&self) -> Option<&str> {
        self.unwritten.as_deref()
    }

    /// Whether the CNI configuration exists on the disk.
    pub(crate) fn is_configured(&self) -> bool {
        let conf = self.wanted.cni_conf.as_ref();
        conf.is_some_and(|(path, _, _)| path.exists())
    }

    /// Returns how the agent's CNI configuration relates to those of other networks; `None` if the agent writes none.
    pub fn standing(&self) -> Option<&PodNetworkOwner> {
        self.wanted.cni_conf.as_ref().map(|_| &self.standing)
    }

    /// Returns the path of the CNI configuration; `None` if the agent writes none.
    pub fn cni_conf(&self) -> Option<&Path> {
        let conf = self.wanted.cni_conf.as_ref();
        conf.map(|(path, _, _)| path.as_path())
    }

    /// Returns the name of the network in the CNI configuration; `None` if the agent writes none.
    pub fn network(&self) -> Option<String> {
        let (_, template, _) = self.wanted.cni_conf.as_ref()?;
        template.network()
    }

    /// Writes the files that are out of date. A failure is logged unless it was logged last, and the write is retried
    /// with the next call. `waits_for_pods`: the node gets its first range only when a pod needs it.
    pub(crate) fn refresh(
        &mut self,
        holding: &NodeAllocation,
        waits_for_pods: bool,
        now: Duration,
    ) {
        let overdue = now.saturating_sub(self.checked_at) > CHECK_PAUSE;
        if overdue {
            self.checked_at = now;
        }
        let (mut trouble, mut unwritten) = (Vec::new(), Vec::new());
        if let Some((path, links)) = &self.wanted.subnet_env {
            let text = subnet_env::render(holding, *links);
            if text.is_none() && !holding.blocks.is_empty() {
                trouble.push("--subnet-env: the node has no podCIDR, which flannel's plugin needs: use a pool with allocationMode: NodeCIDR".to_owned());
            }
            keep(path, text, &mut self.subnet_env, overdue, &mut unwritten);
        }
        if let Some((path, template, facts)) = &self.wanted.cni_conf {
            let text = template.render(holding, waits_for_pods, facts);
            // The file counts as the agent's even if it was removed after this process wrote it, so that it is put
            // back.
            let is_ours = self.cni_conf.is_some() || path.exists();
            let is_due = self.look_at <= now || self.standing == PodNetworkOwner::Open;
            if (is_ours || text.is_some()) && is_due {
                self.look_at = now + LOOK_PAUSE;
                let network = template.network().unwrap_or_default();
                // An error here also makes the write of the file fail, and that is reported.
                let beside = OtherConfigs::look(path, &network).unwrap_or_default();
                self.standing = beside.standing(path, is_ours, self.wanted.over_others);
            }
            if !matches!(self.standing, PodNetworkOwner::Left(_)) {
                keep(path, text, &mut self.cni_conf, overdue, &mut unwritten);
            }
        }
        self.unwritten = (!unwritten.is_empty()).then(|| unwritten.join("; "));
        trouble.extend(unwritten);
        let trouble = trouble.join("; ");
        if self.trouble != trouble {
            if !trouble.is_empty() {
                warn!("{trouble}");
            }
            self.trouble = trouble;
        }
    }
}

/// Writes `text` to `path`, unless `text` was `written` last. If `overdue`, the file on the disk is compared in any
/// case.
fn keep(
    path: &Path,
    text: Option<String>,
    written: &mut Option<String>,
    overdue: bool,
    trouble: &mut Vec<String>,
) {
    let Some(text) = text.filter(|text| overdue || written.as_ref() != Some(text)) else {
        return;
    };
    match put(path, text.as_bytes(), 0o644) {
        Ok(new) => {
            if new {
                info!("wrote {}", path.display());
            }
            *written = Some(text);
        }
        Err(error) => {
            // The content of the file is unknown after an error, so the next call writes it again.
            *written = None;
            trouble.push(error.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::files::conflist::PTP;
    use crate::files::temp_folder;
    use cadastre_core::Cidr;
    use cadastre_core::node_allocation::Block;

    fn holding() -> NodeAllocation {
        NodeAllocation {
            blocks: vec![Block {
                cidr: Cidr::parse_strict("10.1.0.0/26").unwrap(),
                uid: "u".to_owned(),
                pool: "p".to_owned(),
                draining: false,
                reserved: Vec::new(),
                on_request: Vec::new(),
            }],
            ..NodeAllocation::default()
        }
    }

    #[test]
    fn beside_anothers_network_ours_is_written_once_that_is_gone_and_then_stays() {
        const KINDNET: &str = r#"{"name": "kindnet", "plugins": [{"type": "ptp"}]}"#;
        let folder = temp_folder();
        let conf = folder.join("05-cadastre.conflist");
        let start = || {
            let facts = Facts {
                node: "n1".to_owned(),
                mtu: 1500,
            };
            KeptFiles::new(WantedFiles {
                cni_conf: Some((conf.clone(), Template::new(PTP).unwrap(), facts)),
                ..WantedFiles::default()
            })
        };
        let (holding, nothing) = (holding(), NodeAllocation::default());
        let at = Duration::from_secs;
        let others = folder.join("10-kindnet.conflist");
        fs::write(&others, KINDNET).unwrap();
        let mut kept = start();
        kept.refresh(&nothing, false, at(1));
        assert_eq!(
            kept.standing(),
            Some(&PodNetworkOwner::Open),
            "nothing to write"
        );
        kept.refresh(&holding, false, at(1));
        let left = PodNetworkOwner::Left("10-kindnet.conflist".to_owned());
        assert_eq!(kept.standing(), Some(&left));
        assert!(!conf.exists() && kept.unwritten().is_none());
        fs::remove_file(&others).unwrap();
        kept.refresh(&holding, false, at(7));
        assert_eq!(kept.standing(), Some(&PodNetworkOwner::First));
        assert!(conf.exists());
        // The other configuration comes back, and the agent's is removed.
        fs::write(&others, KINDNET).unwrap();
        fs::remove_file(&conf).unwrap();
        kept.refresh(&holding, false, at(70));
        assert_eq!(kept.standing(), Some(&PodNetworkOwner::First));
        assert!(conf.exists(), "this process wrote it");
        // The agent is restarted, as for an update. Its file exists, so it stays in use.
        let mut kept = start();
        kept.refresh(&holding, false, at(71));
        assert_eq!(kept.standing(), Some(&PodNetworkOwner::First));
        fs::write(&conf, "of an earlier version").unwrap();
        let mut kept = start();
        kept.refresh(&holding, false, at(72));
        let text = fs::read_to_string(&conf).unwrap();
        assert!(text.contains("cadastre-ipam"), "{text}");
        let first = folder.join("00-first.conflist");
        fs::write(&first, KINDNET).unwrap();
        kept.refresh(&holding, false, at(78));
        let behind = PodNetworkOwner::Behind("00-first.conflist".to_owned());
        assert_eq!(kept.standing(), Some(&behind));
        assert!(conf.exists());
        // When the node has no range any more, the file stays, and the agent still checks what sorts before it.
        fs::remove_file(&first).unwrap();
        kept.refresh(&nothing, false, at(84));
        assert_eq!(kept.standing(), Some(&PodNetworkOwner::First));
        assert_eq!(KeptFiles::new(WantedFiles::default()).standing(), None);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_cannot_be_written_is_told_until_it_can() {
        let folder = temp_folder();
        let conf = folder.join("net.d/05-cadastre.conflist");
        let facts = Facts {
            node: "n1".to_owned(),
            mtu: 1500,
        };
        let mut kept = KeptFiles::new(WantedFiles {
            cni_conf: Some((conf.clone(), Template::new(PTP).unwrap(), facts)),
            ..WantedFiles::default()
        });
        let holding = holding();
        // A file in place of the directory makes the write fail even for root.
        let blocker = folder.join("net.d");
        fs::write(&blocker, "").unwrap();
        let at = Duration::from_secs;
        kept.refresh(&holding, false, at(1));
        let told = kept.unwritten().unwrap().to_owned();
        assert!(
            told.contains("net.d") && told.contains("choose another path"),
            "{told}"
        );
        fs::remove_file(&blocker).unwrap();
        kept.refresh(&holding, false, at(2));
        assert_eq!(kept.unwritten(), None);
        assert!(conf.exists());
        // The file is removed, and cannot be put back. Refreshes that do not try to write must not clear the error.
        fs::remove_dir_all(&blocker).unwrap();
        fs::write(&blocker, "").unwrap();
        kept.refresh(&holding, false, at(90));
        assert!(kept.unwritten().is_some());
        kept.refresh(&holding, false, at(91));
        assert!(kept.unwritten().is_some(), "as long as it is not there");
        fs::remove_dir_all(folder).unwrap_or_default();
    }
}
