//! The plugin's own configuration: the `ipam` section, what the runtime adds to it, and `CNI_ARGS`.
//!
//! Every key is optional. Only what a command needs is read, so that a DEL does not fail over
//! something that only an ADD would use.

use std::path::PathBuf;

use crate::PodRef;
use crate::cni::args::{self, Args};
use crate::cni::error::{CniError, INVALID_CONFIG, INVALID_ENVIRONMENT};
use crate::cni::golang::{self, IpNet};
use crate::cni::json::Value;
use cadastre_core::Addr;

const SOCKET: &str = "/run/cadastre/cni.sock";
const STORE: &str = "/var/lib/cadastre/node.redb";

/// Where the addresses of the node are asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Places {
    /// The agent's socket
    pub(super) socket: PathBuf,
    /// The store, for when no agent answers
    pub(super) store: PathBuf,
}

/// What an ADD asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Wishes {
    pub(super) pools: Vec<String>,
    pub(super) addresses: Vec<Addr>,
    pub(super) pod: Option<PodRef>,
}

fn wrong(msg: String) -> CniError {
    CniError::new(INVALID_CONFIG, msg)
}

impl Places {
    pub(super) fn read(root: &Value) -> Result<Self, CniError> {
        let path = |key: &str, usual: &str| {
            let Some(item) = root.get("ipam").and_then(|ipam| ipam.get(key)) else {
                return Ok(PathBuf::from(usual));
            };
            let path = item.as_str().filter(|path| path.starts_with('/'));
            path.map(PathBuf::from).ok_or_else(|| {
                wrong(format!(
                    "ipam.{key} of the network config is no absolute path: write one, or leave it out for {usual}"
                ))
            })
        };
        Ok(Self {
            socket: path("socket", SOCKET)?,
            store: path("store", STORE)?,
        })
    }
}

impl Wishes {
    /// Addresses come from the first of these that has any: the capability `ips`, `args.cni.ips`,
    /// `IP` of `CNI_ARGS`, `ipam.addresses`.
    pub(super) fn read(root: &Value, env_args: &[u8]) -> Result<Self, CniError> {
        let ipam = root.get("ipam");
        let env = Args::parse(env_args)
            .map_err(|text| CniError::new(INVALID_ENVIRONMENT, format!("CNI_ARGS: {text}")))?;
        known(&env)?;
        let pools = ipam.and_then(|ipam| ipam.get("pools"));
        let pools = texts(pools, "ipam.pools", "names of pools")?;
        if pools.iter().any(String::is_empty) {
            return Err(wrong(
                "ipam.pools has an empty name: take it out".to_owned(),
            ));
        }
        let runtime = root.get("runtimeconfig").and_then(|it| it.get("ips"));
        let cni = root.get("args").and_then(|it| it.get("cni"));
        let mut places = vec![
            (
                "runtimeConfig.ips",
                texts(runtime, "runtimeConfig.ips", "addresses")?,
            ),
            (
                "args.cni.ips",
                texts(
                    cni.and_then(|it| it.get("ips")),
                    "args.cni.ips",
                    "addresses",
                )?,
            ),
        ];
        let ip = env.get("IP").filter(|ip| !ip.is_empty());
        places.push(("IP of CNI_ARGS", ip.map(golang::text).into_iter().collect()));
        let listed = ipam.and_then(|ipam| ipam.get("addresses"));
        places.push((
            "ipam.addresses",
            texts(listed, "ipam.addresses", "addresses")?,
        ));
        let asked = places.into_iter().find(|(_, texts)| !texts.is_empty());
        let (place, asked) = asked.unwrap_or_default();
        let addresses = asked.iter().map(|text| address(text, place));
        Ok(Self {
            pools,
            addresses: addresses.collect::<Result<_, _>>()?,
            pod: pod(&env),
        })
    }
}

/// Refuses keys that nobody knows, unless it is said that they may be there.
fn known(env: &Args) -> Result<(), CniError> {
    let ours = |key: &[u8]| key.starts_with(b"K8S_POD_") || matches!(key, b"IP" | b"IgnoreUnknown");
    let unknown: Vec<String> = env
        .pairs()
        .filter(|(key, _)| !ours(key))
        .map(|(key, value)| args::quote_pair(key, value))
        .collect();
    let ignore = env
        .get("IgnoreUnknown")
        .is_some_and(|value| args::parse_bool(value) == Ok(true));
    if unknown.is_empty() || ignore {
        return Ok(());
    }
    let msg = format!(
        "CNI_ARGS has {}, which cadastre-ipam does not know: it takes IP, K8S_POD_NAMESPACE, K8S_POD_NAME and K8S_POD_UID; add IgnoreUnknown=1 to pass over others",
        unknown.join(", ")
    );
    Err(CniError::new(INVALID_ENVIRONMENT, msg))
}

fn texts(value: Option<&Value>, key: &str, what: &str) -> Result<Vec<String>, CniError> {
    let Some(value) = value else {
        return Ok(Vec::new());
    };
    let texts = value.as_array().and_then(|items| {
        let texts = items.iter().map(|it| it.as_str().map(str::to_owned));
        texts.collect::<Option<Vec<_>>>()
    });
    texts.ok_or_else(|| {
        wrong(format!(
            "{key} of the network config is no list of {what}: write [\"…\"], or leave it out"
        ))
    })
}

/// An address, also with a prefix length, which does not count.
fn address(text: &str, place: &str) -> Result<Addr, CniError> {
    let net = IpNet::parse(text).map(|net| net.ip);
    net.or_else(|| golang::parse_ip(text)).ok_or_else(|| {
        let text = golang::quote(text.as_bytes());
        wrong(format!("{place}: {text} is no IP address"))
    })
}

fn pod(env: &Args) -> Option<PodRef> {
    let value = |key| env.get(key).map(golang::text).unwrap_or_default();
    let pod = PodRef {
        namespace: value("K8S_POD_NAMESPACE"),
        name: value("K8S_POD_NAME"),
        uid: value("K8S_POD_UID"),
    };
    (pod != PodRef::default()).then_some(pod)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wishes(text: &str, args: &str) -> Result<Wishes, CniError> {
        let root = Value::parse(text.as_bytes()).unwrap();
        Wishes::read(&root, args.as_bytes())
    }

    fn addresses(text: &str, args: &str) -> Vec<String> {
        let wishes = wishes(text, args).unwrap();
        wishes.addresses.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn nothing_is_needed() {
        assert_eq!(wishes("{}", ""), Ok(Wishes::default()));
        let places = Places::read(&Value::Null).unwrap();
        assert_eq!(places.socket, PathBuf::from(SOCKET));
        assert_eq!(places.store, PathBuf::from(STORE));
    }

    #[test]
    fn the_nearest_wish_for_addresses_counts() {
        let mut text = r#"{"ipam":{"addresses":["10.0.0.1","fd00::1/64"]},"args":{"cni":{"ips":["10.0.0.3"]}},"runtimeConfig":{"ips":["10.0.0.4/24"]}}"#.to_owned();
        assert_eq!(addresses(&text, "IP=10.0.0.2"), ["10.0.0.4"]);
        text = text.replace("runtimeConfig", "other");
        assert_eq!(addresses(&text, "IP=10.0.0.2"), ["10.0.0.3"]);
        text = text.replace("args", "other");
        assert_eq!(addresses(&text, "IP=10.0.0.2"), ["10.0.0.2"]);
        assert_eq!(addresses(&text, "IP="), ["10.0.0.1", "fd00::1"]);
    }

    #[test]
    fn the_pod_is_told_in_any_order() {
        let args = "K8S_POD_UID=u;IgnoreUnknown=1;K8S_POD_NAME=n;OTHER=x;K8S_POD_NAMESPACE=s";
        let pod = wishes("{}", args).unwrap().pod.unwrap();
        assert_eq!(
            (pod.namespace.as_str(), pod.name.as_str(), pod.uid.as_str()),
            ("s", "n", "u")
        );
        assert_eq!(wishes("{}", "IgnoreUnknown=1").unwrap().pod, None);
    }

    #[test]
    fn garbage_is_named_with_what_to_do() {
        for (text, args, code, says) in [
            (
                r#"{"ipam":{"pools":"a"}}"#,
                "",
                7,
                "ipam.pools of the network config is no list",
            ),
            (r#"{"ipam":{"pools":[""]}}"#, "", 7, "empty name"),
            (
                r#"{"ipam":{"addresses":["x"]}}"#,
                "",
                7,
                "ipam.addresses: \"x\" is no IP address",
            ),
            ("{}", "IP=x", 7, "IP of CNI_ARGS: \"x\""),
            ("{}", "IP", 4, "CNI_ARGS: ARGS: invalid pair \"IP\""),
            ("{}", "A=1;B=2", 4, "has \"A=1\", \"B=2\", which"),
            ("{}", "A=1;IgnoreUnknown=0", 4, "IgnoreUnknown=1"),
        ] {
            let error = wishes(text, args).unwrap_err();
            assert_eq!(error.code, code, "{text} {args}");
            assert!(error.msg.contains(says), "{}", error.msg);
        }
        let root = Value::parse(br#"{"ipam":{"socket":"x"}}"#).unwrap();
        assert_eq!(Places::read(&root).unwrap_err().code, 7);
    }
}
