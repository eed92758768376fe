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
/// on, too. Texts of errors are not compared.
fn compare(call: &Call, [theirs, ours]: &[Answer; 2]) -> Result<bool, String> {
    let result = |answer: &Answer| serde_json::from_str::<Value>(&answer.stdout).ok();
    match (theirs.status, ours.status) {
        (Some(0), Some(0)) if result(theirs) == result(ours) => Ok(true),
        // Theirs may refuse a value of the wrong type where ours does not read it.
        (Some(1), Some(1)) if call.odd && ours.code().is_some() => Ok(false),
        (Some(1), Some(1)) if theirs.code() == ours.code() => {
            // Which of several requested addresses theirs has tried when it fails is random.
            Ok(!takes_either(call))
        }
        // STATUS of theirs ignores the configuration; ours reports one that cannot work.
        (Some(0), Some(1)) if call.command == "STATUS" && ours.code() == Some(50) => Ok(true),
        // GC of theirs does nothing; ours requires the list of valid attachments.
        (Some(0), Some(1)) if call.command == "GC" && ours.code() == Some(7) => Ok(true),
        // Theirs may crash, or accept what has no meaning; ours reads less into such a config, or refuses it.
        (_, Some(0)) if call.odd => Ok(false),
        (_, Some(1)) if call.odd && ours.code().is_some() => Ok(false),
        _ => Err("the answers differ".to_owned()),
    }
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
    let (file, content) = match rng.below(9) {
        0 => (near, id),
        1 => (near, format!("{id}\r\neth0")),
        2 => (near, format!("\n {id}\r\neth0 \u{a0}\n")),
        3 => (near, String::new()),
        4 => ("notes".to_owned(), format!("{id}\r\nnet1")),
        5 => ("last_reserved_ip.0".to_owned(), near),
        6 => ("last_reserved_ip.1".to_owned(), "garbage".to_owned()),
        7 => ("last_reserved_ip.0".to_owned(), format!("{near}\n")),
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
