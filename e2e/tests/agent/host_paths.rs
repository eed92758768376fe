//! The errors for host paths that are read-only or occupied by a file of another type.

use std::fs;
use std::path::Path;
use std::process::Command;

use cadastre_e2e::daemon::binary;
use rustix::process::geteuid;
use serde_json::json;

use crate::{Machine, eventually, pool, shared};

/// Runs `cadastre ARGS` with a read-only file system mounted at `folder`. Returns the exit code and the output, or
/// `None` if this host does not allow mounts.
fn on_read_only(folder: &Path, args: &[&str]) -> Option<(Option<i32>, String)> {
    let apart = || {
        let mut command = Command::new("unshare");
        command.arg("--mount").env("HOME", "/nonexistent");
        if !geteuid().is_root() {
            command.arg("--map-root-user");
        }
        command
    };
    let script = r#"mount -t tmpfs -o ro tmpfs "$0" && exec "$@""#;
    let script = ["sh", "-c", script, folder.to_str().unwrap()];
    let tried = apart().args(script).arg("true").output();
    if !tried.is_ok_and(|it| it.status.success()) {
        println!("left out: this machine allows no mounts");
        return None;
    }
    let mut command = apart();
    command.args(script).arg(binary().unwrap()).args(args);
    let done = command.output().unwrap();
    let text = [done.stdout, done.stderr].concat();
    Some((done.status.code(), String::from_utf8(text).unwrap()))
}

#[test]
fn a_read_only_place_ends_it_and_is_told_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (bin, run) = (at("opt/bin"), at("run"));
    let (cni, grpc) = (at("run/cni.sock"), at("run/agent.sock"));
    let install = ["install-cni", "--from", "/bin/cat", "--to", &bin];
    let agent = [
        "agent",
        "--node-name=n1",
        "--admin-address=127.0.0.1:0",
        "--cni-socket",
        &cni,
        "--socket",
        &grpc,
    ];
    for (args, says) in [
        (&install[..], [bin.as_str(), "agent.cni.binDir"]),
        (&agent[..], [run.as_str(), "cannot create"]),
    ] {
        let Some((code, text)) = on_read_only(folder.path(), args) else {
            return;
        };
        assert_eq!(code, Some(1), "{text}");
        let also = [
            "Read-only file system",
            "Mount its file system so that it can be written",
        ];
        for says in says.into_iter().chain(also) {
            assert!(text.contains(says), "{args:?}: {text}");
        }
    }
}

#[tokio::test]
async fn occupied_places_keep_an_agent_from_being_ready_and_are_told_until_they_are_free() {
    let (cluster, api) = shared().await;
    pool(&api, "places", "10.88.0.0/27", json!({})).await;
    api.node("places", "places-1").await.unwrap();
    let mut machine = Machine::new(&cluster.control_plane, "places-1", &[]);
    let conf = machine.path("net.d/05-cadastre.conflist");
    let flag = format!("--cni-conf={}", conf.display());
    machine.flags.push(flag);
    let (lib, net) = (machine.path("lib"), machine.path("net.d"));
    for place in [&lib, &net] {
        fs::write(place, "").unwrap();
    }
    machine.start();
    is_unready_for(&mut machine, "lib: File exists").await;
    fs::remove_file(&lib).unwrap();
    is_unready_for(&mut machine, "net.d: File exists").await;
    // An ADD succeeds although the agent is not ready. The agent lacks only the CNI configuration. A runtime uses the
    // network only once this configuration exists.
    machine.add("c1").await.unwrap();
    fs::remove_file(&net).unwrap();
    // An ADD makes the agent write the configuration at once. Without an ADD, the agent tries again within a minute.
    machine.add("c2").await.unwrap();
    machine.ready().await;
    assert!(conf.exists());
}

async fn is_unready_for(machine: &mut Machine, why: &str) {
    eventually(&format!("/readyz says {why:?}"), async || {
        let error = machine.agent().ready().await.err();
        let said = error.map(|it| it.to_string()).unwrap_or_default();
        let advised = said.contains("There is a file where a directory has to be");
        anyhow::ensure!(said.contains(why) && advised, "{said}");
        Ok(Some(()))
    })
    .await;
}
