//! Access to the API server. All IO of the kubectl plugin with the API server is here.
//!
//! Lists are paged and consistent: the API server never answers from a cache that may be behind. Every call has a
//! timeout, and errors say what to do.

use std::fmt::Debug;
use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, ObjectList, Patch, PatchParams};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::json;

use super::Flags;
use super::inventory::Inventory;
use super::lists::{ClusterLists, Readable, WantedKinds};
use cadastre_api::{LEASE_NAME, NodeAddressesLite, NodeSubnetLite};
use cadastre_daemon::client;

/// The field manager that writes the annotations.
const MANAGER: &str = "kubectl-cadastre";
/// At most this many attempts to list a kind. A list must start again if it expires between two pages.
const TRIES: usize = 3;
/// Progress is shown once listing takes longer than this.
const PATIENCE: Duration = Duration::from_secs(1);

/// A client of the API server, with the timeout and the page size of one command.
#[derive(Clone)]
pub struct ApiReach {
    /// The client itself, for requests that have no method here
    pub client: Client,
    /// The namespace of pods that are given by name alone
    pub namespace: String,
    timeout: Duration,
    page: Option<u32>,
}

/// The outcome of a write that succeeds only at a given resourceVersion.
#[derive(Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The object is written.
    Done,
    /// The write was rejected, because the object has another version by now.
    Changed,
}

impl ApiReach {
    /// Configures a client from the kubeconfig and the flags, without a request to the API server.
    pub async fn new(flags: &Flags) -> anyhow::Result<Self> {
        let options = client::Options {
            kubeconfig: flags.kubeconfig.clone(),
            context: flags.context.clone(),
            rate: None,
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

    /// Lists the objects that a verb needs and builds an inventory of them.
    pub(crate) async fn inventory(&self, wanted: WantedKinds) -> anyhow::Result<Inventory> {
        Ok(Inventory::new(&self.lists(wanted).await?, Timestamp::now()))
    }

    /// Lists the objects that a verb needs.
    ///
    /// Pods are listed last. So a pod created meanwhile is found, and a pod deleted meanwhile is known to be gone.
    pub async fn lists(&self, wanted: WantedKinds) -> anyhow::Result<ClusterLists> {
        let mut progress = ListProgress::new();
        let all = |client: &Client| client.clone();
        let pools = self
            .list(&Api::all(all(&self.client)), &mut progress)
            .await?;
        let nodes = self
            .list(&Api::all(all(&self.client)), &mut progress)
            .await?;
        let blocks = self
            .list(&Api::all(all(&self.client)), &mut progress)
            .await?;
        let subnets = self
            .list(&Api::all(all(&self.client)), &mut progress)
            .await?;
        let addresses = self
            .list(&Api::all(all(&self.client)), &mut progress)
            .await?;
        let services = self.services(&mut progress).await?;
        let mut lists = ClusterLists {
            nodes,
            pools,
            subnets,
            addresses,
            blocks,
            services,
            ..ClusterLists::default()
        };
        if wanted.namespaces {
            lists.namespaces = self.namespaces(&mut progress).await?;
        }
        lists.leases = self.leases().await;
        lists.parts = self.parts().await;
        if wanted.pods {
            lists.pods = self
                .list(&Api::all(all(&self.client)), &mut progress)
                .await?;
        }
        Ok(lists)
    }

    /// Lists ServiceCIDRs. The result is empty on servers before 1.33, which do not have this kind.
    async fn services(
        &self,
        progress: &mut ListProgress,
    ) -> anyhow::Result<Vec<k8s_openapi::api::networking::v1::ServiceCIDR>> {
        let api = Api::all(self.client.clone());
        match self.pages(&api, progress).await {
            Err(CallError::Api(404, _)) => Ok(Vec::new()),
            other => other.map_err(|trouble| trouble.into_error("servicecidrs.networking.k8s.io")),
        }
    }

    /// Lists the Leases with the name of the controllers' Lease, in all namespaces.
    async fn leases(&self) -> Readable<Lease> {
        let named = ListParams::default().fields(&format!("metadata.name={LEASE_NAME}"));
        self.few(&Api::all(self.client.clone()), &named).await
    }

    /// Lists the pods with the chart's label, which are controllers and agents.
    async fn parts(&self) -> Readable<Pod> {
        let ours = ListParams::default().labels("app.kubernetes.io/name=cadastre");
        self.few(&Api::all(self.client.clone()), &ours).await
    }

    async fn few<K>(&self, api: &Api<K>, params: &ListParams) -> Readable<K>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let listed = self.call(api.list(params)).await.map(|it| it.items);
        listed.map_err(|trouble| trouble.into_error(&resource::<K>()).to_string())
    }

    async fn namespaces(
        &self,
        progress: &mut ListProgress,
    ) -> anyhow::Result<Vec<kube::core::PartialObjectMeta<k8s_openapi::api::core::v1::Namespace>>>
    {
        let api: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(self.client.clone());
        progress.begin("namespaces");
        let listed = self.call(api.list_metadata(&ListParams::default())).await;
        Ok(listed
            .map_err(|trouble| trouble.into_error("namespaces"))?
            .items)
    }

    /// Lists all objects of a kind.
    async fn list<K>(&self, api: &Api<K>, progress: &mut ListProgress) -> anyhow::Result<Vec<K>>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let kind = resource::<K>();
        let listed = self.pages(api, progress).await;
        listed.map_err(|trouble| trouble.into_error(&kind))
    }

    async fn pages<K>(&self, api: &Api<K>, progress: &mut ListProgress) -> Result<Vec<K>, CallError>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
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
                let page: ObjectList<K> = match self.call(api.list(&params)).await {
                    // The continue token has expired, so the list is started again.
                    Err(CallError::Api(410, _)) if tries < TRIES => continue 'anew,
                    other => other?,
                };
                all.extend(page.items);
                progress.tell(all.len());
                match page.metadata.continue_.filter(|token| !token.is_empty()) {
                    Some(token) => params.continue_token = Some(token),
                    None => return Ok(all),
                }
            }
        }
    }

    /// Reads the NodeSubnet of a node, not from a cache; `None` if there is none.
    pub async fn subnet(&self, name: &str) -> anyhow::Result<Option<NodeSubnetLite>> {
        let api: Api<NodeSubnetLite> = Api::all(self.client.clone());
        let read = self.call(api.get_opt(name)).await;
        read.map_err(|trouble| trouble.into_error(&resource::<NodeSubnetLite>()))
    }

    /// Reads the NodeAddresses of a node, not from a cache; `None` if there is none.
    pub async fn addresses(&self, name: &str) -> anyhow::Result<Option<NodeAddressesLite>> {
        let api: Api<NodeAddressesLite> = Api::all(self.client.clone());
        let read = self.call(api.get_opt(name)).await;
        read.map_err(|trouble| trouble.into_error(&resource::<NodeAddressesLite>()))
    }

    /// Sets an annotation of a NodeSubnet, or removes it if `value` is `None`. Does nothing if the NodeSubnet no longer
    /// has this version.
    pub async fn annotate(
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
            Err(trouble) => Err(trouble.into_error(&resource::<NodeSubnetLite>())),
        }
    }

    /// Awaits one call for at most the time of `--request-timeout`.
    pub async fn call<T>(
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
pub enum CallError {
    /// The API server answered with this error code and message.
    Api(u16, String),
    /// The API server did not answer within this time.
    Slow(Duration),
    /// The API server was not reached, or its answer cannot be parsed.
    Other(String),
}

impl CallError {
    /// Converts the error to an error of the command, which advises the user what to do. `what` names the resource.
    pub fn into_error(self, what: &str) -> anyhow::Error {
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

fn resource<K: Resource<DynamicType = ()>>() -> String {
    let (plural, group) = (K::plural(&()), K::group(&()));
    if group.is_empty() {
        plural.into_owned()
    } else {
        format!("{plural}.{group}")
    }
}

/// Shows on a terminal how many objects have been listed.
pub struct ListProgress {
    kind: String,
    start: Instant,
    shown: bool,
    terminal: bool,
}

impl ListProgress {
    /// Starts the clock. Nothing is shown in the first second, or if standard error is not a terminal.
    pub fn new() -> Self {
        ListProgress {
            kind: String::new(),
            start: Instant::now(),
            shown: false,
            terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Sets the kind of the objects that are listed next.
    pub fn begin(&mut self, kind: &str) {
        kind.clone_into(&mut self.kind);
    }

    /// Shows that `count` objects of this kind have been listed so far.
    pub fn tell(&mut self, count: usize) {
        if self.terminal && self.start.elapsed() > PATIENCE {
            self.shown = true;
            eprint!("\r\x1b[K{} {}...", count, self.kind);
            let _ = std::io::stderr().flush();
        }
    }
}

impl Default for ListProgress {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for ListProgress {
    fn drop(&mut self) {
        if self.shown {
            eprint!("\r\x1b[K");
        }
    }
}
