//! Random cases. The same calls go to the published host-local ("theirs") and to cadastre-ipam ("ours"), each in a
//! folder of its own. After every call the answers and the folders are compared.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::call::{Answer, Call, DIR, tree};
use super::configs::{self, Base};
use super::plugins::Plugins;
use super::rng::Rng;

/// The number of calls of a case, unless the case ends early.
const CALLS: u64 = 40;

/// Which plugins are called in the folder `ours`. In the folder `theirs`, only the published host-local is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    Ours,
    /// cadastre-ipam or the published host-local, chosen at random for each call
    Both,
}

/// Runs the case of a seed, and returns the number of calls made.
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

/// Compares two answers, without the texts of errors. Returns `Ok(true)` if they are equal, or differ in an accepted
/// way. Returns `Ok(false)` if the case must end, because the answers differ in an accepted way that can make the data
/// directories differ. Any other difference is an error.
fn compare(call: &Call, [theirs, ours]: &[Answer; 2]) -> Result<bool, String> {
    let result = |answer: &Answer| serde_json::from_str::<Value>(&answer.stdout).ok();
    match (theirs.status, ours.status) {
        (Some(0), Some(0)) if result(theirs) == result(ours) => Ok(true),
        // host-local may reject a value of the wrong type that cadastre-ipam does not read.
        (Some(1), Some(1)) if call.odd && ours.code().is_some() => Ok(false),
        (Some(1), Some(1)) if theirs.code() == ours.code() => {
            // If several addresses were requested, host-local tries them in random order, and a call that fails may
            // leave a reservation. So the data directories of the two plugins may differ.
            Ok(!takes_either(call))
        }
        // The verb STATUS: host-local ignores the configuration, and cadastre-ipam reports a configuration that cannot
        // work.
        (Some(0), Some(1)) if call.command == "STATUS" && ours.code() == Some(50) => Ok(true),
        // The verb GC: host-local does nothing, and cadastre-ipam requires the list of valid attachments.
        (Some(0), Some(1)) if call.command == "GC" && ours.code() == Some(7) => Ok(true),
        // With an odd configuration, host-local may crash, or accept values that have no meaning. cadastre-ipam ignores
        // such values or rejects them.
        (_, Some(0)) if call.odd => Ok(false),
        (_, Some(1)) if call.odd && ours.code().is_some() => Ok(false),
        _ => Err("the answers differ".to_owned()),
    }
}

/// Returns whether host-local chooses at random between several addresses that one ADD requests.
fn takes_either(call: &Call) -> bool {
    call.command == "ADD" && call.asked > 1
}

/// Creates or removes files in the same way in both folders, as other programs, older releases and crashes do.
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
        // Creates the file as another program would: replaces an existing file instead of writing into it.
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
