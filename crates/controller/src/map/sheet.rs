//! A pool with all that lies in it.

use std::collections::BTreeMap;

use super::{Kind, MOST_ROWS, Row, Sheet, head};
use crate::cluster::seen::{AgentReport, BlockSpec, Node, Pool, Text};
use crate::cluster::world::World;
use cadastre_api::Recall;
use cadastre_core::{Cidr, Span};

/// One range, before its owner has a number.
pub(super) struct Holding {
    pub cidr: Cidr,
    pub node: Text,
    pub uid: Text,
    pub kind: Kind,
}

pub(super) fn sheet(pool: &Pool, world: &World) -> Sheet {
    let head = head(pool);
    let ranges: Vec<Cidr> = head.sides.iter().flat_map(|it| it.cidrs.clone()).collect();
    let inside = |cidr: &Cidr| ranges.iter().any(|range| range.overlaps(cidr));
    let mut all: Vec<Holding> = holdings(world, |name, cidr| {
        name == Some(&*pool.name) || (name.is_none() && inside(cidr))
    });
    all.sort_by(|a, b| (a.cidr, a.kind, &a.node).cmp(&(b.cidr, b.kind, &b.node)));
    let cut = all.len() > MOST_ROWS;
    all.truncate(MOST_ROWS);
    let mut owners: Vec<Text> = all.iter().map(|it| it.node.clone()).collect();
    owners.sort_unstable();
    owners.dedup();
    let rows = all.iter().map(|it| {
        let at = owners.binary_search(&it.node).unwrap_or(0);
        let (used, cooling, free) = counts(it, world);
        Row(it.cidr, at, it.kind, used, cooling, free)
    });
    let rows = rows.collect();
    Sheet {
        reserved: reserved(pool, &ranges, world),
        head,
        owners: owners.iter().map(ToString::to_string).collect(),
        cut,
        rows,
    }
}

/// All ranges that `wanted` says yes to, given the pool of a block (none for a podCIDR) and the range.
pub(super) fn holdings(
    world: &World,
    wanted: impl Fn(Option<&str>, &Cidr) -> bool,
) -> Vec<Holding> {
    let mut all = Vec::new();
    for node in world.nodes.iter() {
        for cidr in node.pod_cidrs.iter().filter(|it| wanted(None, it)) {
            all.push(of_node(node, *cidr));
        }
    }
    let mut listed: BTreeMap<Cidr, (Text, Option<Recall>)> = BTreeMap::new();
    for subnet in world.subnets.iter() {
        let Ok(spec) = &subnet.spec else { continue };
        for held in &spec.blocks {
            if let Ok(cidr) = Cidr::parse_strict(&held.cidr) {
                listed.insert(cidr, (subnet.name.clone(), held.recall));
            }
        }
        for previous in &spec.previous {
            let cidrs = previous.pod_cidrs.iter();
            let cidrs = cidrs.filter_map(|it| Cidr::parse_lenient(&it.cidr).ok());
            for cidr in cidrs.filter(|it| wanted(None, it)) {
                all.push(Holding {
                    cidr,
                    node: subnet.name.clone(),
                    uid: previous.node_uid.as_str().into(),
                    kind: Kind::Rest,
                });
            }
        }
    }
    for block in world.blocks.iter() {
        let Ok(spec) = &block.spec else { continue };
        if wanted(Some(&spec.pool), &spec.cidr) {
            let list = listed.get(&spec.cidr);
            all.push(of_block(spec, list));
        }
    }
    all
}

fn of_node(node: &Node, cidr: Cidr) -> Holding {
    Holding {
        cidr,
        node: node.name.clone(),
        uid: node.uid.clone(),
        kind: Kind::PodCidr,
    }
}

fn of_block(spec: &BlockSpec, listed: Option<&(Text, Option<Recall>)>) -> Holding {
    let listed = listed.filter(|(name, _)| *name == spec.owner.name);
    let kind = match listed {
        _ if spec.owner.resting => Kind::Quarantine,
        None => Kind::Unlisted,
        Some((_, None)) => Kind::Block,
        Some((_, Some(Recall::IfEmpty))) => Kind::Recall,
        Some((_, Some(Recall::Drain))) => Kind::Drain,
    };
    Holding {
        cidr: spec.cidr,
        node: spec.owner.name.clone(),
        uid: spec.owner.uid.clone(),
        kind,
    }
}

/// The word of the agent of that Node object.
pub(super) fn report<'a>(node: &str, uid: &str, world: &'a World) -> Option<&'a AgentReport> {
    let report = world.subnets.get(node)?.report.as_deref()?;
    (*report.node_uid == *uid).then_some(report)
}

/// Used, cooling, free: by the agent's word, else as pods report.
fn counts(holding: &Holding, world: &World) -> (u64, u64, Option<u64>) {
    let cidr = &holding.cidr;
    let report = report(&holding.node, &holding.uid, world);
    let of_cidr = |report: &&AgentReport| {
        let first = report.blocks.partition_point(|word| word.cidr < *cidr);
        let word = report.blocks.get(first).filter(|word| word.cidr == *cidr)?;
        Some((word.used, word.cooling, Some(word.free)))
    };
    if let Some(counts) = report.as_ref().and_then(of_cidr) {
        return counts;
    }
    let orphans = report.map_or(0, |report| orphans(report, cidr).count());
    let used = orphans + world.pods.count_in(cidr);
    (used as u64, 0, None)
}

/// Addresses of the range that the agent has for pods that it does not see, with the UIDs of those.
pub(super) fn orphans<'a>(
    report: &'a AgentReport,
    cidr: &'a Cidr,
) -> impl Iterator<Item = &'a (cadastre_core::Addr, crate::cluster::seen::PodUid)> {
    let all = &report.orphans;
    let first = all.partition_point(|(addr, _)| *addr < cidr.first());
    all[first..]
        .iter()
        .take_while(|(addr, _)| *addr <= cidr.last())
}

/// What is never given out of these ranges, whoever says so.
fn reserved(pool: &Pool, ranges: &[Cidr], world: &World) -> Vec<String> {
    let own = pool.spec.iter().flat_map(|spec| &spec.reserved);
    let mut spans: Vec<Span> = own.filter_map(|text| Span::parse(text).ok()).collect();
    let services = world
        .services
        .iter()
        .flat_map(|it| it.cidrs.iter().copied());
    spans.extend(services.map(Span::from));
    spans.retain(|span| ranges.iter().any(|range| span.overlaps(range)));
    for range in ranges {
        let nodes = world.node_addresses.within(range).take(MOST_ROWS);
        spans.extend(nodes.map(Span::from));
    }
    spans.sort_by_key(|span| (span.first(), span.last()));
    spans.dedup();
    spans.iter().map(Span::to_string).collect()
}
