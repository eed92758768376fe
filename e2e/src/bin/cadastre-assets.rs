//! Builds the programs of the control plane where they are missing: `make control-plane`.

use cadastre_e2e::assets;

fn main() -> anyhow::Result<()> {
    assets::ensure(&assets::CONTROL_PLANE)
}
