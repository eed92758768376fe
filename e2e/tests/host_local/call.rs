//! One call of a plugin, and what it left.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::Write as _;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Stands in configs and answers for the folder of a side.
pub const DIR: &str = "@DIR@";

/// What a runtime passes.
#[derive(Clone, Debug, Default)]
pub struct Call {
    pub command: String,
    pub id: String,
    pub ifname: Vec<u8>,
    pub netns: String,
    pub args: Vec<u8>,
    pub path: String,
    pub config: Vec<u8>,
    /// How many addresses are asked for by name, at most
    pub asked: usize,
}

/// What a plugin answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: Option<i32>,
    pub stdout: String,
}

impl Call {
    /// Runs `plugin` in the folder of a side.
    pub fn run(&self, plugin: &Path, side: &Path) -> Answer {
        let mut command = Command::new(plugin);
        command
            .env_clear()
            .current_dir(side)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let text = |text: &str| text.as_bytes().to_owned();
        for (key, value) in [
            ("CNI_COMMAND", text(&self.command)),
            ("CNI_CONTAINERID", text(&self.id)),
            ("CNI_IFNAME", self.ifname.clone()),
            ("CNI_NETNS", text(&self.netns)),
            ("CNI_ARGS", self.args.clone()),
            ("CNI_PATH", text(&self.path)),
        ] {
            if !value.is_empty() {
                command.env(key, OsString::from_vec(value));
            }
        }
        let mut child = command.spawn().unwrap();
        let folder = side.to_str().unwrap();
        // One that has no use for it closes it unread.
        let config = replace(&self.config, DIR.as_bytes(), folder.as_bytes());
        let _ = child.stdin.take().unwrap().write_all(&config);
        let output = child.wait_with_output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        // Go writes a byte that is no UTF-8 as an escape, and the character that stands for it as it is.
        let stdout = stdout.replace(folder, DIR).replace("\\ufffd", "\u{fffd}");
        Answer {
            status: output.status.code(),
            stdout,
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} id {:?} ifname {:?} netns {:?} args {:?} path {:?}\n{}",
            self.command,
            self.id,
            String::from_utf8_lossy(&self.ifname),
            self.netns,
            String::from_utf8_lossy(&self.args),
            self.path,
            String::from_utf8_lossy(&self.config)
        )
    }
}

fn replace(text: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len() + 64);
    let mut rest = text;
    while let Some(at) = rest.windows(from.len()).position(|window| window == from) {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(to);
        rest = &rest[at + from.len()..];
    }
    out.extend_from_slice(rest);
    out
}

/// Every folder and file below a path: kind and mode, and bytes.
pub type Tree = BTreeMap<PathBuf, (u32, String)>;

/// What is below a side's folder, but for the notes that ours keeps beside a network's directory.
pub fn tree(side: &Path) -> Tree {
    let mut tree = Tree::new();
    gather(side, Path::new(""), &mut tree);
    tree
}

fn gather(side: &Path, below: &Path, tree: &mut Tree) {
    for item in fs::read_dir(side.join(below)).unwrap() {
        let item = item.unwrap();
        let name = item.file_name().into_string().unwrap_or_default();
        if name.starts_with('.') && name.contains(".index") {
            continue;
        }
        let path = below.join(item.file_name());
        let meta = item.metadata().unwrap();
        let bytes = meta.is_file().then(|| fs::read(item.path()).unwrap());
        let content = String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned();
        tree.insert(path.clone(), (meta.permissions().mode(), content));
        if meta.is_dir() {
            gather(side, &path, tree);
        }
    }
}
