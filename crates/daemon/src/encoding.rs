//! How the API server encodes the objects that it sends.
//!
//! For its own kinds, such as Nodes and Pods, the API server can encode objects as protobuf. That costs it and its
//! client far less than JSON does. For kinds of CRDs there is only JSON.
//!
//! An answer is the text `k8s` and a zero byte, and then an *envelope*: a message (`Unknown` of
//! k8s.io/apimachinery/pkg/runtime) whose field 2 is the encoded object. A watch sends frames, each with its length in
//! front. A frame is a message with the type of the event and such an answer.

use std::io;

use futures::{Stream, StreamExt as _, TryStreamExt as _};
use http::header::{ACCEPT, CONTENT_TYPE, HeaderMap};
use http::{HeaderValue, Request, Response};
use http_body_util::BodyExt as _;
use kube::api::WatchEvent;
use kube::client::Body;
use kube::core::watch::{Bookmark, BookmarkMeta};
use kube::core::{Status, TypeMeta};
use kube::{Client, Error};
use prost::{DecodeError, Message};
use serde::de::Error as _;
use tokio_util::codec::LengthDelimitedCodec;
use tokio_util::io::StreamReader;

/// The media type of protobuf
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
/// The answers to a list that is wanted as protobuf. Servers that cannot encode protobuf answer in JSON.
const PROTOBUF_OR_JSON: HeaderValue =
    HeaderValue::from_static("application/vnd.kubernetes.protobuf, application/json");
const PROTOBUF_EVENTS: HeaderValue =
    HeaderValue::from_static("application/vnd.kubernetes.protobuf;stream=watch");

/// The beginning of an answer in protobuf.
pub(crate) const MAGIC: [u8; 4] = *b"k8s\0";

/// The maximum size of an object in bytes. The limit is over ten times the size of any object that API servers store.
pub(crate) const LONGEST: usize = 32 << 20;

/// Reads an object from its protobuf message.
pub type Decode<K> = fn(&[u8]) -> Result<K, DecodeError>;

/// How the objects of a kind are to be encoded in lists and watches.
#[derive(Debug)]
pub enum Encoding<K> {
    /// JSON, which exists for every kind
    Json,
    /// Protobuf, which exists for the API server's own kinds. If a server answers a list in JSON all the same, the list
    /// is read as JSON.
    Protobuf(Decode<K>),
}

// Derived, these would demand that objects can be copied.
impl<K> Clone for Encoding<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Encoding<K> {}

/// Returns how the body of a response with these headers is encoded, if `wanted` was requested.
pub(crate) fn of_response<K>(headers: &HeaderMap, wanted: Encoding<K>) -> Encoding<K> {
    let media_type = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    if media_type.is_some_and(|it| it.starts_with(PROTOBUF.as_bytes())) {
        wanted
    } else {
        Encoding::Json
    }
}

/// Sends the request of a list. Fails if the response is an error.
pub(crate) async fn list<K>(
    client: &Client,
    mut request: Request<Vec<u8>>,
    wanted: Encoding<K>,
) -> Result<Response<Body>, Error> {
    if let Encoding::Protobuf(_) = wanted {
        request.headers_mut().insert(ACCEPT, PROTOBUF_OR_JSON);
    }
    send(client, request).await
}

/// Sends the request of a watch, and returns the events of the response; `None` if the response is not in protobuf.
pub(crate) async fn watch<K: kube::Resource>(
    client: &Client,
    mut request: Request<Vec<u8>>,
    decode: Decode<K>,
) -> Result<Option<impl Stream<Item = Result<WatchEvent<K>, Error>> + use<K>>, Error> {
    request.headers_mut().insert(ACCEPT, PROTOBUF_EVENTS);
    let response = send(client, request).await?;
    if let Encoding::Json = of_response(response.headers(), Encoding::Protobuf(decode)) {
        return Ok(None);
    }
    let bytes = response.into_body().into_data_stream();
    let bytes = StreamReader::new(bytes.map_err(io::Error::other));
    let frames = LengthDelimitedCodec::builder()
        .max_frame_length(LONGEST)
        .new_read(bytes);
    Ok(Some(frames.map(move |frame| {
        event(&frame.map_err(Error::ReadEvents)?, decode)
    })))
}

/// Sends a request. If the response is an error, returns it with the API server's message.
async fn send(client: &Client, request: Request<Vec<u8>>) -> Result<Response<Body>, Error> {
    let response = client.send(request.map(Body::from)).await?;
    let code = response.status();
    if !code.is_client_error() && !code.is_server_error() {
        return Ok(response);
    }
    let body = response.into_body().collect_bytes().await?;
    let status = read_status(&body).unwrap_or_else(|| {
        let text = String::from_utf8_lossy(&body);
        Status::failure(text.trim(), "").with_code(code.as_u16())
    });
    Err(Error::Api(status.boxed()))
}

fn read_status(body: &[u8]) -> Option<Status> {
    match open(body) {
        Some(message) => StatusMessage::decode(&*message)
            .ok()
            .map(StatusMessage::read),
        None => serde_json::from_slice(body).ok(),
    }
}

/// Reads an event of a watch. An object that cannot be read is an [`Error::SerdeError`], so that the watch can continue
/// with the next event.
fn event<K: kube::Resource>(frame: &[u8], decode: Decode<K>) -> Result<WatchEvent<K>, Error> {
    let event = EventMessage::decode(frame).map_err(unreadable)?;
    let object = event.object.and_then(|it| open(&it.raw));
    let object = object.ok_or_else(|| unreadable("an event without an object"))?;
    if event.r#type == "ERROR" {
        let status = StatusMessage::decode(&*object).map_err(unreadable)?;
        return Ok(WatchEvent::Error(status.read().boxed()));
    }
    let object = decode(&object).map_err(unreadable)?;
    match &*event.r#type {
        "ADDED" => Ok(WatchEvent::Added(object)),
        "MODIFIED" => Ok(WatchEvent::Modified(object)),
        "DELETED" => Ok(WatchEvent::Deleted(object)),
        "BOOKMARK" => Ok(WatchEvent::Bookmark(Bookmark {
            types: TypeMeta::default(),
            metadata: BookmarkMeta {
                resource_version: object.meta().resource_version.clone().unwrap_or_default(),
                annotations: object.meta().annotations.clone().unwrap_or_default(),
            },
        })),
        other => Err(unreadable(format!("an event of the unknown type {other}"))),
    }
}

fn unreadable(why: impl std::fmt::Display) -> Error {
    Error::SerdeError(serde_json::Error::custom(why))
}

/// Returns the message in the envelope of an answer; `None` if the answer is not in protobuf.
fn open(answer: &[u8]) -> Option<Vec<u8>> {
    let envelope = answer.strip_prefix(&MAGIC)?;
    EnvelopeMessage::decode(envelope).ok()?.raw
}

#[derive(Message)]
struct EnvelopeMessage {
    #[prost(bytes = "vec", optional, tag = "2")]
    raw: Option<Vec<u8>>,
}

/// `WatchEvent` of k8s.io/apimachinery/pkg/apis/meta/v1
#[derive(Message)]
struct EventMessage {
    #[prost(string, tag = "1")]
    r#type: String,
    #[prost(message, optional, tag = "2")]
    object: Option<RawMessage>,
}

#[derive(Message)]
struct RawMessage {
    #[prost(bytes = "vec", tag = "1")]
    raw: Vec<u8>,
}

/// `Status` of k8s.io/apimachinery/pkg/apis/meta/v1
#[derive(Message)]
struct StatusMessage {
    #[prost(bytes = "vec", tag = "3")]
    message: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    reason: Vec<u8>,
    #[prost(int32, tag = "6")]
    code: i32,
}

impl StatusMessage {
    fn read(self) -> Status {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let code = u16::try_from(self.code).unwrap_or_default();
        Status::failure(&text(&self.message), &text(&self.reason)).with_code(code)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use cadastre_api::NodeLite;
    use cadastre_api::watched::protobuf;
    use kube::ResourceExt as _;

    use super::*;

    /// A Node with the fields that tests use
    #[derive(Message)]
    struct NodeMessage {
        #[prost(message, optional, tag = "1")]
        metadata: Option<MetaMessage>,
    }

    #[derive(Message)]
    struct MetaMessage {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(string, tag = "6")]
        resource_version: String,
    }

    #[derive(Message)]
    struct NodeListMessage {
        #[prost(message, optional, tag = "1")]
        metadata: Option<ListMetaMessage>,
        #[prost(message, repeated, tag = "2")]
        items: Vec<NodeMessage>,
    }

    #[derive(Message)]
    struct ListMetaMessage {
        #[prost(string, tag = "2")]
        resource_version: String,
        #[prost(string, tag = "3")]
        next: String,
    }

    fn seal(message: &impl Message) -> Vec<u8> {
        let raw = Some(message.encode_to_vec());
        [&MAGIC[..], &EnvelopeMessage { raw }.encode_to_vec()].concat()
    }

    fn node(name: &str, version: u32) -> NodeMessage {
        NodeMessage {
            metadata: Some(MetaMessage {
                name: name.to_owned(),
                resource_version: version.to_string(),
            }),
        }
    }

    /// Returns a list of Nodes as an API server sends it.
    pub(crate) fn sealed_list(names: &[&str], version: u32, next: &str) -> Vec<u8> {
        let metadata = ListMetaMessage {
            resource_version: version.to_string(),
            next: next.to_owned(),
        };
        seal(&NodeListMessage {
            metadata: Some(metadata),
            items: names.iter().map(|name| node(name, 1)).collect(),
        })
    }

    /// Returns a frame with a Node as an API server sends it in a watch.
    pub(crate) fn framed_event(kind: &str, name: &str, version: u32) -> Vec<u8> {
        framed(kind, seal(&node(name, version)))
    }

    /// Returns a frame with an error as an API server sends it in a watch.
    pub(crate) fn framed_error(code: u16) -> Vec<u8> {
        framed("ERROR", sealed_status(code))
    }

    /// Returns an error as an API server sends it.
    pub(crate) fn sealed_status(code: u16) -> Vec<u8> {
        seal(&StatusMessage {
            message: b"too \xff old".to_vec(),
            reason: b"Expired".to_vec(),
            code: code.into(),
        })
    }

    /// Returns a frame with an event whose object is `raw`.
    pub(crate) fn framed(kind: &str, raw: Vec<u8>) -> Vec<u8> {
        let event = EventMessage {
            r#type: kind.to_owned(),
            object: Some(RawMessage { raw }),
        };
        let event = event.encode_to_vec();
        let length = u32::try_from(event.len()).unwrap().to_be_bytes();
        [&length[..], &event].concat()
    }

    #[test]
    fn an_error_is_read_in_either_encoding() {
        let read = |body: &[u8]| read_status(body).map(|it| (it.code, it.message, it.reason));
        let of = |message: &str| Some((410, message.to_owned(), "Expired".to_owned()));
        assert_eq!(read(&sealed_status(410)), of("too \u{fffd} old"));
        let json = br#"{"kind": "Status", "code": 410, "message": "old", "reason": "Expired"}"#;
        assert_eq!(read(json), of("old"));
        assert_eq!(read(b"<html>"), None);
    }

    #[test]
    fn an_event_that_cannot_be_read_does_not_end_the_watch() {
        let read = |frame: &[u8]| event::<NodeLite>(&frame[4..], protobuf::node);
        let added = read(&framed_event("ADDED", "a", 7)).unwrap();
        assert!(matches!(added, WatchEvent::Added(node) if node.name_any() == "a"));
        let broken = [
            framed_event("MOVED", "a", 7),
            framed("ADDED", b"{}".to_vec()),
            framed("ADDED", [&MAGIC[..], &[0x12, 2, 0xff, 0xff]].concat()),
            framed("ERROR", Vec::new()),
            [&[0; 4][..], &[0xff; 9]].concat(),
        ];
        for frame in broken {
            assert!(
                matches!(read(&frame), Err(Error::SerdeError(_))),
                "{frame:?}"
            );
        }
    }
}
