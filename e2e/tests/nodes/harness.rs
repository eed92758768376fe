//! Tests of the harness. When the harness ends, even if it is killed, everything that it has started must end, too.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::ensure;
use cadastre_e2e::node::{MachineOptions, Site, SiteOptions};
use tokio::runtime::Runtime;

use crate::{Stage, eventually};

/// The environment variable that marks the process which the test kills.
const CHILD: &str = "CADASTRE_E2E_CHILD";

/// In the marked process: starts a site with a machine, prints the site's folder, and waits to be killed. In other
/// processes: returns `None`.
pub fn child() -> Option<ExitCode> {
    std::env::var_os(CHILD)?;
    let runtime = Runtime::new().unwrap();
    runtime.block_on(async {
        let site = Site::start(SiteOptions::default()).await.unwrap();
        let machine = site.machine(MachineOptions::default()).await.unwrap();
        // This shell ignores SIGTERM, SIGINT and SIGHUP. When the harness is killed, the shell must end, too.
        let deaf = [
            "sh",
            "-c",
            "trap '' TERM INT HUP; while :; do sleep 1; done",
        ];
        let _deaf = machine.spawn("deaf", &deaf).await.unwrap();
        let folder = site.cluster().folder().display().to_string();
        let mut stdout = std::io::stdout();
        writeln!(stdout, "{folder}").unwrap();
        std::future::pending::<()>().await;
    });
    None
}

pub(crate) async fn a_killed_harness_leaves_nothing(_: &Stage) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(CHILD, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut folder = String::new();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    said.read_line(&mut folder).unwrap();
    let folder = folder.trim();
    assert!(Path::new(folder).join("n1").is_dir(), "{folder:?}");
    let cgroup = format!("cadastre-e2e-{}-", child.id());
    assert!(processes(folder) >= 8, "{}", processes(folder));
    assert!(cgroups(&cgroup) > 0);
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("nothing is left", async || {
        let processes = processes(folder);
        ensure!(processes == 0, "{processes} processes");
        let cgroups = cgroups(&cgroup);
        ensure!(cgroups == 0, "{cgroups} cgroups");
        ensure!(!Path::new(folder).exists(), "the folder {folder}");
        Ok(Some(()))
    })
    .await;
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    assert!(!mounts.contains(folder), "{mounts}");
}

/// Returns how many processes have a path in `folder` in their command line.
fn processes(folder: &str) -> usize {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    all.filter(|it| {
        let line = std::fs::read(it.path().join("cmdline")).unwrap_or_default();
        // The command line of the caretaker contains the folder, too. The caretaker is not counted, because it ends
        // after all other processes.
        let line = String::from_utf8_lossy(&line).into_owned();
        line.contains(folder) && !line.contains("rm -rf")
    })
    .count()
}

fn cgroups(prefix: &str) -> usize {
    let hierarchies = std::fs::read_dir("/sys/fs/cgroup").unwrap().flatten();
    let inside = hierarchies.flat_map(|it| std::fs::read_dir(it.path()).into_iter().flatten());
    let names = inside.flatten().map(|it| it.file_name());
    names
        .filter(|it| it.to_string_lossy().starts_with(prefix))
        .count()
}
