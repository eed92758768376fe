//! `CNI_ARGS`: `KEY=value` pairs with `;` between them.

use super::golang;

/// Pairs, and whether those that nobody knows may be passed over.
#[derive(Debug, Default)]
pub(super) struct Args {
    pairs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Args {
    /// Splits a text into pairs; the error is the Go library's text.
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        let mut args = Self::default();
        if text.is_empty() {
            return Ok(args);
        }
        for pair in text.split(|&byte| byte == b';') {
            let parts: Vec<&[u8]> = pair.split(|&byte| byte == b'=').collect();
            let [key, value] = parts[..] else {
                return Err(format!("ARGS: invalid pair {}", golang::quote(pair)));
            };
            args.pairs.push((key.to_owned(), value.to_owned()));
        }
        Ok(args)
    }

    /// The pairs in their order.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.pairs
            .iter()
            .map(|(key, value)| (key.as_slice(), value.as_slice()))
    }

    /// The last value of a key.
    pub(super) fn get(&self, name: &str) -> Option<&[u8]> {
        let found = self.pairs().filter(|(key, _)| *key == name.as_bytes());
        found.last().map(|(_, value)| value)
    }
}

/// `key=value`, quoted.
pub(super) fn quote_pair(key: &[u8], value: &[u8]) -> String {
    golang::quote(&[key, b"=", value].concat())
}

/// The library's boolean: `1` or `true`, `0` or `false`, in any case.
pub(super) fn parse_bool(value: &[u8]) -> Result<bool, String> {
    let text = golang::text(value).to_lowercase();
    match text.as_str() {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err(format!("boolean unmarshal error: invalid input {text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_is_one_pair() {
        let args = Args::parse(b"IP=10.0.0.1;A=;IP=10.0.0.2").unwrap();
        assert_eq!(args.get("IP"), Some(b"10.0.0.2".as_slice()));
        assert_eq!(
            (args.get("A"), args.get("ip")),
            (Some(b"".as_slice()), None)
        );
        assert!(Args::parse(b"").unwrap().pairs.is_empty());
        let fault = |text: &[u8]| Args::parse(text).unwrap_err();
        assert_eq!(fault(b"A=1;"), r#"ARGS: invalid pair """#);
        assert_eq!(fault(b"A=1=2"), r#"ARGS: invalid pair "A=1=2""#);
        assert_eq!(fault(b"a\n\xff"), r#"ARGS: invalid pair "a\n\xff""#);
    }

    #[test]
    fn booleans_are_the_librarys() {
        assert_eq!(parse_bool(b"TRUE"), Ok(true));
        assert_eq!(parse_bool(b"0"), Ok(false));
        assert_eq!(
            parse_bool(b"Yes").unwrap_err(),
            "boolean unmarshal error: invalid input yes"
        );
    }
}
