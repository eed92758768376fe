//! The CNI configurations of other networks in the runtime's directory, and which configuration the runtime uses.
//!
//! A runtime uses the file that sorts first by name. If Cadastre's file sorted before a working file of another
//! network, all new pods of the node would silently move to Cadastre's network. So the other files are classified
//! first:
//!
//! - A directory, or a file not named `*.conflist`, `*.conf` or `*.json`, is not considered, because runtimes skip it
//!   as well.
//! - A file that names the plugin `cadastre-ipam` counts as *ours*. A file of Multus whose cluster network is
//!   Cadastre's counts as *ours*, too. Pods of such networks get addresses from Cadastre.
//! - A file counts as *spare* if it has no other plugin than `loopback`, if its network has the name `crio`, `podman`
//!   or `containerd-net`, or if nerdctl has written it. Packages of runtimes install such files for machines without a
//!   cluster, and expect a cluster's file to sort before them.
//! - A file that is no valid CNI configuration counts as *broken*. It defines no network, but containerd stops at this
//!   file. CRI-O uses the next file.
//! - Any other file counts as the file of another network, even if the file cannot be read.
//!
//! A file does not show whether its network is in use or left over. So the administrator has to decide whether to
//! remove such a file.

use std::ffi::OsStr;
use std::path::Path;
use std::{fs, io};

use cadastre_core::inert::some;
use serde_json::Value;

/// The type of Cadastre's CNI plugin. A configuration that uses this plugin counts as Cadastre's.
const PLUGIN: &str = "cadastre-ipam";
/// Names of networks that packages of container runtimes install.
const SPARE: [&str; 3] = ["crio", "podman", "containerd-net"];
/// At most this many files are named in a message.
const NAMED: usize = 3;
/// A file with more bytes than this is not read, because configurations have only some kilobytes.
const LONGEST: u64 = 1 << 20;

/// How a configuration file is classified. The list in the module's comment explains the kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Ours,
    OtherNetwork,
    Spare,
    Broken,
}

/// Which network new pods of the node get, as far as the files show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PodNetworkOwner {
    /// Not decided yet, because the agent has had no configuration to write.
    #[default]
    Open,
    /// The runtime uses the agent's configuration.
    First,
    /// The agent writes its file, but the runtime uses one of the named files, because they sort before the agent's
    /// file.
    Behind(String),
    /// The agent does not write its file, because the named files of other networks exist.
    Left(String),
}

/// Returns which network new pods get if the agent's file is `own` and Cadastre's network has the name `network`.
/// `is_ours` is true if the agent has already written its file. If `over_others` is true, the agent writes its file in
/// any case.
pub(crate) fn network_owner(
    own: &Path,
    network: &str,
    is_ours: bool,
    over_others: bool,
) -> io::Result<PodNetworkOwner> {
    let own_name = own.file_name().unwrap_or_default().to_string_lossy();
    let others = other_files(own, &own_name, network)?;
    // If another file uses Cadastre's plugin, the runtime uses none of the files that sort after that file.
    let relevant = others.iter().take_while(|(_, kind)| *kind != Kind::Ours);
    if !is_ours && !over_others {
        let networks = relevant.clone();
        let networks = networks.filter(|(_, kind)| *kind == Kind::OtherNetwork);
        let names: Vec<&str> = networks.map(|(name, _)| name.as_str()).collect();
        if !names.is_empty() {
            return Ok(PodNetworkOwner::Left(joined(&names)));
        }
    }
    let names = relevant.map(|(name, _)| name.as_str());
    let before: Vec<&str> = names.filter(|name| **name < *own_name).collect();
    Ok(if before.is_empty() {
        PodNetworkOwner::First
    } else {
        PodNetworkOwner::Behind(joined(&before))
    })
}

/// Returns the files in the directory that runtimes would load, except the agent's file, sorted by name.
fn other_files(own: &Path, own_name: &str, network: &str) -> io::Result<Vec<(String, Kind)>> {
    let entries = match fs::read_dir(own.parent().unwrap_or(Path::new("."))) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut all = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if name != *own_name && is_loaded(&name) && !entry.file_type()?.is_dir() {
            let kind = kind(&entry.path(), own_name, network);
            all.push((name.to_string_lossy().into_owned(), kind));
        }
    }
    all.sort();
    Ok(all)
}

/// Whether runtimes load a file of this name.
fn is_loaded(name: &OsStr) -> bool {
    let extension = Path::new(name).extension().and_then(OsStr::to_str);
    extension.is_some_and(|it| matches!(it, "conflist" | "conf" | "json"))
}

/// Classifies the file at `path`. `own` is the name of the agent's file, `network` the name of Cadastre's network.
fn kind(path: &Path, own: &str, network: &str) -> Kind {
    // A link may lead to a place that only the runtime can read, and reading a pipe would block. So anything that is
    // not a regular file, and a file that is too large, counts as another network.
    let found = fs::metadata(path);
    if !found.is_ok_and(|it| it.is_file() && it.len() <= LONGEST) {
        return Kind::OtherNetwork;
    }
    let Ok(bytes) = fs::read(path) else {
        return Kind::OtherNetwork;
    };
    let conf: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    if !conf.is_object() {
        return Kind::Broken;
    }
    if names_plugin(&conf) || is_over(&conf, own, network) {
        return Kind::Ours;
    }
    let is_list = path.extension().is_some_and(|it| it == "conflist");
    let types: Vec<Option<&str>> = match conf["plugins"].as_array().filter(|_| is_list) {
        Some(plugins) => plugins.iter().map(|it| it["type"].as_str()).collect(),
        // Since CNI 1.1, the plugins of a list can be in a folder that has the name of the list. So a list without
        // `plugins` may be valid.
        None if is_list && conf["name"].is_string() && conf["plugins"].is_null() => {
            return Kind::OtherNetwork;
        }
        None if is_list => return Kind::Broken,
        None => vec![conf["type"].as_str()],
    };
    let is_typed = |it: Option<&str>| it.is_some_and(|it| !it.is_empty());
    if types.is_empty() || !types.iter().copied().all(is_typed) {
        return Kind::Broken;
    }
    let is_spare = |name: &str| SPARE.contains(&name);
    let is_loopback = types.iter().all(|it| *it == Some("loopback"));
    if is_loopback || !conf["nerdctlID"].is_null() || conf["name"].as_str().is_some_and(is_spare) {
        return Kind::Spare;
    }
    Kind::OtherNetwork
}

/// Whether Cadastre's CNI plugin appears anywhere in the configuration: as the IPAM plugin, or nested in the
/// configuration of a meta plugin.
fn names_plugin(conf: &Value) -> bool {
    match conf {
        Value::Object(fields) => {
            fields.get("type").and_then(Value::as_str) == Some(PLUGIN)
                || fields.values().any(names_plugin)
        }
        Value::Array(all) => all.iter().any(names_plugin),
        _ => false,
    }
}

/// Whether `conf` is a configuration of Multus whose cluster network is Cadastre's. Multus can be a plugin in a list or
/// have a configuration of its own. `clusterNetwork` is the file or the name of the cluster network.
fn is_over(conf: &Value, own: &str, network: &str) -> bool {
    let plugins = conf["plugins"].as_array().into_iter().flatten();
    let named = plugins
        .chain([conf])
        .filter_map(|it| it["clusterNetwork"].as_str());
    let is_own =
        |over: &str| over == network || Path::new(over).file_name() == Some(OsStr::new(own));
    named.into_iter().any(is_own)
}

/// Joins the first few names and shortens each of them, because there may be many names and long names.
fn joined(names: &[&str]) -> String {
    let cut = |name: &&str| name.chars().take(80).collect::<String>();
    let names: Vec<String> = names.iter().map(cut).collect();
    some(&names, NAMED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::temp_folder;

    const OWN: &str = "05-cadastre.conflist";
    const KINDNET: &str = r#"{"cniVersion": "0.4.0", "name": "kindnet", "plugins": [
        {"type": "ptp", "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.9.0.0/24"}]]}}]}"#;

    /// Returns which network new pods get if these files exist. `is_ours` is true if the agent has already written its
    /// file.
    fn owner(files: &[(&str, &str)], is_ours: bool, over_others: bool) -> PodNetworkOwner {
        let folder = temp_folder();
        for (name, text) in files {
            fs::write(folder.join(name), text).unwrap();
        }
        let owner = network_owner(&folder.join(OWN), "cadastre", is_ours, over_others).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        owner
    }

    fn left(names: &str) -> PodNetworkOwner {
        PodNetworkOwner::Left(names.to_owned())
    }

    fn behind(names: &str) -> PodNetworkOwner {
        PodNetworkOwner::Behind(names.to_owned())
    }

    #[test]
    fn the_agent_leaves_pods_to_another_network_unless_over_others_is_set() {
        for name in ["10-kindnet.conflist", "00-first.conflist"] {
            assert_eq!(owner(&[(name, KINDNET)], false, false), left(name));
        }
        let bridge = r#"{"name": "mynet", "type": "bridge"}"#;
        assert_eq!(
            owner(
                &[("10-mynet.conf", bridge), ("20-x.json", bridge)],
                false,
                false
            ),
            left("10-mynet.conf, 20-x.json")
        );
        let after = [("10-kindnet.conflist", KINDNET)];
        assert_eq!(owner(&after, false, true), PodNetworkOwner::First);
        let first = [("00-first.conflist", KINDNET)];
        assert_eq!(owner(&first, false, true), behind("00-first.conflist"));
    }

    #[test]
    fn a_file_that_was_written_before_stays_in_use() {
        let after = [("10-kindnet.conflist", KINDNET)];
        assert_eq!(owner(&after, true, false), PodNetworkOwner::First);
        // Another network's configuration appears, which sorts before the agent's file.
        let first = [("00-first.conflist", KINDNET)];
        assert_eq!(owner(&first, true, false), behind("00-first.conflist"));
        // A user, or an agent with another file name, has written a file that uses Cadastre's plugin. The runtime uses
        // this file. So new pods are in Cadastre's network.
        let ours =
            r#"{"name": "x", "plugins": [{"type": "macvlan", "ipam": {"type": "cadastre-ipam"}}]}"#;
        let earlier = [("01-x.conflist", ours), ("10-kindnet.conflist", KINDNET)];
        assert_eq!(owner(&earlier, false, false), PodNetworkOwner::First);
        let later = [("10-kindnet.conflist", KINDNET), ("11-x.conflist", ours)];
        assert_eq!(owner(&later, false, false), left("10-kindnet.conflist"));
    }

    #[test]
    fn multus_counts_as_ours_only_over_cadastres_network() {
        let shim = |over: &str| {
            format!(
                r#"{{"name": "multus-cni-network", "type": "multus-shim", "clusterNetwork": "{over}"}}"#
            )
        };
        for over in ["/host/etc/cni/net.d/05-cadastre.conflist", "cadastre"] {
            let files = [("00-multus.conf", &*shim(over))];
            assert_eq!(owner(&files, true, false), PodNetworkOwner::First, "{over}");
        }
        let files = [(
            "00-multus.conf",
            &*shim("/host/etc/cni/net.d/10-kindnet.conflist"),
        )];
        assert_eq!(owner(&files, true, false), behind("00-multus.conf"));
        for (over, expected) in [
            (
                "/etc/cni/net.d/05-cadastre.conflist",
                PodNetworkOwner::First,
            ),
            ("kindnet", left("00-multus.conflist")),
        ] {
            let list = format!(r#"{{"name": "m", "plugins": [{}]}}"#, shim(over));
            let files = [("00-multus.conflist", &*list)];
            assert_eq!(owner(&files, false, false), expected, "{over}");
        }
        let delegates =
            |conf: &str| format!(r#"{{"name": "m", "type": "multus", "delegates": [{conf}]}}"#);
        let ours = r#"{"plugins": [{"type": "ptp", "ipam": {"type": "cadastre-ipam"}}]}"#;
        let files = [("00-multus.conf", &*delegates(ours))];
        assert_eq!(owner(&files, true, false), PodNetworkOwner::First);
        let files = [("00-multus.conf", &*delegates(KINDNET))];
        assert_eq!(owner(&files, false, false), left("00-multus.conf"));
    }

    #[test]
    fn spare_networks_and_files_that_no_runtime_loads_are_no_other_network() {
        let named =
            |name: &str| format!(r#"{{"name": "{name}", "plugins": [{{"type": "bridge"}}]}}"#);
        let files = [
            ("100-crio-bridge.conflist", &*named("crio")),
            ("87-podman-bridge.conflist", &*named("podman")),
            ("10-containerd-net.conflist", &*named("containerd-net")),
            (
                "nerdctl-bridge.conflist",
                r#"{"name": "bridge", "nerdctlID": 0, "plugins": [{"type": "bridge"}]}"#,
            ),
            ("99-loopback.conf", r#"{"name": "lo", "type": "loopback"}"#),
            ("10-kindnet.conflist.bak", KINDNET),
            ("05-cilium.conflist.cilium_bak", KINDNET),
            ("README", "words"),
            ("10-broken.conflist", "{"),
            ("11-broken.conflist", r#"{"name": "x", "plugins": []}"#),
            ("12-broken.conf", r#"{"name": "x"}"#),
        ];
        assert_eq!(owner(&files, false, false), PodNetworkOwner::First);
        // The file has the name of containerd's example file, but contains a network of kubenet.
        let files = [("10-containerd-net.conflist", &*named("k8s-pod-network"))];
        assert_eq!(
            owner(&files, false, false),
            left("10-containerd-net.conflist")
        );
        // The report also names spare and broken files that sort before the agent's file.
        let files = [
            ("00-crio.conflist", &*named("crio")),
            ("01-x.conflist", "{"),
        ];
        let both = behind("00-crio.conflist, 01-x.conflist");
        assert_eq!(owner(&files, true, false), both);
        assert_eq!(owner(&files, false, false), both);
    }

    #[test]
    fn a_file_that_cannot_be_read_counts_as_another_network() {
        let folder = temp_folder();
        let link = folder.join("10-linked.conflist");
        std::os::unix::fs::symlink("/nonexistent/elsewhere", link).unwrap();
        fs::create_dir(folder.join("20-folder.conflist")).unwrap();
        let owner = || network_owner(&folder.join(OWN), "cadastre", false, false).unwrap();
        assert_eq!(owner(), left("10-linked.conflist"));
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(owner(), PodNetworkOwner::First);
    }

    #[test]
    fn at_most_three_files_are_named_and_long_names_are_cut() {
        let long = format!("1-{}.conflist", "x".repeat(200));
        let conf = r#"{"name": "n", "type": "x", "plugins": [{"type": "x"}]}"#;
        let files = [&*long, "2.conflist", "3.conflist", "4.conflist", "5.conf"];
        let files = files.map(|it| (it, conf));
        let PodNetworkOwner::Left(names) = owner(&files, false, false) else {
            panic!("it is written")
        };
        assert!(
            names.ends_with("2.conflist, 3.conflist and 2 more"),
            "{names}"
        );
        assert!(names.len() < 160, "{names}");
    }
}
