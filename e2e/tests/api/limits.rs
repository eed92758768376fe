//! The longest allowed lists, even with the most expensive content, stay within the API server's cost budgets for
//! rules.

use std::time::Instant;

use cadastre_api::{MOST_BLOCKS, MOST_ORPHANS};
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::{Lab, causes, dry_run, pool, subnet};

/// CIDRs of the maximum text length. They differ only in their last digits, which makes comparisons costly.
fn ipv4(count: u32) -> Vec<String> {
    (0..count)
        .map(|n| format!("100.{}.{}.128/28", 100 + n / 256, n % 256))
        .collect()
}

fn ipv6(count: u32) -> Vec<String> {
    (0..count)
        .map(|n| format!("2001:db8:1234:5678:9abc:def0:1234:{:x}/128", 0x5600 + n))
        .collect()
}

/// Ranges whose first and last address differ in the first bit, which is the most expensive case for the rules.
fn ranges(count: u32) -> Vec<String> {
    let ends = |n| {
        format!("2001:db8:1234:5678:9abc:def0:{n:x}:1111-a001:db8:1234:5678:9abc:def0:{n:x}:1111")
    };
    (0..count).map(|n| ends(0x1000 + n)).collect()
}

fn longest(v4: u32, v6: u32, reserved: u32) -> Value {
    json!({
        "allocationMode": "NodeCIDR",
        "ipv4": {"cidrs": ipv4(v4), "blockSize": 28},
        "ipv6": {"cidrs": ipv6(v6), "blockSize": 128},
        "reserved": ranges(reserved),
        "assignments": assignments(MOST_ASSIGNMENTS),
    })
}

/// The maximum number of assignments of a pool.
const MOST_ASSIGNMENTS: u32 = 1024;

/// Assignments to nodes whose names have the maximum length.
fn assignments(count: u32) -> Vec<Value> {
    let of = |(n, (v4, v6)): (u32, (String, String))| json!({"node": format!("{n:0>253}"), "cidrs": [v4, v6]});
    let ranges = ipv4(count).into_iter().zip(ipv6(count));
    (0..count).zip(ranges).map(of).collect()
}

/// Pools in which each reserved entry overlaps only one of the last CIDRs. So each entry is compared with almost all
/// CIDRs.
fn touching() -> [Value; 3] {
    let v4 = |entry: fn(u32) -> String| {
        let reserved: Vec<String> = (0..128).map(entry).collect();
        json!({"allocationMode": "NodeCIDR", "ipv4": {"cidrs": ipv4(256), "blockSize": 28}, "reserved": reserved})
    };
    let last = ipv6(128);
    [
        v4(|n| format!("100.100.{}.{}", 248 + n / 16, 128 + n % 16)),
        v4(|n| {
            let (third, fourth) = (248 + n / 16, 128 + n % 16);
            format!("100.100.{third}.{fourth}-100.100.{third}.200")
        }),
        json!({
            "allocationMode": "NodeCIDR", "ipv6": {"cidrs": last, "blockSize": 128}, "reserved": last,
        }),
    ]
}

impl Lab {
    pub(crate) async fn limits(&self) {
        for (n, spec) in touching().iter().enumerate() {
            let start = Instant::now();
            self.create(&pool(&format!("touching-{n}"), spec)).await;
            eprintln!(
                "reserved that is looked for last, {n}: {:?}",
                start.elapsed()
            );
        }
        let start = Instant::now();
        self.create(&pool("longest", &longest(256, 128, 128))).await;
        eprintln!("create of the longest pool: {:?}", start.elapsed());

        let start = Instant::now();
        let status = Patch::Merge(json!({"status": {"nodes": 1}}));
        self.pools
            .patch_status("longest", &PatchParams::default(), &status)
            .await
            .unwrap();
        eprintln!("status of the longest pool: {:?}", start.elapsed());

        self.longest_in_vain().await;
        let mut too_many = longest(1, 1, 1);
        too_many["assignments"] = assignments(MOST_ASSIGNMENTS + 1).into();
        for (spec, field) in [
            (longest(257, 1, 1), "spec.ipv4.cidrs"),
            (longest(1, 129, 1), "spec.ipv6.cidrs"),
            (longest(1, 1, 129), "spec.reserved"),
            (too_many, "spec.assignments"),
        ] {
            let answer = self
                .pools
                .create(&dry_run(), &pool("too-long", &spec))
                .await;
            let complaints = causes(&answer.unwrap_err());
            assert!(
                matches!(&complaints[0], (f, m) if f == field && m.starts_with("Too many")),
                "{complaints:?}"
            );
        }
        self.longest_node().await;
    }

    /// Checks a pool in which all reserved entries lie outside the CIDRs. So every entry is compared with every CIDR.
    async fn longest_in_vain(&self) {
        let mut spec = longest(256, 128, 0);
        let entry = |n| format!("2001:db8:1234:5678:9abc:def0:1235:{n:x}");
        spec["reserved"] = (0x5600..0x5680).map(entry).collect();
        let answer = self.pools.create(&dry_run(), &pool("vain", &spec)).await;
        let complaints = causes(&answer.unwrap_err());
        let why = "in none of the cidrs, so there is nothing to keep out: take it off the list, or correct it";
        assert!(
            matches!(&complaints[..], [(f, m)] if f == "spec.reserved" && m.ends_with(why)),
            "{complaints:?}"
        );
    }

    /// Checks a NodeSubnet with the maximum number of blocks, with a status for each block, and with the maximum number
    /// of orphans.
    async fn longest_node(&self) {
        let plain = subnet("longest", &json!({}));
        self.subnets
            .create(&PostParams::default(), &plain)
            .await
            .unwrap();
        let params = PatchParams::default();
        let start = Instant::now();
        let spec =
            |blocks| Patch::Merge(json!({"spec": {"nodeUID": UID, "blocks": listed(blocks)}}));
        self.subnets
            .patch("longest", &params, &spec(MOST_BLOCKS))
            .await
            .unwrap();
        eprintln!("{MOST_BLOCKS} blocks listed: {:?}", start.elapsed());
        let start = Instant::now();
        let status = |blocks, orphans| {
            Patch::Merge(json!({"status": {
                "nodeUID": UID, "blocks": reported(blocks), "orphans": in_use(orphans),
            }}))
        };
        self.subnets
            .patch_status("longest", &params, &status(MOST_BLOCKS, MOST_ORPHANS))
            .await
            .unwrap();
        eprintln!("{MOST_BLOCKS} blocks reported: {:?}", start.elapsed());

        let longer = self
            .subnets
            .patch("longest", &params, &spec(MOST_BLOCKS + 1))
            .await;
        let mut refused = vec![("spec.blocks", longer)];
        for (field, blocks, orphans) in [
            ("status.blocks", MOST_BLOCKS + 1, 1),
            ("status.orphans", 1, MOST_ORPHANS + 1),
        ] {
            let status = status(blocks, orphans);
            let answer = self.subnets.patch_status("longest", &params, &status).await;
            refused.push((field, answer));
        }
        for (field, answer) in refused {
            let complaints = causes(&answer.unwrap_err());
            assert!(
                matches!(&complaints[0], (f, m) if f == field && m.starts_with("Too many")),
                "{complaints:?}"
            );
        }
    }
}

const UID: &str = "01234567-89ab-cdef-0123-456789abcdef";

fn cidr(n: usize) -> String {
    format!("fd00:10:244:{:x}::40/122", 0x1000 + n)
}

fn listed(count: usize) -> Vec<Value> {
    let block =
        |n| json!({"cidr": cidr(n), "uid": UID, "pool": "pods-of-tenants", "recall": "Drain"});
    (0..count).map(block).collect()
}

fn reported(count: usize) -> Vec<Value> {
    let block = |n| json!({"cidr": cidr(n), "uid": UID, "used": 10, "cooling": 10, "free": 44});
    (0..count).map(block).collect()
}

fn in_use(count: usize) -> Vec<Value> {
    let address = |n| {
        let address = format!("fd00:10:244:{:x}::41", 0x1000 + n);
        json!({"address": address, "podUID": UID})
    };
    (0..count).map(address).collect()
}
