//! Builds programs where they are missing: those of the control plane (`make control-plane`), or
//! those that nodes need besides (`make nodes`).

use anyhow::{Result, bail};
use cadastre_e2e::assets;

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        None => assets::ensure(&assets::CONTROL_PLANE),
        Some("nodes") => assets::ensure(&assets::NODES),
        Some(other) => bail!("unknown argument {other:?}: give nothing, or \"nodes\""),
    }
}
