//! Lists the objects of a kind. Each object is parsed when it arrives.
//!
//! Neither the text of a page nor its objects are ever in memory all at once. For example, the text of 5,000
//! NodeSubnets takes over 100 MB, and decisions need only a few percent of it.
//!
//! # Guarantees
//! - All pages show the same state of the API server. If that is not possible, the list fails
//!   ([`ListError::is_expired`]) and has to be started again.
//! - An API server that stops responding ends the list ([`ListError::Silent`]).

mod scanner;

use std::fmt::Debug;
use std::pin::Pin;
use std::time::Duration;

use futures::{AsyncBufRead, AsyncBufReadExt as _};
use kube::Api;
use kube::api::ListParams;
use kube::core::Request;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::time::timeout;

use scanner::{Part, Scanner};

/// Why a list is incomplete.
#[derive(Debug, Error)]
pub enum ListError {
    /// The API server rejected the request, or the connection broke.
    #[error(transparent)]
    Api(#[from] kube::Error),
    /// The API server has sent nothing for this long.
    #[error("the API server said nothing for {} s", .0.as_secs_f32())]
    Silent(Duration),
    /// The response is not a list in JSON.
    #[error("the API server's answer cannot be read: {0}")]
    Unreadable(String),
    /// The pages of the list show different states.
    #[error("the API server's state of a moment ago is gone: the list begins again")]
    Moved,
}

impl ListError {
    /// Whether the list failed because the API server no longer has the listed state. If so, a new list has to be
    /// started.
    pub(crate) fn is_expired(&self) -> bool {
        match self {
            ListError::Api(kube::Error::Api(status)) => status.code == 410,
            ListError::Moved => true,
            _ => false,
        }
    }
}

/// The maximum number of attempts to read a list whose state expires before all its pages have arrived.
const TRIES: u32 = 3;

/// Lists all objects of a kind in pages of `page` objects. Keeps only what `read` returns for each object. Fails if the
/// API server sends nothing for the time `patience`.
pub async fn all<K, T>(
    api: &Api<K>,
    page: u32,
    patience: Duration,
    read: impl Fn(K) -> T,
) -> Result<Vec<T>, ListError>
where
    K: kube::Resource + DeserializeOwned + Clone + Debug,
{
    let mut tries = 1;
    loop {
        match once(api, page, patience, &read).await {
            Err(error) if error.is_expired() && tries < TRIES => tries += 1,
            other => return other,
        }
    }
}

async fn once<K, T>(
    api: &Api<K>,
    page: u32,
    patience: Duration,
    read: &impl Fn(K) -> T,
) -> Result<Vec<T>, ListError>
where
    K: kube::Resource + DeserializeOwned + Clone + Debug,
{
    let mut list = PagedList::new(api.clone(), ListParams::default().limit(page), patience);
    let mut objects = Vec::new();
    while let Some(object) = list.next().await? {
        objects.push(read(object));
    }
    Ok(objects)
}

/// A list that is being read page by page.
pub struct PagedList<K> {
    api: Api<K>,
    params: ListParams,
    patience: Duration,
    page: Option<Page>,
    version: Option<String>,
    is_over: bool,
}

struct Page {
    body: Pin<Box<dyn AsyncBufRead + Send>>,
    scanner: Scanner,
    metadata: Metadata,
    /// Whether the end of `body` has been reached
    is_read: bool,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    resource_version: String,
    #[serde(rename = "continue")]
    next: String,
}

impl<K: kube::Resource + DeserializeOwned + Clone + Debug> PagedList<K> {
    /// Lists the objects that `params` selects, in pages of the size that `params` sets. The list fails if the API
    /// server sends nothing for the time `patience`.
    pub fn new(api: Api<K>, params: ListParams, patience: Duration) -> Self {
        PagedList {
            api,
            params,
            patience,
            page: None,
            version: None,
            is_over: false,
        }
    }

    /// Returns the next object, or `None` at the end of the last page.
    pub async fn next(&mut self) -> Result<Option<K>, ListError> {
        loop {
            let page = match &mut self.page {
                Some(page) => page,
                None if self.is_over => return Ok(None),
                none => none.insert(request(&self.api, &self.params, self.patience).await?),
            };
            match page.scanner.next()? {
                Some(Part::Item(object)) => return Ok(Some(object)),
                Some(Part::Metadata(metadata)) => page.metadata = metadata,
                None if page.is_read => self.end_page()?,
                None => {
                    let read = timeout(self.patience, page.body.fill_buf());
                    let read = read.await.map_err(|_| ListError::Silent(self.patience))?;
                    let bytes = read.map_err(|error| ListError::Unreadable(error.to_string()))?;
                    page.scanner.push(bytes)?;
                    let count = bytes.len();
                    page.is_read = count == 0;
                    page.body.as_mut().consume(count);
                }
            }
        }
    }

    /// Returns the resource version of the listed state; `None` before the end of the last page.
    pub fn version(self) -> Option<String> {
        self.version.filter(|_| self.is_over)
    }

    /// Checks a complete page, and prepares the request for the next one.
    fn end_page(&mut self) -> Result<(), ListError> {
        let Some(page) = self.page.take() else {
            return Ok(());
        };
        let metadata = page.metadata;
        if !page.scanner.is_over() {
            return Err(ListError::Unreadable("it ends early".to_owned()));
        }
        let version = metadata.resource_version;
        if version.is_empty() {
            let why = "it has no resourceVersion".to_owned();
            return Err(ListError::Unreadable(why));
        }
        if self.version.as_ref().is_some_and(|first| *first != version) {
            return Err(ListError::Moved);
        }
        self.version = Some(version);
        self.is_over = metadata.next.is_empty();
        self.params.continue_token = Some(metadata.next).filter(|next| !next.is_empty());
        Ok(())
    }
}

/// Requests a page. [`PagedList::next`] reads the page's text.
async fn request<K: kube::Resource + Clone>(
    api: &Api<K>,
    params: &ListParams,
    patience: Duration,
) -> Result<Page, ListError> {
    let request = Request::new(api.resource_url()).list(params);
    let mut request = request.map_err(kube::Error::BuildRequest)?;
    request.extensions_mut().insert("list");
    let client = api.clone().into_client();
    let answer = timeout(patience, client.request_stream(request)).await;
    let body = answer.map_err(|_| ListError::Silent(patience))??;
    Ok(Page {
        body: Box::pin(body),
        scanner: Scanner::default(),
        metadata: Metadata::default(),
        is_read: false,
    })
}
