//! The HTTP interface of a [`super::StandIn`].

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Query, State};
use futures::stream;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, Method, Response, StatusCode, Uri};
use hyper::body::Bytes;
use prost::Message;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::{Instant, timeout_at};

use super::objects::{NODES, Objects, PODS, Page, PageRequest};
use super::recorded::{Envelope, MAGIC};
use crate::raw::{JSON, MERGE_PATCH, PROTOBUF};

/// How often an idle watch delivers a bookmark
const BOOKMARK: Duration = Duration::from_secs(50);

#[derive(Message)]
struct ListMessage {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ListMeta>,
    #[prost(bytes = "bytes", repeated, tag = "2")]
    items: Vec<Bytes>,
}

#[derive(Message)]
struct ListMeta {
    #[prost(string, tag = "2")]
    resource_version: String,
    #[prost(string, tag = "3")]
    next: String,
}

pub(super) async fn serve(listener: TcpListener, objects: Arc<Objects>) -> io::Result<()> {
    let api = Router::new().fallback(handle).with_state(objects);
    axum::serve(listener, api).await
}

type Params = HashMap<String, String>;

async fn handle(
    State(objects): State<Arc<Objects>>,
    method: Method,
    uri: Uri,
    Query(params): Query<Params>,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    let (collection, name) = split(uri.path());
    let is_watch = params
        .get("watch")
        .is_some_and(|it| it != "false" && it != "0");
    let verb = match (&method, name) {
        (&Method::GET, None) if is_watch => "WATCH",
        (&Method::GET, None) => "LIST",
        _ => method.as_str(),
    };
    let plural = collection.rsplit('/').next().unwrap_or_default();
    objects.count_request(format!("{verb} {plural}"));
    if uri.path() == "/version" {
        let version = json!({
            "major": "1", "minor": "36", "gitVersion": "v1.36.3", "gitCommit": "", "gitTreeState": "clean",
            "buildDate": "2026-01-01T00:00:00Z", "goVersion": "go1.26", "compiler": "gc", "platform": "linux/amd64",
        });
        return json_answer(StatusCode::OK, &version);
    }
    let is_generated = collection == NODES || collection == PODS;
    match (&method, name) {
        (&Method::GET, None) if is_watch => watch(objects, collection.to_owned(), &params),
        (&Method::GET, None) => list(&objects, collection, is_generated, &headers, &params),
        (&Method::PATCH, Some(name)) if collection == NODES => {
            let patch = serde_json::from_slice(&body).unwrap_or_default();
            let node = objects.assign(name, &patch);
            node.map_or_else(
                || refused(StatusCode::NOT_FOUND),
                |it| answer(StatusCode::OK, JSON, it),
            )
        }
        _ if is_generated => refused(StatusCode::METHOD_NOT_ALLOWED),
        (&Method::GET, Some(name)) => found(objects.get(collection, name).map(Ok)),
        (&Method::POST, None) => {
            let object = serde_json::from_slice(&body).unwrap_or_default();
            let stored = match plural {
                "events" => object,
                _ => objects.put(collection, object),
            };
            json_answer(StatusCode::CREATED, &stored)
        }
        (&Method::PUT, Some(name)) => {
            let next: Value = serde_json::from_slice(&body).unwrap_or_default();
            found(objects.change(collection, name, |object| replace(object, next)))
        }
        (&Method::PATCH, Some(name)) => {
            let patch: Value = serde_json::from_slice(&body).unwrap_or_default();
            let is_merge = headers
                .get(CONTENT_TYPE)
                .is_some_and(|it| it == MERGE_PATCH);
            found(objects.change(collection, name, |object| change(object, patch, is_merge)))
        }
        _ => refused(StatusCode::METHOD_NOT_ALLOWED),
    }
}

/// Splits a path into the path of the collection and the name of the object. A subresource is ignored.
fn split(path: &str) -> (&str, Option<&str>) {
    let segments: Vec<&str> = path.split('/').collect();
    let before = if segments.get(1) == Some(&"api") {
        3
    } else {
        4
    };
    let is_in_namespace = segments.get(before) == Some(&"namespaces");
    let last = if is_in_namespace { before + 2 } else { before };
    let end: usize = segments.iter().take(last + 1).map(|it| it.len() + 1).sum();
    let collection = path.get(..end.saturating_sub(1)).unwrap_or(path);
    (collection, segments.get(last + 1).copied())
}

/// Replaces an object, unless it has another version than the new object names.
fn replace(object: &mut Value, next: Value) -> bool {
    let is = &object["metadata"]["resourceVersion"];
    if !next["metadata"]["resourceVersion"].is_null() && next["metadata"]["resourceVersion"] != *is
    {
        return false;
    }
    let (uid, created) = (
        object["metadata"]["uid"].take(),
        object["metadata"]["creationTimestamp"].take(),
    );
    *object = next;
    object["metadata"]["uid"] = uid;
    object["metadata"]["creationTimestamp"] = created;
    true
}

/// Applies a patch, unless its tests fail or it names another version or UID.
fn change(object: &mut Value, patch: Value, is_merge: bool) -> bool {
    if !is_merge {
        let patch = serde_json::from_value::<json_patch::Patch>(patch);
        return patch.is_ok_and(|patch| json_patch::patch(object, &patch).is_ok());
    }
    let meta = &patch["metadata"];
    let mut fields = ["uid", "resourceVersion"].into_iter();
    if fields.any(|it| !meta[it].is_null() && meta[it] != object["metadata"][it]) {
        return false;
    }
    json_patch::merge(object, &patch);
    true
}

fn list(
    objects: &Objects,
    collection: &str,
    is_generated: bool,
    headers: &HeaderMap,
    params: &Params,
) -> Response<Body> {
    let number = |text: &str| text.parse::<u64>().ok();
    let size = |name: &str| usize::try_from(number(params.get(name)?)?).ok();
    let limit = size("limit").unwrap_or(usize::MAX);
    // A token is the version of the first page and the number of objects before the next page.
    let token = params.get("continue").and_then(|it| it.split_once('-'));
    let version = token.and_then(|(version, _)| number(version));
    let from = token.and_then(|(_, from)| from.parse().ok()).unwrap_or(0);
    let asked = PageRequest {
        version,
        from,
        limit,
    };
    let wants = |it: &http::HeaderValue| it.as_bytes().starts_with(PROTOBUF.as_bytes());
    if !is_generated {
        let page = objects.page_of_others(collection, &asked);
        return answer(StatusCode::OK, JSON, in_json(&page));
    }
    if !headers.get(ACCEPT).is_some_and(wants) {
        return refused(StatusCode::NOT_ACCEPTABLE);
    }
    let page = objects.page(collection, &asked);
    let list = ListMessage {
        metadata: Some(ListMeta {
            resource_version: page.version.to_string(),
            next: page.next,
        }),
        items: page.items,
    };
    let envelope = Envelope {
        type_meta: None,
        raw: list.encode_to_vec(),
    };
    answer(
        StatusCode::OK,
        PROTOBUF,
        [MAGIC, &envelope.encode_to_vec()].concat(),
    )
}

fn in_json(page: &Page) -> Vec<u8> {
    let metadata = json!({"resourceVersion": page.version.to_string(), "continue": page.next});
    let mut text = format!("{{\"kind\":\"List\",\"metadata\":{metadata},\"items\":[").into_bytes();
    for (i, item) in page.items.iter().enumerate() {
        if i > 0 {
            text.push(b',');
        }
        text.extend_from_slice(item);
    }
    text.extend_from_slice(b"]}");
    text
}

/// Returns an endless answer with the changes after the version in `params`.
fn watch(objects: Arc<Objects>, collection: String, params: &Params) -> Response<Body> {
    let after = params.get("resourceVersion").and_then(|it| it.parse().ok());
    let after: u64 = after.unwrap_or_else(|| objects.version());
    let media_type = match &*collection {
        NODES | PODS => "application/vnd.kubernetes.protobuf;stream=watch",
        _ => JSON,
    };
    let changes = stream::unfold(
        (objects, collection, after),
        |(objects, collection, after)| async move {
            let waits = objects.changed.notified();
            let mut waits = std::pin::pin!(waits);
            let silent_at = Instant::now() + BOOKMARK;
            loop {
                waits.as_mut().enable();
                let (last, frames) = objects.changes(&collection, after);
                if !frames.is_empty() {
                    return Some((
                        Ok::<_, Infallible>(frames.concat()),
                        (objects.clone(), collection, last),
                    ));
                }
                if timeout_at(silent_at, waits.as_mut()).await.is_err() {
                    let (version, frame) = objects.bookmark(&collection);
                    return Some((Ok(frame.to_vec()), (objects.clone(), collection, version)));
                }
                waits.set(objects.changed.notified());
            }
        },
    );
    answer_with(StatusCode::OK, media_type, Body::from_stream(changes))
}

fn found(object: Option<Result<Value, ()>>) -> Response<Body> {
    match object {
        Some(Ok(object)) => json_answer(StatusCode::OK, &object),
        Some(Err(())) => refused(StatusCode::CONFLICT),
        None => refused(StatusCode::NOT_FOUND),
    }
}

fn refused(code: StatusCode) -> Response<Body> {
    let reason = code.canonical_reason().unwrap_or_default().replace(' ', "");
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": reason, "reason": reason,
        "code": code.as_u16(),
    });
    json_answer(code, &status)
}

fn json_answer(code: StatusCode, object: &Value) -> Response<Body> {
    answer(code, JSON, object.to_string())
}

fn answer(code: StatusCode, media_type: &'static str, body: impl Into<Bytes>) -> Response<Body> {
    answer_with(code, media_type, Body::from(body.into()))
}

fn answer_with(code: StatusCode, media_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = code;
    let media_type = http::HeaderValue::from_static(media_type);
    response.headers_mut().insert(CONTENT_TYPE, media_type);
    response
}
