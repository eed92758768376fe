//! What a config says about attachments that exist: the previous result of one, and all valid ones.

use super::error::{CniError, INVALID_CONFIG};
use super::golang::IpNet;
use super::json::Value;
use cadastre_core::Addr;

/// The addresses of the previous result. What cannot be read is left out.
pub(super) fn previous(root: &Value) -> Vec<Addr> {
    let result = root.get("prevresult");
    let ips = result.and_then(|result| result.get("ips"));
    let ips = ips.and_then(Value::as_array).unwrap_or_default();
    let address = |ip: &Value| {
        let net = IpNet::parse(ip.get("address")?.as_str()?)?;
        Some(net.ip)
    };
    ips.iter().filter_map(address).collect()
}

/// Container id and interface of an attachment that is valid.
pub(super) type Valid = (Vec<u8>, Vec<u8>);

/// Each attachment that is valid. Without a list, or with one that
/// cannot be read in full, nothing must be taken back: that is an error.
pub(super) fn valid(root: &Value) -> Result<Vec<Valid>, CniError> {
    let wrong = |what: &str| {
        let msg = format!(
            "GC: {what} in the config, so nothing was taken back: the runtime has to list every attachment that exists, as {{containerID, ifname}}"
        );
        CniError::new(INVALID_CONFIG, msg)
    };
    // The second spelling is that of an early text of the specification; libcni sends both.
    let list = root.get("cni.dev/valid-attachments");
    let list = list.or_else(|| root.get("cni.dev/attachments"));
    let list = list.ok_or_else(|| wrong("no `cni.dev/valid-attachments`"))?;
    let list = list
        .as_array()
        .ok_or_else(|| wrong("`cni.dev/valid-attachments` that is no list"))?;
    let text = |item: &Value, key| Some(item.get(key)?.as_str()?.as_bytes().to_owned());
    let one = |item| Some((text(item, "containerid")?, text(item, "ifname")?));
    list.iter()
        .map(|item| {
            one(item).ok_or_else(|| {
                wrong("an entry of `cni.dev/valid-attachments` without containerID or ifname")
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on<T>(text: &str, read: impl Fn(&Value) -> T) -> T {
        read(&Value::parse(text.as_bytes()).unwrap())
    }

    #[test]
    fn only_a_whole_list_of_valid_attachments_counts() {
        let ids = |text| {
            let valid = on(text, valid)?;
            Ok::<_, CniError>(valid.len())
        };
        assert_eq!(ids(r#"{"cni.dev/valid-attachments":[]}"#), Ok(0));
        assert_eq!(
            ids(r#"{"cni.dev/attachments":[{"containerID":"a","ifname":"b"}]}"#),
            Ok(1)
        );
        for text in [
            "{}",
            r#"{"cni.dev/valid-attachments":null}"#,
            r#"{"cni.dev/valid-attachments":{}}"#,
            r#"{"cni.dev/valid-attachments":[{"containerID":"a"}]}"#,
        ] {
            let error = ids(text).unwrap_err();
            assert!(error.code == 7 && error.msg.contains("nothing was taken back"));
        }
    }

    #[test]
    fn a_previous_result_is_read_as_far_as_it_can_be() {
        let text = r#"{"prevResult":{"ips":[{"address":"10.0.0.2/24"},{"address":7},{},{"ADDRESS":"fd00::2/64"}]}}"#;
        let ips = on(text, previous)
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>();
        assert_eq!(ips, ["10.0.0.2", "fd00::2"]);
        assert!(on("{}", previous).is_empty());
    }
}
