//! Gives the sender of a request the `Retry-After` header of its response.
//!
//! The client library returns the body of an error response but drops its headers. When the API server limits requests
//! (priority and fairness, shutdown), only this header says when to try again.

use std::cell::Cell;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tower::{Layer, Service};

tokio::task_local! {
    static ASKED: Cell<Option<Duration>>;
}

/// Runs a request; returns its result, and the pause that the response asked for.
pub async fn heard<T>(request: impl Future<Output = T>) -> (T, Option<Duration>) {
    let with_pause = async {
        let answer = request.await;
        (answer, ASKED.with(Cell::get))
    };
    ASKED.scope(Cell::new(None), with_pause).await
}

/// A layer that makes a service a [`RetryAfterService`].
#[derive(Clone, Copy, Debug)]
pub struct RetryAfterLayer;

impl<S> Layer<S> for RetryAfterLayer {
    type Service = RetryAfterService<S>;

    fn layer(&self, inner: S) -> RetryAfterService<S> {
        RetryAfterService { inner }
    }
}

/// A service that records the `Retry-After` header of each response.
#[derive(Clone, Debug)]
pub struct RetryAfterService<S> {
    inner: S,
}

impl<S, B, R> Service<http::Request<B>> for RetryAfterService<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            let pause = answer.as_ref().ok().and_then(|it| asked(it.headers()));
            // Requests of watches and agents do not run in `heard`, so there may be no cell to set.
            let _ = ASKED.try_with(|cell| cell.set(pause));
            answer
        })
    }
}

/// Returns the pause, if the header is in whole seconds. HTTP also allows a date, but API servers never send one.
fn asked(headers: &http::HeaderMap) -> Option<Duration> {
    let text = headers.get(http::header::RETRY_AFTER)?.to_str().ok()?;
    text.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::ready;

    use tower::{ServiceExt as _, service_fn};

    use super::*;

    /// Returns the pause that is recorded for a response with this header.
    async fn hear(header: &'static str) -> Option<Duration> {
        let server = service_fn(move |_| {
            let answer = http::Response::builder().status(429);
            let answer = answer.header("retry-after", header).body(()).unwrap();
            ready(Ok::<_, Infallible>(answer))
        });
        let client = RetryAfterLayer.layer(server);
        let request = http::Request::get("/x").body(()).unwrap();
        let (answer, pause) = heard(client.oneshot(request)).await;
        assert_eq!(answer.unwrap().status(), 429);
        pause
    }

    #[tokio::test]
    async fn the_pause_that_an_answer_asks_for_is_heard() {
        assert_eq!(hear("7").await, Some(Duration::from_secs(7)));
        assert_eq!(hear("soon").await, None);
        assert_eq!(hear("-1").await, None);
    }
}
