//! Passes the `Retry-After` header of a response to the sender of the request.
//!
//! The client library returns the body of an error response but not its headers. When the API server limits requests
//! (priority and fairness, shutdown), only this header says when to try again.

use std::cell::Cell;
use std::time::Duration;

use http::Response;

tokio::task_local! {
    static PAUSE: Cell<Option<Duration>>;
}

/// Runs a request. Returns its result, and the pause in the `Retry-After` header of its last response, if any.
pub async fn heard<T>(request: impl Future<Output = T>) -> (T, Option<Duration>) {
    let with_pause = async {
        let answer = request.await;
        (answer, PAUSE.with(Cell::get))
    };
    PAUSE.scope(Cell::new(None), with_pause).await
}

/// Waits for the response to a request, and records the response's `Retry-After` header for [`heard`]. Used in a
/// [`tower::util::MapFutureLayer`].
pub(crate) async fn record<B, E>(
    answer: impl Future<Output = Result<Response<B>, E>>,
) -> Result<Response<B>, E> {
    let answer = answer.await;
    let pause = answer
        .as_ref()
        .ok()
        .and_then(|it| retry_after(it.headers()));
    // Watches and agents send requests outside of `heard`. During such a request there is no cell to set.
    let _ = PAUSE.try_with(|cell| cell.set(pause));
    answer
}

/// Returns the pause if the header has whole seconds. HTTP also allows a date, but API servers never send one.
fn retry_after(headers: &http::HeaderMap) -> Option<Duration> {
    let text = headers.get(http::header::RETRY_AFTER)?.to_str().ok()?;
    text.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_pause_that_a_response_asks_for_is_returned() {
        let seven = Some(Duration::from_secs(7));
        for (header, pause) in [("7", seven), ("soon", None), ("-1", None)] {
            let answer = Response::builder()
                .status(429)
                .header("retry-after", header);
            let answer = std::future::ready(answer.body(()));
            let (answer, recorded) = heard(record(answer)).await;
            assert_eq!(answer.unwrap().status(), 429);
            assert_eq!(recorded, pause, "{header}");
        }
    }
}
