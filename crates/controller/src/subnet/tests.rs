use super::conditions::WRITES_REJECTED;
use super::*;
use crate::cluster::cache::ClusterCache;
use crate::cluster::objects::{Pool, SubnetCondition};
use crate::cluster::request::{Rejection, RequestOutcome};
use crate::demand::Demand;
use crate::fixtures::{
    NOW, cluster, cluster_of, in_step, node, pool, pool_with, rebuilt, reported, subnet,
};
use cadastre_api::NodePool;
use cadastre_daemon::watch::ObjectEvent;

/// The entry of a pool in a NodeSubnet: its name, whether it is retained, and its cooldown in seconds.
type Entry = (&'static str, bool, u32);

/// Checks which pools the NodeSubnet of a node should list. The node has blocks of pool `p`, which has a cooldown that
/// differs from the default. Pool `q` also selects the node. At first, the NodeSubnet lists the pools `before`.
#[track_caller]
fn assert_listed(change: impl FnOnce(&mut Pool), before: &[Entry], expected: &[Entry]) {
    let mut p = pool_with("p", "10.0.0.0/24", |spec| spec.terms.cooldown_seconds = 7);
    change(&mut p);
    let mut subnet = subnet("n", &["10.0.0.16/28", "10.0.0.32/28"], 0);
    let listed = before.iter().map(|(name, retained, cooldown)| {
        let mut listed = NodePool {
            name: (*name).to_owned(),
            retained: *retained,
            ..NodePool::default()
        };
        listed.terms.cooldown_seconds = *cooldown;
        listed
    });
    subnet.spec.as_mut().unwrap().pools = listed.collect();
    let cache = cluster_of(vec![p, pool("q", "10.0.1.0/24")], vec![subnet.clone()]);
    let wanted = wanted(
        &subnet.name,
        Some(&subnet),
        &cache,
        &rebuilt(&cache),
        AgentPace::default(),
    );
    let pools = wanted.unwrap().pools;
    let entry = |it: &'_ NodePool| (it.retained, it.terms.cooldown_seconds);
    let entries = pools.iter().map(|it| (it.name.as_str(), entry(it)));
    let entries: Vec<_> = entries.map(|(name, (a, b))| (name, a, b)).collect();
    assert_eq!(entries, expected);
}

#[test]
fn a_pool_that_serves_no_more_is_retained_while_the_node_has_blocks_of_it() {
    assert_listed(|_| {}, &[], &[("p", false, 7), ("q", false, 30)]);
    let retained = [("q", false, 30), ("p", true, 7)];
    let disable = |pool: &mut Pool| pool.spec.as_mut().unwrap().disabled = true;
    assert_listed(disable, &[], &retained);
    assert_listed(|pool| pool.deleting = true, &[], &retained);
}

#[test]
fn the_settings_of_an_invalid_pool_stay_as_they_were_last_listed() {
    let invalidate = |pool: &mut Pool| pool.spec = Err("no".to_owned());
    let retained = [("q", false, 30), ("p", true, 7)];
    assert_listed(invalidate, &[("p", false, 7)], &retained);
    assert_listed(invalidate, &[], &[("q", false, 30)]);
}

#[test]
fn a_spec_of_which_parts_are_invalid_is_written_again() {
    let is = subnet("n", &["10.0.0.16/28"], 0);
    let spec = is.spec.clone().unwrap();
    let request = |is_partial| {
        let is = Subnet {
            is_partial,
            ..is.clone()
        };
        difference(&is.name, Some(&spec), Some(&is))
    };
    assert!(request(false).is_none());
    assert!(matches!(request(true), Some(ApiRequest::Replace(..))));
}

#[test]
fn managed_fields_are_removed_once_if_an_agent_writes_statuses() {
    let mut subnets = Subnets::default();
    let spec = NodeSubnetSpec::default();
    let mut is = subnet("n", &[], 0);
    is.has_managed_fields = true;
    is.report = None;
    assert_eq!(subnets.strip(spec.clone(), &is), None, "no agent writes");
    is.report = Some(Box::default());
    let request = subnets.strip(spec.clone(), &is);
    assert!(
        matches!(request, Some(ApiRequest::Replace(..))),
        "{request:?}"
    );
    assert_eq!(subnets.strip(spec, &is), None, "only once");
}

#[test]
fn pools_for_which_one_object_has_no_room_are_left_out_and_reported_once() {
    let range = |n: u32| format!("10.{}.{}.0/28", n >> 8, n & 255);
    let pools = (0..1_100).map(|n| pool(&format!("p{n:04}"), &range(n)));
    let mut of_node = subnet("n", &["10.4.75.0/28"], 0);
    of_node.spec.as_mut().unwrap().blocks[0].pool = "p1099".to_owned();
    let mut cache = cluster_of(pools.collect(), vec![of_node]);
    let mut block = crate::cluster::objects::Block::clone(cache.blocks.iter().next().unwrap());
    block.version += 1;
    block.spec.as_mut().unwrap().pool = "p1099".into();
    cache.blocks.change(ObjectEvent::Applied(block));
    let mut allocations = rebuilt(&cache);
    let mut subnets = Subnets::default();
    let mut all_reasons = Vec::new();
    for _ in 0..2 {
        subnets.queue.add("n".into());
        let next = |cx: &mut Context| subnets.next(cx).unwrap();
        let ((request, _), reasons) = reported(&cache, &mut allocations, NOW, next);
        all_reasons.extend(reasons);
        let ApiRequest::Replace(_, ObjectSpec::Subnet(spec)) = request else {
            panic!("{request:?}");
        };
        assert!(spec.pools.len() <= MOST_POOLS);
        let has_block_of = |pool: &NodePool| pool.name == "p1099";
        assert!(spec.pools.iter().any(has_block_of));
        let size = serde_json::to_vec(&spec).unwrap().len();
        assert!(size < 2 * MOST_BYTES_OF_POOLS, "{size} bytes");
        subnets.requests.answered(&"n".into(), &done());
    }
    assert_eq!(all_reasons, [POOLS_LEFT_OUT]);
    // The event was emitted only once, but the condition reports the problem as long as it lasts.
    let of_node = cache.subnets.get("n").unwrap();
    let all = conditions(&subnets, of_node, &cache, &mut allocations);
    let condition = all.iter().find(|it| &*it.kind == POOLS_LEFT_OUT).unwrap();
    let names_count = condition.message.contains("1100 pools select");
    assert!(condition.is_true() && names_count, "{condition:?}");
}

/// Returns the answer to a write that has succeeded.
fn done() -> RequestAnswer<'static> {
    RequestAnswer::to_write(&Purpose::DefaultPool, &RequestOutcome::Gone)
}

fn rejected() -> RequestOutcome {
    RequestOutcome::Rejected(Rejection::Rejected("a policy forbids it".to_owned()))
}

fn conditions(
    subnets: &Subnets,
    of: &Subnet,
    cache: &ClusterCache,
    allocations: &mut AllocationState,
) -> Vec<SubnetCondition> {
    in_step(cache, allocations, NOW, |cx| subnets.conditions(of, cx))
}

/// Returns node `n`, whose NodeSubnet has conditions of these types with status `True`.
fn with_conditions(kinds: &[&str]) -> (Subnet, ClusterCache, AllocationState) {
    let condition = |kind: &&str| SubnetCondition {
        kind: (*kind).into(),
        status: "True".into(),
        reason: "Why".into(),
        message: "so".to_owned(),
        since: "2026-01-02T03:04:05Z".into(),
        generation: Some(3),
    };
    let mut of_node = subnet("n", &["10.0.0.16/28"], 0);
    of_node.report.get_or_insert_default().conditions = kinds.iter().map(condition).collect();
    let pools = vec![pool("p", "10.0.0.0/24")];
    let cache = cluster_of(pools, vec![of_node.clone()]);
    let allocations = rebuilt(&cache);
    (of_node, cache, allocations)
}

#[test]
fn a_condition_reports_writes_that_keep_being_rejected_and_later_that_they_are_not() {
    let (mut of_node, cache, mut allocations) = with_conditions(&[]);
    let mut subnets = Subnets::default();
    let call = ObjectCall::WriteSubnet("n".into());
    for _ in 0..3 {
        allocations
            .refusals
            .note(&call, &rejected(), true, NOW.mono);
    }
    let first = conditions(&subnets, &of_node, &cache, &mut allocations);
    assert_eq!(first.len(), 1, "{first:?}");
    assert!(first[0].is_true() && &*first[0].kind == WRITES_REJECTED);
    let has_reason = first[0].message.contains("a policy forbids it");
    assert!(has_reason, "{first:?}");
    of_node.report.get_or_insert_default().conditions = first.clone().into();
    let again = conditions(&subnets, &of_node, &cache, &mut allocations);
    assert_eq!(again, first, "once");
    let gone = RequestOutcome::Gone;
    allocations.refusals.note(&call, &gone, true, NOW.mono);
    subnets.note_outcome("n".into());
    let over = conditions(&subnets, &of_node, &cache, &mut allocations);
    assert!(over.len() == 1 && &*over[0].status == "False", "{over:?}");
}

#[test]
fn rejections_that_an_earlier_leader_reported_stay_until_the_outcome_of_a_write_is_known() {
    let (of_node, cache, mut allocations) = with_conditions(&[WRITES_REJECTED]);
    let before = of_node.report.as_ref().unwrap().conditions.to_vec();
    let mut subnets = Subnets::default();
    let now = conditions(&subnets, &of_node, &cache, &mut allocations);
    assert_eq!(now, before, "nothing was written");
    let call = ObjectCall::WriteSubnet("n".into());
    allocations
        .refusals
        .note(&call, &rejected(), true, NOW.mono);
    let now = conditions(&subnets, &of_node, &cache, &mut allocations);
    assert_eq!(now, before, "rejected once");
    // An earlier write has succeeded, but the present write fails. So it is not known whether the rejections are over.
    subnets.note_outcome("n".into());
    let now = conditions(&subnets, &of_node, &cache, &mut allocations);
    assert_eq!(now, before, "rejected once");
    let gone = RequestOutcome::Gone;
    allocations.refusals.note(&call, &gone, true, NOW.mono);
    let over = conditions(&subnets, &of_node, &cache, &mut allocations);
    assert_eq!(&*over[0].status, "False");
    subnets.gone(cache.nodes.get("n").unwrap());
    let now = conditions(&subnets, &of_node, &cache, &mut allocations);
    assert_eq!(now, before, "the outcome was that of a deleted node");
}

#[test]
fn a_node_whose_first_block_is_rejected_has_a_node_subnet_for_the_condition() {
    let cache = cluster(vec![pool("p", "10.0.0.0/24")], vec![node("n")]);
    let mut allocations = rebuilt(&cache);
    let mut demand = Demand::default();
    demand.add_name(&"n".into(), &cache, &allocations);
    in_step(&cache, &mut allocations, NOW, |cx| demand.work(cx));
    let cidr = allocations.blocks.of(&"n".into()).next().unwrap().cidr;
    let wanted = |allocations: &AllocationState| {
        wanted(&"n".into(), None, &cache, allocations, AgentPace::default())
    };
    assert!(wanted(&allocations).is_none(), "one write suffices");
    let call = ObjectCall::WriteBlock(cidr);
    for _ in 0..3 {
        allocations
            .refusals
            .note(&call, &rejected(), true, NOW.mono);
    }
    let spec = wanted(&allocations).unwrap();
    assert!(spec.blocks.is_empty() && spec.pools.len() == 1, "{spec:?}");
}

#[test]
fn conditions_of_others_stay_as_they_are() {
    let (of_node, cache, mut allocations) =
        with_conditions(&["OfSomebodyElse", WRITES_REJECTED, "OfAnother"]);
    let before = of_node.report.as_ref().unwrap().conditions.to_vec();
    let mut subnets = Subnets::default();
    subnets.note_outcome("n".into());
    let wanted = conditions(&subnets, &of_node, &cache, &mut allocations);
    assert_eq!(&*wanted[1].status, "False");
    let others = [&wanted[0], &wanted[2]];
    assert_eq!(others, [&before[0], &before[2]], "and in their places");
    // The conditions can be written only to the latest version of the object, so the loop sends the pending write of
    // the spec first.
    subnets.queue.add("n".into());
    in_step(&cache, &mut allocations, NOW, |cx| {
        let (request, _) = subnets.next(cx).unwrap();
        subnets.requests.answered(&"n".into(), &done());
        assert!(matches!(request, ApiRequest::Replace(..)), "{request:?}");
        let decision = subnets.update_conditions(&"n".into(), cx);
        let KeyDecision::Send(request, purpose) = decision else {
            panic!("no condition is written");
        };
        let written = ApiRequest::SetSubnetConditions(KnownObject::of(&of_node), wanted);
        assert_eq!(request, written);
        // After a conflict the cached version may be outdated, so the next request is a read.
        let conflict = RequestOutcome::Rejected(Rejection::Guard("modified".to_owned()));
        let affected = subnets.answered(&RequestAnswer::to_write(&purpose, &conflict), cx);
        subnets.queue.add(affected.subnets[0].clone());
        let (request, _) = subnets.next(cx).unwrap();
        assert!(matches!(request, ApiRequest::Read(..)), "{request:?}");
    });
}

#[test]
fn no_condition_is_written_if_there_are_more_than_are_read() {
    let many: Vec<String> = (0..=MOST_CONDITIONS).map(|n| format!("Of{n}")).collect();
    let mut kinds: Vec<&str> = many.iter().map(String::as_str).collect();
    kinds[0] = WRITES_REJECTED;
    let is_written = |kinds: &[&str]| {
        let (_, cache, mut allocations) = with_conditions(kinds);
        let mut subnets = Subnets::default();
        subnets.note_outcome("n".into());
        in_step(&cache, &mut allocations, NOW, |cx| {
            let decision = subnets.update_conditions(&"n".into(), cx);
            matches!(decision, KeyDecision::Send(..))
        })
    };
    assert!(!is_written(&kinds) && is_written(&kinds[..MOST_CONDITIONS]));
}

#[test]
fn an_empty_node_subnet_of_a_live_node_stays() {
    let empty = subnet("n", &[], 0);
    let mut cache = cluster_of(Vec::new(), vec![empty.clone()]);
    let allocations = rebuilt(&cache);
    let exists = |cache: &ClusterCache| {
        wanted(
            &empty.name,
            Some(&empty),
            cache,
            &allocations,
            AgentPace::default(),
        )
        .is_some()
    };
    assert!(exists(&cache));
    cache.nodes.change(ObjectEvent::Deleted(node("n")));
    assert!(!exists(&cache));
}
