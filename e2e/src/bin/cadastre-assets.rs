//! Builds missing programs. The argument selects which programs:
//! - none: the programs of the control plane, and the CRDs of IPAMClaims and FRRConfigurations (`make control-plane`)
//! - `nodes`: the programs that real nodes need in addition, if nodes can run on this host (`make nodes`)
//! - `services`: kube-proxy and CoreDNS, if nodes can run on this host (`make services`)
//! - `tools`: helm, the checker of histories, and the tools that build clients in Python and Go (`make tools`)
//! - `monitoring`: Prometheus, for the tests of alerts and dashboards (`make monitoring`)

use std::io::Write as _;

use anyhow::{Result, bail};
use cadastre_e2e::assets::Program;
use cadastre_e2e::{assets, clients, node};

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        None => {
            assets::ensure(&assets::CONTROL_PLANE)?;
            assets::ipam_claim_crd()?;
            assets::frr_crd().map(|_| ())
        }
        Some("nodes") => {
            for_nodes(&assets::NODES)?;
            if node::available().is_ok() {
                assets::multus_manifest()?;
            }
            Ok(())
        }
        Some("services") => for_nodes(&assets::SERVICES),
        Some("tools") => {
            assets::ensure(&assets::TOOLS)?;
            assets::ensure(&assets::HISTORY_CHECKERS)?;
            match clients::ready()? {
                Ok(_) => Ok(()),
                Err(reason) => Ok(writeln!(
                    std::io::stderr(),
                    "nothing is made for clients: {reason}"
                )?),
            }
        }
        Some("monitoring") => assets::ensure(&assets::MONITORING),
        Some(other) => {
            bail!(
                "unknown argument {other:?}: give nothing, \"nodes\", \"services\", \"tools\" or \"monitoring\""
            )
        }
    }
}

/// Builds missing programs of nodes, if nodes can run on this host.
fn for_nodes(programs: &[Program]) -> Result<()> {
    match node::available() {
        Ok(()) => assets::ensure(programs),
        Err(reason) => Ok(writeln!(
            std::io::stderr(),
            "nodes cannot run here, nothing is built for them: {reason}"
        )?),
    }
}
