//! Parses `CNI_ARGS`, which consists of `KEY=value` pairs with `;` between them.

/// The pairs of `CNI_ARGS`, in the order in which `CNI_ARGS` lists them.
#[derive(Debug)]
pub(super) struct CniArgs<'a>(Vec<(&'a str, &'a str)>);

impl<'a> CniArgs<'a> {
    /// Splits a text into pairs. Fails if `is_known` is false for a key, unless the text contains the pair
    /// `IgnoreUnknown=1` or `IgnoreUnknown=true`.
    pub(super) fn parse(text: &'a str, is_known: fn(&str) -> bool) -> Result<Self, String> {
        let pairs = text.split(';').filter(|_| !text.is_empty()).map(|pair| {
            let parts = pair.split_once('=');
            let parts = parts.filter(|(_, value)| !value.contains('='));
            parts.ok_or_else(|| {
                format!(
                    "CNI_ARGS has the part {pair:?}: write KEY=value, with `;` between parts only"
                )
            })
        });
        let args = Self(pairs.collect::<Result<_, _>>()?);
        let ignore = args.get("IgnoreUnknown").unwrap_or("0");
        let ignore = match ignore.to_ascii_lowercase().as_str() {
            "1" | "true" => true,
            "0" | "false" => false,
            _ => {
                return Err(format!(
                    "IgnoreUnknown of CNI_ARGS is {ignore:?}: write 1 or 0"
                ));
            }
        };
        let is_known = |key| key == "IgnoreUnknown" || is_known(key);
        match args.0.iter().find(|(key, _)| !ignore && !is_known(key)) {
            None => Ok(args),
            Some((key, _)) => Err(format!(
                "CNI_ARGS has the key {key:?}, which is not known here: remove it, or add IgnoreUnknown=1"
            )),
        }
    }

    /// Returns the last value of a key.
    pub(super) fn get(&self, name: &str) -> Option<&'a str> {
        let found = self.0.iter().rfind(|(key, _)| *key == name);
        found.map(|(_, value)| *value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_parts_and_unknown_keys_are_rejected() {
        let parse = |text| CniArgs::parse(text, |key| matches!(key, "IP" | "A"));
        let args = parse("IP=10.0.0.1;A=;IP=10.0.0.2").unwrap();
        assert_eq!(args.get("IP"), Some("10.0.0.2"));
        assert_eq!((args.get("A"), args.get("ip")), (Some(""), None));
        assert!(parse("").unwrap().0.is_empty());
        assert!(parse("X=y;IgnoreUnknown=TRUE").is_ok());
        for (text, says) in [
            ("A=1;", "the part \"\""),
            ("A=1=2", "the part \"A=1=2\""),
            ("A", "the part \"A\""),
            ("X=y", "the key \"X\""),
            ("IgnoreUnknown=yes", "write 1 or 0"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
