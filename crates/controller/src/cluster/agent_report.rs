//! Reads the status of a NodeSubnet, as an agent wrote it. The status is read entry by entry, so that an invalid entry
//! does not affect the others.
//!
//! Agents run on every node and may be outdated, faulty or compromised. This module checks formats, signs, maximums and
//! repetitions. The code that uses a report checks whether a block belongs to the node.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::names::PoolName;
use super::objects::{AddressRequest, AgentReport, BlockReport, PodUid, SubnetCondition, Text};
use cadastre_api::{
    BlockStatus, LeakCandidate, MOST_ADDRESS_REQUESTS, MOST_BLOCKS, MOST_ORPHANS, MOST_POOLS,
    MOST_WITHDRAWALS, PoolDemand,
};
use cadastre_core::{Addr, Cidr};

/// The highest demand that is accepted. A higher demand is a mistake, because no node runs so many pods.
const MOST_DEMAND: i64 = 1_000_000;
/// Maximum number of invalid entries that a report describes.
const MOST_TEXTS: usize = 5;

/// Maximum number of conditions in a NodeSubnet. The controller writes three of them and keeps those of other writers.
/// If a NodeSubnet has more conditions than this, the controller writes no condition.
pub(crate) const MOST_CONDITIONS: usize = 16;

/// The type of the condition that reports whether all entries of an agent's status are valid.
pub const ACCEPTED: &str = "Accepted";

/// Invalid entries: descriptions of the first few, and the number of all.
#[derive(Default)]
struct Invalid {
    texts: Vec<String>,
    count: u64,
}

impl Invalid {
    fn add(&mut self, text: String) {
        self.count += 1;
        if self.texts.len() < MOST_TEXTS {
            self.texts.push(text);
        }
    }
}

/// Reads a status. Returns `None` if the status is not a JSON object.
pub fn read(status: &Value) -> Option<Box<AgentReport>> {
    let fields = status.as_object()?;
    let mut invalid = Invalid::default();
    let node_uid = match fields.get("nodeUID") {
        Some(Value::String(uid)) => uid.as_str(),
        Some(_) => {
            invalid.add("nodeUID is no text".to_owned());
            ""
        }
        None => "",
    };
    let mut list = List {
        fields,
        invalid: &mut invalid,
    };
    let demand = list.read("pools", MOST_POOLS, demand, |(pool, _)| pool.clone());
    let blocks = list.read("blocks", MOST_BLOCKS, block, |it| (it.cidr, it.uid.clone()));
    let orphans = list.read("orphans", MOST_ORPHANS, orphan, |(addr, _)| *addr);
    let withdrawn = list.read("withdrawn", MOST_WITHDRAWALS, range, |range| *range);
    let withdrawing = list.read("withdrawing", MOST_WITHDRAWALS, range, |range| *range);
    let field = "requestedAddresses";
    let requests = list.read(field, MOST_ADDRESS_REQUESTS, request, |it| it.uid.clone());
    Some(Box::new(AgentReport {
        node_uid: node_uid.into(),
        demand,
        blocks,
        orphans,
        withdrawn,
        withdrawing,
        requests,
        refused: invalid.texts,
        refusals: invalid.count,
        conditions: conditions(fields.get("conditions")),
    }))
}

struct List<'a> {
    fields: &'a Map<String, Value>,
    invalid: &'a mut Invalid,
}

impl List<'_> {
    /// Returns the valid entries among the first `most` of a list, sorted by key. If several entries have the same key,
    /// none of them is returned, because it is unknown which one is meant.
    fn read<W, T, K: Ord>(
        &mut self,
        field: &str,
        most: usize,
        read: impl Fn(W) -> Result<T, String>,
        key: impl Fn(&T) -> K,
    ) -> Box<[T]>
    where
        W: for<'de> Deserialize<'de>,
    {
        let list = match self.fields.get(field) {
            None | Some(Value::Null) => return Box::default(),
            Some(Value::Array(list)) => list,
            Some(_) => {
                self.invalid.add(format!("{field} is no list"));
                return Box::default();
            }
        };
        if list.len() > most {
            self.invalid.add(format!(
                "{field} has {} entries: only the first {most} are read",
                list.len()
            ));
        }
        let mut by_key: BTreeMap<K, Option<T>> = BTreeMap::new();
        for (at, entry) in list.iter().take(most).enumerate() {
            let entry = W::deserialize(entry).map_err(|error| error.to_string());
            match entry.and_then(&read) {
                Ok(entry) => {
                    let same = by_key.entry(key(&entry));
                    same.and_modify(|it| *it = None).or_insert(Some(entry));
                }
                Err(why) => self.invalid.add(format!("{field}[{at}]: {why}")),
            }
        }
        for _ in by_key.values().filter(|entry| entry.is_none()) {
            self.invalid
                .add(format!("{field} names something twice: neither is read"));
        }
        by_key.into_values().flatten().collect()
    }
}

fn demand(entry: PoolDemand) -> Result<(PoolName, u64), String> {
    let demand = u64::try_from(entry.demand).map_err(|_| {
        format!(
            "demand {} of pool \"{}\" is negative",
            entry.demand, entry.pool
        )
    })?;
    if entry.demand > MOST_DEMAND {
        return Err(format!(
            "demand {demand} of pool \"{}\" is more than {MOST_DEMAND}",
            entry.pool
        ));
    }
    Ok((entry.pool.into(), demand))
}

#[expect(clippy::needless_pass_by_value, reason = "like the other readers")]
fn range(text: String) -> Result<Cidr, String> {
    Cidr::parse_strict(&text).map_err(|error| error.to_string())
}

fn block(entry: BlockStatus) -> Result<BlockReport, String> {
    let cidr = Cidr::parse_strict(&entry.cidr).map_err(|error| error.to_string())?;
    let count = |name: &str, count: i64| {
        u64::try_from(count).map_err(|_| format!("{name} {count} of {cidr} is negative"))
    };
    let used = count("used", entry.used)?;
    let cooling = count("cooling", entry.cooling)?;
    let free = count("free", entry.free)?;
    let withdrawn = count("withdrawn", entry.withdrawn)?;
    let size = cidr.size();
    let counts = [used, cooling, free, withdrawn];
    if counts.into_iter().map(u128::from).sum::<u128>() > size {
        return Err(format!("{cidr} has only {size} addresses"));
    }
    if entry.released && (used > 0 || cooling > 0) {
        return Err(format!("{cidr} is released and in use at once"));
    }
    Ok(BlockReport {
        cidr,
        uid: entry.uid.into(),
        used,
        cooling,
        free,
        withdrawn,
        released: entry.released,
    })
}

#[expect(clippy::needless_pass_by_value, reason = "as the other readers")]
fn orphan(entry: LeakCandidate) -> Result<(Addr, PodUid), String> {
    let addr = Addr::parse_strict(&entry.address)
        .ok_or_else(|| format!("\"{}\" is no address in canonical form", entry.address))?;
    let uid = match entry.pod_uid.as_str() {
        "" => PodUid::default(),
        text => PodUid::read(text),
    };
    Ok((addr, uid))
}

#[expect(clippy::needless_pass_by_value, reason = "as the other readers")]
fn request(entry: cadastre_api::AddressRequest) -> Result<AddressRequest, String> {
    let pod = format!("{}/{}", entry.namespace, entry.pod);
    let is_name = |text: &str| !text.is_empty() && !text.contains('/');
    let names = [&entry.namespace, &entry.pod, &entry.pod_uid];
    if !names.into_iter().all(|it| is_name(it)) {
        return Err(format!(
            "\"{pod}\" with UID \"{}\" is no pod",
            entry.pod_uid
        ));
    }
    let addresses = entry.addresses.iter().map(|text| {
        let addr = Addr::parse_strict(text);
        addr.ok_or_else(|| format!("\"{text}\" is no address in canonical form"))
    });
    let mut addresses = addresses.collect::<Result<Vec<Addr>, String>>()?;
    addresses.sort_unstable();
    let is_one_of_each = addresses.windows(2).all(|it| it[0].family != it[1].family);
    if addresses.is_empty() || !is_one_of_each {
        return Err(format!("pod {pod} requests not one address of a family"));
    }
    Ok(AddressRequest {
        pod: pod.into(),
        uid: entry.pod_uid.as_str().into(),
        addresses: addresses.into(),
    })
}

fn conditions(list: Option<&Value>) -> Box<[SubnetCondition]> {
    let list = list.and_then(Value::as_array).into_iter().flatten();
    let text = |condition: &Value, field: &str| -> Text {
        condition[field].as_str().unwrap_or_default().into()
    };
    let read = |condition: &Value| SubnetCondition {
        kind: text(condition, "type"),
        status: text(condition, "status"),
        reason: text(condition, "reason"),
        message: text(condition, "message").to_string(),
        since: text(condition, "lastTransitionTime"),
        generation: condition["observedGeneration"].as_i64(),
    };
    list.take(MOST_CONDITIONS + 1).map(read).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_invalid_entry_does_not_affect_others() {
        let report = read(&json!({
            "nodeUID": "u1",
            "pools": [
                {"pool": "a", "demand": 40}, {"pool": "b", "demand": -1},
                {"pool": "c", "demand": 9_000_000_000i64}, {"pool": 7},
                {"pool": "d", "demand": 1}, {"pool": "d", "demand": 2},
            ],
            "blocks": [
                {"cidr": "10.0.0.0/26", "uid": "b1", "used": 3},
                {"cidr": "10.0.0.64/26", "uid": "b2", "used": 63, "cooling": 2},
                {"cidr": "10.0.0.129/26", "uid": "b3"},
                {"cidr": "10.0.0.192/26", "uid": "b4", "used": 1, "released": true},
            ],
            "orphans": [
                {"address": "10.0.0.1", "podUID": "01234567-89ab-cdef-0123-456789abcdef"},
                {"address": "10.0.0.2", "podUID": "x"}, {"address": "10.0.0.2", "podUID": "y"},
                {"address": "010.0.0.3", "podUID": "z"}, {"address": "10.0.0.4"},
            ],
            "requestedAddresses": [
                {"namespace": "d", "pod": "a", "podUID": "1", "addresses": ["fd00::7", "10.0.0.7"]},
                {"namespace": "d", "pod": "b", "podUID": "2", "addresses": []},
                {"namespace": "d", "pod": "c", "podUID": "3", "addresses": ["10.0.0.7", "10.0.0.8"]},
                {"namespace": "d", "pod": "d/e", "podUID": "4", "addresses": ["10.0.0.7"]},
                {"namespace": "", "pod": "f", "podUID": "5", "addresses": ["10.0.0.7"]},
                {"namespace": "d", "pod": "g", "podUID": "", "addresses": ["10.0.0.7"]},
                {"namespace": "d", "pod": "h", "podUID": "6", "addresses": ["10.0.0.0/24"]},
            ],
        }))
        .unwrap();
        assert_eq!(&*report.node_uid, "u1");
        assert_eq!(&*report.demand, &[("a".into(), 40)]);
        let blocks: Vec<String> = report.blocks.iter().map(|b| b.cidr.to_string()).collect();
        assert_eq!(blocks, ["10.0.0.0/26"]);
        assert_eq!(report.orphans.len(), 1);
        assert_eq!(
            report.orphans[0].1,
            PodUid(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef)
        );
        let [request] = &*report.requests else {
            panic!("{:?}", report.requests);
        };
        assert_eq!((&*request.pod, request.addresses.len()), ("d/a", 2));
        assert_eq!(report.refusals, 16, "{:?}", report.refused);
        assert_eq!(report.refused.len(), MOST_TEXTS);
    }

    #[test]
    fn unknown_fields_of_a_newer_agent_are_ignored() {
        let report = read(&json!({
            "nodeUID": "u1", "later": [1], "agent": {"version": "99.0.0", "later": 1},
            "pools": [{"pool": "a", "demand": 4, "later": "x"}],
            "blocks": [{"cidr": "10.0.0.0/26", "uid": "b1", "used": 3, "later": {}}],
            "orphans": [{"address": "10.0.0.1", "podUID": "p", "later": null}],
        }))
        .unwrap();
        assert_eq!(report.refusals, 0, "{:?}", report.refused);
        assert_eq!((report.demand.len(), report.blocks.len()), (1, 1));
        assert_eq!(report.orphans.len(), 1);
    }

    #[test]
    fn a_status_of_any_shape_is_read() {
        assert!(read(&Value::Null).is_none() && read(&json!([])).is_none());
        let report = read(&json!({"nodeUID": 7, "pools": {}, "blocks": null, "orphans": "x"}));
        assert_eq!(report.unwrap().refusals, 3);
        let many: Vec<Value> = (0..100_000)
            .map(|n| {
                let address = format!("10.{}.{}.{}", n >> 16, n >> 8 & 255, n & 255);
                json!({"address": address, "podUID": "p"})
            })
            .collect();
        let report = read(&json!({ "orphans": many })).unwrap();
        assert_eq!((report.orphans.len(), report.refusals), (MOST_ORPHANS, 1));
    }
}
