//! The files that are kept as what the node holds has it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing::{info, warn};

use super::conflist::{Facts, Template};
use super::put;
use super::subnet_env::{self, Links};
use crate::node::Holding;

/// What somebody else changed on the disk is mended in that time.
const CHECK_PAUSE: Duration = Duration::from_secs(60);

/// Which files are wanted.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Where `subnet.env` goes, and what goes into it besides
    pub subnet_env: Option<(PathBuf, Links)>,
    /// Where the CNI configuration goes, and what it is made of
    pub cni_conf: Option<(PathBuf, Template, Facts)>,
}

/// The files, and what was last put into them.
#[derive(Debug)]
pub struct Kept {
    wanted: Wanted,
    subnet_env: Option<String>,
    cni_conf: Option<String>,
    /// When they were last compared with the disk, since boot
    checked_at: Duration,
    trouble: String,
    /// What of that keeps a file from being written
    unwritten: Option<String>,
}

impl Kept {
    /// Nothing is written yet.
    pub fn new(wanted: Wanted) -> Self {
        Self {
            wanted,
            subnet_env: None,
            cni_conf: None,
            checked_at: Duration::ZERO,
            trouble: String::new(),
            unwritten: None,
        }
    }

    /// Why a file that is wanted is not there, or not as it should be.
    pub fn unwritten(&self) -> Option<&str> {
        self.unwritten.as_deref()
    }

    /// Whether the runtime has a CNI configuration of ours.
    pub fn is_configured(&self) -> bool {
        let conf = self.wanted.cni_conf.as_ref();
        conf.is_some_and(|(path, _, _)| path.exists())
    }

    /// The name of the network in the CNI configuration, if that is wanted.
    pub fn network(&self) -> Option<String> {
        let (_, template, _) = self.wanted.cni_conf.as_ref()?;
        template.network()
    }

    /// Writes what is otherwise than it should be. What cannot be written is logged once a change, and
    /// tried again with the next call. `waits_for_pods`: the node holds nothing as long as no pod comes.
    pub fn refresh(&mut self, holding: &Holding, waits_for_pods: bool, now: Duration) {
        let overdue = now.saturating_sub(self.checked_at) > CHECK_PAUSE;
        if overdue {
            self.checked_at = now;
        }
        let (mut trouble, mut unwritten) = (Vec::new(), Vec::new());
        if let Some((path, links)) = &self.wanted.subnet_env {
            let text = subnet_env::render(holding, *links);
            if text.is_none() && !holding.blocks.is_empty() {
                trouble.push("--subnet-env: the node has no podCIDR, which flannel's plugin needs: use a pool with allocate: NodeCIDR".to_owned());
            }
            keep(path, text, &mut self.subnet_env, overdue, &mut unwritten);
        }
        if let Some((path, template, facts)) = &self.wanted.cni_conf {
            let text = template.render(holding, waits_for_pods, facts);
            keep(path, text, &mut self.cni_conf, overdue, &mut unwritten);
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

/// Puts `text` in place, if there is one and it is not `written` already. `overdue` looks at the disk
/// all the same.
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
            // It may be another than it was when it was written: tried again with the next call.
            *written = None;
            trouble.push(error.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::agent::files::conflist::PTP;
    use crate::agent::files::temp_folder;
    use crate::ipam::Cidr;
    use crate::node::Block;

    #[test]
    fn what_cannot_be_written_is_told_until_it_can() {
        let folder = temp_folder();
        let conf = folder.join("net.d/05-cadastre.conflist");
        let facts = Facts {
            node: "n1".to_owned(),
            mtu: 1500,
        };
        let mut kept = Kept::new(Wanted {
            subnet_env: None,
            cni_conf: Some((conf.clone(), Template::new(PTP).unwrap(), facts)),
        });
        let holding = Holding {
            blocks: vec![Block {
                cidr: Cidr::parse_strict("10.1.0.0/26").unwrap(),
                uid: "u".to_owned(),
                pool: "p".to_owned(),
                draining: false,
                reserved: Vec::new(),
                on_request: Vec::new(),
            }],
            ..Holding::default()
        };
        // A file where the directory has to be: this fails as root, too.
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
        // Somebody takes it away, and it cannot be put back: the looks in between do not forget that.
        fs::remove_dir_all(&blocker).unwrap();
        fs::write(&blocker, "").unwrap();
        kept.refresh(&holding, false, at(90));
        assert!(kept.unwritten().is_some());
        kept.refresh(&holding, false, at(91));
        assert!(kept.unwritten().is_some(), "as long as it is not there");
        fs::remove_dir_all(folder).unwrap_or_default();
    }
}
