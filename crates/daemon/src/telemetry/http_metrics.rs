//! Counts and times the client's requests to the API server.
//!
//! If the caller gives up a request, for example after a timeout, the request counts as one without a response. For
//! watches, only the time until the response begins is measured.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use futures::future::BoxFuture;
use http::{Method, StatusCode};
use prometheus::{Error, HistogramOpts, HistogramVec, IntCounterVec, IntGauge, Opts, Registry};
use tower::layer::layer_fn;
use tower::{Layer, Service};

use super::catalog::register;

/// The label `code` of requests without a response.
const NO_ANSWER: &str = "<error>";

/// Metrics of requests to the API server: number, duration, and how many are in flight.
#[derive(Clone)]
pub struct HttpMetrics {
    requests: IntCounterVec,
    seconds: HistogramVec,
    in_flight: IntGauge,
}

impl HttpMetrics {
    /// Registers all metrics of requests. Fails only if a metric's name is already in use.
    pub fn register(registry: &Registry) -> Result<Self, Error> {
        let requests = Opts::new(
            "rest_client_requests_total",
            "Requests to the API server by status code, method and host",
        );
        let seconds = HistogramOpts::new(
            "rest_client_request_duration_seconds",
            "Time from sending a request to the API server to the headers of its answer",
        )
        .buckets(vec![
            0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
        ]);
        let requests = IntCounterVec::new(requests, &["code", "method", "host"])?;
        let seconds = HistogramVec::new(seconds, &["verb", "host"])?;
        let in_flight = IntGauge::new(
            "cadastre_api_requests_in_flight",
            "Requests to the API server that wait for the headers of the answer",
        )?;
        Ok(HttpMetrics {
            requests: register(registry, requests)?,
            seconds: register(registry, seconds)?,
            in_flight: register(registry, in_flight)?,
        })
    }

    /// Returns the layer for a client. `host` is the API server's host, for the label `host` of the metrics.
    pub fn layer<S>(&self, host: &str) -> impl Layer<S, Service = HttpMetricsService<S>> {
        let (metrics, host) = (self.clone(), Arc::<str>::from(host));
        layer_fn(move |inner| HttpMetricsService {
            inner,
            metrics: metrics.clone(),
            host: Arc::clone(&host),
        })
    }
}

/// A service whose requests are counted and timed.
#[derive(Clone)]
pub struct HttpMetricsService<S> {
    inner: S,
    metrics: HttpMetrics,
    host: Arc<str>,
}

/// A request in flight. The request is counted when this value is dropped, however the request ends.
struct Flight {
    metrics: HttpMetrics,
    host: Arc<str>,
    method: Method,
    begun: Instant,
    status: Option<StatusCode>,
}

impl Flight {
    /// Sets the status. The assignment is in a method so that the async block captures the whole value. If the async
    /// block assigned to the field, it would capture only a copy of the field, and the rest would be dropped before the
    /// response.
    fn land(&mut self, status: Option<StatusCode>) {
        self.status = status;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let HttpMetrics {
            requests,
            seconds,
            in_flight,
        } = &self.metrics;
        let code = self.status.as_ref().map_or(NO_ANSWER, StatusCode::as_str);
        let (method, host) = (self.method.as_str(), &*self.host);
        in_flight.dec();
        requests.with_label_values(&[code, method, host]).inc();
        let seconds = seconds.with_label_values(&[method, host]);
        seconds.observe(self.begun.elapsed().as_secs_f64());
    }
}

impl<S, B, R> Service<http::Request<B>> for HttpMetricsService<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        self.metrics.in_flight.inc();
        let mut flight = Flight {
            metrics: self.metrics.clone(),
            host: Arc::clone(&self.host),
            method: request.method().clone(),
            begun: Instant::now(),
            status: None,
        };
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            flight.land(answer.as_ref().ok().map(http::Response::status));
            answer
        })
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::pending;

    use tower::{ServiceExt as _, service_fn};

    use super::*;

    fn request() -> http::Request<()> {
        http::Request::patch("/x").body(()).unwrap()
    }

    #[tokio::test]
    async fn an_answered_request_is_counted_by_its_code() {
        let metrics = HttpMetrics::register(&Registry::new()).unwrap();
        let server = service_fn(async |_| {
            let answer = http::Response::builder().status(409).body(()).unwrap();
            Ok::<_, Infallible>(answer)
        });
        let client = metrics.layer("here").layer(server);
        client.oneshot(request()).await.unwrap();
        let labels = ["409", "PATCH", "here"];
        let count = metrics.requests.with_label_values(&labels);
        assert_eq!((count.get(), metrics.in_flight.get()), (1, 0));
    }

    #[tokio::test]
    async fn a_request_given_up_is_counted_as_one_without_an_answer() {
        let metrics = HttpMetrics::register(&Registry::new()).unwrap();
        let server = service_fn(|_| pending::<Result<http::Response<()>, Infallible>>());
        let mut client = metrics.layer("here").layer(server);
        let call = client.call(request());
        assert_eq!(metrics.in_flight.get(), 1);
        drop(call);
        let labels = [NO_ANSWER, "PATCH", "here"];
        let count = metrics.requests.with_label_values(&labels);
        assert_eq!((count.get(), metrics.in_flight.get()), (1, 0));
    }
}
