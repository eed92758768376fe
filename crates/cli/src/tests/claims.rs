//! Tests of how the subcommands show and check claims, and of what `claim` says.

use serde_json::{Value, json};

use super::{Cluster, SINCE, addr, assert_contains, cidr, now, style, time};
use crate::address::{AddressState, describe};
use crate::check::Severity;
use crate::claim::{ClaimsReport, CreateState, User, consequence, new_claim, outcome, rejection};
use crate::claims::ClaimFact;
use crate::reach::CallError;
use crate::render::VerbReport as _;
use crate::{drain, explain, pop, show};
use cadastre_api::pod_claim::claim_of_addresses;
use cadastre_api::{ADDRESSES_ANNOTATION, CLAIM_ANNOTATION, CLAIM_FINALIZER, IPClaimLite};

/// The address of claim shop/db.
const DB: &str = "10.0.0.100";

impl Cluster {
    /// Adds a claim of pool p with these addresses. The claim was created half an hour ago.
    fn claim(&mut self, name: &str, addresses: &[&str], reason: &str, message: &str) {
        let (namespace, short) = name.split_once('/').unwrap();
        let version = self.next();
        let ready = if addresses.is_empty() {
            "False"
        } else {
            "True"
        };
        let condition = json!({
            "type": "Ready", "status": ready, "reason": reason, "message": message, "lastTransitionTime": SINCE,
        });
        let claim = json!({
            "metadata": {
                "namespace": namespace, "name": short, "uid": format!("claim-{name}"), "resourceVersion": version,
                "creationTimestamp": SINCE, "finalizers": [CLAIM_FINALIZER],
            },
            "spec": {"pool": "p"},
            "status": {"addresses": addresses, "pool": "p", "conditions": [condition]},
        });
        self.lists
            .claims
            .push(serde_json::from_value(claim).unwrap());
    }

    /// Adds claim shop/db, for which pool p has no free address.
    fn claim_of_exhausted_pool(&mut self) {
        let message = "pool \"p\" has no free address";
        self.claim("shop/db", &[], "Exhausted", message);
    }

    fn last_claim(&mut self) -> &mut IPClaimLite {
        self.lists.claims.last_mut().unwrap()
    }

    /// Adds an address of a claim as a block of a node. `used` says whether the agent has assigned the address.
    fn claim_block(&mut self, address: &str, claim: &str, node: &str, used: bool) {
        let cidr = format!("{address}/32");
        self.block(&cidr, "p", node);
        let mut subnets = self.lists.subnets.iter_mut();
        let subnet = subnets.find(|it| it.metadata.name.as_deref() == Some(node));
        let subnet = subnet.unwrap();
        let add = |list: &mut Value, entry: Value| list.as_array_mut().unwrap().push(entry);
        let uid = format!("block-{cidr}");
        let listed = json!({"cidr": cidr, "uid": uid, "pool": "p", "claim": claim});
        add(&mut subnet.spec["blocks"], listed);
        let counted =
            json!({"cidr": cidr, "uid": uid, "used": u8::from(used), "free": u8::from(!used)});
        add(&mut subnet.status["blocks"], counted);
    }

    /// Adds a pod that names the claim `db`.
    fn claiming_pod(&mut self, name: &str, node: &str, addresses: &[&str]) {
        self.pod(name, node, addresses);
        let annotations = [(CLAIM_ANNOTATION.to_owned(), "db".to_owned())];
        let pod = self.lists.pods.last_mut().unwrap();
        pod.metadata.annotations = Some(annotations.into());
    }

    /// Makes the agent of the node report the address of the claim as in use by the pod.
    fn uses(&mut self, node: &str, address: &str, pod: &str) {
        let mut lists = self.lists.addresses.iter_mut();
        let list = lists.find(|it| it.metadata.name.as_deref() == Some(node));
        let entry = format!("{address} cbr0/9876543210-{pod} eth0 pod-{pod} {pod} {SINCE}");
        let entries = &mut list.unwrap().spec["addresses"];
        entries.as_array_mut().unwrap().push(json!(entry));
    }

    /// Returns a cluster with claim shop/db. Pod shop/web of node a uses the claim.
    fn in_use() -> Self {
        let mut cluster = Self::new();
        let message = "pod web on node a uses the addresses";
        cluster.claim("shop/db", &[DB], "InUse", message);
        let status = &mut cluster.last_claim().status;
        status["node"] = json!("a");
        status["pod"] = json!("web");
        status["since"] = json!(SINCE);
        cluster.claim_block(DB, "shop/db", "a", true);
        cluster.claiming_pod("shop/web", "a", &[DB]);
        cluster.uses("a", DB, "shop/web");
        cluster
    }

    /// Returns a cluster with claim shop/db, which no pod uses.
    fn available() -> Self {
        let mut cluster = Self::new();
        cluster.claim("shop/db", &[DB], "Available", "no pod uses the addresses");
        cluster
    }

    fn explained(&self, pod: &str) -> String {
        let explanation = explain::pod(pod, &self.inventory()).unwrap();
        explanation.text(&style())
    }

    fn fact(&self) -> ClaimFact {
        ClaimFact::read(self.lists.claims.last().unwrap())
    }
}

fn state_of(cluster: &Cluster, at: &str) -> (AddressState, String) {
    let report = describe(addr(at), &cluster.inventory());
    (report.state, report.text(&style()))
}

/// Node `b` was a standby, and is the owner now. Node `a` was the owner, and is the standby now.
#[test]
fn a_virtual_machine_that_migrates_is_well_and_its_new_node_counts_the_address() {
    let mut cluster = Cluster::new();
    cluster.claim(
        "shop/db",
        &[DB],
        "InUse",
        "pod target on node b uses the addresses",
    );
    let cidr_text = format!("{DB}/32");
    for node in ["a", "b"] {
        cluster.claim_block(DB, "shop/db", node, true);
    }
    let blocks = &mut cluster.lists.blocks;
    blocks.pop();
    let block = blocks.last_mut().unwrap();
    block.spec["owner"] = json!({"kind": "Node", "name": "b", "uid": "node-b", "number": 1});
    block.spec["standby"] = json!([{"kind": "Node", "name": "a", "uid": "node-a"}]);
    block.spec["vmiUID"] = json!("vm");
    for subnet in &mut cluster.lists.subnets {
        let is_owner = subnet.metadata.name.as_deref() == Some("b");
        let last = |list: &mut Value| list.as_array_mut().unwrap().pop().unwrap();
        let (mut listed, mut counted) = (
            last(&mut subnet.spec["blocks"]),
            last(&mut subnet.status["blocks"]),
        );
        listed["vmiUID"] = json!("vm");
        listed["standby"] = json!(!is_owner);
        if is_owner {
            let uid = json!(format!("block-{cidr_text}+1"));
            (listed["uid"], counted["uid"]) = (uid.clone(), uid);
        }
        subnet.spec["blocks"].as_array_mut().unwrap().push(listed);
        subnet.status["blocks"]
            .as_array_mut()
            .unwrap()
            .push(counted);
    }
    let owner = json!([{
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "vm", "uid": "vm", "controller": true,
    }]);
    for (pod, node) in [("shop/source", "a"), ("shop/target", "b")] {
        cluster.claiming_pod(pod, node, &[DB]);
        let pod_of = cluster.lists.pods.last_mut().unwrap();
        pod_of.metadata.owner_references = serde_json::from_value(owner.clone()).unwrap();
        cluster.uses(node, DB, pod);
    }
    assert_eq!(cluster.codes(), Vec::<String>::new());
    let inventory = cluster.inventory();
    let entry = inventory.registry.blocks.get(&cidr(&cidr_text)).unwrap();
    assert_eq!(inventory.block_status(entry).map(|it| it.used), Some(1));
}

#[test]
fn claims_are_listed_with_their_users_and_why_they_wait() {
    let mut cluster = Cluster::in_use();
    cluster.claim("shop/cart", &[], "Exhausted", "pool \"p\" is full");
    cluster.last_claim().spec = json!({"addresses": ["10.0.0.7"]});
    cluster.claim("blog/new", &[], "", "");
    cluster.last_claim().status = Value::Null;
    let facts: Vec<ClaimFact> = cluster.lists.claims.iter().map(ClaimFact::read).collect();
    let report = ClaimsReport::of(&facts);
    let names: Vec<&str> = report.claims.iter().map(|it| &*it.name).collect();
    assert_eq!(names, ["new", "cart", "db"], "by namespace, then by name");
    let narrow = crate::render::Style {
        wide: false,
        ..style()
    };
    let text = report.text(&narrow);
    let line = |name: &str| text.lines().find(|it| it.contains(name)).unwrap();
    assert_contains(
        line("cart"),
        &["shop", "False", "Exhausted", "30m", "is full"],
    );
    assert_contains(line("db"), &[DB, " a ", "web", "True", "InUse"]);
    assert!(
        !text.contains("uses the addresses"),
        "that is no news: {text}"
    );
    assert_contains(&report.text(&style()), &["uses the addresses", "10.0.0.7"]);
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["claims"][2]["addresses"], json!([DB]));
    let none = ClaimsReport::of(&[]).text(&style());
    assert_contains(&none, &["There is no claim", "-A"]);
}

#[test]
fn a_new_claim_is_as_the_user_asked_and_rejections_say_what_to_do() {
    let claim = serde_json::to_value(new_claim("db", Some("p"), &[addr("10.0.0.7")])).unwrap();
    assert_eq!(claim["metadata"]["name"], "db");
    assert_eq!(
        claim["spec"],
        json!({"pool": "p", "addresses": ["10.0.0.7"]})
    );
    let rejected = |code: u16, why: &str| {
        let error = CallError::Api(code, why.to_owned());
        rejection(error, "shop", "db").to_string()
    };
    for (code, why, says) in [
        (409, "already exists", "exists already"),
        (
            404,
            "namespaces \"shop\" not found",
            "there is no namespace shop",
        ),
        (
            404,
            "404 page not found",
            "install the CustomResourceDefinitions",
        ),
        (
            403,
            "exceeded quota: claims",
            "the namespace's quota allows no further claim",
        ),
        (
            403,
            "user x cannot create resource",
            "ask for the verb \"create\"",
        ),
        (
            403,
            "the namespace is being terminated",
            "rejects it with 403: the namespace is",
        ),
        (
            422,
            "spec: two addresses of one family",
            "rejects it with 422: spec: two",
        ),
    ] {
        assert_contains(&rejected(code, why), &[says]);
    }
}

#[test]
fn a_created_claim_is_ready_or_waits_once_the_controller_has_decided() {
    let mut cluster = Cluster::available();
    let ready = outcome(&cluster.fact()).unwrap();
    assert_eq!(ready.state, CreateState::Ready);
    assert_contains(
        &ready.text(&style()),
        &["shop/db", DB, "cadastre.dev/claim: db"],
    );
    cluster.claim("shop/more", &[], "Exhausted", "pool \"p\" is full");
    let waits = outcome(&cluster.fact()).unwrap();
    assert_eq!(waits.state, CreateState::Waiting);
    assert_eq!(waits.why, "Exhausted: pool \"p\" is full");
    cluster.last_claim().status["conditions"][0]["reason"] = json!("Pending");
    assert!(outcome(&cluster.fact()).is_none());
    cluster.last_claim().status = Value::Null;
    assert!(outcome(&cluster.fact()).is_none());
}

#[test]
fn the_release_of_a_claim_says_who_uses_it_and_how_long_it_stays() {
    let user = |pod: &str, node: &str| User {
        pod: pod.to_owned(),
        node: Some(node.to_owned()),
    };
    let says = |claim: &ClaimFact, users: Option<&[User]>, cooldown: Option<u32>| {
        consequence(claim, users, cooldown, now())
    };
    let mut cluster = Cluster::in_use();
    let users = [user("web", "a"), user("other", "b")];
    let text = says(&cluster.fact(), Some(&users), Some(30));
    let parts = [
        "pod web on node a uses 10.0.0.100: the claim stays until that pod is gone",
        "then for a cooldown of 30 s",
        "get no address once it is gone: other.",
        "asks for them (--address)",
    ];
    assert_contains(&text, &parts);
    assert!(!text.contains("gone: web"), "{text}");
    let text = says(&cluster.fact(), None, None);
    assert_contains(
        &text,
        &["the cooldown of its pool", "you may not list pods"],
    );
    cluster.last_claim().status["pod"] = Value::Null;
    let text = says(&cluster.fact(), Some(&[]), Some(30));
    assert_contains(
        &text,
        &["node a has 10.0.0.100 until no container uses them"],
    );

    let mut cluster = Cluster::available();
    let text = says(&cluster.fact(), Some(&[]), Some(30));
    assert_contains(&text, &["no node has had 10.0.0.100: it goes at once"]);
    cluster.last_claim().status["releasedAt"] = json!("2026-11-21T11:59:50Z");
    let text = says(&cluster.fact(), Some(&[]), Some(30));
    assert_contains(&text, &["it goes in 20 s, when a cooldown of 30 s is over"]);
    let text = says(&cluster.fact(), Some(&[]), Some(5));
    assert_contains(&text, &["it goes at once"]);
    cluster.last_claim().spec = json!({"addresses": [DB]});
    cluster.last_claim().metadata.deletion_timestamp = time(SINCE);
    let text = says(&cluster.fact(), Some(&[]), Some(30));
    assert!(
        text.starts_with("it is being deleted already: no node"),
        "{text}"
    );
    assert!(!text.contains("--address"), "{text}");
}

#[test]
fn an_address_shows_its_claim_whether_or_not_a_node_has_it() {
    let mut cluster = Cluster::available();
    let (state, text) = state_of(&cluster, DB);
    assert_eq!(state, AddressState::Claimed);
    let parts = [
        "of a claim, and not in use",
        "shop/db\n",
        "Available: no pod uses",
        "Pool:",
    ];
    assert_contains(&text, &parts);
    assert!(
        !text.contains("Range:") && !text.contains("Wanted by"),
        "{text}"
    );
    cluster.claim(
        "shop/late",
        &[],
        "AddressInUse",
        "10.0.0.100 is of claim shop/db",
    );
    cluster.last_claim().spec = json!({"addresses": [DB]});
    cluster.claiming_pod("shop/web", "b", &[]);
    let (_, text) = state_of(&cluster, DB);
    let parts = [
        "Wanted by:",
        "shop/late\n",
        "AddressInUse: 10.0.0.100 is",
        "web on node b",
    ];
    assert_contains(&text, &parts);

    let cluster = Cluster::in_use();
    let (state, text) = state_of(&cluster, DB);
    assert_eq!(state, AddressState::InUse);
    let parts = [
        "10.0.0.100/32 Block of node a, of claim shop/db",
        "InUse: pod web on node a uses the addresses",
        "pod shop/web",
    ];
    assert_contains(&text, &parts);
    assert_eq!(state_of(&cluster, "10.0.0.101").0, AddressState::NotCarved);
}

#[test]
fn a_node_shows_the_blocks_of_claims_and_the_state_of_every_address() {
    let mut cluster = Cluster::in_use();
    cluster.claim_block("10.0.0.102", "shop/web", "a", false);
    cluster.claim("shop/web", &["10.0.0.102"], "Releasing", "node a releases");
    cluster.lists.pools[0].spec["reserved"] = json!(["10.0.0.12-10.0.0.13"]);
    let status = &mut cluster.lists.subnets[0].status;
    status["withdrawn"] = json!(["10.0.0.8/30"]);
    let inventory = cluster.inventory();
    let report = show::node("a", true, &inventory).unwrap();
    let text = report.text(&style());
    assert_contains(
        &text,
        &["Active, of claim shop/db", "Active, of claim shop/web"],
    );
    let rows = report.addresses.unwrap().into_iter();
    let rows = rows.map(|it| {
        let pods = it.pods.join(",");
        let claim = it.claim.unwrap_or_default();
        format!(
            "{} {} {:?} {pods} {claim}",
            it.addresses, it.count, it.state
        )
    });
    let rows: Vec<String> = rows.map(|it| it.trim_end().to_owned()).collect();
    let all = [
        "10.0.0.0 1 Network",
        "10.0.0.1 1 InUse shop/cart",
        "10.0.0.2-10.0.0.7 6 Free",
        "10.0.0.8-10.0.0.11 4 TakenOut",
        "10.0.0.12-10.0.0.13 2 Reserved",
        "10.0.0.14 1 Free",
        "10.0.0.15 1 Broadcast",
        "10.0.0.100 1 InUse shop/web shop/db",
        "10.0.0.102 1 Claimed  shop/web",
    ];
    assert_eq!(rows, all);
    let without = show::node("a", false, &inventory).unwrap();
    assert!(without.addresses.is_none());
    assert_contains(&without.text(&style()), &["INTERFACE", "shop/web"]);
}

#[test]
fn addresses_of_a_block_that_all_cool_are_cooling_and_others_may_be() {
    let mut cluster = Cluster::new();
    let counts = |cluster: &mut Cluster, cooling: u8, free: u8| {
        let block = &mut cluster.lists.subnets[0].status["blocks"][0];
        (block["cooling"], block["free"]) = (json!(cooling), json!(free));
    };
    counts(&mut cluster, 3, 10);
    assert_eq!(state_of(&cluster, "10.0.0.2").0, AddressState::Free);
    let text = show::node("a", true, &cluster.inventory()).unwrap();
    assert_contains(&text.text(&style()), &["A free address may be in cooldown"]);
    counts(&mut cluster, 13, 0);
    assert_eq!(state_of(&cluster, "10.0.0.2").0, AddressState::Cooling);
}

#[test]
fn an_ipv6_block_is_listed_in_few_rows() {
    let mut cluster = Cluster::empty();
    let spec = json!({"ipv6": {"cidrs": ["fd00::/56"], "blockSize": 64}});
    cluster.pool("p", &spec);
    cluster.node("a", &["10.9.0.0/24"]);
    cluster.block("fd00::/64", "p", "a");
    cluster.subnet("a", &["fd00::/64"], &[("fd00::7", "shop/cart")]);
    cluster.pod("shop/cart", "a", &["fd00::7"]);
    let report = show::node("a", true, &cluster.inventory()).unwrap();
    let rows = report.addresses.unwrap();
    let states: Vec<(&str, AddressState)> =
        rows.iter().map(|it| (&*it.addresses, it.state)).collect();
    let all = [
        ("10.9.0.0-10.9.0.255", AddressState::InPodCidr),
        ("fd00::", AddressState::Network),
        ("fd00::1", AddressState::Gateway),
        ("fd00::2-fd00::6", AddressState::Free),
        ("fd00::7", AddressState::InUse),
        ("fd00::8-fd00::ffff:ffff:ffff:ffff", AddressState::Free),
    ];
    assert_eq!(states, all);
    assert_eq!(
        rows.last().unwrap().count,
        (u128::from(u64::MAX) - 7).to_string()
    );
}

#[test]
fn a_pod_that_names_a_claim_is_told_what_it_waits_for() {
    let mut cluster = Cluster::new();
    cluster.claiming_pod("shop/web", "b", &[]);
    let parts = [
        "it has no address yet: it names claim shop/db, which does not exist",
        "kubectl cadastre claim create db -n shop --pool POOL",
        "cadastre.dev/claim: db",
    ];
    assert_contains(&cluster.explained("shop/web"), &parts);

    cluster.claim_of_exhausted_pool();
    let parts = [
        "claim shop/db has no addresses (Exhausted: pool \"p\" has no free address)",
        "What ends the wait:\n  more ranges in pool \"p\"",
        "it wants addresses of pool \"p\"",
    ];
    assert_contains(&cluster.explained("shop/web"), &parts);

    let mut cluster = Cluster::available();
    cluster.claiming_pod("shop/web", "b", &[]);
    let text = cluster.explained("shop/web");
    let parts = [
        "no node has the addresses of claim shop/db yet",
        "check that one leads",
    ];
    assert_contains(&text, &parts);
    assert!(
        !text.contains("Ranges of node"),
        "pools do not matter: {text}"
    );
    cluster.last_claim().status["conditions"][0]["reason"] = json!("NodeNotSelected");
    let parts = [
        "no node gets the addresses of claim shop/db now",
        "another node for the pod",
    ];
    assert_contains(&cluster.explained("shop/web"), &parts);

    // The pod's own node has the address.
    cluster.claim_block(DB, "shop/db", "b", false);
    let parts = [
        "node b has 10.0.0.100 of claim shop/db for it",
        "kubectl describe pod",
    ];
    assert_contains(&cluster.explained("shop/web"), &parts);
    cluster.uses("b", DB, "shop/old");
    cluster.lists.subnets[1].status["blocks"][1]["used"] = json!(1);
    let parts = [
        "pod shop/old on the same node has 10.0.0.100",
        "container is gone",
    ];
    assert_contains(&cluster.explained("shop/web"), &parts);
    cluster.pod("shop/old", "b", &[]);
    assert_contains(
        &cluster.explained("shop/web"),
        &["kubectl delete pod -n shop old"],
    );
}

#[test]
fn a_pod_that_asks_for_an_address_is_told_what_it_waits_for() {
    let asking = |address: &str| {
        let mut cluster = Cluster::new();
        cluster.pod("shop/web", "b", &[]);
        let annotations = [(ADDRESSES_ANNOTATION.to_owned(), address.to_owned())];
        let pod = cluster.lists.pods.last_mut().unwrap();
        pod.metadata.annotations = Some(annotations.into());
        let claim = claim_of_addresses("web", pod.metadata.uid.as_deref().unwrap());
        (cluster, format!("shop/{claim}"))
    };
    // The node's own block contains the address, so no claim is needed.
    let (cluster, claim) = asking("10.0.0.18");
    let text = cluster.explained("shop/web");
    let parts = [
        "it has no address yet: it asks for 10.0.0.18, and node b has that in its ranges",
        "What ends the wait:\n  the next try of the kubelet",
        "cadastre.dev/addresses: 10.0.0.18",
    ];
    assert_contains(&text, &parts);
    assert!(
        !text.contains(&claim) && !text.contains("no effect"),
        "{text}"
    );
    // The controller is about to create the claim.
    let (mut cluster, claim) = asking("10.0.0.40");
    let creates = format!("the controller, which creates claim {claim} within seconds");
    let parts = ["which is not in the ranges of node b", creates.as_str()];
    assert_contains(&cluster.explained("shop/web"), &parts);
    // Another pod has the address.
    let (used, claim_of_used) = asking("10.0.0.1");
    let parts = [
        "it asks for 10.0.0.1, which pod shop/cart has",
        "the end of that pod",
    ];
    assert_contains(&used.explained("shop/web"), &parts);
    let mut used = used;
    used.claim(&claim_of_used, &[], "AddressInUse", "10.0.0.1 is in use");
    used.last_claim().spec = json!({"addresses": ["10.0.0.1"]});
    let parts = [
        "has no addresses (AddressInUse: 10.0.0.1 is in use)",
        "pod shop/cart, which has 10.0.0.1, when it is released",
        "or a pod that asks for another address",
    ];
    assert_contains(&used.explained("shop/web"), &parts);
    // Another claim still has the address, because node a has not released the address for that claim. Node a may be
    // dead.
    let (mut moved, claim_of_moved) = asking(DB);
    moved.claim("shop/web-before", &[DB], "Releasing", "node a releases");
    moved.claim_block(DB, "shop/web-before", "a", true);
    moved.claim(&claim_of_moved, &[], "AddressInUse", "another claim has it");
    moved.last_claim().spec = json!({"addresses": [DB]});
    let parts = [
        "node a still has 10.0.0.100 of claim shop/web-before",
        "the agent of a, once it has seen that no container uses the address. If that node is dead",
    ];
    assert_contains(&moved.explained("shop/web"), &parts);
    cluster.claim(&claim, &[], "ExplicitAddressesDenied", "pool p denies");
    let part = "the pool, if whoever may change it sets explicitAddresses: Allow";
    assert_contains(&cluster.explained("shop/web"), &[part]);
}

#[test]
fn a_pod_waits_for_another_node_until_that_releases_the_address() {
    let mut cluster = Cluster::in_use();
    let text = cluster.explained("shop/web");
    let parts = [
        "it has 10.0.0.100 of pool p",
        "Claim shop/db:",
        "10.0.0.100 is on node a, for 60m",
    ];
    assert_contains(&text, &parts);
    assert!(!text.contains("What ends the wait"), "{text}");
    cluster.claiming_pod("shop/next", "b", &[]);
    let parts = [
        "node a has 10.0.0.100 for pod web, which also names claim shop/db",
        "kubectl delete pod -n shop web",
        "pods that name it:",
    ];
    assert_contains(&cluster.explained("shop/next"), &parts);
    let is_web = |it: &cadastre_api::PodLite| it.metadata.name.as_deref() == Some("web");
    cluster.lists.pods.retain(|it| !is_web(it));
    let parts = ["node a still has 10.0.0.100", "kubectl delete node a"];
    assert_contains(&cluster.explained("shop/next"), &parts);
    let block = cluster.lists.blocks.last_mut().unwrap();
    block.spec["owner"] = json!({"kind": "Quarantine", "name": "dead", "uid": "node-dead"});
    block.spec["until"] = json!("2026-11-21T12:05:00Z");
    let subnet = &mut cluster.lists.subnets[0];
    subnet.spec["blocks"].as_array_mut().unwrap().pop();
    let parts = [
        "node dead, which had 10.0.0.100",
        "its quarantine, which is over in 5m",
    ];
    assert_contains(&cluster.explained("shop/next"), &parts);
}

#[test]
fn a_pod_that_names_an_ipam_claim_is_told_what_its_interface_waits_for() {
    let mut cluster = Cluster::new();
    let networks = json!([{"name": "vlan7", "ipam-claim-reference": "db"}]).to_string();
    cluster.pod("shop/vm", "b", &[]);
    let annotations = [("k8s.v1.cni.cncf.io/networks".to_owned(), networks)];
    let pod = cluster.lists.pods.last_mut().unwrap();
    pod.metadata.annotations = Some(annotations.into());
    let parts = [
        "IPAMClaim shop/db of an interface:\n  there is no such claim",
        "the interface waits: IPClaim shop/db does not exist",
        "if a pool serves its network (spec.networks)",
    ];
    assert_contains(&cluster.explained("shop/vm"), &parts);
    cluster.claim_of_exhausted_pool();
    let parts = [
        "the interface waits: claim shop/db has no addresses (Exhausted",
        "what ends the wait: more ranges in pool \"p\"",
    ];
    assert_contains(&cluster.explained("shop/vm"), &parts);
}

#[test]
fn a_pod_that_has_another_address_than_its_claim_keeps_it() {
    let mut cluster = Cluster::available();
    let annotations = [
        (CLAIM_ANNOTATION.to_owned(), "db".to_owned()),
        ("cadastre.dev/pools".to_owned(), "p".to_owned()),
    ];
    cluster.lists.pods[0].metadata.annotations = Some(annotations.into());
    let parts = [
        "it has 10.0.0.1 of pool p from 10.0.0.0/28, and not the addresses of its claim",
        "cadastre.dev/pools: p (no effect: the pod names a claim)",
    ];
    assert_contains(&cluster.explained("shop/cart"), &parts);
}

#[test]
fn blocks_of_claims_are_no_room_for_other_pods() {
    let mut cluster = Cluster::in_use();
    cluster.claim_block("10.0.0.102", "shop/web", "b", false);
    cluster.claim("shop/web", &["10.0.0.102"], "Releasing", "node b releases");
    let inventory = cluster.inventory();
    let node = explain::node("a", &inventory).unwrap().text(&style());
    let line = "10.0.0.100/32 (claim shop/db): pod web on this node names the claim: shop/web";
    assert_contains(&node, &[line]);
    let node = explain::node("b", &inventory).unwrap().text(&style());
    let parts = [
        "10.0.0.102/32 (claim shop/web): no pod on this node names the claim",
        "last block of this pool and family",
    ];
    assert_contains(&node, &parts);
    let pool = explain::pool("p", &inventory).unwrap().text(&style());
    assert_contains(&pool, &["2 claims have addresses of it"]);
    let surplus = drain::surplus(&"node-b".into(), &inventory, &[].into());
    assert_eq!(surplus, []);
    let refused = drain::judge(cidr("10.0.0.102/32"), &inventory).unwrap_err();
    assert_contains(&refused.why, &["it is the address of claim shop/web"]);
    let node = inventory.node("b").unwrap();
    let obstacle = pop::obstacle(&cidr("10.0.0.102/32"), node, &inventory);
    assert_contains(&obstacle.unwrap(), &["claim release shop/web"]);
    cluster.pod("shop/waits", "b", &[]);
    assert_contains(&cluster.explained("shop/waits"), &["node b has 16 free"]);
}

#[test]
fn claims_that_are_well_have_no_findings() {
    assert_eq!(Cluster::available().codes(), Vec::<String>::new());
    assert_eq!(Cluster::in_use().codes(), Vec::<String>::new());
    let mut cluster = Cluster::in_use();
    cluster.claim(
        "shop/late",
        &[],
        "AddressInUse",
        "10.0.0.100 is of claim shop/db",
    );
    cluster.last_claim().spec = json!({"addresses": [DB]});
    assert_eq!(cluster.codes(), Vec::<String>::new());
    let checked = cluster.check().text(&style());
    assert_contains(&checked, &["3 blocks, 2 claims, 2 addresses in use"]);
}

#[test]
fn contradictions_of_claims_are_found() {
    let mut cluster = Cluster::available();
    cluster.claim("shop/twin", &[DB], "Available", "no pod uses the addresses");
    let later = "2026-11-21T11:40:00Z";
    cluster.last_claim().metadata.creation_timestamp = time(later);
    assert_eq!(cluster.codes(), ["ClaimedTwice address 10.0.0.100"]);
    let finding = cluster.check().findings.remove(0);
    assert_contains(&finding.message, &["claim shop/db has it"]);
    assert_contains(&finding.advice, &["claim release shop/twin"]);

    let mut cluster = Cluster::new();
    cluster.claim("shop/db", &["10.0.0.18"], "Available", "");
    assert_eq!(cluster.codes(), ["ClaimInRangeOfNode claim shop/db"]);
    let finding = cluster.check().findings.remove(0);
    let part = "block 10.0.0.16/28, which node b has and has not handed over yet";
    assert_contains(&finding.message, &[part]);
    assert_contains(&finding.advice, &["kubectl cadastre show ip 10.0.0.18"]);
    // The claim's block, a block of one address, lies inside a block of the node that has handed the address over.
    let hand_over = |cluster: &mut Cluster| {
        let all = &mut cluster.lists.subnets;
        let subnet = all
            .iter_mut()
            .find(|it| it.metadata.name.as_deref() == Some("b"));
        subnet.unwrap().status["withdrawn"] = json!(["10.0.0.18/32"]);
    };
    hand_over(&mut cluster);
    assert_eq!(cluster.codes(), Vec::<String>::new());

    // The status names a node that does not have the address.
    let mut cluster = Cluster::available();
    cluster.last_claim().status["node"] = json!("b");
    cluster.last_claim().status["since"] = json!("2026-11-21T11:59:30Z");
    assert_eq!(cluster.codes(), Vec::<String>::new(), "that is not long");
    cluster.last_claim().status["since"] = json!(SINCE);
    assert_eq!(cluster.codes(), ["StaleClaim claim shop/db"]);

    // The NodeSubnet does not list the address, so the pod waits.
    let mut cluster = Cluster::in_use();
    let subnet = &mut cluster.lists.subnets[0];
    subnet.spec["blocks"].as_array_mut().unwrap().pop();
    assert_eq!(cluster.codes(), ["BlockNotListed block 10.0.0.100/32"]);
    let finding = cluster.check().findings.remove(0);
    assert_contains(&finding.message, &["node a has it for a claim"]);
}

#[test]
fn a_deletion_that_lasts_is_reported_with_what_keeps_the_claim() {
    let finding = |cluster: &Cluster| {
        let mut findings = cluster.check().findings;
        findings.retain(|it| it.code == "ClaimStaysDeleted");
        findings.pop().map(|it| (it.severity, it.message))
    };
    let deleted = |cluster: &mut Cluster, at: &str| {
        cluster.last_claim().metadata.deletion_timestamp = time(at);
    };
    let mut cluster = Cluster::in_use();
    deleted(&mut cluster, "2026-11-21T11:55:00Z");
    assert_eq!(finding(&cluster), None, "a pod may take minutes to end");
    deleted(&mut cluster, SINCE);
    let (severity, message) = finding(&cluster).unwrap();
    assert_eq!(severity, Severity::Info, "{message}");
    assert_contains(&message, &["for 30m", "pod web on node a still names it"]);
    let is_web = |it: &cadastre_api::PodLite| it.metadata.name.as_deref() == Some("web");
    cluster.lists.pods.retain(|it| !is_web(it));
    let (severity, message) = finding(&cluster).unwrap();
    assert_eq!(severity, Severity::Warning, "{message}");
    assert_contains(&message, &["node a does not release 10.0.0.100"]);

    let mut cluster = Cluster::available();
    deleted(&mut cluster, "2026-11-21T11:59:00Z");
    assert_eq!(finding(&cluster), None, "the cooldown may not be over");
    deleted(&mut cluster, SINCE);
    cluster.last_claim().status["releasedAt"] = json!("2026-11-21T11:59:00Z");
    assert_eq!(finding(&cluster), None, "the cooldown may not be over");
    cluster.last_claim().status["releasedAt"] = json!(SINCE);
    let (severity, message) = finding(&cluster).unwrap();
    assert_eq!(severity, Severity::Warning, "{message}");
    assert_contains(&message, &["although no node has its addresses"]);
    let finalizers = [CLAIM_FINALIZER, "example.org/guard"].map(str::to_owned);
    cluster.last_claim().metadata.finalizers = Some(finalizers.into());
    let (severity, message) = finding(&cluster).unwrap();
    assert_eq!(severity, Severity::Info, "{message}");
    assert_contains(&message, &["the finalizer example.org/guard"]);
}

#[test]
fn a_time_in_the_future_makes_no_claim_wait_longer() {
    let mut cluster = Cluster::available();
    cluster.last_claim().status["releasedAt"] = json!("2026-11-21T13:00:00Z");
    let text = consequence(&cluster.fact(), Some(&[]), Some(30), now());
    assert_contains(&text, &["it goes in 30 s"]);
}

#[test]
fn a_pod_for_which_cni_requests_an_address_is_told_what_it_waits_for() {
    let mut cluster = Cluster::new();
    cluster.pod("shop/web", "b", &[]);
    let uid = "pod-shop/web";
    let request = |address: &str| json!([{"namespace": "shop", "pod": "web", "podUID": "u", "addresses": [address]}]);
    let pod = cluster.lists.pods.last_mut().unwrap();
    assert_eq!(pod.metadata.uid.as_deref(), Some(uid));
    pod.metadata.uid = Some("u".to_owned());
    let claim = format!("shop/{}", claim_of_addresses("web", "u"));
    cluster.lists.subnets[1].status["requestedAddresses"] = request("10.0.0.40");
    let creates = format!("the controller, which creates claim {claim} within seconds");
    let parts = [
        "it has no address yet: it asks for 10.0.0.40, which is not in the ranges of node b",
        "the CNI configuration or the runtime: 10.0.0.40",
        creates.as_str(),
    ];
    assert_contains(&cluster.explained("shop/web"), &parts);
    // The claim exists, and waits for the address because a pod uses it.
    cluster.lists.subnets[1].status["requestedAddresses"] = request("10.0.0.1");
    cluster.claim(&claim, &[], "AddressInUse", "10.0.0.1 is in use");
    cluster.last_claim().spec = json!({"addresses": ["10.0.0.1"]});
    let parts = [
        "has no addresses (AddressInUse: 10.0.0.1 is in use)",
        "pod shop/cart, which has 10.0.0.1, when it is released",
    ];
    assert_contains(&cluster.explained("shop/web"), &parts);
    // Another node cannot request addresses for the pod.
    let mut lied = Cluster::new();
    lied.pod("shop/web", "b", &[]);
    lied.lists.pods.last_mut().unwrap().metadata.uid = Some("u".to_owned());
    lied.lists.subnets[0].status["requestedAddresses"] = request("10.0.0.40");
    let text = lied.explained("shop/web");
    assert!(!text.contains("10.0.0.40"), "{text}");
}
