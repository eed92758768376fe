//! Reaching the API server: the one place of the plugin with IO towards it.
//!
//! Lists are paged and consistent (never from a cache that may be behind), every call has a timeout,
//! and each error says what to do.

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
use super::lists::{Lists, Readable, Wanted};
use cadastre_api::{LEASE_NAME, NodeAddressesLite, NodeSubnetLite};
use cadastre_daemon::client;

/// Who writes the annotations.
const MANAGER: &str = "kubectl-cadastre";
/// Lists that expire between two pages are begun anew so often.
const TRIES: usize = 3;
/// Work that takes longer says how far it is.
const PATIENCE: Duration = Duration::from_secs(1);

/// The API server, with the limits of one command.
#[derive(Clone)]
pub struct Reach {
    /// For what is not here
    pub client: Client,
    /// The namespace of pods that are named without one
    pub namespace: String,
    timeout: Duration,
    page: Option<u32>,
}

/// What became of a guarded write.
#[derive(Debug, PartialEq, Eq)]
pub enum Written {
    /// It took effect.
    Done,
    /// The object is another version by now.
    Changed,
}

impl Reach {
    /// By the kubeconfig and context of the flags. Nothing is asked yet.
    pub async fn new(flags: &Flags) -> anyhow::Result<Self> {
        let options = client::Options {
            kubeconfig: flags.kubeconfig.clone(),
            context: flags.context.clone(),
            rate: None,
        };
        Self::of(client::configure(&options).await?, flags)
    }

    /// By that configuration of a cluster.
    pub(crate) fn of(mut config: kube::Config, flags: &Flags) -> anyhow::Result<Self> {
        if flags.impersonate.is_some() {
            config.auth_info.impersonate.clone_from(&flags.impersonate);
        }
        let namespace = flags.namespace.clone();
        let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
        Ok(Reach {
            client: Client::try_from(config)
                .context("the cluster's configuration cannot be used")?,
            namespace,
            timeout: flags.timeout(),
            page: Some(flags.chunk_size).filter(|page| *page > 0),
        })
    }

    /// Lists what a verb needs and puts it in order.
    pub(crate) async fn inventory(&self, wanted: Wanted) -> anyhow::Result<Inventory> {
        Ok(Inventory::new(&self.lists(wanted).await?, Timestamp::now()))
    }

    /// Lists what a verb needs.
    ///
    /// Holders first, pods last: a pod that comes meanwhile is seen, one that goes meanwhile is gone.
    pub async fn lists(&self, wanted: Wanted) -> anyhow::Result<Lists> {
        let mut progress = Progress::new();
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
        let mut lists = Lists {
            nodes,
            pools,
            subnets,
            addresses,
            blocks,
            services,
            ..Lists::default()
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

    /// Servers before 1.33 have no ServiceCIDRs.
    async fn services(
        &self,
        progress: &mut Progress,
    ) -> anyhow::Result<Vec<k8s_openapi::api::networking::v1::ServiceCIDR>> {
        let api = Api::all(self.client.clone());
        match self.pages(&api, progress).await {
            Err(Trouble::Api(404, _)) => Ok(Vec::new()),
            other => other.map_err(|trouble| trouble.told("servicecidrs.networking.k8s.io")),
        }
    }

    /// Of the controller, in whatever namespace it is.
    async fn leases(&self) -> Readable<Lease> {
        let named = ListParams::default().fields(&format!("metadata.name={LEASE_NAME}"));
        self.few(&Api::all(self.client.clone()), &named).await
    }

    /// Controllers and agents that run as pods of the chart.
    async fn parts(&self) -> Readable<Pod> {
        let ours = ListParams::default().labels("app.kubernetes.io/name=cadastre");
        self.few(&Api::all(self.client.clone()), &ours).await
    }

    async fn few<K>(&self, api: &Api<K>, params: &ListParams) -> Readable<K>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let listed = self.call(api.list(params)).await.map(|it| it.items);
        listed.map_err(|trouble| trouble.told(&resource::<K>()).to_string())
    }

    async fn namespaces(
        &self,
        progress: &mut Progress,
    ) -> anyhow::Result<Vec<kube::core::PartialObjectMeta<k8s_openapi::api::core::v1::Namespace>>>
    {
        let api: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(self.client.clone());
        progress.begin("namespaces");
        let listed = self.call(api.list_metadata(&ListParams::default())).await;
        Ok(listed.map_err(|trouble| trouble.told("namespaces"))?.items)
    }

    /// All objects of a kind.
    async fn list<K>(&self, api: &Api<K>, progress: &mut Progress) -> anyhow::Result<Vec<K>>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let kind = resource::<K>();
        let listed = self.pages(api, progress).await;
        listed.map_err(|trouble| trouble.told(&kind))
    }

    async fn pages<K>(&self, api: &Api<K>, progress: &mut Progress) -> Result<Vec<K>, Trouble>
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
                    // The list is too old to go on with.
                    Err(Trouble::Api(410, _)) if tries < TRIES => continue 'anew,
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

    /// One NodeSubnet as it is now, by a consistent read.
    pub async fn subnet(&self, name: &str) -> anyhow::Result<Option<NodeSubnetLite>> {
        let api: Api<NodeSubnetLite> = Api::all(self.client.clone());
        let read = self.call(api.get_opt(name)).await;
        read.map_err(|trouble| trouble.told(&resource::<NodeSubnetLite>()))
    }

    /// One NodeAddresses as it is now, by a consistent read.
    pub async fn addresses(&self, name: &str) -> anyhow::Result<Option<NodeAddressesLite>> {
        let api: Api<NodeAddressesLite> = Api::all(self.client.clone());
        let read = self.call(api.get_opt(name)).await;
        read.map_err(|trouble| trouble.told(&resource::<NodeAddressesLite>()))
    }

    /// Sets or removes an annotation of a NodeSubnet if it is still that version.
    pub async fn annotate(
        &self,
        name: &str,
        version: &str,
        annotation: &str,
        value: Option<&str>,
    ) -> anyhow::Result<Written> {
        let api: Api<NodeSubnetLite> = Api::all(self.client.clone());
        let patch = Patch::Merge(json!({"metadata": {
            "resourceVersion": version, "annotations": {annotation: value},
        }}));
        let params = PatchParams {
            field_manager: Some(MANAGER.to_owned()),
            ..PatchParams::default()
        };
        match self.call(api.patch(name, &params, &patch)).await {
            Ok(_) => Ok(Written::Done),
            Err(Trouble::Api(409, _)) => Ok(Written::Changed),
            Err(Trouble::Api(404, _)) => bail!("NodeSubnet {name} is gone: its node has left"),
            Err(Trouble::Api(403, why)) => bail!(
                "no right to patch nodesubnets.cadastre.dev: {why}: ask for the verb \"patch\" on it"
            ),
            Err(trouble) => Err(trouble.told(&resource::<NodeSubnetLite>())),
        }
    }

    /// One call, within the time it may take.
    pub async fn call<T>(
        &self,
        call: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, Trouble> {
        match tokio::time::timeout(self.timeout, call).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(kube::Error::Api(status))) => {
                Err(Trouble::Api(status.code, status.message.clone()))
            }
            Ok(Err(error)) => Err(Trouble::Other(chain(&error))),
            Err(_) => Err(Trouble::Slow(self.timeout)),
        }
    }
}

/// What went wrong with a call.
#[derive(Debug)]
pub enum Trouble {
    /// The API server answered no, with that code.
    Api(u16, String),
    /// It did not answer in time.
    Slow(Duration),
    /// It was not reached, or its answer cannot be read.
    Other(String),
}

impl Trouble {
    /// As an error of the command; `what` names the resource.
    pub fn told(self, what: &str) -> anyhow::Error {
        match self {
            Trouble::Api(404, _) if what.ends_with("cadastre.dev") => anyhow!(
                "the cluster has no {what}: install the CustomResourceDefinitions (cadastre crd | kubectl apply --server-side -f -), or choose another cluster with --context"
            ),
            Trouble::Api(401, why) => anyhow!(
                "the API server does not know who asks ({why}): renew the credentials of this context"
            ),
            Trouble::Api(403, why) => anyhow!(
                "no right to read {what} ({why}): ask for the verbs \"get\" and \"list\" on it"
            ),
            Trouble::Api(code, why) => anyhow!("the API server refuses {what} with {code}: {why}"),
            Trouble::Slow(limit) => anyhow!(
                "the API server did not answer about {what} within {} s: try again, or give it longer with --request-timeout",
                limit.as_secs()
            ),
            Trouble::Other(why) => anyhow!(
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

/// Tells on a terminal how far a long list is.
pub struct Progress {
    kind: String,
    start: Instant,
    shown: bool,
    terminal: bool,
}

impl Progress {
    /// Nothing is told within the first second, and nothing at all where nobody looks.
    pub fn new() -> Self {
        Progress {
            kind: String::new(),
            start: Instant::now(),
            shown: false,
            terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Another kind is being read.
    pub fn begin(&mut self, kind: &str) {
        kind.clone_into(&mut self.kind);
    }

    /// So many of it have come.
    pub fn tell(&mut self, count: usize) {
        if self.terminal && self.start.elapsed() > PATIENCE {
            self.shown = true;
            eprint!("\r\x1b[K{} {}...", count, self.kind);
            let _ = std::io::stderr().flush();
        }
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            eprint!("\r\x1b[K");
        }
    }
}
