//! Restricts who may read the admin port. The API server decides who may.
//!
//! A request carries a bearer token. A TokenReview says to which user the token belongs. A SubjectAccessReview says
//! whether this user may `get` the path as a non-resource URL.
//!
//! # Guarantees
//! - Answers are cached for a while, so scrapes cost the API server very little.
//! - Clients without access can cause only a bounded number of concurrent requests, and use only a bounded amount of
//!   memory.
//! - If a client was allowed recently, it stays allowed while the API server does not respond, because metrics are
//!   needed especially then.
//! - Tokens are sent only to the API server.

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

/// How long positive answers are cached.
const FRESH_ALLOWED: Duration = Duration::from_secs(60);
/// How long negative answers are cached.
const FRESH_DENIED: Duration = Duration::from_secs(10);
/// For how long a positive answer is still used while the API server does not respond.
const STALE: Duration = Duration::from_secs(900);
/// The maximum time to wait for an answer of the API server.
const LIMIT: Duration = Duration::from_secs(5);
/// The maximum number of concurrent requests to the API server.
const AT_ONCE: usize = 8;
/// The maximum number of cached answers.
const MOST: usize = 128;

/// Asks the API server who may read the admin port, and caches the answers.
#[derive(Clone)]
pub struct AccessReview(Arc<Inner>);

struct Inner {
    /// The client for reviews, which is not set until the process has connected to its cluster
    client: OnceLock<Client>,
    slots: Semaphore,
    cache: Mutex<AnswerCache>,
    /// The last logged message. As long as a new message equals it, the message is not logged
    logged: Mutex<String>,
}

/// The API server's answer about a token and a path.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Access {
    Allowed,
    /// This user is not allowed to read the path
    Forbidden(String),
    /// The API server knows no user to whom this token belongs
    UnknownToken,
}

impl Default for AccessReview {
    /// Returns a review without an API server. Every check fails with an error until [`Self::set_client`] is called.
    fn default() -> Self {
        Self(Arc::new(Inner {
            client: OnceLock::new(),
            slots: Semaphore::new(AT_ONCE),
            cache: Mutex::default(),
            logged: Mutex::default(),
        }))
    }
}

impl AccessReview {
    /// Sets the client for requests to the API server. Only the first call has an effect.
    pub fn set_client(&self, client: Client) {
        let _ = self.0.client.set(client);
    }

    /// Returns whether the owner of the token is allowed to read the path. If the decision of the API server is not
    /// known, the error says why.
    async fn may(&self, token: &str, path: &str) -> Result<Access, String> {
        let key = (token.to_owned(), path.to_owned());
        let (cache, now) = (|| lock(&self.0.cache), Instant::now());
        if let Some(access) = cache().fresh(&key, now) {
            return Ok(access);
        }
        let answer = match (self.0.client.get(), self.0.slots.try_acquire()) {
            (Some(client), Ok(_slot)) => match timeout(LIMIT, ask(client, token, path)).await {
                Ok(answer) => answer.map_err(|error| {
                    format!("the API server does not say who may read {path}: {error}: check that it answers, and the ClusterRole cadastre-metrics-auth")
                }),
                Err(_) => Err(format!("the API server did not answer within {LIMIT:?}")),
            },
            (None, _) => Err("starting: try again".to_owned()),
            (_, Err(_)) => Err("too many ask at once: try again".to_owned()),
        };
        match answer {
            Ok(access) => {
                cache().remember(key, access.clone(), now);
                Ok(access)
            }
            Err(_) if cache().was_allowed(&key, now) => Ok(Access::Allowed),
            Err(why) => {
                let mut logged = lock(&self.0.logged);
                if *logged != why {
                    warn!("{why}");
                    logged.clone_from(&why);
                }
                Err(why)
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn ask(client: &Client, token: &str, path: &str) -> kube::Result<Access> {
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
        return Ok(Access::UnknownToken);
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
        Access::Allowed
    } else {
        Access::Forbidden(user.username.unwrap_or_default())
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
    match review.may(token, &path).await {
        Ok(Access::Allowed) => next.run(request).await,
        Ok(Access::UnknownToken) => refuse(
            StatusCode::UNAUTHORIZED,
            "the API server knows nobody of this token: it has expired, or is another cluster's\n"
                .to_owned(),
        ),
        Ok(Access::Forbidden(user)) => refuse(
            StatusCode::FORBIDDEN,
            format!(
                "{user} may not read {path}: bind a ClusterRole with nonResourceURLs: [{path}] and verbs: [get], such as cadastre-metrics\n"
            ),
        ),
        Err(why) => refuse(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

fn refuse(code: StatusCode, text: String) -> Response {
    let scheme = [(header::WWW_AUTHENTICATE, "Bearer")];
    match code {
        StatusCode::UNAUTHORIZED => (code, scheme, text).into_response(),
        code => (code, text).into_response(),
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// A client's bearer token, and the path that the client wants to read.
type Key = (String, String);

/// The cached answers, each with the time at which it arrived.
#[derive(Default)]
struct AnswerCache(HashMap<Key, (Access, Instant)>);

fn is_usable((access, at): &(Access, Instant), now: Instant) -> bool {
    *access == Access::Allowed && now.duration_since(*at) < STALE
}

impl AnswerCache {
    fn fresh(&self, key: &Key, now: Instant) -> Option<Access> {
        let (access, at) = self.0.get(key)?;
        let limit = match access {
            Access::Allowed => FRESH_ALLOWED,
            _ => FRESH_DENIED,
        };
        (now.duration_since(*at) < limit).then(|| access.clone())
    }

    fn was_allowed(&self, key: &Key, now: Instant) -> bool {
        self.0.get(key).is_some_and(|it| is_usable(it, now))
    }

    /// Adds an answer. If the cache is full, negative and old answers are removed first, so that clients without access
    /// do not displace clients with access. If the cache is still full after that, all answers are removed.
    fn remember(&mut self, key: Key, access: Access, now: Instant) {
        if self.0.len() >= MOST {
            self.0.retain(|_, it| is_usable(it, now));
        }
        if self.0.len() >= MOST {
            self.0.clear();
        }
        self.0.insert(key, (access, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(token: &str) -> Key {
        (token.to_owned(), "/metrics".to_owned())
    }

    #[test]
    fn answers_are_cached_for_a_while_and_in_bounded_number() {
        let (mut cache, start) = (AnswerCache::default(), Instant::now());
        let later = |seconds| start + Duration::from_secs(seconds);
        cache.remember(key("good"), Access::Allowed, start);
        cache.remember(key("bad"), Access::UnknownToken, start);
        assert_eq!(cache.fresh(&key("good"), later(59)), Some(Access::Allowed));
        assert_eq!(cache.fresh(&key("good"), later(60)), None);
        assert_eq!(
            cache.fresh(&key("bad"), later(9)),
            Some(Access::UnknownToken)
        );
        assert_eq!(cache.fresh(&key("bad"), later(10)), None);
        let other = ("good".to_owned(), "/other".to_owned());
        assert_eq!(cache.fresh(&other, start), None, "of that path alone");
        assert!(cache.was_allowed(&key("good"), later(899)));
        assert!(!cache.was_allowed(&key("good"), later(900)));
        assert!(!cache.was_allowed(&key("bad"), start));
        for n in 0..10 * MOST {
            cache.remember(key(&n.to_string()), Access::UnknownToken, later(1));
            assert!(cache.0.len() <= MOST);
        }
        let is_kept = cache.was_allowed(&key("good"), later(2));
        assert!(is_kept, "clients without access evicted it");
    }

    #[test]
    fn only_bearer_tokens_are_read() {
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
