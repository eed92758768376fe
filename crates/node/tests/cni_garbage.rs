//! Runs the CNI plugin with arbitrary environments and arbitrary standard input. The plugin must not panic, and must
//! answer with a result or an error object. An invalid request must not change anything.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use cadastre_node::cni;
use cadastre_node::cni::Env;
use cadastre_node::{AddressAssignment, Op, OpError, OpErrorKind, OpOutcome};
use proptest::prelude::*;
use serde_json::Value;

/// The folder to which valid requests may write.
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cni_garbage");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
});

/// Returns paths and contents of all files in the folder.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for item in fs::read_dir(folder).unwrap() {
        let path = item.unwrap().path();
        if path.is_dir() {
            files.extend(self::files(&path));
        } else {
            files.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    files
}

fn is_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(plain)
}

/// Checks that no name in an operation can lead to a path outside of the directory in which the name is used.
fn check_op(op: &Op) {
    let check = |attachment: &cadastre_node::Attachment| {
        assert!(is_name(&attachment.network) && is_name(&attachment.container_id));
        let ifname = &attachment.ifname;
        assert!(ifname.len() < 16 && !ifname.contains(['/', ':', ' ', '\n']));
    };
    match op {
        Op::Add(add) => check(&add.attachment),
        Op::Del(attachment) => check(attachment),
        Op::Check(of) => check(&of.attachment),
        Op::Gc(gc) => assert!(is_name(&gc.network)),
        Op::Status => {}
    }
}

fn request(env: &Env, as_host_local: bool, refused: bool, stdin: &[u8]) {
    let before = files(&FOLDER);
    let asked = RefCell::new(0);
    let ask = |_: &Path, _: &Path, op: &Op, _: Duration| {
        check_op(op);
        *asked.borrow_mut() += 1;
        match op {
            _ if refused => Err(OpError {
                why: OpErrorKind::Exhausted,
                text: "all used".to_owned(),
            }),
            Op::Add(_) => Ok(OpOutcome::Assigned(AddressAssignment::default())),
            _ => Ok(OpOutcome::Done),
        }
    };
    let output = cni::run(env, as_host_local, stdin, &ask);
    if output.failed {
        let error: Value = serde_json::from_str(&output.stdout).unwrap();
        let code = error["code"].as_u64().unwrap();
        assert!(code > 0 && !error["msg"].as_str().unwrap().is_empty());
        // host-local reports code 999 only for errors that occur while it works. All other errors occur before its
        // first change of a file, so no file may have changed.
        if code != 999 && env.command != "DEL" {
            assert_eq!(files(&FOLDER), before, "{}", output.stdout);
        }
        assert!(*asked.borrow() == 0 || refused);
    } else {
        assert!(output.stdout.is_empty() || serde_json::from_str::<Value>(&output.stdout).is_ok());
    }
}

/// Generates configurations. In each, some parts are missing, of the wrong type, unusual, or valid.
fn config() -> impl Strategy<Value = String> {
    let leaf = || {
        prop_oneof![
            Just("null".to_owned()),
            Just("[]".to_owned()),
            Just("{}".to_owned()),
            Just("-1.5e9".to_owned()),
            Just("true".to_owned()),
            "\"[ -~]{0,12}\"".prop_map(|text| text.replace('\\', "")),
            "\"\\PC{0,6}\"",
            Just("[\"10.0.0.5\", \"fd00::5/64\"]".to_owned()),
            Just("[[{\"subnet\":\"10.0.0.0/28\"}]]".to_owned()),
            Just("[{\"containerID\":\"a\",\"ifname\":\"eth0\"}]".to_owned()),
        ]
    };
    let or =
        |good: &'static str, odds: u32| prop_oneof![odds => Just(good.to_owned()), 1 => leaf()];
    let ipam_key = prop_oneof![
        Just("pools"),
        Just("addresses"),
        Just("socket"),
        Just("ranges"),
        Just("subnet"),
        Just("routes"),
        Just("type"),
        Just("gateway"),
        Just("RangeEnd"),
    ];
    let top_key = prop_oneof![
        Just("prevResult"),
        Just("cni.dev/valid-attachments"),
        Just("args"),
        Just("runtimeConfig"),
        Just("ipam"),
    ];
    (
        or("\"1.1.0\"", 8),
        or("\"net\"", 8),
        proptest::collection::vec((ipam_key, leaf()), 0..3),
        proptest::collection::vec((top_key, leaf()), 0..3),
    )
        .prop_map(|(version, name, ipam, top)| {
            let member = |(key, value): &(&str, String)| format!(",\"{key}\":{value}");
            let ipam: String = ipam.iter().map(member).collect();
            let top: String = top
                .iter()
                // If the whole `ipam` section were replaced by a value with a subnet, `dataDir` would be missing. Then
                // the CNI plugin would write to another folder.
                .filter(|(key, value)| *key != "ipam" || !value.contains("subnet"))
                .map(member)
                .collect();
            let folder = FOLDER.to_str().unwrap();
            format!(
                "{{\"cniVersion\":{version},\"name\":{name},\"ipam\":{{\"dataDir\":\"{folder}\"{ipam}}}{top}}}"
            )
        })
}

fn env() -> impl Strategy<Value = Env> {
    let odd = || {
        prop_oneof![
            "[^\0]{0,20}",
            "[a-z/.:; =\n-]{0,20}",
            Just("a".repeat(10_000))
        ]
    };
    let or = |good: &'static str| prop_oneof![9 => Just(good.to_owned()), 1 => odd()];
    let args = prop_oneof![
        Just(String::new()),
        Just("IgnoreUnknown=1;K8S_POD_UID=u;IP=10.0.0.3".to_owned()),
        "(IP|A|IgnoreUnknown|K8S_POD_NAME)=[a-z0-9.:/]{0,9}(;IP=10.0.0.[0-9]{1,2})?",
        odd(),
    ];
    let command = prop_oneof![
        6 => Just("ADD".to_owned()),
        3 => Just("DEL".to_owned()),
        2 => Just("CHECK".to_owned()),
        2 => Just("GC".to_owned()),
        2 => Just("STATUS".to_owned()),
        1 => Just("VERSION".to_owned()),
        1 => odd(),
    ];
    (command, or("c1"), or("eth0"), or("/nowhere"), args).prop_map(
        |(command, container_id, ifname, netns, args)| Env {
            command,
            container_id,
            ifname,
            netns,
            args,
            path: "/opt/cni/bin".to_owned(),
            netns_override: String::new(),
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn odd_requests_are_answered(
        env in env(),
        config in config(),
        as_host_local in any::<bool>(),
        refused in any::<bool>(),
        cut in proptest::option::weighted(0.1, 0usize..300),
    ) {
        let text = match cut {
            Some(at) if config.is_char_boundary(at) && at < config.len() => &config[..at],
            _ => &config,
        };
        request(&env, as_host_local, refused, text.as_bytes());
    }
}

#[test]
fn a_hundred_megabytes_are_not_read() {
    let env = Env {
        command: "ADD".to_owned(),
        container_id: "a".to_owned(),
        ifname: "b".to_owned(),
        netns: "/nowhere".to_owned(),
        path: "/".to_owned(),
        ..Env::default()
    };
    let endless = std::io::Read::take(std::io::repeat(b'['), 100 << 20);
    let never = |_: &Path, _: &Path, _: &Op, _: Duration| unreachable!();
    let output = cni::run(&env, false, endless, &never);
    let error: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!(error["code"], 6);
    assert!(error["msg"].as_str().unwrap().contains("1048576"));
}
