//! The longest lists, in their longest and costliest form, are within the budgets of the server.

use std::time::Instant;

use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::{Lab, causes, dry_run, pool};

/// Full-length texts, neighbours all of them: nothing can be told apart early.
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

/// Ranges that differ from the first bit on, which is found last.
fn ranges(count: u32) -> Vec<String> {
    let ends = |n| {
        format!("2001:db8:1234:5678:9abc:def0:{n:x}:1111-a001:db8:1234:5678:9abc:def0:{n:x}:1111")
    };
    (0..count).map(|n| ends(0x1000 + n)).collect()
}

fn longest(v4: u32, v6: u32, reserved: u32) -> Value {
    json!({
        "allocate": "NodeCIDR",
        "ipv4": {"cidrs": ipv4(v4), "blockSize": 28},
        "ipv6": {"cidrs": ipv6(v6), "blockSize": 128},
        "reserved": ranges(reserved),
    })
}

impl Lab {
    pub(crate) async fn limits(&self) {
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

        for (spec, field) in [
            (longest(257, 1, 1), "spec.ipv4.cidrs"),
            (longest(1, 129, 1), "spec.ipv6.cidrs"),
            (longest(1, 1, 129), "spec.reserved"),
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
    }
}
