//! Label selectors that are parsed once and matched often.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::Label;

/// A label selector in a form that can be matched without allocating memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selector(Vec<Requirement>);

/// One condition on a label. The first field is the key of the label.
#[derive(Clone, Debug, PartialEq)]
pub enum Requirement {
    /// The label exists and has one of the values.
    In(String, Vec<String>),
    /// The label does not exist or has none of the values.
    NotIn(String, Vec<String>),
    /// The label exists, with any value.
    Exists(String),
    /// The label does not exist.
    Absent(String),
}

impl Requirement {
    /// The key of the label that the requirement is about.
    pub fn key(&self) -> &str {
        match self {
            Requirement::In(key, _)
            | Requirement::NotIn(key, _)
            | Requirement::Exists(key)
            | Requirement::Absent(key) => key,
        }
    }

    /// Returns whether a label with this value meets the requirement. `None` stands for an absent label.
    fn allows(&self, value: Option<&str>) -> bool {
        let listed = |values: &[String]| value.is_some_and(|v| values.iter().any(|x| x == v));
        match self {
            Requirement::In(_, values) => listed(values),
            Requirement::NotIn(_, values) => !listed(values),
            Requirement::Exists(_) => value.is_some(),
            Requirement::Absent(_) => value.is_none(),
        }
    }
}

impl fmt::Display for Requirement {
    /// Writes the operator as it is written in selectors, followed by at most the first five values.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// At most this many values are written. A longer list would not fit into an event.
        const NAMED: usize = 5;
        let (operator, values) = match self {
            Requirement::In(_, values) => ("In", values),
            Requirement::NotIn(_, values) => ("NotIn", values),
            Requirement::Exists(_) => return f.write_str("Exists"),
            Requirement::Absent(_) => return f.write_str("DoesNotExist"),
        };
        let named = &values[..values.len().min(NAMED)];
        write!(f, "{operator} ({}", named.join(", "))?;
        if values.len() > NAMED {
            write!(f, " and {} more", values.len() - NAMED)?;
        }
        f.write_str(")")
    }
}

impl Selector {
    /// Parses a selector. An absent or empty selector matches everything. An error names the wrong expression and says
    /// what to write.
    pub fn new(selector: Option<&LabelSelector>) -> Result<Self, String> {
        let mut requirements = Vec::new();
        let Some(selector) = selector else {
            return Ok(Selector(requirements));
        };
        for (key, value) in selector.match_labels.iter().flatten() {
            requirements.push(Requirement::In(key.clone(), vec![value.clone()]));
        }
        for expression in selector.match_expressions.iter().flatten() {
            let key = expression.key.clone();
            let values = expression.values.clone().unwrap_or_default();
            requirements.push(match (expression.operator.as_str(), values.is_empty()) {
                ("In", false) => Requirement::In(key, values),
                ("NotIn", false) => Requirement::NotIn(key, values),
                ("Exists", true) => Requirement::Exists(key),
                ("DoesNotExist", true) => Requirement::Absent(key),
                ("In" | "NotIn", true) => {
                    return Err(format!("matchExpressions: {} on \"{key}\" needs at least one value", expression.operator));
                }
                ("Exists" | "DoesNotExist", false) => {
                    return Err(format!("matchExpressions: {} on \"{key}\" takes no values", expression.operator));
                }
                (other, _) => {
                    return Err(format!(
                        "matchExpressions: operator \"{other}\" on \"{key}\" is unknown: use In, NotIn, Exists or DoesNotExist"
                    ));
                }
            });
        }
        Ok(Selector(requirements))
    }

    /// Returns whether the labels meet every requirement. The labels must be sorted by key.
    pub fn matches(&self, labels: &[Label]) -> bool {
        self.unmet(labels).is_none()
    }

    /// Returns the first requirement that the labels do not meet, with the value of the label if the label exists. The
    /// labels must be sorted by key.
    pub(crate) fn unmet<'a>(
        &'a self,
        labels: &'a [Label],
    ) -> Option<(&'a Requirement, Option<&'a str>)> {
        self.0.iter().find_map(|requirement| {
            let at = labels.binary_search_by(|(key, _)| (**key).cmp(requirement.key()));
            let value = at.ok().map(|at| &*labels[at].1);
            (!requirement.allows(value)).then_some((requirement, value))
        })
    }

    /// Returns the number of requirements. Of two selectors that match, the one with more requirements is more
    /// specific.
    pub fn specificity(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelectorRequirement;

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Vec<Label> {
        pairs
            .iter()
            .map(|(k, v)| ((*k).into(), (*v).into()))
            .collect()
    }

    fn expression(key: &str, operator: &str, values: &[&str]) -> LabelSelector {
        LabelSelector {
            match_expressions: Some(vec![LabelSelectorRequirement {
                key: key.into(),
                operator: operator.into(),
                values: Some(values.iter().map(ToString::to_string).collect()),
            }]),
            ..Default::default()
        }
    }

    #[test]
    fn every_operator_means_what_kubernetes_means() {
        let gpu = labels(&[("class", "gpu"), ("zone", "a")]);
        let plain = labels(&[("zone", "b")]);
        for (selector, on_gpu, on_plain) in [
            (expression("class", "In", &["gpu", "fpga"]), true, false),
            (expression("class", "NotIn", &["gpu"]), false, true),
            (expression("class", "Exists", &[]), true, false),
            (expression("class", "DoesNotExist", &[]), false, true),
        ] {
            let selector = Selector::new(Some(&selector)).unwrap();
            assert_eq!(
                (selector.matches(&gpu), selector.matches(&plain)),
                (on_gpu, on_plain),
                "{selector:?}"
            );
        }
        assert!(Selector::new(None).unwrap().matches(&plain));
    }

    #[test]
    fn the_unmet_requirement_is_returned_with_the_labels_value() {
        let gpu = labels(&[("class", "gpu")]);
        for (selector, value, text) in [
            (
                expression("class", "In", &["cpu", "fpga"]),
                Some("gpu"),
                "In (cpu, fpga)",
            ),
            (expression("zone", "In", &["a"]), None, "In (a)"),
            (
                expression("class", "NotIn", &["gpu"]),
                Some("gpu"),
                "NotIn (gpu)",
            ),
            (expression("zone", "Exists", &[]), None, "Exists"),
            (
                expression("class", "DoesNotExist", &[]),
                Some("gpu"),
                "DoesNotExist",
            ),
            (
                expression("zone", "In", &["a", "b", "c", "d", "e", "f", "g"]),
                None,
                "In (a, b, c, d, e and 2 more)",
            ),
        ] {
            let selector = Selector::new(Some(&selector)).unwrap();
            let (requirement, has) = selector.unmet(&gpu).unwrap();
            assert_eq!((requirement.to_string().as_str(), has), (text, value));
        }
    }

    #[test]
    fn a_wrong_expression_is_named() {
        for (operator, values, text) in [
            ("In", &[][..], "needs at least one value"),
            ("Exists", &["x"][..], "takes no values"),
            ("Gt", &["1"][..], "unknown"),
        ] {
            let error = Selector::new(Some(&expression("class", operator, values))).unwrap_err();
            assert!(error.contains(text) && error.contains("class"), "{error}");
        }
    }
}
