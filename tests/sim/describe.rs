//! Short descriptions of requests, answers and watch events for traces.

use cadastre_api::{AllocatedRange, NodeSubnetSpec, frr};
use cadastre_controller::cluster::objects::{
    Block, BlockSpec, Node, Object, Pool, Subnet, SubnetCondition, Text,
};
use cadastre_controller::cluster::request::{ApiRequest, ObjectKind, ObjectSpec, RequestOutcome};
use cadastre_controller::{ControllerEvent, EventRecord, Regarding};
use cadastre_core::Cidr;
use cadastre_daemon::watch::ObjectEvent;
use serde_json::Value;
use std::fmt::Write as _;

pub fn ranges(cidrs: &[Cidr]) -> String {
    let texts: Vec<String> = cidrs.iter().map(ToString::to_string).collect();
    texts.join(",")
}

fn held(ranges: &[AllocatedRange]) -> String {
    let one =
        |range: &AllocatedRange| format!("{}@{}", range.cidr, range.pool.as_deref().unwrap_or("-"));
    ranges.iter().map(one).collect::<Vec<_>>().join(",")
}

fn subnet(subnet: &Subnet) -> String {
    let spec = subnet.spec.as_ref().map_or_else(Clone::clone, subnet_spec);
    format!("v{} {spec}", subnet.version)
}

fn subnet_spec(spec: &NodeSubnetSpec) -> String {
    let mut text = format!(
        "[{} {}",
        spec.node_uid.as_deref().unwrap_or("-"),
        held(&spec.pod_cidrs)
    );
    for previous in &spec.quarantined {
        let until = previous.until.0.as_second() % 100_000;
        let ranges = held(&previous.pod_cidrs);
        let _ = write!(text, " | {} {ranges} until {until}", previous.node_uid);
    }
    for held in &spec.blocks {
        let recall = held.recall.map(|it| format!("!{it:?}")).unwrap_or_default();
        let _ = write!(text, " +{} {}@{}{recall}", held.cidr, held.uid, held.pool);
    }
    text + "]"
}

fn block(block: &Block) -> String {
    let spec = block.spec.as_ref().map_or_else(Clone::clone, block_spec);
    format!("v{} {} {spec}", block.version, block.uid)
}

fn block_spec(spec: &BlockSpec) -> String {
    let owner = &spec.owner;
    let quarantined = if owner.quarantined {
        "quarantined, "
    } else {
        ""
    };
    let until = spec.until.map_or(0, |until| until.as_second() % 100_000);
    format!(
        "{}@{} {quarantined}{} {} until {until}",
        spec.cidr, spec.pool, owner.name, owner.uid
    )
}

fn node(node: &Node) -> String {
    let term = node.term.as_deref().unwrap_or("-");
    let bare = if node.annotated { "" } else { " bare" };
    let deleting = if node.deleting { " deleting" } else { "" };
    let (uid, version, podcidrs) = (&node.uid, node.version, ranges(&node.pod_cidrs));
    format!("{uid} v{version} {podcidrs} term {term}{bare}{deleting}")
}

fn pool(pool: &Pool) -> String {
    format!("{} v{} {:?}", pool.uid, pool.version, pool.finalizers)
}

/// The name of the object or node that a request is about; `None` if it is about all objects of a kind.
pub fn name_of(request: &ApiRequest) -> Option<&str> {
    match request {
        ApiRequest::ListPodsOf { node, .. } => Some(node),
        ApiRequest::Create(_, ObjectSpec::Block(spec))
        | ApiRequest::Replace(_, ObjectSpec::Block(spec)) => Some(&spec.owner.name),
        _ => request.about()?.1,
    }
}

pub fn verb(request: &ApiRequest) -> String {
    let kind = request.about().map(|(kind, _)| kind);
    let of_kind = |verb: &str| kind.map_or(String::new(), |kind| format!("{verb}{kind:?}"));
    match request {
        ApiRequest::List(_) => of_kind("List") + "s",
        ApiRequest::Read(..) => of_kind("Read"),
        ApiRequest::Create(..) => of_kind("Create"),
        ApiRequest::Replace(..) => of_kind("Replace"),
        ApiRequest::Delete(..) => of_kind("Delete"),
        _ => {
            let text = format!("{request:?}");
            let verb = text.split([' ', '(', '{']).next();
            verb.unwrap_or_default().to_owned()
        }
    }
}

pub fn of_request(request: &ApiRequest) -> String {
    let verb = verb(request);
    match request {
        ApiRequest::AssignPodCidrs(a) => {
            let term = a.term.as_deref().unwrap_or("-");
            let bare = if a.annotated { "" } else { " bare" };
            format!("{verb} {} {} if term {term}{bare}", a.uid, ranges(&a.cidrs))
        }
        ApiRequest::TouchNode(t) => {
            let from = t.from.as_deref().unwrap_or("-");
            format!("{verb} {} from {from} to {}", t.uid, t.term)
        }
        ApiRequest::SetTaints(it) => {
            let keys: Vec<&str> = it.after.iter().map(|it| &*it.key).collect();
            format!("{verb} {} {keys:?}", it.uid)
        }
        ApiRequest::SetExhausted(it) => {
            format!("{verb} {} {}", it.uid, it.message.as_deref().unwrap_or("-"))
        }
        ApiRequest::Create(_, spec) => format!("{verb} {}", of_spec(spec)),
        ApiRequest::Replace(it, spec) => format!("{verb} v{} {}", it.version, of_spec(spec)),
        ApiRequest::Delete(ObjectKind::Block, it) => format!("{verb} {} v{}", it.name, it.version),
        ApiRequest::Delete(_, it) => format!("{verb} v{}", it.version),
        ApiRequest::Read(ObjectKind::Block, name) => format!("{verb} {name}"),
        ApiRequest::SetSubnetConditions(_, conditions) => {
            let text = |it: &SubnetCondition| format!("{}={} {}", it.kind, it.status, it.message);
            let all: Vec<String> = conditions.iter().map(text).collect();
            format!("{verb} {}", all.join("; "))
        }
        ApiRequest::SetFinalizers(_, it, finalizers) => {
            format!("{verb} v{} {finalizers:?}", it.version)
        }
        ApiRequest::SetClaimStatus(it, status) => {
            let reasons = status.conditions.iter().map(|c| &*c.reason);
            let reasons: Vec<&str> = reasons.collect();
            let node = status.node.as_deref().unwrap_or("-");
            format!(
                "{verb} v{} {} {:?} on {node} {}",
                it.version,
                it.name,
                status.addresses,
                reasons.join(" ")
            )
        }
        ApiRequest::SetPoolStatus(it, status) => {
            let conditions = status.conditions.iter();
            let conditions = conditions.map(|c| format!("{}={}", c.type_, c.reason));
            let conditions = conditions.collect::<Vec<_>>().join(" ");
            let (ipv4, ipv6) = (&status.ipv4, &status.ipv6);
            format!("{verb} v{} {ipv4:?} {ipv6:?} {conditions}", it.version)
        }
        ApiRequest::ReadIpamClaim(name) => format!("{verb} {name}"),
        ApiRequest::FillIpamClaim(it, ips) => {
            format!(
                "{verb} {} {} v{} {:?}",
                it.name, it.uid, it.version, ips.ips
            )
        }
        _ => verb,
    }
}

fn prefixes(spec: &Value) -> String {
    frr::prefixes(spec).collect::<Vec<_>>().join(",")
}

fn of_spec(spec: &ObjectSpec) -> String {
    match spec {
        ObjectSpec::Subnet(spec) => subnet_spec(spec),
        ObjectSpec::Routes(spec) => spec.destinations.join(","),
        ObjectSpec::FrrConfiguration(spec) => prefixes(spec),
        ObjectSpec::Block(spec) => block_spec(spec),
        ObjectSpec::Pool(spec) => format!("{spec:?}"),
        ObjectSpec::Claim(new) => format!("{:?}", new.spec),
    }
}

pub fn of_outcome(outcome: &RequestOutcome) -> String {
    match outcome {
        RequestOutcome::Node(n) => node(n),
        RequestOutcome::Subnet(it) => subnet(it),
        RequestOutcome::Routes(it) => it.spec.destinations.join(","),
        RequestOutcome::FrrConfiguration(it) => prefixes(&it.spec),
        RequestOutcome::Block(it) => block(it),
        RequestOutcome::Blocks(blocks) => format!("{} blocks", blocks.len()),
        RequestOutcome::Nodes(nodes) => format!("{} nodes", nodes.len()),
        RequestOutcome::Subnets(subnets) => format!("{} subnets", subnets.len()),
        RequestOutcome::Pods(pods, _) => format!("{} pods", pods.len()),
        RequestOutcome::Pool(it) => pool(it),
        other => format!("{other:?}"),
    }
}

pub fn of_report(report: &EventRecord) -> (Text, String) {
    let Regarding { name, uid, .. } = &report.about;
    let text = format!("{uid} {}: {}", report.reason, report.note);
    (name.clone(), text)
}

/// Returns the object that an event is about, and a description of the event.
pub fn describe(event: &ControllerEvent) -> (Option<Text>, String) {
    fn of<T: Object>(
        kind: &str,
        change: &ObjectEvent<T>,
        more: impl Fn(&T) -> String,
    ) -> (Option<Text>, String) {
        let (object, text) = match change {
            ObjectEvent::Applied(object) => (Some(object), more(object)),
            ObjectEvent::Deleted(object) => (Some(object), format!("deleted {}", more(object))),
            ObjectEvent::Restarted { .. } => (None, "list begins".to_owned()),
            ObjectEvent::Listed => (None, "list ends".to_owned()),
            ObjectEvent::Reached(version) => (None, format!("known to v{version}")),
        };
        let name = object.map_or_else(|| "".into(), |it| it.name().clone().into());
        (Some(name), format!("{kind} {text}"))
    }
    match event {
        ControllerEvent::Nodes(change) => of("node", change, node),
        ControllerEvent::Pools(change) => of("pool", change, pool),
        ControllerEvent::Subnets(change) => of("subnet", change, subnet),
        ControllerEvent::Routes(change) => {
            of("routes", change, |it| it.spec.destinations.join(","))
        }
        ControllerEvent::FrrConfigurations(change) => of("frr", change, |it| prefixes(&it.spec)),
        ControllerEvent::Blocks(change) => {
            let (_, text) = of("block", change, block);
            let spec = match change {
                ObjectEvent::Applied(it) | ObjectEvent::Deleted(it) => it.spec.as_ref().ok(),
                _ => None,
            };
            (spec.map(|spec| spec.owner.name.clone().into()), text)
        }
        ControllerEvent::ServiceRanges(change) => of("services", change, |s| ranges(&s.cidrs)),
        ControllerEvent::Claims(change) => of("claim", change, |it| {
            format!("{} {:?}", it.name, it.status.addresses)
        }),
        ControllerEvent::Pods(change) => of("pod", change, |p| format!("{:?}", p.addresses)),
        _ => (None, String::new()),
    }
}
