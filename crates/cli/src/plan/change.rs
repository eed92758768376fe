//! Applies the changes of a plan to the lists of objects in memory. Nothing is written to the API server.

use std::collections::BTreeMap;

use anyhow::{Context as _, bail};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

use crate::inventory::Inventory;
use crate::lists::ClusterLists;
use cadastre_api::{FINALIZER, IPPoolLite, IPPoolSpec, NodeSubnetLite};
use cadastre_controller::cluster::objects::Node;
use cadastre_core::{Addr, Cidr, IpRange};

/// Returns the name of the nth added node. No real node can have a name in parentheses.
pub(crate) fn new_node_name(nth: usize) -> String {
    format!("(new-{nth:05})")
}

/// Returns whether the name is that of a node that `plan` added.
pub(super) fn is_new(name: &str) -> bool {
    name.starts_with('(')
}

/// Adds nodes with these labels to the lists.
pub(crate) fn add_nodes(
    lists: &mut ClusterLists,
    count: usize,
    labels: &[(String, String)],
) -> anyhow::Result<()> {
    let labels: BTreeMap<_, _> = labels.iter().cloned().collect();
    for nth in 1..=count {
        let (name, uid) = (new_node_name(nth), format!("new-{nth}"));
        // This is how many pods a kubelet runs by default. Without this number, the node would wait for a podCIDR whose
        // size depends on it.
        let status = json!({"capacity": {"pods": "110"}});
        let metadata = json!({"name": name, "uid": uid, "labels": labels});
        let node = json!({"metadata": metadata, "status": status});
        lists.nodes.push(serde_json::from_value(node)?);
    }
    Ok(())
}

/// Raises a node's demand for a pool to at least `addresses`, in the status of its NodeSubnet. Adds a NodeSubnet if the
/// node has none.
pub(super) fn demand(
    lists: &mut ClusterLists,
    node: &Node,
    pool: &str,
    addresses: u64,
) -> anyhow::Result<()> {
    let (name, uid) = (&*node.name, &*node.uid);
    let is_named = |it: &NodeSubnetLite| it.metadata.name.as_deref() == Some(name);
    if !lists.subnets.iter().any(is_named) {
        let metadata = json!({"name": name, "uid": format!("subnet-{uid}")});
        let subnet = json!({"metadata": metadata, "spec": {"nodeUID": uid}});
        lists.subnets.push(serde_json::from_value(subnet)?);
    }
    for subnet in lists.subnets.iter_mut().filter(|it| is_named(it)) {
        if subnet.status["nodeUID"] != json!(uid) {
            subnet.status = json!({"nodeUID": uid, "pools": []});
        }
        let pools = &mut subnet.status["pools"];
        if pools.is_null() {
            *pools = json!([]);
        }
        let Some(pools) = pools.as_array_mut() else {
            continue;
        };
        match pools.iter_mut().find(|it| it["pool"] == json!(pool)) {
            Some(known) if known["demand"].as_u64().unwrap_or(0) >= addresses => {}
            Some(known) => known["demand"] = json!(addresses),
            None => pools.push(json!({"pool": pool, "demand": addresses})),
        }
    }
    Ok(())
}

/// Parses the IPPools in a YAML or JSON file, as `kubectl apply` would.
pub(crate) fn read_pools(text: &str) -> anyhow::Result<Vec<Value>> {
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(text).context("it is neither YAML nor JSON")?;
    let mut pools = Vec::new();
    for document in documents.into_iter().filter(|it| !it.is_null()) {
        let items = match document.get("items").and_then(Value::as_array) {
            Some(items) => items.clone(),
            None => vec![document],
        };
        for item in items {
            let kind = item["kind"].as_str().unwrap_or_default();
            if kind != "IPPool" {
                bail!("it contains a {kind}, but only IPPools can be planned");
            }
            if item["metadata"]["name"].as_str().is_none() {
                bail!("an IPPool in it has no name");
            }
            pools.push(item);
        }
    }
    if pools.is_empty() {
        bail!("there is no IPPool in it");
    }
    Ok(pools)
}

fn pool_mut<'a>(lists: &'a mut ClusterLists, name: &str) -> Option<&'a mut IPPoolLite> {
    let mut pools = lists.pools.iter_mut();
    pools.find(|it| it.metadata.name.as_deref() == Some(name))
}

/// Adds a pool, or replaces the spec of the pool with this name. Returns the line that reports the change. Fails if
/// `allocationMode` would change, because the API server does not allow that.
pub(super) fn put_pool(
    lists: &mut ClusterLists,
    pool: &Value,
    now: Timestamp,
) -> anyhow::Result<String> {
    let name = pool["metadata"]["name"].as_str().unwrap_or_default();
    let spec: IPPoolSpec = serde_json::from_value(pool["spec"].clone())
        .with_context(|| format!("the spec of pool \"{name}\" cannot be read"))?;
    let spec = serde_json::to_value(spec)?;
    if let Some(known) = pool_mut(lists, name) {
        let mode = known.spec["allocationMode"].as_str().unwrap_or("Blocks");
        if spec["allocationMode"] != mode {
            bail!(
                "pool \"{name}\" allocates {mode}, which cannot be changed: add a new pool instead"
            );
        }
        known.spec = spec;
        return Ok(format!("pool \"{name}\" changes"));
    }
    let mut created: IPPoolLite = serde_json::from_value(json!({
        "metadata": {"name": name, "uid": format!("new-{name}"), "finalizers": [FINALIZER]},
        "spec": spec,
    }))?;
    created.metadata.creation_timestamp = Some(Time(now));
    lists.pools.push(created);
    Ok(format!("pool \"{name}\" is new"))
}

/// Marks a pool as being deleted. Fails if there is no pool of this name.
pub(super) fn delete_pool(
    lists: &mut ClusterLists,
    name: &str,
    now: Timestamp,
) -> anyhow::Result<()> {
    let pool = pool_mut(lists, name).with_context(|| {
        format!("there is no pool \"{name}\" (kubectl get ippools.cadastre.dev)")
    })?;
    pool.metadata.deletion_timestamp = Some(Time(now));
    Ok(())
}

/// Takes a range out of every pool that contains a part of the range. Returns the names of these pools.
pub(super) fn drain(lists: &mut ClusterLists, range: &Cidr, inventory: &Inventory) -> Vec<String> {
    let pools = inventory.registry.pools.touching(range);
    let names: Vec<String> = pools.map(|pool| pool.name.to_string()).collect();
    for pool in &mut lists.pools {
        let name = pool.metadata.name.clone().unwrap_or_default();
        if !names.contains(&name) {
            continue;
        }
        for (field, longest) in [("ipv4", 32), ("ipv6", 128)] {
            let Some(cidrs) = pool.spec[field]["cidrs"].as_array() else {
                continue;
            };
            let size = pool.spec[field]["blockSize"].as_u64();
            let state = inventory.registry.pools.get(&*name);
            let default = state.and_then(|it| it.space.block_len(range.family()));
            let size = size.or(default.map(u64::from)).unwrap_or(longest);
            let cidrs = cidrs
                .iter()
                .filter_map(|it| Cidr::parse_lenient(it.as_str()?).ok());
            let left: Vec<String> = cidrs
                .flat_map(|cidr| without(&cidr, range))
                // A piece that is smaller than a block cannot be allocated, so it is left out.
                .filter(|cidr| cidr.family() != range.family() || u64::from(cidr.len()) <= size)
                .map(|cidr| cidr.to_string())
                .collect();
            if left.is_empty() {
                // The API server rejects a pool that loses a family. So if no range of a family is left, the family
                // keeps its ranges, and the pool is disabled.
                pool.spec["disabled"] = json!(true);
            } else {
                pool.spec[field]["cidrs"] = json!(left);
            }
        }
    }
    names
}

/// Returns disjoint CIDRs that together contain the addresses of `cidr` outside of `range`.
fn without(cidr: &Cidr, range: &Cidr) -> Vec<Cidr> {
    if !cidr.overlaps(range) {
        return vec![*cidr];
    }
    let shifted = |addr: Addr, value: Option<u128>| value.map(|value| Addr { value, ..addr });
    let before = shifted(range.first(), range.first().value.checked_sub(1));
    let after = shifted(range.last(), range.last().value.checked_add(1));
    let before = before.and_then(|end| IpRange::new(cidr.first(), end));
    let after = after.and_then(|start| IpRange::new(start, cidr.last()));
    let spans = before.into_iter().chain(after);
    spans.flat_map(|span| span.to_cidrs()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::cidr;

    #[test]
    fn what_is_left_of_a_range_is_all_of_it_but_the_other() {
        let left = |a: &str, b: &str| {
            let left = without(&cidr(a), &cidr(b));
            left.iter().map(Cidr::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            left("10.0.0.0/24", "10.0.0.64/26"),
            ["10.0.0.0/26", "10.0.0.128/25"]
        );
        assert_eq!(left("10.0.0.0/24", "10.0.0.0/8"), Vec::<String>::new());
        assert_eq!(left("10.0.0.0/24", "10.1.0.0/24"), ["10.0.0.0/24"]);
        assert_eq!(left("0.0.0.0/1", "0.0.0.0/2"), ["64.0.0.0/2"]);
    }

    #[test]
    fn a_file_of_something_else_is_refused_by_name() {
        let error = read_pools("kind: Pod\nmetadata: {name: a}\n").unwrap_err();
        assert!(format!("{error:#}").contains("Pod"), "{error:#}");
        assert!(read_pools("").is_err());
        let two = "kind: IPPool\nmetadata: {name: a}\n---\nkind: IPPool\nmetadata: {name: b}\n";
        assert_eq!(read_pools(two).unwrap().len(), 2);
    }
}
