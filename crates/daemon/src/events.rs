//! Kubernetes events. They are written in the background, so that nothing else waits for them.
//!
//! Each [`EventNote`] becomes an Event of its own. A note reports a change of state, so two notes about the same object
//! are not aggregated into one Event. For example, if an object overlaps two others, users see an Event for each
//! overlap.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::Client;
use kube::api::{Api, ObjectMeta, PostParams};
use tokio::sync::mpsc;
use tracing::debug;

/// The maximum time to write one event.
const LIMIT: Duration = Duration::from_secs(5);

/// A change of an object's state, which the task that [`spawn`] starts writes as a Kubernetes Event.
#[derive(Clone, Debug, PartialEq)]
pub struct EventNote {
    /// The object whose state has changed; it becomes `regarding` of the Event
    pub about: ObjectReference,
    /// Whether the event has the type Warning, that is, needs attention
    pub warning: bool,
    /// A CamelCase word that must stay stable, because users build alerts on it
    pub reason: &'static str,
    /// The text for users: what happened, to which object, and what to do
    pub note: String,
}

/// Starts a task that writes events one by one, with `manager` as reporting controller. Returns the channel for notes,
/// in which at most `backlog` notes wait. `lost` is called for each note that could not be written.
pub fn spawn(
    client: Client,
    manager: &'static str,
    backlog: usize,
    lost: impl Fn() + Send + 'static,
) -> mpsc::Sender<EventNote> {
    let (sender, mut notes) = mpsc::channel::<EventNote>(backlog);
    let instance = std::env::var("POD_NAME").unwrap_or_else(|_| manager.to_owned());
    let post = PostParams {
        field_manager: Some(manager.to_owned()),
        ..PostParams::default()
    };
    tokio::spawn(async move {
        while let Some(note) = notes.recv().await {
            let (namespace, event) = render(note, manager, &instance, Timestamp::now());
            let events: Api<Event> = Api::namespaced(client.clone(), &namespace);
            match tokio::time::timeout(LIMIT, events.create(&post, &event)).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => {
                    lost();
                    debug!("event not written: {error}");
                }
                Err(_) => lost(),
            }
        }
    });
    sender
}

/// Returns the Event for `note`, and its namespace: that of the object, or `default` if the object has none.
fn render(note: EventNote, manager: &str, instance: &str, now: Timestamp) -> (String, Event) {
    let about = note.about;
    let namespace = about
        .namespace
        .clone()
        .unwrap_or_else(|| "default".to_owned());
    let kind = if note.warning { "Warning" } else { "Normal" };
    let event = Event {
        metadata: ObjectMeta {
            name: Some(event_name(about.name.as_deref().unwrap_or_default(), now)),
            namespace: Some(namespace.clone()),
            ..ObjectMeta::default()
        },
        regarding: Some(about),
        type_: Some(kind.to_owned()),
        reason: Some(note.reason.to_owned()),
        note: Some(short(&note.note)),
        action: Some("Allocate".to_owned()),
        event_time: Some(MicroTime(now)),
        reporting_controller: Some(manager.to_owned()),
        reporting_instance: Some(instance.to_owned()),
        ..Event::default()
    };
    (namespace, event)
}

/// Shortens a text to the API's maximum length for notes.
fn short(text: &str) -> String {
    /// The maximum length of a note in the API, in bytes
    const LONGEST: usize = 1024;
    if text.len() <= LONGEST {
        return text.to_owned();
    }
    let end = (0..=LONGEST - 3)
        .rev()
        .find(|at| text.is_char_boundary(*at));
    format!("{}...", &text[..end.unwrap_or_default()])
}

/// Returns a name for an event: the object's name and the time. Shortens the object's name if necessary, because the
/// API server rejects events whose names are too long.
fn event_name(name: &str, now: Timestamp) -> String {
    const LONGEST: usize = 253;
    let time = format!("{:x}", now.as_nanosecond());
    // Names are ASCII, so characters can be counted as bytes.
    let short: String = name.chars().take(LONGEST - 1 - time.len()).collect();
    format!("{}.{time}", short.trim_end_matches(['.', '-']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_an_event_is_never_too_long() {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        assert_eq!(event_name("n1", now), "n1.18fae27693b40000");
        let long = [("n", 63), ("o", 63), ("d", 63), ("e", 61)];
        let long = long.map(|(letter, count)| letter.repeat(count)).join(".");
        let name = event_name(&long, now);
        assert!(name.ends_with(".18fae27693b40000"), "{name}");
        assert_eq!(name.len(), 253);
        let dots = format!("{}.{}", "n".repeat(235), "e".repeat(17));
        assert!(!event_name(&dots, now).contains(".."));
    }

    #[test]
    fn an_event_has_the_namespace_of_its_object_and_a_note_within_the_limit() {
        let about = ObjectReference {
            kind: Some("Pod".to_owned()),
            name: Some("p".to_owned()),
            namespace: Some("web".to_owned()),
            ..ObjectReference::default()
        };
        let mut note = EventNote {
            about,
            warning: true,
            reason: "PoolExhausted",
            note: "\u{e9}".repeat(600),
        };
        let (namespace, event) = render(note.clone(), "m", "i", Timestamp::UNIX_EPOCH);
        assert_eq!(namespace, "web");
        assert_eq!(event.metadata.namespace.as_deref(), Some("web"));
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        let text = event.note.unwrap();
        assert!(text.len() <= 1024, "{}", text.len());
        assert!(text.ends_with("\u{e9}..."), "{text}");
        (note.about.namespace, note.warning) = (None, false);
        let (namespace, event) = render(note, "m", "i", Timestamp::UNIX_EPOCH);
        assert_eq!(namespace, "default");
        assert_eq!(event.type_.as_deref(), Some("Normal"));
    }
}
