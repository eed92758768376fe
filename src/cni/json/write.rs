//! Writing, as Go does: four spaces, `<`, `>` and `&` escaped, no newline at the end.

use std::fmt::Write as _;

/// A value to write.
#[derive(Clone, Debug)]
pub(in crate::cni) enum Out {
    Null,
    /// A number's text
    Number(String),
    String(String),
    Array(Vec<Out>),
    Object(Vec<(&'static str, Out)>),
}

impl Out {
    /// A list of strings.
    pub(in crate::cni) fn strings(texts: &[String]) -> Self {
        Self::Array(texts.iter().cloned().map(Self::String).collect())
    }

    /// The same with the keys of every object in their order by bytes.
    pub(in crate::cni) fn sorted(self) -> Self {
        match self {
            Self::Array(items) => Self::Array(items.into_iter().map(Self::sorted).collect()),
            Self::Object(mut members) => {
                members.sort_by_key(|(key, _)| *key);
                let sorted = members
                    .into_iter()
                    .map(|(key, value)| (key, value.sorted()));
                Self::Object(sorted.collect())
            }
            other => other,
        }
    }

    /// Over several lines.
    pub(in crate::cni) fn pretty(&self) -> String {
        let mut out = String::new();
        self.write(&mut out, Some(0));
        out
    }

    /// On one line, without spaces.
    pub(in crate::cni) fn line(&self) -> String {
        let mut out = String::new();
        self.write(&mut out, None);
        out
    }

    fn write(&self, out: &mut String, depth: Option<usize>) {
        match self {
            Self::Null => out.push_str("null"),
            Self::Number(text) => out.push_str(text),
            Self::String(text) => string(out, text),
            Self::Array(items) => list(out, depth, ['[', ']'], items, |out, item, depth| {
                item.write(out, depth);
            }),
            Self::Object(members) => {
                list(
                    out,
                    depth,
                    ['{', '}'],
                    members,
                    |out, (key, value), depth| {
                        string(out, key);
                        out.push_str(if depth.is_some() { ": " } else { ":" });
                        value.write(out, depth);
                    },
                );
            }
        }
    }
}

fn list<T>(
    out: &mut String,
    depth: Option<usize>,
    [open, close]: [char; 2],
    items: &[T],
    mut write: impl FnMut(&mut String, &T, Option<usize>),
) {
    out.push(open);
    let inside = depth.map(|depth| depth + 1);
    for (at, item) in items.iter().enumerate() {
        if at > 0 {
            out.push(',');
        }
        new_line(out, inside);
        write(out, item, inside);
    }
    if !items.is_empty() {
        new_line(out, depth);
    }
    out.push(close);
}

fn new_line(out: &mut String, depth: Option<usize>) {
    if let Some(depth) = depth {
        out.push('\n');
        out.extend(std::iter::repeat_n("    ", depth));
    }
}

fn string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\x08' => out.push_str("\\b"),
            '\x0c' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' | '\0'..' ' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            _ => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_indented_by_four_spaces_and_empty_ones_stay_on_their_line() {
        let value = Out::Object(vec![
            ("b", Out::Array(vec![Out::Number("1".into()), Out::Null])),
            ("a", Out::Object(vec![])),
            ("c", Out::strings(&[])),
        ]);
        assert_eq!(
            value.pretty(),
            "{\n    \"b\": [\n        1,\n        null\n    ],\n    \"a\": {},\n    \"c\": []\n}"
        );
        assert_eq!(value.sorted().line(), r#"{"a":{},"b":[1,null],"c":[]}"#);
    }

    #[test]
    fn what_html_would_take_amiss_is_escaped() {
        let text = Out::String("<&>\u{2028}\"\\\n\u{1}é\u{7f}".to_owned());
        assert_eq!(
            text.line(),
            "\"\\u003c\\u0026\\u003e\\u2028\\\"\\\\\\n\\u0001é\u{7f}\""
        );
    }
}
