//! Escaping of untrusted text, so that it cannot forge lines of a log or send commands to a terminal.
//!
//! Control characters, line separators and characters that change the direction of text become JSON escapes. So JSON
//! text still means the same after escaping.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Escapes text that must stay on one line, for example in a log.
pub fn line(text: &str) -> Cow<'_, str> {
    escaped(text, is_active)
}

/// Escapes text that may have several lines, for example for a terminal. Line feeds are kept.
pub fn lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c != '\n' && is_active(c))
}

/// Whether the character controls the terminal, the line or the direction of text.
fn is_active(c: char) -> bool {
    let turns = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns || matches!(c, '\u{2028}' | '\u{2029}')
}

fn escaped(text: &str, is_active: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_active) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            c if !is_active(c) => escaped.push(c),
            '\n' => escaped.push_str("\\n"),
            '\r' => escaped.push_str("\\r"),
            '\t' => escaped.push_str("\\t"),
            c => {
                let _ = write!(escaped, "\\u{:04x}", u32::from(c));
            }
        }
    }
    Cow::Owned(escaped)
}

/// Joins the first `most` items with commas, and appends the number of items that are left out.
pub fn some<T: ToString>(all: &[T], most: usize) -> String {
    let named: Vec<String> = all.iter().take(most).map(ToString::to_string).collect();
    let named = named.join(", ");
    match all.len().saturating_sub(most) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_other_text_stays() {
        for (text, escaped) in [
            ("10.244.0.0/16 ü 漢 \\n", "10.244.0.0/16 ü 漢 \\n"),
            ("a\nb\r\n\tc", "a\\nb\\r\\n\\tc"),
            ("\x1b[2J\x07\x7f", "\\u001b[2J\\u0007\\u007f"),
            ("\u{9b}31m", "\\u009b31m"),
            ("\u{202e}txt\u{2029}", "\\u202etxt\\u2029"),
        ] {
            assert_eq!(line(text), escaped);
        }
        assert_eq!(lines("a\n\x1b[A\n"), "a\n\\u001b[A\n");
    }

    #[test]
    fn what_is_left_out_of_a_list_is_counted() {
        assert_eq!(some(&[1, 2, 3], 3), "1, 2, 3");
        assert_eq!(some(&[1, 2, 3, 4], 2), "1, 2 and 2 more");
    }
}
