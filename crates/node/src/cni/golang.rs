//! What callers can see of Go's standard library.
//!
//! Runtimes, scripts and people know the texts of the published plugins, and those come from Go:
//! how a string is quoted, how the kernel's errors are worded, which forms of an address are read. A
//! drop-in says the same.

use std::fmt::Write as _;
use std::io;
use std::net::IpAddr;

use cadastre_core::{Addr, Family};

/// Bytes as text; each byte that is no UTF-8 becomes U+FFFD.
pub(super) fn text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().map(|_| '\u{fffd}'));
    }
    text
}

/// `%q`: in double quotes, with escapes for what does not print.
pub(super) fn quote(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len() + 2);
    out.push('"');
    for chunk in bytes.utf8_chunks() {
        chunk.valid().chars().for_each(|c| quote_char(&mut out, c));
        for byte in chunk.invalid() {
            let _ = write!(out, "\\x{byte:02x}");
        }
    }
    out.push('"');
    out
}

/// A key of JSON without regard to case: two letters outside of ASCII fold to letters inside.
pub(super) fn fold(key: &str) -> String {
    let key = key.chars().map(|c| match c {
        '\u{17f}' => 's',
        '\u{212a}' => 'k',
        _ => c.to_ascii_lowercase(),
    });
    key.collect()
}

/// JSON with what HTML would take amiss escaped. None of it can stand outside of a string.
pub(super) fn escape_html(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                escape(&mut out, format_args!("\\u{:04x}", u32::from(c)));
            }
            _ => out.push(c),
        }
    }
    out
}

/// `%q` of a list of strings.
pub(super) fn quote_all<'a>(texts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let quoted: Vec<String> = texts.into_iter().map(quote).collect();
    format!("[{}]", quoted.join(" "))
}

fn quote_char(out: &mut String, c: char) {
    match c {
        '\\' => out.push_str("\\\\"),
        '"' => out.push_str("\\\""),
        '\x07' => out.push_str("\\a"),
        '\x08' => out.push_str("\\b"),
        '\x0c' => out.push_str("\\f"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\x0b' => out.push_str("\\v"),
        ' '..='~' => out.push(c),
        _ if c.is_ascii() => escape(out, format_args!("\\x{:02x}", u32::from(c))),
        _ if !prints(c) && u32::from(c) > 0xffff => {
            escape(out, format_args!("\\U{:08x}", u32::from(c)));
        }
        _ if !prints(c) => escape(out, format_args!("\\u{:04x}", u32::from(c))),
        _ => out.push(c),
    }
}

fn escape(out: &mut String, code: std::fmt::Arguments<'_>) {
    let _ = out.write_fmt(code);
}

fn prints(c: char) -> bool {
    // Soft hyphen, joiners, marks of direction and byte order: letters to nobody.
    let format = matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff0}'..='\u{fffb}');
    !(c.is_control() || c.is_whitespace() || format)
}

/// `net.ParseIP`: no zones, no leading zeros; an IPv4-mapped address is IPv4.
pub(super) fn parse_ip(text: &str) -> Option<Addr> {
    let ip: IpAddr = text.parse().ok()?;
    Some(Addr::from(ip.to_canonical()))
}

/// An address with the prefix length that was written behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IpNet {
    /// The address with its host bits; IPv4 if it was written as IPv4-mapped
    pub(super) ip: Addr,
    /// The prefix length
    pub(super) ones: u8,
    /// The bits of the mask: 32, or 128 also of an address written as IPv4-mapped
    pub(super) bits: u8,
}

impl IpNet {
    /// `net.ParseCIDR`, host bits kept.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (ip, ones) = text.split_once('/')?;
        let ip: IpAddr = ip.parse().ok()?;
        let bits = Addr::from(ip).family.bits();
        if ones.is_empty() || !ones.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let ones = ones.parse().ok().filter(|&ones| ones <= bits)?;
        let ip = Addr::from(ip.to_canonical());
        Some(Self { ip, ones, bits })
    }
}

impl std::fmt::Display for IpNet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mapped = self.bits == 128 && self.ip.family == Family::V4;
        let ones = self.ones.saturating_sub(if mapped { 96 } else { 0 });
        write!(f, "{}/{ones}", self.ip)
    }
}

/// `strconv.Atoi`, with its error's text.
pub(super) fn atoi(text: &str) -> Result<i64, String> {
    let fault = |what: &str| format!("strconv.Atoi: parsing {}: {what}", quote(text.as_bytes()));
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(fault("invalid syntax"));
    }
    text.parse().map_err(|_| fault("value out of range"))
}

/// The kernel's error in Go's words: lower case, no number.
pub(super) fn errno(error: &io::Error) -> String {
    // What the C libraries word differently, and what is met most often.
    let known = match error.raw_os_error() {
        Some(1) => "operation not permitted",
        Some(2) => "no such file or directory",
        Some(5) => "input/output error",
        Some(13) => "permission denied",
        Some(17) => "file exists",
        Some(20) => "not a directory",
        Some(21) => "is a directory",
        Some(22) => "invalid argument",
        Some(23) => "too many open files in system",
        Some(24) => "too many open files",
        Some(27) => "file too large",
        Some(28) => "no space left on device",
        Some(30) => "read-only file system",
        Some(36) => "file name too long",
        Some(40) => "too many levels of symbolic links",
        Some(122) => "disk quota exceeded",
        _ => {
            let text = error.to_string();
            let text = text.split(" (os error").next().unwrap_or_default();
            return text.to_lowercase();
        }
    };
    known.to_owned()
}

/// `filepath.Clean`: by text alone, without asking the file system.
pub(super) fn clean(path: &str) -> String {
    let rooted = path.starts_with('/');
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." if parts.last().is_some_and(|last| *last != "..") => {
                parts.pop();
            }
            ".." if rooted => {}
            _ => parts.push(part),
        }
    }
    match (rooted, parts.join("/")) {
        (true, path) => format!("/{path}"),
        (false, path) if path.is_empty() => ".".to_owned(),
        (false, path) => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_quoted_as_go_quotes_them() {
        assert_eq!(quote(b"a\"b\\c"), r#""a\"b\\c""#);
        assert_eq!(quote(b"\x00\x07\n\x7f\xff"), r#""\x00\a\n\x7f\xff""#);
        assert_eq!(
            quote("é\u{a0}'\u{1f600}".as_bytes()),
            "\"é\\u00a0'\u{1f600}\""
        );
    }

    #[test]
    fn addresses_are_read_as_go_reads_them() {
        let ip = |text: &str| parse_ip(text).map(|ip| ip.to_string());
        assert_eq!(ip("::ffff:10.0.0.1").as_deref(), Some("10.0.0.1"));
        assert_eq!(ip("FD00::0:1").as_deref(), Some("fd00::1"));
        for bad in ["", "10.0.0.01", "fe80::1%eth0", " 10.0.0.1", "10.0.0.1/8"] {
            assert_eq!(ip(bad), None, "{bad}");
        }
        let net = |text: &str| IpNet::parse(text).map(|net| net.to_string());
        assert_eq!(net("10.1.2.3/016").as_deref(), Some("10.1.2.3/16"));
        assert_eq!(net("::ffff:10.0.0.0/120").as_deref(), Some("10.0.0.0/24"));
        for bad in [
            "10.0.0.0",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.0/+8",
            "10.0.0.0/8/8",
        ] {
            assert_eq!(net(bad), None, "{bad}");
        }
    }

    #[test]
    fn paths_are_cleaned_by_text_alone() {
        for (path, clean_path) in [
            ("/a/../b/./c//d/", "/b/c/d"),
            ("/../a", "/a"),
            ("../a/..", ".."),
            ("a/..", "."),
            ("", "."),
            ("/", "/"),
        ] {
            assert_eq!(clean(path), clean_path);
        }
    }
}
