//! What a runtime asks: the environment and standard input, looked at in the order in which the Go
//! library looks.

use std::io::Read;
use std::os::unix::ffi::OsStringExt as _;

use super::error::{CniError, DECODING_FAILURE, INVALID_CONFIG, INVALID_ENVIRONMENT, IO_FAILURE};
use super::golang;
use super::json::{self, Value};

/// The largest config that is read, in bytes. One with 8,000 valid attachments has 1,000,000.
const MAX_CONFIG: usize = 1024 * 1024;

/// The variables of the protocol, empty where they are not set.
#[derive(Clone, Debug, Default)]
pub struct Env {
    /// `CNI_COMMAND`
    pub command: Vec<u8>,
    /// `CNI_CONTAINERID`
    pub container_id: Vec<u8>,
    /// `CNI_NETNS`
    pub netns: Vec<u8>,
    /// `CNI_IFNAME`
    pub ifname: Vec<u8>,
    /// `CNI_ARGS`
    pub args: Vec<u8>,
    /// `CNI_PATH`
    pub path: Vec<u8>,
    /// `CNI_NETNS_OVERRIDE`
    pub netns_override: Vec<u8>,
}

impl Env {
    /// Those of the process.
    pub(crate) fn of_process() -> Self {
        let var = |name| std::env::var_os(name).unwrap_or_default().into_vec();
        Self {
            command: var("CNI_COMMAND"),
            container_id: var("CNI_CONTAINERID"),
            netns: var("CNI_NETNS"),
            ifname: var("CNI_IFNAME"),
            args: var("CNI_ARGS"),
            path: var("CNI_PATH"),
            netns_override: var("CNI_NETNS_OVERRIDE"),
        }
    }

    /// Whether the network namespace may be the plugin's own.
    pub(super) fn any_netns(&self) -> bool {
        self.netns_override.eq_ignore_ascii_case(b"true") || self.netns_override == b"1"
    }

    /// Looks at what the command needs. `strict` asks for `CNI_PATH`, which an IPAM plugin has no
    /// use for, as the Go library does.
    pub(super) fn check(&self, strict: bool) -> Result<(), CniError> {
        let attachment = matches!(self.command.as_slice(), b"ADD" | b"CHECK" | b"DEL");
        let netns = matches!(self.command.as_slice(), b"ADD" | b"CHECK");
        let path = strict && (attachment || matches!(self.command.as_slice(), b"GC" | b"STATUS"));
        let mut missing = Vec::new();
        let mut need = |name: &'static str, value: &[u8], needed: bool| {
            if needed && value.is_empty() {
                missing.push(name);
            }
            needed && !value.is_empty()
        };
        need("CNI_COMMAND", &self.command, true);
        if need("CNI_CONTAINERID", &self.container_id, attachment) {
            container_id(&self.container_id)?;
        }
        need("CNI_NETNS", &self.netns, netns);
        if need("CNI_IFNAME", &self.ifname, attachment) {
            interface(&self.ifname)?;
        }
        need("CNI_PATH", &self.path, path);
        if missing.is_empty() {
            return Ok(());
        }
        let msg = format!("required env variables [{}] missing", missing.join(","));
        Err(CniError::new(INVALID_ENVIRONMENT, msg))
    }
}

/// The rule for container ids and names of networks. It is also what makes them safe as names of
/// files: no slash, and no dot at the start.
fn is_name(text: &[u8]) -> bool {
    text.first().is_some_and(u8::is_ascii_alphanumeric)
        && text
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-'))
}

fn container_id(id: &[u8]) -> Result<(), CniError> {
    if is_name(id) {
        return Ok(());
    }
    let msg = "invalid characters in containerID";
    Err(CniError::with(INVALID_ENVIRONMENT, msg, golang::text(id)))
}

fn interface(name: &[u8]) -> Result<(), CniError> {
    let wrong = |msg, details| Err(CniError::with(INVALID_ENVIRONMENT, msg, details));
    if name.len() > 15 {
        let details = "interface name should be less than 16 characters";
        return wrong("interface name is too long", details);
    }
    if matches!(name, b"." | b"..") {
        return wrong("interface name is . or ..", "");
    }
    let bad = |c: char| c == '/' || c == ':' || c.is_whitespace();
    if golang::text(name).contains(bad) {
        let msg = "interface name contains / or : or whitespace characters";
        return wrong(msg, "");
    }
    Ok(())
}

/// Standard input, bounded.
pub(super) fn read(stdin: impl Read) -> Result<Vec<u8>, CniError> {
    let mut text = Vec::new();
    let limit = MAX_CONFIG as u64 + 1;
    if let Err(error) = stdin.take(limit).read_to_end(&mut text) {
        let msg = format!("error reading from stdin: {}", golang::errno(&error));
        return Err(CniError::new(IO_FAILURE, msg));
    }
    if text.len() > MAX_CONFIG {
        let msg =
            "error unmarshall network config: it has more than 1048576 bytes; write it shorter";
        return Err(CniError::new(DECODING_FAILURE, msg));
    }
    Ok(text)
}

/// A config whose name is a legal one.
#[derive(Clone, Debug)]
pub(super) struct Config<'d> {
    /// The network
    pub(super) name: String,
    /// All of it
    pub(super) root: &'d Value,
}

impl<'d> Config<'d> {
    pub(super) fn new(root: &'d Value) -> Result<Self, CniError> {
        let name = field(root, "name").map_err(|fault| undecodable(&fault))?;
        if name.is_empty() {
            return Err(CniError::new(INVALID_CONFIG, "missing network name"));
        }
        if !is_name(name.as_bytes()) {
            let msg = "invalid characters found in network name";
            return Err(CniError::with(INVALID_CONFIG, msg, name));
        }
        Ok(Self { name, root })
    }

    /// The version as it is written, empty if it is not.
    pub(super) fn version(&self) -> Result<String, CniError> {
        field(self.root, "cniversion").map_err(|fault| {
            let msg = format!("decoding version from network config: {fault}");
            CniError::new(DECODING_FAILURE, msg)
        })
    }
}

/// The error about a config that cannot be read.
pub(super) fn undecodable(text: &str) -> CniError {
    let msg = format!("error unmarshall network config: {text}");
    CniError::new(DECODING_FAILURE, msg)
}

/// The text of a key, which is given in lower case; empty if there is none.
fn field(root: &Value, name: &str) -> Result<String, String> {
    let mut text = String::new();
    let read = json::fields(root, |key, value| match key {
        _ if key == name => json::string(value, &mut text),
        _ => Ok(()),
    });
    read.map_err(|fault| fault.to_string()).map(|()| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(command: &str, id: &str, ifname: &str) -> Env {
        let bytes = |text: &str| text.as_bytes().to_owned();
        Env {
            command: bytes(command),
            container_id: bytes(id),
            netns: bytes("/x"),
            ifname: bytes(ifname),
            path: bytes("/y"),
            ..Env::default()
        }
    }

    #[test]
    fn what_is_missing_is_named_all_at_once() {
        let missing = |env: &Env| env.check(true).unwrap_err().msg;
        assert_eq!(
            missing(&Env {
                command: b"ADD".to_vec(),
                ..Env::default()
            }),
            "required env variables [CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH] missing"
        );
        assert_eq!(
            missing(&Env {
                command: b"GC".to_vec(),
                ..Env::default()
            }),
            "required env variables [CNI_PATH] missing"
        );
        let status = Env {
            command: b"STATUS".to_vec(),
            ..Env::default()
        };
        assert_eq!(status.check(false), Ok(()), "no use for CNI_PATH");
        assert_eq!(env("DEL", "a", "b").check(true), Ok(()));
    }

    #[test]
    fn ids_and_interfaces_that_could_leave_their_place_are_refused() {
        for id in ["/", "../a", ".a", "a/b", "a\nb", "-a", "a b", "é"] {
            let error = env("DEL", id, "eth0").check(true).unwrap_err();
            assert_eq!((error.code, error.details.as_str()), (4, id));
        }
        let long = "a".repeat(10_000);
        assert_eq!(env("ADD", &long, "eth0").check(true), Ok(()));
        for ifname in [".", "..", "a/b", "a:b", "a b", "a\u{a0}", "a\nb", &long] {
            assert_eq!(env("ADD", "a", ifname).check(true).unwrap_err().code, 4);
        }
    }

    #[test]
    fn a_config_needs_a_legal_name() {
        let error = |text: &str| {
            let root = Value::parse(text.as_bytes()).unwrap();
            Config::new(&root).unwrap_err()
        };
        assert_eq!(
            error("[]").msg,
            "error unmarshall network config: the network config is no object: write one"
        );
        assert_eq!(
            error(r#"{"name":[]}"#).msg,
            "error unmarshall network config: name of the network config is no string: write one, or leave it out"
        );
        assert_eq!(error("null").msg, "missing network name");
        assert_eq!(error(r#"{"NAME":"../x"}"#).details, "../x");
    }

    #[test]
    fn more_than_a_mebibyte_is_not_read() {
        let endless = std::io::repeat(b' ');
        let error = read(endless).unwrap_err();
        assert_eq!(error.code, 6);
        assert!(error.msg.contains("1048576 bytes"), "{}", error.msg);
        assert_eq!(read(&b"{}"[..]).unwrap(), b"{}");
    }
}
