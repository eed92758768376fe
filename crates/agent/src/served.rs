//! The condition `ServedByOthers` of the NodeSubnet. The condition reports that new pods of the node use another
//! network than Cadastre's, and its message says what to do about that. The Node object does not show the problem,
//! because the other network makes the node ready.

use std::path::Path;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::conditions::set;
use super::files::others::PodNetworkOwner;
use cadastre_api::SERVED_BY_OTHERS;

/// Returns the condition to set; [`merged`](super::conditions::merged) sets its timestamp. Returns `None` if the
/// condition in `before` should stay as it is. The condition is set to `False` only if `before` contains it already.
/// `own` is the path of the agent's CNI configuration; `None` if the agent writes none.
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
    set(SERVED_BY_OTHERS, (is_true, reason, message), before)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_owner(owner: Option<&PodNetworkOwner>, before: &[Condition]) -> Option<Condition> {
        let own = Path::new("/host/cni-conf/05-cadastre.conflist");
        condition(owner, Some(own), before)
    }

    #[test]
    fn a_true_condition_says_what_to_do_and_a_false_one_only_replaces_it() {
        assert_eq!(of_owner(Some(&PodNetworkOwner::First), &[]), None);
        assert_eq!(of_owner(None, &[]), None);
        let left = PodNetworkOwner::Left("10-kindnet.conflist".to_owned());
        let left = of_owner(Some(&left), &[]).unwrap();
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
        let behind = of_owner(Some(&behind), &[]).unwrap();
        assert_eq!((&*behind.status, &*behind.reason), ("True", "OthersFirst"));
        for part in [
            "00-multus.conf comes before 05-cadastre",
            "agent.cni.confName",
        ] {
            assert!(behind.message.contains(part), "{part}: {}", behind.message);
        }
        let before = [left];
        assert_eq!(
            of_owner(Some(&PodNetworkOwner::Open), &before),
            None,
            "the owner is unknown"
        );
        let well = of_owner(Some(&PodNetworkOwner::First), &before).unwrap();
        assert_eq!((&*well.status, &*well.reason), ("False", "OursFirst"));
        let gone = of_owner(None, &before).unwrap();
        assert_eq!((&*gone.status, &*gone.reason), ("False", "NotWanted"));
    }
}
