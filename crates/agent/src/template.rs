//! Text templates in the syntax of Jinja, for the files that other programs read.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, UndefinedBehavior};
use serde::Serialize;

/// The maximum number of steps of one rendering. A file for a node with 4,096 ranges needs about a tenth of them.
const FUEL: u64 = 1_000_000;

/// Why a template cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template uses a name that does not exist.
    #[error("{unknown} means nothing: use {}", .known.join(", "))]
    Name {
        /// The name in the template
        unknown: String,
        /// The names that exist
        known: Vec<&'static str>,
    },
    /// The template's syntax is wrong, or an expression cannot be evaluated.
    #[error("{}{}", .0, .0.line().map_or(String::new(), |line| format!(" (line {line})")))]
    Syntax(minijinja::Error),
    /// After the names were replaced by values, the text is not JSON.
    #[error("it is no JSON once the values are filled in: {0}")]
    Json(serde_json::Error),
    /// After the names were replaced by values, the text is JSON, but not a conflist.
    #[error("it is no conflist: {0}")]
    NoConflist(&'static str),
}

/// Checks that a template is well-formed, and uses no names but `known`.
pub(crate) fn check(text: &str, known: &[&'static str]) -> Result<(), TemplateError> {
    let environment = environment();
    let template = environment
        .template_from_str(text)
        .map_err(TemplateError::Syntax)?;
    let used = template.undeclared_variables(false);
    let unknown = used.into_iter().filter(|it| !known.contains(&it.as_str()));
    match unknown.min() {
        None => Ok(()),
        Some(unknown) => Err(TemplateError::Name {
            unknown: unknown.chars().take(40).collect(),
            known: known.to_vec(),
        }),
    }
}

/// Replaces the names in a template by the fields of `values`.
pub(crate) fn render(text: &str, values: impl Serialize) -> Result<String, TemplateError> {
    let environment = environment();
    let template = environment
        .template_from_str(text)
        .map_err(TemplateError::Syntax)?;
    template
        .render(Serde(values))
        .map_err(TemplateError::Syntax)
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    // With these settings, a line that contains only a statement leaves no line in the output.
    let syntax = SyntaxConfig::builder()
        .keep_trailing_newline(true)
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    environment.set_syntax(syntax.unwrap_or_default());
    environment.set_fuel(Some(FUEL));
    environment
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_template_without_end_or_with_a_wrong_field_is_an_error() {
        let values = BTreeMap::from([("list", vec![BTreeMap::from([("a", 1)])])]);
        let says = |text: &str| {
            let checked = check(text, &["list"]);
            checked.and_then(|()| render(text, &values))
        };
        for text in ["{{ list", "{% for x in list %}", "{{ list[0].b }}"] {
            let error = says(text).unwrap_err().to_string();
            assert!(error.ends_with("(line 1)"), "{text}: {error}");
        }
        let many = BTreeMap::from([("list", vec![0; 2_000])]);
        let square = "{% for a in list %}{% for b in list %}x{% endfor %}{% endfor %}";
        let error = render(square, many).unwrap_err().to_string();
        assert!(error.contains("fuel"), "{error}");
        let error = says("{{ lists }}").unwrap_err().to_string();
        assert_eq!(error, "lists means nothing: use list");
        let text = says("[\n  {% for x in list %}\n  {{ x.a }}\n  {% endfor %}\n]\n").unwrap();
        assert_eq!(text, "[\n  1\n]\n");
    }
}
