//! Lists the objects of a kind. Each object is parsed when it arrives.
//!
//! Neither the text of a page nor its objects are ever in memory all at once. For example, the text of 5,000
//! NodeSubnets takes over 100 MB, and decisions need only a few percent of it.
//!
//! A page begins with the token of the next page. The next page is requested at once, so that the API server prepares it
//! while the present page is parsed.
//!
//! # Guarantees
//! - All pages show the same state of the API server. If that is not possible, the list fails
//!   ([`ListError::is_expired`]) and has to be started again.
//! - An API server that stops responding ends the list ([`ListError::Silent`]).

mod json;
mod protobuf;

use std::fmt::Debug;
use std::pin::Pin;
use std::time::Duration;

use futures::{AsyncBufRead, AsyncBufReadExt as _, TryStreamExt as _};
use http_body_util::BodyExt as _;
use kube::Api;
use kube::api::ListParams;
use kube::core::Request;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::encoding::{self, Decode, Encoding};

/// Why a list is incomplete.
#[derive(Debug, Error)]
pub enum ListError {
    /// The API server rejected the request, or the connection broke.
    #[error(transparent)]
    Api(#[from] kube::Error),
    /// The API server has sent nothing for this long.
    #[error("the API server said nothing for {} s", .0.as_secs_f32())]
    Silent(Duration),
    /// The response is not a list.
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
    encoding: Encoding<K>,
    page: u32,
    patience: Duration,
    read: impl Fn(K) -> T,
) -> Result<Vec<T>, ListError>
where
    K: kube::Resource + DeserializeOwned + Clone + Debug + Send + 'static,
{
    let mut tries = 1;
    loop {
        match once(api, encoding, page, patience, &read).await {
            Err(error) if error.is_expired() && tries < TRIES => tries += 1,
            other => return other,
        }
    }
}

async fn once<K, T>(
    api: &Api<K>,
    encoding: Encoding<K>,
    page: u32,
    patience: Duration,
    read: &impl Fn(K) -> T,
) -> Result<Vec<T>, ListError>
where
    K: kube::Resource + DeserializeOwned + Clone + Debug + Send + 'static,
{
    let params = ListParams::default().limit(page);
    let mut list = PagedList::new(api.clone(), encoding, params, patience);
    let mut objects = Vec::new();
    while let Some(object) = list.next().await? {
        objects.push(read(object));
    }
    Ok(objects)
}

/// A list that is being read page by page.
pub struct PagedList<K> {
    api: Api<K>,
    /// How the answers are to be encoded; once a page has arrived, how it was encoded
    encoding: Encoding<K>,
    params: ListParams,
    patience: Duration,
    page: Option<Page<K>>,
    /// The request for the page after `page`; at most one
    next_page: JoinSet<Result<Page<K>, ListError>>,
    version: Option<String>,
    is_over: bool,
}

struct Page<K> {
    encoding: Encoding<K>,
    body: Pin<Box<dyn AsyncBufRead + Send>>,
    scanner: Scanner<K>,
    metadata: Metadata,
    /// Whether the end of `body` has been reached
    is_read: bool,
}

/// Splits the body of a page into its parts.
enum Scanner<K> {
    Json(json::Scanner),
    Protobuf(protobuf::Scanner, Decode<K>),
}

/// A part of a list that has arrived completely.
#[derive(Debug)]
enum Part<K, M> {
    Item(K),
    Metadata(M),
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    resource_version: String,
    #[serde(rename = "continue")]
    next: String,
}

impl<K> PagedList<K>
where
    K: kube::Resource + DeserializeOwned + Clone + Debug + Send + 'static,
{
    /// Lists the objects that `params` selects, in pages of the size that `params` sets. The list fails if the API
    /// server sends nothing for the time `patience`.
    pub fn new(api: Api<K>, encoding: Encoding<K>, params: ListParams, patience: Duration) -> Self {
        PagedList {
            api,
            encoding,
            params,
            patience,
            page: None,
            next_page: JoinSet::new(),
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
                None => {
                    if self.next_page.is_empty() {
                        self.request_page();
                    }
                    let Some(page) = self.next_page.join_next().await else {
                        continue;
                    };
                    let page = page.map_err(|error| ListError::Unreadable(error.to_string()))??;
                    self.encoding = page.encoding;
                    self.page.insert(page)
                }
            };
            match page.scanner.next()? {
                Some(Part::Item(object)) => return Ok(Some(object)),
                Some(Part::Metadata(metadata)) => {
                    let next = Some(&metadata.next).filter(|next| !next.is_empty());
                    self.params.continue_token = next.cloned();
                    page.metadata = metadata;
                    if self.params.continue_token.is_some() && self.next_page.is_empty() {
                        self.request_page();
                    }
                }
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

    /// Requests the page that `params` selects.
    fn request_page(&mut self) {
        let page = request(
            self.api.clone(),
            self.encoding,
            self.params.clone(),
            self.patience,
        );
        self.next_page.spawn(page);
    }

    /// Returns the resource version of the listed state; `None` before the end of the last page.
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref().filter(|_| self.is_over)
    }

    /// Returns how the API server encodes the objects.
    pub fn encoding(&self) -> Encoding<K> {
        self.encoding
    }

    /// Checks a complete page.
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
        Ok(())
    }
}

/// Requests a page. [`PagedList::next`] reads its body.
async fn request<K>(
    api: Api<K>,
    encoding: Encoding<K>,
    params: ListParams,
    patience: Duration,
) -> Result<Page<K>, ListError>
where
    K: kube::Resource + DeserializeOwned + Clone + Debug,
{
    let request = Request::new(api.resource_url()).list(&params);
    let mut request = request.map_err(kube::Error::BuildRequest)?;
    request.extensions_mut().insert("list");
    let client = api.into_client();
    let answer = timeout(patience, encoding::list(&client, request, encoding)).await;
    let answer = answer.map_err(|_| ListError::Silent(patience))??;
    let encoding = encoding::of_response(answer.headers(), encoding);
    let body = answer.into_body().into_data_stream();
    Ok(Page {
        encoding,
        body: Box::pin(body.map_err(std::io::Error::other).into_async_read()),
        scanner: Scanner::of(encoding),
        metadata: Metadata::default(),
        is_read: false,
    })
}

impl<K: DeserializeOwned> Scanner<K> {
    fn of(encoding: Encoding<K>) -> Self {
        match encoding {
            Encoding::Json => Scanner::Json(json::Scanner::default()),
            Encoding::Protobuf(decode) => Scanner::Protobuf(protobuf::Scanner::default(), decode),
        }
    }

    /// Adds bytes that have arrived. No bytes mean that the end of the input is reached.
    fn push(&mut self, bytes: &[u8]) -> Result<(), ListError> {
        match self {
            Scanner::Json(scanner) => scanner.push(bytes),
            Scanner::Protobuf(scanner, _) => {
                scanner.push(bytes);
                Ok(())
            }
        }
    }

    /// Returns the next part; `None` if more bytes are needed.
    fn next(&mut self) -> Result<Option<Part<K, Metadata>>, ListError> {
        match self {
            Scanner::Json(scanner) => scanner.next(),
            Scanner::Protobuf(scanner, decode) => scanner.next(*decode),
        }
    }

    /// Whether the list is complete.
    fn is_over(&self) -> bool {
        match self {
            Scanner::Json(scanner) => scanner.is_over(),
            Scanner::Protobuf(scanner, _) => scanner.is_over(),
        }
    }
}
