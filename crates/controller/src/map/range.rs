//! One range and who has which of its addresses.

use std::collections::BTreeMap;

use super::sheet::{holdings, orphans, report};
use super::{Detail, Kind, MOST_ADDRESSES, Told, Used};
use crate::cluster::seen::PodUid;
use crate::cluster::world::World;
use cadastre_api::block_name;
use cadastre_core::{Addr, Cidr};

/// Nothing where nobody holds exactly that range.
pub(super) fn detail(cidr: &Cidr, world: &World) -> Option<Detail> {
    let mut same = holdings(world, |_, it| it == cidr);
    same.sort_by_key(|it| it.kind);
    let held = same.into_iter().next()?;
    let block = world.blocks.get(&block_name(cidr));
    let block = block.and_then(|it| it.spec.as_ref().ok());
    let block = block.filter(|_| !matches!(held.kind, Kind::PodCidr | Kind::Rest));
    let subnet = world.subnets.get(&held.node);
    let spec = subnet.and_then(|it| it.spec.as_ref().ok());
    let text = cidr.to_string();
    let listed = spec.and_then(|it| it.blocks.iter().find(|it| it.cidr == text));
    let range = spec.and_then(|it| it.pod_cidrs.iter().find(|it| it.cidr == text));
    let pool = block.map(|it| it.pool.to_string());
    let pool = pool.or_else(|| range?.pool.clone());
    let previous = spec.into_iter().flat_map(|it| &it.previous);
    let mut until = previous.filter(|it| held.kind == Kind::Rest && *it.node_uid == *held.uid);
    let until = until.next().map(|it| it.until.0);
    let (addresses, cut) = addresses(cidr, &held.node, &held.uid, world);
    Some(Detail {
        cidr: *cidr,
        kind: held.kind,
        pool,
        node: held.node.to_string(),
        uid: held.uid.to_string(),
        since: block.map(|it| it.since),
        until: block.and_then(|it| it.until).or(until),
        reserved: listed
            .map(|it| [it.reserved.as_slice(), &it.on_request].concat())
            .unwrap_or_default(),
        addresses,
        cut,
    })
}

/// What the agent and the pods say, each address once.
fn addresses(cidr: &Cidr, node: &str, uid: &str, world: &World) -> (Vec<Used>, bool) {
    let mut all: BTreeMap<Addr, (Told, Option<PodUid>)> = BTreeMap::new();
    for (addr, pod) in report(node, uid, world)
        .into_iter()
        .flat_map(|it| orphans(it, cidr))
    {
        let pod = Some(*pod).filter(|pod| *pod != PodUid::default());
        all.insert(*addr, (Told::Agent, pod));
    }
    for (addr, pod) in world.pods.within(cidr, MOST_ADDRESSES + 1) {
        let told = all.entry(addr).or_insert((Told::Pod, None));
        if told.0 == Told::Agent {
            told.0 = Told::Both;
        }
        told.1 = told.1.or(pod);
    }
    let cut = all.len() > MOST_ADDRESSES;
    let used = all.into_iter().take(MOST_ADDRESSES);
    let used = used.map(|(address, (told, pod))| Used {
        address,
        pod: pod
            .and_then(|pod| world.pods.name(pod))
            .map(ToString::to_string),
        uid: pod.map(|pod| pod.to_string()),
        told,
    });
    (used.collect(), cut)
}
