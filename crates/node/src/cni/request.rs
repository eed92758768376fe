//! The environment variables with which a container runtime tells the CNI plugin what to do.

use super::error::{CniError, INVALID_ENVIRONMENT};

/// The environment variables of the CNI protocol. A variable that is not set is empty.
#[derive(Clone, Debug, Default)]
pub struct Env {
    /// `CNI_COMMAND`: ADD, DEL, CHECK, GC, STATUS or VERSION; empty if the program was started by hand
    pub command: String,
    /// `CNI_CONTAINERID`: the id of the container or sandbox
    pub container_id: String,
    /// `CNI_NETNS`: the path of the container's network namespace
    pub netns: String,
    /// `CNI_IFNAME`: the name of the interface in the container
    pub ifname: String,
    /// `CNI_ARGS`: pairs `KEY=value` with `;` between them, for example with the pod's name
    pub args: String,
    /// `CNI_PATH`: the directories of CNI plugins, which only the host-local mode requires to be set
    pub path: String,
    /// `CNI_NETNS_OVERRIDE`: if `1` or `true`, `netns` is allowed to be the network namespace of the CNI plugin itself
    pub netns_override: String,
}

fn wrong(msg: String) -> CniError {
    CniError::new(INVALID_ENVIRONMENT, msg)
}

impl Env {
    /// Reads the environment variables of this process. Fails if a variable is not UTF-8.
    pub(super) fn of_process() -> Result<Self, CniError> {
        let var = |name| {
            let text = std::env::var_os(name).unwrap_or_default().into_string();
            text.map_err(|text| wrong(format!("{name} is {}, which is not UTF-8", text.display())))
        };
        Ok(Self {
            command: var("CNI_COMMAND")?,
            container_id: var("CNI_CONTAINERID")?,
            netns: var("CNI_NETNS")?,
            ifname: var("CNI_IFNAME")?,
            args: var("CNI_ARGS")?,
            path: var("CNI_PATH")?,
            netns_override: var("CNI_NETNS_OVERRIDE")?,
        })
    }

    /// Returns whether the request permits the network namespace to be the one in which the CNI plugin runs.
    pub(super) fn any_netns(&self) -> bool {
        self.netns_override.eq_ignore_ascii_case("true") || self.netns_override == "1"
    }

    /// Checks the variables that the command needs. If `strict` is true, `CNI_PATH` is required, too, because the Go
    /// library for CNI plugins requires it, although an IPAM plugin does not use it.
    pub(super) fn check(&self, strict: bool) -> Result<(), CniError> {
        let command = self.command.as_str();
        let attachment = matches!(command, "ADD" | "CHECK" | "DEL");
        let path = strict && (attachment || matches!(command, "GC" | "STATUS"));
        let missing = [
            ("CNI_CONTAINERID", &self.container_id, attachment),
            ("CNI_NETNS", &self.netns, attachment && command != "DEL"),
            ("CNI_IFNAME", &self.ifname, attachment),
            ("CNI_PATH", &self.path, path),
        ];
        let missing = missing
            .iter()
            .filter(|(_, value, needed)| *needed && value.is_empty());
        let missing: Vec<&str> = missing.map(|(name, ..)| *name).collect();
        if !missing.is_empty() {
            let missing = missing.join(", ");
            return Err(wrong(format!(
                "{command} needs {missing}: the runtime has to set them"
            )));
        }
        if attachment && !is_name(&self.container_id) {
            return Err(wrong(format!(
                "CNI_CONTAINERID is {:?}: {NAME_RULE}",
                self.container_id
            )));
        }
        if attachment && !is_interface(&self.ifname) {
            return Err(wrong(format!(
                "CNI_IFNAME is {:?}: it has to have at most 15 bytes, no slash, colon or space, and not to be `.` or `..`",
                self.ifname
            )));
        }
        Ok(())
    }
}

/// The rule of [`is_name`] as text for error messages.
pub(super) const NAME_RULE: &str =
    "it has to begin with a letter or digit and to consist of letters, digits, `_`, `.` and `-`";

/// Returns whether a text can be a container ID or the name of a network. Such a text is also safe as a file name,
/// because it has no slash and does not start with a dot.
pub(super) fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
}

fn is_interface(name: &str) -> bool {
    let bad = |c: char| c == '/' || c == ':' || c.is_whitespace();
    name.len() < 16 && name != "." && name != ".." && !name.contains(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(command: &str, id: &str, ifname: &str) -> Env {
        Env {
            command: command.to_owned(),
            container_id: id.to_owned(),
            netns: "/x".to_owned(),
            ifname: ifname.to_owned(),
            path: "/y".to_owned(),
            ..Env::default()
        }
    }

    #[test]
    fn the_error_names_all_missing_variables() {
        let of = |command: &str| Env {
            command: command.to_owned(),
            ..Env::default()
        };
        let missing = of("ADD").check(true).unwrap_err().msg;
        assert!(missing.starts_with("ADD needs CNI_CONTAINERID, CNI_NETNS, CNI_IFNAME, CNI_PATH:"));
        assert!(of("GC").check(true).is_err());
        assert_eq!(of("STATUS").check(false), Ok(()), "no use for CNI_PATH");
        assert_eq!(env("DEL", "a", "b").check(true), Ok(()));
    }

    #[test]
    fn ids_and_interfaces_that_are_no_file_names_are_rejected() {
        for id in ["/", "../a", ".a", "a/b", "a\nb", "-a", "a b", "é"] {
            assert_eq!(env("DEL", id, "eth0").check(true).unwrap_err().code, 4);
        }
        let long = "a".repeat(10_000);
        assert_eq!(env("ADD", &long, "eth0").check(true), Ok(()));
        for ifname in [".", "..", "a/b", "a:b", "a b", "a\u{a0}", "a\nb", &long] {
            assert_eq!(env("ADD", "a", ifname).check(true).unwrap_err().code, 4);
        }
    }
}
