//! Restricts who may read the admin port; the API server decides.
//!
//! A request carries a bearer token. A TokenReview says which user the token belongs to. A SubjectAccessReview says
//! whether this user may `get` the path as a non-resource URL.
//!
//! # Guarantees
//! - Answers are cached for a while, so scrapes cost the API server next to nothing.
//! - Clients without access can only cause a bounded number of concurrent requests and use a bounded amount of memory.
//! - A client that was allowed recently stays allowed while the API server does not respond, because metrics are needed
//!   especially then.
//! - Tokens are only sent to the API server.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::warn;

/// How long positive and negative answers are cached.
const FRESH: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(10));
/// How long a positive answer is used while the API server does not respond.
const STALE: Duration = Duration::from_secs(900);
/// The longest wait for the API server.
const LIMIT: Duration = Duration::from_secs(5);
/// At most this many requests to the API server are under way.
const AT_ONCE: usize = 8;
/// At most this many answers are cached.
const MOST: usize = 128;

/// Asks the API server who may read, and caches its answers.
#[derive(Clone)]
pub struct AccessReview(Arc<Inner>);

struct Inner {
    /// Not set before the process has connected to its cluster
    client: OnceLock<Client>,
    slots: Semaphore,
    known: Mutex<Known>,
    /// The last logged message
    said: Mutex<String>,
}

/// The API server's answer about a token and a path.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Allowed,
    /// This user may not read the path
    Forbidden(String),
    /// The API server knows no user of this token
    Nobody,
}

impl AccessReview {
    /// Returns a review without an API server. Until [`Self::by`] is called, every check fails with an error.
    pub fn new() -> Self {
        Self(Arc::new(Inner {
            client: OnceLock::new(),
            slots: Semaphore::new(AT_ONCE),
            known: Mutex::default(),
            said: Mutex::default(),
        }))
    }

    /// Sets the client for the API server to ask. Only the first call has an effect.
    pub fn by(&self, client: Client) {
        let _ = self.0.client.set(client);
    }

    /// Returns whether the owner of the token may read the path. The error says why this is not known.
    async fn may(&self, token: &str, path: &str) -> Result<Verdict, String> {
        let key = (token.to_owned(), path.to_owned());
        let (known, now) = (|| lock(&self.0.known), Instant::now());
        if let Some(verdict) = known().fresh(&key, now) {
            return Ok(verdict);
        }
        let asked = match (self.0.client.get(), self.0.slots.try_acquire()) {
            (Some(client), Ok(_slot)) => match timeout(LIMIT, ask(client, token, path)).await {
                Ok(answer) => answer.map_err(|error| {
                    format!("the API server does not say who may read {path}: {error}: check that it answers, and the ClusterRole cadastre-metrics-auth")
                }),
                Err(_) => Err(format!("the API server did not answer within {LIMIT:?}")),
            },
            (None, _) => Err("starting: try again".to_owned()),
            (_, Err(_)) => Err("too many ask at once: try again".to_owned()),
        };
        match asked {
            Ok(verdict) => {
                known().remember(key, verdict.clone(), now);
                Ok(verdict)
            }
            Err(_) if known().was_allowed(&key, now) => Ok(Verdict::Allowed),
            Err(why) => {
                let mut said = lock(&self.0.said);
                if *said != why {
                    warn!("{why}");
                    said.clone_from(&why);
                }
                Err(why)
            }
        }
    }
}

impl Default for AccessReview {
    fn default() -> Self {
        Self::new()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn ask(client: &Client, token: &str, path: &str) -> kube::Result<Verdict> {
    let params = PostParams::default();
    let review = TokenReview {
        spec: TokenReviewSpec {
            token: token.to_owned(),
            ..TokenReviewSpec::default()
        },
        ..TokenReview::default()
    };
    let whose = Api::all(client.clone()).create(&params, &review).await?;
    let whose = whose.status.unwrap_or_default();
    let (Some(true), Some(user)) = (whose.authenticated, whose.user) else {
        return Ok(Verdict::Nobody);
    };
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: user.username.clone(),
            groups: user.groups,
            uid: user.uid,
            extra: user.extra,
            non_resource_attributes: Some(NonResourceAttributes {
                path: Some(path.to_owned()),
                verb: Some("get".to_owned()),
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let may = Api::all(client.clone()).create(&params, &review).await?;
    Ok(if may.status.is_some_and(|it| it.allowed) {
        Verdict::Allowed
    } else {
        Verdict::Forbidden(user.username.unwrap_or_default())
    })
}

/// Middleware that lets a request pass if its token is allowed to read the path.
pub(super) async fn guard(
    State(review): State<AccessReview>,
    request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path().to_owned();
    let Some(token) = bearer(request.headers()) else {
        let text = "a bearer token is asked for: one of somebody who may get this path\n";
        return refuse(StatusCode::UNAUTHORIZED, text.to_owned());
    };
    let verdict = review.may(token, &path).await;
    match verdict {
        Ok(Verdict::Allowed) => next.run(request).await,
        Ok(Verdict::Nobody) => refuse(
            StatusCode::UNAUTHORIZED,
            "the API server knows nobody of this token: it has expired, or is another cluster's\n"
                .to_owned(),
        ),
        Ok(Verdict::Forbidden(user)) => refuse(
            StatusCode::FORBIDDEN,
            format!(
                "{user} may not read {path}: bind a ClusterRole with nonResourceURLs: [{path}] and verbs: [get], such as cadastre-metrics\n"
            ),
        ),
        Err(why) => refuse(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

fn refuse(code: StatusCode, text: String) -> Response {
    let mut answer = (code, text).into_response();
    if code == StatusCode::UNAUTHORIZED {
        let scheme = header::HeaderValue::from_static("Bearer");
        answer
            .headers_mut()
            .insert(header::WWW_AUTHENTICATE, scheme);
    }
    answer
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers
        .get(header::AUTHORIZATION)?
        .to_str()
        .ok()?
        .split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// Token and path.
type Key = (String, String);

/// Cached answers, with the time of each.
#[derive(Default)]
struct Known(HashMap<Key, (Verdict, Instant)>);

impl Known {
    fn fresh(&self, key: &Key, now: Instant) -> Option<Verdict> {
        let (verdict, at) = self.0.get(key)?;
        let limit = if *verdict == Verdict::Allowed {
            FRESH.0
        } else {
            FRESH.1
        };
        (now.duration_since(*at) < limit).then(|| verdict.clone())
    }

    fn was_allowed(&self, key: &Key, now: Instant) -> bool {
        let known = self.0.get(key);
        known.is_some_and(|(verdict, at)| {
            *verdict == Verdict::Allowed && now.duration_since(*at) < STALE
        })
    }

    /// Adds an answer. If the cache is full, negative and old answers are evicted first, so that clients without access
    /// do not evict those with access. If the cache is still full then, all answers are evicted.
    /// do not evict those with access.
    fn remember(&mut self, key: Key, verdict: Verdict, now: Instant) {
        if self.0.len() >= MOST {
            self.0.retain(|_, (verdict, at)| {
                *verdict == Verdict::Allowed && now.duration_since(*at) < STALE
            });
        }
        if self.0.len() >= MOST {
            self.0.clear();
        }
        self.0.insert(key, (verdict, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(token: &str) -> Key {
        (token.to_owned(), "/metrics".to_owned())
    }

    #[test]
    fn answers_are_remembered_for_a_while_and_only_so_many() {
        let (mut known, start) = (Known::default(), Instant::now());
        let later = |seconds| start + Duration::from_secs(seconds);
        known.remember(key("good"), Verdict::Allowed, start);
        known.remember(key("bad"), Verdict::Nobody, start);
        assert_eq!(known.fresh(&key("good"), later(59)), Some(Verdict::Allowed));
        assert_eq!(known.fresh(&key("good"), later(60)), None);
        assert_eq!(known.fresh(&key("bad"), later(9)), Some(Verdict::Nobody));
        assert_eq!(known.fresh(&key("bad"), later(10)), None);
        let other = ("good".to_owned(), "/other".to_owned());
        assert_eq!(known.fresh(&other, start), None, "of that path alone");
        assert!(known.was_allowed(&key("good"), later(899)));
        assert!(!known.was_allowed(&key("good"), later(900)));
        assert!(!known.was_allowed(&key("bad"), start));
        for n in 0..10 * MOST {
            known.remember(key(&n.to_string()), Verdict::Nobody, later(1));
            assert!(known.0.len() <= MOST);
        }
        assert!(
            known.was_allowed(&key("good"), later(2)),
            "strangers pushed it out"
        );
    }

    #[test]
    fn only_a_bearer_token_is_one() {
        let of = |value: &'static str| {
            let value = header::HeaderValue::from_static(value);
            let headers = HeaderMap::from_iter([(header::AUTHORIZATION, value)]);
            bearer(&headers).map(str::to_owned)
        };
        assert_eq!(of("Bearer abc").as_deref(), Some("abc"));
        assert_eq!(of("bearer  abc ").as_deref(), Some("abc"));
        for none in ["Bearer ", "Bearer", "Basic abc", "abc", ""] {
            assert_eq!(of(none), None, "{none:?}");
        }
        assert_eq!(bearer(&HeaderMap::new()), None);
    }
}
