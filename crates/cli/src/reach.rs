//! Access to the API server. All IO of the kubectl plugin with the API server is here.
//!
//! Lists are paged and consistent: the API server never answers from a cache that may be behind. Every call has a
//! timeout, and errors say what to do.

use std::fmt::Debug;
use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, Namespace};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::PartialObjectMeta;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::json;

use super::Flags;
use super::inventory::Inventory;
use super::lists::{ClusterLists, Readable, WantedKinds};
use cadastre_api::{
    IPClaim, IPClaimLite, IPPoolLite, LEASE_NAME, NodeAddressesLite, NodeSubnetLite, PodLite,
};
use cadastre_daemon::client;

/// The field manager that writes the annotations.
const MANAGER: &str = "kubectl-cadastre";
/// The maximum number of attempts to list a kind. If the list expires between two pages, listing must start again.
const TRIES: usize = 3;
/// Progress is shown once listing takes longer than this.
const PATIENCE: Duration = Duration::from_secs(1);

/// A kind of the API whose objects can be listed in the whole cluster.
pub(crate) trait Listed:
    Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug
{
}

impl<K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug> Listed for K {}

/// A client of the API server, with the timeout and the page size of one command.
#[derive(Clone)]
pub(crate) struct ApiReach {
    /// The client itself, for requests that have no method here
    pub client: Client,
    /// The namespace of pods and claims that are given by name alone
    pub namespace: String,
    timeout: Duration,
    page: Option<u32>,
}

/// The outcome of a write that succeeds only at a given resourceVersion.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WriteOutcome {
    /// The object is written.
    Done,
    /// The write was rejected, because the object no longer has the given resourceVersion.
    Changed,
}

impl ApiReach {
    /// Configures a client from the kubeconfig and the flags, without a request to the API server.
    pub(crate) async fn new(flags: &Flags) -> anyhow::Result<Self> {
        let options = client::Options {
            kubeconfig: flags.kubeconfig.clone(),
            context: flags.context.clone(),
        };
        Self::of(client::configure(&options).await?, flags)
    }

    /// Configures a client from `config` and the flags.
    pub(crate) fn of(mut config: kube::Config, flags: &Flags) -> anyhow::Result<Self> {
        if flags.impersonate.is_some() {
            config.auth_info.impersonate.clone_from(&flags.impersonate);
        }
        let namespace = flags.namespace.clone();
        let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
        Ok(ApiReach {
            client: Client::try_from(config)
                .context("the cluster's configuration cannot be used")?,
            namespace,
            timeout: flags.timeout(),
            page: Some(flags.chunk_size).filter(|page| *page > 0),
        })
    }

    /// Lists the objects that a subcommand needs and builds an inventory of them.
    pub(crate) async fn inventory(&self, wanted: WantedKinds) -> anyhow::Result<Inventory> {
        Ok(Inventory::new(&self.lists(wanted).await?, Timestamp::now()))
    }

    /// Lists the objects that a subcommand needs.
    ///
    /// Pods are listed last. So a pod that is created while the other kinds are listed is found. A pod that is deleted
    /// during that time is known to be gone.
    pub(crate) async fn lists(&self, wanted: WantedKinds) -> anyhow::Result<ClusterLists> {
        let progress = &mut ListProgress::new();
        let controller_lease = ListParams::default().fields(&format!("metadata.name={LEASE_NAME}"));
        let parts = ListParams::default().labels("app.kubernetes.io/name=cadastre");
        Ok(ClusterLists {
            pools: self.list(progress).await?,
            nodes: self.list(progress).await?,
            blocks: self.list(progress).await?,
            subnets: self.list(progress).await?,
            addresses: self.list(progress).await?,
            // An earlier version of the CustomResourceDefinitions does not have IPClaims.
            claims: self.list_if_there(progress).await?,
            // API servers before Kubernetes 1.33 do not have ServiceCIDRs.
            services: self.list_if_there(progress).await?,
            namespaces: match wanted {
                WantedKinds::PodsAndNamespaces => self.namespaces(progress).await?,
                _ => Vec::new(),
            },
            leases: self.optional(&controller_lease).await,
            parts: self.optional(&parts).await,
            pods: match wanted {
                WantedKinds::NoPods => Vec::new(),
                _ => self.list(progress).await?,
            },
        })
    }

    /// Lists objects that a subcommand can do without. `Err` has the reason why they cannot be read.
    async fn optional<K: Listed>(&self, params: &ListParams) -> Readable<K> {
        let api = Api::<K>::all(self.client.clone());
        let listed = self.call(api.list(params)).await.map(|it| it.items);
        listed.map_err(|error| error.about::<K>().to_string())
    }

    async fn namespaces(
        &self,
        progress: &mut ListProgress,
    ) -> anyhow::Result<Vec<PartialObjectMeta<Namespace>>> {
        progress.begin("namespaces");
        let api = Api::<Namespace>::all(self.client.clone());
        let listed = self.call(api.list_metadata(&ListParams::default())).await;
        Ok(listed.map_err(CallError::about::<Namespace>)?.items)
    }

    /// Lists all objects of a kind. An error names the kind.
    async fn list<K: Listed>(&self, progress: &mut ListProgress) -> anyhow::Result<Vec<K>> {
        let all = Api::all(self.client.clone());
        let listed = self.pages(&all, progress).await;
        listed.map_err(CallError::about::<K>)
    }

    /// Lists all objects of a kind. If the cluster does not have the kind, returns an empty list.
    async fn list_if_there<K: Listed>(
        &self,
        progress: &mut ListProgress,
    ) -> anyhow::Result<Vec<K>> {
        let all = Api::all(self.client.clone());
        match self.pages(&all, progress).await {
            Err(CallError::Api(404, _)) => Ok(Vec::new()),
            listed => listed.map_err(CallError::about::<K>),
        }
    }

    async fn pages<K: Listed>(
        &self,
        api: &Api<K>,
        progress: &mut ListProgress,
    ) -> Result<Vec<K>, CallError> {
        let mut tries = 0;
        'anew: loop {
            progress.begin(&K::plural(&()));
            tries += 1;
            let mut all: Vec<K> = Vec::new();
            let mut params = ListParams {
                limit: self.page,
                ..ListParams::default()
            };
            loop {
                let page = match self.call(api.list(&params)).await {
                    // The continue token has expired, so the list is started again.
                    Err(CallError::Api(410, _)) if tries < TRIES => continue 'anew,
                    page => page?,
                };
                all.extend(page.items);
                progress.show(all.len());
                params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
                if params.continue_token.is_none() {
                    return Ok(all);
                }
            }
        }
    }

    /// Reads the NodeSubnet of a node from etcd, not from a cache. Returns `None` if the NodeSubnet does not exist.
    pub(crate) async fn subnet(&self, name: &str) -> anyhow::Result<Option<NodeSubnetLite>> {
        self.get(name).await
    }

    /// Reads the NodeAddresses of a node from etcd, not from a cache. Returns `None` if the NodeAddresses do not exist.
    pub(crate) async fn addresses(&self, name: &str) -> anyhow::Result<Option<NodeAddressesLite>> {
        self.get(name).await
    }

    /// Lists the claims of a namespace. If `namespace` is `None`, lists the claims of all namespaces.
    pub(crate) async fn claims(&self, namespace: Option<&str>) -> anyhow::Result<Vec<IPClaimLite>> {
        let api = match namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let listed = self.pages(&api, &mut ListProgress::new()).await;
        listed.map_err(CallError::about::<IPClaimLite>)
    }

    /// Reads a claim from etcd, not from a cache. Returns `None` if the claim does not exist.
    pub(crate) async fn claim(
        &self,
        namespace: &str,
        name: &str,
    ) -> anyhow::Result<Option<IPClaimLite>> {
        let api = Api::namespaced(self.client.clone(), namespace);
        let claim = self.call(api.get_opt(name)).await;
        claim.map_err(CallError::about::<IPClaimLite>)
    }

    /// Lists the pods of a namespace; `Err` has the reason why they cannot be read.
    pub(crate) async fn pods_of(&self, namespace: &str) -> Readable<PodLite> {
        let api = Api::namespaced(self.client.clone(), namespace);
        let listed = self.pages(&api, &mut ListProgress::new()).await;
        listed.map_err(|error| error.about::<PodLite>().to_string())
    }

    /// Lists the events with this reason about the pod `pod` (`namespace/name`) with this UID. `Err` has the reason why
    /// they cannot be read.
    pub(crate) async fn events_of(&self, pod: &str, uid: &str, reason: &str) -> Readable<Event> {
        let namespace = pod.split('/').next().unwrap_or_default();
        let api = Api::<Event>::namespaced(self.client.clone(), namespace);
        let fields = format!("involvedObject.uid={uid},reason={reason}");
        let params = ListParams::default().fields(&fields);
        let listed = self.call(api.list(&params)).await.map(|it| it.items);
        listed.map_err(|error| error.about::<Event>().to_string())
    }

    /// Reads a pool. Returns `None` if the pool does not exist, or if the user may not read pools.
    pub(crate) async fn pool_if_readable(&self, name: &str) -> Option<IPPoolLite> {
        self.get(name).await.ok()?
    }

    /// Creates a claim in a namespace. With `dry_run` the API server only checks the claim.
    pub(crate) async fn create_claim(
        &self,
        namespace: &str,
        claim: &IPClaim,
        dry_run: bool,
    ) -> Result<(), CallError> {
        let api: Api<IPClaim> = Api::namespaced(self.client.clone(), namespace);
        let params = PostParams {
            dry_run,
            field_manager: Some(MANAGER.to_owned()),
        };
        self.call(api.create(&params, claim)).await.map(|_| ())
    }

    /// Deletes the claim with this UID. If the name belongs to another claim by now, nothing is deleted (error 409).
    pub(crate) async fn delete_claim(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> Result<(), CallError> {
        let api: Api<IPClaimLite> = Api::namespaced(self.client.clone(), namespace);
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: Some(uid.to_owned()),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        self.call(api.delete(name, &params)).await.map(|_| ())
    }

    async fn get<K: Listed>(&self, name: &str) -> anyhow::Result<Option<K>> {
        let api = Api::<K>::all(self.client.clone());
        self.call(api.get_opt(name))
            .await
            .map_err(CallError::about::<K>)
    }

    /// Sets an annotation of a NodeSubnet, or removes it if `value` is `None`. Changes nothing if the version of the
    /// NodeSubnet is no longer `version`.
    pub(crate) async fn annotate(
        &self,
        name: &str,
        version: &str,
        annotation: &str,
        value: Option<&str>,
    ) -> anyhow::Result<WriteOutcome> {
        let api: Api<NodeSubnetLite> = Api::all(self.client.clone());
        let patch = Patch::Merge(json!({"metadata": {
            "resourceVersion": version, "annotations": {annotation: value},
        }}));
        let params = PatchParams {
            field_manager: Some(MANAGER.to_owned()),
            ..PatchParams::default()
        };
        match self.call(api.patch(name, &params, &patch)).await {
            Ok(_) => Ok(WriteOutcome::Done),
            Err(CallError::Api(409, _)) => Ok(WriteOutcome::Changed),
            Err(CallError::Api(404, _)) => bail!("NodeSubnet {name} is gone: its node was deleted"),
            Err(CallError::Api(403, why)) => bail!(
                "no right to patch nodesubnets.cadastre.dev: {why}: ask for the verb \"patch\" on it"
            ),
            Err(error) => Err(error.about::<NodeSubnetLite>()),
        }
    }

    /// Waits for the answer to a call, for at most the time of `--request-timeout`.
    pub(crate) async fn call<T>(
        &self,
        call: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, CallError> {
        match tokio::time::timeout(self.timeout, call).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(kube::Error::Api(status))) => {
                Err(CallError::Api(status.code, status.message.clone()))
            }
            Ok(Err(error)) => Err(CallError::Other(chain(&error))),
            Err(_) => Err(CallError::Slow(self.timeout)),
        }
    }
}

/// Why a call failed.
#[derive(Debug)]
pub(crate) enum CallError {
    /// The API server answered with this error code and message.
    Api(u16, String),
    /// The API server did not answer within this time.
    Slow(Duration),
    /// The API server was not reached, or its answer cannot be parsed.
    Other(String),
}

impl CallError {
    /// Converts the error like [`Self::into_error`], and takes the resource's name from its kind.
    fn about<K: Resource<DynamicType = ()>>(self) -> anyhow::Error {
        let (plural, group) = (K::plural(&()), K::group(&()));
        let dot = if group.is_empty() { "" } else { "." };
        self.into_error(&format!("{plural}{dot}{group}"))
    }

    /// Converts the error to an error of the command, which advises the user what to do. `what` names the resource.
    pub(crate) fn into_error(self, what: &str) -> anyhow::Error {
        match self {
            CallError::Api(404, _) if what.ends_with("cadastre.dev") => anyhow!(
                "the cluster has no {what}: install the CustomResourceDefinitions (cadastre crd | kubectl apply --server-side -f -), or choose another cluster with --context"
            ),
            CallError::Api(401, why) => anyhow!(
                "the API server rejected the credentials ({why}): renew the credentials of this context"
            ),
            CallError::Api(403, why) => anyhow!(
                "no right to read {what} ({why}): ask for the verbs \"get\" and \"list\" on it"
            ),
            CallError::Api(code, why) => {
                anyhow!("the API server rejected the request for {what} with {code}: {why}")
            }
            CallError::Slow(limit) => anyhow!(
                "the API server did not answer about {what} within {} s: try again, or allow more time with --request-timeout",
                limit.as_secs()
            ),
            CallError::Other(why) => anyhow!(
                "the API server was not reached for {what}: {why}: is it up, and is this the right context (kubectl config current-context)?"
            ),
        }
    }
}

fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        source = inner.source();
    }
    text
}

/// Shows on a terminal how many objects have been listed.
struct ListProgress {
    kind: String,
    start: Instant,
    shown: bool,
}

impl ListProgress {
    fn new() -> Self {
        ListProgress {
            kind: String::new(),
            start: Instant::now(),
            shown: false,
        }
    }

    /// Sets the kind of the objects that are listed next.
    fn begin(&mut self, kind: &str) {
        kind.clone_into(&mut self.kind);
    }

    /// Shows that `count` objects of this kind have been listed so far. Shows nothing in the first second, or if
    /// standard error is not a terminal.
    fn show(&mut self, count: usize) {
        if std::io::stderr().is_terminal() && self.start.elapsed() > PATIENCE {
            self.shown = true;
            eprint!("\r\x1b[K{} {}...", count, self.kind);
            let _ = std::io::stderr().flush();
        }
    }
}

impl Drop for ListProgress {
    fn drop(&mut self) {
        if self.shown {
            eprint!("\r\x1b[K");
        }
    }
}
