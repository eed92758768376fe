//! Opening the store, and making a new one in place of one that was lost.

use std::path::{Path, PathBuf};
use std::time::Duration;

use cadastre_core::holding::Holding;
use cadastre_node::{Known, Store, StoreError, clock, set_aside};

/// How long another process may have the file.
const WAIT: Duration = Duration::from_secs(3);

/// What was found where the store should be.
#[derive(Debug)]
pub enum Found {
    /// It can be used
    Whole,
    /// There is none
    Nothing,
    /// It was damaged, and now lies there under another name
    Damaged {
        /// Where it is now
        aside: PathBuf,
        /// What is wrong with it
        what: String,
    },
}

/// Looks at the file; one that is damaged gets another name. An error says what to do; after one of
/// [`is_final`] trying again is of no use.
pub async fn find(path: &Path) -> Result<Found, StoreError> {
    let path = path.to_owned();
    blocking(move || match Store::open_existing(&path, WAIT) {
        Ok(_) => Ok(Found::Whole),
        Err(StoreError::Missing { .. }) => Ok(Found::Nothing),
        Err(error @ StoreError::Damaged { .. }) => {
            let aside = set_aside(&path)?;
            Ok(Found::Damaged {
                aside,
                what: error.to_string(),
            })
        }
        Err(error) => Err(error),
    })
    .await
}

/// Whether only people can mend it.
pub fn is_final(error: &StoreError) -> bool {
    matches!(error, StoreError::Format { .. })
}

/// Makes a new file of what is held and of what others remember to be in use. Returns how many
/// attachments lost an address that another one claims, too.
pub async fn make(path: &Path, holding: Holding, known: Vec<Known>) -> Result<usize, StoreError> {
    let path = path.to_owned();
    blocking(move || {
        let (_, lost) = Store::rebuild(&path, &holding, &known, &clock::now())?;
        Ok(lost.len())
    })
    .await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or(Err(StoreError::Busy {
        what: "the work on it was cut off",
    }))
}
