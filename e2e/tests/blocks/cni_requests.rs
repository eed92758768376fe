//! Addresses that the CNI configuration or the runtime requests for a pod, on any node, through the CNI plugin.

use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use cadastre_api::ADDRESSES_ANNOTATION;
use cadastre_e2e::fixtures::{LIMIT, gone};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, Fixtures, daemon};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::addresses::{claim_of, has_claim, nth};
use crate::claims::{claims, ready};
use crate::{node, shared};

/// A way in which a runtime requests an address.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// The variable `CNI_ARGS`, which contains `IP=ADDRESS`
    Args,
    /// The field `args.cni.ips` of the configuration
    ArgsOfConfig,
    /// The field `runtimeConfig.ips` of the configuration
    RuntimeConfig,
}

/// Calls the CNI plugin for a container with the pod's name, as a runtime does. Returns the address that the container
/// gets, or the text of the error.
fn call(
    verb: &str,
    ifname: &str,
    (way, address): (Way, &str),
    pod: &Pod,
    agent: &Value,
) -> Result<Result<String, String>> {
    let (name, uid) = (pod.name_any(), pod.uid().unwrap_or_default());
    let mut args =
        format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={name};K8S_POD_UID={uid}");
    let mut config = json!({"cniVersion": "1.0.0", "name": "net", "type": "ptp", "ipam": agent});
    match way {
        Way::Args => args = format!("{args};IP={address}"),
        Way::ArgsOfConfig => config["args"] = json!({"cni": {"ips": [address]}}),
        Way::RuntimeConfig => config["runtimeConfig"] = json!({"ips": [address]}),
    }
    let mut child = Command::new(daemon::plugin()?)
        .env_clear()
        .env("CNI_COMMAND", verb)
        .env("CNI_CONTAINERID", &name)
        .env("CNI_IFNAME", ifname)
        .env("CNI_NETNS", format!("/run/netns/{name}"))
        .env("CNI_PATH", "/opt/cni/bin")
        .env("CNI_ARGS", args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut stdin = child.stdin.take().context("no stdin")?;
    stdin.write_all(config.to_string().as_bytes())?;
    drop(stdin);
    let output = child.wait_with_output()?;
    let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    if !output.status.success() {
        return Ok(Err(text(&said["msg"])));
    }
    let address = text(&said["ips"][0]["address"]);
    Ok(Ok(address.split('/').next().unwrap_or_default().to_owned()))
}

/// Calls the CNI plugin on a node without blocking this thread.
async fn call_on(
    agents: &Agents,
    (verb, node, ifname): (&str, &str, &str),
    (way, address): (Way, &str),
    pod: &Pod,
) -> Result<Result<String, String>> {
    let agent = agents.ipam(node)?;
    let (verb, ifname, address) = (verb.to_owned(), ifname.to_owned(), address.to_owned());
    let pod = pod.clone();
    let called =
        tokio::task::spawn_blocking(move || call(&verb, &ifname, (way, &address), &pod, &agent));
    called.await?
}

/// Calls ADD until the pod gets the address, as a kubelet does.
async fn gets(agents: &Agents, node: &str, (way, address): (Way, &str), pod: &Pod) -> Result<()> {
    let what = format!("{} gets {address} by {way:?}", pod.name_any());
    until(&what, LIMIT, async || {
        let add = ("ADD", node, "eth0");
        match call_on(agents, add, (way, address), pod).await? {
            Ok(has) => {
                ensure!(has == address, "{has}");
                Ok(Some(()))
            }
            Err(why) => anyhow::bail!(why),
        }
    })
    .await
}

/// Calls ADD until the text of the error contains all of `parts`. Fails if the pod gets an address.
async fn is_refused(
    agents: &Agents,
    (node, ifname): (&str, &str),
    request: (Way, &str),
    pod: &Pod,
    parts: &[&str],
) -> Result<()> {
    let what = format!("the agent tells {} of {parts:?}", pod.name_any());
    until(&what, LIMIT, async || {
        let refusal = call_on(agents, ("ADD", node, ifname), request, pod).await?;
        let refusal = refusal.err().context("it has the address")?;
        ensure!(parts.iter().all(|it| refusal.contains(it)), "{refusal}");
        Ok(Some(()))
    })
    .await
}

/// Returns a /28 of the range `START.0/25` that `listed` does not contain.
fn unlisted(start: &str, listed: &[&str]) -> Result<String> {
    let blocks = (0..8).map(|n| format!("{start}.{}/28", n * 16));
    let mut blocks = blocks.filter(|it| !listed.contains(&it.as_str()));
    blocks.next().context("no free block")
}

async fn nodes_of(fixtures: &Fixtures, agents: &Agents, pool: &str, range: &str) -> Result<()> {
    let spec = json!({
        "ipv4": {"cidrs": [range], "blockSize": 28},
        "cooldownSeconds": 0, "maxBlocksPerNode": 1,
    });
    fixtures.block_pool(pool, spec).await?;
    for nth in 1..=2 {
        let name = format!("{pool}-{nth}");
        node(fixtures, agents, pool, &name).await?;
        fixtures.listed(&name, 1).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_pod_gets_the_address_that_its_runtime_requests_on_any_node() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    nodes_of(&fixtures, &agents, "cni", "10.79.4.0/25").await?;
    let own = fixtures.listed("cni-1", 1).await?[0].clone();
    let others = fixtures.listed("cni-2", 1).await?[0].clone();
    let unlisted = unlisted("10.79.4", &[&own, &others])?;

    let at_home = fixtures.pod("cni-home", "cni-1", &[]).await?;
    gets(&agents, "cni-1", (Way::Args, &nth(&own, 9)?), &at_home).await?;
    assert!(!has_claim(&fixtures, &at_home).await?, "its node has it");

    let ways = [Way::Args, Way::ArgsOfConfig, Way::RuntimeConfig];
    for (n, way) in (0..).zip(ways) {
        for (place, range) in [("free", &*unlisted), ("other", &*others)] {
            let (name, address) = (format!("cni-{place}-{n}"), nth(range, 5 + n)?);
            let pod = fixtures.pod(&name, "cni-1", &[]).await?;
            gets(&agents, "cni-1", (way, &address), &pod).await?;
            let status = ready(&fixtures, &claim_of(&pod), "InUse").await?;
            assert_eq!(status.node.as_deref(), Some("cni-1"));
            let claim = claims(&fixtures).get(&claim_of(&pod)).await?;
            let owner = &claim.owner_references()[0];
            assert_eq!((&*owner.kind, &*owner.name), ("Pod", &*name));
            let what = "the request ends when the pod has its address";
            let is_over = |it: &cadastre_api::NodeSubnet| {
                let status = it.status.as_ref();
                status.is_some_and(|it| it.requested_addresses.is_empty())
            };
            fixtures.subnet_until("cni-1", what, is_over).await?;
            let again = call_on(&agents, ("ADD", "cni-1", "eth0"), (way, &address), &pod);
            assert_eq!(again.await?.as_ref(), Ok(&address));

            // The pod is deleted. A new pod on another node asks for the same address, and waits until the deleted
            // pod's container is gone.
            fixtures.report_addresses(&name, &[&address]).await?;
            fixtures.delete_pod(&name).await?;
            let next = fixtures.pod(&format!("{name}-next"), "cni-2", &[]).await?;
            is_refused(
                &agents,
                ("cni-2", "eth0"),
                (way, &address),
                &next,
                &[&claim_of(&next)],
            )
            .await?;
            let text = fixtures.event_about(&next, "AddressUnavailable").await?;
            ensure!(text.contains("in the CNI request"), "{text}");
            ensure!(text.contains(&claim_of(&pod)), "{text}");
            agents.free("cni-1", &name).await?;
            gets(&agents, "cni-2", (way, &address), &next).await?;
            gone(&claims(&fixtures), &claim_of(&pod)).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn only_the_own_interface_of_a_pod_of_the_node_gets_an_address_from_elsewhere() -> Result<()>
{
    let (_, fixtures, agents) = shared().await?;
    nodes_of(&fixtures, &agents, "cnino", "10.79.5.0/25").await?;
    let others = fixtures.listed("cnino-2", 1).await?[0].clone();
    let address = nth(&others, 9)?;
    let request = (Way::RuntimeConfig, &*address);
    let liar = fixtures.node("cnino", "cnino-3").await?;
    let third = fixtures.listed("cnino-3", 1).await?[0].clone();
    let own = fixtures.listed("cnino-1", 1).await?[0].clone();
    let unlisted = unlisted("10.79.5", &[&own, &others, &third])?;
    let free = [nth(&unlisted, 3)?, nth(&unlisted, 4)?, nth(&unlisted, 5)?];

    // `net1` belongs to another network, so a requested address must be in the node's own blocks.
    let second = fixtures.pod("cnino-second", "cnino-1", &[]).await?;
    let says = ["no block of this node contains it"];
    is_refused(&agents, ("cnino-1", "net1"), request, &second, &says).await?;

    // The pod's annotation asks for one address, and the runtime for another. The ADD is refused, and the error names
    // both addresses.
    let annotated = fixtures.pod("cnino-annotated", "cnino-1", &[]).await?;
    let annotation = json!({"metadata": {"annotations": {ADDRESSES_ANNOTATION: free[0]}}});
    let annotation: Patch<Value> = Patch::Merge(annotation);
    let params = PatchParams::default();
    let name = annotated.name_any();
    fixtures.pods.patch(&name, &params, &annotation).await?;
    let both = [&*address, &*free[0]];
    is_refused(&agents, ("cnino-1", "eth0"), request, &annotated, &both).await?;

    // A lying agent requests addresses for a pod of another node, and for its own pod under a wrong namespace. Neither
    // request has an effect.
    let victim = fixtures.pod("cnino-victim", "cnino-2", &[]).await?;
    let own = fixtures.pod("cnino-own", "cnino-3", &[]).await?;
    let requests: Vec<Value> = [("default", &victim), ("kube-system", &own)]
        .into_iter()
        .map(|(namespace, pod)| {
            json!({
                "namespace": namespace, "pod": pod.name_any(), "podUID": pod.uid(),
                "addresses": [free[1]],
            })
        })
        .collect();
    let honest = fixtures.pod("cnino-honest", "cnino-3", &[]).await?;
    let last = json!({
        "namespace": "default", "pod": honest.name_any(), "podUID": honest.uid(),
        "addresses": [free[2]],
    });
    let all: Vec<Value> = requests.into_iter().chain([last]).collect();
    let status = json!({"nodeUID": liar.uid(), "requestedAddresses": all});
    fixtures.write_status("cnino-3", status).await?;
    ready(&fixtures, &claim_of(&honest), "InUse").await?;
    assert!(!has_claim(&fixtures, &victim).await?);
    let in_kube_system: kube::Api<cadastre_api::IPClaim> =
        kube::Api::namespaced(fixtures.client.clone(), "kube-system");
    let theirs = in_kube_system.get_opt(&claim_of(&own)).await?;
    assert!(theirs.is_none());
    Ok(())
}
