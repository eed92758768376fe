//! Reading: text to a flat list of nodes.

use crate::cni::golang;

/// How deep values may nest.
const MAX_DEPTH: usize = 10_000;

/// A text that is JSON.
#[derive(Debug)]
pub(in crate::cni) struct Doc<'a> {
    text: &'a [u8],
    nodes: Vec<Node>,
}

/// One value or key: where it stands, and where the next one does that is not inside of it.
#[derive(Debug)]
struct Node {
    kind: Kind,
    start: usize,
    end: usize,
    next: usize,
}

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cni) enum Kind {
    Null,
    Bool,
    Number,
    String,
    Array,
    Object,
}

/// A value of a [`Doc`].
#[derive(Clone, Copy, Debug)]
pub(in crate::cni) struct Item<'d> {
    doc: &'d Doc<'d>,
    at: usize,
}

impl<'a> Doc<'a> {
    /// Reads one value and nothing behind it; the error is Go's text.
    pub(in crate::cni) fn parse(text: &'a [u8]) -> Result<Self, String> {
        let mut reader = Reader {
            text,
            at: 0,
            nodes: Vec::new(),
            open: Vec::new(),
        };
        reader.document()?;
        Ok(Self {
            text,
            nodes: reader.nodes,
        })
    }

    /// The value.
    pub(in crate::cni) fn root(&'a self) -> Item<'a> {
        Item { doc: self, at: 0 }
    }
}

impl<'d> Item<'d> {
    fn node(&self) -> &'d Node {
        &self.doc.nodes[self.at]
    }

    /// What it is.
    pub(in crate::cni) fn kind(&self) -> Kind {
        self.node().kind
    }

    /// Its text.
    pub(in crate::cni) fn raw(&self) -> &'d [u8] {
        let node = self.node();
        &self.doc.text[node.start..node.end]
    }

    /// The string that it is.
    pub(in crate::cni) fn string(&self) -> Option<String> {
        (self.kind() == Kind::String).then(|| unquote(self.raw()))
    }

    /// The keys, in lower case, and the values of an object; nothing of anything else.
    pub(in crate::cni) fn members(&self) -> impl Iterator<Item = (String, Item<'d>)> + use<'d> {
        let keys = self.inside(Kind::Object, |nodes, key| nodes[key + 1].next);
        keys.map(|key| {
            let value = Item {
                at: key.at + 1,
                ..key
            };
            (fold(&unquote(key.raw())), value)
        })
    }

    /// The elements of an array; nothing of anything else.
    pub(in crate::cni) fn elements(&self) -> impl Iterator<Item = Item<'d>> + use<'d> {
        self.inside(Kind::Array, |nodes, element| nodes[element].next)
    }

    fn inside(
        &self,
        kind: Kind,
        next: fn(&[Node], usize) -> usize,
    ) -> impl Iterator<Item = Item<'d>> + use<'d> {
        let (doc, end) = (self.doc, self.node().next);
        let mut at = if self.kind() == kind {
            self.at + 1
        } else {
            end
        };
        std::iter::from_fn(move || {
            let item = (at < end).then_some(Item { doc, at })?;
            at = next(&doc.nodes, at);
            Some(item)
        })
    }

    /// The value of a key, which is given in lower case; the last one of several. `None` for null.
    pub(in crate::cni) fn get(&self, name: &str) -> Option<Item<'d>> {
        let found = self.members().filter(|(key, _)| key == name).last();
        found
            .map(|(_, value)| value)
            .filter(|value| value.kind() != Kind::Null)
    }
}

/// A key without regard to case: two letters outside of ASCII fold to letters inside.
fn fold(key: &str) -> String {
    key.chars()
        .map(|c| match c {
            '\u{17f}' => 's',
            '\u{212a}' => 'k',
            _ => c.to_ascii_lowercase(),
        })
        .collect()
}

/// What may come next.
#[derive(Clone, Copy, PartialEq)]
enum Expect {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    Nothing,
}

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
    nodes: Vec<Node>,
    /// The arrays and objects that are not closed yet
    open: Vec<usize>,
}

impl Reader<'_> {
    fn document(&mut self) -> Result<(), String> {
        let mut expect = Expect::Value;
        loop {
            while self.peek().is_some_and(is_space) {
                self.at += 1;
            }
            let Some(byte) = self.peek() else {
                return match expect {
                    Expect::Nothing => Ok(()),
                    _ => Err(end()),
                };
            };
            expect = match (expect, byte) {
                (Expect::ValueOrEnd, b']') | (Expect::KeyOrEnd, b'}') => self.close(),
                (Expect::Value | Expect::ValueOrEnd, _) => self.value(byte)?,
                (Expect::Key | Expect::KeyOrEnd, b'"') => {
                    self.string()?;
                    Expect::Colon
                }
                (Expect::Key | Expect::KeyOrEnd, _) => {
                    return Err(invalid(byte, "looking for beginning of object key string"));
                }
                (Expect::Colon, b':') => self.step(Expect::Value),
                (Expect::Colon, _) => return Err(invalid(byte, "after object key")),
                (Expect::CommaOrEnd, _) if self.in_object() => match byte {
                    b',' => self.step(Expect::Key),
                    b'}' => self.close(),
                    _ => return Err(invalid(byte, "after object key:value pair")),
                },
                (Expect::CommaOrEnd, b',') => self.step(Expect::Value),
                (Expect::CommaOrEnd, b']') => self.close(),
                (Expect::CommaOrEnd, _) => return Err(invalid(byte, "after array element")),
                (Expect::Nothing, _) => return Err(invalid(byte, "after top-level value")),
            };
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    /// The next byte of a number, a word or an escape, which the end of the text ends like a space.
    fn next(&mut self) -> u8 {
        let byte = self.peek().unwrap_or(b' ');
        self.at += 1;
        byte
    }

    fn step(&mut self, expect: Expect) -> Expect {
        self.at += 1;
        expect
    }

    fn in_object(&self) -> bool {
        self.open
            .last()
            .is_some_and(|&at| self.nodes[at].kind == Kind::Object)
    }

    fn after(&self) -> Expect {
        if self.open.is_empty() {
            Expect::Nothing
        } else {
            Expect::CommaOrEnd
        }
    }

    fn close(&mut self) -> Expect {
        self.at += 1;
        let next = self.nodes.len();
        if let Some(at) = self.open.pop() {
            let node = &mut self.nodes[at];
            (node.end, node.next) = (self.at, next);
        }
        self.after()
    }

    fn leaf(&mut self, kind: Kind, start: usize) {
        let next = self.nodes.len() + 1;
        self.nodes.push(Node {
            kind,
            start,
            end: self.at,
            next,
        });
    }

    fn value(&mut self, byte: u8) -> Result<Expect, String> {
        let start = self.at;
        match byte {
            b'{' | b'[' => {
                let (kind, expect) = match byte {
                    b'{' => (Kind::Object, Expect::KeyOrEnd),
                    _ => (Kind::Array, Expect::ValueOrEnd),
                };
                self.open.push(self.nodes.len());
                if self.open.len() > MAX_DEPTH {
                    return Err(invalid(byte, "exceeded max depth"));
                }
                self.leaf(kind, start);
                return Ok(self.step(expect));
            }
            b'"' => self.string()?,
            b'-' | b'0'..=b'9' => self.number(start)?,
            b't' => self.word("true", Kind::Bool)?,
            b'f' => self.word("false", Kind::Bool)?,
            b'n' => self.word("null", Kind::Null)?,
            _ => return Err(invalid(byte, "looking for beginning of value")),
        }
        Ok(self.after())
    }

    fn string(&mut self) -> Result<(), String> {
        let start = self.at;
        self.at += 1;
        loop {
            let byte = self.peek().ok_or_else(end)?;
            self.at += 1;
            match byte {
                b'"' => break,
                b'\\' => self.escape()?,
                0..0x20 => return Err(invalid(byte, "in string literal")),
                _ => {}
            }
        }
        self.leaf(Kind::String, start);
        Ok(())
    }

    fn escape(&mut self) -> Result<(), String> {
        match self.next() {
            b'b' | b'f' | b'n' | b'r' | b't' | b'\\' | b'/' | b'"' => Ok(()),
            b'u' => (0..4).try_for_each(|_| match self.next() {
                byte if byte.is_ascii_hexdigit() => Ok(()),
                byte => Err(invalid(byte, "in \\u hexadecimal character escape")),
            }),
            byte => Err(invalid(byte, "in string escape code")),
        }
    }

    fn word(&mut self, word: &str, kind: Kind) -> Result<(), String> {
        let start = self.at;
        for expected in word.bytes() {
            let byte = self.next();
            if byte != expected {
                let context = format!("in literal {word} (expecting '{}')", char::from(expected));
                return Err(invalid(byte, &context));
            }
        }
        self.leaf(kind, start);
        Ok(())
    }

    fn number(&mut self, start: usize) -> Result<(), String> {
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        match self.next() {
            b'0' => {}
            b'1'..=b'9' => self.digits(),
            byte => return Err(invalid(byte, "in numeric literal")),
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            match self.next() {
                b'0'..=b'9' => self.digits(),
                byte => {
                    return Err(invalid(byte, "after decimal point in numeric literal"));
                }
            }
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            match self.next() {
                b'0'..=b'9' => self.digits(),
                byte => return Err(invalid(byte, "in exponent of numeric literal")),
            }
        }
        self.leaf(Kind::Number, start);
        Ok(())
    }

    fn digits(&mut self) {
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

fn end() -> String {
    "unexpected end of JSON input".to_owned()
}

fn invalid(byte: u8, context: &str) -> String {
    format!("invalid character {} {context}", golang::quote_byte(byte))
}

/// What a string's text, quotes included, means. Lone surrogates become U+FFFD.
fn unquote(raw: &[u8]) -> String {
    let inner = raw.get(1..raw.len().saturating_sub(1)).unwrap_or_default();
    if !inner.contains(&b'\\') {
        return golang::text(inner);
    }
    let mut out = String::with_capacity(inner.len());
    let mut rest = inner;
    while let Some(at) = rest.iter().position(|&byte| byte == b'\\') {
        out.push_str(&golang::text(&rest[..at]));
        let code = rest.get(at + 1).copied().unwrap_or(b'\\');
        rest = rest.get(at + 2..).unwrap_or_default();
        out.push(match code {
            b'b' => '\x08',
            b'f' => '\x0c',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => unicode(&mut rest),
            other => char::from(other),
        });
    }
    out.push_str(&golang::text(rest));
    out
}

/// The character of four hexadecimal digits, or of two such escapes that are one character.
fn unicode(rest: &mut &[u8]) -> char {
    let unit = |text: &[u8]| u16::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok();
    let Some(first) = rest.get(..4).and_then(unit) else {
        return '\u{fffd}';
    };
    *rest = &rest[4..];
    let second = rest
        .strip_prefix(b"\\u")
        .and_then(|rest| rest.get(..4))
        .and_then(unit);
    let pair = [Some(first), second].into_iter().flatten();
    match char::decode_utf16(pair).next() {
        Some(Ok(c)) => {
            if c.len_utf16() == 2 {
                *rest = &rest[6..];
            }
            c
        }
        _ => '\u{fffd}',
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Doc::parse(text.as_bytes()).unwrap_err()
    }

    #[test]
    fn faults_of_syntax_have_gos_texts() {
        for (text, fault) in [
            ("", "unexpected end of JSON input"),
            (" {", "unexpected end of JSON input"),
            ("{\"a", "unexpected end of JSON input"),
            (
                "{a}",
                "invalid character 'a' looking for beginning of object key string",
            ),
            ("{\"a\" 1}", "invalid character '1' after object key"),
            (
                "{\"a\":1 2}",
                "invalid character '2' after object key:value pair",
            ),
            (
                "{\"a\":1,}",
                "invalid character '}' looking for beginning of object key string",
            ),
            (
                "[1,]",
                "invalid character ']' looking for beginning of value",
            ),
            ("[1 2]", "invalid character '2' after array element"),
            ("{} x", "invalid character 'x' after top-level value"),
            ("01", "invalid character '1' after top-level value"),
            ("-", "invalid character ' ' in numeric literal"),
            (
                "1.",
                "invalid character ' ' after decimal point in numeric literal",
            ),
            (
                "1ex",
                "invalid character 'x' in exponent of numeric literal",
            ),
            (
                "tru",
                "invalid character ' ' in literal true (expecting 'e')",
            ),
            (
                "nil",
                "invalid character 'i' in literal null (expecting 'u')",
            ),
            ("\"a\nb\"", "invalid character '\\n' in string literal"),
            ("\"\\q\"", "invalid character 'q' in string escape code"),
            (
                "\"\\u12x4\"",
                "invalid character 'x' in \\u hexadecimal character escape",
            ),
            (
                "'a'",
                "invalid character '\\'' looking for beginning of value",
            ),
        ] {
            assert_eq!(error(text), fault, "{text}");
        }
    }

    #[test]
    fn nesting_is_bounded_and_costs_no_stack() {
        let deep = "[".repeat(10_000) + &"]".repeat(10_000);
        assert!(Doc::parse(deep.as_bytes()).is_ok());
        let deeper = "[".repeat(1_000_000);
        assert_eq!(error(&deeper), "invalid character '[' exceeded max depth");
    }

    #[test]
    fn keys_are_found_without_regard_to_case_and_the_last_one_counts() {
        let text = br#"{"A": 1, "\u0061": [true, {"x": null}], "b\n": "\ud83d\ude00\ud83d\u0041", "\u017fub": 3}"#;
        let doc = Doc::parse(text).unwrap();
        let a = doc.root().get("a").unwrap();
        assert_eq!((a.kind(), a.elements().count()), (Kind::Array, 2));
        assert!(
            a.elements().last().unwrap().get("x").is_none(),
            "null is nothing"
        );
        let b = doc.root().get("b\n").unwrap();
        assert_eq!(b.string().as_deref(), Some("\u{1f600}\u{fffd}A"));
        assert_eq!(doc.root().get("sub").unwrap().raw(), b"3");
        assert_eq!(doc.root().members().count(), 4);
        assert_eq!(a.members().count() + b.elements().count(), 0);
    }

    #[test]
    fn bytes_that_are_no_utf8_are_replaced_one_by_one() {
        let doc = Doc::parse(b"\"a\xe2\x82b\xff\"").unwrap();
        assert_eq!(
            doc.root().string().as_deref(),
            Some("a\u{fffd}\u{fffd}b\u{fffd}")
        );
    }
}
