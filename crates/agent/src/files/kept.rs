//! Writes the files that other programs read, whenever the node's ranges have changed. Restores a file when another
//! program changes or removes it.

use std::path::{Path, PathBuf};

use tracing::{info, warn};

use super::conflist::{Facts, Template};
use super::others::{PodNetworkOwner, network_owner};
use super::subnet_env::{self, Links};
use super::{FileError, put};
use cadastre_core::node_allocation::{NodeAllocation, is_claim};

/// The files to keep up to date, and the values in them.
#[derive(Clone, Debug, Default)]
pub struct WantedFiles {
    /// The path of `subnet.env`, and the values in the file that do not depend on ranges
    pub subnet_env: Option<(PathBuf, Links)>,
    /// The path of the CNI configuration, its template, and the values for the template's placeholders
    pub cni_conf: Option<(PathBuf, Template, Facts)>,
    /// Whether to write the CNI configuration even if another network is configured
    pub over_others: bool,
}

/// Writes the wanted files, and writes them again after another program has changed or removed them.
#[derive(Debug, Default)]
pub struct KeptFiles {
    wanted: WantedFiles,
    /// Whether this process has written the CNI configuration
    has_written_conf: bool,
    network_owner: PodNetworkOwner,
    /// The problem that was logged last; empty if there is none
    logged: String,
}

/// The state of the wanted files after the last attempt to write them.
#[derive(Clone, Debug, Default)]
pub struct FilesReported {
    /// Which network new pods get; `None` if the agent writes no CNI configuration
    pub network_owner: Option<PodNetworkOwner>,
    /// Why a wanted file is missing or out of date; `None` if all files are up to date
    pub unwritten: Option<String>,
    /// Whether Cadastre's CNI configuration exists on the disk
    pub is_configured: bool,
}

impl FilesReported {
    /// Whether another network serves the node's pods. If so, the agent does not masquerade, route or announce.
    pub fn is_left_to_others(&self) -> bool {
        matches!(self.network_owner, Some(PodNetworkOwner::Left(_)))
    }
}

impl KeptFiles {
    /// Returns a value that keeps the wanted files up to date. The first refresh writes them.
    pub fn new(wanted: WantedFiles) -> Self {
        Self {
            wanted,
            ..Self::default()
        }
    }

    /// Writes the files that are out of date or were changed on the disk. A problem is logged unless the same problem
    /// was logged last. `waits_for_pods` is true if the node gets its first range only when a pod needs one.
    pub(crate) fn refresh(
        &mut self,
        holding: &NodeAllocation,
        waits_for_pods: bool,
    ) -> FilesReported {
        // The files do not contain blocks of claims, because such a block serves a single pod, and comes and goes with
        // that pod.
        let mut holding = holding.clone();
        holding.blocks.retain(|it| !is_claim(&it.pool));
        let holding = &holding;
        let (mut problems, mut unwritten) = (Vec::new(), Vec::new());
        if let Some((path, links)) = &self.wanted.subnet_env {
            match subnet_env::render(holding, *links) {
                Some(text) => unwritten.extend(keep(path, &text).err()),
                None if holding.blocks.is_empty() => {}
                None => problems.push("--subnet-env: the node has no podCIDR, which flannel's plugin needs: use a pool with allocationMode: NodeCIDR".to_owned()),
            }
        }
        let mut report = FilesReported::default();
        if let Some((path, template, facts)) = &self.wanted.cni_conf {
            let text = template.render(holding, waits_for_pods, facts);
            // If this process has written the file and another program has removed it, the file still counts as the
            // agent's. So the agent writes it again.
            let is_ours = self.has_written_conf || path.exists();
            if is_ours || text.is_some() {
                let network = template.network();
                let owner = network_owner(path, network, is_ours, self.wanted.over_others);
                // An error here is ignored, because its cause also makes the write of the file fail, and that failure
                // is reported.
                self.network_owner = owner.unwrap_or(PodNetworkOwner::First);
            }
            let is_left = matches!(self.network_owner, PodNetworkOwner::Left(_));
            if let Some(text) = text.filter(|_| !is_left) {
                let kept = keep(path, &text);
                self.has_written_conf |= kept.is_ok();
                unwritten.extend(kept.err());
            }
            report.network_owner = Some(self.network_owner.clone());
            report.is_configured = path.exists();
        }
        let unwritten: Vec<String> = unwritten.iter().map(ToString::to_string).collect();
        report.unwritten = (!unwritten.is_empty()).then(|| unwritten.join("; "));
        problems.extend(unwritten);
        let problems = problems.join("; ");
        if self.logged != problems {
            if !problems.is_empty() {
                warn!("{problems}");
            }
            self.logged = problems;
        }
        report
    }
}

/// Writes the file unless its content is `text` already.
fn keep(path: &Path, text: &str) -> Result<(), FileError> {
    if put(path, text.as_bytes(), 0o644)? {
        info!("wrote {}", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::files::conflist::PTP;
    use crate::files::temp_folder;
    use crate::snapshot::testing::allocation;

    fn keeping(conf: &Path) -> KeptFiles {
        let facts = Facts {
            node: "n1".to_owned(),
            mtu: 1500,
        };
        KeptFiles::new(WantedFiles {
            cni_conf: Some((conf.to_owned(), Template::new(PTP).unwrap(), facts)),
            ..WantedFiles::default()
        })
    }

    #[test]
    fn the_conf_is_written_when_the_other_network_is_gone_and_then_stays() {
        const KINDNET: &str = r#"{"name": "kindnet", "plugins": [{"type": "ptp"}]}"#;
        let folder = temp_folder();
        let conf = folder.join("05-cadastre.conflist");
        let allocation = allocation(&["10.0.0.0/26"]);
        let nothing = NodeAllocation::default();
        let owner = |files: &mut KeptFiles, allocation: &NodeAllocation| {
            let report = files.refresh(allocation, false);
            assert_eq!(report.unwritten, None);
            report.network_owner.unwrap()
        };
        let other = folder.join("10-kindnet.conflist");
        fs::write(&other, KINDNET).unwrap();
        let mut files = keeping(&conf);
        let nothing_to_write = owner(&mut files, &nothing);
        assert_eq!(nothing_to_write, PodNetworkOwner::Open);
        let left = PodNetworkOwner::Left("10-kindnet.conflist".to_owned());
        assert_eq!(owner(&mut files, &allocation), left);
        assert!(!conf.exists());
        fs::remove_file(&other).unwrap();
        assert_eq!(owner(&mut files, &allocation), PodNetworkOwner::First);
        assert!(conf.exists());
        // The other network's configuration comes back, and the agent's configuration is removed.
        fs::write(&other, KINDNET).unwrap();
        fs::remove_file(&conf).unwrap();
        assert_eq!(owner(&mut files, &allocation), PodNetworkOwner::First);
        assert!(conf.exists(), "this process wrote it");
        // The agent is restarted, as in an update. The agent's file exists, so the runtime keeps using the file.
        let mut files = keeping(&conf);
        assert_eq!(owner(&mut files, &allocation), PodNetworkOwner::First);
        fs::write(&conf, "of an earlier version").unwrap();
        let mut files = keeping(&conf);
        owner(&mut files, &allocation);
        let text = fs::read_to_string(&conf).unwrap();
        assert!(text.contains("cadastre-ipam"), "{text}");
        let first = folder.join("00-first.conflist");
        fs::write(&first, KINDNET).unwrap();
        let behind = PodNetworkOwner::Behind("00-first.conflist".to_owned());
        assert_eq!(owner(&mut files, &allocation), behind);
        assert!(conf.exists());
        // When the node no longer has a range, the file stays. The agent still checks which other files sort before the
        // file.
        fs::remove_file(&first).unwrap();
        assert_eq!(owner(&mut files, &nothing), PodNetworkOwner::First);
        let mut without = KeptFiles::new(WantedFiles::default());
        assert_eq!(without.refresh(&allocation, false).network_owner, None);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn addresses_of_claims_are_no_ranges_of_the_node() {
        const RANGES: &str = r#"{"name": "x", "plugins": [{"type": "x", "a": {{POD_CIDRS}}}]}"#;
        let folder = temp_folder();
        let conf = folder.join("05-cadastre.conflist");
        let mut files = keeping(&conf);
        files.wanted.cni_conf.as_mut().unwrap().1 = Template::new(RANGES).unwrap();
        let mut claimed = allocation(&["10.0.0.77/32"]);
        claimed.blocks[0].pool = "shop/db".to_owned();
        files.refresh(&claimed, false);
        assert!(!conf.exists(), "the node has nothing for other pods");
        let own = allocation(&["10.0.0.0/26"]).blocks;
        claimed.blocks.extend(own);
        files.refresh(&claimed, false);
        let text = fs::read_to_string(&conf).unwrap();
        assert!(text.contains(r#"["10.0.0.0/26"]"#), "{text}");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_that_cannot_be_written_is_reported_until_it_can() {
        let folder = temp_folder();
        let conf = folder.join("net.d/05-cadastre.conflist");
        let mut files = keeping(&conf);
        let mut unwritten = || {
            let report = files.refresh(&allocation(&["10.0.0.0/26"]), false);
            report.unwritten
        };
        // A file has the path of the directory, so the write fails even for root.
        let blocker = folder.join("net.d");
        fs::write(&blocker, "").unwrap();
        let error = unwritten().unwrap();
        for part in ["net.d", "choose another path"] {
            assert!(error.contains(part), "{error}");
        }
        fs::remove_file(&blocker).unwrap();
        assert_eq!(unwritten(), None);
        assert!(conf.exists());
        // The file is removed, and cannot be written again.
        fs::remove_dir_all(&blocker).unwrap();
        fs::write(&blocker, "").unwrap();
        for _ in 0..2 {
            assert!(unwritten().is_some());
        }
        fs::remove_dir_all(folder).unwrap();
    }
}
