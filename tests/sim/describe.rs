//! Short descriptions of requests, answers and watch events for traces.

use cadastre_api::{AllocatedRange, NodeSubnetSpec};
use cadastre_controller::cluster::objects::{BlockSpec, Node, Object, SubnetCondition, Text};
use cadastre_controller::cluster::request::{ApiRequest, ObjectKind, ObjectSpec, RequestOutcome};
use cadastre_controller::{ControllerEvent, EventRecord, Regarding};
use cadastre_core::Cidr;
use cadastre_daemon::watch::ObjectEvent;
use std::fmt::Write as _;

pub fn ranges(cidrs: &[Cidr]) -> String {
    cidrs
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(",")
}

fn held(ranges: &[AllocatedRange]) -> String {
    let one =
        |range: &AllocatedRange| format!("{}@{}", range.cidr, range.pool.as_deref().unwrap_or("-"));
    ranges.iter().map(one).collect::<Vec<_>>().join(",")
}

fn subnet(spec: &NodeSubnetSpec) -> String {
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

fn block(spec: &BlockSpec) -> String {
    let owner = &spec.owner;
    let rests = if owner.quarantined { "rests, " } else { "" };
    let until = spec.until.map_or(0, |until| until.as_second() % 100_000);
    format!(
        "{}@{} {rests}{} {} until {until}",
        spec.cidr, spec.pool, owner.name, owner.uid
    )
}

fn node(node: &Node) -> String {
    let term = node.term.as_deref().unwrap_or("-");
    let (bare, going) = (
        if node.annotated { "" } else { " bare" },
        if node.deleting { " deleting" } else { "" },
    );
    format!(
        "{} v{} {} term {term}{bare}{going}",
        node.uid,
        node.version,
        ranges(&node.pod_cidrs)
    )
}

/// The name of the object or node that a request is about; `None` if it is about all objects of a kind.
pub fn name_of(request: &ApiRequest) -> Option<&str> {
    match request {
        ApiRequest::ListPodsOf { node } => Some(node),
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
            format!(
                "{verb} {} {} if term {term}{}",
                a.uid,
                ranges(&a.cidrs),
                if a.annotated { "" } else { " bare" }
            )
        }
        ApiRequest::TouchNode(t) => {
            let from = t.from.as_deref().unwrap_or("-");
            format!("{verb} {} from {from} to {}", t.uid, t.term)
        }
        ApiRequest::Create(_, spec) => format!("{verb} {}", of_spec(spec)),
        ApiRequest::Replace(it, spec) => format!("{verb} v{} {}", it.version, of_spec(spec)),
        ApiRequest::Delete(ObjectKind::Block, it) => format!("{verb} {} v{}", it.name, it.version),
        ApiRequest::Delete(_, it) => format!("{verb} v{}", it.version),
        ApiRequest::Read(ObjectKind::Block, name) => format!("{verb} {name}"),
        ApiRequest::SetSubnetConditions(_, conditions) => {
            let words = |it: &SubnetCondition| format!("{}={} {}", it.kind, it.status, it.message);
            let all: Vec<String> = conditions.iter().map(words).collect();
            format!("{verb} {}", all.join("; "))
        }
        ApiRequest::SetPoolFinalizers(it, finalizers) => {
            format!("{verb} v{} {finalizers:?}", it.version)
        }
        ApiRequest::SetPoolStatus(it, status) => {
            let conditions: Vec<String> = status
                .conditions
                .iter()
                .map(|c| format!("{}={}", c.type_, c.reason))
                .collect();
            format!(
                "{verb} v{} {:?} {:?} {}",
                it.version,
                status.ipv4,
                status.ipv6,
                conditions.join(" ")
            )
        }
        _ => verb,
    }
}

fn of_spec(spec: &ObjectSpec) -> String {
    match spec {
        ObjectSpec::Subnet(spec) => subnet(spec),
        ObjectSpec::Block(spec) => block(spec),
        ObjectSpec::Pool(spec) => format!("{spec:?}"),
    }
}

pub fn of_outcome(outcome: &RequestOutcome) -> String {
    match outcome {
        RequestOutcome::Node(n) => node(n),
        RequestOutcome::Subnet(s) => format!(
            "v{} {}",
            s.version,
            s.spec.as_ref().map_or_else(Clone::clone, subnet)
        ),
        RequestOutcome::Block(it) => {
            let what = it.spec.as_ref().map_or_else(Clone::clone, block);
            format!("v{} {} {what}", it.version, it.uid)
        }
        RequestOutcome::Blocks(blocks) => format!("{} blocks", blocks.len()),
        RequestOutcome::Nodes(nodes) => format!("{} nodes", nodes.len()),
        RequestOutcome::Subnets(subnets) => format!("{} subnets", subnets.len()),
        RequestOutcome::Pods(pods) => format!("{} pods", pods.len()),
        RequestOutcome::Pool(pool) => {
            format!("{} v{} {:?}", pool.uid, pool.version, pool.finalizers)
        }
        other => format!("{other:?}"),
    }
}

pub fn of_status(status: &cadastre_api::NodeSubnetStatus) -> String {
    serde_json::to_string(status).unwrap()
}

pub fn of_report(report: &EventRecord) -> (Text, String) {
    let Regarding { name, uid, .. } = &report.about;
    (
        name.clone(),
        format!("{uid} {}: {}", report.reason, report.note),
    )
}

/// Returns the object that an event is about, and a description of the event.
pub fn describe(event: &ControllerEvent) -> (Option<Text>, String) {
    fn of<T: Object>(
        kind: &str,
        change: &ObjectEvent<T>,
        more: impl Fn(&T) -> String,
    ) -> (Option<Text>, String) {
        let line = |object: &T, verb: &str| {
            (
                Some(object.name().clone().into()),
                format!("{kind} {verb}{}", more(object)),
            )
        };
        match change {
            ObjectEvent::Applied(object) => line(object, ""),
            ObjectEvent::Deleted(object) => line(object, "deleted "),
            ObjectEvent::Restarted { .. } => (Some("".into()), format!("{kind} list begins")),
            ObjectEvent::Listed => (Some("".into()), format!("{kind} list ends")),
            ObjectEvent::Reached(version) => {
                (Some("".into()), format!("{kind} known to v{version}"))
            }
        }
    }
    match event {
        ControllerEvent::Nodes(change) => of("node", change, node),
        ControllerEvent::Pools(change) => of("pool", change, |p| {
            format!("v{} {:?}", p.version, p.finalizers)
        }),
        ControllerEvent::Subnets(change) => of("subnet", change, |s| {
            format!(
                "v{} {}",
                s.version,
                s.spec.as_ref().map_or_else(Clone::clone, subnet)
            )
        }),
        ControllerEvent::Blocks(change) => {
            let (_, text) = of("block", change, |b| {
                let what = b.spec.as_ref().map_or_else(Clone::clone, block);
                format!("v{} {} {what}", b.version, b.uid)
            });
            let owner = match change {
                ObjectEvent::Applied(b) | ObjectEvent::Deleted(b) => b
                    .spec
                    .as_ref()
                    .ok()
                    .map(|spec| spec.owner.name.clone().into()),
                _ => None,
            };
            (owner, text)
        }
        ControllerEvent::ServiceRanges(change) => of("services", change, |s| ranges(&s.cidrs)),
        ControllerEvent::Pods(change) => of("pod", change, |p| format!("{:?}", p.addresses)),
        _ => (None, String::new()),
    }
}
