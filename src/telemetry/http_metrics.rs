//! Counts requests to the API server where they leave the client.

use std::pin::Pin;
use std::task::{Context, Poll};

use prometheus::{Error, IntCounterVec, Opts, Registry};
use tower::{Layer, Service};

/// `rest_client_requests_total{code,method}`
#[derive(Clone)]
pub struct HttpMetrics {
    requests: IntCounterVec,
}

impl HttpMetrics {
    /// Registers the counter.
    pub fn register(registry: &Registry) -> Result<Self, Error> {
        let opts = Opts::new(
            "rest_client_requests_total",
            "Requests to the API server by method and status code",
        );
        let requests = IntCounterVec::new(opts, &["code", "method"])?;
        registry.register(Box::new(requests.clone()))?;
        Ok(HttpMetrics { requests })
    }

    /// The layer for a client's stack.
    pub fn layer(&self) -> Counting {
        Counting(self.requests.clone())
    }
}

/// Puts a [`Counted`] round a service.
#[derive(Clone)]
pub struct Counting(IntCounterVec);

impl<S> Layer<S> for Counting {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted {
            inner,
            requests: self.0.clone(),
        }
    }
}

/// A service whose answers are counted; `code` is `<error>` where there was none.
#[derive(Clone)]
pub struct Counted<S> {
    inner: S,
    requests: IntCounterVec,
}

impl<S, B, R> Service<http::Request<B>> for Counted<S>
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
        let requests = self.requests.clone();
        let method = request.method().clone();
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            let code = answer.as_ref().map_or_else(
                |_| "<error>".to_owned(),
                |a| a.status().as_u16().to_string(),
            );
            requests
                .with_label_values(&[code.as_str(), method.as_str()])
                .inc();
            answer
        })
    }
}
