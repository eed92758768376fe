//! Label selectors, read once and matched often.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use crate::cluster::seen::Text;

/// A label selector in a form that matches without allocation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selector(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq)]
enum Requirement {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    Absent(String),
}

impl Selector {
    /// Reads a selector; absent or empty matches everything. The error says which expression is
    /// wrong and what to write.
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

    /// Whether labels, sorted by key, satisfy every requirement.
    pub fn matches(&self, labels: &[(Text, Text)]) -> bool {
        self.0.iter().all(|requirement| {
            let value = |key: &str| {
                labels
                    .binary_search_by(|(k, _)| (**k).cmp(key))
                    .ok()
                    .map(|at| &*labels[at].1)
            };
            match requirement {
                Requirement::In(key, values) => {
                    value(key).is_some_and(|v| values.iter().any(|x| x == v))
                }
                Requirement::NotIn(key, values) => {
                    !value(key).is_some_and(|v| values.iter().any(|x| x == v))
                }
                Requirement::Exists(key) => value(key).is_some(),
                Requirement::Absent(key) => value(key).is_none(),
            }
        })
    }

    /// How many requirements there are: of two matching selectors the one with more is the more
    /// specific.
    pub fn specificity(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelectorRequirement;

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Vec<(Text, Text)> {
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
