//! The condition `ServedByOthers` of the NodeSubnet. It reports that new pods of the node use another network, and what
//! to do about it. The Node itself does not show the problem, because the other network makes the node ready.

use std::path::Path;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::files::others::PodNetworkOwner;
use cadastre_api::SERVED_BY_OTHERS;

/// Returns the condition to set, without its times; `None` if the condition in `before` should stay as it is. `own` is
/// the path of the agent's CNI configuration; `None` if the agent writes none. The condition is set to `False` only if
/// `before` contains it already.
pub(crate) fn condition(
    owner: Option<&PodNetworkOwner>,
    own: Option<&Path>,
    before: &[Condition],
) -> Option<Condition> {
    let own = own.and_then(Path::file_name).unwrap_or_default();
    let own = own.to_string_lossy();
    let (is_true, reason, message) = match owner {
        Some(PodNetworkOwner::Open) => return None,
        Some(PodNetworkOwner::Left(names)) => (
            true,
            "LeftToOthers",
            format!(
                "{names} is in the runtime's folder of CNI configurations, so this agent has not written {own}: new pods of the node get no address of Cadastre. If nothing uses that file any more, remove it; if pods shall be Cadastre's all the same, let the agent go before it (agent.cni.overOthers=true of the chart, or --cni-conf-over-others)"
            ),
        ),
        Some(PodNetworkOwner::Behind(names)) => (
            true,
            "OthersFirst",
            format!(
                "{names} comes before {own} by name in the runtime's folder of CNI configurations, and the runtime goes by the first: new pods of the node get no address of Cadastre. Remove that file, or choose a name for ours that comes before it (agent.cni.confName of the chart, or --cni-conf)"
            ),
        ),
        Some(PodNetworkOwner::First) => (
            false,
            "OursFirst",
            format!("the runtime goes by {own}, which this agent writes"),
        ),
        None => (
            false,
            "NotWanted",
            "this agent is to write no CNI configuration".to_owned(),
        ),
    };
    let is_there = || before.iter().any(|it| it.type_ == SERVED_BY_OTHERS);
    (is_true || is_there()).then(|| Condition {
        type_: SERVED_BY_OTHERS.to_owned(),
        status: if is_true { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(jiff::Timestamp::UNIX_EPOCH),
        observed_generation: None,
    })
}

/// Whether `is` has all conditions of `wanted`. Their times are not compared.
pub(crate) fn has_all(is: &[Condition], wanted: &[Condition]) -> bool {
    let says = |a: &Condition, b: &Condition| {
        (&a.type_, &a.status, &a.reason, &a.message) == (&b.type_, &b.status, &b.reason, &b.message)
    };
    wanted.iter().all(|it| is.iter().any(|is| says(is, it)))
}

/// Returns the conditions `is`, in which those of `wanted` replace conditions of the same types. Other conditions, such
/// as the controller's, stay. If the status of a condition changes, its transition time is `now`.
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

    fn set(owner: Option<&PodNetworkOwner>, before: &[Condition]) -> Option<Condition> {
        let own = Path::new("/host/cni-conf/05-cadastre.conflist");
        condition(owner, Some(own), before)
    }

    fn second(at: i64) -> jiff::Timestamp {
        jiff::Timestamp::from_second(at).unwrap()
    }

    #[test]
    fn a_true_condition_says_what_to_do_and_a_false_one_only_replaces_it() {
        assert_eq!(set(Some(&PodNetworkOwner::First), &[]), None);
        assert_eq!(set(None, &[]), None);
        let left = PodNetworkOwner::Left("10-kindnet.conflist".to_owned());
        let left = set(Some(&left), &[]).unwrap();
        assert_eq!((&*left.status, &*left.reason), ("True", "LeftToOthers"));
        for part in [
            "10-kindnet.conflist is in",
            "05-cadastre.conflist",
            "remove it",
            "agent.cni.overOthers=true",
        ] {
            assert!(left.message.contains(part), "{part}: {}", left.message);
        }
        let behind = PodNetworkOwner::Behind("00-multus.conf".to_owned());
        let behind = set(Some(&behind), &[]).unwrap();
        assert_eq!((&*behind.status, &*behind.reason), ("True", "OthersFirst"));
        for part in [
            "00-multus.conf comes before 05-cadastre",
            "agent.cni.confName",
        ] {
            assert!(behind.message.contains(part), "{part}: {}", behind.message);
        }
        let before = [left];
        assert_eq!(
            set(Some(&PodNetworkOwner::Open), &before),
            None,
            "the owner is unknown"
        );
        let well = set(Some(&PodNetworkOwner::First), &before).unwrap();
        assert_eq!((&*well.status, &*well.reason), ("False", "OursFirst"));
        let gone = set(None, &before).unwrap();
        assert_eq!((&*gone.status, &*gone.reason), ("False", "NotWanted"));
    }

    #[test]
    fn other_conditions_stay_and_transition_times_are_those_of_changes() {
        let accepted = Condition {
            type_: "Accepted".to_owned(),
            ..set(Some(&PodNetworkOwner::Behind("x".to_owned())), &[]).unwrap()
        };
        let left =
            |name: &str| vec![set(Some(&PodNetworkOwner::Left(name.to_owned())), &[]).unwrap()];
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
        let well = vec![set(Some(&PodNetworkOwner::First), &is).unwrap()];
        let is = merged(&is, &well, second(3));
        assert_eq!((is.len(), is[1].last_transition_time.0), (2, second(3)));
    }
}
