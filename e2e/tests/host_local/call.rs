//! Calls a CNI plugin once, and records the files that the call leaves.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

/// The placeholder for the path of the folder in which a plugin runs. Configurations and answers contain it.
pub const DIR: &str = "@DIR@";

/// The input that a runtime passes to a plugin.
#[derive(Clone, Debug, Default)]
pub struct Call {
    pub command: String,
    pub id: String,
    pub ifname: String,
    pub netns: String,
    pub args: String,
    pub path: String,
    pub config: String,
    /// Whether some value of the configuration was replaced by a random value, perhaps of another type
    pub odd: bool,
    /// The maximum number of addresses that the call requests explicitly
    pub asked: usize,
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub status: Option<i32>,
    pub stdout: String,
}

impl Call {
    /// Runs `plugin` in the folder `side`, whose path replaces [`DIR`] in the configuration.
    pub fn run(&self, plugin: &Path, side: &Path) -> Answer {
        let mut command = Command::new(plugin);
        command
            .env_clear()
            .current_dir(side)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        for (key, value) in [
            ("CNI_COMMAND", &self.command),
            ("CNI_CONTAINERID", &self.id),
            ("CNI_IFNAME", &self.ifname),
            ("CNI_NETNS", &self.netns),
            ("CNI_ARGS", &self.args),
            ("CNI_PATH", &self.path),
        ] {
            if !value.is_empty() {
                command.env(key, value);
            }
        }
        let mut child = command.spawn().unwrap();
        let folder = side.to_str().unwrap();
        // Write errors are ignored, because a plugin that ends without reading its input closes the pipe.
        let config = self.config.replace(DIR, folder);
        let _ = child.stdin.take().unwrap().write_all(config.as_bytes());
        let output = child.wait_with_output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        Answer {
            status: output.status.code(),
            stdout: stdout.replace(folder, DIR),
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} id {:?} ifname {:?} netns {:?} args {:?} path {:?}\n{}",
            self.command, self.id, self.ifname, self.netns, self.args, self.path, self.config
        )
    }
}

impl Answer {
    /// Returns the code of the error, or `None` if the answer is no error.
    pub fn code(&self) -> Option<u64> {
        let error: Value = serde_json::from_str(&self.stdout).ok()?;
        error["code"].as_u64().filter(|_| self.status == Some(1))
    }
}

/// Every folder and file below a path, with its mode and its content.
pub type Tree = BTreeMap<PathBuf, (u32, String)>;

/// Returns all files below the folder `side`, except the index files that cadastre-ipam keeps beside a network's
/// folder.
pub fn tree(side: &Path) -> Tree {
    let mut tree = Tree::new();
    gather(side, Path::new(""), &mut tree);
    tree
}

fn gather(side: &Path, below: &Path, tree: &mut Tree) {
    for item in fs::read_dir(side.join(below)).unwrap() {
        let item = item.unwrap();
        let name = item.file_name().into_string().unwrap_or_default();
        if name.starts_with('.') && Path::new(&name).extension().is_some_and(|it| it == "index") {
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
