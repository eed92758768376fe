//! Creates the cgroups below which the kubelets create theirs: `cadastre-e2e-PID-N/NODE` in every hierarchy.
//!
//! Cgroups are the only part of a node that is outside all namespaces. They are removed when the [`Cgroups`] is
//! dropped. If this process ends without dropping the [`Cgroups`], a caretaker process removes them. If the caretaker
//! was killed, too, the next start removes them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::scratch::Caretaker;

const ROOT: &str = "/sys/fs/cgroup";
const PREFIX: &str = "cadastre-e2e-";

/// The maximum time for which a removal is retried. A cgroup cannot be removed until its last process is reaped.
const BUSY: Duration = Duration::from_secs(20);

const CARETAKER: &str = r#"
tries=0
while [ "$tries" -lt 100 ]; do
    find /sys/fs/cgroup/*/"$1" -depth -type d -delete 2>/dev/null
    ls -d /sys/fs/cgroup/*/"$1" >/dev/null 2>&1 || break
    tries=$((tries + 1)); sleep 0.1
done
"#;

/// The cgroups of a site: one folder in each hierarchy, with a sub-folder for each node.
#[derive(Debug)]
pub struct Cgroups {
    name: String,
    caretaker: Option<Caretaker>,
}

/// Returns an error if this host does not have the cgroup hierarchies that the nodes' kubelets need.
pub fn available() -> Result<(), String> {
    let memory = Path::new(ROOT).join("memory");
    if !memory.is_dir() {
        return Err(format!(
            "{} does not exist: the nodes' kubelets are set up for cgroup v1 hierarchies",
            memory.display()
        ));
    }
    let probe = memory.join(format!("{PREFIX}{}-probe", std::process::id()));
    fs::create_dir(&probe)
        .and_then(|()| fs::remove_dir(&probe))
        .map_err(|error| format!("cannot make cgroups ({}): {error}", probe.display()))
}

impl Cgroups {
    /// Removes cgroups of earlier runs, chooses a unique name, and starts the caretaker. Does not create cgroups.
    pub fn new() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        sweep();
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{n}", std::process::id());
        let caretaker = Some(Caretaker::start(CARETAKER, name.as_ref())?);
        Ok(Self { name, caretaker })
    }

    /// Creates the cgroups of a node, if they are missing, and returns the kubelet's `cgroupRoot`.
    pub fn of(&self, node: &str) -> Result<String> {
        for hierarchy in hierarchies() {
            let mut folder = hierarchy.clone();
            for part in [&self.name, node] {
                let parent = folder.clone();
                folder.push(part);
                match fs::create_dir(&folder) {
                    Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => continue,
                    made => made.with_context(|| format!("cannot make {}", folder.display()))?,
                }
                // A new cpuset has no processors and no memory, so processes could not join it. So the parent's values
                // are copied.
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    if let Ok(value) = fs::read(parent.join(file)) {
                        fs::write(folder.join(file), value)?;
                    }
                }
            }
        }
        Ok(format!("/{}/{node}", self.name))
    }

    /// Removes a node's cgroups once all processes of the node are dead. Otherwise, a restarted kubelet would wait 3 s
    /// for each cgroup that is left.
    pub async fn clear(&self, node: &str) -> Result<()> {
        let start = Instant::now();
        loop {
            let left: Vec<PathBuf> = hierarchies()
                .into_iter()
                .map(|it| it.join(&self.name).join(node))
                .filter(|it| !remove(it))
                .collect();
            if left.is_empty() {
                return Ok(());
            }
            if start.elapsed() > BUSY {
                bail!("cgroups are still busy after {BUSY:?}: {left:?}");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        if let Some(caretaker) = self.caretaker.take() {
            caretaker.end();
        }
    }
}

fn hierarchies() -> Vec<PathBuf> {
    let entries = fs::read_dir(ROOT).into_iter().flatten().flatten();
    entries
        .filter(|it| it.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter(|it| it.file_name() != "unified")
        .map(|it| it.path())
        .collect()
}

/// Removes the cgroups of earlier runs, whose processes no longer exist.
fn sweep() {
    for hierarchy in hierarchies() {
        for entry in fs::read_dir(hierarchy).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let rest = name.to_str().and_then(|it| it.strip_prefix(PREFIX));
            let owner = rest.and_then(|it| it.split('-').next());
            if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
                remove(&entry.path());
            }
        }
    }
}

/// Removes a cgroup and its children. Returns whether the cgroup is gone.
fn remove(cgroup: &Path) -> bool {
    for entry in fs::read_dir(cgroup).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path());
        }
    }
    let _ = fs::remove_dir(cgroup);
    !cgroup.exists()
}
