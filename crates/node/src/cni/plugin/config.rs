//! The part of the configuration that concerns addresses of the node: the `ipam` section, the fields that the container
//! runtime adds, and `CNI_ARGS`.
//!
//! Every key is optional. Each command reads only the keys that it needs, so a wrong value of a key that only ADD uses
//! does not make a DEL fail.

use std::path::PathBuf;

use crate::PodRef;
use crate::cni::address::parse_host;
use crate::cni::args::CniArgs;
use crate::cni::config::Config;
use crate::cni::error::{CniError, INVALID_CONFIG, INVALID_ENVIRONMENT};
use cadastre_core::Addr;

const SOCKET: &str = "/run/cadastre/cni.sock";
const STORE: &str = "/run/cadastre/node.redb";

/// Where the CNI plugin finds the agent and the store, from the config or by default.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Paths {
    /// Path of the agent's socket
    pub(super) socket: PathBuf,
    /// Path of the store, which is used if no agent answers
    pub(super) store: PathBuf,
}

/// The pools and addresses that an ADD requests, and the pod that is to get them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct RequestedAddresses {
    pub(super) pools: Vec<String>,
    pub(super) addresses: Vec<Addr>,
    pub(super) pod: Option<PodRef>,
}

pub(super) fn wrong(msg: impl Into<String>) -> CniError {
    CniError::new(INVALID_CONFIG, msg)
}

impl Paths {
    pub(super) fn read(config: &Config) -> Result<Self, CniError> {
        let path = |key: &str, default: &str| {
            let path: Option<String> = config.get(&["ipam", key]).map_err(wrong)?;
            let path = path.unwrap_or_else(|| default.to_owned());
            if path.starts_with('/') {
                return Ok(PathBuf::from(path));
            }
            Err(wrong(format!(
                "ipam.{key} of the network config is {path:?}: write an absolute path, or leave it out for {default}"
            )))
        };
        Ok(Self {
            socket: path("socket", SOCKET)?,
            store: path("store", STORE)?,
        })
    }
}

impl RequestedAddresses {
    /// Reads the pools and addresses that an ADD requests. The addresses come from the first of these places that has
    /// any: the capability `ips`, `args.cni.ips`, `IP` of `CNI_ARGS`, `ipam.addresses`.
    pub(super) fn read(config: &Config, env_args: &str) -> Result<Self, CniError> {
        let known = |key: &str| key == "IP" || key.starts_with("K8S_POD_");
        let env = CniArgs::parse(env_args, known)
            .map_err(|text| CniError::new(INVALID_ENVIRONMENT, text))?;
        let texts = |path: &[&str]| config.get_or_default::<Vec<String>>(path).map_err(wrong);
        let pools = texts(&["ipam", "pools"])?;
        if pools.iter().any(String::is_empty) {
            return Err(wrong("ipam.pools has an empty name: remove it"));
        }
        let ip = env.get("IP").filter(|ip| !ip.is_empty());
        let asked = [
            ("runtimeConfig.ips", texts(&["runtimeConfig", "ips"])?),
            ("args.cni.ips", texts(&["args", "cni", "ips"])?),
            (
                "IP of CNI_ARGS",
                ip.map(str::to_owned).into_iter().collect(),
            ),
            ("ipam.addresses", texts(&["ipam", "addresses"])?),
        ];
        let asked = asked.into_iter().find(|(_, texts)| !texts.is_empty());
        let (place, asked) = asked.unwrap_or_default();
        let addresses = asked
            .iter()
            .map(|text| parse_host(text).map_err(|error| wrong(format!("{place}: {error}"))));
        Ok(Self {
            pools,
            addresses: addresses.collect::<Result<_, _>>()?,
            pod: pod(&env),
        })
    }
}

fn pod(env: &CniArgs<'_>) -> Option<PodRef> {
    let value = |key| env.get(key).unwrap_or_default().to_owned();
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

    fn config(more: &str) -> Config {
        Config::parse(format!(r#"{{"name":"net"{more}}}"#).as_bytes()).unwrap()
    }

    fn requested(more: &str, args: &str) -> Result<RequestedAddresses, CniError> {
        RequestedAddresses::read(&config(more), args)
    }

    fn addresses(more: &str, args: &str) -> Vec<String> {
        let requested = requested(more, args).unwrap();
        requested
            .addresses
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn every_key_is_optional() {
        assert_eq!(requested("", ""), Ok(RequestedAddresses::default()));
        let paths = Paths::read(&config("")).unwrap();
        assert_eq!(paths.socket, PathBuf::from(SOCKET));
        assert_eq!(paths.store, PathBuf::from(STORE));
    }

    #[test]
    fn the_first_place_with_addresses_counts() {
        let mut text = r#","ipam":{"addresses":["10.0.0.1","fd00::1/64"]},"args":{"cni":{"ips":["10.0.0.3"]}},"runtimeConfig":{"ips":["10.0.0.4/24"]}"#.to_owned();
        assert_eq!(addresses(&text, "IP=10.0.0.2"), ["10.0.0.4"]);
        text = text.replace("runtimeConfig", "other");
        assert_eq!(addresses(&text, "IP=10.0.0.2"), ["10.0.0.3"]);
        text = text.replace("args", "others");
        assert_eq!(addresses(&text, "IP=10.0.0.2"), ["10.0.0.2"]);
        assert_eq!(addresses(&text, "IP="), ["10.0.0.1", "fd00::1"]);
    }

    #[test]
    fn the_pod_is_read_in_any_order() {
        let args = "K8S_POD_UID=u;IgnoreUnknown=1;K8S_POD_NAME=n;OTHER=x;K8S_POD_NAMESPACE=s";
        let pod = requested("", args).unwrap().pod.unwrap();
        assert_eq!(
            (pod.namespace.as_str(), pod.name.as_str(), pod.uid.as_str()),
            ("s", "n", "u")
        );
        assert_eq!(requested("", "IgnoreUnknown=1").unwrap().pod, None);
    }

    #[test]
    fn errors_name_the_invalid_value() {
        for (text, args, code, says) in [
            (r#","ipam":{"pools":"a"}"#, "", 7, "ipam.pools"),
            (r#","ipam":{"pools":[""]}"#, "", 7, "empty name"),
            (r#","ipam":{"addresses":["x"]}"#, "", 7, "ipam.addresses"),
            ("", "IP=x", 7, "IP of CNI_ARGS: \"x\""),
            ("", "IP", 4, "CNI_ARGS has the part \"IP\""),
            ("", "A=1;IgnoreUnknown=0", 4, "the key \"A\""),
        ] {
            let error = requested(text, args).unwrap_err();
            assert_eq!(error.code, code, "{text} {args}");
            assert!(error.msg.contains(says), "{}", error.msg);
        }
        let relative = config(r#","ipam":{"socket":"x"}"#);
        assert_eq!(Paths::read(&relative).unwrap_err().code, 7);
    }
}
