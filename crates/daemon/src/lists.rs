//! Lists, read object by object as they arrive.
//!
//! Neither a page nor its text is ever in memory as a whole: 5,000 NodeSubnets are over 100 MB as text,
//! and decisions need a few percent of that.
//!
//! # Guarantees
//! - All pages are of one state of the API server; where that cannot be had, the list fails
//!   ([`Error::is_expired`]) and has to begin again.
//! - An API server that falls silent ends the list ([`Error::Silent`]).

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

/// Why a list is not complete.
#[derive(Debug, Error)]
pub enum Error {
    /// It was refused, or cut off.
    #[error(transparent)]
    Api(#[from] kube::Error),
    /// Nothing came for that long.
    #[error("the API server said nothing for {} s", .0.as_secs_f32())]
    Silent(Duration),
    /// It is not what a list looks like.
    #[error("the API server's answer cannot be read: {0}")]
    Unreadable(String),
    /// Its pages are of different states.
    #[error("the API server's state of a moment ago is gone: the list begins again")]
    Moved,
}

impl Error {
    /// Whether the state that was being listed is no longer there: it has to be listed anew.
    pub(crate) fn is_expired(&self) -> bool {
        match self {
            Error::Api(kube::Error::Api(status)) => status.code == 410,
            Error::Moved => true,
            _ => false,
        }
    }
}

/// How often a list begins again whose state is gone before all its pages came.
const TRIES: u32 = 3;

/// All objects of a kind in the few fields that `read` takes of each, in pages of so many; each object is
/// forgotten before the next one is read.
pub async fn all<K, T>(
    api: &Api<K>,
    page: u32,
    patience: Duration,
    read: impl Fn(K) -> T,
) -> Result<Vec<T>, Error>
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
) -> Result<Vec<T>, Error>
where
    K: kube::Resource + DeserializeOwned + Clone + Debug,
{
    let mut list = List::new(api.clone(), ListParams::default().limit(page), patience);
    let mut objects = Vec::new();
    while let Some(object) = list.next().await? {
        objects.push(read(object));
    }
    Ok(objects)
}

/// A list that is being read.
pub struct List<K> {
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
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    resource_version: String,
    #[serde(rename = "continue")]
    next: String,
}

impl<K: kube::Resource + DeserializeOwned + Clone + Debug> List<K> {
    /// Of what `params` select, in pages as large as they say. `patience`: for how long the API server
    /// may say nothing.
    pub fn new(api: Api<K>, params: ListParams, patience: Duration) -> Self {
        List {
            api,
            params,
            patience,
            page: None,
            version: None,
            is_over: false,
        }
    }

    /// The next object, or nothing at the end of the last page.
    pub async fn next(&mut self) -> Result<Option<K>, Error> {
        loop {
            let page = match &mut self.page {
                Some(page) => page,
                None if self.is_over => return Ok(None),
                none => none.insert(ask(&self.api, &self.params, self.patience).await?),
            };
            let read = timeout(self.patience, page.body.fill_buf());
            let read = read.await.map_err(|_| Error::Silent(self.patience))?;
            let bytes = read.map_err(|error| Error::Unreadable(error.to_string()))?;
            if bytes.is_empty() {
                self.turn()?;
                continue;
            }
            let (used, part) = page.scanner.feed(bytes)?;
            page.body.as_mut().consume(used);
            let text = page.scanner.text();
            match part {
                Some(Part::Item) => {
                    return serde_json::from_slice(text).map(Some).map_err(unreadable);
                }
                Some(Part::Metadata) => {
                    page.metadata = serde_json::from_slice(text).map_err(unreadable)?;
                }
                None => {}
            }
        }
    }

    /// The state that was listed, once all of it has been read.
    pub fn version(self) -> Option<String> {
        self.version.filter(|_| self.is_over)
    }

    /// A page has been read.
    fn turn(&mut self) -> Result<(), Error> {
        let Some(Page {
            scanner, metadata, ..
        }) = self.page.take()
        else {
            return Ok(());
        };
        if !scanner.is_over() {
            return Err(Error::Unreadable("it ends early".to_owned()));
        }
        let version = metadata.resource_version;
        if version.is_empty() {
            return Err(Error::Unreadable("it has no resourceVersion".to_owned()));
        }
        if self.version.as_ref().is_some_and(|first| *first != version) {
            return Err(Error::Moved);
        }
        self.version = Some(version);
        self.is_over = metadata.next.is_empty();
        self.params.continue_token = Some(metadata.next).filter(|next| !next.is_empty());
        Ok(())
    }
}

async fn ask<K: kube::Resource + Clone>(
    api: &Api<K>,
    params: &ListParams,
    patience: Duration,
) -> Result<Page, Error> {
    let request = Request::new(api.resource_url()).list(params);
    let mut request = request.map_err(kube::Error::BuildRequest)?;
    request.extensions_mut().insert("list");
    let client = api.clone().into_client();
    let asked = timeout(patience, client.request_stream(request)).await;
    let body = asked.map_err(|_| Error::Silent(patience))??;
    Ok(Page {
        body: Box::pin(body),
        scanner: Scanner::default(),
        metadata: Metadata::default(),
    })
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn unreadable(error: serde_json::Error) -> Error {
    Error::Unreadable(error.to_string())
}
