//! How often the agent writes the NodeSubnet's status.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::{Machine, eventually, publishes, start};

/// Returns the number of PATCHes that the agent has sent to the API server.
async fn writes(machine: &Machine) -> f64 {
    let name = "rest_client_requests_total";
    machine.metric(name, &[("method", "PATCH")]).await
}

/// A minute with ten pods per second, compressed to six seconds. The publish interval and the cooldown are a tenth of
/// their defaults, too.
#[tokio::test]
async fn churn_costs_at_most_a_write_in_fifty_pod_events() {
    const PODS: u32 = 600;
    let flags = ["--publish-interval", "3", "--add-wait", "5"];
    let range = "10.20.0.0/16";
    let terms = json!({"ipv4": {"cidrs": [range]}, "cooldownSeconds": 3, "idleSeconds": 86400});
    let (api, machine) = start("churn", range, terms, &flags).await;
    let before = writes(&machine).await;
    let begun = Instant::now();
    let pace = Duration::from_millis(10);
    for n in 0..PODS {
        machine.add(&format!("c{n}")).await.unwrap();
        if n >= 60 {
            machine.del(&format!("c{}", n - 60)).await;
        }
        tokio::time::sleep_until((begun + pace * (n + 1)).into()).await;
    }
    let events = f64::from(2 * PODS - 60);
    let written = writes(&machine).await - before;
    println!(
        "{events} pod events in {:?}: {written} writes, {:.4} an event",
        begun.elapsed(),
        written / events
    );
    assert!(written <= 0.02 * events, "{written} writes");
    let held = machine
        .in_use()
        .await
        .into_iter()
        .map(|(_, it)| it)
        .collect();
    publishes(&api, "churn-1", held).await;
}

#[tokio::test]
async fn nothing_is_written_while_nothing_changes() {
    let terms = json!({"cooldownSeconds": 1});
    let (api, mut machine) = start("quiet", "10.21.0.0/24", terms, &[]).await;
    let address = machine.add("c1").await.unwrap();
    machine.add("c2").await.unwrap();
    machine.del("c2").await;
    publishes(&api, "quiet-1", vec![address]).await;
    // When the cooldown is over, the agent reports the address as free. After this report, nothing changes any more.
    eventually("the released address is told as free", async || {
        let status = api.subnets.get("quiet-1").await?.status.unwrap_or_default();
        let block = &status.blocks[0];
        anyhow::ensure!((block.cooling, block.free) == (0, 12), "{block:?}");
        Ok(Some(()))
    })
    .await;
    let written = writes(&machine).await;
    let status = api.subnets.get("quiet-1").await.unwrap().status;
    // Several publish intervals must pass without a write, so this test has to sleep.
    let before = machine.agent().process().usage().unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let after = machine.agent().process().usage().unwrap();
    let busy = after.cpu.saturating_sub(before.cpu);
    println!(
        "idle: {} KiB resident, {busy:?} of CPU in 5 s",
        after.rss / 1024
    );
    assert!(
        busy < Duration::from_millis(100),
        "{busy:?} of CPU in 5 idle seconds"
    );
    assert!((writes(&machine).await - written).abs() < 0.5);
    // Only the status is compared. The resourceVersion may differ, because the controller writes the spec when another
    // test creates a pool.
    let now = api.subnets.get("quiet-1").await.unwrap();
    assert_eq!(now.status, status);
}

#[tokio::test]
async fn a_status_that_somebody_else_wrote_is_set_right() {
    let (api, machine) = start("right", "10.22.0.0/24", json!({}), &[]).await;
    let address = machine.add("c1").await.unwrap();
    publishes(&api, "right-1", vec![address.clone()]).await;
    let empty = json!({"blocks": [], "pools": []});
    api.write_status("right-1", empty).await.unwrap();
    api.subnet_until("right-1", "tells of its block again", |it| {
        let mut blocks = it.status.iter().flat_map(|it| &it.blocks);
        blocks.next().is_some_and(|it| it.used == 1)
    })
    .await
    .unwrap();
    let nothing = cadastre_api::NodeAddressesSpec::default();
    api.list_addresses("right-1", nothing).await.unwrap();
    publishes(&api, "right-1", vec![address.clone()]).await;
    let both = vec![address, machine.add("c2").await.unwrap()];
    publishes(&api, "right-1", both.clone()).await;
    let list = api.addresses.get("right-1").await.unwrap();
    assert_eq!(list.metadata.managed_fields, None, "they only cost space");
    let params = kube::api::DeleteParams::default();
    api.addresses.delete("right-1", &params).await.unwrap();
    publishes(&api, "right-1", both).await;
    drop(machine);
}
