//! Waits until conditions hold, never for a fixed time.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// The shortest interval between two calls of `look`.
const LOOK: Duration = Duration::from_millis(20);
/// The longest interval between two calls of `look`. The interval grows, because a call may use the processor time that
/// the condition needs.
const SELDOM: Duration = Duration::from_millis(500);
/// The interval is at most 1/`LATE` of the time waited so far. So the delay until a condition is noticed is at most
/// this fraction of the whole wait.
const LATE: u32 = 20;

/// Calls `look` until it returns a value, and returns this value. After `limit`, fails with the error "not within
/// LIMIT: WHAT".
///
/// An error of `look` counts as "not yet", because the API server may be down for a while. When `limit` is reached, the
/// error contains the last error of `look`.
pub async fn until<T>(
    what: &str,
    limit: Duration,
    mut look: impl AsyncFnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = Instant::now();
    let mut last;
    loop {
        match look().await {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => last = None,
            Err(error) => last = Some(error),
        }
        if start.elapsed() > limit {
            break;
        }
        let pause = (start.elapsed() / LATE).clamp(LOOK, SELDOM);
        tokio::time::sleep(pause).await;
    }
    match last {
        Some(error) => Err(error.context(format!("not within {limit:?}: {what}"))),
        None => bail!("not within {limit:?}: {what}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_never_comes_is_named_with_the_last_error() {
        let never = until("rain", Duration::ZERO, async || {
            Err::<Option<()>, _>(anyhow::anyhow!("clear sky"))
        });
        let text = format!("{:#}", never.await.unwrap_err());
        assert_eq!(text, "not within 0ns: rain: clear sky");
        let mut looks = 0;
        let third = until("the third look", LOOK * 100, async || {
            looks += 1;
            Ok((looks == 3).then_some(looks))
        });
        assert_eq!(third.await.unwrap(), 3);
    }
}
