//! Finds the container image of this repository, which `make e2e` or `make image` builds.

use std::env;
use std::path::{Path, PathBuf};

/// Repository and tag of the image, as in the chart's values.
pub const SHIPPED: (&str, &str) = ("cadastre.dev/cadastre", cadastre_core::VERSION);

/// Returns the path of the image's archive for [`SiteOptions::images`](super::SiteOptions): the value of the
/// environment variable `CADASTRE_IMAGE` if set, else the path of the file that make writes. If there is no file, the
/// error says what to do.
pub fn shipped() -> Result<PathBuf, String> {
    let path = match env::var_os("CADASTRE_IMAGE") {
        Some(path) => PathBuf::from(path),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/cadastre-image.tar"),
    };
    if path.is_file() {
        return Ok(path);
    }
    Err(format!(
        "there is no image at {}: run `make test-image`",
        path.display()
    ))
}
