//! A Node and a Pod as a real kube-apiserver sends them, from which others are made.

use anyhow::{Context as _, Result, ensure};
use http::Request;
use http::header::ACCEPT;
use http_body_util::BodyExt as _;
use kube::Client;
use kube::client::Body;
use prost::Message;
use serde_json::Value;

use crate::raw::PROTOBUF;

/// The beginning of an answer in protobuf
pub(super) const MAGIC: &[u8] = b"k8s\0";

/// A Node and a Pod in both encodings.
#[derive(Clone, Debug)]
pub struct Recorded {
    pub(super) node: ObjectMessage,
    pub(super) node_in_json: Value,
    pub(super) pod: ObjectMessage,
}

/// A Node or a Pod whose three parts are not decoded. A field that is appended to a part replaces an earlier one, or is
/// added to a list.
#[derive(Clone, Message)]
pub(super) struct ObjectMessage {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) metadata: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) spec: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) status: Vec<u8>,
}

/// The envelope of an answer
#[derive(Clone, Message)]
pub(super) struct Envelope {
    #[prost(bytes = "vec", optional, tag = "1")]
    pub(super) type_meta: Option<Vec<u8>>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) raw: Vec<u8>,
}

impl Recorded {
    /// Reads a Node and a Pod of the namespace `default` from a real API server. The Node must have no podCIDRs, and the
    /// Pod no addresses.
    pub async fn read(client: &Client, node: &str, pod: &str) -> Result<Self> {
        let node = format!("/api/v1/nodes/{node}");
        let pod = format!("/api/v1/namespaces/default/pods/{pod}");
        Ok(Recorded {
            node: message(client, &node).await?,
            node_in_json: client
                .request(Request::get(&node).body(Vec::new())?)
                .await?,
            pod: message(client, &pod).await?,
        })
    }
}

async fn message(client: &Client, path: &str) -> Result<ObjectMessage> {
    let request = Request::get(path).header(ACCEPT, PROTOBUF);
    let answer = client.send(request.body(Body::empty())?).await?;
    ensure!(answer.status().is_success(), "{path}: {}", answer.status());
    let body = answer.into_body().collect().await?.to_bytes();
    let body = body.strip_prefix(MAGIC).context("not in protobuf")?;
    Ok(ObjectMessage::decode(&*Envelope::decode(body)?.raw)?)
}
