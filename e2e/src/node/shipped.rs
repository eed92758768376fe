//! The image of this repository, built by `make e2e` or `make image`.

use std::env;
use std::path::{Path, PathBuf};

/// Repository and tag in the chart's values.
pub const SHIPPED: (&str, &str) = ("cadastre.dev/cadastre", cadastre_core::VERSION);

/// The image's archive for [`SiteOptions::images`](super::SiteOptions): `CADASTRE_IMAGE`, else where make writes
/// it; if there is none, the error says what to do.
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
