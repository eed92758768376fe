//! Random cases: the same calls to the published host-local and to ours, each in its own folder, with a comparison
//! after every step.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::call::{Answer, Call, DIR, tree};
use super::configs::{self, Base};
use super::plugins::Plugins;
use super::rng::Rng;

/// Calls per case.
const CALLS: u64 = 40;

/// Which plugin is called on our side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    Ours,
    /// Ours or the published one, at random: a switch back and forth at every step
    Both,
}

/// Runs the case of a seed; returns the number of its calls.
pub fn case(plugins: &Plugins, root: &Path, who: Who, seed: u64) -> u64 {
    let rng = &mut Rng::new(seed);
    let folder = root.join(format!("{seed:x}"));
    let sides = ["theirs", "ours"].map(|name| folder.join(name));
    for side in &sides {
        fs::create_dir_all(side).unwrap();
    }
    let resolv = "nameserver 10.0.0.10\nsearch a b\n";
    fs::write(folder.join("resolv.conf"), resolv).unwrap();
    let odd =
        b"#x\n;nameserver 1\n\toptions a <b>\xff\r\ndomain\ndomain &\nsearch c\nnameserver\x0b::1";
    fs::write(folder.join("odd.conf"), odd).unwrap();
    let mut base = configs::base(rng);
    let mut calls = 0;
    while calls < CALLS {
        if rng.percent(3) {
            base = configs::base(rng);
        }
        if rng.percent(5) {
            disturb(rng, &base, &sides);
        }
        let call = configs::call(rng, &base);
        let ours = match who {
            Who::Both if rng.percent(50) => &plugins.theirs,
            _ => &plugins.ours,
        };
        let answers = [
            call.run(&plugins.theirs, &sides[0]),
            call.run(ours, &sides[1]),
        ];
        calls += 1;
        let trees = sides.each_ref().map(|side| tree(side));
        let verdict = compare(&call, &answers).and_then(|go_on| {
            if !go_on || trees[0] == trees[1] {
                return Ok(go_on);
            }
            // A plugin that assigns addresses and releases them again after a failure leaves `last_reserved_ip` behind.
            if takes_either(&call) && answers[0].status == Some(1) {
                return Ok(false);
            }
            Err("the folders differ".to_owned())
        });
        match verdict {
            Ok(true) => {}
            Ok(false) => break,
            Err(text) => panic!(
                "seed {seed}, call {calls}: {text}\n{call}\ntheirs {:?} {}\nours   {:?} {}\ntheirs {:#?}\nours   {:#?}",
                answers[0].status,
                answers[0].stdout,
                answers[1].status,
                answers[1].stdout,
                trees[0],
                trees[1],
            ),
        }
    }
    fs::remove_dir_all(&folder).unwrap();
    calls
}

/// Whether the answers are equal, or differ in an accepted way; `Ok(false)` if the folders may differ from here
/// on, too.
fn compare(call: &Call, [theirs, ours]: &[Answer; 2]) -> Result<bool, String> {
    if theirs == ours {
        return Ok(true);
    }
    // Theirs crashed, with a stack on standard error: ours fails with an ordinary error, before any effect.
    if theirs.status == Some(2) {
        let error: Value = serde_json::from_str(&ours.stdout).map_err(|error| error.to_string())?;
        return match ours.status {
            Some(1) if error["code"].is_u64() => Ok(false),
            // A null among the routes, which results of older versions cannot contain.
            Some(0) if error["dns"].is_object() => Ok(false),
            _ => Err("theirs crashed".to_owned()),
        };
    }
    // Ours rejects JSON that theirs accepts; the effects of theirs are then missing on our side.
    if refuses_json(ours) {
        return Ok(false);
    }
    // Messages about undecodable configurations are worded differently.
    if undecodable(theirs) && code(ours).is_some() && code(theirs) == code(ours) {
        return Ok(true);
    }
    // STATUS of theirs ignores the configuration.
    if call.command == "STATUS" && theirs.status == Some(0) {
        let error: Value = serde_json::from_str(&ours.stdout).unwrap_or_default();
        return match error["code"].as_u64() {
            Some(50) => Ok(true),
            _ => Err("STATUS".to_owned()),
        };
    }
    // GC of theirs does nothing; ours requires the list of valid attachments.
    if call.command == "GC" && theirs.status == Some(0) {
        let refused = ours.stdout.contains("nothing was taken back");
        return refused.then_some(true).ok_or_else(|| "GC".to_owned());
    }
    if takes_either(call) && theirs.status == Some(1) && ours.status == Some(1) {
        let both = |text: &str| theirs.stdout.contains(text) && ours.stdout.contains(text);
        if both("failed to allocate") {
            return Ok(false);
        }
    }
    Err("the answers differ".to_owned())
}

/// The code of an error, if the answer is one.
fn code(answer: &Answer) -> Option<u64> {
    let error: Value = serde_json::from_str(&answer.stdout).ok()?;
    error["code"].as_u64().filter(|_| answer.status == Some(1))
}

/// Whether the message is one of Go's about invalid JSON or a value of the wrong type.
fn undecodable(answer: &Answer) -> bool {
    let error: Value = serde_json::from_str(&answer.stdout).unwrap_or_default();
    let msg = error["msg"].as_str().unwrap_or_default();
    [
        "error unmarshall network config: ",
        "decoding version from network config: ",
        "json: cannot unmarshal ",
    ]
    .iter()
    .any(|words| msg.starts_with(words))
}

/// Whether ours rejected JSON that Go accepts: half of a surrogate pair, a number beyond the range of floating
/// point, values that are nested too deeply.
fn refuses_json(answer: &Answer) -> bool {
    let words = [
        "lone leading surrogate in hex escape",
        "unexpected end of hex escape",
        "number out of range",
        "recursion limit exceeded",
    ];
    code(answer) == Some(6) && words.iter().any(|words| answer.stdout.contains(words))
}

/// Whether theirs chooses at random between two addresses that were requested in one set.
fn takes_either(call: &Call) -> bool {
    call.command == "ADD" && call.asked > 1
}

/// Creates what other programs, older releases and crashes leave, equally in both folders.
fn disturb(rng: &mut Rng, base: &Base, sides: &[PathBuf; 2]) {
    let text = |path: &str| base.config.pointer(path).and_then(Value::as_str);
    let (Some(data_dir), Some(name)) = (text("/ipam/dataDir"), text("/name")) else {
        return;
    };
    let near = base.near[rng.index(base.near.len())].clone();
    let id = format!("c{}", rng.below(8));
    let (file, content) = match rng.below(10) {
        0 => (near, id),
        1 => (near, format!("{id}\r\neth0")),
        2 => (near, format!("\n {id}\r\neth0 \u{a0}\n")),
        3 => (near, String::new()),
        4 => (format!("in/{near}"), format!("{id}\r\neth0")),
        5 => ("notes".to_owned(), format!("{id}\r\nnet1")),
        6 => ("last_reserved_ip.0".to_owned(), near),
        7 => ("last_reserved_ip.1".to_owned(), "garbage".to_owned()),
        8 => ("last_reserved_ip.0".to_owned(), format!("{near}\n")),
        _ => {
            for side in sides {
                let folder = folder(data_dir, name, side);
                let _ = fs::remove_file(folder.join(&near));
            }
            return;
        }
    };
    for side in sides {
        let path = folder(data_dir, name, side).join(&file);
        let Some(parent) = path.parent() else {
            return;
        };
        if parent.ends_with("in") {
            let _ = fs::create_dir(parent);
        }
        // Creates the file as another program does, replacing an existing one instead of writing into it.
        if parent.is_dir() {
            let new = parent.join("new");
            fs::write(&new, &content).unwrap();
            fs::set_permissions(&new, fs::Permissions::from_mode(0o644)).unwrap();
            fs::rename(&new, &path).unwrap();
        }
    }
}

fn folder(data_dir: &str, name: &str, side: &Path) -> PathBuf {
    PathBuf::from(data_dir.replace(DIR, side.to_str().unwrap())).join(name)
}
