//! Files that the agent writes for other programs.

use std::fs;
use std::process::Command;

use cadastre_e2e::daemon::binary;
use serde_json::{Value, json};

use crate::{Machine, eventually, shared};

#[tokio::test]
async fn the_cni_configuration_and_subnet_env_come_with_the_node_s_range() {
    let (cluster, api) = shared().await;
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let template = r#"{"name": "pods", "cniVersion": "1.0.0", "plugins": [
        {"type": "bridge", "mtu": {{MTU}}, "ranges": {{POD_CIDRS}}, "ipam": {"type": "cadastre-ipam"}}]}"#;
    fs::write(path("template"), template).unwrap();
    let (conf, env) = (
        path("net.d/05-cadastre.conflist"),
        path("flannel/subnet.env"),
    );
    let flags = [
        "--cni-conf",
        &conf,
        "--cni-conf-template",
        &path("template"),
        "--subnet-env",
        &env,
        "--mtu",
        "1450",
    ];
    api.node("conf", "conf-1").await.unwrap();
    let mut machine = Machine::new(&cluster.control_plane, "conf-1", &flags);
    machine.start();
    eventually("it waits for its NodeSubnet", async || {
        let word = machine.agent().ready().await.err().map(|it| it.to_string());
        Ok(word.filter(|it| it.contains("no NodeSubnet")))
    })
    .await;
    assert!(!folder.path().join("net.d").exists(), "half ready");
    api.pool("conf", json!({"ipv4": {"cidrs": ["10.60.0.0/16"]}}))
        .await
        .unwrap();
    let range = api.served("conf-1").await.unwrap().remove(0);
    machine.ready().await;
    let text = eventually("the configuration is there", async || {
        Ok(fs::read_to_string(&conf).ok())
    })
    .await;
    let written: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(written["plugins"][0]["ranges"], json!([range]));
    assert_eq!(written["plugins"][0]["mtu"], 1450);
    let first = range.replace(".0/24", ".1/24");
    assert_eq!(
        fs::read_to_string(&env).unwrap(),
        format!(
            "FLANNEL_NETWORK=10.60.0.0/16\nFLANNEL_SUBNET={first}\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
        )
    );
    assert_eq!(fs::read_dir(path("net.d")).unwrap().count(), 1);
    // When the agent stops, it leaves its CNI configuration in place, unless a flag makes the agent remove it.
    machine.stop().await;
    assert!(fs::exists(&conf).unwrap());
    machine.flags.push("--remove-cni-conf".to_owned());
    machine.start();
    machine.ready().await;
    machine.stop().await;
    assert!(!fs::exists(&conf).unwrap());
}

#[test]
fn the_plugin_is_installed_at_once_and_also_while_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (
        folder.path().join("cadastre-ipam"),
        folder.path().join("bin"),
    );
    let install = || {
        let done = Command::new(binary().unwrap())
            .arg("install-cni")
            .arg("--from")
            .arg(&from)
            .arg("--to")
            .arg(&to)
            .output()
            .unwrap();
        (done.status.code(), String::from_utf8(done.stderr).unwrap())
    };
    let (code, text) = install();
    assert_eq!(code, Some(1));
    assert!(
        text.contains("cadastre-ipam") && text.contains("No such file"),
        "{text}"
    );
    fs::copy("/bin/cat", &from).unwrap();
    let (code, text) = install();
    assert!(code == Some(0) && text.contains("installed"), "{text}");
    let mut running = Command::new(to.join("cadastre-ipam"))
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    fs::copy("/bin/ls", &from).unwrap();
    assert_eq!(install().0, Some(0));
    let (_, text) = install();
    assert!(text.contains("there already"), "{text}");
    drop(running.stdin.take());
    assert!(running.wait().unwrap().success());
}
