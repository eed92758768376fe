//! The only container image that nodes have: a static busybox, imported without a registry.
//!
//! Pod sandboxes use this image too, because its entry point sleeps, and ends at once on a signal.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::json;

use super::available;

/// The image's name. No registry has the image, so pods need `imagePullPolicy: Never`.
pub const IMAGE: &str = "cadastre.dev/e2e:1";

const APPLETS: [&str; 12] = [
    "cat", "echo", "hostname", "ip", "ls", "nc", "ping", "ping6", "sh", "sleep", "true", "wget",
];

/// The entry point. This script handles signals, because the first process of a container ignores signals without a
/// handler.
const ENTRY: &str = "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done";

/// Writes the image to `folder` in the format of `docker save`, which containerd can import. Returns the archive's
/// path.
pub fn write(folder: &Path) -> Result<PathBuf> {
    let busybox = available::busybox().map_err(anyhow::Error::msg)?;
    let folder = folder.join("image");
    let root = folder.join("root");
    for name in ["bin", "etc", "tmp"] {
        fs::create_dir_all(root.join(name))?;
    }
    fs::copy(busybox, root.join("bin/busybox"))?;
    for applet in APPLETS {
        symlink("busybox", root.join("bin").join(applet))?;
    }
    let layer = folder.join("layer.tar");
    tar(&root, &layer, &["."])?;
    let digest = ring::digest::digest(&ring::digest::SHA256, &fs::read(&layer)?);
    let mut diff_id = "sha256:".to_owned();
    for byte in digest.as_ref() {
        write!(diff_id, "{byte:02x}")?;
    }
    let config = json!({
        "architecture": match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        },
        "os": "linux",
        "config": {"Entrypoint": ["/bin/sh", "-c", ENTRY], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
    });
    let manifest = json!([
        {"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}
    ]);
    fs::write(folder.join("config.json"), config.to_string())?;
    fs::write(folder.join("manifest.json"), manifest.to_string())?;
    let image = folder.join("image.tar");
    tar(
        &folder,
        &image,
        &["manifest.json", "config.json", "layer.tar"],
    )?;
    Ok(image)
}

fn tar(from: &Path, to: &Path, what: &[&str]) -> Result<()> {
    let output = Command::new("tar")
        .args(["--owner=0", "--group=0", "--numeric-owner", "-cf"])
        .arg(to)
        .arg("-C")
        .arg(from)
        .args(what)
        .output()
        .context("cannot run tar")?;
    if !output.status.success() {
        bail!("tar failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
