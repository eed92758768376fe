//! The conditions of the NodeSubnet that the agent writes. The controller writes the other conditions.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Returns a condition; [`merged`] sets its timestamp.
pub(crate) fn condition(type_: &str, status: &str, reason: &str, message: String) -> Condition {
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(jiff::Timestamp::UNIX_EPOCH),
        observed_generation: None,
    }
}

/// Returns a condition with the status `True` or `False`. Returns `None` if the status is `False` and `before` contains
/// no condition of this type. So a condition that was never true is not published.
pub(crate) fn set(
    type_: &str,
    (is_true, reason, message): (bool, &str, String),
    before: &[Condition],
) -> Option<Condition> {
    let is_there = || before.iter().any(|it| it.type_ == type_);
    let status = if is_true { "True" } else { "False" };
    (is_true || is_there()).then(|| condition(type_, status, reason, message))
}

/// Whether the existing conditions (`is`) include all wanted conditions (`wanted`). Timestamps are not compared.
pub(crate) fn has_all(is: &[Condition], wanted: &[Condition]) -> bool {
    let says = |a: &Condition, b: &Condition| {
        (&a.type_, &a.status, &a.reason, &a.message) == (&b.type_, &b.status, &b.reason, &b.message)
    };
    wanted.iter().all(|it| is.iter().any(|is| says(is, it)))
}

/// Returns the existing conditions (`is`), in which each wanted condition (`wanted`) has replaced the condition of its
/// type. Conditions of other types, such as the controller's, stay. If the status of a condition changes, its
/// transition time becomes `now`.
pub(crate) fn merged(
    is: &[Condition],
    wanted: &[Condition],
    now: jiff::Timestamp,
) -> Vec<Condition> {
    let now = jiff::Timestamp::from_second(now.as_second()).unwrap_or(now);
    let mut all = is.to_vec();
    for condition in wanted {
        let place = all.iter_mut().find(|it| it.type_ == condition.type_);
        let before = place.as_ref().filter(|it| it.status == condition.status);
        let since = before.map_or(Time(now), |it| it.last_transition_time.clone());
        let new = Condition {
            last_transition_time: since,
            ..condition.clone()
        };
        match place {
            Some(place) => *place = new,
            None => all.push(new),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn condition(type_: &str, is_true: bool, reason: &str) -> Condition {
        let before = [set(type_, (true, "Before", String::new()), &[]).unwrap()];
        set(type_, (is_true, reason, String::new()), &before).unwrap()
    }

    fn second(at: i64) -> jiff::Timestamp {
        jiff::Timestamp::from_second(at).unwrap()
    }

    #[test]
    fn other_conditions_stay_and_transition_times_are_those_of_changes() {
        let accepted = condition("Accepted", true, "x");
        let left = |reason: &str| vec![condition("ServedByOthers", true, reason)];
        let is = merged(std::slice::from_ref(&accepted), &left("a"), second(1));
        assert_eq!(is.len(), 2);
        assert_eq!(is[0], accepted);
        assert_eq!(is[1].last_transition_time.0, second(1));
        assert!(has_all(&is, &left("a")) && !has_all(&is, &left("b")));
        assert!(has_all(&is, &[]) && !has_all(&[], &left("a")));
        let is = merged(&is, &left("b"), second(2));
        assert_eq!(
            is[1].last_transition_time.0,
            second(1),
            "the status has not changed"
        );
        let well = vec![condition("ServedByOthers", false, "c")];
        let is = merged(&is, &well, second(3));
        assert_eq!((is.len(), is[1].last_transition_time.0), (2, second(3)));
    }
}
