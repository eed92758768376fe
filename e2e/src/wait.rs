//! Waiting for a condition, never for a time.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Between two looks, at first.
const LOOK: Duration = Duration::from_millis(20);
/// Between two looks, at last: a look may cost the very processor time that is waited for.
const SELDOM: Duration = Duration::from_millis(500);
/// What is waited for is seen late by at most this part of the time that it took.
const LATE: u32 = 20;

/// Calls `look` until it gives something, at most for `limit`. `what` completes the sentence "not
/// within 10 s: …".
///
/// An error of `look` counts as "not yet": an API server may be down for a while. The last one is
/// told when the time is up.
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
