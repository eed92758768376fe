//! Calls a plugin once and records the files that it leaves.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::Write as _;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Placeholder for a side's folder in configurations and answers.
pub const DIR: &str = "@DIR@";

/// The input that a runtime passes to a plugin.
#[derive(Clone, Debug, Default)]
pub struct Call {
    pub command: String,
    pub id: String,
    pub ifname: Vec<u8>,
    pub netns: String,
    pub args: Vec<u8>,
    pub path: String,
    pub config: Vec<u8>,
    /// The most addresses that the call may request explicitly
    pub asked: usize,
}

/// The plugin's exit status and output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: Option<i32>,
    pub stdout: String,
}

impl Call {
    /// Runs `plugin` in the folder of a side, with that folder in the place of [`DIR`].
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
        // A plugin that ends without reading its input closes the pipe.
        let config = replace(&self.config, DIR.as_bytes(), folder.as_bytes());
        let _ = child.stdin.take().unwrap().write_all(&config);
        let output = child.wait_with_output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        // Go escapes bytes that are not UTF-8, but writes the replacement character as it is.
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

/// Kind and mode, and content, of every folder and file below a path.
pub type Tree = BTreeMap<PathBuf, (u32, String)>;

/// The files below a side's folder, without those that our plugin keeps beside a network's directory.
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
