//! `show node --addresses`: every address of a node with its state. Adjacent addresses with the same state are one row,
//! so ranges of any size can be listed.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::address::{AddressState, describe};
use crate::inventory::{Cover, Inventory};
use crate::render::{Columns, Style};
use cadastre_api::node_allocation;
use cadastre_core::usable::above;
use cadastre_core::{Addr, Cidr, IpRange};

/// Adjacent addresses of one range with the same state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SpanRow {
    /// The address. For several addresses, the first and the last of them with a dash between them
    pub addresses: String,
    /// The number of addresses, as text because there may be 2^64 and more
    pub count: String,
    pub state: AddressState,
    /// The smallest block or podCIDR that contains the addresses
    pub range: Cidr,
    /// The pods that use the address, as `namespace/name`
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<String>,
    /// The claim that has the address, as `namespace/name`
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
}

/// What all addresses of a row have in common.
#[derive(PartialEq)]
struct Common {
    state: AddressState,
    range: Cidr,
    pods: Vec<String>,
    claim: Option<String>,
}

/// Returns all addresses of the ranges that nodes of this name have or had, in ascending order.
pub(super) fn spans(node: &str, inventory: &Inventory) -> Vec<SpanRow> {
    let excluded = excluded(node, inventory);
    let mut rows = Vec::new();
    let mut before: Option<Cidr> = None;
    for range in inventory.ranges_of(node) {
        // The ranges are sorted. So if one range is a part of another, the wider range comes first.
        if before.is_none_or(|it| !it.contains(&range)) {
            before = Some(range);
            rows.extend(spans_of(&range, node, &excluded, inventory));
        }
    }
    rows
}

fn spans_of(range: &Cidr, node: &str, excluded: &[IpRange], inventory: &Inventory) -> Vec<SpanRow> {
    let mut begins = BTreeSet::from([range.first()]);
    let changes = changes(range, node, inventory).into_iter();
    let changes = changes.chain(excluded.iter().copied());
    for span in changes.filter_map(|it| it.within(range)) {
        begins.insert(span.first());
        begins.extend(above(span.last(), range.last()));
    }
    let before = |addr: &Addr| Addr {
        value: addr.value.saturating_sub(1),
        ..*addr
    };
    let ends = begins.iter().skip(1).map(before).chain([range.last()]);
    let parts = begins.iter().copied().zip(ends);
    let mut joined: Vec<(Addr, Addr, Common)> = Vec::new();
    for (first, last) in parts {
        let common = Common::at(first, range, inventory);
        match joined.last_mut() {
            Some((_, end, it)) if *it == common && it.pods.is_empty() => *end = last,
            _ => joined.push((first, last, common)),
        }
    }
    let spans = joined.into_iter();
    let rows = spans.filter_map(|(first, last, it)| {
        let span = IpRange::new(first, last)?;
        Some(SpanRow {
            addresses: span.to_string(),
            count: span.size().to_string(),
            state: it.state,
            range: it.range,
            pods: it.pods,
            claim: it.claim,
        })
    });
    rows.collect()
}

/// Returns spans of addresses. The state of the addresses in the range changes only where one of these spans begins or
/// ends.
fn changes(range: &Cidr, node: &str, inventory: &Inventory) -> Vec<IpRange> {
    let cache = &inventory.cache;
    let in_use = inventory.in_use_within(range).map(|(addr, _)| addr);
    let reported = inventory.pods_in(range).map(|(addr, _)| addr);
    let of_nodes = cache.node_addresses.within(range);
    let addresses = in_use.chain(reported).chain(of_nodes);
    let addresses = addresses.chain(inventory.claimed_in(range));
    let addresses = addresses.map(IpRange::from);
    let subnet = inventory.subnets.get(node);
    let taken_out = subnet
        .into_iter()
        .flat_map(|it| it.withdrawn.iter().chain(&it.withdrawing));
    let conflicts = subnet.into_iter().flat_map(|it| &it.conflicts);
    let conflicts = conflicts.filter_map(|it| Addr::parse_lenient(&it.address));
    let addresses = addresses.chain(conflicts.map(IpRange::from));
    let services = cache.services.iter().flat_map(|it| &it.cidrs);
    let others: Vec<Cidr> = inventory.covers_in(range).map(|it| cidr_of(&it)).collect();
    let cidrs = taken_out.chain(services).copied().chain(others);
    let pool = inventory.registry.pools.of(range).into_iter();
    let reserved = pool.flat_map(|it| it.reserved.iter().chain(&it.on_request));
    let spans = addresses.chain(cidrs.map(IpRange::from));
    spans.chain(reserved.copied()).collect()
}

fn cidr_of(cover: &Cover) -> Cidr {
    match cover {
        Cover::Block(entry) => entry.cidr,
        Cover::PodCidr(cidr, _) | Cover::QuarantinedPodCidr(cidr, ..) => *cidr,
    }
}

/// Returns the gateway, network and broadcast addresses of the node's blocks.
fn excluded(node: &str, inventory: &Inventory) -> Vec<IpRange> {
    let subnet = inventory.subnets.get(node);
    let Some(spec) = subnet.and_then(|it| it.spec.as_ref().ok()) else {
        return Vec::new();
    };
    let uid = spec.node_uid.as_deref().unwrap_or_default();
    let (allocation, _) = node_allocation::read(spec, uid);
    let excluded = allocation.blocks.iter().flat_map(|block| {
        let pool = allocation.pools.iter().find(|it| it.name == block.pool);
        let usable = block.usable(pool);
        // The network address and the gateway have different states, although they may lie in one excluded span.
        let single = usable.gateway.into_iter().chain([block.cidr.first()]);
        let single: Vec<IpRange> = single.map(IpRange::from).collect();
        [usable.excluded, single].concat()
    });
    excluded.collect()
}

impl Common {
    fn at(addr: Addr, range: &Cidr, inventory: &Inventory) -> Self {
        let report = describe(addr, inventory);
        let holders = report.holders.iter().map(|it| match it.pod.as_str() {
            "" => it.handle.clone(),
            pod => pod.to_owned(),
        });
        let pods: BTreeSet<String> = holders.chain(report.pods).collect();
        Common {
            state: report.state,
            range: report.range.map_or(*range, |it| it.cidr),
            pods: pods.into_iter().collect(),
            claim: report.claim.map(|it| it.name),
        }
    }
}

/// Formats the rows as a table, or returns `nothing` if there are none.
pub(super) fn table(rows: &[SpanRow], style: &Style, nothing: &str) -> String {
    let heads = ["ADDRESSES", "COUNT", "STATE", "RANGE", "POD", "CLAIM"];
    let mut table = Columns::new(&heads);
    for row in rows {
        table.row([
            row.addresses.clone(),
            row.count.clone(),
            format!("{:?}", row.state),
            row.range.to_string(),
            row.pods.join(", "),
            row.claim.clone().unwrap_or_default(),
        ]);
    }
    table.text(style, nothing)
}
