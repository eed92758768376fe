//! DELs that never come, and DELs that come more than once.

use std::os::unix::fs::PermissionsExt as _;

use cadastre_e2e::wait::until;
use serde_json::json;

use crate::pods;
use crate::{LIMIT, Stage, machines};

/// A main plugin that does with its DELs what the file says: nothing, or everything three times.
const ODD: &str = r#"#!/bin/sh
input=$(cat)
ptp() { printf %s "$input" | /opt/cni/bin/ptp; }
echo "$CNI_COMMAND $CNI_CONTAINERID" >> /var/log/odd.log
case "$CNI_COMMAND $(cat /var/odd)" in
"DEL never") exit 0 ;;
"DEL thrice") ptp && ptp && ptp ;;
*) ptp ;;
esac
"#;

pub(crate) async fn never_or_three_times(stage: &Stage) {
    let (hand, group) = (&stage.hand, "odd");
    let spec = machines::both("10.32.0.0/24", "fd00:32::/120");
    hand.block_pool(group, spec).await.unwrap();
    let odd = stage.site.cluster().folder().join("odd-ptp");
    std::fs::write(&odd, ODD).unwrap();
    std::fs::set_permissions(&odd, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut side = machines::side(&json!({"type": "odd-ptp"}));
    side.plugins.push(("odd-ptp".to_owned(), odd));
    let machine = stage.machine(group, side).await;
    let node = machine.name();
    std::fs::write(machine.var().join("odd"), "thrice").unwrap();
    pods::ready(hand, node, true).await;

    pods::create_many(hand, group, &format!("{group}-stays"), 0..3, Some(node)).await;
    let stay = pods::running(hand, group, 3).await;
    for (round, odd) in ["thrice", "never"].into_iter().enumerate() {
        std::fs::write(machine.var().join("odd"), odd).unwrap();
        let prefix = format!("goes-{round}");
        pods::create_many(hand, group, &prefix, 0..5, Some(node)).await;
        let all = pods::running(hand, group, 8).await;
        pods::assert_unique(&all);
        machines::told(hand, node, &all).await;
        for n in 0..5 {
            hand.pods
                .delete(
                    &format!("{prefix}-{n}"),
                    &kube::api::DeleteParams::default(),
                )
                .await
                .unwrap();
        }
        let left = pods::running(hand, group, 3).await;
        // What is not deleted by anybody is found to be gone.
        machines::told(hand, node, &left).await;
        let addresses = |pods: &[pods::Running]| -> Vec<_> {
            pods.iter().map(|it| it.addresses.clone()).collect()
        };
        assert_eq!(addresses(&left), addresses(&stay));
    }
    let log = machine.var().join("log/odd.log");
    let calls = std::fs::read_to_string(log).unwrap();
    assert!(calls.matches("DEL").count() >= 10, "{calls}");
    std::fs::write(machine.var().join("odd"), "once").unwrap();
    pods::delete_all(hand, group).await;
    until("the node stays ready", LIMIT, async || {
        pods::ready(hand, node, true).await;
        Ok(Some(()))
    })
    .await
    .unwrap();
}
