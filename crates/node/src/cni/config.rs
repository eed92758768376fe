//! Reads the network config from standard input.
//!
//! Every CNI plugin of a chain reads the same config, and other plugins are written in Go. Therefore this module reads
//! a config as Go does: keys are compared without regard to case, unknown keys are ignored, `null` counts as absent,
//! and of a repeated key the last value counts. This module differs from Go in one point: if two keys of an object
//! differ only in case, this module reports an error.

use std::io::Read;

use cadastre_core::Addr;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::address::IpNet;
use super::error::{CniError, DECODING_FAILURE, INVALID_CONFIG, IO_FAILURE};
use super::request::{NAME_RULE, is_name};

/// Maximum size of a config in bytes. A config with 8,000 valid attachments has 1,000,000 bytes.
const MAX_CONFIG: usize = 1024 * 1024;

/// A network config whose name has been checked.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) name: String,
    root: Value,
}

/// An attachment that the container runtime lists as valid.
#[derive(Deserialize, Debug)]
pub(super) struct ValidAttachment {
    #[serde(rename = "containerid")]
    pub(super) container_id: String,
    pub(super) ifname: String,
}

impl Config {
    /// Reads and parses a config. Fails if the text is longer than [`MAX_CONFIG`].
    pub(super) fn read_from(stdin: impl Read) -> Result<Self, CniError> {
        let mut text = Vec::new();
        let read = stdin.take(MAX_CONFIG as u64 + 1).read_to_end(&mut text);
        read.map_err(|error| {
            CniError::new(
                IO_FAILURE,
                format!("cannot read the network config: {error}"),
            )
        })?;
        if text.len() > MAX_CONFIG {
            let msg = format!("the network config has more than {MAX_CONFIG} bytes: shorten it");
            return Err(CniError::new(DECODING_FAILURE, msg));
        }
        Self::parse(&text)
    }

    pub(super) fn parse(text: &[u8]) -> Result<Self, CniError> {
        let undecodable = |error: String| {
            let msg = format!("the network config cannot be decoded: {error}; correct it there");
            CniError::new(DECODING_FAILURE, msg)
        };
        let root: Value =
            serde_json::from_slice(text).map_err(|error| undecodable(error.to_string()))?;
        let root = with_lower_case_keys(root).map_err(undecodable)?;
        if !root.is_object() {
            return Err(undecodable("it is not an object".to_owned()));
        }
        let mut config = Self {
            name: String::new(),
            root,
        };
        config.name = config.get_or_default(&["name"]).map_err(undecodable)?;
        if is_name(&config.name) {
            return Ok(config);
        }
        let msg = format!(
            "the network config has the name {:?}: {NAME_RULE}",
            config.name
        );
        Err(CniError::new(INVALID_CONFIG, msg))
    }

    /// Returns `cniVersion` as it is written. If the config has none, returns the first version of the CNI protocol.
    pub(super) fn version(&self) -> Result<String, CniError> {
        let version: Option<String> = self
            .get(&["cniVersion"])
            .map_err(|error| CniError::new(DECODING_FAILURE, error))?;
        Ok(version
            .filter(|it| !it.is_empty())
            .unwrap_or("0.1.0".to_owned()))
    }

    pub(super) fn has(&self, path: &[&str]) -> bool {
        self.find(path).is_some()
    }

    /// Decodes the value at a path of keys. Returns `None` if there is no value.
    pub(super) fn get<T: DeserializeOwned>(&self, path: &[&str]) -> Result<Option<T>, String> {
        let value = self.find(path).map(T::deserialize).transpose();
        value.map_err(|error| {
            let path = path.join(".");
            format!("{path} of the network config: {error}; correct it, or leave it out")
        })
    }

    /// Decodes the value at a path of keys. If there is no value, returns the default of the type, such as an empty
    /// list.
    pub(super) fn get_or_default<T>(&self, path: &[&str]) -> Result<T, String>
    where
        T: DeserializeOwned + Default,
    {
        self.get(path).map(Option::unwrap_or_default)
    }

    fn find(&self, path: &[&str]) -> Option<&Value> {
        let mut keys = path.iter().map(|key| key.to_ascii_lowercase());
        keys.try_fold(&self.root, |value, key| value.get(key))
    }

    /// Returns the addresses of the previous result. Skips addresses that cannot be parsed.
    pub(super) fn previous(&self) -> Vec<Addr> {
        let ips = self.find(&["prevResult", "ips"]).and_then(Value::as_array);
        let address = |ip: &Value| Some(IpNet::deserialize(ip.get("address")?).ok()?.ip);
        ips.into_iter().flatten().filter_map(address).collect()
    }

    /// Returns the attachments that the container runtime lists as valid. Fails if the list is missing or unreadable,
    /// because GC must not release any address without a complete list.
    pub(super) fn valid(&self) -> Result<Vec<ValidAttachment>, CniError> {
        // An early version of the specification uses the second key, `cni.dev/attachments`. libcni sends both keys.
        let list = self.get(&["cni.dev/valid-attachments"]).transpose();
        let list = list.or_else(|| self.get(&["cni.dev/attachments"]).transpose());
        list.unwrap_or_else(|| Err("it has no cni.dev/valid-attachments".to_owned()))
            .map_err(|error| {
                let msg = format!(
                    "GC released nothing: {error}; the runtime has to list every attachment that exists, as {{containerID, ifname}}"
                );
                CniError::new(INVALID_CONFIG, msg)
            })
    }
}

/// Converts the keys of all objects to lower case, and removes nulls from objects. Fails if two keys of an object
/// become equal.
fn with_lower_case_keys(value: Value) -> Result<Value, String> {
    Ok(match value {
        Value::Array(items) => {
            let items = items.into_iter().map(with_lower_case_keys);
            items.collect::<Result<_, _>>()?
        }
        Value::Object(members) => {
            let mut folded = Map::new();
            for (key, value) in members {
                let value = with_lower_case_keys(value)?;
                if folded.insert(key.to_ascii_lowercase(), value).is_some() {
                    return Err(format!("the key {key:?} occurs twice"));
                }
            }
            folded.retain(|_, value| !value.is_null());
            folded.into()
        }
        value => value,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(more: &str) -> Config {
        Config::parse(format!(r#"{{"name":"net"{more}}}"#).as_bytes()).unwrap()
    }

    #[test]
    fn keys_have_no_case_and_null_is_absent() {
        let config = config(r#","IPAM":{"DataDir":"a","\u0073ubnet":null},"x":[{"y":1}]"#);
        assert_eq!(config.get(&["ipam", "dataDir"]), Ok(Some("a".to_owned())));
        assert!(!config.has(&["ipam", "subnet"]) && config.has(&["x"]));
        let error = config.get::<i64>(&["ipam", "dataDir"]).unwrap_err();
        assert!(error.starts_with("ipam.dataDir of the network config: invalid type"));
    }

    #[test]
    fn an_undecodable_config_is_an_error_with_its_place() {
        let deep = "[".repeat(1_000_000);
        for (text, code, says) in [
            ("", 6, "EOF while parsing a value at line 1 column 0"),
            ("[]", 6, "not an object"),
            ("{}\nx", 6, "trailing characters at line 2 column 1"),
            (r#"{"a":1,"A":null}"#, 6, "\"a\" occurs twice"),
            (r#"{"a":"\ud83d"}"#, 6, "hex escape"),
            (r#"{"name":[]}"#, 6, "name of the network config"),
            (&deep, 6, "recursion limit exceeded"),
            ("{}", 7, "the name \"\""),
            (r#"{"name":"../x"}"#, 7, "../x"),
        ] {
            let error = Config::parse(text.as_bytes()).unwrap_err();
            assert_eq!(error.code, code, "{text}");
            assert!(error.msg.contains(says), "{}", error.msg);
        }
        assert!(Config::parse(b"{\"name\":\"\xff\"}").is_err());
    }

    #[test]
    fn more_than_a_mebibyte_is_not_read() {
        let error = Config::read_from(std::io::repeat(b' ')).unwrap_err();
        assert_eq!(error.code, 6);
        assert!(error.msg.contains("1048576 bytes"), "{}", error.msg);
    }

    #[test]
    fn only_a_complete_list_of_valid_attachments_counts() {
        let ids = |more| config(more).valid().map(|valid| valid.len());
        assert_eq!(ids(r#","cni.dev/valid-attachments":[]"#), Ok(0));
        let early = r#","cni.dev/attachments":[{"containerID":"a","ifname":"b"}]"#;
        assert_eq!(ids(early), Ok(1));
        for more in [
            "",
            r#","cni.dev/valid-attachments":null"#,
            r#","cni.dev/valid-attachments":{}"#,
            r#","cni.dev/valid-attachments":[{"containerID":"a"}]"#,
        ] {
            let error = ids(more).unwrap_err();
            assert!(error.code == 7 && error.msg.contains("released nothing"));
        }
    }

    #[test]
    fn invalid_addresses_of_a_previous_result_are_skipped() {
        let ips = r#","prevResult":{"ips":[{"address":"10.0.0.2/24"},{"address":7},{},{"ADDRESS":"fd00::2/64"}]}"#;
        let ips: Vec<String> = config(ips)
            .previous()
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(ips, ["10.0.0.2", "fd00::2"]);
        assert!(config("").previous().is_empty());
    }
}
