//! Checks whether real nodes can run on this host.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::cgroups;

/// Required programs, and the Debian packages that contain them.
const PROGRAMS: [(&str, &str); 7] = [
    ("ip", "iproute2"),
    ("mount", "mount"),
    ("nsenter", "util-linux"),
    ("runc", "runc"),
    ("setpriv", "util-linux"),
    ("tar", "tar"),
    ("unshare", "util-linux"),
];

/// The only program in the image of the test pods: its name, and the Debian package that contains it.
const BUSYBOX: (&str, &str) = ("busybox", "busybox-static");

/// The program by which kube-proxy sets its rules, and the Debian package that contains it.
const IPTABLES: (&str, &str) = ("iptables", "iptables");

/// Folders that a machine replaces by its own. A machine does not see the host's files in these folders.
const HIDDEN: [&str; 4] = ["/etc", "/opt", "/run", "/var"];

/// Checks whether real nodes can run on this host. If not, the error says why and what to do. Takes a few milliseconds.
pub fn available() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("namespaces of a node need root".to_owned());
    }
    let all: Vec<_> = PROGRAMS.iter().chain([&BUSYBOX]).copied().collect();
    missing(&all, |program| find(program).is_some())?;
    busybox()?;
    cgroups::available()?;
    let folder = std::env::temp_dir();
    let hidden = HIDDEN.iter().find(|it| folder.starts_with(it));
    if let Some(hidden) = hidden {
        return Err(format!(
            "{} lies in {hidden}, which is another folder on a node: set TMPDIR elsewhere",
            folder.display()
        ));
    }
    // Tries to create the kinds of namespaces and interfaces that machines and the fabric need.
    try_out(
        "namespaces",
        "--net --mount --uts --ipc --pid --fork --mount-proc",
        "mount -t tmpfs tmpfs /mnt",
    )?;
    try_out("a bridge", "--net", "ip link add br0 type bridge")?;
    try_out(
        "veth pairs",
        "--net",
        "ip link add one type veth peer name two",
    )
}

/// Returns an error that names all missing programs, and the Debian packages that contain them. Each entry of `all` is
/// a program and its package.
fn missing(
    all: &[(&'static str, &'static str)],
    is_there: impl Fn(&str) -> bool,
) -> Result<(), String> {
    let (programs, packages): (Vec<&str>, BTreeSet<&str>) =
        all.iter().filter(|it| !is_there(it.0)).copied().unzip();
    if programs.is_empty() {
        return Ok(());
    }
    let packages: Vec<&str> = packages.into_iter().collect();
    let are = if programs.len() == 1 { "is" } else { "are" };
    Err(format!(
        "{} {are} missing: apt-get install {}",
        programs.join(", "),
        packages.join(" ")
    ))
}

/// Returns an error if the kernel cannot create macvlan interfaces.
pub fn macvlan() -> Result<(), String> {
    let script = "ip link add br0 type bridge && ip link add link br0 name macvlan0 type macvlan mode bridge";
    try_out("macvlan interfaces", "--net", script)
}

/// Returns an error if the kernel cannot create ipvlan interfaces.
pub fn ipvlan() -> Result<(), String> {
    let script =
        "ip link add br0 type bridge && ip link add link br0 name ipvlan0 type ipvlan mode l2";
    try_out("ipvlan interfaces", "--net", script)
}

/// Returns an error if kube-proxy cannot run: if iptables is missing, or does not work in network namespaces.
pub fn kube_proxy() -> Result<(), String> {
    missing(&[IPTABLES], |program| find(program).is_some())?;
    let script = "PATH=$PATH:/usr/sbin:/sbin; iptables -t nat -N TEST && ip6tables -t nat -N TEST";
    try_out("rules of iptables", "--net", script)
}

/// Returns the path of a program in `PATH`, or else in the folders where Debian has root's programs.
pub(super) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|it| it.is_file())
}

/// Returns the path of a statically linked busybox, which can run in an image that contains nothing else.
pub(super) fn busybox() -> Result<PathBuf, String> {
    let advice = "apt-get install busybox-static";
    let path = find("busybox").ok_or_else(|| format!("busybox is missing: {advice}"))?;
    let text = std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    // A dynamic executable contains the path of the dynamic loader. A static executable does not.
    let loader = b"/ld-linux";
    if text.windows(loader.len()).any(|it| it == loader) {
        return Err(format!("{} is not static: {advice}", path.display()));
    }
    Ok(path)
}

fn try_out(what: &str, namespaces: &str, script: &str) -> Result<(), String> {
    let unshare = find("unshare").unwrap_or_else(|| Path::new("unshare").to_owned());
    let output = Command::new(unshare)
        .args(namespaces.split(' '))
        .args(["sh", "-c", script])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot run unshare: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!(
        "this machine does not allow {what} (unshare {namespaces} sh -c \"{script}\"): {}",
        said.trim()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_of_the_kernel_is_told_with_its_reason() {
        let text = try_out("a test", "--no-such-flag", "true").unwrap_err();
        assert!(
            text.contains("a test") && text.contains("no-such-flag"),
            "{text}"
        );
        let text = try_out("a test", "--net", "no-such-program").unwrap_err();
        assert!(text.contains("no-such-program"), "{text}");
    }

    #[test]
    fn all_that_is_missing_is_named_at_once() {
        assert_eq!(missing(&PROGRAMS, |_| true), Ok(()));
        let none = missing(&PROGRAMS, |_| false).unwrap_err();
        let packages = "apt-get install iproute2 mount runc tar util-linux";
        assert!(
            none.starts_with("ip, mount, nsenter,") && none.ends_with(packages),
            "{none}"
        );
        let one = missing(&PROGRAMS, |it| it != "runc").unwrap_err();
        assert_eq!(one, "runc is missing: apt-get install runc");
    }

    #[test]
    fn programs_are_found_and_missed() {
        assert!(find("sh").is_some());
        assert_eq!(find("no-such-program"), None);
    }
}
