//! The steps of a turn that tell others: the API server, the files of other programs, the admin port.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use std::{mem, slice};

use jiff::Timestamp;
use k8s_openapi::api::core::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, OwnerReference, Time};
use kube::api::{GetParams, Patch, PatchParams, PostParams};
use kube::core::PartialObjectMeta;
use kube::{Api, Client, Resource as _, ResourceExt as _};
use serde_json::json;
use tracing::{debug, info, warn};

use super::addresses::{self, TO_BE_REPORTED};
use super::demand::{Wishes, wanted};
use super::files::others::Standing;
use super::masquerade::Masquerade;
use super::namespaces::Namespace;
use super::publish::{Next, Written, is_same};
use super::run::{Agent, Event, Told};
use super::seen;
use super::served;
use super::snapshot::gives;
use super::status::status;
use super::work::STARTING;
use cadastre_api::choice::Label;
use cadastre_api::{
    AGENT_MANAGER, NodeAddresses, NodeAddressesSpec, NodeSubnet, NodeSubnetLite, NodeSubnetStatus,
    POOLS_ANNOTATION, SERVED_BY_OTHERS,
};
use cadastre_node::clock;

/// Longest wait for the API server.
const API_LIMIT: Duration = Duration::from_secs(10);
/// Why a part of what was written is not stored, and what to do.
const OLDER_CRDS: &str = "the CRDs are older than the agent: apply those of its version (cadastre crd | kubectl apply --server-side -f -)";

/// Reasons of the events that say that another's network has the node's pods.
const LEFT_TO_OTHERS: &str = "LeftToOthers";
const OTHERS_FIRST: &str = "OthersFirst";

/// What came of writing the list of addresses.
#[derive(Debug)]
pub(super) enum Listed {
    /// It was written; an older CRD may have dropped a part of it
    Done(Option<Box<Cut>>),
    /// It was not, or nobody knows
    Failed,
}

/// A list of which only a part is stored.
#[derive(Clone, Debug)]
pub(super) struct Cut {
    pub written: NodeAddressesSpec,
    pub stored: NodeAddressesSpec,
}

impl Agent {
    pub(super) fn publish(&mut self) {
        self.publish_at = None;
        let Some(snapshot) = &self.snapshot else {
            return;
        };
        let now = clock::since_boot();
        let wishes: Wishes = self.parts.service.known.lock().wishes.count(now).0;
        let wants = wanted(snapshot, &wishes);
        let leaks = self.parts.leaks.lock();
        let leaks = leaks.unwrap_or_else(PoisonError::into_inner);
        let nothing = BTreeSet::new();
        let named = match &self.subnet {
            Told::There(subnet) => &subnet.named,
            _ => &nothing,
        };
        let orphans = leaks.orphans(snapshot, named, now);
        drop(leaks);
        let mut told = status(snapshot, &wants, &orphans, &clock::now().boot);
        let (standing, own) = (self.files.standing(), self.files.cni_conf());
        let is = self.publisher.conditions();
        told.conditions.extend(served::condition(standing, own, is));
        let next = self.publisher.next(&told, &wants, snapshot, now);
        let lag = self.publisher.lag(now).max(self.schedule.lag(now));
        self.parts.metrics.behind(lag);
        match next {
            Next::Nothing => {}
            Next::At(at) => self.publish_at = Some(at),
            Next::Write { version, urgent } => {
                let api: Api<NodeSubnetLite> = Api::all(self.parts.client.clone());
                let name = self.settings.node.clone();
                let is = self.publisher.conditions();
                told.conditions = served::merged(is, &told.conditions, Timestamp::now());
                self.tasks.spawn(async move {
                    Event::Written(urgent, write(&api, &name, &version, &told).await)
                });
            }
        }
    }

    /// Writes the list of addresses, if it is time to.
    pub(super) fn write_list(&mut self) {
        self.list_at = None;
        let (Some(snapshot), Told::There(subnet)) = (&self.snapshot, &self.subnet) else {
            return;
        };
        let told = match &self.addresses {
            Told::Unknown => return,
            Told::Absent => None,
            Told::There(told) => Some(told),
        };
        if !self.is_ours(subnet) {
            return;
        }
        let nothing = NodeAddressesSpec::default();
        let told_list = told.map_or(&nothing, |it| &it.list);
        let mut list = addresses::list(snapshot, &clock::now().boot);
        let differs = match told {
            None => !list.addresses.is_empty(),
            Some(told) => {
                // An older CRD drops a part of the list: what is stored is all that can be.
                let is_stored = self.list_cut.as_deref().is_some_and(|cut| {
                    told.list.is_same(&cut.stored) && list.is_same(&cut.written)
                });
                (!told.list.is_same(&list) && !is_stored) || told.owner != subnet.uid
            }
        };
        let (now, wall) = (clock::since_boot(), Timestamp::now());
        let known = self.parts.service.known.lock();
        let (named, pods) = (&subnet.named, &known.pods);
        let wall_ms = wall.as_millisecond();
        let urgent = differs && addresses::is_urgent(told_list, named, snapshot, pods, wall_ms);
        drop(known);
        match self.schedule.next(differs, urgent, now) {
            addresses::Next::Nothing => {}
            // What cannot wait may come to be so merely because time goes by.
            addresses::Next::At(at) => self.list_at = Some(at.min(now + TO_BE_REPORTED)),
            addresses::Next::Write => {
                list.as_of = Timestamp::from_second(wall.as_second()).ok().map(Time);
                let client = self.parts.client.clone();
                let name = self.settings.node.clone();
                let (owner, is_new) = (subnet.uid.clone(), told.is_none());
                self.tasks.spawn(async move {
                    Event::Listed(write_list(client, &name, &owner, is_new, list).await)
                });
            }
        }
    }

    pub(super) fn list_written(&mut self, listed: Listed) {
        let now = clock::since_boot();
        let Listed::Done(cut) = listed else {
            return self.schedule.written(false, now);
        };
        if cut.is_some() && self.list_cut.is_none() {
            warn!(
                "NodeAddresses {} was stored without a part of what this agent tells: {OLDER_CRDS}",
                self.settings.node
            );
        }
        self.list_cut = cut;
        self.schedule.written(true, now);
    }

    pub(super) fn written(&mut self, urgent: bool, written: Written) {
        let result = match &written {
            Written::Done { .. } => "done",
            Written::Outdated => "outdated",
            Written::Failed => "failed",
        };
        if let Written::Done { cut, .. } = &written {
            if cut.is_some() && !self.is_cut {
                warn!(
                    "NodeSubnet {} was stored without a part of what this agent tells: {OLDER_CRDS}",
                    self.settings.node
                );
            }
            self.is_cut = cut.is_some();
        }
        self.parts.metrics.wrote(urgent, result);
        self.publisher.written(written, clock::since_boot());
    }

    /// What is held, for other programs on the node.
    pub(super) fn write_files(&mut self) {
        if self.snapshot.is_some() {
            let holding = Arc::clone(&self.parts.holding.borrow());
            let waits_for_pods = self.parts.service.known.lock().waits_for_pods();
            let now = clock::since_boot();
            self.files.refresh(&holding, waits_for_pods, now);
            self.tell_served();
            let is_left = matches!(self.files.standing(), Some(Standing::Left(_)));
            // What another's pods send is another's business.
            if let Some(masquerade) = self.masquerade.as_mut().filter(|_| !is_left) {
                let spec = match &self.subnet {
                    Told::There(subnet) => subnet.spec.as_ref().ok(),
                    _ => None,
                };
                let ranges = spec.map(|it| it.pod_ranges.as_slice());
                masquerade.refresh(ranges, &holding, clock::since_boot());
            }
        }
    }

    /// That another's network has the node's pods is told once a change, also over restarts.
    fn tell_served(&mut self) {
        let standing = self.files.standing();
        if standing == self.served.as_ref() || standing == Some(&Standing::Open) {
            return;
        }
        // What an earlier agent has told is in the NodeSubnet.
        let is: &[Condition] = match &self.subnet {
            Told::Unknown => return,
            Told::Absent => &[],
            Told::There(subnet) => subnet.status.conditions.as_slice(),
        };
        let said = served::condition(standing, self.files.cni_conf(), is);
        let before = mem::replace(&mut self.served, standing.cloned());
        let Some(said) = said else { return };
        let is_news = before.is_some() || !served::is_said(is, slice::from_ref(&said));
        match self.served {
            Some(Standing::Left(_)) if is_news => self.tell_node(LEFT_TO_OTHERS, said.message),
            Some(Standing::Behind(_)) if is_news => self.tell_node(OTHERS_FIRST, said.message),
            _ => info!("{}", said.message),
        }
    }

    /// Asks for the namespaces of pods. Returns when to do that again.
    pub(super) fn ask_namespaces(&mut self) -> Option<Duration> {
        let mut known = self.parts.service.known.lock();
        let due = known.namespaces.due(clock::since_boot());
        let wake = known.namespaces.wake();
        drop(known);
        for name in due {
            let client = self.parts.client.clone();
            self.tasks.spawn(async move {
                let answer = namespace(client, &name).await;
                Event::Namespace(name, answer)
            });
        }
        wake
    }

    pub(super) fn tell_readiness(&self) {
        let readiness = &self.parts.readiness;
        if !self.parts.ledger.is_open() {
            let why = self.store_trouble.as_str();
            let why = if why.is_empty() { STARTING } else { why };
            return readiness.say_without_api(false, why);
        }
        if let Some(refusal) = self.parts.ledger.trouble() {
            return readiness.say_without_api(false, &refusal.text);
        }
        let Some(snapshot) = &self.snapshot else {
            return readiness.say_without_api(false, "starting");
        };
        let gives = snapshot.blocks.iter().any(gives);
        // It gets one when a pod comes, which comes to a node that is ready only.
        let can_ask = || {
            let known = self.parts.service.known.lock();
            let had_one = || self.files.is_configured() || self.has_let_go;
            self.followed && (known.waits_for_pods() || known.may_ask() && had_one())
        };
        if !gives && !can_ask() {
            let why = match (&self.node, &self.subnet) {
                (Told::Absent, _) => "there is no Node object of this name: see --node-name",
                (_, Told::Absent) => {
                    "there is no NodeSubnet of this node: see that the controller runs and that a pool serves the node"
                }
                _ if !self.store_trouble.is_empty() => &self.store_trouble,
                _ if !snapshot.blocks.is_empty() => {
                    "nothing that this node holds gives new addresses: its blocks are asked back, withdrawn or let go; see that a pool serves the node"
                }
                _ => "the node holds nothing to give addresses from yet",
            };
            return readiness.say_without_api(false, why);
        }
        // The runtime waits for the one, flannel's plugin for the other.
        if let Some(why) = self.files.unwritten() {
            return readiness.say_without_api(false, why);
        }
        if let Some(why) = self.masquerade.as_ref().and_then(Masquerade::trouble) {
            return readiness.say_without_api(false, why);
        }
        // helm waits for this, and the other network serves the node: it is no fault of the agent's.
        if let Some(Standing::Left(names)) = self.files.standing() {
            let says = format!("leaves new pods to {names}: see the condition {SERVED_BY_OTHERS}");
            return readiness.say_without_api(true, &says);
        }
        readiness.say_without_api(
            true,
            if !gives {
                "asks for a block when a pod comes"
            } else if self.followed {
                "gives addresses"
            } else {
                "gives addresses from what was held last: the API server does not answer"
            },
        );
    }
}

/// A namespace as the API server's cache has it, else as its store has it: one that was made a moment
/// ago may not be in the cache yet.
async fn namespace(client: Client, name: &str) -> Option<Namespace> {
    let api: Api<PartialObjectMeta<v1::Namespace>> = Api::all(client);
    let asked = async {
        match api.get_metadata_opt_with(name, &GetParams::any()).await {
            Ok(Some(found)) => Ok(found),
            Ok(None) => api.get_metadata(name).await,
            Err(error) => Err(error),
        }
    };
    let why = match tokio::time::timeout(API_LIMIT, asked).await {
        Ok(Ok(found)) => {
            return Some(Namespace {
                labels: labels(found.labels()),
                pools: found.annotations().get(POOLS_ANNOTATION).cloned(),
            });
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {API_LIMIT:?}"),
    };
    warn!(
        namespace = name,
        "its labels and pools are not known, and its pods wait where these might matter: {why}"
    );
    None
}

fn labels(labels: &BTreeMap<String, String>) -> Vec<Label> {
    let labels = labels.iter();
    labels
        .map(|(key, value)| (key.as_str().into(), value.as_str().into()))
        .collect()
}

/// Writes the list of addresses. The NodeSubnet owns it, so that it goes with it.
async fn write_list(
    client: Client,
    name: &str,
    owner: &str,
    is_new: bool,
    list: NodeAddressesSpec,
) -> Listed {
    let api: Api<NodeAddresses> = Api::all(client);
    let mut object = NodeAddresses::new(name, list);
    object.metadata.owner_references = Some(vec![OwnerReference {
        api_version: NodeSubnet::api_version(&()).into_owned(),
        kind: NodeSubnet::kind(&()).into_owned(),
        name: name.to_owned(),
        uid: owner.to_owned(),
        ..OwnerReference::default()
    }]);
    let manager = Some(AGENT_MANAGER.to_owned());
    let asked = async {
        if is_new {
            let params = PostParams {
                field_manager: manager,
                ..PostParams::default()
            };
            return api.create(&params, &object).await;
        }
        let patch = Patch::Merge(json!({
            "metadata": {"ownerReferences": object.metadata.owner_references},
            "spec": {
                "nodeUID": object.spec.node_uid, "bootID": object.spec.boot_id,
                "asOf": object.spec.as_of, "addresses": object.spec.addresses,
            },
        }));
        let params = PatchParams {
            field_manager: manager,
            ..PatchParams::default()
        };
        api.patch(name, &params, &patch).await
    };
    match tokio::time::timeout(API_LIMIT, asked).await {
        Ok(Ok(stored)) => {
            let (written, stored) = (object.spec, stored.spec);
            let is_whole = stored.is_same(&written);
            Listed::Done((!is_whole).then(|| Box::new(Cut { written, stored })))
        }
        // The watch will show what there is.
        Ok(Err(kube::Error::Api(answer))) if answer.code == 409 => Listed::Failed,
        Ok(Err(kube::Error::Api(answer))) => {
            warn!(
                "NodeAddresses {name} is refused: {} ({}): check the agent's ClusterRole, and that the CRDs are those of the agent's version",
                answer.message, answer.code
            );
            Listed::Failed
        }
        Ok(Err(error)) => {
            debug!("NodeAddresses {name} not written: {error}");
            Listed::Failed
        }
        Err(_) => Listed::Failed,
    }
}

/// Writes the status onto that version.
async fn write(
    api: &Api<NodeSubnetLite>,
    name: &str,
    version: &str,
    status: &NodeSubnetStatus,
) -> Written {
    let mut body = json!({
        "metadata": {"resourceVersion": version},
        "status": {
            "nodeUID": status.node_uid, "pools": status.pools, "blocks": status.blocks,
            "agent": status.agent, "orphans": status.orphans,
        },
    });
    if !status.conditions.is_empty() {
        body["status"]["conditions"] = json!(status.conditions);
    }
    let patch = Patch::Merge(body);
    let params = PatchParams {
        field_manager: Some(AGENT_MANAGER.to_owned()),
        ..PatchParams::default()
    };
    let begun = Timestamp::now();
    let answer = tokio::time::timeout(API_LIMIT, api.patch_status(name, &params, &patch)).await;
    match answer {
        Ok(Ok(object)) => {
            let seen = seen::subnet(object);
            debug!(version = seen.version, "status written");
            let is_whole = is_same(&seen.status, status);
            Written::Done {
                version: seen.version,
                status: Box::new(seen.status),
                cut: (!is_whole).then(|| Box::new(status.clone())),
            }
        }
        Ok(Err(kube::Error::Api(answer))) if answer.code == 409 => Written::Outdated,
        Ok(Err(kube::Error::Api(answer))) if answer.code == 404 => {
            debug!("there is no NodeSubnet to write to");
            Written::Failed
        }
        Ok(Err(kube::Error::Api(answer))) if matches!(answer.code, 403 | 413 | 422) => {
            warn!(
                "the status of NodeSubnet {name} is refused: {} ({}): check the agent's ClusterRole, and that CRDs and agent are of one version",
                answer.message, answer.code
            );
            Written::Failed
        }
        Ok(Err(error)) => {
            debug!(%begun, "status not written: {error}");
            Written::Failed
        }
        Err(_) => Written::Failed,
    }
}
